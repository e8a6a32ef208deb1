"""Evaluation in real processes: P gloo ranks on this host, each with its own column blocks, reducing over `c10d`.

Every rank loads the model, multiplies its share of each row-parallel linear and takes part in every all-reduce. At the end of each
variant the ranks compare their likelihoods (of a text, of the choices of tasks) bit for bit: one that differs is an error, not a warning.

Leaves out: sharded weights, GPUs (a real job uses torchrun and `attach` in its own script).
Source: docs/design.md, Section 7.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from echoreduce.errors import CheckError, ConfigError
from echoreduce.integrations.choice import Requests, score
from echoreduce.integrations.evaluation import Variant, negative_log_likelihood
from echoreduce.integrations.language_model import load
from echoreduce.integrations.transformers import attach

#: Longest wait of a rank for its peers: the slowest rank may still be reading the model.
GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    Attributes:
        model: folder or GGUF file.
        dtype: of the weights.
        tokens: int64 [windows, length + 1]; None: no text.
        batch: windows a forward.
        variants: in order; their configs are never None.
        world_size: number of processes.
        rendezvous: file through which they find each other.
        threads: torch threads of each.
        tasks: scored after the text, in order.
    """

    model: str
    dtype: str
    tokens: Tensor | None
    batch: int
    variants: list[Variant]
    world_size: int
    rendezvous: str
    threads: int
    tasks: tuple[Requests, ...] = ()


@dataclass(frozen=True)
class Event:
    """What rank 0 reports.

    Attributes:
        kind: `loaded`, `advanced` (windows or rows done), `finished` (perplexity of a variant), or `scored` (its scores on a task).
        scores: rows of `choice.score`.
    """

    kind: str
    variant: int = 0
    windows: int = 0
    perplexity: float = math.nan
    seconds: float = 0.0
    task: int = -1
    scores: list[list[float]] | None = None


def evaluate(job: Job, on_event: Callable[[Event], None]) -> list[Event]:
    """Run the job in `job.world_size` processes and return the `finished` and `scored` events, one a variant and text or task.

    Raises:
        ConfigError: fewer than two processes.
        CheckError: a process failed, or ranks disagree; the text holds the first traceback.
    """
    if job.world_size < 2:
        raise ConfigError(f"real processes need a world size of at least 2, got {job.world_size}")
    events: Any = multiprocessing.get_context("spawn").Queue()
    finished: list[Event] = []
    processes = start_processes(_rank, args=(job, events), nprocs=job.world_size, join=False, start_method="spawn")
    assert processes is not None, "join=False returns the context"
    try:
        alive = True
        while alive:
            alive = not processes.join(timeout=0.05)
            while (event := _next(events)) is not None:
                on_event(event)
                if event.kind in ("finished", "scored"):
                    finished.append(event)
    except ProcessException as failure:
        raise CheckError(f"a rank failed: {failure}") from failure
    expected = len(job.variants) * (len(job.tasks) + (job.tokens is not None))
    if len(finished) != expected:
        raise CheckError(f"{len(finished)} of {expected} measurements finished")
    return finished


def _next(events: Any) -> Event | None:
    try:
        event: Event = events.get(timeout=0.1)
    except queue.Empty:
        return None
    return event


def rendezvous_file() -> str:
    """Path of a file that does not exist yet, for a file-based rendezvous on this host."""
    return str(Path(tempfile.mkdtemp(prefix="echoreduce-")) / "rendezvous")


def _rank(rank: int, job: Job, events: Any) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo", init_method=f"file://{job.rendezvous}", rank=rank, world_size=job.world_size, timeout=GROUP_TIMEOUT)
    try:
        model, _ = load(job.model, job.dtype)
        dist.barrier()
        if rank == 0:
            events.put(Event("loaded"))
        for index, variant in enumerate(job.variants):
            _measure(rank, job, index, variant, model, events)
    finally:
        dist.destroy_process_group()
    # All is reported; leave without tearing the interpreter down. A thread of gloo may still hold a tensor then, and one that asks for the
    # interpreter's lock at that time aborts the process: "terminate called without an active exception" (pytorch issues 179291, 190489).
    events.close()
    events.join_thread()
    os._exit(0)


def _measure(rank: int, job: Job, index: int, variant: Variant, model: Any, events: Any) -> None:
    assert variant.config is not None, "a variant without configuration has nothing to reduce"

    def report(event: Event) -> None:
        if rank == 0:
            events.put(event)

    def advance(done: int) -> None:
        report(Event("advanced", index, done))

    with attach(model, variant.config, group=dist.group.WORLD):
        if job.tokens is not None:
            started = time.perf_counter()
            total, count = negative_log_likelihood(model, job.tokens, job.batch, advance)
            seconds = time.perf_counter() - started
            _agree(variant.name, torch.tensor([total], dtype=torch.float64))
            report(Event("finished", index, job.tokens.shape[0], math.exp(total / count), seconds))
        for number, requests in enumerate(job.tasks):
            started = time.perf_counter()
            scores = score(model, requests, advance)
            seconds = time.perf_counter() - started
            _agree(variant.name, scores)
            report(Event("scored", index, seconds=seconds, task=number, scores=scores.tolist()))


def _agree(name: str, found: Tensor) -> None:
    """Raise CheckError unless all ranks hold the same bits, float64 of any shape."""
    bits = found.contiguous().view(torch.int64)
    others = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(others, bits)
    differ = [rank for rank, other in enumerate(others) if not torch.equal(other, others[0])]
    if differ:
        raise CheckError(f"{name}: ranks {differ} disagree with rank 0 on the likelihood")
