"""What goes wrong on real GPUs: a killed peer (O17), memory that cannot be opened (O18); and equal bits on all ranks, in all runs (O33)."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contributions import contributions
from echoreduce import reference
from echoreduce.config import NO_FEEDBACK, FeedbackConfig, QuantConfig

pytestmark = pytest.mark.gpu(2)
WORLD = 2
TIMEOUT = 3.0


def start_group(rank, port, store_timeout=60):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=WORLD, device_id=device, timeout=timedelta(seconds=store_timeout))
    return device


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _killed(rank, port, marker):
    """Rank 1 dies by SIGKILL between two calls; rank 0 writes what it saw and leaves by SIGTERM's default action."""
    from echoreduce.errors import PeerError
    from echoreduce.runtime.p2p import P2PBackend

    device = start_group(rank, port)
    backend = P2PBackend(timeout=timedelta(seconds=TIMEOUT))
    x = torch.ones(1 << 20, dtype=torch.bfloat16, device=device)
    for _ in range(20):
        backend.all_reduce(x, QuantConfig(), "two_shot")
    backend.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    backend.all_reduce(x, QuantConfig(), "two_shot")
    try:
        backend.synchronize()
    except PeerError as error:
        Path(marker).write_text(f"{time.monotonic() - began:.3f} {error.ranks} {error}")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)  # only if SIGTERM did not end it


def test_a_killed_peer_is_reported_and_the_survivor_can_be_ended(tmp_path):
    marker = tmp_path / "seen"
    context = mp.get_context("spawn")
    processes = [context.Process(target=_killed, args=(rank, port, str(marker))) for port in [free_port()] for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [-signal.SIGTERM, -signal.SIGKILL]
    seconds, text = marker.read_text().split(" ", 1)
    assert text.startswith("(1,)")
    assert "rank 1" in text
    assert TIMEOUT - 0.5 < float(seconds) < TIMEOUT + 2.0


def _cannot_open(rank, port, failing):
    """The step that opens the peers' memory fails on the ranks `failing`."""
    from echoreduce.errors import BackendUnavailable, EchoReduceWarning
    from echoreduce.runtime.dispatch import open_backend
    from echoreduce.runtime.memory import SymmetricBlock

    device = start_group(rank, port)

    def refuse(self, *arguments):
        raise RuntimeError("cudaIpcOpenMemHandle: invalid device context")

    original = SymmetricBlock.allocate
    if rank in failing:
        SymmetricBlock.allocate = refuse
    every = contributions(WORLD, 70_001, torch.bfloat16)
    expected = reference.all_reduce(every, QuantConfig(), "two_shot").output
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend, reason = open_backend(None, "auto")
    assert backend.name == "c10d"
    assert "invalid device context" in reason
    assert sum(issubclass(each.category, EchoReduceWarning) for each in caught) == 1
    assert torch.equal(backend.all_reduce(every[rank].to(device), QuantConfig(), "two_shot").cpu(), expected)
    with pytest.raises(BackendUnavailable, match=f"rank {failing[0]}: .*invalid device context"):
        open_backend(None, "p2p")
    SymmetricBlock.allocate = original
    backend, _ = open_backend(None, "p2p")
    assert torch.equal(backend.all_reduce(every[rank].to(device), QuantConfig(), "two_shot").cpu(), expected)
    backend.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("failing", [(1,), (0, 1)])
def test_ranks_agree_when_memory_cannot_be_opened(failing):
    mp.spawn(_cannot_open, args=(free_port(), failing), nprocs=WORLD, join=True)


def _half_open(rank, port):
    """Rank 1 fails inside the rendezvous, where the other one already waits for it: the bound on that wait brings both together."""
    import torch.distributed._symmetric_memory as symmetric

    from echoreduce.errors import BackendUnavailable
    from echoreduce.runtime import memory
    from echoreduce.runtime.p2p import P2PBackend

    start_group(rank, port)
    memory.CONNECT_TIMEOUT = timedelta(seconds=3)

    def refuse(*arguments):
        raise RuntimeError("cudaIpcOpenMemHandle: invalid device context")

    original = symmetric.rendezvous
    if rank == 1:
        symmetric.rendezvous = refuse
    began = time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"open the peers' memory .*rank 1: RuntimeError: cudaIpcOpenMemHandle"):
        P2PBackend()
    assert time.monotonic() - began < 20.0
    symmetric.rendezvous = original
    dist.destroy_process_group()


def test_a_rank_that_fails_inside_the_rendezvous():
    mp.spawn(_half_open, args=(free_port(),), nprocs=WORLD, join=True)


def _expandable(rank, port):
    from echoreduce.runtime.dispatch import open_backend

    device = start_group(rank, port)
    every = contributions(WORLD, 70_001, torch.bfloat16)
    backend, _ = open_backend(None, "auto")
    result = backend.all_reduce(every[rank].to(device), QuantConfig(), "two_shot").cpu()
    assert torch.equal(result, reference.all_reduce(every, QuantConfig(), "two_shot").output)
    backend.close()
    dist.destroy_process_group()


def test_expandable_segments():
    code = "import sys, torch.multiprocessing as m, test_failing_peers as t; m.spawn(t._expandable, args=(int(sys.argv[1]),), nprocs=2)"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment["PYTHONPATH"] = ":".join([*folders, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(free_port()), ":".join(folders)], env=environment, timeout=120, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


SITES = 10
#: O33: one hash a configuration over ranks, runs and delays.
CONFIGURATIONS = [
    (QuantConfig(bits=bits, policy=policy), algorithm, feedback, dtype)
    for bits, policy, algorithm, feedback, dtype in [
        (4, "zero_aware", "two_shot", FeedbackConfig(state="float8_e4m3"), torch.bfloat16),
        (4, "symmetric", "one_shot", NO_FEEDBACK, torch.float16),
        (8, "asymmetric", "two_shot", FeedbackConfig("group", 0.75, 0.35, (0.7, 0.3), "fp32"), torch.float32),
        (8, "symmetric", "two_shot", NO_FEEDBACK, torch.bfloat16),
    ]
]


def _hashes(rank, port, results):
    from echoreduce.runtime.p2p import P2PBackend

    device = start_group(rank, port)
    backend = P2PBackend(timeout=timedelta(seconds=20))
    delays = torch.Generator().manual_seed(rank)
    found = []
    for quant, algorithm, feedback, dtype in CONFIGURATIONS:
        for run in range(3):
            state = backend.new_state(feedback) if feedback.enabled else None
            digest = hashlib.sha256()
            for site in range(SITES):
                if run == 2:
                    time.sleep(0.02 * float(torch.rand((), generator=delays)))
                x = contributions(WORLD, 100_003, dtype, seed=site)[rank].to(device)
                digest.update(backend.all_reduce(x, quant, algorithm, state).cpu().view(torch.uint8).numpy().tobytes())
            found.append(digest.hexdigest())
    backend.close()
    torch.save(found, Path(results) / f"{rank}.pt")
    dist.destroy_process_group()


def test_one_hash_over_ranks_runs_and_delays(tmp_path):
    mp.spawn(_hashes, args=(free_port(), str(tmp_path)), nprocs=WORLD, join=True)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    assert found[0] == found[1]
    assert len(found[0]) == 3 * len(CONFIGURATIONS)
    for index in range(0, len(found[0]), 3):
        assert len(set(found[0][index : index + 3])) == 1
