"""The training loop: variants one after the other, each from the same weights and over the same data, resumable.

fp32 master weights and AdamW states, products in bf16, one micro-batch a step. Losses stay on the device and come to the host every
LOG_EVERY steps, so the host does not wait for each step.

With virtual ranks one process trains all of them, so one GPU gives the curves of any P; its times say nothing about a collective.

Leaves out: data parallelism, accumulation. Source: the paper, Appendix B (optimizer, clipping, schedule).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decoder import SHAPES, Decoder, Shape, fresh, pretrained
from echoreduce.communicator import BackendName
from echoreduce.config import EchoConfig
from echoreduce.measure.report import environment
from echoreduce.runtime.dispatch import open_backend
from echoreduce.session import Session
from echoreduce.virtual import VirtualBackend
from launch import Ranks, ranks
from reducers import EchoReducer
from training_data import Windows

BETAS, EPSILON, DECAY, CLIP, LOWEST_RATE = (0.9, 0.95), 1e-5, 0.1, 1.0, 0.1
LOG_EVERY = 10
#: What a matrix product reaches at these sizes, for the estimate only: 35 % of 790 TFLOP/s.
FLOPS_PER_GPU = 0.35 * 790e12


@dataclass(frozen=True)
class Variant:
    """One curve.

    Attributes:
        config: of the sites, both directions.
        backend: on GPUs; on the CPU always c10d.
        rate: factor on the peak learning rate.
    """

    config: EchoConfig
    backend: BackendName = "p2p"
    rate: float = 1.0


@dataclass(frozen=True)
class Plan:
    """What `training.py run` was told; see its options."""

    task: str
    variants: dict[str, Variant]
    tokens: Path
    model: Path | None
    shape: str
    steps: int
    batch: int
    length: int
    rate: float
    warmup: int
    seed: int
    dtype: str
    held_out: int
    validate_every: int
    checkpoint_every: int
    limit: float
    virtual: int
    out: Path

    def setting(self) -> dict[str, Any]:
        """What two runs must share for their curves to be compared."""
        left_out = ("variants", "tokens", "model", "checkpoint_every", "limit", "out")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


class OutOfTime(Exception):
    """The limit has passed."""


def run(plan: Plan) -> None:
    """Train every variant that has no summary yet."""
    with ranks() as who:
        done = finished(plan)
        estimate(plan, who, [name for name in plan.variants if name not in done])
        for name, variant in plan.variants.items():
            if name in done:
                who.say(f"{name}: done before")
                continue
            try:
                Run(plan, who, name, variant).train()
            except OutOfTime:
                who.say(f"{name}: the limit of {plan.limit:.0f} s has passed")
                break


def finished(plan: Plan) -> dict[str, Any]:
    """Summaries by variant in OUT.json.

    Raises:
        SystemExit: they were made with another setting.
    """
    path = plan.out.with_suffix(".json")
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    if {"virtual": 0, **found["setting"]} != plan.setting():
        raise SystemExit(f"{path} was made with other options; choose another --out")
    variants: dict[str, Any] = found["variants"]
    return variants


def estimate(plan: Plan, who: Ranks, names: list[str]) -> None:
    """Say how long the GPUs will take at FLOPS_PER_GPU."""
    shape = SHAPES[plan.shape] if plan.model is None else pretrained(plan.model, who.device)[0]
    flops = 3 * shape.flops(plan.length) * plan.batch * plan.length
    seconds = flops / (who.world_size * FLOPS_PER_GPU)
    who.say(
        f"{shape.parameters() / 1e6:.0f} M parameters, {plan.batch} x {plan.length} tokens and {flops / 1e12:.1f} TFLOP a step: on "
        f"{who.world_size} H200 at 35 % {seconds:.2f} s, {seconds * plan.steps * len(names):.0f} s for {len(names)} x {plan.steps} steps, "
        "plus all-reduces"
    )


def rate_at(step: int, steps: int, warmup: int, peak: float) -> float:
    """Linear warm-up, then a cosine from the peak to a tenth of it (Appendix B: 3e-4 to 3e-5)."""
    if step < warmup:
        return peak * (step + 1) / warmup
    turn = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return peak * (LOWEST_RATE + (1 - LOWEST_RATE) * turn)


class Run:
    """One variant: model, optimizer, session, curve."""

    def __init__(self, plan: Plan, who: Ranks, name: str, variant: Variant) -> None:
        self.plan, self.who, self.name, self.variant = plan, who, name, variant
        self.compute = getattr(torch, plan.dtype)
        shape, whole = self._weights()
        self.model = Decoder(shape, whole, who, torch.float32, self.compute, plan.length, plan.virtual)
        self.data = Windows(plan.tokens, plan.length, plan.held_out, who.device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, fused=True)
        self.whole = {id(p) for p in self.model.replicated()}
        backend = (
            VirtualBackend(plan.virtual)
            if plan.virtual
            else open_backend(None, variant.backend if who.device.type == "cuda" else "c10d")[0]
        )
        self.session = Session(backend, variant.config, 2 * shape.layers)
        self.step, self.rows, self.pending = 0, [], []  # type: int, list[dict[str, Any]], list[tuple[int, Tensor, Tensor]]
        self._restore()

    def _weights(self) -> tuple[Shape, Any]:
        if self.plan.model is not None:
            return pretrained(self.plan.model, self.who.device)
        shape = SHAPES[self.plan.shape]
        return shape, fresh(shape, self.plan.seed, self.who.device)

    def train(self) -> None:
        """All steps that are left, then the summary.

        Raises:
            OutOfTime: the limit has passed; with checkpoints the state is kept.
        """
        reducer = EchoReducer(self.session)
        peak = self.plan.rate * self.variant.rate
        began, first = time.perf_counter(), self.step
        while self.step < self.plan.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(self.step, self.plan.steps, self.plan.warmup, peak)
            ids, targets = self.data.batch(self.step, self.plan.batch)
            loss = self.model.loss(ids, targets, reducer)
            loss.backward()
            norm = self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.pending.append((self.step, loss.detach(), norm))
            self.step += 1
            if self.step % LOG_EVERY == 0 or self.step == self.plan.steps:
                self._log(began, self.step - first)
                if self.who.past(self.plan.limit):
                    self._save()
                    raise OutOfTime
                began, first = time.perf_counter(), self.step
            if self.step % self.plan.validate_every == 0 or self.step == self.plan.steps:
                self._validate(reducer)
                began, first = time.perf_counter(), self.step
            if self.plan.checkpoint_every and self.step % self.plan.checkpoint_every == 0:
                self._save()
                began, first = time.perf_counter(), self.step
        self._finish()

    def _clip(self) -> Tensor:
        """Scale gradients so that the norm of the whole model's is at most CLIP; returns the norm before. No wait for the device."""
        sharded = [p.grad for p in self.model.parameters() if p.grad is not None and id(p) not in self.whole]
        replicated = [p.grad for p in self.model.parameters() if p.grad is not None and id(p) in self.whole]
        total = torch.nn.utils.get_total_norm(sharded).square()
        dist.all_reduce(total)
        norm = (total + torch.nn.utils.get_total_norm(replicated).square()).sqrt()
        factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([*sharded, *replicated], factor)
        return norm

    def _log(self, began: float, steps: int) -> None:
        """Bring the pending losses to the host, which waits for the device, and say how long the last `steps` steps took."""
        values = torch.stack([torch.stack((loss.float(), norm.float())) for _, loss, norm in self.pending]).tolist()
        seconds = (time.perf_counter() - began) / steps
        speed, left = self.plan.batch * self.plan.length / seconds, (self.plan.steps - self.step) * seconds
        rows = [{"step": step, "loss": loss, "norm": norm, "seconds": seconds} for (step, _, _), (loss, norm) in zip(self.pending, values)]
        self.rows += rows
        self.pending = []
        self._append([{"variant": self.name, **row, "tokens_per_second": speed} for row in rows])
        self.who.say(
            f"{self.name} {self.step}/{self.plan.steps}: loss {values[-1][0]:.4f}, norm {values[-1][1]:.2f}, {1e3 * seconds:.0f} ms, "
            f"{speed:.0f} tokens/s, {left:.0f} s left"
        )
        if not all(math.isfinite(loss) for loss, _ in values):
            raise SystemExit(f"{self.name}: the loss is not finite at step {self.step}")

    def _append(self, rows: list[dict[str, Any]]) -> None:
        if self.who.rank == 0:
            path = self.plan.out.with_suffix(".jsonl")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))

    @torch.no_grad()
    def _validate(self, reducer: EchoReducer) -> None:
        rows = min(self.plan.batch, self.plan.held_out)
        losses = [self.model.loss(ids, targets, reducer) for ids, targets in self.data.validation(rows)]
        if losses:
            loss = float(torch.stack(losses).mean())
            self._append([{"variant": self.name, "step": self.step, "validation": loss}])
            self.rows.append({"step": self.step, "validation": loss})
            self.who.say(f"{self.name} {self.step}/{self.plan.steps}: validation {loss:.4f}")

    def _finish(self) -> None:
        """Write the variant's summary and forget its checkpoint; all ranks must hold the replicated weights alike."""
        digest = torch.cat([p.detach().flatten() for p in self.model.replicated()]).view(torch.int32).to(torch.int64)
        ends = torch.stack((digest.sum(), -digest.sum()))
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        train = [row for row in self.rows if "loss" in row]
        tail = train[-min(100, len(train)) :]
        validation = [row["validation"] for row in self.rows if "validation" in row]
        summary = {
            "steps": self.step,
            "tail_100_loss": statistics.fmean(row["loss"] for row in tail),
            "validation_loss": validation[-1] if validation else None,
            "step_seconds": statistics.median(row["seconds"] for row in train[len(train) // 4 :]),
            "peak_rate": self.plan.rate * self.variant.rate,
            "replicated_weights_equal": int(ends[0]) == -int(ends[1]),
            "backend": self.session.backend.name,
            "config": repr(self.variant.config),
            "environment": environment(),
        }
        if self.who.rank == 0:
            path = self.plan.out.with_suffix(".json")
            found = finished(self.plan)
            path.write_text(json.dumps({"setting": self.plan.setting(), "variants": {**found, self.name: summary}}, indent=1) + "\n")
            self._checkpoint().unlink(missing_ok=True)
        self.who.say(f"{self.name}: tail {summary['tail_100_loss']:.4f}, {1e3 * summary['step_seconds']:.0f} ms a step, {summary}")
        self.session.backend.close()
        dist.barrier()

    def _checkpoint(self) -> Path:
        return self.plan.out.with_name(f"{self.plan.out.name}_{self.name}_{self.who.rank}.pt")

    def _save(self) -> None:
        if self.plan.checkpoint_every:
            state = {"setting": self.plan.setting(), "step": self.step, "rows": self.rows}
            torch.save({**state, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self._checkpoint())

    def _restore(self) -> None:
        """Go on from a checkpoint of the same setting, if all ranks have one."""
        path = self._checkpoint()
        state = torch.load(path, map_location=self.who.device, weights_only=True) if path.exists() else {}
        step = torch.tensor([state["step"] if state.get("setting") == self.plan.setting() else 0], device=self.who.device)
        low, high = step.clone(), step.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        if int(low) == int(high) > 0:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.rows = state["step"], state["rows"]
            self.who.say(f"{self.name}: goes on from step {self.step}")
