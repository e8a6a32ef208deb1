"""The compensated all-reduce over peer-to-peer memory: Triton kernels that write into each other's workspace, one host, NVLink or PCIe.

    all_reduce -> plan (cached by shape and settings) -> [grow] -> one launch -> [update on a side stream: group residual only]

The host never waits: kernels find each other by flags, and the epoch that the flags carry is advanced on the device, so a captured CUDA
graph replays like an eager call. What goes wrong on the device (a peer that does not come, a peer that calls something else) is
written to pinned memory and raised at the next call, `synchronize` or `close`; the output of such a call is NaN where it could not be
computed.

Leaves out: bits = 16 (the library's own all-reduce), several hosts (`c10d`), the choice of path (`dispatch`).
Source: docs/design.md, Section 7; the paper, Section 4.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.config import FeedbackConfig, QuantConfig
from echoreduce.errors import ConfigError, DTypeError, EchoReduceError, GroupError, PassError
from echoreduce.quant.grid import DATA_DTYPES
from echoreduce.runtime import pipeline
from echoreduce.runtime.c10d import check_out
from echoreduce.runtime.failure import failure
from echoreduce.runtime.membership import member_of
from echoreduce.runtime.pipeline import Launcher, Site
from echoreduce.runtime.requirements import require_peers
from echoreduce.runtime.schedule import Tuning, UpdateTuning
from echoreduce.runtime.staged import StagedLauncher
from echoreduce.runtime.state import P2PState
from echoreduce.runtime.streams import StreamOrder
from echoreduce.runtime.workspace import Workspace

#: Longest wait of a kernel for a peer, unless the caller says otherwise.
DEFAULT_TIMEOUT = timedelta(seconds=60)
#: Largest workspace half; larger messages go in pieces.
LARGEST_HALF = 2 << 30
#: First workspace half: messages of 32 MiB at P = 2 and 4 bits.
FIRST_HALF = 32 << 20
#: Shapes and settings whose plans are kept.
MOST_PLANS = 4096
#: Polls that stand for a second in the interpreter, which has no clock.
POLLS_PER_SECOND = 500


class P2PBackend:
    """Compensated all-reduce over peer-to-peer memory.

    Collective: construction, `all_reduce`, `close`. `all_reduce` runs on the current stream of `device`; calls of one backend from
    several streams are put in order by events.

    Args:
        group: process group of ranks on one host; None is the default group.
        device: this rank's CUDA device; None is the current one. `cpu` runs the kernels in Triton's interpreter (TRITON_INTERPRET=1).
        timeout: longest wait of a kernel for a peer; None: 60 s.
        blocking: wait for the device after every call and raise at once; for tests and debugging.
        largest_half: bytes of the largest workspace half.
        first_half: bytes of a workspace half at the start.
        schedule: `persistent` (one launch a call) or `staged` (the paper's streams and events, two-shot only; slower).
        tuning: start of every schedule; None: the built-in ones.
        update: how the group residual's update runs beside the caller's next kernels; None: the built-in way.
    Raises:
        GroupError: torch.distributed is not initialized, or this rank is not in the group.
        ConfigError: another schedule.
        BackendUnavailable: on every rank, with the reasons of those where peer-to-peer memory cannot be had.
    """

    name = "p2p"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
        blocking: bool = False,
        largest_half: int = LARGEST_HALF,
        first_half: int = FIRST_HALF,
        tuning: Tuning | None = None,
        schedule: Literal["persistent", "staged"] = "persistent",
        update: UpdateTuning | None = None,
    ) -> None:
        self.group = member_of(group)
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.timeout = timeout or DEFAULT_TIMEOUT
        self.blocking = blocking
        self.largest_half = largest_half
        self.tuning = tuning
        if schedule not in ("persistent", "staged"):
            raise ConfigError(f"schedule must be 'persistent' or 'staged', got {schedule!r}")
        self._staged = schedule == "staged"
        self.device, self.limits, self._float8 = require_peers(self.group, device)
        self._native = self.device.type == "cuda"
        self.update = update or UpdateTuning()
        unit = 10**9 if self._native else POLLS_PER_SECOND
        self._patience = int(self.timeout.total_seconds() * unit)
        self._launchers: dict[Site, Launcher] = {}
        self._order = StreamOrder(self.device, self.update.priority)
        self._busy = threading.Lock()
        self._last: Site | None = None
        self._failed: EchoReduceError | None = None
        self._workspace: Workspace | None = None
        if self.world_size > 1:
            self._workspace = Workspace(self.group, self.device, min(first_half, largest_half))

    def new_state(self, feedback: FeedbackConfig) -> P2PState:
        """Empty feedback state of this rank."""
        return P2PState(feedback)

    def all_reduce(self, x: Tensor, quant: QuantConfig, algorithm: str, state: P2PState | None = None, out: Tensor | None = None) -> Tensor:
        """See `Backend.all_reduce`.

        Raises:
            PeerError, MismatchError: an earlier call failed on the device (with `blocking`: this one).
            DTypeError: x is not fp16, bf16 or fp32. ShapeError: `out` does not fit, or the state belongs to another shape.
            GroupError: closed, x is on another device, or memory would have to grow while a graph is captured.
            PassError: another thread is inside a call of this backend.
        """
        if not self._busy.acquire(blocking=False):
            raise PassError("concurrent use: another thread is inside an all-reduce of this group; give each thread its own group")
        try:
            self._check_call(x, out)
            result = self._reduce(x.detach() if x.requires_grad else x, quant, algorithm, state, out)
            if self.blocking:
                self._synchronize()
            return result
        finally:
            self._busy.release()

    def forget_schedules(self) -> None:
        """Plan every shape anew at its next call, after `tuning` was changed; every rank does it between the same calls."""
        self._launchers.clear()

    def synchronize(self) -> None:
        """Wait for this backend's work on the current stream and raise what went wrong on the device. Not collective."""
        with self._busy:
            self._synchronize()

    def close(self) -> None:
        """Give the workspace back. Collective, unless a call has failed; raises what went wrong on the device before."""
        with self._busy:
            if self._workspace is None:
                return
            try:
                self._synchronize()
            finally:
                self._workspace.close(wait_for_peers=self._failed is None)
                self._workspace = None

    def _check_call(self, x: Tensor, out: Tensor | None) -> None:
        if self.world_size > 1 and self._workspace is None:
            raise GroupError("this backend is closed")
        if self._failed is not None:
            raise self._failed
        self._raise_failure()
        if x.dtype not in DATA_DTYPES:
            raise DTypeError(f"cannot all-reduce {x.dtype} in low precision; accepted are float32, bfloat16 and float16")
        if x.device != self.device:
            raise GroupError(f"the tensor is on {x.device}, this backend on {self.device}")
        if out is not None:
            check_out(out, x.shape, x.dtype)

    def _reduce(self, x: Tensor, quant: QuantConfig, algorithm: str, state: P2PState | None, out: Tensor | None) -> Tensor:
        if self.world_size == 1 or x.numel() == 0:
            return x.clone() if out is None else _copy(out, x)
        if quant.bits == 16:
            total = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self.group)
            return total if out is None else _copy(out, total)
        direct = out is not None and out.is_contiguous()
        source = x.contiguous()
        target = out if direct and out is not None else torch.empty_like(source)
        self._order.enter()
        self._run(source, target, self._launcher(x, quant, algorithm, state), state)
        if out is None or direct:
            return target
        return _copy(out, target)

    def _launcher(self, x: Tensor, quant: QuantConfig, algorithm: str, state: P2PState | None) -> Launcher:
        feedback = state.config if state is not None and state.config.enabled else None
        site = Site(x.numel(), x.dtype, quant, algorithm, feedback, state is None or state.fresh)
        found = self._launchers.get(site)
        if found is None:
            if len(self._launchers) >= MOST_PLANS:
                self._launchers.clear()
            arguments = (self.world_size, self.rank, self.limits, self.tuning, self.largest_half, self._native, self._float8)
            made = pipeline.plan(site, *arguments)
            workspace = self._workspace
            assert workspace is not None, "checked by the caller"
            if made.half > workspace.half:
                self._grow(workspace, made.half)
            kind = StagedLauncher if self._staged and algorithm == "two_shot" else Launcher
            found = self._launchers[site] = kind(made, workspace, self._patience)
        self._last = site
        return found

    def _run(self, x: Tensor, y: Tensor, launcher: Launcher, state: P2PState | None) -> None:
        made = launcher.plan
        feedback = made.feedback
        tensors = [x, x, x, x] if state is None or feedback is None else state.prepare(made.cut, self.device, self._order.capturing)
        late = feedback is not None and feedback.residual == "group"
        source = x.clone() if late and x.data_ptr() == y.data_ptr() else x
        for index in range(len(made.pieces)):
            self._order.wait_for_update()
            launcher.launch(index, source, y, tensors)
            if late:
                with self._order.update_after(source, tensors):
                    launcher.launch_update(index, source, tensors, self.update)
        if state is not None:
            state.fresh = False

    def _grow(self, workspace: Workspace, half: int) -> None:
        if self._order.capturing:
            raise GroupError(
                f"this all-reduce needs a workspace of {2 * half} bytes and has {2 * workspace.half}; it cannot grow while a CUDA graph is "
                "captured: make one call of this size before the capture"
            )
        self._synchronize()
        self._launchers.clear()
        workspace.grow(min(self.largest_half, 1 << (half - 1).bit_length()))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
            self._order.synchronize()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failed is None and self._workspace is not None and self._workspace.failed:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            own = pipeline.settings_text(self._last.numel, pipeline.settings_code(self._last)) if self._last is not None else "no call"
            self._failed = failure(self._workspace, self.timeout.total_seconds(), own)
        if self._failed is not None:
            raise self._failed


def _copy(out: Tensor, result: Tensor) -> Tensor:
    with torch.no_grad():
        return out.copy_(result)
