"""Measuring variants against the exact model on the same tokens: perplexity, KL divergence of the next-token distribution, agreement.

Why KL: the perplexity of a damaged model can be lower by chance, the divergence from the exact model cannot, and its spread over windows
is far smaller. Per batch the exact model runs once and all variants of a group after it; sums are kept per window, so every mean has a
standard error. A group's lines are appended when it is done, so a killed run continues where it was.

Leaves out: which variants (`accuracy_variants`), texts (`accuracy_texts`), tables and figures (`accuracy_report`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accuracy_texts import Windows
from accuracy_trials import Trial
from echoreduce.integrations.transformers import attach


@dataclass
class Job:
    """One model on one text at one P.

    Attributes:
        conditions: what identifies the job in a result line: model, text, world_size, windows, window, batch, dtype.
        environment: hardware, versions, commit.
        model: Hugging Face causal language model, not attached.
        sites: all-reduces of a pass.
        windows: tokens and which of them are scored.
        batch: windows a forward.
        out: file to which lines are appended.
    """

    conditions: dict[str, Any]
    environment: dict[str, Any]
    model: Any
    sites: int
    windows: Windows
    batch: int
    out: Path

    @property
    def world_size(self) -> int:
        """P."""
        return int(self.conditions["world_size"])

    @property
    def numel(self) -> int:
        """Values of a message of a full batch."""
        return int(self.windows.tokens[: self.batch, :-1].numel() * self.model.config.get_text_config().hidden_size)


@dataclass
class Scores:
    """Sums over the scored tokens of each window, fp64 [windows]: negative log-likelihood and KL in nats, agreements of the top token."""

    nll: Tensor
    kl: Tensor
    agree: Tensor


def key(line: dict[str, Any]) -> str:
    """What makes two result lines the same measurement."""
    names = ("model", "text", "world_size", "windows", "window", "dtype", "name", "configuration")
    return json.dumps([line[name] for name in names], sort_keys=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Result lines of a file; a last line cut off by a kill is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def missing(job: Job, trials: list[Trial], done: set[str]) -> list[Trial]:
    """Trials without a result line."""
    return [trial for trial in trials if key({**job.conditions, "name": trial.name, "configuration": trial.as_data()}) not in done]


def groups(trials: list[Trial], size: int) -> Iterator[list[Trial]]:
    """Cut into groups that share the exact model's runs."""
    for start in range(0, len(trials), size):
        yield trials[start : start + size]


def measure(job: Job, trials: list[Trial]) -> list[dict[str, Any]]:
    """Run a group of trials and append their lines to `job.out`."""
    exact_nll: list[Tensor] = []
    parts: dict[str, list[Scores]] = {trial.name: [] for trial in trials}
    seconds = dict.fromkeys(parts, 0.0)
    device = next(job.model.parameters()).device
    with torch.inference_mode():
        for tokens, scored in job.windows.batches(job.batch, device):
            exact = log_probabilities(job.model, tokens)
            exact_nll.append(compare(exact, exact, tokens, scored).nll)
            for trial in trials:
                started = time.perf_counter()
                with attach(job.model, trial.config, backend=trial.backend(job.world_size, job.sites)):
                    found = log_probabilities(job.model, tokens)
                parts[trial.name].append(compare(exact, found, tokens, scored))
                del found
                seconds[trial.name] += time.perf_counter() - started
    counts = job.windows.scored.sum(-1).double()
    base = torch.cat(exact_nll)
    lines = []
    for trial in trials:
        joined = Scores(*(torch.cat([getattr(part, name) for part in parts[trial.name]]) for name in ("nll", "kl", "agree")))
        line = {**job.conditions, "name": trial.name, **summary(joined, base, counts)}
        line["bits_per_value"] = trial.bits_per_value(job.world_size, job.numel, job.sites)
        line |= {"seconds": seconds[trial.name], "configuration": trial.as_data(), "environment": job.environment}
        lines.append(line)
    with job.out.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return lines


def log_probabilities(model: Any, tokens: Tensor) -> list[Tensor]:
    """Log-probabilities of the next token after each of tokens[:, :-1]: per window fp32 [length, vocabulary]."""
    logits = list(model(input_ids=tokens[:, :-1], use_cache=False).logits)
    for row in range(len(logits)):
        logits[row] = torch.log_softmax(logits[row].float(), dim=-1)
    return logits


def compare(exact: list[Tensor], found: list[Tensor], tokens: Tensor, scored: Tensor) -> Scores:
    """Sums of each window of a batch, on the CPU.

    Args:
        exact, found: log-probabilities per window.
        tokens: int64 [batch, length + 1].
        scored: bool [batch, length], which predictions count.
    """
    rows = []
    for row, (p, q) in enumerate(zip(exact, found)):
        nll = -q.gather(-1, tokens[row, 1:, None]).squeeze(-1)
        ratio = q - p
        kl = (p.exp() * (torch.expm1(ratio) - ratio)).sum(-1)  # sum p log(p/q), since both add up to 1: no term is negative
        agree = p.argmax(-1) == q.argmax(-1)
        rows.append(torch.stack([torch.where(scored[row], value.double(), 0.0).sum() for value in (nll, kl, agree)]))
    return Scores(*torch.stack(rows).cpu().unbind(-1))


def summary(scores: Scores, base: Tensor, counts: Tensor) -> dict[str, Any]:
    """Means over scored tokens, with standard errors over windows (delta method for the perplexity's increase), and KL and what is added to
    the negative log-likelihood by window, nats a token.

    Args:
        base: negative log-likelihood of the exact model by window.
        counts: scored tokens by window.
    """
    total = counts.sum().item()
    exact = math.exp(base.sum().item() / total)
    found = math.exp(scores.nll.sum().item() / total)
    return {
        "perplexity": found,
        "exact_perplexity": exact,
        "increase": found - exact,
        "increase_percent": 100 * (found / exact - 1),
        "increase_percent_error": 100 * found / exact * standard_error(scores.nll - base, counts),
        "kl": scores.kl.sum().item() / total,
        "kl_error": standard_error(scores.kl, counts),
        "kl_windows": [float(f"{value:.5g}") for value in (scores.kl / counts).tolist()],
        "nll_windows": [float(f"{value:.5g}") for value in ((scores.nll - base) / counts).tolist()],
        "agreement": scores.agree.sum().item() / total,
        "tokens": total,
    }


def standard_error(sums: Tensor, counts: Tensor) -> float:
    """Of the ratio sum(sums) / sum(counts) over independent windows; 0 for a single window."""
    windows = counts.numel()
    if windows < 2:
        return 0.0
    deviation = sums - sums.sum() / counts.sum() * counts
    return (deviation.square().sum() * windows / (windows - 1)).sqrt().item() / counts.sum().item()
