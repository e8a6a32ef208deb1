"""Runs a program on the arrays of all ranks in one process: exactly, or with every hop requantized.

Why: the sum is the product, and what a b-bit wire does to it depends on the path. This interpreter is where the two meet: it plays any
program with any quantizer, so ring, tree, butterfly, one-shot and two-shot can be compared at equal bits.

Rules. Contributions that arrive in one round are added in rank order, the destination's own at its rank's place, so all ranks that add
the same values get the same bits. With a quantizer, a sender replaces its own values by the decoded codes that it sends: whoever
keeps a copy agrees with whoever got one (the owner of two-shot, every rank of one-shot). A value that already is a decoded
code is forwarded as that code, without another rounding. Leaves out: wire layout and error feedback (see `quant`, `reference`).
Source: the paper, Section 4.1; docs/design.md, Sections 3 and 8.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from echoreduce.collectives.program import IntArray, Program, Round, chunk_starts
from echoreduce.errors import ShapeError

#: Quantize and dequantize one chunk, shape [values] -> [values].
Requantize = Callable[[NDArray], NDArray]
#: (source, destination), each int64 [transfers] -> which of them travel over a quantized link, bool [transfers].
QuantizedLinks = Callable[[IntArray, IntArray], NDArray[np.bool_]]


def execute(
    program: Program, contributions: NDArray, requantize: Requantize | None = None, quantized_links: QuantizedLinks | None = None
) -> NDArray:
    """All-reduce the rows of `contributions` by the program.

    Args:
        program: any program; not proven here (see `proof.prove`).
        contributions: shape [world_size, numel], any numeric dtype; not modified.
        requantize: what the wire does to a chunk; None for an exact wire.
        quantized_links: which links requantize; None for all.
    Returns:
        What every rank ends with, shape [world_size, numel], dtype of the input.
    Raises:
        ShapeError: not one row a rank.
    Cost: rounds x transfers slices of numpy; meant for up to a few hundred ranks.
    """
    if contributions.ndim != 2 or contributions.shape[0] != program.world_size:
        raise ShapeError(f"contributions must have shape [{program.world_size}, numel], got {list(contributions.shape)}")
    switches = np.zeros((program.switches, contributions.shape[1]), dtype=contributions.dtype)
    state = _State(np.concatenate([contributions, switches]), chunk_starts(contributions.shape[1], program.chunks))
    for round_ in program.rounds():
        transfers = round_.per_chunk()
        if requantize is not None:
            lossy = np.ones(len(transfers), dtype=bool)
            if quantized_links is not None:
                lossy = quantized_links(transfers.src, transfers.dst)
            state.encode(transfers.select(lossy), requantize)
        state.deliver(transfers)
    return state.values[: program.world_size]


class _State:
    """Buffers of all participants, and which chunks are decoded codes."""

    def __init__(self, values: NDArray, starts: IntArray) -> None:
        self.values = values
        self.starts = starts
        self.coded = np.zeros((values.shape[0], starts.size - 1), dtype=bool)

    def chunk(self, participant: int, chunk: int) -> NDArray:
        return self.values[participant, self.starts[chunk] : self.starts[chunk + 1]]

    def encode(self, transfers: Round, requantize: Requantize) -> None:
        """Senders replace what they send by its decoded codes, once a chunk."""
        for src, chunk in sorted(set(zip(transfers.src.tolist(), transfers.lo.tolist()))):
            if not self.coded[src, chunk]:
                part = self.chunk(src, chunk)
                if part.size:
                    part[:] = requantize(part)
                self.coded[src, chunk] = True

    def deliver(self, transfers: Round) -> None:
        """Copies replace, reduces add in rank order; everything reads the state before the round."""
        coded = self.coded[transfers.src, transfers.lo]
        arriving: dict[tuple[int, int], list[tuple[int, NDArray]]] = {}
        copies: list[tuple[NDArray, NDArray]] = []
        for src, dst, chunk, reduce in zip(
            transfers.src.tolist(), transfers.dst.tolist(), transfers.lo.tolist(), transfers.reduce.tolist()
        ):
            part = self.chunk(src, chunk).copy()
            if reduce:
                arriving.setdefault((dst, chunk), []).append((src, part))
            else:
                copies.append((self.chunk(dst, chunk), part))
        self.coded[transfers.dst, transfers.lo] = coded & ~transfers.reduce
        for (dst, chunk), parts in arriving.items():
            own = self.chunk(dst, chunk)
            ordered = [part for _, part in sorted([*parts, (dst, own.copy())], key=lambda item: item[0])]
            total = ordered[0]
            for part in ordered[1:]:
                total = total + part
            own[:] = total
        for place, part in copies:
            place[:] = part
