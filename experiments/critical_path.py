"""Time that an all-reduce adds to the critical path: matrix product and all-reduce together, minus the matrix product alone.

    torchrun --nproc-per-node 2 experiments/critical_path.py --out critical_path.json

As the paper measures it (Section 7.1): the group residual's update runs on a side stream beside the next product, so what it costs is what
it takes from that product. 1 GiB is [65536, 4096] by [4096, 8192] in bf16.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from echoreduce.config import PRESETS
from echoreduce.measure.report import write_json
from echoreduce.measure.timing import summarize
from echoreduce.runtime.p2p import P2PBackend

VARIANTS = ("nccl", "no_feedback", "default", "paper")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--sites", type=int, default=10, help="products and all-reduces of a timed pass")
    parser.add_argument("--passes", type=int, default=8, help="timed passes, after three untimed ones")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    backend = P2PBackend(first_half=600 << 20)
    a = torch.randn(options.tokens, options.inner, device=device, dtype=torch.bfloat16)
    w = torch.randn(options.inner, options.hidden, device=device, dtype=torch.bfloat16) / options.inner**0.5
    outputs = [torch.empty(options.tokens, options.hidden, device=device, dtype=torch.bfloat16) for _ in range(2)]
    y = torch.empty_like(outputs[0])
    states = {name: backend.new_state(PRESETS[name].feedback) for name in VARIANTS[2:]}

    def one_pass(variant: str) -> float:
        """Milliseconds a site."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for site in range(options.sites):
            x = torch.mm(a, w, out=outputs[site % 2])
            if variant == "nccl":
                dist.all_reduce(x)
            elif variant != "product":
                backend.all_reduce(x, PRESETS[variant].quant, "two_shot", states.get(variant), out=y)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / options.sites

    rows = {}
    for variant in ("product", *VARIANTS):
        durations = []
        for repetition in range(options.passes + 3):
            dist.barrier()
            duration = torch.tensor([one_pass(variant)], device=device)
            dist.all_reduce(duration, op=dist.ReduceOp.MAX)
            if repetition >= 3:
                durations.append(float(duration))
        rows[variant] = summarize(durations).median
    backend.synchronize()
    if rank == 0:
        alone = rows["product"]
        for variant in VARIANTS:
            added = rows[variant] - alone
            ratio = (rows["nccl"] - alone) / added
            print(f"{variant}: {rows[variant]:.3f} ms, adds {added:.3f} ms to the product's {alone:.3f}, {ratio:.2f}x of nccl", flush=True)
        if options.out:
            write_json(options.out, milliseconds=rows, tokens=options.tokens, hidden=options.hidden, inner=options.inner)
    backend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
