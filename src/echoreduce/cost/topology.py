"""What the cost model knows of a machine: links, nodes that share network ports, pods that share uplinks, and the speed of adding.

Terms. A message of b bytes over a link takes alpha + b beta. A port that handles k messages in a row takes
alpha + (k - 1) overhead + bytes beta: `overhead` is the part of alpha in which the port itself is busy. Overhead equal to alpha is the
single-port model of Hockney and of Patarasuk and Yuan (the default), 0 is a port that drives all peers at once; LogGP's o lies between.
Adding b received bytes takes b gamma. Ports are full duplex.

Leaves out: routing and adaptive congestion control; a shared link is a queue that serves messages in order of arrival.
Source: Hockney (1994); Alexandrov et al., LogGP (1995); Thakur et al. (2005), Section 4; NCCL's tuning tables for `PROTOCOLS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from echoreduce.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """One kind of link.

    Attributes:
        alpha: seconds a message.
        beta: seconds a byte.
        overhead: seconds for which a port is busy with a message beyond its bytes; None is alpha (single-port model).
    """

    alpha: float
    beta: float
    overhead: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gap"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"link: {'overhead' if name == 'gap' else name} must be finite and >= 0, got {getattr(self, name)!r}")

    @property
    def gap(self) -> float:
        """Seconds between two messages of a port, beyond their bytes."""
        return self.alpha if self.overhead is None else self.overhead


@dataclass(frozen=True)
class Host:
    """What the processes of one host share, its cores and memory: a queue that every message passes.

    Attributes:
        wakeup: seconds for each rank that sends anything in a round (it must be scheduled).
        overhead: seconds a message.
        beta: seconds a byte.
        beta_large: seconds a byte of a round beyond its first `cached` bytes; None is `beta`.
        cached: bytes of all messages of a round together that caches hold on their way.
    Raises:
        ConfigError: a time is negative or not finite, or `cached` is negative.
    """

    wakeup: float
    beta: float
    overhead: float = 0.0
    beta_large: float | None = None
    cached: int = 1 << 22

    def __post_init__(self) -> None:
        values = (self.wakeup, self.beta, self.overhead, self.beta_large or 0.0)
        if not all(0.0 <= value < float("inf") for value in values) or self.cached < 0:
            raise ConfigError(f"host: times must be finite and >= 0, cached >= 0, got {values} and {self.cached}")

    def occupied(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds for which each message of a round occupies the host, without the wakeup; `nbytes` holds all messages of the round."""
        large = self.beta if self.beta_large is None else self.beta_large
        fits = min(1.0, self.cached / max(float(nbytes.sum()), 1.0))
        return self.overhead + nbytes * (fits * self.beta + (1.0 - fits) * large)


@dataclass(frozen=True)
class Wire:
    """Bytes on the wire for each byte of the message, by kind of link: 1 is uncompressed, 4.25 / 16 is 4 bits with qparams.

    A link with a factor below 1 pays `Topology.codec` on both sides.
    """

    inside: float = 1.0
    across: float = 1.0


#: Full precision everywhere.
PLAIN = Wire()


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's protocols as link parameters: how much of the bandwidth is data, and what a hop costs.

    Attributes:
        name: LL, LL128 or Simple.
        bandwidth: fraction of the link's bandwidth that carries data.
        ring: (alpha inside a node, alpha across nodes) of algorithms with one peer at a time, seconds.
        tree: the same for trees and other algorithms with several peers.
    """

    name: str
    bandwidth: float
    ring: tuple[float, float]
    tree: tuple[float, float]


def _us(*values: float) -> tuple[float, float]:
    first, second = values
    return first * 1e-6, second * 1e-6


#: Hop latencies of NCCL 2.7's tuner (src/graph/tuning.cc: NVLink and network rows of hwLat, LL inside a node times 1.8 on several nodes),
#: bandwidths as it assumes them: LL a quarter (4-byte flag beside each 4 bytes, and no pipelining), LL128 120 of 128 bytes, Simple all.
PROTOCOLS: tuple[Protocol, ...] = (
    Protocol("LL", 0.25, ring=_us(0.47 * 1.8, 2.7), tree=_us(0.52 * 1.8, 5.0)),
    Protocol("LL128", 120 / 128, ring=_us(1.9, 4.0), tree=_us(1.2, 8.5)),
    Protocol("Simple", 1.0, ring=_us(3.4, 9.6), tree=_us(4.0, 14.0)),
)


@dataclass(frozen=True)
class Topology:
    """A machine.

    Attributes:
        name: for tables.
        inside: link between two ranks of a node.
        across: link between ranks of different nodes; None is the same as `inside`.
        ranks_per_node: ranks of a node; None puts all ranks in one node.
        nics_per_node: network ports that the ranks of a node share, each of `across`'s bandwidth; None is one a rank (no sharing).
        nodes_per_pod: nodes below one uplink; None is no such level.
        oversubscription: the ports of a pod together over its uplink's bandwidth, >= 1.
        host: what every message of the whole machine shares if its ranks are processes of one host; None is nothing.
        gamma: seconds a byte reduced.
        codec: seconds a (full precision) byte quantized or dequantized.
        node_switch, network_switch: whether the node's or the network's switch can add (NVLS, SHARP).
        protocols: choices for alpha and bandwidth; empty means the links' own.
    """

    name: str
    inside: Link
    across: Link | None = None
    ranks_per_node: int | None = None
    nics_per_node: int | None = None
    nodes_per_pod: int | None = None
    oversubscription: float = 1.0
    host: Host | None = None
    gamma: float = 0.0
    codec: float = 0.0
    node_switch: bool = False
    network_switch: bool = False
    protocols: tuple[Protocol, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "nics_per_node", "nodes_per_pod"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"topology: {name} must be at least 1, got {value}")
        if self.oversubscription < 1.0 or min(self.gamma, self.codec) < 0.0:
            raise ConfigError(
                f"topology: oversubscription >= 1, gamma >= 0, codec >= 0, got {self.oversubscription}, {self.gamma}, {self.codec}"
            )

    @property
    def network(self) -> Link:
        """The link between nodes."""
        return self.across or self.inside

    def node_size(self, world_size: int) -> int:
        """Ranks of a full node: `ranks_per_node`, or all of them."""
        return self.ranks_per_node or world_size

    def ports(self, world_size: int) -> int:
        """Network ports of a node."""
        return self.nics_per_node or self.node_size(world_size)

    def with_protocol(self, protocol: Protocol, several_peers: bool) -> Topology:
        """This machine with the protocol's hop latencies and bandwidth; `several_peers` picks the tree row."""
        inside, across = protocol.tree if several_peers else protocol.ring

        def link(old: Link, alpha: float) -> Link:
            overhead = old.overhead if old.overhead is None else min(old.overhead, alpha)
            return Link(alpha, old.beta / protocol.bandwidth, overhead)

        return replace(self, inside=link(self.inside, inside), across=link(self.network, across), protocols=())


def flat(alpha: float, beta: float, gamma: float = 0.0, overhead: float | None = None, name: str = "flat") -> Topology:
    """Every pair of ranks joined by a link of its own: the model of the closed forms in the literature."""
    return Topology(name, Link(alpha, beta, overhead), gamma=gamma)


#: Machines to ask about. Bandwidths are the vendors' or measured (docs/design.md, Section 6); alphas without a protocol are assumptions.
PRESETS: Mapping[str, Topology] = {
    "1GBps": flat(0.0, 1e-9, name="1GBps: Baidu's example, 1 GB/s, no latency"),
    "6GBps": flat(0.0, 1 / 6e9, name="6GBps: Baidu's example, InfiniBand at 6 GB/s, no latency"),
    "flat": flat(5e-6, 1 / 25e9, gamma=1 / 500e9, name="flat: 25 GB/s, 5 us, single-port"),
    "summit": Topology(
        "summit: 6 V100 a node over NVLink, 25 GB/s between nodes, NCCL 2.7 protocols",
        Link(3.4e-6, 1 / 50e9, 0.3e-6),
        Link(9.6e-6, 1 / 25e9, 0.3e-6),  # both EDR ports taken as one, since NCCL spreads its channels over them
        ranks_per_node=6,
        nics_per_node=1,
        gamma=1 / 400e9,
        protocols=PROTOCOLS,
    ),
    "h200": Topology(
        "h200: 8 H200 a node over NVLink at the measured 391 GB/s, 400 Gb/s a GPU between nodes",
        Link(2e-6, 1 / 391e9, 0.3e-6),
        Link(8e-6, 1 / 50e9, 0.5e-6),
        ranks_per_node=8,
        gamma=1 / 2000e9,
        codec=1 / 2600e9,
        node_switch=True,
    ),
}


def preset(name: str) -> Topology:
    """A named machine.

    Raises:
        ConfigError: unknown name; the text lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown topology {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]
