"""Runs a calibration: over gloo processes that it starts, under torchrun with NCCL, or over the devices of one process (P2P).

Leaves out: the fit (`cost.calibrate`) and the runs (`collectives.run`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from echoreduce.cli.sizes import format_bytes
from echoreduce.collectives.catalogue import build
from echoreduce.collectives.program import Program
from echoreduce.collectives.run import DeviceRunner, Runner, measure, process_group
from echoreduce.cost.calibrate import PROBE_BYTES, Calibration, Comparison, Measure, collect, conclude
from echoreduce.errors import BackendUnavailable, CheckError, ConfigError

#: Compared with the model; pipelined ones in 4 pieces.
COMPARED = ("ring", "halving_doubling", "double_binary_tree", "pat", "two_shot", "one_shot")
PIECES = 4

#: Calls of a repetition, fewer for large messages: at most so many, and bytes of them together.
CALLS = 16
CALLED_BYTES = 1 << 25


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        backend: gloo, nccl or p2p.
        world_sizes: processes or devices, measured one after the other (nccl: torchrun's number counts).
        sizes: bytes of the compared messages.
        sweeps, repeats, timeout, quietest: see `echoreduce calibrate --help`.
    """

    backend: str
    world_sizes: tuple[int, ...]
    sizes: tuple[int, ...]
    sweeps: int
    repeats: int
    timeout: int
    quietest: bool = False

    @property
    def probe_sizes(self) -> tuple[int, ...]:
        """Bytes of the probes. Between GPUs the launch hides 8 MiB, so beta shows only in messages as large as those to be compared."""
        if self.backend == "gloo":
            return PROBE_BYTES
        return tuple(sorted({*PROBE_BYTES, *(size for size in self.sizes if size > max(PROBE_BYTES))}))

    def __post_init__(self) -> None:
        if not self.world_sizes or min(self.world_sizes) < 2:
            raise ConfigError(f"--world-size: calibration needs at least 2 ranks, got {self.world_sizes}")


@dataclass(frozen=True)
class Result:
    """Constants of one world size and the comparison."""

    calibration: Calibration
    comparisons: tuple[Comparison, ...]

    def as_dict(self) -> dict[str, Any]:
        """Constants, samples and comparisons, for JSON."""
        rows = [{**asdict(c), "error": c.error} for c in self.comparisons]
        return {**asdict(self.calibration), "comparisons": rows}


def run(plan: Plan) -> list[Result] | None:
    """Carry out the plan; None on ranks that do not report.

    Raises:
        BackendUnavailable: NCCL outside torchrun or without a GPU a process, P2P without enough GPUs.
        CheckError: an all-reduce gave a wrong sum.
    """
    if plan.backend == "p2p":
        return [_over_devices(plan, n) for n in plan.world_sizes]
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        result = _in_group(plan, None)
        return None if result is None else [result]
    if plan.backend == "nccl":
        raise BackendUnavailable("NCCL needs one process a GPU: torchrun --nproc-per-node 2 -m echoreduce calibrate --backend nccl")
    return [_spawn(plan, n) for n in plan.world_sizes]


def _spawn(plan: Plan, world_size: int) -> Result:
    """Gloo processes on this host; rank 0 leaves its result in a file."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (plan, world_size, folder), nprocs=world_size)  # type: ignore[attr-defined, no-untyped-call]
        result: Result = torch.load(Path(folder, "result"), weights_only=False)  # written by our own process a moment ago
        return result


def _process(rank: int, plan: Plan, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    _bind(rank)
    result = _in_group(plan, (rank, world_size, folder))
    if result is not None:
        torch.save(result, Path(folder, "result"))


def _bind(rank: int) -> None:
    """Keep this process on one core, as MPI's launchers do, and its threads from preempting each other (Linux; no privilege needed).

    Gloo's device thread polls while the main thread holds the lock of a connection. Woken on the main thread's core, it takes that core
    for the rest of a time slice (4 ms): a call of 1 ms then takes up to 8. Batch jobs never preempt when they wake, so they alternate.
    """
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _in_group(plan: Plan, spawned: tuple[int, int, str] | None) -> Result | None:
    """Calibrate inside one process of a group that this function opens and closes."""
    device = torch.device("cpu")
    if plan.backend == "nccl":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise BackendUnavailable(f"NCCL needs one GPU a process, found {torch.cuda.device_count()} for local rank {local}")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    rank, size, folder = spawned or (-1, -1, None)
    meeting = None if folder is None else f"{folder}/meet"
    with process_group(plan.backend, plan.timeout, device, meeting, rank, size) as (rank, size):
        timer = _timer(device, plan.repeats)
        return _campaign(plan, size, timer, lambda program: _check(program, device, rank, size), reports=rank == 0)


def _campaign(plan: Plan, world_size: int, timer: Measure, check: Callable[[Program], None], reports: bool) -> Result | None:
    """Check, measure and, on the reporting rank, fit."""
    programs = [build(name, world_size, 1, PIECES) for name in COMPARED]
    for program in programs:
        check(program)  # correctness gates timing
    measured = collect(timer, world_size, programs, plan.sizes, plan.sweeps, plan.probe_sizes)
    if not reports:
        return None
    constants, compared = conclude(measured, plan.quietest)
    return Result(constants, tuple(compared))


def _timer(device: torch.device, repeats: int) -> Measure:
    def timer(program: Program, nbytes: int) -> float:
        tensor = torch.ones(nbytes // 4, device=device)
        runner = Runner(program, tensor)
        calls = max(1, min(CALLS, CALLED_BYTES // nbytes))
        return measure(lambda: runner(tensor), device, repeats, warmup=1, calls=calls).median

    return timer


def _check(program: Program, device: torch.device, rank: int, size: int) -> None:
    """Sum integers, which fp32 adds exactly in any order."""
    tensor = torch.arange(1000, device=device, dtype=torch.float32) % 97 + rank
    expected = (torch.arange(1000, device=device, dtype=torch.float32) % 97) * size + sum(range(size))
    _same(program, Runner(program, tensor)(tensor), expected)


def _same(program: Program, got: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = (got != expected).nonzero()
    if wrong.numel():
        raise CheckError(f"{program.name} gave a wrong sum, first at value {int(wrong[0])}")


def _over_devices(plan: Plan, world_size: int) -> Result:
    if torch.cuda.device_count() < world_size:
        raise BackendUnavailable(f"p2p needs {world_size} GPUs in this process, found {torch.cuda.device_count()}")
    devices = [torch.device("cuda", i) for i in range(world_size)]

    def tensors(numel: int) -> list[torch.Tensor]:
        return [torch.arange(numel, device=d, dtype=torch.float32) % 97 + i for i, d in enumerate(devices)]

    def timer(program: Program, nbytes: int) -> float:
        return DeviceRunner(program, devices, nbytes // 4).measure(tensors(nbytes // 4), plan.repeats, warmup=1).median

    def check(program: Program) -> None:
        expected = (torch.arange(1000, dtype=torch.float32) % 97) * world_size + sum(range(world_size))
        for tensor in DeviceRunner(program, devices, 1000)(tensors(1000)):
            _same(program, tensor.cpu(), expected)

    result = _campaign(plan, world_size, timer, check, reports=True)
    assert result is not None, "one process reports"
    return result


def show(result: Result, console: Console) -> None:
    """Constants in one line, the comparison as a table."""
    c = result.calibration
    host = ""
    if c.beta_host:
        bytes_ = f"{c.beta_host * 1e9:.3g} ns a byte ({c.beta_large * 1e9:.3g} beyond 4 MiB of a round)"
        host = f", shared by all: {c.wakeup * 1e6:.3g} us a sender, {c.overhead * 1e6:.3g} us a message, {bytes_}"
    console.print(
        f"{c.world_size} ranks: alpha {c.alpha * 1e6:.3g} us, beta {c.beta * 1e9:.3g} ns a byte, gamma {c.gamma * 1e9:.3g} ns a byte{host}"
        f"; median error of the fit {100 * c.residual:.0f} %",
        soft_wrap=True,
        highlight=False,
    )
    table = Table()
    for name in ("algorithm", "message", "measured", "spread", "predicted", "error"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in result.comparisons:
        spread = f"{1e3 * row.spread[0]:.3f} .. {1e3 * row.spread[1]:.3f}"
        times = (f"{1e3 * row.measured:.3f} ms", spread, f"{1e3 * row.predicted:.3f} ms")
        table.add_row(row.algorithm, format_bytes(row.nbytes), *times, f"{100 * row.error:+.0f} %")
    console.print(table)
    within = sum(abs(row.error) <= 0.25 for row in result.comparisons)
    console.print(f"within 25 %: {within} of {len(result.comparisons)}", highlight=False)
