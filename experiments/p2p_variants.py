"""Where the time of the peer-to-peer all-reduce goes: schedules and variants of the kernels, timed on real devices.

    torchrun --nproc-per-node 2 experiments/p2p_variants.py --sizes 1G,64M,8M --out variants.json

For each size, algorithm and feedback it times schedules (warps, values a chunk, blocks a stage) around the built-in one, after checking
that every schedule gives the same bits on all ranks. Leaves out: other libraries (`echoreduce bench`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import time

import torch
import torch.distributed as dist

from echoreduce.cli.sizes import parse_size
from echoreduce.config import NO_FEEDBACK, FeedbackConfig, QuantConfig
from echoreduce.measure.report import write_json
from echoreduce.measure.timing import summarize, time_eager, time_graph
from echoreduce.runtime.p2p import P2PBackend
from echoreduce.runtime.schedule import BUILT_IN, Tuning

FEEDBACKS = {"none": NO_FEEDBACK, "float8": FeedbackConfig(state="float8_e4m3"), "bf16": FeedbackConfig(state="bf16")}


def tunings(nbytes: int, warps: tuple[int, ...], registers: tuple[int, ...]) -> list[Tuning]:
    """Schedules worth a try at this size."""
    if nbytes >= 1 << 28:
        chunks = (32768, 131072)
        blocks = ((2, 3, 1), (3, 3, 2), (4, 4, 2), (4, 4, 4), (4, 6, 2), (5, 6, 3), (6, 6, 4), (6, 8, 4))
    elif nbytes >= 1 << 25:
        chunks = (8192, 16384, 32768)
        blocks = ((2, 2, 1), (2, 2, 2), (2, 3, 1), (3, 3, 2), (4, 4, 2), (4, 4, 4), (4, 6, 2))
    else:
        chunks = (4096, 8192, 16384)
        blocks = ((2, 2, 1), (2, 2, 2), (1, 1, 1))
    found = [Tuning(w, c, blocks=b, registers=r) for w, c, b, r in itertools.product(warps, chunks, blocks, registers)]
    return [tuning for tuning in found if sum(tuning.blocks) * tuning.warps <= 64]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def agree_max(value: float, device: torch.device) -> float:
    tensor = torch.tensor([value], device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def same_bits(y: torch.Tensor) -> bool:
    copies = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, y)
    return all(torch.equal(copies[0].view(torch.int16), copy.view(torch.int16)) for copy in copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1G,64M,8M")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--feedback", default="none,float8")
    parser.add_argument("--algorithms", default="two_shot,one_shot")
    parser.add_argument("--warps", default="2,4")
    parser.add_argument("--registers", default="0", help="bounds of a thread's registers; 0 is the compiler's choice")
    parser.add_argument("--rotation", default="none", choices=("none", "hadamard"))
    parser.add_argument("--policy", default="zero_aware", choices=("symmetric", "asymmetric", "zero_aware", "compact"))
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--built-in", action="store_true", help="only the built-in schedule")
    parser.add_argument("--staged", action="store_true", help="the paper's schedule: a launch a stage and tile, streams and events")
    parser.add_argument("--graph", action="store_true", help="time CUDA graphs at every size")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    began = time.monotonic()
    rows = []
    backend = P2PBackend(first_half=1200 << 20, schedule="staged" if options.staged else "persistent")
    for size in options.sizes.split(","):
        nbytes = parse_size(size, "--sizes")
        x = torch.randn(nbytes // 2, device=device, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        timer = time_graph if nbytes <= 1 << 24 or options.graph else time_eager
        copy = x.clone()
        nccl = agree_max(summarize(timer(lambda copy=copy: dist.all_reduce(copy), 5, 20, device)).median, device)
        del copy
        if rank == 0:
            print(f"== {size} nccl {nccl:.4f} ms", flush=True)
        for bits, algorithm, name in itertools.product(
            map(int, options.bits.split(",")), options.algorithms.split(","), options.feedback.split(",")
        ):
            found = []
            choices = tunings(nbytes, numbers(options.warps), numbers(options.registers))
            for tuning in [BUILT_IN[algorithm, name != "none"]] if options.built_in else choices:
                if agree_max(time.monotonic() - began, device) > options.seconds:
                    break
                backend.tuning = tuning
                backend.forget_schedules()
                feedback = FEEDBACKS[name]
                state = backend.new_state(feedback) if feedback.enabled else None
                quant = QuantConfig(bits=bits, group_size=options.group_size, policy=options.policy, rotation=options.rotation)

                def call(quant=quant, algorithm=algorithm, state=state, x=x, y=y):
                    return backend.all_reduce(x, quant, algorithm, state, out=y)

                call()
                call()
                backend.synchronize()
                if not same_bits(y):
                    raise SystemExit(f"ranks differ: {size} {algorithm} {name} {tuning}")
                timing = summarize(timer(call, 3, 10, device))
                backend.synchronize()
                found.append((agree_max(timing.median, device), tuning))
                del state
            found.sort(key=lambda pair: pair[0])
            for milliseconds, tuning in found:
                blocks = list(tuning.blocks)
                rows.append([size, bits, algorithm, name, milliseconds, nccl, tuning.warps, tuning.chunk_values, blocks, tuning.registers])
            if rank == 0 and found:
                best = "; ".join(f"{m:.4f} w{t.warps} c{t.chunk_values} b{t.blocks} r{t.registers}" for m, t in found[:4])
                print(f"{size} {bits}bit {algorithm} {name}: {nccl / found[0][0]:.2f}x {best}", flush=True)
    if rank == 0 and options.out:
        columns = ["size", "bits", "algorithm", "feedback", "ms", "nccl_ms", "warps", "chunk_values", "blocks", "registers"]
        settings = {name: getattr(options, name) for name in ("rotation", "policy", "group_size", "staged")}
        write_json(options.out, columns=columns, rows=rows, **settings)
    backend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
