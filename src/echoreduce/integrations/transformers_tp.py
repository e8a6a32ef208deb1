"""Sharded tensor parallelism of transformers (5.16.1 and newer) with our all-reduces, through its own plan mechanism.

    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=distributed_config(name, tp_size=4))

or, on a model that transformers has sharded already, there and back in one process:

    with enable(model) as echo: ...

The model's own plan is kept as it is but for: plain linears that it calls `rowwise` (a site each), plain linears that it calls `colwise`
(no collective), the attention and MLP blocks that hold them (one backward all-reduce each, where transformers has one for each
projection), the base model (a pass), and norms on a rank's own heads (`replicated_with_grad_allreduce`: the stock hook sums the accumulated
gradient again with every micro-batch). Each forward of the base model is a pass, so each decode step of `generate` is one.

Leaves out, and what is known:
  * Output heads and embeddings keep the plan's own styles, 16 bits, one backward all-reduce for a sharded head.
  * `rowwise_split_input` (Phi-3; attention of OLMo 2) keeps its own style: those are no sites.
  * Mixture of experts: attention sites are ours; experts sum in 16 bits with their own style (`moe_tp_experts`), forward and backward.
  * Gemma 2 and 3 norm the sum before it joins the residual stream, where feedback does harm: see `advise`.
  * Expert, sequence and pipeline parallelism, quantized linears: not touched.
Source: transformers/distributed/tensor_parallel.py (5.16 to 5.24 tested, docs/training.md; 5.16.0: `enable` only).
"""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echoreduce.communicator import BackendName, Communicator
from echoreduce.config import EchoConfig, preset
from echoreduce.errors import ConfigError, EchoReduceWarning
from echoreduce.integrations.tensor_parallel import BlockHook, ColumnLinear, PassHooks, RowLinear, exchange, shared
from echoreduce.session import Session

#: Names of modules whose input goes to column-parallel linears and nowhere else, by the conventions of transformers.
BLOCKS = ("self_attn", "mlp")

NORM_STYLE = "replicated_with_grad_allreduce"

#: Names that transformers gives to a norm between a block's sum and the residual stream (Gemma 2 to 4, OLMo 2 and 3, EXAONE 4; GLM 4).
POST_NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm")

_numbers = itertools.count(1)


# --- which module plays which part ------------------------------------------------------------------------------------------------


def generic(name: str) -> str:
    """Name of a module as plans write it: layer numbers become `*`."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)


def parts(model: Any) -> dict[str, str]:
    """Names of modules and their parts, in the order of the model.

    Parts: `pass` (the base model), `block`, `column` (inside a block), `lone column` (reduces its own gradient), `row`, `norm`.

    Raises:
        ConfigError: the model has no plan, or it marks no plain row-parallel linear.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise ConfigError(f"{type(model).__name__} has no tensor-parallel plan, so its row-parallel layers are not known")
    modules = dict(model.named_modules())
    styles = {name: plan.get(generic(name)) for name in modules if name}
    linears = {name for name, module in modules.items() if type(module) is nn.Linear}
    rows = {name for name in linears if styles[name] == "rowwise"}
    columns = {name for name in linears if styles[name] == "colwise"}
    norms = {name for name, style in styles.items() if style == NORM_STYLE}
    if not rows:
        raise ConfigError(f"the tensor-parallel plan of {type(model).__name__} marks no plain row-parallel linear")
    blocks = whole_blocks(modules, rows | columns | norms, columns)
    base = next(name for name, module in modules.items() if module is model.base_model)
    found = {base: "pass"}
    for name in modules:
        if name in blocks:
            found[name] = "block"
        elif name in columns:
            found[name] = "column" if name.rpartition(".")[0] in blocks else "lone column"
        elif name in rows | norms:
            found[name] = "row" if name in rows else "norm"
    return found


def norms_sums(module: nn.Module) -> bool:
    """Whether a layer, or a model's layers, norm the sum of a block before it joins the residual stream, as Gemma 2 and 3 or OLMo 2 do."""
    return any(isinstance(getattr(m, name, None), nn.Module) for m in module.modules() for name in POST_NORMS)


def advise(model: nn.Module, config: EchoConfig | str) -> EchoConfig:
    """The configuration, with a warning where feedback is known to do harm: a norm rescales what was meant to cancel an error.

    Args:
        model: whole, sharded or on the meta device; only the names of its modules are looked at.
        config: a preset's name, an `EchoConfig`, or "auto": `post_norm` if the model norms its sums, else `default`.
    Raises:
        ConfigError: no such preset.
    Source: docs/accuracy.md, Gemma 3 270M.
    """
    if config == "auto":
        config = "post_norm" if norms_sums(model) else "default"
    found = preset(config) if isinstance(config, str) else config
    if found.feedback.enabled and norms_sums(model):
        warnings.warn(
            f"{type(model).__name__} norms its sums before they join the residual stream: feedback does harm there (Gemma 3 270M, "
            "docs/accuracy.md). Use preset 'post_norm', 6 bits rotated without feedback, which \"auto\" chooses.",
            EchoReduceWarning,
            stacklevel=3,
        )
    return found


def whole_blocks(modules: Mapping[str, nn.Module], known: set[str], columns: set[str]) -> set[str]:
    """Blocks that may reduce the gradient of their input once: named as in `BLOCKS`, and no parameter belongs to anything unknown.

    A plan's key speaks of all layers, so all of its blocks qualify or none.
    """
    candidates = {name.rpartition(".")[0] for name in columns}
    refused = set()
    for name in candidates:
        owners = {f"{name}.{owned}".rpartition(".")[0] for owned, _ in modules[name].named_parameters()}
        if name.rpartition(".")[2] not in BLOCKS or not owners <= known:
            refused.add(generic(name))
    refused |= {generic(name) for name in modules if name not in candidates and generic(name) in map(generic, candidates)}
    return {name for name in candidates if generic(name) not in refused}


class Installer:
    """Gives modules their parts in one model; the base model comes first and opens the session.

    Args:
        found: as `parts` returns.
        config, backend, record: see `distributed_config`.
    """

    def __init__(self, found: Mapping[str, str], config: EchoConfig, backend: BackendName, record: bool | None) -> None:
        kinds = list(found.values())
        self.sites = kinds.count("row")
        self.backward_sites = kinds.count("block") + kinds.count("lone column")
        self.config, self.backend, self.record = config, backend, record
        self.session: Session | None = None
        self._keys = itertools.count()

    def open(self, group: dist.ProcessGroup) -> Session:
        """A new session, for a model that is being built."""
        communicator = Communicator(group, self.config, self.backend)
        self.session = Session(communicator.backend, self.config, self.sites, max(1, self.backward_sites), record=self.record)
        self._keys = itertools.count()
        return self.session

    def install(self, part: str, module: nn.Module) -> list[Any]:
        """Give a module its part; returns handles of hooks."""
        session = self.session
        assert session is not None, "the base model comes before its modules"
        key = f"{part} {next(self._keys)}"
        if part == "pass":
            module._echo_session = session  # type: ignore[assignment]
            return PassHooks(session).install(module)
        if part == "block":
            return [module.register_forward_pre_hook(BlockHook(session, key), with_kwargs=True)]
        made = {"row": RowLinear, "column": ColumnLinear, "lone column": ColumnLinear}.get(part) or shared(type(module))
        exchange(module, made, session, None if part == "column" else key)
        return []


# --- from_pretrained ----------------------------------------------------------------------------------------------------------------


class EchoStyle:
    """A named style of transformers: shards parameters as the stock style does, and installs our part instead of its forward."""

    def __init__(self, stock: Any, part: str, installer: Installer) -> None:
        self._stock = stock
        self._part = part
        self._installer = installer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stock, name)

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Called by transformers for each module of the plan, a parent before its children."""
        if self._part == "pass" or self._installer.session is None:
            self._installer.open(mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp"))
            self._installer.install("pass", module if self._part == "pass" else built_around(module))
        if self._part != "pass":
            self._installer.install(self._part, module)
        return module


def built_around(module: nn.Module) -> nn.Module:
    """The model that transformers is sharding, seen from one of its modules: `model` of the function that called us.

    Why: a base model loaded by itself (`AutoModel`) is its own root, whose name is empty, and transformers 5.24 drops the plan's rule of
    that name (its test for experts, a pattern of the names in an empty expert plan, matches the empty name).

    Raises:
        ConfigError: no caller holds it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("model")
        if isinstance(found, nn.Module) and any(each is module for each in found.modules()):
            return found
        frame = frame.f_back
    raise ConfigError("the model that is being sharded was not found; load a model with a head, or use enable() on a loaded one")


def distributed_config(
    model: Any,
    tp_size: int,
    config: EchoConfig | str = "auto",
    *,
    backend: BackendName = "auto",
    model_class: Any = None,
    record: bool | None = None,
) -> Any:
    """What `from_pretrained(..., distributed_config=...)` takes to load a sharded model with our all-reduces.

    Args:
        model: name or folder of the model, or its transformers configuration.
        tp_size: ranks, P; must be the number of processes.
        config: a preset's name, an `EchoConfig`, or "auto", see `advise`.
        backend: see `Communicator`.
        model_class: the class that `from_pretrained` is called on, if not `AutoModelForCausalLM`.
        record: see `Session`; True where torch.compile recomputes activations.
    Returns:
        transformers.distributed.DistributedConfig with the model's whole plan. One call for each model that is loaded. The model's
        session is `model.base_model._echo_session`.
    Raises:
        ConfigError: transformers 5.16.0, which ignores the plan of a DistributedConfig and would load the stock model; see also `parts`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    if version("transformers") == "5.16.0":
        raise ConfigError(
            "transformers 5.16.0 ignores the plan of a DistributedConfig; use 5.16.1 or newer, or load the model with "
            "DistributedConfig(tp_size=P) and call enable(model)"
        )
    of = AutoConfig.from_pretrained(model) if isinstance(model, str) or hasattr(model, "__fspath__") else model
    with torch.device("meta"):
        blank = AutoModelForCausalLM.from_config(of) if model_class is None else model_class._from_config(of)
    found = parts(blank)
    plan = dict(blank.tp_plan)
    installer = Installer(found, advise(blank, config), backend, record)
    prefix = f"echoreduce {next(_numbers)}"
    for name, part in found.items():
        key, style = generic(name), f"{prefix} {part}"
        if style not in ALL_PARALLEL_STYLES:
            stock = ALL_PARALLEL_STYLES[plan[key]] if key in plan else TensorParallelLayer()
            ALL_PARALLEL_STYLES.register(style, EchoStyle(stock, part, installer))
        plan[key] = style
    return DistributedConfig(tp_size=tp_size, tp_plan=plan)


# --- a model that is sharded already ------------------------------------------------------------------------------------------------


def take_stock_hooks(parameter: nn.Parameter) -> tuple[dict[int, Any], dict[int, Any]]:
    """Take away the hooks by which transformers (5.22 and newer) sums a parameter's gradient: (those that are left, those taken)."""
    hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    taken = {number: hook for number, hook in hooks.items() if getattr(hook, "__module__", "").startswith("transformers.")}
    for number in taken:
        del hooks[number]
    return hooks, taken


class Enabled:
    """What `enable` returns: the session, and the way back. As a context manager it disables at the end.

    Attributes:
        model: the model.
        session: its session.
    """

    def __init__(self, model: Any, session: Session) -> None:
        self.model = model
        self.session = session
        self._handles: list[Any] = []
        self._kept: list[tuple[nn.Module, type[nn.Module], Any, dict[int, Any]]] = []
        self._taken: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def give(self, installer: Installer, part: str, module: nn.Module) -> None:
        """Give a module its part and keep what it was."""
        if part not in ("pass", "block"):
            self._kept.append((module, type(module), module.__dict__.pop("forward", None), dict(module._backward_hooks)))
            module._backward_hooks.clear()
            self._taken += [take_stock_hooks(parameter) for parameter in module.parameters(recurse=False)]
        self._handles += installer.install(part, module)

    def disable(self) -> None:
        """Restore the stock model exactly; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        for module, kind, forward, hooks in self._kept:
            module.__class__ = kind
            if forward is not None:
                module.forward = forward
            module._backward_hooks.update(hooks)
            del module._echo_session, module._echo_key
        for hooks, taken in self._taken:
            hooks.update(taken)
        if self._handles:
            del self.model.base_model._echo_session
        self._handles, self._kept, self._taken = [], [], []

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()


def enable(
    model: Any,
    config: EchoConfig | str = "auto",
    *,
    group: dist.ProcessGroup | None = None,
    backend: BackendName = "auto",
    record: bool | None = None,
) -> Enabled:
    """Send the all-reduces of a model that transformers has sharded through EchoReduce; `disable()` restores it exactly.

    Args:
        model: loaded with `distributed_config=DistributedConfig(tp_size=P)`.
        config: a preset's name, an `EchoConfig`, or "auto", see `advise`.
        group: its tensor-parallel ranks; None: the `tp` dimension of the model's own device mesh.
        backend, record: see `distributed_config`.
    Raises:
        ConfigError: the model is not sharded, or enabled already; see also `parts`.
    """
    if getattr(model.base_model, "_echo_session", None) is not None:
        raise ConfigError("the model is enabled already; disable it first")
    found = parts(model)
    modules = dict(model.named_modules())
    for name, part in found.items():
        if part in ("row", "column", "lone column") and "forward" not in modules[name].__dict__:
            raise ConfigError(
                f"{name} is not sharded: load the model with distributed_config, or use transformers.attach for whole weights"
            )
    if group is None:
        mesh = model._device_mesh
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    installer = Installer(found, advise(model, config), backend, record)
    enabled = Enabled(model, installer.open(group))
    for name, part in found.items():
        enabled.give(installer, part, modules[name])
    return enabled
