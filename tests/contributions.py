"""Test data that can betray: different on every rank and in every element, with the hard groups in between."""

from __future__ import annotations

import torch
from torch import Tensor

from echoreduce.config import QuantConfig
from echoreduce.quant.grid import levels, symmetric_limit


def contributions(world_size: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values of all ranks, [P, numel]: normal, with a per-rank offset, outliers, zeros, one-sided and tiny stretches."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * world_size + numel % 7)
    x = torch.randn(world_size, numel, generator=generator) + 0.1 * torch.arange(world_size).reshape(-1, 1)
    if numel >= 1024:
        x[:, 7] *= 1000
        x[:, 128:256] = 0
        x[:, 256:384] = x[:, 256:384].abs() + 3
        x[:, 384:512] *= 1e-6
        x[1:, 512:640] = 0
        x[:, 640:768] = -(x[:, 640:768].abs() + 2)
        x[:, 768:896] = 3.7 + torch.arange(world_size).reshape(-1, 1)
    return x.to(dtype)


def magnitudes(world_size: int, numel: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Values of all ranks, [P, numel], in stretches of 64 from subnormal numbers to the largest ones, 2**5 apart."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * world_size + numel % 7)
    x = torch.randn(world_size, numel, generator=generator, dtype=torch.float64)
    stretches = torch.arange(numel) // 64
    low, high = (-137, 128) if dtype != torch.float16 else (-27, 15)
    x = x * 2.0 ** (low + 5 * stretches % (high - low)).double()
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def exact_steps(group: Tensor, quant: QuantConfig) -> Tensor:
    """Group step before any 16-bit rounding: sym amax / (2^(b-1) - 1), asym (max - min) / (2^b - 1); [*batch] for [*batch, g]."""
    if quant.policy == "symmetric":
        return group.abs().amax(-1) / symmetric_limit(quant.bits)
    return (group.amax(-1) - group.amin(-1)) / levels(quant.bits)
