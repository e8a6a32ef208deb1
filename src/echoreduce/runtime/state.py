"""Feedback state of one direction of one session on one rank, in the kernels' layout.

An average is one tensor of padded size in the quantizer's own domain (segments, groups, values in order). The float8 types are kept as
int32 words of four, in the order in which the kernels' threads hold a group, plus one int32 exponent a group. Starting a pass clears
nothing: its first site is told not to read what is there.

Source: `feedback.compensator`, whose numbers these are bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echoreduce.config import FeedbackConfig
from echoreduce.errors import GroupError, ShapeError
from echoreduce.kernels.spec import pieces_of
from echoreduce.partition import Partition

STORED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
        self._room = (-1, -1)
        self._scaled = config.state.startswith("float8")

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
        if self._room[0] < cut.padded or self._room[1] < cut.groups or self._values[0].device != device:
            if capturing:
                raise GroupError("feedback state must be allocated before a CUDA graph is captured: run the pass once before")
            count = self.config.averages
            with torch.inference_mode(False):
                dtype = STORED_DTYPES.get(self.config.state, torch.int32)
                size = cut.padded // 4 if self._scaled else cut.padded
                groups = cut.groups if self._scaled else 1
                self._values = [torch.empty(size, dtype=dtype, device=device) for _ in range(count)]
                self._exponents = [torch.empty(groups, dtype=torch.int32, device=device) for _ in range(count)]
                self._room = cut.padded, cut.groups
        last = len(self._values) - 1
        return [self._values[0], self._exponents[0], self._values[last], self._exponents[last]]

    def averages(self) -> list[tuple[Tensor, Tensor | None]]:
        """(values [padded], exponents [groups] or None) of each average, for comparison with the reference; float8 as its bits, int8."""
        cut = self._cut
        if self.fresh or cut is None:
            return []
        if not self._scaled:
            return [(value[: cut.padded], None) for value in self._values]
        pieces = pieces_of(cut.group_size)
        shape = (cut.groups, 2, cut.group_size // (8 * pieces), pieces, 4)  # group, half of a chunk, lane, piece, byte
        plain = [words[: cut.padded // 4].view(torch.int8).reshape(shape).permute(0, 3, 2, 1, 4).reshape(-1) for words in self._values]
        return [(value, exponent[: cut.groups].to(torch.int8)) for value, exponent in zip(plain, self._exponents)]
