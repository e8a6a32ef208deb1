"""Tail: read the rounded sums that arrive from the other owners (the paper, Section 4.2)."""

import triton
import triton.language as tl

from echoreduce.kernels.gather import leave_landed
from echoreduce.kernels.place import GATHER, flag, landing
from echoreduce.kernels.signal import wait
from echoreduce.kernels.tile import step_rows


@triton.jit
def tail(first, stop, stride, y, call, epoch, spec: tl.constexpr):
    """One block's share of the tail stage: chunks first, first + stride, ... below stop of every other rank's segment.

    Waits for: (GATHER, owner, chunk) >= epoch, acquire.sys. Reads: codes of the sums. Writes: the output outside the own segment.
    """
    P: tl.constexpr = spec.world_size
    chunk = first
    while chunk < stop:
        if P == 2:
            _read_from(spec.peer(1), chunk, y, call, epoch, spec)
        else:
            distance = epoch * 0 + 1
            while distance < P:
                _read_from((spec.rank + distance) % P, chunk, y, call, epoch, spec)
                distance += 1
        chunk += stride


@triton.jit
def _read_from(owner, chunk, y, call, epoch, spec: tl.constexpr):
    """One chunk of one owner's segment."""
    table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps = call
    there = flag(table, GATHER, owner, chunk, spec)
    arrived = wait(there, epoch, digest, control, record, GATHER, owner, chunk, patience, spec)
    here = landing(table, spec.rank, GATHER, owner, epoch, half, area, spec)
    step = chunk * steps
    end = tl.minimum(step + steps, tl.cdiv(groups, spec.rows))
    while step < end:
        row, real = step_rows(step, groups, spec)
        row = row.to(tl.int64)
        leave_landed(y, here, groups, row, arrived, row + origin + owner * pitch, real, numel, spec)
        step += 1
