"""Counts what a program costs in traffic, memory and roundings, exactly and per rank.

Why: bytes against Patarasuk and Yuan's bound, rounds against the latency term, and roundings against the error are the three
numbers in which the algorithms differ. Time is not counted here (`echoreduce.cost`).

Roundings follow the rules of `interpreter`: a sender adopts its own codes, a decoded code is forwarded as it is. `roundings` is the most
roundings on the way of any contribution to any output. `noise` is the variance of an output in units of the variance of rounding one
contribution, if contributions are independent and alike and the rounding error of a sum of k of them has k times that variance:
the sum over all roundings that reach the output of the number of contributions in what was rounded. The relative error of the
sum of N contributions is then that of one rounding times sqrt(noise / N) (`relative_error`).
Source: the paper, Table 1, for the count; the noise law is derived here and measured in docs/collectives.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echoreduce.collectives.interpreter import QuantizedLinks
from echoreduce.collectives.program import IntArray, Program, Round, chunk_starts


@dataclass(frozen=True, eq=False)
class Traffic:
    """What moves. Arrays have shape [participants], switches last.

    Attributes:
        rounds: rounds that carry anything.
        messages: messages that each participant sends.
        sent, received: values that each participant sends and receives.
        buffer: most values that a participant holds beside the message itself: contributions that arrive in one round and wait to be added.
    """

    rounds: int
    messages: IntArray
    sent: IntArray
    received: IntArray
    buffer: IntArray

    @property
    def total(self) -> int:
        """Values that cross links in all."""
        return int(self.sent.sum())


@dataclass(frozen=True)
class Roundings:
    """What a quantized wire does to the sum.

    Attributes:
        most: most roundings on the way of a contribution to an output.
        noise: variance of the worst output in units of one contribution's rounding variance, see the module's text.
        world_size: ranks.
    """

    most: int
    noise: int
    world_size: int

    def relative_error(self, one_rounding: float) -> float:
        """Relative error of the sum (norm of the error over norm of the sum) if one rounding has `one_rounding`."""
        return float(one_rounding * np.sqrt(self.noise / self.world_size))


def count_traffic(program: Program, numel: int) -> Traffic:
    """Messages and values of every participant for a message of `numel` values; exact 64-bit integers."""
    p = program.participants
    starts = chunk_starts(numel, program.chunks)
    messages, sent, received, buffer = (np.zeros(p, dtype=np.int64) for _ in range(4))
    rounds = 0
    for round_ in program.rounds():
        rounds += len(round_) > 0
        values = starts[round_.hi] - starts[round_.lo]
        messages += np.bincount(round_.messages().src, minlength=p)
        np.add.at(sent, round_.src, values)
        np.add.at(received, round_.dst, values)
        waiting = np.zeros(p, dtype=np.int64)
        np.add.at(waiting, round_.dst, np.where(round_.reduce, values, 0))
        np.maximum(buffer, waiting, out=buffer)
    return Traffic(rounds, messages, sent, received, buffer)


def count_roundings(program: Program, quantized_links: QuantizedLinks | None = None) -> Roundings:
    """Roundings and noise if every hop (or every hop over a quantized link) requantizes."""
    ledger = _Ledger(program)
    for round_ in program.rounds():
        transfers = round_.per_chunk()
        lossy = np.ones(len(transfers), dtype=bool)
        if quantized_links is not None:
            lossy = quantized_links(transfers.src, transfers.dst)
        ledger.encode(transfers.select(lossy))
        ledger.deliver(transfers)
    n = program.world_size
    return Roundings(int(ledger.depth[:n].max()), int(ledger.noise[:n].max()), n)


def between_nodes(ranks_per_node: int) -> QuantizedLinks:
    """Only links between nodes of `ranks_per_node` ranks are quantized; links inside a node carry values exactly."""

    def links(src: IntArray, dst: IntArray) -> NDArray[np.bool_]:
        return np.asarray(src // ranks_per_node != dst // ranks_per_node)

    return links


class _Ledger:
    """Per participant and chunk: contributions held, roundings on the worst path, noise, and whether the chunk is a decoded code."""

    def __init__(self, program: Program) -> None:
        shape = (program.participants, program.chunks)
        self.held = np.zeros(shape, dtype=np.int64)
        self.held[: program.world_size] = 1
        self.depth = np.zeros(shape, dtype=np.int64)
        self.noise = np.zeros(shape, dtype=np.int64)
        self.coded = np.zeros(shape, dtype=bool)

    def encode(self, transfers: Round) -> None:
        at = (transfers.src, transfers.lo)
        fresh = ~self.coded[at]
        at = (transfers.src[fresh], transfers.lo[fresh])
        # plain assignment, not addition: a chunk that goes to several peers in one round is encoded once
        self.depth[at] = self.depth[at] + 1
        self.noise[at] = self.noise[at] + self.held[at]
        self.coded[at] = True

    def deliver(self, transfers: Round) -> None:
        source, target = (transfers.src, transfers.lo), (transfers.dst, transfers.lo)
        adds, copies = transfers.reduce, ~transfers.reduce
        held, depth, noise, coded = self.held[source], self.depth[source], self.noise[source], self.coded[source]
        into = (transfers.dst[adds], transfers.lo[adds])
        np.add.at(self.held, into, held[adds])
        np.maximum.at(self.depth, into, depth[adds])
        np.add.at(self.noise, into, noise[adds])
        over = (transfers.dst[copies], transfers.lo[copies])
        self.held[over], self.depth[over], self.noise[over] = held[copies], depth[copies], noise[copies]
        self.coded[target] = coded & ~transfers.reduce
