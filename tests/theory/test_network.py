"""The linearized network three ways, and the constants that its Jacobians give."""

import numpy as np
import pytest

from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory import network, stream
from theory.settings import ALL, SINGLE

SITES, DIM = 24, 16
NETWORK = network.random_network(SITES, DIM, strength=0.8, seed=0)
RNG = np.random.default_rng(1)


@pytest.mark.parametrize("sites", [1, 2, 3, SITES])
@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
def test_lemma_2_and_lemma_3_are_direct_propagation(feedback, sites):
    part = NETWORK.prefix(sites)
    result = stream.run(RNG.standard_normal((sites, 7, DIM)), feedback)
    direct = network.propagate(part, result.net)
    assert network.from_partial_sums(part, result.partial) == pytest.approx(direct, abs=1e-10)
    assert network.from_injected(network.coefficients(part, feedback), result.injected) == pytest.approx(direct, abs=1e-10)
    assert np.abs(direct).max() > 0.1


def test_single_step_coefficients_are_one_propagated_jacobian_each():
    matrices = network.coefficients(NETWORK, SINGLE)
    assert matrices[-1] == pytest.approx(np.eye(DIM), abs=1e-12)
    assert matrices[:-1] == pytest.approx(network.propagated_jacobians(NETWORK), abs=1e-12)


def test_propagated_jacobians_by_plain_products():
    sources = network.propagated_jacobians(NETWORK)
    for t in (0, 5, SITES - 2):
        product = np.eye(DIM)
        for k in range(t + 2, SITES):
            product = (np.eye(DIM) + NETWORK.jacobians[k]) @ product
        assert sources[t] == pytest.approx(product @ NETWORK.jacobians[t + 1], abs=1e-10)


def test_constants_are_the_smallest_that_satisfy_r1_r2_and_assumption_1():
    constants = network.measure(NETWORK)
    energy = NETWORK.scales**2
    added = np.diff(energy)
    frobenius = np.sum(NETWORK.jacobians**2, axis=(1, 2)) / DIM
    assert np.all(frobenius[1:] <= constants.c0 * added[1:] / energy[1:-1] * (1 + 1e-12))
    assert np.any(frobenius[1:] >= constants.c0 * added[1:] / energy[1:-1] * (1 - 1e-12))
    assert (constants.delta_min, constants.delta_max) == (added.min(), added.max())
    epsilon = network.reinforcement(NETWORK)
    assert constants.budget == pytest.approx(epsilon.sum())
    assert 0.0 < constants.budget < 2.0
    for last in (3, SITES - 1):  # every isotropic injection before site `last`, by plain products
        allowed = (1 + epsilon[last]) * energy[last + 1] / energy[last]
        for s in range(last):
            carried = np.eye(DIM)
            for k in range(s + 1, last):
                carried = (np.eye(DIM) + NETWORK.jacobians[k]) @ carried
            after = carried + NETWORK.jacobians[last] @ carried
            assert np.sum(after**2) <= allowed * np.sum(carried**2) * (1 + 1e-12)


def test_reinforcement_is_the_maximum_over_both_collections():
    epsilon = network.reinforcement(NETWORK)
    assert epsilon[0] == 0.0
    steps = np.eye(DIM) + NETWORK.jacobians
    for k in range(1, 8):
        members = [np.linalg.multi_dot([*steps[k - 1 : first - 1 : -1], np.eye(DIM), np.eye(DIM)]) for first in range(1, k + 1)]
        members += [np.linalg.multi_dot([*steps[k - 1 : t + 1 : -1], np.eye(DIM), NETWORK.jacobians[t + 1]]) for t in range(k - 1)]
        ratio = max(np.sum((steps[k] @ a) ** 2) / np.sum(a**2) for a in members)
        assert epsilon[k] == pytest.approx(max(0.0, ratio * (NETWORK.scales[k] / NETWORK.scales[k + 1]) ** 2 - 1))


def test_convex_combinations_need_no_larger_epsilon():
    epsilon = network.reinforcement(NETWORK)
    k = 6
    members = [np.eye(DIM)]
    for site in range(k - 1, 0, -1):
        members.append(members[-1] @ (np.eye(DIM) + NETWORK.jacobians[site]))
    for share in RNG.dirichlet(np.ones(len(members)), size=20):
        covariance = sum(w * m @ m.T / np.trace(m @ m.T) for w, m in zip(share, members))
        step = np.eye(DIM) + NETWORK.jacobians[k]
        allowed = (1 + epsilon[k]) * (NETWORK.scales[k + 1] / NETWORK.scales[k]) ** 2
        assert np.trace(step @ covariance @ step.T) <= allowed * (1 + 1e-12)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"\[N \+ 1\]"):
        network.LinearNetwork(np.zeros((4, 2, 2)), np.ones(4))
    with pytest.raises(ConfigError, match="R1 needs"):
        network.measure(network.LinearNetwork(np.zeros((4, 2, 2)), np.ones(5)))
