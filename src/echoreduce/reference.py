"""THE WHOLE ALGORITHM in plain torch, on all ranks' tensors in one process. Read top to bottom; everything faster must equal it.

    all_reduce
      enter       x' = x + c: cut into segments and groups, rotate, add the correction                                     (Eq. 10)
      [rescale    gradients with fp16 qparams: x' times a power of two that all ranks share, undone after the tail          (Section 5.4)]
      two-shot    push    each rank rounds the segments that it does not own and sends the codes to their owners
                  reduce  the owner adds, in rank order and fp32, its own values and what the peers' codes stand for,
                          and rounds the sum
                  gather  the rounded sum goes to every rank
                  tail    every rank, the owner too, reads the same code                                                    (Section 4)
      one-shot    push    each rank rounds its whole tensor and sends the codes to everybody
                  tail    every rank adds the same P copies, its own code too, in rank order
      residuals   what each rank must return later: u_i, with sum_i u_i = -delta                                            (Eq. 4)

Tensors of all ranks are stacked in dimension 0 and every function is vectorized over it. Shapes: P ranks, S = P segments, G groups a
segment, g values a group. The domain in which feedback lives is the quantizer's: blocks of shape [P, S, G, g], rotated if the
quantizer rotates.

Leaves out: bytes (`quant.packing`), processes (`runtime.c10d`), kernels (`kernels`), and which bits a site sends (`session`).
Source: the paper, Sections 4 and 5.1; docs/design.md, Sections 3 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echoreduce.config import QuantConfig, Residual
from echoreduce.errors import ShapeError
from echoreduce.feedback import rescale as units
from echoreduce.partition import Partition, partition
from echoreduce.quant import codec
from echoreduce.quant.grid import Grid, divide, fit, qparams_dtype
from echoreduce.quant.rotation import hadamard


@dataclass(frozen=True)
class Rounded:
    """What a rounding sends: levels (code - zero), fp32 [*batch, groups, group_size], and their grid [*batch, groups]."""

    level: Tensor
    grid: Grid

    def values(self) -> Tensor:
        """What the receiver reads, fp32, shape of `level`."""
        return codec.dequantize(self.level, self.grid)

    def codes(self) -> Tensor:
        """What travels, uint8, shape of `level`."""
        return codec.to_codes(self.level, self.grid)


@dataclass(frozen=True)
class Reduced:
    """Result of one all-reduce.

    Attributes:
        output: the sum that every rank receives, shape and dtype of one contribution.
        residuals: u_i of each rank, fp32 [P, S, G, g]; None unless asked for.
        bounds: largest error of the rounding that made rank i's residual, fp32 [P, S, G]; None as residuals.
        record: the intermediates; None where nothing was quantized.
    """

    output: Tensor
    residuals: Tensor | None = None
    bounds: Tensor | None = None
    record: Record | None = None


@dataclass(frozen=True)
class Record:
    """Every intermediate of one call, for tests and documents.

    Attributes:
        compensated: x' in blocks, fp32 [P, S, G, g].
        pushed: codes and grid that rank i sends for segment j, [P, S, G(, g)]. Two-shot: the diagonal (own segments) is not sent.
        received: what is added up, fp32 [P, S, G, g]: what the codes stand for; two-shot: the owner's own segment as it is.
        sums: what the owner of each segment adds up, fp32 [S, G, g]; one-shot: the sum itself.
        gathered: codes and grid of each reduced segment, [S, G(, g)]; None for one-shot.
        values: what every rank reads before the rotation is undone, fp32 [S, G, g].
        exponent: all tensors above are in units of 2**-exponent (`feedback.rescale`), int32 [1]; None: in the data's own units.
    """

    compensated: Tensor
    pushed: Rounded
    received: Tensor
    sums: Tensor
    gathered: Rounded | None
    values: Tensor
    exponent: Tensor | None = None


def all_reduce(
    contributions: Tensor,
    quant: QuantConfig,
    algorithm: str = "two_shot",
    correction: Tensor | None = None,
    residual: Residual = "none",
    *,
    rescale: bool = False,
) -> Reduced:
    """Sum the contributions of all ranks through a low-bit wire.

    Args:
        contributions: fp16, bf16 or fp32, shape [P, *shape]; row i is rank i's tensor.
        quant: quantizer; bits = 16 returns the exact fp32 sum in rank order.
        algorithm: `two_shot` or `one_shot`.
        correction: c of each rank in the blocks' domain, fp32 [P, S, G, g]; None is zero.
        residual: which residual to return: `none`, `group` or `local`.
        rescale: change units by a shared power of two around the rounding (`feedback.rescale`).
    Returns:
        Reduced; the output has shape [*shape].
    Raises:
        DTypeError: other dtypes.
    Error: per value at most `QuantConfig.reach` steps of each rounding, P of them (two-shot: P - 1 contributions and the sum).
    """
    if quant.bits == 16 or contributions.shape[0] == 1 or contributions[0].numel() == 0:
        total = in_rank_order(contributions.float()) if contributions.shape[0] > 1 else contributions[0].clone()
        return Reduced(total.to(contributions.dtype))
    record = trace(contributions, quant, algorithm, correction, rescale=rescale)
    world_size = contributions.shape[0]
    cut = partition(contributions[0].numel(), world_size, quant.group_size)
    output = leave(own_units(record.values, record.exponent), quant, cut, contributions.shape[1:], contributions.dtype)
    if residual == "none":
        return Reduced(output, record=record)
    residuals, bounds = local_residuals(record) if residual == "local" else group_residuals(record)
    return Reduced(output, own_units(residuals, record.exponent), own_units(bounds, record.exponent), record)


def trace(
    contributions: Tensor, quant: QuantConfig, algorithm: str = "two_shot", correction: Tensor | None = None, *, rescale: bool = False
) -> Record:
    """Run the stages and keep every intermediate; arguments as `all_reduce`, at least one value and bits < 16."""
    qparams = qparams_dtype(quant, contributions.dtype)
    compensated = enter(contributions, quant, correction)
    exponent = None
    if rescale:
        exponent = units.shared_exponent(units.largest_exponent(compensated), contributions.shape[0])
        compensated = units.scale_by(compensated, exponent)
    pushed = push(compensated, quant, qparams)
    if algorithm == "one_shot":
        received = pushed.values()
        sums = in_rank_order(received)
        return Record(compensated, pushed, received, sums, None, sums, exponent)
    received = at_owners(compensated, pushed)
    sums, gathered = reduce(received, quant, qparams)
    return Record(compensated, pushed, received, sums, gathered, tail(gather(gathered)), exponent)


# --- entry and exit -----------------------------------------------------------------------------------------------------------


def enter(contributions: Tensor, quant: QuantConfig, correction: Tensor | None = None) -> Tensor:
    """Cut, rotate, compensate: x' of every rank in blocks (Eq. 10).

    Args:
        contributions: [P, *shape], any float dtype, at least one value a rank.
        correction: fp32 [P, S, G, g] or None.
    Returns:
        fp32 [P, S, G, g]. The padding repeats the tensor's last value.
    """
    world_size = contributions.shape[0]
    flat = contributions.reshape(world_size, -1)
    blocks = to_blocks(flat, partition(flat.shape[1], world_size, quant.group_size), quant)
    return blocks if correction is None else blocks + correction


def to_blocks(flat: Tensor, cut: Partition, quant: QuantConfig) -> Tensor:
    """Rows of values [*batch, numel] to fp32 blocks [*batch, S, G, g], rotated if the quantizer rotates."""
    if flat.shape[-1] != cut.numel:
        raise ShapeError(f"expected rows of {cut.numel} values, got {flat.shape[-1]}")
    values = flat.float()
    missing = cut.padded - cut.numel
    if missing:
        values = torch.cat((values, values[..., -1:].expand(*values.shape[:-1], missing)), dim=-1)
    blocks = values.reshape(*values.shape[:-1], cut.world_size, cut.segment_groups, cut.group_size)
    return hadamard(blocks) if quant.rotation == "hadamard" else blocks


def leave(values: Tensor, quant: QuantConfig, cut: Partition, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Blocks [S, G, g] back to the caller's shape and dtype: undo the rotation, drop the padding, round to the output dtype."""
    if quant.rotation == "hadamard":
        values = hadamard(values)
    return values.reshape(-1)[: cut.numel].reshape(shape).to(dtype)


def own_units(values: Tensor, exponent: Tensor | None) -> Tensor:
    """Undo the change of units: values * 2**-exponent; None: there was none."""
    return values if exponent is None else units.scale_by(values, -exponent)


# --- stages -------------------------------------------------------------------------------------------------------------------


def push(compensated: Tensor, quant: QuantConfig, qparams: torch.dtype) -> Rounded:
    """Round the segments for their owners; in two-shot nobody reads a rank's rounding of its own segment.

    Args:
        compensated: x', fp32 [*batch, G, g].
        qparams: 16-bit dtype of scale and offset.
    """
    return round_groups(compensated, quant, qparams)


def at_owners(compensated: Tensor, pushed: Rounded) -> Tensor:
    """What the owner of each segment has in hand: the peers' codes, read, and its own segment in full precision.

    Args:
        compensated: x' of every rank, fp32 [P, S, G, g].
        pushed: what the ranks sent, [P, S, G(, g)].
    Returns:
        fp32 [P, S, G, g], row i is rank i's share of each segment.
    """
    received = pushed.values()
    owner = torch.arange(compensated.shape[0], device=compensated.device)
    received[owner, owner] = compensated[owner, owner]
    return received


def reduce(received: Tensor, quant: QuantConfig, qparams: torch.dtype) -> tuple[Tensor, Rounded]:
    """Add up each segment in rank order and round the sum for the way back.

    Args:
        received: fp32 [P, *segments, G, g].
    Returns:
        (s, fp32 [*segments, G, g]; its rounding).
    """
    sums = in_rank_order(received)
    return sums, round_groups(sums, quant, qparams)


def gather(reduced: Rounded) -> Rounded:
    """Every rank receives every owner's rounding: in one process they are already side by side, [S, G(, g)]."""
    return reduced


def tail(gathered: Rounded) -> Tensor:
    """What every rank, owner included, reads from the gathered codes, fp32 [S, G, g]."""
    return gathered.values()


def round_groups(values: Tensor, quant: QuantConfig, qparams: torch.dtype) -> Rounded:
    """Round fp32 groups [*batch, G, g] to their own grids."""
    grid = fit(values, quant, qparams)
    return Rounded(codec.quantize(values, grid, quant), grid)


def in_rank_order(copies: Tensor) -> Tensor:
    """Sum over dimension 0, one addition after the other from rank 0, so that every backend gets the same bits."""
    total = copies[0].clone()
    for copy in copies[1:]:
        total += copy
    return total


# --- residuals ----------------------------------------------------------------------------------------------------------------


def local_residuals(record: Record) -> tuple[Tensor, Tensor]:
    """u_i = the rounding errors that rank i made: x' - DQ(Q(x')) where it pushed, s - DQ(Q(s)) on the segment that it owns.

    Returns:
        (residuals fp32 [P, S, G, g], largest error of the rounding that made each, fp32 [P, S, G]).
    """
    residuals = record.compensated - record.received  # zero on own segments in two-shot
    bounds = record.pushed.grid.largest_error
    if record.gathered is not None:
        owner = torch.arange(residuals.shape[0], device=residuals.device)
        residuals[owner, owner] = record.sums - record.values
        bounds[owner, owner] = record.gathered.grid.largest_error
    return residuals, bounds


def group_residuals(record: Record) -> tuple[Tensor, Tensor]:
    """u_i = x'_i - y / P (the paper, Section 3.3); y is the fp32 value before the cast to the output dtype.

    Returns:
        (residuals fp32 [P, S, G, g], bounds of the push's errors, fp32 [P, S, G]; they do not bound this residual).
    """
    world_size = record.compensated.shape[0]
    return record.compensated - divide(record.values, world_size), record.pushed.grid.largest_error


def injected_error(record: Record) -> Tensor:
    """delta = y - sum_i x'_i (Eq. 1) in the blocks' domain, before the cast to the output dtype, fp32 [S, G, g]."""
    return record.values - in_rank_order(record.compensated)
