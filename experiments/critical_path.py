"""Time that an all-reduce adds to the critical path: matrix product and all-reduce together, minus the matrix product alone.

    torchrun --nproc-per-node 2 experiments/critical_path.py --out critical_path.json

As the paper measures it (Section 7.1): the group residual's update runs on a side stream beside the next product, so what it costs is what
it takes from that product. 1 GiB is [65536, 4096] by [4096, 8192] in bf16.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.config import PRESETS, EchoConfig
from echoreduce.measure.report import write_json
from echoreduce.measure.timing import summarize
from echoreduce.runtime.p2p import P2PBackend
from echoreduce.runtime.schedule import UpdateTuning
from echoreduce.runtime.state import P2PState


@dataclass(frozen=True)
class Variant:
    """What follows the product: nothing, NCCL, or a preset whose averages are kept in `state` and updated as `update` says."""

    name: str
    state: str = ""
    update: UpdateTuning | None = None

    @property
    def label(self) -> str:
        """Key in the results."""
        if self.update is None:
            return self.name
        return (
            f"{self.name}, {self.state} averages, update {self.update.blocks} x {self.update.warps} warps, priority {self.update.priority}"
        )

    def config(self) -> EchoConfig:
        """The preset with this variant's state."""
        config = PRESETS[self.name]
        return replace(config, feedback=replace(config.feedback, state=self.state)) if self.state else config


def variants(states: str, updates: str) -> list[Variant]:
    """The fixed rows, then `paper` for each state and update (blocks x warps x priority)."""
    found = [Variant("product"), Variant("nccl"), Variant("no_feedback"), Variant("default")]
    for state in states.split(","):
        for update in updates.split(","):
            blocks, warps, priority = map(int, update.split("x"))
            found.append(Variant("paper", state, UpdateTuning(blocks, warps, priority)))
    return found


def reduce_site(backend: P2PBackend, config: EchoConfig, state: P2PState | None, y: Tensor, x: Tensor) -> None:
    """One site; the state starts with the first and is never reset, since every later site costs the same."""
    backend.all_reduce(x, config.quant, "two_shot", state, out=y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--sites", type=int, default=10, help="products and all-reduces of a timed pass")
    parser.add_argument("--passes", type=int, default=8, help="timed passes, after three untimed ones")
    parser.add_argument("--states", default="fp32", help="of the averages of `paper`, with commas")
    parser.add_argument("--updates", default="528x4x0", help="blocks x warps x stream priority of its update, with commas")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    a = torch.randn(options.tokens, options.inner, device=device, dtype=torch.bfloat16)
    w = torch.randn(options.inner, options.hidden, device=device, dtype=torch.bfloat16) / options.inner**0.5
    outputs = [torch.empty(options.tokens, options.hidden, device=device, dtype=torch.bfloat16) for _ in range(2)]
    y = torch.empty_like(outputs[0])

    def one_pass(call: Callable[[Tensor], object]) -> float:
        """Milliseconds a site."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for site in range(options.sites):
            call(torch.mm(a, w, out=outputs[site % 2]))
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / options.sites

    rows = {}
    for variant in variants(options.states, options.updates):
        backend = None
        call: Callable[[Tensor], object] = {"product": lambda x: None, "nccl": dist.all_reduce}.get(variant.name)  # type: ignore[assignment]
        if call is None:
            backend, config = P2PBackend(first_half=600 << 20, update=variant.update or UpdateTuning()), variant.config()
            state = backend.new_state(config.feedback) if config.feedback.enabled else None
            call = partial(reduce_site, backend, config, state, y)
        durations = []
        for repetition in range(options.passes + 3):
            dist.barrier()
            duration = torch.tensor([one_pass(call)], device=device)
            dist.all_reduce(duration, op=dist.ReduceOp.MAX)
            if repetition >= 3:
                durations.append(float(duration))
        rows[variant.label] = summarize(durations).median
        if backend is not None:
            backend.close()
    if rank == 0:
        alone = rows["product"]
        for label, median in rows.items():
            added = median - alone
            ratio = (rows["nccl"] - alone) / added if added > 0 else float("nan")
            print(f"{label}: {median:.3f} ms, adds {added:.3f} ms to the product's {alone:.3f}, {ratio:.2f}x of nccl", flush=True)
        if options.out:
            write_json(options.out, milliseconds=rows, tokens=options.tokens, hidden=options.hidden, inner=options.inner)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
