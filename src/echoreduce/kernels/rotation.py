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
def hadamard(x, spec: tl.constexpr):
    """Turn each group of a tile [rows, lanes, 8, pieces] by the orthonormal Walsh-Hadamard matrix."""
    R: tl.constexpr = spec.rows
    L: tl.constexpr = spec.lanes
    J: tl.constexpr = spec.pieces
    for stage in tl.static_range(3):
        h: tl.constexpr = 1 << stage
        x = x.reshape(R, L, 8 // (2 * h), 2, h, J).permute(0, 1, 2, 4, 5, 3)
        x = _pair(x).permute(0, 1, 2, 5, 3, 4).reshape(R, L, 8, J)
    for stage in tl.static_range(spec.lane_stages):
        h: tl.constexpr = 1 << stage
        x = x.reshape(R, L // (2 * h), 2, h, 8, J).permute(0, 1, 3, 4, 5, 2)
        x = _pair(x).permute(0, 1, 5, 2, 3, 4).reshape(R, L, 8, J)
    for stage in tl.static_range(spec.piece_stages):
        h: tl.constexpr = 1 << stage
        x = x.reshape(R, L, 8, J // (2 * h), 2, h).permute(0, 1, 2, 3, 5, 4)
        x = _pair(x).permute(0, 1, 2, 3, 5, 4).reshape(R, L, 8, J)
    return x * spec.norm
