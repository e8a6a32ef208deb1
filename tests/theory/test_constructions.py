"""Proposition 2, run: growth exp(sqrt(N)) of the amplifying network, q**2 sqrt(N) of the coherent one, by fitted exponents."""

import numpy as np
import pytest

from echoreduce.config import NO_FEEDBACK
from echoreduce.theory import bounds, constructions, network, stream
from echoreduce.theory.weights import tail, weight
from theory.settings import FULL_GAIN, PAPER_FULL, SINGLE

WITH_AND_WITHOUT = {**FULL_GAIN, "none": NO_FEEDBACK}
any_setting = pytest.mark.parametrize("feedback", WITH_AND_WITHOUT.values(), ids=WITH_AND_WITHOUT)
AMPLIFYING = constructions.Amplifying(8, c=0.5)
COHERENT = constructions.Coherent(8, h=1.0)


def slope(x, y):
    """Least-squares slope of y over x."""
    return float(np.polyfit(np.asarray(x, dtype=float), np.asarray(y, dtype=float), 1)[0])


def last_exponent(counts, values):
    """p of values ~ N**p + constant, from the last three of counts that grow by a factor 4."""
    first, second = np.diff(np.asarray(values))[-2:]
    return float(np.log(second / first) / np.log(4.0))


@any_setting
@pytest.mark.parametrize("blocks", [AMPLIFYING, COHERENT], ids=["amplifying", "coherent"])
def test_the_clean_ray_and_the_jacobians_are_what_the_proof_says(blocks, feedback):
    scales = blocks.scales(12)
    clean = np.zeros((1, 8))
    clean[0, 0] = np.sqrt(8) * scales[0]
    rng = np.random.default_rng(0)
    for k in range(12):
        v = rng.standard_normal((1, 8))
        measured = (blocks.block(k, clean + 1e-6 * v) - blocks.block(k, clean - 1e-6 * v)) / 2e-6
        assert measured == pytest.approx(v @ blocks.jacobian(k).T, abs=1e-7)
        clean = clean + blocks.block(k, clean)
        assert np.linalg.norm(clean) / np.sqrt(8) == pytest.approx(scales[k + 1])
    result = constructions.run(blocks, 12, stream.random_sphere((12, 5, 8), 1e-3, seed=1), feedback)
    linear = network.propagate(
        constructions.linearize(blocks, 12), stream.run(stream.random_sphere((12, 5, 8), 1e-3, seed=1), feedback).net
    )
    assert result.linear == pytest.approx(linear, abs=1e-14)


@any_setting
def test_amplifying_mean_square_is_lemma_4(feedback):
    for sites in (1, 2, 30):
        matrices = network.coefficients(constructions.linearize(AMPLIFYING, sites), feedback)
        assert AMPLIFYING.mean_square(sites, 0.3, feedback) == pytest.approx(bounds.mean_square(matrices, 0.3), rel=1e-10)
    passes, sites = 2000, 30
    result = constructions.run(AMPLIFYING, sites, stream.random_sphere((sites, passes, 8), 0.3, seed=2), feedback)
    assert result.deviation == pytest.approx(result.linear, abs=1e-11)  # affine blocks: H_k = 0
    energy = np.sum(result.deviation**2, axis=-1)
    assert energy.mean() == pytest.approx(AMPLIFYING.mean_square(sites, 0.3, feedback), abs=4.5 * energy.std() / np.sqrt(passes))


@any_setting
def test_amplifying_network_grows_exponentially_in_sqrt_n(feedback):
    counts = 4 ** np.arange(3, 7)  # 64 .. 4096 sites
    relative = np.array([AMPLIFYING.mean_square(n, 1.0, feedback) / 8 / AMPLIFYING.sigma(n) ** 2 for n in counts])
    assert last_exponent(counts, np.log(relative)) == pytest.approx(0.5, abs=0.03)  # log E ~ N**(1/2)
    c, added = AMPLIFYING.c, AMPLIFYING.added
    rate = slope(np.sqrt(counts), np.log(relative) + (c**2 / added + 1.0) * np.log(counts))
    assert rate == pytest.approx(4 * c / np.sqrt(added), rel=0.02)  # 2 sum log(1 + c / sigma) and its logarithmic correction
    assert relative[-1] > 1e40 * relative[0]


def test_amplifying_network_satisfies_r2_and_breaks_assumption_1():
    sites = 40
    constants = network.measure(constructions.linearize(AMPLIFYING, sites))
    assert constants.c0 == pytest.approx(AMPLIFYING.c**2 / AMPLIFYING.dim / AMPLIFYING.added)
    assert constants.budget >= AMPLIFYING.budget(sites) > 1.0
    counts = 4 ** np.arange(3, 9)
    budgets = np.array([AMPLIFYING.budget(int(n)) for n in counts])
    assert last_exponent(counts, budgets) == pytest.approx(0.5, abs=0.02)
    assert np.diff(budgets)[-1] / np.diff(np.sqrt(counts))[-1] == pytest.approx(4 * AMPLIFYING.c, rel=0.05)  # 2 c sum 1 / sigma


def second_order(sites, q_bar, feedback, injections):
    """Root mean square of the second-order part, per entry in units of sigma_N."""
    q = q_bar * np.sqrt(8) * COHERENT.sigma(1)
    result = constructions.run(COHERENT, sites, stream.random_sphere((injections, 16, 8), q, seed=3), feedback)
    return float(np.sqrt(np.mean(np.sum(result.second_order**2, axis=-1)) / 8) / COHERENT.sigma(sites))


@any_setting
@pytest.mark.parametrize("everywhere", [False, True], ids=["one injection", "injections everywhere"])
def test_coherent_network_grows_as_q_squared_sqrt_n(feedback, everywhere):
    counts = np.array([128, 512, 2048])
    values = np.array([second_order(n, 1e-3, feedback, n if everywhere else 1) for n in counts])
    exponent = last_exponent(counts, values)
    if everywhere and feedback is NO_FEEDBACK:
        assert 0.55 < exponent < 0.85  # ||E||**2 itself grows as log N (Remark 2), on top of sqrt(N)
    else:
        assert exponent == pytest.approx(0.5, abs=0.06)
    strengths = np.array([1e-4, 3e-4, 1e-3])
    by_strength = [second_order(64, float(s), feedback, 64 if everywhere else 1) for s in strengths]
    assert slope(np.log(strengths), np.log(by_strength)) == pytest.approx(2.0, abs=0.02)


def test_the_second_order_response_of_a_block_is_the_proofs():
    """h / (2 sigma_k**2 sqrt(d)) ||Pi E||**2 along f for a deviation E that is orthogonal to e_0 and f."""
    deviation = np.zeros((1, 8))
    deviation[0, 2:] = 1e-3
    for k in (0, 3):
        clean = np.zeros((1, 8))
        clean[0, 0] = np.sqrt(8) * COHERENT.sigma(k)
        response = COHERENT.block(k, clean + deviation) - COHERENT.block(k, clean)
        expected = COHERENT.h / (2 * COHERENT.sigma(k) ** 2 * np.sqrt(8)) * np.sum(deviation**2)
        assert response[0, 1] == pytest.approx(expected, rel=1e-5)


def test_coherent_network_satisfies_assumption_1_with_no_budget():
    net = constructions.linearize(COHERENT, 40)
    exact, measured = COHERENT.constants(40), network.measure(net)
    assert measured.budget == pytest.approx(0.0, abs=1e-12)
    for name in ("dim", "sigma_0", "sigma_1", "delta_min", "delta_max", "c0"):
        assert getattr(measured, name) == pytest.approx(getattr(exact, name))
    for k, jacobian in enumerate(net.jacobians):
        step = np.eye(8) + jacobian
        assert np.linalg.eigvalsh(step.T @ step).max() <= (net.scales[k + 1] / net.scales[k]) ** 2 * (1 + 1e-12)


@pytest.mark.parametrize("feedback", [PAPER_FULL, SINGLE], ids=["paper-full", "single"])
def test_a_single_injection_is_carried_with_g_k(feedback):
    """The closed form of the proof: Pi E_k^lin = sigma_k g_k Pi delta_0, and along e_0 only the tail remains."""
    sites = 20
    delta = stream.random_sphere((1, 3, 8), 1e-3, seed=4)
    linear = constructions.run(COHERENT, sites, delta, feedback).linear
    sigma = COHERENT.scales(sites)
    age = np.arange(1, sites)
    g = 1 / sigma[1] - np.sum(weight(feedback, age - 1) / sigma[age + 1])
    by_parts = tail(feedback, sites - 1) / sigma[sites] + np.sum(tail(feedback, age - 1) * (1 / sigma[age] - 1 / sigma[age + 1]))
    assert g == pytest.approx(float(by_parts))
    assert linear[:, 1:] == pytest.approx(sigma[sites] * g * delta[0, :, 1:], abs=1e-15)
    assert linear[:, 0] == pytest.approx(tail(feedback, sites - 1) * delta[0, :, 0], abs=1e-15)
