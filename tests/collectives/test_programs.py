"""Shapes of programs: chunks, phases, trees, rounds and symmetry."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.cases import NAMES, shapes
from echoreduce.collectives.catalogue import build
from echoreduce.collectives.pat import pat
from echoreduce.collectives.program import Round, chunk_starts
from echoreduce.collectives.tree import ROOT, Tree, double_tree_parents, power_of_two_parents
from echoreduce.errors import ConfigError


@given(st.integers(0, 2**62), st.integers(1, 200_000))
def test_chunks_cover_the_message_in_balance_without_overflow(numel: int, chunks: int) -> None:
    starts = chunk_starts(numel, chunks)
    sizes = np.diff(starts)
    assert starts[0] == 0
    assert starts[-1] == numel
    assert set(sizes.tolist()) <= {numel // chunks, -(-numel // chunks)}
    for c in (0, chunks // 2, chunks - 1):
        assert starts[c] == c * numel // chunks


@given(st.integers(0, 10**6), st.integers(1, 300))
def test_adjacent_chunks_hold_their_share(numel: int, chunks: int) -> None:
    sizes = np.diff(chunk_starts(numel, chunks))
    assert (sizes + np.roll(sizes, -1) >= 2 * numel // chunks).all()


def test_chunks_refuse_nonsense() -> None:
    for numel, chunks in ((-1, 2), (4, 0)):
        with pytest.raises(ConfigError):
            chunk_starts(numel, chunks)


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_a_phase_have_the_same_messages(name: str) -> None:
    """What lets the simulator price one step and repeat it."""
    for n in (2, 5, 8, 12):
        everyone = np.arange(n, dtype=np.int64)
        for program in shapes(name, n, pieces=(1, 9)):
            for phase in program.phases:
                first = phase.build(0, everyone).messages()
                for step in range(1, phase.steps):
                    other = phase.build(step, everyone).messages()
                    for field in ("src", "dst", "chunks", "reduced"):
                        assert (getattr(first, field) == getattr(other, field)).all(), (name, n, phase.label, step)


@pytest.mark.parametrize("name", NAMES)
def test_a_period_means_that_its_first_ranks_stand_for_all(name: str) -> None:
    """Each rank sends what its representative sends, and building for some ranks gives exactly their transfers."""
    for n in (4, 6, 8, 12):
        for program in shapes(name, n):
            if program.period is None:
                continue
            for phase in program.phases:
                whole = phase.build(0, np.arange(n, dtype=np.int64))
                for rank in range(n):
                    mine = whole.select(whole.src == rank)
                    alone = phase.build(0, np.array([rank]))
                    assert all((getattr(mine, f) == getattr(alone, f)).all() for f in ("src", "dst", "lo", "hi", "reduce"))
                    stand_in = whole.select(whole.src == rank % program.period).messages()
                    assert sorted(mine.messages().chunks.tolist()) == sorted(stand_in.chunks.tolist())
                    distance = {int(d - rank) % program.period for d in mine.dst}
                    assert distance == {int(d - rank % program.period) % program.period for d in stand_in.dst}


def test_rounds() -> None:
    for n in (2, 3, 8, 13, 64):
        log = (n - 1).bit_length()
        assert build("ring", n).round_count == 2 * (n - 1)
        assert build("one_shot", n).round_count == 1
        assert build("two_shot", n).round_count == 2
        assert build("pat", n).round_count == 2 * log
        assert build("halving_doubling", n).round_count == 2 * (n.bit_length() - 1) + (0 if n & (n - 1) == 0 else 2)
        assert build("double_binary_tree", n, 1, 5).round_count == build("binary_tree", n).round_count + 4
        assert build("binary_tree", n).round_count <= 2 * log
    assert build("ring_2d", 24, 4).round_count == 2 * 3 + 2 * 5
    assert build("echo_2d", 24, 4).round_count == 4


def test_pat_with_limited_messages() -> None:
    assert pat(64, 1).round_count == 2 * 63
    for limit in (1, 2, 4, 8):
        program = pat(37, limit)
        assert max(int(r.messages().chunks.max()) for r in program.rounds()) <= limit
    with pytest.raises(ConfigError, match="aggregate"):
        pat(4, 0)


def test_messages_join_transfers_of_one_pair_in_order() -> None:
    round_ = Round.of([2, 0, 2, 2], [1, 1, 1, 0], [0, 1, 4, 2], [2, 2, 5, 4], reduce=False)
    round_ = Round(round_.src, round_.dst, round_.lo, round_.hi, np.array([True, False, False, True]))
    messages = round_.messages()
    assert messages.src.tolist() == [2, 0, 2]
    assert messages.dst.tolist() == [1, 1, 0]
    assert messages.chunks.tolist() == [3, 1, 2]
    assert messages.reduced.tolist() == [2, 0, 2]
    assert len(round_.per_chunk()) == 6


def depth(parents: np.ndarray) -> int:
    return int(Tree(parents, np.zeros_like(parents)).levels().max(initial=0))


def test_double_binary_trees_for_2_to_1024_ranks() -> None:
    """No rank is inner in both, at most one is a leaf in both, two parents and at most two children each, the roots one parent."""
    for n in range(2, 1025):
        trees = double_tree_parents(n)
        children = np.array([np.bincount(t[t != ROOT], minlength=n) for t in trees])
        roots = [int(np.flatnonzero(t == ROOT)[0]) for t in trees]
        assert all(int((t == ROOT).sum()) == 1 for t in trees)
        assert roots[0] != roots[1] or n == 2
        inner = children > 0
        assert not (inner[0] & inner[1]).any(), n
        leaf_in_both = int((~inner[0] & ~inner[1]).sum())
        assert leaf_in_both == n % 2, n
        parents = np.array([t != ROOT for t in trees]).sum(axis=0)
        assert (parents == np.where(np.isin(np.arange(n), roots), 1, 2)).all(), n
        total = children.sum(axis=0)
        assert total.max() <= 2
        if n % 2 == 0:  # the roots have one child and one parent, all others two and two
            assert (total == np.where(np.isin(np.arange(n), roots), 1, 2)).all(), n
        else:  # all have two, but the one rank that is a leaf in both
            assert sorted(total.tolist()) == [0] + [2] * (n - 1), n
        assert max(depth(t) for t in trees) <= math.ceil(math.log2(n)), n


def test_the_trees_are_ncclss_for_14_ranks() -> None:
    """The figure of NCCL's source for its power-of-two pattern, 14 ranks."""
    expected = {0: ROOT, 1: 2, 2: 4, 3: 2, 4: 8, 5: 6, 6: 4, 7: 6, 8: 0, 9: 10, 10: 12, 11: 10, 12: 8, 13: 12}
    assert dict(enumerate(power_of_two_parents(14, rooted_at_zero=True).tolist())) == expected
