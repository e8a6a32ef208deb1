"""Attach and detach on every architecture with a plan; virtual ranks and real processes give the same bits; bias once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echoreduce import PRESETS, preset
from echoreduce.errors import ConfigError, EchoReduceWarning, PassError
from echoreduce.integrations.transformers import SiteLinear, attach, row_parallel_linears
from echoreduce.integrations.transformers_tp import norms_sums
from echoreduce.virtual import column_bounds, partial_products
from ranks import RankPool

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*norms its sums")
ARCHITECTURES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3")


def tiny(architecture: str) -> Any:
    """Two layers, 4 heads of 16, random weights; Qwen2 with biases on its row-parallel layers, of the size of its embeddings."""
    torch.manual_seed(0)
    name = "Gemma3TextConfig" if architecture == "Gemma3" else f"{architecture}Config"
    config = getattr(transformers, name)(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for module in row_parallel_linears(model).values():
        if architecture == "Qwen2":
            module.bias = nn.Parameter(0.02 * torch.randn(64))
    return model


def logits(model: Any) -> Tensor:
    ids = torch.arange(2 * 17).reshape(2, 17) % 128
    with torch.no_grad():
        result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attach_and_detach(architecture: str) -> None:
    model = tiny(architecture)
    before, keys = logits(model), list(model.state_dict())
    with attach(model, "exact", world_size=4) as attachment:
        assert attachment.session.sites == 4
        assert (logits(model) - before).abs().max() <= 1e-5 * before.abs().max()
    attachment = attach(model, "default", world_size=4)
    changed = logits(model)
    assert 0 < (changed - before).norm() / before.norm() < 0.2
    assert torch.equal(logits(model), changed)
    assert list(model.state_dict()) == keys
    with pytest.raises(ConfigError, match="attached already"):
        attach(model, "default", world_size=2)
    attachment.detach()
    attachment.detach()
    assert torch.equal(logits(model), before)
    assert not any(isinstance(module, SiteLinear) for module in model.modules())
    assert not model.base_model._forward_hooks
    assert not model.base_model._forward_pre_hooks


def test_o25_deepcopy_and_state_dict_of_an_attached_model() -> None:
    model = tiny("Llama")
    attachment = attach(model, "default", world_size=2)
    expected = logits(model)
    twin = copy.deepcopy(model)
    attachment.detach()
    assert torch.equal(logits(twin), expected)
    assert not torch.equal(logits(model), expected)
    sessions = {id(m._echo_session) for m in twin.modules() if isinstance(m, SiteLinear)}
    assert len(sessions) == 1
    assert id(attachment.session) not in sessions


def test_o34_a_bias_counts_once() -> None:
    model = tiny("Qwen2")
    before = logits(model)
    with attach(model, preset("int8"), world_size=4):
        after = logits(model)
    assert (after - before).norm() / before.norm() < 0.02
    for module in row_parallel_linears(model).values():
        module.bias.data *= 4
    assert (logits(model) - before).norm() / before.norm() > 0.02, "a bias counted four times would be seen"


def rank_logits(group: Any, architecture: str, name: str) -> Tensor:
    with attach(tiny(architecture), name, group=group) as attachment:
        first, second = logits(attachment.model), logits(attachment.model)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Gemma3"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ["default", "paper", "no_feedback"])
def test_virtual_and_real_ranks_give_the_same_bits(pool: RankPool, architecture: str, world_size: int, name: str) -> None:
    model = tiny(architecture)
    with attach(model, name, world_size=world_size):
        expected = logits(model)
    for rank in pool.run(rank_logits, world_size, architecture, name):
        assert torch.equal(rank, expected)


def test_each_decode_step_is_a_pass() -> None:
    model = tiny("Llama")
    ids = torch.arange(6).reshape(1, 6)
    with attach(model, "default", world_size=2):
        once = model.generate(ids, min_new_tokens=5, max_new_tokens=5, do_sample=False)
        again = model.generate(ids, min_new_tokens=5, max_new_tokens=5, do_sample=False)
    assert once.shape == (1, 11)
    assert torch.equal(once, again)


def test_o23_an_exception_in_the_middle_of_a_forward() -> None:
    model = tiny("Llama")
    with attach(model, "default", world_size=2) as attachment:
        expected = logits(model)
        layer = model.model.layers[1].mlp
        handle = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("as if out of memory")))
        with pytest.raises(MemoryError):
            logits(model)
        handle.remove()
        with pytest.raises(PassError):
            attachment.session.reduce(torch.ones(2, 4))
        assert torch.equal(logits(model), expected)


def test_gradients_pass_through() -> None:
    model = tiny("Llama").train()
    ids = torch.arange(2 * 9).reshape(2, 9)
    model(input_ids=ids, labels=ids).loss.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with attach(model, preset("int8"), world_size=2):
        model(input_ids=ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad - exact[name]).norm() <= 0.02 * exact[name].norm(), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_o21_activation_checkpoints_of_an_attached_model(reentrant: bool) -> None:
    model = tiny("Llama").train()
    ids = torch.arange(2 * 9).reshape(2, 9)
    with attach(model, preset("default"), world_size=3) as attachment:
        found = []
        for checkpoints in (False, True):
            if checkpoints:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
                model.enable_input_require_grads()
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            assert (attachment.session.recorded_bytes > 0) == checkpoints
            loss.backward()
            assert attachment.session.recorded_bytes == 0
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


def test_models_without_a_plan_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor-parallel plan"):
        attach(nn.Sequential(nn.Linear(4, 4)), "default", world_size=2)
    with pytest.raises(ConfigError, match="one of world_size"):
        attach(tiny("Llama"), "default", world_size=2, group=object())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_partial_products_sum_to_the_product(world_size: int) -> None:
    x, weight = torch.randn(3, 7, 66), torch.randn(10, 66)
    bounds = [column_bounds(66, world_size, rank) for rank in range(world_size)]
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    torch.testing.assert_close(partial_products(x, weight, world_size).sum(0), x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "normed"), [("Llama", False), ("Phi3", False), ("Granite", False), ("Gemma2", True), ("Olmo2", True), ("Glm4", True)]
)
def test_models_that_norm_their_sums_are_known(architecture: str, normed: bool) -> None:
    with torch.device("meta"):
        config = getattr(transformers, f"{architecture}Config")(num_hidden_layers=1, vocab_size=256, pad_token_id=0)
        assert norms_sums(transformers.AutoModelForCausalLM.from_config(config)) == normed


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_feedback_on_a_model_that_norms_its_sums_is_warned_of(architecture: str) -> None:
    model = tiny(architecture)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach(model, "default", world_size=2).detach()
        normed = len([w for w in caught if issubclass(w.category, EchoReduceWarning) and "norms its sums" in str(w.message)])
        assert normed == architecture.startswith("Gemma")
        assert all(w.filename == __file__ for w in caught if issubclass(w.category, EchoReduceWarning))
        caught.clear()
        with attach(model, world_size=2) as attachment:
            chosen = "post_norm" if architecture.startswith("Gemma") else "default"
            assert attachment.session.config == PRESETS[chosen]
        attach(model, "int8", world_size=2).detach()
        assert not [w for w in caught if issubclass(w.category, EchoReduceWarning)]
