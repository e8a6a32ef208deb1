"""Values to codes and back on a given grid.

    level = min(round((x - offset) * (1 / scale)), 2**bits - 1 - zero),   code = level + zero,   x^ = level * scale + offset

Rounding is half to even. Only the upper end needs clipping, unless the grid is centred (`QuantConfig.clipped`): `zero` is the rounded
image of the minimum under the same monotone map, so no level falls below -zero. `levels` (fp32) and codes (uint8) carry the same
information; the reference works on levels, which saves two passes, and the wire on codes.

Source: the paper, Eq. 8 and 9; docs/design.md, Section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echoreduce.config import QuantConfig
from echoreduce.quant.grid import Grid, levels, symmetric_limit


def quantize(groups: Tensor, grid: Grid, quant: QuantConfig) -> Tensor:
    """Round each value to its nearest level.

    Args:
        groups: values, fp32, shape [*batch, groups, group_size].
        grid: of the same groups, tensors of shape [*batch, groups].
        quant: bits and policy are read.
    Returns:
        Levels, fp32 integers (code - zero), shape of `groups`; NaN in non-finite groups.
    Cost: reads `groups` once, writes as many fp32 values.
    Error: at most `grid.largest_error` per value after `dequantize`.
    """
    if quant.policy == "symmetric":
        rounded = (groups * grid.inverse.unsqueeze(-1)).round_()
        top = torch.full_like(grid.zero, symmetric_limit(quant.bits))
    else:
        rounded = (groups - grid.offset.unsqueeze(-1)).mul_(grid.inverse.unsqueeze(-1)).round_()
        top = levels(quant.bits) - grid.zero
        if quant.clipped:
            torch.maximum(rounded, -grid.zero.unsqueeze(-1), out=rounded)
    return torch.minimum(rounded, top.unsqueeze(-1), out=rounded)


def dequantize(level: Tensor, grid: Grid) -> Tensor:
    """Value of each level: level * scale + offset, two roundings in fp32.

    Args:
        level: fp32, shape [*batch, groups, group_size].
        grid: tensors of shape [*batch, groups].
    Returns:
        fp32 values, shape of `level`; NaN in non-finite groups. A level of -0 gives +0, as the code 0 would.
    """
    return (level * grid.scale.unsqueeze(-1)).add_(grid.offset.unsqueeze(-1))


def to_codes(level: Tensor, grid: Grid) -> Tensor:
    """Codes 0 .. 2**bits - 1, uint8, shape of `level`; 0 in non-finite groups, which their NaN scale already marks."""
    return (level + grid.zero.unsqueeze(-1)).nan_to_num_(0.0).to(torch.uint8)


def to_levels(codes: Tensor, grid: Grid) -> Tensor:
    """Inverse of `to_codes`: fp32 levels, code - zero."""
    return codes.float().sub_(grid.zero.unsqueeze(-1))
