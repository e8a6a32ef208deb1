"""Which all-reduce is cheapest, and where the answer changes: what NCCL's tuner does, over every algorithm of the catalogue.

Every candidate is priced by its closed form: algorithms that the machine can run, pieces in powers of two for pipelined ones, NCCL's
protocols where the machine lists them, full precision or a b-bit wire. The answer is a pure function of its arguments, so all ranks agree.
Leaves out: contention that closed forms do not know (see `simulator`), and what a choice does to the error (see `collectives.counters`).
Source: NCCL's tuner (ncclTopoTuneModel) for the idea; docs/design.md, Section 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from echoreduce.collectives.catalogue import ALGORITHMS, Algorithm
from echoreduce.cost.model import cost
from echoreduce.cost.topology import PLAIN, Protocol, Topology, Wire
from echoreduce.errors import ConfigError

#: Pieces that are tried for pipelined algorithms.
PIECES = tuple(1 << i for i in range(11))

#: Algorithms whose hops are priced by the tree row of a protocol: a rank has several peers at a time.
_SEVERAL_PEERS = frozenset(
    {"binary_tree", "pipelined_tree", "double_binary_tree", "nccl_tree", "pat", "collnet_chain", "collnet_direct", "nvls", "nvls_tree"}
)


@dataclass(frozen=True)
class Choice:
    """One way to run an all-reduce, with its price.

    Attributes:
        algorithm: name in `collectives.catalogue`.
        pieces: pieces of a pipelined algorithm, else 1.
        protocol: NCCL protocol, "" where the machine lists none.
        seconds: predicted time.
    """

    algorithm: str
    pieces: int
    protocol: str
    seconds: float

    def __str__(self) -> str:
        return self.algorithm + (f" x{self.pieces}" if self.pieces > 1 else "") + (f" {self.protocol}" if self.protocol else "")


def candidates(topology: Topology, world_size: int, names: Iterable[str] | None = None) -> list[Algorithm]:
    """Algorithms that run on this machine: in-switch ones need a switch that adds, single-node ones a single node."""
    known = ALGORITHMS if names is None else {name: ALGORITHMS[name] for name in names if name in ALGORITHMS}
    if names is not None and len(known) < len(set(names)):
        raise ConfigError(f"unknown algorithm in {sorted(set(names))}; known are {', '.join(ALGORITHMS)}")
    nodes = -(-world_size // topology.node_size(world_size))
    return [a for a in known.values() if _runs(a, topology, nodes)]


def _runs(algorithm: Algorithm, topology: Topology, nodes: int) -> bool:
    if algorithm.single_node and nodes > 1:
        return False
    if not algorithm.in_switch:
        return True
    return topology.node_switch if algorithm.name.startswith("nvls") else topology.network_switch and nodes > 1


def price(algorithm: Algorithm, topology: Topology, world_size: int, nbytes: float, wire: Wire = PLAIN) -> Choice:
    """The algorithm with its best pieces and protocol.

    Raises:
        ConfigError: the machine's nodes do not make up the world.
    """
    per_node = min(topology.node_size(world_size), world_size)
    best: Choice | None = None
    protocols: tuple[Protocol | None, ...] = topology.protocols or (None,)
    for protocol in protocols:
        machine = topology if protocol is None else topology.with_protocol(protocol, algorithm.name in _SEVERAL_PEERS)
        for pieces in PIECES if algorithm.pipelined else (1,):
            seconds = cost(algorithm.name, machine, world_size, nbytes, per_node, pieces, wire)
            if best is None or seconds < best.seconds:
                best = Choice(algorithm.name, pieces, protocol.name if protocol else "", seconds)
    assert best is not None, "no protocol and no pieces to try"
    return best


def with_named_protocol(topology: Topology, choice: Choice) -> Topology:
    """The machine as the choice prices it: with its protocol, if it has one."""
    for protocol in topology.protocols:
        if protocol.name == choice.protocol:
            return topology.with_protocol(protocol, choice.algorithm in _SEVERAL_PEERS)
    return topology


def rank(topology: Topology, world_size: int, nbytes: float, wire: Wire = PLAIN, names: Iterable[str] | None = None) -> list[Choice]:
    """All candidates, cheapest first; equal prices in the catalogue's order.

    Args:
        topology: the machine.
        world_size: ranks.
        nbytes: bytes of the message at full precision.
        wire: bytes on the wire for each of them.
        names: algorithms to consider; None for all that run there.
    """
    return sorted((price(a, topology, world_size, nbytes, wire) for a in candidates(topology, world_size, names)), key=lambda c: c.seconds)


@dataclass(frozen=True)
class Crossover:
    """From `nbytes` on, `to` is cheaper than what was cheapest below it."""

    nbytes: int
    before: Choice
    to: Choice


def crossovers(
    topology: Topology,
    world_size: int,
    smallest: int = 1024,
    largest: int = 1 << 33,
    wire: Wire = PLAIN,
    names: Iterable[str] | None = None,
) -> list[Crossover]:
    """Message sizes at which the cheapest algorithm (or protocol) changes, smallest first, to within 1 %.

    Between neighbouring powers of two a change is found by bisection; a winner over less than a factor of two in size may be missed.
    """
    if not 1 <= smallest <= largest:
        raise ConfigError(f"sizes must satisfy 1 <= smallest <= largest, got {smallest}, {largest}")
    listed = None if names is None else tuple(names)

    def best(nbytes: int) -> Choice:
        return rank(topology, world_size, nbytes, wire, listed)[0]

    found, low, before = [], smallest, best(smallest)
    while low < largest:
        high = min(2 * low, largest)
        after = best(high)
        while _kind(before) != _kind(after):  # there may be several changes on the way
            low, to = _change(low, high, _kind(before), best)
            found.append(Crossover(low, before, to))
            before = to
        low, before = high, after
    return found


def _change(left: int, right: int, kind: tuple[str, str], best: Callable[[int], Choice]) -> tuple[int, Choice]:
    """First size, to within 1 %, at which the winner is no longer of the kind that wins at `left`, and the winner there."""
    while right - left > max(1, left // 128):
        middle = (left + right) // 2
        left, right = (middle, right) if _kind(best(middle)) == kind else (left, middle)
    return right, best(right)


def _kind(choice: Choice) -> tuple[str, str]:
    return choice.algorithm, choice.protocol
