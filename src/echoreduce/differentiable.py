"""The two differentiable functions of tensor parallelism over a session, and the two that mark where a pass begins and ends.

    reduce_from_tp   forward: all-reduce     backward: identity       leaves a row-parallel layer (Megatron's g)
    copy_to_tp       forward: identity       backward: all-reduce     enters column-parallel layers (Megatron's f)
    open_pass        forward: a pass begins  backward: identity       on the model's input
    close_pass       forward: the pass ends  backward: its backward begins    on the model's output

The collectives are functional operators registered with `torch.library` (`Library.define`, a third of the host time of `custom_op`), so
that torch.compile keeps them in the graph whole. They find their session by a string handle, because Dynamo passes strings and not
objects; the registry holds it weakly (an eager graph holds its session, a compiled one only the handle). Which forward pass a gradient
belongs to travels through the graph as a 0-dimensional int64 tensor (token), not as a Python number, which a compiled graph would
freeze. No operator's output aliases its input; the identities return a view under autograd, which refuses in-place changes of it.

Double backward, and higher orders: the adjoint of each function is the other one; all-reduces of the second order and above are exact
(16 bits, no feedback). A compiled function has no double backward (torch says so).

With virtual ranks a contribution is [P, *shape]: `reduce_from_tp` takes it to [*shape], `copy_to_tp` goes the other way.

Leaves out: the session's bookkeeping (`session`), modules (`integrations`).
Source: Shoeybi et al., 2019; docs/training.md; cases O11, O12, O26, O30 of the field.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from echoreduce.errors import PassError


class Reducer(Protocol):
    """What the functions need of a session."""

    @property
    def handle(self) -> str: ...
    @property
    def stacked(self) -> bool: ...
    @property
    def world_size(self) -> int: ...

    def reduce_site(self, x: Tensor, direction: str, key: str, grad: bool, counted: bool, number: int | None) -> Tensor: ...
    def enter_region(self, key: str) -> int: ...
    def open_forward(self, grad: bool) -> None: ...
    def close_forward(self) -> int: ...
    def open_backward(self, number: int) -> None: ...
    def exact_sum(self, x: Tensor) -> Tensor: ...


_reducers: weakref.WeakValueDictionary[str, Reducer] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(reducer: Reducer) -> str:
    """A new handle by which operators find `reducer` as long as it lives; this process only."""
    handle = f"session-{next(_numbers)}"
    _reducers[handle] = reducer
    return handle


def find(handle: str) -> Reducer:
    """The session of a handle.

    Raises:
        PassError: it does not live any more.
    """
    found = _reducers.get(handle)
    if found is None:
        raise PassError(f"{handle} is gone: the graph outlived the session whose all-reduces it holds")
    return found


# --- operators ----------------------------------------------------------------------------------------------------------------

_library = torch.library.Library("echoreduce", "DEF")
_library.define("reduce(Tensor x, str session, str direction, str key, bool stacked, bool grad, bool counted, Tensor? token) -> Tensor")
_library.define("exact_sum(Tensor x, str session) -> Tensor")
_library.define("enter_region(Tensor x, str session, str key) -> Tensor")
_library.define("open_pass(Tensor x, str session, bool grad) -> Tensor")
_library.define("close_pass(Tensor x, str session) -> (Tensor, Tensor)")
_library.define("open_backward(Tensor grad, Tensor token, str session) -> Tensor")


def _reduce(x: Tensor, session: str, direction: str, key: str, stacked: bool, grad: bool, counted: bool, token: Tensor | None) -> Tensor:
    number = None if token is None else int(token)
    return find(session).reduce_site(x, direction, key, grad, counted, number).contiguous()


def _exact_sum(x: Tensor, session: str) -> Tensor:
    return find(session).exact_sum(x).contiguous()


def _enter_region(x: Tensor, session: str, key: str) -> Tensor:
    return torch.tensor(find(session).enter_region(key))


def _open_pass(x: Tensor, session: str, grad: bool) -> Tensor:
    find(session).open_forward(grad)
    return x.clone()


def _close_pass(x: Tensor, session: str) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.tensor(find(session).close_forward())


def _open_backward(grad: Tensor, token: Tensor, session: str) -> Tensor:
    find(session).open_backward(int(token))
    return grad.clone()


def _fake_token(x: Tensor, *_: object) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _fake_reduce(x: Tensor, session: str, direction: str, key: str, stacked: bool, *_: object) -> Tensor:
    return x.new_empty(x.shape[1:] if stacked else x.shape)


for _name, _function, _fake in (
    ("reduce", _reduce, _fake_reduce),
    ("exact_sum", _exact_sum, lambda x, *_: x.new_empty(x.shape)),
    ("enter_region", _enter_region, _fake_token),
    ("open_pass", _open_pass, lambda x, *_: torch.empty_like(x)),
    ("close_pass", _close_pass, lambda x, *_: (torch.empty_like(x), _fake_token(x))),
    ("open_backward", _open_backward, lambda grad, *_: torch.empty_like(grad)),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"echoreduce::{_name}", _fake, lib=_library)

_ops = torch.ops.echoreduce


# --- functions ----------------------------------------------------------------------------------------------------------------


def reduce_from_tp(x: Tensor, session: Reducer, key: str = "", direction: str = "forward") -> Tensor:
    """All-reduce in the forward pass, identity in the backward pass; the next site of the session's open pass. A collective call.

    Args:
        x: this rank's contribution, fp16, bf16 or fp32, any shape (also empty) and layout; virtual ranks: [P, *shape].
        session: a `session.Session`; a pass of it is open.
        key: names the site inside its pass; needed where an activation checkpoint may run it again.
        direction: whose pass and feedback state: `forward`, or `backward` for gradients that are reduced by hand.
    Returns:
        The sum, a new tensor, shape and dtype of x (virtual: of one row), attached to the graph.
    Raises:
        PassError, ShapeError, MismatchError, PeerError, DTypeError: see `Session.reduce`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        reduced: Tensor = _ReduceFromTP.apply(x, session.handle, key, direction, session.stacked)  # type: ignore[no-untyped-call]
        return reduced
    result: Tensor = _ops.reduce(x, session.handle, direction, key, session.stacked, torch.is_grad_enabled(), _counted(), None)
    return result


def copy_to_tp(x: Tensor, session: Reducer, key: str = "") -> Tensor:
    """Identity in the forward pass, all-reduce of the gradient in the backward pass, with the session's backward state.

    Args:
        x: what every rank holds alike, fp16, bf16 or fp32, any shape.
        session: a `session.Session`; a forward pass of it is open.
        key: names the region inside its pass.
    Returns:
        x, under autograd as a view that refuses in-place changes (virtual ranks: expanded to [P, *shape]). Nothing is recorded where
        no gradient is asked for, so frozen layers send nothing.
    Raises:
        PassError: no forward pass is open. In the backward pass as `Session.reduce`.
    """
    if session.world_size > 1 and torch.is_grad_enabled() and x.requires_grad:
        copied: Tensor = _CopyToTP.apply(x, session.handle, key, session.world_size if session.stacked else 0)  # type: ignore[no-untyped-call]
        return copied
    return x.expand(session.world_size, *x.shape) if session.stacked else x


def sum_gradient(x: Tensor, session: Reducer) -> Tensor:
    """Identity in the forward pass, exact sum of the gradient in the backward pass (16 bits, no feedback, not a site).

    For small replicated parameters that see only this rank's share of the activations, such as a norm on a rank's own heads.
    Returns x, under autograd as a view that refuses in-place changes.
    """
    if session.world_size > 1 and torch.is_grad_enabled() and x.requires_grad:
        copied: Tensor = _CopyExactly.apply(x, session.handle)  # type: ignore[no-untyped-call]
        return copied
    return x


def open_pass(x: Tensor, session: Reducer) -> Tensor:
    """Begin a forward pass when x is there; put it on the model's input (token ids or embeddings). Returns a copy of x."""
    if torch.is_grad_enabled() and x.requires_grad:
        opened: Tensor = _OpenPass.apply(x, session.handle)  # type: ignore[no-untyped-call]
        return opened
    result: Tensor = _ops.open_pass(x, session.handle, torch.is_grad_enabled())
    return result


def close_pass(x: Tensor, session: Reducer) -> Tensor:
    """End the forward pass when x is there, and begin its backward when the gradient of x is; put it on the model's output.

    Returns a copy of x: an operator with two outputs, so that no partitioner can move the pass's number out of the forward graph.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        closed: Tensor = _ClosePass.apply(x, session.handle)  # type: ignore[no-untyped-call]
        return closed
    result: Tensor = _ops.close_pass(x, session.handle)[0]
    return result


# --- autograd -----------------------------------------------------------------------------------------------------------------


def _second_order(grad: Tensor) -> bool:
    return torch.is_grad_enabled() and grad.requires_grad


def _counted() -> bool:
    """Whether the regions around this site announce their gradients: compiled ones do not."""
    return not torch.compiler.is_compiling()


def _hold(ctx: Any, session: str) -> None:
    if not torch.compiler.is_compiling():
        ctx.held = find(session)


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, session: str, key: str, direction: str, stacked: bool) -> Tensor:
        ctx.session, ctx.ranks = session, x.shape[0] if stacked else 0
        _hold(ctx, session)
        result: Tensor = _ops.reduce(x, session, direction, key, stacked, True, _counted(), None)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ranks:
            grad = grad.expand(ctx.ranks, *grad.shape)
        elif _second_order(grad):
            grad = _CopyExactly.apply(grad, ctx.session)  # type: ignore[no-untyped-call]
        return grad, None, None, None, None


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, session: str, key: str, ranks: int) -> Tensor:
        ctx.session, ctx.key, ctx.stacked = session, key, ranks > 0
        _hold(ctx, session)
        # The partitioner of a compiled graph moves what only the backward reads into the backward: there the mark on the output tells.
        ctx.save_for_backward(*([] if torch.compiler.is_compiling() else [_ops.enter_region(x, session, key)]))
        return x.expand(ranks, *x.shape) if ranks else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint allows no second unpacking
        token = saved[0] if saved else None
        if _second_order(grad):
            return _ReduceGradient.apply(grad, token, ctx.session, ctx.key, ctx.stacked), None, None, None  # type: ignore[no-untyped-call]
        return _ops.reduce(grad, ctx.session, "backward", ctx.key, ctx.stacked, True, True, token), None, None, None


class _OpenPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, session: str) -> Tensor:
        result: Tensor = _ops.open_pass(x, session, True)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ClosePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, session: str) -> Tensor:
        ctx.session = session
        _hold(ctx, session)
        closed, token = _ops.close_pass(x, session)
        ctx.save_for_backward(token)
        result: Tensor = closed
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (token,) = ctx.saved_tensors
        if _second_order(grad):
            find(ctx.session).open_backward(int(token))
            return grad, None
        return _ops.open_backward(grad, token, ctx.session), None


class _ReduceGradient(torch.autograd.Function):
    """The backward all-reduce itself, differentiable: its adjoint hands the cotangent, alike on all ranks, to every rank."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, token: Tensor | None, session: str, key: str, stacked: bool) -> Tensor:
        ctx.session, ctx.ranks = session, grad.shape[0] if stacked else 0
        result: Tensor = _ops.reduce(grad, session, "backward", key, stacked, True, True, token)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        handed = grad.expand(ctx.ranks, *grad.shape) if ctx.ranks else _CopyExactly.apply(grad, ctx.session)  # type: ignore[no-untyped-call]
        return handed, None, None, None, None


class _CopyExactly(torch.autograd.Function):
    """Identity whose adjoint sums exactly: what a double backward owes to the identity of `reduce_from_tp`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, session: str) -> Tensor:
        ctx.session = session
        _hold(ctx, session)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumExactly.apply(grad, ctx.session), None  # type: ignore[no-untyped-call]


class _SumExactly(torch.autograd.Function):
    """Exact sum whose adjoint is the identity of `_CopyExactly`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, session: str) -> Tensor:
        ctx.session = session
        result: Tensor = _ops.exact_sum(x, session)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _CopyExactly.apply(grad, ctx.session), None  # type: ignore[no-untyped-call]
