"""The compensator follows Eq. 10 to 12, in every storage type, and nothing non-finite gets in."""

from __future__ import annotations

import pytest
import torch

from echoreduce import FeedbackConfig
from echoreduce.feedback.compensator import FeedbackState, ceil_log2, correction, load, power_of_two, store, update

STEP = torch.ones(2, 3)


def test_unrolls_to_the_weights_of_eq_12() -> None:
    config = FeedbackConfig(residual="group", gain=0.75, blend=0.35, decays=(0.7, 0.3), state="fp32")
    state = FeedbackState(config)
    residuals = [torch.randn(2, 3, 16, dtype=torch.float32) for _ in range(6)]
    for residual in residuals:
        update(state, residual, STEP)
    age = torch.arange(6).flip(0)
    weights = 0.75 * (0.35 * 0.3 * 0.7**age + 0.65 * 0.7 * 0.3**age)
    expected = sum(w * r for w, r in zip(weights, residuals))
    returned = correction(state)
    assert returned is not None
    torch.testing.assert_close(returned, expected, rtol=1e-5, atol=1e-6)


def test_single_step_returns_the_last_residual_exactly() -> None:
    state = FeedbackState(FeedbackConfig(state="fp32"))
    assert correction(state) is None
    update(state, torch.randn(2, 3, 16), STEP)
    last = torch.randn(2, 3, 16)
    update(state, last, STEP)
    assert torch.equal(correction(state), last)
    state.reset()
    assert correction(state) is None


@pytest.mark.parametrize("state", ["float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1.0, 3e4, 1e30])
def test_float8_follows_the_magnitude_of_the_group(state: str, scale: float) -> None:
    config = FeedbackConfig(state=state)
    value = (torch.rand(2, 3, 128) - 0.5) * scale
    known = load(store(value, config, torch.full((2, 3), scale)))
    searched = load(store(value, config))
    bound = 0.5 * scale * (2**-4 if state == "float8_e4m3" else 2**-3)
    assert (known - value).abs().max() <= bound
    assert (searched - value).abs().max() <= bound
    assert known.abs().max() > 0


def test_non_finite_residuals_count_as_zero() -> None:
    for state in ("fp32", "bf16", "float8_e4m3", "float8_e5m2"):
        kept = FeedbackState(FeedbackConfig(state=state))
        residual = torch.ones(1, 2, 16) * 0.25
        residual[0, 1] = torch.nan
        residual[0, 0, 3] = torch.inf
        update(kept, residual, torch.tensor([[1.0, torch.nan]]))
        returned = correction(kept)
        assert torch.isfinite(returned).all()
        assert (returned[0, 1] == 0).all()
        assert returned[0, 0, 3] == 0
        assert returned[0, 0, 0] == 0.25


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-126, 127, dtype=torch.int32)
    assert torch.equal(power_of_two(exponents).double(), 2.0 ** exponents.double())
    x = torch.tensor([1.0, 1.5, 2.0, 0.75, 3e38, 2.0**-126])
    assert ceil_log2(x).tolist() == [0, 1, 1, 0, 128, -126]


def test_averages_that_are_not_needed_are_not_kept() -> None:
    assert FeedbackConfig().averages == 1
    assert FeedbackConfig(decays=(0.7, 0.3)).averages == 2
    assert FeedbackConfig(decays=(0.7, 0.3), blend=1.0).averages == 1
    assert FeedbackConfig(residual="none").averages == 0
    assert FeedbackConfig(decays=(0.7, 0.3), blend=0.0).weights == ((1.0, 0.3),)
