"""A collective as data: rounds of transfers of chunks, each copied or reduced at its destination.

Why: one description serves every reader of it. The proof (`proof`), real tensors (`interpreter`), traffic and roundings (`counters`), the
clock (`echoreduce.cost`) and a real process group (`run`) all interpret the same `Program`, so what is proven is what is priced and run.

Meaning. The message is cut into `chunks` chunks; chunk c holds the values floor(c X / C) .. floor((c + 1) X / C) (`chunk_starts`). Every
participant owns a buffer of the whole message: a rank's starts with its contribution, a switch's with zeros. All transfers of a round read
the state at the round's start; then `copy` replaces and `reduce` adds. Transfers of one round with the same source and destination are one
message. A phase is a number of rounds of equal shape: the same messages of the same numbers of chunks, only other chunks. That is
what lets the simulator price a ring of 100,000 ranks without writing its 2 * 10^10 transfers down.

Leaves out: which values a chunk holds, what the wire format is, and how long anything takes.
Source: msccl's programs (Cowan et al., 2023) for the idea; Patarasuk and Yuan (2009), Section 2, for the model; docs/design.md, Section 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from echoreduce.errors import ConfigError

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

#: Home of a switch that belongs to no node.
NETWORK = -1


def chunk_starts(numel: int, chunks: int) -> IntArray:
    """First value of each chunk, and the end: floor(c * numel / chunks) for c = 0 .. chunks.

    Any two cyclically adjacent chunks hold at least floor(2 numel / chunks) values together, which is why a ring over these chunks meets
    Patarasuk and Yuan's bound for every message length, not only for multiples of the world size (see `bound`).

    Args:
        numel: values of the message, >= 0, up to 2^62.
        chunks: number of chunks, >= 1.
    Returns:
        int64, shape [chunks + 1]; the product is formed without overflow.
    Raises:
        ConfigError: a negative length or no chunk.
    """
    if numel < 0 or chunks < 1:
        raise ConfigError(f"cannot cut {numel} values into {chunks} chunks")
    whole, rest = divmod(numel, chunks)
    index = np.arange(chunks + 1, dtype=np.int64)
    return index * whole + index * rest // chunks


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of one round, in the order in which their sources send them.

    Attributes:
        src, dst: participants, int64, shape [messages].
        chunks: chunks carried by each message.
        reduced: how many of them are added at the destination (the others are copied).
    """

    src: IntArray
    dst: IntArray
    chunks: IntArray
    reduced: IntArray


@dataclass(frozen=True, eq=False)
class Round:
    """Transfers that happen together; all arrays have shape [transfers].

    Attributes:
        src, dst: participants, int64. A source sends in array order.
        lo, hi: chunks lo .. hi - 1 are carried, int64.
        reduce: True adds at the destination, False replaces.
    """

    src: IntArray
    dst: IntArray
    lo: IntArray
    hi: IntArray
    reduce: BoolArray

    @staticmethod
    def of(src: ArrayLike, dst: ArrayLike, lo: ArrayLike, hi: ArrayLike, reduce: bool) -> Round:
        """A round from array-likes of one broadcast shape; `hi` is one past the last chunk."""
        a, b, c, d = np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (src, dst, lo, hi)))
        return Round(a.ravel(), b.ravel(), c.ravel(), d.ravel(), np.full(a.size, reduce))

    @staticmethod
    def join(rounds: Iterable[Round]) -> Round:
        """One round with the transfers of several, in order."""
        parts = list(rounds)
        if not parts:
            return Round.of([], [], [], [], False)
        fields = (np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "dst", "lo", "hi", "reduce"))
        return Round(*fields)

    def __len__(self) -> int:
        return int(self.src.size)

    def select(self, index: ArrayLike) -> Round:
        """The transfers at `index` (a mask or positions)."""
        at = np.asarray(index)
        return Round(self.src[at], self.dst[at], self.lo[at], self.hi[at], self.reduce[at])

    def per_chunk(self) -> Round:
        """The same round with one transfer for each chunk carried."""
        width = self.hi - self.lo
        if np.all(width == 1):
            return self
        of = np.repeat(np.arange(len(self)), width)
        chunk = self.lo[of] + np.arange(of.size) - np.repeat(np.cumsum(width) - width, width)
        return Round(self.src[of], self.dst[of], chunk, chunk + 1, self.reduce[of])

    def messages(self) -> Messages:
        """Transfers gathered by (source, destination), in order of first appearance."""
        width = self.hi - self.lo
        reduced = np.where(self.reduce, width, 0)
        if len(self) < 2:
            return Messages(self.src, self.dst, width, reduced)
        span = int(max(self.src.max(), self.dst.max())) + 1
        key = self.src * span + (self.dst - self.src) % span
        if np.all(key[1:] > key[:-1]):  # the builders' usual order: no two transfers share source and destination
            return Messages(self.src, self.dst, width, reduced)
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        first = first[order]
        totals = (np.bincount(group, weights=w, minlength=order.size)[order].astype(np.int64) for w in (width, reduced))
        return Messages(self.src[first], self.dst[first], *totals)


@dataclass(frozen=True)
class Phase:
    """Rounds of equal shape.

    Attributes:
        label: what the phase does, for tables and counterexamples.
        steps: number of rounds.
        build: `(step, ranks) -> Round`: the transfers of that step whose source is in `ranks` (int64, sorted). Phases of a program
            without a `period`, and those in which switches send, are only ever asked for all ranks and may ignore `ranks`.
    """

    label: str
    steps: int
    build: Callable[[int, IntArray], Round]


@dataclass(frozen=True)
class Program:
    """An all-reduce over `world_size` ranks.

    Attributes:
        name: the algorithm's name in `catalogue`.
        world_size: ranks, numbered 0 .. world_size - 1; node k holds ranks k * ranks_per_node and following.
        chunks: chunks of the message.
        phases: what happens, in order.
        switch_homes: one entry for each switch, a participant from world_size on that adds and copies but contributes nothing (in-switch
            reduction): the node that it sits in, or NETWORK.
        period: claims that all ranks play the same part, and that ranks r and r + period do so even when nodes are told apart (a
            relabelling of ranks and chunks that moves whole nodes maps one on the other), so the first `period` ranks stand for all.
            None claims nothing.
    """

    name: str
    world_size: int
    chunks: int
    phases: tuple[Phase, ...]
    switch_homes: tuple[int, ...] = ()
    period: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"{self.name}: world_size must be at least 1, got {self.world_size}")

    @property
    def switches(self) -> int:
        """Switches that take part."""
        return len(self.switch_homes)

    @property
    def participants(self) -> int:
        """Ranks and switches."""
        return self.world_size + self.switches

    @property
    def round_count(self) -> int:
        """Rounds, 2 (N - 1) for the ring."""
        return sum(phase.steps for phase in self.phases)

    def rounds(self) -> Iterator[Round]:
        """All rounds in order, each built when asked for."""
        everyone = np.arange(self.world_size, dtype=np.int64)
        for phase in self.phases:
            for step in range(phase.steps):
                yield phase.build(step, everyone)


def fixed(label: str, round_: Round) -> Phase:
    """A phase of the one given round."""
    return Phase(label, 1, lambda step, ranks: round_)


def from_rounds(name: str, world_size: int, chunks: int, rounds: Iterable[Round], switch_homes: tuple[int, ...] = ()) -> Program:
    """A program from rounds written out, for mutated programs and for algorithms brought from elsewhere."""
    phases = tuple(fixed(f"round {i}", r) for i, r in enumerate(rounds))
    return Program(name, world_size, chunks, phases, switch_homes)
