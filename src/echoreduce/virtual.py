"""Virtual ranks: what P processes would compute, in one process on one device.

A row-parallel linear is split into P column blocks, its P partial products are the contributions of P ranks, and `reference` reduces
them, vectorized over ranks. So any model can be judged at any P on a laptop or one GPU, with the bits that P processes would give
(`tests/distributed` compares them).

Leaves out: column-parallel layers (they need no communication, and splitting them changes nothing), speed of the collective.
Source: docs/design.md, Section 7.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor

from echoreduce import reference
from echoreduce.config import FeedbackConfig, QuantConfig
from echoreduce.errors import ConfigError, DTypeError, ShapeError
from echoreduce.feedback import compensator
from echoreduce.feedback.compensator import FeedbackState
from echoreduce.quant import packing
from echoreduce.quant.grid import DATA_DTYPES, qparams_dtype
from echoreduce.recording import Recording


class VirtualBackend:
    """P ranks in one process; implements `runtime.backend.Backend` on stacked contributions.

    Args:
        world_size: number of virtual ranks, P >= 1.
    """

    name = "virtual"
    rank = 0
    training = True

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ConfigError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size

    def new_state(self, feedback: FeedbackConfig) -> FeedbackState:
        """Empty feedback state of all P ranks."""
        return FeedbackState(feedback)

    def close(self) -> None:
        """Nothing to give back."""

    def all_reduce(
        self,
        x: Tensor,
        quant: QuantConfig,
        algorithm: str,
        state: FeedbackState | None = None,
        out: Tensor | None = None,
        *,
        recording: Recording | None = None,
        rescale: bool = False,
    ) -> Tensor:
        """Sum the rows of x through the low-bit wire.

        Args:
            x: contributions of all ranks, fp16, bf16 or fp32, shape [P, *shape].
            quant, algorithm, state, out, recording, rescale: as `TrainingBackend.all_reduce`.
        Returns:
            Shape [*shape].
        Raises:
            ShapeError: the first dimension of x is not P, or the state belongs to another shape.
            DTypeError: other dtypes.
        """
        if x.dim() < 1 or x.shape[0] != self.world_size:
            raise ShapeError(f"expected contributions of {self.world_size} ranks in dimension 0, got shape {tuple(x.shape)}")
        if x.dtype not in DATA_DTYPES:
            raise DTypeError(f"cannot all-reduce {x.dtype} in low precision; accepted are float32, bfloat16 and float16")
        x = x.detach()
        returned = compensator.correction(state) if state is not None else None
        residual = "none" if state is None else state.config.residual
        reduced = reference.all_reduce(x, quant, algorithm, returned, residual, rescale=rescale)
        if recording is not None:
            fill(recording, reduced, quant, x.dtype)
        if state is not None and reduced.residuals is not None and reduced.bounds is not None:
            compensator.update(state, reduced.residuals, reduced.bounds)
        return reduced.output if out is None else out.copy_(reduced.output)


def fill(recording: Recording, reduced: reference.Reduced, quant: QuantConfig, dtype: torch.dtype) -> None:
    """Record a finished call: the bytes that every rank would have received, or the sum where nothing was quantized."""
    record = reduced.record
    if record is None or record.exponent is not None:
        recording.keep_output(reduced.output)
        return
    received = record.pushed if record.gathered is None else record.gathered
    recording.keep_wire(packing.encode(received.level, received.grid, quant, qparams_dtype(quant, dtype)), quant, reduced.output)


def column_bounds(in_features: int, world_size: int, rank: int) -> tuple[int, int]:
    """Columns [start, stop) of a row-parallel weight that rank `rank` owns; sizes differ by at most one."""
    return rank * in_features // world_size, (rank + 1) * in_features // world_size


def partial_product(x: Tensor, weight: Tensor, world_size: int, rank: int) -> Tensor:
    """Rank `rank`'s share of x @ weight.T: its columns of x times its columns of weight.

    Args:
        x: [*batch, in_features].
        weight: [out_features, in_features].
    Returns:
        [*batch, out_features], the same bits in one process of P virtual ranks and in P processes.
    """
    start, stop = column_bounds(weight.shape[1], world_size, rank)
    return F.linear(x[..., start:stop], weight[:, start:stop])


def partial_products(x: Tensor, weight: Tensor, world_size: int) -> Tensor:
    """All ranks' shares, [P, *batch, out_features]."""
    return torch.stack([partial_product(x, weight, world_size, rank) for rank in range(world_size)])
