"""Arguments of `bench`: nonsense is refused with one line that names the option, before any device is touched."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from echoreduce.cli import bench, check
from echoreduce.cli.bench import Row, draw, print_rows
from echoreduce.errors import ConfigError

app = typer.Typer()
bench.register(app)
check.register(app)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--min-size", "8M", "--max-size", "1M"], "--min-size"),
        (["--max-size", "4kb!"], "--max-size"),
        (["--min-size", "-1"], "--min-size"),
        (["--factor", "1"], "--factor"),
        (["--dtype", "int8"], "--dtype"),
        (["--graph", "sometimes"], "--graph"),
        (["--presets", "quick"], "quick"),
    ],
)
def test_nonsense_is_refused_in_one_line(arguments, words):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["bench", "check"])
def test_without_torchrun_the_command_to_type_is_named(command, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    result = CliRunner().invoke(app, [command])
    assert isinstance(result.exception, ConfigError)
    assert "torchrun" in str(result.exception)


def test_rows_are_printed_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    names = ("nccl", "ours")
    rows = [Row(size, name, "graph", size / 1e6, 0.1, 0.2, 1.0, 1.0, size // 4, None) for size in (8192, 65536) for name in names]
    print_rows(rows)
    assert "64 KiB" in capsys.readouterr().out
    draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
