"""Reduce: the owner adds its own segment and the peers' codes in rank order and rounds the sum (the paper, Section 4.1)."""

import triton
import triton.language as tl

from echoreduce.kernels.gather import leave_own, send_sum
from echoreduce.kernels.place import GATHER, PUSH, flag, flag_slot, landing, workspace
from echoreduce.kernels.rounding import fit, read_back, round_values, rounding_error
from echoreduce.kernels.signal import publish, wait
from echoreduce.kernels.state import compensate, remember
from echoreduce.kernels.tile import add_codes, load_codes, load_values, step_rows


@triton.jit
def reduce(first, stop, stride, x, y, state, call, epoch, spec: tl.constexpr):
    """One block's share of reduce and gather: chunks first, first + stride, ... below stop of the own segment.

    Waits for: (PUSH, peer, chunk) >= epoch of every peer, acquire.sys.
    Reads: own values, once; P - 1 copies of codes; state, once. Writes: the output's own segment; codes of the sum to P - 1 peers; state.
    Publishes: (GATHER, rank, chunk) = epoch in every peer's flags, release.sys after a block barrier.
    """
    P: tl.constexpr = spec.world_size
    table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps = call
    total = tl.cdiv(groups, spec.rows)
    chunk = first
    while chunk < stop:
        arrived = epoch == epoch
        for distance in tl.static_range(1, P):
            there = flag(table, PUSH, spec.peer(distance), chunk, spec)
            arrived = wait(there, epoch, digest, control, record, PUSH, spec.peer(distance), chunk, patience, spec) & arrived
        step = chunk * steps
        end = tl.minimum(chunk * steps + steps, total)
        while step < end:
            row, real = step_rows(step, groups, spec)
            _reduce_step(x, y, state, call, row, real, arrived, epoch, spec)
            step += 1
        tl.debug_barrier()
        for distance in tl.static_range(1, P):
            publish(workspace(table, spec.peer(distance)), flag_slot(GATHER, spec.rank, chunk, spec), epoch, digest)
        chunk += stride


@triton.jit
def _reduce_step(x, y, state, call, row, real, arrived, epoch, spec: tl.constexpr):
    """One tile: add in rank order, round, hand over to gather, keep the rounding error."""
    P: tl.constexpr = spec.world_size
    table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps = call
    group = row.to(tl.int64) + origin + spec.rank * pitch
    own = compensate(load_values(x, group, numel, spec), state, group, spec)
    total = own
    if spec.rank > 1:  # rank 1 begins with its own values too: the first addition may be turned round
        here = landing(table, spec.rank, PUSH, 0, epoch, half, area, spec)
        total = load_codes(here, groups, row.to(tl.int64), arrived, spec) * spec.unit
    for source in tl.static_range(P):
        if source == spec.rank:
            total = total + own if spec.rank > 1 else total
        elif source > 0 or spec.rank == 1:
            here = landing(table, spec.rank, PUSH, source, epoch, half, area, spec)
            total = add_codes(total, here, groups, row.to(tl.int64), arrived, spec.unit, spec)
    scale, inverse, zero, offset, word, finite = fit(total, spec)
    rounded = round_values(total, inverse, zero, offset, spec)
    value = read_back(rounded, scale, offset, spec)
    send_sum(rounded, zero, word, finite, row, real, call, epoch, spec)
    leave_own(y, value, rounded, scale, zero, finite, group, real, numel, spec)
    if spec.residual == "local":
        remember(rounding_error(total, rounded, scale, offset, spec), scale, state, group, real, spec)
