"""Push: quantize the segments that other ranks own and write them to their owners (the paper, Section 4.1)."""

import triton
import triton.language as tl

from echoreduce.kernels.place import PUSH, flag_slot, landing, leave_card, workspace
from echoreduce.kernels.rounding import fit, round_values, rounding_error
from echoreduce.kernels.signal import publish
from echoreduce.kernels.state import compensate, remember
from echoreduce.kernels.tile import load_values, step_rows, store_codes


@triton.jit
def push(first, stop, stride, x, state, call, code, epoch, spec: tl.constexpr):
    """One block's share of the push stage: chunks first, first + stride, ... below stop, for each other rank's segment.

    Reads: values pushed, once; state, once. Writes: codes and qparams to the owner; state, once (local residual).
    Publishes: (PUSH, rank, chunk) = epoch in the owner's flags, release.sys after a block barrier. Waits for nothing.
    """
    P: tl.constexpr = spec.world_size
    chunk = first
    while chunk < stop:
        if P == 2:
            _push_to(spec.peer(1), chunk, x, state, call, code, epoch, spec)
        else:  # a loop, not copies of its body, which took 38 s to compile for eight ranks; one peer needs no loop
            distance = epoch * 0 + 1
            while distance < P:
                _push_to((spec.rank + distance) % P, chunk, x, state, call, code, epoch, spec)
                distance += 1
        chunk += stride


@triton.jit
def _push_to(owner, chunk, x, state, call, code, epoch, spec: tl.constexpr):
    """One chunk of one owner's segment."""
    table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps = call
    there = landing(table, owner, PUSH, spec.rank, epoch, half, area, spec)
    step = chunk * steps
    end = tl.minimum(step + steps, tl.cdiv(groups, spec.rows))
    while step < end:
        row, real = step_rows(step, groups, spec)
        group = row.to(tl.int64) + origin + owner * pitch
        value = compensate(load_values(x, group, numel, spec), state, group, spec)
        scale, inverse, zero, offset, word, finite = fit(value, spec)
        rounded = round_values(value, inverse, zero, offset, spec)
        store_codes(there, groups, row.to(tl.int64), real, rounded, zero, word, finite, spec)
        if spec.residual == "local":
            remember(rounding_error(value, rounded, scale, offset, spec), scale, state, group, real, spec)
        step += 1
    if chunk == 0:
        leave_card(table, owner, numel, code, epoch, spec)
    tl.debug_barrier()
    publish(workspace(table, owner), flag_slot(PUSH, spec.rank, chunk, spec), epoch, digest)
