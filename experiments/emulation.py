"""The compensated all-reduce over any wire format, on the stacked contributions of virtual ranks.

Why: `wire_formats` says what a receiver reads; this says what that does to a model. It is `echoreduce.reference` with the quantizer
replaced, the local residual in fp32, and what the library does not offer: another format for gather than for push, feedback returned
several sites later, a gain that changes with depth, and owners that round their own segment too. With the library's own grid it gives
the library's bits (tests/experiments/test_emulation.py), so that figures of both stand in one table.

Leaves out: the paper's residual and two averages (the library has them), non-finite values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echoreduce import reference
from echoreduce.config import EchoConfig, FeedbackConfig, QuantConfig
from echoreduce.partition import partition
from echoreduce.quant.rotation import hadamard
from echoreduce.recording import Recording
from echoreduce.sites import bits_at
from echoreduce.virtual import VirtualBackend
from wire_formats import Format

#: Bits by which a site policy asks for `Emulation.edge`; at 16 the sum is exact, at all others `Emulation.body` is used.
EDGE_BITS = 8

PLAIN = QuantConfig()


@dataclass(frozen=True)
class Wire:
    """Format of the contributions and format of the sum (one-shot sends no sum)."""

    push: Format
    gather: Format

    @property
    def block(self) -> int:
        """Values that both formats divide."""
        return math.lcm(self.push.block, self.gather.block)

    def bits_per_value(self, algorithm: str, world_size: int) -> float:
        """Normalized so that a 16-bit all-reduce has 16 (`evaluation.bits_per_value`)."""
        if algorithm == "one_shot":
            return self.push.bits_per_value * world_size / 2
        return (self.push.bits_per_value + self.gather.bits_per_value) / 2


@dataclass(frozen=True)
class Emulation:
    """One compensated all-reduce that the library does not have.

    Attributes:
        body: format of most sites.
        edge: format of the sites to which the site policy gives `EDGE_BITS`.
        rotation: values of a Hadamard block, a power of two; 0: none.
        gain: (first, last): gain of the correction at the first and at the last site, linear in between.
        lag: sites after which a residual is returned; 2 keeps attention and MLP sites apart.
        quantize_own: an owner rounds its own segment as its peers do, so that a value does not depend on who owns it.
        signs: a fixed pattern of signs before the rotation, so that a block of equal values does not become one large one.
    """

    body: Wire
    edge: Wire
    rotation: int = 0
    gain: tuple[float, float] = (1.0, 1.0)
    lag: int = 1
    quantize_own: bool = False
    signs: bool = False

    @property
    def block(self) -> int:
        """Values that every format and the rotation divide, so that all sites are cut alike."""
        return math.lcm(self.body.block, self.edge.block, max(self.rotation, 1))

    def wire(self, bits: int) -> Wire:
        """What a site of `bits` bits sends."""
        return self.edge if bits == EDGE_BITS else self.body

    def gain_at(self, site: int, sites: int) -> float:
        """Gain of site `site` of a pass."""
        first, last = self.gain
        return first if sites < 2 else first + (last - first) * site / (sites - 1)


@dataclass
class EmulatedState:
    """Residuals of the last `lag` compensated sites, oldest first, fp32 [P, S, L]; empty at the start of a pass."""

    residuals: list[Tensor] = field(default_factory=list)
    site: int = 0

    def reset(self) -> None:
        """Start a pass."""
        self.residuals, self.site = [], 0


class EmulatedBackend(VirtualBackend):
    """Virtual ranks on emulated wires; `attach(model, config, backend=EmulatedBackend(...))`.

    Of the configuration the site policy, the algorithm and whether there is feedback count; the rest is `emulation`.

    Args:
        world_size: P.
        emulation: formats and feedback.
        sites: all-reduces of a pass.
    """

    def __init__(self, world_size: int, emulation: Emulation, sites: int) -> None:
        super().__init__(world_size)
        self.emulation = emulation
        self.sites = sites

    def new_state(self, feedback: FeedbackConfig) -> EmulatedState:  # type: ignore[override]
        """Empty feedback state of all P ranks."""
        return EmulatedState()

    def all_reduce(  # type: ignore[override]
        self,
        x: Tensor,
        quant: QuantConfig,
        algorithm: str,
        state: EmulatedState | None = None,
        out: Tensor | None = None,
        *,
        recording: Recording | None = None,
        rescale: bool = False,
    ) -> Tensor:
        """Sum the rows of x [P, *shape] through the emulated wire."""
        assert (out, recording, rescale) == (None, None, False), "only plain inference is emulated"
        site = 0
        if state is not None:
            site, state.site = state.site, state.site + 1
        if quant.bits == 16 or self.world_size == 1:
            return reference.in_rank_order(x.float()).to(x.dtype)
        setting = self.emulation
        flat = x.detach().reshape(self.world_size, -1)
        cut = partition(flat.shape[1], self.world_size, setting.block)
        compensated = turn(reference.to_blocks(flat, cut, PLAIN).flatten(-2), setting.rotation, setting.signs)
        if state is not None and len(state.residuals) == setting.lag:
            returned, gain = state.residuals.pop(0), setting.gain_at(site, self.sites)
            compensated = compensated + (returned if gain == 1.0 else returned * gain)
        values, residual = exchange(compensated, setting.wire(quant.bits), algorithm, setting.quantize_own)
        if state is not None:
            state.residuals.append(residual)
        return reference.leave(turn_back(values, setting.rotation, setting.signs), PLAIN, cut, x.shape[1:], x.dtype)


def exchange(compensated: Tensor, wire: Wire, algorithm: str, quantize_own: bool = False) -> tuple[Tensor, Tensor]:
    """Push, reduce, gather, tail.

    Args:
        compensated: x' of all ranks, fp32 [P, S, L], S = P.
    Returns:
        (what every rank reads, fp32 [S, L]; local residuals, fp32 [P, S, L]: they add up to -delta).
    """
    received = wire.push.encode_decode(compensated)
    if algorithm == "one_shot":
        return reference.in_rank_order(received), compensated - received
    owner = torch.arange(compensated.shape[0], device=compensated.device)
    if not quantize_own:
        received[owner, owner] = compensated[owner, owner]
    sums = reference.in_rank_order(received)
    values = wire.gather.encode_decode(sums)
    residual = compensated - received
    residual[owner, owner] += sums - values
    return values, residual


def turn(values: Tensor, rotation: int, signs: bool = False) -> Tensor:
    """Hadamard of blocks of `rotation` values along the last dimension, after the pattern of signs."""
    if rotation == 0:
        return values
    blocks = values.unflatten(-1, (-1, rotation))
    return hadamard(blocks * sign_pattern(blocks) if signs else blocks).flatten(-2)


def turn_back(values: Tensor, rotation: int, signs: bool = False) -> Tensor:
    """Inverse of `turn`."""
    if rotation == 0:
        return values
    blocks = hadamard(values.unflatten(-1, (-1, rotation)))
    return (blocks * sign_pattern(blocks) if signs else blocks).flatten(-2)


def sign_pattern(like: Tensor) -> Tensor:
    """The same +1 and -1 for every block [*batch, rotation]."""
    generator = torch.Generator().manual_seed(0)
    return (2.0 * torch.randint(0, 2, (like.shape[-1],), generator=generator) - 1.0).to(like)


def emulated_bits(emulation: Emulation, config: EchoConfig, world_size: int, numel: int, sites: int) -> float:
    """Bits on the links per value of the message, as `evaluation.bits_per_value`."""
    algorithm = config.algorithm_for(world_size, numel)
    sent = 0.0
    for site in range(sites):
        bits = bits_at(config.sites, site, sites, config.quant.bits)
        sent += 16.0 if bits == 16 else emulation.wire(bits).bits_per_value(algorithm, world_size)
    return sent / sites
