"""Bytes against Patarasuk and Yuan's bound, buffers, and roundings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.cases import NAMES, shapes
from echoreduce.collectives.bound import lower_bound, total_lower_bound
from echoreduce.collectives.catalogue import ALGORITHMS, build
from echoreduce.collectives.counters import between_nodes, count_roundings, count_traffic
from echoreduce.errors import ConfigError

EXACT = ("ring", "two_shot", "pat")  # meet the bound for every message of a multiple of N, the ring for every message
NAMES_WITHOUT_SWITCH = [n for n in NAMES if not ALGORITHMS[n].in_switch]


def test_the_bound_itself() -> None:
    assert lower_bound(1, 10**18) == 0
    assert lower_bound(2, 7) == 7
    assert lower_bound(3, 1) == 2
    assert lower_bound(24_576, 2**62) == -(-2 * 24_575 * 2**62 // 24_576)
    assert total_lower_bound(4, 5) == 30
    for n, x in ((0, 1), (2, -1)):
        with pytest.raises(ConfigError):
            lower_bound(n, x)
        with pytest.raises(ConfigError):
            total_lower_bound(n, x)


@pytest.mark.parametrize("name", NAMES_WITHOUT_SWITCH)
def test_no_program_beats_the_bound(name: str) -> None:
    for n in [*range(1, 65), 96, 128]:
        if n > 64 and name in ("one_shot", "two_shot", "echo_2d"):
            continue
        per_node = max(k for k in range(1, n + 1) if n % k == 0 and k * k <= n)
        program = ALGORITHMS[name].build(n, per_node, 2)
        for numel in (n, 1, 1000):
            traffic = count_traffic(program, numel)
            assert traffic.sent.max() >= lower_bound(n, numel), (n, numel)
            assert traffic.received.max() >= lower_bound(n, numel), (n, numel)
            assert traffic.total >= total_lower_bound(n, numel)
            assert traffic.sent.sum() == traffic.received.sum()


@given(st.integers(1, 64), st.integers(0, 5000))
@settings(max_examples=60, deadline=None)
def test_the_ring_meets_the_bound_for_every_message(n: int, numel: int) -> None:
    traffic = count_traffic(build("ring", n), numel)
    assert traffic.sent.max() == lower_bound(n, numel)
    assert traffic.received.max() == lower_bound(n, numel)


def test_who_meets_the_bound_and_who_cannot() -> None:
    for n in range(2, 65):
        numel = 12 * n
        bound = lower_bound(n, numel)
        sent = {name: int(count_traffic(build(name, n, 1, 6), numel).sent[:n].max()) for name in NAMES}
        for name in EXACT:
            assert sent[name] == bound, (name, n)
        for program in [*shapes("ring_2d", n), *shapes("echo_2d", n)]:
            assert count_traffic(program, numel).sent.max() == bound
        if n & (n - 1) == 0:
            assert sent["halving_doubling"] == bound
        elif n > 2:
            assert sent["halving_doubling"] > bound
        assert sent["naive"] == (n - 1) * numel
        assert sent["one_shot"] == (n - 1) * numel
        if n > 3:
            assert sent["double_binary_tree"] == 2 * numel  # full bandwidth, up to the N / (N - 1) of the bound
            assert sent["binary_tree"] >= 2 * numel
        assert sent["nvls"] == numel + numel // n  # below the bound for N > 3: the switch adds, and is not one of its processes


def test_trees_move_the_least_in_total_and_switches_less_per_rank() -> None:
    for n in (5, 8, 30):
        for name in ("ring", "binary_tree", "double_binary_tree", "pat", "halving_doubling", "two_shot", "naive"):
            assert count_traffic(build(name, n, 1, 2), 60 * n).total == total_lower_bound(n, 60 * n), name
    collnet = count_traffic(build("collnet_chain", 8, 1, 1), 800)
    assert collnet.sent[:8].max() == 800 < lower_bound(8, 800)


def test_messages_and_buffers() -> None:
    n, numel = 8, 800
    assert count_traffic(build("ring", n), numel).messages.tolist() == [14] * n
    assert count_traffic(build("pat", n), numel).messages.tolist() == [6] * n  # aggregated: one message a round
    buffer = {name: int(count_traffic(build(name, n), numel).buffer.max()) for name in ("ring", "halving_doubling", "two_shot", "one_shot")}
    assert buffer == {"ring": 100, "halving_doubling": 400, "two_shot": 700, "one_shot": 5600}


def test_roundings_of_each_algorithm() -> None:
    """Table 1 of the paper, and its counterpart for the other algorithms."""
    for n in (2, 4, 8, 16, 32, 64):
        log = int(math.log2(n))
        counted = {name: count_roundings(build(name, n, 1, 1)) for name in NAMES}
        most = {name: c.most for name, c in counted.items()}
        assert most["ring"] == n
        assert most["two_shot"] == min(2, n)
        assert most["one_shot"] == 1
        assert most["halving_doubling"] == most["pat"] == log + 1
        assert most["binary_tree"] == most["double_binary_tree"] == log + 1
        noise = {name: c.noise for name, c in counted.items()}
        assert noise["ring"] == n * (n - 1) // 2 + n
        assert noise["two_shot"] == 2 * n - 1
        assert noise["one_shot"] == n
        assert noise["halving_doubling"] == n * log // 2 + n


def test_hierarchy_with_exact_links_inside_nodes() -> None:
    program = build("echo_2d", 32, 8)
    assert count_roundings(program).most == 3
    across = count_roundings(program, between_nodes(8))
    assert across.most == 2
    assert across.noise == 8 * (4 - 1) + 32
    assert count_roundings(program, lambda src, dst: np.zeros(src.size, dtype=bool)).noise == 0
