"""What every backend offers: one compensated all-reduce, and the state that belongs to it.

The session decides bits and passes, the backend moves bytes. A backend owns the memory layout of its feedback state, so the state is
opaque to everybody else; all backends give the same bits for the same inputs (`reference`).

Source: docs/design.md, Section 7.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

from torch import Tensor

from echoreduce.config import FeedbackConfig, QuantConfig
from echoreduce.recording import Recording


class State(Protocol):
    """Feedback state of one direction of one session on one rank."""

    def reset(self) -> None:
        """Start a pass: the next call counts the stored averages as zero, whatever is in them."""


class Backend(Protocol):
    """One group's compensated all-reduce.

    Attributes:
        name: `c10d`, `p2p`, `virtual`.
        world_size: ranks of the group, P.
        rank: this process's rank in the group (0 for virtual ranks).
    """

    @property
    def name(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def rank(self) -> int: ...

    def new_state(self, feedback: FeedbackConfig) -> Any:
        """Empty feedback state, a `State` of the backend's own type; allocates nothing."""

    def all_reduce(self, x: Tensor, quant: QuantConfig, algorithm: str, state: Any = None, out: Tensor | None = None) -> Tensor:
        """Sum x over the group. A collective call: every rank of the group makes it, with the same shape, dtype and settings.

        Args:
            x: fp16, bf16 or fp32, any shape and layout, this rank's contribution (virtual: [P, *shape]).
            quant: quantizer of this site; bits = 16 is the exact sum of the library's own all-reduce.
            algorithm: `two_shot` or `one_shot`.
            state: feedback state from this backend's `new_state`, read and advanced; None: nothing is fed back.
            out: where the sum is written (may be x itself); None: a new contiguous tensor.
        Returns:
            The sum, shape and dtype of x (virtual: of one row); never an alias of x unless out is x.
        """

    def close(self) -> None:
        """Give back memory and handles; further calls raise GroupError. Collective where the backend's text says so."""


class TrainingBackend(Backend, Protocol):
    """A backend with the two options that training asks for; `supports_training` tells.

    Attributes:
        training: True.
    """

    training: bool

    def all_reduce(
        self,
        x: Tensor,
        quant: QuantConfig,
        algorithm: str,
        state: Any = None,
        out: Tensor | None = None,
        *,
        recording: Recording | None = None,
        rescale: bool = False,
    ) -> Tensor:
        """As `Backend.all_reduce`.

        Args:
            recording: filled, so that `recording.replay()` gives the same sum on this rank without communication.
            rescale: change units by a power of two shared by all ranks (`feedback.rescale`); one more collective of one integer.
        """


def supports_training(backend: Backend) -> TypeGuard[TrainingBackend]:
    """Whether `all_reduce` takes `recording` and `rescale`."""
    return getattr(backend, "training", False) is True
