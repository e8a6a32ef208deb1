"""The paper's schedule of a two-shot call: a launch a stage and tile, streams for the stages, events for the order inside a tile.

    push stream     push t0   push t1   push t2 ...
    reduce stream             reduce t0 reduce t1 ...      (reduce and gather: one kernel)
    tail stream                         tail t0   tail t1 ...

Between ranks the same flags as in the persistent kernel; within a rank an event lets reduce start a tile when push has ended it, and
tail when reduce has. The caller's stream is forked before the first push and joined after the last tail. Kept as the documented alternative
(docs/kernels.md): same stages, same bits.

Source: the paper, Section 4.2 and Appendix C.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from echoreduce.runtime.pipeline import Launcher, Piece, options_of

STAGES = ("push", "reduce", "tail")
#: Tiles of a call, as many as the paper's figure shows in flight.
TILES = 4


def tiles_of(chunks: int) -> list[tuple[int, int]]:
    """Ranges of chunks: at most TILES, none empty."""
    count = min(TILES, chunks)
    edges = [chunks * index // count for index in range(count + 1)]
    return list(itertools.pairwise(edges))


class StagedLauncher(Launcher):
    """As `Launcher`, stage by stage. The streams are made at the first call and kept."""

    _streams: list[Any] | None = None

    def launch(self, index: int, x: Tensor, y: Tensor, state: list[Tensor]) -> None:
        """Enqueue piece `index`; the current stream waits for its end."""
        piece = self.plan.pieces[index]
        chunks = math.ceil(math.ceil(piece.groups / piece.schedule.rows) / piece.schedule.steps)
        if x.device.type != "cuda":
            for tile in tiles_of(chunks):
                for stage in STAGES:
                    self._stage(piece, stage, tile, chunks, x, y, state)
            return
        if self._streams is None:
            self._streams = [torch.cuda.Stream(x.device) for _ in STAGES]
        caller = torch.cuda.current_stream(x.device)
        for stream in self._streams:
            stream.wait_stream(caller)
        for tile in tiles_of(chunks):
            done: torch.cuda.Event | None = None
            for stage, stream in zip(STAGES, self._streams):
                with torch.cuda.stream(stream):
                    if done is not None:
                        stream.wait_event(done)
                    self._stage(piece, stage, tile, chunks, x, y, state)
                    done = torch.cuda.Event()
                    done.record(stream)
        for stream in self._streams:
            caller.wait_stream(stream)

    def _stage(self, piece: Piece, stage: str, tile: tuple[int, int], chunks: int, x: Tensor, y: Tensor, state: list[Tensor]) -> None:
        from echoreduce.kernels.staged import stage_kernel

        cut = piece.schedule
        blocks = {"push": cut.pushers, "reduce": cut.reducers, "tail": cut.tails}[stage]
        last = stage == "tail" and tile[1] == chunks
        pointers = (x, y, *state, *self.plan.floats, self._workspace.table, self._workspace.control, self._workspace.record)
        kernel: Any = stage_kernel
        grid = (min(blocks, tile[1] - tile[0]),)
        kernel[grid](*pointers, *self._call(piece), *tile, stage, last, piece.spec, **options_of(cut))
