"""The training experiment as a command: 16-bit ranks equal one process, 4 bits stay near them, a stopped run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

import training_report
import training_run
from echoreduce.errors import ConfigError
from training import VARIANTS, arguments, plan_of
from training_data import Windows, documents

SCRIPT = Path(__file__).parents[2] / "experiments" / "training.py"
STEPS = 120
SHORT = ("--shape", "tiny", "--batch", "4", "--length", "64", "--warmup", "10", "--rate", "1e-3", "--dtype", "float32", "--held-out", "8")
WHOLE = ("--steps", str(STEPS), "--validate-every", "60")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes of Python's own help as tokens: a text that changes of this project leave alone, since another text is another run."""
    path = tmp_path_factory.mktemp("tokens") / "bytes.bin"
    text = "".join(topics[name] for name in sorted(topics)).encode()
    np.frombuffer(text, dtype=np.uint8).astype(np.uint16).tofile(path)
    return path


def train(processes: int, tokens: Path, out: Path, *options: str) -> str:
    """Run the command; returns what it printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(SCRIPT), "run"]
    command = [*launch, "--tokens", str(tokens), "--out", str(out), *SHORT, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def summaries(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())["variants"]
    return found


@pytest.fixture(scope="module")
def finished(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, 16 bits and `default`; and 16 bits in one process beside it."""
    out = tmp_path_factory.mktemp("training") / "two"
    train(2, tokens, out, *WHOLE, "--variants", "exact,default")
    train(1, tokens, out.with_name("one"), *WHOLE, "--variants", "exact")
    return out


def test_two_ranks_equal_one_process(finished: Path) -> None:
    two, one = (training_report.curves(out)["exact"] for out in (finished, finished.with_name("one")))
    assert list(two) == list(one) == list(range(STEPS))
    assert max(abs(two[step] - one[step]) / one[step] for step in range(10)) < 1e-5
    # The order of sums differs, and training amplifies it.
    assert training_report.tail_mean(two, 40) == pytest.approx(training_report.tail_mean(one, 40), rel=1e-3)


def test_virtual_ranks_train_like_real_ones(finished: Path, tokens: Path) -> None:
    virtual = finished.with_name("virtual")
    train(1, tokens, virtual, *WHOLE, "--emulate", "2", "--variants", "exact,default")
    # The order of sums differs, and training amplifies it; two runs of `default` may end half a percent apart.
    for name, slack, apart in (("exact", 1e-5, 1e-3), ("default", 1e-4, 1e-2)):
        ours, real = training_report.curves(virtual)[name], training_report.curves(finished)[name]
        assert list(ours) == list(range(STEPS))
        assert max(abs(ours[step] - real[step]) / real[step] for step in range(10)) < slack
        assert training_report.tail_mean(ours, 40) == pytest.approx(training_report.tail_mean(real, 40), rel=apart)
    assert summaries(virtual)["default"]["backend"] == "virtual"


def test_default_stays_within_one_percent(finished: Path) -> None:
    curves = training_report.curves(finished)
    tails = {name: training_report.tail_mean(curve, 40) for name, curve in curves.items()}
    assert tails["exact"] < 0.75 * curves["exact"][0], "the model has learned"
    assert curves["default"] != curves["exact"]
    assert abs(tails["default"] - tails["exact"]) / tails["exact"] < 0.01
    rows = summaries(finished)
    assert all(row["replicated_weights_equal"] for row in rows.values())
    assert abs(rows["default"]["validation_loss"] / rows["exact"]["validation_loss"] - 1) < 0.01
    assert rows["default"]["environment"]["commit"] is None or len(rows["default"]["environment"]["commit"]) >= 7


def test_finished_variants_are_known_and_other_settings_refused(finished: Path) -> None:
    words = ["run", "--tokens", "t", "--out", str(finished), *SHORT, *WHOLE]
    assert sorted(training_run.finished(plan_of(arguments(words)))) == ["default", "exact"]
    with pytest.raises(SystemExit, match="made with other options"):
        training_run.finished(plan_of(arguments([*words, "--batch", "5"])))


def test_a_stopped_run_goes_on_with_the_same_curve(finished: Path, tokens: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    options = (*WHOLE, "--variants", "default", "--checkpoint-every", "1000", "--limit-seconds", "0.001")
    assert "the limit of 0 s has passed" in train(2, tokens, stopped, *options)
    assert "goes on from step 10" in train(2, tokens, stopped, *options)
    assert not stopped.with_suffix(".json").exists()
    whole = training_report.curves(finished)["default"]
    assert training_report.curves(stopped)["default"] == {step: whole[step] for step in range(20)}


def test_table_and_plot(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = training_report.table(finished, 40).splitlines()
    assert len(lines) == 4
    assert "16-bit" in lines[2]
    assert "| - |" in lines[2]
    assert lines[3].count("%") == 2
    training_report.plot(finished, tmp_path / "curves.png", 40)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_gap_is_relative_to_the_base_over_the_window() -> None:
    base = dict.fromkeys(range(5), 2.0)
    curve = {0: 2.0, 1: 2.0, 2: 2.2, 3: 2.2, 4: 2.2}
    assert training_report.gap(curve, base, 2) == pytest.approx({1: 0.0, 2: 0.05, 3: 0.1, 4: 0.1})


def test_gaps_over_seeds_are_means_of_paired_differences(tmp_path: Path) -> None:
    outs = []
    for seed, (base, gap) in enumerate(((2.0, 0.01), (4.0, 0.03), (3.0, 0.02))):
        out = tmp_path / f"seed_{seed}"
        outs.append(out)
        losses = {"exact": base, "default": base * (1 + gap)}
        rows = [{"variant": name, "step": step, "loss": loss} for name, loss in losses.items() for step in range(4)]
        out.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summaries = {name: {"validation_loss": loss + 1} for name, loss in losses.items()}
        out.with_suffix(".json").write_text(json.dumps({"variants": summaries}))
    exact, default = training_report.gaps(outs, 2).splitlines()[2:]
    assert exact == "| 16-bit | 3 | 3.0000, spread 33.33 % | 4.0000, spread 25.00 % |"
    assert default == "| `default` | 3 | +2.00 ± 0.58 % | +1.52 ± 0.50 % |"
    with pytest.raises(ConfigError, match="at least two"):
        training_report.gaps(outs[:1], 2)


def test_schedule_of_appendix_b() -> None:
    rates = [training_run.rate_at(step, 1000, 100, 3e-4) for step in range(1000)]
    assert rates[99] == pytest.approx(3e-4)
    assert rates[0] == pytest.approx(3e-6)
    assert max(rates) == rates[99] or max(rates) == rates[100]
    assert rates[-1] == pytest.approx(3e-5, rel=1e-3)


def test_windows_are_apart_and_held_out(tokens: Path) -> None:
    import torch

    data = Windows(tokens, 64, 3, torch.device("cpu"))
    whole = torch.from_numpy(np.fromfile(tokens, dtype=np.uint16).astype(np.int64))
    held = [ids for ids, _ in data.validation(1)]
    assert len(held) == 3
    assert torch.equal(torch.cat(held).flatten(), whole[: 3 * 64])
    ids, targets = data.batch(1, 2)
    assert torch.equal(ids.flatten(), whole[5 * 64 : 7 * 64])
    assert torch.equal(targets.flatten(), whole[5 * 64 + 1 : 7 * 64 + 1])
    again, _ = data.batch(data.count, 1)
    assert torch.equal(again, data.batch(0, 1)[0])


def test_documents_end_at_the_separator(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("one\ntwo\n<|endoftext|>\nthree\n")
    assert list(documents(path)) == ["one\ntwo\n", "three\n"]


def test_same_learning_rate_but_for_the_paper_s_larger_one() -> None:
    assert {name for name, variant in VARIANTS.items() if variant.rate != 1.0} == {"default_high"}
