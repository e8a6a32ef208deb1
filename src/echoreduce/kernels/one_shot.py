"""One-shot in one launch: every rank sends the codes of its whole tensor to every rank, and every rank adds the same P copies.

One hop instead of two and one rounding a contribution; at P = 2 the same bytes as two-shot. Blocks are specialized and ordered as in
`two_shot`: the first `pushers` push, the others add up. `groups` counts the groups of the whole padded tensor here, which is one
segment as far as chunks and landing areas go.

Source: docs/design.md, Section 3; docs/kernels.md.
"""

import triton
import triton.language as tl

from echoreduce.kernels.gather import leave
from echoreduce.kernels.place import PUSH, describe, flag, flag_slot, landing, leave_card, workspace
from echoreduce.kernels.rounding import fit, round_values, rounding_error
from echoreduce.kernels.signal import EPOCH, finish, publish, wait
from echoreduce.kernels.state import compensate, remember
from echoreduce.kernels.tile import add_codes, load_codes, load_values, step_rows, store_codes

RUNTIME = ["numel", "groups", "pitch", "origin", "half", "area", "digest", "code", "patience", "steps", "pushers"]


@triton.jit
def push_all(first, stop, stride, x, state, call, code, epoch, spec: tl.constexpr):
    """One block's share of the push stage: its codes to every rank, ourselves included.

    Reads: x, once; state, once. Writes: codes P times; state, once (local residual).
    Publishes: (PUSH, rank, chunk) = epoch in every rank's flags, release.sys after a block barrier. Waits for nothing.
    """
    P: tl.constexpr = spec.world_size
    table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps = call
    total = tl.cdiv(groups, spec.rows)
    chunk = first
    while chunk < stop:
        step = chunk * steps
        end = tl.minimum(chunk * steps + steps, total)
        while step < end:
            row, real = step_rows(step, groups, spec)
            at = row.to(tl.int64)
            group = at + origin
            value = compensate(load_values(x, group, numel, spec), state, group, spec)
            scale, inverse, zero, offset, word, finite = fit(value, spec)
            rounded = round_values(value, inverse, zero, offset, spec)
            for distance in tl.static_range(1, P + 1):
                there = landing(table, spec.peer(distance), PUSH, spec.rank, epoch, half, area, spec)
                store_codes(there, groups, at, real, rounded, zero, word, finite, spec)
            if spec.residual == "local":
                remember(rounding_error(value, rounded, scale, offset, spec), scale, state, group, real, spec)
            step += 1
        if chunk == 0:
            for distance in tl.static_range(1, P):
                leave_card(table, spec.peer(distance), numel, code, epoch, spec)
        tl.debug_barrier()
        for distance in tl.static_range(1, P + 1):
            publish(workspace(table, spec.peer(distance)), flag_slot(PUSH, spec.rank, chunk, spec), epoch, digest)
        chunk += stride


@triton.jit
def add_copies(table, groups, row, arrived, epoch, half, area, spec: tl.constexpr):
    """What the P copies of a tile stand for, added in rank order; fp32 [lanes, rows, 8, pieces]."""
    P: tl.constexpr = spec.world_size
    total = load_codes(landing(table, spec.rank, PUSH, 0, epoch, half, area, spec), groups, row, arrived, spec)
    for source in tl.static_range(1, P):
        here = landing(table, spec.rank, PUSH, source, epoch, half, area, spec)
        total = add_codes(total, here, groups, row, arrived, 1.0, spec)
    return total


@triton.jit
def add_all(first, stop, stride, y, call, epoch, spec: tl.constexpr):
    """One block's share of the sum: waits for (PUSH, every rank, chunk) >= epoch, acquire.sys.

    Reads: P copies of the codes. Writes: y, once.
    """
    P: tl.constexpr = spec.world_size
    table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps = call
    total = tl.cdiv(groups, spec.rows)
    chunk = first
    while chunk < stop:
        arrived = epoch == epoch
        for distance in tl.static_range(1, P + 1):
            there = flag(table, PUSH, spec.peer(distance), chunk, spec)
            arrived = wait(there, epoch, digest, control, record, PUSH, spec.peer(distance), chunk, patience, spec) & arrived
        step = chunk * steps
        end = tl.minimum(chunk * steps + steps, total)
        while step < end:
            row, real = step_rows(step, groups, spec)
            value = add_copies(table, groups, row.to(tl.int64), arrived, epoch, half, area, spec)
            leave(y, value, row.to(tl.int64) + origin, real, numel, spec)
            step += 1
        chunk += stride


@triton.jit(do_not_specialize=RUNTIME)
def one_shot_kernel(
    x, y, m0, e0, m1, e1, w0, w1, d0, r0, d1, r1,
    table, control, record, numel, groups, pitch, origin, half, area, digest, code, patience, steps, pushers,
    spec: tl.constexpr,
):  # fmt: skip
    """One rank's whole call. A program owns chunks of one stage.

    Tensor passes: x once, y once, state once each way, codes P times out and in ((P - 1) of them over links).
    """
    epoch = tl.load(control + EPOCH) + 1
    state = (m0, e0, m1, e1, w0, w1, d0, r0, d1, r1)
    call = describe(table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps)
    chunks = tl.cdiv(tl.cdiv(groups, spec.rows), steps)
    pid = tl.program_id(0)
    if pid < pushers:
        push_all(pid, chunks, pushers, x, state, call, code, epoch, spec)
    else:
        add_all(pid - pushers, chunks, tl.num_programs(0) - pushers, y, call, epoch, spec)
    finish(control, epoch)
