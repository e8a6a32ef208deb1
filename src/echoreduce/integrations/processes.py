"""Evaluation in real processes: P gloo ranks on this host, each with its own column blocks, reducing over `c10d`.

Every rank loads the model, multiplies its share of each row-parallel linear and takes part in every all-reduce. At the end of each
variant the ranks compare their likelihoods bit for bit: one that differs is an error, not a warning.

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
        tokens: int64 [windows, length + 1].
        batch: windows a forward.
        variants: in order; their configs are never None.
        world_size: number of processes.
        rendezvous: file through which they find each other.
        threads: torch threads of each.
    """

    model: str
    dtype: str
    tokens: Tensor
    batch: int
    variants: list[Variant]
    world_size: int
    rendezvous: str
    threads: int


@dataclass(frozen=True)
class Event:
    """What rank 0 reports: `loaded`, `advanced` (windows done), or `finished` (perplexity and seconds of a variant)."""

    kind: str
    variant: int = 0
    windows: int = 0
    perplexity: float = math.nan
    seconds: float = 0.0


def evaluate(job: Job, on_event: Callable[[Event], None]) -> list[Event]:
    """Run the job in `job.world_size` processes and return the `finished` events, one a variant.

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
                if event.kind == "finished":
                    finished.append(event)
    except ProcessException as failure:
        raise CheckError(f"a rank failed: {failure}") from failure
    if len(finished) != len(job.variants):
        raise CheckError(f"{len(finished)} of {len(job.variants)} variants finished")
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


def _measure(rank: int, job: Job, index: int, variant: Variant, model: Any, events: Any) -> None:
    assert variant.config is not None, "a variant without configuration has nothing to reduce"

    def advance(windows: int) -> None:
        if rank == 0:
            events.put(Event("advanced", index, windows))

    started = time.perf_counter()
    with attach(model, variant.config, group=dist.group.WORLD):
        total, count = negative_log_likelihood(model, job.tokens, job.batch, advance)
    seconds = time.perf_counter() - started
    totals = [torch.empty(1, dtype=torch.float64) for _ in range(job.world_size)]
    dist.all_gather(totals, torch.tensor([total], dtype=torch.float64))
    if any(other.item() != totals[0].item() for other in totals):
        raise CheckError(f"{variant.name}: ranks disagree on the likelihood, {[other.item() for other in totals]}")
    if rank == 0:
        events.put(Event("finished", index, job.tokens.shape[0], math.exp(total / count), seconds))
