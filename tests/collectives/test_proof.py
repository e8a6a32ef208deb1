"""The proof: every program is an all-reduce, and every single fault in one is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collectives.cases import NAMES, shapes
from echoreduce.collectives.catalogue import ALGORITHMS, build
from echoreduce.collectives.interpreter import execute
from echoreduce.collectives.program import Program, Round, from_rounds
from echoreduce.collectives.proof import find_fault, prove
from echoreduce.errors import CheckError, ConfigError


@pytest.mark.parametrize("name", NAMES)
def test_every_program_is_an_all_reduce_for_1_to_64_ranks(name: str) -> None:
    for n in range(1, 65):
        for program in shapes(name, n):
            assert find_fault(program) is None, (name, n)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("one_shot", "two_shot", "echo_2d", "nvls")])
def test_larger_worlds(name: str) -> None:
    for n in (100, 127, 128, 130):
        assert find_fault(build(name, n, 2 if n % 2 == 0 else 1, 5)) is None


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_does_nothing(name: str) -> None:
    program = build(name, 1, 1, 4)
    assert sum(len(r) for r in program.rounds()) == 0
    assert find_fault(program) is None


def mutations(program: Program, rounds: list[Round], at: int, transfer: int) -> dict[str, list[Round]]:
    """The program with one transfer dropped, doubled, or sent elsewhere."""
    round_ = rounds[at]
    keep = np.arange(len(round_)) != transfer

    def with_round(changed: Round) -> list[Round]:
        return [*rounds[:at], changed, *rounds[at + 1 :]]

    one = round_.select([transfer])
    found = {"dropped": with_round(round_.select(keep)), "doubled": with_round(Round.join([round_, one]))}
    elsewhere = int(one.dst[0] + 1) % program.participants
    if elsewhere == one.src[0]:
        elsewhere = (elsewhere + 1) % program.participants
    if elsewhere != one.dst[0]:
        moved = Round(one.src, np.array([elsewhere]), one.lo, one.hi, one.reduce)
        found["misdirected"] = with_round(Round.join([round_.select(keep), moved]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_single_mutation_is_caught(name: str) -> None:
    """Dropped and doubled transfers always, misdirected ones of symmetric programs always; of others unless the sum is still right.

    A tree has such detours: 0 -> 1 -> 2 may become 0 -> 2 and 1 -> 2. Tensors, which know nothing of the proof, decide what they are.
    """
    tried = detours = 0
    for n in (2, 3, 4, 6, 7):
        for program in shapes(name, n, pieces=(2,)):
            rounds = list(program.rounds())
            for at, round_ in enumerate(rounds):
                for transfer in range(len(round_)):
                    for kind, mutated in mutations(program, rounds, at, transfer).items():
                        broken = replace(program, phases=from_rounds(name, n, program.chunks, mutated).phases)
                        tried += 1
                        if find_fault(broken) is None:
                            assert kind == "misdirected", (name, n, at, transfer, kind)
                            assert program.period is None, (name, n, at, transfer)
                            assert sums(broken), (name, n, at, transfer, kind)
                            detours += 1
    assert tried > 20
    assert detours <= tried // 10


def sums(program: Program) -> bool:
    """Whether random 60-bit integers come out summed on every rank."""
    values = np.random.default_rng(0).integers(0, 2**60, (program.world_size, 2 * program.chunks))
    return bool((execute(program, values) == values.sum(axis=0)).all())


def test_the_first_counterexample_names_round_rank_chunk_and_contributor() -> None:
    rounds = list(build("ring", 4).rounds())
    lacking = from_rounds("ring", 4, 4, [rounds[0].select(rounds[0].src != 1), *rounds[1:]])
    fault = find_fault(lacking)
    assert fault is not None
    assert fault.round is None
    assert "holds rank 1's contribution to chunk 0 0 times, not once" in str(fault)
    with pytest.raises(CheckError, match=r"ring over 4 ranks is no all-reduce: at the end: rank 0"):
        prove(lacking)


def test_races_redundant_and_malformed_transfers_are_faults() -> None:
    good = list(build("two_shot", 3).rounds())
    clash = Round.join([good[1], Round.of([0], [1], 2, 3, reduce=False)])
    assert "two transfers write chunk 2 of participant 1" in str(find_fault(from_rounds("x", 3, 3, [good[0], clash])))
    again = find_fault(from_rounds("x", 3, 3, [*good, Round.of([0], [1], 0, 1, reduce=False)]))
    assert again is not None
    assert again.round == 2
    assert "brings nothing new" in again.text
    twice = find_fault(from_rounds("x", 3, 3, [good[0], good[0], good[1]]))
    assert twice is not None
    assert twice.round == 1
    assert "a second time" in twice.text
    for bad in (
        Round.of([0], [0], 0, 1, True),
        Round.of([0], [3], 0, 1, True),
        Round.of([0], [1], 2, 4, True),
        Round.of([0], [1], 1, 1, True),
    ):
        fault = find_fault(from_rounds("x", 3, 3, [bad]))
        assert fault is not None
        assert "outside the program" in fault.text


def test_bad_arguments_are_refused() -> None:
    for call in (
        lambda: build("rings", 4),
        lambda: build("ring", 0),
        lambda: build("ring_2d", 6, 4),
        lambda: build("pipelined_tree", 4, 1, 0),
    ):
        with pytest.raises(ConfigError):
            call()


def test_the_nccl_algorithms_each_have_a_row() -> None:
    named = {row.nccl for row in ALGORITHMS.values() if row.nccl}
    assert named == {"Ring", "Tree", "CollnetChain", "CollnetDirect", "NVLS", "NVLSTree", "PAT"}
