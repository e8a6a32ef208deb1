"""Gather: send the rounded sum of the own segment to every rank, and read it as they will (the paper, Section 4.2)."""

import triton
import triton.language as tl

from echoreduce.kernels.place import GATHER, landing
from echoreduce.kernels.rotation import hadamard, turn_codes
from echoreduce.kernels.rounding import pack, read_word
from echoreduce.kernels.tile import load_codes, load_word, load_words, store_codes, store_values


@triton.jit
def leave(y, value, group, real, numel, spec: tl.constexpr):
    """Undo the rotation and write values to the output."""
    if spec.rotate:
        value = hadamard(value, spec) * spec.norm
    store_values(y, group, real, numel, value, spec)


@triton.jit
def leave_landed(y, landing, groups, row, arrived, group, real, numel, spec: tl.constexpr):
    """Write what a landing area holds for a tile to the output; NaN if `arrived` is false."""
    if spec.integer_turn:
        scale, zero, offset = read_word(load_word(landing, groups, row, arrived, spec), spec)
        store_values(y, group, real, numel, turn_codes(load_words(landing, row, spec), scale, zero, spec), spec)
    else:
        leave(y, load_codes(landing, groups, row, arrived, spec), group, real, numel, spec)


@triton.jit
def send_sum(rounded, zero, word, finite, row, real, call, epoch, spec: tl.constexpr):
    """One tile of the own segment: codes and qparams to every peer, and to ourselves if the group residual reads them again."""
    P: tl.constexpr = spec.world_size
    table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps = call
    nearest: tl.constexpr = 0 if spec.residual == "group" else 1
    for distance in tl.static_range(nearest, P):
        there = landing(table, spec.peer(distance), GATHER, spec.rank, epoch, half, area, spec)
        store_codes(there, groups, row.to(tl.int64), real, rounded, zero, word, finite, spec)


@triton.jit
def leave_own(y, value, rounded, scale, zero, finite, group, real, numel, spec: tl.constexpr):
    """Write the rounded sum of one tile of the own segment to the output, as every other rank will read it."""
    if spec.integer_turn:
        store_values(y, group, real, numel, turn_codes(pack(rounded, zero, finite, 0, spec), scale, zero, spec), spec)
    else:
        leave(y, value, group, real, numel, spec)
