"""EchoReduce on a Hugging Face causal language model: attach, detach.

Which layers are row-parallel is read from the model's own tensor-parallel plan, so every architecture that has one works (Llama, Qwen2,
Qwen3, Mistral, Gemma 2 and 3, ...). `attach` turns those linears into sites: with `world_size=P` into P virtual ranks in this process,
with `group=` into this process's share of a real group, where each process multiplies its own columns and reduces over the group.
Each forward of the base model is one pass; a decode step of `generate` is a pass of its own. A bias is added once, after the sum.

The class of each module is exchanged and nothing else, so parameters, state_dict and hooks stay as they are, `copy.deepcopy` gives a
model with fresh feedback state, and `detach` restores the model exactly.

Sharded weights, and training with all-reduces in both directions, are `distributed_config` and `enable` (`transformers_tp`).

Leaves out: sharding the weights (each process holds the whole model) and the all-reduces of the backward pass (each process has the
whole gradient); activation checkpoints work.
Gemma 2 and 3 norm the sum before it joins the residual stream, where feedback does harm: "auto" takes `post_norm` there, and a warning says
so where a configuration with feedback is given.
Source: docs/design.md, Section 7; Shoeybi et al., 2019 (row-parallel linears).
"""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from echoreduce.communicator import Communicator
from echoreduce.config import EchoConfig
from echoreduce.errors import ConfigError
from echoreduce.integrations.tensor_parallel import PassHooks, exchange
from echoreduce.integrations.transformers_tp import advise, distributed_config, enable
from echoreduce.runtime.backend import Backend
from echoreduce.session import Session
from echoreduce.virtual import VirtualBackend, partial_product, partial_products

__all__ = ["Attachment", "SiteLinear", "attach", "distributed_config", "enable", "row_parallel_linears"]


class SiteLinear(nn.Linear):
    """A row-parallel linear whose partial products are summed by a session; made by `attach` only, by exchange of the class."""

    _echo_session: Session
    _echo_key: str

    def forward(self, x: Tensor) -> Tensor:
        """x [*batch, in_features] -> [*batch, out_features]; a collective call in a real group."""
        backend = self._echo_session.backend
        if backend.name == "virtual":
            contribution = partial_products(x, self.weight, backend.world_size)
        else:
            contribution = partial_product(x, self.weight, backend.world_size, backend.rank)
        total = self._echo_session.reduce(contribution, key=self._echo_key)
        return total if self.bias is None else total + self.bias


class Attachment:
    """What `attach` returns: the session, and the way back. As a context manager it detaches at the end.

    Attributes:
        model: the attached model.
        session: its session; `session.backend` is the virtual or real group.
    """

    def __init__(self, model: nn.Module, session: Session, handles: list[Any]) -> None:
        self.model = model
        self.session = session
        self._handles = handles

    def detach(self) -> None:
        """Restore the model exactly; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self.model.modules():
            if isinstance(module, SiteLinear) and module._echo_session is self.session:
                del module._echo_session, module._echo_key
                module.__class__ = nn.Linear  # type: ignore[assignment]

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


def attach(
    model: nn.Module,
    config: EchoConfig | str = "auto",
    *,
    world_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    backend: Backend | None = None,
) -> Attachment:
    """Send the model's row-parallel sums through EchoReduce.

    Args:
        model: a Hugging Face model with a tensor-parallel plan, in one piece (not sharded).
        config: a preset's name, an `EchoConfig`, or "auto": `post_norm` if the model norms its sums, else `default`.
        world_size: number of virtual ranks in this process; None: a real group.
        group: process group of the real ranks; None is the default group. Not together with `world_size`.
        backend: a ready backend instead of either.
    Returns:
        Attachment.
    Raises:
        ConfigError: no plan, no row-parallel linear, already attached, or contradictory arguments.
        GroupError: a real group was wanted and torch.distributed is not initialized.
    """
    if sum(choice is not None for choice in (world_size, group, backend)) > 1:
        raise ConfigError("give one of world_size (virtual ranks), group (real ranks) or backend")
    modules = row_parallel_linears(model)
    if backend is None:
        backend = VirtualBackend(world_size) if world_size is not None else Communicator(group).backend
    session = Session(backend, advise(model, config), sites=len(modules))
    for name, module in modules.items():
        exchange(module, SiteLinear, session, name)
    return Attachment(model, session, PassHooks(session).install(getattr(model, "base_model", model)))


def row_parallel_linears(model: nn.Module) -> dict[str, Any]:
    """Modules that the model's tensor-parallel plan marks row-parallel, by name, in the order of the model.

    Raises:
        ConfigError: there is no plan, it marks nothing, a marked module is not a plain nn.Linear, or the model is attached already.
    """
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise ConfigError(f"{type(model).__name__} has no tensor-parallel plan, so its row-parallel layers are not known")
    patterns = [_pattern(name) for name, style in plan.items() if style.startswith("rowwise")]
    found = {name: module for name, module in model.named_modules() if any(p.fullmatch(name) for p in patterns)}
    if not found:
        raise ConfigError(f"the tensor-parallel plan of {type(model).__name__} marks no row-parallel layer")
    for name, module in found.items():
        if isinstance(module, SiteLinear):
            raise ConfigError(f"{name} is attached already; detach first")
        if type(module) is not nn.Linear:
            raise ConfigError(f"{name} is a {type(module).__name__}; only nn.Linear can be split into column blocks here")
    return found


def _pattern(plan_key: str) -> re.Pattern[str]:
    """Plan key with `*` for a layer number to a pattern on module names."""
    return re.compile(re.escape(plan_key).replace(r"\*", r"[^.]+"))
