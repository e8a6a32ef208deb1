"""The command: no arguments give help, errors name the option, results are printed and written."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from echoreduce.cli import app
from echoreduce.cli.evaluate import parse_policy
from echoreduce.errors import ConfigError
from echoreduce.measure.report import environment, write_json
from echoreduce.sites import early_half, edges, uniform

transformers = pytest.importorskip("transformers")
runner = CliRunner()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A saved two-layer Llama with a byte-level tokenizer, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    text = folder / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 20)
    return folder, text


def test_no_arguments_give_help_and_exit_2() -> None:
    done = runner.invoke(app, [])
    assert "evaluate" in done.output
    assert "demo" in done.output


def test_evaluate_prints_and_writes(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = tiny
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    arguments = ["evaluate", str(model), "--text", str(text), "-P", "4", "--group-size", "16", "--window", "32", "--windows", "3"]
    done = runner.invoke(app, [*arguments, "--batch", "2", "--json", str(out), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    for name in ("16-bit", "8-bit", "paper", "default"):
        assert name in done.output
    written = json.loads(out.read_text())
    assert [row["name"] for row in written["rows"]] == ["16-bit", "8-bit", "4-bit, no feedback", "paper", "fast", "default"]
    assert written["conditions"]["world_size"] == 4
    assert written["environment"]["packages"]["torch"] == version("torch")
    assert all(row["perplexity"] > 1 for row in written["rows"])
    assert len(written["rows"][4]["accumulated"]) == 4
    assert picture.stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore:.*norms its sums")
def test_evaluate_shows_the_preset_of_models_that_norm_their_sums(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    plain, text = tiny
    model, out = tmp_path / "gemma", tmp_path / "r.json"
    transformers.AutoTokenizer.from_pretrained(plain).save_pretrained(model)
    config = transformers.Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    options = ["-P", "2", "--window", "32", "--windows", "1", "--no-errors"]
    arguments = ["evaluate", str(model), "--text", str(text), *options, "--json", str(out)]
    assert runner.invoke(app, arguments).exit_code == 0
    assert [row["name"] for row in json.loads(out.read_text())["rows"]][-2:] == ["default", "post_norm"]
    assert runner.invoke(app, [*arguments, "--preset", "default"]).exit_code == 0
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == ["16-bit", "default"]


def test_evaluate_in_real_processes_equals_virtual_ranks(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = tiny
    found = {}
    for backend in ("virtual", "processes"):
        out = tmp_path / f"{backend}.json"
        arguments = ["evaluate", str(model), "--text", str(text), "-P", "2", "--group-size", "16", "--window", "32", "--windows", "2"]
        options = ["--backend", backend, "--preset", "default", "--preset", "paper", "--no-errors", "--threads", "1", "--json", str(out)]
        done = runner.invoke(app, [*arguments, *options])
        assert done.exit_code == 0, done.output
        found[backend] = [row["perplexity"] for row in json.loads(out.read_text())["rows"]]
    assert found["virtual"][1:] == found["processes"][1:]
    assert found["virtual"][0] == pytest.approx(found["processes"][0], rel=1e-6)


def test_o11_one_rank_is_the_model_itself(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = tiny
    out = tmp_path / "r.json"
    arguments = ["evaluate", str(model), "--text", str(text), "-P", "1", "--window", "32", "--windows", "1", "--json", str(out)]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert len({row["perplexity"] for row in json.loads(out.read_text())["rows"]}) == 1


@pytest.mark.parametrize(
    ("options", "quoted"),
    [
        (["--table", "everything"], "everything"),
        (["--preset", "papre"], "papre"),
        (["--policy", "edges:x"], "edges:x"),
        (["--bits", "11"], "11"),
        (["--group-size", "100"], "100"),
    ],
)
def test_bad_options_are_one_line_and_exit_1(tiny: tuple[Path, Path], options: list[str], quoted: str) -> None:
    model, text = tiny
    command = [sys.executable, "-m", "echoreduce", "evaluate", str(model), "--text", str(text), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert quoted in done.stderr
    assert "Traceback" not in done.stderr


def test_policies_are_parsed() -> None:
    assert parse_policy("uniform") == uniform()
    assert parse_policy("early_half") == early_half(8)
    assert parse_policy("edges:1:3:6") == edges(1, 3, 6)
    for bad in ("edges:1:2:3:4", "late_half", "uniform:4"):
        with pytest.raises(ConfigError, match=bad):
            parse_policy(bad)


def test_info_says_what_can_run_here(tmp_path: Path) -> None:
    out = tmp_path / "info.json"
    done = runner.invoke(app, ["info", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "gloo" in done.output
    written = json.loads(out.read_text())
    assert set(written["presets"]) >= {"paper", "paper_early", "default"}


def test_the_record_names_no_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/bin/echoreduce", "evaluate", "/home/me/model", "--json", "/home/me/r.json"])
    assert environment()["command"] == "echoreduce evaluate model --json r.json"
    write_json(tmp_path / "deep" / "r.json", rows=[])
    assert json.loads((tmp_path / "deep" / "r.json").read_text())["rows"] == []
