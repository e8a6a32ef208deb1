"""Judging a configuration on a language model: perplexity, bits on the wire, injected and accumulated error.

Variants are named configurations. `SUMMARY` answers "what does 4-bit tensor parallelism do to my model", `ABLATION` holds every row of
docs/design.md, Section 6. The error figures come from virtual ranks, whose bits are those of real ones, on the first tokens.

Leaves out: starting processes (`processes`), printing and plotting (`cli`).
Source: the paper, Sections 3.2 (S_t), 7.2 and 7.4 (ablations).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from echoreduce import reference
from echoreduce.config import NO_FEEDBACK, EchoConfig, FeedbackConfig, QuantConfig, preset
from echoreduce.errors import ConfigError
from echoreduce.feedback import compensator
from echoreduce.feedback.compensator import FeedbackState
from echoreduce.integrations.transformers import attach
from echoreduce.partition import partition, wire_bytes
from echoreduce.recording import Recording
from echoreduce.sites import bits_at, early_half, edges, uniform
from echoreduce.virtual import VirtualBackend

#: Tokens on which the error figures are measured; a few hundred settle the mean over sites.
OBSERVED_TOKENS = 256


@dataclass(frozen=True)
class Variant:
    """A row of a table: its name, and the configuration (None: the model as it is, no splitting)."""

    name: str
    config: EchoConfig | None


@dataclass
class Result:
    """What a variant did to the model.

    Attributes:
        name: of the variant.
        perplexity: exp of the mean negative log-likelihood a token.
        increase: perplexity above that of the first variant measured with bits 16 (absolute).
        bits_per_value: bits that cross links per value of the message, normalized so that a 16-bit all-reduce has 16.
        injected: mean over sites of |delta_k| / |sum_i x_k,i|, first `OBSERVED_TOKENS` tokens; None if not measured.
        accumulated: rms of S_t per site, same tokens (empty if not measured).
        seconds: wall time of the perplexity run.
    """

    name: str
    perplexity: float
    increase: float
    bits_per_value: float
    injected: float | None = None
    accumulated: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summary_variants(group_size: int | None = None, bits: int = 4) -> list[Variant]:
    """16-bit, 8-bit, low-bit without feedback, the paper, `fast`, the default; without a group size each has its own."""
    return [
        Variant("16-bit", preset("exact", group_size=group_size)),
        Variant("8-bit", preset("int8", group_size=group_size)),
        Variant(f"{bits}-bit, no feedback", preset("no_feedback", bits=bits, group_size=group_size)),
        Variant("paper", preset("paper", bits=bits, group_size=group_size)),
        Variant("fast", preset("fast", bits=bits, group_size=group_size)),
        Variant("default", preset("default", bits=bits, group_size=group_size)),
    ]


def ablation_variants(group_size: int | None = None, bits: int = 4) -> list[Variant]:
    """Every row of docs/design.md, Section 6, two-shot unless it says otherwise; without a group size at 128."""
    group_size = group_size or QuantConfig().group_size
    quant = QuantConfig(bits=bits, group_size=group_size)
    local = FeedbackConfig(state="fp32")
    base = EchoConfig(quant=quant, feedback=local, algorithm="two_shot", sites=uniform())
    off = replace(base, feedback=NO_FEEDBACK)
    paper = preset("paper", bits=bits, group_size=group_size)
    two_edges = replace(base, sites=edges(first=2, last=2, bits=8))
    eight = replace(quant, bits=8)
    return [
        Variant("16-bit", preset("exact", group_size=group_size)),
        Variant("symmetric, no feedback", replace(off, quant=replace(quant, policy="symmetric"))),
        Variant("asymmetric, no feedback", replace(off, quant=replace(quant, policy="asymmetric"))),
        Variant("zero-aware, no feedback", off),
        Variant("paper", paper),
        Variant("paper, early half 8 bits", replace(paper, sites=early_half(8))),
        Variant("local", base),
        Variant("local, last site 8 bits", replace(base, sites=edges(first=0, last=1, bits=8))),
        Variant("local, edges 2+2 8 bits", two_edges),
        Variant("local, edges 2+2, float8 state", replace(two_edges, feedback=replace(local, state="float8_e4m3"))),
        Variant("local, edges 2+2, Hadamard", replace(two_edges, quant=replace(quant, rotation="hadamard"))),
        Variant("local, one-shot", replace(base, algorithm="one_shot")),
        Variant("8-bit, no feedback", replace(off, quant=eight)),
        Variant("8-bit, local", replace(base, quant=eight)),
        Variant("fast", preset("fast", bits=bits, group_size=group_size)),
        Variant("default", preset("default", bits=bits, group_size=group_size)),
    ]


VARIANT_SETS: dict[str, Callable[[int | None, int], list[Variant]]] = {"summary": summary_variants, "ablation": ablation_variants}


def variants_of(name: str, group_size: int | None, bits: int) -> list[Variant]:
    """A named set of variants.

    Raises:
        ConfigError: unknown set.
    """
    if name not in VARIANT_SETS:
        raise ConfigError(f"table must be one of {', '.join(VARIANT_SETS)}, got {name!r}")
    return VARIANT_SETS[name](group_size, bits)


def negative_log_likelihood(model: Any, tokens: Tensor, batch: int, advance: Callable[[int], None] | None = None) -> tuple[float, int]:
    """Summed negative log-likelihood in nats and number of predicted tokens.

    Args:
        model: Hugging Face causal language model.
        tokens: int64 [windows, length + 1].
        batch: windows a forward.
        advance: told the number of windows after each forward.
    """
    device = next(model.parameters()).device
    total, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, tokens.shape[0], batch):
            chunk = tokens[start : start + batch].to(device)
            logits = model(input_ids=chunk[:, :-1], use_cache=False).logits
            for row, target in zip(logits, chunk[:, 1:]):
                total += F.cross_entropy(row.float(), target, reduction="sum").item()
            count += chunk[:, 1:].numel()
            if advance is not None:
                advance(chunk.shape[0])
    return total, count


def perplexity(model: Any, tokens: Tensor, batch: int, advance: Callable[[int], None] | None = None) -> float:
    """exp(mean negative log-likelihood), arguments as `negative_log_likelihood`."""
    total, count = negative_log_likelihood(model, tokens, batch, advance)
    return math.exp(total / count)


def bits_per_value(config: EchoConfig | None, world_size: int, numel: int, sites: int) -> float:
    """Bits on the links per value of the message, qparams and 8-bit sites included; a bandwidth-optimal 16-bit all-reduce has 16.

    Args:
        config: None is the unsplit model, 16.
        world_size: P.
        numel: values of one message.
        sites: all-reduces of a pass.
    """
    if config is None or world_size == 1:
        return 16.0
    algorithm = config.algorithm_for(world_size, numel)
    sent = 0
    for site in range(sites):
        quant = config.quant.with_bits(bits_at(config.sites, site, sites, config.quant.bits))
        sent += wire_bytes(numel, world_size, quant, algorithm)
    padded = partition(numel, world_size, config.quant.group_size).padded
    return 8 * sent / sites / (2 * (world_size - 1) / world_size * padded)


class ObservedBackend(VirtualBackend):
    """Virtual ranks that also keep, for each site of one pass, what was injected and what has piled up.

    Attributes:
        injected: |delta_k| / |sum_i x_k,i| by site.
        accumulated: rms over values of S_t = sum_{k <= t} rho_k by site, rho_k = y_k - sum_i x_k,i (Eq. 5 and 6).
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.injected: list[float] = []
        self.accumulated: list[float] = []
        self._sum: Tensor | None = None

    def all_reduce(
        self,
        x: Tensor,
        quant: QuantConfig,
        algorithm: str,
        state: FeedbackState | None = None,
        out: Tensor | None = None,
        *,
        recording: Recording | None = None,
        rescale: bool = False,
    ) -> Tensor:
        """As `VirtualBackend.all_reduce`."""
        returned = compensator.correction(state) if state is not None else None
        result = super().all_reduce(x, quant, algorithm, state, out, recording=recording, rescale=rescale)
        exact = reference.in_rank_order(x.float())
        delta = torch.zeros_like(exact)
        if quant.bits != 16 and self.world_size > 1:
            record = reference.trace(x, quant, algorithm, returned)
            cut = partition(exact.numel(), self.world_size, quant.group_size)
            delta = reference.leave(reference.injected_error(record), quant, cut, exact.shape, torch.float32)
        self.injected.append((delta.norm() / exact.norm()).item())
        net = result.float() - exact
        self._sum = net if self._sum is None else self._sum + net
        self.accumulated.append(self._sum.square().mean().sqrt().item())
        return result


def observe(model: Any, tokens: Tensor, config: EchoConfig, world_size: int) -> tuple[float, list[float]]:
    """Mean relative injected error over sites, and rms of S_t by site, on the first `OBSERVED_TOKENS` tokens.

    Args:
        tokens: int64 [windows, length + 1].
    """
    backend = ObservedBackend(world_size)
    device = next(model.parameters()).device
    with attach(model, config, backend=backend), torch.no_grad():
        model(input_ids=tokens[:1, :-1][:, :OBSERVED_TOKENS].to(device), use_cache=False)
    return sum(backend.injected) / len(backend.injected), backend.accumulated
