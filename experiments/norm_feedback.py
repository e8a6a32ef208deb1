"""Feedback on a model that norms its sums (Gemma 2 and 3): the owed error, scaled by what two neighbouring norms do to it.

    python experiments/norm_feedback.py --model gemma-3-270m --data DIR --out norm_feedback.jsonl

There the residual stream receives w * y / rms(y) of a sum y, so an error u of site k costs w_k u / rms_k in the stream, and site k + 1 pays
it back if it adds c = u (w_k / w_{k+1}) (rms_{k+1} / rms_k), by channel and token. rms_k is known after site k, rms_{k+1} is not before
its sum. Four ways: `plain` ignores the norms (as the library does), `means` takes the mean of rms_{k+1} from a calibration, `own` estimates
it by the rank's own contribution, times a calibrated factor for each site and rank, `oracle` knows it. |w_k / w_{k+1}| is cut at 8.

One process, virtual ranks, fp32; calibration on WikiText-2 validation. Leaves out: a backend (the correction has to be turned out of the
quantizer's domain). Source: docs/accuracy.md, Gemma 3 270M.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from accuracy_texts import find
from echoreduce import reference
from echoreduce.config import QuantConfig
from echoreduce.integrations.language_model import windows
from echoreduce.measure.report import environment
from echoreduce.partition import partition

MODES = ("none", "plain", "means", "own", "oracle")
LARGEST_RATIO = 8.0
FOUR = QuantConfig(bits=4, group_size=64, policy="compact", rotation="hadamard")
#: First and last sites at 7 bits, as in preset `default`.
EDGES = (3, 2)


def rms(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).add(1e-6).sqrt()


@dataclass
class Owed:
    """What a site left to the next: residuals of the ranks [P, ..., hidden], the site's number, rms of its sum."""

    residuals: Tensor
    site: int
    size: Tensor


@dataclass
class Emulation:
    """Row-parallel layers of a model whose sums go through the reference all-reduce.

    Attributes:
        weights: of the norm behind each site, [hidden] each.
        means: mean rms of each site's sum. own: rms of the sum over that of each rank's contribution, [P, 1, 1, 1]. From `calibrate`.
    """

    model: Any
    world_size: int
    weights: list[Tensor] = field(default_factory=list)
    quant: Callable[[int], QuantConfig] | None = None
    mode: str = "none"
    gain: float = 1.0
    means: list[float] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._owed: Owed | None = None
        self._seen: list[list[tuple[float, Tensor]]] = []
        for layer in self.model.model.layers:
            pairs = (layer.self_attn.o_proj, layer.post_attention_layernorm), (layer.mlp.down_proj, layer.post_feedforward_layernorm)
            for linear, norm in pairs:
                linear.forward = self._site(len(self.weights), linear)
                self.weights.append(1.0 + norm.weight)  # Gemma's norms store w - 1
                self._seen.append([])

    def logits(self, window: Tensor) -> Tensor:
        """Log-probabilities [tokens, vocabulary] of one pass."""
        self._owed = None
        return self.model(input_ids=window[None, :-1], use_cache=False).logits[0].log_softmax(-1)

    def calibrate(self, text: Tensor) -> None:
        """Measure the sums of exact passes."""
        self.quant = None
        for window in text:
            self.logits(window)
        self.means = [sum(size for size, _ in seen) / len(seen) for seen in self._seen]
        self.own = [torch.stack([ratio for _, ratio in seen]).mean(0) for seen in self._seen]

    def _site(self, site: int, linear: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            parts = x.chunk(self.world_size, -1), linear.weight.chunk(self.world_size, 1)
            contributions = torch.stack([a @ b.t() for a, b in zip(*parts)])
            exact = contributions.sum(0)
            if self.quant is None:
                self._seen[site].append((float(rms(exact).mean()), (rms(exact) / rms(contributions)).mean((1, 2, 3), keepdim=True)))
                return exact
            if self.mode != "none" and self._owed is not None:
                contributions = contributions + self.gain * self._correction(site, contributions, rms(exact), self._owed)
            return self._reduce(site, contributions)

        return forward

    def _correction(self, site: int, contributions: Tensor, oracle: Tensor, owed: Owed) -> Tensor:
        if self.mode == "plain":
            return owed.residuals
        channels = (self.weights[owed.site] / self.weights[site]).clamp(-LARGEST_RATIO, LARGEST_RATIO)
        if self.mode == "means":
            sizes: Any = self.means[site] / owed.size
        else:
            sizes = (oracle if self.mode == "oracle" else self.own[site] * rms(contributions)) / owed.size
        return owed.residuals * channels * sizes

    def _reduce(self, site: int, contributions: Tensor) -> Tensor:
        assert self.quant is not None
        quant, shape = self.quant(site), contributions.shape[1:]
        found = reference.all_reduce(contributions, quant, "two_shot", residual="local")
        assert found.residuals is not None
        cut = partition(shape.numel(), self.world_size, quant.group_size)
        turned = torch.stack([reference.leave(own, quant, cut, shape, torch.float32) for own in found.residuals])
        self._owed = Owed(turned, site, rms(found.output))
        return found.output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of Gemma 3")
    parser.add_argument("--data", type=Path, default=os.environ.get("ECHOREDUCE_DATA") or None, help="folder of the texts")
    parser.add_argument("--texts", default="wikitext2_test_raw.txt")
    parser.add_argument("--world-sizes", default="4")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--bits", default="4,5,6")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--gains", default="1,0.75")
    parser.add_argument("--uniform", action="store_true", help="no edges at 7 bits")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def cut(name: str, count: int) -> Tensor:
        return windows(tokenizer, find(name, options.data).read_text(encoding="utf-8"), options.window, count, True)

    for world_size in map(int, options.world_sizes.split(",")):
        emulation = Emulation(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval(), world_size)
        emulation.calibrate(cut("wikitext2_valid_raw.txt", 4))
        for text in options.texts.split(","):
            measure(emulation, text, cut(text, options.windows), options)


def measure(emulation: Emulation, text: str, rows: Tensor, options: argparse.Namespace) -> None:
    """Every bit width, way and gain on one text; appends a line each."""
    emulation.quant = None
    exact = [emulation.logits(window) for window in rows]
    sites = len(emulation.weights)
    for bits in map(int, options.bits.split(",")):
        inner = replace(FOUR, bits=bits)
        edge = inner if options.uniform else replace(FOUR, bits=max(7, bits))

        def quant(site: int, inner: QuantConfig = inner, edge: QuantConfig = edge) -> QuantConfig:
            return inner if EDGES[0] <= site < sites - EDGES[1] else edge

        emulation.quant = quant
        for mode in options.modes.split(","):
            for gain in map(float, options.gains.split(",") if mode != "none" else "1"):
                emulation.mode, emulation.gain = mode, gain
                line = {
                    "text": text,
                    "world_size": emulation.world_size,
                    "bits": bits,
                    "edges": not options.uniform,
                    "mode": mode,
                    "gain": gain,
                }
                line |= scores([emulation.logits(window) for window in rows], exact, rows)
                with Path(options.out).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, "windows": len(rows), "window": options.window, "environment": environment()}) + "\n")
                print({name: round(value, 4) if isinstance(value, float) else value for name, value in line.items()}, flush=True)


def scores(ours: list[Tensor], exact: list[Tensor], rows: Tensor) -> dict[str, float]:
    """KL in nats, and the relative increase of perplexity with its standard error over windows."""
    divergences = [float((p.exp() * (p - q)).sum(-1).mean()) for p, q in zip(exact, ours)]
    rises = torch.tensor([float((p - q).gather(-1, window[1:, None]).mean()) for p, q, window in zip(exact, ours, rows)])
    error = float(rises.std() / len(rows) ** 0.5) if len(rows) > 1 else float("nan")
    return {"kl": sum(divergences) / len(divergences), "increase": float(rises.mean().expm1()), "error": error}


if __name__ == "__main__":
    main()
