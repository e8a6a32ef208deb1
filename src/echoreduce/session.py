"""A pass and its sites: which all-reduce of the pass this is, how many bits it sends, and what the earlier ones still owe.

A model has one session. `begin` opens a pass (one forward, or one backward) and makes the feedback state zero, whatever happened
before: an exception, an early return, another shape, inference mode. Then the k-th `reduce` of the pass is site k. State never outlives
a pass, so a request's output does not depend on the requests before it. Forward and backward keep separate state and counters.

Backward passes open themselves: the gradient that reaches `close_pass` begins one, or the first gradient of another forward pass does.
They may come in any order (gradient accumulation; 1F1B: F1 F2 B1 B2), but one after the other.

A forward site that runs inside a backward is one that an activation checkpoint runs again: it returns its recorded sum, sends nothing
and moves no state. Recordings are found by (number of the forward pass, key of the site) and freed when the backward ends.

Leaves out: who calls `begin` and `reduce` in a model (`integrations`), autograd (`differentiable`), how the sum is formed (`runtime`,
`virtual`).
Source: the paper, Sections 5.1 and 5.4; docs/design.md, Section 5; docs/training.md; cases O19 to O23 of the field.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from echoreduce import differentiable
from echoreduce.config import EchoConfig, QuantConfig
from echoreduce.errors import ConfigError, PassError, ShapeError
from echoreduce.passes import EndOfBackward, OpenForwards, PassState, may_be_recomputed, recomputing
from echoreduce.recording import Recording
from echoreduce.runtime.backend import Backend, State, supports_training
from echoreduce.sites import bits_at, needs_sites

Direction = Literal["forward", "backward"]

#: Forward passes that may wait for their backward at a time; a pipeline of D stages has at most D.
PASSES_IN_FLIGHT = 64


class Session:
    """Compensated all-reduces of one model on one group.

    Args:
        backend: moves the bytes; several sessions may share one.
        config: quantizer, feedback, algorithm and site policy.
        sites: all-reduces of a pass; needed by every site policy but `uniform`. A pass may stop earlier, never go on longer.
        backward_sites: the same for a backward pass; None: as many as forward. Where layers are frozen the last one is found by
            counting the gradients that the forward pass announced.
        record: keep what activation checkpoints need (docs/training.md); None: where a checkpoint can be seen. True is needed
            where torch.compile recomputes.
        passes_in_flight: forward passes that may wait for their backward at a time.
    Raises:
        ConfigError: the site policy needs `sites`, or lists another number of them.
    """

    def __init__(
        self,
        backend: Backend,
        config: EchoConfig,
        sites: int | None = None,
        backward_sites: int | None = None,
        *,
        record: bool | None = None,
        passes_in_flight: int = PASSES_IN_FLIGHT,
    ) -> None:
        for name, count in (("sites", sites), ("backward_sites", backward_sites), ("passes_in_flight", passes_in_flight)):
            if count is not None and count < 1:
                raise ConfigError(f"{name} must be at least 1, got {count}")
        if needs_sites(config.sites):
            bits_at(config.sites, 0, sites, config.quant.bits)
        self.backend = backend
        self.config = config
        self.sites = sites
        self.backward_sites = sites if backward_sites is None else backward_sites
        self.record = record
        self.stacked = backend.name == "virtual"
        self.world_size = backend.world_size
        self.handle = differentiable.register(self)
        self._passes: dict[str, PassState] = {name: PassState(self._new_state()) for name in ("forward", "backward")}
        self._forwards = OpenForwards(passes_in_flight)
        self._begun = 0
        self._end = EndOfBackward()

    def _new_state(self) -> State | None:
        return self.backend.new_state(self.config.feedback) if self.config.feedback.enabled else None

    # --- passes ---------------------------------------------------------------------------------------------------------------

    def begin(self, direction: Direction = "forward", *, number: int | None = None) -> None:
        """Open a pass: site 0 comes next and nothing is owed. Always allowed; an unfinished pass is dropped.

        Does nothing for a forward pass inside a backward, where a checkpoint runs the model again.

        Args:
            direction: `forward` or `backward`.
            number: of the forward pass whose backward this is; None: the last one that was begun.
        """
        if direction == "backward":
            self._end.forget()
            self._start("backward", self._begun if number is None else number)
        else:
            self.open_forward(torch.is_grad_enabled())

    def end(self, direction: Direction = "forward") -> None:
        """Close the pass and drop its state; `reduce` before the next `begin` is an error. Inside a backward: nothing, as `begin`."""
        if direction == "backward":
            self._finish_backward()
        elif not recomputing():
            self._passes["forward"].stop()

    @contextmanager
    def run_pass(self, direction: Direction = "forward", *, number: int | None = None) -> Iterator[Session]:
        """`with session.run_pass(): ...` is begin and end, also when the body raises."""
        self.begin(direction, number=number)
        try:
            yield self
        except BaseException:
            if direction == "forward":
                self.abandon()
            raise
        finally:
            self.end(direction)

    def abandon(self) -> None:
        """End a forward pass that broke off: it will have no backward, so nothing is kept for one. Inside a backward: nothing."""
        if not recomputing():
            self._passes["forward"].stop()
            self._forwards.drop(self._begun)

    def _start(self, direction: Direction, number: int) -> None:
        current = self._passes[direction]
        self._take(current, direction)
        try:
            current.start(number)
        finally:
            current.lock.release()

    def _take(self, current: PassState, direction: str) -> None:
        if not current.lock.acquire(blocking=False):
            raise PassError(f"concurrent use: a {direction} pass of this session is inside an all-reduce; use one session a thread")

    def open_forward(self, grad: bool) -> None:
        """Begin a forward pass; `grad`: whether it may get a backward."""
        if recomputing():
            return
        if self._end.watched and not self._end.running:
            self._finish_backward()  # what a backward that failed left
        self._start("forward", self._begun + 1)
        self._begun += 1
        if grad or self.record:
            self._forwards.add(self._begun)

    def close_forward(self) -> int:
        """End the forward pass and return its number; of a recomputed one only the number."""
        if recomputing():
            return self._recomputed()
        self._passes["forward"].stop()
        return self._passes["forward"].number

    def open_backward(self, number: int) -> None:
        """Begin the backward of forward pass `number`; called inside it."""
        self._watch_backward()
        self._start("backward", number)

    def _watch_backward(self) -> None:
        """Note that a backward runs, and see to its end; what a failed one left is cleared."""
        if self._end.running:
            return
        if self._end.watched:
            self._finish_backward()
        session = weakref.ref(self)

        def ended() -> None:
            alive = session()
            if alive is not None:
                alive._finish_backward()

        self._end.watch(ended)

    def _finish_backward(self) -> None:
        current = self._passes["backward"]
        current.stop()
        self._forwards.drop(current.number)
        current.number = 0
        self._end.forget()

    def _recomputed(self) -> int:
        """Number of the forward pass that is run again."""
        self._watch_backward()
        current = self._passes["backward"]
        if current.number == 0:
            only = self._forwards.only()
            if only is None:
                raise PassError(
                    "several forward passes wait for their backward, and which one runs is not known before its first gradient; "
                    "put close_pass on the model's output (integrations do), or use session.run_pass('backward', number=...)"
                )
            current.number = only
        return current.number

    # --- sites ----------------------------------------------------------------------------------------------------------------

    @property
    def site(self) -> int:
        """Index of the next site of the forward pass."""
        return self._passes["forward"].site

    @property
    def number(self) -> int:
        """Number of the last forward pass that was begun, from 1; 0: none yet."""
        return self._begun

    @property
    def recorded_bytes(self) -> int:
        """Bytes held for activation checkpoints at this moment."""
        return self._forwards.nbytes

    def bits(self, site: int, direction: Direction = "forward") -> int:
        """Bits that site `site` of a pass sends."""
        return bits_at(self.config.sites, site, self._sites(direction), self.config.quant.bits)

    def _sites(self, direction: str) -> int | None:
        """Sites of the pass that is open; backward, those that the forward pass announced."""
        if direction == "forward":
            return self.sites
        left = self._forwards.get(self._passes["backward"].number)
        if left is not None and left.counted and left.entries and callable(self.config.sites):
            return left.entries
        return self.backward_sites

    def reduce(self, x: Tensor, direction: Direction = "forward", key: str = "") -> Tensor:
        """The next site of the pass: sum x over the group. A collective call.

        Args:
            x: this rank's contribution, fp16, bf16 or fp32, any shape and layout, the same numel at every site of a pass
                (virtual ranks: contributions of all ranks, [P, *shape]).
            direction: whose pass this is a site of.
            key: names the site inside its pass; needed where an activation checkpoint may run it again.
        Returns:
            The sum, new tensor of the same shape and dtype (virtual ranks: of one row). Gradients pass through unchanged, as behind a
            row-parallel layer, whose output every rank uses alike (`differentiable.reduce_from_tp`).
        Raises:
            PassError: no open pass, more sites than `sites`, concurrent use, or a recomputed site without a recording.
            ShapeError: another numel than the pass began with.
            ConfigError: `rescale` is asked of a backend that cannot.
        """
        return differentiable.reduce_from_tp(x, self, key, direction)

    def reduce_site(self, x: Tensor, direction: str, key: str, grad: bool, counted: bool, number: int | None) -> Tensor:
        """What the operator behind `reduce` does, without autograd.

        Args:
            grad: whether grad was enabled where the site was called.
            counted: whether the regions around the site announce their gradients (`enter_region`); compiled ones do not.
            number: of the forward pass whose gradient this is; None: of the backward that is open.
        """
        if direction == "forward" and recomputing():
            return self._replay(x, key)
        if number is not None:
            self._follow(number)
        current = self._passes[direction]
        self._take(current, direction)
        try:
            site = self._next_site(current, x, direction)
            quant = self.config.quant.with_bits(bits_at(self.config.sites, site, self._sites(direction), self.config.quant.bits))
            recording = self._recording(key or f"site {site}", grad, counted) if direction == "forward" else None
            return self._call(x, quant, current.state, recording, direction == "backward" and self.config.rescale == "backward")
        finally:
            current.lock.release()

    def _call(self, x: Tensor, quant: QuantConfig, state: State | None, recording: Recording | None, rescale: bool) -> Tensor:
        numel = x.numel() // self.world_size if self.backend.name == "virtual" else x.numel()
        algorithm = self.config.algorithm_for(self.world_size, numel)
        if recording is None and not rescale:
            return self.backend.all_reduce(x, quant, algorithm, state)
        if supports_training(self.backend):
            return self.backend.all_reduce(x, quant, algorithm, state, recording=recording, rescale=rescale)
        if rescale:
            raise ConfigError(
                f"backend {self.backend.name} cannot change units around a gradient (rescale='backward'); use backend='c10d', or bf16 "
                "qparams, which need no factor: EchoConfig(rescale='none', quant=QuantConfig(qparams='bf16'))"
            )
        total = self.backend.all_reduce(x, quant, algorithm, state)
        if recording is not None:
            recording.keep_output(total)
        return total

    def _follow(self, number: int) -> None:
        """A gradient of forward pass `number` has come: open its backward unless it is the one that is open."""
        self._watch_backward()
        current = self._passes["backward"]
        if not current.open or current.number != number:
            self._start("backward", number)

    def _next_site(self, current: PassState, x: Tensor, direction: str) -> int:
        if not current.open:
            raise PassError(f"no {direction} pass is open; call session.begin({direction!r}) when a pass starts")
        sites = self.sites if direction == "forward" else self.backward_sites
        if sites is not None and current.site >= sites:
            raise PassError(
                f"site {current.site + 1} of a pass of {sites}: a new pass was not begun, or the model has more sites than it said"
            )
        if current.numel not in (-1, x.numel()):
            raise ShapeError(
                f"site {current.site} has {x.numel()} values, but its pass began with {current.numel}; begin a pass when the shape changes"
            )
        current.numel = x.numel()
        site = current.site
        current.site += 1
        return site

    # --- recomputation ----------------------------------------------------------------------------------------------------------

    def _recording(self, key: str, grad: bool, counted: bool) -> Recording | None:
        left = self._forwards.get(self._begun)
        if left is None:
            return None
        left.counted = left.counted and grad and counted
        if not (may_be_recomputed(grad) if self.record is None else self.record):
            return None
        if key in left.recordings:
            raise PassError(f"two sites of a pass have the key {key!r}, so a checkpoint could not tell them apart; give each its own")
        left.recordings[key] = Recording()
        return left.recordings[key]

    def _replay(self, x: Tensor, key: str) -> Tensor:
        recording = self._forwards.recording(self._recomputed(), key)
        if recording.shape != tuple(x.shape[1:] if self.stacked else x.shape):
            raise PassError(f"the site {key!r} had shape {recording.shape} and is recomputed with {tuple(x.shape)}")
        return recording.replay()

    def enter_region(self, key: str) -> int:
        """A region starts whose gradient will be reduced; returns the number of its forward pass."""
        if recomputing():
            return self._recomputed()
        if not self._passes["forward"].open:
            raise PassError("no forward pass is open; call session.begin() when a pass starts")
        if self._forwards.get(self._begun) is None:
            self._forwards.add(self._begun)
        left = self._forwards.get(self._begun)
        assert left is not None, "just added"
        left.entries += 1
        return self._begun

    def exact_sum(self, x: Tensor) -> Tensor:
        """The sum at 16 bits, without feedback, outside any pass: for gradients of the second order."""
        return self.backend.all_reduce(x, self.config.quant.with_bits(16), "two_shot")

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """A session with fresh state on the same backend: a copied model continues on the same group."""
        copy = Session(self.backend, self.config, self.sites, self.backward_sites, record=self.record)
        memo[id(self)] = copy
        return copy

    def __getstate__(self) -> object:
        raise TypeError("a Session holds a process group and cannot be pickled; save session.config and open a new session")
