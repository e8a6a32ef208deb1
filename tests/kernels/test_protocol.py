"""The real kernels and the real P2P backend in P processes on CPU: every bit as in the reference, state included."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from contributions import contributions, magnitudes
from echoreduce import reference
from echoreduce.config import NO_FEEDBACK, PRESETS, FeedbackConfig, QuantConfig
from echoreduce.feedback.compensator import FeedbackState, correction, update
from echoreduce.kernels.spec import PLANES, Spec, wire_chunk
from echoreduce.quant import packing
from echoreduce.quant.grid import Grid
from echoreduce.runtime.schedule import Tuning
from interpreted import InterpretedPool

SMALL = Tuning(warps=1, chunk_values=2048, waves=2, blocks=(2, 2, 1))


def open_backend(group: dist.ProcessGroup, **options: object):
    from echoreduce.runtime.p2p import P2PBackend

    return P2PBackend(group, device="cpu", tuning=SMALL, **{"timeout": timedelta(seconds=60), "first_half": 1 << 16, **options})


def run_pass(group, quant, algorithm, feedback, dtype, numel, sites, options, data):
    """One pass of `sites` calls on `data(P, numel, dtype, seed)`: outputs, and the averages after each."""
    backend = open_backend(group, **options)
    state = backend.new_state(feedback) if feedback.enabled else None
    outputs, averages = [], []
    for site in range(sites):
        x = data(dist.get_world_size(group), numel, dtype, seed=site)[dist.get_rank(group)]
        outputs.append(backend.all_reduce(x, quant, algorithm, state))
        averages.append([(value.clone(), None if e is None else e.clone()) for value, e in state.averages()] if state else [])
    backend.close()
    return outputs, averages


PAPER = FeedbackConfig("group", 0.75, 0.35, (0.7, 0.3), "fp32")
CASES = [
    (2, "two_shot", QuantConfig(), NO_FEEDBACK, torch.bfloat16, 1280, {}),
    (2, "one_shot", QuantConfig(), FeedbackConfig(state="float8_e4m3"), torch.bfloat16, 1501, {}),
    (3, "two_shot", QuantConfig(bits=8), FeedbackConfig(state="float8_e5m2"), torch.float16, 2003, {}),
    (4, "two_shot", QuantConfig(), FeedbackConfig(state="bf16"), torch.float32, 3001, {}),
    (4, "one_shot", QuantConfig(bits=5, group_size=64), FeedbackConfig(decays=(0.7, 0.3), gain=0.75), torch.bfloat16, 1029, {}),
    (2, "two_shot", QuantConfig(qparams="fp16"), PAPER, torch.bfloat16, 2601, {}),
    (3, "one_shot", QuantConfig(rotation="hadamard"), FeedbackConfig("group", state="float8_e4m3"), torch.bfloat16, 1301, {}),
    (3, "two_shot", QuantConfig(bits=6, policy="asymmetric"), NO_FEEDBACK, torch.float16, 5, {}),
    (4, "two_shot", QuantConfig(policy="symmetric"), NO_FEEDBACK, torch.float32, 1, {}),
    (3, "two_shot", QuantConfig(), FeedbackConfig(state="float8_e4m3"), torch.bfloat16, 12345, {"schedule": "staged"}),
    (2, "two_shot", QuantConfig(bits=2, group_size=256), NO_FEEDBACK, torch.bfloat16, 1600, {}),
    (2, "one_shot", QuantConfig(bits=3, policy="symmetric", group_size=16), NO_FEEDBACK, torch.float16, 1600, {}),
    (2, "two_shot", QuantConfig(bits=7, policy="asymmetric", group_size=32), FeedbackConfig(state="float8_e5m2"), torch.float32, 1600, {}),
    (
        3,
        "two_shot",
        QuantConfig(policy="compact", group_size=64, rotation="hadamard"),
        FeedbackConfig(state="float8_e4m3"),
        torch.bfloat16,
        3001,
        {},
    ),
    (2, "one_shot", QuantConfig(bits=6, policy="compact", group_size=32), FeedbackConfig(), torch.float32, 2003, {}),
    (2, "two_shot", QuantConfig(bits=2, policy="compact"), NO_FEEDBACK, torch.float16, 1601, {}),
    (2, "two_shot", QuantConfig(group_size=16), FeedbackConfig(), torch.bfloat16, 3001, {"largest_half": 1 << 12}),
    (2, "one_shot", QuantConfig(), PAPER, torch.bfloat16, 20001, {"largest_half": 1 << 14}),
]


@pytest.mark.parametrize("world_size, algorithm, quant, feedback, dtype, numel, options", CASES)
def test_pass_equals_the_reference(ranks, world_size, algorithm, quant, feedback, dtype, numel, options):
    check_pass(ranks, world_size, algorithm, quant, feedback, dtype, numel, options)


def check_pass(ranks, world_size, algorithm, quant, feedback, dtype, numel, options, data=contributions):
    sites = 3
    results = ranks.run(run_pass, world_size, quant, algorithm, feedback, dtype, numel, sites, options, data)
    state = FeedbackState(feedback)
    for site in range(sites):
        x = data(world_size, numel, dtype, seed=site)
        expected = reference.all_reduce(x, quant, algorithm, correction(state), feedback.residual)
        for outputs, _ in results:
            torch.testing.assert_close(outputs[site], expected.output, rtol=0, atol=0, equal_nan=True)
        if feedback.enabled:
            update(state, expected.residuals, expected.bounds)
            for rank, (_, averages) in enumerate(results):
                for mine, want in zip(averages[site], state.averages, strict=True):
                    check_average(mine, want.values[rank].reshape(-1), None if want.exponent is None else want.exponent[rank].reshape(-1))


def test_eight_ranks():
    """More ranks than the other tests have, whose kernels loop over peers."""
    eight = InterpretedPool(8)
    try:
        chosen = PRESETS["default"]
        for algorithm in ("two_shot", "one_shot"):
            check_pass(eight, 8, algorithm, chosen.quant, chosen.feedback, torch.bfloat16, 1029, {})
    finally:
        eight.close()


@pytest.mark.parametrize(
    "world_size, algorithm, bits, group_size, dtype",
    [
        (2, "two_shot", 4, 64, torch.bfloat16),
        (3, "two_shot", 4, 64, torch.float16),
        (2, "two_shot", 4, 64, torch.float32),
        (2, "one_shot", 4, 64, torch.bfloat16),
        (2, "two_shot", 4, 16, torch.bfloat16),
        (2, "two_shot", 4, 32, torch.bfloat16),
        (2, "two_shot", 4, 128, torch.float32),
        (3, "two_shot", 5, 64, torch.bfloat16),
        (2, "two_shot", 2, 256, torch.bfloat16),
    ],
)
def test_rotated_groups_of_every_magnitude(ranks, world_size, algorithm, bits, group_size, dtype):
    """Values kept in another unit, fused products and sums of codes (`Spec.unit`, `capped`, `integer_turn`) change no bit at either end."""
    quant = QuantConfig(bits=bits, policy="compact", group_size=group_size, rotation="hadamard")
    check_pass(ranks, world_size, algorithm, quant, FeedbackConfig(state="float8_e4m3"), dtype, 64 * 54 + 1, {}, magnitudes)


def landed(group, quant, numel):
    """A two-shot call, and what its push left in this rank's workspace: bytes of the landing area of each source."""
    from echoreduce.kernels.spec import data_offset

    backend = open_backend(group)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    backend.all_reduce(contributions(world_size, numel, torch.bfloat16)[rank], quant, "two_shot")
    area = backend._launchers.popitem()[1].plan.pieces[0].area
    start = data_offset(world_size) + backend._workspace.half  # the first call has epoch 1 and uses half 1
    areas = backend._workspace.local[start : start + world_size * area].reshape(world_size, area).clone()
    backend.close()
    return areas


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_and_qparams_on_the_wire_are_the_reference_s(ranks, bits):
    """Byte for byte as `quant.packing` lays them out, but for the order of a group's chunks (see `kernels.spec`)."""
    quant, numel, world_size = QuantConfig(bits=bits), 1280, 2
    record = reference.trace(contributions(world_size, numel, torch.bfloat16), quant)
    groups = numel // quant.group_size // world_size
    for rank, areas in enumerate(ranks.run(landed, world_size, quant, numel)):
        source = 1 - rank
        level, grid = record.pushed.level[source, rank], record.pushed.grid
        mine = Grid(*(getattr(grid, name)[source, rank] for name in ("scale", "inverse", "zero", "offset", "one_sided")))
        expected = packing.encode(level, mine, quant, torch.bfloat16)
        split = groups * quant.group_size * bits // 8
        words = areas[source, :split].view(torch.int32)
        if bits == 8:
            natural = words.reshape(groups, 2, 4, 4).permute(0, 3, 2, 1)  # group, half of a chunk, lane, piece
        else:
            natural = words.reshape(groups, 4, 4).permute(0, 2, 1)  # group, lane, piece
        assert torch.equal(natural.reshape(-1).contiguous().view(torch.uint8), expected[:split])
        assert torch.equal(areas[source, split : split + 4 * groups], expected[split:])


def test_planes_and_chunk_order_of_the_kernels_are_those_of_the_wire():
    assert PLANES == packing.PLANES
    for policy, bits in itertools.product(("symmetric", "asymmetric", "zero_aware", "compact"), (2, 3, 4, 5, 6)):
        quant, spec = QuantConfig(bits=bits, policy=policy), Spec(2, 0, bits=bits, policy=policy)
        assert (spec.clipped, spec.reach) == (quant.clipped, quant.reach)
    spec = Spec(2, 0)
    assert sorted(wire_chunk(spec, chunk) for chunk in range(16)) == list(range(16))
    assert [wire_chunk(spec, chunk) for chunk in range(5)] == [0, 4, 8, 12, 1]


def check_average(mine, values, exponent):
    stored, scale = mine
    if exponent is None:
        assert torch.equal(stored, values)
    else:
        assert torch.equal(scale, exponent)
        assert torch.equal(stored, values.view(torch.int8))
