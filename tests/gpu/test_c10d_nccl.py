"""The c10d backend over NCCL gives the bits of the reference on the CPU, state included."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contributions import contributions
from echoreduce import QuantConfig, preset
from echoreduce import reference as ref
from echoreduce.communicator import Communicator
from echoreduce.runtime.c10d import C10dBackend
from echoreduce.session import Session
from echoreduce.virtual import VirtualBackend

SITES = 5
CASES = list(
    itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        ("two_shot", "one_shot"),
        (QuantConfig(), QuantConfig(bits=8), QuantConfig(rotation="hadamard"), QuantConfig(bits=5, policy="symmetric")),
    )
)


def sha(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def work(rank: int, world_size: int, rendezvous: str, results: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, device_id=torch.device("cuda", rank)
    )
    lines = []
    for check in (False, True):
        backend = C10dBackend(check_headers=check)
        for dtype, algorithm, quant in CASES:
            x = contributions(world_size, 5001, dtype)[rank].cuda()
            lines.append(sha(backend.all_reduce(x, quant, algorithm)))
    for name in ("default", "paper"):
        session = Communicator(None, name, "c10d").session(SITES)
        session.begin()
        lines += [sha(session.reduce(contributions(world_size, 5001, seed=k)[rank].cuda())) for k in range(SITES)]
    (Path(results) / f"{rank}.txt").write_text("\n".join(lines))
    dist.destroy_process_group()


@pytest.mark.gpu(2)
def test_nccl_equals_the_reference_on_the_cpu(tmp_path: Path) -> None:
    mp.start_processes(work, args=(2, str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=2, start_method="spawn")
    expected = []
    for _ in range(2):
        expected += [sha(ref.all_reduce(contributions(2, 5001, dtype), quant, algorithm).output) for dtype, algorithm, quant in CASES]
    for name in ("default", "paper"):
        session = Session(VirtualBackend(2), preset(name), SITES)
        session.begin()
        expected += [sha(session.reduce(contributions(2, 5001, seed=k))) for k in range(SITES)]
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text().split("\n") == expected
