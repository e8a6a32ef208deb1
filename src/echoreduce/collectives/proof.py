"""Symbols instead of numbers: a proof that a program is an all-reduce, or the first place where it is not.

Each buffer entry is a vector of counts, one a contributing rank. A program is right if every rank ends with every contribution exactly
once in every chunk, and it is clean if on the way no transfer races with another, doubles a contribution or brings nothing new. Because
the operator is associative and commutative, counts are all there is to know: a program that passes is right for every input. A program
that claims a `period` must also load all ranks alike in every round, since the simulator builds on that.

Leaves out: rounding (see `interpreter`), and time. Cost: rounds x transfers x ranks small integers, in numpy.
Source: docs/design.md, Section 8; the symbolic check of msccl-tools for the idea.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echoreduce.collectives.program import Program, Round
from echoreduce.errors import CheckError

Counts = NDArray[np.int16]


@dataclass(frozen=True)
class Counterexample:
    """The first fault of a program.

    Attributes:
        round: index of the round, or None for a fault of the final state.
        text: what is wrong, with participant, chunk and contributor.
    """

    round: int | None
    text: str

    def __str__(self) -> str:
        where = "at the end" if self.round is None else f"in round {self.round}"
        return f"{where}: {self.text}"


def find_fault(program: Program) -> Counterexample | None:
    """None if the program is an all-reduce in which every transfer counts, else the first counterexample."""
    n = program.world_size
    state = np.zeros((program.participants, program.chunks, n), dtype=np.int16)
    state[np.arange(n), :, np.arange(n)] = 1
    for index, round_ in enumerate(program.rounds()):
        text = _malformed(program, round_) or _lopsided(program, round_)
        if text is None:
            text = _apply(state, round_.per_chunk())
        if text is not None:
            return Counterexample(index, text)
    wrong = np.argwhere(state[:n] != 1)
    if wrong.size:
        rank, chunk, contributor = (int(x) for x in wrong[0])
        times = int(state[rank, chunk, contributor])
        return Counterexample(None, f"rank {rank} holds rank {contributor}'s contribution to chunk {chunk} {times} times, not once")
    return None


def prove(program: Program) -> None:
    """Raise with the first counterexample if the program is not an all-reduce.

    Raises:
        CheckError: the text names round, rank, chunk and contributor.
    """
    fault = find_fault(program)
    if fault is not None:
        raise CheckError(f"{program.name} over {program.world_size} ranks is no all-reduce: {fault}")


def _malformed(program: Program, round_: Round) -> str | None:
    """A transfer that names no participant or chunk, or that goes nowhere."""
    p, c = program.participants, program.chunks
    bad = (round_.src < 0) | (round_.src >= p) | (round_.dst < 0) | (round_.dst >= p) | (round_.src == round_.dst)
    bad |= (round_.lo < 0) | (round_.hi > c) | (round_.lo >= round_.hi)
    if not bad.any():
        return None
    i = int(np.argmax(bad))
    return f"transfer {round_.src[i]} -> {round_.dst[i]} of chunks {round_.lo[i]} .. {round_.hi[i] - 1} is outside the program"


def _lopsided(program: Program, round_: Round) -> str | None:
    """A rank that sends or receives another number of chunks than rank 0, in a program that claims that all ranks are alike."""
    if program.period is None:
        return None
    for end, verb in ((round_.src, "sends"), (round_.dst, "receives")):
        chunks = np.bincount(end, weights=round_.hi - round_.lo, minlength=program.world_size)
        odd = np.flatnonzero(chunks != chunks[0])
        if odd.size:
            return f"rank {odd[0]} {verb} {chunks[odd[0]]:.0f} chunks, rank 0 {chunks[0]:.0f}, where all are said to be alike"
    return None


def _apply(state: Counts, round_: Round) -> str | None:
    """Carry out one round (one transfer a chunk) on the state, or say what is wrong with it."""
    if not len(round_):
        return None
    arriving = state[round_.src, round_.lo]
    place = round_.dst * state.shape[1] + round_.lo
    text = _race(round_, place)
    if text is not None:
        return text
    idle = np.where(round_.reduce, ~arriving.any(axis=1), (arriving == state[round_.dst, round_.lo]).all(axis=1))
    if idle.any():
        i = int(np.argmax(idle))
        return f"transfer {round_.src[i]} -> {round_.dst[i]} of chunk {round_.lo[i]} brings nothing new"
    copies, adds = ~round_.reduce, round_.reduce
    state[round_.dst[copies], round_.lo[copies]] = arriving[copies]
    np.add.at(state.reshape(-1, state.shape[2]), place[adds], arriving[adds])
    doubled = state[round_.dst, round_.lo] > 1
    if doubled.any():
        i, contributor = (int(x) for x in np.argwhere(doubled)[0])
        return f"participant {round_.dst[i]} adds rank {contributor}'s contribution to chunk {round_.lo[i]} a second time"
    return None


def _race(round_: Round, place: NDArray[np.int64]) -> str | None:
    """Two transfers into one chunk of one participant, unless both add."""
    order = np.argsort(place, kind="stable")
    same = place[order][1:] == place[order][:-1]
    clash = same & ~(round_.reduce[order][1:] & round_.reduce[order][:-1])
    if not clash.any():
        return None
    i = int(order[np.argmax(clash)])
    return f"two transfers write chunk {round_.lo[i]} of participant {round_.dst[i]} and not both add"
