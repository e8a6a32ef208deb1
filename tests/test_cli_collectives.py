"""simulate, choose, plot, calibrate, and their size arguments (O36)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from echoreduce.cli import app
from echoreduce.cli.sizes import format_bytes, parse_range, parse_size
from echoreduce.errors import ConfigError

runner = CliRunner()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("7", 7),
        ("64M", 64 << 20),
        ("64m", 64 << 20),
        ("1.5G", 3 << 29),
        ("1.5g", 3 << 29),
        ("2MiB", 2 << 20),
        ("2mib", 2 << 20),
        ("2MIB", 2 << 20),
        ("1e6", 10**6),
        ("1E6", 10**6),
        ("4kb", 4000),
        ("4KB", 4000),
        ("4KiB", 4096),
        ("4k", 4096),
        ("0.5K", 512),
        (".5k", 512),
        ("1e3K", 1024000),
        ("1 GiB", 1 << 30),
        ("2T", 2 << 40),
        ("12B", 12),
        ("4611686018427387904", 1 << 62),
    ],
)
def test_o36_sizes_mean_what_the_help_says(text: str, nbytes: int) -> None:
    assert parse_size(text, "--size") == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "-1", "4kb!", "M", "1.5", "1.1K", "1..5K", "2 M M", "1e", "1e-3", "nan", "inf", "0x10", "64Q", "5000000T", "1,5G", "٣", "--"],
)
def test_o36_nonsense_is_refused_in_one_line_that_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "--min-size")
    assert str(caught.value).startswith("--min-size: ")
    assert "\n" not in str(caught.value)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**40))
def test_whole_numbers_survive(nbytes: int) -> None:
    assert parse_size(str(nbytes), "-b") == nbytes
    assert parse_size(f"{nbytes}KiB", "-b") == 1024 * nbytes


def test_o36_ranges() -> None:
    assert parse_range("1M", "8M") == [1 << 20, 2 << 20, 4 << 20, 8 << 20]
    assert parse_range("1M", "7M", step="2M") == [1 << 20, 3 << 20, 5 << 20, 7 << 20]
    assert parse_range("0", "4") == [0, 1, 2, 4]
    assert parse_range("3", "3") == [3]
    for arguments, option in (
        (("8M", "1M"), "--min-size"),
        (("1M", "8M", 1.0), "--factor"),
        (("1M", "8M", 2.0, "0"), "--step"),
        (("1M", "8M", 2.0, "x"), "--step"),
        (("0", "1G", 2.0, "1"), "--step"),
        (("1", "-2"), "--max-size"),
    ):
        with pytest.raises(ConfigError, match=f"^{option}"):
            parse_range(*arguments)
    assert [format_bytes(b) for b in (0, 1536, 64 << 20, 1 << 30)] == ["0 B", "1.5 KiB", "64 MiB", "1 GiB"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "-b", "4kb!"],
        ["simulate", "-b", "-1"],
        ["simulate", "-b", "8M", "-e", "1M"],
        ["simulate", "-b", "1M", "-e", "8M", "-i", "0"],
        ["choose", "--size", "2Q"],
        ["choose", "-b", "8M", "-e", "1M"],
        ["choose", "--bits", "4,x"],
        ["choose", "--only", "rings"],
        ["choose", "--bits", "9"],
        ["simulate", "rings"],
        ["simulate", "-t", "nowhere"],
        ["simulate", "ring_2d", "-P", "7", "--ranks-per-node", "2"],
        ["plot", "--what", "pie"],
        ["calibrate", "-P", "1"],
        ["calibrate", "-P", "two"],
        ["calibrate", "-b", "x"],
    ],
)
def test_wrong_arguments_exit_2_with_one_line(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "Traceback" not in result.output


def test_simulate_proves_counts_and_times(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    result = runner.invoke(app, ["simulate", "-P", "6", "-t", "h200", "-b", "1M", "-e", "4M", "--bits", "4", "--json", str(target)])
    assert result.exit_code == 0, result.output
    saved = json.loads(target.read_text())
    rows = {(r["algorithm"], r["nbytes"]): r for r in saved["rows"]}
    ring = rows["ring", 1 << 20]
    assert ring["proven"] is True
    assert ring["rounds"] == 10
    assert ring["sent"] == ring["bound"] == -(-2 * 5 * (1 << 20) // 6)
    assert ring["roundings"] == 6
    assert ring["simulated"] == pytest.approx(ring["closed_form"])
    assert ("nvls", 4 << 20) in rows
    assert saved["environment"]["python"]
    assert "6 ranks, 4 bits" in result.output


def test_simulate_at_scale_and_in_pods() -> None:
    result = runner.invoke(app, ["simulate", "ring", "nccl_tree", "-P", "24576", "-t", "summit", "-b", "1K"])
    assert result.exit_code == 0, result.output
    pods = ["--ranks-per-node", "4", "--nics", "1", "--nodes-per-pod", "2", "--oversubscription", "2", "--across-alpha", "9"]
    result = runner.invoke(app, ["simulate", "halving_doubling", "-P", "16", "--alpha", "2", "--bandwidth", "100", *pods])
    assert result.exit_code == 0, result.output


def test_choose_lists_the_ranking_and_the_crossovers(tmp_path: Path) -> None:
    target = tmp_path / "choice.json"
    result = runner.invoke(app, ["choose", "-P", "8", "--only", "one_shot,two_shot,ring", "--json", str(target)])
    assert result.exit_code == 0, result.output
    choices = json.loads(target.read_text())["choices"]
    assert set(choices) == {"16", "4"}
    for choice in choices.values():
        times = [c["seconds"] for c in choice["ranking"]]
        assert times == sorted(times)
        assert choice["crossovers"][0]["from"] == "one_shot"
    assert choices["4"]["crossovers"][0]["nbytes"] > choices["16"]["crossovers"][0]["nbytes"]
    nccl = runner.invoke(app, ["choose", "-P", "96", "-t", "summit", "--only", "nccl", "--bits", "16"])
    assert nccl.exit_code == 0
    assert "halving_doubling" not in nccl.output


def test_plot_draws_every_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("echoreduce.cli.topology_error.ALGORITHMS", ("ring", "two_shot"))
    result = runner.invoke(app, ["plot", "--out", str(tmp_path), "--what", "size,ranks,ratio", "-P", "96"])
    assert result.exit_code == 0, result.output
    assert {p.name for p in tmp_path.iterdir()} == {f"collectives_{n}.png" for n in ("time_size", "time_ranks", "latency_ratio")}


def test_calibrate_measures_gloo_and_its_file_is_a_topology(tmp_path: Path) -> None:
    target = tmp_path / "gloo.json"
    arguments = [
        "calibrate",
        "-P",
        "2",
        "-b",
        "256K",
        "-e",
        "256K",
        "--sweeps",
        "1",
        "--repeats",
        "1",
        "--timeout",
        "60",
        "--json",
        str(target),
    ]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    row = json.loads(target.read_text())["calibrations"][0]
    assert row["world_size"] == 2
    assert row["alpha"] > 0
    assert len(row["comparisons"]) == 6
    assert all(c["measured"] > 0 and c["predicted"] > 0 for c in row["comparisons"])
    again = runner.invoke(app, ["choose", "-P", "2", "-t", str(target)])
    assert again.exit_code == 0, again.output


def test_backends_that_are_not_there_say_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    for backend in ("nccl", "p2p"):
        result = runner.invoke(app, ["calibrate", "--backend", backend, "-P", "2"])
        assert result.exit_code != 0
        assert "BackendUnavailable" in repr(result.exception)
