"""Memory that every rank of a host can write: torch symmetric memory between GPUs, or a shared file between CPU processes.

Both give the same thing, the address at which this process sees each rank's block. The second exists so that the real kernels, in
Triton's interpreter, and the real host code run in real processes without a GPU (tests, continuous integration).

Leaves out: what is in the block (`workspace`), and agreement among ranks about failures (`workspace` again).
Source: torch.distributed._symmetric_memory; docs/design.md, Section 7.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 128

#: Longest wait for a peer while handles are exchanged: a rank whose driver refuses a handle leaves the others waiting for it.
CONNECT_TIMEOUT = timedelta(seconds=60)


class SharedBlock(Protocol):
    """One block a rank.

    Attributes:
        local: this rank's own block, uint8 [bytes], at an address that is a multiple of 128.
        addresses: where this process sees the block of each rank.
    """

    local: Tensor
    addresses: list[int]

    def allocate(self, nbytes: int, device: torch.device) -> None:
        """Local: take the memory."""

    def connect(self, group: dist.ProcessGroup) -> None:
        """Collective: make every rank's block visible in every process."""

    def release(self) -> None:
        """Local: give the memory back; no peer may use it any more."""


class SymmetricBlock:
    """A CUDA block from torch symmetric memory (fabric or POSIX handles; one host, one rank a device)."""

    def __init__(self) -> None:
        self.local: Tensor = torch.empty(0)
        self.addresses: list[int] = []
        self._handle: Any = None

    def allocate(self, nbytes: int, device: torch.device) -> None:
        """Local: a block of its own, not shared with other users of symmetric memory."""
        import torch.distributed._symmetric_memory as symmetric

        self.local = symmetric.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)

    def connect(self, group: dist.ProcessGroup) -> None:
        """Collective: exchange handles. The table starts at the allocation's base, so this tensor's offset is added."""
        import torch.distributed._symmetric_memory as symmetric

        with _bounded(group):
            self._handle = symmetric.rendezvous(self.local, group)
        if self._handle is None:
            raise RuntimeError("rendezvous gave no handle")
        offset = int(getattr(self._handle, "offset", 0))
        own = int(self._handle.buffer_ptrs[self._handle.rank]) + offset
        if own != self.local.data_ptr():
            raise RuntimeError("the address table does not contain this rank's own block")
        skip = -self.local.data_ptr() % ALIGNMENT
        self.addresses = [int(base) + offset + skip for base in self._handle.buffer_ptrs]
        self.local = self.local[skip : self.local.numel() - ALIGNMENT + skip]

    def release(self) -> None:
        """Local."""
        self._handle = None
        self.local = torch.empty(0)
        self.addresses = []


@contextlib.contextmanager
def _bounded(group: dist.ProcessGroup) -> Iterator[None]:
    """Waits on the group's store end after CONNECT_TIMEOUT."""
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    before = store.timeout
    store.set_timeout(min(before, CONNECT_TIMEOUT))
    try:
        yield
    finally:
        store.set_timeout(before)


class FileBlock:
    """A CPU block in a file that all ranks of the host map; for the interpreter."""

    def __init__(self) -> None:
        self.local: Tensor = torch.empty(0)
        self.addresses: list[int] = []
        self._path = ""
        self._views: list[Tensor] = []

    def allocate(self, nbytes: int, device: torch.device) -> None:
        """Local: a zero-filled file in memory where the system has such a place."""
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        descriptor, self._path = tempfile.mkstemp(prefix="echoreduce-", dir=folder)
        os.ftruncate(descriptor, nbytes)
        os.close(descriptor)
        self.local = torch.from_file(self._path, shared=True, size=nbytes, dtype=torch.uint8)

    def connect(self, group: dist.ProcessGroup) -> None:
        """Collective: exchange paths and map them; the names vanish as soon as everybody has them open."""
        paths: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(paths, (self._path, self.local.numel()), group=group)
        rank = dist.get_rank(group)
        for peer, (path, nbytes) in enumerate(paths):
            view = self.local if peer == rank else torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
            self._views.append(view)
        self.addresses = [view.data_ptr() for view in self._views]
        dist.barrier(group)
        self._unlink()

    def release(self) -> None:
        """Local."""
        self._unlink()
        self._views = []
        self.local = torch.empty(0)
        self.addresses = []

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path:
                os.unlink(self._path)
        self._path = ""
