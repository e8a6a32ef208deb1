"""Exact sites still return errors, the knapsack is exact, budgets are obeyed, what is recommended is as good as `default` elsewhere."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from echoreduce import FeedbackConfig, load_config, preset
from echoreduce.cli import app
from echoreduce.errors import ConfigError
from echoreduce.integrations.calibration import BITS, ReturningBackend, Subject, Text, assign, candidates, recommend, sensitivity
from echoreduce.integrations.demo_data import find_model, find_text
from echoreduce.integrations.evaluation import bits_per_value, perplexity
from echoreduce.integrations.language_model import load, read_text, windows
from echoreduce.integrations.transformers import attach
from echoreduce.session import Session

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny() -> Any:
    """Three layers, six sites, weights large enough that the logits are not flat."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def some_windows(count: int, length: int = 24, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(0, vocabulary, (count, length + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_exact_sites_return_what_the_site_before_owes(rotation: Any) -> None:
    base = preset("default", group_size=16)
    config = replace(
        base,
        sites=(16, 4, 16, 16),
        feedback=FeedbackConfig(state="fp32"),
        quant=replace(base.quant, rotation=rotation),
        algorithm="two_shot",
    )
    session = Session(ReturningBackend(3), config, 4)
    session.begin()
    generator = torch.Generator().manual_seed(0)
    net = []
    for _ in range(4):
        x = torch.randn(3, 50, generator=generator)
        net.append(session.reduce(x) - x.sum(0))
    assert net[0].abs().max() < 1e-5
    assert net[1].abs().max() > 0.05
    assert (net[1] + net[2]).abs().max() < 1e-5
    assert net[3].abs().max() < 1e-5


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(0, 22))
def test_the_knapsack_is_exact(rows: list[list[float]], budget_over: int) -> None:
    table = np.array(rows)
    sites = len(rows)
    budget = 4 * sites + budget_over
    found = assign(table, budget)
    assert sum(found) <= budget
    value = sum(table[k, BITS.index(b)] for k, b in enumerate(found))
    columns = itertools.product(range(4), repeat=sites)
    best = min(sum(table[k, c] for k, c in enumerate(one)) for one in columns if sum(BITS[c] for c in one) <= budget)
    assert value == pytest.approx(best)
    with pytest.raises(ConfigError, match=f"{4 * sites - 1} bits over {sites} sites"):
        assign(table, 4 * sites - 1)


def test_judging(tiny: Any) -> None:
    subject, tokens = Subject(tiny, 4), some_windows(3)
    text = Text.of(subject, tokens)
    assert text.judge(subject, preset("exact")) == (0.0, 1.0)
    config = preset("default", group_size=16)
    steps: list[int] = []
    divergence, ratio = text.judge(subject, config, lambda: steps.append(1))
    assert len(steps) == 3
    measured = {}
    for name in (config, "exact"):
        with attach(tiny, name, world_size=4):
            measured[name] = perplexity(tiny, tokens, 1)
    assert ratio == pytest.approx(measured[config] / measured["exact"], rel=1e-5)
    with attach(tiny, config, world_size=4), torch.no_grad():
        other = torch.cat([tiny(input_ids=row[None, :-1]).logits[0] for row in tokens]).log_softmax(-1)
    exact = torch.cat(text.exact).log_softmax(-1)
    expected = torch.nn.functional.kl_div(other, exact, log_target=True, reduction="batchmean").item()
    assert divergence == pytest.approx(expected, rel=1e-3)


def test_shares_of_the_sites_add_up(tiny: Any) -> None:
    subject = Subject(tiny, 4)
    text = Text.of(subject, some_windows(8))
    base = preset("default", group_size=16)
    table = sensitivity(subject, text, base)
    assert table.shape == (6, 4)
    assert (table[:, 0] > 5 * table[:, 3]).all()
    for column, width in enumerate(BITS):
        assert text.judge(subject, replace(base, sites=(width,) * 6))[0] == pytest.approx(table[:, column].sum(), rel=0.35)


@pytest.mark.parametrize("budget", [4.25, 4.6, 5.3, 9.5])
@pytest.mark.parametrize("world_size", [2, 4])
def test_budgets_are_obeyed_and_used(budget: float, world_size: int) -> None:
    table = np.outer(np.linspace(1, 2, 60), [1.0, 0.25, 0.06, 0.004])
    numel = 128 * 576
    found = candidates(table, preset("default"), budget, world_size, numel)
    assert [one.name for one in found].count("default") == 1
    for one in found:
        assert one.bits_per_value == bits_per_value(one.config, world_size, numel, 60)
        assert one.fits == (one.bits_per_value <= budget + 1e-9)
        assert one.fits or one.name == "default"
    assigned = [one for one in found if one.name.startswith("assigned")]
    assert assigned
    assert max(one.bits_per_value for one in assigned) > min(budget, 8.5) - 4 / 60


def test_a_budget_below_the_wire_is_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"budget of 4.1 bits a value is below the least that the wire takes, 4.12"):
        recommend(Subject(tiny, 4), some_windows(1), some_windows(1), 4.1, lambda label: None)


def test_the_command_writes_a_file_that_evaluate_takes(tiny: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = Tokenizer(models.BPE(vocab={chr(c): c - 64 for c in range(64, 128)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / "model")
    tiny.save_pretrained(tmp_path / "model")
    text, out, table = tmp_path / "text.txt", tmp_path / "found.json", tmp_path / "table.json"
    text.write_text("itwasthebestoftimesitwastheworstoftimes" * 20)
    common = [str(tmp_path / "model"), "--text", str(text), "-P", "4", "--window", "24"]
    done = CliRunner().invoke(app, ["recommend", *common, "-b", "5.2", "--windows", "2", "--held-out", "3", "-o", str(out)])
    assert done.exit_code == 0, done.output
    evidence = json.loads(out.read_text())["evidence"]
    config = load_config(out)
    assert bits_per_value(config, 4, 24 * 64, 6) <= 5.2
    assert evidence["bits_per_value"] <= evidence["budget_bits"] == 5.2
    assert evidence["model"] == "model"
    assert len(evidence["text"]["sha256"]) == 64
    assert len(evidence["site_divergence"]) == 6
    fitting = [row for row in evidence["candidates"] if row["fits"]]
    assert min(fitting, key=lambda row: row["divergence"])["name"] == evidence["chosen"]
    done = CliRunner().invoke(app, ["evaluate", *common, "--config", str(out), "--no-errors", "--json", str(table)])
    assert done.exit_code == 0, done.output
    rows = json.loads(table.read_text())["rows"]
    assert [row["name"] for row in rows] == ["16-bit", "found"]
    assert rows[1]["bits_per_value"] == pytest.approx(evidence["bits_per_value"])


def test_a_model_that_norms_its_sums_gets_no_feedback() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = transformers.Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = some_windows(3)
    tokens[:, 0] = 2  # <bos>
    found = recommend(Subject(model, 4), tokens[:1], tokens[1:], 5.5, lambda label: None)
    assert [one.name for one in found.candidates if one.config.feedback.enabled] == ["default"]
    assert not found.chosen.config.feedback.enabled
    assert "no feedback" in found.evidence()["method"]


def test_windows_with_bos() -> None:
    class Letters:
        bos_token_id: int | None = 99

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) - 97 for c in text]}

    letters = Letters()
    assert windows(letters, "abcdefg", 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert windows(letters, "abcdefg", 3, bos=True).tolist() == [[99, 1, 2, 3], [99, 4, 5, 6]]
    letters.bos_token_id = None
    with pytest.raises(ConfigError, match="no <bos>"):
        windows(letters, "abcdefg", 3, bos=True)


def test_a_list_for_another_model_is_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="lists 5 sites, but the pass has 6"):
        attach(tiny, replace(preset("default"), sites=(4,) * 5), world_size=2)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_recommended_one_is_no_worse_than_default_on_other_windows() -> None:
    try:
        path, words = find_model(), find_text()
    except ConfigError as missing:
        pytest.skip(str(missing))
    model, tokenizer = load(path)
    tokens = windows(tokenizer, read_text(words), 32, 13)
    subject = Subject(model, 4)
    found = recommend(subject, tokens[:1], tokens[1:5], 4.6, lambda label: None)
    assert found.chosen.bits_per_value <= 4.6
    other = Text.of(subject, tokens[5:])
    assert other.judge(subject, found.chosen.config)[0] <= 1.1 * other.judge(subject, preset("default"))[0]
