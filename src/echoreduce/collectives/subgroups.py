"""Which ranks work together in a phase: the whole world, the ranks of a node, or the ranks with one local index.

Why: a 2D ring is the ring's two halves played inside nodes and across them, and hierarchical Echo is the direct two-shot played
the same way. With the grouping as a value, each algorithm is written once and composed.

The message has world_size chunks. Inside a node of L ranks (M nodes) local index l owns the block of chunks l M .. (l + 1) M - 1;
across nodes, node n owns chunk l M + n of it. Leaves out: groups of unequal size.
Source: docs/design.md, Section 8; NCCL 2.4's 2D hierarchical rings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from echoreduce.collectives.program import IntArray
from echoreduce.errors import ConfigError


@dataclass(frozen=True)
class Subgroups:
    """Disjoint groups of `size` ranks, as functions of arrays of ranks.

    Attributes:
        size: ranks in each group.
        position: ranks -> index of each in its group.
        member: (ranks, index) -> the rank at that index of the same group.
        block: (ranks, index) -> chunks (lo, hi) that the member at that index owns.
    """

    size: int
    position: Callable[[IntArray], IntArray]
    member: Callable[[IntArray, IntArray], IntArray]
    block: Callable[[IntArray, IntArray], tuple[IntArray, IntArray]]


def whole(world_size: int) -> Subgroups:
    """All ranks in one group; rank r owns chunk r of world_size chunks."""
    return Subgroups(world_size, lambda r: r, lambda r, q: q + np.zeros_like(r), lambda r, q: (q, q + 1))


def inside(world_size: int, ranks_per_node: int) -> Subgroups:
    """One group a node; local index l owns the block of world_size / ranks_per_node chunks that starts at l times that."""
    nodes = node_count(world_size, ranks_per_node)
    return Subgroups(
        ranks_per_node,
        lambda r: r % ranks_per_node,
        lambda r, q: r - r % ranks_per_node + q,
        lambda r, q: (q * nodes, (q + 1) * nodes),
    )


def across(world_size: int, ranks_per_node: int) -> Subgroups:
    """One group a local index, a member a node; node n owns chunk n of the block that `inside` gave to that local index."""
    nodes = node_count(world_size, ranks_per_node)

    def block(r: IntArray, q: IntArray) -> tuple[IntArray, IntArray]:
        lo = r % ranks_per_node * nodes + q
        return lo, lo + 1

    return Subgroups(nodes, lambda r: r // ranks_per_node, lambda r, q: q * ranks_per_node + r % ranks_per_node, block)


def node_count(world_size: int, ranks_per_node: int) -> int:
    """world_size / ranks_per_node.

    Raises:
        ConfigError: nodes of that size do not make up the world.
    """
    if world_size < 1 or ranks_per_node < 1 or world_size % ranks_per_node:
        raise ConfigError(f"world_size must be a multiple of ranks_per_node, got {world_size} and {ranks_per_node}")
    return world_size // ranks_per_node
