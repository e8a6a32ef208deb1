"""Closed forms of the weights against truncated series, and the paper's own figures."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echoreduce.config import NO_FEEDBACK, FeedbackConfig
from echoreduce.errors import ConfigError
from echoreduce.theory import weights
from theory.settings import ALL, FULL_GAIN, PAPER, PAPER_FULL, SINGLE

AGES = np.arange(2000)
configs = st.builds(
    FeedbackConfig,
    gain=st.floats(0.0, 1.0),
    blend=st.floats(0.0, 1.0),
    decays=st.tuples(st.floats(0.0, 0.97), st.floats(0.0, 0.97)),
)


def test_the_papers_figures():
    assert weights.mean_age(PAPER) == pytest.approx(1.0952, abs=5e-5)
    assert weights.tail_energy(PAPER) == pytest.approx(1.2804, abs=5e-5)
    assert weights.remaining_energy(PAPER, 56) == pytest.approx(5.006, abs=5e-4)
    assert weights.remaining_energy(NO_FEEDBACK, 56) == 56.0
    assert 56 / (1 + weights.mean_age(PAPER)) == pytest.approx(27, abs=0.5)  # "about 27 at N = 56"


def test_single_step_returns_everything_at_the_next_site():
    assert weights.weight(SINGLE, [0, 1, 2]).tolist() == [1.0, 0.0, 0.0]
    assert weights.tail(SINGLE, [0, 1, 2]).tolist() == [1.0, 0.0, 0.0]
    assert weights.mean_age(SINGLE) == 0.0
    assert weights.tail_energy(SINGLE) == weights.tail_sum(SINGLE) == weights.remaining_energy(SINGLE, 1000) == 1.0


@given(configs)
def test_sums_are_the_series_they_stand_for(feedback):
    w, tails, phi = (f(feedback, AGES) for f in (weights.weight, weights.tail, weights.remaining))
    assert w.sum() == pytest.approx(1.0, abs=1e-9)
    assert tails == pytest.approx(w[::-1].cumsum()[::-1], abs=1e-9)
    assert phi[1:] == pytest.approx(1.0 - weights.effective_gain(feedback) * w.cumsum()[:-1], abs=1e-9)
    assert weights.mean_age(feedback) == pytest.approx((AGES * w).sum(), rel=1e-9, abs=1e-12)
    assert weights.tail_sum(feedback) == pytest.approx(1.0 + weights.mean_age(feedback), rel=1e-12)
    assert weights.tail_sum(feedback) == pytest.approx(tails.sum(), rel=1e-9)
    assert weights.tail_energy(feedback) == pytest.approx((tails**2).sum(), rel=1e-9)


@given(configs, st.integers(0, 300))
def test_finite_sums(feedback, sites):
    tails, phi = weights.tail(feedback, np.arange(sites)), weights.remaining(feedback, np.arange(sites))
    assert weights.tail_sum(feedback, sites) == pytest.approx(tails.sum(), rel=1e-9, abs=1e-12)
    assert weights.tail_energy(feedback, sites) == pytest.approx((tails**2).sum(), rel=1e-9, abs=1e-12)
    assert weights.remaining_sum(feedback, sites) == pytest.approx(phi.sum(), rel=1e-9, abs=1e-12)
    assert weights.remaining_energy(feedback, sites) == pytest.approx((phi**2).sum(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("feedback", FULL_GAIN.values(), ids=FULL_GAIN)
def test_response_is_the_spectrum_of_the_tails(feedback):
    frequency = np.linspace(0, 2 * np.pi, 512, endpoint=False)
    series = np.exp(-1j * np.outer(frequency, AGES[:400])) @ weights.tail(feedback, AGES[:400])
    response = weights.response(feedback, frequency)
    assert response == pytest.approx(series, abs=1e-9)
    assert np.mean(np.abs(response) ** 2) == pytest.approx(weights.tail_energy(feedback), rel=1e-9)
    assert response[0].real == pytest.approx(1.0 + weights.mean_age(feedback))


@pytest.mark.parametrize("feedback", ALL.values(), ids=ALL)
def test_remaining_starts_at_one_and_never_grows(feedback):
    phi = weights.remaining(feedback, AGES)
    assert phi[0] == 1.0
    assert np.all(np.diff(phi) <= 0)
    assert phi[-1] == pytest.approx(1.0 - weights.effective_gain(feedback))


@pytest.mark.parametrize("age", [-1, 0.5, [0, -2]])
def test_ages_are_whole_and_not_negative(age):
    with pytest.raises(ConfigError, match="ages are whole"):
        weights.weight(PAPER_FULL, age)


def test_a_negative_number_of_sites_is_refused():
    with pytest.raises(ConfigError, match="-3"):
        weights.tail_sum(PAPER_FULL, -3)
