"""PAT: parallel aggregated trees, NCCL's logarithmic reduce-scatter and all-gather for any number of ranks.

Every rank is the root of a binomial tree over the offsets from it, 0 .. N - 1; all N trees run at once, each shifted by one rank, and
what a rank sends to the same peer for several trees is one message. The far hops come first and carry little, the near hops come
last and carry much: Bruck's algorithm with its dimensions reversed. Each rank sends and receives exactly N - 1 chunks a half, so the
all-reduce meets Patarasuk and Yuan's bound with 2 ceil(log2 N) rounds for every N, not only for powers of two.

`aggregate` limits the chunks of a message (NCCL's intermediate buffers are finite): the last, heavy rounds are then split and walked
depth first, down to 2 (N - 1) rounds of one chunk at `aggregate` = 1. Leaves out: PAT inside a node, which NCCL does not use either.
Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale" (2025); Bruck et al. (1997).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from echoreduce.collectives.program import IntArray, Phase, Program, Round
from echoreduce.errors import ConfigError


def pat(world_size: int, aggregate: int | None = None) -> Program:
    """All-reduce as PAT reduce-scatter and PAT all-gather.

    Args:
        world_size: ranks, any number; rank r owns chunk r.
        aggregate: most chunks in a message; None for no limit.
    """
    if aggregate is not None and aggregate < 1:
        raise ConfigError(f"aggregate must be at least 1 chunk, got {aggregate}")
    levels = (world_size - 1).bit_length()
    hops = list(_hops(np.zeros(1, dtype=np.int64), levels - 1, world_size, aggregate or world_size))
    scatter = tuple(_phase(world_size, level, offsets, gather=False) for level, offsets in reversed(hops))
    gather = tuple(_phase(world_size, level, offsets, gather=True) for level, offsets in hops)
    return Program("pat", world_size, world_size, scatter + gather, period=1)


def _hops(known: IntArray, level: int, world_size: int, limit: int) -> Iterator[tuple[int, IntArray]]:
    """(level, offsets that send to offset + 2^level), in an order in which every offset has its chunk before it sends it."""
    if level < 0:
        return
    sending = known[known + (1 << level) < world_size]
    if sending.size:
        yield level, sending
    known = np.concatenate([known, sending + (1 << level)])
    half = (known.size + 1) // 2
    parts = (known,) if known.size <= limit else (known[:half], known[half:])
    for part in parts:
        yield from _hops(part, level - 1, world_size, limit)


def _phase(world_size: int, level: int, offsets: IntArray, gather: bool) -> Phase:
    """All-gather: rank r is at offset d in the tree of rank r - d and passes its chunk on. Reduce-scatter: the same edges backwards."""
    distance = 1 << level

    def build(step: int, ranks: IntArray) -> Round:
        source = np.repeat(ranks, offsets.size)
        near = np.tile(offsets, ranks.size)
        if gather:
            chunk, peer = (source - near) % world_size, (source + distance) % world_size
        else:
            chunk, peer = (source - near - distance) % world_size, (source - distance) % world_size
        return Round.of(source, peer, chunk, chunk + 1, reduce=not gather)

    return Phase(f"pat {'all-gather' if gather else 'reduce-scatter'}, distance {distance}, {offsets.size} chunks", 1, build)
