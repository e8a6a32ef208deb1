"""The bound holds for every right result, and finds the wrong ones that a weak check lets pass."""

from __future__ import annotations

import math

import pytest
import torch

from contributions import contributions
from echoreduce import reference
from echoreduce.config import QuantConfig
from echoreduce.measure.numeric import bound, first_bad, relative_error, sqnr_db
from echoreduce.measure.timing import summarize, time_eager

CONFIGS = [(bits, policy) for bits in (2, 4, 8) for policy in ("symmetric", "asymmetric", "zero_aware")]


def sums(world_size, quant, dtype, algorithm, numel=4099, seed=0):
    every = contributions(world_size, numel, dtype, seed=seed)
    exact = every.double().sum(0)
    return list(every), exact, reference.all_reduce(every, quant, algorithm).output


@pytest.mark.parametrize("bits, policy", CONFIGS)
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_right_sums_stay_within_the_bound(bits, policy, algorithm, dtype):
    for world_size in (2, 3, 5):
        quant = QuantConfig(bits=bits, policy=policy)
        every, exact, result = sums(world_size, quant, dtype, algorithm, seed=world_size)
        assert first_bad(result, exact, bound(every, exact, quant, dtype)) is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_wrong_sums_are_found(world_size):
    """Segments swapped, the last rank skipped, rank 0 added twice, one value off, one not a number."""
    quant = QuantConfig()
    every, exact, result = sums(world_size, quant, torch.bfloat16, "two_shot", numel=2048 * world_size)
    allowed = bound(every, exact, quant, torch.bfloat16)
    swapped = torch.cat((result[2048:4096], result[:2048], result[4096:]))
    skipped = reference.all_reduce(torch.stack([*every[:-1], torch.zeros_like(every[0])]), quant).output
    twice = reference.all_reduce(torch.stack([2 * every[0], *every[1:]]), quant).output
    for wrong in (swapped, skipped, twice):
        assert first_bad(wrong, exact, allowed) is not None
    off = result.clone()
    off[777] += 3 * float(allowed[777]) + 1
    assert first_bad(off, exact, allowed) == 777
    off[5] = math.nan
    assert first_bad(off, exact, allowed) == 5


def test_metrics():
    exact = torch.tensor([3.0, 4.0])
    assert sqnr_db(exact, exact) == math.inf
    assert sqnr_db(exact * 1.1, exact) == pytest.approx(20.0, abs=1e-4)
    assert relative_error(exact * 1.1, exact) == pytest.approx(0.1, rel=1e-5)


def test_percentiles_and_wall_clock():
    timing = summarize([float(value) for value in range(1, 102)])
    assert (timing.median, timing.fifth, timing.ninetyfifth, timing.least, timing.count) == (51.0, 6.0, 96.0, 1.0, 101)
    calls = []
    durations = time_eager(lambda: calls.append(1), 3, 5, torch.device("cpu"))
    assert len(durations) == 5
    assert len(calls) == 8
    assert min(durations) >= 0.0
