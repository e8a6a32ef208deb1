"""`echoreduce analyze` prints constants and verdicts with their equations, writes everything, and draws from what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from echoreduce.cli import app
from echoreduce.cli.analyze import read_report
from echoreduce.errors import ConfigError

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A saved three-layer Llama with one token a character, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    letters = Tokenizer(models.BPE(vocab={chr(c): c - 64 for c in range(64, 128)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "text.txt").write_text("itwasthebestoftimesitwastheworstoftimes" * 3)
    return folder, folder / "text.txt"


def test_measure_write_read_draw(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = tiny
    out = tmp_path / "a.json"
    arguments = ["analyze", str(model), "--text", str(text), "--tokens", "16", "--windows", "2", "--preset", "paper", "--preset", "default"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(out)], terminal_width=240)
    assert done.exit_code == 0, done.output
    for said in ("Theorem 1 (Eq. 19)", "Lemma 4 (Eq. 20)", "Assumption 1 (Eq. 24)", "holds", "Lambda_N"):
        assert said in done.output
    written = json.loads(out.read_text())
    assert written["conditions"]["world_size"] == 4
    assert len(written["windows"]) == 2
    window = written["windows"][0]
    assert len(window["network"]["sites"]) == 6
    assert len(window["network"]["sigma"]) == 7
    assert [one["name"] for one in window["variants"]] == ["paper", "default"]
    for one in window["variants"]:
        assert len(one["by_site"]["injected"]) == len(one["by_site"]["share_of_output"]) == 6
        assert all(check["verdict"] == "holds" or check["verdict"].startswith("violated: ") for check in one["checks"])
    again = CliRunner().invoke(app, ["analyze", "--from", str(out), "--plot", str(tmp_path / "pictures")])
    assert again.exit_code == 0, again.output
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert len(pictures) == 3
    assert all(picture.stat().st_size > 10_000 for picture in pictures)


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["analyze"])
    assert isinstance(done.exception, ConfigError)
    assert "--text" in str(done.exception)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a --json file"):
        read_report(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="missing"):
        read_report(tmp_path / "missing.json")
