"""Order among the streams that use one backend: a second stream waits for the first, the update of the group residual runs beside.

A communicator's kernels must never overlap on one rank: two of them would take the same epoch. When a call comes on another stream than
the one before, the new stream waits for an event on the old one. While a graph is captured an event of work outside the capture cannot
be waited for; capture itself synchronizes before it begins, and calls that follow each other inside one capture are ordered the same way.

Source: docs/design.md, Section 7 (second stream); the paper, Section 5.3 and Appendix C (fifth stream).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class StreamOrder:
    """Streams of one backend on one device; does nothing on the CPU.

    Args:
        device: of the backend.
        priority: of the side stream; -1 is above the default.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device = device
        self._priority = priority
        self._cuda = device.type == "cuda"
        self._last: Any = None
        self._raw = -1
        self._side: Any = None
        self._updated: Any = None
        self._updated_captured = False

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def enter(self) -> None:
        """Put the current stream behind the stream of the last call."""
        if not self._cuda:
            return
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        if raw == self._raw:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None:
            with torch.cuda.stream(self._last):
                captured = torch.cuda.is_current_stream_capturing()
            if captured == self.capturing:
                event = torch.cuda.Event()
                event.record(self._last)
                stream.wait_event(event)
        self._last = stream
        self._raw = raw

    def wait_for_update(self) -> None:
        """Put the current stream behind the last update, if one is still to be waited for."""
        if self._updated is not None:
            if self._updated_captured == self.capturing:
                torch.cuda.current_stream(self._device).wait_event(self._updated)
            self._updated = None

    @contextmanager
    def update_after(self, x: Tensor, tensors: list[Tensor]) -> Iterator[None]:
        """Run the body's launches on the side stream, behind the current one; the next call waits for them.

        While a graph is captured the body runs on the current stream: a side stream would have to be joined before the capture ends.
        """
        if not self._cuda or self.capturing:
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self._device, priority=self._priority)
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield
        self._updated = torch.cuda.Event()
        self._updated.record(self._side)
        self._updated_captured = False
        for tensor in (x, *tensors):
            tensor.record_stream(self._side)

    def synchronize(self) -> None:
        """Wait for the side stream."""
        if self._side is not None:
            self._side.synchronize()
