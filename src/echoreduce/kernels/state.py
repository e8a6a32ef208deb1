"""Feedback state between memory and registers: correction on entry, averages after the rounding; the twin of `feedback.compensator`.

State is stored for the padded tensor in the quantizer's own domain, so a tile reads and writes it without a look at the caller's
tensor. An average is one tensor of values and, for the float8 types, one int8 exponent a group.

Source: `feedback.compensator`; docs/design.md, Section 5.
"""

import triton
import triton.language as tl

from echoreduce.kernels.rotation import hadamard
from echoreduce.kernels.rounding import rows4
from echoreduce.kernels.tile import gather_pieces, lane_offsets, part_pieces, to_bf16


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
def from_float8(stored, spec: tl.constexpr):
    """Bits of a float8 number (int8) to fp32, exactly."""
    if spec.native_float8:
        if spec.state == "float8_e4m3":
            return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return stored.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        bits = stored.to(tl.int32) & 0xFF
        if spec.state == "float8_e4m3":
            magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120 moves the exponent's bias
        else:
            magnitude = ((bits & 0x7F) << 21).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2**112
        return tl.where(bits >= 0x80, -magnitude, magnitude)


@triton.jit
def to_float8(value, spec: tl.constexpr):
    """fp32 within the type's range to float8, rounded half to even; int8 bits."""
    if spec.native_float8:
        if spec.state == "float8_e4m3":
            return value.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        else:
            return value.to(tl.float8e5).to(tl.int8, bitcast=True)
    else:
        return _to_float8_by_bits(value, spec)


@triton.jit
def _to_float8_by_bits(value, spec: tl.constexpr):
    """As `to_float8`, in integer arithmetic."""
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
    sign = tl.where(bits < 0, 0x80, 0)
    return (tl.where(size < smallest, small, normal) | sign).to(tl.int8)


@triton.jit
def load_average(values, exponents, group, spec: tl.constexpr):
    """One average of a tile's groups, fp32 [rows, lanes, 8, pieces]; reads it once."""
    at = (group * spec.group_size)[:, None, None] + lane_offsets(spec)
    stride: tl.constexpr = spec.lanes * 8
    last: tl.constexpr = spec.pieces - 1
    two: tl.constexpr = last if last < 1 else 1
    three: tl.constexpr = last if last < 2 else 2
    a = tl.load(values + at)
    b = tl.load(values + (at + two * stride))
    c = tl.load(values + (at + three * stride))
    d = tl.load(values + (at + last * stride))
    stored = gather_pieces(a, b, c, d, spec)
    if spec.float8:
        exponent = tl.load(exponents + group).to(tl.int32)
        return from_float8(stored, spec) * rows4(power_of_two(exponent))
    elif spec.state == "bf16" and not spec.native:
        return (stored.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def store_average(value, step, values, exponents, group, real, bounded: tl.constexpr, spec: tl.constexpr):
    """Write one average of a tile's groups.

    Args:
        value: fp32 [rows, lanes, 8, pieces], finite.
        step: scale of the grid on which each group was rounded, fp32 [rows]; sets the float8 exponent if `bounded`.
    """
    if spec.float8:
        if bounded:
            bound = 0.5 * tl.where(step < float("inf"), step, 0.0)
        else:
            bound = tl.max(tl.max(tl.max(tl.abs(value), 3), 2), 1)
        exponent = tl.minimum(tl.maximum(ceil_log2(bound) - 8, -126), 126)
        tl.store(exponents + group, exponent.to(tl.int8), mask=real)
        stored = to_float8(value * rows4(power_of_two(-exponent)), spec)
    elif spec.state == "bf16":
        stored = to_bf16(value, spec)
    else:
        stored = value
    a, b, c, d = part_pieces(stored, spec)
    where = values + (group * spec.group_size)[:, None, None] + lane_offsets(spec)
    stride: tl.constexpr = spec.lanes * 8
    keep = real[:, None, None]
    tl.store(where, a, mask=keep)
    if spec.pieces > 1:
        tl.store(where + stride, b, mask=keep)
    if spec.pieces > 2:
        tl.store(where + 2 * stride, c, mask=keep)
        tl.store(where + 3 * stride, d, mask=keep)


@triton.jit
def compensate(x, state, group, spec: tl.constexpr):
    """x' = x + c in the quantizer's domain (Eq. 10); reads each average once, nothing at the first site of a pass.

    Args:
        x: values of a tile as the caller gave them, fp32.
        state: (m0, e0, m1, e1, weight0, weight1, decay0, 1 - decay0, decay1, 1 - decay1), m values and e exponents of an average.
    """
    if spec.rotate:
        x = hadamard(x, spec)
    if spec.averages > 0 and not spec.first:
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
    residual = tl.where(tl.abs(residual) < float("inf"), residual, 0.0)
    _refresh(residual, step, m0, e0, decay0, rest0, group, real, 0, spec)
    if spec.averages == 2:
        _refresh(residual, step, m1, e1, decay1, rest1, group, real, 1, spec)
