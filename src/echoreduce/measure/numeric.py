"""How far a result is from the exact sum, and how far it may be: error metrics and THE tolerance table.

    what is compared                                    tolerance
    codes, qparams, state, outputs across ranks          bitwise
    outputs across backends, algorithm fixed             bitwise
    output against the exact sum                         `bound`: `QuantConfig.reach` steps a rounding, SLACK for 16-bit qparams and output
    sums in another order (16-bit paths, baselines)      P ulps of the 16-bit type at the magnitude of the largest partial sum

Source: docs/design.md, Section 4; cases.md ("Bound").
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from echoreduce.config import QuantConfig

#: Stored scales are rounded up to 8 significant bits (bf16) and offsets down, which widens a step by at most 2**-7 twice.
SLACK = 1.02


def sqnr_db(result: Tensor, exact: Tensor) -> float:
    """Signal to quantization noise, 20 log10(||exact|| / ||result - exact||) in dB; inf without error."""
    noise = float((result.double() - exact.double()).norm())
    return math.inf if noise == 0.0 else 20.0 * math.log10(float(exact.double().norm()) / noise)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact||."""
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def steps(values: Tensor, quant: QuantConfig) -> Tensor:
    """Exact step of each group before any 16-bit rounding, repeated for each value; fp32, shape of `values` (flat)."""
    size = quant.group_size
    padded = -(-values.numel() // size) * size
    flat = values.reshape(-1).float()
    if padded > flat.numel():
        flat = torch.cat((flat, flat[-1:].expand(padded - flat.numel())))
    low, high = flat.reshape(-1, size).aminmax(dim=-1)
    if quant.layout == "compact":
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        wider = 0.0 if quant.clipped else 2.0 ** (quant.bits - 8)
        step = (high - low) * (1.0 + wider) / ((1 << quant.bits) - 1)
    elif quant.policy == "symmetric":
        step = torch.maximum(high, -low) / ((1 << (quant.bits - 1)) - 1)
    else:
        # Rounding the offset down widens a one-sided group by at most one unit in the last place of its minimum.
        step = (high - low + torch.where((low > 0) | (high < 0), low.abs() * 2.0**-7, 0.0)) / ((1 << quant.bits) - 1)
    return step.repeat_interleave(size)[: values.numel()]


def turn(values: Tensor, quant: QuantConfig) -> Tensor:
    """Groups of a flat tensor, padded with its last value, times the orthonormal Hadamard matrix; fp32, flat, padded."""
    flat = values.reshape(-1).float()
    short = -flat.numel() % quant.group_size
    padded = torch.cat((flat, flat[-1:].expand(short))) if short else flat
    matrix, pair = flat.new_ones(1, 1), flat.new_tensor([[1.0, 1.0], [1.0, -1.0]])
    while matrix.shape[0] < quant.group_size:
        matrix = torch.kron(matrix, pair)
    return (padded.reshape(-1, quant.group_size) @ matrix / math.sqrt(quant.group_size)).reshape(-1)


def bound(contributions: list[Tensor], exact: Tensor, quant: QuantConfig, dtype: torch.dtype) -> Tensor:
    """Largest error that a value of the sum may have: `QuantConfig.reach` steps a rounding, and the output's rounding.

    Args:
        contributions: x of each rank, flat.
        exact: their sum, fp32 or wider, flat.
    Returns:
        fp32, flat. Two-shot sends P - 1 contributions and the sum, one-shot P contributions; this bounds both.
    """
    if quant.rotation == "hadamard":
        plain = replace(quant, rotation="none")
        turned = bound([turn(x, quant) for x in contributions], turn(exact, quant), plain, torch.float32)
        groups = turned.reshape(-1, quant.group_size).square().sum(-1).sqrt()  # a rotation keeps the length of a group's error
        spread = groups.repeat_interleave(quant.group_size)[: exact.numel()]
        return SLACK * spread + exact.abs().float() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    total = quant.reach * sum((steps(x, quant) for x in contributions), torch.zeros_like(exact, dtype=torch.float32))
    # The rounded sum spans at most the exact one's range plus the error that the contributions brought in.
    levels = (1 << quant.bits) - 1
    largest = total.reshape(-1)
    total = total + quant.reach * (steps(exact, quant) + 2.0 * largest / levels * (2 if quant.policy == "symmetric" else 1))
    return SLACK * total + exact.abs().float() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal


def first_bad(result: Tensor, exact: Tensor, allowed: Tensor) -> int | None:
    """First flat index where |result - exact| exceeds what is allowed, or is not a number; None if there is none."""
    error = (result.reshape(-1).double() - exact.reshape(-1).double()).abs()
    bad = ~(error <= allowed.reshape(-1).double())
    return int(bad.nonzero()[0]) if bool(bad.any()) else None
