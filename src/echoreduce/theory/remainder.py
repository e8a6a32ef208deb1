"""Bounds on the second-order part E_N - E_N^lin: Proposition 1, Corollary 2, and how likely the truncation of Proposition 1 is.

Proposition 1 bounds the remainders of a pass that is stopped at the first site whose deviation exceeds twice its linear bound
Theta_n = kappa_p q_bar sqrt(d) sigma_n. The paper does not say how often a pass is stopped; `truncation_probability` does.

Leaves out: first order (`bounds`); the network that attains the order (`constructions`).
Source: the paper, Appendix A.5; docs/theory.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from echoreduce.config import FeedbackConfig
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory.bounds import NetworkConstants, log_level, tail_constants


def kappa_squared(feedback: FeedbackConfig, constants: NetworkConstants, sites: int, p: float) -> float:
    """kappa_p**2 = C_bar log(2 N / p) + C_bar' log(2 N / p)**2: Theorem 2 (ii) for all N prefixes at once.

    Args:
        sites: N.
        p: probability that some prefix exceeds its bound Theta_n.
    """
    if sites < 1:
        raise ConfigError(f"a pass has at least one site, got {sites}")
    log_level(p)
    level = log_level(p / sites)
    first, second = tail_constants(feedback, constants)
    return first * level + second * level**2


def threshold(feedback: FeedbackConfig, constants: NetworkConstants, q: float, sigma: ArrayLike, sites: int, p: float) -> np.ndarray:
    """Theta_n = kappa_p q_bar sqrt(d) sigma_n; Proposition 1 stops a pass where ||E_n|| > 2 Theta_n.

    Args:
        sigma: sigma_n, any shape.
    Returns:
        Theta_n, shape of `sigma`, in units of the hidden state's norm.
    """
    kappa = np.sqrt(kappa_squared(feedback, constants, sites, p))
    return np.asarray(kappa * constants.relative_step(q) * np.sqrt(constants.dim) * np.asarray(sigma, dtype=np.float64))


def second_order_constant(feedback: FeedbackConfig, constants: NetworkConstants, sites: int, p: float) -> float:
    """C_2 = 4 h_bar e**(Lambda/2) (sigma_1 + sqrt(Delta_max)) / Delta_min * kappa_p**2 of Proposition 1."""
    growth = (constants.sigma_1 + np.sqrt(constants.delta_max)) / constants.delta_min
    kappa = kappa_squared(feedback, constants, sites, p)
    return float(4.0 * constants.curvature * np.exp(constants.budget / 2.0) * growth * kappa)


def proposition_1(feedback: FeedbackConfig, constants: NetworkConstants, q: float, sigma_n: float, sites: int, p: float) -> float:
    """Proposition 1: (E ||sum_n Phi_{N,n+1} r_n||**2)**(1/2) <= C_2 q_bar**2 sqrt(N) sqrt(d) sigma_N for the stopped remainders r_n.

    Returns:
        The right side, in units of the hidden state's norm.
    """
    constant = second_order_constant(feedback, constants, sites, p)
    return float(constant * constants.relative_step(q) ** 2 * np.sqrt(sites) * np.sqrt(constants.dim) * sigma_n)


def proposition_1_sharp(feedback: FeedbackConfig, constants: NetworkConstants, q: float, scales: ArrayLike, sites: int, p: float) -> float:
    """Proposition 1 before its sum over 1/sigma_{n+1} is bounded: `stopped_remainder` at the limit 2 kappa_p q_bar sqrt(d).

    Args:
        scales: sigma_0 .. sigma_N, shape [N + 1].
    """
    if np.shape(scales) != (sites + 1,):
        raise ShapeError(f"scales are sigma_0 .. sigma_N, shape [{sites + 1}], got {np.shape(scales)}")
    limit = 2.0 * np.sqrt(kappa_squared(feedback, constants, sites, p) * constants.dim) * constants.relative_step(q)
    return stopped_remainder(constants, float(limit), scales)


def stopped_remainder(constants: NetworkConstants, limit: float, scales: ArrayLike) -> float:
    """The step of Proposition 1's proof for any limit l: passes that stop where ||E_n|| > l sigma_n have a second-order part of root
    mean square norm at most e**(Lambda/2) sigma_N sum_n (h_bar l**2 / (2 sqrt(d))) / sigma_{n+1}.

    With a measured limit this is the useful form: kappa_p is an order of magnitude above what happens (docs/theory.md).

    Args:
        limit: l, in units of sigma_n (not of a norm per entry).
        scales: sigma_0 .. sigma_N, shape [N + 1].
    """
    sigma = np.asarray(scales, dtype=np.float64)
    one = constants.curvature * limit**2 / (2.0 * np.sqrt(constants.dim))
    return float(np.exp(constants.budget / 2.0) * sigma[-1] * one * np.sum(1.0 / sigma[1:]))


def truncation_probability(feedback: FeedbackConfig, constants: NetworkConstants, q: float, sites: int, p: float) -> float:
    """Bound on the probability that Proposition 1 stops the pass at all: p + (C_2 q_bar N / kappa_p)**2 / 2, at most 1.

    Not in the paper. If the pass is first stopped at n, E_n = E_n^lin + stopped remainder; with ||E_n^lin|| <= Theta_n (all n, probability
    1 - p) the remainder exceeds Theta_n, and Chebyshev with Proposition 1 for the prefix n bounds that by (C_2 q_bar / kappa_p)**2 n.
    """
    kappa = kappa_squared(feedback, constants, sites, p)
    constant = second_order_constant(feedback, constants, sites, p)
    return float(min(1.0, p + (constant * constants.relative_step(q)) ** 2 / kappa * sites * (sites - 1) / 2.0))


def second_order_budget(remainders: Sequence[float] | np.ndarray, constants: NetworkConstants, q: float, scales: ArrayLike) -> float:
    """Lambda_2 of Eq. 25: sum_n (E ||r_n||**2)**(1/2) / (sqrt(d) sigma_{n+1}), in units of q_bar**2.

    Args:
        remainders: root mean square norm of the stopped remainder r_n of each site, shape [N].
        scales: sigma_0 .. sigma_N, shape [N + 1].
    """
    sigma = np.asarray(scales, dtype=np.float64)
    values = np.asarray(remainders, dtype=np.float64)
    if sigma.shape != (values.size + 1,):
        raise ShapeError(f"{values.size} remainders need {values.size + 1} scales, got shape {sigma.shape}")
    return float(np.sum(values / sigma[1:]) / np.sqrt(constants.dim) / constants.relative_step(q) ** 2)


def corollary_2(constants: NetworkConstants, q: float, sigma_n: float, budget: float) -> float:
    """Corollary 2: with Eq. 25 the second-order part is at most e**(Lambda/2) Lambda_2 q_bar**2 sqrt(d) sigma_N, without sqrt(N).

    Args:
        budget: Lambda_2, see `second_order_budget`.
    Returns:
        Bound on the root mean square norm, in units of the hidden state's norm.
    """
    return float(np.exp(constants.budget / 2.0) * budget * constants.relative_step(q) ** 2 * np.sqrt(constants.dim) * sigma_n)
