"""A pass and its sites: which all-reduce of the pass this is, how many bits it sends, and what the earlier ones still owe.

A model has one session. `begin` opens a pass (one forward, or one backward) and makes the feedback state zero, whatever happened
before: an exception, an early return, another shape, inference mode. Then the k-th `reduce` of the pass is site k. State never outlives
a pass, so a request's output does not depend on the requests before it. Forward and backward keep separate state and counters.

Leaves out: who calls `begin` and `reduce` in a model (`integrations`), and how the sum is formed (`runtime`, `virtual`).
Source: the paper, Sections 5.1 and 5.4; docs/design.md, Section 5.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from echoreduce.config import EchoConfig
from echoreduce.errors import ConfigError, PassError, ShapeError
from echoreduce.runtime.backend import Backend, State
from echoreduce.sites import bits_at, needs_sites

Direction = Literal["forward", "backward"]


@dataclass
class PassState:
    """One direction's pass: whether it is open, its next site, the message size its state belongs to, and the state."""

    state: State | None
    open: bool = False
    site: int = 0
    numel: int = -1
    lock: threading.Lock = field(default_factory=threading.Lock)


class Session:
    """Compensated all-reduces of one model on one group.

    Args:
        backend: moves the bytes; several sessions may share one.
        config: quantizer, feedback, algorithm and site policy.
        sites: all-reduces of a pass; needed by every site policy but `uniform`. A pass may stop earlier, never go on longer.
    Raises:
        ConfigError: the site policy needs `sites`, or lists another number of them.
    """

    def __init__(self, backend: Backend, config: EchoConfig, sites: int | None = None) -> None:
        if sites is not None and sites < 1:
            raise ConfigError(f"sites must be at least 1, got {sites}")
        if needs_sites(config.sites):
            bits_at(config.sites, 0, sites, config.quant.bits)
        self.backend = backend
        self.config = config
        self.sites = sites
        self._passes: dict[str, PassState] = {name: PassState(self._new_state()) for name in ("forward", "backward")}

    def _new_state(self) -> State | None:
        return self.backend.new_state(self.config.feedback) if self.config.feedback.enabled else None

    def begin(self, direction: Direction = "forward") -> None:
        """Open a pass: site 0 comes next and nothing is owed. Always allowed; an unfinished pass is dropped."""
        current = self._passes[direction]
        if not current.lock.acquire(blocking=False):
            raise PassError(f"concurrent use: a {direction} pass of this session is inside an all-reduce; use one session a thread")
        try:
            if current.state is not None:
                current.state.reset()
            current.open, current.site, current.numel = True, 0, -1
        finally:
            current.lock.release()

    def end(self, direction: Direction = "forward") -> None:
        """Close the pass and drop its state; `reduce` before the next `begin` is an error."""
        current = self._passes[direction]
        if current.state is not None:
            current.state.reset()
        current.open = False

    @contextmanager
    def run_pass(self, direction: Direction = "forward") -> Iterator[Session]:
        """`with session.run_pass(): ...` is begin and end, also when the body raises."""
        self.begin(direction)
        try:
            yield self
        finally:
            self.end(direction)

    @property
    def site(self) -> int:
        """Index of the next site of the forward pass."""
        return self._passes["forward"].site

    def bits(self, site: int) -> int:
        """Bits that site `site` of a pass sends."""
        return bits_at(self.config.sites, site, self.sites, self.config.quant.bits)

    def reduce(self, x: Tensor, direction: Direction = "forward") -> Tensor:
        """The next site of the pass: sum x over the group. A collective call.

        Args:
            x: this rank's contribution, fp16, bf16 or fp32, any shape and layout, the same numel at every site of a pass
                (virtual ranks: contributions of all ranks, [P, *shape]).
        Returns:
            The sum, new tensor of the same shape and dtype (virtual ranks: of one row). Gradients pass through unchanged, as behind a
            row-parallel layer, whose output every rank uses alike.
        Raises:
            PassError: no open pass, more sites than `sites`, or concurrent use.
            ShapeError: another numel than the pass began with.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            reduced: Tensor = _ReduceThenIdentity.apply(x, self, direction)  # type: ignore[no-untyped-call]
            return reduced
        return self._reduce(x, direction)

    def _reduce(self, x: Tensor, direction: Direction) -> Tensor:
        current = self._passes[direction]
        if not current.lock.acquire(blocking=False):
            raise PassError(f"concurrent use: a {direction} pass of this session is inside an all-reduce; use one session a thread")
        try:
            site = self._next_site(current, x, direction)
            quant = self.config.quant.with_bits(self.bits(site))
            algorithm = self.config.algorithm_for(self.backend.world_size)
            return self.backend.all_reduce(x, quant, algorithm, current.state)
        finally:
            current.lock.release()

    def _next_site(self, current: PassState, x: Tensor, direction: Direction) -> int:
        if not current.open:
            raise PassError(f"no {direction} pass is open; call session.begin({direction!r}) when a pass starts")
        if self.sites is not None and current.site >= self.sites:
            raise PassError(
                f"site {current.site + 1} of a pass of {self.sites}: a new pass was not begun, or the model has more sites than it said"
            )
        if current.numel not in (-1, x.numel()):
            raise ShapeError(
                f"site {current.site} has {x.numel()} values, but its pass began with {current.numel}; begin a pass when the shape changes"
            )
        current.numel = x.numel()
        site = current.site
        current.site += 1
        return site

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """A session with fresh state on the same backend: a copied model continues on the same group."""
        copy = Session(self.backend, self.config, self.sites)
        memo[id(self)] = copy
        return copy

    def __getstate__(self) -> object:
        raise TypeError("a Session holds a process group and cannot be pickled; save session.config and open a new session")


class _ReduceThenIdentity(torch.autograd.Function):
    """Forward: all-reduce. Backward: identity (Megatron's g, Shoeybi et al., 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, session: Session, direction: Direction) -> Tensor:
        ctx.stacked = session.backend.name == "virtual"
        ctx.shape = x.shape
        return session._reduce(x, direction)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.expand(ctx.shape) if ctx.stacked else grad, None, None
