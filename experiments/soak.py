"""Many calls of random sizes, algorithms and feedback with one rank delayed at random: every sum must repeat, on every rank.

    torchrun --nproc-per-node 2 experiments/soak.py --calls 100000

Each shape has fixed inputs, so each of its sums must be the same as its first one; the first ones are compared among ranks. Prints one line
and exits 1 if any sum differs.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from echoreduce.config import FeedbackConfig, QuantConfig
from echoreduce.runtime.p2p import P2PBackend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--shapes", type=int, default=64)
    parser.add_argument("--largest", type=int, default=1 << 18, help="values of the largest tensor")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after so long, and say after how many calls")
    parser.add_argument("--timeout", type=float, default=10.0, help="longest wait for a peer, s")
    parser.add_argument(
        "--process-group", default="nccl", choices=("nccl", "gloo"), help="gloo keeps other kernels out of a sanitizer's way"
    )
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    nccl = options.process_group == "nccl"
    dist.init_process_group(options.process_group, device_id=device if nccl else None)
    talk = device if nccl else torch.device("cpu")  # where the process group's own tensors are
    backend = P2PBackend(device=device, timeout=timedelta(seconds=options.timeout))
    order, delays = random.Random(5), random.Random(rank)
    sizes = [order.randrange(1, 1 << order.randrange(3, options.largest.bit_length())) for _ in range(options.shapes)]
    states = [backend.new_state(FeedbackConfig(state="float8_e4m3")) if index % 3 == 0 else None for index in range(options.shapes)]
    inputs = [torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes]
    first: dict[int, torch.Tensor] = {}
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    began, made = time.monotonic(), 0
    for call in range(options.calls):
        index = order.randrange(options.shapes)
        state = states[index]
        if state is not None:
            state.reset()
        if delays.random() < 0.02:
            torch.cuda._sleep(delays.randrange(1, 400_000))
        y = backend.all_reduce(inputs[index], QuantConfig(), ("two_shot", "one_shot")[index % 2], state)
        if index in first:
            wrong += (y != first[index]).any()
        else:
            first[index] = y
        made = call + 1
        if made % 1000 == 0:
            stop = torch.tensor([float(time.monotonic() - began > options.seconds)], device=talk)
            dist.all_reduce(stop)
            if float(stop) > 0:
                break
    backend.synchronize()
    for index in sorted(first):
        mine = first[index].to(talk)
        copies = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, mine)
        wrong += sum(int((copy != copies[0]).any()) for copy in copies)
    total = int(wrong)
    if rank == 0:
        print(f"soak: {made} calls of {options.shapes} shapes in {time.monotonic() - began:.1f} s, {total} wrong sums", flush=True)
    backend.close()
    dist.destroy_process_group()
    raise SystemExit(1 if total else 0)


if __name__ == "__main__":
    main()
