"""Theorem 1, Eq. 21 and the variance forms against simulated passes: constant, alternating, random, adversarial and arbitrary errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from echoreduce.config import NO_FEEDBACK
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory import source, stream, weights
from theory.settings import ALL, FULL_GAIN, HALF, PAPER, PAPER_FULL, SINGLE

SITES, DIM, Q = 120, 5, 0.7
SEQUENCES = {
    "constant": lambda feedback: stream.constant(SITES, DIM, Q),
    "alternating": lambda feedback: stream.alternating(SITES, DIM, Q),
    "random": lambda feedback: stream.random_sphere((SITES, DIM), Q, seed=3),
    "adversarial": lambda feedback: stream.adversarial(SITES, DIM, Q, feedback, seed=4),
}


@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_bounds_hold_and_the_closed_form_is_the_recurrence(feedback, sequence):
    injected = sequence(feedback)
    assert np.linalg.norm(injected, axis=-1) == pytest.approx(Q)
    result = stream.run(injected, feedback)
    assert result.partial == pytest.approx(stream.closed_form(injected, feedback), abs=1e-12)
    assert result.largest() <= source.source_maximum(feedback, Q, SITES) * (1 + 1e-12)
    assert source.source_maximum(feedback, Q, SITES) <= source.source_bound(feedback, Q, SITES) * (1 + 1e-12)
    if feedback in FULL_GAIN.values():
        assert result.largest() <= source.theorem_1(feedback, Q) * (1 + 1e-12)


@given(arrays(np.float64, (40, 3), elements=st.floats(-1, 1)), st.sampled_from(list(ALL.values())))
def test_bounds_hold_for_any_values(injected, feedback):
    q = np.linalg.norm(injected, axis=-1)
    result = stream.run(injected, feedback)
    assert result.partial == pytest.approx(stream.closed_form(injected, feedback), abs=1e-11)
    assert result.largest() <= source.source_maximum(feedback, q) + 1e-11
    assert result.largest() <= source.source_bound(feedback, float(q.max()), 40) + 1e-11


def test_the_constant_sequence_attains_nq_without_feedback():
    assert stream.run(stream.constant(SITES, DIM, Q), NO_FEEDBACK).largest() == pytest.approx(SITES * Q, rel=1e-12)
    assert source.source_bound(NO_FEEDBACK, Q, SITES) == SITES * Q


@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
@pytest.mark.parametrize("sequence", ["constant", "adversarial"])
def test_the_sharp_bound_is_attained(feedback, sequence):
    reached = stream.run(SEQUENCES[sequence](feedback), feedback).largest()
    assert reached == pytest.approx(source.source_maximum(feedback, Q, SITES), rel=1e-9)


@pytest.mark.parametrize("feedback", FULL_GAIN.values(), ids=FULL_GAIN)
def test_theorem_1_is_attained_in_the_limit(feedback):
    reached = stream.run(stream.constant(400, DIM, Q), feedback).largest()
    assert reached == pytest.approx(source.theorem_1(feedback, Q), rel=1e-9)


def test_random_errors_stay_far_below_the_worst_case_without_feedback():
    largest = stream.run(SEQUENCES["random"](None), NO_FEEDBACK).largest()
    assert 0.5 * np.sqrt(SITES) * Q < largest < 3.0 * np.sqrt(SITES) * Q < SITES * Q


@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
def test_variance_of_uncorrelated_errors(feedback):
    passes = 4000
    partial = stream.run(stream.random_sphere((56, passes, DIM), Q, seed=5), feedback).partial[-1]
    energy = np.sum(partial**2, axis=-1)
    expected = source.source_variance(feedback, Q, 56)
    assert energy.mean() == pytest.approx(expected, abs=4.0 * energy.std() / np.sqrt(passes) + 1e-12)
    if feedback in FULL_GAIN.values():
        assert expected <= weights.tail_energy(feedback) * Q**2 * (1 + 1e-12)


@pytest.mark.parametrize("rho", [-0.6, 0.0, 0.5, 0.9])
@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
def test_variance_of_correlated_errors(feedback, rho):
    passes, sites = 3000, 30
    partial = stream.run(stream.correlated(sites, DIM, Q, rho, seed=6, passes=passes), feedback).partial[-1]
    energy = np.sum(partial**2, axis=-1)
    expected = source.correlated_variance(feedback, Q, rho ** np.arange(sites))
    assert energy.mean() == pytest.approx(expected, abs=5.0 * energy.std() / np.sqrt(passes))


@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
def test_limits_of_the_correlated_variance(feedback):
    uncorrelated = np.eye(1, 56)[0]
    assert source.correlated_variance(feedback, Q, uncorrelated) == pytest.approx(source.source_variance(feedback, Q, 56))
    assert source.correlated_variance(feedback, Q, np.ones(56)) == pytest.approx(source.source_maximum(feedback, Q, 56) ** 2)


@given(st.floats(-0.95, 0.95))
@settings(max_examples=30)
def test_the_best_weights_return_what_can_be_predicted(rho):
    correlation = rho ** np.arange(20)
    phi = source.best_remaining(correlation)
    assert phi[:2] == pytest.approx([1.0, -rho], abs=1e-8)
    assert phi[2:] == pytest.approx(0.0, abs=1e-8)
    least = phi @ source.toeplitz(correlation) @ phi
    assert least == pytest.approx(1.0 - rho**2, abs=1e-8)
    for feedback in ALL.values():
        assert source.correlated_variance(feedback, 1.0, correlation) >= least - 1e-9


def test_two_time_scales_beat_a_single_step_only_where_errors_alternate():
    for rho in (0.0, 0.2, 0.5, 0.9):
        correlation = rho ** np.arange(56)
        assert source.correlated_variance(SINGLE, 1.0, correlation) < source.correlated_variance(PAPER_FULL, 1.0, correlation)
        assert source.correlated_variance(SINGLE, 1.0, correlation) < source.correlated_variance(PAPER, 1.0, correlation)
    alternating = (-0.6) ** np.arange(56)
    assert source.correlated_variance(PAPER_FULL, 1.0, alternating) < source.correlated_variance(SINGLE, 1.0, alternating)


def test_sites_that_send_more_bits():
    q = np.ones(50)
    q[-2:] = 1 / 17
    assert source.source_maximum(SINGLE, q) == 1.0
    injected = q[:, None] * stream.constant(50, DIM, 1.0)
    assert stream.run(injected, SINGLE).partial[-1] == pytest.approx(injected[-1], abs=1e-12)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"needs gain 1, got 0\.5"):
        source.theorem_1(HALF, Q)
    with pytest.raises(ShapeError, match="scalar"):
        source.source_maximum(PAPER, Q)
    with pytest.raises(ShapeError, match="starts with 1"):
        source.correlated_variance(PAPER, Q, [0.5, 0.1])
    with pytest.raises(ConfigError, match="rho"):
        stream.correlated(4, 2, Q, 1.5, seed=0)
