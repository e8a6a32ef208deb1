"""How the sums of a tensor-parallel decoder are formed: by EchoReduce, by the group's own 16-bit all-reduce, or not at all.

    enter   forward: identity      backward: all-reduce     before column-parallel layers
    leave   forward: all-reduce    backward: identity       behind row-parallel layers

The 16-bit sums are in place, as in Megatron: no copy is charged to the baseline. "Not at all" is for timing: what is left is the time
that no all-reduce can save.

Source: Shoeybi et al., 2019; the paper, Section 7.1.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.integrations.tensor_parallel import close_pass, copy_to_tp, open_pass, reduce_from_tp
from echoreduce.session import Session


class Reducer(Protocol):
    """The four places where a decoder calls."""

    def open(self, x: Tensor) -> Tensor:
        """On the model's input: a pass begins."""

    def close(self, x: Tensor) -> Tensor:
        """On its output: the pass ends."""

    def enter(self, x: Tensor, key: str) -> Tensor:
        """Identity; sums the gradient."""

    def leave(self, x: Tensor, key: str) -> Tensor:
        """Sums x, which is this rank's contribution and nobody else's: it may be overwritten."""


class EchoReducer:
    """All-reduces of a session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def open(self, x: Tensor) -> Tensor:
        return open_pass(x, self.session)

    def close(self, x: Tensor) -> Tensor:
        return close_pass(x, self.session)

    def enter(self, x: Tensor, key: str) -> Tensor:
        return copy_to_tp(x, self.session, key)

    def leave(self, x: Tensor, key: str) -> Tensor:
        return reduce_from_tp(x, self.session, key)


class NoReducer:
    """Leaves every contribution as it is."""

    def open(self, x: Tensor) -> Tensor:
        return x

    def close(self, x: Tensor) -> Tensor:
        return x

    def enter(self, x: Tensor, key: str) -> Tensor:
        return x

    def leave(self, x: Tensor, key: str) -> Tensor:
        return x


class ExactReducer(NoReducer):
    """The default group's own all-reduce, in place."""

    def enter(self, x: Tensor, key: str) -> Tensor:
        entered: Tensor = _Enter.apply(x)
        return entered

    def leave(self, x: Tensor, key: str) -> Tensor:
        left: Tensor = _Leave.apply(x)
        return left


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.contiguous()
        dist.all_reduce(total)
        return total


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ShardedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits whose vocabulary is split over the default group's ranks; sums in fp32, three small all-reduces."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int) -> Tensor:
        """Logits [n, this rank's vocabulary], target int64 [n], first row of this rank's vocabulary -> loss, fp32 [n]."""
        width = logits.shape[-1]
        top = logits.amax(-1).float()
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        shifted = logits.float() - top[:, None]
        own = (target >= start) & (target < start + width)
        index = (target - start).clamp(0, width - 1)[:, None]
        picked = shifted.gather(1, index)[:, 0] * own
        share = shifted.exp_()
        sums = torch.stack((share.sum(-1), picked))
        dist.all_reduce(sums)
        share.div_(sums[0][:, None])
        ctx.save_for_backward(share.to(logits.dtype), index, own)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        share, index, own = ctx.saved_tensors
        spread = share * grad[:, None].to(share.dtype)
        return spread.scatter_add_(1, index, -(grad * own)[:, None].to(share.dtype)), None, None
