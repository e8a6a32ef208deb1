"""The event simulator: queues, contention, symmetry, and scale."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echoreduce.collectives.catalogue import ALGORITHMS, build
from echoreduce.collectives.program import Round, from_rounds
from echoreduce.cost.queues import serve
from echoreduce.cost.simulator import representatives, simulate
from echoreduce.cost.topology import PRESETS, Host, Link, Topology, flat

FLAT = flat(5e-6, 1 / 25e9, 1 / 500e9, 1e-6)
NODES = Topology("nodes", Link(1e-6, 1 / 300e9, 2e-7), Link(6e-6, 1 / 25e9, 5e-7), ranks_per_node=8, gamma=1 / 500e9)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 10), st.floats(0, 3)), max_size=40),
    st.lists(st.floats(0, 5), min_size=5, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_queues_equal_a_plain_loop(jobs: list[tuple[int, float, float]], free: list[float]) -> None:
    resource = np.array([j[0] for j in jobs], dtype=np.int64)
    arrive, width = (np.array([j[i] for j in jobs], dtype=np.float64) for i in (1, 2))
    state = np.array(free)
    begin = serve(resource, arrive.copy(), width, state)
    expected, plain = np.zeros(len(jobs)), list(free)
    for i in sorted(range(len(jobs)), key=lambda i: (arrive[i], i)):
        expected[i] = max(arrive[i], plain[resource[i]])
        plain[resource[i]] = expected[i] + width[i]
    assert np.allclose(begin, expected)
    assert np.allclose(state, plain)


def test_one_message_fan_out_and_fan_in() -> None:
    machine = flat(5.0, 2.0, 3.0, 1.0)
    one = from_rounds("x", 4, 1, [Round.of([0], [1], 0, 1, reduce=True)])
    assert simulate(one, machine, 10).seconds == 5 + 20 + 30
    out = from_rounds("x", 4, 1, [Round.of([0, 0, 0], [1, 2, 3], 0, 1, reduce=False)])
    assert simulate(out, machine, 10).seconds == 5 + 2 * 1 + 3 * 20
    into = from_rounds("x", 4, 1, [Round.of([1, 2, 3], [0, 0, 0], 0, 1, reduce=True)])
    assert simulate(into, machine, 10).seconds == 5 + 2 * 1 + 3 * 20 + 3 * 30
    # a rank that is not concerned does not wait: 2 -> 3 runs beside 0 -> 1 -> 0
    apart = from_rounds("x", 4, 1, [Round.of([0], [1], 0, 1, False), Round.of([1, 2], [0, 3], 0, 1, False)])
    clocks = simulate(apart, machine, 10).clocks
    assert clocks.tolist() == [50.0, 46.0, 21.0, 25.0]


def test_shared_network_ports_slow_the_butterfly_and_not_the_ring() -> None:
    """The SMP contention for which Patarasuk and Yuan proposed the ring: one port for a node of 8 ranks."""
    shared = replace(NODES, nics_per_node=1)
    x = 1e9
    ring, butterfly = build("ring", 64), build("halving_doubling", 64)
    assert simulate(ring, shared, x).seconds == pytest.approx(simulate(ring, NODES, x).seconds, rel=1e-6)
    slower = simulate(butterfly, shared, x).seconds / simulate(butterfly, NODES, x).seconds
    assert 7.0 < slower < 8.0
    assert simulate(butterfly, shared, x).seconds > 5 * simulate(ring, shared, x).seconds
    assert simulate(butterfly, NODES, x).seconds < simulate(ring, NODES, x).seconds


def test_oversubscribed_uplinks_slow_what_crosses_pods() -> None:
    pods = replace(NODES, nodes_per_pod=2, oversubscription=4.0)
    x = 1e9
    program = build("echo_2d", 64, 8)
    assert simulate(program, pods, x).seconds > 2 * simulate(program, NODES, x).seconds
    inside = build("ring", 16)
    assert simulate(inside, pods, x).seconds == pytest.approx(simulate(inside, replace(NODES, nodes_per_pod=2), x).seconds)


def test_a_shared_host_carries_every_byte() -> None:
    host = replace(flat(1e-3, 1e-9, 0.0, 0.0), host=Host(0.0, 1e-9, 1e-4))
    seconds = simulate(build("ring", 4), host, 4e6).seconds
    busy = 6 * 4 * (1e-4 + 1e-3)  # the host is never idle but for the first and the last message's way
    assert busy < seconds <= busy + 2 * 6 * 1e-3
    alone = from_rounds("x", 4, 1, [Round.of(range(4), [1, 2, 3, 0], 0, 1, reduce=False)])
    assert simulate(alone, host, 1e6).seconds == pytest.approx(1e-3 + 4 * (1e-4 + 1e-3), rel=1e-9)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_representatives_give_what_all_ranks_give(name: str) -> None:
    machines = [FLAT, NODES, replace(NODES, nics_per_node=2), replace(NODES, nodes_per_pod=2, oversubscription=3.0)]
    for machine in machines:
        for n in (8, 16, 24, 32):
            program = build(name, n, 8, 4)
            for nbytes in (0, 1e4, 1e8):
                few, all_ = simulate(program, machine, nbytes), simulate(program, machine, nbytes, full=True)
                queues = machine.nics_per_node or machine.nodes_per_pod  # ties in shared queues depend on the numbering
                assert few.seconds == pytest.approx(all_.seconds, rel=0.03 if queues else 1e-9), (machine, n, nbytes)
                assert few.clocks.size <= all_.clocks.size


def test_what_is_multiplied_out_equals_what_is_played() -> None:
    """A long phase against the same rounds written as phases of one step, which cannot be multiplied out."""
    for machine in (FLAT, NODES):
        for program in (build("ring", 48), build("ring_2d", 48, 8), build("pipelined_tree", 12, 1, 40), build("naive", 6, 1, 50)):
            written = from_rounds(program.name, program.world_size, program.chunks, list(program.rounds()))
            short, long = simulate(program, machine, 1e7), simulate(written, machine, 1e7)
            assert short.seconds == pytest.approx(long.seconds, rel=1e-6)
            assert long.played == written.round_count
    assert simulate(build("ring", 48), FLAT, 1e7).played < 10


SYMMETRIC = ("ring", "ring_2d", "two_shot", "one_shot", "echo_2d", "pat")


@pytest.mark.parametrize("n", [24_576, 100_000])
def test_symmetric_programs_at_scale_take_less_than_a_second(n: int) -> None:
    for name in SYMMETRIC:
        for machine in (FLAT, NODES):
            start = time.process_time()
            outcome = simulate(build(name, n, 8), machine, 2**40)
            assert time.process_time() - start < 1.0, (name, machine.name)
            assert outcome.classes <= 8
            assert representatives(build(name, n, 8), machine) == outcome.classes
            assert 0 < outcome.seconds < 1e9


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n not in ("one_shot", "two_shot", "echo_2d", "nvls")])
def test_any_program_to_4096_ranks_takes_seconds(name: str) -> None:
    start = time.process_time()
    assert simulate(build(name, 4096, 8, 16), NODES, 1e8).seconds > 0
    assert time.process_time() - start < 10.0


def test_sizes_of_64_bits() -> None:
    huge = float(2**62)
    assert simulate(build("ring", 24_576), FLAT, huge).seconds == pytest.approx(2 * huge / 25e9 + huge / 500e9, rel=1e-3)


def test_the_ring_of_24_576_ranks_over_the_tree() -> None:
    """The 180 reported for Summit lies on our curve: above it for small messages, below it for large ones."""
    from echoreduce.cli.figures import ratio

    summit = PRESETS["summit"]
    ratios = {nbytes: ratio(summit, 24_576, nbytes) for nbytes in (8, 1 << 16, 1 << 18, 1 << 30)}
    assert ratios[8] > 400
    assert ratios[1 << 16] > 180 > ratios[1 << 18]
    assert ratios[1 << 30] < 2
