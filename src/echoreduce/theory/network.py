"""The linearized network: E_N^lin three ways, and the constants C_0 and Lambda of a network whose Jacobians are known.

    direct        E_{k+1} = (I + J_k) E_k + rho_k                                                            (Eq. 15 without remainder)
    partial sums  E_N = S_{N-1} + sum_t Phi_{N,t+2} J_{t+1} S_t                                                               (Lemma 2)
    coefficients  E_N = sum_s K_s delta_s,  K_s = phi_{N-1-s} I + sum_{t >= s} phi_{t-s} Phi_{N,t+2} J_{t+1}                  (Lemma 3)

The paper states Lemma 3 at gain one (T for phi); the proof only uses Eq. 13, so phi gives every gain.

Cost: N products of d x d matrices; meant for d up to some hundreds. Real models: `integrations.estimate` (probes, no matrices).
Source: the paper, Appendix A.3 and A.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echoreduce.config import FeedbackConfig
from echoreduce.errors import ShapeError
from echoreduce.theory.bounds import NetworkConstants
from echoreduce.theory.weights import Array, remaining


@dataclass(frozen=True)
class LinearNetwork:
    """Jacobians and scales of a pass.

    Attributes:
        jacobians: J_k of the blocks, shape [N, d, d].
        scales: sigma_0 .. sigma_N, shape [N + 1].
    """

    jacobians: Array
    scales: Array

    def __post_init__(self) -> None:
        shape = self.jacobians.shape
        if len(shape) != 3 or shape[1] != shape[2] or self.scales.shape != (shape[0] + 1,):
            raise ShapeError(f"expected jacobians [N, d, d] and scales [N + 1], got {shape} and {self.scales.shape}")

    @property
    def sites(self) -> int:
        """N."""
        return int(self.jacobians.shape[0])

    @property
    def dim(self) -> int:
        """d."""
        return int(self.jacobians.shape[1])

    def prefix(self, sites: int) -> LinearNetwork:
        """The network that ends after `sites` sites."""
        return LinearNetwork(self.jacobians[:sites], self.scales[: sites + 1])


def propagate(network: LinearNetwork, net: Array) -> Array:
    """E_N^lin by running the linearized blocks one after the other.

    Args:
        net: rho_k, shape [N, *batch, d].
    Returns:
        E_N^lin, shape [*batch, d].
    """
    deviation = np.zeros(net.shape[1:])
    for jacobian, rho in zip(network.jacobians, net):
        deviation = deviation + deviation @ jacobian.T + rho
    return deviation


def from_partial_sums(network: LinearNetwork, partial: Array) -> Array:
    """E_N^lin by Lemma 2.

    Args:
        partial: S_t, shape [N, *batch, d].
    Returns:
        E_N^lin, shape [*batch, d].
    """
    total = partial[-1].copy()
    for source, early in zip(propagated_jacobians(network), partial[:-1]):
        total += early @ source.T
    return np.asarray(total)


def from_injected(coefficients: Array, injected: Array) -> Array:
    """E_N^lin by Lemma 3.

    Args:
        coefficients: K_s, shape [N, d, d].
        injected: delta_s, shape [N, *batch, d].
    Returns:
        E_N^lin, shape [*batch, d].
    """
    return np.asarray(np.einsum("sij,s...j->...i", coefficients, injected))


def propagated_jacobians(network: LinearNetwork) -> Array:
    """Phi_{N,t+2} J_{t+1} for t = 0 .. N - 2, shape [N - 1, d, d]: what carries S_t to the output (Lemma 2)."""
    product = np.eye(network.dim)
    result = np.empty((network.sites - 1, network.dim, network.dim))
    for t in range(network.sites - 2, -1, -1):
        result[t] = product @ network.jacobians[t + 1]
        product = product + result[t]
    return result


def coefficients(network: LinearNetwork, feedback: FeedbackConfig) -> Array:
    """K_s of Lemma 3, at any gain, shape [N, d, d]: what carries delta_s to the output.

    ||K_s||_F**2 / d is how much of the energy of a rounding at site s arrives: the figure by which bits are worth spending there.
    With single-step feedback at gain one K_{N-1} = I and K_s = Phi_{N,s+2} J_{s+1}.
    """
    sites = network.sites
    sources = propagated_jacobians(network)
    age = np.arange(sites - 1)[None, :] - np.arange(sites)[:, None]
    matrix = np.where(age >= 0, remaining(feedback, np.maximum(age, 0)), 0.0)
    identity = remaining(feedback, np.arange(sites)[::-1])[:, None, None] * np.eye(network.dim)
    return np.asarray(identity + np.tensordot(matrix, sources, axes=1))


def reinforcement(network: LinearNetwork) -> Array:
    """epsilon_k of Assumption 1 for k = 0 .. N - 1, shape [N]: the smallest that the first two collections of Eq. 23 need.

    epsilon_k = max(0, max_A ||(I + J_k) A||_F**2 / ||A||_F**2 * sigma_k**2 / sigma_{k+1}**2 - 1) over A = Phi_{k,l}, 1 <= l <= k, and
    A = Phi_{k,t+2} J_{t+1}. The convex hull adds nothing. epsilon_0 is zero: no deviation arrives at the first site. The third
    collection (second-order responses) is not in it: it needs the noise, and only Proposition 1 uses it.
    """
    sites, dim = network.sites, network.dim
    epsilon = np.zeros(sites)
    members = np.empty((0, dim, dim))
    for k in range(1, sites):
        fresh = [np.eye(dim)] + ([network.jacobians[k - 1]] if k >= 2 else [])
        members = np.concatenate((members, np.stack(fresh)))
        energy = np.sum(members**2, axis=(1, 2))
        members, energy = members[energy > 0], energy[energy > 0]
        members = members + network.jacobians[k] @ members
        ratio = np.max(np.sum(members**2, axis=(1, 2)) / energy)
        epsilon[k] = max(0.0, ratio * (network.scales[k] / network.scales[k + 1]) ** 2 - 1.0)
    return epsilon


def measure(network: LinearNetwork, curvature: float = 0.0) -> NetworkConstants:
    """The constants of a network from its Jacobians and scales: Delta_min, Delta_max, C_0, Lambda.

    Args:
        curvature: h_bar of R3, which Jacobians do not show.
    Raises:
        ConfigError: the scales do not increase (R1 does not hold).
    """
    energy = network.scales**2
    added = np.diff(energy)
    frobenius = np.sum(network.jacobians**2, axis=(1, 2)) / network.dim
    return NetworkConstants(
        dim=network.dim,
        sigma_0=float(network.scales[0]),
        sigma_1=float(network.scales[1]),
        delta_min=float(added.min()),
        delta_max=float(added.max()),
        c0=float(np.max(frobenius[1:] * energy[1:-1] / added[1:], initial=0.0)) if added.min() > 0 else 0.0,
        budget=float(reinforcement(network).sum()),
        curvature=curvature,
    )


def random_network(sites: int, dim: int, strength: float, seed: int, start: float = 1.0) -> LinearNetwork:
    """A random network that scales as R1 and R2 ask: sigma_k**2 grows by about one a site, J_k is Gaussian of size strength / sigma_k.

    Args:
        strength: root mean square singular value of J_k times sigma_k.
        seed: of numpy's default generator.
        start: sigma_0.
    """
    rng = np.random.default_rng(seed)
    added = rng.uniform(0.5, 1.5, sites)
    scales = np.sqrt(start**2 + np.concatenate(([0.0], np.cumsum(added))))
    noise = rng.standard_normal((sites, dim, dim)) / np.sqrt(dim)
    return LinearNetwork(noise * (strength / scales[:-1])[:, None, None], scales)
