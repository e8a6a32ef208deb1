"""Lemmas 4 to 6, Theorem 2, Corollary 1 and Remark 2: Monte Carlo on random networks whose C_0 and Lambda are computed, not assumed."""

from functools import cache

import numpy as np
import pytest

from echoreduce.config import NO_FEEDBACK
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory import bounds, constructions, network, stream
from echoreduce.theory.weights import mean_age, tail_energy
from theory.settings import ALL, FULL_GAIN, PAPER, PAPER_FULL, SINGLE

Q, PASSES = 0.05, 2000
NETWORKS = {
    "weak": network.random_network(24, 16, strength=0.4, seed=0),
    "strong": network.random_network(24, 16, strength=1.5, seed=1),
    "narrow": network.random_network(60, 4, strength=0.8, seed=2, start=0.5),
    "critical": constructions.linearize(constructions.Coherent(8, h=0.0), 40),
}
CONSTANTS = {name: network.measure(net) for name, net in NETWORKS.items()}
grid = pytest.mark.parametrize("name", NETWORKS)
full_gain = pytest.mark.parametrize("feedback", FULL_GAIN.values(), ids=FULL_GAIN)
any_gain = pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)


@cache
def relative_energies(name, feedback):
    """||E_N^lin||**2 / (d sigma_N**2) of each pass."""
    return energies(name, feedback, noise(name))


def energies(name, feedback, injected):
    net = NETWORKS[name]
    deviation = network.propagate(net, stream.run(injected, feedback).net)
    return np.sum(deviation**2, axis=-1) / net.dim / net.scales[-1] ** 2


@cache
def noise(name):
    net = NETWORKS[name]
    return stream.random_sphere((net.sites, PASSES, net.dim), Q, seed=3)


def exact(name, feedback, q=Q):
    net = NETWORKS[name]
    return bounds.mean_square(network.coefficients(net, feedback), q) / net.dim / net.scales[-1] ** 2


@grid
@any_gain
def test_lemma_4_is_an_equality_for_isotropic_errors(name, feedback):
    energy = relative_energies(name, feedback)
    assert energy.mean() == pytest.approx(exact(name, feedback), abs=4.5 * energy.std() / np.sqrt(PASSES))


def test_lemma_4_with_one_bound_a_site():
    net = NETWORKS["weak"]
    q = np.linspace(1.0, 0.1, net.sites) * Q
    energy = energies("weak", SINGLE, noise("weak") * (q / Q)[:, None, None])
    assert energy.mean() == pytest.approx(exact("weak", SINGLE, q), abs=4.5 * energy.std() / np.sqrt(PASSES))


@grid
def test_lemmas_5_and_6(name):
    net, constants = NETWORKS[name], CONSTANTS[name]
    sources = network.propagated_jacobians(net)
    assert np.sum(sources**2) / net.dim <= bounds.propagated_sources(constants, net.scales[-1])
    for t, source in enumerate(sources):
        start = float(np.sum(net.jacobians[t + 1] ** 2))
        assert np.sum(source**2) <= bounds.propagated(constants, start, net.scales[t + 2], net.scales[-1]) * (1 + 1e-12)


@grid
@full_gain
def test_theorem_2_in_mean_square(name, feedback):
    constants, end = CONSTANTS[name], NETWORKS[name].scales[-1]
    sharp, paper = (f(feedback, constants, Q, end) for f in (bounds.theorem_2_mean_sharp, bounds.theorem_2_mean))
    measured = relative_energies(name, feedback).mean()
    assert measured <= sharp <= paper
    assert exact(name, feedback) <= sharp


@grid
@full_gain
@pytest.mark.parametrize("p", [0.5, 0.05, 0.005])
def test_theorem_2_in_probability(name, feedback, p):
    constants, end = CONSTANTS[name], NETWORKS[name].scales[-1]
    energy = relative_energies(name, feedback)
    assert np.mean(energy > bounds.theorem_2_tail(feedback, constants, Q, end, p)) <= p
    assert np.mean(energy > bounds.tail_from_mean(exact(name, feedback), p)) <= p + 3 * np.sqrt(p / PASSES)


@full_gain
def test_the_constants_of_theorem_2_are_the_papers(feedback):
    c = bounds.NetworkConstants(dim=9, sigma_0=1.0, sigma_1=2.0, delta_min=0.5, delta_max=4.0, c0=0.25, budget=np.log(4.0))
    mean, tau = 1.0 + mean_age(feedback), tail_energy(feedback)
    assert c.relative_step(3.0) == pytest.approx(0.5)
    assert bounds.theorem_2_mean(feedback, c, 3.0, 8.0) == pytest.approx(2 * (tau / 16 + mean**2) * 0.25)
    first, second = bounds.tail_constants(feedback, c, 8.0)
    assert first == pytest.approx(8 * (tau / 16 + mean**2))
    assert second == pytest.approx(8 / 9 * (0.25 + mean * 3.0) ** 2)  # sqrt(9 * 4 * 0.25 * 4) / 2 = 3
    prefix = bounds.tail_constants(feedback, c)
    assert prefix == pytest.approx((8 * (tau + mean**2), 8 / 9 * (1 + mean * 3.0) ** 2))
    tail = bounds.theorem_2_tail(feedback, c, 3.0, 8.0, 0.1)
    assert tail == pytest.approx(0.25 * (first * np.log(20) + second * np.log(20) ** 2))


@grid
def test_single_step_saves_the_factor_two_and_the_kernel(name):
    constants, end = CONSTANTS[name], NETWORKS[name].scales[-1]
    single = bounds.theorem_2_mean_sharp(SINGLE, constants, Q, end)
    assert exact(name, SINGLE) <= single
    assert single == pytest.approx(bounds.theorem_2_mean(SINGLE, constants, Q, end) / 2)
    assert single < bounds.theorem_2_mean(PAPER_FULL, constants, Q, end) / 2.5


@pytest.mark.parametrize("c0", [0.5, 1.0, 2.0])
def test_the_single_step_bound_is_attained(c0):
    """Scaled rotations I + J_k = sigma_{k+1}/sigma_k R: Assumption 1 and R2 with equality at every site, Lambda = 0."""
    sites, scales = 400, np.sqrt(1.0 + np.arange(401.0))
    ratio = scales[1:] / scales[:-1]
    cosine = (1 + ratio**2 - c0 * (ratio**2 - 1)) / (2 * ratio)
    sine = np.sqrt(1 - cosine**2)
    turns = np.array([[cosine, -sine], [sine, cosine]]).transpose(2, 0, 1)
    net = network.LinearNetwork(ratio[:, None, None] * turns - np.eye(2), scales)
    constants = network.measure(net.prefix(40))
    assert constants.c0 == pytest.approx(c0)
    assert constants.budget == pytest.approx(0.0, abs=1e-12)
    relative = bounds.mean_square(network.coefficients(net, SINGLE), Q) / 2 / scales[-1] ** 2
    rest = (scales[1] / scales[-1]) ** 2  # Lemma 6 drops the end of its telescoping sum
    q_bar = constants.relative_step(Q)
    assert relative == pytest.approx((rest + c0 * (1 - rest)) * q_bar**2, rel=1e-9)
    assert bounds.theorem_2_mean_sharp(SINGLE, constants, Q, scales[-1]) == pytest.approx(relative, rel=3 / sites)


@grid
@any_gain
def test_corollary_1(name, feedback):
    constants, scales = CONSTANTS[name], NETWORKS[name].scales
    sharp, paper = (f(feedback, constants, Q, scales) for f in (bounds.corollary_1_sharp, bounds.corollary_1))
    assert exact(name, feedback) <= sharp <= paper * (1 + 1e-12)


@grid
def test_the_ends_of_corollary_1(name):
    constants, scales = CONSTANTS[name], NETWORKS[name].scales
    without = bounds.remark_2(constants, Q, scales)
    full = bounds.theorem_2_mean(PAPER_FULL, constants, Q, scales[-1])
    assert bounds.corollary_1(NO_FEEDBACK, constants, Q, scales) == pytest.approx(2 * without)
    assert bounds.corollary_1_sharp(NO_FEEDBACK, constants, Q, scales) == pytest.approx(without)
    assert bounds.corollary_1(PAPER_FULL, constants, Q, scales) == pytest.approx(2 * full)
    at_paper = bounds.corollary_1(PAPER, constants, Q, scales)
    assert at_paper == pytest.approx(2 * 0.75**2 * full + without / 8)


@grid
def test_remark_2(name):
    net, constants = NETWORKS[name], CONSTANTS[name]
    bound = bounds.remark_2(constants, Q, net.scales)
    assert exact(name, NO_FEEDBACK) <= bound * (1 + 1e-12)
    assert bound <= bounds.remark_2_log(constants, Q, net.sites) * (1 + 1e-12)


def test_remark_2_is_attained_by_the_critical_network():
    """log N without compensation, bounded with it, in one and the same network."""
    dim, counts = 8, np.array([8, 32, 128, 512])
    blocks = constructions.Coherent(dim, h=0.0)
    without, single = [], []
    for sites in counts:
        net = constructions.linearize(blocks, int(sites))
        constants = blocks.constants(int(sites))
        share = dim * net.scales[-1] ** 2
        without.append(bounds.mean_square(network.coefficients(net, NO_FEEDBACK), Q) / share)
        single.append(bounds.mean_square(network.coefficients(net, SINGLE), Q) / share)
        bound = bounds.remark_2(constants, Q, net.scales)
        radial = Q**2 * sites / dim**2 / net.scales[-1] ** 2  # the ray's own direction is not propagated
        assert without[-1] == pytest.approx(bound * (dim - 1) / dim + radial, rel=1e-9)
        assert single[-1] <= bounds.theorem_2_mean(SINGLE, constants, Q, net.scales[-1])
    steps = np.diff(without) / np.diff(np.log(counts))
    assert steps == pytest.approx(steps[-1], rel=0.15)  # linear in log N
    assert without[-1] > 2.5 * without[0]
    assert max(single) == single[0]


@grid
def test_advantage_is_the_ratio_of_the_two_bounds_site_by_site(name):
    net, constants = NETWORKS[name], CONSTANTS[name]
    factor = bounds.advantage(PAPER_FULL, constants, net.scales)
    energy = net.scales**2
    compensated = 2 * 2.0952381**2 * constants.c0 * (1 / energy[1:-1] - 1 / energy[2:])
    assert factor == pytest.approx(compensated * energy[2:], rel=1e-6)
    assert factor[-1] < factor[0]


def test_what_does_not_fit_is_refused():
    constants = CONSTANTS["weak"]
    with pytest.raises(ConfigError, match=r"Theorem 2 needs gain 1, got 0\.75"):
        bounds.theorem_2_mean(PAPER, constants, Q, 5.0)
    with pytest.raises(ConfigError, match="p must lie"):
        bounds.theorem_2_tail(PAPER_FULL, constants, Q, 5.0, 1.0)
    with pytest.raises(ConfigError, match="R1 needs"):
        bounds.NetworkConstants(4, 1.0, 1.0, 0.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="positive"):
        bounds.NetworkConstants(0, 1.0, 1.0, 0.5, 1.0, 1.0)
    with pytest.raises(ConfigError, match="negative"):
        bounds.NetworkConstants(4, 1.0, 1.0, 0.5, 1.0, -1.0)
    with pytest.raises(ShapeError, match="sigma_0"):
        bounds.remark_2(constants, Q, [1.0])
