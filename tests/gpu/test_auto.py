"""`Communicator` on NCCL picks peer-to-peer kernels by itself; a session over it and an attached model give the bits of virtual ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from contributions import contributions
from echoreduce import preset
from echoreduce.communicator import Communicator
from echoreduce.integrations.transformers import attach
from echoreduce.session import Session
from echoreduce.virtual import VirtualBackend

SITES = 6
NAMES = ("default", "paper", "no_feedback")


def work(rank: int, rendezvous: str, results: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=2, device_id=device)
    found: dict[str, object] = {}
    for name in NAMES:
        with Communicator(None, name) as communicator:
            found[f"{name} explain"] = communicator.explain(torch.empty(1 << 20, dtype=torch.bfloat16))
            session = communicator.session(SITES)
            for numel in (5000, 70_001):
                session.begin()
                xs = [contributions(2, numel, torch.bfloat16, seed=k)[rank].to(device) for k in range(SITES)]
                found[f"{name} {numel}"] = [session.reduce(x).cpu() for x in xs]
            with attach(tiny(device), name, backend=communicator.backend) as attachment, torch.no_grad():
                ids = torch.arange(34, device=device).reshape(2, 17)
                found[f"{name} logits"] = attachment.model(input_ids=ids, use_cache=False).logits.cpu()
            communicator.backend.synchronize()
    torch.save(found, Path(results) / f"{rank}.pt")
    dist.destroy_process_group()


def tiny(device: torch.device) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(device, torch.bfloat16).eval()  # fp32 messages this small go exact


@pytest.mark.gpu(2)
def test_auto_equals_virtual_ranks(tmp_path: Path) -> None:
    mp.start_processes(work, args=(str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=2, start_method="spawn")
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    device = torch.device("cuda", 0)
    for name in NAMES:
        session = Session(VirtualBackend(2), preset(name), SITES)
        for numel in (5000, 70_001):
            session.begin()
            expected = [session.reduce(contributions(2, numel, torch.bfloat16, seed=k)) for k in range(SITES)]
            for rank in range(2):
                assert all(torch.equal(a, b) for a, b in zip(found[rank][f"{name} {numel}"], expected)), (name, numel)
        with attach(tiny(device), name, world_size=2) as attachment, torch.no_grad():
            logits = attachment.model(input_ids=torch.arange(34, device=device).reshape(2, 17), use_cache=False).logits.cpu()
        for rank in range(2):
            assert torch.equal(found[rank][f"{name} logits"], logits), name
            assert "backend auto" in found[rank][f"{name} explain"]
            assert "p2p: " in found[rank][f"{name} explain"]
