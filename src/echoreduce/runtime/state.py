"""Feedback state of one direction of one session on one rank, in the kernels' layout.

An average is one tensor of padded size in the quantizer's own domain (segments, groups, values in order), plus one int8 exponent a
group for the float8 types. Starting a pass clears nothing: its first site is told not to read what is there.

Source: `feedback.compensator`, whose numbers these are bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echoreduce.config import FeedbackConfig
from echoreduce.errors import GroupError, ShapeError
from echoreduce.partition import Partition

STORED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "float8_e4m3": torch.int8, "float8_e5m2": torch.int8}


class P2PState:
    """Moving averages of one direction; `prepare` takes memory at the first site of a pass, and keeps it while passes fit.

    Attributes:
        config: the compensator's setting.
        fresh: the next site is the first of its pass.
    """

    def __init__(self, config: FeedbackConfig) -> None:
        self.config = config
        self.fresh = True
        self._cut: Partition | None = None
        self._values: list[Tensor] = []
        self._exponents: list[Tensor] = []

    def reset(self) -> None:
        """Start a pass."""
        self.fresh = True

    def prepare(self, cut: Partition, device: torch.device, capturing: bool = False) -> list[Tensor]:
        """Values and exponents of average 0 and 1, for the kernels' arguments.

        Raises:
            ShapeError: the pass began with another size.
            GroupError: memory would have to be taken while a CUDA graph is captured.
        """
        if not self.fresh and self._cut != cut:
            raise ShapeError(f"{cut.numel} values at this site, but the pass began with another size; begin a new pass")
        self._cut = cut
        missing = not self._values or self._values[0].numel() < cut.padded or self._exponents[0].numel() < cut.groups
        if missing or self._values[0].device != device:
            if capturing:
                raise GroupError("feedback state must be allocated before a CUDA graph is captured: run the pass once before")
            count = self.config.averages
            with torch.inference_mode(False):
                dtype = STORED_DTYPES[self.config.state]
                self._values = [torch.empty(cut.padded, dtype=dtype, device=device) for _ in range(count)]
                self._exponents = [torch.empty(cut.groups, dtype=torch.int8, device=device) for _ in range(count)]
        last = len(self._values) - 1
        return [self._values[0], self._exponents[0], self._values[last], self._exponents[last]]

    def averages(self) -> list[tuple[Tensor, Tensor | None]]:
        """(values [padded], exponents [groups] or None) of each average, for comparison with the reference; float8 as its bits, int8."""
        if self.fresh or self._cut is None:
            return []
        padded, groups = self._cut.padded, self._cut.groups
        scaled = self.config.state.startswith("float8")
        return [(value[:padded], exponent[:groups] if scaled else None) for value, exponent in zip(self._values, self._exponents)]
