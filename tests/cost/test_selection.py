"""Selection, crossovers and calibration."""

from __future__ import annotations

import math

import pytest

from echoreduce.collectives.catalogue import ALGORITHMS, build
from echoreduce.collectives.program import Program
from echoreduce.cost.calibrate import Calibration, Comparison, Measure, collect, conclude, fit, probes
from echoreduce.cost.model import cost
from echoreduce.cost.selection import candidates, crossovers, price, rank, with_named_protocol
from echoreduce.cost.simulator import simulate
from echoreduce.cost.topology import PRESETS, Topology, Wire, flat
from echoreduce.errors import ConfigError

FOUR = Wire(4.25 / 16, 4.25 / 16)


def test_the_cheapest_is_the_cheapest() -> None:
    for name, world_size in (("h200", 8), ("h200", 64), ("summit", 24_576), ("flat", 7)):
        machine = PRESETS[name]
        for nbytes in (1, 10**6, 10**9):
            ranking = rank(machine, world_size, nbytes)
            times = [c.seconds for c in ranking]
            assert times == sorted(times)
            per_node = min(machine.node_size(world_size), world_size)
            for choice in ranking:
                priced = with_named_protocol(machine, choice)
                assert choice.seconds == cost(choice.algorithm, priced, world_size, nbytes, per_node, choice.pieces)


def test_only_what_runs_there_is_offered() -> None:
    on_node = {a.name for a in candidates(PRESETS["h200"], 8)}
    assert {"nvls", "one_shot"} <= on_node
    assert "collnet_direct" not in on_node
    assert "nvls" not in {a.name for a in candidates(PRESETS["h200"], 16)}
    assert not any(a.in_switch for a in candidates(PRESETS["flat"], 16))
    with pytest.raises(ConfigError):
        candidates(PRESETS["flat"], 4, ["ring", "rings"])


def test_latency_chooses_trees_and_bandwidth_rings() -> None:
    """As NCCL: tree for small messages, ring for large ones, at a size that grows with the number of ranks."""
    changes = []
    for world_size in (96, 384, 1536):
        found = crossovers(PRESETS["summit"], world_size, 1024, 1 << 40, names=("ring", "nccl_tree"))
        kinds = [found[0].before.algorithm, *(c.to.algorithm for c in found)]
        assert kinds[0] == "nccl_tree"
        assert kinds[-1] == "ring"
        changes.append(max(c.nbytes for c in found if c.to.algorithm == "ring" and c.before.algorithm != "ring"))
    assert changes == sorted(changes)
    protocols = [c.protocol for c in (price(ALGORITHMS["nccl_tree"], PRESETS["summit"], 96, b) for b in (64, 10**6, 10**10))]
    assert protocols == ["LL", "LL128", "Simple"]


def test_crossovers_are_where_the_ranking_changes() -> None:
    found = crossovers(PRESETS["h200"], 8)
    assert found
    for change in found:
        below, above = (rank(PRESETS["h200"], 8, int(change.nbytes * f))[0].algorithm for f in (0.98, 1.02))
        assert (below, above) == (change.before.algorithm, change.to.algorithm)


def test_four_bits_move_the_crossover_from_one_shot_to_two_shot() -> None:
    machine = flat(5e-6, 1 / 400e9, 0.0, 0.0)
    plain, four = (crossovers(machine, 8, names=("one_shot", "two_shot"), wire=w)[0].nbytes for w in (Wire(), FOUR))
    # alpha = (N - 1) (1 - 2 / N) X beta f: only the product of size and bits counts
    assert plain == pytest.approx(5e-6 * 400e9 / (7 * 0.75), rel=0.02)
    assert four / plain == pytest.approx(16 / 4.25, rel=0.02)


def test_bad_ranges_are_refused() -> None:
    with pytest.raises(ConfigError, match="smallest <= largest"):
        crossovers(PRESETS["h200"], 8, 10, 5)


def campaign(measure: Measure, *args: object, quietest: bool = False, **more: object) -> tuple[Calibration, list[Comparison]]:
    return conclude(collect(measure, *args, **more), quietest)


def simulated(machine: Topology) -> Measure:
    return lambda program, nbytes: simulate(program, machine, nbytes).seconds


@pytest.mark.parametrize("shared", [False, True])
def test_calibration_finds_the_constants_of_a_known_machine(shared: bool) -> None:
    host = (3e-5, 1e-4) if shared else (0.0, 0.0)
    truth = Calibration(4, 2e-4, *host, 4e-10, *((3e-10, 5e-10) if shared else (0.0, 0.0)), 1e-10, 0.0, ())
    names = ("ring", "pat", "two_shot", "one_shot")
    sizes = (1 << 21, 1 << 25)
    found, compared = campaign(simulated(truth.topology()), 4, [build(n, 4) for n in names], sizes, sweeps=1)
    assert bool(found.beta_host) == shared
    if shared:
        assert found.beta_host == pytest.approx(truth.beta_host, rel=0.1)
        assert found.beta_large == pytest.approx(truth.beta_large, rel=0.1)
        assert found.overhead == pytest.approx(truth.overhead, rel=0.25)
        assert found.wakeup == pytest.approx(truth.wakeup, rel=0.5)
    else:
        assert found.beta == pytest.approx(truth.beta, rel=0.05)
        assert found.alpha == pytest.approx(truth.alpha, rel=0.15)
    assert found.gamma == pytest.approx(truth.gamma, rel=0.15)  # on a shared host only `pair and add` shows it
    assert len(compared) == len(names) * len(sizes)
    assert max(abs(c.error) for c in compared) < 0.1


def test_sweeps_are_interleaved_and_medians_or_the_quietest_count() -> None:
    calls: list[tuple[str, int]] = []

    def noisy(program: Program, nbytes: int) -> float:
        calls.append((program.name, nbytes))
        sweep = (len(calls) - 1) // per_sweep
        return (1e-3 + nbytes * 1e-9) * (1.0, 50.0, 2.0)[sweep]

    per_sweep = 5 * 2 + 1
    _, compared = campaign(noisy, 2, [build("ring", 2)], [1000], sweeps=3, probe_sizes=(1000, 100_000))
    assert len(calls) == 3 * per_sweep
    assert calls[:per_sweep] == calls[per_sweep : 2 * per_sweep]
    assert compared[0].measured == pytest.approx(2 * (1e-3 + 1e-6))
    assert compared[0].spread == pytest.approx(((1e-3 + 1e-6), 50 * (1e-3 + 1e-6)))
    calls.clear()
    _, compared = campaign(noisy, 2, [build("ring", 2)], [1000], sweeps=3, quietest=True, probe_sizes=(1000, 100_000))
    assert compared[0].measured == pytest.approx(1e-3 + 1e-6)


def test_probes_and_refusals() -> None:
    assert set(probes(2)) == {"pair", "pair and add", "shift", "shift and add", "exchange"}
    rounds = {name: program.round_count for name, program in probes(5).items()}
    assert rounds == {"pair": 4, "pair and add": 4, "shift": 8, "shift and add": 8, "exchange": 2}
    with pytest.raises(ConfigError):
        probes(1)
    with pytest.raises(ConfigError):
        campaign(lambda p, b: 1.0, 2, probe_sizes=(8, 8))
    with pytest.raises(ConfigError):
        campaign(lambda p, b: 1.0, 2, sweeps=0)


def test_a_fit_never_has_negative_or_infinite_constants() -> None:
    for slope in (0.0, 1e-9):
        constants, _ = campaign(lambda p, b, s=slope: 1e-3 + s * b, 3, sweeps=1)
        values = (constants.alpha, constants.overhead, constants.wakeup, constants.beta, constants.beta_host, constants.gamma)
        assert all(math.isfinite(v) and v >= 0 for v in values)
        assert fit(constants.samples, 3).alpha == constants.alpha
