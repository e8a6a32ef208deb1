"""The all-reduce kernel of one rank on one GPU, without peers: what a call costs beside the wire, alone and between matrix products.

    python experiments/loopback.py --presets no_feedback,fast,default --sizes 1G,64M,8M --out loopback.json

Rank 0 of two runs alone. What it would write to its peer goes to a second block of the same device, and its flags stand at a later epoch,
so no wait waits: a call reads and writes the same bytes with the same instructions, only nothing crosses a link. Its time is a lower bound
of the real one, and the rest of the real one is the link's. `--product M,K,N` adds the time that a call takes between bf16 products
[M, K] x [K, N]: pairs of product and call minus products alone, with the clock of the multiprocessors in each case.

Leaves out: results (what is received is zeros; `tests/gpu/test_p2p.py` checks the bits), more than one rank.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from echoreduce.cli.sizes import parse_size
from echoreduce.config import EchoConfig, preset
from echoreduce.kernels.spec import data_offset, flag_bytes
from echoreduce.measure.report import write_json
from echoreduce.measure.timing import summarize, time_eager, time_graph
from echoreduce.runtime.pipeline import Launcher, Site, plan
from echoreduce.runtime.schedule import BUILT_IN, Device, Tuning
from echoreduce.runtime.state import P2PState

WORLD_SIZE = 2
LATER = 1 << 30  # epoch at which all flags stand


class Alone:
    """Launches of one rank whose peer is a block of its own device."""

    def __init__(self, numel: int, config: EchoConfig, algorithm: str, tuning: Tuning | None, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        feedback = config.feedback if config.feedback.enabled else None
        site = Site(numel, torch.bfloat16, config.quant, algorithm, feedback, False)
        limits = Device(multiprocessors=properties.multi_processor_count)
        self.plan = plan(site, WORLD_SIZE, 0, limits, tuning, 1 << 40, True, True)
        nbytes = data_offset(WORLD_SIZE) + 2 * self.plan.half
        self._blocks = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(WORLD_SIZE)]
        self._blocks[0][: flag_bytes(WORLD_SIZE)].view(torch.int64).fill_(LATER << 32)
        workspace = SimpleNamespace(
            table=torch.tensor([block.data_ptr() for block in self._blocks], dtype=torch.int64, device=device),
            control=torch.zeros(16, dtype=torch.int32, device=device),
            record=torch.zeros(16, dtype=torch.int64, pin_memory=True),
            half=self.plan.half,
        )
        self._workspace = workspace
        self._launcher = Launcher(self.plan, workspace, 10_000_000)  # type: ignore[arg-type]
        self.x = torch.randn(numel, device=device).to(torch.bfloat16)
        self.y = torch.empty_like(self.x)
        self._state: list[torch.Tensor] = [self.x] * 4
        if feedback is not None:
            state = P2PState(feedback)
            self._state = state.prepare(self.plan.cut, device)
            for tensor in self._state:
                tensor.zero_()

    def __call__(self) -> None:
        self._launcher.launch(0, self.x, self.y, self._state)

    def check(self) -> None:
        """A call has ended, without a timeout, and left numbers."""
        self()
        torch.cuda.synchronize()
        if int(self._workspace.record[0]) != 0 or not bool(torch.isfinite(self.y.float()).all()):
            raise SystemExit("the kernel gave up a wait or left NaN")

    @property
    def kernel(self) -> dict[str, int]:
        """Registers and spills of the compiled kernel."""
        compiled = next(iter(self._launcher._compiled.values()))
        return {"registers": compiled.n_regs, "spills": compiled.n_spills}


class Clock:
    """Clock of the multiprocessors and power of the device, read every 20 ms beside what runs; empty without nvidia-smi."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clock:
        tool = shutil.which("nvidia-smi")
        if tool:
            query = [tool, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "20"]
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
            time.sleep(0.5)
            self.samples.clear()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            parts = line.split(",")
            if len(parts) == 2:
                self.samples.append((float(parts[0]), float(parts[1])))

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            self._process.kill()

    @property
    def median(self) -> tuple[float, float]:
        """(MHz, W), zeros without samples."""
        if not self.samples:
            return 0.0, 0.0
        columns = [sorted(column) for column in zip(*self.samples)]
        return columns[0][len(columns[0]) // 2], columns[1][len(columns[1]) // 2]


def between_products(call: Any, shape: tuple[int, int, int], repeats: int, device: torch.device) -> dict[str, Any]:
    """What the call adds between products, ms, and the clock of each run (products alone, pairs, the call alone), runs in turn."""
    m, k, n = shape
    a = torch.randn(m, k, device=device).to(torch.bfloat16)
    b = torch.randn(k, n, device=device).to(torch.bfloat16)
    c = torch.empty(m, n, device=device, dtype=torch.bfloat16)

    def product() -> None:
        torch.mm(a, b, out=c)

    def pair() -> None:
        product()
        call()

    found: dict[str, list[float]] = {"product": [], "pair": [], "call": []}
    clocks: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for _ in range(3):
        for name, run in (("product", product), ("pair", pair), ("call", call)):
            with Clock() as clock:
                for _ in range(5):
                    run()
                torch.cuda.synchronize()
                clock.samples.clear()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(repeats):
                    run()
                end.record()
                torch.cuda.synchronize()
                found[name].append(start.elapsed_time(end) / repeats)
                clocks[name].append(clock.median)
    medians = {name: sorted(times)[1] for name, times in found.items()}
    return {"shape": shape, "ms": medians, "adds_ms": medians["pair"] - medians["product"], "all_ms": found, "clock_mhz_and_watts": clocks}


def tunings(text: str) -> list[Tuning | None]:
    """`w4,2-3-1,r0,c65536` separated by spaces; empty is the built-in one."""
    found: list[Tuning | None] = []
    for item in text.split():
        warps, blocks, registers, chunk = item.split(",")
        push, reduce, tail = map(int, blocks.split("-"))
        found.append(Tuning(int(warps[1:]), int(chunk[1:]), blocks=(push, reduce, tail), registers=int(registers[1:])))
    return found or [None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="no_feedback,fast,default")
    parser.add_argument("--sizes", default="1G,64M,8M")
    parser.add_argument("--algorithm", default="two_shot", choices=("two_shot", "one_shot"))
    parser.add_argument("--bits", type=int, default=0, help="instead of the preset's")
    parser.add_argument("--tunings", default="", help="such as 'w4,2-3-1,r0,c65536 w4,3-3-2,r0,c65536'")
    parser.add_argument("--product", default="", help="M,K,N of a bf16 product to run between calls")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    for size in options.sizes.split(","):
        nbytes = parse_size(size, "--sizes")
        timer = time_graph if nbytes <= 1 << 24 else time_eager
        for name in options.presets.split(","):
            config = preset(name)
            if options.bits:
                config = replace(config, quant=replace(config.quant, bits=options.bits))
            for tuning in tunings(options.tunings):
                call = Alone(nbytes // 2, config, options.algorithm, tuning, device)
                call.check()
                timing = summarize(timer(call, 5, options.repeats, device))
                used = tuning or BUILT_IN[options.algorithm, config.feedback.enabled]
                row = {"size": nbytes, "preset": name, "tuning": str(used), "ms": timing.median, "spread": timing.spread, **call.kernel}
                if options.product:
                    m, k, n = map(int, options.product.split(","))
                    row["between"] = between_products(call, (m, k, n), options.repeats, device)
                rows.append(row)
                print(f"{size:>5} {name:12} {timing.median:.4f} ms {call.kernel} {used}", flush=True)
                if options.product:
                    print(f"      between products: {row['between']}", flush=True)
                del call
    if options.out:
        write_json(options.out, rows=rows, algorithm=options.algorithm)


if __name__ == "__main__":
    main()
