"""The experiments' decoder against transformers: loss and gradients of two ranks, heads that do not divide by two included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from decoder import Decoder, Shape, span
from echoreduce.config import PRESETS
from echoreduce.runtime.c10d import C10dBackend
from echoreduce.session import Session
from launch import Ranks
from ranks import check, run_fresh
from reducers import EchoReducer, ExactReducer

transformers = pytest.importorskip("transformers")

#: Three groups of two query heads and one key head: two on rank 0, one on rank 1.
SIZES = {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 6}


def reference(architecture: str) -> tuple[Any, Shape]:
    """A random model of transformers, the same in every process, and its shape."""
    torch.manual_seed(5)
    tied = architecture == "Qwen3"
    extra = {
        "num_key_value_heads": 3,
        "head_dim": 16,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
    }
    config = getattr(transformers, f"{architecture}Config")(**SIZES, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)  # norms of one would hide a norm that is left out
        assert "bias" not in name
    return model, Shape(2, 96, 6, 3, 16, 144, 96, 5e3, tied, tied, config.rms_norm_eps)


HOW = ("own", "exact", "int8")


def compare(group: Any, architecture: str) -> dict[str, dict[str, float]]:
    """Relative errors of the loss and of some gradients of this rank against the whole model, for each of HOW."""
    model, shape = reference(architecture)
    ids = torch.randint(96, (3, 24), generator=torch.Generator().manual_seed(2))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    logits = model(input_ids=inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    weights, whole = model.state_dict(), {name: p.grad for name, p in model.named_parameters()}
    who = Ranks(dist.get_rank(), 2, torch.device("cpu"), 0.0)
    results = {}
    for how in HOW:
        ours = Decoder(shape, lambda name, size: weights[name], who, torch.float32, torch.float32, 32)
        session = Session(C10dBackend(None), PRESETS[how], 4) if how in PRESETS else None
        found = ours.loss(inputs, targets, ExactReducer() if session is None else EchoReducer(session))
        found.backward()
        pairs = {"loss": (found.detach(), loss.detach()), **gradients(ours, whole, who.rank)}
        results[how] = {name: float((mine - theirs).norm() / theirs.norm()) for name, (mine, theirs) in pairs.items()}
    return results


def gradients(ours: Decoder, whole: dict[str, Any], rank: int) -> dict[str, tuple[Any, Any]]:
    """This rank's gradients and what they must be."""
    first, end = span(3, rank, 2)
    embedding = "model.embed_tokens.weight"
    pairs = {
        "queries": (ours.layers[1].qkv.grad[: 32 * (end - first)], whole["model.layers.1.self_attn.q_proj.weight"][32 * first : 32 * end]),
        "down": (ours.layers[0].down.grad, whole["model.layers.0.mlp.down_proj.weight"][:, 72 * rank : 72 * rank + 72]),
        "norm": (ours.layers[0].norm1.grad, whole["model.layers.0.input_layernorm.weight"]),
        "head": (ours.head.grad, whole[embedding if ours.shape.tied else "lm_head.weight"][48 * rank : 48 * rank + 48]),
    }
    if ours.shape.head_norms:
        return {**pairs, "head norm": (ours.layers[0].k_norm.grad, whole["model.layers.0.self_attn.k_norm.weight"])}
    return {**pairs, "embedding": (ours.embedding.grad, whole[embedding])}


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_two_ranks_equal_transformers(architecture: str) -> None:
    for results in check(run_fresh(compare, 2, architecture, patience=120.0)):
        assert max(results["own"].values()) < 1e-5, results
        assert max(results["exact"].values()) < 1e-5, results
        assert 1e-4 < max(results["int8"].values()) < 0.05, results


@pytest.mark.parametrize("count, world_size", [(3, 2), (8, 2), (9, 4), (2, 3)])
def test_spans_cover_everything_once(count: int, world_size: int) -> None:
    spans = [span(count, rank, world_size) for rank in range(world_size)]
    assert [index for first, end in spans for index in range(first, end)] == list(range(count))
    sizes = [end - first for first, end in spans]
    assert max(sizes) - min(sizes) <= 1
