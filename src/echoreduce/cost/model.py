"""Closed forms: the time of every all-reduce in alpha, beta and gamma, as a short list of terms.

A `Term` is a number of equal rounds: how many messages the busiest port handles in each, which shares of the message they carry, and
what is added. The price of a round is alpha + (messages - 1) overhead + bytes beta + added bytes gamma, with the bytes counted at the
rank's port or, if that is slower, at the node's shared network ports. `cost` sums the terms; `formula` prints them.

Exact on flat machines for naive (one piece), ring, halving-doubling, one-shot, two-shot, PAT, NVLS and, at N = 2^k - 1 and 2^k, the binary
tree; exact for the 2D algorithms on their own nodes. Elsewhere each round is priced as its busiest rank, as if rounds were synchronous,
which is too much where ranks run ahead and too little where messages of two rounds meet at a port. A flat ring that leaves
nodes is priced by its slowest cycle, see `Term.mixed`. The tests hold all of them against `simulator`, with the range for each.

Leaves out: what depends on who shares what with whom (pods, the host): ask the simulator.
Source: Thakur, Rabenseifner and Gropp (2005), Section 4; Patarasuk and Yuan (2009), Section 4; Sanders, Speck and Traeff (2009).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from echoreduce.collectives.catalogue import algorithm
from echoreduce.collectives.subgroups import node_count
from echoreduce.cost.topology import PLAIN, Link, Topology, Wire
from echoreduce.errors import ConfigError


@dataclass(frozen=True)
class Term:
    """Rounds of equal price.

    Attributes:
        rounds: how many.
        inside: (messages, share of the message) of the busiest port over links inside the node, a round.
        across: the same over links between nodes.
        node: share of the message that leaves (or enters) a node in a round, all its ranks together.
        added: share of the message that the busiest rank adds in a round.
        mixed: fraction of the hops that cross nodes, for a flat ring: rounds then follow each other at the pace of the slower of
            the average hop (a value goes round once) and the busiest port (the slowest link's).
    """

    rounds: int
    inside: tuple[int, float] = (0, 0.0)
    across: tuple[int, float] = (0, 0.0)
    node: float = 0.0
    added: float = 0.0
    mixed: float | None = None

    def seconds(self, topology: Topology, nbytes: float, wire: Wire, ports: int) -> float:
        """Time of all rounds of this term for `nbytes` bytes of full precision; `ports` network ports a node."""
        if self.mixed is not None:
            return self.rounds * self._ring_round(self.mixed, topology, nbytes, wire)
        near, far = topology.inside, topology.network
        port = _occupied(near, self.inside, nbytes * wire.inside) + _occupied(far, self.across, nbytes * wire.across)
        shared = self.node * nbytes * wire.across * far.beta / ports + (far.gap if self.across[0] else 0.0)
        last = far if self.across[0] else near
        moved = _coded(self.inside[1], wire.inside) + _coded(self.across[1], wire.across)
        work = (topology.gamma * self.added + 2 * topology.codec * moved) * nbytes
        return self.rounds * (last.alpha - last.gap + max(port, shared) + work)

    def _ring_round(self, crossing: float, topology: Topology, nbytes: float, wire: Wire) -> float:
        share = self.inside[1] * nbytes
        near, far = topology.inside, topology.network
        work = (topology.gamma * self.added + 2 * topology.codec * _coded(self.inside[1], max(wire.inside, wire.across))) * nbytes
        hops = [near.alpha + share * wire.inside * near.beta + work, far.alpha + share * wire.across * far.beta + work]
        ports = [near.gap + share * wire.inside * near.beta, far.gap + share * wire.across * far.beta]
        return max((1 - crossing) * hops[0] + crossing * hops[1], *ports)


def _occupied(link: Link, load: tuple[int, float], nbytes: float) -> float:
    return load[0] * link.gap + load[1] * nbytes * link.beta


def _coded(share: float, factor: float) -> float:
    return share if factor < 1.0 else 0.0


def cost(
    name: str, topology: Topology, world_size: int, nbytes: float, ranks_per_node: int = 1, pieces: int = 1, wire: Wire = PLAIN
) -> float:
    """Seconds of one all-reduce by its closed form.

    Args:
        name: a key of `collectives.catalogue.ALGORITHMS`.
        topology: the machine; where it has nodes, `ranks_per_node` should be theirs.
        world_size: ranks, >= 1; one rank costs nothing.
        nbytes: bytes of the message at full precision, >= 0; any size that float64 holds.
        ranks_per_node: nodes of a hierarchical algorithm.
        pieces: pieces of a pipelined algorithm.
        wire: bytes on the wire for each byte of the message.
    Raises:
        ConfigError: unknown name, negative size, or nodes that do not make up the world.
    """
    if not 0 <= nbytes < float("inf"):
        raise ConfigError(f"bytes must be finite and >= 0, got {nbytes}")
    ports = topology.ports(world_size)
    return sum(t.seconds(topology, nbytes, wire, ports) for t in terms(name, topology, world_size, ranks_per_node, pieces))


def terms(name: str, topology: Topology, world_size: int, ranks_per_node: int = 1, pieces: int = 1) -> list[Term]:
    """The closed form as a list of terms; empty for one rank."""
    algorithm(name)
    node_count(world_size, ranks_per_node)
    if pieces < 1:
        raise ConfigError(f"pieces must be at least 1, got {pieces}")
    if world_size == 1:
        return []
    return [t for t in _FORMS[name](world_size, ranks_per_node, pieces, _Places(topology, world_size)) if t.rounds]


def formula(closed_form: list[Term]) -> str:
    """The terms as text: `14 (alpha + 0.125 X beta + 0.125 X gamma) + ...`, with o for overhead and ' for links across nodes."""
    return " + ".join(_term_text(t) for t in closed_form) or "0"


def _term_text(t: Term) -> str:
    if t.mixed is not None:
        return f"{t.rounds} max((1-f) hop + f hop', busiest port; f = {t.mixed:.3g}, {t.inside[1]:.3g} X a hop)"
    mark = "'" if t.across[0] else ""
    text = [f"alpha{mark}"]
    for (messages, share), prime in ((t.inside, ""), (t.across, "'")):
        more = messages - (prime == mark)
        text += [f"{more} o{prime}"] if more > 0 else []
        text += [f"{share:.4g} X beta{prime}"] if share else []
    text += [f"{t.added:.4g} X gamma"] if t.added else []
    return f"{t.rounds} ({' + '.join(text)})"


@dataclass(frozen=True)
class _Places:
    """Where messages of flat algorithms go on a machine with nodes."""

    topology: Topology
    world_size: int

    @property
    def node(self) -> int:
        return min(self.topology.node_size(self.world_size), self.world_size)

    def heads(self, nodes: int) -> _Places:
        """One rank a node, taken as a flat world of its own."""
        return _Places(replace(self.topology, ranks_per_node=None), nodes)

    def term(self, rounds: int, messages: int, share: float, added: float, crossing: int) -> Term:
        """Rounds whose busiest rank handles `messages`, in a pattern where `crossing` ranks of a node send to other nodes."""
        if crossing == 0:
            return Term(rounds, inside=(messages, share), added=added)
        return Term(rounds, across=(messages, share), node=crossing * share, added=added)

    def crossing(self, distance: int) -> int:
        """Ranks of a node whose peer at `distance` is in another node."""
        return 0 if self.node == self.world_size else min(distance, self.node)

    def everyone(self, rounds: int, each: float, added: float) -> Term:
        """Rounds in which each rank sends a share `each` to every other rank."""
        near, far = self.node - 1, self.world_size - self.node
        return Term(rounds, (near, near * each), (far, far * each), self.node * far * each, added)


def _naive(n: int, k: int, c: int, at: _Places) -> list[Term]:
    def out(added: float) -> Term:
        return _at_root(at, n, (n - 1) / c, added)

    gather, scatter = out((n - 1) / c), out(0.0)
    return [gather] * c + [scatter]


def _at_root(at: _Places, n: int, share: float, added: float) -> Term:
    near = at.node - 1
    far = n - at.node
    each = share / (n - 1)
    return Term(1, (near, near * each), (far, far * each), far * each, added)


def _ring(n: int, k: int, c: int, at: _Places) -> list[Term]:
    if at.crossing(1):
        return [Term(n - 1, (1, 1 / n), added=a, mixed=1 / at.node) for a in (1 / n, 0.0)]
    return [Term(n - 1, (1, 1 / n), added=1 / n), Term(n - 1, (1, 1 / n))]


def _ring_2d(n: int, k: int, c: int, at: _Places) -> list[Term]:
    m = n // k
    inner, outer = Term(k - 1, (1, 1 / k), added=1 / k), _rail(m - 1, 1, 1 / n, k, 1 / n, at)
    return [inner, outer, _rail(m - 1, 1, 1 / n, k, 0.0, at), Term(k - 1, (1, 1 / k))]


def _rail(rounds: int, messages: int, share: float, k: int, added: float, at: _Places) -> Term:
    """Every rank talks to its peers in other nodes."""
    return at.term(rounds, messages, share, added, 0 if at.node == at.world_size else k)


def _halving_doubling(n: int, k: int, c: int, at: _Places) -> list[Term]:
    levels = n.bit_length() - 1
    extra = n > 1 << levels
    aligned = at.node & (at.node - 1) == 0  # partners differ in one bit, so they share a node of 2^j ranks or none does
    crossing = [0 if aligned and 1 << level < at.node else at.crossing(1 << level) for level in range(levels)]
    halving = [at.term(1, 1, 2.0 ** (level - levels), 2.0 ** (level - levels), crossing[level]) for level in reversed(range(levels))]
    doubling = [at.term(1, 1, 2.0 ** (level - levels), 0.0, crossing[level]) for level in range(levels)]
    fold, unfold = ([at.term(1, 1, 1.0, a, at.crossing(1) if at.node % 2 else 0)] if extra else [] for a in (1.0, 0.0))
    return fold + halving + doubling + unfold


def _one_shot(n: int, k: int, c: int, at: _Places) -> list[Term]:
    return [at.everyone(1, 1.0, n - 1)]


def _two_shot(n: int, k: int, c: int, at: _Places) -> list[Term]:
    return [at.everyone(1, 1 / n, (n - 1) / n), at.everyone(1, 1 / n, 0.0)]


def _echo_2d(n: int, k: int, c: int, at: _Places) -> list[Term]:
    m = n // k
    inner = Term(int(k > 1), (k - 1, (k - 1) / k), added=(k - 1) / k)
    outer = [_rail(int(m > 1), m - 1, (m - 1) / n, k, a, at) for a in ((m - 1) / n, 0.0)]
    return [inner, *outer, Term(int(k > 1), (k - 1, (k - 1) / k))]


def _pat(n: int, k: int, c: int, at: _Places) -> list[Term]:
    hops = []
    for level in reversed(range((n - 1).bit_length())):
        distance = 1 << level
        share = -(-(n - distance) // (2 * distance)) / n
        hops.append((share, at.crossing(distance)))
    scatter = [at.term(1, 1, share, share, crossing) for share, crossing in reversed(hops)]
    return scatter + [at.term(1, 1, share, 0.0, crossing) for share, crossing in hops]


def _tree(n: int, share: float, trees: int, c: int, at: _Places) -> list[Term]:
    """Pipelined tree(s) over all ranks: rounds up only, rounds both ways, rounds down only; `share` of the message a piece.

    The edges of the i-th round from the leaves are 2^i ranks long. An even number of ranks has a root with one child, which
    only shows if the message is one piece; two ranks are nothing but that.
    """
    top = 1 if n % 2 == 0 else 0
    depth = (n - top).bit_length() - 1 + top
    narrow = depth - 1 if top and (c == 1 or n == 2) else depth
    up, down = [], []
    for level in range(depth):
        messages = 2 if level < narrow else 1
        far = messages * share if at.node < n and 1 << level >= at.node else 0
        up.append(at.term(1, messages, messages * share, messages * share, int(far > 0)))
        down.append(at.term(1, messages, messages * share, 0.0, int(far > 0)))
    messages, added = (2 * trees, 2) if n > 2 else (trees, 1)
    messages += int(n > 2 and trees == 1)
    both = at.term(c - 1, messages, messages * share, added * share, int(at.node < n))
    return [*up, both, *reversed(down)]


def _nccl_tree(n: int, k: int, c: int, at: _Places) -> list[Term]:
    """Chains inside, double tree across; the trees' heads in a node are two ranks, so the port of one serves one tree."""
    m, share = n // k, 1 / (2 * c)
    if k == 1:
        return _tree(n, share, 2, c, at)
    chain = [Term(k - 1, (2, 2 * share), added=a) for a in (2 * share, 0.0)]
    if m == 1:
        return [chain[0], Term(c - 1, (4, 4 * share) if k > 2 else (2, 2 * share), added=2 * share if k > 2 else share), chain[1]]
    tree = _tree(m, share, 1, c, at.heads(m))
    both = tree[len(tree) // 2]  # up, both ways, down: here a head also serves the two chains of its node
    messages, shares = both.inside
    if at.node == n:
        tree[len(tree) // 2] = Term(both.rounds, (messages + 2, shares + 2 * share), added=both.added + share)
    else:
        tree = [_lift(t, (2 if t is not both else 4) * share, (0, 0.0) if t is not both else (2, 2 * share)) for t in tree]
    return [chain[0], *tree, chain[1]]


def _lift(t: Term, node: float, inside: tuple[int, float] = (0, 0.0)) -> Term:
    """A term of an algorithm over one rank a node, on links between nodes; `node` is the share that a node takes in, all its ranks."""
    return Term(t.rounds, inside, t.inside, node=node, added=t.added)


def _collnet_chain(n: int, k: int, c: int, at: _Places) -> list[Term]:
    share = 1 / c
    switch = int(n > k)
    chain = [Term(k - 1, (1, share), added=a) for a in (share, 0.0)]
    hop = Term(switch, across=(1, share), node=share)
    inner = (2, 2 * share) if k > 2 or not switch else (int(k > 1), share if k > 1 else 0.0)
    steady = Term(c - 1, (1, share) if switch and k > 1 else inner, (switch, share * switch), share * switch, share if k > 1 else 0.0)
    return [chain[0], hop, steady, hop, chain[1]]


def _collnet_direct(n: int, k: int, c: int, at: _Places) -> list[Term]:
    inner = [Term(int(k > 1), (k - 1, (k - 1) / k), added=a) for a in ((k - 1) / k, 0.0)]
    hop = Term(2 if n > k else 0, across=(1, 1 / k), node=1.0)
    return [inner[0], hop, inner[1]]


def _nvls(n: int, k: int, c: int, at: _Places) -> list[Term]:
    return [Term(1, (1, 1.0)), Term(2, (1, 1 / n)), Term(1, (1, (n - 1) / n))]


def _nvls_tree(n: int, k: int, c: int, at: _Places) -> list[Term]:
    m = n // k
    if k == 1:
        return _tree(n, 1.0, 1, 1, at)
    across = _tree(m, 1 / k, 1, 1, at.heads(m)) if m > 1 else []
    if at.node < n:  # rails alternate between the two trees, so half of a node's ranks are inner
        across = [_lift(t, (k + 1) // 2 * t.inside[1]) for t in across]
    node = _nvls(k, k, 1, at)
    return [node[0], Term(1, (1, 1 / k)), *across, Term(1, (1, 1 / k)), node[2]]


_FORMS: dict[str, Callable[[int, int, int, _Places], list[Term]]] = {
    "naive": _naive,
    "ring": _ring,
    "ring_2d": _ring_2d,
    "halving_doubling": _halving_doubling,
    "binary_tree": lambda n, k, c, at: _tree(n, 1.0, 1, 1, at),
    "pipelined_tree": lambda n, k, c, at: _tree(n, 1 / c, 1, c, at),
    "double_binary_tree": lambda n, k, c, at: _tree(n, 1 / (2 * c), 2, c, at),
    "nccl_tree": _nccl_tree,
    "one_shot": _one_shot,
    "two_shot": _two_shot,
    "echo_2d": _echo_2d,
    "pat": _pat,
    "collnet_chain": _collnet_chain,
    "collnet_direct": _collnet_direct,
    "nvls": _nvls,
    "nvls_tree": _nvls_tree,
}
