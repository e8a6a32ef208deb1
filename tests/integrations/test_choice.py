"""Scores are log-likelihoods whatever the batches; tasks are found, read and limited as documented; ranks agree."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("transformers")

import questions
from echoreduce.errors import ConfigError
from echoreduce.integrations.choice import Requests, Task, encode, find_tasks, known_tasks, load_task, score, spread
from echoreduce.integrations.transformers import attach, enable
from ranks import RankPool
from stock import shard

TOLERANCE = 1e-5  # nats a token: fp32 sums of another order in two layers and a log-sum-exp


def tasks(folder: Path) -> list[Task]:
    return [load_task(path) for path in questions.write(folder)]


def one_by_one(model: Any, tokenizer: Any, task: Task) -> torch.Tensor:
    """Each choice in a forward of its own, no padding."""
    found = torch.full((len(task), task.width), -math.inf, dtype=torch.float64)
    for i, (prompt, choices) in enumerate(zip(task.prompts, task.choices)):
        for j, text in enumerate(choices):
            context = tokenizer(prompt.rstrip())["input_ids"] if prompt else [tokenizer.bos_token_id]
            ids = context + (tokenizer(f"{prompt} {text}")["input_ids"][len(context) :] if prompt else tokenizer(f" {text}")["input_ids"])
            with torch.no_grad():
                logits = model(torch.tensor([ids[:-1]])).logits[0].double()
            losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            found[i, j] = -losses[len(context) - 1 :].sum()
    return found


@pytest.mark.parametrize("batch_tokens", [1, 100, 100_000])
def test_scores_are_those_of_single_forwards(tmp_path: Path, batch_tokens: int) -> None:
    model, tokenizer = questions.model(), questions.tokenizer()
    for task in tasks(tmp_path):
        requests = encode(tokenizer, task, batch_tokens)
        found, expected = score(model, requests), one_by_one(model, tokenizer, task)
        assert torch.equal(torch.isinf(found), ~requests.present)
        assert torch.equal(torch.isinf(expected), ~requests.present)
        longest = max(len(text) + 2 for row in task.choices for text in row)
        assert (found - expected)[requests.present].abs().max() < longest * TOLERANCE
        assert (found[:, 0] - found[:, 1]).abs().min() > longest * TOLERANCE  # the choices differ by more


def test_padding_is_not_seen(tmp_path: Path) -> None:
    model, task = questions.model(), tasks(tmp_path)[0]
    requests = encode(questions.tokenizer(), task, 100_000)
    (batch,) = requests.batches
    padded = torch.arange(batch.inputs.shape[1]) >= (batch.inputs != 0).sum(1, keepdim=True)
    assert padded.any()
    before = score(model, requests)
    batch.inputs[padded] = 77
    assert torch.equal(score(model, requests), before)


def test_equal_inputs_share_a_row() -> None:
    letters = Task("letters", ("Q:", "Q: x"), (("a", "b", "c"), ("a", "bc")), (0, 1), ("", ""))
    requests = encode(questions.tokenizer(), letters)
    assert (requests.sequences, requests.tokens) == (3, len("Q: ") + len("Q: x ") + len("Q: x b"))
    model = questions.model()
    assert score(model, requests)[0].tolist() == pytest.approx(one_by_one(model, questions.tokenizer(), letters)[0].tolist(), abs=1e-4)


def test_long_prompts_lose_their_beginning() -> None:
    tokenizer, model = questions.tokenizer(), questions.model()
    long, short = (Task("t", (prompt,), (("yes", "nay"),), (0,), ("",)) for prompt in ("x" * 50 + "abcdef", "cdef"))
    assert torch.equal(score(model, encode(tokenizer, long, max_length=7)), score(model, encode(tokenizer, short, max_length=7)))
    assert not torch.equal(score(model, encode(tokenizer, long)), score(model, encode(tokenizer, short)))


def test_the_prefix_token_stands_for_an_empty_prompt(tmp_path: Path) -> None:
    _, pairs = tasks(tmp_path)
    first = {int(batch.inputs[row, 0]) for batch in encode(questions.tokenizer(), pairs).batches for row in range(len(batch.inputs))}
    other = encode(questions.tokenizer(), pairs, prefix_token=7)
    assert first == {questions.tokenizer().bos_token_id} == {256}
    assert {int(batch.inputs[row, 0]) for batch in other.batches for row in range(len(batch.inputs))} == {7}


# --- files ----------------------------------------------------------------------------------------------------------------------------


def test_a_limit_is_spread_over_kinds_and_file() -> None:
    kinds = tuple(f"paradigm {i // 100}" for i in range(700))
    for limit in (1, 7, 50, 700, 900):
        indices = spread(kinds, limit)
        counts = Counter(kinds[i] for i in indices)
        assert len(set(indices)) == len(indices) == min(limit, 700)
        if limit >= 7:
            assert max(counts.values()) - min(counts.values()) <= 1
            assert len(counts) == 7
    assert spread(kinds, 50) == spread(kinds, 50)
    assert spread(("",) * 10, 5) == [0, 2, 4, 6, 8]
    with pytest.raises(ConfigError, match="at least 1"):
        spread(kinds, 0)


def test_tasks_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHOREDUCE_DATA", raising=False)
    (tmp_path / "choice").mkdir()
    asked, pairs = questions.write(tmp_path / "choice")
    (tmp_path / "choice" / "other.jsonl").write_text('{"question": "?", "answer": "!"}\n')
    assert known_tasks(tmp_path) == known_tasks(tmp_path / "choice") == [pairs, asked]
    assert list(find_tasks("quest:5, pairs", tmp_path)) == [(asked, 5), (pairs, None)]
    assert list(find_tasks("all:3", tmp_path)) == [(pairs, 3), (asked, 3)]
    assert list(find_tasks(f"{asked}:2")) == [(asked, 2)]
    monkeypatch.setenv("ECHOREDUCE_DATA", str(tmp_path))
    assert list(find_tasks("pairs")) == [(pairs, None)]
    for bad in ("s", "sizes"):
        with pytest.raises(ConfigError, match="pairs, questions"):
            list(find_tasks(bad))


@pytest.mark.parametrize(
    ("line", "quoted"),
    [
        ('{"prompt": "a", "choices": ["b"], "label": 0}', "at least two"),
        ('{"prompt": "a", "choices": ["b", " "], "label": 0}', "not empty"),
        ('{"prompt": "a", "choices": ["b", "c"], "label": 2}', "index of the 2 choices"),
        ('{"question": "a", "answer": "b"}', "prompt"),
        ("{", "JSONDecodeError"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str, quoted: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "choices": ["b", "c"], "label": 0}\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, line 2.*{quoted}"):
        load_task(path)


# --- ranks ----------------------------------------------------------------------------------------------------------------------------


def on_ranks(group: Any, path: str) -> dict[str, torch.Tensor]:
    """Scores with whole weights, and with weights that transformers shards."""
    from torch.distributed.device_mesh import DeviceMesh

    requests = encode(questions.tokenizer(), load_task(path), 200)
    model, found = questions.model(), {}
    with attach(model, "default", group=group):
        found["whole"] = score(model, requests)
    model = shard(model, DeviceMesh.from_group(group, "cpu"))
    for name in ("default", "exact"):
        with enable(model, name):
            found[f"sharded {name}"] = score(model, requests)
    return found


def virtual(requests: Requests, name: str) -> torch.Tensor:
    model = questions.model()
    with attach(model, name, world_size=2):
        return score(model, requests)


def test_a_tensor_parallel_model_scores_as_virtual_ranks(pool: RankPool, tmp_path: Path) -> None:
    for path in questions.write(tmp_path):
        first, second = pool.run(on_ranks, 2, str(path))
        requests = encode(questions.tokenizer(), load_task(path), 200)
        present = requests.present
        longest = max(len(text) + 2 for row in load_task(path).choices for text in row)
        for name, found in first.items():
            assert torch.equal(found, second[name]), name
        default, exact = virtual(requests, "default"), virtual(requests, "exact")
        assert torch.equal(first["whole"], default)
        assert (first["sharded exact"] - exact)[present].abs().max() < longest * TOLERANCE
        rounding = (default - exact)[present].abs().max()
        assert rounding > 10 * longest * TOLERANCE
        assert (first["sharded default"] - default)[present].abs().max() < longest * TOLERANCE


def test_real_data_has_25_files(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        paths = known_tasks(None)
    except ConfigError as missing:
        pytest.skip(str(missing))
    assert len(paths) == 24  # GSM8K's solutions are no multiple choice
    for path in paths:
        task = load_task(path, 30)
        assert len(task) == 30
        assert json.dumps(task.choices)
