"""What the CPU paths cost, side by side: a forward with virtual ranks against the plain one, and the c10d header.

    python experiments/cpu_costs.py forward [--world-size 4] [--tokens 1024] [--repeat 5]
    python experiments/cpu_costs.py header  [--sizes 8192 1048576] [--repeat 200]

Variants alternate in one process and one run, medians with quartiles; outputs are checked before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from echoreduce import QuantConfig, preset
from echoreduce import reference as ref
from echoreduce.integrations.demo_data import find_model, find_text
from echoreduce.integrations.language_model import load, read_text, windows
from echoreduce.integrations.processes import rendezvous_file
from echoreduce.integrations.transformers import attach
from echoreduce.measure.report import environment
from echoreduce.runtime.c10d import C10dBackend


def alternate(variants: dict[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each variant, run in turn `repeat` times after one warm-up."""
    for run in variants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeat):
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def show(seconds: dict[str, list[float]], baseline: str, unit: float, name: str) -> None:
    """Median, quartiles and the ratio to the baseline."""
    base = statistics.median(seconds[baseline])
    for variant, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{variant:28s} {middle / unit:10.3f} {name}  ({low / unit:.3f} .. {high / unit:.3f})  {middle / base:6.2f} x")


def forward(arguments: argparse.Namespace) -> None:
    """A forward of SmolLM2-135M: plain, and with virtual ranks under several presets."""
    model, tokenizer = load(find_model())
    ids = windows(tokenizer, read_text(find_text()), arguments.tokens, 1)[:, :-1]

    def run(name: str | None) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with torch.inference_mode():
                if name is None:
                    return model(input_ids=ids, use_cache=False).logits
                with attach(model, preset(name), world_size=arguments.world_size):
                    return model(input_ids=ids, use_cache=False).logits

        return call

    plain, exact = run(None)(), run("exact")()
    assert (plain - exact).abs().max() < 1e-3 * plain.abs().max(), "splitting the columns must not change the model"
    variants = {"plain": run(None), **{name: run(name) for name in ("exact", "no_feedback", "paper", "default")}}
    show(alternate(variants, arguments.repeat), "plain", 1.0, "s")


def header(arguments: argparse.Namespace) -> None:
    """One all-reduce over two gloo processes: the library's, and ours with and without the header."""
    mp.start_processes(header_rank, args=(arguments, rendezvous_file()), nprocs=2, start_method="spawn")


def header_rank(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    checked, bare = C10dBackend(check_headers=True), C10dBackend(check_headers=False)
    quant = QuantConfig()
    for size in arguments.sizes:
        every = torch.randn(2, size // 2, generator=torch.Generator().manual_seed(1)).bfloat16()
        for backend in (checked, bare):
            assert torch.equal(backend.all_reduce(every[rank], quant, "one_shot"), ref.all_reduce(every, quant, "one_shot").output)
        seconds = alternate(
            {
                "gloo all_reduce, bf16": partial(dist.all_reduce, every[rank].clone()),
                "ours, 4 bits, no header": partial(bare.all_reduce, every[rank], quant, "one_shot"),
                "ours, 4 bits, header": partial(checked.all_reduce, every[rank], quant, "one_shot"),
            },
            arguments.repeat,
        )
        if rank == 0:
            print(f"{size} bytes")
            show(seconds, "ours, 4 bits, no header", 1e-6, "us")
    dist.destroy_process_group()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("forward")
    one.add_argument("--world-size", type=int, default=4)
    one.add_argument("--tokens", type=int, default=1024)
    one.add_argument("--repeat", type=int, default=5)
    one.set_defaults(run=forward)
    two = commands.add_parser("header")
    two.add_argument("--sizes", type=int, nargs="+", default=[8192, 1048576])
    two.add_argument("--repeat", type=int, default=200)
    two.set_defaults(run=header)
    arguments = parser.parse_args()
    print(environment())
    arguments.run(arguments)


if __name__ == "__main__":
    main()
