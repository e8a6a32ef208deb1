"""Sharded transformers on gloo: logits, gradients, generation, checkpoints, there and back, saving; one backward all-reduce a block."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from echoreduce.errors import ConfigError
from echoreduce.integrations.transformers_tp import built_around, distributed_config, enable, generic, parts, take_stock_hooks
from ranks import RankPool, check, run_fresh
from stock import shard

transformers = pytest.importorskip("transformers")

ARCHITECTURES = ("Llama", "Qwen2", "Qwen3", "Mistral")
LAYERS = 3


def tiny(architecture: str, **options: Any) -> Any:
    """Three layers, 4 heads of 16, random weights; Qwen2 with biases on its row-parallel layers, as large as its activations."""
    torch.manual_seed(0)
    name = "Gemma3TextConfig" if architecture == "Gemma3" else f"{architecture}Config"
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**(sizes | heads | options)))
    if architecture == "Qwen2":
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias = nn.Parameter(0.1 * torch.randn(64))
            layer.mlp.down_proj.bias = nn.Parameter(0.1 * torch.randn(64))
    return model


def sharded(group: Any, architecture: str, **options: Any) -> Any:
    """What `from_pretrained(distributed_config=...)` gives, on a subgroup."""
    return shard(tiny(architecture, **options), DeviceMesh.from_group(group, "cpu"))


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    return 1 + torch.arange(rows * length).reshape(rows, length) % 127


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def step(model: Any, ids: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and whole gradients of one step."""
    model.zero_grad()
    ids = tokens() if ids is None else ids
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def errors(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> tuple[float, float]:
    """Relative errors of the logits, and of the worst gradient."""
    assert sorted(ours[1]) == sorted(theirs[1])
    gradients = [((ours[1][name] - g).norm() / g.norm()).item() for name, g in theirs[1].items()]
    return ((ours[0] - theirs[0]).norm() / theirs[0].norm()).item(), max(gradients)


def same(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> bool:
    return torch.equal(ours[0], theirs[0]) and all(torch.equal(ours[1][name], g) for name, g in theirs[1].items())


# --- enable and disable -------------------------------------------------------------------------------------------------------------


def there_and_back(group: Any, architecture: str) -> dict[str, Any]:
    single, model = step(tiny(architecture)), sharded(group, architecture)
    stock, keys = step(model), list(model.state_dict())
    found: dict[str, Any] = {"stock": errors(stock, single)}
    for name in ("exact", "int8"):
        with enable(model, name) as echo:
            found[name] = errors(step(model), single)
            session = echo.session
            sites = (session.site, session.sites, session._passes["backward"].site, session.backward_sites)
            found[f"{name} sites"] = sites
            found["keys"] = list(model.state_dict()) == keys
            with pytest.raises(ConfigError, match="enabled already"):
                enable(model, name)
    echo.disable()
    found["restored"] = same(step(model), stock)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_o26_o34_enable_and_disable(pool: RankPool, architecture: str) -> None:
    for found in pool.run(there_and_back, 2, architecture):
        assert max(found["stock"] + found["exact"]) < 1e-5
        assert max(found["int8"]) < 0.02
        assert min(found["int8"]) > 1e-4
        assert found["exact sites"] == found["int8 sites"] == (2 * LAYERS,) * 4
        assert found["keys"]
        assert found["restored"]


def test_stock_hooks_on_parameters_are_taken_and_given_back() -> None:
    """As transformers 5.22 and newer makes them at the first forward; a user's own hook stays."""
    calls: list[str] = []

    def stock(parameter: Tensor) -> None:
        calls.append("stock")

    stock.__module__ = "transformers.distributed.tensor_parallel"
    weight = nn.Parameter(torch.ones(3))
    assert take_stock_hooks(weight)[1] == {}
    weight.register_post_accumulate_grad_hook(stock)
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("own"))
    left, taken = take_stock_hooks(weight)
    weight.sum().backward()
    assert calls == ["own"]
    left.update(taken)
    weight.sum().backward()
    assert sorted(calls) == ["own", "own", "stock"]


def test_o34_a_bias_counted_twice_would_be_seen() -> None:
    model = tiny("Qwen2")
    before, _ = step(model)
    for layer in model.model.layers:
        layer.mlp.down_proj.bias.data *= 2
    after, _ = step(model)
    assert (after - before).norm() > 0.02 * before.norm()


def trained(group: Any, architecture: str) -> dict[str, bool]:
    model = sharded(group, architecture)
    results = {}
    with enable(model, "default") as echo:
        expected = step(model)
        one, two = tokens(2, 9), tokens(3, 5) + 20
        alone = [step(model, ids) for ids in (one, two)]
        for reentrant in (True, False):
            model.train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            calls = echo.session.backend._call
            results[f"checkpoint {reentrant}"] = same(step(model), expected)
            norms = sum(name.endswith(("q_norm", "k_norm")) for name, _ in model.named_modules())
            results[f"calls {reentrant}"] = echo.session.backend._call - calls == 4 * LAYERS + norms
            results[f"freed {reentrant}"] = echo.session.recorded_bytes == 0
            # F1 F2 B1 B2, with an evaluation between
            model.zero_grad()
            losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (one, two)]
            with torch.no_grad():
                model(input_ids=tokens(1, 4))
            for loss in losses:
                loss.backward()
            summed = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            results[f"interleaved {reentrant}"] = all(
                torch.allclose(summed[name], alone[0][1][name] + alone[1][1][name], rtol=1e-5, atol=1e-8) for name in summed
            )
            model.gradient_checkpointing_disable()
    return results


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_o21_o22_checkpoints_accumulation_and_interleaving(pool: RankPool, architecture: str) -> None:
    for results in pool.run(trained, 2, architecture):
        assert len(results) == 8
        assert all(results.values()), results


def generated(group: Any, name: str) -> dict[str, Any]:
    model, single = sharded(group, "Llama").eval(), tiny("Llama").eval()
    results: dict[str, Any] = {}
    with enable(model, name) as echo, torch.no_grad():
        padded, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.int64)
        padded[0, :4], mask[0, :4] = 0, 0
        for label, inputs in (
            ("padded", {"input_ids": padded, "attention_mask": mask}),
            ("one", {"input_ids": tokens(1, 4)}),
            ("again", {"input_ids": padded, "attention_mask": mask}),
        ):
            before = echo.session.number
            ours = model.generate(**inputs, min_new_tokens=5, max_new_tokens=5, do_sample=False)
            theirs = single.generate(**inputs, min_new_tokens=5, max_new_tokens=5, do_sample=False)
            results[label] = (ours, torch.equal(ours, theirs), echo.session.number - before)
    return results


@pytest.mark.parametrize("name", ["exact", "default"])
def test_generate_with_cache_padding_and_changing_batches(pool: RankPool, name: str) -> None:
    first, second = pool.run(generated, 2, name)
    for label, (ours, equal, passes) in first.items():
        assert torch.equal(ours, second[label][0]), "ranks agree on every token"
        assert passes == 5, "each decode step is a pass"
        assert equal or name == "default"
    assert torch.equal(first["padded"][0], first["again"][0])


def compiled(group: Any) -> list[bool]:
    """The base model in one graph. (The stock head, a DTensor, cannot be traced with dynamic shapes on torch 2.13.)"""
    torch._dynamo.reset()
    model, results = sharded(group, "Llama", attn_implementation="eager", num_hidden_layers=1), []
    with enable(model, "default") as echo:
        batches = (tokens(2, 9), tokens(3, 9))
        expected = [step(model, ids) for ids in batches]
        model.model.compile(backend="aot_eager", fullgraph=True, dynamic=True)
        for ids, eager in zip(batches, expected):
            results.append(max(errors(step(model, ids), eager)) < 1e-6 and echo.session._passes["backward"].site == 2)
    return results


def test_o30_compiled(pool: RankPool) -> None:
    for rank in pool.run(compiled, 2):
        assert rank == [True, True]


def copied(group: Any) -> dict[str, bool]:
    model = sharded(group, "Qwen3")
    with enable(model) as echo:
        expected = step(model)
        body = (expected[0], {name: g for name, g in expected[1].items() if name.startswith(("model.layers", "model.norm"))})
        twin = copy.deepcopy(model)
        own = {id(module._echo_session) for module in twin.modules() if hasattr(module, "_echo_session")}
        results = {
            "one session": len(own) == 1,
            "its own": id(echo.session) not in own,
            "same": same(step(twin), body),
        }  # the stock head and embedding of a copy still use the original's weights
        results["not disturbed"] = same(step(model), expected)
        with pytest.raises(ConfigError, match="is not sharded"):
            enable(tiny("Llama"))
    return results


def test_o25_deepcopy_and_whole_models(pool: RankPool) -> None:
    for results in pool.run(copied, 2):
        assert len(results) == 4
        assert all(results.values()), results


# --- from_pretrained ------------------------------------------------------------------------------------------------------------------


def loaded(group: Any, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for architecture in (*ARCHITECTURES, "Gemma3"):
        path = str(Path(folder) / architecture)
        single = step(transformers.AutoModelForCausalLM.from_pretrained(path))
        for name in ("exact", "int8"):
            config = distributed_config(path, 2, name)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
            session = model.base_model._echo_session
            results[f"{architecture} {name}"] = errors(step(model), single)
            results[f"{architecture} {name} sites"] = (session.site, session._passes["backward"].site, session.sites)
            results[f"{architecture} shard"] = tuple(model.model.layers[0].mlp.down_proj.weight.to_local().shape)
        model.save_pretrained(path + "-saved")
        again = transformers.AutoModelForCausalLM.from_pretrained(path + "-saved")
        plain = transformers.AutoModelForCausalLM.from_pretrained(path)
        results[f"{architecture} saved"] = all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.parameters()))
    path = str(Path(folder) / "Llama")
    base = transformers.AutoModel.from_pretrained(
        path, distributed_config=distributed_config(path, 2, "exact", model_class=transformers.LlamaModel)
    )
    alone = transformers.AutoModel.from_pretrained(path)
    with torch.no_grad():
        ours, theirs = base(input_ids=tokens())[0], alone(input_ids=tokens())[0]
    results["base"] = ((ours - theirs).norm() / theirs.norm()).item()
    return results


def test_a_version_that_would_ignore_the_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echoreduce.integrations.transformers_tp.version", lambda package: "5.16.0")
    with pytest.raises(ConfigError, match="ignores the plan"):
        distributed_config(tiny("Llama").config, 2)


def test_from_pretrained(tmp_path: Path) -> None:
    for architecture in (*ARCHITECTURES, "Gemma3"):
        tiny(architecture).save_pretrained(tmp_path / architecture)
    for results in check(run_fresh(loaded, 2, str(tmp_path), timeout=60.0, patience=120.0)):
        assert results is not None
        for architecture in (*ARCHITECTURES, "Gemma3"):
            assert max(results[f"{architecture} exact"]) < 1e-5, architecture
            assert results[f"{architecture} exact sites"] == results[f"{architecture} int8 sites"] == (2 * LAYERS,) * 3
            assert results[f"{architecture} shard"] == (64, 64)
            assert results[f"{architecture} saved"], architecture
        for architecture in ARCHITECTURES:
            assert max(results[f"{architecture} int8"]) < 0.02, architecture
        assert results["base"] < 1e-5


def without_a_root_rule(group: Any) -> tuple[int, int | None, bool]:
    """A base model by itself, sharded as transformers 5.24 does it, which drops the rule of the empty name."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    def build(model: nn.Module) -> nn.Module:
        for name, module in model.named_modules():
            if name and generic(name) in plan:
                ALL_PARALLEL_STYLES[plan[generic(name)]].install_forward(module, mesh)
        return model

    mesh = DeviceMesh.from_group(group, "cpu")
    base = tiny("Llama").model
    plan = {
        name: style
        for name, style in distributed_config(base.config, 2, "int8", model_class=transformers.LlamaModel).tp_plan.items()
        if style.startswith("echoreduce")
    }
    assert "" in plan
    session = build(base)._echo_session
    with torch.no_grad():
        base(input_ids=tokens())
    module = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="was not found"):
        built_around(module)
    return session.site, session.sites, session._passes["forward"].open


def test_the_root_is_found_where_its_rule_was_dropped(pool: RankPool) -> None:
    assert pool.run(without_a_root_rule, 2) == [(2 * LAYERS, 2 * LAYERS, False)] * 2


# --- parts ----------------------------------------------------------------------------------------------------------------------------


def count(model: Any) -> dict[str, int]:
    found = list(parts(model).values())
    return {part: found.count(part) for part in sorted(set(found))}


def test_parts_of_architectures() -> None:
    assert count(tiny("Llama")) == {"block": 6, "column": 15, "pass": 1, "row": 6}
    assert count(tiny("Qwen3")) == {"block": 6, "column": 15, "norm": 6, "pass": 1, "row": 6}
    experts = {"num_local_experts": 2} | {"num_experts_per_tok": 1}
    assert count(tiny("Mixtral", **experts)) == {"block": 3, "column": 9, "pass": 1, "row": 3}, "attention only"
    assert count(tiny("Olmo2")) == {"block": 3, "column": 6, "pass": 1, "row": 3}, "its attention splits a whole input: not ours"
    with pytest.raises(ConfigError, match="marks no plain row-parallel linear"):
        parts(tiny("Phi3"))
    with pytest.raises(ConfigError, match="no tensor-parallel plan"):
        parts(nn.Linear(2, 2))


def test_a_block_with_an_unknown_parameter_reduces_by_projection() -> None:
    model = tiny("Llama")
    for layer in model.model.layers:
        layer.mlp.router = nn.Linear(64, 2)
    assert count(model) == {"block": 3, "column": 9, "lone column": 6, "pass": 1, "row": 6}


@pytest.mark.parametrize(("name", "plan"), [("model.layers.10.mlp", "model.layers.*.mlp"), ("layers.3", "layers.*"), ("w1.q2", "w1.q2")])
def test_generic_names(name: str, plan: str) -> None:
    assert generic(name) == plan
