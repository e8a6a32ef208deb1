"""Proposition 2, as networks that run: why Assumption 1 is needed, and why the sqrt(N) of Proposition 1 cannot go.

    Amplifying  F_k(x) = c / sigma_k e e'x + sqrt(d) (sigma_{k+1} - sigma_k) e_0                                    (Proposition 2 a)
    Coherent    F_k(x) = sqrt(d) (sigma_{k+1} - sigma_k) n(x) + h sqrt(d) / 2 ||Pi n(x)||**2 f,  n(x) = x / ||x||    (Proposition 2 b)

on the clean ray z_k = sqrt(d) sigma_k e_0 with sigma_k**2 = sigma_0**2 + k Delta. e_0, e and f are the first, second and second unit
vectors. `Coherent` with h = 0 is the critical network: every tangential deviation grows exactly as the hidden state does, so Remark 2
(log N without compensation) is attained in it up to (d - 1) / d.

`run` drives the exact and the quantized network side by side, with the compensator's recurrence in between: nothing is linearized
but the deviation that is asked for.

Source: the paper, Appendix A.6; docs/theory.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echoreduce.config import FeedbackConfig
from echoreduce.theory.bounds import NetworkConstants
from echoreduce.theory.network import LinearNetwork
from echoreduce.theory.stream import Compensator
from echoreduce.theory.weights import Array, remaining


class Blocks(Protocol):
    """A network on the clean ray."""

    @property
    def dim(self) -> int:
        """d."""

    def scales(self, sites: int) -> Array:
        """sigma_0 .. sigma_N, shape [N + 1]."""

    def block(self, k: int, x: Array) -> Array:
        """F_k of each row of x, shape [M, d]."""

    def jacobian(self, k: int) -> Array:
        """J_k at the clean z_k, shape [d, d]."""


@dataclass(frozen=True)
class Ray:
    """What both networks share: dimension, energy added by each site, and the scale that the pass starts from."""

    dim: int
    added: float = 1.0
    start: float = 1.0

    def sigma(self, k: int) -> float:
        """sigma_k."""
        return float(np.sqrt(self.start**2 + k * self.added))

    def scales(self, sites: int) -> Array:
        """sigma_0 .. sigma_N, shape [N + 1]."""
        return np.asarray(np.sqrt(self.start**2 + np.arange(sites + 1) * self.added))

    def rise(self, k: int) -> float:
        """sigma_{k+1} - sigma_k."""
        return self.sigma(k + 1) - self.sigma(k)


@dataclass(frozen=True)
class Amplifying(Ray):
    """Proposition 2 (a): one fixed direction is amplified by 1 + c / sigma_k at every site."""

    c: float = 0.5

    def block(self, k: int, x: Array) -> Array:
        """F_k of each row of x, shape [M, d]."""
        out = np.zeros_like(x)
        out[:, 1] = self.c / self.sigma(k) * x[:, 1]
        out[:, 0] = np.sqrt(self.dim) * self.rise(k)
        return out

    def jacobian(self, k: int) -> Array:
        """J_k = c / sigma_k e e', shape [d, d]."""
        result = np.zeros((self.dim, self.dim))
        result[1, 1] = self.c / self.sigma(k)
        return result

    def mean_square(self, sites: int, q: float, feedback: FeedbackConfig) -> float:
        """E ||E_N^lin||**2 for isotropic errors of norm q, exactly (Lemma 4 with equality; K_s is diagonal).

        Cost: O(N) memory and one convolution, so that thousands of sites are cheap.
        """
        phi = remaining(feedback, np.arange(sites))
        along = self.c / self.scales(sites)[:sites]
        growth = np.concatenate((np.cumprod((1.0 + along)[::-1])[::-1], [1.0]))
        source = growth[2:] * along[1:]  # Phi_{N,t+2} J_{t+1} along e, t = 0 .. N - 2
        amplified = phi[::-1].copy()
        if sites > 1:
            amplified[:-1] += np.convolve(source[::-1], phi)[: sites - 1][::-1]
        return float(q**2 / self.dim * (np.sum(amplified**2) + (self.dim - 1) * np.sum(phi**2)))

    def exponent(self, sites: int) -> float:
        """sum_{1 <= l < N} log(1 + c / sigma_l), about 2 c sqrt(N / Delta): half the logarithm of the energy's growth."""
        return float(np.sum(np.log1p(self.c / self.scales(sites)[1:sites])))

    def budget(self, sites: int) -> float:
        """Lambda of Assumption 1 over the first collection of Eq. 23, in closed form; grows as sqrt(N).

        With pi_k = prod_{l=1}^{k-1} (1 + c / sigma_l), the injection of site 0 needs the largest epsilon_k.
        """
        sigma = self.scales(sites)
        along = self.c / sigma[1:sites]
        energy = np.concatenate(([1.0], np.cumprod(1.0 + along)[:-1])) ** 2
        gain = ((self.dim - 1) + energy * (1.0 + along) ** 2) / ((self.dim - 1) + energy)
        return float(np.maximum(0.0, gain * (sigma[1:sites] / sigma[2 : sites + 1]) ** 2 - 1.0).sum())


@dataclass(frozen=True)
class Coherent(Ray):
    """Proposition 2 (b): epsilon_k = 0 for every covariance, and second-order responses that all point along f."""

    h: float = 1.0

    def block(self, k: int, x: Array) -> Array:
        """F_k of each row of x, shape [M, d]."""
        unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
        out = np.sqrt(self.dim) * self.rise(k) * unit
        out[:, 1] += 0.5 * self.h * np.sqrt(self.dim) * np.sum(unit[:, 1:] ** 2, axis=-1)
        return np.asarray(out)

    def jacobian(self, k: int) -> Array:
        """J_k = (sigma_{k+1} / sigma_k - 1) Pi, shape [d, d]."""
        result = np.eye(self.dim) * (self.rise(k) / self.sigma(k))
        result[0, 0] = 0.0
        return result

    def constants(self, sites: int, nearest: float = 1.0) -> NetworkConstants:
        """All constants, exactly: C_0 from alpha_k**2 (d - 1) / d, Lambda = 0, h_bar from the second derivatives.

        On a segment that keeps ||x|| >= nearest * ||z_k||: H_k <= (2 / sqrt(3) b_k + h sqrt(d)) / (nearest**2 d sigma_k**2), because
        the second derivative of n has norm 2 / (sqrt(3) ||x||**2) and that of ||Pi n||**2 at most 2 / ||x||**2 (docs/theory.md).

        Args:
            nearest: 1 - (largest ||E_k|| / ||z_k||) of the passes considered.
        """
        sigma = self.scales(sites)
        share = (np.diff(sigma) / sigma[:-1]) ** 2 * (self.dim - 1) / self.dim
        return NetworkConstants(
            dim=self.dim,
            sigma_0=float(sigma[0]),
            sigma_1=float(sigma[1]),
            delta_min=self.added,
            delta_max=self.added,
            c0=float(np.max(share[1:] * sigma[1:-1] ** 2, initial=0.0) / self.added),
            budget=0.0,
            curvature=float((2.0 / np.sqrt(3.0) * np.diff(sigma).max() + self.h) / nearest**2),
        )


def linearize(blocks: Blocks, sites: int) -> LinearNetwork:
    """The Jacobians and scales of the first `sites` sites."""
    return LinearNetwork(np.stack([blocks.jacobian(k) for k in range(sites)]), blocks.scales(sites))


@dataclass(frozen=True)
class Run:
    """M passes of the quantized network beside the exact one.

    Attributes:
        deviation: E_N, shape [M, d].
        linear: E_N^lin, shape [M, d].
        second_order: sum_n Phi_{N,n+1} r_n of the (stopped) remainders, shape [M, d].
        remainders: root mean square over the passes of ||r_n||, shape [N].
        largest: max over n <= N of ||E_n|| / sigma_n, shape [M].
        stopped: share of the passes in which some ||E_n||, n < N, exceeded the limit.
    """

    deviation: Array
    linear: Array
    second_order: Array
    remainders: Array
    largest: Array
    stopped: float


def run(blocks: Blocks, sites: int, injected: Array, feedback: FeedbackConfig, limit: float = np.inf) -> Run:
    """Run the exact and the quantized network (Eq. 14) with compensated errors.

    Args:
        sites: N.
        injected: delta_k, shape [n, M, d] with n <= N; later sites inject nothing.
        limit: a pass is stopped (its remainders count as zero from there on) where ||E_n|| / sigma_n exceeds it; Proposition 1
            has 2 kappa_p q_bar sqrt(d).
    """
    passes = injected.shape[1]
    scales = blocks.scales(sites)
    clean = np.zeros((1, blocks.dim))
    clean[0, 0] = np.sqrt(blocks.dim) * scales[0]
    deviation, linear, second = (np.zeros((passes, blocks.dim)) for _ in range(3))
    compensator = Compensator(feedback, (passes, blocks.dim))
    active = np.ones((passes, 1))
    remainders, largest, nothing = np.zeros(sites), np.zeros(passes), np.zeros((passes, blocks.dim))
    for k in range(sites):
        active[np.linalg.norm(deviation, axis=-1) > limit * scales[k]] = 0.0
        delta = injected[k] if k < injected.shape[0] else nothing
        rho = delta + compensator.correction()
        compensator.update(-delta)
        exact = blocks.block(k, clean)
        jacobian = blocks.jacobian(k).T
        response = blocks.block(k, clean + deviation) - exact  # psi_k of Eq. 15
        remainder = (response - deviation @ jacobian) * active
        remainders[k] = np.sqrt(np.mean(np.sum(remainder**2, axis=-1)))
        second = second + second @ jacobian + remainder
        linear = linear + linear @ jacobian + rho
        deviation = deviation + response + rho
        clean = clean + exact
        largest = np.maximum(largest, np.linalg.norm(deviation, axis=-1) / scales[k + 1])
    return Run(deviation, linear, second, remainders, largest, float(1.0 - active.mean()))
