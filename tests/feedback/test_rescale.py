"""The shared power of two: exact, right for zero, subnormal, huge and non-finite gradients, outside the compensator (O27, O07)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contributions import contributions
from echoreduce import QuantConfig, preset
from echoreduce import reference as ref
from echoreduce.feedback.rescale import LIMIT, NOTHING, largest_exponent, scale_by, shared_exponent
from echoreduce.runtime.c10d import C10dBackend
from echoreduce.session import Session
from echoreduce.virtual import VirtualBackend
from ranks import RankPool

FP16 = QuantConfig(qparams="fp16")
P = 4


def normal(numel: int = 1000) -> Tensor:
    return torch.randn(P, numel, generator=torch.Generator().manual_seed(5))


@given(st.floats(min_value=1.401298464324817e-45, max_value=2.0**126, width=32))
def test_the_exponent_is_the_ceiling_of_the_logarithm(value: float) -> None:
    exponent = int(largest_exponent(torch.tensor([0.0, -value, value / 3])))
    assert 2.0 ** (exponent - 1) < value <= 2.0**exponent


def test_nothing_and_everything_non_finite_give_no_factor() -> None:
    for values in ([0.0, -0.0], [torch.nan, torch.inf, -torch.inf]):
        largest = largest_exponent(torch.tensor(values))
        assert largest.item() == NOTHING
        assert shared_exponent(largest, 4).item() == 0
    assert largest_exponent(torch.tensor([torch.nan, 3.0, torch.inf])).item() == 2


@given(st.integers(-LIMIT, LIMIT), st.integers(8, 16))
def test_scaling_there_and_back_is_exact(exponent: int, mantissa: int) -> None:
    value = scale_by(torch.tensor([mantissa / 8]), torch.tensor([max(-140, min(120, -exponent))], dtype=torch.int32))
    there = scale_by(value, torch.tensor([exponent], dtype=torch.int32))
    assert torch.equal(scale_by(there, torch.tensor([-exponent], dtype=torch.int32)), value)


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@pytest.mark.parametrize("power", [-140, -100, -40, -1, 20, 100])
def test_o27_codes_do_not_depend_on_the_unit(algorithm: str, power: int) -> None:
    """Also with subnormal numbers, as far as their own digits go: values with 8 significant bits."""
    x = (normal() * 16).round() / 16
    unit = ref.all_reduce(x, FP16, algorithm, residual="local", rescale=True)
    moved = ref.all_reduce(torch.ldexp(x, torch.tensor(power)), FP16, algorithm, residual="local", rescale=True)
    assert torch.equal(moved.record.pushed.codes(), unit.record.pushed.codes())
    assert torch.equal(moved.output, torch.ldexp(unit.output, torch.tensor(power)))
    if power > -120:
        assert torch.equal(moved.residuals, torch.ldexp(unit.residuals, torch.tensor(power)))


def test_o27_without_the_factor_fp16_qparams_lose_the_gradient() -> None:
    x = normal() * 1e-9
    exact = x.sum(0)
    assert (ref.all_reduce(x, FP16).output - exact).norm() > 0.5 * exact.norm()
    assert (ref.all_reduce(x, FP16, rescale=True).output - exact).norm() < 0.2 * exact.norm()
    assert (ref.all_reduce(x, QuantConfig()).output - exact).norm() < 0.2 * exact.norm(), "bf16 qparams need no factor"


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1e-12), (torch.float16, 6e-8), (torch.float32, 1e9)])
def test_o27_half_precision_gradients(dtype: torch.dtype, scale: float) -> None:
    x = torch.full((P, 512), 1.0)
    x[:, ::3] = -2.0
    x = (x * scale).to(dtype)
    result = ref.all_reduce(x, FP16, rescale=True).output
    exact = x.float().sum(0)
    assert result.dtype == dtype
    assert (result.float() - exact).norm() < 0.05 * exact.norm()


def test_o27_zeros() -> None:
    assert (ref.all_reduce(torch.zeros(P, 512), FP16, rescale=True).output == 0).all()
    x = torch.zeros(P, 512)
    x[2] = normal(512)[2] * 1e-9
    assert (ref.all_reduce(x, FP16, rescale=True).output - x[2]).norm() < 0.2 * x[2].norm()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_o07_a_bad_value_spoils_its_group_only(bad: float) -> None:
    x = normal(1024) * 1e-9
    clean = ref.all_reduce(x, FP16, rescale=True).output
    x[1, 300] = bad
    result = ref.all_reduce(x, FP16, rescale=True).output
    assert result[256:384].isnan().all()
    rest = torch.ones(1024, dtype=torch.bool)
    rest[256:384] = False
    assert torch.equal(result[rest], clean[rest])


def a_backward_pass(group: Any, scales: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    session = Session(C10dBackend(group), preset("paper"), len(scales))
    session.begin("backward")
    rank, world_size = session.backend.rank, session.backend.world_size
    outputs = [session.reduce(contributions(world_size, 1500, seed=k)[rank] * s, "backward") for k, s in enumerate(scales)]
    return outputs, [average.values for average in session._passes["backward"].state.averages]


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_and_virtual_ranks_give_the_same_bits_and_state(pool: RankPool, world_size: int) -> None:
    scales = [1e-9, 1e-7, 0.0, 1e-30, 1.0]
    virtual = Session(VirtualBackend(world_size), preset("paper"), len(scales))
    virtual.begin("backward")
    expected = [virtual.reduce(contributions(world_size, 1500, seed=k) * s, "backward") for k, s in enumerate(scales)]
    averages = virtual._passes["backward"].state.averages
    for rank, (outputs, state) in enumerate(pool.run(a_backward_pass, world_size, scales)):
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected))
        assert all(torch.equal(values, average.values[rank]) for values, average in zip(state, averages))


def test_the_paper_preset_rescales_backward_only() -> None:
    session = Session(VirtualBackend(2), preset("paper"), 2)
    x = normal()[:2] * 1e-9
    exact = x.sum(0)
    session.begin("backward")
    assert (session.reduce(x, "backward") - exact).norm() < 0.2 * exact.norm()
    session.begin()
    assert (session.reduce(x) - exact).norm() > 0.5 * exact.norm()
