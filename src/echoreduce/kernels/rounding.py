"""Values to codes and back, in registers: the twin of `quant.grid`, `quant.codec` and `quant.packing`, bit for bit.

A tile of groups is a tensor [lanes, rows, 8, pieces] of fp32 values (see `spec`), a grid a tensor [rows] a parameter. All arithmetic
is IEEE fp32 without contraction (kernels are compiled with `enable_fp_fusion=False`); the two divisions a group needs are correctly
rounded. Four tricks keep the instructions a value few; each is exact:

  * rounding half to even is an addition of 1.5 * 2**23, which leaves level + 0x4B400000 in the bits of the sum;
  * packing adds those bits up, shifted, and takes the constants out once a word (modulo 2**32);
  * unpacking masks a code where it stands in the word, lets it be the mantissa of 2**23 + code * 2**position, subtracts
    2**23 + zero * 2**position and scales by scale * 2**-position, an exact power of two away from the scale;
  * level * scale is exact (at most 8 by 11 bits), so the fused multiply-add of the offset rounds once, as two operations would. Only a
    product beyond fp32's range would tell the two apart; `asymmetric`, whose offset may have the other sign, keeps two operations.

Source: docs/design.md, Section 4; the paper, Section 4.3.
"""

import triton
import triton.language as tl

from echoreduce.config import LARGEST_COMPACT_EXPONENT

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23
MAGIC_BITS = tl.constexpr(0x4B400000)
MANTISSA = tl.constexpr(0x4B000000)  # bits of 2**23
COMPACT_EXPONENT = tl.constexpr(LARGEST_COMPACT_EXPONENT)


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def extent(x, spec: tl.constexpr):
    """(smallest, largest) value of each group, [rows] fp32; NaN or Inf where a value is NaN."""
    if spec.native:
        low = tl.reduce(tl.reduce(tl.reduce(x, 3, _min_nan), 2, _min_nan), 0, _min_nan)
        high = tl.reduce(tl.reduce(tl.reduce(x, 3, _max_nan), 2, _max_nan), 0, _max_nan)
    else:  # the interpreter's maxima skip NaN
        x = tl.where(x == x, x, float("inf"))
        low = tl.min(tl.min(tl.min(x, 3), 2), 0)
        high = tl.max(tl.max(tl.max(x, 3), 2), 0)
    return low, high


@triton.jit
def round_up(x, spec: tl.constexpr):
    """Bits (int32) of the smallest number of the 16-bit type that is not below x >= 0; Inf or beyond where x has none."""
    if spec.half_qparams:
        nearest = x.to(tl.float16)
        bits = nearest.to(tl.int16, bitcast=True).to(tl.int32)
        return tl.where(nearest.to(tl.float32) < x, bits + 1, bits) & 0x7FFF
    else:
        return ((x.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16).to(tl.int32) & 0x7FFF


@triton.jit
def round_down(x, spec: tl.constexpr):
    """Bits (int32, 0 to 0xFFFF) of the largest number of the 16-bit type that is not above x."""
    if spec.half_qparams:
        nearest = x.to(tl.float16)
        bits = nearest.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        below = tl.where(bits == 0, 0x8001, tl.where(bits < 0x8000, bits - 1, bits + 1))
        return tl.where(nearest.to(tl.float32) > x, below, bits)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        return (tl.where(x < 0, bits + 0xFFFF, bits) >> 16).to(tl.int32)


@triton.jit
def widen(bits, spec: tl.constexpr):
    """fp32 value of the 16-bit type's bits (int32, upper half ignored)."""
    if spec.half_qparams:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def constant(value: tl.constexpr, spec: tl.constexpr):
    """`value` for each group, [rows] fp32."""
    return tl.full([spec.rows], value, tl.float32)


@triton.jit
def nan_word(spec: tl.constexpr):
    """The qparams of a group that is not finite."""
    if spec.compact:
        return ((255 << spec.mantissa) | (1 << (spec.mantissa - 1))) << spec.bits
    elif spec.half_qparams:
        return 0x7E00
    else:
        return 0x7FC0


@triton.jit
def fit(x, spec: tl.constexpr):
    """Grid of each group of a tile, whose values are in `spec.unit`.

    Returns:
        scale, inverse (for values in that unit), zero (a float), offset, word (qparams as they travel), finite; each [rows].
    """
    low, high = extent(x, spec)
    if spec.compact:
        low = tl.where(low > 0, 0.0, low * (1.0 / spec.unit))  # NaN stays
        high = tl.where(high < 0, 0.0, high * (1.0 / spec.unit))
        raw = tl.math.div_rn(0.5 * high - 0.5 * low, constant(0.5 * spec.top, spec))
        return _finish_compact(raw, low, high, spec)
    if spec.symmetric:
        raw = tl.math.div_rn(tl.maximum(high, -low), constant(spec.limit, spec))
        one_sided = low != low
        offset_bits = low.to(tl.int32, bitcast=True) & 0
    else:
        offset_bits = round_down(low, spec)
        if spec.policy == "zero_aware":
            one_sided = (low > 0) | (high < 0)
            floor = tl.where(one_sided, widen(offset_bits, spec), low)
        else:
            one_sided = low == low
            floor = widen(offset_bits, spec)
        raw = tl.math.div_rn(0.5 * high - 0.5 * floor, constant(0.5 * spec.top, spec))
    return _finish(raw, low, one_sided, offset_bits, spec)


@triton.jit
def _finish(raw, low, one_sided, offset_bits, spec: tl.constexpr):
    """Round the scale up, mark non-finite groups, place the zero point, and put the wire word together."""
    bits = round_up(raw, spec)
    if spec.half_qparams:
        infinite: tl.constexpr = 0x7C00
        nan: tl.constexpr = 0x7E00
    else:
        infinite: tl.constexpr = 0x7F80
        nan: tl.constexpr = 0x7FC0
        bits = tl.where((bits > 0) & (bits < 0x80), 0x80, bits)  # 2**-126: the reciprocal stays finite
    finite = (bits < infinite) & (raw == raw)
    if not spec.symmetric:
        finite = finite & (~one_sided | ((offset_bits & 0x7FFF) < infinite))
        one_sided = one_sided & finite
    bits = tl.where(finite, bits, nan)
    scale = widen(bits, spec)
    inverse = tl.where(bits == 0, 0.0, tl.math.div_rn(constant(1.0, spec), tl.where(bits == 0, 1.0, scale)))
    if spec.symmetric:
        zero = constant(spec.limit, spec)
        offset = constant(0.0, spec)
        word = bits
    else:
        centred = (-low * inverse + MAGIC) - MAGIC
        centred = tl.minimum(tl.maximum(centred, 0.0), spec.top * 1.0)
        zero = tl.where(one_sided | ~finite, 0.0, centred)
        offset = tl.where(one_sided, widen(offset_bits, spec), 0.0)
        word = tl.where(one_sided, bits | 0x8000 | (offset_bits << 16), bits | (zero.to(tl.int32) << 16))
    return scale, inverse, zero, offset, word, finite


@triton.jit
def _finish_compact(raw, low, high, spec: tl.constexpr):
    """As `_finish`, for a scale and a zero point in one word; narrow codes round the scale down and centre the grid."""
    dropped: tl.constexpr = 23 - spec.mantissa
    unit: tl.constexpr = 1 << spec.mantissa  # of the exponent
    size = raw.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = size < 0x7F800000
    raised: tl.constexpr = 0 if spec.clipped else ((1 << dropped) - 1)
    field = (tl.where(finite, size, 0) + raised) >> dropped
    field = tl.where((size > 0) & (field < unit), unit, field)
    beyond: tl.constexpr = 127 + COMPACT_EXPONENT + 1 if spec.capped else 255
    finite = finite & (field < beyond * unit)
    field = tl.where(finite, field, 255 * unit + unit // 2)
    scale = (field << dropped).to(tl.float32, bitcast=True)
    inverse = tl.where(field == 0, 0.0, tl.math.div_rn(constant(1.0, spec), tl.where(field == 0, 1.0, scale)))
    if spec.clipped:
        middle = 0.5 * spec.top - (0.5 * low + 0.5 * high) * inverse
    else:
        middle = -low * inverse
    zero = tl.minimum(tl.maximum((middle + MAGIC) - MAGIC, 0.0), spec.top * 1.0)
    zero = tl.where(finite & (field > 0), zero, 0.0)
    word = (field << spec.bits) | zero.to(tl.int32)
    return scale, inverse * (1.0 / spec.unit), zero, constant(0.0, spec), word, finite


@triton.jit
def rows4(v):
    """[rows] to [1, rows, 1, 1]."""
    return v[None, :, None, None]


@triton.jit
def round_values(x, inverse, zero, offset, spec: tl.constexpr):
    """Levels of a tile's values plus MAGIC, fp32: half to even, clipped at the upper end, on a centred grid at both."""
    if spec.symmetric:
        rounded = x * rows4(inverse) + MAGIC
        return tl.minimum(rounded, MAGIC + spec.limit)
    elif spec.compact:
        rounded = x * rows4(inverse) + MAGIC
        if spec.clipped:
            rounded = tl.maximum(rounded, rows4(-zero + MAGIC))
        return tl.minimum(rounded, rows4(spec.top - zero + MAGIC))
    else:
        rounded = (x - rows4(offset)) * rows4(inverse) + MAGIC
        return tl.minimum(rounded, rows4(spec.top - zero + MAGIC))


@triton.jit
def reconstruct(level, scale, offset, spec: tl.constexpr):
    """Value of each level; scale and offset broadcast against it."""
    if spec.one_word:
        return level * scale
    elif spec.policy == "asymmetric":
        return level * scale + offset
    else:
        return tl.fma(level, scale, offset)


@triton.jit
def read_back(rounded, scale, offset, spec: tl.constexpr):
    """What every receiver will read for the values that `round_values` rounded."""
    return reconstruct(rounded - MAGIC, rows4(scale), rows4(offset), spec)


@triton.jit
def rounding_error(x, rounded, scale, offset, spec: tl.constexpr):
    """x minus what every receiver will read for it, x in `spec.unit`; one fused operation if `spec.capped`."""
    if spec.capped:
        return tl.fma(rounded - MAGIC, rows4(scale * -spec.unit), x)  # -0 stays -0
    else:
        return x - read_back(rounded, scale, offset, spec)


@triton.jit
def pack(rounded, zero, finite, index: tl.constexpr, spec: tl.constexpr):
    """Plane `index` of the codes of a tile: its words [lanes, rows, pieces], int32, one a chunk.

    An 8-bit plane has two words a chunk: index 0 and 1 are the words of the lower and the upper four values.
    """
    width: tl.constexpr = spec.width(0) if spec.bits == 8 else spec.width(index)
    bits = rounded.to(tl.int32, bitcast=True)
    unshift = zero.to(tl.int32) - MAGIC_BITS
    e = tl.arange(0, 8)[None, None, :, None]
    if spec.bits == 8:
        inside = (e // 4) == index
        word = tl.sum(tl.where(inside, bits << (8 * (e % 4)), 0), 2)
        word += (unshift * 0x01010101)[None, :, None]
    elif spec.plane_count == 1:
        ones: tl.constexpr = 0x11111111 if width == 4 else 0x5555
        word = tl.sum(bits << (width * e), 2) + (unshift * ones)[None, :, None]
    else:
        shift: tl.constexpr = spec.below(index)
        code = ((bits + rows4(unshift)) >> shift) & ((1 << width) - 1)
        word = tl.sum(code << (width * e), 2)
    return tl.where(finite[None, :, None], word, 0)


@triton.jit
def read_word(word, spec: tl.constexpr):
    """Grid of each group from its wire word: scale, zero (a float), offset; each [rows]."""
    if spec.symmetric:
        return widen(word & 0x7FFF, spec), constant(spec.limit, spec), constant(0.0, spec)
    elif spec.compact:
        field = (word & 0xFFFF) >> spec.bits
        scale = (field << (23 - spec.mantissa)).to(tl.float32, bitcast=True)
        return scale, (word & spec.top).to(tl.float32), constant(0.0, spec)
    else:
        one_sided = (word & 0x8000) != 0
        second = (word >> 16) & 0xFFFF
        zero = tl.where(one_sided, 0.0, second.to(tl.float32))
        offset = tl.where(one_sided, widen(second, spec), 0.0)
        return widen(word & 0x7FFF, spec), zero, offset


@triton.jit
def spread(word, spec: tl.constexpr):
    """Each word of a tile eight times, [lanes, rows, 8, pieces], all in the thread that holds it.

    Broadcasting would say the same, but lets the compiler give the copies to other threads and exchange the values through shared memory.
    """
    twice = tl.join(word, word)
    four = tl.join(twice, twice)
    return tl.join(four, four).reshape(spec.lanes, spec.rows, spec.pieces, 8).permute(0, 1, 3, 2)


@triton.jit
def as_mantissa(word, mask, spec: tl.constexpr):
    """2**23 + (word & mask) as fp32, for masks within 23 bits."""
    if spec.native:  # one instruction; the compiler makes two of it
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [word, mask, MANTISSA], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = (word & mask) | MANTISSA
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def levels_of_words(first, second, word, spec: tl.constexpr):
    """Levels of a tile from its code words and qparams, each times a power of two and with a factor that makes up for it.

    Args:
        first: plane 0, int32 [lanes, rows, pieces]; for 8 bits the lower four values of each chunk.
        second: for 8 bits the upper four values, else unused.
        word: qparams, int32 [rows].
    Returns:
        (level * 2**position, scale * 2**-position, offset), fp32, broadcast to [lanes, rows, 8, pieces]. Widths 4 and 8 only.
    """
    scale, zero, offset = read_word(word, spec)
    e = tl.arange(0, 8)[None, None, :, None]
    if spec.bits == 8:
        part = e % 4
        source = tl.where(e < 4, spread(first, spec), spread(second, spec))
        source = tl.where(part < 2, source, source >> 16)
        position = 8 * (part % 2)
        mask = 255 << position
    else:
        source = tl.where(e < 5, spread(first, spec), spread(first >> 20, spec))
        position = 4 * (e % 5)
        mask = 15 << position
    raised = as_mantissa(source, tl.broadcast_to(mask, source.shape), spec)
    factor = (1 << position).to(tl.float32)
    base = 8388608.0 + rows4(zero) * factor
    inverse_factor = ((127 << 23) - (position << 23)).to(tl.float32, bitcast=True)
    return raised - base, rows4(scale) * inverse_factor, rows4(offset)


@triton.jit
def levels_of_codes(code, word, spec: tl.constexpr):
    """As `levels_of_words`, from whole codes, int32 [lanes, rows, 8, pieces] (multi-plane widths)."""
    scale, zero, offset = read_word(word, spec)
    level = (code | MANTISSA).to(tl.float32, bitcast=True) - 8388608.0 - rows4(zero)
    return level, rows4(scale), rows4(offset)
