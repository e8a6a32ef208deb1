"""The long-lived workspace of a group: flags, cards, two halves of landing areas, and what the kernels keep for themselves.

One block a rank that all peers write into; the int64 table of its addresses; a control block (epoch, ticket, abort word) in local device
memory, which the kernels advance by themselves; a record in pinned host memory, in which a kernel says why it gave up waiting.

Set-up is all or nothing: after each step the ranks exchange what went wrong, and if anything did, all of them raise the same
BackendUnavailable. The last step writes a word into every peer's block through the mapped addresses and reads it there, because a driver
that says "peer access" has been seen to fail at the first real write.

Source: docs/design.md, Section 7; the paper, Appendix C (workspace layout).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.errors import BackendUnavailable
from echoreduce.kernels.spec import CARD_BYTES, data_offset, flag_bytes
from echoreduce.runtime.memory import FileBlock, SharedBlock, SymmetricBlock

#: Words of the control block and the record; the kernels' module `signal` says which is which.
CONTROL_WORDS = 16
RECORD_WORDS = 16

#: Byte offset of the probe words: the first flags, before any call uses them.
PROBE = 0x5EED


class Workspace:
    """One group's shared memory. Collective: construction, `grow` and `close`.

    Args:
        group: process group whose ranks share one host.
        device: this rank's device; `cpu` uses shared files and Triton's interpreter.
        half: bytes of each of the two halves.
    Attributes:
        half: bytes of a half.
        table: int64 [P], address of each rank's block as this process sees it.
        control: int32 [16] on the device.
        record: int64 [16] in pinned host memory.
    Raises:
        BackendUnavailable: on every rank, with every failed rank's reason.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, half: int) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        cuda = device.type == "cuda"
        self.control = torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device)
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=cuda)
        self._watch = self.record.numpy()
        self.half = 0
        self.table = torch.zeros(self.world_size, dtype=torch.int64, device=device)
        self._block: SharedBlock | None = None
        self._set_up(half)

    def grow(self, half: int) -> None:
        """Replace the block by a larger one. Every rank calls it at the same call, because the need follows from the size alone."""
        self._quiesce()
        if self._block is not None:
            self._block.release()
            self._block = None
        self._set_up(half)

    def close(self, wait_for_peers: bool = True) -> None:
        """Give the memory back. With `wait_for_peers`, after a barrier: nobody writes into it any more."""
        if self._block is None:
            return
        if wait_for_peers:
            self._quiesce()
        self._block.release()
        self._block = None
        self.half = 0

    @property
    def failed(self) -> bool:
        """Whether a kernel has written a record; a look at host memory."""
        return bool(self._watch[0] != 0)

    @property
    def local(self) -> Tensor:
        """This rank's own block, uint8."""
        assert self._block is not None, "the workspace is open"
        return self._block.local

    def card(self, source: int, parity: int) -> list[int]:
        """(numel, settings code, epoch) that `source` left for the call of that parity; synchronizes with the device."""
        start = flag_bytes(self.world_size) + (parity * self.world_size + source) * CARD_BYTES
        return [int(word) for word in self.local[start : start + 24].view(torch.int64).cpu()]

    def _quiesce(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def _set_up(self, half: int) -> None:
        half = -(-half // 128) * 128
        block: SharedBlock = SymmetricBlock() if self.device.type == "cuda" else FileBlock()
        nbytes = data_offset(self.world_size) + 2 * half
        try:
            agree(self.group, "allocate", lambda: block.allocate(nbytes, self.device))
            agree(self.group, "open the peers' memory", lambda: block.connect(self.group))
            agree(self.group, "clear the flags", lambda: self._clear(block))
            agree(self.group, "write to a peer", lambda: self._probe_write(block))
            agree(self.group, "see a peer's write", lambda: self._probe_read(block))
            agree(self.group, "clear the flags", lambda: self._clear(block))
        except BackendUnavailable:
            block.release()
            raise
        self._block = block
        self.half = half
        self.table.copy_(torch.tensor(block.addresses, dtype=torch.int64))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _clear(self, block: SharedBlock) -> None:
        block.local[: data_offset(self.world_size)].zero_()
        self.control.zero_()
        self.record.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _probe_write(self, block: SharedBlock) -> None:
        from echoreduce.kernels.probe import probe_kernel

        table = torch.tensor(block.addresses, dtype=torch.int64, device=self.device)
        probe_kernel[(self.world_size,)](table, self.rank, PROBE)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _probe_read(self, block: SharedBlock) -> None:
        found = block.local[: 8 * self.world_size].view(torch.int64).cpu().tolist()
        missing = [rank for rank, word in enumerate(found) if word != PROBE + rank]
        if missing:
            raise RuntimeError(f"nothing arrived from rank {', '.join(map(str, missing))}")


def agree(group: dist.ProcessGroup, what: str, step: Callable[[], Any]) -> None:
    """Run a step on every rank and raise the same BackendUnavailable everywhere if it failed anywhere. Collective.

    Raises:
        BackendUnavailable: names the step, and each failed rank with its reason.
    """
    reason = ""
    try:
        step()
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no text'}"
    reasons: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text]
    if failed:
        raise BackendUnavailable(f"peer-to-peer memory cannot be used: could not {what} ({'; '.join(failed)})")
