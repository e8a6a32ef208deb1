"""The usual way, for comparison: quantize kernel, all-to-all, reduce kernel, all-gather, dequantize kernel, one after the other.

Same arithmetic and instructions a value as ours, but the library's collectives move the codes and nothing overlaps; the two-collective
row of the paper's Table 2. Every segment is quantized, the own one too, as in ZeRO++.

Source: the paper, Table 2; Wang et al., 2024a (ZeRO++).
"""

import triton
import triton.language as tl

from echoreduce.kernels.gather import leave_landed
from echoreduce.kernels.rounding import fit, round_values
from echoreduce.kernels.tile import add_codes, load_codes, load_values, step_rows, store_codes

RUNTIME = ["numel", "groups", "area", "sent", "arrived"]


@triton.jit(do_not_specialize=RUNTIME)
def quantize_kernel(x, sent, numel, groups, area, spec: tl.constexpr):
    """x to P landing areas of `area` bytes at address `sent`; a program owns steps."""
    P: tl.constexpr = spec.world_size
    step = tl.program_id(0)
    row, real = step_rows(step, groups, spec)
    row = row.to(tl.int64)
    for segment in tl.static_range(P):
        value = load_values(x, row + segment * groups, numel.to(tl.int64), spec)
        scale, inverse, zero, offset, word, finite = fit(value, spec)
        rounded = round_values(value, inverse, zero, offset, spec)
        store_codes(sent + segment * area, groups.to(tl.int64), row, real, rounded, zero, word, finite, spec)


@triton.jit(do_not_specialize=RUNTIME)
def reduce_kernel(arrived, sent, groups, area, spec: tl.constexpr):
    """Add the P landing areas at `arrived` and round the sum into one area at `sent`."""
    P: tl.constexpr = spec.world_size
    row, real = step_rows(tl.program_id(0), groups, spec)
    row = row.to(tl.int64)
    here = groups >= 0
    total = load_codes(arrived, groups.to(tl.int64), row, here, spec)
    for source in tl.static_range(1, P):
        total = add_codes(total, arrived + source * area, groups.to(tl.int64), row, here, 1.0, spec)
    scale, inverse, zero, offset, word, finite = fit(total, spec)
    rounded = round_values(total, inverse, zero, offset, spec)
    store_codes(sent, groups.to(tl.int64), row, real, rounded, zero, word, finite, spec)


@triton.jit(do_not_specialize=RUNTIME)
def dequantize_kernel(arrived, y, numel, groups, area, spec: tl.constexpr):
    """P landing areas at `arrived` to y."""
    P: tl.constexpr = spec.world_size
    row, real = step_rows(tl.program_id(0), groups, spec)
    row = row.to(tl.int64)
    for segment in tl.static_range(P):
        landing = arrived + segment * area
        leave_landed(y, landing, groups.to(tl.int64), row, groups >= 0, row + segment * groups, real, numel.to(tl.int64), spec)
