"""The P2P backend, every bit as in the CPU reference, eager and as a CUDA graph: on all GPUs of the machine, and with two, three, four
and eight ranks on whatever GPUs there are, one included."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from contributions import contributions, magnitudes
from echoreduce import reference
from echoreduce.config import NO_FEEDBACK, PRESETS, FeedbackConfig, QuantConfig
from gpu_ranks import check_pass, open_backend, run

pytestmark = pytest.mark.gpu(1)
WORLD = min(8, max(2, torch.cuda.device_count()))
CALLS = 400
PAPER = FeedbackConfig("group", 0.75, 0.35, (0.7, 0.3), "fp32")
FLOAT8 = FeedbackConfig(state="float8_e4m3")


#: (quantizer, algorithm, feedback, dtype, numel): every quantizer, state, dtype and way of padding once; each compiles anew.
CONFIGURATIONS = [
    (QuantConfig(), "two_shot", FLOAT8, torch.bfloat16, 300_007),
    (QuantConfig(), "one_shot", FLOAT8, torch.bfloat16, 128 * 4096),
    (QuantConfig(bits=8), "two_shot", FeedbackConfig(state="float8_e5m2"), torch.bfloat16, 1000),
    (QuantConfig(bits=8), "one_shot", NO_FEEDBACK, torch.float16, 70_001),
    (QuantConfig(), "two_shot", FeedbackConfig(), torch.float32, 1),
    (QuantConfig(bits=6, group_size=64), "two_shot", NO_FEEDBACK, torch.bfloat16, 40_001),
    (QuantConfig(bits=5, policy="asymmetric", group_size=32), "two_shot", NO_FEEDBACK, torch.float16, 40_001),
    (QuantConfig(bits=3, policy="symmetric", group_size=256), "one_shot", NO_FEEDBACK, torch.float32, 40_001),
    (QuantConfig(rotation="hadamard"), "two_shot", NO_FEEDBACK, torch.bfloat16, 40_001),
    (PRESETS["default"].quant, "two_shot", PRESETS["default"].feedback, torch.bfloat16, 300_007),
    (PRESETS["default"].quant, "one_shot", PRESETS["default"].feedback, torch.bfloat16, 40_001),
    (PRESETS["default"].quant, "two_shot", NO_FEEDBACK, torch.float16, 40_001),
    (QuantConfig(bits=5, policy="compact", rotation="hadamard", group_size=64), "two_shot", FLOAT8, torch.bfloat16, 40_001),
    (QuantConfig(qparams="fp16"), "two_shot", PAPER, torch.bfloat16, 1_000_001),
    (QuantConfig(), "two_shot", FLOAT8, torch.bfloat16, 1 << 20),
]


def _every_configuration(rank):
    backend = open_backend(first_half=1 << 16)
    for quant, algorithm, feedback, dtype, numel in CONFIGURATIONS:
        check_pass(backend, rank, quant, algorithm, feedback, dtype, numel)
    backend.close()
    backend = open_backend(first_half=1 << 14, largest_half=1 << 18)  # in pieces
    check_pass(backend, rank, QuantConfig(), "two_shot", FLOAT8, torch.bfloat16, 2_000_001)
    backend.close()


def _every_magnitude(rank):
    backend = open_backend(first_half=1 << 20)
    chosen = PRESETS["default"]
    for algorithm, dtype, group_size in (
        ("two_shot", torch.bfloat16, 64),
        ("one_shot", torch.bfloat16, 64),
        ("two_shot", torch.float16, 64),
        ("two_shot", torch.float32, 64),
        ("two_shot", torch.bfloat16, 32),
        ("two_shot", torch.bfloat16, 128),
    ):
        quant = replace(chosen.quant, group_size=group_size)
        check_pass(backend, rank, quant, algorithm, chosen.feedback, dtype, 64 * 540 + 1, data=magnitudes)
    backend.close()


def test_rotated_groups_of_every_magnitude():
    """Products that are fused, sums of codes and values in another unit, in machine code (the interpreter takes other instructions)."""
    run(_every_magnitude, world=2)


def test_every_configuration_equals_the_reference():
    run(_every_configuration, world=WORLD)


#: What the presets send, at sizes that no P divides; for P that the machine may not have a GPU each for.
CHOSEN = [
    *(
        (PRESETS[name].quant, "two_shot", PRESETS[name].feedback, torch.bfloat16, 100_003)
        for name in ("default", "fast", "accurate", "paper")
    ),
    (PRESETS["default"].quant, "one_shot", PRESETS["default"].feedback, torch.bfloat16, 20_001),
    (PRESETS["int8"].quant, "two_shot", NO_FEEDBACK, torch.float16, 40_001),
]


def _presets(rank, chosen):
    backend = open_backend(first_half=1 << 16)
    for quant, algorithm, feedback, dtype, numel in chosen:
        check_pass(backend, rank, quant, algorithm, feedback, dtype, numel)
    backend.close()


@pytest.mark.parametrize(("world", "count"), [(2, 6), (3, 2), (4, 6), (8, 2)])
def test_presets_at_every_number_of_ranks(world, count):
    if 1 < torch.cuda.device_count() < world:
        pytest.skip(f"{world} ranks need {world} GPUs, or one that all share; found {torch.cuda.device_count()}")
    run(_presets, CHOSEN[:count], world=world)


def _graph(rank):
    backend = open_backend()
    quant, numel, sites = QuantConfig(), 50_001, 4
    x = torch.zeros(sites, numel, dtype=torch.bfloat16, device="cuda")
    y = torch.zeros_like(x)
    state = backend.new_state(FLOAT8)

    def one_pass():
        state.reset()
        for site in range(sites):
            backend.all_reduce(x[site], quant, "two_shot", state, out=y[site])

    one_pass()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_pass()
    for replay in range(50):
        x.copy_(torch.stack([contributions(WORLD, numel, torch.bfloat16, seed=10 * replay + site)[rank] for site in range(sites)]))
        graph.replay()
        captured = y.clone()
        y.zero_()
        one_pass()
        backend.synchronize()
        assert torch.equal(captured, y), f"replay {replay} differs from the eager pass"
    backend.close()


def test_graph_replay_equals_eager():
    run(_graph, world=WORLD)


def _shapes(rank):
    backend = open_backend(first_half=1 << 16)
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = [], []
    for call in range(CALLS):
        rows = int(torch.randint(1, 65, (1,), generator=generator))
        hidden = (2880, 64, 4096)[int(torch.randint(0, 3, (1,), generator=generator))]
        shape = (8 * rows, hidden) if call == CALLS // 2 else (rows, hidden)
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(2 * call + rank)).bfloat16()
        inputs.append(shape)
        outputs.append(backend.all_reduce(x.cuda(), QuantConfig(), ("two_shot", "one_shot")[call % 2]))
    backend.synchronize()
    for call in range(0, CALLS, 20):
        generators = [torch.Generator().manual_seed(2 * call + peer) for peer in range(WORLD)]
        every = torch.stack([torch.randn(*inputs[call], generator=each).bfloat16() for each in generators])
        assert torch.equal(outputs[call].cpu(), reference.all_reduce(every, QuantConfig(), ("two_shot", "one_shot")[call % 2]).output)
    backend.close()


def test_calls_of_changing_shape_and_algorithm():
    run(_shapes, world=WORLD)


def _streams(rank):
    backend = open_backend()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.randn(2, 1 << 20, generator=torch.Generator().manual_seed(rank)).bfloat16().cuda()
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(first):
            a = backend.all_reduce(x[0], QuantConfig(), "two_shot")
        with torch.cuda.stream(second):
            b = backend.all_reduce(x[1], QuantConfig(), "two_shot")
    torch.cuda.synchronize()
    backend.synchronize()
    every = torch.stack([torch.randn(2, 1 << 20, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(WORLD)])
    assert torch.equal(a.cpu(), reference.all_reduce(every[:, 0], QuantConfig(), "two_shot").output)
    assert torch.equal(b.cpu(), reference.all_reduce(every[:, 1], QuantConfig(), "two_shot").output)
    backend.close()


def test_two_streams_are_put_in_order():
    run(_streams, world=WORLD)


def _late(rank):
    """Rank 1 never calls, as if it had died: rank 0 says so within the bound and can go on."""
    from echoreduce.errors import PeerError
    from echoreduce.runtime.p2p import P2PBackend

    backend = P2PBackend(timeout=timedelta(seconds=2))
    if rank == 0:
        y = backend.all_reduce(torch.ones(1 << 20, dtype=torch.bfloat16, device="cuda"), QuantConfig(), "two_shot")
        enqueued = time.monotonic()
        with pytest.raises(PeerError, match="gave up waiting for rank 1") as caught:
            backend.synchronize()
        assert caught.value.ranks == (1,)
        assert time.monotonic() - enqueued < 4.0
        assert bool(y.isnan().any())
        with pytest.raises(PeerError):
            backend.close()


def test_a_peer_that_never_comes_is_reported_within_the_bound():
    run(_late, world=2)


def _mismatch(rank):
    from echoreduce.errors import MismatchError

    backend = open_backend(blocking=True)
    with pytest.raises(MismatchError, match=r"rank 0: 25600 values bf16.*rank 1: 51200 values bf16"):
        backend.all_reduce(torch.ones(100 * (rank + 1), 256, dtype=torch.bfloat16, device="cuda"), QuantConfig(), "two_shot")


def test_a_mismatch_is_raised_on_both_ranks():
    run(_mismatch, world=2)
