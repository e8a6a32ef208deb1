"""Bounds on the first-order output deviation E_N^lin, with every constant: Lemmas 4 to 6, Theorem 2, Corollary 1, Remark 2.

Units: q and the scales sigma_k are those of the hidden state; q is the norm of one injected error, sigma_k the root mean square of an
entry of z_k, and q_bar = q / (sqrt(d) sigma_1) is without unit. Results named "relative" are E ||E_N^lin||**2 / (d sigma_N**2).

Sharper forms that the paper leaves out stand beside its own (`*_sharp`) and are proved in docs/theory.md.

Leaves out: second order (`remainder`), how the constants of a network are found (`network`, `integrations.estimate`).
Source: the paper, Section 6.2, Appendix A.1 to A.5; docs/theory.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from echoreduce.config import FeedbackConfig
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory.weights import Array, effective_gain, mean_age, tail_energy


@dataclass(frozen=True)
class NetworkConstants:
    """What the bounds need to know of a network (Appendix A.1).

    Attributes:
        dim: d, entries of the hidden state.
        sigma_0: root mean square entry of the hidden state that enters the first site.
        sigma_1: the same after the first site.
        delta_min: R1, smallest energy sigma_{k+1}**2 - sigma_k**2 that a site adds, > 0.
        delta_max: R1, largest.
        c0: R2, smallest C_0 with ||J_k||_F**2 / d <= C_0 Delta_k / sigma_k**2 at every site k >= 1 (site 0 enters no bound).
        budget: Lambda of Assumption 1, the sum of the epsilon_k.
        curvature: h_bar of R3, H_k <= h_bar / (sigma_k**2 sqrt(d)); only Proposition 1 reads it.
    """

    dim: int
    sigma_0: float
    sigma_1: float
    delta_min: float
    delta_max: float
    c0: float
    budget: float = 0.0
    curvature: float = 0.0

    def __post_init__(self) -> None:
        if self.dim < 1 or self.sigma_0 <= 0 or self.sigma_1 <= 0:
            raise ConfigError(f"dim, sigma_0 and sigma_1 must be positive, got {self.dim}, {self.sigma_0}, {self.sigma_1}")
        if not 0 < self.delta_min <= self.delta_max:
            raise ConfigError(f"R1 needs 0 < delta_min <= delta_max, got {self.delta_min} and {self.delta_max}")
        if min(self.c0, self.budget, self.curvature) < 0:
            raise ConfigError(f"c0, budget and curvature cannot be negative, got {self.c0}, {self.budget}, {self.curvature}")

    def relative_step(self, q: float) -> float:
        """q_bar = q / (sqrt(d) sigma_1): one injected error per entry, in units of the hidden state after the first site."""
        return float(q / (np.sqrt(self.dim) * self.sigma_1))


def need_full_gain(feedback: FeedbackConfig, name: str) -> None:
    """Raise `ConfigError` unless the gain is one."""
    if effective_gain(feedback) != 1.0:
        raise ConfigError(f"{name} needs gain 1, got {effective_gain(feedback)}; Corollary 1 covers the others")


def mean_square(coefficients: Array, q: ArrayLike) -> float:
    """Lemma 4 (Eq. 20): E ||E_N^lin||**2 <= sum_s q_s**2 ||K_s||_F**2 / d; equality for isotropic errors of norm exactly q_s.

    Args:
        coefficients: K_s, shape [N, d, d] (`network.coefficients`).
        q: bound on ||delta_s||, a scalar or one value a site, shape [N] (sites that send more bits).
    """
    energy = np.sum(coefficients**2, axis=(1, 2)) / coefficients.shape[-1]
    return float(np.sum(np.asarray(q, dtype=np.float64) ** 2 * energy))


def propagated(constants: NetworkConstants, trace: float, sigma_from: float, sigma_to: float) -> float:
    """Lemma 5: a deviation of energy `trace` at site j has at most e**Lambda (sigma_n / sigma_j)**2 times that energy at site n."""
    return float(np.exp(constants.budget) * trace * (sigma_to / sigma_from) ** 2)


def propagated_sources(constants: NetworkConstants, sigma_n: float) -> float:
    """Lemma 6: sum_t ||Phi_{N,t+2} J_{t+1}||_F**2 / d <= e**Lambda C_0 (sigma_N / sigma_1)**2.

    The telescoping sum also gives the factor 1 - (sigma_1 / sigma_N)**2, which the paper drops and this function keeps out as well.
    """
    return float(np.exp(constants.budget) * constants.c0 * (sigma_n / constants.sigma_1) ** 2)


def theorem_2_mean(feedback: FeedbackConfig, constants: NetworkConstants, q: float, sigma_n: float) -> float:
    """Theorem 2 (i), relative: 2 [tau_2 (sigma_1 / sigma_N)**2 + (1 + mu_w)**2 C_0 e**Lambda] q_bar**2.

    Args:
        feedback: gain one.
        q: bound on the norm of one injected error.
        sigma_n: sigma_N, scale of the hidden state at the output.
    Raises:
        ConfigError: gain below one.
    """
    need_full_gain(feedback, "Theorem 2")
    source, spread = _mean_terms(feedback, constants, sigma_n)
    return 2.0 * (source + spread) * constants.relative_step(q) ** 2


def theorem_2_mean_sharp(feedback: FeedbackConfig, constants: NetworkConstants, q: float, sigma_n: float) -> float:
    """Theorem 2 (i) without its factor 2, relative; never above `theorem_2_mean`.

    Minkowski instead of (x + y)**2 <= 2 x**2 + 2 y**2: (sqrt(tau_2) sigma_1 / sigma_N + (1 + mu_w) sqrt(C_0 e**Lambda))**2 q_bar**2.
    With single-step feedback the two parts belong to different errors and simply add:
    [(sigma_1 / sigma_N)**2 + C_0 e**Lambda] q_bar**2 (docs/theory.md, Lemma S2).
    """
    need_full_gain(feedback, "Theorem 2")
    source, spread = _mean_terms(feedback, constants, sigma_n)
    cross = 0.0 if mean_age(feedback) == 0.0 else 2.0 * float(np.sqrt(source * spread))
    return (source + spread + cross) * constants.relative_step(q) ** 2


def _mean_terms(feedback: FeedbackConfig, constants: NetworkConstants, sigma_n: float) -> tuple[float, float]:
    """tau_2 (sigma_1 / sigma_N)**2 and (1 + mu_w)**2 C_0 e**Lambda."""
    source = tail_energy(feedback) * (constants.sigma_1 / sigma_n) ** 2
    return source, float((1.0 + mean_age(feedback)) ** 2 * constants.c0 * np.exp(constants.budget))


def tail_constants(feedback: FeedbackConfig, constants: NetworkConstants, sigma_n: float | None = None) -> tuple[float, float]:
    """(C, C') of Theorem 2 (ii).

    C = 8 [tau_2 (sigma_1 / sigma_N)**2 + (1 + mu_w)**2 C_0 e**Lambda]
    C' = 8/9 (sigma_1 / sigma_N + (1 + mu_w) sqrt(d e**Lambda C_0 Delta_max) / sigma_1)**2

    Args:
        sigma_n: sigma_N; None gives the constants with a bar, which hold for every prefix of the pass (sigma_1 / sigma_n <= 1).
    """
    need_full_gain(feedback, "Theorem 2")
    end = constants.sigma_1 if sigma_n is None else sigma_n
    source, spread = _mean_terms(feedback, constants, end)
    largest = np.sqrt(constants.dim * np.exp(constants.budget) * constants.c0 * constants.delta_max) / constants.sigma_1
    return 8.0 * (source + spread), float(8.0 / 9.0 * (constants.sigma_1 / end + (1.0 + mean_age(feedback)) * largest) ** 2)


def theorem_2_tail(feedback: FeedbackConfig, constants: NetworkConstants, q: float, sigma_n: float, p: float) -> float:
    """Theorem 2 (ii): with probability at least 1 - p, ||E_N^lin||**2 / (d sigma_N**2) <= q_bar**2 (C log(2/p) + C' log(2/p)**2).

    Raises:
        ConfigError: p outside (0, 1), or gain below one.
    """
    level = log_level(p)
    first, second = tail_constants(feedback, constants, sigma_n)
    return constants.relative_step(q) ** 2 * (first * level + second * level**2)


def tail_from_mean(mean: float, p: float) -> float:
    """Markov's inequality: the relative energy exceeds mean / p with probability at most p.

    Not in the paper. C' holds a factor d, so for wide networks this is below `theorem_2_tail` unless p is tiny (docs/theory.md).
    """
    log_level(p)
    return mean / p


def log_level(p: float) -> float:
    """lambda_p = log(2 / p)."""
    if not 0.0 < p < 1.0:
        raise ConfigError(f"p must lie in (0, 1), got {p}")
    return float(np.log(2.0 / p))


def remark_2(constants: NetworkConstants, q: float, scales: ArrayLike) -> float:
    """Remark 2, relative, without compensation: e**Lambda q_bar**2 sum_{s < N} (sigma_1 / sigma_{s+1})**2, which grows as log N.

    Args:
        scales: sigma_0 .. sigma_N, shape [N + 1].
    """
    sigma = _scales(scales)
    total = np.sum((constants.sigma_1 / sigma[1:]) ** 2)
    return float(np.exp(constants.budget) * constants.relative_step(q) ** 2 * total)


def remark_2_log(constants: NetworkConstants, q: float, sites: int) -> float:
    """Remark 2 from R1 alone, relative: e**Lambda q_bar**2 (1 + log(1 + (N - 1) x) / x) with x = Delta_min / sigma_1**2."""
    x = constants.delta_min / constants.sigma_1**2
    return float(np.exp(constants.budget) * constants.relative_step(q) ** 2 * (1.0 + np.log1p((sites - 1) * x) / x))


def corollary_1(feedback: FeedbackConfig, constants: NetworkConstants, q: float, scales: ArrayLike) -> float:
    """Corollary 1, relative, any gain: 4 eta**2 [...] q_bar**2 + 2 (1 - eta)**2 e**Lambda q_bar**2 sum_s (sigma_1 / sigma_{s+1})**2.

    Args:
        feedback: any gain; without feedback eta is 0.
        scales: sigma_0 .. sigma_N, shape [N + 1].
    """
    gain = effective_gain(feedback)
    source, spread = _mean_terms(feedback, constants, float(_scales(scales)[-1]))
    compensated = 4.0 * gain**2 * (source + spread) * constants.relative_step(q) ** 2
    return compensated + 2.0 * (1.0 - gain) ** 2 * remark_2(constants, q, scales)


def corollary_1_sharp(feedback: FeedbackConfig, constants: NetworkConstants, q: float, scales: ArrayLike) -> float:
    """Corollary 1 by Minkowski, relative: (eta sqrt(A) + (1 - eta) sqrt(B))**2, A of Theorem 2 (i) sharp, B of Remark 2.

    Equal to A at gain one and to B without feedback; the paper's form is twice as large at both ends.
    """
    gain = effective_gain(feedback)
    sigma_n = float(_scales(scales)[-1])
    source, spread = _mean_terms(feedback, constants, sigma_n)
    cross = 0.0 if mean_age(feedback) == 0.0 else 2.0 * float(np.sqrt(source * spread))
    compensated = (source + spread + cross) * constants.relative_step(q) ** 2
    return float((gain * np.sqrt(compensated) + (1.0 - gain) * np.sqrt(remark_2(constants, q, scales))) ** 2)


def advantage(feedback: FeedbackConfig, constants: NetworkConstants, scales: ArrayLike) -> Array:
    """Section 6.2: what compensation at gain one multiplies the term of each site by, 2 (1 + mu_w)**2 C_0 Delta_k / sigma_k**2.

    Args:
        scales: sigma_0 .. sigma_N, shape [N + 1].
    Returns:
        One factor a site k = 1 .. N - 1, shape [N - 1]; below one where the bound gains.
    """
    energy = _scales(scales) ** 2
    factor: Array = 2.0 * (1.0 + mean_age(feedback)) ** 2 * constants.c0 * np.diff(energy)[1:] / energy[1:-1]
    return factor


def _scales(scales: ArrayLike) -> Array:
    """sigma_0 .. sigma_N as a checked vector."""
    sigma = np.asarray(scales, dtype=np.float64)
    if sigma.ndim != 1 or sigma.size < 2 or np.any(sigma <= 0):
        raise ShapeError(f"scales are sigma_0 .. sigma_N, positive, shape [N + 1], got shape {sigma.shape}")
    return sigma
