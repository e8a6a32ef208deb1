"""What `end_to_end.py` measures: checks, cells of (model, task, load), and the report made of their rows.

Leaves out: options (`end_to_end`), the model (`decoder`), the load itself (`background_load`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from background_load import PeerCopies
from decoder import SHAPES, Decoder, fresh
from echoreduce.config import PRESETS, EchoConfig, QuantConfig
from echoreduce.measure.numeric import bound, first_bad
from echoreduce.measure.report import write_json
from echoreduce.measure.timing import summarize
from echoreduce.runtime.dispatch import open_backend
from echoreduce.session import Session
from launch import Ranks
from reducers import EchoReducer, ExactReducer, NoReducer, Reducer

VARIANTS = ("nccl", "none", "fast", "default", "paper", "no_feedback")
#: For the estimate only.
FLOPS_PER_GPU = 600e12
#: A short prefill of the whole model may differ so much from the exact one, relative to its norm.
LARGEST_ERROR = 1.0
CHECKED_VALUES = 1 << 22


class Study:
    """All cells of one command.

    Args:
        options: of `end_to_end.py`.
        who: the ranks.
    """

    def __init__(self, options: argparse.Namespace, who: Ranks) -> None:
        self.options, self.who = options, who
        self.out = Path(options.out)
        self.cuda = who.device.type == "cuda"
        self.backend, _ = open_backend(None, "p2p" if self.cuda else "c10d")
        self.loads = [int(load) for load in options.loads.split(",")]
        wanted = {"nccl", "none", *options.variants.split(",")}
        if wanted - set(VARIANTS):
            raise SystemExit(f"--variants: accepted are {', '.join(VARIANTS)}, got {options.variants}")
        self.variants = [name for name in VARIANTS if name in wanted]
        self.copies = PeerCopies(who) if any(self.loads) else None
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        #: Relative error of the last hidden states of a short prefill, by model and variant.
        self.errors: dict[str, dict[str, float]] = {}

    def run(self) -> None:
        """Check, then measure every cell that has no rows yet; write the report."""
        names = self.options.models.split(",")
        unknown = [name for name in names if name not in SHAPES]
        if unknown:
            raise SystemExit(f"--models: accepted are {', '.join(SHAPES)}, got {', '.join(unknown)}")
        self.check_calls()
        if self.copies is not None:
            self.who.say(f"background copies: {self.copies.copy_ms:.3f} ms a block while all ranks copy")
        for name in names:
            Model(self, name).measure()
        if self.cuda:
            self.backend.synchronize()
        if self.who.rank == 0:
            write_json(
                self.out.with_suffix(".json"), options=self.setting(), errors=self.errors, rows=rows(self.out), table=report(self.out)
            )
        self.backend.close()

    def setting(self) -> dict[str, Any]:
        """Options without paths and limits."""
        return {name: value for name, value in vars(self.options).items() if name not in ("out", "limit_seconds")}

    def config(self, variant: str, task: str) -> EchoConfig:
        """The preset; `paper` in training without what p2p does not have."""
        config = PRESETS[variant]
        if config.rescale == "backward" and task == "train":
            return replace(config, rescale="none", quant=QuantConfig(qparams="bf16"))
        return config

    def reducers(self, task: str, layers: int) -> dict[str, Reducer]:
        """One for each variant."""
        made: dict[str, Reducer] = {"nccl": ExactReducer(), "none": NoReducer()}
        for name in self.variants[2:]:
            made[name] = EchoReducer(Session(self.backend, self.config(name, task), 2 * layers))
        return made

    def check_calls(self) -> None:
        """Each preset's all-reduce against the exact sum: the bound, and the same bits on all ranks.

        Raises:
            SystemExit: one of them fails.
        """
        generator = torch.Generator(self.who.device).manual_seed(self.who.rank)
        x = torch.randn(CHECKED_VALUES + 3, device=self.who.device, generator=generator).to(self.dtype)
        contributions = [torch.empty_like(x) for _ in range(self.who.world_size)]
        dist.all_gather(contributions, x)
        exact = torch.stack([c.float() for c in contributions]).sum(0)
        for name in self.variants[2:]:
            config = PRESETS[name]
            for algorithm in ("two_shot", "one_shot"):
                y = self.backend.all_reduce(x, config.quant, algorithm)
                bad = first_bad(y, exact, bound(contributions, exact, config.quant, self.dtype))
                if bad is not None or not same_everywhere(y):
                    raise SystemExit(f"{name}, {algorithm}: wrong sum at {bad}; nothing is timed")
        self.who.say(f"sums of {', '.join(self.variants[2:])} lie within their bounds, alike on all ranks")


class Model:
    """The cells of one model."""

    def __init__(self, study: Study, name: str) -> None:
        self.study, self.who, self.options, self.name = study, study.who, study.options, name
        shape = SHAPES[name]
        self.shape = replace(shape, layers=self.options.layers or shape.layers)
        self.decoder: Decoder | None = None

    def measure(self) -> None:
        """Prefill, all-reduce alone, and the training step if asked for, under each load."""
        tasks = ["prefill", "all_reduce"]
        if self.name in self.options.train_models.split(","):
            tasks.append("train")
        done = {(row["model"], row["task"], row["load"]) for row in rows(self.study.out)}
        for task in tasks:
            left = [load for load in self.study.loads if (self.name, task, load) not in done]
            seconds = self.seconds(task)
            self.who.say(f"{self.name} {task}: about {seconds:.0f} s a load, {len(left)} loads")
            if not left:
                continue
            step, reducers = None, {}
            for load in left:
                if self.too_late(seconds):
                    self.who.say(f"{self.name} {task} under {load} %: left out, the limit is near")
                    continue
                if step is None:
                    step, reducers = self.prepare(task)
                self.cell(task, load, step, reducers)
            del step, reducers
            if self.study.cuda:
                torch.cuda.empty_cache()

    def too_late(self, seconds: float) -> bool:
        """Whether a cell would end past the limit. Collective."""
        limit = self.options.limit_seconds
        return limit > 0 and self.who.past(max(limit - seconds, 1e-3))

    def tokens(self, task: str) -> int:
        """Of one pass."""
        return (self.options.train_batch if task == "train" else self.options.batch) * self.options.length

    def flops(self, task: str) -> float:
        """Of one pass, all ranks; the head works on the last tokens only in a prefill."""
        if task == "train":
            return 3 * self.shape.flops(self.options.length) * self.tokens(task)
        head = 2.0 * self.shape.vocabulary * self.shape.hidden
        return (self.shape.flops(self.options.length) - head) * self.tokens(task)

    def seconds(self, task: str) -> float:
        """What a cell takes at FLOPS_PER_GPU, all-reduces not counted."""
        if task == "all_reduce":
            return 1.0
        passes = len(self.study.variants) * (self.options.repetitions + 1)
        return passes * self.flops(task) / (self.who.world_size * FLOPS_PER_GPU)

    def prepare(self, task: str) -> tuple[Callable[[Reducer, str], None], dict[str, Reducer]]:
        """The pass to time, and who reduces in it."""
        if task == "all_reduce":
            return self.all_reduce(), self.study.reducers(task, self.shape.layers)
        began = time.monotonic()
        if self.decoder is None:
            source = fresh(self.shape, 0, self.who.device)
            self.decoder = Decoder(self.shape, source, self.who, self.study.dtype, self.study.dtype, self.options.length)
            self.check()
            self.who.say(f"{self.name}: built and checked in {time.monotonic() - began:.1f} s")
        return (self.prefill() if task == "prefill" else self.train()), self.study.reducers(task, self.shape.layers)

    def ids(self, count: int, seed: int = 1) -> Tensor:
        """Random tokens, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.shape.vocabulary, (count, self.options.length), generator=generator).to(self.who.device)

    @torch.no_grad()
    def check(self) -> None:
        """A short prefill with every variant against the exact one.

        Raises:
            SystemExit: an error above LARGEST_ERROR, or ranks that differ.
        """
        assert self.decoder is not None, "built before"
        ids = self.ids(2)[:, :512]
        exact = self.decoder(ids, ExactReducer()).float()
        for name, reducer in self.study.reducers("prefill", self.shape.layers).items():
            if name in ("nccl", "none"):
                continue
            hidden = self.decoder(ids, reducer)
            error = float((hidden.float() - exact).norm() / exact.norm())
            self.study.errors.setdefault(self.name, {})[name] = error
            self.who.say(f"{self.name}, {name}: relative error of the last hidden states {error:.4f}")
            if not error < LARGEST_ERROR or not same_everywhere(hidden):
                raise SystemExit(f"{self.name}, {name}: error {error}, or ranks differ; nothing is timed")

    def prefill(self) -> Callable[[Reducer, str], None]:
        decoder, ids = self.decoder, self.ids(self.options.batch)
        assert decoder is not None, "built before"
        micro = self.options.micro or self.options.batch

        @torch.no_grad()
        def step(reducer: Reducer, name: str) -> None:
            for rows_of_ids in ids.split(micro):
                decoder.last_logits(rows_of_ids, reducer)

        return step

    def train(self) -> Callable[[Reducer, str], None]:
        decoder, ids = self.decoder, self.ids(self.options.train_batch)
        assert decoder is not None, "built before"
        # A rate of zero does all the work and keeps the weights alike for all variants.
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.0, fused=True)

        def step(reducer: Reducer, name: str) -> None:
            for rows_of_ids in ids.split(self.options.train_micro):
                decoder.loss(rows_of_ids, rows_of_ids.roll(-1, 1), reducer).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def all_reduce(self) -> Callable[[Reducer, str], None]:
        """The all-reduces of a prefill, one after the other, nothing beside them."""
        tokens = (self.options.micro or self.options.batch) * self.options.length
        x = torch.randn(tokens, self.shape.hidden, device=self.who.device, dtype=self.study.dtype)
        zeros = torch.zeros_like(x)  # summed in place again and again

        @torch.no_grad()
        def step(reducer: Reducer, name: str) -> None:
            reducer.open(x[:1])
            for _ in range(2 * self.shape.layers):
                reducer.leave(zeros if name == "nccl" else x, "")
            reducer.close(x[:1])

        return step

    def cell(self, task: str, load: int, step: Callable[[Reducer, str], None], reducers: dict[str, Reducer]) -> None:
        """Time every variant in turn and append the rows."""
        began = time.monotonic()
        durations: dict[str, list[float]] = {name: [] for name in reducers}

        def measure() -> None:
            for repetition in range(self.options.repetitions + 1):
                for name, reducer in reducers.items():
                    duration = self.timed(lambda name=name, reducer=reducer: step(reducer, name))
                    if repetition > 0:
                        durations[name].append(duration)

        if self.study.copies is None:
            measure()
        else:
            with self.study.copies.running(load / 100):
                measure()
        if self.who.rank == 0:
            self.append([self.row(task, load, name, summarize(found)) for name, found in durations.items()])
        medians = ", ".join(f"{name} {summarize(found).median:.1f}" for name, found in durations.items())
        self.who.say(f"{self.name} {task} under {load} %: {medians} ms, in {time.monotonic() - began:.1f} s")

    def timed(self, call: Callable[[], None]) -> float:
        """Milliseconds of a call on the slowest rank."""
        dist.barrier()
        if self.study.cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            duration = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            call()
            duration = 1e3 * (time.perf_counter() - start)
        longest = torch.tensor([duration], device=self.who.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    def row(self, task: str, load: int, variant: str, timing: Any) -> dict[str, Any]:
        """One line of OUT.jsonl; milliseconds of a pass, and of one call for `all_reduce`."""
        calls = 2 * self.shape.layers if task == "all_reduce" else 1
        return {
            "model": self.name,
            "task": task,
            "load": load,
            "variant": variant,
            "median": timing.median / calls,
            "least": timing.least / calls,
            "spread": timing.spread,
            "count": timing.count,
            "tflops_per_gpu": None if task == "all_reduce" else self.flops(task) / timing.median * 1e-9 / self.who.world_size,
        }

    def append(self, found: list[dict[str, Any]]) -> None:
        path = self.study.out.with_suffix(".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in found))


def same_everywhere(x: Tensor) -> bool:
    """Whether every rank holds the same bits."""
    digest = x.contiguous().view(torch.uint8).to(torch.int64).cumsum(0 if x.dim() == 1 else -1).sum()
    ends = torch.stack((digest, -digest))
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    return int(ends[0]) == -int(ends[1])


def rows(out: Path) -> list[dict[str, Any]]:
    """What has been measured."""
    path = out.with_suffix(".jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(out: Path) -> str:
    """Markdown: Table 3 of the paper, a row for each cell and variant."""
    cells: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in rows(out):
        cells.setdefault((row["model"], row["task"], row["load"]), {})[row["variant"]] = row
    lines = [
        "| model | task | load | variant | ms (spread) | 16-bit ms | speedup | blocked share | recovered |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, task, load), found in cells.items():
        base, none = found["nccl"]["median"], found["none"]["median"]
        for variant, row in found.items():
            if variant in ("nccl", "none"):
                continue
            share = "-" if task == "all_reduce" else f"{100 * (base - none) / base:.1f} %"
            recovered = "-" if task == "all_reduce" else f"{100 * (base - row['median']) / (base - none):.0f} %"
            timed = f"{row['median']:.2f} ({100 * row['spread']:.1f} %)"
            cells_of_row = (model, task, f"{load} %", variant, timed, f"{base:.2f}", f"{base / row['median']:.3f}", share, recovered)
            lines.append(f"| {' | '.join(cells_of_row)} |")
    return "\n".join(lines)
