"""Recursive halving and doubling ("butterfly"): the fewest rounds and, for powers of two, the fewest bytes.

Partners at distance N/2, N/4, .., 1 exchange halves of what is left and add; the way back doubles. For a power of two this
meets the bound in both terms, but every rank of a node talks to another node in the same round, and on a node that shares one network
port that costs ranks_per_node times the wire time: the contention for which Patarasuk and Yuan proposed the ring.

World sizes that are no power of two fold first: with N = 2^m + e, ranks 1, 3, .., 2e - 1 hand their message to their left neighbour,
2^m ranks run the butterfly, and the result is handed back. The cost is that of 2^m ranks plus 2 (alpha + X beta) + X gamma, never less.
Source: Thakur, Rabenseifner and Gropp (2005), Section 4.5; Patarasuk and Yuan (2009), Section 3.
"""

from __future__ import annotations

import numpy as np

from echoreduce.collectives.program import IntArray, Phase, Program, Round, fixed


def halving_doubling(world_size: int) -> Program:
    """Recursive halving-doubling on the largest power of two of ranks, the others folded in; 2 log2 rounds, and 2 more to fold.

    The message is cut into as many chunks as ranks run the butterfly; member i of it owns chunk i in between.
    """
    levels = world_size.bit_length() - 1
    members = 1 << levels
    extra = world_size - members
    folded = np.arange(extra, dtype=np.int64)

    def exchange(level: int, gather: bool) -> Phase:
        """Partners differ in bit `level`; they swap the halves of size 2^level that are not theirs (gather: that are)."""

        def build(step: int, ranks: IntArray) -> Round:
            member, present = _member(ranks, extra)
            source, member = ranks[present], member[present]
            partner = member ^ (1 << level)
            half = (member if gather else partner) >> level << level
            return Round.of(source, _rank(partner, extra), half, half + (1 << level), reduce=not gather)

        return Phase(f"{'doubling' if gather else 'halving'}, distance {1 << level}", 1, build)

    fold = (fixed("fold", Round.of(2 * folded + 1, 2 * folded, 0, members, reduce=True)),) if extra else ()
    unfold = (fixed("unfold", Round.of(2 * folded, 2 * folded + 1, 0, members, reduce=False)),) if extra else ()
    halving = tuple(exchange(level, gather=False) for level in reversed(range(levels)))
    doubling = tuple(exchange(level, gather=True) for level in range(levels))
    period = None if extra else 1
    return Program("halving_doubling", world_size, members, fold + halving + doubling + unfold, period=period)


def _member(ranks: IntArray, extra: int) -> tuple[IntArray, np.ndarray]:
    """(butterfly member of each rank, whether it has one): of the first 2 * extra ranks only the even ones have."""
    early = ranks < 2 * extra
    return np.where(early, ranks // 2, ranks - extra), ~early | (ranks % 2 == 0)


def _rank(members: IntArray, extra: int) -> IntArray:
    """The rank that plays each butterfly member."""
    return np.where(members < extra, 2 * members, members + extra)
