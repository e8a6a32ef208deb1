"""Proposition 3 on operators that turn smoothly along the pass, and what happens when they do not."""

import numpy as np
import pytest

from echoreduce.config import NO_FEEDBACK
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory import backward, bounds, stream, weights
from echoreduce.theory.bounds import NetworkConstants
from theory.settings import ALL, FULL_GAIN, PAPER, PAPER_FULL, SINGLE

Q, GAMMA = 0.3, 1.4
full_gain = pytest.mark.parametrize("feedback", FULL_GAIN.values(), ids=FULL_GAIN)


def operators(sites, smooth=True, added=1.0):
    """D_k = gamma times a rotation by an angle that moves as sqrt(k) (smooth: its speed falls as 1 / sigma_k), or flips its sign."""
    scales = np.sqrt(1.0 + added * np.arange(sites + 1))
    angle = 0.7 * scales[:-1] if smooth else np.pi * np.arange(sites)
    turns = GAMMA * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]).transpose(2, 0, 1)
    return backward.Operators(turns, scales)


def constants_of(ops):
    added = np.diff(ops.scales**2)
    return NetworkConstants(ops.turns.shape[1], ops.scales[0], ops.scales[1], added.min(), added.max(), c0=0.0)


def variances(ops, feedback):
    """E ||S_t||**2 for every t, exactly (isotropic errors of norm Q)."""
    return np.array([bounds.mean_square(backward.coefficients(ops, feedback, t), Q) for t in range(ops.turns.shape[0])])


@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
@pytest.mark.parametrize("last", [0, 7, 29])
def test_coefficients_are_the_recurrence(feedback, last):
    ops = operators(30)
    injected = stream.random_sphere((30, 6, 2), Q, seed=0)
    direct = backward.partial_sum(ops, injected, feedback, last)
    matrices = backward.coefficients(ops, feedback, last)
    assert np.einsum("sij,smj->mi", matrices, injected[last:]) == pytest.approx(direct, abs=1e-12)


@full_gain
@pytest.mark.parametrize("sites", [10, 60, 200])
def test_proposition_3(feedback, sites):
    ops = operators(sites)
    gamma, smoothness = ops.largest(), ops.smoothness()
    assert gamma == pytest.approx(GAMMA)
    assert 0.3 < smoothness < 2.0 * GAMMA
    bound = backward.proposition_3(feedback, constants_of(ops), Q, gamma, smoothness)
    measured = variances(ops, feedback)
    assert measured.max() <= bound
    assert measured.max() > bound / 300


@full_gain
def test_monte_carlo_agrees_with_the_coefficients(feedback):
    ops, passes = operators(40), 3000
    energy = np.sum(backward.partial_sum(ops, stream.random_sphere((40, passes, 2), Q, seed=1), feedback, 0) ** 2, axis=-1)
    expected = variances(ops, feedback)[0]
    assert energy.mean() == pytest.approx(expected, abs=4.5 * energy.std() / np.sqrt(passes))


@full_gain
def test_the_step_that_bounds_the_mismatch(feedback):
    ops = operators(50)
    constants = constants_of(ops)
    mismatch = backward.mismatch_constant(constants, ops.largest(), ops.smoothness())
    entering = ops.entering
    for s in range(1, 50):
        gap = np.linalg.norm(entering[s] - entering[:s], ord=2, axis=(1, 2))
        assert np.all(gap <= mismatch * np.arange(s, 0, -1) / ops.scales[s] ** 2 * (1 + 1e-12))


def test_the_constant_by_hand():
    c = NetworkConstants(dim=4, sigma_0=2.0, sigma_1=3.0, delta_min=0.5, delta_max=4.0, c0=0.0)
    assert backward.mismatch_constant(c, 1.5, 0.25) == pytest.approx(0.25 * 2 + 1.5 * 4 / 2)
    # single step: tau_2 = 1, mu_w = 0
    assert backward.proposition_3_constant(SINGLE, c, 1.5, 0.25) == pytest.approx(2 * (2.25 * 2.25 + 3.5**2 * 9 * (1 / 16 + 1 / 2)))
    expected = 2 * (2.25 * weights.tail_energy(PAPER_FULL) * 2.25 + (3.5 * 2.0952381) ** 2 * 9 * (1 / 16 + 1 / 2))
    assert backward.proposition_3_constant(PAPER_FULL, c, 1.5, 0.25) == pytest.approx(expected)
    assert backward.proposition_3(SINGLE, c, 2.0, 1.5, 0.25) == pytest.approx(backward.proposition_3_constant(SINGLE, c, 1.5, 0.25) * 4 / 9)


@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
def test_any_gain(feedback):
    ops = operators(80)
    bound = backward.proposition_3_gain(feedback, constants_of(ops), Q, ops.largest(), ops.smoothness(), 80)
    assert variances(ops, feedback).max() <= bound * (1 + 1e-12)


def test_without_feedback_the_variance_grows_as_log_n_and_with_it_not():
    counts = (20, 80, 320)
    without = [variances(operators(n), NO_FEEDBACK).max() for n in counts]
    for n, value in zip(counts, without):
        assert value <= backward.uncompensated(constants_of(operators(n)), Q, GAMMA, n)
    assert np.diff(without) == pytest.approx((GAMMA * Q) ** 2 * np.log(4), rel=0.05)
    feedback = [variances(operators(n), PAPER_FULL).max() for n in counts]
    assert feedback[2] == pytest.approx(feedback[1], rel=0.02)


def test_smoothness_is_necessary():
    """Operators that flip sign from site to site: single-step feedback doubles every error, and the variance grows as log N again."""
    rough = [variances(operators(n, smooth=False), SINGLE).max() for n in (20, 80, 320)]
    assert np.diff(rough) == pytest.approx(4 * (GAMMA * Q) ** 2 * np.log(4), rel=0.1)
    assert operators(320, smooth=False).smoothness() > 4 * operators(20, smooth=False).smoothness() * 0.9


def test_what_does_not_fit_is_refused():
    ops = operators(4)
    with pytest.raises(ConfigError, match="Proposition 3 needs gain 1"):
        backward.proposition_3(PAPER, constants_of(ops), Q, 1.0, 1.0)
    with pytest.raises(ShapeError, match="scales"):
        backward.Operators(ops.turns, ops.scales[:-1])
    with pytest.raises(ConfigError, match="at least one site"):
        backward.uncompensated(constants_of(ops), Q, 1.0, 0)
