"""Ranks of an experiment: one process a device under torchrun, NCCL on CUDA, gloo on CPU.

Leaves out: what the ranks do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process among its peers, and the clock by which all of them stop together.

    Attributes:
        rank, world_size: in the default group.
        device: this rank's own.
        began: `time.monotonic()` at the start.
    """

    rank: int
    world_size: int
    device: torch.device
    began: float

    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.began

    def past(self, limit: float) -> bool:
        """Whether rank 0 has run for `limit` seconds (0: no limit). Collective, so that all ranks stop at the same place."""
        spent = torch.tensor([self.seconds()], device=self.device)
        dist.broadcast(spent, 0)
        return 0 < limit < float(spent)

    def say(self, text: str) -> None:
        """Print on rank 0, with the seconds since the start."""
        if self.rank == 0:
            print(f"[{self.seconds():6.1f} s] {text}", flush=True)


@contextmanager
def ranks() -> Iterator[Ranks]:
    """Join the default group and leave it at the end.

    Raises:
        SystemExit: not started by torchrun.
    """
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start this under torchrun, for example: torchrun --nproc-per-node 2 experiments/...")
    began = time.monotonic()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, began)
    finally:
        dist.destroy_process_group()
