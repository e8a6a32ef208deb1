"""The residual stream of a Hugging Face model, block by block, with tangents: what the paper's z_k, F_k and J_k are on a real model.

    z_{k+1} = z_k + F_k(z_k)   block k reads the stream through its norm (entry) and adds its output to it (exit)              (Eq. 14)

Even blocks are attention, odd ones MLPs; the site is the row-parallel linear in it. The stream of all tokens of a window is one vector,
d = tokens * hidden size. Jacobian products are exact, by forward-mode differentiation: a tangent is added at exits, or put in place of
what an entry reads, and the tangents that arrive at every block come back from one forward. Layers are run by themselves with the
arguments that the model gave them, so a run may start at any layer.

Gemma 2 and 3 norm a block's output before it joins the stream: there `normed` is set, and the exit is that norm.

Leaves out: models whose attention and MLP read the same stream in parallel (Phi, Cohere), which have no such recursion.
Source: the paper, Section 6.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from echoreduce.errors import ConfigError
from echoreduce.integrations.transformers import row_parallel_linears
from echoreduce.integrations.transformers_tp import norms_sums

Hook = Callable[[int, Tensor], Tensor | None]


@dataclass(frozen=True)
class Block:
    """One block of the stream.

    Attributes:
        site: name of its row-parallel linear.
        entry: the norm that reads the stream.
        exit: the module whose output joins the stream: the linear itself, or a norm behind it.
        normed: whether it is a norm.
    """

    site: str
    entry: nn.Module
    exit: nn.Module
    normed: bool

    def joined(self, exact: Tensor, error: Tensor) -> Tensor:
        """What the stream gets of an error in the sum: the error itself, or what the norm behind it makes of it."""
        if not self.normed:
            return error
        with torch.no_grad():
            change: Tensor = self.exit(exact + error) - self.exit(exact)
        return change


def find_blocks(model: nn.Module) -> list[Block]:
    """Blocks in the order of a pass.

    Raises:
        ConfigError: the model's layers are not attention and MLP one after the other, each behind a norm.
    """
    linears = row_parallel_linears(model)
    blocks = []
    for index, layer in enumerate(layers_of(model)):
        inside = {id(module) for module in layer.modules()}
        names = [name for name, module in linears.items() if id(module) in inside]
        sandwich = norms_sums(layer)
        second = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        if len(names) != 2 or not hasattr(layer, "input_layernorm") or not hasattr(layer, second):
            raise ConfigError(
                f"layer {index} of {type(model).__name__} is no attention and MLP in sequence, each behind a norm (sites {names}); "
                "the recursion z + F(z) of the paper does not describe it"
            )
        exits = ("post_attention_layernorm", "post_feedforward_layernorm")
        for name, entry, leaving in zip(names, ("input_layernorm", second), exits):
            out = getattr(layer, leaving) if sandwich else linears[name]
            blocks.append(Block(name, getattr(layer, entry), out, sandwich))
    return blocks


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Decoder layers.

    Raises:
        ConfigError: the base model has no `layers` and `norm`.
    """
    base: Any = getattr(model, "base_model", model)
    if not isinstance(getattr(base, "layers", None), nn.ModuleList) or not isinstance(getattr(base, "norm", None), nn.Module):
        raise ConfigError(f"{type(model).__name__} has no decoder layers and final norm where Llama has them")
    return list(base.layers)


class ResidualStream:
    """The clean stream of a model on one window, and products with its Jacobians.

    Args:
        model: Hugging Face causal language model in float32, not attached, with eager attention (forward-mode derivatives need it).
        tokens: token ids, int64 [length].
    Attributes:
        blocks: one a site.
        clean: z_0 .. z_N, each [1, length, hidden].
    Raises:
        ConfigError: a model without the recursion.
    """

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.model = model
        self.tokens = tokens
        self.blocks = find_blocks(model)
        self._layers = layers_of(model)
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handles = [layer.register_forward_pre_hook(self._keep, with_kwargs=True) for layer in self._layers]
        try:
            self.clean = self.visit()
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append((args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states"}))

    @property
    def sites(self) -> int:
        """N."""
        return len(self.blocks)

    @property
    def dim(self) -> int:
        """d = length * hidden size."""
        return self.clean[0].numel()

    @contextmanager
    def hooked(self, entering: Hook | None = None, leaving: Hook | None = None) -> Iterator[None]:
        """Call `entering(k, what arrives)` before block k reads it (N: the final norm) and `leaving(k, output)` after; a returned tensor
        takes the place of what is read or joins."""
        base: Any = getattr(self.model, "base_model", self.model)
        handles = []
        for k, module in enumerate([block.entry for block in self.blocks] + [base.norm]):
            if entering is not None:
                handles.append(module.register_forward_pre_hook(lambda _, args, k=k: _wrapped(entering(k, args[0]))))
        for k, block in enumerate(self.blocks):
            if leaving is not None:
                handles.append(block.exit.register_forward_hook(lambda _, __, output, k=k: leaving(k, output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def visit(self) -> list[Tensor]:
        """Run the whole model as it is now (attached or not); returns what arrives at every block and at the end."""
        found: list[Tensor] = []

        def keep(_: int, x: Tensor) -> None:
            found.append(x.detach().clone())

        device = next(self.model.parameters()).device
        with self.hooked(keep), torch.no_grad():
            base: Any = getattr(self.model, "base_model", self.model)
            base(input_ids=self.tokens[None].to(device), use_cache=False)
        return found

    def tangents(
        self, injected: Mapping[int, Tensor] | None = None, read: Mapping[int, Tensor] | None = None, rows: int = 1
    ) -> dict[int, Tensor]:
        """Tangents that arrive at each block, to first order about the clean stream.

        Args:
            injected: site -> tangent added to what joins the stream there, [rows, length, hidden].
            read: site -> tangent that block reads in place of the one that arrives; its J_k times it is then the difference of the
                tangents that arrive at k + 1 and k.
            rows: independent tangents, in the first dimension.
        Returns:
            site (or N for the end) -> [rows, length, hidden], from the first layer that is touched on.
        """
        injected, read = injected or {}, read or {}
        first = min((*injected, *read)) // 2
        arrived: dict[int, Tensor] = {}

        def entering(k: int, x: Tensor) -> Tensor | None:
            primal, tangent = forward_ad.unpack_dual(x)
            arrived[k] = torch.zeros_like(primal) if tangent is None else tangent.clone()
            return forward_ad.make_dual(primal, read[k]) if k in read else None

        def leaving(k: int, output: Tensor) -> Tensor | None:
            if k not in injected:
                return None
            primal, tangent = forward_ad.unpack_dual(output)
            joined: Tensor = forward_ad.make_dual(primal, injected[k] if tangent is None else injected[k] + tangent)
            return joined

        with forward_ad.dual_level(), torch.no_grad(), self.hooked(entering, leaving):
            z = self.clean[2 * first].expand(rows, -1, -1).clone()
            for layer, (args, kwargs) in zip(self._layers[first:], self._calls[first:]):
                output = layer(z, *args, **kwargs)
                z = output[0] if isinstance(output, tuple) else output
            entering(self.sites, z)
        return arrived


def _wrapped(value: Tensor | None) -> tuple[Tensor] | None:
    return None if value is None else (value,)


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Attention in plain operations, which forward-mode derivatives need; put back at the end."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
