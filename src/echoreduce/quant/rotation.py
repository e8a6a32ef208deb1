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
    Cost: log2(group_size) additions per value.
    """
    size = groups.shape[-1]
    assert size & (size - 1) == 0, f"group size {size} is not a power of two"
    half = 1
    while half < size:
        pairs = groups.unflatten(-1, (size // (2 * half), 2, half))
        a, b = pairs.unbind(-2)
        groups = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return groups * (1.0 / math.sqrt(size))
