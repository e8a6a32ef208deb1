"""Tensor parallelism in plain PyTorch: the differentiable functions, and styles for `parallelize_module`.

    rules = {"*.mlp": "block", "*.mlp.w1": "colwise", "*.mlp.w3": "colwise", "*.mlp.w2": "rowwise"}
    parallelize_module(model, mesh, parallel_plan(model, mesh, rules, "default"))

Weights become DTensors, as with torch's own styles, so state_dict, optimizers and distributed checkpoints stay as they are. The
computation is local: `F.linear` on the rank's shard and our own all-reduces, one forward for each row-parallel linear, and one backward
for each block that is named (else for each column-parallel linear). No DTensor takes part in it, so no collective of DTensor's own is
left in forward or backward (on torch 2.11 it could not be switched off).

The class of each linear is exchanged, and hooks mark block and model; so `copy.deepcopy` works and gives a model with a session of its
own, and torch.compile(fullgraph=True) sees plain modules.

Leaves out: sequence parallelism; embeddings and output heads (use torch's styles for them beside these); models of transformers
(`transformers_tp`).
Source: docs/design.md, Section 5; docs/training.md; Shoeybi et al., 2019; cases O22, O25, O26, O30 and O34 of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from echoreduce.communicator import BackendName, Communicator
from echoreduce.config import EchoConfig
from echoreduce.differentiable import close_pass, copy_to_tp, open_pass, reduce_from_tp, sum_gradient
from echoreduce.errors import ConfigError
from echoreduce.session import Session

__all__ = ["close_pass", "copy_to_tp", "open_pass", "parallel_plan", "reduce_from_tp", "sum_gradient"]

Rule = Literal["colwise", "rowwise", "block", "sum_grad"]
RULES = ("colwise", "rowwise", "block", "sum_grad")

#: Arguments of a model that its first site depends on; the first that is there carries the mark of a new pass.
INPUTS = ("inputs_embeds", "input_ids", "hidden_states")


# --- modules ------------------------------------------------------------------------------------------------------------------


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class ColumnLinear(nn.Linear):
    """A linear whose output features are split over ranks; its input is reduced by its block, or by itself where it has none.

    Made by `parallel_plan` only, by exchange of the class. `in_features` and `out_features` stay those of the whole layer.
    """

    _echo_session: Session
    _echo_key: str | None

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, in_features] -> [*batch, this rank's out_features]."""
        if self._echo_key is not None:
            x = copy_to_tp(x, self._echo_session, self._echo_key)
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class RowLinear(nn.Linear):
    """A linear whose input features are split over ranks; a site. The bias is added once, after the sum."""

    _echo_session: Session
    _echo_key: str

    def forward(self, x: Tensor) -> Tensor:
        """[*batch, this rank's in_features] -> [*batch, out_features]; a collective call."""
        total = reduce_from_tp(F.linear(x, local(self.weight)), self._echo_session, self._echo_key)
        return total if self.bias is None else total + local(self.bias)


class SharedParameters(nn.Module):
    """Mixed into the class of a module whose replicated parameters see only this rank's share of the activations: sums their gradients."""

    _echo_session: Session

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with parameters whose gradient is summed over ranks."""
        own = dict(self._parameters)
        try:
            for name, parameter in own.items():
                if parameter is not None:
                    self._parameters[name] = sum_gradient(local(parameter), self._echo_session)  # type: ignore[assignment]
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(own)


def exchange(module: nn.Module, made: type[nn.Module], session: Session, key: str | None = None) -> None:
    """Make a module one of the classes above."""
    module.__class__ = made
    module._echo_session, module._echo_key = session, key  # type: ignore[assignment]


_shared: dict[type[nn.Module], type[nn.Module]] = {}


def shared(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a module with `SharedParameters` mixed in; the same class each time."""
    if kind not in _shared:
        _shared[kind] = type(f"Shared{kind.__name__}", (SharedParameters, kind), {})
    return _shared[kind]


class BlockHook:
    """Forward pre-hook of a block: reduces the gradient of its first tensor argument, once for all its column-parallel linears."""

    def __init__(self, session: Session, key: str) -> None:
        self.session = session
        self.key = key

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return on_first_input(lambda x: copy_to_tp(x, self.session, self.key), args, kwargs)


class PassHooks:
    """Hooks of a model: a forward pass of the session begins when it is entered and ends when it is left, also by an exception."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook."""
        return on_first_input(lambda x: open_pass(x, self.session), args, kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook, called always; the output is None after an exception."""
        if output is None:
            self.session.abandon()
            return None
        return on_first_output(lambda x: close_pass(x, self.session), output)

    def install(self, module: nn.Module) -> list[Any]:
        """Hook a module; returns the handles that remove the hooks."""
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]


def on_first_input(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a module with the first tensor changed: one of `INPUTS` by name, else the first by position, else the first by name.

    Raises:
        ConfigError: there is no tensor.
    """
    for name in INPUTS:
        if isinstance(kwargs.get(name), Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, name: change(value)}
    raise ConfigError("a pass or block that is marked must get a tensor as an argument")


def on_first_output(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """A module's output with its first tensor changed; a tensor, a tuple or list, or a mapping (the outputs of transformers)."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            if isinstance(value, Tensor):
                return type(output)((*output[:index], change(value), *output[index + 1 :]))
    if isinstance(output, Mapping):
        for name, value in output.items():
            if isinstance(value, Tensor):
                output[name] = change(value)  # type: ignore[index]
                return output
    raise ConfigError(f"the output of a model must hold a tensor, got {type(output).__name__}")


# --- styles -------------------------------------------------------------------------------------------------------------------


class _LinearStyle(ParallelStyle):
    """Shards a linear's parameters and exchanges its class."""

    def __init__(self, session: Session, key: str | None, made: type[nn.Linear], placements: dict[str, Placement]) -> None:
        self.session = session
        self.key = key
        self.made = made
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, device_mesh, [self.placements[name]], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        exchange(module, self.made, self.session, self.key)
        return module


class _BlockStyle(ParallelStyle):
    def __init__(self, session: Session, key: str) -> None:
        self.session = session
        self.key = key

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(BlockHook(self.session, self.key), with_kwargs=True)
        return module


class _PassStyle(ParallelStyle):
    def __init__(self, session: Session) -> None:
        self.session = session

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        PassHooks(self.session).install(module)
        module._echo_session = self.session  # type: ignore[assignment]
        return module


class _SumGradStyle(ParallelStyle):
    def __init__(self, session: Session) -> None:
        self.session = session

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        exchange(module, shared(type(module)), self.session)
        return module


def parallel_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    rules: Mapping[str, Rule],
    config: EchoConfig | str = "default",
    *,
    backend: BackendName = "auto",
    record: bool | None = None,
) -> dict[str, ParallelStyle]:
    """Styles for `torch.distributed.tensor.parallel.parallelize_module`; all share one session.

    Args:
        model: not parallelized yet, the same weights on every rank (or let `parallelize_module` send rank 0's). Its forward is a pass.
        mesh: one-dimensional, of the tensor-parallel ranks.
        rules: names of modules, with the wildcards of `fnmatch`, and what becomes of them: `colwise` and `rowwise` linears;
            `block`, a module whose first tensor argument goes to the column-parallel linears inside it and nowhere else (no residual
            connection inside): its gradient is reduced once for all of them; `sum_grad`, replicated parameters behind a
            column-parallel linear, such as a norm on a rank's own heads.
        config: a preset's name or an `EchoConfig`.
        backend: see `Communicator`.
        record: see `Session`; True where torch.compile recomputes activations.
    Returns:
        Full names of modules and their styles. The model's session is `model._echo_session` once they are applied.
    Raises:
        ConfigError: a rule matches nothing, is not one of the four, or cuts something else than an nn.Linear.
        GroupError: see `Communicator`.
    """
    found = matched(model, rules)
    blocks = [name for name, rule in found.items() if rule == "block"]
    columns = [name for name, rule in found.items() if rule == "colwise"]
    alone = [name for name in columns if not any(name.startswith(f"{block}.") for block in blocks)]
    rows = [name for name, rule in found.items() if rule == "rowwise"]
    if not rows:
        raise ConfigError("the rules name no rowwise linear, so there is nothing to reduce")
    communicator = Communicator(mesh.get_group(), config, backend)
    sites = Session(communicator.backend, communicator.config, len(rows), max(1, len(blocks) + len(alone)), record=record)
    plan: dict[str, ParallelStyle] = {"": _PassStyle(sites)}
    plan |= {name: _BlockStyle(sites, name) for name in blocks}
    for name in columns:
        key = name if name in alone else None
        plan[name] = _LinearStyle(sites, key, ColumnLinear, {"weight": Shard(0), "bias": Shard(0)})
    plan |= {name: _LinearStyle(sites, name, RowLinear, {"weight": Shard(1), "bias": Replicate()}) for name in rows}
    plan |= {name: _SumGradStyle(sites) for name, rule in found.items() if rule == "sum_grad"}
    return plan


def matched(model: nn.Module, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Names of modules that have a rule, in the order of the model; see `parallel_plan` for what is refused."""
    for rule in rules.values():
        if rule not in RULES:
            raise ConfigError(f"rules are {', '.join(RULES)}, got {rule!r}")
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ConfigError(f"no module of the model has the name {pattern!r}")
    found = {name: rule for name in modules for pattern, rule in rules.items() if fnmatchcase(name, pattern)}
    for name, rule in found.items():
        if rule in ("colwise", "rowwise") and type(modules[name]) is not nn.Linear:
            raise ConfigError(f"{name} is a {type(modules[name]).__name__}; only a plain nn.Linear can be {rule}")
    return found
