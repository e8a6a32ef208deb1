"""Proposition 1 and Corollary 2 on the coherent network, whose constants are known exactly (Lambda = 0 for every covariance)."""

import numpy as np
import pytest

from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory import constructions, remainder, stream
from echoreduce.theory.bounds import NetworkConstants, tail_constants
from theory.settings import FULL_GAIN, PAPER, PAPER_FULL, SINGLE

BLOCKS = constructions.Coherent(8, h=1.0)
PASSES, P = 300, 0.1
full_gain = pytest.mark.parametrize("feedback", FULL_GAIN.values(), ids=FULL_GAIN)


def passes(sites, q_bar, feedback, limit=np.inf):
    q = q_bar * np.sqrt(BLOCKS.dim) * BLOCKS.sigma(1)
    injected = stream.random_sphere((sites, PASSES, BLOCKS.dim), q, seed=sites)
    return q, constructions.run(BLOCKS, sites, injected, feedback, limit)


def norm(vectors):
    """Root mean square norm over the passes."""
    return float(np.sqrt(np.mean(np.sum(vectors**2, axis=-1))))


def test_the_second_derivatives_behind_h_bar():
    """Finite differences of n and of ||Pi n||**2 never exceed 2 / (sqrt(3) r**2) and 2 / r**2, and come close."""
    rng = np.random.default_rng(0)
    step, largest = 1e-3, np.zeros(2)
    for _ in range(2000):
        x, v = rng.standard_normal((2, 3))
        v /= np.linalg.norm(v)
        radius = np.linalg.norm(x)
        unit = [(x + t * v) / np.linalg.norm(x + t * v) for t in (-step * radius, 0.0, step * radius)]
        flat = [np.sum(u[1:] ** 2) for u in unit]
        largest[0] = max(largest[0], np.linalg.norm(unit[0] - 2 * unit[1] + unit[2]) / step**2)
        largest[1] = max(largest[1], abs(flat[0] - 2 * flat[1] + flat[2]) / step**2)
    assert np.all(largest <= np.array([2 / np.sqrt(3), 2.0]) * (1 + 1e-4))
    assert np.all(largest >= 0.97 * np.array([2 / np.sqrt(3), 2.0]))


@full_gain
@pytest.mark.parametrize("sites", [8, 64])
def test_first_and_second_order_are_the_whole_deviation(feedback, sites):
    _, result = passes(sites, 0.02, feedback)
    assert result.linear + result.second_order == pytest.approx(result.deviation, abs=1e-12)
    assert norm(result.second_order) > 1e-6


@full_gain
@pytest.mark.parametrize("sites", [8, 64])
@pytest.mark.parametrize("q_bar", [3e-3, 3e-4])
def test_proposition_1(feedback, sites, q_bar):
    q = q_bar * np.sqrt(BLOCKS.dim) * BLOCKS.sigma(1)
    kappa = np.sqrt(remainder.kappa_squared(feedback, BLOCKS.constants(sites), sites, P))
    assert 2 * kappa * q_bar < 0.9, "the segment reaches the origin: R3 does not hold"
    constants = BLOCKS.constants(sites, nearest=1 - 2 * kappa * q_bar)
    limit = 2 * kappa * q_bar * np.sqrt(BLOCKS.dim)
    scales = BLOCKS.scales(sites)
    threshold = remainder.threshold(feedback, constants, q, scales, sites, P)
    assert limit * scales == pytest.approx(2 * threshold)
    _, result = passes(sites, q_bar, feedback, limit)
    sharp = remainder.proposition_1_sharp(feedback, constants, q, scales, sites, P)
    assert norm(result.second_order) <= sharp <= remainder.proposition_1(feedback, constants, q, scales[-1], sites, P)
    assert result.stopped <= remainder.truncation_probability(feedback, constants, q, sites, P)


@full_gain
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_the_step_of_the_proof_at_a_measured_limit(feedback, share):
    """With the largest deviation that occurs as the limit the bound is within two orders; with less, passes stop and it still holds."""
    sites = 64
    limit = share * passes(sites, 0.01, feedback)[1].largest.max()
    _, result = passes(sites, 0.01, feedback, limit)
    constants = BLOCKS.constants(sites, nearest=1 - limit / np.sqrt(BLOCKS.dim))
    bound = remainder.stopped_remainder(constants, float(limit), BLOCKS.scales(sites))
    assert (result.stopped > 0) == (share < 1)
    assert norm(result.second_order) <= bound
    if share == 1:
        assert norm(result.second_order) > bound / 100


@full_gain
def test_each_remainder_obeys_r3(feedback):
    sites = 32
    _, result = passes(sites, 0.02, feedback)
    limit = result.largest.max()
    curvature = BLOCKS.constants(sites, nearest=1 - limit / np.sqrt(BLOCKS.dim)).curvature
    assert np.all(result.remainders <= curvature * limit**2 / (2 * np.sqrt(BLOCKS.dim)))


@full_gain
def test_corollary_2(feedback):
    sites = 64
    q, result = passes(sites, 0.005, feedback)
    constants, scales = BLOCKS.constants(sites), BLOCKS.scales(sites)
    budget = remainder.second_order_budget(result.remainders, constants, q, scales)
    bound = remainder.corollary_2(constants, q, scales[-1], budget)
    assert norm(result.second_order) <= bound
    assert bound < 2 * norm(result.second_order)  # coherent responses: Minkowski is nearly an equality


@full_gain
def test_c_2_by_hand(feedback):
    c = NetworkConstants(dim=4, sigma_0=1.0, sigma_1=2.0, delta_min=0.5, delta_max=4.0, c0=0.25, budget=np.log(4.0), curvature=3.0)
    first, second = tail_constants(feedback, c)
    level = np.log(2 * 10 / 0.1)
    kappa = first * level + second * level**2
    assert remainder.kappa_squared(feedback, c, 10, 0.1) == pytest.approx(kappa)
    assert remainder.second_order_constant(feedback, c, 10, 0.1) == pytest.approx(4 * 3 * 2 * (2 + 2) / 0.5 * kappa)
    bound = remainder.proposition_1(feedback, c, 0.4, 7.0, 10, 0.1)
    assert bound == pytest.approx(192 * kappa * 0.1**2 * np.sqrt(10) * 2 * 7)


def test_truncation_becomes_unlikely_as_the_errors_shrink():
    constants = BLOCKS.constants(20)
    chances = [remainder.truncation_probability(SINGLE, constants, q, 20, P) for q in (1.0, 1e-4, 1e-5)]
    assert chances[0] == 1.0
    assert P < chances[2] < chances[1] < 1.0
    assert chances[2] == pytest.approx(P, rel=0.05)


def test_what_does_not_fit_is_refused():
    constants = BLOCKS.constants(5)
    with pytest.raises(ConfigError, match="needs gain 1"):
        remainder.kappa_squared(PAPER, constants, 5, P)
    with pytest.raises(ConfigError, match="at least one site"):
        remainder.kappa_squared(SINGLE, constants, 0, P)
    with pytest.raises(ShapeError, match=r"\[6\]"):
        remainder.proposition_1_sharp(PAPER_FULL, constants, 1.0, np.ones(5), 5, P)
    with pytest.raises(ShapeError, match="4 scales"):
        remainder.second_order_budget([1.0, 2.0, 3.0], constants, 1.0, np.ones(3))
