"""Hadamard rotation of a tile's groups, in registers: the twin of `quant.rotation`, same butterflies in the same order.

A group's value index is (piece * lanes + lane) * 8 + element, so the stages of half 1, 2, 4 stay inside a chunk, the next ones cross
the threads of a group (one shuffle a value) and the last ones are sums and differences of whole pieces. Nothing goes through shared
memory: dimensions are split off at the end of the shape, where a thread holds both halves, and joined again in the reverse order.

The way back of narrow `compact` codes takes no fp32 butterflies: a level is a small integer, so all stages but the last run on codes, four
to a word and then two, and every sum is exact; so are the reference's, whose levels times a scale of few bits never fill an fp32 mantissa.

Source: `quant.rotation`.
"""

import triton
import triton.language as tl

from echoreduce.kernels.rounding import MANTISSA, as_mantissa
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
    """Turn each group of a tile [lanes, rows, 8, pieces] by the Hadamard matrix of +-1, sqrt(group_size) times the orthonormal one."""
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
    return gather_pieces(a, b, c, d, spec)


@triton.jit
def _pair(a, b, largest: tl.constexpr):
    """Sum and difference of packed unsigned numbers up to `largest`, in every field; the difference is raised by it: no field borrows."""
    return a + b, a - b + largest


@triton.jit
def _across(word, spec: tl.constexpr):
    """Butterflies across pieces, then across the threads of a group, on bytes of at most 2 * top; int32 [lanes, rows, pieces]."""
    ones: tl.constexpr = 0x01010101
    first: tl.constexpr = 2 * spec.top
    if spec.pieces == 4:
        x, y = tl.split(word.reshape(spec.lanes, spec.rows, 2, 2))
        x, y = _pair(x, y, first * ones)
        a, c = tl.split(x)
        b, d = tl.split(y)
        a, c = _pair(a, c, 2 * first * ones)
        b, d = _pair(b, d, 2 * first * ones)
        word = tl.join(tl.join(a, c), tl.join(b, d)).reshape(spec.lanes, spec.rows, 4)
    elif spec.pieces == 2:
        a, b = tl.split(word)
        a, b = _pair(a, b, first * ones)
        word = tl.join(a, b)
    lane = tl.arange(0, spec.lanes)[:, None, None]
    crossings: tl.constexpr = spec.lane_stages
    for stage in tl.static_range(crossings):
        other = tl.gather(word, tl.broadcast_to(lane ^ (1 << stage), word.shape), 0)
        upper = (lane >> stage) & 1
        largest: tl.constexpr = (first * spec.pieces << stage) * ones
        word = other + (word ^ -upper) + upper * (largest + 1)  # lower lanes add; upper ones: other - word + largest
    return word


@triton.jit
def _halves(word, spec: tl.constexpr):
    """Two fields of 16 bits as fp32: 2**23 + field."""
    if spec.native:
        low = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7610;", "=r,r,r", [word, MANTISSA], tl.int32, is_pure=True, pack=1)
        high = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [word, MANTISSA], tl.int32, is_pure=True, pack=1)
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    else:
        return as_mantissa(word, 0xFFFF, spec), as_mantissa(word >> 16, 0xFFFF, spec)


@triton.jit
def _last(word, base, factor, spec: tl.constexpr):
    """Last stage, between the two fields of each word, and the scale; `base` is what the sum of two fields as floats has too much."""
    low, high = _halves(word, spec)
    return tl.join(((low - base) + high) * factor, (low - high) * factor)


@triton.jit
def turn_codes(words, scale, zero, spec: tl.constexpr):
    """What a tile's codes stand for, turned back: fp32 [lanes, rows, 8, pieces]; `spec.integer_turn` only.

    Every difference is raised by the largest number of its stage. After k stages all fields but the pure sums are raised by
    top * 2**(k - 1), the differences among them since their last difference, and the sum of the zero points is in the pure sum alone.

    Args:
        words: int32 [lanes, rows, pieces], a code in each nibble.
        scale, zero: of each group, fp32 [rows]; a NaN scale makes its group NaN.
    """
    even = words & 0x0F0F0F0F
    odd = (words >> 4) & 0x0F0F0F0F
    plus, minus = _pair(even, odd, spec.top * 0x01010101)
    plus = _across(plus, spec)
    minus = _across(minus, spec)
    largest: tl.constexpr = (spec.top * spec.group_size // 4) * 0x00010001
    pp, pm = _pair(plus & 0x00FF00FF, (plus >> 8) & 0x00FF00FF, largest)
    mp, mm = _pair(minus & 0x00FF00FF, (minus >> 8) & 0x00FF00FF, largest)
    raised: tl.constexpr = 16777216.0 + spec.top * spec.group_size // 2
    factor = (scale * (spec.norm if spec.exact_norm else 1.0))[None, :, None]
    first = (tl.arange(0, spec.lanes)[:, None, None] == 0) & (tl.arange(0, spec.pieces)[None, None, :] == 0)
    base = tl.where(first, 16777216.0 + (spec.group_size * 1.0) * zero[None, :, None], raised)
    none = tl.where(first, raised, raised)
    even = tl.join(_last(pp, base, factor, spec), _last(pm, none, factor, spec))
    odd = tl.join(_last(mp, none, factor, spec), _last(mm, none, factor, spec))
    value = tl.join(even, odd).reshape(spec.lanes, spec.rows, spec.pieces, 8).permute(0, 1, 3, 2)
    return value if spec.exact_norm else value * spec.norm
