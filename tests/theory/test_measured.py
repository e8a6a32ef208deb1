"""Bounds from measured energies agree with those from matrices, need no R1, and are never below what they bound."""

from __future__ import annotations

import numpy as np
import pytest

from echoreduce import FeedbackConfig, preset
from echoreduce.config import NO_FEEDBACK
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory import bounds, measured
from echoreduce.theory import network as matrices
from echoreduce.theory.network import LinearNetwork, coefficients, random_network
from echoreduce.theory.weights import Array

SETTINGS = {
    "single step": FeedbackConfig(),
    "paper, gain 1": FeedbackConfig(residual="group", gain=1.0, decays=(0.7, 0.3)),
    "paper": preset("paper").feedback,
    "none": NO_FEEDBACK,
}


def product(network: LinearNetwork, end: int, start: int) -> Array:
    """Phi_{end,start}."""
    result = np.eye(network.dim)
    for jacobian in network.jacobians[start:end]:
        result = (np.eye(network.dim) + jacobian) @ result
    return result


def energies(network: LinearNetwork) -> tuple[Array, Array]:
    """||Phi_{k,j}||_F**2 / d and ||Phi_{k,j+1} J_j||_F**2 / d from the matrices."""
    sites = network.sites
    first, second = np.zeros((sites + 1, sites + 1)), np.zeros((sites + 1, sites + 1))
    for j in range(1, sites + 1):
        for k in range(j, sites + 1):
            first[j, k] = np.sum(product(network, k, j) ** 2) / network.dim
            if k > j:
                second[j, k] = np.sum((product(network, k, j + 1) @ network.jacobians[j]) ** 2) / network.dim
    return first, second


def measure(network: LinearNetwork) -> measured.MeasuredNetwork:
    first, second = energies(network)
    scales = network.scales
    epsilon = measured.reinforcement(first, second, scales)
    jacobian = np.sum(network.jacobians**2, axis=(1, 2)) / network.dim
    return measured.MeasuredNetwork(network.dim, scales, jacobian, epsilon, measured.endpoint_budget(first, second, scales))


@pytest.mark.parametrize("seed", range(3))
def test_constants_are_those_of_the_matrices(seed: int) -> None:
    network = random_network(9, 7, 1.2, seed)
    found, exact = measure(network), matrices.measure(network)
    assert found.reinforcement == pytest.approx(matrices.reinforcement(network))
    assert found.budget == pytest.approx(exact.budget)
    assert found.constants().c0 == pytest.approx(exact.c0)
    assert found.constants().delta_min == pytest.approx(exact.delta_min)
    assert 0 < found.spread <= exact.c0
    assert found.arriving <= found.budget + 1e-12


def test_a_network_that_grows_as_its_scales_has_no_reinforcement() -> None:
    scales = np.array([1.0, 1.5, 2.5, 2.6, 4.0])
    jacobians = (scales[1:] / scales[:-1] - 1.0)[:, None, None] * np.eye(5)
    found = measure(LinearNetwork(jacobians, scales))
    assert found.reinforcement == pytest.approx(np.zeros(4), abs=1e-12)
    assert found.arriving == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_returned_shares_are_lemma_3_before_summation_by_parts(name: str) -> None:
    network = random_network(8, 6, 1.0, 4)
    shares = measured.returned(SETTINGS[name], 8)
    expected = coefficients(network, SETTINGS[name])
    for s in range(8):
        found = sum(shares[m] * product(network, 8, s + 1 + m) for m in range(8 - s))
        assert found == pytest.approx(expected[s], abs=1e-10)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("falling", [False, True])
def test_bounds_hold_with_and_without_r1(name: str, falling: bool) -> None:
    network = random_network(10, 8, 1.1, 7)
    if falling:
        scales = network.scales.copy()
        scales[6:] *= 0.5
        network = LinearNetwork(network.jacobians, scales)
    found = measure(network)
    feedback, q = SETTINGS[name], np.linspace(0.5, 2.0, 10)
    exact = bounds.mean_square(coefficients(network, feedback), q) / (network.dim * network.scales[-1] ** 2)
    by_site = measured.mean_by_site(feedback, network=found, q=q, budget=found.arriving)
    assert exact <= by_site * (1 + 1e-12)
    assert by_site <= measured.mean_by_site(feedback, found, q, found.budget) * (1 + 1e-12)
    whole = measured.mean(feedback, found, 2.0, found.arriving)
    assert exact <= whole <= measured.mean(feedback, found, 2.0, found.budget) * (1 + 1e-12)
    if falling:
        with pytest.raises(ConfigError, match="R1"):
            found.constants()
    else:
        assert measured.mean(feedback, found, 2.0, found.budget) <= bounds.corollary_1_sharp(
            feedback, found.constants(), 2.0, found.scales
        ) * (1 + 1e-12)


def test_single_step_by_site_is_exact_where_the_network_is_critical() -> None:
    scales = np.sqrt(1.0 + np.arange(7.0))
    jacobians = (scales[1:] / scales[:-1] - 1.0)[:, None, None] * np.eye(3)
    network = LinearNetwork(jacobians, scales)
    q = np.array([1.0, 3.0, 1.0, 0.5, 2.0, 1.0])
    exact = bounds.mean_square(coefficients(network, FeedbackConfig()), q) / (3 * scales[-1] ** 2)
    assert measured.mean_by_site(FeedbackConfig(), measure(network), q, 0.0) == pytest.approx(exact)


def test_tail_needs_full_gain_and_grows_as_p_falls() -> None:
    found = measure(random_network(6, 5, 1.0, 1))
    assert measured.tail(FeedbackConfig(), found, 1.0, 0.1, 0.01) > measured.tail(FeedbackConfig(), found, 1.0, 0.1, 0.1)
    assert measured.tail(FeedbackConfig(), found, 1.0, 0.1, 0.5) > measured.mean(FeedbackConfig(), found, 1.0, 0.1)
    with pytest.raises(ConfigError, match="gain 1"):
        measured.tail(preset("paper").feedback, found, 1.0, 0.1, 0.1)


def test_source_energy_and_second_order() -> None:
    assert measured.source_energy(NO_FEEDBACK, [1.0, 2.0, 3.0]) == pytest.approx(14.0)
    assert measured.source_energy(FeedbackConfig(), [1.0, 2.0, 3.0]) == pytest.approx(9.0)
    flat = measured.MeasuredNetwork(4, np.array([1.0, 1.0, 2.0]), np.zeros(2), np.zeros(2), 0.0)
    assert measured.second_order(flat, [3.0, 5.0]) == pytest.approx(2.0 * (3.0 + 2.5))
    with pytest.raises(ShapeError, match="scales"):
        measured.MeasuredNetwork(4, np.ones(3), np.zeros(3), np.zeros(2), 0.0)
