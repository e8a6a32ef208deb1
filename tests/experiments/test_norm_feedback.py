"""Feedback scaled by norms: exact sums leave the model alone, and a correction pays back in the stream what the error cost there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from norm_feedback import FOUR, LARGEST_RATIO, MODES, Emulation, Owed, rms, scores  # noqa: E402

P, HIDDEN = 2, 64
ROWS = torch.arange(3 * 17).reshape(3, 17) % 120


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma3TextConfig(**sizes, **heads)).eval()
    for layer in model.model.layers:
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            norm.weight.data = 0.2 * torch.randn(HIDDEN)
    return model


@torch.no_grad()
def test_every_way_runs_and_fine_sums_change_nothing() -> None:
    expected = [tiny()(input_ids=row[None, :-1]).logits[0].log_softmax(-1) for row in ROWS]
    emulation = Emulation(tiny(), P)
    emulation.calibrate(ROWS)
    exact = [emulation.logits(row) for row in ROWS]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(exact, expected))
    assert len(emulation.own) == 6
    assert emulation.own[0].shape == (P, 1, 1, 1)
    for mode in MODES:
        emulation.mode = mode
        found = []
        for bits in (8, 4):
            emulation.quant = lambda site, bits=bits: replace(FOUR, bits=bits)
            found.append(scores([emulation.logits(row) for row in ROWS], exact, ROWS)["kl"])
        assert 0 <= found[0] < 1e-3
        assert found[0] < found[1]


@torch.no_grad()
def test_a_correction_pays_back_what_the_error_cost_in_the_stream() -> None:
    emulation = Emulation(tiny(), P, mode="oracle")
    u, size, later = 0.01 * torch.randn(P, 1, 4, HIDDEN), torch.rand(1, 4, 1) + 0.5, torch.rand(1, 4, 1) + 0.5
    c = emulation._correction(3, torch.zeros(P, 1, 4, HIDDEN), later, Owed(u, 2, size))
    ratio = (emulation.weights[2] / emulation.weights[3]).abs() < LARGEST_RATIO
    cost, paid = emulation.weights[2] * u / size, emulation.weights[3] * c / later
    assert torch.allclose(paid[..., ratio], cost[..., ratio], rtol=1e-4)
    assert ratio.float().mean() > 0.9
    assert torch.allclose(rms(torch.full((1, 4), 2.0)), torch.tensor([[2.0]]))
