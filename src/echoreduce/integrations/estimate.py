"""The figures of the paper's theory on a real model: constants by probes, errors by recording, deviations predicted and measured.

    probe    isotropic injections before every site, propagated exactly: ||J_k||, epsilon_k and Lambda of Assumption 1, ||K_s||
    follow   a pass of virtual ranks: delta_k, rho_k, S_t, the real deviation E_k, the linearized one, and the remainders r_k

One probe vector v serves every site. Then Phi_{k,j+1} J_j v = Phi_{k,j} v - Phi_{k,j+1} v gives the second collection of Eq. 23, and
K_s v = sum_m (phi_m - phi_{m-1}) Phi_{N,s+1+m} v gives Lemma 3 for every compensator, from the same N products. v is uniform on the
sphere of radius sqrt(d), so that E ||A v||**2 = ||A||_F**2 (Hutchinson, 1989).

Leaves out: verdicts (`verdicts`), printing and plotting (`cli`). Source: the paper, Sections 6.1, 6.2 and Appendix A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echoreduce import reference
from echoreduce.config import EchoConfig, FeedbackConfig, QuantConfig
from echoreduce.feedback import compensator
from echoreduce.feedback.compensator import FeedbackState
from echoreduce.integrations.residual_stream import ResidualStream
from echoreduce.integrations.transformers import attach
from echoreduce.partition import partition
from echoreduce.recording import Recording
from echoreduce.theory.measured import MeasuredNetwork, endpoint_budget, reinforcement, returned
from echoreduce.theory.weights import Array, remaining
from echoreduce.virtual import VirtualBackend


class KeepingBackend(VirtualBackend):
    """Virtual ranks that keep the tensors of one pass.

    Attributes:
        injected: delta_k by site, fp32, shape of the message.
        net: rho_k = y_k - sum_i x_k,i by site (Eq. 5), with the rounding of y to its dtype.
        exact: sum_i x_k,i by site.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.injected: list[Tensor] = []
        self.net: list[Tensor] = []
        self.exact: list[Tensor] = []

    def all_reduce(
        self,
        x: Tensor,
        quant: QuantConfig,
        algorithm: str,
        state: FeedbackState | None = None,
        out: Tensor | None = None,
        *,
        recording: Recording | None = None,
        rescale: bool = False,
    ) -> Tensor:
        """As `VirtualBackend.all_reduce`."""
        owed = compensator.correction(state) if state is not None else None
        result = super().all_reduce(x, quant, algorithm, state, out, recording=recording, rescale=rescale)
        exact = reference.in_rank_order(x.float())
        delta = torch.zeros_like(exact)
        if quant.bits != 16 and self.world_size > 1:
            cut = partition(exact.numel(), self.world_size, quant.group_size)
            record = reference.trace(x, quant, algorithm, owed)
            delta = reference.leave(reference.injected_error(record), quant, cut, exact.shape, torch.float32)
        self.injected.append(delta)
        self.net.append(result.float() - exact)
        self.exact.append(exact)
        return result


@dataclass(frozen=True)
class Probes:
    """Energies of propagated isotropic vectors, one row a probe; divided by ||v||**2 = d.

    Attributes:
        first: ||Phi_{k,j} v||**2 / d, shape [probes, N + 1, N + 1] by (j, k), 1 <= j <= k.
        second: ||Phi_{k,j+1} J_j v||**2 / d, the same shape, 1 <= j < k; (j, j + 1) is ||J_j||_F**2 / d.
        coefficients: ||K_s v||**2 / d by compensator, each [probes, N].
        scales: sigma_0 .. sigma_N.
        dim: d.
    """

    first: Array
    second: Array
    coefficients: dict[str, Array]
    scales: Array
    dim: int

    def network(self, rows: slice = slice(None)) -> MeasuredNetwork:
        """The network's figures by the mean over (some of) the probes."""
        first, second = self.first[rows].mean(0), self.second[rows].mean(0)
        sites = self.scales.size - 1
        jacobian = np.array([second[k, k + 1] for k in range(sites)])
        epsilon, arriving = reinforcement(first, second, self.scales), endpoint_budget(first, second, self.scales)
        return MeasuredNetwork(self.dim, self.scales, jacobian, epsilon, arriving)

    def spread(self, figure: Callable[[MeasuredNetwork], float]) -> float:
        """Standard error of a figure, from its values on the probes one by one; 0 for a single probe."""
        count = self.first.shape[0]
        return standard_error(np.array([figure(self.network(slice(i, i + 1))) for i in range(count)]))


def standard_error(values: Array) -> float:
    """Of the mean of independent values; 0 for one."""
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 0.0


def scales_of(stream: ResidualStream) -> Array:
    """sigma_k = ||z_k|| / sqrt(d), shape [N + 1]."""
    return np.asarray(norms(stream.clean) / np.sqrt(stream.dim))


def energies(vectors: Tensor) -> Array:
    """Squared norms of rows [rows, ...], float64 [rows]."""
    return np.asarray(vectors.double().square().flatten(1).sum(1).cpu())


def isotropic(shape: torch.Size, probes: int, seed: int) -> Tensor:
    """Vectors uniform on the sphere of radius sqrt(d), shape [probes, *shape]."""
    noise = torch.randn(probes, *shape, generator=torch.Generator().manual_seed(seed))
    flat = noise.flatten(1)
    sphere: Tensor = flat * (flat.shape[1] ** 0.5 / flat.norm(dim=1, keepdim=True))
    return sphere.reshape(noise.shape)


def probe(
    stream: ResidualStream,
    compensators: Mapping[str, FeedbackConfig],
    probes: int = 2,
    seed: int = 0,
    step: Callable[[], None] | None = None,
) -> Probes:
    """Propagate isotropic injections from before every site to the end, at no error in the products.

    Args:
        stream: the clean stream.
        compensators: those whose ||K_s|| are wanted, by name.
        probes: independent vectors, run side by side.
        step: called after each of the N - 1 starts.
    """
    sites, dim = stream.sites, stream.dim
    v = isotropic(stream.clean[0].shape[1:], probes, seed).to(stream.clean[0])
    first, second = np.zeros((probes, sites + 1, sites + 1)), np.zeros((probes, sites + 1, sites + 1))
    first[:, sites, sites] = 1.0
    final = {sites: v}
    following = {sites: v}
    for j in range(sites - 1, 0, -1):
        arrived = stream.tangents(injected={j - 1: v}, rows=probes)
        for k in range(j, sites + 1):
            first[:, j, k] = energies(arrived[k]) / dim
            if k > j:
                second[:, j, k] = energies(arrived[k] - following[k]) / dim
        following = arrived
        final[j] = arrived[sites]
        if step is not None:
            step()
    coefficients = {}
    for name, feedback in compensators.items():
        shares = returned(feedback, sites)
        rows = [sum((float(shares[m]) * final[s + 1 + m] for m in range(sites - s) if shares[m] != 0.0), 0.0 * v) for s in range(sites)]
        coefficients[name] = np.stack([energies(row) / dim for row in rows], axis=1)
    return Probes(first, second, coefficients, scales_of(stream), dim)


@dataclass(frozen=True)
class Trajectory:
    """One quantized pass beside the clean one. Norms are over all tokens and entries; shape [N] unless said otherwise.

    Attributes:
        injected: ||delta_k||, in the message.
        relative: ||delta_k|| / ||sum_i x_k,i||.
        joined: ||delta_k|| as it joins the stream (differs behind a norm only).
        partial: ||S_t|| in the message.
        joined_partial: the same of what joins the stream.
        departure: max_t ||S_t - sum_s phi_{t-s} delta_s|| / max_t ||S_t||: how far Eq. 13 is from exact (state dtype, casts).
        correlation: <delta_k, delta_l> / (||delta_k|| ||delta_l||), shape [N, N]; 0 where a site injects nothing.
        unevenness: largest mean square of delta_k over tokens, over its mean: 1 for isotropic errors.
        deviation: ||E_k||, shape [N + 1].
        linear: ||E_k^lin||, shape [N + 1].
        second_order: ||E_k - E_k^lin||, shape [N + 1].
        remainders: ||r_k||, r_k = F_k(z_k + E_k) - F_k(z_k) - J_k E_k (Eq. 16).
        growth: ||J_k E_k|| / ||E_k||: what block k makes of the deviation that is really there.
        token_deviation: median over tokens of ||E_N||**2 / ||z_N||**2.
    """

    injected: Array
    relative: Array
    joined: Array
    partial: Array
    joined_partial: Array
    departure: float
    correlation: Array
    unevenness: Array
    deviation: Array
    linear: Array
    second_order: Array
    remainders: Array
    growth: Array
    token_deviation: float


def follow(stream: ResidualStream, config: EchoConfig, world_size: int) -> Trajectory:
    """Run one pass of virtual ranks on the stream's tokens and compare it with the clean one."""
    backend = KeepingBackend(world_size)
    with attach(stream.model, config, backend=backend):
        perturbed = stream.visit()
    shape = stream.clean[0].shape
    exact, net, injected = ([kept.reshape(shape) for kept in rows] for rows in (backend.exact, backend.net, backend.injected))
    joined = [block.joined(total, delta) for block, total, delta in zip(stream.blocks, exact, injected)]
    joined_net = [block.joined(total, rho) for block, total, rho in zip(stream.blocks, exact, net)]
    deviation = [there - clean for there, clean in zip(perturbed, stream.clean)]
    linear = stream.tangents(injected=dict(enumerate(joined_net)))
    alone = stream.tangents(read=dict(enumerate(deviation[:-1])))
    carried = [alone[k + 1] - alone[k] for k in range(stream.sites)]
    remainders = [deviation[k + 1] - deviation[k] - joined_net[k] - carried[k] for k in range(stream.sites)]
    second_order = [deviation[k] - linear[k] for k in range(stream.sites + 1)]
    lengths = norms(deviation)
    return Trajectory(
        injected=norms(injected),
        relative=norms(injected) / norms(exact),
        joined=norms(joined),
        partial=norms(running_sums(net)),
        joined_partial=norms(running_sums(joined_net)),
        departure=departure(injected, net, config.feedback),
        correlation=correlations(injected),
        unevenness=np.array([unevenness(delta) for delta in joined]),
        deviation=lengths,
        linear=norms([linear[k] for k in range(stream.sites + 1)]),
        second_order=norms(second_order),
        remainders=norms(remainders),
        growth=np.divide(norms(carried), lengths[:-1], out=np.zeros(stream.sites), where=lengths[:-1] > 0),
        token_deviation=median_by_token(deviation[-1], stream.clean[-1]),
    )


def median_by_token(deviation: Tensor, clean: Tensor) -> float:
    """Median over tokens of ||E_N||**2 / ||z_N||**2, what the final norm of a typical token sees."""
    ratio = deviation.double().square().sum(-1) / clean.double().square().sum(-1)
    return float(ratio.median())


def norms(vectors: list[Tensor]) -> Array:
    """Norm of each, float64 [len]."""
    return np.array([vector.double().norm().item() for vector in vectors])


def running_sums(vectors: list[Tensor]) -> list[Tensor]:
    """S_t = sum_{k <= t} of them."""
    total = torch.zeros_like(vectors[0])
    sums = []
    for vector in vectors:
        total = total + vector
        sums.append(total)
    return sums


def departure(injected: list[Tensor], net: list[Tensor], feedback: FeedbackConfig) -> float:
    """max_t ||S_t - sum_{s <= t} phi_{t-s} delta_s|| / max_t ||S_t|| (Eq. 13)."""
    phi = remaining(feedback, np.arange(len(injected)))
    worst, largest = 0.0, 0.0
    for t, total in enumerate(running_sums(net)):
        predicted = torch.zeros_like(total)
        for s in range(t + 1):
            if phi[t - s] != 0.0:
                predicted += float(phi[t - s]) * injected[s]
        worst = max(worst, (total - predicted).norm().item())
        largest = max(largest, total.norm().item())
    return worst / largest if largest > 0 else 0.0


def correlations(vectors: list[Tensor]) -> Array:
    """Cosines between all pairs, shape [N, N]; rows of zero vectors are zero."""
    flat = torch.stack([vector.flatten().double() for vector in vectors])
    length = flat.norm(dim=1, keepdim=True)
    unit = flat / torch.where(length > 0, length, 1.0)
    return np.asarray((unit @ unit.T).cpu())


def unevenness(delta: Tensor) -> float:
    """Largest mean square over tokens (all but the last dimension), over the mean; 1 where there is no error."""
    energy = delta.double().square().mean(-1).flatten()
    return float(energy.max() / energy.mean()) if energy.mean() > 0 else 1.0
