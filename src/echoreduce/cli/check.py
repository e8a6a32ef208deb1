"""`echoreduce check`: is this machine fit for peer-to-peer kernels, and does the check itself notice wrong sums?

    torchrun --nproc-per-node 2 -m echoreduce check

Topology, a real write to every peer, link bandwidth, sums of data that can betray (different on every rank and in every segment), the same
bits on all ranks; then the check is run on collectives that are wrong on purpose, and has to fail on each. Exit code 1 if anything fails.

Source: mscclpp and rccl-tests threads (case O37: a self-check that every shard mix-up passed).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import Tensor

from echoreduce.cli.bench import console, contribution, start
from echoreduce.config import NO_FEEDBACK, FeedbackConfig, QuantConfig
from echoreduce.errors import BackendUnavailable
from echoreduce.measure.numeric import bound, first_bad
from echoreduce.measure.report import write_json
from echoreduce.measure.timing import summarize, time_eager
from echoreduce.partition import partition
from echoreduce.runtime.p2p import P2PBackend

Sum = Callable[[Tensor, QuantConfig, str], Tensor]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)


def check(
    numel: Annotated[int, typer.Option(min=1, help="values of the largest tensor that is summed")] = 1_000_003,
    json: Annotated[Path | None, typer.Option("--json", help="write the findings here")] = None,
) -> None:
    """Topology, peer-to-peer probe, link bandwidth, correctness; needs torchrun and one CUDA device a rank."""
    device = start()
    findings: list[tuple[str, bool, str]] = [topology(device)]
    try:
        backend = P2PBackend()
    except BackendUnavailable as error:
        findings.append(("peer-to-peer probe", False, str(error)))
        backend = None
    if backend is not None:
        findings.append(("peer-to-peer probe", True, "every rank's write arrived at every rank"))
        findings.append(bandwidth(device))
        findings.extend(correctness(backend, numel, device))
        findings.extend(mutants(backend, numel, device))
        backend.close()
    good = all(passed for _, passed, _ in findings)
    if dist.get_rank() == 0:
        table = Table(title="echoreduce check", title_justify="left")
        for column in ("what", "result", "detail"):
            table.add_column(column)
        for what, passed, detail in findings:
            table.add_row(what, "pass" if passed else "FAIL", detail)
        console.print(table)
        if json is not None:
            write_json(json, findings=findings)
    dist.destroy_process_group()
    if not good:
        raise typer.Exit(1)


def topology(device: torch.device) -> tuple[str, bool, str]:
    """Device names, and which pairs the driver says can write to each other."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)]
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    detail = f"{dist.get_world_size()} ranks, {count} devices ({names})"
    return ("topology", not pairs, detail + (f"; no peer access {pairs}" if pairs else "; peer access between all"))


def bandwidth(device: torch.device) -> tuple[str, bool, str]:
    """Both ways at once, rank to the next rank, through the process group; GB/s of one direction."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        return ("link", True, "one rank")
    sent = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    median = summarize(time_eager(exchange, 3, 10, device)).median
    return ("link", True, f"{sent.numel() / median / 1e6:.0f} GB/s each way (send and receive of 256 MiB at once)")


def verify(reduce: Sum, numel: int, quant: QuantConfig, algorithm: str, device: torch.device) -> str:
    """Sum known data and compare; an empty text, or what is wrong with its first bad index. Collective."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    every = [contribution(numel, torch.bfloat16, device, peer) for peer in range(world_size)]
    exact = torch.stack(every).float().sum(0)
    y = reduce(every[rank], quant, algorithm)
    torch.cuda.synchronize()
    bad = first_bad(y, exact, bound(every, exact, quant, torch.bfloat16))
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, (bad, y.view(torch.int16).long().sum().item()))
    wrong = [(peer, index) for peer, (index, _) in enumerate(found) if index is not None]
    if wrong:
        return f"first bad index {wrong[0][1]} on rank {wrong[0][0]}"
    return "" if len({checksum for _, checksum in found}) == 1 else "the ranks hold different bits"


def correctness(backend: P2PBackend, numel: int, device: torch.device) -> list[tuple[str, bool, str]]:
    """Sums at several sizes, bits and algorithms; and a pass with feedback, equal on all ranks."""
    findings = []
    for bits in (4, 8):
        for algorithm in ("two_shot", "one_shot"):
            for size in sorted({1, min(numel, 129), numel}):
                wrong = verify(backend.all_reduce, size, QuantConfig(bits=bits), algorithm, device)
                findings.append((f"{bits}-bit {algorithm}, {size} values", not wrong, wrong or "every value within its bound"))
    for feedback in (NO_FEEDBACK, FeedbackConfig(state="float8_e4m3")):
        state = backend.new_state(feedback) if feedback.enabled else None
        checksums = []
        for site in range(4):
            x = contribution(numel, torch.bfloat16, device, dist.get_rank() + 16 * site)
            checksums.append(backend.all_reduce(x, QuantConfig(), "two_shot", state).view(torch.int16).long().sum().item())
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, checksums)
        same = all(other == checksums for other in everywhere)
        findings.append((f"4 sites, feedback {feedback.residual}", same, "the same bits on all ranks" if same else "ranks differ"))
    return findings


def mutants(backend: P2PBackend, numel: int, device: torch.device) -> list[tuple[str, bool, str]]:
    """Collectives that are wrong on purpose; each must be found."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return []

    def swapped(x: Tensor, quant: QuantConfig, algorithm: str) -> Tensor:
        y = backend.all_reduce(x, quant, algorithm)
        cut = partition(x.numel(), world_size, quant.group_size)
        (a, b), (c, d) = cut.bounds(0), cut.bounds(1)
        width = min(b - a, d - c)
        y[a : a + width], y[c : c + width] = y[c : c + width].clone(), y[a : a + width].clone()
        return y

    def without_last(x: Tensor, quant: QuantConfig, algorithm: str) -> Tensor:
        return backend.all_reduce(torch.zeros_like(x) if dist.get_rank() == world_size - 1 else x, quant, algorithm)

    def first_twice(x: Tensor, quant: QuantConfig, algorithm: str) -> Tensor:
        return backend.all_reduce(2 * x if dist.get_rank() == 0 else x, quant, algorithm)

    findings = []
    for what, wrong in (("segments 0 and 1 swapped", swapped), ("last rank left out", without_last), ("rank 0 added twice", first_twice)):
        text = verify(wrong, numel, QuantConfig(), "two_shot", device)
        findings.append((f"mutant: {what}", bool(text), f"found: {text}" if text else "NOT FOUND by the check"))
    return findings
