"""Group against local residual: the step recursions against the real quantizer (the plain reference), and Theorem 1's gap."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from echoreduce import reference
from echoreduce.config import NO_FEEDBACK, FeedbackConfig, QuantConfig
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory import residuals
from echoreduce.theory.residuals import Widths
from theory.settings import ALL, PAPER, PAPER_FULL, SINGLE

BF16 = 1.0 + 2.0**-7  # a scale is rounded up to bf16
GROUP_SINGLE = replace(SINGLE, residual="group")
LOCAL = {"single": SINGLE, "paper's kernel": replace(PAPER_FULL, residual="local"), "gain 0.75": replace(PAPER, residual="local")}
GROUP = {"paper": PAPER, "paper-full": PAPER_FULL, "single": GROUP_SINGLE, "single-half": replace(GROUP_SINGLE, gain=0.5)}
SETTINGS = {f"local {k}": v for k, v in LOCAL.items()} | {f"group {k}": v for k, v in GROUP.items()} | {"none": NO_FEEDBACK}


@dataclass
class Pass:
    """What the reference did: largest steps, errors and ||S|| of each site, and x' - mean x'."""

    push: np.ndarray
    gather: np.ndarray
    error: np.ndarray
    partial: np.ndarray
    deviations: np.ndarray


def play(contributions, feedback, quant, algorithm="two_shot"):
    """Run the plain reference over a pass with fp32 state; contributions fp32 [N, P, n]."""
    state = [torch.zeros(()) for _ in feedback.weights]
    rows, partial, total, deviations = [], [], 0.0, []
    for k, x in enumerate(contributions):
        correction = sum(w * s for (w, _), s in zip(feedback.weights, state)) if k and state else None
        record = reference.trace(x, quant, algorithm, correction)
        made = reference.local_residuals if feedback.residual == "local" else reference.group_residuals
        residual = made(record)[0]
        state = [b * s + (1 - b) * residual for (_, b), s in zip(feedback.weights, state)]
        delta = reference.injected_error(record)
        total = total + delta + (0.0 if correction is None else correction.sum(0))
        gather = 0.0 if record.gathered is None else float(record.gathered.grid.scale.max())
        pushed = record.pushed.grid.scale
        if record.gathered is not None:  # two-shot: nobody rounds its own segment
            pushed = pushed[~torch.eye(len(x), dtype=torch.bool)]
        rows.append((float(pushed.max()), gather, float(delta.abs().max())))
        partial.append(float(total.norm()))
        deviations.append((record.compensated - record.compensated.mean(0)).numpy())
    push, gather, error = np.array(rows).T
    return Pass(push, gather, error, np.array(partial), np.array(deviations))


def widths_of(contributions, quant):
    """Largest widths over sites, segments and groups; for the symmetric grid twice the largest magnitude."""
    blocks = torch.stack([reference.enter(x, quant) for x in contributions])

    def width(values):
        spread = values.amax(-1) - values.amin(-1)
        return float((2 * values.abs().amax(-1) if quant.policy == "symmetric" else spread).max())

    total = blocks.sum(1)
    return Widths(blocks.shape[1], width(blocks), width(total), width(blocks - total.unsqueeze(1) / blocks.shape[1]))


def contributions(kind, sites, ranks, seed=0, numel=128):
    noise = torch.randn(sites, ranks, ranks * numel, generator=torch.Generator().manual_seed(seed))
    return noise[:1].expand(sites, -1, -1) if kind == "same" else noise


@pytest.mark.parametrize("kind", ["white", "same"])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@pytest.mark.parametrize("quant", [QuantConfig(group_size=64), QuantConfig(bits=3, group_size=32, policy="symmetric")], ids=["4z", "3s"])
@pytest.mark.parametrize("feedback", SETTINGS.values(), ids=SETTINGS)
def test_the_real_quantizer_obeys_the_recursion_and_its_limit(feedback, quant, algorithm, kind):
    data = contributions(kind, 16, 3)
    played = play(data, feedback, quant, algorithm)
    arguments = (widths_of(data, quant), feedback, residuals.grid_steps(quant))
    options = {"one_shot": algorithm == "one_shot", "rounding": BF16}
    bound = residuals.step_bounds(*arguments, 16, **options)
    limit = residuals.step_limit(*arguments, **options)
    slack = 1 + 1e-5  # fp32
    for name in ("push", "gather", "error"):
        assert np.all(getattr(played, name) <= getattr(bound, name) * slack)
        assert np.all(getattr(bound, name) <= getattr(limit, name) * slack)
    assert played.push[0] > 0.9 * bound.push[0]


@pytest.mark.parametrize("one_shot", [False, True])
@pytest.mark.parametrize("feedback", SETTINGS.values(), ids=SETTINGS)
def test_the_recursion_converges_to_its_fixed_point(feedback, one_shot):
    widths = Widths(4, contribution=3.0, total=5.0, deviation=2.9)
    last = residuals.step_bounds(widths, feedback, 15.0, 400, one_shot=one_shot)
    limit = residuals.step_limit(widths, feedback, 15.0, one_shot=one_shot)
    if feedback.residual == "group" and feedback.gain == 1.0:
        assert np.isinf(limit.push)
        assert np.isinf(limit.error)
        growth = np.diff(last.push)[-1]
        assert growth > 0
        assert last.push[-1] == pytest.approx(growth * 400, rel=0.05)  # linear in the number of sites
        return
    for name in ("push", "gather", "error"):
        assert getattr(last, name)[-1] == pytest.approx(float(getattr(limit, name)), rel=1e-9)


def test_the_fixed_point_of_the_local_residual_in_closed_form():
    widths = Widths(4, contribution=3.0, total=5.0, deviation=2.9)
    limit = residuals.step_limit(widths, SINGLE, 15.0)
    assert float(limit.push) == pytest.approx(3.0 / 14)  # W / (L - eta): 15/14 of the step without feedback
    assert float(limit.gather) == pytest.approx((5.0 + 3 * 2 * 3.0 / 14) / 14)
    assert float(limit.error) == pytest.approx((3 * float(limit.push) + float(limit.gather)) / 2)
    assert float(residuals.step_limit(widths, SINGLE, 15.0, one_shot=True).error) == pytest.approx(2 * 3.0 / 14)


def test_the_fixed_point_of_the_group_residual_in_closed_form():
    widths = Widths(2, contribution=3.0, total=5.0, deviation=2.0)
    limit = residuals.step_limit(widths, replace(GROUP_SINGLE, gain=0.75), 15.0, one_shot=True)
    assert float(limit.push) == pytest.approx((3.0 + 0.75 * 2.0 / 0.25) / (15.0 - 0.75))  # x' carries up to D / (1 - eta)


def test_two_bits_with_full_gain_and_many_ranks_still_have_a_local_limit():
    assert np.isfinite(residuals.step_limit(Widths(8, 1.0, 1.0, 1.0), SINGLE, 3.0).error)
    assert np.isinf(residuals.step_limit(Widths(8, 1.0, 1.0, 0.0), GROUP_SINGLE, 1.0).error)


@pytest.mark.parametrize("feedback", GROUP.values(), ids=GROUP)
def test_deviations_come_back_whatever_the_quantizer_does(feedback):
    quant = QuantConfig(group_size=64)
    data = contributions("white", 12, 4)
    blocks = np.array([reference.enter(x, quant).numpy() for x in data], dtype=np.float64)
    expected = residuals.fed_back_deviations(blocks - blocks.mean(1, keepdims=True), feedback)
    assert play(data, feedback, quant).deviations == pytest.approx(expected, abs=1e-4)
    assert play(data, feedback, replace(quant, bits=8)).deviations == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("feedback", GROUP.values(), ids=GROUP)
def test_range_growth_of_independent_contributions(feedback):
    sites, ranks = 40, 4
    noise = np.random.default_rng(0).standard_normal((sites, ranks, 20000))
    mean = noise.mean(1, keepdims=True)
    compensated = mean + residuals.fed_back_deviations(noise - mean, feedback)
    measured = np.sqrt(np.mean(compensated**2, axis=(1, 2)))
    assert measured == pytest.approx(residuals.range_growth(feedback, ranks, sites), rel=0.02)


def test_the_measured_widening_of_the_papers_setting():
    """docs/design.md, Section 5: 1.2x at gain 0.75, P = 4, on a real model of 60 sites."""
    assert residuals.range_growth(PAPER, 4, 60).mean() == pytest.approx(1.2, abs=0.05)
    assert residuals.range_growth(PAPER_FULL, 4, 60).mean() > 1.9
    assert residuals.range_growth(SINGLE, 4, 60).tolist() == [1.0] * 60


@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
def test_deviation_response(feedback):
    impulse = np.zeros((50, 2, 1))
    impulse[0, :, 0] = (1.0, -1.0)
    response = residuals.deviation_response(feedback, 50)
    assert residuals.fed_back_deviations(impulse, feedback)[:, 0, 0] == pytest.approx(response, abs=1e-12)


def test_deviations_never_leave_at_gain_one():
    assert residuals.deviation_response(PAPER_FULL, 300)[-1] == pytest.approx(1 / 2.0952381, rel=1e-6)
    assert residuals.deviation_response(PAPER, 300).sum() == pytest.approx(4.0)  # 1 / (1 - eta)


def test_theorem_1_has_no_depth_independent_q_with_the_group_residual():
    """Counterexample: ranks that repeat their contribution: at gain one S_t grows with the group residual, not with the local one."""
    quant = QuantConfig(group_size=64)
    data = contributions("same", 56, 4)
    group, local, without = (play(data, f, quant) for f in (PAPER_FULL, replace(PAPER_FULL, residual="local"), NO_FEEDBACK))
    assert group.partial[-1] > 5 * group.partial[4]
    assert group.error[-1] > 8 * group.error[0]
    assert np.polyfit(np.log(np.arange(10, 56)), np.log(group.push[10:]), 1)[0] == pytest.approx(1.0, abs=0.15)  # linear in k
    assert local.partial.max() < 3 * local.partial[0]
    assert local.error.max() < 1.5 * local.error[0]
    assert without.partial[-1] == pytest.approx(56 * without.partial[0], rel=1e-3)


def test_single_step_local_leaves_only_the_last_error():
    quant = QuantConfig(group_size=64)
    data = contributions("white", 20, 4)
    last = play(data[-1:], NO_FEEDBACK, quant).partial[0]
    assert play(data, SINGLE, quant).partial[-1] == pytest.approx(last, rel=0.1)
    assert play(data, NO_FEEDBACK, quant).partial[-1] > 3.5 * last


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="world_size"):
        Widths(1, 1.0, 1.0, 1.0)
    with pytest.raises(ShapeError, match="sum to zero"):
        residuals.fed_back_deviations(np.ones((3, 2, 4)), PAPER)
    assert residuals.grid_steps(QuantConfig()) == 15
    assert residuals.grid_steps(QuantConfig(policy="symmetric")) == 14
    assert FeedbackConfig().residual == "local"
