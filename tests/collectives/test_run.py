"""Programs over real gloo processes, and over the devices of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from collectives.cases import NAMES
from echoreduce.collectives.catalogue import ALGORITHMS, build
from echoreduce.collectives.run import DeviceRunner, Runner, all_reduce, plan
from echoreduce.errors import GroupError, ShapeError
from ranks import RankPool

RUNNABLE = tuple(n for n in NAMES if not ALGORITHMS[n].in_switch)
SIZES = (0, 1, 7, 1000)


def contribution(rank: int, numel: int) -> torch.Tensor:
    """Integers below 2^10, different for each rank and value, which fp32 adds exactly in any order."""
    return ((torch.arange(numel) * 31 + 7 * rank) % 997).float()


def sum_all(group: dist.ProcessGroup) -> list[str]:
    """Every algorithm at every size; returns what went wrong."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    wrong = []
    for name in RUNNABLE:
        program = build(name, size, 2 if size % 2 == 0 else 1, 2)
        for numel in SIZES:
            tensor = contribution(rank, numel)
            result = all_reduce(program, tensor, group)
            expected = sum(contribution(r, numel) for r in range(size))
            if result is not tensor or not torch.equal(tensor, expected):
                wrong.append(f"{name} with {numel} values")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_real_runs_over_gloo_give_the_sum(pool: RankPool, world_size: int) -> None:
    assert pool.run(sum_all, world_size) == [[]] * world_size


def run_with_switch(group: dist.ProcessGroup) -> list[str]:
    """Four processes: three ranks and the switch, or two ranks and the two halves of NVLS."""
    rank = dist.get_rank(group)
    wrong = []
    for program in (build("collnet_direct", 3), build("collnet_chain", 3, 1, 2), build("nvls", 2)):
        tensor = contribution(rank, 100)
        all_reduce(program, tensor, group)
        expected = sum(contribution(r, 100) for r in range(program.world_size))
        if rank < program.world_size and not torch.equal(tensor, expected):
            wrong.append(program.name)
    return wrong


def test_a_switch_is_one_more_process(pool: RankPool) -> None:
    assert pool.run(run_with_switch, 4) == [[]] * 4


def all_ranks_bitwise(group: dist.ProcessGroup) -> list[torch.Tensor]:
    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(3, 50, generator=generator)
    return [all_reduce(build(name, 5), values.clone(), group) for name in ("ring", "one_shot", "two_shot", "pat", "double_binary_tree")]


def test_ranks_agree_bit_for_bit_and_shape_is_kept(pool: RankPool) -> None:
    results = pool.run(all_ranks_bitwise, 5)
    for others in results[1:]:
        for mine, other in zip(results[0], others):
            assert mine.shape == (3, 50)
            assert torch.equal(mine, other)


def misuse(group: dist.ProcessGroup) -> None:
    with pytest.raises(GroupError, match="needs 3 processes"):
        Runner(build("ring", 3), torch.zeros(4), group)
    runner = Runner(build("ring", 2), torch.zeros(4), group)
    with pytest.raises(ShapeError, match="4 values was planned for"):
        runner(torch.zeros(5))
    with pytest.raises(ShapeError):
        runner(torch.zeros(4, 2)[:, 0])


def test_misuse_is_refused(pool: RankPool) -> None:
    pool.run(misuse, 2)


def test_a_plan_leaves_empty_messages_out_on_both_sides() -> None:
    program = build("ring", 4)
    plans = [plan(program, rank, 2) for rank in range(4)]
    sent = sum(message.numel for p in plans for sends in p.sends for message in sends)
    received = sum(message.numel for p in plans for receives in p.receives for message in receives)
    assert sent == received == 2 * 3 * 2
    assert all(message.numel > 0 for p in plans for sends in p.sends for message in sends)


@pytest.mark.parametrize("name", NAMES)
def test_devices_of_one_process(name: str) -> None:
    program = ALGORITHMS[name].build(4, 2, 2)
    tensors = [contribution(rank, 90) if rank < 4 else torch.zeros(90) for rank in range(program.participants)]
    runner = DeviceRunner(program, [torch.device("cpu")] * program.participants, 90)
    timing = runner.measure([t.clone() for t in tensors], repeats=3)
    expected = sum(contribution(rank, 90) for rank in range(4))
    for tensor in runner(tensors)[:4]:
        assert torch.equal(tensor, expected)
    assert len(timing.seconds) == 3
    assert timing.spread[0] <= timing.median <= timing.spread[1]
    with pytest.raises(GroupError, match="devices"):
        DeviceRunner(program, [torch.device("cpu")], 90)
