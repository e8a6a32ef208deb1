"""Time of work on a device: medians with their spread, eager or as a CUDA graph, and the slowest rank's.

Every call is timed by a pair of events on the stream, all are enqueued back to back, and the host waits once at the end; so the host's
own time is hidden where the device is slower, as in a model. In a CUDA graph several calls are captured and a replay's time is divided by
their number: that is what small messages cost where launches are free.

Leaves out: what is timed, and whether it is right (a benchmark checks its result first).
Source: docs/design.md, Section 6; nccl-tests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Durations of equal calls, milliseconds.

    Attributes:
        median, fifth, ninetyfifth, least: percentiles 50, 5 and 95, and the minimum.
        count: calls timed.
    """

    median: float
    fifth: float
    ninetyfifth: float
    least: float
    count: int

    @property
    def spread(self) -> float:
        """(95th - 5th percentile) / median."""
        return (self.ninetyfifth - self.fifth) / self.median if self.median > 0 else 0.0


def summarize(milliseconds: Sequence[float]) -> Timing:
    """Percentiles of measured durations."""
    ordered = sorted(milliseconds)
    assert ordered, "at least one duration"

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return Timing(statistics.median(ordered), percentile(0.05), percentile(0.95), ordered[0], len(ordered))


def time_eager(call: Callable[[], Any], warmup: int, iterations: int, device: torch.device) -> list[float]:
    """Milliseconds of each call; on the CPU by the wall clock."""
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        durations = []
        for _ in range(iterations):
            start = time.perf_counter()
            call()
            durations.append(1e3 * (time.perf_counter() - start))
        return durations
    torch.cuda.synchronize(device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in events]


def capture(call: Callable[[], Any], calls: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `calls` calls, after three eager ones on the capture's own stream."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    return graph


def time_graph(call: Callable[[], Any], warmup: int, iterations: int, device: torch.device, calls: int = 10) -> list[float]:
    """Milliseconds a call, one figure a replay of a graph of `calls` calls."""
    graph = capture(call, calls, device)
    return [duration / calls for duration in time_eager(graph.replay, warmup, iterations, device)]
