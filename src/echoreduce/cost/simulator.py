"""Event simulator: plays a program's messages over a topology, every rank at its own pace.

A rank starts a round when its previous one is done: its sends have left and its receives have arrived and been added. Its port sends its
messages one after the other; each passes, cut through, the queues of what it shares (the node's network ports, the pod's uplink, the
whole host) and then the receiver's port. Nothing else waits for anything: there is no barrier between rounds.

Scale. A program with a `period` is played with one representative of each class of ranks (one rank on a flat machine, one node
otherwise), and rounds of a phase repeat until every clock advances by the same amount, after which the rest is multiplied out:
playing rounds is a max-plus linear map, so once it shifts all clocks alike it does so forever. A ring of 100,000 ranks
takes a few rounds. Programs without symmetry are played in full, a few numpy operations a round.

Where messages of several ranks queue for one shared link, ties are served in array order, which no relabelling preserves; there
representatives stand for all to within a few percent, elsewhere exactly.

Leaves out: rounding of chunks to whole values (under one value a chunk), and variance. Times are float64 seconds, sizes float64
bytes (exact to 2^53 and to a relative 10^-16 beyond).
Source: docs/design.md, Section 8; Baccelli et al. (1992) for max-plus periodicity.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echoreduce.collectives.program import Messages, Phase, Program
from echoreduce.cost.queues import Floats, Ints, serve
from echoreduce.cost.topology import PLAIN, Topology, Wire
from echoreduce.errors import ConfigError

_SAME = 1e-9


@dataclass(frozen=True, eq=False)
class Outcome:
    """Result of a simulation.

    Attributes:
        seconds: when the last rank is done.
        clocks: when each simulated rank (or representative) and switch is done, seconds.
        classes: ranks simulated; world_size when played in full.
        played: rounds played one by one; the others were multiplied out.
    """

    seconds: float
    clocks: Floats
    classes: int
    played: int


def simulate(program: Program, topology: Topology, nbytes: float, wire: Wire = PLAIN, *, full: bool = False) -> Outcome:
    """Time of one all-reduce.

    Args:
        program: any program.
        topology: the machine; its nodes should be the program's where that is hierarchical.
        nbytes: bytes of the message at full precision, >= 0.
        wire: bytes on the wire for each of them.
        full: play every rank even where one stands for all (to check that it does).
    Raises:
        ConfigError: a negative size.
    """
    if not 0 <= nbytes < float("inf"):
        raise ConfigError(f"bytes must be finite and >= 0, got {nbytes}")
    classes = program.world_size if full else representatives(program, topology)
    clock = _Clock(program, topology, float(nbytes), wire, classes)
    for phase in program.phases:
        clock.play(phase)
    return Outcome(float(clock.ready.max(initial=0.0)), clock.ready, classes, clock.played)


def representatives(program: Program, topology: Topology) -> int:
    """How many ranks stand for all: the fewest whole nodes (and pods) in a period of the program, or the whole world."""
    n = program.world_size
    if program.period is None or program.switches or topology.host is not None:
        return n
    node = 1 if topology.ranks_per_node is None or topology.ranks_per_node >= n else topology.ranks_per_node
    pod = node * topology.nodes_per_pod if topology.nodes_per_pod else 1
    classes = math.lcm(program.period, node, pod)
    return classes if classes < n and n % classes == 0 else n


class _Clock:
    """All clocks of a simulation: of ranks and switches, of receiving ports, and of shared links."""

    def __init__(self, program: Program, topology: Topology, nbytes: float, wire: Wire, classes: int) -> None:
        self.program, self.topology, self.nbytes, self.wire, self.classes = program, topology, nbytes, wire, classes
        self.ready: Floats = np.zeros(classes + program.switches)
        self.port: Floats = np.zeros_like(self.ready)
        node = topology.node_size(program.world_size)
        nodes = -(-classes // node)
        pods = -(-nodes // topology.nodes_per_pod) if topology.nodes_per_pod else 0
        self.shared = {"node out": np.zeros(nodes), "node in": np.zeros(nodes), "pod out": np.zeros(pods), "pod in": np.zeros(pods)}
        self.shared["host"] = np.zeros(1)
        self.played = 0
        self.lag = min(node, classes) if classes > 1 else 1

    def play(self, phase: Phase) -> None:
        """All rounds of a phase, multiplying out as soon as the clocks shift together."""
        first = phase.build(0, np.arange(self.classes, dtype=np.int64))
        if not len(first):
            return
        load = _Load(self, first.messages())
        history: deque[Floats] = deque(maxlen=self.lag + 1)
        step = 0
        while step < phase.steps:
            load.advance()
            self.played += 1
            step += 1
            if phase.steps - step <= self.lag:
                continue
            history.append(load.state())
            if len(history) > self.lag and step % self.lag == 0:
                shift = history[-1] - history[0]
                if shift.max() - shift.min() <= _SAME * shift.max():
                    jumps = (phase.steps - step) // self.lag
                    load.skip(jumps * float(shift.mean()))
                    step += jumps * self.lag


class _Load:
    """The messages of one phase's rounds as times and resources, so that a round is a few array operations."""

    def __init__(self, clock: _Clock, messages: Messages) -> None:
        self.clock = clock
        n, k, topology, wire = clock.program.world_size, clock.classes, clock.topology, clock.wire
        node = topology.node_size(n)
        homes = np.concatenate([np.arange(n, dtype=np.int64) // node, np.asarray(clock.program.switch_homes, dtype=np.int64)])
        crossing = homes[messages.src] != homes[messages.dst]
        value: Floats = messages.chunks * np.float64(clock.nbytes / clock.program.chunks)
        factor = np.where(crossing, wire.across, wire.inside)
        self.bytes = value * factor
        link = (topology.inside, topology.network)
        self.alpha, self.beta, self.gap = (
            np.where(crossing, getattr(link[1], name), getattr(link[0], name)) for name in ("alpha", "beta", "gap")
        )
        self.src = np.where(messages.src < n, messages.src % k, messages.src - n + k)
        self.dst = np.where(messages.dst < n, messages.dst % k, messages.dst - n + k)
        self.from_rank, self.to_rank = messages.src < n, messages.dst < n
        self._port_times(messages, value, factor)
        self.stages = self._stages(homes[messages.src], homes[messages.dst], crossing, node)

    def _port_times(self, messages: Messages, value: Floats, factor: Floats) -> None:
        """Constants of a round: encoding before the sends, offsets and ends of the sends, adding after the receives."""
        size, topology = self.clock.ready.size, self.clock.topology
        codec = np.where(factor < 1.0, topology.codec * value, 0.0)
        add = np.where(self.to_rank, topology.gamma * value * messages.reduced / np.maximum(messages.chunks, 1) + codec, 0.0)
        self.encode = np.bincount(self.src, weights=np.where(self.from_rank, codec, 0.0), minlength=size)
        self.add = np.bincount(self.dst, weights=add, minlength=size)
        self.width = np.where(self.from_rank, self.gap + self.bytes * self.beta, 0.0)  # a switch has a port for every rank
        self.send = np.bincount(self.src, weights=self.width, minlength=size) + self.encode
        order = np.argsort(self.src, kind="stable")
        total = np.cumsum(self.width[order]) - self.width[order]
        first = np.searchsorted(self.src[order], self.src[order])
        self.offset = np.empty_like(total)
        self.offset[order] = total - total[first]
        self.offset += self.encode[self.src]
        self.senders, self.receivers = np.unique(self.src), np.unique(self.dst)

    def _stages(self, home: Ints, away: Ints, crossing: NDArray[np.bool_], node: int) -> list[tuple[str, Ints, Ints, Floats]]:
        """(shared link, messages that use it, which one of its kind, how long each occupies it) in the order of the way."""
        clock, topology = self.clock, self.clock.topology
        n = clock.program.world_size
        stages: list[tuple[str, NDArray[np.bool_], Ints, Floats]] = []
        ports = topology.ports(n)
        nodes = clock.shared["node out"].size
        if crossing.any() and ports < node:
            share = self.bytes * topology.network.beta / ports
            stages.append(("node out", crossing & self.from_rank, home % nodes, share))
            stages.append(("node in", crossing & self.to_rank, away % nodes, share))
        if topology.nodes_per_pod and topology.oversubscription > 1.0:
            pod = topology.nodes_per_pod
            pods = clock.shared["pod out"].size
            leaving = crossing & (home // pod != away // pod)
            share = self.bytes * topology.network.beta * topology.oversubscription / (pod * ports)
            stages.insert(1, ("pod out", leaving & self.from_rank, home // pod % pods, share))
            stages.insert(2, ("pod in", leaving & self.to_rank, away // pod % pods, share))
        if topology.host is not None:
            everyone = np.ones(self.bytes.size, dtype=bool)
            occupied = topology.host.occupied(self.bytes)
            occupied[np.unique(self.src, return_index=True)[1]] += topology.host.wakeup
            stages.append(("host", everyone, np.zeros_like(home), occupied))
        return [(name, np.flatnonzero(uses), which[uses], share[uses]) for name, uses, which, share in stages if uses.any()]

    def advance(self) -> None:
        """Play one round."""
        ready = self.clock.ready
        head = ready[self.src] + self.offset
        end = head + self.bytes * self.beta
        for name, index, which, share in self.stages:
            begin = serve(which, head[index], share, self.clock.shared[name])
            head[index] = np.maximum(head[index], begin)
            end[index] = np.maximum(end[index], begin + share)
        arrival = end + self.alpha
        at = self.to_rank
        begin = serve(self.dst[at], head[at] + self.alpha[at], (self.gap + self.bytes * self.beta)[at], self.clock.port)
        arrival[at] = np.maximum(arrival[at], begin + self.bytes[at] * self.beta[at])
        last = np.full(ready.size, -np.inf)
        np.maximum.at(last, self.dst, arrival)
        ready[self.senders] += self.send[self.senders]
        ready[self.receivers] = np.maximum(ready[self.receivers], last[self.receivers]) + self.add[self.receivers]

    def state(self) -> Floats:
        """Every clock that a round of this phase reads or moves."""
        clock = self.clock
        parts = [clock.ready[self.senders], clock.ready[self.receivers], clock.port[self.receivers[self.receivers < clock.classes]]]
        parts += [clock.shared[name][np.unique(which)] for name, _, which, _ in self.stages]
        return np.concatenate(parts)

    def skip(self, seconds: float) -> None:
        """Move every clock of this phase on by `seconds`."""
        clock = self.clock
        moved = np.union1d(self.senders, self.receivers)
        clock.ready[moved] += seconds
        clock.port[self.receivers[self.receivers < clock.classes]] += seconds
        for name, _, which, _ in self.stages:
            clock.shared[name][np.unique(which)] += seconds
