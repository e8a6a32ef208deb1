"""Feedback state between memory and registers: correction on entry, averages after the rounding; the twin of `feedback.compensator`.

State is stored for the padded tensor in the quantizer's own domain, so a tile reads and writes it without a look at the caller's
tensor. An average is one tensor of values; for the float8 types, int32 words of four, in the order in which threads hold them (as 8-bit
codes on the wire: lower halves of a group's chunks, then upper halves, lane by lane), and one int32 exponent a group.

Source: `feedback.compensator`; docs/design.md, Section 5.
"""

import triton
import triton.language as tl

from echoreduce.kernels.rotation import hadamard
from echoreduce.kernels.rounding import rows4
from echoreduce.kernels.tile import at_values, at_words, gather_pieces, lane_offsets, part_pieces, store_pieces, store_rows, to_bf16


@triton.jit
def power_of_two(exponent):
    """2.0**exponent for int32 exponents in -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ceil_log2(x):
    """Smallest integer e with 2**e >= x for fp32 x >= 0; -127 or -126 for zero and subnormals, as in the reference."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 + tl.where((bits & 0x7FFFFF) != 0, 1, 0)


@triton.jit
def _four_from_words(word, spec: tl.constexpr):
    """The four float8 numbers of each int32 word, lowest byte first, as fp32 tensors of the word's shape; exact."""
    if spec.native_float8:
        if spec.state == "float8_e4m3":
            return tl.inline_asm_elementwise(
                """{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q;
                mov.b32 {l, h}, $4;
                cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;
                mov.b32 {a, b}, p; mov.b32 {c, d}, q;
                cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }""",
                "=f,=f,=f,=f,r", [word], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q;
                mov.b32 {l, h}, $4;
                cvt.rn.f16x2.e5m2x2 p, l; cvt.rn.f16x2.e5m2x2 q, h;
                mov.b32 {a, b}, p; mov.b32 {c, d}, q;
                cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }""",
                "=f,=f,=f,=f,r", [word], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
    else:
        return (
            _from_byte(word << 24, spec), _from_byte(word << 16, spec), _from_byte(word << 8, spec), _from_byte(word, spec),
        )  # fmt: skip


@triton.jit
def _from_byte(word, spec: tl.constexpr):
    """The float8 number in the highest byte of each word; its exponent and mantissa become fp32's, then a power of two moves the bias."""
    if spec.state == "float8_e4m3":
        return ((word >> 4) & -0x7810_0000).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120; mask 0x87F00000
    else:
        return ((word >> 3) & -0x7020_0000).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2**112; mask 0x8FE00000


@triton.jit
def _four_to_words(a, b, c, d, finite, spec: tl.constexpr):
    """Four fp32 tensors within 256 in magnitude to float8 words, rounded half to even; what is not finite becomes zero.

    The device's conversion turns NaN and what is too large into the type's largest codes, which no number within 256 has. Where the
    caller has not cleared such values, these bytes are, four at a time; with `spec.clear_groups` whole groups that are not `finite`.
    """
    if spec.native_float8:
        if spec.state == "float8_e4m3":
            word = tl.inline_asm_elementwise(
                """{ .reg .b16 l, h;
                cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;
                mov.b32 $0, {l, h}; }""",
                "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
            above: tl.constexpr = 0x02020202
        else:
            word = tl.inline_asm_elementwise(
                """{ .reg .b16 l, h;
                cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3;
                mov.b32 $0, {l, h}; }""",
                "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
            above: tl.constexpr = 0x05050505
        if spec.clear_groups:
            word = tl.where(finite, word, 0)
        elif spec.clear_bytes:
            word = tl.inline_asm_elementwise(
                """{ .reg .b32 t;
                and.b32 t, $1, 0x7F7F7F7F; add.u32 t, t, $2; prmt.b32 t, t, 0, 0xBA98; not.b32 t, t; and.b32 $0, $1, t; }""",
                "=r,r,r", [word, above], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        return word
    else:
        low = _to_byte(a, spec) | (_to_byte(b, spec) << 8)
        return low | (_to_byte(c, spec) << 16) | (_to_byte(d, spec) << 24)


@triton.jit
def _to_byte(value, spec: tl.constexpr):
    """fp32 within 256 in magnitude to the bits of a float8 number, in integer arithmetic."""
    value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    if spec.state == "float8_e4m3":
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
        smallest: tl.constexpr = 0.015625
    else:
        normal = ((magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21) - (112 << 2)
        small = ((size * 65536.0 + 12582912.0) - 12582912.0).to(tl.int32)
        smallest: tl.constexpr = 0.00006103515625
    return tl.where(size < smallest, small, normal) | tl.where(bits < 0, 0x80, 0)


@triton.jit
def _words_of(group, spec: tl.constexpr):
    """Offsets of the words of a tile's lower half chunks, [lanes, rows, pieces]; the upper halves follow lanes * pieces words on."""
    lane = tl.arange(0, spec.lanes)[:, None, None] * spec.pieces + tl.arange(0, spec.pieces)[None, None, :]
    return (group * (spec.group_size // 4))[None, :, None] + lane


@triton.jit
def load_float8(values, group, spec: tl.constexpr):
    """Stored float8 numbers of a tile, fp32 [lanes, rows, 8, pieces], not yet scaled."""
    at = _words_of(group, spec)
    a, b, c, d = _four_from_words(tl.load(at_words(values, at, spec)), spec)
    e, f, g, h = _four_from_words(tl.load(at_words(values, at + spec.lanes * spec.pieces, spec)), spec)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd).reshape(spec.lanes, spec.rows, spec.pieces, 8).permute(0, 1, 3, 2)


@triton.jit
def store_float8(values, value, step, group, real, spec: tl.constexpr):
    """Inverse of `load_float8`; `step` as in `store_average`."""
    octets = value.permute(0, 1, 3, 2).reshape(spec.lanes, spec.rows, spec.pieces, 2, 2, 2)
    even, odd = tl.split(octets)
    ae, cg = tl.split(even)
    bf, dh = tl.split(odd)
    a, e = tl.split(ae)
    b, f = tl.split(bf)
    c, g = tl.split(cg)
    d, h = tl.split(dh)
    at = _words_of(group, spec)
    keep = real[None, :, None]
    finite = tl.broadcast_to((step < float("inf"))[None, :, None], a.shape)
    tl.store(at_words(values, at, spec), _four_to_words(a, b, c, d, finite, spec), mask=keep)
    tl.store(at_words(values, at + spec.lanes * spec.pieces, spec), _four_to_words(e, f, g, h, finite, spec), mask=keep)


@triton.jit
def load_average(values, exponents, group, spec: tl.constexpr):
    """One average of a tile's groups, fp32 [lanes, rows, 8, pieces]; reads it once."""
    if spec.float8:
        exponent = tl.load(exponents + group)
        return load_float8(values, group, spec) * rows4(power_of_two(exponent))
    else:
        return _load_plain(values, group, spec)


@triton.jit
def _load_plain(values, group, spec: tl.constexpr):
    at = (group * spec.group_size)[None, :, None] + lane_offsets(spec)
    stride: tl.constexpr = spec.lanes * 8
    last: tl.constexpr = spec.pieces - 1
    two: tl.constexpr = last if last < 1 else 1
    three: tl.constexpr = last if last < 2 else 2
    a = tl.load(at_values(values, at, spec))
    b = tl.load(at_values(values, at + two * stride, spec))
    c = tl.load(at_values(values, at + three * stride, spec))
    d = tl.load(at_values(values, at + last * stride, spec))
    stored = gather_pieces(a, b, c, d, spec)
    if spec.state == "bf16" and not spec.native:
        return (stored.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def store_average(value, step, values, exponents, group, real, bounded: tl.constexpr, spec: tl.constexpr):
    """Write one average of a tile's groups.

    Args:
        value: fp32 [lanes, rows, 8, pieces], times `spec.unit`, finite; a bounded float8 average may hold what is not finite, which is
            stored as zero.
        step: scale of the grid on which each group was rounded, fp32 [rows], NaN if the group is not finite; sets the float8
            exponent if `bounded`.
    """
    if spec.float8:
        if bounded:
            bound = spec.reach * tl.where(step < float("inf"), step, 0.0)
        else:
            bound = tl.max(tl.max(tl.max(tl.abs(value), 3), 2), 0)
        exponent = tl.minimum(tl.maximum(ceil_log2(bound) - 8, -126), 126)
        store_rows(exponents + group, exponent, real, spec)
        store_float8(values, value * rows4(power_of_two(-exponent) * (1.0 / spec.unit)), step, group, real, spec)
    else:
        stored = value
        if spec.state == "bf16":
            stored = to_bf16(value, spec)
        a, b, c, d = part_pieces(stored, spec)
        keep = real[None, :, None]
        at = (group * spec.group_size)[None, :, None] + lane_offsets(spec)
        store_pieces(values, at, a, b, c, d, keep, keep, keep, keep, spec.lanes * 8, spec)


@triton.jit
def compensate(x, state, group, spec: tl.constexpr):
    """x' = x + c in the quantizer's domain (Eq. 10); reads each average once, nothing at the first site of a pass.

    Args:
        x: values of a tile as the caller gave them, fp32.
    Returns:
        x' times `spec.unit`.
        state: (m0, e0, m1, e1, weight0, weight1, decay0, 1 - decay0, decay1, 1 - decay1), m values and e exponents of an average.
    """
    if spec.rotate:
        x = hadamard(x, spec)
        if spec.unit == 1.0:
            x = x * spec.norm
    if spec.averages == 1 and spec.plain and spec.float8 and not spec.first:
        m0, e0, m1, e1, weight0, weight1, decay0, rest0, decay1, rest1 = state
        x = tl.fma(load_float8(m0, group, spec), rows4(power_of_two(tl.load(e0 + group)) * spec.unit), x)  # exact product
    elif spec.averages > 0 and not spec.first:
        m0, e0, m1, e1, weight0, weight1, decay0, rest0, decay1, rest1 = state
        correction = load_average(m0, e0, group, spec)
        if not spec.plain:
            correction = correction * weight0
        if spec.averages == 2:
            correction = correction + load_average(m1, e1, group, spec) * weight1
        x = x + correction
    return x


@triton.jit
def _refresh(residual, step, values, exponents, decay, rest, group, real, index: tl.constexpr, spec: tl.constexpr):
    """m <- decay m + (1 - decay) u (Eq. 11) for one average."""
    value = residual
    if spec.decays(index):
        value = residual * rest
        if not spec.first:
            value = load_average(values, exponents, group, spec) * decay + value
    store_average(value, step, values, exponents, group, real, spec.bounded(index), spec)


@triton.jit
def remember(residual, step, state, group, real, spec: tl.constexpr):
    """Refresh the averages with the residual of a tile; what is not finite counts as zero and never reaches the next site."""
    m0, e0, m1, e1, weight0, weight1, decay0, rest0, decay1, rest1 = state
    if not (spec.clear_groups or spec.clear_bytes):  # else the conversion does it
        residual = tl.where(tl.abs(residual) < float("inf"), residual, 0.0)
    _refresh(residual, step, m0, e0, decay0, rest0, group, real, 0, spec)
    if spec.averages == 2:
        _refresh(residual, step, m1, e1, decay1, rest1, group, real, 1, spec)
