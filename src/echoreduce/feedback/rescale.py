"""A change of units around one all-reduce: a power of two that all ranks share (the paper, Section 5.4 and Appendix C).

Why: fp16 qparams cannot hold the scale of a tiny gradient (below 2**-24 it is zero and the group vanishes) nor of a huge one. Every rank
multiplies its compensated contribution by 2**e before it is rounded and what it reads by 2**-e after. e follows from the largest finite
magnitude in the group, so it takes one all-reduce (MAX) of one integer; only the exponent field moves, so nothing is rounded. The
compensator stays outside: x' = x + c is formed before, u = x' - ... brought back after, and its averages keep the gradient's own units.

    e = TARGET - ceil(log2 P) - ceil(log2 amax):  the sum of P contributions stays below 2**TARGET, two octaves under fp16's largest number

Blocks are fp32 whatever the data are, so no factor can overflow an fp16 gradient (6e-8 needs 2**35, which fp16 does not have). NaN and
Inf do not take part in the maximum: their groups become NaN, the others keep their precision. All zero: e = 0.

Leaves out: bf16 qparams, which have fp32's range and need no factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echoreduce.feedback.compensator import ceil_log2, power_of_two

#: log2 of what the sum of all contributions stays below after the change of units; fp16's largest number is just under 2**16.
TARGET = 14

#: Exponent of a tensor without a finite value other than zero.
NOTHING = -(1 << 15)

#: Largest |e|: two factors of at most 2**126 each, both normal fp32 numbers with normal reciprocals.
LIMIT = 252


def largest_exponent(blocks: Tensor) -> Tensor:
    """Smallest integer m with 2**m >= every finite |value|; `NOTHING` if all are zero or not finite.

    Args:
        blocks: fp32, any shape, at least one value.
    Returns:
        int32, shape [1], on the device of `blocks`; the maximum over ranks is taken of this.
    """
    magnitude = torch.where(torch.isfinite(blocks), blocks.abs(), 0.0).amax().reshape(1)
    # ceil_log2 reads the exponent field, which subnormal numbers do not use: bring them up first.
    small = magnitude < 2.0**-100
    exponent = ceil_log2(torch.where(small, magnitude * 2.0**100, magnitude)) - 100 * small.to(torch.int32)
    return torch.where(magnitude > 0, exponent, NOTHING).to(torch.int32)


def shared_exponent(largest: Tensor, world_size: int) -> Tensor:
    """The e of the module's text.

    Args:
        largest: maximum over all ranks of `largest_exponent`, int32 [1].
        world_size: P.
    Returns:
        int32 [1], within +-LIMIT; 0 where `largest` is `NOTHING`.
    """
    exponent = TARGET - (world_size - 1).bit_length() - largest
    return torch.where(largest == NOTHING, 0, exponent).clamp_(-LIMIT, LIMIT).to(torch.int32)


def scale_by(values: Tensor, exponent: Tensor) -> Tensor:
    """values * 2**exponent, exact unless the result leaves the normal range of fp32.

    Args:
        values: fp32, any shape.
        exponent: int32 [1], within +-LIMIT.
    Cost: two multiplications a value, so that |exponent| > 126 (gradients below 2**-112) is exact too.
    """
    half = torch.div(exponent, 2, rounding_mode="floor")
    return values * power_of_two(half) * power_of_two(exponent - half)
