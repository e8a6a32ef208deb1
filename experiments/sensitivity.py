"""Which measurement of a site's sensitivity predicts the KL of a whole assignment of bits? Decides how `echoreduce recommend` measures.

    alone    KL_k(b): site k at b bits with feedback, every other site exact (`calibration.sensitivity`); an assignment gets the sum
    changed  KL(all 4) - KL(all 4, site k at b); an assignment gets KL(all 4) minus the sum

Both predict the KL of random assignments, of uniform bits and of edges; then each assigns bits under a budget and the two are compared
on held-out windows.

    python experiments/sensitivity.py MODEL --text FILE --out docs/results/sensitivity_smollm2_p4.json
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from echoreduce.config import EchoConfig, preset
from echoreduce.integrations.calibration import BITS, Subject, Table, Text, assign, sensitivity
from echoreduce.integrations.language_model import load, read_text, windows
from echoreduce.measure.report import write_json


def changed(subject: Subject, text: Text, base: EchoConfig) -> tuple[float, Table]:
    """KL of all sites at the fewest bits, and what each change of one site takes away from it."""
    sites = len(subject.sites)
    flat = text.judge(subject, replace(base, sites=(min(BITS),) * sites))[0]
    table = np.zeros((sites, len(BITS)))
    for site in range(sites):
        for column, width in enumerate(BITS[1:], start=1):
            policy = tuple(width if other == site else min(BITS) for other in range(sites))
            table[site, column] = text.judge(subject, replace(base, sites=policy))[0] - flat
        print(f"changed: site {site} of {sites}", flush=True)
    return flat, table


def total(table: Table, policy: tuple[int, ...]) -> float:
    """Sum over sites of the table's entries at the policy's bits."""
    return float(sum(table[site, BITS.index(width)] for site, width in enumerate(policy)))


def rank(values: np.ndarray) -> np.ndarray:
    """Rank of each value."""
    return np.argsort(np.argsort(values))


def main() -> None:
    """Measure, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--assignments", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, tokenizer = load(options.model, "float32", options.device)
    tokens = windows(tokenizer, read_text(options.text), options.window, options.windows + options.held_out)
    subject = Subject(model, options.world_size)
    sites, base = len(subject.sites), preset("default")
    text = Text.of(subject, tokens[: options.windows])
    alone = sensitivity(subject, text, base, step=lambda: print(".", end="", flush=True))
    flat, change = changed(subject, text, base)

    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(len(BITS)), options.assignments)
    policies = [tuple(int(b) for b in rng.choice(BITS, sites, p=share)) for share in shares]
    policies += [(width,) * sites for width in BITS] + [(8, 8) + (4,) * (sites - 4) + (8, 8)]
    measured = np.array([text.judge(subject, replace(base, sites=policy))[0] for policy in policies])
    predictions = {
        "alone": np.array([total(alone, policy) for policy in policies]),
        "changed": np.array([flat + total(change, policy) for policy in policies]),
    }
    held_out = Text.of(subject, tokens[options.windows :])
    rows = {}
    for name, predicted in predictions.items():
        error = predicted - measured
        rows[name] = {
            "correlation": float(np.corrcoef(predicted, measured)[0, 1]),
            "rank_correlation": float(np.corrcoef(rank(predicted), rank(measured))[0, 1]),
            "relative_error": float(np.sqrt(np.mean(error**2) / np.mean(measured**2))),
            "mean_ratio": float(np.mean(predicted / measured)),
            "held_out_divergence_by_mean_bits": {
                str(mean): held_out.judge(subject, replace(base, sites=assign(alone if name == "alone" else change, int(mean * sites))))[0]
                for mean in (4.25, 4.5, 5.0)
            },
        }
        print(f"\n{name}: {rows[name]}", flush=True)
    write_json(
        options.out,
        conditions={
            "model": options.model.name,
            "text": options.text.name,
            "world_size": options.world_size,
            "window": options.window,
            "windows": options.windows,
            "held_out": options.held_out,
            "threads": torch.get_num_threads(),
        },
        rows=rows,
        policies=policies,
        measured=measured.tolist(),
        predicted={name: values.tolist() for name, values in predictions.items()},
        alone=alone.tolist(),
        changed=change.tolist(),
    )


if __name__ == "__main__":
    main()
