"""All-reduces that work inside nodes, then across them, then inside again: the 2D ring and hierarchical Echo.

Why: only 1 / ranks_per_node of the message crosses the network from each rank, and the rings are as short as a node and as the number
of nodes, instead of their product. The latency stays linear in the number of nodes: the constant shrinks, the law does not.
Source: NCCL 2.4 (Jeaugey, 2019) for the 2D ring; the paper, Section 4.1, for two-shot; ZeRO++ (Wang et al., 2024) for quantizing
across nodes.
"""

from __future__ import annotations

from echoreduce.collectives.direct import direct_all_gather, direct_reduce_scatter
from echoreduce.collectives.program import Program
from echoreduce.collectives.ring import ring_all_gather, ring_reduce_scatter
from echoreduce.collectives.subgroups import across, inside


def ring_2d(world_size: int, ranks_per_node: int) -> Program:
    """Ring reduce-scatter inside nodes, ring all-reduce of each rank's block across nodes, ring all-gather inside.

    2 (L - 1) + 2 (M - 1) rounds for M nodes of L ranks; bytes of a rank 2 (N - 1) / N of the message, as for the flat ring.
    """
    node, rail = inside(world_size, ranks_per_node), across(world_size, ranks_per_node)
    phases = (
        *ring_reduce_scatter(node, "reduce-scatter inside"),
        *ring_reduce_scatter(rail, "reduce-scatter across"),
        *ring_all_gather(rail, "all-gather across"),
        *ring_all_gather(node, "all-gather inside"),
    )
    return Program("ring_2d", world_size, world_size, phases, period=ranks_per_node)


def echo_2d(world_size: int, ranks_per_node: int) -> Program:
    """Two-shot's push inside nodes, two-shot on each rank's block across nodes, two-shot's gather inside: 4 rounds at any size.

    Three roundings a value if every link is quantized (the last gather forwards codes), two if only the links between nodes are
    (`counters.count_roundings` with `between_nodes`).
    """
    node, rail = inside(world_size, ranks_per_node), across(world_size, ranks_per_node)
    phases = (
        *direct_reduce_scatter(node, "push inside"),
        *direct_reduce_scatter(rail, "push across"),
        *direct_all_gather(rail, "gather across"),
        *direct_all_gather(node, "gather inside"),
    )
    return Program("echo_2d", world_size, world_size, phases, period=ranks_per_node)
