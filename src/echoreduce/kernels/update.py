"""Update: the paper's group residual u = x' - y / P and its averages, beside the caller's next kernel (the paper, Section 5.3).

y is read as the fp32 values that the codes stand for, not from the output, whose type has rounded it; the codes are still in the
workspace, because a call writes to the other half than the one before it. The local residual needs none of this: push and reduce have
it in registers.

Source: the paper, Sections 5.1 and 5.3; `reference.group_residuals`.
"""

import triton
import triton.language as tl

from echoreduce.kernels.one_shot import add_copies
from echoreduce.kernels.place import GATHER, landing
from echoreduce.kernels.signal import EPOCH
from echoreduce.kernels.state import compensate, remember
from echoreduce.kernels.tile import load_codes, load_values, step_rows

RUNTIME = ["numel", "groups", "pitch", "origin", "half", "area"]


@triton.jit
def _remember_group(x, state, value, group, real, numel, spec: tl.constexpr):
    """u = x' - y / P for one tile, IEEE division."""
    own = compensate(load_values(x, group, numel, spec), state, group, spec)
    if spec.world_size & (spec.world_size - 1) == 0:
        share = value * (1.0 / spec.world_size)
    else:
        share = tl.math.div_rn(value, tl.full([spec.lanes, spec.rows, 8, spec.pieces], spec.world_size, tl.float32))
    remember(own - share, tl.full([spec.rows], 0.0, tl.float32), state, group, real, spec)


@triton.jit(do_not_specialize=RUNTIME)
def update_kernel(
    x, m0, e0, m1, e1, w0, w1, d0, r0, d1, r1, table, control, numel, groups, pitch, origin, half, area,
    one_shot: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Refresh the averages of the call that has just ended on this rank; a program owns steps, no flags, no order.

    Reads: x, averages, codes of the sum (one-shot: of the P copies). Writes: averages.
    """
    P: tl.constexpr = spec.world_size
    epoch = tl.load(control + EPOCH)
    state = (m0, e0, m1, e1, w0, w1, d0, r0, d1, r1)
    numel = numel.to(tl.int64)
    groups = groups.to(tl.int64)
    pitch = pitch.to(tl.int64)
    origin = origin.to(tl.int64)
    half = half.to(tl.int64)
    area = area.to(tl.int64)
    done = epoch == epoch
    total = tl.cdiv(groups, spec.rows)
    step = tl.program_id(0)
    while step < total:
        row, real = step_rows(step, groups, spec)
        row = row.to(tl.int64)
        if one_shot:
            value = add_copies(table, groups, row, done, epoch, half, area, spec)
            _remember_group(x, state, value, row + origin, real, numel, spec)
        else:
            for owner in tl.static_range(P):
                here = landing(table, spec.rank, GATHER, owner, epoch, half, area, spec)
                value = load_codes(here, groups, row, done, spec)
                _remember_group(x, state, value, row + origin + owner * pitch, real, numel, spec)
        step += tl.num_programs(0)
