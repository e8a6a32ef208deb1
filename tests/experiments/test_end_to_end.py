"""The end-to-end experiment as a command on two gloo processes, and its report on known figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decoder import SHAPES
from end_to_end_run import VARIANTS, report

SCRIPT = Path(__file__).parents[2] / "experiments" / "end_to_end.py"


def run(out: Path, *options: str) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    sizes = [
        "--models",
        "tiny-untied,tiny",
        "--train-models",
        "tiny-untied",
        "--layers",
        "2",
        "--batch",
        "2",
        "--length",
        "32",
        "--micro",
        "1",
    ]
    training = ["--train-batch", "2", "--train-micro", "1", "--repetitions", "1", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, *sizes, *training, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_whole_command(tmp_path: Path) -> None:
    out = tmp_path / "end_to_end"
    text = run(out, "--loads", "0,50")
    rows = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    cells = {(row["model"], row["task"], row["load"]) for row in rows}
    wanted = [("tiny-untied", task) for task in ("prefill", "all_reduce", "train")] + [("tiny", "prefill"), ("tiny", "all_reduce")]
    assert cells == {(*cell, load) for cell in wanted for load in (0, 50)}
    assert len(rows) == len(cells) * len(VARIANTS)
    assert all(row["median"] >= row["least"] >= 0 for row in rows)
    assert "within their bounds" in text
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["environment"]["command"].startswith("end_to_end.py")
    assert record["rows"] == rows
    assert record["table"] in text
    # What is there is not measured again; a limit that has passed leaves the rest out.
    again = run(out, "--loads", "0,50,75", "--limit-seconds", "0.001")
    assert again.count("left out, the limit is near") == len(wanted)
    assert [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()] == rows


def test_report_gives_the_paper_s_three_figures(tmp_path: Path) -> None:
    def row(variant: str, milliseconds: float, task: str) -> dict[str, Any]:
        return {"model": "m", "task": task, "load": 0, "variant": variant, "median": milliseconds, "spread": 0.01}

    times = {"nccl": 2000.0, "none": 1600.0, "default": 1700.0, "paper": 2100.0}
    lines = [json.dumps(row(name, value, task)) for task in ("prefill", "all_reduce") for name, value in times.items()]
    (tmp_path / "out.jsonl").write_text("\n".join(lines) + "\n")
    table = report(tmp_path / "out").splitlines()
    assert table[2] == "| m | prefill | 0 % | default | 1700.00 (1.0 %) | 2000.00 | 1.176 | 20.0 % | 75 % |"
    assert table[3].endswith("| 0.952 | 20.0 % | -25 % |")
    assert table[4].endswith("| 1.176 | - | - |")


@pytest.mark.parametrize("name, billions", [("llama3-8b", 7.50), ("qwen3-8b", 7.57), ("qwen3-0.6b", 0.49)])
def test_shapes_have_the_known_sizes(name: str, billions: float) -> None:
    assert SHAPES[name].parameters() / 1e9 == pytest.approx(billions, abs=0.01)
