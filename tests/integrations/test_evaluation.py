"""Perplexity of a real model is what others measured, in virtual ranks and in processes; the error figures are what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from echoreduce import preset
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.integrations import processes
from echoreduce.integrations.demo_data import find_model, find_text
from echoreduce.integrations.evaluation import (
    ObservedBackend,
    Variant,
    ablation_variants,
    bits_per_value,
    observe,
    perplexity,
    summary_variants,
)
from echoreduce.integrations.language_model import load, read_text, windows
from echoreduce.integrations.transformers import attach
from echoreduce.session import Session


def model_and_text() -> tuple[Path, Path]:
    try:
        return find_model(), find_text()
    except ConfigError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, torch.Tensor]:
    model_path, text_path = model_and_text()
    model, tokenizer = load(model_path)
    return model, windows(tokenizer, read_text(text_path), 128, 2)


@pytest.mark.model
def test_real_processes_give_the_perplexity_of_virtual_ranks(smollm2: tuple[Any, torch.Tensor]) -> None:
    model, tokens = smollm2
    torch.set_num_threads(1)
    variants = [Variant("default", preset("default", group_size=64)), Variant("no feedback", preset("no_feedback", group_size=64))]
    job = processes.Job(str(find_model()), "float32", tokens, 1, variants, 2, processes.rendezvous_file(), 1)
    events: list[processes.Event] = []
    finished = processes.evaluate(job, events.append)
    assert sum(event.windows for event in events if event.kind == "advanced") == 2 * tokens.shape[0]
    for variant, event in zip(variants, finished):
        with attach(model, variant.config, world_size=2):
            assert perplexity(model, tokens, 1) == event.perplexity
    plain = perplexity(model, tokens, 1)
    assert 5 < plain < 60
    assert plain < finished[0].perplexity < finished[1].perplexity


@pytest.mark.model
def test_feedback_keeps_the_accumulated_error_at_one_rounding(smollm2: tuple[Any, torch.Tensor]) -> None:
    model, tokens = smollm2
    _, without = observe(model, tokens, preset("no_feedback", group_size=64), 4)
    _, paper = observe(model, tokens, preset("paper", group_size=64), 4)
    _, default = observe(model, tokens, preset("default", group_size=64), 4)
    assert len(without) == len(default) == 60
    assert default[-1] < 0.1 * without[-1]
    assert default[-1] < paper[-1] < without[-1]


def test_observed_errors_are_those_of_the_call() -> None:
    backend = ObservedBackend(3)
    session = Session(backend, preset("fast", group_size=16), 6)  # sites 0, 1 send 8 bits, 2 and 3 send 4
    session.begin()
    piled = torch.zeros(40)
    for site in range(4):
        x = torch.randn(3, 40)
        piled += session.reduce(x) - x.sum(0)
        assert backend.accumulated[site] == pytest.approx(piled.square().mean().sqrt().item(), rel=1e-4)
    assert 0 < backend.injected[0] < backend.injected[2] < 0.5


def test_bits_per_value_counts_everything() -> None:
    numel = 1024 * 576
    assert bits_per_value(None, 4, numel, 60) == 16
    assert bits_per_value(preset("exact"), 4, numel, 60) == 16
    assert bits_per_value(preset("no_feedback"), 4, numel, 60) == 4.25
    assert bits_per_value(preset("fast"), 4, numel, 60) == pytest.approx((56 * 4.25 + 4 * 8.25) / 60)
    assert bits_per_value(preset("fast"), 2, numel, 60) == pytest.approx((56 * 4.25 + 4 * 8.25) / 60)
    assert bits_per_value(preset("default"), 4, numel, 60) == pytest.approx((55 * 4.25 + 5 * 7.5) / 60)
    names = [variant.name for variant in ablation_variants()]
    assert len(set(names)) == len(names) >= 14
    assert [variant.name for variant in summary_variants()] == ["16-bit", "8-bit", "4-bit, no feedback", "paper", "fast", "default"]


def test_windows_share_one_token_and_texts_are_read(tmp_path: Path) -> None:
    class Characters:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) for c in text]}

    cut = windows(Characters(), "abcdefghij", 3)
    assert ["".join(map(chr, row)) for row in cut.tolist()] == ["abcd", "defg", "ghij"]
    assert windows(Characters(), "abcdefghij", 3, 1).shape == (1, 4)
    with pytest.raises(ShapeError, match="one window of 30"):
        windows(Characters(), "abc", 30)
    (tmp_path / "a.json").write_text(json.dumps({"x": {"title": "t", "extract": "first"}, "y": ["second", {"text": "third"}]}))
    assert read_text(tmp_path / "a.json") == "first\n\nsecond\n\nthird"
    with pytest.raises(ConfigError, match="no text at"):
        read_text(tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match=r"neither a folder with a config\.json"):
        load(tmp_path)


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    class Uniform(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 50)})

    assert math.isclose(perplexity(Uniform(), torch.randint(0, 50, (3, 8)), 2), 50, rel_tol=1e-6)
