"""The compensator's weights in closed form: what is returned when (w_r), what is still owed (T_m), what remains in S_t (phi_m).

    w_r = a (1 - b1) b1**r + (1 - a) (1 - b2) b2**r            weight on an error of age r, sums to one                      (Eq. 12)
    T_m = sum_{r >= m} w_r = a b1**m + (1 - a) b2**m           part not yet returned m sites later                           (Eq. 18)
    phi_m = (1 - eta) + eta T_m                                part that remains in the partial sum S_t = sum phi_{t-s} delta_s (Eq. 13)

Why: every bound of the theory depends on the compensator only through sums of these, and all of them are geometric, so nothing is
truncated. The setting is the same `FeedbackConfig` that the collective runs: blend a, decays (b1, b2), gain eta. w, T, mu_w and tau_2
are kernel constants and ignore the gain; phi has it, and is one at every age when nothing is fed back.

Leaves out: bounds (`source`, `bounds`), and the recurrence itself (`stream`).
Source: the paper, Sections 5.2 and 6.2, Lemma 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from echoreduce.config import FeedbackConfig
from echoreduce.errors import ConfigError

Array = NDArray[np.float64]


def effective_gain(feedback: FeedbackConfig) -> float:
    """eta, or 0 where the configuration feeds nothing back."""
    return feedback.gain if feedback.enabled else 0.0


def averages(feedback: FeedbackConfig) -> tuple[tuple[float, float], tuple[float, float]]:
    """((a, b1), (1 - a, b2)): blend weight and decay of the two moving averages (Eq. 10, 11)."""
    return ((feedback.blend, feedback.decays[0]), (1.0 - feedback.blend, feedback.decays[1]))


def weight(feedback: FeedbackConfig, age: ArrayLike) -> Array:
    """w_r of Eq. 12: the weight of an error of age r in the correction at gain one.

    Args:
        age: r in sites, integers >= 0, any shape.
    Returns:
        w_r, float64, shape of `age`; the sum over all r is one.
    """
    r = ages(age)
    return sum((share * (1.0 - decay) * np.power(decay, r) for share, decay in averages(feedback)), np.zeros(r.shape))


def tail(feedback: FeedbackConfig, age: ArrayLike) -> Array:
    """T_m of Eq. 18: the part of an error that the corrections of the first m later sites have not returned, at gain one.

    Args:
        age: m in sites, integers >= 0, any shape.
    Returns:
        T_m = sum_{r >= m} w_r, float64, shape of `age`; T_0 = 1, and T_m = 0 for m >= 1 with single-step feedback.
    """
    m = ages(age)
    return sum((share * np.power(decay, m) for share, decay in averages(feedback)), np.zeros(m.shape))


def remaining(feedback: FeedbackConfig, age: ArrayLike) -> Array:
    """phi_m of Eq. 13: the part of an error that is still in the partial sum m sites after it was injected.

    Args:
        age: m in sites, integers >= 0, any shape.
    Returns:
        phi_m = (1 - eta) + eta T_m, float64, shape of `age`; one at every age without feedback.
    """
    gain = effective_gain(feedback)
    return (1.0 - gain) + gain * tail(feedback, age)


def mean_age(feedback: FeedbackConfig) -> float:
    """mu_w of Eq. 19, in sites: sum_r r w_r, the mean age at which an error is returned.

    1.0952 for the paper's setting, 0 for single step.
    """
    return sum(share * decay / (1.0 - decay) for share, decay in averages(feedback))


def tail_sum(feedback: FeedbackConfig, sites: int | None = None) -> float:
    """sum_{m < sites} T_m (Theorem 1); 1 + mu_w over all ages.

    Args:
        sites: number of ages, None for all of them.
    """
    return sum(share * geometric(decay, sites) for share, decay in averages(feedback))


def tail_energy(feedback: FeedbackConfig, sites: int | None = None) -> float:
    """sum_{m < sites} T_m**2; over all ages tau_2 of Theorem 2, 1.2804 for the paper's setting and 1 for single step.

    Args:
        sites: number of ages, None for all of them.
    """
    pairs = averages(feedback)
    return sum(first * second * geometric(b * c, sites) for first, b in pairs for second, c in pairs)


def remaining_sum(feedback: FeedbackConfig, sites: int) -> float:
    """sum_{m < sites} phi_m = (1 - eta) N + eta sum_{m < N} T_m: the exact worst case behind Eq. 21."""
    gain = effective_gain(feedback)
    return (1.0 - gain) * sites + gain * tail_sum(feedback, sites)


def remaining_energy(feedback: FeedbackConfig, sites: int) -> float:
    """sum_{m < sites} phi_m**2 = (1 - eta)**2 N + 2 eta (1 - eta) sum T_m + eta**2 sum T_m**2: variance of S_{N-1} in units of q**2.

    5.006 for the paper's setting at gain 0.75 and N = 56 (Section 6.3); N without feedback.
    """
    gain = effective_gain(feedback)
    kept = 1.0 - gain
    return kept**2 * sites + 2.0 * gain * kept * tail_sum(feedback, sites) + gain**2 * tail_energy(feedback, sites)


def response(feedback: FeedbackConfig, frequency: ArrayLike) -> NDArray[np.complex128]:
    """sum_m T_m exp(-i omega m) at gain one: how the compensator passes an error that varies along the sites.

    At omega = 0 it is 1 + mu_w (constant errors, Theorem 1's worst case); the mean of its squared magnitude over all frequencies is tau_2.

    Args:
        frequency: omega in radians a site, any shape.
    """
    turn = np.exp(-1j * np.asarray(frequency, dtype=np.float64))
    return sum((share / (1.0 - decay * turn) for share, decay in averages(feedback)), np.zeros(turn.shape, dtype=np.complex128))


def geometric(ratio: float, terms: int | None) -> float:
    """1 + ratio + ... + ratio**(terms - 1) for 0 <= ratio < 1; the infinite sum for None."""
    if terms is not None and terms < 0:
        raise ConfigError(f"a number of sites cannot be negative, got {terms}")
    missing = 0.0 if terms is None else ratio**terms
    return (1.0 - missing) / (1.0 - ratio)


def ages(age: ArrayLike) -> Array:
    """Ages as float64, checked: integers >= 0."""
    values = np.asarray(age, dtype=np.float64)
    if values.size and (values.min() < 0 or np.any(values != np.floor(values))):
        raise ConfigError(f"ages are whole numbers of sites >= 0, got {age!r}")
    return values
