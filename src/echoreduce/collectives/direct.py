"""Direct all-reduces over links between every pair of ranks: one-shot and two-shot, the two that Echo quantizes.

One-shot: every rank sends its whole message to every other, one round. Two-shot: every rank sends each owner its segment, the owner adds
and sends the sum back, two rounds and the bandwidth-optimal bytes. Few rounds mean few roundings: a contribution is rounded once or
twice whatever the world size, where a ring rounds it N times (the paper, Table 1).
A rank sends to its successors in rotated order, r + 1, r + 2, .., so that no two ranks send to one destination at the same time.
Source: the paper, Section 4.1; docs/design.md, Section 3.
"""

from __future__ import annotations

import numpy as np

from echoreduce.collectives.program import IntArray, Phase, Program, Round
from echoreduce.collectives.subgroups import Subgroups, whole


def direct_reduce_scatter(groups: Subgroups, label: str = "push") -> tuple[Phase, ...]:
    """One round: every member sends each other member the block that it owns, to be added there."""

    def build(step: int, ranks: IntArray) -> Round:
        sources, peers = _rotated(groups, ranks)
        lo, hi = groups.block(sources, peers)
        return Round.of(sources, groups.member(sources, peers), lo, hi, reduce=True)

    return (Phase(f"direct {label}", 1, build),) if groups.size > 1 else ()


def direct_all_gather(groups: Subgroups, label: str = "gather") -> tuple[Phase, ...]:
    """One round: every member sends the block that it owns to each other member."""

    def build(step: int, ranks: IntArray) -> Round:
        sources, peers = _rotated(groups, ranks)
        lo, hi = groups.block(sources, groups.position(sources))
        return Round.of(sources, groups.member(sources, peers), lo, hi, reduce=False)

    return (Phase(f"direct {label}", 1, build),) if groups.size > 1 else ()


def one_shot(world_size: int) -> Program:
    """Every rank adds every message itself: one round, (N - 1) messages of the whole size a rank."""
    groups = whole(world_size)

    def build(step: int, ranks: IntArray) -> Round:
        sources, peers = _rotated(groups, ranks)
        return Round.of(sources, peers, 0, 1, reduce=True)

    return Program("one_shot", world_size, 1, (Phase("direct exchange", 1, build),) if world_size > 1 else (), period=1)


def two_shot(world_size: int) -> Program:
    """The paper's decomposition: push and reduce, then gather; two rounds, 2 (N - 1) / N of the message a rank."""
    groups = whole(world_size)
    return Program("two_shot", world_size, world_size, direct_reduce_scatter(groups) + direct_all_gather(groups), period=1)


def _rotated(groups: Subgroups, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """(sources, positions of their peers): each source with size - 1 peers, its successor first."""
    sources = np.repeat(ranks, groups.size - 1)
    ahead = np.tile(np.arange(1, groups.size, dtype=np.int64), ranks.size)
    return sources, (groups.position(sources) + ahead) % groups.size
