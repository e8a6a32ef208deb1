"""The error stream of a pass, simulated: the compensator's own recurrence fed with injected errors, and the sequences that test it.

    C_k = sum_j weight_j m_j       rho_k = delta_k + C_k       S_k = S_{k-1} + rho_k       m_j <- b_j m_j + (1 - b_j) (-delta_k)

This is Eq. 5, 6, 10 and 11 summed over the group (sum_i u_i = -delta, Eq. 4), step by step and without any closed form, so that the
closed forms of `weights` and `source` can be judged against it.

Leaves out: the network behind the sites (`network`), ranks one by one (`residuals`), real quantizers (`reference`).
Source: the paper, Sections 3.3 and 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echoreduce.config import FeedbackConfig
from echoreduce.errors import ConfigError
from echoreduce.theory.weights import Array, remaining


class Compensator:
    """Eq. 10 and 11 in float64: the twin of `feedback.compensator` that needs no torch. One object serves one pass.

    Args:
        feedback: the setting; `residual="none"` makes every correction zero.
        shape: shape of one residual.
    """

    def __init__(self, feedback: FeedbackConfig, shape: tuple[int, ...]) -> None:
        self.weights = feedback.weights
        self.state = [np.zeros(shape) for _ in self.weights]
        self.shape = shape

    def correction(self) -> Array:
        """c_k from the residuals seen so far, shape of one residual."""
        return sum((weight * state for (weight, _), state in zip(self.weights, self.state)), np.zeros(self.shape))

    def update(self, residual: Array) -> None:
        """Take in u_k."""
        self.state = [decay * state + (1.0 - decay) * residual for (_, decay), state in zip(self.weights, self.state)]


@dataclass(frozen=True)
class Stream:
    """One pass.

    Attributes:
        injected: delta_k, shape [N, *batch, d].
        correction: C_k, shape as `injected`.
        net: rho_k = delta_k + C_k (Eq. 5).
        partial: S_t, shape as `injected` (Eq. 6).
    """

    injected: Array
    correction: Array
    net: Array
    partial: Array

    def largest(self) -> float:
        """max_t ||S_t|| over the pass and the batch; the norm is over the last dimension."""
        return float(np.linalg.norm(self.partial, axis=-1).max(initial=0.0))


def run(injected: Array, feedback: FeedbackConfig) -> Stream:
    """Feed a pass of injected errors through the recurrence.

    Args:
        injected: delta_k, float64, shape [N, *batch, d].
        feedback: the compensator.
    """
    compensator = Compensator(feedback, injected.shape[1:])
    correction = np.empty_like(injected)
    for k, delta in enumerate(injected):
        correction[k] = compensator.correction()
        compensator.update(-delta)
    net = injected + correction
    return Stream(injected, correction, net, np.cumsum(net, axis=0))


def closed_form(injected: Array, feedback: FeedbackConfig) -> Array:
    """S_t = sum_{s <= t} phi_{t-s} delta_s (Eq. 13; Lemma 1 at gain one).

    Args:
        injected: delta_k, shape [N, *batch, d].
    Returns:
        S_t, shape as `injected`.
    """
    sites = injected.shape[0]
    age = np.arange(sites)[:, None] - np.arange(sites)[None, :]
    matrix = np.where(age >= 0, remaining(feedback, np.maximum(age, 0)), 0.0)
    return np.asarray(np.tensordot(matrix, injected, axes=1))


def constant(sites: int, dim: int, q: float) -> Array:
    """delta_k = q e for a fixed unit vector e: reaches N q without feedback (Theorem 1). Shape [N, d]."""
    return np.full((sites, dim), q / np.sqrt(dim))


def alternating(sites: int, dim: int, q: float) -> Array:
    """delta_k = (-1)**k q e. Shape [N, d]."""
    signs: Array = np.where(np.arange(sites) % 2 == 0, 1.0, -1.0)
    return signs[:, None] * constant(sites, dim, q)


def random_sphere(shape: tuple[int, ...], q: float, seed: int) -> Array:
    """Independent errors, uniform on the sphere of radius q: the noise model of Eq. 22 with equality.

    Args:
        shape: [N, *batch, d]; one error for each index of all but the last dimension.
        q: their norm.
        seed: of numpy's default generator.
    """
    noise = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(q * noise / np.linalg.norm(noise, axis=-1, keepdims=True))


def correlated(sites: int, dim: int, q: float, rho: float, seed: int, passes: int = 1) -> Array:
    """Gaussian errors with E <delta_k, delta_{k+l}> = q**2 rho**l. Shape [N, passes, d].

    Raises:
        ConfigError: |rho| > 1.
    """
    if abs(rho) > 1.0:
        raise ConfigError(f"rho must lie in [-1, 1], got {rho}")
    noise = np.random.default_rng(seed).standard_normal((sites, passes, dim)) * (q / np.sqrt(dim))
    for k in range(1, sites):
        noise[k] = rho * noise[k - 1] + np.sqrt(1.0 - rho**2) * noise[k]
    return np.asarray(noise)


def adversarial(sites: int, dim: int, q: float, feedback: FeedbackConfig, seed: int) -> Array:
    """An adversary that sees the state: each error of norm q points where it makes ||S_k|| = ||S_{k-1} + C_k + delta_k|| largest.

    Returns:
        delta_k, shape [N, d].
    """
    rng = np.random.default_rng(seed)
    compensator = Compensator(feedback, (dim,))
    injected = np.empty((sites, dim))
    partial = np.zeros(dim)
    for k in range(sites):
        before = partial + compensator.correction()
        direction = before if np.linalg.norm(before) > 1e-9 * q else rng.standard_normal(dim)
        injected[k] = q * direction / np.linalg.norm(direction)
        compensator.update(-injected[k])
        partial = before + injected[k]
    return injected
