"""Bounds on the source: how large the partial sum S_t of a pass can become, before the network amplifies it.

Worst case (Theorem 1, Eq. 21), mean square (Section 6.3), and mean square for errors that are correlated between sites, which the
paper leaves out, with the weights that would be best for a given correlation.

All functions take the bound q on one injected error, ||delta_k|| <= q, as given. With the group residual q itself depends on the
compensator: see `residuals`.

Leaves out: the network (`bounds`) and the backward pass (`backward`).
Source: the paper, Sections 6.2 and 6.3, Appendix A.2; docs/theory.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from echoreduce.config import FeedbackConfig
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory.weights import Array, effective_gain, mean_age, remaining, remaining_energy, remaining_sum


def theorem_1(feedback: FeedbackConfig, q: float) -> float:
    """Theorem 1 (Eq. 19): max_t ||S_t|| <= (1 + mu_w) q at gain one, for every error sequence and any number of sites.

    Attained, in the limit of many sites, by the constant sequence: T_m >= 0, so no sequence does worse.

    Args:
        q: bound on the norm of one injected error, any unit; the result has the same.
    Raises:
        ConfigError: gain below one, where no bound independent of the number of sites exists (see `source_bound`).
    """
    if effective_gain(feedback) != 1.0:
        raise ConfigError(f"Theorem 1 needs gain 1, got {effective_gain(feedback)}; use source_bound, which has the number of sites")
    return (1.0 + mean_age(feedback)) * q


def source_bound(feedback: FeedbackConfig, q: float, sites: int) -> float:
    """Eq. 21: max_t ||S_t|| <= (1 - eta) N q + eta (1 + mu_w) q; N q without feedback.

    Args:
        q: bound on the norm of one injected error.
        sites: N, sites of the pass.
    """
    gain = effective_gain(feedback)
    return (1.0 - gain) * sites * q + gain * (1.0 + mean_age(feedback)) * q


def source_maximum(feedback: FeedbackConfig, q: ArrayLike, sites: int | None = None) -> float:
    """The largest ||S_t|| that any sequence can reach: max_t sum_{s <= t} phi_{t-s} q_s. Sharp form of Eq. 21, attained.

    Args:
        q: bound on the norm of one injected error; a scalar with `sites`, or one value a site, shape [N] (sites that send more bits).
        sites: N for a scalar q.
    Raises:
        ShapeError: q is neither a scalar with `sites` nor a vector.
    """
    bound = np.asarray(q, dtype=np.float64)
    if bound.ndim == 0 and sites is not None:
        return float(bound) * remaining_sum(feedback, sites)
    if bound.ndim != 1:
        raise ShapeError(f"q must be a scalar (with sites=) or one value a site, got shape {bound.shape} and sites={sites}")
    return float(np.max(np.convolve(bound, remaining(feedback, np.arange(bound.size)))[: bound.size], initial=0.0))


def source_variance(feedback: FeedbackConfig, q: float, sites: int) -> float:
    """Variance form of Section 6.3: E ||S_{N-1}||**2 <= q**2 sum_{m < N} phi_m**2 for errors uncorrelated between sites.

    Equality where E ||delta_k||**2 = q**2. 5.006 q**2 for the paper's setting at N = 56 against 56 q**2 without feedback; at gain one
    at most tau_2 q**2 for any N.

    Args:
        q: bound on the norm of one injected error, or its root mean square.
        sites: N, sites of the pass.
    """
    return q**2 * remaining_energy(feedback, sites)


def correlated_variance(feedback: FeedbackConfig, q: float, correlation: ArrayLike) -> float:
    """E ||S_{N-1}||**2 for errors that are correlated between sites: q**2 sum_{m,n < N} phi_m phi_n r_{|m-n|}.

    Not in the paper. r = (1, 0, 0, ...) gives `source_variance`, r = 1 everywhere the square of `source_maximum`.

    Args:
        q: root mean square norm of one injected error.
        correlation: r_l = E <delta_k, delta_{k+l}> / q**2, shape [N], r_0 = 1.
    """
    r = lags(correlation)
    phi = remaining(feedback, np.arange(r.size))
    return q**2 * float(phi @ toeplitz(r) @ phi)


def best_remaining(correlation: ArrayLike) -> Array:
    """The phi_m that make E ||S_{N-1}||**2 smallest for a known correlation: phi = R^-1 e_0 / (e_0' R^-1 e_0).

    Not in the paper. A causal compensator fixes phi_0 = 1 and nothing else, so the best S_{N-1} is what cannot be predicted linearly
    from the earlier errors: its variance is q**2 / (e_0' R^-1 e_0). For uncorrelated errors this is single-step feedback at gain one;
    for r_l = rho**l it is phi = (1, -rho, 0, ...): less than the full error is to be returned at the next site only if rho < 0.

    Args:
        correlation: r_l, shape [N], r_0 = 1, of a positive definite sequence.
    Returns:
        phi_m, shape [N].
    """
    r = lags(correlation)
    unit = np.zeros(r.size)
    unit[0] = 1.0
    phi = np.linalg.solve(toeplitz(r), unit)
    return np.asarray(phi / phi[0], dtype=np.float64)


def toeplitz(first: Array) -> Array:
    """Symmetric Toeplitz matrix [N, N] with the given first row."""
    index = np.arange(first.size)
    matrix: Array = first[np.abs(index[:, None] - index[None, :])]
    return matrix


def lags(correlation: ArrayLike) -> Array:
    """Correlation by lag as a checked vector, r_0 = 1."""
    r = np.asarray(correlation, dtype=np.float64)
    if r.ndim != 1 or r.size == 0 or abs(r[0] - 1.0) > 1e-12:
        raise ShapeError(f"correlation must be a vector that starts with 1 (lag 0), got shape {r.shape}")
    return r
