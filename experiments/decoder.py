"""A plain decoder (Llama, Qwen3) whose weights are split over ranks, for experiments.

Why not transformers' own modules: fp32 master weights with bf16 products, QKV and gate-up each in one product, flash attention, so that
what is timed is matrix products and all-reduces, two sites a layer. `tests/experiments` compares it with transformers.

Heads are split by groups of one key head and its query heads, in contiguous ranges that may differ by one: SmolLM2's 3 groups are 2 and 1
on two ranks, so all of its sites are real. The sums in front of the residual stream go through a `Reducer`; the embedding of a tied
model, the head and the norms on heads use 16-bit sums, which are no sites.

Leaves out: KV cache, dropout, biases, activation checkpoints, masks.
Source: Qwen3 (Yang et al., 2025); Llama 3 (Grattafiori et al., 2024); the paper, Appendix B.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from launch import Ranks
from reducers import ExactReducer, Reducer, ShardedCrossEntropy

#: Standard deviation of new weights; output projections are divided by sqrt(2 x layers), as in NeMo.
DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, named as in transformers' configurations where they are equal."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    rope_base: float
    head_norms: bool
    tied: bool
    epsilon: float = 1e-6

    def parameters(self) -> int:
        """Weights of the matrix products, the head included, of all ranks."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocabulary * self.hidden

    def flops(self, length: int) -> float:
        """Floating-point operations a token of a forward pass in a sequence of `length`, causal attention included."""
        return 2.0 * self.parameters() + 2.0 * self.layers * self.heads * self.head_dim * length


SHAPES = {
    "llama3-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, 5e5, False, False, 1e-5),
    "qwen3-8b": Shape(36, 4096, 32, 8, 128, 12288, 151936, 1e6, True, False),
    # Vocabulary of SmolLM2's tokenizer instead of Qwen's 151,936.
    "qwen3-0.6b": Shape(28, 1024, 16, 8, 128, 3072, 49152, 1e6, True, True),
    "tiny": Shape(4, 64, 4, 2, 16, 128, 256, 1e4, True, True),
    "tiny-untied": Shape(3, 64, 8, 4, 16, 128, 256, 1e4, False, False),
}

REPLICATED = ("norm", "norm1", "norm2", "q_norm", "k_norm", "embedding")

#: Name of a weight, as transformers writes it, and its shape -> the whole weight.
Source = Callable[[str, tuple[int, ...]], Tensor]


def fresh(shape: Shape, seed: int, device: torch.device) -> Source:
    """New weights, the same on every rank: each from a generator of its own."""

    def whole(name: str, size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return torch.ones(size, device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + seed)
        output = name.endswith(("o_proj.weight", "down_proj.weight"))
        deviation = DEVIATION / (2 * shape.layers) ** 0.5 if output else DEVIATION
        return torch.empty(size, device=device).normal_(0.0, deviation, generator=generator)

    return whole


def pretrained(folder: Path, device: torch.device) -> tuple[Shape, Source]:
    """Shape and weights of a Llama-like model in a transformers folder with one safetensors file."""
    from safetensors import safe_open

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    shape = Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        inner=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        rope_base=config["rope_parameters"]["rope_theta"],
        head_norms=config["model_type"] == "qwen3",
        tied=config["tie_word_embeddings"],
        epsilon=config["rms_norm_eps"],
    )
    file = safe_open(folder / "model.safetensors", "pt")

    def whole(name: str, size: tuple[int, ...]) -> Tensor:
        found: Tensor = file.get_tensor(name).to(device, torch.float32)
        assert found.shape == size, f"{name}: {tuple(found.shape)} instead of {size}"
        return found

    return shape, whole


def span(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and end of a rank's share of `count` things; shares differ by at most one, lower ranks have more."""
    edges = [-(-count * part // world_size) for part in range(world_size + 1)]
    return edges[rank], edges[rank + 1]


class Layer(nn.Module):
    """One layer's share of a rank.

    Args:
        whole: weights by name, without the layer's prefix.
        index: of the layer; names its sites.
        dtype: in which weights are kept.
    """

    def __init__(self, shape: Shape, whole: Source, index: int, rank: int, world_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.key = shape, f"layer {index}"
        queries = shape.heads // shape.kv_heads
        first, end = span(shape.kv_heads, rank, world_size)
        left, right = span(shape.inner, rank, world_size)
        self.heads, self.kv_heads = queries * (end - first), end - first
        d = shape.head_dim

        def rows(name: str, size: int, start: int, stop: int) -> Tensor:
            return whole(name, (size, shape.hidden))[start:stop]

        def keep(*parts: Tensor) -> nn.Parameter:
            return nn.Parameter(torch.cat(parts).to(dtype).contiguous())

        kv = [rows(f"self_attn.{name}_proj.weight", shape.kv_heads * d, first * d, end * d) for name in "kv"]
        self.qkv = keep(rows("self_attn.q_proj.weight", shape.heads * d, first * queries * d, end * queries * d), *kv)
        output = whole("self_attn.o_proj.weight", (shape.hidden, shape.heads * d))
        self.out = keep(output[:, first * queries * d : end * queries * d])
        self.gate_up = keep(*(rows(f"mlp.{name}_proj.weight", shape.inner, left, right) for name in ("gate", "up")))
        self.down = keep(whole("mlp.down_proj.weight", (shape.hidden, shape.inner))[:, left:right])
        self.norm1 = keep(whole("input_layernorm.weight", (shape.hidden,)))
        self.norm2 = keep(whole("post_attention_layernorm.weight", (shape.hidden,)))
        if shape.head_norms:
            self.q_norm = keep(whole("self_attn.q_norm.weight", (d,)))
            self.k_norm = keep(whole("self_attn.k_norm.weight", (d,)))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], reducer: Reducer) -> Tensor:
        """[rows, length, hidden] in the dtype of products, the same on all ranks -> the same."""
        h = reducer.enter(norm(x, self.norm1, self.shape.epsilon), f"{self.key} attention")
        x = x + reducer.leave(self.attention(h, rope), f"{self.key} attention")
        h = reducer.enter(norm(x, self.norm2, self.shape.epsilon), f"{self.key} mlp")
        return x + reducer.leave(self.mlp(h), f"{self.key} mlp")

    def attention(self, h: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """This rank's contribution to the attention block's sum."""
        rows, length, _ = h.shape
        rotated = self.heads + self.kv_heads
        qkv = linear(h, self.qkv).view(rows, length, -1, self.shape.head_dim)
        qk, v = qkv[:, :, :rotated], qkv[:, :, rotated:]
        if self.shape.head_norms:
            exact = ExactReducer()
            q_norm, k_norm = (exact.enter(weight, "") for weight in (self.q_norm, self.k_norm))
            weights = torch.cat((q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1))).to(h.dtype)
            qk = F.rms_norm(qk, (self.shape.head_dim,), eps=self.shape.epsilon) * weights
        qk = rotate(qk, rope)
        q, k, v = (part.transpose(1, 2) for part in (qk[:, :, : self.heads], qk[:, :, self.heads :], v))
        with flash(h):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return linear(mixed.transpose(1, 2).reshape(rows, length, -1), self.out)

    def mlp(self, h: Tensor) -> Tensor:
        """This rank's contribution to the MLP block's sum."""
        gate, up = linear(h, self.gate_up).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down)


class VirtualLayer(nn.Module):
    """One layer's shares of all ranks in one process, for a session of virtual ranks; what the ranks hold alike is one parameter.

    Args:
        share: a rank's layer by its number.
        world_size: virtual ranks.
    """

    def __init__(self, share: Callable[[int], Layer], world_size: int) -> None:
        super().__init__()
        self.shares = nn.ModuleList(share(rank) for rank in range(world_size))
        first = self.shares[0]
        for other in self.shares[1:]:
            for name in REPLICATED:
                if hasattr(first, name):
                    setattr(other, name, getattr(first, name))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], reducer: Reducer) -> Tensor:
        """As `Layer.forward`; the reducer takes and gives [P, rows, length, hidden] on the ranks' side."""
        first = self.shares[0]
        h = reducer.enter(norm(x, first.norm1, first.shape.epsilon), f"{first.key} attention").unbind()
        parts = torch.stack([share.attention(own, rope) for share, own in zip(self.shares, h)])
        x = x + reducer.leave(parts, f"{first.key} attention")
        h = reducer.enter(norm(x, first.norm2, first.shape.epsilon), f"{first.key} mlp").unbind()
        parts = torch.stack([share.mlp(own) for share, own in zip(self.shares, h)])
        return x + reducer.leave(parts, f"{first.key} mlp")


class Decoder(nn.Module):
    """A rank's share of the model.

    Args:
        whole: `fresh` or `pretrained` weights.
        ranks: whose share, and where.
        virtual: ranks whose shares this process holds, which is the only one; 0: its own share alone. Above 0 the reducer is an
            `EchoReducer` on a session of virtual ranks.
        keep: dtype of the weights (fp32: master weights). compute: dtype of products and activations.
        length: longest sequence.
    """

    def __init__(
        self, shape: Shape, whole: Source, ranks: Ranks, keep: torch.dtype, compute: torch.dtype, length: int, virtual: int = 0
    ) -> None:
        super().__init__()
        rank, world_size = ranks.rank, ranks.world_size
        assert virtual == 0 or world_size == 1, "virtual ranks live in one process"
        self.shape, self.compute = shape, compute

        def share(index: int, part: int, parts: int) -> Layer:
            return Layer(shape, lambda name, size: whole(f"model.layers.{index}.{name}", size), index, part, parts, keep)

        def layer(index: int) -> nn.Module:
            return VirtualLayer(lambda part: share(index, part, virtual), virtual) if virtual else share(index, rank, world_size)

        self.layers = nn.ModuleList(layer(index) for index in range(shape.layers))
        self.start, end = span(shape.vocabulary, rank, world_size)
        size = (shape.vocabulary, shape.hidden)
        embedding = whole("model.embed_tokens.weight", size).to(keep)
        head = embedding if shape.tied else whole("lm_head.weight", size).to(keep)
        self.head = nn.Parameter(head[self.start : end].clone())
        self.embedding = None if shape.tied else nn.Parameter(embedding)
        self.norm = nn.Parameter(whole("model.norm.weight", (shape.hidden,)).to(keep))
        self._rope = angles(shape, length, compute, ranks.device)
        self._exact = ExactReducer()

    def forward(self, ids: Tensor, reducer: Reducer) -> Tensor:
        """Token ids [rows, length] -> normed hidden states [rows, length, hidden]. One pass of the reducer."""
        ids = reducer.open(ids)
        x = self.embed(ids)
        rope = self._rope[0][: ids.shape[1]], self._rope[1][: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, rope, reducer)
        return reducer.close(norm(x, self.norm, self.shape.epsilon))

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding; a tied one is split by vocabulary, and its rows are summed in 16 bits."""
        if self.embedding is not None:
            return F.embedding(ids, self.embedding).to(self.compute)
        width = self.head.shape[0]
        own = (ids >= self.start) & (ids < self.start + width)
        rows = F.embedding((ids - self.start).clamp(0, width - 1), self.head) * own[..., None]
        return self._exact.leave(rows.to(self.compute), "embedding")

    def last_logits(self, ids: Tensor, reducer: Reducer) -> Tensor:
        """This rank's logits of the token after the last, [rows, this rank's vocabulary]: what a prefill gives."""
        return linear(self(ids, reducer)[:, -1], self.head)

    def loss(self, ids: Tensor, targets: Tensor, reducer: Reducer) -> Tensor:
        """Mean cross-entropy in nats, fp32, the same on all ranks."""
        hidden = self._exact.enter(self(ids, reducer), "head")
        logits = linear(hidden.flatten(0, 1), self.head)
        losses: Tensor = ShardedCrossEntropy.apply(logits, targets.flatten(), self.start)
        return losses.mean()

    def replicated(self) -> list[nn.Parameter]:
        """Parameters that every rank holds alike."""
        return [p for name, p in self.named_parameters() if name.rpartition(".")[2] in REPLICATED]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in the dtype of x."""
    return F.linear(x, weight.to(x.dtype))


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm in the dtype of x."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), epsilon)


def angles(shape: Shape, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, [length, 1, head_dim]."""
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    turns = torch.arange(length, device=device, dtype=torch.float32)[:, None] * shape.rope_base**-half
    both = torch.cat((turns, turns), dim=-1)[:, None]
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on [rows, length, heads, head_dim]; halves are rotated, as in transformers."""
    low, high = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat((-high, low), dim=-1) * rope[1]


def flash(x: Tensor) -> Any:
    """Only fused attention on CUDA in 16 bits: the plain one would hold length x length scores."""
    if x.device.type != "cuda" or x.dtype == torch.float32:
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
