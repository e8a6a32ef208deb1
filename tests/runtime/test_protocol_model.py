"""The protocol of the peer-to-peer kernels as a small model: two ranks, several calls, every interleaving; and broken variants must fail.

Each rank runs calls one after the other (stream order). A call has three stage processes that run beside each other (blocks of one launch);
the next call starts when all have ended. A store to a peer is under way until it is delivered, at any later moment; a release waits for
the stores of its own process. A landing area holds the number of the call that wrote it, and a read of anything else is an error, and so is
a state from which nothing can go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

PUSH, GATHER = 0, 1
PUSHER = (("write", PUSH), ("raise", PUSH))
#: Actions of the stages: write a landing area at the peer, raise its flag, wait for our own flag, read our own landing area.
ALGORITHMS = {
    "two_shot": (
        PUSHER,
        (("wait", PUSH), ("read", PUSH), ("write", GATHER), ("raise", GATHER)),
        (("wait", GATHER), ("read", GATHER)),
    ),
    "one_shot": (PUSHER, (("wait", PUSH), ("read", PUSH)), ()),
}
ONE, TWO = ("one_shot",) * 3, ("two_shot",) * 3
MIXED = ("two_shot", "one_shot", "two_shot")


@dataclass(frozen=True)
class Rules:
    """What the protocol promises; each False is a bug that the exploration has to find."""

    double_buffered: bool = True
    release_waits_for_stores: bool = True
    every_rank_waits: bool = True
    flags_are_raised: bool = True


@dataclass(frozen=True)
class State:
    """calls[r]: call that rank r is in; places[r][s]: next action of stage s; areas[r][stage][half], flags[r][stage]: what r's memory
    holds; under_way: stores (rank, stage process, stage, half, call) not yet delivered."""

    calls: tuple[int, int]
    places: tuple[tuple[int, ...], tuple[int, ...]]
    areas: tuple
    flags: tuple
    under_way: frozenset


class Fault(Exception):
    """A stale read or a state without a way on."""


def put(nested: tuple, path: tuple[int, ...], value: object) -> tuple:
    head, *rest = path
    return tuple((put(item, tuple(rest), value) if rest else value) if index == head else item for index, item in enumerate(nested))


def steps_of(rank: int, call: int, rules: Rules, algorithms: tuple[str, ...]) -> tuple:
    stages = ALGORITHMS[algorithms[call - 1]]
    if rank == 1 and not rules.every_rank_waits:  # as if its segment and all it reads were empty
        return tuple(tuple(action for action in stage if action[0] in ("write", "raise")) for stage in stages)
    return stages


def successors(state: State, rules: Rules, algorithms: tuple[str, ...]):
    for store in state.under_way:
        rank, _, stage, half, call = store
        yield State(state.calls, state.places, put(state.areas, (1 - rank, stage, half), call), state.flags, state.under_way - {store})
    for rank in (0, 1):
        call = state.calls[rank]
        if call > len(algorithms):
            continue
        actions = steps_of(rank, call, rules, algorithms)
        if all(place == len(actions[index]) for index, place in enumerate(state.places[rank])):
            if not any(store[0] == rank for store in state.under_way):  # a kernel ends when its stores have been delivered
                places = put(state.places, (rank,), (0, 0, 0))
                yield State(put(state.calls, (rank,), call + 1), places, state.areas, state.flags, state.under_way)
            continue
        for process, place in enumerate(state.places[rank]):
            if place < len(actions[process]):
                after = act(state, rules, rank, process, *actions[process][place])
                if after is not None:
                    yield State(after.calls, put(after.places, (rank, process), place + 1), after.areas, after.flags, after.under_way)


def act(state: State, rules: Rules, rank: int, process: int, what: str, stage: int) -> State | None:
    """The state after one action, or None if it has to wait."""
    call = state.calls[rank]
    half = call % 2 if rules.double_buffered else 0
    if what == "write":
        return State(state.calls, state.places, state.areas, state.flags, state.under_way | {(rank, process, stage, half, call)})
    if what == "raise":
        if rules.release_waits_for_stores and any(store[:2] == (rank, process) for store in state.under_way):
            return None
        raised = put(state.flags, (1 - rank, stage), call) if rules.flags_are_raised or call < 2 else state.flags
        return State(state.calls, state.places, state.areas, raised, state.under_way)
    if what == "wait":
        return state if state.flags[rank][stage] - call >= 0 else None
    found = state.areas[rank][stage][half]
    if found != call:
        raise Fault(f"rank {rank} in call {call} reads stage {stage} and finds call {found}")
    return state


def explore(rules: Rules, algorithms: tuple[str, ...]) -> int:
    """Visit every reachable state and return their number.

    Raises:
        Fault: a stale read, or a deadlock.
    """
    calls = len(algorithms)
    start = State((1, 1), ((0, 0, 0),) * 2, (((0, 0), (0, 0)),) * 2, ((0, 0),) * 2, frozenset())
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        following = list(successors(state, rules, algorithms))
        if not following and state.calls != (calls + 1, calls + 1):
            raise Fault(f"nobody can go on: calls {state.calls}")
        for after in following:
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return len(seen)


@pytest.mark.parametrize("algorithms", [ONE, TWO, MIXED, ("one_shot", "two_shot", "one_shot")])
def test_no_interleaving_of_three_calls_reads_stale_data_or_locks_up(algorithms):
    assert explore(Rules(), algorithms) > 80


@pytest.mark.parametrize("algorithms", [ONE, MIXED])
def test_a_single_buffer_is_overwritten_under_a_slow_reader(algorithms):
    with pytest.raises(Fault, match="finds call"):
        explore(Rules(double_buffered=False), algorithms)


def test_two_shot_alone_would_not_need_the_second_buffer():
    """Its last flag says that the peer has read what we pushed, and it gathers only after our next push; one-shot has no such echo."""
    assert explore(Rules(double_buffered=False), TWO) > 80


@pytest.mark.parametrize("algorithms", [ONE, TWO, MIXED])
@pytest.mark.parametrize("broken", [Rules(release_waits_for_stores=False), Rules(every_rank_waits=False)])
def test_broken_variants_read_stale_data(broken, algorithms):
    with pytest.raises(Fault, match="finds call"):
        explore(broken, algorithms)


@pytest.mark.parametrize("algorithms", [ONE, TWO])
def test_a_lost_signal_is_a_deadlock(algorithms):
    with pytest.raises(Fault, match="nobody can go on"):
        explore(Rules(flags_are_raised=False), algorithms)


def test_two_calls_do_not_suffice_to_betray_a_rank_that_never_waits():
    """The second call uses the other half; only the third meets what a slow rank still reads, which is why two halves need the wait."""
    assert explore(Rules(every_rank_waits=False), ONE[:2]) > 20
