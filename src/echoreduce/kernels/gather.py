"""Gather: send the rounded sum of the own segment to every rank, and read it as they will (the paper, Section 4.2)."""

import triton
import triton.language as tl

from echoreduce.kernels.place import GATHER, landing
from echoreduce.kernels.rotation import hadamard
from echoreduce.kernels.tile import store_codes, store_values


@triton.jit
def leave(y, value, group, real, numel, spec: tl.constexpr):
    """Undo the rotation and write values to the output."""
    if spec.rotate:
        value = hadamard(value, spec)
    store_values(y, group, real, numel, value, spec)


@triton.jit
def gather_step(y, value, rounded, zero, word, finite, row, real, call, epoch, spec: tl.constexpr):
    """One tile of the own segment: codes to every peer (and to ourselves if the group residual reads them again), values to y.

    Writes: codes and qparams P - 1 times; the output once.
    """
    P: tl.constexpr = spec.world_size
    table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps = call
    row = row.to(tl.int64)
    nearest: tl.constexpr = 0 if spec.residual == "group" else 1
    for distance in tl.static_range(nearest, P):
        there = landing(table, spec.peer(distance), GATHER, spec.rank, epoch, half, area, spec)
        store_codes(there, groups, row, real, rounded, zero, word, finite, spec)
    leave(y, value, row + origin + spec.rank * pitch, real, numel, spec)
