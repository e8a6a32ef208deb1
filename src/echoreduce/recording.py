"""What one all-reduce leaves behind so that its result can be given again without communication.

Why: an activation checkpoint runs a part of the forward pass a second time, during the backward pass. The all-reduces in that part must
give the same sums again, send nothing, and leave the feedback state alone. Every rank has rebuilt the sum from bytes that it
received; keeping those bytes is enough to rebuild it again, bit for bit.

    two-shot    the gathered segments: bits + qparams a value (4.25 bits at 4 bits and groups of 128)
    one-shot    P copies of that (8.5 bits at P = 2), or the sum itself where that is smaller
    16 bits     the sum itself; also where a backend gives no bytes

Leaves out: when a recording is made and dropped (`session`).
Source: docs/training.md; case O21 of the field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from echoreduce import reference
from echoreduce.config import QuantConfig
from echoreduce.errors import ShapeError
from echoreduce.partition import partition
from echoreduce.quant import packing
from echoreduce.quant.grid import qparams_dtype


@dataclass
class Recording:
    """One recorded all-reduce; empty until a backend fills it.

    Attributes:
        wire: uint8, [S, bytes] (two-shot) or [P, S, bytes] (one-shot); None if `output` is kept instead.
        output: the sum itself, detached; None if `wire` is kept.
        quant: the quantizer that made `wire`.
        shape: of the sum.
        dtype: of the sum.
    """

    wire: Tensor | None = None
    output: Tensor | None = None
    quant: QuantConfig | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def keep_output(self, output: Tensor) -> None:
        """Record the sum itself; a copy, so that nobody's in-place change reaches it."""
        self.wire, self.output = None, output.detach().clone()
        self.shape, self.dtype = tuple(output.shape), output.dtype

    def keep_wire(self, wire: Tensor, quant: QuantConfig, output: Tensor) -> None:
        """Record the received bytes, or the sum where it is smaller.

        Args:
            wire: as the attribute; kept, not copied.
            output: the sum that was made of them.
        """
        if wire.numel() > output.numel() * output.element_size():
            self.keep_output(output)
            return
        self.wire, self.output, self.quant = wire, None, quant
        self.shape, self.dtype = tuple(output.shape), output.dtype

    def replay(self) -> Tensor:
        """The recorded sum, a new tensor with the bits of the first time. Not a collective call.

        Raises:
            ShapeError: nothing was recorded.
        """
        if self.output is not None:
            return self.output.clone()
        if self.wire is None or self.quant is None:
            raise ShapeError("nothing was recorded")
        qparams = qparams_dtype(self.quant, self.dtype)
        segments = self.wire.shape[-2]
        cut = partition(math.prod(self.shape), segments, self.quant.group_size)
        values = reference.Rounded(*packing.decode(self.wire, cut.segment_groups, self.quant, qparams)).values()
        if values.dim() == 4:
            values = reference.in_rank_order(values)
        return reference.leave(values, self.quant, cut, torch.Size(self.shape), self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that the recording holds."""
        return sum(kept.numel() * kept.element_size() for kept in (self.wire, self.output) if kept is not None)
