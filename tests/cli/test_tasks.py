"""`evaluate --tasks`: results are printed, written, resumed, and the same in real processes; the markdown table comes from the lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

import questions
from echoreduce import preset
from echoreduce.cli import app, tasks
from echoreduce.errors import ConfigError
from echoreduce.integrations.choice import encode, load_task, score
from echoreduce.integrations.transformers import attach
from echoreduce.measure.paired import compare

TABLE = Path(__file__).parents[2] / "experiments" / "tasks.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model and two tasks."""
    path = tmp_path_factory.mktemp("tasks")
    questions.model().save_pretrained(path)
    questions.tokenizer().save_pretrained(path)
    questions.write(path)
    return path


def evaluate(folder: Path, *options: str) -> str:
    arguments = ["evaluate", str(folder), "--data", str(folder), "--group-size", "16", "--threads", "1", *options]
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def rows(path: Path) -> list[dict[str, Any]]:
    return [record for record in map(json.loads, filter(None, path.read_text().splitlines())) if "task" in record]


def test_results_are_those_of_the_parts(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    printed = evaluate(folder, "--tasks", "all:9", "-P", "2", "-P", "4", "--preset", "paper", "--json", str(out))
    for word in ("questions", "pairs", "all", "16-bit", "paper", "P = 2", "P = 4"):
        assert word in printed
    found = json.loads(out.read_text())["tasks"]
    assert len(found) == 2 * 2 * 2
    task, model = load_task(folder / "questions.jsonl", 9), questions.model()
    requests = encode(questions.tokenizer(), task)
    scores = []
    for config in (preset("exact"), preset("paper", group_size=16)):
        with attach(model, config, world_size=4):
            scores.append(score(model, requests))
    expected = compare(*scores, torch.tensor(task.labels), task.characters())
    (row,) = [r for r in found if (r["task"], r["variant"], r["world_size"]) == ("questions", "paper", 4)]
    assert expected.divergence == pytest.approx(row["divergence"], rel=1e-9)
    assert expected.divergence > 0
    assert (expected.accuracy, expected.changed) == (row["accuracy"], row["changed"])


def test_a_second_run_measures_only_what_is_missing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.jsonl"
    evaluate(folder, "--tasks", "pairs", "--preset", "default", "--out", str(out))
    before = out.read_text()
    calls: list[int] = []
    monkeypatch.setattr(tasks, "score", lambda *a, **k: calls.append(1) or score(*a, **k))
    evaluate(folder, "--tasks", "pairs", "--preset", "default", "--out", str(out))
    assert not calls
    assert out.read_text() == before
    out.write_text(before[:-40])  # killed while the last line was written
    evaluate(folder, "--tasks", "pairs", "--preset", "default", "--preset", "int8", "--out", str(out))
    assert len(calls) == 3
    assert [line.key.variant for line in tasks.read_lines(out)] == ["16-bit", "default", "int8"]
    evaluate(folder, "--tasks", "pairs", "--preset", "default", "--bits", "6", "--out", str(out))  # another digest
    assert len(calls) == 5


def test_real_processes_give_the_scores_of_virtual_ranks(folder: Path, tmp_path: Path) -> None:
    found = {}
    for backend in ("virtual", "processes"):
        out = tmp_path / f"{backend}.jsonl"
        evaluate(folder, "--tasks", "all:6", "-P", "2", "--preset", "default", "--backend", backend, "--out", str(out))
        found[backend] = {(r["task"], r["variant"]): r["divergence"] for r in rows(out)}
    assert found["virtual"].keys() == found["processes"].keys()
    assert len(found["virtual"]) == 4
    for key, divergence in found["virtual"].items():
        assert found["processes"][key] == pytest.approx(divergence, rel=1e-3, abs=1e-12)  # gloo adds the exact sum in its own order
    assert found["virtual"]["pairs", "default"] > 0


def test_text_and_tasks_stand_beside_each_other(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "r.json"
    text.write_text("It was the best of times. " * 20)
    evaluate(folder, "--text", str(text), "--window", "32", "--tasks", "pairs", "--no-errors", "--json", str(out))
    written = json.loads(out.read_text())
    assert len(written["rows"]) == len(written["tasks"]) == 6
    assert written["conditions"]["text"] == "t.txt"


@pytest.mark.parametrize(
    ("options", "quoted"),
    [
        ([], "--text, --tasks or both"),
        (["--tasks", "pears"], "pears"),
        (["--tasks", "pairs", "--prefix-token", "<none>"], "<none>"),
        (["--tasks", "pairs", "--text", "t.txt", "-P", "2", "-P", "4"], "one --world-size"),
    ],
)
def test_bad_options_name_themselves(folder: Path, options: list[str], quoted: str) -> None:
    with pytest.raises(ConfigError, match=quoted):
        evaluate(folder, *options)


def test_the_markdown_table(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    evaluate(folder, "--tasks", "all", "-P", "2", "--preset", "default", "--out", str(out))
    done = subprocess.run([sys.executable, str(TABLE), str(out)], capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    (row,) = [r for r in rows(out) if (r["task"], r["variant"]) == ("pairs", "default")]
    (shown,) = [line for line in lines if line.startswith("| pairs |")]
    assert f"{100 * row['exact']:.1f}" in shown
    assert f"+{row['gained']} / -{row['lost']}" in shown
    assert any(line.startswith("| **all** |") for line in lines)
