"""Real gloo processes for tests.

`RankPool` keeps N processes alive and runs module-level functions on the first P of them, so that a test pays milliseconds and not
seconds. `run_fresh` starts processes for one test only: those that kill, stop or time out.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 60.0


@dataclass
class Failure:
    """An exception in a rank: class name, its bases' names, text and traceback."""

    kind: str
    bases: tuple[str, ...]
    text: str
    trace: str
    ranks: tuple[int, ...] = ()


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "echoreduce.communicator", "echoreduce.integrations.transformers"])
    return context


def _attempt(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        names = tuple(base.__name__ for base in type(error).__mro__)
        return Failure(type(error).__name__, names, str(error), traceback.format_exc(), getattr(error, "ranks", ()))


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    while (task := pipe.recv()) is not None:
        function, world_size, args = task
        pipe.send(_attempt(function, groups[world_size], *args))
    dist.destroy_process_group()


class RankPool:
    """N gloo ranks that run functions on request."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="echoreduce-test-")
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = multiprocessing.Pipe()
            process = _context().Process(target=_serve, args=(rank, size, rendezvous, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, failures: bool = False) -> list[Any]:
        """Call function(group, *args) on ranks 0 .. world_size - 1 and return their results in rank order.

        Args:
            function: module-level function; its first argument is the process group of these ranks.
            failures: return `Failure` objects instead of raising RankError.
        """
        pipes = self._pipes[:world_size]
        for pipe in pipes:
            pipe.send((function, world_size, args))
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(2 * TIMEOUT_SECONDS):
                raise RankError(f"rank {rank} did not answer within {2 * TIMEOUT_SECONDS} s")
            results.append(pipe.recv())
        return results if failures else check(results)

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def check(results: list[Any]) -> list[Any]:
    """Raise RankError with the first rank's traceback if any result is a Failure."""
    for rank, result in enumerate(results):
        if isinstance(result, Failure):
            raise RankError(f"rank {rank}: {result.trace}")
    return results


def _fresh(
    rank: int, size: int, rendezvous: str, timeout: float, function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    pipe.send(_attempt(function, dist.group.WORLD, *args))


def run_fresh(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 10.0, patience: float = 60.0, method: str = "forkserver"
) -> list[Any]:
    """Call function(group, *args) in `size` new processes; a rank that dies or does not end in `patience` seconds gives None.

    Args:
        timeout: of the process group, seconds.
        method: start method, `forkserver`, `spawn` or `fork`.
    """
    context = _context() if method == "forkserver" else multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory(prefix="echoreduce-test-") as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        pipes, processes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_fresh, args=(rank, size, rendezvous, timeout, function, args, there), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        results = [_receive(pipe, process, patience) for pipe, process in zip(pipes, processes)]
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return results


def _receive(pipe: Connection, process: Any, patience: float) -> Any:
    ready = wait([pipe, process.sentinel], timeout=patience)
    if pipe in ready or pipe.poll():
        try:
            return pipe.recv()
        except EOFError:
            return None
    return None


def kill_self() -> None:
    """SIGKILL this process, as the out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
