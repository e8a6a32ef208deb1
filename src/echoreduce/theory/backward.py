"""The backward pass: errors enter through the normalization's Jacobian A_k = D_k / sigma_k, which differs from site to site.

    S_t = sum_{s >= t} B_{s,t} delta_s,    B_{s,t} = A_s - eta sum_{k=t}^{s-1} w_{s-1-k} A_k                          (Appendix A.7)

The pass visits the sites in decreasing order; an error of site s is returned at s - 1, s - 2, ... through other operators than the one
it entered by, so the cancellation is not exact, and Proposition 3 needs the operators to vary slowly.

Leaves out: what the network does with S_t (the paper has no backward counterpart of Theorem 2).
Source: the paper, Section 5.4 and Appendix A.7; docs/theory.md for the constant and for gains below one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echoreduce.config import FeedbackConfig
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory.bounds import NetworkConstants, need_full_gain
from echoreduce.theory.stream import Compensator
from echoreduce.theory.weights import Array, effective_gain, mean_age, tail_energy, weight


@dataclass(frozen=True)
class Operators:
    """Normalization Jacobians of a pass.

    Attributes:
        turns: D_k, shape [N, d, d], without unit.
        scales: sigma_0 .. sigma_N, shape [N + 1]; A_k = D_k / sigma_k.
    """

    turns: Array
    scales: Array

    def __post_init__(self) -> None:
        if self.turns.ndim != 3 or self.scales.shape != (self.turns.shape[0] + 1,):
            raise ShapeError(f"expected turns [N, d, d] and scales [N + 1], got {self.turns.shape} and {self.scales.shape}")

    @property
    def entering(self) -> Array:
        """A_k, shape [N, d, d]."""
        return np.asarray(self.turns / self.scales[:-1, None, None])

    def largest(self) -> float:
        """gamma_bar = max_k ||D_k|| (operator norm)."""
        return float(np.linalg.norm(self.turns, ord=2, axis=(1, 2)).max())

    def smoothness(self) -> float:
        """c_D: smallest with ||D_s - D_k|| <= c_D (s - k) sqrt(Delta_max) / sigma_s for all k < s."""
        root = np.sqrt(np.diff(self.scales**2).max())
        worst = 0.0
        for s in range(1, self.turns.shape[0]):
            jump = np.linalg.norm(self.turns[s] - self.turns[:s], ord=2, axis=(1, 2))
            worst = max(worst, float(np.max(jump * self.scales[s] / (np.arange(s, 0, -1) * root))))
        return worst


def partial_sum(operators: Operators, injected: Array, feedback: FeedbackConfig, last: int) -> Array:
    """S_t of the backward pass by the compensator's own recurrence, site by site from N - 1 down to `last`.

    Args:
        injected: delta_s in gradient units, by forward index, shape [N, *batch, d].
        last: t, the site that the pass has reached.
    Returns:
        S_t, shape [*batch, d].
    """
    compensator = Compensator(feedback, injected.shape[1:])
    total = np.zeros(injected.shape[1:])
    entering = operators.entering
    for k in range(injected.shape[0] - 1, last - 1, -1):
        total = total + (injected[k] + compensator.correction()) @ entering[k].T
        compensator.update(-injected[k])
    return total


def coefficients(operators: Operators, feedback: FeedbackConfig, last: int) -> Array:
    """B_{s,t} for s = t .. N - 1, shape [N - t, d, d]: what remains of delta_s once the pass has reached site t = `last`."""
    entering = operators.entering[last:]
    sites = entering.shape[0]
    age = np.arange(sites)[:, None] - 1 - np.arange(sites)[None, :]
    returned = np.where(age >= 0, effective_gain(feedback) * weight(feedback, np.maximum(age, 0)), 0.0)
    return np.asarray(entering - np.tensordot(returned, entering, axes=1))


def mismatch_constant(constants: NetworkConstants, gamma: float, smoothness: float) -> float:
    """C_A = c_D sqrt(Delta_max) + gamma_bar Delta_max / sigma_0: ||A_s - A_k|| <= C_A (s - k) / sigma_s**2 for k < s."""
    return float(smoothness * np.sqrt(constants.delta_max) + gamma * constants.delta_max / constants.sigma_0)


def proposition_3_constant(feedback: FeedbackConfig, constants: NetworkConstants, gamma: float, smoothness: float) -> float:
    """C_bwd of Proposition 3, with the paper's own bounds for its two sums put in:

    C_bwd = 2 gamma_bar**2 tau_2 (sigma_1 / sigma_0)**2
            + 2 C_A**2 (1 + mu_w)**2 sigma_1**2 (1 / sigma_0**4 + 1 / (Delta_min sigma_0**2))

    Args:
        feedback: gain one.
        gamma: gamma_bar, bound on ||D_k||.
        smoothness: c_D.
    """
    need_full_gain(feedback, "Proposition 3")
    start = constants.sigma_0
    steady = gamma**2 * tail_energy(feedback) * (constants.sigma_1 / start) ** 2
    moving = mismatch_constant(constants, gamma, smoothness) ** 2 * (1.0 + mean_age(feedback)) ** 2
    return 2.0 * (steady + moving * constants.sigma_1**2 * (1.0 / start**4 + 1.0 / (constants.delta_min * start**2)))


def proposition_3(feedback: FeedbackConfig, constants: NetworkConstants, q: float, gamma: float, smoothness: float) -> float:
    """Proposition 3: max_t E ||S_t^bwd||**2 <= C_bwd q**2 / sigma_1**2, at gain one, for any number of sites.

    Args:
        q: bound on the norm of one injected error, in gradient units.
    Returns:
        The right side, in units of the gradient of the hidden state, squared.
    """
    return proposition_3_constant(feedback, constants, gamma, smoothness) * q**2 / constants.sigma_1**2


def uncompensated(constants: NetworkConstants, q: float, gamma: float, sites: int) -> float:
    """Without feedback: max_t E ||S_t^bwd||**2 <= gamma_bar**2 q**2 sum_s 1/sigma_s**2, with R1 at most
    gamma_bar**2 q**2 (1/sigma_0**2 + log(1 + (N - 1) Delta_min / sigma_0**2) / Delta_min). Not in the paper."""
    if sites < 1:
        raise ConfigError(f"a pass has at least one site, got {sites}")
    start = constants.sigma_0**2
    return float((gamma * q) ** 2 * (1.0 / start + np.log1p((sites - 1) * constants.delta_min / start) / constants.delta_min))


def proposition_3_gain(
    feedback: FeedbackConfig, constants: NetworkConstants, q: float, gamma: float, smoothness: float, sites: int
) -> float:
    """Proposition 3 at any gain, by Minkowski: (eta sqrt(A) + (1 - eta) sqrt(B))**2, A of Proposition 3, B of `uncompensated`.

    Not in the paper, which runs the backward pass at gain 0.75 and proves it at gain one. Grows as (1 - eta)**2 log N.
    """
    gain = effective_gain(feedback)
    full = FeedbackConfig(gain=1.0, blend=feedback.blend, decays=feedback.decays)
    compensated = proposition_3(full, constants, q, gamma, smoothness)
    return float((gain * np.sqrt(compensated) + (1.0 - gain) * np.sqrt(uncompensated(constants, q, gamma, sites))) ** 2)
