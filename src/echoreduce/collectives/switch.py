"""In-switch reduction: programs in which a switch takes part, adds and multicasts (SHARP, CollNet, NVLS).

Why: Patarasuk and Yuan's bound counts processes that add. A switch that adds is one more participant, and the ranks alone then send
about half of the bound: the proof is not wrong, its model has no such switch. Switches are participants from world_size on.

NVLS reads through one multicast object and writes through another, so its switch appears as two participants: one that adds
(multimem.ld_reduce) and one that copies (multimem.st). Leaves out: the switch's own limits (number of operands, formats).
Source: NCCL 2.14 to 2.18 release notes (CollnetDirect, CollnetChain, NVLS, NVLSTree); Graham et al., SHARP (2016).
"""

from __future__ import annotations

import numpy as np

from echoreduce.collectives.direct import direct_all_gather, direct_reduce_scatter
from echoreduce.collectives.program import NETWORK, IntArray, Phase, Program, Round, fixed
from echoreduce.collectives.subgroups import inside, node_count
from echoreduce.collectives.tree import ROOT, Tree, double_tree_parents, tree_phases


def collnet_chain(world_size: int, ranks_per_node: int, pieces: int) -> Program:
    """A chain inside each node; its head sends to the network's switch, which adds and answers every head. Pipelined."""
    nodes = node_count(world_size, ranks_per_node)
    switch = world_size
    parent = np.arange(-1, world_size, dtype=np.int64)
    parent[np.arange(nodes) * ranks_per_node] = switch
    parent[switch] = ROOT
    if world_size == 1:
        return Program("collnet_chain", 1, pieces, ())
    if nodes == 1:  # nothing to leave the node for: the head is the root
        return Program("collnet_chain", world_size, pieces, tree_phases((_one(np.arange(-1, world_size - 1)),), pieces))
    return Program("collnet_chain", world_size, pieces, tree_phases((_one(parent),), pieces), (NETWORK,))


def collnet_direct(world_size: int, ranks_per_node: int) -> Program:
    """Direct reduce-scatter inside the node, each rank's block added in the network's switch, direct all-gather inside."""
    nodes = node_count(world_size, ranks_per_node)
    node = inside(world_size, ranks_per_node)
    middle: tuple[Phase, ...] = ()
    if nodes > 1:
        ranks = np.arange(world_size, dtype=np.int64)
        lo, hi = node.block(ranks, node.position(ranks))
        up = Round.of(ranks, world_size, lo, hi, reduce=True)
        down = Round.of(world_size, ranks, lo, hi, reduce=False)
        middle = (fixed("add in the switch", up), fixed("switch answers", down))
    phases = (*direct_reduce_scatter(node, "reduce-scatter inside"), *middle, *direct_all_gather(node, "all-gather inside"))
    return Program("collnet_direct", world_size, world_size, phases, (NETWORK,) if nodes > 1 else ())


def nvls(world_size: int) -> Program:
    """NVLink SHARP on one node: each rank reads its 1 / N through the adding switch, and writes it through the multicast."""
    if world_size == 1:
        return Program("nvls", 1, 1, ())
    phases = _switch_in(world_size, world_size, world_size) + _switch_out(world_size, world_size, world_size + 1)
    return Program("nvls", world_size, world_size, phases, (0, 0))


def nvls_tree(world_size: int, ranks_per_node: int) -> Program:
    """NVLS inside each node, a binary tree across nodes for each local index's block."""
    nodes = node_count(world_size, ranks_per_node)
    if ranks_per_node == 1:
        return Program("nvls_tree", world_size, 1, _rails(world_size, 1))
    phases = (
        *_switch_in(world_size, ranks_per_node, switch=world_size),
        *_rails(world_size, ranks_per_node),
        *_switch_out(world_size, ranks_per_node, switch=world_size + nodes),
    )
    return Program("nvls_tree", world_size, ranks_per_node, phases, (*range(nodes), *range(nodes)))


def _one(parent: IntArray) -> Tree:
    return Tree(parent.astype(np.int64), np.zeros(parent.size, dtype=np.int64))


def _switch_in(world_size: int, per_node: int, switch: int) -> tuple[Phase, ...]:
    """Every rank's message into its node's adding switch (`switch` + node), and block l back to local index l."""
    ranks = np.arange(world_size, dtype=np.int64)
    own = ranks % per_node
    at = switch + ranks // per_node
    load = Round.of(ranks, at, 0, per_node, reduce=True)
    return fixed("add in the node's switch", load), fixed("switch answers", Round.of(at, ranks, own, own + 1, reduce=False))


def _switch_out(world_size: int, per_node: int, switch: int) -> tuple[Phase, ...]:
    """Every rank's block into its node's multicast (`switch` + node), and from there to the node's other ranks."""
    ranks = np.arange(world_size, dtype=np.int64)
    own = ranks % per_node
    store = Round.of(ranks, switch + ranks // per_node, own, own + 1, reduce=False)
    ahead = np.tile(np.arange(1, per_node, dtype=np.int64), world_size)
    owner = np.repeat(ranks, per_node - 1)
    peer = owner - owner % per_node + (owner + ahead) % per_node
    cast = Round.of(switch + owner // per_node, peer, owner % per_node, owner % per_node + 1, reduce=False)
    return fixed("store to the multicast", store), fixed("multicast", cast)


def _rails(world_size: int, per_node: int) -> tuple[Phase, ...]:
    """A tree across nodes for each local index l, which carries block l; even and odd l use the two trees of the double tree."""
    nodes = world_size // per_node
    parent = np.empty(world_size, dtype=np.int64)
    for local in range(per_node):
        across = double_tree_parents(nodes)[local % 2]
        parent[local::per_node] = np.where(across >= 0, across * per_node + local, ROOT)
    return tree_phases((Tree(parent, np.arange(world_size, dtype=np.int64) % per_node),), 1)
