"""A small pre-norm network with column- and row-parallel linears, biases included, for tests of training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from echoreduce import EchoConfig
from echoreduce.integrations.tensor_parallel import parallel_plan

HIDDEN, INNER = 64, 128
RULES = {"*.mlp": "block", "*.mlp.w1": "colwise", "*.mlp.w3": "colwise", "*.mlp.w2": "rowwise"}


class MLP(nn.Module):
    """w2(silu(w1 x) * w3 x), with biases large enough that one added twice is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        nn.init.normal_(self.w2.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(HIDDEN), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def keep_products(*_: Any) -> Any:
    """Selective checkpoint: matrix products are kept, all else, the all-reduces too, runs again."""
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default, torch.ops.aten.mm.default])


class Net(nn.Module):
    """`layers` layers; `mode` says how activations are checkpointed.

    Modes: none, reentrant, non-reentrant, selective, nested (pairs of layers, and each layer inside), every-other.
    """

    def __init__(self, layers: int = 4, mode: str = "none") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.last = nn.RMSNorm(HIDDEN)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        if self.mode.startswith("nested"):
            for index in range(0, len(self.layers), 2):
                x = checkpoint(self.pair, index, x, use_reentrant=self.mode == "nested-reentrant")
        else:
            for index, layer in enumerate(self.layers):
                x = self.one(index, layer, x)
        return self.last(x)

    def pair(self, index: int, x: Tensor) -> Tensor:
        for layer in self.layers[index : index + 2]:
            x = checkpoint(layer, x, use_reentrant=self.mode == "nested-reentrant")
        return x

    def one(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        if self.mode == "none" or (self.mode == "every-other" and index % 2):
            return layer(x)
        if self.mode == "selective":
            return checkpoint(layer, x, use_reentrant=False, context_fn=keep_products)
        return checkpoint(layer, x, use_reentrant=self.mode == "reentrant")


def net(layers: int = 4, mode: str = "none") -> Net:
    """The same weights in every process."""
    torch.manual_seed(3)
    return Net(layers, mode)


def parallel(group: Any, config: EchoConfig | str, layers: int = 4, mode: str = "none", rules: Any = RULES, **options: Any) -> Net:
    """The network on the ranks of `group`."""
    model = net(layers, mode)
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(model, mesh, parallel_plan(model, mesh, rules, config, **options), src_data_rank=None)
    return model


def data(rows: int = 6, seed: int = 0) -> Tensor:
    """Input, the same in every process; requires grad."""
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Whole gradients by parameter, and of the inputs."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}
    return whole | {f"input {index}": x.grad.clone() for index, x in enumerate(inputs) if x.grad is not None}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Squared distance to a fixed random target; the norm at the end would make a plain square constant."""
    return (model(x) - torch.randn(HIDDEN, generator=torch.Generator().manual_seed(77))).square().mean()


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one step from zero gradients."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    loss = loss_of(model, x)
    loss.backward()
    return loss.detach(), gradients(model, x)
