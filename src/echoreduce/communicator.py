"""A process group and the backend that serves it: the object that users who call collectives themselves hold.

`Communicator.all_reduce` is one quantized all-reduce without memory; error feedback needs to know where a pass begins, so it lives in
`Communicator.session`. Which backend was chosen and why can be asked (`explain`).

Leaves out: models (`integrations`).
Source: docs/design.md, Sections 3 and 7.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.config import EchoConfig, preset
from echoreduce.errors import ConfigError
from echoreduce.quant.grid import divide
from echoreduce.runtime.c10d import check_out
from echoreduce.runtime.dispatch import AutoBackend, open_backend
from echoreduce.session import Session

BackendName = Literal["auto", "p2p", "c10d"]


class Communicator:
    """Low-bit all-reduce on one process group.

    Args:
        group: process group; None is the default group.
        config: a preset's name or an `EchoConfig`.
        backend: `p2p` (kernels over peer memory; one host, CUDA), `c10d` (any group), or `auto`: for groups over NCCL `p2p` with 16-bit
            values below the crossover, and `c10d` with one warning where some rank cannot; for others `c10d`. Opening `auto` and `p2p` on a
            group over NCCL is collective.
        timeout: longest wait for peers in one collective; None: the group's own.
        check_headers: compare shape, dtype and settings before each payload; None: the backend's default (on for gloo, off for NCCL).
    Raises:
        GroupError: no process group, or this rank is not a member of it.
        ConfigError: unknown preset or backend.
        BackendUnavailable: `p2p` was asked for and some rank cannot; the text has every rank's reason.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        config: EchoConfig | str = "default",
        backend: BackendName = "auto",
        *,
        timeout: timedelta | None = None,
        check_headers: bool | None = None,
    ) -> None:
        self.config = preset(config) if isinstance(config, str) else config
        self.backend, self._reason = open_backend(group, backend, timeout=timeout, check_headers=check_headers)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return int(self.backend.rank)

    @property
    def world_size(self) -> int:
        """Ranks of the group, P."""
        return int(self.backend.world_size)

    def all_reduce(self, x: Tensor, *, op: str = "sum", out: Tensor | None = None) -> Tensor:
        """Sum (or average) x over the group in `config.quant.bits` bits, without error feedback. A collective call.

        Args:
            x: fp16, bf16 or fp32, any shape (also empty, also 0-dimensional) and layout; equal shape and dtype on all ranks.
            op: `sum` or `avg` (sum / P).
            out: written instead of a new tensor; any layout without internal overlap. Not differentiable.
        Returns:
            Shape and dtype of x, the same bits on every rank. Gradients pass through unchanged (`avg`: divided by P), as behind a
            row-parallel layer.
        Raises:
            ConfigError: another op. MismatchError, PeerError, DTypeError, ShapeError: see `C10dBackend.all_reduce`.
        """
        if op not in ("sum", "avg"):
            raise ConfigError(f"op must be 'sum' or 'avg', got {op!r}: other operations have no low-bit form here")
        if out is not None:
            check_out(out, x.shape, x.dtype)
        if out is None and torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = _SumThenIdentity.apply(x, self)  # type: ignore[no-untyped-call]
        else:
            result = self._sum(x, out if op == "sum" else None)
        if op == "avg":
            result = divide(result, self.world_size)
            if out is not None:
                with torch.no_grad():
                    result = out.copy_(result)
        return result

    def all_reduce_(self, x: Tensor) -> Tensor:
        """In place: x itself holds the sum afterwards, whatever its layout; memory outside the view is untouched.

        Raises:
            ShapeError: x is expanded, or a leaf that requires grad.
        """
        return self.all_reduce(x, out=x)

    def _sum(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        algorithm = self.config.algorithm_for(self.world_size, x.numel())
        result: Tensor = self.backend.all_reduce(x, self.config.quant, algorithm, None, out)
        return result

    def session(self, sites: int | None = None) -> Session:
        """A session with error feedback on this group.

        Args:
            sites: all-reduces of a pass; needed by every site policy but `uniform`.
        """
        return Session(self.backend, self.config, sites)

    def explain(self, x: Tensor | None = None) -> str:
        """Which backend and algorithm serve this group, and why; with a tensor, also which path a message like it takes."""
        algorithm = self.config.algorithm_for(self.world_size, None if x is None else x.numel())
        path = ""
        if x is not None and isinstance(self.backend, AutoBackend):
            path = f"; {self.backend.explain(x.numel() * x.element_size(), x.dtype, self.config.quant.bits)}"
        return f"backend {self.backend.name} ({self._reason}){path}; {algorithm} on {self.world_size} ranks; {self.config.quant}"

    def close(self) -> None:
        """Give back what the backend holds and refuse further calls; the process group stays. Collective for `p2p` and `auto`."""
        self.backend.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _SumThenIdentity(torch.autograd.Function):
    """Forward: all-reduce. Backward: identity (Megatron's g, Shoeybi et al., 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        return communicator._sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
