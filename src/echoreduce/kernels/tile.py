"""Tiles between memory and registers: values of the caller's tensor, feedback state, codes and qparams of the workspace.

One step of a block is `spec.rows` consecutive groups of one segment. The last step of a segment may reach beyond it: its surplus rows
read what the last group reads and write nothing. Where the tensor ends inside a segment (`spec.even` is false), missing values repeat
the tensor's last value, as in `partition`.

Source: docs/kernels.md.
"""

import triton
import triton.language as tl

from echoreduce.kernels.rounding import levels_of_codes, levels_of_words, nan_word, pack, reconstruct, spread


@triton.jit
def step_rows(step, groups, spec: tl.constexpr):
    """Groups of a step inside its segment: (index clamped to the last group, whether it is a group of the segment); [rows]."""
    row = step * spec.rows + tl.arange(0, spec.rows)
    return tl.minimum(row, groups - 1), row < groups


@triton.jit
def lane_offsets(spec: tl.constexpr):
    """Offset of each value of a thread's first chunk inside its group, int32 [lanes, 1, 8]."""
    return tl.arange(0, spec.lanes)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]


@triton.jit
def at_values(x, offset, spec: tl.constexpr):
    """x + offset of each value, pointers [lanes, rows, 8], with a hint that puts neighbouring threads on the lanes of a group.

    Triton orders the dimensions of a tile by how contiguous they are. Lanes and rows are equally so, and which of them goes first
    depends on the version (3.6: lanes, 3.7 and later: rows). Rows first spreads a warp's loads over memory and takes every maximum of
    a group through shared memory, so lanes are called a little more contiguous than they are. Nothing else reads that figure: accesses
    are as wide as the last dimension's, which is larger (`Spec.near`). An argument's hint is lost: it has to be made on the sum.
    """
    near: tl.constexpr = spec.near(8)
    return tl.max_contiguous(x + offset, [near, 1, 8])


@triton.jit
def at_words(plane, offset, spec: tl.constexpr):
    """plane + offset of each word, pointers [lanes, rows, pieces], as `at_values`."""
    near: tl.constexpr = spec.near(spec.pieces)
    run: tl.constexpr = spec.pieces
    return tl.max_contiguous(plane + offset, [near, 1, run])


@triton.jit
def gather_pieces(a, b, c, d, spec: tl.constexpr):
    """Chunks of a tile, each [lanes, rows, 8], to one tensor [lanes, rows, 8, pieces]; as many are used as there are pieces."""
    if spec.pieces == 4:
        return tl.join(tl.join(a, c), tl.join(b, d)).reshape(spec.lanes, spec.rows, 8, 4)
    elif spec.pieces == 2:
        return tl.join(a, b)
    else:
        return a[:, :, :, None]


@triton.jit
def part_pieces(x, spec: tl.constexpr):
    """Inverse of `gather_pieces`; unused ones repeat the first."""
    if spec.pieces == 4:
        ac, bd = tl.split(x.reshape(spec.lanes, spec.rows, 8, 2, 2))
        a, c = tl.split(ac)
        b, d = tl.split(bd)
        return a, b, c, d
    elif spec.pieces == 2:
        a, b = tl.split(x)
        return a, b, a, b
    else:
        a = x.reshape(spec.lanes, spec.rows, 8)
        return a, a, a, a


@triton.jit
def to_fp32(x, spec: tl.constexpr):
    """Data as fp32, exactly."""
    if spec.dtype == "bf16" and not spec.native:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def from_fp32(x, spec: tl.constexpr):
    """fp32 to the data's type, rounded half to even."""
    if spec.dtype == "fp32":
        return x
    elif spec.dtype == "fp16":
        return x.to(tl.float16)
    else:
        return to_bf16(x, spec)


@triton.jit
def to_bf16(x, spec: tl.constexpr):
    """fp32 to bf16, rounded half to even; the interpreter's own conversion cuts off."""
    if spec.native:
        return x.to(tl.bfloat16)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_values(x, group, numel, spec: tl.constexpr):
    """Values of the groups `group` (int64 [rows], counted in the padded tensor) as fp32 [lanes, rows, 8, pieces].

    Reads each value once; one 16-byte load a chunk of 16-bit data.
    """
    start = (group * spec.group_size)[None, :, None] + lane_offsets(spec)
    stride: tl.constexpr = spec.lanes * 8
    last: tl.constexpr = spec.pieces - 1
    two: tl.constexpr = last if last < 1 else 1
    three: tl.constexpr = last if last < 2 else 2
    if spec.even:
        a = tl.load(at_values(x, start, spec))
        b = tl.load(at_values(x, start + two * stride, spec))
        c = tl.load(at_values(x, start + three * stride, spec))
        d = tl.load(at_values(x, start + last * stride, spec))
    elif (tl.max(group, 0) + 1) * spec.group_size <= numel:
        a = tl.load(at_values(x, start, spec))
        b = tl.load(at_values(x, start + two * stride, spec))
        c = tl.load(at_values(x, start + three * stride, spec))
        d = tl.load(at_values(x, start + last * stride, spec))
    else:
        end = numel - 1
        a = tl.load(x + tl.minimum(start, end))
        b = tl.load(x + tl.minimum(start + two * stride, end))
        c = tl.load(x + tl.minimum(start + three * stride, end))
        d = tl.load(x + tl.minimum(start + last * stride, end))
    return to_fp32(gather_pieces(a, b, c, d, spec), spec)


@triton.jit
def store_values(y, group, real, numel, value, spec: tl.constexpr):
    """Write a tile's values (fp32) to the caller's tensor in its own type; padding and surplus rows are left out."""
    start = (group * spec.group_size)[None, :, None] + lane_offsets(spec)
    stride: tl.constexpr = spec.lanes * 8
    a, b, c, d = part_pieces(from_fp32(value, spec), spec)
    if spec.even:
        keep = real[None, :, None]
        store_pieces(y, start, a, b, c, d, keep, keep, keep, keep, stride, spec)
    elif (tl.max(group, 0) + 1) * spec.group_size <= numel:
        keep = real[None, :, None]
        store_pieces(y, start, a, b, c, d, keep, keep, keep, keep, stride, spec)
    else:
        room = tl.where(real[None, :, None], numel - start, 0)
        store_pieces(y, start, a, b, c, d, room > 0, room > stride, room > 2 * stride, room > 3 * stride, stride, spec)


@triton.jit
def store_pieces(y, start, a, b, c, d, ka, kb, kc, kd, stride: tl.constexpr, spec: tl.constexpr):
    tl.store(at_values(y, start, spec), a, mask=ka)
    if spec.pieces > 1:
        tl.store(at_values(y, start + stride, spec), b, mask=kb)
    if spec.pieces > 2:
        tl.store(at_values(y, start + 2 * stride, spec), c, mask=kc)
        tl.store(at_values(y, start + 3 * stride, spec), d, mask=kd)


@triton.jit
def words_of(row, spec: tl.constexpr):
    """Offset of each word of a tile in a plane with one word a chunk, int64 [lanes, rows, pieces]; a thread's words are neighbours."""
    lane = tl.arange(0, spec.lanes)[:, None, None] * spec.pieces + tl.arange(0, spec.pieces)[None, None, :]
    return (row * (spec.lanes * spec.pieces))[None, :, None] + lane


@triton.jit
def qparams_at(landing, groups, spec: tl.constexpr):
    """Address of the qparams of a landing area of `groups` groups: behind the codes, at a multiple of 16 bytes."""
    return landing + (groups * spec.code_bytes + 15) // 16 * 16


@triton.jit
def store_codes(landing, groups, row, real, rounded, zero, word, finite, spec: tl.constexpr):
    """Write a tile's codes and qparams to one landing area.

    Args:
        landing: address of the area, int64, 16-byte aligned; code planes first, qparams after `groups` groups of them.
        row: int64 [rows], groups inside the area; `real` says which are written.
    """
    planes: tl.constexpr = spec.plane_count
    at = words_of(row, spec)
    keep = real[None, :, None]
    if spec.bits == 8:
        plane = tl.multiple_of(landing.to(tl.pointer_type(tl.int32)), 16)
        at = words_of(2 * row, spec)
        tl.store(at_words(plane, at, spec), pack(rounded, zero, finite, 0, spec), mask=keep)
        tl.store(at_words(plane, at + spec.lanes * spec.pieces, spec), pack(rounded, zero, finite, 1, spec), mask=keep)
    else:
        for index in tl.static_range(planes):
            _store_plane(landing, groups, at, keep, pack(rounded, zero, finite, index, spec), index, spec)
    store_word(landing, groups, row, real, word, spec)


@triton.jit
def plane_at(landing, groups, index: tl.constexpr, spec: tl.constexpr):
    """Pointer to code plane `index` of a landing area; its element holds the plane's bits of one chunk."""
    kind: tl.constexpr = tl.int8 if spec.width(index) == 1 else (tl.int16 if spec.width(index) == 2 else tl.int32)
    before: tl.constexpr = spec.group_size * spec.below(index) // 8
    return tl.multiple_of((landing + groups * before).to(tl.pointer_type(kind)), 16)


@triton.jit
def _store_plane(landing, groups, at, keep, words, index: tl.constexpr, spec: tl.constexpr):
    plane = plane_at(landing, groups, index, spec)
    tl.store(at_words(plane, at, spec), words.to(plane.dtype.element_ty), mask=keep)


@triton.jit
def store_rows(where, value, keep, spec: tl.constexpr):
    """Write one int16 or int32 number a group; [rows] each.

    Every thread that holds a number writes it, threads of a group the same one: `tl.store` would first hand the numbers to as many threads
    as there are, through shared memory and two barriers.
    """
    if spec.native:
        address = where.to(tl.int64)
        if value.dtype == tl.int16:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; .reg .b16 t; setp.ne.s32 p, $3, 0; cvt.u16.u32 t, $2; @p st.global.b16 [$1], t; mov.u32 $0, 0; }",
                "=r,l,r,r", [address, value.to(tl.int32), keep.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r,r", [address, value, keep.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    else:
        tl.store(where, value, mask=keep)


@triton.jit
def store_word(landing, groups, row, real, word, spec: tl.constexpr):
    """Write the qparams of a tile's groups."""
    if spec.one_word:
        store_rows(qparams_at(landing, groups, spec).to(tl.pointer_type(tl.int16)) + row, word.to(tl.int16), real, spec)
    else:
        store_rows(qparams_at(landing, groups, spec).to(tl.pointer_type(tl.int32)) + row, word, real, spec)


@triton.jit
def load_word(landing, groups, row, arrived, spec: tl.constexpr):
    """Qparams of a tile's groups, int32 [rows]; those of a group that is not finite if `arrived` is false (a wait was given up)."""
    qparams = qparams_at(landing, groups, spec)
    if spec.one_word:
        word = tl.load(qparams.to(tl.pointer_type(tl.int16)) + row).to(tl.int32)
    else:
        word = tl.load(qparams.to(tl.pointer_type(tl.int32)) + row)
    return tl.where(arrived, word, nan_word(spec))


@triton.jit
def load_words(landing, row, spec: tl.constexpr):
    """Code words of a tile, int32 [lanes, rows, pieces], 4 bits only."""
    return tl.load(at_words(tl.multiple_of(landing.to(tl.pointer_type(tl.int32)), 16), words_of(row, spec), spec))


@triton.jit
def load_codes(landing, groups, row, arrived, spec: tl.constexpr):
    """What a landing area holds for a tile's groups, fp32 [lanes, rows, 8, pieces]; NaN if `arrived` is false."""
    level, scale, offset = load_levels(landing, groups, row, arrived, spec)
    return reconstruct(level, scale, offset, spec)


@triton.jit
def add_codes(total, landing, groups, row, arrived, unit: tl.constexpr, spec: tl.constexpr):
    """total + unit * `load_codes`; one fused operation if `spec.capped`, else the unit must be 1."""
    level, scale, offset = load_levels(landing, groups, row, arrived, spec)
    if spec.capped:
        return tl.fma(level, scale * unit, total)
    else:
        return total + reconstruct(level, scale, offset, spec)


@triton.jit
def load_levels(landing, groups, row, arrived, spec: tl.constexpr):
    """(level, scale, offset) of `load_codes`, each fp32 and [lanes, rows, 8, pieces] or broadcast to it."""
    at = words_of(row, spec)
    word = load_word(landing, groups, row, arrived, spec)
    if spec.bits == 8:
        plane = tl.multiple_of(landing.to(tl.pointer_type(tl.int32)), 16)
        at = words_of(2 * row, spec)
        further = at + spec.lanes * spec.pieces
        return levels_of_words(tl.load(at_words(plane, at, spec)), tl.load(at_words(plane, further, spec)), word, spec)
    elif spec.bits == 4:
        words = load_words(landing, row, spec)
        return levels_of_words(words, words, word, spec)
    else:
        return levels_of_codes(_load_planes(landing, groups, at, spec), word, spec)


@triton.jit
def _load_planes(landing, groups, at, spec: tl.constexpr):
    """Codes of several planes put together, int32 [lanes, rows, 8, pieces]."""
    planes: tl.constexpr = spec.plane_count
    code = tl.full([spec.lanes, spec.rows, 8, spec.pieces], 0, tl.int32)
    for index in tl.static_range(planes):
        code |= _load_plane(landing, groups, at, index, spec)
    return code


@triton.jit
def _load_plane(landing, groups, at, index: tl.constexpr, spec: tl.constexpr):
    words = tl.load(at_words(plane_at(landing, groups, index, spec), at, spec)).to(tl.int32)
    e = tl.arange(0, 8)[None, None, :, None]
    return ((spread(words, spec) >> (spec.width(index) * e)) & spec.plane_mask(index)) << spec.below(index)
