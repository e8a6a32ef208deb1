"""From the range of a group to its grid: scale, and zero point or offset, as they travel on the wire.

The grid of a group has 2**bits levels, `(code - zero) * scale + offset`. Three policies place it:

    symmetric    scale = amax / (2**(bits-1) - 1), zero in the middle, nothing else sent                                  (Eq. 8)
    asymmetric   offset = minimum, scale = (max - offset) / (2**bits - 1): zero falls between two levels                  (Eq. 9, naive)
    zero_aware   the group straddles zero: zero = round(-min / scale), an integer, so that 0 is a level; offset = 0
                 the group lies on one side of zero: as asymmetric
    compact      zero_aware with the range of every group widened to include zero: never an offset, so that b bits of zero point and
                 16 - b bits of scale (8 exponent, 8 - b mantissa bits) share one 16-bit word. Up to 4 bits the scale is rounded down
                 and the grid centred on the range, zero = round((2**b - 1) / 2 - (min + max) / (2 scale)); values beyond either
                 end are clipped to it. Above 4 bits the scale is rounded up

Where the paper lets the two cases of zero_aware "blend smoothly", ours meet: at min = 0 both give zero = 0 and offset = 0, and a group
that straddles zero by less than half a step is rounded to the same grid (docs/differences.md).

Range safety (docs/design.md, Section 4), which the paper lacks:
  * scale is rounded up and offset down to 16 bits, so every value lies within half a step of a level (`QuantConfig.reach`: one
    step where the scale is rounded down. The range has less than 15 (1 + 2**-4) steps there: half of what is too much, 0.47, and half a
    step of the zero point's own rounding);
  * a far one-sided group keeps its minimum as offset, because its zero point would not fit 16 bits; the scale's sign bit, otherwise
    free, says that the second parameter is an offset;
  * a NaN or Inf in a group, or a range that the 16-bit type cannot hold, makes the scale NaN and thus the whole group NaN.

Division is IEEE, two a group (scale, and its reciprocal); values are multiplied by the reciprocal and rounded half to even. All
arithmetic is fp32 without fused multiply-add, so that every backend can repeat it bit for bit.

Leaves out: codes (`codec`), bytes (`packing`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echoreduce.config import LARGEST_COMPACT_EXPONENT, QuantConfig
from echoreduce.errors import DTypeError

#: Smallest scale that is stored in bf16: the smallest normal number, whose reciprocal is still finite in fp32.
SMALLEST_BF16_SCALE = 2.0**-126

DATA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Grid:
    """The grids of many groups; all tensors fp32 of shape [*batch, groups].

    Attributes:
        scale: distance of two levels, >= 0, representable in the 16-bit qparams type; NaN marks a non-finite group.
        inverse: fp32 reciprocal of scale; 0 where scale is 0.
        zero: integer code of the level `offset` (0 .. 2**bits - 1).
        offset: value of that level; representable in the 16-bit qparams type.
        one_sided: bool, whether the second wire parameter is the offset (else the zero point).
        reach: largest rounding error of a value in steps, `QuantConfig.reach`.
    """

    scale: Tensor
    inverse: Tensor
    zero: Tensor
    offset: Tensor
    one_sided: Tensor
    reach: float = 0.5

    @property
    def largest_error(self) -> Tensor:
        """Bound of the rounding error of each group's values; NaN for non-finite groups."""
        return self.scale * self.reach


def levels(bits: int) -> int:
    """Largest code, 2**bits - 1."""
    return (1 << bits) - 1


def symmetric_limit(bits: int) -> int:
    """Largest magnitude of a symmetric code, 2**(bits-1) - 1; the most negative code is never used (Section 4.3)."""
    return (1 << (bits - 1)) - 1


def qparams_dtype(quant: QuantConfig, data: torch.dtype) -> torch.dtype:
    """16-bit dtype of scale and offset for data of dtype `data`.

    Raises:
        DTypeError: `data` is not fp16, bf16 or fp32.
    """
    if data not in DATA_DTYPES:
        raise DTypeError(f"cannot quantize {data}; accepted are {', '.join(str(d) for d in DATA_DTYPES)}")
    if quant.layout == "compact":
        return torch.bfloat16
    if quant.qparams == "auto":
        return torch.float16 if data == torch.float16 else torch.bfloat16
    return torch.float16 if quant.qparams == "fp16" else torch.bfloat16


def divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, correctly rounded on every device: on CUDA torch turns a division by a Python number into a multiplication."""
    return x / x.new_full((), divisor)


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Smallest number of 16-bit type `dtype` that is not below x >= 0, as fp32; overflow gives Inf, NaN stays NaN."""
    nearest = x.to(dtype)
    bumped = (nearest.view(torch.int16) + 1).view(dtype)
    return torch.where(nearest.float() < x, bumped, nearest).float()


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest number of 16-bit type `dtype` that is not above x (any sign), as fp32; overflow gives -Inf, NaN stays NaN."""
    nearest = x.to(dtype)
    bits = nearest.view(torch.int16)
    # One step down: magnitude - 1 above zero, magnitude + 1 at or below it (nearest > x >= 0 is never zero here).
    below = torch.where(bits > 0, bits - 1, torch.where(bits == 0, torch.full_like(bits, -32767), bits + 1)).view(dtype)
    return torch.where(nearest.float() > x, below, nearest).float()


def compact_mantissa(bits: int) -> int:
    """Mantissa bits of a `compact` scale beside a zero point of `bits` bits."""
    return 8 - bits


def round_compact(x: Tensor, quant: QuantConfig) -> Tensor:
    """x >= 0 with 8 exponent and `compact_mantissa(bits)` mantissa bits, as fp32: the largest such number that is not above x if
    `quant.clipped`, else the smallest that is not below x; overflow gives Inf, `quant.capped` from 2**(LARGEST_COMPACT_EXPONENT + 1) on."""
    dropped = 23 - compact_mantissa(quant.bits)
    raised = 0 if quant.clipped else (1 << dropped) - 1
    rounded = (x.view(torch.int32) + raised) >> dropped << dropped
    scale = torch.where(torch.isfinite(x), rounded.view(torch.float32), x)
    return torch.where(scale >= 2.0 ** (LARGEST_COMPACT_EXPONENT + 1), torch.inf, scale) if quant.capped else scale


def fit(groups: Tensor, quant: QuantConfig, qparams: torch.dtype) -> Grid:
    """Grid of each group.

    Args:
        groups: values, fp32, shape [*batch, groups, group_size].
        quant: bits and policy are read.
        qparams: torch.float16 or torch.bfloat16, see `qparams_dtype`.
    Returns:
        Grid with tensors of shape [*batch, groups].
    Cost: one read of `groups`.
    Error: every finite value of a group lies within `Grid.largest_error` of a level, scale / 2 but for narrow `compact` codes.
    """
    low, high = groups.amin(-1), groups.amax(-1)  # both let a NaN through; together faster than aminmax on CPU
    if quant.layout == "compact":
        low, high = torch.where(low > 0, 0.0, low), torch.where(high < 0, 0.0, high)  # NaN stays
    if quant.policy == "symmetric":
        raw = divide(torch.maximum(high, -low), symmetric_limit(quant.bits))
        offset = torch.zeros_like(low)
        one_sided = torch.zeros_like(low, dtype=torch.bool)
    else:
        if quant.layout in ("zero_aware", "compact"):
            one_sided = (low > 0) | (high < 0)
        else:
            one_sided = torch.ones_like(low, dtype=torch.bool)
        offset = torch.where(one_sided, round_down(low, qparams), torch.zeros_like(low))
        # Halved, so that max - min of large fp32 values stays finite; halving is exact.
        raw = divide(0.5 * high - 0.5 * torch.where(one_sided, offset, low), 0.5 * levels(quant.bits))
    return _finish(raw, low, high, offset, one_sided, quant, qparams)


def _finish(raw: Tensor, low: Tensor, high: Tensor, offset: Tensor, one_sided: Tensor, quant: QuantConfig, qparams: torch.dtype) -> Grid:
    """Round the scale, mark non-finite groups, and place the zero point."""
    raw = raw.abs()  # a group of zeros may give -0, whose sign bit would mean an offset
    scale = round_compact(raw, quant) if quant.layout == "compact" else round_up(raw, qparams)
    if qparams == torch.bfloat16:
        scale = torch.where((raw > 0) & (scale < SMALLEST_BF16_SCALE), SMALLEST_BF16_SCALE, scale)
    finite = torch.isfinite(scale) & torch.isfinite(offset)
    scale = torch.where(finite, scale, torch.nan)
    offset = torch.where(finite, offset, 0.0)
    one_sided = one_sided & finite
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    if quant.policy == "symmetric":
        zero = torch.full_like(scale, symmetric_limit(quant.bits))
    else:
        middle = 0.5 * levels(quant.bits) - (0.5 * low + 0.5 * high) * inverse if quant.clipped else -low * inverse
        zero = torch.round(middle).clamp_(0, levels(quant.bits)).abs_()
        zero = torch.where(one_sided | ~finite | (scale == 0), 0.0, zero)
    return Grid(scale, inverse, zero, offset, one_sided, quant.reach)


def to_wire(grid: Grid, quant: QuantConfig, qparams: torch.dtype) -> Tensor:
    """qparams as they travel: int16 bit patterns, shape [*batch, groups, 1 or 2].

    `compact`: the zero point in the low `bits` bits, the scale's exponent and mantissa above it. Else word 0 is the scale (its sign bit
    set where word 1 is an offset), word 1 the zero point as an integer or the offset's bits.
    """
    if quant.layout == "compact":
        field = grid.scale.view(torch.int32) >> (23 - compact_mantissa(quant.bits))
        return (field << quant.bits | grid.zero.to(torch.int32)).to(torch.int16).unsqueeze(-1)
    scale = grid.scale.to(qparams).view(torch.int16)
    if quant.policy == "symmetric":
        return scale.unsqueeze(-1)
    scale = torch.where(grid.one_sided, scale | torch.iinfo(torch.int16).min, scale)
    second = torch.where(grid.one_sided, grid.offset.to(qparams).view(torch.int16), grid.zero.to(torch.int16))
    return torch.stack((scale, second), dim=-1)


def from_wire(words: Tensor, quant: QuantConfig, qparams: torch.dtype) -> Grid:
    """Inverse of `to_wire`.

    Args:
        words: int16, shape [*batch, groups, 1 or 2].
    Returns:
        The grid that the sender used (`inverse` is recomputed, for feedback only).
    """
    first = words[..., 0].contiguous()
    if quant.layout == "compact":
        word = first.to(torch.int32) & 0xFFFF
        scale = (word >> quant.bits << (23 - compact_mantissa(quant.bits))).view(torch.float32)
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
        zero = (word & levels(quant.bits)).float()
        return Grid(scale, inverse, zero, torch.zeros_like(scale), torch.zeros_like(scale, dtype=torch.bool), quant.reach)
    scale = (first & 0x7FFF).view(qparams).float()
    if quant.policy == "symmetric":
        one_sided = torch.zeros_like(scale, dtype=torch.bool)
        zero = torch.full_like(scale, symmetric_limit(quant.bits))
        offset = torch.zeros_like(scale)
    else:
        second = words[..., 1].contiguous()
        one_sided = first < 0
        zero = torch.where(one_sided, 0.0, second.float())
        offset = torch.where(one_sided, second.view(qparams).float(), 0.0)
    return Grid(scale, torch.where(scale == 0, 0.0, 1.0 / scale), zero, offset, one_sided)
