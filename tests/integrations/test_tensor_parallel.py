"""Training in plain PyTorch on gloo ranks: gradients, checkpoints, accumulation, interleaving, compile, copies, optimizer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import toy
from echoreduce import EchoConfig, QuantConfig, preset
from echoreduce.errors import ConfigError
from echoreduce.integrations.tensor_parallel import ColumnLinear, RowLinear, copy_to_tp, parallel_plan, reduce_from_tp
from echoreduce.runtime.c10d import C10dBackend
from echoreduce.session import Session
from ranks import RankPool

MODES = ["reentrant", "non-reentrant", "selective", "nested", "nested-reentrant", "every-other"]


def relative(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert sorted(ours) == sorted(theirs)
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return sorted(ours) == sorted(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- O26, O34: gradients and biases -----------------------------------------------------------------------------------------------


def errors(group: Any, config: str, rules: dict[str, str]) -> tuple[float, float, int]:
    model = toy.parallel(group, config, rules=rules)
    loss, ours = toy.step(model, toy.data())
    expected, theirs = toy.step(toy.net(), toy.data())
    return (loss - expected).abs().item(), relative(ours, theirs), model._echo_session._passes["backward"].site


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_o26_o34_gradients_are_those_of_one_process(pool: RankPool, world_size: int) -> None:
    """The biases are as large as the activations, so one that is added on every rank would be seen."""
    singly = {name: rule for name, rule in toy.RULES.items() if rule != "block"}
    for rules, sites in ((toy.RULES, 4), (singly, 8)):
        for loss, gradient, backward in pool.run(errors, world_size, "exact", rules):
            assert loss < 1e-5
            assert gradient < 1e-5
            assert backward == (sites if world_size > 1 else 0)
        for loss, gradient, _ in pool.run(errors, world_size, "int8", rules):
            assert loss < 0.02
            assert gradient < 0.02
            assert (gradient > 1e-4) == (world_size > 1)


def leaves(group: Any) -> tuple[bool, bool, str]:
    session = Session(C10dBackend(group), preset("exact"), 4)
    session.begin()
    needs, does_not = torch.ones(3, requires_grad=True), torch.ones(3)
    plain = reduce_from_tp(copy_to_tp(does_not, session), session)
    total = reduce_from_tp(copy_to_tp(needs, session), session)
    total.sum().backward()
    try:
        session.backend.all_reduce(does_not, session.config.quant, "two_shot", out=needs)
    except ValueError as error:
        return plain.requires_grad, torch.equal(needs.grad, torch.full((3,), 4.0)), str(error)
    return False, False, ""


def test_o26_leaves(pool: RankPool) -> None:
    for plain, right, text in pool.run(leaves, 4):
        assert not plain
        assert right
        assert "leaf that requires grad" in text


# --- O21: activation checkpoints ----------------------------------------------------------------------------------------------------


def checkpointed(group: Any, config: str) -> list[tuple[Any, ...]]:
    rows = []
    plain = [toy.parallel(group, config)] * 3
    expected = [toy.step(model, toy.data(seed=k)) for k, model in enumerate(plain)]
    for mode in MODES:
        model = toy.parallel(group, config, mode=mode)
        for seed, (loss, whole) in enumerate(expected):
            before = model._echo_session.backend._call
            found, ours = toy.step(model, toy.data(seed=seed))
            calls = model._echo_session.backend._call - before
            rows.append((mode, torch.equal(found, loss), equal(ours, whole), calls, model._echo_session.recorded_bytes))
    return rows


@pytest.mark.parametrize("config", ["default", "paper"])
def test_o21_checkpoints_change_nothing_and_send_nothing(pool: RankPool, config: str) -> None:
    for rows in pool.run(checkpointed, 2, config):
        for row in rows:
            assert row[1:] == (True, True, 8, 0), row


# --- O22: accumulation, frozen layers, evaluation, interleaving ---------------------------------------------------------------------


def accumulated(group: Any, mode: str) -> tuple[float, list[str], bool]:
    def fresh() -> toy.Net:
        made = toy.parallel(group, "default", mode=mode)
        for layer in made.layers[:2]:
            layer.requires_grad_(False)
        return made

    batches = [toy.data(rows, seed).detach() for seed, rows in enumerate((2, 2, 2, 1))]
    total: dict[str, Tensor] = {}
    for x in batches:
        alone = fresh()
        toy.loss_of(alone, x).backward()
        for name, gradient in toy.gradients(alone).items():
            total[name] = total[name] + gradient if name in total else gradient
    model = fresh()
    for x in batches:
        toy.loss_of(model, x).backward()
        model.eval()
        with torch.no_grad():
            first = model(toy.data(5))
            assert torch.equal(model(toy.data(5)), first)
        model.train()
    ours = toy.gradients(model)
    frozen = [name for name, p in model.named_parameters() if p.grad is None]
    return relative(ours, total), frozen, model._echo_session.recorded_bytes == 0


@pytest.mark.parametrize("mode", ["none", "non-reentrant"])
def test_o22_accumulation_with_frozen_layers_and_evaluation_between(pool: RankPool, mode: str) -> None:
    for error, frozen, freed in pool.run(accumulated, 2, mode):
        assert error < 1e-6
        assert sorted({name.split(".")[1] for name in frozen}) == ["0", "1"]
        assert freed


def interleaved(group: Any, mode: str, order: tuple[int, ...]) -> list[tuple[bool, bool]]:
    batches = [toy.data(rows, seed).detach() for seed, rows in enumerate((2, 5))]
    model, results = toy.parallel(group, "default", mode=mode), []
    alone = [toy.step(toy.parallel(group, "default"), x)[1] for x in batches]
    for _ in range(2):  # F1 F2 B B, twice
        model.zero_grad()
        inputs = [x.clone().requires_grad_() for x in batches]
        losses = [toy.loss_of(model, x) for x in inputs]
        for index in order:
            losses[index].backward()
        right = all(torch.equal(x.grad, whole["input 0"]) for x, whole in zip(inputs, alone))
        ours = toy.gradients(model)
        right = right and all(torch.equal(ours[name], alone[0][name] + alone[1][name]) for name in ours)
        results.append((right, model._echo_session.recorded_bytes == 0))
    return results


@pytest.mark.parametrize("mode", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_interleaved_micro_batches(pool: RankPool, mode: str, order: tuple[int, ...]) -> None:
    for rank in pool.run(interleaved, 2, mode, order):
        assert rank == [(True, True)] * 2


# --- O12, O23, O24: empty tensors, exceptions, inference mode -----------------------------------------------------------------------


def disturbed(group: Any) -> dict[str, bool]:
    expected = toy.step(toy.parallel(group, "default"), toy.data())
    model = toy.parallel(group, "default", mode="non-reentrant")

    def undisturbed() -> bool:
        loss, ours = toy.step(model, toy.data())
        return torch.equal(loss, expected[0]) and equal(ours, expected[1])

    results = {}
    empty = toy.data(0).detach().requires_grad_()
    model(empty).sum().backward()
    results["empty"] = empty.grad.shape == (0, toy.HIDDEN) and undisturbed()
    for where in (model.layers[2].norm, model.layers[1].mlp.w2):
        handle = where.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("as if out of memory")))
        with pytest.raises(MemoryError):
            model(toy.data())
        handle.remove()
        results[f"forward {type(where).__name__}"] = undisturbed()
    x = toy.data()
    x.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("as if out of memory")))
    with pytest.raises(MemoryError):
        toy.loss_of(model, x).backward()
    results["backward"] = undisturbed()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            model(toy.data().detach())
        results[mode.__name__] = undisturbed()
    results["freed"] = model._echo_session.recorded_bytes == 0
    return results


def test_o12_o23_o24_nothing_is_left_behind(pool: RankPool) -> None:
    for rank in pool.run(disturbed, 2):
        assert all(rank.values()), rank


# --- O25: copies, state_dict, optimizer ---------------------------------------------------------------------------------------------


def kept(group: Any) -> dict[str, bool]:
    model, single = toy.parallel(group, "exact"), toy.net()
    results = {"keys": list(model.state_dict()) == list(single.state_dict())}
    ours, theirs = torch.optim.AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(single.parameters(), lr=0.01)
    for seed in range(3):
        for net, optimizer in ((model, ours), (single, theirs)):
            toy.step(net, toy.data(seed=seed))
            optimizer.step()
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}
    results["weights"] = all((whole[name] - p).abs().max() < 2e-4 for name, p in single.state_dict().items())
    results["sharded"] = model.layers[0].mlp.w2.weight.to_local().shape == (toy.HIDDEN, toy.INNER // dist.get_world_size(group))
    fresh = toy.parallel(group, "exact")
    fresh.load_state_dict(model.state_dict())
    results["loaded"] = torch.equal(fresh(toy.data()), model(toy.data()))
    compensated = toy.parallel(group, "default")
    expected = toy.step(compensated, toy.data())
    twin = copy.deepcopy(compensated)
    results["own session"] = twin._echo_session is not compensated._echo_session
    shared = {id(m._echo_session) for m in twin.modules() if isinstance(m, (RowLinear, ColumnLinear))}
    hooks = [hook for m in twin.modules() for hook in m._forward_pre_hooks.values()]
    shared |= {id(getattr(hook, "session", None) or hook.__self__.session) for hook in hooks}
    results["one session"] = shared == {id(twin._echo_session)}
    results["twin"] = equal(toy.step(twin, toy.data())[1], expected[1])
    try:
        pickle.dumps(compensated)
    except TypeError as error:
        results["pickle"] = "session.config" in str(error)
    return results


def test_o25_weights_copies_and_optimizers(pool: RankPool) -> None:
    for rank in pool.run(kept, 2):
        assert len(rank) == 8
        assert all(rank.values()), rank


# --- O30: torch.compile -------------------------------------------------------------------------------------------------------------


def compiled(group: Any) -> list[tuple[bool, bool, bool, int]]:
    torch._dynamo.reset()
    model = toy.parallel(group, "default", layers=2)
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    results = []
    for rows in (2, 5, 9):
        x = toy.data(rows)
        loss, whole = toy.step(model, x)
        found, ours = toy.step(fast, x)
        with torch.no_grad():
            y = fast(x)
            results.append(
                (torch.equal(y, model(x)), torch.equal(found, loss), relative(strip(ours), whole) < 1e-6, model._echo_session.site)
            )
    return results


def strip(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}


def test_o30_compiled(pool: RankPool) -> None:
    for rank in pool.run(compiled, 2):
        assert rank == [(True, True, True, 2)] * 3


# --- double backward, sharded norms, rules ------------------------------------------------------------------------------------------


def penalized(group: Any) -> float:
    found = []
    for model in (toy.parallel(group, "exact", layers=2), toy.net(2)):
        x = toy.data().detach().requires_grad_()
        (gradient,) = torch.autograd.grad(toy.loss_of(model, x), x, create_graph=True)
        (100 * gradient.square().sum()).backward()
        found.append(toy.gradients(model, x))
    return relative(found[0], found[1])


def test_double_backward(pool: RankPool) -> None:
    assert all(error < 1e-4 for error in pool.run(penalized, 2))


class Headed(nn.Module):
    """A block with a norm on each rank's own heads, as Qwen3's q_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.w1, self.mlp.norm, self.mlp.w2 = nn.Linear(64, 64), nn.RMSNorm(16), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.mlp.norm(self.mlp.w1(x).unflatten(-1, (-1, 16))).flatten(-2)
        return x + self.mlp.w2(inner)


def headed(group: Any) -> float:
    found = []
    for ranks in (True, False):
        torch.manual_seed(2)
        model = Headed()
        if ranks:
            rules = {"mlp.w1": "colwise", "mlp.norm": "sum_grad", "mlp.w2": "rowwise"}
            mesh = DeviceMesh.from_group(group, "cpu")
            parallelize_module(model, mesh, parallel_plan(model, mesh, rules, EchoConfig(QuantConfig(bits=16))), src_data_rank=None)
        for _ in range(2):  # accumulates
            model(toy.data()).square().mean().backward()
        found.append(toy.gradients(model))
    return relative(*found)


def test_a_norm_on_a_ranks_own_heads(pool: RankPool) -> None:
    assert all(error < 1e-5 for error in pool.run(headed, 2))


def refusals(group: Any) -> list[str]:
    mesh = DeviceMesh.from_group(group, "cpu")
    texts = []
    for rules in ({"*.w9": "colwise"}, {"*.w1": "diagonal"}, {"*.norm": "rowwise"}, {"*.w1": "colwise"}):
        try:
            parallel_plan(toy.net(), mesh, rules)
        except ConfigError as error:
            texts.append(str(error))
    return texts


def test_rules_that_are_refused(pool: RankPool) -> None:
    for texts in pool.run(refusals, 1):
        assert len(texts) == 4
        for text, part in zip(texts, ("'*.w9'", "'diagonal'", "is a RMSNorm", "no rowwise linear")):
            assert part in text
