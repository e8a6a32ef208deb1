"""Measures alpha, beta and gamma of a machine with small programs, and compares the model's prediction with measured all-reduces.

Why: a price list is only as good as its constants. The probes are programs of a few equal rounds, played by the very code that plays the
all-reduces, so what they measure is what the model needs: `pair` (one message, back and forth), `shift` (every rank sends one), `shift
and add` (the same, added at the receiver) and `exchange` (every rank sends one to every other). A round of m messages of b bytes on a host
whose processes share cores and memory takes

    alpha + m (overhead + b beta_host) + b gamma,

which is fitted by least squares of relative errors; `pair` alone gives the link's own beta. Where a shift costs no more a byte than a pair,
links do not share anything and the host term is left out. With more processes than cores the host term is not a detail: it is
the time that cores need to move everybody's bytes. Constants are fitted for each world size, since alpha then contains the scheduler.

Probes and all-reduces are measured in turn, several times over, and medians are compared: on a machine with other work, what is measured
minutes apart is not measured on the same machine.

Leaves out: how a program is timed: the caller brings a `Measure` (see `collectives.run`), so this module needs no torch.
Source: docs/design.md, Section 8; LogGP (Alexandrov et al., 1995) for the overhead term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echoreduce.collectives.program import Program, Round, from_rounds
from echoreduce.cost.simulator import simulate
from echoreduce.cost.topology import Link, Topology
from echoreduce.errors import ConfigError

#: (program, bytes of the message) -> median seconds of one call, the slowest rank's.
Measure = Callable[[Program, int], float]

#: Bytes of the probes.
PROBE_BYTES = (1 << 12, 1 << 17, 1 << 20, 1 << 22, 1 << 23)

#: Rounds of a probe.
PROBE_ROUNDS = 4

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
        beta: seconds a byte of a lone message.
        beta_host: seconds a byte of all messages together on the shared host (0 where nothing is shared).
        gamma: seconds a byte added.
        residual: median relative error of the fit over the probes.
        samples: what was measured.
    """

    world_size: int
    alpha: float
    overhead: float
    beta: float
    beta_host: float
    gamma: float
    residual: float
    samples: tuple[Sample, ...]

    def topology(self) -> Topology:
        """The machine with these constants, all ranks in one node."""
        bus = Link(0.0, self.beta_host, self.overhead) if self.beta_host else None
        link = Link(self.alpha, self.beta, 0.0)
        return Topology(f"calibrated, {self.world_size} processes", link, bus=bus, gamma=self.gamma)


@dataclass(frozen=True)
class Comparison:
    """A measured all-reduce beside its prediction.

    Attributes:
        algorithm: name in `collectives.catalogue`.
        nbytes: bytes of the message.
        measured, predicted: seconds.
    """

    algorithm: str
    nbytes: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction, signed."""
        return self.predicted / self.measured - 1.0


def probes(world_size: int) -> dict[str, Program]:
    """The probe programs by name: PROBE_ROUNDS rounds of one shape.

    Raises:
        ConfigError: fewer than two ranks.
    """
    if world_size < 2:
        raise ConfigError(f"calibration needs at least 2 ranks, got {world_size}")
    ranks = np.arange(world_size, dtype=np.int64)
    source = np.repeat(ranks, world_size - 1)
    ahead = np.tile(ranks[1:], world_size)
    shift = [Round.of(ranks, (ranks + 1) % world_size, 0, 1, reduce=reduce) for reduce in (False, True)]
    rounds = {
        "pair": [Round.of(i % 2, 1 - i % 2, 0, 1, reduce=False) for i in range(PROBE_ROUNDS)],
        "shift": [shift[0]] * PROBE_ROUNDS,
        "shift and add": [shift[1]] * PROBE_ROUNDS,
    }
    if world_size > 2:  # a chunk for each distance, so that no two messages write one place
        exchange = Round.of(source, (source + ahead) % world_size, ahead - 1, ahead, reduce=False)
        rounds["exchange"] = [exchange] * PROBE_ROUNDS
    return {name: from_rounds(name, world_size, int(r[0].hi.max()), r) for name, r in rounds.items()}


def campaign(
    measure: Measure,
    world_size: int,
    programs: Sequence[Program] = (),
    sizes: Sequence[int] = (),
    sweeps: int = 3,
    probe_sizes: Sequence[int] = PROBE_BYTES,
) -> tuple[Calibration, list[Comparison]]:
    """Measure probes and all-reduces in turn, fit the constants, and predict the all-reduces with them.

    Args:
        measure: times a program; called in the same order on every rank of a real group.
        world_size: ranks, >= 2.
        programs, sizes: every program at every size (bytes of the message) is compared.
        sweeps: how often everything is measured; the median over the sweeps counts.
        probe_sizes: bytes of a probe's message, at least two different ones.
    Returns:
        The constants, and a comparison for each program and size.
    Raises:
        ConfigError: too few ranks, sizes or sweeps.
    """
    if len(set(probe_sizes)) < 2 or sweeps < 1:
        raise ConfigError(f"calibration needs two message sizes and one sweep, got {tuple(probe_sizes)} and {sweeps}")
    todo = [(program, b * program.chunks) for program in probes(world_size).values() for b in probe_sizes]
    todo = [(program, nbytes) for program, nbytes in todo if nbytes <= 4 * max(probe_sizes)]
    runs = [(program, nbytes) for program in programs for nbytes in sizes]
    times = np.array([[measure(program, nbytes) for program, nbytes in todo + runs] for _ in range(sweeps)])
    medians = np.median(times, axis=0).tolist()
    samples = [_sample(program, nbytes, seconds) for (program, nbytes), seconds in zip(todo, medians)]
    constants = fit(samples, world_size)
    machine = constants.topology()
    compared = [
        Comparison(program.name, nbytes, seconds, simulate(program, machine, nbytes).seconds)
        for (program, nbytes), seconds in zip(runs, medians[len(todo) :])
    ]
    return constants, compared


def _sample(program: Program, nbytes: int, seconds: float) -> Sample:
    round_ = next(iter(program.rounds()))
    each = nbytes // program.chunks
    return Sample(program.name, len(round_), each, each if round_.reduce.any() else 0, seconds / program.round_count)


def fit(samples: Sequence[Sample], world_size: int) -> Calibration:
    """The constants that explain the samples with the least squared relative error; none is negative."""
    pair = [s for s in samples if s.probe == "pair"]
    shift = [s for s in samples if s.probe == "shift"]
    beta = _solve([[1.0, s.nbytes] for s in pair], pair)[1]
    beta_shift = _solve([[1.0, s.nbytes] for s in shift], shift)[1]
    shared = beta_shift > _SHARED * beta
    crowd = [s for s in samples if s.probe != "pair"]
    if shared:
        rows = [[1.0, s.messages, s.messages * s.nbytes, s.added] for s in crowd]
        alpha, overhead, beta_host, gamma = _solve(rows, crowd)
    else:
        alpha, beta, gamma = _solve([[1.0, s.nbytes * s.messages / world_size, s.added] for s in crowd], crowd)
        overhead = beta_host = 0.0
    model = Calibration(world_size, alpha, overhead, beta, beta_host, gamma, 0.0, tuple(samples))
    errors = [abs(_predict(model, s) / s.seconds - 1.0) for s in crowd]
    return Calibration(world_size, alpha, overhead, beta, beta_host, gamma, float(np.median(errors)), tuple(samples))


def _predict(c: Calibration, s: Sample) -> float:
    port = s.nbytes * c.beta * max(1.0, s.messages / c.world_size)
    return c.alpha + max(port, s.messages * (c.overhead + s.nbytes * c.beta_host)) + s.added * c.gamma


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
