"""Closed forms against textbook formulas and against the simulator; O38."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from echoreduce.collectives.catalogue import ALGORITHMS, build
from echoreduce.cost.model import cost, formula, terms
from echoreduce.cost.simulator import simulate
from echoreduce.cost.topology import PRESETS, PROTOCOLS, Link, Topology, Wire, flat, preset
from echoreduce.errors import ConfigError

ALPHA, BETA, GAMMA = 3e-6, 1 / 20e9, 1 / 700e9
SINGLE_PORT = flat(ALPHA, BETA, GAMMA)
NODES = Topology("nodes", Link(1e-6, 1 / 300e9, 2e-7), Link(6e-6, 1 / 25e9, 5e-7), ranks_per_node=8, gamma=1 / 500e9)
SIZES = (0.0, 1.0, 1e4, 1e6, 1e9)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_o38_every_cost_is_finite_ends_quickly_and_is_zero_for_one_rank(name: str) -> None:
    start = time.monotonic()
    for n in range(1, 18):
        for nbytes in (0, 1, 10**9):
            for per_node in (k for k in range(1, n + 1) if n % k == 0):
                seconds = cost(name, SINGLE_PORT, n, nbytes, per_node)
                played = simulate(build(name, n, per_node), SINGLE_PORT, nbytes).seconds
                assert math.isfinite(seconds)
                assert math.isfinite(played)
                assert (seconds > 0) == (played > 0) == (n > 1)
                if n == 1:
                    assert seconds == played == 0.0
    assert time.monotonic() - start < 60.0


def test_o38_textbook_formulas() -> None:
    for n in range(2, 18):
        for x in (0, 1, 1e9):
            ring = 2 * (n - 1) * ALPHA + 2 * (n - 1) / n * x * BETA + (n - 1) / n * x * GAMMA
            assert cost("ring", SINGLE_PORT, n, x) == pytest.approx(ring)
            assert cost("two_shot", SINGLE_PORT, n, x) == pytest.approx(ring)  # single-port: as many messages, one after the other
            assert cost("one_shot", SINGLE_PORT, n, x) == pytest.approx((n - 1) * (ALPHA + x * BETA + x * GAMMA))
            power = 1 << (n.bit_length() - 1)
            butterfly = 2 * math.log2(power) * ALPHA + (power - 1) / power * x * (2 * BETA + GAMMA)
            fold = 0.0 if power == n else 2 * (ALPHA + x * BETA) + x * GAMMA
            assert cost("halving_doubling", SINGLE_PORT, n, x) == pytest.approx(butterfly + fold)
            assert cost("halving_doubling", SINGLE_PORT, n, x) >= cost("halving_doubling", SINGLE_PORT, power, x)
            pat = 2 * math.ceil(math.log2(n)) * ALPHA + (n - 1) / n * x * (2 * BETA + GAMMA)
            assert cost("pat", SINGLE_PORT, n, x) == pytest.approx(pat)
    assert cost("ring_2d", SINGLE_PORT, 24, 1e6, 4) == pytest.approx(2 * 8 * ALPHA + 23 / 24 * 1e6 * (2 * BETA + GAMMA))
    pieces = 64
    depth = 5  # a root above a full tree over 31 ranks
    steady = (pieces - 1) * (4 * ALPHA + 4 * 1e6 / 128 * BETA + 2 * 1e6 / 128 * GAMMA)
    ends = depth * (2 * (2 * ALPHA + 2 * 1e6 / 128 * BETA) + 2 * 1e6 / 128 * GAMMA)
    assert cost("double_binary_tree", SINGLE_PORT, 32, 1e6, 1, pieces) == pytest.approx(steady + ends)


def test_the_documents_worked_examples() -> None:
    """300M parameters, 1.2 GB: 1.2 s and 10.8 s into a single reducer at 1 GB/s, about 0.4 s around a ring at 6 GB/s."""
    for n, gather in ((2, 1.2), (10, 10.8)):
        both_ways = cost("naive", PRESETS["1GBps"], n, 1.2e9)
        assert both_ways == pytest.approx(2 * gather)  # one way in, one way out
        overlapped = simulate(build("naive", n, 1, 1000), PRESETS["1GBps"], 1.2e9).seconds
        assert overlapped == pytest.approx(gather, rel=2e-3)  # the answer leaves while the next piece comes in
    for n in (4, 40, 400):
        ring = cost("ring", PRESETS["6GBps"], n, 1.2e9)
        assert ring == pytest.approx(2 * (n - 1) / n * 0.2)
    assert cost("ring", PRESETS["6GBps"], 400, 1.2e9) == pytest.approx(0.4, rel=0.01)


EXACT_ON_FLAT = ("ring", "ring_2d", "halving_doubling", "one_shot", "two_shot", "echo_2d", "pat", "nvls", "collnet_direct")


@pytest.mark.parametrize("machine", [SINGLE_PORT, flat(5e-6, 1 / 25e9, 1 / 500e9, 1e-6), flat(5e-6, 1 / 25e9, 0.0, 0.0)])
@pytest.mark.parametrize("name", EXACT_ON_FLAT)
def test_closed_form_equals_simulation_on_flat_machines(name: str, machine: Topology) -> None:
    for n in [*range(1, 20), 64, 100]:
        for per_node in (k for k in (1, 2, 5) if n % k == 0):
            for nbytes in SIZES:
                played = simulate(build(name, n, per_node), machine, nbytes).seconds
                assert cost(name, machine, n, nbytes, per_node) == pytest.approx(played, rel=1e-9), (n, per_node, nbytes)


def test_closed_form_equals_simulation_for_perfect_trees_and_the_unpipelined_reducer() -> None:
    machine = flat(5e-6, 1 / 25e9, 1 / 500e9, 1e-6)
    for nbytes in SIZES:
        for n in (2, 3, 4, 7, 8, 15, 16, 63, 64, 255, 256):
            played = simulate(build("binary_tree", n), machine, nbytes).seconds
            assert cost("binary_tree", machine, n, nbytes) == pytest.approx(played, rel=1e-9)
        for n in range(2, 20):
            assert cost("naive", machine, n, nbytes) == pytest.approx(simulate(build("naive", n), machine, nbytes).seconds, rel=1e-9)


@pytest.mark.parametrize("name", ["ring_2d", "echo_2d", "collnet_direct", "nvls_tree"])
def test_closed_form_equals_simulation_on_the_algorithms_own_nodes(name: str) -> None:
    for n in (8, 16, 32, 64):
        for nbytes in SIZES:
            assert cost(name, NODES, n, nbytes, 8) == pytest.approx(simulate(build(name, n, 8), NODES, nbytes).seconds, rel=1e-9)


#: Range of simulated over closed form where ranks run at different paces; measured, see docs/collectives.md.
RANGES = {
    ("naive", "flat"): (0.68, 1.0),
    ("pipelined_tree", "flat"): (0.65, 1.0),
    ("double_binary_tree", "flat"): (0.75, 1.15),
    ("nccl_tree", "flat"): (0.63, 1.25),
    ("collnet_chain", "flat"): (0.8, 1.0),
    ("ring", "nodes"): (1.0, 1.1),
    ("nccl_tree", "nodes"): (0.68, 1.02),
    ("collnet_chain", "nodes"): (0.85, 1.0),
    ("two_shot", "nodes"): (1.0, 1.45),
    ("pat", "nodes"): (0.55, 1.0),
}


@pytest.mark.parametrize(("name", "kind"), list(RANGES))
def test_closed_form_is_near_the_simulation_elsewhere(name: str, kind: str) -> None:
    low, high = RANGES[name, kind]
    machine = NODES if kind == "nodes" else flat(5e-6, 1 / 25e9, 1 / 500e9, 1e-6)
    for n in (16, 24, 64) if kind == "nodes" else (2, 3, 5, 8, 15, 16, 24, 100):
        for pieces in (1, 4, 64) if ALGORITHMS[name].pipelined else (1,):
            for nbytes in SIZES:
                per_node = 8 if kind == "nodes" or n in (16, 24) else 1
                ratio = simulate(build(name, n, per_node, pieces), machine, nbytes).seconds / cost(
                    name, machine, n, nbytes, per_node, pieces
                )
                assert low - 1e-9 <= ratio <= high + 1e-9, (n, pieces, nbytes, ratio)


def test_bits_change_bytes_and_the_codec_is_paid_for() -> None:
    machine = replace(SINGLE_PORT, codec=1e-12)
    four = Wire(4.25 / 16, 4.25 / 16)
    saved = cost("ring", machine, 8, 1e9) - cost("ring", machine, 8, 1e9, wire=four)
    assert saved == pytest.approx(2 * 7 / 8 * 1e9 * (BETA * 11.75 / 16 - 2e-12))
    assert simulate(build("ring", 8), machine, 1e9, four).seconds == pytest.approx(cost("ring", machine, 8, 1e9, wire=four))
    across = Wire(1.0, 4.25 / 16)
    assert cost("echo_2d", NODES, 64, 1e9, 8, wire=across) < cost("echo_2d", NODES, 64, 1e9, 8)


def test_formula_is_readable() -> None:
    assert formula(terms("ring", SINGLE_PORT, 8)) == "7 (alpha + 0.125 X beta + 0.125 X gamma) + 7 (alpha + 0.125 X beta)"
    assert formula(terms("ring", SINGLE_PORT, 1)) == "0"
    assert "alpha'" in formula(terms("echo_2d", NODES, 64, 8))
    assert "f = 0.125" in formula(terms("ring", NODES, 64))


def test_protocols_are_link_parameters() -> None:
    names = [p.name for p in PROTOCOLS]
    assert names == ["LL", "LL128", "Simple"]
    summit = PRESETS["summit"]
    ll, ll128, simple = (summit.with_protocol(p, several_peers=True) for p in PROTOCOLS)
    assert ll.network.alpha < ll128.network.alpha < simple.network.alpha
    assert ll.network.beta == pytest.approx(4 * simple.network.beta)
    assert ll128.network.beta == pytest.approx(128 / 120 * simple.network.beta)


def test_nonsense_is_refused() -> None:
    for call in (
        lambda: cost("rings", SINGLE_PORT, 4, 1),
        lambda: cost("ring", SINGLE_PORT, 4, -1),
        lambda: cost("ring", SINGLE_PORT, 4, float("nan")),
        lambda: cost("ring", SINGLE_PORT, 0, 1),
        lambda: cost("ring_2d", SINGLE_PORT, 6, 1, 4),
        lambda: cost("naive", SINGLE_PORT, 4, 1, 1, 0),
        lambda: simulate(build("ring", 2), SINGLE_PORT, -1),
        lambda: Link(-1.0, 0.0),
        lambda: Link(0.0, float("inf")),
        lambda: Topology("x", Link(0, 0), ranks_per_node=0),
        lambda: Topology("x", Link(0, 0), oversubscription=0.5),
        lambda: preset("dgx"),
    ):
        with pytest.raises(ConfigError):
            call()
