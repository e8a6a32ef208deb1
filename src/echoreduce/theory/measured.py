"""Bounds from what was measured of a network site by site: no R1, no R2, and one bound q_s a site.

R1 asks that every site adds energy to the hidden state, and R2 measures Jacobians against what it adds. A real model has sites that take
energy away (its last ones, where massive activations are removed), so C_0 = max ||J_k||**2 sigma_k**2 / (d Delta_k) does not exist. Both
conditions are used in one place only, the telescoping sum of Lemma 6. Left as a sum it needs neither (docs/theory.md, Lemma S10):

    sum_t ||Phi_{N,t+2} J_{t+1}||_F**2 / d <= e**Lambda sigma_N**2 sum_t u_t,     u_t = ||J_{t+1}||_F**2 / (d sigma_{t+2}**2)

and c = sigma_1**2 sum_t u_t stands where C_0 stood; where R1 and R2 hold, c <= C_0. Nor do the proofs of Theorem 2 need Assumption 1 at
every site: they use Lemma 5 from a site to the end only, whose smallest budget Lambda_N (`endpoint_budget`) may be far below Lambda, since
one covariance does not meet the worst factor of every site (Lemma S11).

Leaves out: how the figures are measured (`integrations.estimate`). Source: the paper, Appendix A.4 and A.5; docs/theory.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from echoreduce.config import FeedbackConfig
from echoreduce.errors import ShapeError
from echoreduce.theory.bounds import NetworkConstants, log_level, need_full_gain
from echoreduce.theory.weights import Array, effective_gain, mean_age, remaining, tail_energy
from echoreduce.theory.weights import tail as tails_at


@dataclass(frozen=True)
class MeasuredNetwork:
    """A network as probes see it.

    Attributes:
        dim: d, entries of the hidden state.
        scales: sigma_0 .. sigma_N, shape [N + 1].
        jacobian_energy: ||J_k||_F**2 / d, shape [N]; site 0 enters no bound.
        reinforcement: epsilon_k of Assumption 1, shape [N].
        arriving: Lambda_N, see `endpoint_budget`.
    """

    dim: int
    scales: Array
    jacobian_energy: Array
    reinforcement: Array
    arriving: float

    def __post_init__(self) -> None:
        sites = self.scales.size - 1
        if sites < 1 or self.jacobian_energy.shape != (sites,) or self.reinforcement.shape != (sites,):
            raise ShapeError(
                f"expected scales [N + 1], jacobian_energy [N] and reinforcement [N], got {self.scales.shape}, "
                f"{self.jacobian_energy.shape} and {self.reinforcement.shape}"
            )

    @property
    def budget(self) -> float:
        """Lambda = sum_k epsilon_k."""
        return float(self.reinforcement.sum())

    @property
    def added(self) -> Array:
        """Delta_k = sigma_{k+1}**2 - sigma_k**2, shape [N]; R1 wants all of them positive."""
        return np.diff(self.scales**2)

    @property
    def shares(self) -> Array:
        """u_t for t = 0 .. N - 2, shape [N - 1]."""
        return np.asarray(self.jacobian_energy[1:] / self.scales[2:] ** 2)

    @property
    def spread(self) -> float:
        """c = sigma_1**2 sum_t u_t: what C_0 becomes without R1 and R2."""
        return float(self.scales[1] ** 2 * self.shares.sum())

    def relative_step(self, q: float) -> float:
        """q_bar = q / (sqrt(d) sigma_1)."""
        return float(q / (np.sqrt(self.dim) * self.scales[1]))

    def constants(self) -> NetworkConstants:
        """The paper's constants.

        Raises:
            ConfigError: R1 does not hold.
        """
        added, energy = self.added, self.scales**2
        c0 = float(np.max(self.jacobian_energy[1:] * energy[1:-1] / added[1:], initial=0.0)) if added.min() > 0 else 0.0
        sigma_0, sigma_1 = float(self.scales[0]), float(self.scales[1])
        return NetworkConstants(self.dim, sigma_0, sigma_1, float(added.min()), float(added.max()), c0, self.budget)


def grown(budget: float) -> float:
    """e**budget; infinite where it overflows, as a bound that says nothing."""
    with np.errstate(over="ignore"):
        return float(np.exp(budget))


def mean(feedback: FeedbackConfig, network: MeasuredNetwork, q: float, budget: float) -> float:
    """Theorem 2 (i), Corollary 1 and Remark 2 without R1 and R2 (Lemma S10), relative: E ||E_N^lin||**2 / (d sigma_N**2) at most

    (eta sqrt(A) + (1 - eta) sqrt(B))**2,  A = (sqrt(tau_2) sigma_1 / sigma_N + (1 + mu_w) sqrt(c e**Lambda))**2 q_bar**2
    (single step: A = [(sigma_1 / sigma_N)**2 + c e**Lambda] q_bar**2),   B = e**Lambda q_bar**2 sum_s (sigma_1 / sigma_{s+1})**2.

    Args:
        feedback: any gain.
        q: bound on the norm of one injected error.
        budget: Lambda or Lambda_N.
    """
    gain, sigma = effective_gain(feedback), network.scales
    growth = grown(budget)
    source = tail_energy(feedback) * (sigma[1] / sigma[-1]) ** 2
    spread = (1.0 + mean_age(feedback)) ** 2 * network.spread * growth
    cross = 0.0 if mean_age(feedback) == 0.0 else 2.0 * np.sqrt(source * spread)
    both = gain * np.sqrt(source + spread + cross)
    if gain < 1.0:
        both += (1.0 - gain) * np.sqrt(growth * np.sum((sigma[1] / sigma[1:]) ** 2))
    return float((both * network.relative_step(q)) ** 2)


def mean_by_site(feedback: FeedbackConfig, network: MeasuredNetwork, q: ArrayLike, budget: float) -> float:
    """`mean` with one q_s a site and nothing summed away: sum_s q_s**2 B_s**2 / (d sigma_N**2), where ||K_s||_F / sqrt(d) <= B_s,

    B_s = eta (T_{N-1-s} + sum_{t >= s} T_{t-s} g_t) + (1 - eta) h_s,
    g_t = sigma_N sqrt(u_t e**budget),   h_s = sigma_N / sigma_{s+1} e**(budget/2).

    Args:
        q: bound on the norm of each injected error, shape [N].
        budget: Lambda or Lambda_N.
    """
    gain, sites = effective_gain(feedback), network.scales.size - 1
    growth = network.scales[-1] * grown(budget / 2.0)
    tails = tails_at(feedback, np.arange(sites))
    carried = growth * np.sqrt(network.shares)
    compensated = [tails[sites - 1 - s] + float(tails[: sites - 1 - s] @ carried[s:]) for s in range(sites)]
    limit = gain * np.array(compensated)
    if gain < 1.0:
        limit += (1.0 - gain) * growth / network.scales[1:]
    energy = np.sum((np.asarray(q, dtype=np.float64) * limit) ** 2)
    return float(energy / (network.dim * network.scales[-1] ** 2))


def tail(feedback: FeedbackConfig, network: MeasuredNetwork, q: float, budget: float, p: float) -> float:
    """Theorem 2 (ii) without R1 and R2, relative, gain one: 4 v log(2/p) + 8/9 zeta**2 log(2/p)**2, v of `mean`,

    zeta = q_bar (sigma_1 / sigma_N + (1 + mu_w) sigma_1 sqrt(d e**Lambda max_t u_t)).

    Args:
        budget: Lambda or Lambda_N.
        p: probability with which it may fail.
    """
    need_full_gain(feedback, "Theorem 2")
    sigma_1, sigma_n = network.scales[1], network.scales[-1]
    largest = sigma_1 * np.sqrt(network.dim * grown(budget) * network.shares.max(initial=0.0))
    zeta = network.relative_step(q) * (sigma_1 / sigma_n + (1.0 + mean_age(feedback)) * largest)
    level = log_level(p)
    return float(4.0 * mean(feedback, network, q, budget) * level + 8.0 / 9.0 * zeta**2 * level**2)


def second_order(network: MeasuredNetwork, remainders: ArrayLike) -> float:
    """Corollary 2 with Eq. 25 put in: ||E_N - E_N^lin|| <= e**(Lambda/2) sigma_N sum_n ||r_n|| / sigma_{n+1}, in units of the norm.

    Args:
        remainders: ||r_n||, shape [N].
    """
    sizes = np.asarray(remainders, dtype=np.float64)
    return float(grown(network.budget / 2.0) * network.scales[-1] * np.sum(sizes / network.scales[1:]))


def source_energy(feedback: FeedbackConfig, q: ArrayLike) -> float:
    """E ||S_{N-1}||**2 <= sum_s phi_{N-1-s}**2 q_s**2 for uncorrelated errors: the variance form of Section 6.3, one q a site.

    Args:
        q: bound on the norm of each injected error, shape [N].
    """
    bound = np.asarray(q, dtype=np.float64)
    return float(np.sum((remaining(feedback, np.arange(bound.size))[::-1] * bound) ** 2))


def reinforcement(first: Array, second: Array, scales: Array) -> Array:
    """epsilon_k of Assumption 1 from energies, for the first two collections of Eq. 23; site 0, where nothing arrives, has zero.

    Args:
        first: E ||Phi_{k,j} v||**2, shape [N + 1, N + 1] by (j, k), isotropic v; entries with k < j or j < 1 are not read.
        second: E ||Phi_{k,j+1} J_j v||**2, the same shape; entries with k < j + 1 or j < 1 are not read.
        scales: sigma_0 .. sigma_N, shape [N + 1].
    Returns:
        Shape [N].
    """
    sites = scales.size - 1
    epsilon = np.zeros(sites)
    for k in range(1, sites):
        before = np.concatenate((first[1 : k + 1, k], second[1:k, k]))
        after = np.concatenate((first[1 : k + 1, k + 1], second[1:k, k + 1]))
        ratio = np.max(after[before > 0] / before[before > 0], initial=0.0)
        epsilon[k] = max(0.0, ratio * (scales[k] / scales[k + 1]) ** 2 - 1.0)
    return epsilon


def endpoint_budget(first: Array, second: Array, scales: Array) -> float:
    """Lambda_N: the smallest budget with which Lemma 5 holds from every site to the end, for the first two collections of Eq. 23.

    log of max_j (||Phi_{N,j} A||_F**2 / sigma_N**2) / (||A||_F**2 / sigma_j**2) over A = I and, one site later, A = J_j. At most Lambda.

    Args: as `reinforcement`.
    """
    end = scales.size - 1
    grown = [first[j, end] / first[j, j] * (scales[j] / scales[end]) ** 2 for j in range(1, end + 1)]
    for j in range(1, end):
        if second[j, j + 1] > 0:
            grown.append(second[j, end] / second[j, j + 1] * (scales[j + 1] / scales[end]) ** 2)
    return float(np.log(max(grown)))


def returned(feedback: FeedbackConfig, sites: int) -> Array:
    """phi_m - phi_{m-1} for m = 0 .. N - 1 (phi_{-1} = 0): what site s + m adds of an error that site s injected. Shape [N].

    K_s = sum_m (phi_m - phi_{m-1}) Phi_{N,s+1+m}, which is Lemma 3 before the summation by parts.
    """
    return np.diff(remaining(feedback, np.arange(sites)), prepend=0.0)
