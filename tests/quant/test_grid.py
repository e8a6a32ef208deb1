"""The grid always covers its group; parameters survive the wire; non-finite groups stay non-finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echoreduce import QuantConfig
from echoreduce.errors import DTypeError
from echoreduce.quant import codec
from echoreduce.quant.grid import SMALLEST_BF16_SCALE, fit, from_wire, qparams_dtype, round_down, round_up, to_wire

POLICIES = ("symmetric", "asymmetric", "zero_aware", "compact")
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
def test_round_up_and_down_are_the_neighbours(dtype: torch.dtype) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[torch.isfinite(every)].sort().values.unique()
    between = (every[:-1].double() + every[1:].double()).div(2).float()
    inside = (between > every[:-1]) & (between < every[1:])
    assert inside.sum() > 60000
    down = round_down(between[inside], dtype)
    assert torch.equal(down, every[:-1][inside])
    positive = inside & (every[:-1] >= 0)
    assert torch.equal(round_up(between[positive], dtype), every[1:][positive])
    assert torch.equal(round_up(every[every >= 0], dtype), every[every >= 0])
    assert torch.equal(round_down(every, dtype), every)


values = st.floats(min_value=-3e4, max_value=3e4, width=32, allow_subnormal=True)


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(values, min_size=16, max_size=16),
    bits=st.integers(2, 8),
    policy=st.sampled_from(POLICIES),
    dtype=st.sampled_from(HALVES),
    shift=st.sampled_from([0.0, 3.0, -2000.0, 60000.0]),
)
def test_every_value_is_within_the_largest_error(data: list[float], bits: int, policy: str, dtype: torch.dtype, shift: float) -> None:
    quant = QuantConfig(bits=bits, group_size=16, policy=policy, qparams="bf16" if dtype is torch.bfloat16 else "fp16")
    groups = torch.tensor([data]) * (0.1 if shift else 1.0) + shift
    grid = fit(groups, quant, dtype)
    assert torch.isfinite(grid.scale).all()
    restored = codec.dequantize(codec.quantize(groups, grid, quant), grid)
    # Half a step, and the fp32 rounding of (x - offset), x * inverse and level * scale + offset.
    slack = 4 * torch.finfo(torch.float32).eps * groups.abs().amax(-1, keepdim=True)
    assert ((restored - groups).abs() <= grid.largest_error.unsqueeze(-1) * (1 + 1e-5) + slack).all()
    assert grid.reach == (1.0 if policy == "compact" and bits <= 4 else 0.5)


def test_a_narrow_compact_scale_is_rounded_down_and_clips_both_ends_alike() -> None:
    quant = QuantConfig(group_size=64, policy="compact")
    below, above = 15 * (1 + 2.0**-4) - 1e-3, 15 * (1 + 2.0**-4) + 1e-3  # the scale is rounded down to 1 and to 1 + 1/16
    worst = 0.0
    for low in (-12.0, -7.73, -7.5, -3.2, 0.0):
        groups = torch.stack([torch.linspace(low, low + size, 64) for size in (below, above)])
        grid = fit(groups, quant, torch.bfloat16)
        assert grid.scale.tolist() == [1.0, 1.0625]
        error = (codec.dequantize(codec.quantize(groups, grid, quant), grid) - groups).abs() / grid.scale.unsqueeze(-1)
        assert error.amax() <= grid.reach
        assert error[1].amax() <= 0.5 + 1e-6
        worst = max(worst, float(error[0].amax()))
        codes = codec.to_codes(codec.quantize(groups, grid, quant), grid)
        assert codes.min() >= 0
        assert codes.max() <= 15
    assert worst > 0.9  # the bound is nearly reached
    wide = QuantConfig(bits=5, group_size=64, policy="compact")
    assert fit(torch.linspace(-16, 15.1, 64).reshape(1, -1), wide, torch.bfloat16).scale.item() == 1.125  # rounded up


@settings(max_examples=100, deadline=None)
@given(
    data=st.lists(values, min_size=32, max_size=32), bits=st.integers(2, 8), policy=st.sampled_from(POLICIES), dtype=st.sampled_from(HALVES)
)
def test_parameters_survive_the_wire(data: list[float], bits: int, policy: str, dtype: torch.dtype) -> None:
    quant = QuantConfig(bits=bits, group_size=16, policy=policy)
    grid = fit(torch.tensor(data).reshape(2, 16), quant, dtype)
    back = from_wire(to_wire(grid, quant, dtype), quant, dtype)
    for name in ("scale", "inverse", "zero", "offset", "one_sided"):
        assert torch.equal(getattr(grid, name), getattr(back, name)), name


def test_zero_is_a_level_where_the_group_straddles_zero() -> None:
    groups = torch.linspace(-0.37, 1.91, 128).reshape(1, -1)
    groups[0, 5] = 0.0
    grid = fit(groups, QuantConfig(), torch.bfloat16)
    restored = codec.dequantize(codec.quantize(groups, grid, QuantConfig()), grid)
    assert restored[0, 5] == 0.0
    assert not grid.one_sided[0]
    naive = QuantConfig(policy="asymmetric")
    grid = fit(groups, naive, torch.bfloat16)
    assert codec.dequantize(codec.quantize(groups, grid, naive), grid)[0, 5] != 0.0


@pytest.mark.parametrize("dtype", HALVES)
def test_far_one_sided_group_keeps_its_offset(dtype: torch.dtype) -> None:
    groups = torch.linspace(2000, 2001, 128).reshape(1, -1)
    grid = fit(groups, QuantConfig(), dtype)
    assert grid.one_sided[0]
    assert grid.offset[0] == 2000
    restored = codec.dequantize(codec.quantize(groups, grid, QuantConfig()), grid)
    assert (restored - groups).abs().max() <= 0.5 / 15 * 1.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_non_finite_value_marks_its_group_only(bad: float, policy: str, dtype: torch.dtype) -> None:
    quant = QuantConfig(policy=policy)
    groups = torch.randn(3, 128)
    clean = codec.dequantize(codec.quantize(groups, fit(groups, quant, dtype), quant), fit(groups, quant, dtype))
    groups[1, 77] = bad
    grid = fit(groups, quant, dtype)
    restored = codec.dequantize(codec.quantize(groups, grid, quant), grid)
    assert restored[1].isnan().all()
    assert torch.equal(restored[0], clean[0])
    assert torch.equal(restored[2], clean[2])
    back = from_wire(to_wire(grid, quant, dtype), quant, dtype)
    assert back.scale[1].isnan()


def test_no_bf16_group_over_or_underflows() -> None:
    for amplitude in (3e38, 1e30, 1e-30, 1e-37):
        groups = (torch.rand(1, 128) * 2 - 1) * amplitude
        grid = fit(groups, QuantConfig(), torch.bfloat16)
        restored = codec.dequantize(codec.quantize(groups, grid, QuantConfig()), grid)
        assert torch.isfinite(restored).all()
        assert (restored - groups).abs().max() <= grid.scale.max() * 0.5001
        assert grid.scale.max() <= max(2 * amplitude / 15 * 1.01, SMALLEST_BF16_SCALE)
    compact = QuantConfig(policy="compact")
    for amplitude in (3e38, 1e-37, 1e-39, 1e-42):
        groups = (torch.rand(1, 128) * 2 - 1) * amplitude
        grid = fit(groups, compact, torch.bfloat16)
        restored = codec.dequantize(codec.quantize(groups, grid, compact), grid)
        assert ((restored - groups).abs() <= grid.largest_error.unsqueeze(-1) * 1.0001).all()


def test_a_rotated_compact_group_beyond_2_to_the_111_is_not_finite() -> None:
    rotated = QuantConfig(policy="compact", rotation="hadamard")
    groups = torch.tensor([[0.0] * 127 + [15 * 2.0**110], [0.0] * 127 + [15 * 2.0**111]])
    assert fit(groups, rotated, torch.bfloat16).scale.isnan().tolist() == [False, True]
    assert fit(groups, QuantConfig(policy="compact"), torch.bfloat16).scale.isfinite().all()


def test_a_range_beyond_fp16_is_a_non_finite_group() -> None:
    groups = torch.randn(2, 128) * 1e6
    groups[1] = torch.randn(128)
    grid = fit(groups, QuantConfig(), torch.float16)
    assert grid.scale[0].isnan()
    assert torch.isfinite(grid.scale[1])


def test_other_dtypes_are_named() -> None:
    with pytest.raises(DTypeError, match=r"torch\.float64"):
        qparams_dtype(QuantConfig(), torch.float64)
    assert qparams_dtype(QuantConfig(), torch.float32) is torch.bfloat16
    assert qparams_dtype(QuantConfig(), torch.float16) is torch.float16
    assert qparams_dtype(QuantConfig(qparams="fp16"), torch.float32) is torch.float16
