"""Measures alpha, beta and gamma of a machine with small programs, and compares the model's prediction with measured all-reduces.

Why: a price list is only as good as its constants. The probes are programs of a few equal rounds, played by the very code that plays the
all-reduces, so what they measure is what the model needs: `pair` (one message, back and forth), `pair and add` (the same, added at the
receiver, which nothing hides), `shift` and `shift and add` (every rank sends one) and `exchange` (every rank sends one to every other; of
two ranks, each sends two). A round of m messages of b bytes on a host whose processes share cores and memory takes

    alpha + s wakeup + m overhead + min(m b, 4 MiB) beta_host + max(m b - 4 MiB, 0) beta_large + b gamma     (s of its ranks send)

if it stands alone, but ranks run ahead of each other and hide part of alpha. So the constants are those with which the simulator, playing
the same probes, comes nearest to the measured times (least squares of logarithms by Levenberg and Marquardt, from a linear fit). The
link's own beta comes from `pair`. Where a shift costs no more a byte than a pair, links share nothing and the host term is left out. With
more processes than cores the host term is not a detail: it is the time that cores need to move everybody's bytes. Constants are fitted for
each world size, since alpha then contains the scheduler.

Probes and all-reduces are measured in turn, several times over, and medians are compared: on a machine with other work, what is measured
minutes apart is not measured on the same machine.

Leaves out: how a program is timed: the caller brings a `Measure` (see `collectives.run`), so this module needs no torch.
Source: docs/design.md, Section 8; LogGP (Alexandrov et al., 1995) for the overhead term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from echoreduce.collectives.program import Program, Round, from_rounds
from echoreduce.cost.simulator import simulate
from echoreduce.cost.topology import Host, Link, Topology
from echoreduce.errors import ConfigError

#: (program, bytes of the message) -> median seconds of one call, the slowest rank's.
Measure = Callable[[Program, int], float]

#: Bytes of the probes.
PROBE_BYTES = (1 << 12, 1 << 17, 1 << 20, 1 << 21, 1 << 22, 1 << 23)

#: Rounds of a probe: of `pair`; a shift has twice as many and an exchange half, as in the algorithms that consist of them.
PROBE_ROUNDS = 4

#: Start of constants whose linear fit is 0, since the fit is in logarithms.
_SMALLEST = 1e-15

#: A shift that costs this much more a byte than a pair shows that messages share something.
_SHARED = 1.15


@dataclass(frozen=True)
class Sample:
    """One measured probe.

    Attributes:
        probe: its name.
        messages: messages in its round.
        nbytes: bytes of each.
        added: bytes that each receiver adds.
        seconds: median time of a round.
    """

    probe: str
    messages: int
    nbytes: int
    added: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """Constants of one machine at one world size.

    Attributes:
        world_size: processes that were measured.
        alpha: seconds a round, however many messages it has.
        overhead: seconds a message on the shared host (0 where nothing is shared).
        wakeup: seconds for each rank that sends in a round on the shared host (0 where nothing is shared).
        beta: seconds a byte of a lone message.
        beta_host: seconds a byte of all messages together on the shared host (0 where nothing is shared).
        beta_large: the same for bytes of a round beyond what caches hold (`Host.cached`).
        gamma: seconds a byte added.
        residual: median relative error of the fit over the probes.
        samples: what was measured.
    """

    world_size: int
    alpha: float
    overhead: float
    wakeup: float
    beta: float
    beta_host: float
    beta_large: float
    gamma: float
    residual: float
    samples: tuple[Sample, ...]

    def topology(self) -> Topology:
        """The machine with these constants, all ranks in one node."""
        host = Host(self.wakeup, self.beta_host, self.overhead, self.beta_large) if self.beta_host else None
        link = Link(self.alpha, self.beta, 0.0)
        return Topology(f"calibrated, {self.world_size} processes", link, host=host, gamma=self.gamma)


@dataclass(frozen=True)
class Comparison:
    """A measured all-reduce beside its prediction.

    Attributes:
        algorithm: name in `collectives.catalogue`.
        nbytes: bytes of the message.
        measured, predicted: seconds.
        spread: fastest and slowest sweep, seconds.
    """

    algorithm: str
    nbytes: int
    measured: float
    predicted: float
    spread: tuple[float, float]

    @property
    def error(self) -> float:
        """Relative error of the prediction, signed."""
        return self.predicted / self.measured - 1.0


def probes(world_size: int) -> dict[str, Program]:
    """The probe programs by name: a few rounds of one shape, each over other values, as the rounds of an all-reduce are.

    Raises:
        ConfigError: fewer than two ranks.
    """
    if world_size < 2:
        raise ConfigError(f"calibration needs at least 2 ranks, got {world_size}")
    ranks = np.arange(world_size, dtype=np.int64)
    source = np.repeat(ranks, world_size - 1)
    ahead = np.tile(ranks[1:], world_size)
    steps = range(PROBE_ROUNDS)

    def shift(step: int, reduce: bool) -> Round:
        chunk = (ranks - step) % world_size  # what arrived in the round before, as in a ring
        return Round.of(ranks, (ranks + 1) % world_size, chunk, chunk + 1, reduce)

    rounds = {
        "pair": [Round.of(i % 2, 1 - i % 2, i, i + 1, reduce=False) for i in steps],
        "pair and add": [Round.of(i % 2, 1 - i % 2, i, i + 1, reduce=True) for i in steps],
        "shift": [shift(i, reduce=False) for i in range(2 * PROBE_ROUNDS)],
        "shift and add": [shift(i, reduce=True) for i in range(2 * PROBE_ROUNDS)],
    }
    if world_size == 2:  # two messages each, or nothing would tell a message from a round
        source, ahead = np.repeat(ranks, 2), np.tile(ranks + 1, 2)
    # A chunk for each distance, so that no two messages write one place.
    exchange = Round.of(source, (source + (ahead if world_size > 2 else 1)) % world_size, ahead - 1, ahead, reduce=False)
    rounds["exchange"] = [exchange] * (PROBE_ROUNDS // 2)
    return {name: from_rounds(name, world_size, max(int(r.hi.max()) for r in parts), parts) for name, parts in rounds.items()}


@dataclass(frozen=True)
class Measured:
    """Times of a campaign, before anything is fitted.

    Attributes:
        world_size: ranks.
        probes, runs: (program, bytes of its message) of the probes and of the all-reduces to compare.
        times: seconds, shape [sweeps, probes + runs].
    """

    world_size: int
    probes: tuple[tuple[Program, int], ...]
    runs: tuple[tuple[Program, int], ...]
    times: NDArray[np.float64]


def collect(
    measure: Measure,
    world_size: int,
    programs: Sequence[Program] = (),
    sizes: Sequence[int] = (),
    sweeps: int = 3,
    probe_sizes: Sequence[int] = PROBE_BYTES,
) -> Measured:
    """Measure probes and all-reduces in turn; every rank of a real group calls this with the same arguments.

    Args:
        measure: times a program.
        world_size: ranks, >= 2.
        programs, sizes: every program at every size (bytes of the message) is to be compared.
        sweeps: how often everything is measured.
        probe_sizes: bytes of a probe's message, at least two different ones.
    Raises:
        ConfigError: too few ranks, sizes or sweeps.
    """
    if len(set(probe_sizes)) < 2 or sweeps < 1:
        raise ConfigError(f"calibration needs two message sizes and one sweep, got {tuple(probe_sizes)} and {sweeps}")
    todo = [(program, b * program.chunks) for program in probes(world_size).values() for b in probe_sizes]
    todo = [(program, nbytes) for program, nbytes in todo if nbytes <= 4 * max(probe_sizes)]
    runs = [(program, nbytes) for program in programs for nbytes in sizes]
    times = np.array([[measure(program, nbytes) for program, nbytes in todo + runs] for _ in range(sweeps)])
    return Measured(world_size, tuple(todo), tuple(runs), times)


def conclude(measured: Measured, quietest: bool = False) -> tuple[Calibration, list[Comparison]]:
    """Fit the constants to the probes and predict the all-reduces with them; one rank is enough to call this.

    Args:
        measured: what `collect` returned.
        quietest: the fastest sweep counts instead of the median, for a machine that others use too.
    Returns:
        The constants, and a comparison for each program and size.
    """
    times, count = measured.times, len(measured.probes)
    seconds = (times.min(axis=0) if quietest else np.median(times, axis=0)).tolist()
    samples = [_sample(program, nbytes, took) for (program, nbytes), took in zip(measured.probes, seconds)]
    constants = fit(samples, measured.world_size)
    machine = constants.topology()
    lows, highs = times.min(axis=0).tolist(), times.max(axis=0).tolist()
    compared = [
        Comparison(program.name, nbytes, seconds[i], simulate(program, machine, nbytes).seconds, (lows[i], highs[i]))
        for i, (program, nbytes) in enumerate(measured.runs, start=count)
    ]
    return constants, compared


def _sample(program: Program, nbytes: int, seconds: float) -> Sample:
    round_ = next(iter(program.rounds()))
    each = nbytes // program.chunks
    return Sample(program.name, len(round_), each, each if round_.reduce.any() else 0, seconds / program.round_count)


def fit(samples: Sequence[Sample], world_size: int) -> Calibration:
    """The constants with which the simulated probes come nearest to the samples; none is negative."""
    programs = probes(world_size)

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        machine = _constants(world_size, logs, ()).topology()
        times = [simulate(programs[s.probe], machine, s.nbytes * programs[s.probe].chunks).seconds for s in samples]
        distance: NDArray[np.float64] = np.log(np.array(times) / np.array([s.seconds * programs[s.probe].round_count for s in samples]))
        return distance

    found_logs = [_levenberg_marquardt(residuals, np.log(np.maximum(start, _SMALLEST))) for start in _starts(samples, world_size)]
    logs = min(found_logs, key=lambda at: float(residuals(at) @ residuals(at)))
    found = _constants(world_size, logs, tuple(samples))
    return replace(found, residual=float(np.median(np.abs(np.expm1(residuals(logs))))))


def _constants(world_size: int, logs: NDArray[np.float64], samples: tuple[Sample, ...]) -> Calibration:
    """Constants from the logarithms of alpha, beta, gamma and, where the host is shared, overhead, wakeup, beta_host and beta_large."""
    alpha, beta, gamma, *host = (float(v) for v in np.exp(logs))
    overhead, wakeup, beta_host, beta_large = host or (0.0, 0.0, 0.0, 0.0)
    return Calibration(world_size, alpha, overhead, wakeup, beta, beta_host, beta_large, gamma, 0.0, samples)


def _starts(samples: Sequence[Sample], world_size: int) -> list[NDArray[np.float64]]:
    """Starts of the fit: alpha, beta, gamma and, if a shift costs more a byte than a pair, overhead, wakeup, beta_host, beta_large.

    On a shared host the latency of a shift is divided between alpha and the others in two ways, since the fit has several valleys.
    """
    pair, shift = ([s for s in samples if s.probe == name] for name in ("pair", "shift"))
    latency, beta = _solve([[1.0, s.nbytes] for s in pair], pair)
    crowded, slope = _solve([[1.0, s.nbytes] for s in shift], shift)
    if slope <= _SHARED * beta:
        crowd = [s for s in samples if not s.probe.startswith("pair")]
        alpha, beta, gamma = _solve([[1.0, s.nbytes * s.messages / world_size, s.added] for s in crowd], crowd)
        return [np.array([alpha, beta, gamma])]
    together = max(latency, crowded)
    each, byte = together / world_size, slope / world_size
    return [np.array([a * together, beta, 0.1 * beta, 0.1 * each, (0.9 - a) * each, byte, byte]) for a in (0.1, 0.6)]


def _levenberg_marquardt(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]], start: NDArray[np.float64], rounds: int = 20
) -> NDArray[np.float64]:
    """Minimize the sum of squared residuals; derivatives by differences of 1 % in each constant."""
    at, error, damping = start, residuals(start), 1e-2
    for _ in range(rounds):
        slopes = np.stack([(residuals(at + 0.01 * unit) - error) / 0.01 for unit in np.eye(at.size)], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(at.size), -slopes.T @ error)
        trial = at + np.clip(step, -2.0, 2.0)
        new = residuals(trial)
        if new @ new < error @ error:
            at, error, damping = trial, new, damping / 4
        else:
            damping *= 8
        if damping > 1e6 or np.abs(step).max() < 1e-4:
            break
    return at


def _solve(rows: Sequence[Sequence[float]], samples: Sequence[Sample]) -> NDArray[np.float64]:
    """Non-negative least squares of relative errors, by dropping what comes out negative (few columns, so this is enough)."""
    seconds = np.array([s.seconds for s in samples])
    design = np.array(rows, dtype=np.float64) / seconds[:, None]
    scale = np.abs(design).max(axis=0)
    scale[scale == 0.0] = 1.0
    used = np.ones(design.shape[1], dtype=bool)
    while True:
        result = np.zeros(design.shape[1])
        result[used] = np.linalg.lstsq((design / scale)[:, used], np.ones(len(seconds)), rcond=None)[0] / scale[used]
        if (result >= 0.0).all():
            return result
        used &= result > 0.0
