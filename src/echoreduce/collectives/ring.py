"""Ring all-reduce: reduce-scatter and all-gather around a ring, 2 (N - 1) rounds; and the naive single reducer that it replaced.

Every rank sends one chunk to its successor in each round, so the bytes of a rank, 2 (N - 1) / N of the message, do not grow
with N and meet Patarasuk and Yuan's bound; the rounds do grow with N, which is the term that the bound does not cover.
Leaves out: several rings at once over disjoint links (NCCL's channels), which change beta, not the pattern.
Source: Patarasuk and Yuan (2009), Section 4; Gibiansky (Baidu, 2017); the ring text in docs/collectives.md.
"""

from __future__ import annotations

import numpy as np

from echoreduce.collectives.program import IntArray, Phase, Program, Round, fixed
from echoreduce.collectives.subgroups import Subgroups, whole
from echoreduce.errors import ConfigError


def ring_reduce_scatter(groups: Subgroups, label: str = "reduce-scatter") -> tuple[Phase, ...]:
    """size - 1 rounds after which the member at position p holds the sum of block p. The sum of block p starts at member p + 1."""

    def build(step: int, ranks: IntArray) -> Round:
        p = groups.position(ranks)
        lo, hi = groups.block(ranks, (p - 1 - step) % groups.size)
        return Round.of(ranks, groups.member(ranks, (p + 1) % groups.size), lo, hi, reduce=True)

    return (Phase(f"ring {label}", groups.size - 1, build),) if groups.size > 1 else ()


def ring_all_gather(groups: Subgroups, label: str = "all-gather") -> tuple[Phase, ...]:
    """size - 1 rounds that carry each finished block around the ring."""

    def build(step: int, ranks: IntArray) -> Round:
        p = groups.position(ranks)
        lo, hi = groups.block(ranks, (p - step) % groups.size)
        return Round.of(ranks, groups.member(ranks, (p + 1) % groups.size), lo, hi, reduce=False)

    return (Phase(f"ring {label}", groups.size - 1, build),) if groups.size > 1 else ()


def ring(world_size: int) -> Program:
    """The flat ring over all ranks, in rank order (node after node, so one rank of a node sends to the next node)."""
    groups = whole(world_size)
    return Program("ring", world_size, world_size, ring_reduce_scatter(groups) + ring_all_gather(groups), period=1)


def naive(world_size: int, pieces: int = 1) -> Program:
    """Every rank sends its whole message to rank 0, which adds and sends the sum back.

    With `pieces` > 1 the sum of one piece goes out while the next comes in, so a full-duplex link is busy for (N - 1) messages
    instead of 2 (N - 1): the reading under which Baidu's 10.8 s for 10 ranks at 1 GB/s counts one direction only.

    Args:
        world_size: ranks.
        pieces: pieces of the message, >= 1; pieces + 1 rounds.
    """
    if pieces < 1:
        raise ConfigError(f"pieces must be at least 1, got {pieces}")
    others = np.arange(1, world_size, dtype=np.int64)

    def gather(piece: int) -> Round:
        return Round.of(others, 0, piece, piece + 1, reduce=True)

    def scatter(piece: int) -> Round:
        return Round.of(0, others, piece, piece + 1, reduce=False)

    def both(step: int, ranks: IntArray) -> Round:
        return Round.join([scatter(step), gather(step + 1)])

    phases = (fixed("gather", gather(0)), Phase("gather and broadcast", pieces - 1, both), fixed("broadcast", scatter(pieces - 1)))
    return Program("naive", world_size, pieces, phases if world_size > 1 else ())
