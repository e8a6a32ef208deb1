"""Every all-reduce of this package by name, with the NCCL algorithm that it corresponds to.

Why: proofs, prices, selection and the command line iterate over one table, so an algorithm added here is proven, priced and listed.
Source: docs/design.md, Section 8; NCCL's NCCL_ALGO for the third column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echoreduce.collectives.butterfly import halving_doubling
from echoreduce.collectives.direct import one_shot, two_shot
from echoreduce.collectives.hierarchical import echo_2d, ring_2d
from echoreduce.collectives.pat import pat
from echoreduce.collectives.program import Program
from echoreduce.collectives.ring import naive, ring
from echoreduce.collectives.switch import collnet_chain, collnet_direct, nvls, nvls_tree
from echoreduce.collectives.tree import binary_tree, double_binary_tree, nccl_tree, pipelined_tree
from echoreduce.errors import ConfigError


@dataclass(frozen=True)
class Algorithm:
    """A way to build an all-reduce.

    Attributes:
        name: key of `ALGORITHMS`.
        build: (world_size, ranks_per_node, pieces) -> program; ignores what it does not use.
        summary: one line for tables.
        nccl: value of NCCL_ALGO that runs this pattern, or "".
        hierarchical: uses `ranks_per_node`.
        pipelined: uses `pieces`.
        in_switch: needs a switch that adds.
        single_node: runs inside one node only.
    """

    name: str
    build: Callable[[int, int, int], Program]
    summary: str
    nccl: str = ""
    hierarchical: bool = False
    pipelined: bool = False
    in_switch: bool = False
    single_node: bool = False


_ROWS = (
    Algorithm("naive", lambda n, k, c: naive(n, c), "every rank sends all to rank 0, which answers all", pipelined=True),
    Algorithm("ring", lambda n, k, c: ring(n), "reduce-scatter and all-gather around one ring", "Ring"),
    Algorithm("ring_2d", lambda n, k, c: ring_2d(n, k), "rings inside nodes and across them", hierarchical=True),
    Algorithm("halving_doubling", lambda n, k, c: halving_doubling(n), "butterfly; other sizes than powers of two fold first"),
    Algorithm("binary_tree", lambda n, k, c: binary_tree(n), "one tree, the whole message at a time"),
    Algorithm("pipelined_tree", lambda n, k, c: pipelined_tree(n, c), "one tree, piece after piece", pipelined=True),
    Algorithm("double_binary_tree", lambda n, k, c: double_binary_tree(n, c), "two trees with flipped roles", pipelined=True),
    Algorithm(
        "nccl_tree", lambda n, k, c: nccl_tree(n, k, c), "chain inside nodes, double tree across", "Tree", hierarchical=True, pipelined=True
    ),
    Algorithm("one_shot", lambda n, k, c: one_shot(n), "every rank sends all to every other: one round"),
    Algorithm("two_shot", lambda n, k, c: two_shot(n), "segments to their owners and back: two rounds (Echo's)"),
    Algorithm("echo_2d", lambda n, k, c: echo_2d(n, k), "two-shot inside nodes and across them: four rounds", hierarchical=True),
    Algorithm("pat", lambda n, k, c: pat(n), "binomial trees from every rank, messages aggregated", "PAT"),
    Algorithm(
        "collnet_chain",
        lambda n, k, c: collnet_chain(n, k, c),
        "chain inside nodes, the network's switch adds",
        "CollnetChain",
        hierarchical=True,
        pipelined=True,
        in_switch=True,
    ),
    Algorithm(
        "collnet_direct",
        lambda n, k, c: collnet_direct(n, k),
        "direct inside nodes, the network's switch adds",
        "CollnetDirect",
        hierarchical=True,
        in_switch=True,
    ),
    Algorithm("nvls", lambda n, k, c: nvls(n), "the node's switch adds and multicasts", "NVLS", in_switch=True, single_node=True),
    Algorithm(
        "nvls_tree",
        lambda n, k, c: nvls_tree(n, k),
        "the node's switch inside, trees across",
        "NVLSTree",
        hierarchical=True,
        in_switch=True,
    ),
)

#: Algorithms by name, in the order in which tables list them.
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def algorithm(name: str) -> Algorithm:
    """The named algorithm.

    Raises:
        ConfigError: unknown name; the text lists the known ones.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}; known are {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def build(name: str, world_size: int, ranks_per_node: int = 1, pieces: int = 1) -> Program:
    """The named all-reduce over `world_size` ranks in nodes of `ranks_per_node`, pipelined ones in `pieces` pieces.

    Raises:
        ConfigError: unknown name, nodes that do not make up the world, or fewer than one piece.
    """
    return algorithm(name).build(world_size, ranks_per_node, pieces)
