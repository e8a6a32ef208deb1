"""Runs a program for real: torch.distributed point-to-point sends and receives, on gloo or NCCL.

Why: what is proven and priced must also run. One process plays each participant; a program with switches needs one more process for each.
Every round posts all its receives and sends at once and waits for them, so the ranks advance as the simulator assumes: each at
its own pace, held back only by its own messages. Leaves out: overlap of rounds, quantized wires (the package's backends), speed.
Collective: every process of the group calls `all_reduce` with the same program, numel and dtype. On CUDA tensors the work is queued on the
current stream by the backend.
Source: docs/design.md, Section 8.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.collectives.program import IntArray, Program, Round, chunk_starts
from echoreduce.errors import GroupError, ShapeError


@dataclass(frozen=True)
class _Message:
    """One transfer of one round as this process sees it: the peer, the values lo .. hi - 1, and whether they are added on arrival."""

    peer: int
    lo: int
    hi: int
    reduce: bool

    @property
    def numel(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class Plan:
    """A program from one process's side: for each round what it sends and what it receives, chunks already turned into ranges of values."""

    sends: tuple[tuple[_Message, ...], ...]
    receives: tuple[tuple[_Message, ...], ...]
    numel: int


def plan(program: Program, participant: int, numel: int) -> Plan:
    """What `participant` does, round by round, for a message of `numel` values; empty messages are left out on both sides."""
    starts = chunk_starts(numel, program.chunks)
    sends, receives = [], []
    for round_ in program.rounds():
        mine = round_.select((round_.src == participant) | (round_.dst == participant))
        if len(mine):
            sends.append(_gather(mine.select(mine.src == participant), starts, sending=True))
            receives.append(_gather(mine.select(mine.dst == participant), starts, sending=False))
    return Plan(tuple(sends), tuple(receives), numel)


def _gather(round_: Round, starts: IntArray, sending: bool) -> tuple[_Message, ...]:
    """Transfers of one round as messages, in the order of the round, which both sides of a pair share."""
    peers = round_.dst if sending else round_.src
    columns = (peers, starts[round_.lo], starts[round_.hi], round_.reduce)
    rows = zip(*(column.tolist() for column in columns))
    return tuple(_Message(peer, lo, hi, reduce) for peer, lo, hi, reduce in rows if hi > lo)


def all_reduce(program: Program, tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum `tensor` over the group by the program, in place; see `Runner` for repeated calls and for what is raised."""
    return Runner(program, tensor, group)(tensor)


class Runner:
    """A program made ready for one process, numel, dtype and device: planned once, with a staging buffer that calls share.

    Args:
        program: over as many participants as the group has processes.
        like: a tensor of the numel, dtype and device to come.
        group: process group; None for the default one.
    Raises:
        GroupError: the group has not one process a participant.
    """

    def __init__(self, program: Program, like: Tensor, group: dist.ProcessGroup | None = None) -> None:
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size != program.participants:
            raise GroupError(
                f"{program.name} needs {program.participants} processes, {program.switches} of them switches; group has {size}"
            )
        self.group = group
        self.switch = self.rank >= program.world_size
        self.plan = plan(program, self.rank, like.numel())
        most = max((sum(m.numel for m in receives) for receives in self.plan.receives), default=0)
        self.staging = torch.empty(most, dtype=like.dtype, device=like.device)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the group in place.

        Args:
            tensor: this process's contribution (a switch's is ignored and replaced by zeros), any shape, contiguous.
        Returns:
            `tensor`.
        Raises:
            ShapeError: another numel than planned for, or not contiguous.
        """
        if tensor.numel() != self.plan.numel or not tensor.is_contiguous():
            raise ShapeError(f"a contiguous tensor of {self.plan.numel} values was planned for, got shape {list(tensor.shape)}")
        flat = tensor.view(-1)
        if self.switch:
            flat.zero_()
        for sends, receives in zip(self.plan.sends, self.plan.receives):
            arrived = self._exchange(flat, sends, receives)
            _apply(flat, self.rank, receives, arrived)
        return tensor

    def _exchange(self, flat: Tensor, sends: tuple[_Message, ...], receives: tuple[_Message, ...]) -> list[Tensor]:
        """Post all messages of a round and wait for them; returns what arrived, a slice of the staging buffer a message."""
        buffers = list(self.staging[: sum(m.numel for m in receives)].split([m.numel for m in receives])) if receives else []
        ops = [dist.P2POp(dist.irecv, buffer, _peer(m, self.group), self.group) for m, buffer in zip(receives, buffers)]
        for message in sends:
            ops.append(dist.P2POp(dist.isend, flat[message.lo : message.hi], _peer(message, self.group), self.group))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return buffers


def _peer(message: _Message, group: dist.ProcessGroup | None) -> int:
    return message.peer if group is None else dist.get_global_rank(group, message.peer)


def _apply(flat: Tensor, rank: int, receives: tuple[_Message, ...], arrived: list[Tensor]) -> None:
    """Copy or add what arrived; additions into one range happen in rank order, this rank's own value at its place."""
    adding: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    for message, buffer in zip(receives, arrived):
        if message.reduce:
            adding.setdefault((message.lo, message.hi), []).append((message.peer, buffer))
        else:
            flat[message.lo : message.hi].copy_(buffer)
    for (lo, hi), parts in adding.items():
        own = flat[lo:hi]
        if len(parts) == 1:
            own.add_(parts[0][1])  # two operands: the order does not matter
            continue
        ordered = [part for _, part in sorted([*parts, (rank, own)], key=lambda item: item[0])]
        # What arrived is scratch, so nothing is allocated: sums go into the first of them, the last one into `own`.
        total = ordered[0]
        for part in ordered[1:-1]:
            total = torch.add(total, part, out=part if total is own else total)
        torch.add(total, ordered[-1], out=own)


@contextmanager
def process_group(
    backend: str, timeout_seconds: float, device: torch.device, rendezvous: str | None = None, rank: int = -1, world_size: int = -1
) -> Iterator[tuple[int, int]]:
    """The default process group for as long as the block lasts; gives (rank, world_size).

    Args:
        backend: gloo or nccl.
        timeout_seconds: after which a collective gives up on a peer.
        device: of this process; NCCL binds to it.
        rendezvous: path of a file in a shared folder, with `rank` and `world_size`; None takes all three from torchrun's environment.
    """
    limit = timedelta(seconds=timeout_seconds)
    if rendezvous is None:
        dist.init_process_group(backend, timeout=limit, device_id=device if device.type == "cuda" else None)
    else:
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=limit)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Timing:
    """Times of one operation, seconds: the slowest rank's of each repetition.

    Attributes:
        seconds: one value a repetition.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over the repetitions."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(low), float(high)


def measure(operation: Callable[[], object], device: torch.device, repeats: int, warmup: int = 2, calls: int = 1) -> Timing:
    """Time an operation that all processes of the default group call together.

    A barrier precedes every repetition; the time of a call is the slowest rank's. CUDA work is waited for after every call.

    Args:
        operation: what to time; called (warmup + repeats) * calls times.
        device: where it runs.
        repeats: repetitions that count.
        warmup: repetitions that do not.
        calls: calls of a repetition, one after another, each timed: ranks leave a barrier apart, and only the first call pays for that.
    """
    times = []
    for _ in range(warmup + repeats):
        dist.barrier()
        _wait(device)
        for _ in range(calls):
            start = time.perf_counter()
            operation()
            _wait(device)
            times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[warmup * calls :], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Timing(tuple(slowest.tolist()))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceRunner:
    """A program over the devices of one process: transfers are peer copies (P2P over NVLink or PCIe), no process group.

    Rounds are separated by a synchronization of all devices, so this measures links and not a library's latency hiding.

    Args:
        program: over as many participants as there are devices (a device may be listed several times, "cpu" for tests).
        devices: where each participant lives.
        numel: values of the message.
    Raises:
        GroupError: another number of devices than participants.
    """

    def __init__(self, program: Program, devices: list[torch.device], numel: int) -> None:
        if len(devices) != program.participants:
            raise GroupError(f"{program.name} needs {program.participants} devices, got {len(devices)}")
        self.program, self.devices = program, devices
        self.starts = chunk_starts(numel, program.chunks)
        self.rounds = [self._moves(r) for r in program.rounds()]

    def _moves(self, round_: Round) -> list[tuple[int, int, int, int, bool]]:
        """(source, destination, first value, end, add) of each transfer that carries anything."""
        columns = (round_.src, round_.dst, self.starts[round_.lo], self.starts[round_.hi], round_.reduce)
        return [move for move in zip(*(column.tolist() for column in columns)) if move[3] > move[2]]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sum the tensors in place, each on its participant's device, one-dimensional; returns them."""
        for moves in self.rounds:
            arrived = [tensors[src][lo:hi].to(self.devices[dst], non_blocking=True, copy=True) for src, dst, lo, hi, _ in moves]
            self.wait()
            for (_, dst, lo, hi, add), part in zip(moves, arrived):
                place = tensors[dst][lo:hi]
                if add:
                    place.add_(part)
                else:
                    place.copy_(part)
            self.wait()
        return tensors

    def wait(self) -> None:
        """Wait for all devices."""
        for device in self.devices:
            _wait(device)

    def measure(self, tensors: list[Tensor], repeats: int, warmup: int = 2) -> Timing:
        """Time repeated calls, seconds."""
        times = []
        for _ in range(warmup + repeats):
            self.wait()
            start = time.perf_counter()
            self(tensors)
            times.append(time.perf_counter() - start)
        return Timing(tuple(times[warmup:]))
