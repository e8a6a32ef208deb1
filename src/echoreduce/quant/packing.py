"""Codes to bytes and back, and the layout of one segment on the wire.

A segment travels as [code planes | qparams]. bits = 2, 4 and 8 need one plane; 3, 5, 6 and 7 are split into planes of 4, 2 and 1
bits (low bits in the first plane), so that every plane fills whole bytes. Inside a byte the first value has the lowest bits. The
qparams follow as 16-bit little-endian words, one group after the other (`grid.to_wire`).

Source: docs/design.md, Section 4; bit splitting as in FlashCommunication V2 (Li et al., 2025b).
"""

from __future__ import annotations

import torch
from torch import Tensor

from echoreduce.config import QuantConfig
from echoreduce.quant.codec import to_codes, to_levels
from echoreduce.quant.grid import Grid, from_wire, to_wire

#: Widths of the planes that carry a code, lowest bits first.
PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes to bytes.

    Args:
        codes: uint8, values below 2**bits, shape [*batch, n], n divisible by 8.
        bits: 2 to 8.
    Returns:
        uint8, shape [*batch, n * bits / 8], the planes one after the other.
    """
    parts = []
    shift = 0
    for width in PLANES[bits]:
        plane = (codes >> shift) & ((1 << width) - 1)
        parts.append(_pack_plane(plane, width))
        shift += width
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unpack(data: Tensor, bits: int, numel: int) -> Tensor:
    """Inverse of `pack`.

    Args:
        data: uint8, shape [*batch, numel * bits / 8].
        numel: codes per row.
    Returns:
        Codes, uint8, shape [*batch, numel].
    """
    codes: Tensor | None = None
    start = shift = 0
    for width in PLANES[bits]:
        stop = start + numel * width // 8
        plane = _unpack_plane(data[..., start:stop], width) << shift
        codes = plane if codes is None else codes | plane
        start, shift = stop, shift + width
    assert codes is not None, "every bit width has a plane"
    return codes


def _pack_plane(plane: Tensor, width: int) -> Tensor:
    if width == 8:
        return plane
    per_byte = 8 // width
    lanes = plane.unflatten(-1, (-1, per_byte))
    packed: Tensor = lanes[..., 0].clone()
    for lane in range(1, per_byte):
        packed |= lanes[..., lane] << (lane * width)
    return packed


def _unpack_plane(data: Tensor, width: int) -> Tensor:
    if width == 8:
        return data
    lanes = [(data >> (lane * width)) & ((1 << width) - 1) for lane in range(8 // width)]
    return torch.stack(lanes, dim=-1).flatten(-2)


def segment_bytes(groups: int, quant: QuantConfig) -> int:
    """Bytes of a segment of `groups` groups on the wire."""
    return groups * quant.group_bytes()


def encode(level: Tensor, grid: Grid, quant: QuantConfig, qparams: torch.dtype) -> Tensor:
    """Levels and grid of segments to their wire bytes.

    Args:
        level: fp32, shape [*batch, groups, group_size].
        grid: tensors of shape [*batch, groups].
    Returns:
        uint8, shape [*batch, segment_bytes(groups)].
    """
    codes = pack(to_codes(level, grid).flatten(-2), quant.bits)
    words = to_wire(grid, quant, qparams).flatten(-2).contiguous()
    return torch.cat((codes, words.view(torch.uint8)), dim=-1)


def decode(data: Tensor, groups: int, quant: QuantConfig, qparams: torch.dtype) -> tuple[Tensor, Grid]:
    """Inverse of `encode`: (levels fp32 [*batch, groups, group_size], grid [*batch, groups])."""
    numel = groups * quant.group_size
    split = numel * quant.bits // 8
    words = data[..., split:].contiguous().view(torch.int16).unflatten(-1, (groups, quant.qparams_per_group))
    grid = from_wire(words, quant, qparams)
    codes = unpack(data[..., :split], quant.bits, numel).unflatten(-1, (groups, quant.group_size))
    return to_levels(codes, grid), grid
