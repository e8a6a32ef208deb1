"""Hadamard rotation of a tile's groups, in registers: the twin of `quant.rotation`, same butterflies in the same order.

A group's value index is (piece * lanes + lane) * 8 + element, so the stages of half 1, 2, 4 stay inside a chunk, the next ones cross
the threads of a group (one shuffle a value) and the last ones are sums and differences of whole pieces. Nothing goes through shared
memory: dimensions are split off at the end of the shape, where a thread holds both halves, and joined again in the reverse order.

Source: `quant.rotation`.
"""

import triton
import triton.language as tl

from echoreduce.kernels.tile import gather_pieces, part_pieces


@triton.jit
def _one(x):
    """Butterfly over the last dimension of two entries."""
    a, b = tl.split(x)
    return tl.join(a + b, a - b)


@triton.jit
def _two(x):
    """Butterflies over the last dimension, then over the one before."""
    a, b = tl.split(x)
    return tl.join(_one(a + b), _one(a - b))


@triton.jit
def _three(x):
    """Butterflies over the last three dimensions of two entries each, last one first."""
    a, b = tl.split(x)
    return tl.join(_two(a + b), _two(a - b))


@triton.jit
def _chunk(x, spec: tl.constexpr):
    """Stages inside the chunks of one piece and across the threads of a group, [lanes, rows, 8]."""
    x = _three(x.reshape(spec.lanes, spec.rows, 2, 2, 2)).reshape(spec.lanes, spec.rows, 8)
    lane = tl.arange(0, spec.lanes)[:, None, None]
    crossings: tl.constexpr = spec.lane_stages
    for stage in tl.static_range(crossings):
        partner = tl.broadcast_to(lane ^ (1 << stage), x.shape)
        other = tl.gather(x, partner, 0)
        sign = tl.broadcast_to(1.0 - 2.0 * ((lane >> stage) & 1).to(tl.float32), x.shape)
        x = tl.fma(x, sign, other)  # exact product: lower lanes add, upper ones subtract
    return x


@triton.jit
def hadamard(x, spec: tl.constexpr):
    """Turn each group of a tile [lanes, rows, 8, pieces] by the orthonormal Walsh-Hadamard matrix."""
    a, b, c, d = part_pieces(x, spec)
    a = _chunk(a, spec)
    if spec.pieces > 1:
        b = _chunk(b, spec)
        a, b = a + b, a - b
    if spec.pieces > 2:
        c = _chunk(c, spec)
        d = _chunk(d, spec)
        c, d = c + d, c - d
        a, c = a + c, a - c
        b, d = b + d, b - d
    return gather_pieces(a, b, c, d, spec) * spec.norm
