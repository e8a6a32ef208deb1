"""Hadamard rotation inside each group: spreads an outlier over its group before the range is taken.

The sum over ranks is linear, so owners add in the rotated domain; only what enters and what leaves the collective is turned
(docs/design.md, Section 4). The matrix is symmetric and orthonormal, so the same function turns back. It is applied as a
butterfly of log2(group_size) stages in a fixed order, plain fp32 additions, so that every backend can repeat it bit for bit.

Source: fast Walsh-Hadamard transform; Ashkboos et al., 2024 (rotations against outliers).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard(groups: Tensor) -> Tensor:
    """Turn each group by the orthonormal Walsh-Hadamard matrix (natural order).

    Args:
        groups: fp32, shape [*batch, group_size], group_size a power of two.
    Returns:
        fp32, same shape, a new tensor; `hadamard(hadamard(x))` is x up to fp32 rounding.
    Cost: log2(group_size) additions per value, two transposes, two tensors of the size of `groups`.
    """
    size = groups.shape[-1]
    assert size & (size - 1) == 0, f"group size {size} is not a power of two"
    # Values outside, groups inside, so that every stage adds long rows whatever its half.
    values = groups.reshape(-1, size).t().contiguous()
    spare = torch.empty_like(values)
    half = 1
    while half < size:
        before, after = (rows.unflatten(0, (size // (2 * half), 2, half)) for rows in (values, spare))
        torch.add(before[:, 0], before[:, 1], out=after[:, 0])
        torch.sub(before[:, 0], before[:, 1], out=after[:, 1])
        values, spare = spare, values
        half *= 2
    return torch.mul(values.t(), 1.0 / math.sqrt(size), out=spare.view(-1, size)).view(groups.shape)
