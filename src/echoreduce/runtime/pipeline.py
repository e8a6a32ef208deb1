"""From a call to kernel launches: what is compiled, what is passed, in which order. Everything that depends on the shape alone is cached.

The persistent schedule (`two_shot`, `one_shot`) is one launch a call; the staged one (the paper's) is one launch a stage and tile. Both
run the same stages and give the same bits.

Leaves out: checks of arguments, streams and failures (`p2p`).
Source: the paper, Section 4.2 and Appendix C (schedule cache); docs/kernels.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echoreduce.config import FeedbackConfig, QuantConfig
from echoreduce.kernels.spec import Spec, landing_bytes
from echoreduce.partition import Partition, partition
from echoreduce.quant.grid import qparams_dtype
from echoreduce.runtime.schedule import BUILT_IN, Device, Schedule, Tuning, UpdateTuning, half_bytes, pieces, schedule
from echoreduce.runtime.workspace import Workspace

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_NAMES.values())}
POLICIES = ("symmetric", "asymmetric", "zero_aware", "compact")
RESIDUALS = ("none", "group", "local")
ALGORITHMS = ("two_shot", "one_shot")
COMPILE_OPTIONS = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Piece:
    """One launch of a call: groups origin .. origin + groups - 1 of every segment (one-shot: of the tensor)."""

    origin: int
    groups: int
    area: int
    spec: Spec
    schedule: Schedule
    digest: int


@dataclass(frozen=True)
class Plan:
    """A call, prepared.

    Attributes:
        cut: the partition of the tensor.
        pitch: groups from one segment to the next.
        half: bytes that the largest piece needs in a workspace half.
        code: settings in one number, left with the peers for the text of a MismatchError.
        floats: weight, weight, decay, 1 - decay, decay, 1 - decay of the averages.
    """

    algorithm: str
    cut: Partition
    pitch: int
    half: int
    code: int
    floats: tuple[float, ...]
    pieces: tuple[Piece, ...]
    feedback: FeedbackConfig | None


@dataclass(frozen=True)
class Site:
    """What tells one plan from another: the call's shape and settings, and whether its pass begins here."""

    numel: int
    dtype: torch.dtype
    quant: QuantConfig
    algorithm: str
    feedback: FeedbackConfig | None
    first: bool


def plan(
    site: Site, world_size: int, rank: int, device: Device, tuning: Tuning | None, largest_half: int, native: bool, float8: bool
) -> Plan:
    """Prepare a call. Pure; no `tuning` is the built-in one; `native` and `float8` say which conversions the device has (see `Spec`)."""
    cut = partition(site.numel, world_size, site.quant.group_size)
    spec = _spec(site, cut, world_size, rank, native, float8)
    tuning = tuning or BUILT_IN[site.algorithm, spec.residual == "local"]
    ranges = pieces(site.algorithm, cut, spec, largest_half)
    code = settings_code(site)
    made = []
    for origin, groups in ranges:
        chosen = schedule(site.algorithm, groups, site.quant.group_size, device, tuning)
        text = f"{site.numel} {site.dtype} {site.quant} {site.algorithm} {site.feedback} {site.first} {origin} {chosen.rows} {chosen.steps}"
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
        made.append(Piece(origin, groups, landing_bytes(spec, groups), spec.with_rows(chosen.rows), chosen, digest))
    half = max(half_bytes(site.algorithm, groups, spec) for _, groups in ranges)
    return Plan(site.algorithm, cut, cut.segment_groups, half, code, _floats(site.feedback), tuple(made), site.feedback)


def _spec(site: Site, cut: Partition, world_size: int, rank: int, native: bool, float8: bool) -> Spec:
    feedback = site.feedback
    weights = feedback.weights if feedback is not None else ()
    return Spec(
        world_size=world_size,
        rank=rank,
        bits=site.quant.bits,
        group_size=site.quant.group_size,
        policy=site.quant.layout,
        rotate=site.quant.rotation == "hadamard",
        half_qparams=qparams_dtype(site.quant, site.dtype) == torch.float16,
        dtype=DTYPE_NAMES[site.dtype],
        even=cut.padded == cut.numel,
        residual=feedback.residual if weights and feedback is not None else "none",
        averages=len(weights),
        plain=len(weights) == 1 and weights[0][0] == 1.0,
        decaying=sum(1 << index for index, (_, decay) in enumerate(weights) if decay != 0.0),
        state=feedback.state if feedback is not None else "bf16",
        first=site.first,
        native=native,
        native_float8=native and float8,
    )


def _floats(feedback: FeedbackConfig | None) -> tuple[float, ...]:
    weights = (*(feedback.weights if feedback is not None else ()), (0.0, 0.0), (0.0, 0.0))
    (w0, d0), (w1, d1) = weights[0], weights[1]
    return (w0, w1, d0, 1.0 - d0, d1, 1.0 - d1)


def settings_code(site: Site) -> int:
    """Settings as one number, see `settings_text`."""
    residual = RESIDUALS.index(site.feedback.residual) if site.feedback is not None else 0
    digits = (
        (DTYPE_CODES[DTYPE_NAMES[site.dtype]], 4),
        (site.quant.bits, 32),
        (site.quant.group_size, 1024),
        (POLICIES.index(site.quant.policy), 4),
        (int(site.quant.rotation == "hadamard"), 2),
        (ALGORITHMS.index(site.algorithm), 2),
        (residual, 4),
    )
    code = 0
    for digit, base in digits:
        code = code * base + digit
    return code


def settings_text(numel: int, code: int) -> str:
    """What a card says: "200 values bf16, 4 bits, ..."."""
    parts = []
    for base in (4, 2, 2, 4, 1024, 32, 4):
        code, digit = divmod(code, base)
        parts.append(digit)
    residual, algorithm, rotate, policy, group_size, bits, dtype = parts
    name = list(DTYPE_CODES)[dtype] if dtype < len(DTYPE_CODES) else "unknown dtype"
    return (
        f"{numel} values {name}, {bits} bits, group_size {group_size}, {POLICIES[policy]}{', rotated' if rotate else ''}, "
        f"{ALGORITHMS[algorithm]}, residual {RESIDUALS[residual % 3]}"
    )


def options_of(cut: Schedule) -> dict[str, Any]:
    """Compiler and launch options of a schedule."""
    options: dict[str, Any] = {"num_warps": cut.warps, **COMPILE_OPTIONS}
    if cut.registers:
        options["maxnreg"] = cut.registers
    return options


class Launcher:
    """Enqueues pieces of one plan. The first launch of a kernel goes through Triton's compiler, later ones straight to the compiled code.

    Args:
        made: the plan.
        workspace: where it runs; a plan outlives a workspace that grows, a launcher does not.
        patience: bound of every wait, ns (the interpreter: polls).
    """

    def __init__(self, made: Plan, workspace: Workspace, patience: int) -> None:
        self.plan = made
        self._workspace = workspace
        self._patience = patience
        self._compiled: dict[tuple[int, bool, bool], Any] = {}

    def launch(self, index: int, x: Tensor, y: Tensor, state: list[Tensor]) -> None:
        """Enqueue piece `index` on the current stream: the persistent kernel."""
        piece = self.plan.pieces[index]
        cut = piece.schedule
        tail = (*self._call(piece), cut.pushers)
        if self.plan.algorithm == "two_shot":
            tail = (*tail, cut.reducers)
        pointers = (x, y, *state), (self._workspace.table, self._workspace.control, self._workspace.record)
        key = (index, x.data_ptr() % 16 == 0, y.data_ptr() % 16 == 0)
        compiled = self._compiled.get(key)
        if compiled is not None:
            front, back = ([tensor.data_ptr() for tensor in group] for group in pointers)
            compiled[(cut.grid, 1, 1)](*front, *self.plan.floats, *back, *tail, piece.spec)
            return
        kernel = self._kernel()
        self._compiled[key] = kernel[(cut.grid,)](*pointers[0], *self.plan.floats, *pointers[1], *tail, piece.spec, **options_of(cut))

    def launch_update(self, index: int, x: Tensor, state: list[Tensor], tuning: UpdateTuning) -> None:
        """Enqueue the group residual's update for piece `index` on the current stream; the piece must have ended."""
        from echoreduce.kernels.update import update_kernel

        piece = self.plan.pieces[index]
        arguments = (x, *state, *self.plan.floats, self._workspace.table, self._workspace.control, *self._shape(piece))
        kernel: Any = update_kernel
        one_shot = self.plan.algorithm == "one_shot"
        rows = 1024 // piece.spec.group_size * tuning.warps
        blocks = min(tuning.blocks, -(-piece.groups // rows)) if x.device.type == "cuda" else 1
        kernel[(blocks,)](*arguments, one_shot, piece.spec.with_rows(rows), num_warps=tuning.warps, **COMPILE_OPTIONS)

    def _call(self, piece: Piece) -> tuple[int, ...]:
        return (*self._shape(piece), piece.digest, self.plan.code, self._patience, piece.schedule.steps)

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        return (self.plan.cut.numel, piece.groups, self.plan.pitch, piece.origin, self._workspace.half, piece.area)

    def _kernel(self) -> Any:
        if self.plan.algorithm == "two_shot":
            from echoreduce.kernels.two_shot import two_shot_kernel

            return two_shot_kernel
        from echoreduce.kernels.one_shot import one_shot_kernel

        return one_shot_kernel
