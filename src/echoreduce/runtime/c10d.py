"""The compensated all-reduce over torch.distributed: gloo, NCCL, MPI, one host or many.

    two-shot    [header] -> all_to_all_single of the pushed segments -> sum and round -> all_gather of the rounded sums -> read
    one-shot    [header] -> all_gather of the whole rounded tensor -> sum the same P copies in rank order

Every rank runs the functions of `reference` on its own slice, so outputs, codes and residuals equal it bit for bit. All payloads are
uint8 of equal size a rank (uneven all_to_all_single reads uninitialized memory on gloo).

With `rescale` one all-reduce (MAX) of one integer goes before the payload, see `feedback.rescale`.

The header is exchanged on gloo by default and not on NCCL: there it costs one more collective and a synchronization with the host a
call. A peer that died or is late raises PeerError within the timeout; survivors call a roll over the group's store to name it.

Leaves out: overlap of quantization and transfer (`p2p` has it), 16-bit values (bits = 16 is the library's own all-reduce, whose order
of additions is its own).
Source: docs/design.md, Section 7; the two-collective form is ZeRO++'s (Wang et al., 2024a).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce import reference
from echoreduce.config import FeedbackConfig, QuantConfig
from echoreduce.errors import DTypeError, EchoReduceError, GroupError, PassError, PeerError, ShapeError
from echoreduce.feedback import compensator
from echoreduce.feedback import rescale as units
from echoreduce.feedback.compensator import FeedbackState
from echoreduce.partition import Partition, partition
from echoreduce.quant import packing
from echoreduce.quant.grid import DATA_DTYPES, divide, qparams_dtype
from echoreduce.recording import Recording
from echoreduce.runtime.header import WORDS, Header, compare, settings_text
from echoreduce.runtime.membership import member_of

#: Seconds that survivors of a failed call wait for each other before they name who is missing.
ROLL_CALL_SECONDS = 3.0

#: torch 2.13 renamed it; 2.11 has the old name only.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Settings:
    """How one call is made: quantizer, `two_shot` or `one_shot`, and whether units change (`feedback.rescale`)."""

    quant: QuantConfig
    algorithm: str
    rescale: bool


@dataclass(frozen=True)
class Shared:
    """One rank's view of a finished call: blocks and what became of them, for residuals.

    Attributes:
        compensated: own x', fp32 [S, G, g].
        pushed: own rounding, [S, G(, g)].
        sums: own segment's sum, fp32 [G, g]; None for one-shot.
        reduced: its rounding; None for one-shot.
        values: what every rank reads, fp32 [S, G, g].
        wire: the bytes that `values` were read from, uint8 [S, bytes]; one-shot: [P, S, bytes].
        exponent: all fp32 tensors above are in units of 2**-exponent; None: in the data's own units.
    """

    compensated: Tensor
    pushed: reference.Rounded
    sums: Tensor | None
    reduced: reference.Rounded | None
    values: Tensor
    wire: Tensor
    exponent: Tensor | None = None


class C10dBackend:
    """Compensated all-reduce over a torch.distributed process group.

    Collective calls: `all_reduce`. Runs on the current stream for CUDA tensors.

    Args:
        group: process group; None is the default group.
        check_headers: exchange and compare headers before each payload; None: on for gloo, off otherwise.
            Cost on gloo, two local processes: see docs/reproduce.md, "What the header costs".
        timeout: longest wait for peers in one collective of a call; None: the group's own timeout.
    Raises:
        GroupError: torch.distributed is not initialized, or this rank is not in the group.
    """

    name = "c10d"
    training = True

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, check_headers: bool | None = None, timeout: timedelta | None = None
    ) -> None:
        self.group = member_of(group)
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.check_headers = dist.get_backend(self.group) == "gloo" if check_headers is None else check_headers
        self.timeout = timeout
        self._call = 0
        self._busy = threading.Lock()
        self._closed = False

    def new_state(self, feedback: FeedbackConfig) -> FeedbackState:
        """Empty feedback state of this rank."""
        return FeedbackState(feedback)

    def close(self) -> None:
        """Refuse further calls. Not collective; the process group stays as it is."""
        self._closed = True

    def all_reduce(
        self,
        x: Tensor,
        quant: QuantConfig,
        algorithm: str,
        state: FeedbackState | None = None,
        out: Tensor | None = None,
        *,
        recording: Recording | None = None,
        rescale: bool = False,
    ) -> Tensor:
        """See `TrainingBackend.all_reduce`.

        Raises:
            MismatchError: another rank came with another shape, dtype or setting (needs `check_headers`).
            DTypeError: x is not fp16, bf16 or fp32.
            ShapeError: `out` does not fit, or the state belongs to another shape.
            PeerError: a peer died or is late; `ranks` names it.
            PassError: another thread is inside a call of this backend.
        """
        if self._closed:
            raise GroupError("this backend is closed")
        if out is not None:
            check_out(out, x.shape, x.dtype)
        if not self._busy.acquire(blocking=False):
            raise PassError("concurrent use: another thread is inside an all-reduce of this group; give each thread its own group")
        try:
            self._call += 1
            result = self._guarded(x.detach(), Settings(quant, algorithm, rescale), state, recording)
        finally:
            self._busy.release()
        return result if out is None else write_to(out, result)

    def _guarded(self, x: Tensor, how: Settings, state: FeedbackState | None, recording: Recording | None) -> Tensor:
        if self.world_size > 1 and self.check_headers:
            self._exchange_headers(x, how, state)
        if x.dtype not in DATA_DTYPES:
            raise DTypeError(f"cannot all-reduce {x.dtype} in low precision; accepted are float32, bfloat16 and float16")
        if self.world_size == 1 or x.numel() == 0 or how.quant.bits == 16:
            total = x.clone(memory_format=torch.contiguous_format)
            if self.world_size > 1 and x.numel() > 0:
                self._run(lambda: dist.all_reduce(total, group=self.group, async_op=True))
            if recording is not None:
                recording.keep_output(total)
            return total
        cut = partition(x.numel(), self.world_size, how.quant.group_size)
        shared = self._shared(self._compensated(x, cut, how.quant, state), cut, how, x.dtype)
        if state is not None:
            residual, bounds = self._residual(shared, state.config)
            compensator.update(state, reference.own_units(residual, shared.exponent), reference.own_units(bounds, shared.exponent))
        output = reference.leave(reference.own_units(shared.values, shared.exponent), how.quant, cut, x.shape, x.dtype)
        if recording is not None:
            recording.keep_wire(shared.wire, how.quant, output) if shared.exponent is None else recording.keep_output(output)
        return output

    def _compensated(self, x: Tensor, cut: Partition, quant: QuantConfig, state: FeedbackState | None) -> Tensor:
        """x' = x + c in blocks, fp32 [S, G, g]."""
        blocks = reference.to_blocks(x.reshape(-1), cut, quant)
        returned = compensator.correction(state) if state is not None else None
        if returned is None:
            return blocks
        if returned.shape != blocks.shape:
            raise ShapeError(f"{x.numel()} values at this site, but the pass began with another size; begin a new pass")
        return blocks + returned

    def _shared(self, blocks: Tensor, cut: Partition, how: Settings, dtype: torch.dtype) -> Shared:
        """The collective itself, in units that all ranks share if `how.rescale`."""
        exponent = None
        if how.rescale:
            largest = units.largest_exponent(blocks)
            self._run(lambda: dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
            exponent = units.shared_exponent(largest, self.world_size)
            blocks = units.scale_by(blocks, exponent)
        collective = self._two_shot if how.algorithm == "two_shot" else self._one_shot
        return replace(collective(blocks, cut, how.quant, dtype), exponent=exponent)

    def _two_shot(self, blocks: Tensor, cut: Partition, quant: QuantConfig, dtype: torch.dtype) -> Shared:
        qparams = qparams_dtype(quant, dtype)
        pushed = reference.push(blocks, quant, qparams)
        sent = packing.encode(pushed.level, pushed.grid, quant, qparams)
        arrived = torch.empty_like(sent)
        self._run(lambda: dist.all_to_all_single(arrived, sent, group=self.group, async_op=True))
        received = _read(arrived, cut.segment_groups, quant, qparams)
        received[self.rank] = blocks[self.rank]
        sums, reduced = reference.reduce(received, quant, qparams)
        wire = self._gather(packing.encode(reduced.level, reduced.grid, quant, qparams))
        return Shared(blocks, pushed, sums, reduced, _read(wire, cut.segment_groups, quant, qparams), wire)

    def _one_shot(self, blocks: Tensor, cut: Partition, quant: QuantConfig, dtype: torch.dtype) -> Shared:
        qparams = qparams_dtype(quant, dtype)
        pushed = reference.push(blocks, quant, qparams)
        sent = packing.encode(pushed.level, pushed.grid, quant, qparams)
        wire = self._gather(sent)
        copies = _read(wire, cut.segment_groups, quant, qparams)
        return Shared(blocks, pushed, None, None, reference.in_rank_order(copies), wire)

    def _gather(self, sent: Tensor) -> Tensor:
        """All-gather wire bytes [*segments, bytes]: uint8 [P, *segments, bytes]."""
        arrived = sent.new_empty((self.world_size * sent.numel(),))
        self._run(lambda: all_gather_single(arrived, sent.reshape(-1), group=self.group, async_op=True))
        return arrived.reshape(self.world_size, *sent.shape)

    def _residual(self, shared: Shared, feedback: FeedbackConfig) -> tuple[Tensor, Tensor]:
        """This rank's residual and its bounds; as `reference.local_residuals` and `group_residuals`."""
        if feedback.residual == "group":
            return shared.compensated - divide(shared.values, self.world_size), shared.pushed.grid.scale
        residual, bounds = shared.compensated - shared.pushed.values(), shared.pushed.grid.largest_error
        if shared.sums is not None and shared.reduced is not None:
            residual[self.rank] = shared.sums - shared.values[self.rank]
            bounds[self.rank] = shared.reduced.grid.largest_error
        return residual, bounds

    def _exchange_headers(self, x: Tensor, how: Settings, state: FeedbackState | None) -> None:
        algorithm = how.algorithm + (" rescaled" if how.rescale else "")
        header = Header(tuple(x.shape), x.dtype, settings_text(how.quant, algorithm, state and state.config), self._call)
        words = torch.tensor(header.words(), dtype=torch.int64, device=x.device).repeat(self.world_size)
        table = torch.empty_like(words)
        self._run(lambda: dist.all_to_all_single(table, words, group=self.group, async_op=True))
        compare(table.reshape(self.world_size, WORDS).cpu(), header)

    def _run(self, start: Callable[[], Any]) -> None:
        """Start an asynchronous collective and wait for it; turn a failure into a PeerError that names who is missing."""
        try:
            work = start()
            if self.timeout is None:
                work.wait()
            else:
                work.wait(self.timeout)
        except EchoReduceError:
            raise
        except RuntimeError as error:
            raise self._peer_error(error) from error

    def _peer_error(self, error: RuntimeError) -> PeerError:
        missing, note = roll_call(self.group, self.rank, self.world_size, self._call)
        first_line = str(error).strip().splitlines()[0][:200]
        who = f"rank {', '.join(map(str, missing))} did not answer" if missing else "no rank could be named"
        return PeerError(
            f"all-reduce number {self._call} failed on rank {self.rank} of {self.world_size}: {who}{note} ({first_line}); "
            "the group cannot be used any more",
            tuple(missing),
        )


def _read(wire: Tensor, groups: int, quant: QuantConfig, qparams: torch.dtype) -> Tensor:
    """What wire bytes [*segments, bytes] stand for: fp32 [*segments, groups, group_size]."""
    return reference.Rounded(*packing.decode(wire, groups, quant, qparams)).values()


def roll_call(group: dist.ProcessGroup, rank: int, world_size: int, call: int) -> tuple[list[int], str]:
    """Ask over the group's store who is still there after call number `call` failed.

    Returns:
        (group ranks that did not answer within ROLL_CALL_SECONDS, a note for the message).
    """
    prefix = f"echoreduce/roll_call/{group.group_name}/{call}"
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{prefix}/{rank}", "here")
        absent = [peer for peer in range(world_size) if peer != rank]
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        while absent and time.monotonic() < deadline:
            absent = [peer for peer in absent if not store.check([f"{prefix}/{peer}"])]
            if absent:
                time.sleep(0.02)
        return absent, ""
    except (RuntimeError, ConnectionError) as lost:
        return [], f", because the group's store is gone too, which global rank 0 usually keeps ({str(lost).splitlines()[0][:80]})"


def write_to(out: Tensor, result: Tensor) -> Tensor:
    """Copy the sum into the caller's tensor, of any layout that passed `check_out`."""
    with torch.no_grad():
        return out.copy_(result)


def check_out(out: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise unless `out` can take a sum of this shape and dtype.

    Raises:
        ShapeError: another shape; several elements of `out` share memory (an expanded tensor); or `out` is a leaf that requires grad.
        DTypeError: another dtype.
    """
    if out.shape != shape:
        raise ShapeError(f"out has shape {tuple(out.shape)}, the sum {tuple(shape)}")
    if out.dtype != dtype:
        raise DTypeError(f"out has dtype {out.dtype}, the sum {dtype}")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape)):
        raise ShapeError("out is an expanded tensor: several of its elements share memory; pass a clone of it")
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise ShapeError("out is a leaf that requires grad; an in-place all-reduce would cut it from the graph")
