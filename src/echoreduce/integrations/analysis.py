"""`analyze`: constants, errors, predictions and verdicts of some configurations on one window of a text, as plain data for JSON.

Leaves out: printing (`cli.analyze`) and plotting (`cli.analysis_figures`), which read this data and nothing else.
Source: the paper, Section 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from echoreduce.errors import ConfigError
from echoreduce.integrations.estimate import Probes, Trajectory, follow, probe, standard_error
from echoreduce.integrations.evaluation import Variant, bits_per_value
from echoreduce.integrations.residual_stream import ResidualStream, eager_attention
from echoreduce.integrations.verdicts import judge, neighbours, network_assumptions, network_checks, off_diagonal, pass_assumptions
from echoreduce.theory.weights import Array

SANDWICH = (
    "a norm follows every sum before it joins the residual stream: an error passes it first, so what one site returns is not what the site "
    "before it injected into the stream. The theory does not cover this case; bounds on the output are judged as if it did"
)

Step = Callable[[str], None]


def analyze(model: Any, tokens: Tensor, variants: list[Variant], world_size: int, probes: int, step: Step, seed: int = 0) -> dict[str, Any]:
    """Everything that `echoreduce analyze` says about one window.

    Args:
        model: Hugging Face causal language model in float32, not attached.
        tokens: int64 [length].
        variants: configurations to run; all have one.
        world_size: P virtual ranks.
        probes: isotropic vectors.
        step: told what was done: `PROBE` after each start, then the variant's name.
    Raises:
        ConfigError: the model is not in float32, or not of the supported form.
    """
    if next(model.parameters()).dtype.itemsize < 4:
        raise ConfigError("Jacobian products in 16 bits are noise; load the model in float32")
    with eager_attention(model):
        stream = ResidualStream(model, tokens)
        normed = any(block.normed for block in stream.blocks)
        kernels = {one.name: one.config.feedback for one in variants if one.config is not None}
        found = probe(stream, kernels, probes, seed, lambda: step(PROBE))
        rows = []
        for one in variants:
            assert one.config is not None, "every variant of an analysis runs"
            trajectory = follow(stream, one.config, world_size)
            message = tokens.numel() * stream.clean[0].shape[-1]
            row = {"name": one.name, "bits_per_value": bits_per_value(one.config, world_size, message, stream.sites)}
            rows.append(row | _variant(one, trajectory, found, normed))
            step(one.name)
    return {"sandwich": SANDWICH if normed else None, "network": _network(stream, found), "variants": rows}


#: What `step` is told after each start of the probes; there are sites - 1.
PROBE = "probes"


def _network(stream: ResidualStream, found: Probes) -> dict[str, Any]:
    network, sites = found.network(), stream.sites
    energy = [z.square().sum(-1) for z in stream.clean]
    return {
        "dim": found.dim,
        "sites": [block.site for block in stream.blocks],
        "probes": found.first.shape[0],
        "sigma": _rounded(found.scales),
        "delta": _rounded(network.added),
        "largest_token_share": [round(float(one.max() / one.sum()), 4) for one in energy],
        "jacobian_energy": _rounded(network.jacobian_energy),
        "jacobian_energy_error": _rounded(np.array([standard_error(found.second[:, k, k + 1]) for k in range(sites)])),
        "amplification": _rounded(found.first[:, 1:, sites].mean(0)),
        "epsilon": _rounded(network.reinforcement),
        "budget": network.budget,
        "budget_error": found.spread(lambda one: one.budget),
        "endpoint_budget": network.arriving,
        "endpoint_budget_error": found.spread(lambda one: one.arriving),
        "spread": network.spread,
        "spread_error": found.spread(lambda one: one.spread),
        "assumptions": [asdict(one) for one in network_assumptions(found)],
        "checks": [asdict(one) for one in network_checks(found)],
    }


def _variant(one: Variant, trajectory: Trajectory, found: Probes, normed: bool) -> dict[str, Any]:
    assert one.config is not None, "checked by the caller"
    coefficients = found.coefficients[one.name]
    scale = found.dim * found.scales[-1] ** 2
    share = trajectory.joined**2 * coefficients / scale
    by_site = {name: _rounded(value) for name, value in vars(trajectory).items() if isinstance(value, np.ndarray) and value.ndim == 1}
    return {
        "config": repr(one.config),
        "gain": one.config.feedback.gain if one.config.feedback.enabled else 0.0,
        "output": {
            "measured": float(trajectory.deviation[-1] ** 2 / scale),
            "linear": float(trajectory.linear[-1] ** 2 / scale),
            "second_order": float(trajectory.second_order[-1] ** 2 / scale),
            "predicted": float(share.mean(0).sum()),
            "predicted_error": standard_error(share.sum(1)),
            "median_token": trajectory.token_deviation,
        },
        "correlation": {
            "largest": float(off_diagonal(trajectory.correlation).max()),
            "rms": float(np.sqrt(np.mean(off_diagonal(trajectory.correlation) ** 2))),
            "neighbours": neighbours(trajectory.correlation),
            "by_lag": [
                round(float(np.diagonal(trajectory.correlation, lag).mean()), 5)
                for lag in range(1, min(9, trajectory.correlation.shape[0]))
            ],
        },
        "departure": trajectory.departure,
        "by_site": by_site | {"coefficient": _rounded(coefficients.mean(0)), "share_of_output": _rounded(share.mean(0))},
        "assumptions": [asdict(each) for each in pass_assumptions(trajectory, found, normed)],
        "checks": [asdict(each) for each in judge(one.config.feedback, trajectory, found, coefficients, normed)],
    }


def _rounded(values: Array) -> list[float]:
    """Six significant digits, so that files stay readable."""
    return [float(f"{value:.6g}") for value in values]
