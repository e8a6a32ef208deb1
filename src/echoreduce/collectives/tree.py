"""Tree all-reduces: binary tree, pipelined tree, double binary tree, and NCCL's chain inside nodes with a double tree across them.

Why: a tree needs O(log N) rounds where the ring needs O(N). One tree leaves half of the links idle, because leaves only send up and
receive down; two trees with the roles flipped, each with half of the message, use all of them ("full bandwidth").

The tree is the power-of-two pattern of NCCL: position p > 0 with lowest set bit b has the parent (p ^ b) | 2b, or p ^ b where
that is outside. On an odd number of positions 1 .. M it is a full tree: even positions are inner with two children, odd ones are leaves.
  - even N: rank 0 is a root above the full tree on 1 .. N - 1; the second tree is the mirror image, r -> N - 1 - r.
  - odd N: the full tree on positions 1 .. N (rank r at r + 1); the second is shifted by one rank, and rank 0 is a leaf in both.
NCCL itself keeps rank 0 as the root for odd N too, which makes that rank inner in both trees; here no rank ever is.
Leaves out: in-order trees for non-commutative operators.
Source: Sanders, Speck and Traeff (2009), Sections 2 and 3; Jeaugey, NCCL 2.4 (2019). The properties are tested for N = 2 .. 1,024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echoreduce.collectives.program import IntArray, Phase, Program, Round
from echoreduce.collectives.subgroups import node_count
from echoreduce.errors import ConfigError

ROOT = -1
ABSENT = -2


@dataclass(frozen=True, eq=False)
class Tree:
    """A rooted forest over the participants that carries `pieces` chunks from chunk `first` on.

    Attributes:
        parent: int64, shape [participants]; ROOT at roots, ABSENT where a participant takes no part.
        first: first chunk of each participant's tree, int64, shape [participants] (all members of one tree share it).
    """

    parent: IntArray
    first: IntArray

    def levels(self) -> IntArray:
        """Distance of each participant to its root; 0 where it takes no part."""
        level = np.zeros_like(self.parent)
        at = self.parent.copy()
        while np.any(at >= 0):
            level += at >= 0
            at = np.where(at >= 0, self.parent[at], at)
        return level


def power_of_two_parents(positions: int, rooted_at_zero: bool) -> IntArray:
    """Parents in NCCL's pattern; with `rooted_at_zero` position 0 is the root, else the positions are 1 .. positions.

    Returns:
        int64, shape [positions], parents as indexes into the same array (position - 1 in the second case).
    """
    shift = 0 if rooted_at_zero else 1
    p = np.arange(positions, dtype=np.int64) + shift
    low = p & -p
    up = (p ^ low) | (low << 1)
    up = np.where(up >= positions + shift, p ^ low, up)
    return np.where((p == 0) | (up < shift), ROOT, up - shift)


def double_tree_parents(world_size: int) -> tuple[IntArray, IntArray]:
    """Parents in the two trees; see the module's text for the construction."""
    if world_size % 2 == 0:
        one = power_of_two_parents(world_size, rooted_at_zero=True)
        mirrored = one[::-1]
        return one, np.where(mirrored == ROOT, ROOT, world_size - 1 - mirrored)
    one = power_of_two_parents(world_size, rooted_at_zero=False)
    shifted = np.roll(one, 1)
    return one, np.where(shifted == ROOT, ROOT, (shifted + 1) % world_size)


def tree_phases(trees: tuple[Tree, ...], pieces: int) -> tuple[Phase, ...]:
    """Reduce to the roots and broadcast from them, piece after piece, all trees side by side.

    Piece j leaves a participant at level v in round j + depth - v and comes back to it in round j + depth + v - 1, so the whole takes
    2 depth + pieces - 1 rounds, and with many pieces both directions of every link are busy.
    """
    if pieces < 1:
        raise ConfigError(f"pieces must be at least 1, got {pieces}")
    edges = [_Edges.of(tree) for tree in trees]
    depth = max(int(e.level.max(initial=0)) for e in edges)
    if depth == 0:
        return ()
    rounds = 2 * depth + pieces - 1

    def build(start: int) -> Phase:
        full = 2 * depth - 1 <= start < pieces  # every edge is busy both ways until the last piece leaves the leaves
        steps = pieces - start if full else 1
        label = "all levels" if full else f"tree round {start}"
        return Phase(label, steps, lambda step, ranks: Round.join(e.at(start + step, depth, pieces) for e in edges))

    starts = [t for t in range(rounds) if not 2 * depth - 1 < t < pieces]
    return tuple(build(t) for t in starts)


@dataclass(frozen=True, eq=False)
class _Edges:
    child: IntArray
    parent: IntArray
    level: IntArray
    first: IntArray

    @staticmethod
    def of(tree: Tree) -> _Edges:
        child = np.flatnonzero(tree.parent >= 0)
        return _Edges(child, tree.parent[child], tree.levels()[child], tree.first[child])

    def at(self, t: int, depth: int, pieces: int) -> Round:
        """Transfers of round t: up (reduce) and down (copy)."""
        rounds = []
        for piece, src, dst, reduce in (
            (t - depth + self.level, self.child, self.parent, True),
            (t - depth - self.level + 1, self.parent, self.child, False),
        ):
            now = (piece >= 0) & (piece < pieces)
            lo = (self.first + piece)[now]
            rounds.append(Round.of(src[now], dst[now], lo, lo + 1, reduce))
        return Round.join(rounds)


def _from(array: IntArray, first: int = 0) -> Tree:
    return Tree(array, np.full_like(array, first))


def binary_tree(world_size: int) -> Program:
    """One binary tree, the whole message at a time: about 2 log2 N rounds of the whole message."""
    parents = power_of_two_parents(world_size, rooted_at_zero=world_size % 2 == 0)
    return Program("binary_tree", world_size, 1, tree_phases((_from(parents),), 1))


def pipelined_tree(world_size: int, pieces: int) -> Program:
    """The binary tree with the message in `pieces` pieces that follow each other."""
    parents = power_of_two_parents(world_size, rooted_at_zero=world_size % 2 == 0)
    return Program("pipelined_tree", world_size, pieces, tree_phases((_from(parents),), pieces))


def double_binary_tree(world_size: int, pieces: int) -> Program:
    """Two trees with flipped roles, half of the message each, in `pieces` pieces a tree."""
    one, two = double_tree_parents(world_size)
    trees = (_from(one), _from(two, pieces))
    return Program("double_binary_tree", world_size, 2 * pieces, tree_phases(trees, pieces))


def nccl_tree(world_size: int, ranks_per_node: int, pieces: int) -> Program:
    """NCCL's tree: a chain inside each node, whose head is a member of the double binary tree across nodes.

    The heads of the two trees are the first and the last rank of the node, so each uses its own network port.
    """
    nodes = node_count(world_size, ranks_per_node)
    trees = []
    for which, across in enumerate(double_tree_parents(nodes)):
        head, towards = (0, -1) if which == 0 else (ranks_per_node - 1, 1)
        parent = np.arange(world_size, dtype=np.int64) + towards
        heads = np.arange(nodes, dtype=np.int64) * ranks_per_node + head
        parent[heads] = np.where(across >= 0, across * ranks_per_node + head, ROOT)
        trees.append(_from(parent, which * pieces))
    return Program("nccl_tree", world_size, 2 * pieces, tree_phases(tuple(trees), pieces))
