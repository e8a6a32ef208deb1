"""The EleutherAI lm-evaluation-harness over a model that reduces through EchoReduce, offline, on local JSON lines.

`EchoLM` is the harness's own Hugging Face model around a model in hand: attached to virtual or real ranks, or sharded by transformers.
`task_config` makes a task of a file (`choice.load_task` describes the formats), so that `lm_eval.simple_evaluate` needs no network.

On real ranks each forward is collective, so every rank runs the harness with the same tasks, the same limit and the same fixed batch size.
Each call compares the requests of all ranks first and raises on all if they differ, where a forward would hang or add up strangers.
The batches are the harness's, not those of `choice`: at low bits its scores differ from ours by the rounding of other neighbours.

Leaves out: few-shot prompts and tasks of the hub (the harness's own); importing this module imports lm_eval, which takes seconds.
Source: lm-eval 0.4.13, `lm_eval/models/huggingface.py`; docs/tasks.md.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found,import-untyped,unused-ignore]

from echoreduce.errors import ConfigError, MismatchError
from echoreduce.integrations.choice import DELIMITER, load_task
from echoreduce.session import Session


class EchoLM(HFLM):  # type: ignore[misc,unused-ignore]
    """An lm-eval model around a Hugging Face model, whose scores come through whatever is attached to it.

    Args:
        model: Hugging Face causal language model; attach before or after, its state at each call counts.
        tokenizer: its tokenizer.
        batch_size: sequences a forward, a number: `auto` could choose differently on each rank.
        options: of HFLM, `prefix_token_id` or `max_length` for example.
    Raises:
        ConfigError: batch_size is no positive number.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = 8, **options: Any) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size must be a positive number, the same on all ranks, got {batch_size!r}")
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal", **options)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether greedy decoding gives it) of each request; collective on real ranks."""
        self._agree("loglikelihood", requests)
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text; collective on real ranks."""
        self._agree("loglikelihood_rolling", requests)
        found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations; collective on real ranks."""
        self._agree("generate_until", requests)
        found: list[str] = super().generate_until(requests, disable_tqdm)
        return found

    def _agree(self, kind: str, requests: list[Any]) -> None:
        """Raise MismatchError on every rank unless all were given the same requests."""
        group = real_group(self.model)
        if group is None:
            return
        text = repr((kind, self.batch_size, [request.args for request in requests]))
        mine = (len(requests), hashlib.sha256(text.encode()).hexdigest())
        others: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(others, mine, group=group)
        if len(set(others)) > 1:
            counts = [count for count, _ in others]
            raise MismatchError(f"{kind}: ranks were given different requests or batch sizes (numbers of requests by rank: {counts})")


def real_group(model: Any) -> dist.ProcessGroup | None:
    """Process group of the model's real ranks; None: one process, or virtual ranks."""
    for module in model.modules():
        session = getattr(module, "_echo_session", None)
        if isinstance(session, Session):
            group: dist.ProcessGroup | None = getattr(session.backend, "group", None)
            return group
    return None


def task_config(path: str | Path, name: str | None = None) -> dict[str, Any]:
    """What `lm_eval.simple_evaluate(tasks=[...])` takes for a file of multiple-choice questions.

    Args:
        path: JSON lines, {prompt, choices, label} or BLiMP's {uid, good, bad}.
        name: of the task; None: the file's name without suffix.
    Raises:
        ConfigError: see `choice.load_task`.
    """
    source = Path(path).resolve()
    pairs = any(load_task(source).kinds)
    return {
        "task": name or source.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(source)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "" if pairs else "prompt",
        "doc_to_choice": "{{[good, bad]}}" if pairs else "choices",
        "doc_to_target": 0 if pairs else "label",
        "target_delimiter": DELIMITER,
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")],
        "metadata": {"version": 1.0},
    }
