"""Several groups, threads, start methods, peers that die or come late."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from contributions import contributions
from echoreduce import QuantConfig, preset
from echoreduce import reference as ref
from echoreduce.communicator import Communicator
from echoreduce.errors import GroupError, PassError
from echoreduce.runtime.c10d import C10dBackend
from ranks import Failure, RankPool, check, kill_self, run_fresh


def grid_of_groups(group: Any) -> tuple[bool, str]:
    """World of 4: tensor-parallel groups {0,1}, {2,3} and data-parallel groups {0,2}, {1,3}, calls interleaved."""
    rank = dist.get_rank(group)
    mine: dict[str, Any] = {}
    for kind, members in (("tp", [[0, 1], [2, 3]]), ("dp", [[0, 2], [1, 3]])):
        for ranks in members:
            made = dist.new_group(ranks, use_local_synchronization=False)
            if rank in ranks:
                mine[kind] = (made, ranks)
    tp = Communicator(mine["tp"][0], "default").session(6)
    dp = Communicator(mine["dp"][0], "paper").session(6)
    tp.begin()
    dp.begin()
    right = True
    expected = {kind: reference_pass(name, mine[kind][1], numel) for kind, name, numel in (("tp", "default", 640), ("dp", "paper", 999))}
    for site in range(6):
        a = tp.reduce(of_rank(rank, 640, site))
        b = dp.reduce(of_rank(rank, 999, site).reshape(27, 37))
        right &= torch.equal(a, expected["tp"][site]) and torch.equal(b, expected["dp"][site].reshape(27, 37))
    foreign = dist.new_group([0, 1])
    outsider = "member"
    if rank in (2, 3):
        try:
            C10dBackend(foreign)
        except GroupError as error:
            outsider = str(error)
    return right, outsider


def of_rank(rank: int, numel: int, site: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(31 * rank + site))


def reference_pass(name: str, ranks: list[int], numel: int) -> list[Tensor]:
    from echoreduce.session import Session
    from echoreduce.virtual import VirtualBackend

    session = Session(VirtualBackend(len(ranks)), preset(name), 6)
    session.begin()
    return [session.reduce(torch.stack([of_rank(rank, numel, site) for rank in ranks])) for site in range(6)]


def test_o32_sub_groups_and_outsiders() -> None:
    results = check(run_fresh(grid_of_groups, 4, timeout=30))
    assert [right for right, _ in results] == [True] * 4
    assert results[0][1] == "member"
    assert "not a member" in results[2][1]
    assert "not a member" in results[3][1]


def two_threads_two_groups(group: Any) -> list[bool]:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    found: list[bool] = [False, False]

    def work(index: int) -> None:
        backend = C10dBackend(groups[index])
        right = True
        for call in range(30):
            x = contributions(2, 500 + 100 * index, seed=call + 50 * index)
            right &= torch.equal(backend.all_reduce(x[backend.rank], QuantConfig(), "two_shot"), ref.all_reduce(x, QuantConfig()).output)
        found[index] = right

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_o31b_two_threads_on_two_groups() -> None:
    assert check(run_fresh(two_threads_two_groups, 2, timeout=30)) == [[True, True]] * 2


def second_thread_enters(group: Any) -> str:
    backend = C10dBackend(group)
    inside, leave = threading.Event(), threading.Event()
    original = backend._guarded

    def held(*args: Any) -> Tensor:
        inside.set()
        assert leave.wait(30)
        return original(*args)

    backend._guarded = held  # type: ignore[method-assign]
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(backend.all_reduce(torch.ones(5), QuantConfig(), "two_shot")))
    thread.start()
    assert inside.wait(30)
    try:
        backend.all_reduce(torch.ones(5), QuantConfig(), "two_shot")
        text = "no error"
    except PassError as error:
        text = str(error)
    leave.set()
    thread.join(30)
    return f"{text} | {results[0][0].item()}"


def test_o31c_two_threads_on_one_group(pool: RankPool) -> None:
    for text in pool.run(second_thread_enters, 2):
        assert "concurrent use" in text
        assert text.endswith("| 2.0")


def one_all_reduce(group: Any) -> float:
    return float(Communicator(group, "no_feedback").all_reduce(torch.ones(10))[0])


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_o35_start_methods(method: str) -> None:
    assert check(run_fresh(one_all_reduce, 2, method=method, timeout=60)) == [2.0, 2.0]


def test_o35_import_touches_nothing() -> None:
    code = (
        "import echoreduce, echoreduce.communicator, torch, sys;"
        "print(torch.cuda.is_initialized(), 'triton' in sys.modules, 'transformers' in sys.modules, torch.distributed.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False", "False", "False"]


def without_a_peer(group: Any, how: str, timeout: float) -> tuple[float, Any]:
    communicator = Communicator(group, "no_feedback", timeout=timedelta(seconds=timeout))
    x = torch.randn(100_000)
    communicator.all_reduce(x)
    if communicator.rank == 1:
        if how == "dead":
            kill_self()
        time.sleep(timeout + 5)  # the fault itself: a rank that is late, not a wait of the test
    started = time.monotonic()
    try:
        communicator.all_reduce(x)
    except RuntimeError as error:
        return time.monotonic() - started, (type(error).__name__, str(error), error.ranks)
    return time.monotonic() - started, "a result"


def dies_inside(group: Any) -> tuple[float, Any]:
    communicator = Communicator(group, "no_feedback", timeout=timedelta(seconds=8))
    backend = communicator.backend
    x = torch.randn(100_000)
    communicator.all_reduce(x)
    if communicator.rank == 1:
        backend._gather = lambda *args: kill_self()  # type: ignore[method-assign]
    started = time.monotonic()
    try:
        communicator.all_reduce(x)
    except RuntimeError as error:
        return time.monotonic() - started, (type(error).__name__, str(error), error.ranks)
    return time.monotonic() - started, "a result"


def assert_survivors_name_rank_1(results: list[Any], limit: float) -> None:
    for rank in (0, 2):
        assert not isinstance(results[rank], Failure), results[rank]
        seconds, found = results[rank]
        assert found != "a result"
        kind, text, ranks = found
        assert kind == "PeerError"
        assert ranks == (1,), text
        assert "rank 1 did not answer" in text
        assert seconds < limit


def test_a_dead_peer_is_named_within_the_timeout() -> None:
    assert_survivors_name_rank_1(run_fresh(without_a_peer, 3, "dead", 8.0, timeout=8), 8 + 5)


def test_a_peer_that_dies_after_push_is_named_within_the_timeout() -> None:
    assert_survivors_name_rank_1(run_fresh(dies_inside, 3, timeout=8), 8 + 5)


def test_a_late_peer_is_named_within_the_timeout() -> None:
    results = run_fresh(without_a_peer, 3, "late", 3.0, timeout=60)
    assert_survivors_name_rank_1(results, 3 + 5)
    assert isinstance(results[1][1], tuple), "the late rank gets an error, not a wrong result"


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(GroupError, match="init_process_group"):
        C10dBackend()
