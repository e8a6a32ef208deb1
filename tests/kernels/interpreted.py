"""Gloo ranks whose Triton kernels run in the interpreter, over files that they share: the real kernels and host code without a GPU."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path

from ranks import RankPool, _serve


class InterpretedPool(RankPool):
    """As `RankPool`, in processes that were started with TRITON_INTERPRET=1 (Triton reads it when it is imported)."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="echoreduce-test-")
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            for rank in range(size):
                here, there = multiprocessing.Pipe()
                process = context.Process(target=_serve, args=(rank, size, rendezvous, there), daemon=True)
                process.start()
                self._pipes.append(here)
                self._processes.append(process)
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
