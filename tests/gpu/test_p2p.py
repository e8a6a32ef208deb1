"""The P2P backend on two GPUs: every bit as in the reference (computed on the CPU), eager and as a CUDA graph."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contributions import contributions

from echoreduce import reference
from echoreduce.config import NO_FEEDBACK, FeedbackConfig, QuantConfig
from echoreduce.feedback.compensator import FeedbackState, correction, update

pytestmark = pytest.mark.gpu(2)
WORLD = 2
PAPER = FeedbackConfig("group", 0.75, 0.35, (0.7, 0.3), "fp32")
FLOAT8 = FeedbackConfig(state="float8_e4m3")


def _serve(rank, port, function, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=WORLD, device_id=device, timeout=timedelta(seconds=60))
    function(rank, *arguments)
    dist.destroy_process_group()


def run(function, *arguments):
    """Call function(rank, *arguments) in two processes, one a GPU; a failure there fails the test with its traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_serve, args=(port, function, arguments), nprocs=WORLD, join=True)


def open_backend(**options):
    from echoreduce.runtime.p2p import P2PBackend

    return P2PBackend(timeout=timedelta(seconds=10), **options)


def check_pass(backend, rank, quant, algorithm, feedback, dtype, numel, sites=3):
    """One pass, each output and the state compared with the reference."""
    state = backend.new_state(feedback) if feedback.enabled else None
    ideal = FeedbackState(feedback)
    for site in range(sites):
        every = contributions(WORLD, numel, dtype, seed=site)
        if site == 1 and numel > 2000:
            every[1, 1500] = float("nan")
        mine = backend.all_reduce(every[rank].cuda(), quant, algorithm, state)
        backend.synchronize()
        expected = reference.all_reduce(every, quant, algorithm, correction(ideal), feedback.residual)
        torch.testing.assert_close(mine.cpu(), expected.output, rtol=0, atol=0, equal_nan=True)
        if state is not None:
            update(ideal, expected.residuals, expected.steps)
            for (values, exponents), want in zip(state.averages(), ideal.averages, strict=True):
                flat = want.values[rank].reshape(-1)
                assert torch.equal(values.cpu(), flat.view(torch.int8) if want.exponent is not None else flat)
                if want.exponent is not None:
                    assert torch.equal(exponents.cpu(), want.exponent[rank].reshape(-1))


def _every_configuration(rank):
    backend = open_backend(first_half=1 << 16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for algorithm in ("two_shot", "one_shot"):
            for numel in (1, 1000, 128 * 4096, 300_007) if dtype == torch.bfloat16 else (300_007,):
                check_pass(backend, rank, QuantConfig(), algorithm, FLOAT8, dtype, numel)
            check_pass(backend, rank, QuantConfig(bits=8), algorithm, NO_FEEDBACK, dtype, 70_001)
    for bits, policy, group_size in ((5, "asymmetric", 32), (6, "zero_aware", 64), (3, "symmetric", 256), (8, "symmetric", 16), (2, "zero_aware", 128)):
        quant = QuantConfig(bits=bits, policy=policy, group_size=group_size)
        check_pass(backend, rank, quant, "two_shot", FeedbackConfig(state="float8_e5m2"), torch.bfloat16, 40_001)
    check_pass(backend, rank, QuantConfig(rotation="hadamard"), "two_shot", FeedbackConfig(), torch.bfloat16, 40_001)
    check_pass(backend, rank, QuantConfig(qparams="fp16"), "two_shot", PAPER, torch.bfloat16, 1_000_001)
    check_pass(backend, rank, QuantConfig(), "one_shot", PAPER, torch.bfloat16, 100_001)
    backend.close()
    backend = open_backend(first_half=1 << 14, largest_half=1 << 18)
    check_pass(backend, rank, QuantConfig(), "two_shot", FLOAT8, torch.bfloat16, 2_000_001)
    check_pass(backend, rank, QuantConfig(), "one_shot", PAPER, torch.bfloat16, 2_000_001)
    backend.close()


def test_every_configuration_equals_the_reference():
    run(_every_configuration)


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
    run(_graph)


def _shapes(rank):
    backend = open_backend(first_half=1 << 16)
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = [], []
    for call in range(1000):
        rows = int(torch.randint(1, 65, (1,), generator=generator))
        hidden = (2880, 64, 4096)[int(torch.randint(0, 3, (1,), generator=generator))]
        shape = (8 * rows, hidden) if call == 500 else (rows, hidden)
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(2 * call + rank)).bfloat16()
        inputs.append(shape)
        outputs.append(backend.all_reduce(x.cuda(), QuantConfig(), ("two_shot", "one_shot")[call % 2]))
    backend.synchronize()
    for call in range(0, 1000, 50):
        every = torch.stack([torch.randn(*inputs[call], generator=torch.Generator().manual_seed(2 * call + r)).bfloat16() for r in range(WORLD)])
        assert torch.equal(outputs[call].cpu(), reference.all_reduce(every, QuantConfig(), ("two_shot", "one_shot")[call % 2]).output)
    backend.close()


def test_thousand_calls_of_changing_shape_and_algorithm():
    run(_shapes)


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
    run(_streams)
