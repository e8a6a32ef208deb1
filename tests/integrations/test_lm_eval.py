"""lm-eval through the adapter gives the log-likelihoods of `choice`, offline; ranks with different requests are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm-eval==0.4.13")
pytest.importorskip("transformers")

import questions
from echoreduce.errors import ConfigError, MismatchError
from echoreduce.integrations.choice import encode, load_task, score, spread
from echoreduce.integrations.lm_eval import EchoLM, task_config
from echoreduce.integrations.transformers import attach
from echoreduce.measure.paired import compare
from ranks import RankPool

TOLERANCE = 1e-5  # nats a token, as in test_choice: fp32 sums of another order


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import lm_eval.evaluator

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # asks pip and the driver, for seconds


def harness(lm: EchoLM, path: Path, **options: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """(log-likelihoods [examples, width], -inf where there is no choice; metrics)."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    config = task_config(path)
    manager = TaskManager(include_defaults=False)  # reads no task of the harness's own
    found = lm_eval.simple_evaluate(lm, tasks=[config], task_manager=manager, bootstrap_iters=0, **options)
    samples = sorted(found["samples"][config["task"]], key=lambda sample: sample["doc_id"])
    rows = [torch.tensor([float(value) for value, _ in sample["filtered_resps"]], dtype=torch.float64) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-torch.inf)
    return padded, {key.partition(",")[0]: value for key, value in found["results"][config["task"]].items()}


@pytest.mark.parametrize(("config", "world_size"), [("exact", 1), ("exact", 4), ("default", 4)])
def test_log_likelihoods_are_those_of_choice(tmp_path: Path, config: str, world_size: int) -> None:
    """One row a batch on both sides: at low bits a neighbour in the batch changes the groups."""
    model, tokenizer = questions.model(), questions.tokenizer()
    for path in questions.write(tmp_path, 8):
        task = load_task(path)
        requests = encode(tokenizer, task, 1)
        with attach(model, config, world_size=world_size):
            ours = score(model, requests)
            theirs, metrics = harness(EchoLM(model, tokenizer, 1), path)
        longest = max(len(text) + 2 for row in task.choices for text in row)
        assert torch.equal(torch.isinf(theirs), ~requests.present)
        assert (ours - theirs)[requests.present].abs().max() < longest * TOLERANCE
        expected = compare(ours, ours, torch.tensor(task.labels), task.characters())
        assert metrics["acc"] == pytest.approx(expected.accuracy)
        assert metrics["acc_norm"] == pytest.approx(expected.accuracy_norm)


def test_what_is_attached_counts(tmp_path: Path) -> None:
    path, _ = questions.write(tmp_path, 4)
    model = questions.model()
    lm = EchoLM(model, questions.tokenizer(), 4)
    plain, _ = harness(lm, path)
    with attach(model, "no_feedback", world_size=2):
        low, _ = harness(lm, path)
    again, _ = harness(lm, path)
    assert torch.equal(plain, again)
    assert (low - plain).nan_to_num().abs().max() > 0.01


def test_the_same_questions_by_samples(tmp_path: Path) -> None:
    _, pairs = questions.write(tmp_path, 9)
    model, tokenizer = questions.model(), questions.tokenizer()
    indices = spread(load_task(pairs).kinds, 3)
    theirs, _ = harness(EchoLM(model, tokenizer, 3), pairs, samples={"pairs": indices})
    ours = score(model, encode(tokenizer, load_task(pairs, 3)))
    assert theirs.shape == ours.shape == (3, 2)
    assert (theirs - ours).abs().max() < 30 * TOLERANCE


def test_batch_sizes_are_numbers() -> None:
    with pytest.raises(ConfigError, match="'auto'"):
        EchoLM(questions.model(), questions.tokenizer(), "auto")  # type: ignore[arg-type]


def on_ranks(group: Any, path: str) -> tuple[torch.Tensor, str]:
    """The harness's log-likelihoods on this rank, and what it says to requests that only this rank has."""
    from lm_eval.api.instance import Instance

    model = questions.model()
    with attach(model, "default", group=group) as attachment:
        lm = EchoLM(model, questions.tokenizer(), 4)
        task = load_task(path)
        pairs = [(prompt, f" {text}") for prompt, row in zip(task.prompts, task.choices) for text in row]
        asked = [Instance("loglikelihood", {}, arguments, 0) for arguments in pairs]
        found = torch.tensor([value for value, _ in lm.loglikelihood(asked, disable_tqdm=True)])
        with pytest.raises(MismatchError) as refused:
            lm.loglikelihood(asked[attachment.session.backend.rank :], disable_tqdm=True)
    return found, str(refused.value)


def test_ranks_agree_or_are_refused(pool: RankPool, tmp_path: Path) -> None:
    path, _ = questions.write(tmp_path, 4)
    (first, said), (second, said_too) = pool.run(on_ranks, 2, str(path))
    assert torch.equal(first, second)
    assert said == said_too
    assert "[11, 10]" in said
