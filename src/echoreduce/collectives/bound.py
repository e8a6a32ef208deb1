"""Patarasuk and Yuan's lower bound on the traffic of an all-reduce, and how far a program is from it.

What the bound says: if N processes all-reduce X independent items with an associative, commutative operator and no compression, then
2 (N - 1) X items cross links in total (Lemma 3, item by item), so some process sends at least ceil(2 (N - 1) X / N) (Lemma 4).
What it does not: anything about rounds, about switches that add (not processes of the model), or about fewer bits an item.
Source: Patarasuk and Yuan (2009), Lemmas 3 and 4.
"""

from __future__ import annotations

from echoreduce.errors import ConfigError


def lower_bound(world_size: int, numel: int) -> int:
    """ceil(2 (N - 1) X / N): values that the busiest rank must send, whatever the algorithm; exact for integers of any size.

    Raises:
        ConfigError: no rank, or a negative number of values.
    """
    if world_size < 1 or numel < 0:
        raise ConfigError(f"the bound needs at least one rank and no negative size, got {world_size} and {numel}")
    return -(-2 * (world_size - 1) * numel // world_size)


def total_lower_bound(world_size: int, numel: int) -> int:
    """2 (N - 1) X: values that must cross links in total (Lemma 3 for each of the X items)."""
    if world_size < 1 or numel < 0:
        raise ConfigError(f"the bound needs at least one rank and no negative size, got {world_size} and {numel}")
    return 2 * (world_size - 1) * numel
