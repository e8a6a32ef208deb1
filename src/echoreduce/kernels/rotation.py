"""Hadamard rotation of a tile's groups, in registers: the twin of `quant.rotation`, same butterflies in the same order.

A group's value index is (piece * lanes + lane) * 8 + element, so the stages of half 1, 2, 4 stay inside a chunk, the next ones cross
the threads of a group and the last ones its pieces.

Source: `quant.rotation`.
"""

import triton
import triton.language as tl


@triton.jit
def _pair(x):
    """Butterfly over the last dimension, which has two entries."""
    a, b = tl.split(x)
    return tl.join(a + b, a - b)


@triton.jit
def _inside_chunk(x, h: tl.constexpr, spec: tl.constexpr):
    x = x.reshape(spec.lanes, spec.rows, 8 // (2 * h), 2, h, spec.pieces).permute(0, 1, 2, 4, 5, 3)
    return _pair(x).permute(0, 1, 2, 5, 3, 4).reshape(spec.lanes, spec.rows, 8, spec.pieces)


@triton.jit
def _across_lanes(x, h: tl.constexpr, spec: tl.constexpr):
    x = x.reshape(spec.lanes // (2 * h), 2, h, spec.rows, 8, spec.pieces).permute(0, 2, 3, 4, 5, 1)
    return _pair(x).permute(0, 5, 1, 2, 3, 4).reshape(spec.lanes, spec.rows, 8, spec.pieces)


@triton.jit
def _across_pieces(x, h: tl.constexpr, spec: tl.constexpr):
    x = x.reshape(spec.lanes, spec.rows, 8, spec.pieces // (2 * h), 2, h).permute(0, 1, 2, 3, 5, 4)
    return _pair(x).permute(0, 1, 2, 3, 5, 4).reshape(spec.lanes, spec.rows, 8, spec.pieces)


@triton.jit
def hadamard(x, spec: tl.constexpr):
    """Turn each group of a tile [lanes, rows, 8, pieces] by the orthonormal Walsh-Hadamard matrix."""
    crossings: tl.constexpr = spec.lane_stages
    joints: tl.constexpr = spec.piece_stages
    for stage in tl.static_range(3):
        x = _inside_chunk(x, 1 << stage, spec)
    for stage in tl.static_range(crossings):
        x = _across_lanes(x, 1 << stage, spec)
    for stage in tl.static_range(joints):
        x = _across_pieces(x, 1 << stage, spec)
    return x * spec.norm
