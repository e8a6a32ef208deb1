"""Every program that the tests go through: all algorithms, all factorizations into nodes, with and without pieces."""

from __future__ import annotations

from collections.abc import Iterator

from echoreduce.collectives.catalogue import ALGORITHMS, build
from echoreduce.collectives.pat import pat
from echoreduce.collectives.program import Program

NAMES = tuple(ALGORITHMS)


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def shapes(name: str, n: int, pieces: tuple[int, ...] = (1, 3)) -> Iterator[Program]:
    """The algorithm over n ranks: every number of ranks per node if it knows nodes, every number of pieces if it knows pieces."""
    row = ALGORITHMS[name]
    for per_node in divisors(n) if row.hierarchical else [1]:
        for cut in pieces if row.pipelined else (1,):
            yield build(name, n, per_node, cut)
    if name == "pat":
        yield from (pat(n, aggregate) for aggregate in (1, 2, 3))
