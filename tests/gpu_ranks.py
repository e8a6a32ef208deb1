"""Real processes on the GPUs of this machine, one a rank; where ranks outnumber GPUs, several share one and take turns (correct, slow).

Leaves out: timing. NCCL refuses ranks that share a device, so those find each other over gloo; the kernels are the same.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contributions import contributions
from echoreduce import reference
from echoreduce.feedback.compensator import FeedbackState, correction, update
from echoreduce.runtime.requirements import SHARE_DEVICES


def _serve(rank, port, world, function, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    found = torch.cuda.device_count()
    device = torch.device("cuda", rank % found)
    torch.cuda.set_device(device)
    if world > found:
        os.environ[SHARE_DEVICES] = "1"
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    else:
        dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device, timeout=timedelta(seconds=60))
    function(rank, *arguments)
    dist.destroy_process_group()


def run(function, *arguments, world):
    """Call function(rank, *arguments) in `world` processes; a failure there fails the test with its traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_serve, args=(port, world, function, arguments), nprocs=world, join=True)


def open_backend(**options):
    """A P2P backend of all ranks. Its waits last longer than the other ranks' compilation of a kernel."""
    from echoreduce.runtime.p2p import P2PBackend

    shared = dist.get_world_size() > torch.cuda.device_count()
    return P2PBackend(timeout=timedelta(seconds=60 if shared else 10), **options)


def check_pass(backend, rank, quant, algorithm, feedback, dtype, numel, sites=3, data=contributions):
    """One pass, each output and the state compared with the reference."""
    state = backend.new_state(feedback) if feedback.enabled else None
    ideal = FeedbackState(feedback)
    for site in range(sites):
        every = data(backend.world_size, numel, dtype, seed=site)
        if site == 1 and numel > 2000:
            every[1, 1500] = float("nan")
        mine = backend.all_reduce(every[rank].cuda(), quant, algorithm, state)
        backend.synchronize()
        expected = reference.all_reduce(every, quant, algorithm, correction(ideal), feedback.residual)
        torch.testing.assert_close(mine.cpu(), expected.output, rtol=0, atol=0, equal_nan=True)
        if state is not None:
            update(ideal, expected.residuals, expected.bounds)
            for (values, exponents), want in zip(state.averages(), ideal.averages, strict=True):
                flat = want.values[rank].reshape(-1)
                assert torch.equal(values.cpu(), flat.view(torch.int8) if want.exponent is not None else flat)
                if want.exponent is not None:
                    assert torch.equal(exponents.cpu(), want.exponent[rank].reshape(-1))
