"""Peer-to-peer copies beside a measurement, for a share of the time: an interconnect that is shared with other traffic.

Every rank copies a block of its own into the next rank's memory (copy engines, no kernels), waits so long that copies take `duty` of an
unloaded link's time, and copies again. Under load a copy takes longer, so the share is nominal, as in the paper. A thread keeps a few
copies in the queue of a side stream and stops as soon as the measurement has ended. On the CPU the same loop copies between two host
buffers, so that scripts run as a whole.

Source: the paper, Section 7.1 (Table 3, "Load").
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launch import Ranks

BLOCK = 256 << 20
#: Copies that are enqueued together, and such batches in flight.
BATCH, IN_FLIGHT = 8, 2
CYCLES = 20_000_000


class PeerCopies:
    """The copies of one rank. Construction is collective.

    Args:
        who: the ranks; each copies to the next one.
    """

    def __init__(self, who: Ranks) -> None:
        self._who = who
        self._cuda = who.device.type == "cuda"
        nbytes = BLOCK if self._cuda else 1 << 20
        self._source = torch.zeros(nbytes, dtype=torch.uint8, device=who.device)
        self._target = self._peer_block(nbytes)
        self._stream = torch.cuda.Stream(who.device) if self._cuda else None
        #: Milliseconds of one copy while all ranks copy, and of CYCLES cycles of waiting.
        self.copy_ms, self._wait_ms = self._calibrate() if self._cuda else (0.0, 0.0)

    def _peer_block(self, nbytes: int) -> Tensor:
        if not self._cuda:
            return torch.empty_like(self._source)
        import torch.distributed._symmetric_memory as symmetric

        self._own = symmetric.empty(nbytes, dtype=torch.uint8, device=self._who.device)
        self._handle: Any = symmetric.rendezvous(self._own, dist.group.WORLD)
        assert int(self._handle.buffer_ptrs[self._who.rank]) == self._own.data_ptr(), "the block is an allocation of its own"
        peer = (self._who.rank + 1) % self._who.world_size
        block: Tensor = self._handle.get_buffer(peer, (nbytes,), torch.uint8)
        return block

    def _calibrate(self) -> tuple[float, float]:
        def timed(call: Callable[[], Any]) -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            dist.barrier()
            begin.record()
            for _ in range(10):
                call()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) / 10

        return timed(lambda: self._target.copy_(self._source)), timed(lambda: torch.cuda._sleep(CYCLES))

    @contextmanager
    def running(self, duty: float) -> Iterator[None]:
        """Copy for a share `duty` (0 .. 1) of the time inside the body. Collective at both ends."""
        stop = threading.Event()
        failures: list[Exception] = []

        def work() -> None:
            try:
                self._loop(duty, stop)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=work, daemon=True)
        dist.barrier()
        if duty > 0:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if duty > 0:
                thread.join()
            dist.barrier()
        if failures:
            raise RuntimeError("the background copies failed, so the figures are not under load") from failures[0]

    def _loop(self, duty: float, stop: threading.Event) -> None:
        idle = (1 - duty) / duty
        if self._stream is None:
            while not stop.is_set():
                began = time.perf_counter()
                self._target.copy_(self._source)
                time.sleep((time.perf_counter() - began) * idle)
            return
        torch.cuda.set_device(self._who.device)
        cycles = int(CYCLES * self.copy_ms * idle / self._wait_ms)
        ends: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(self._stream):
            while not stop.is_set():
                for _ in range(BATCH):
                    self._target.copy_(self._source)
                    if cycles:
                        torch.cuda._sleep(cycles)
                ends.append(torch.cuda.Event(blocking=True))
                ends[-1].record(self._stream)
                if len(ends) == IN_FLIGHT:
                    ends.popleft().synchronize()
        self._stream.synchronize()
