"""Squared error of the rules for groups near one-sidedness, on the values that a real model sends.

Why: the paper lets its two zero-point cases "blend smoothly" and does not say how; the error on recorded activations and the perplexity
(set `blend`) decide. Every contribution and every exact sum of some windows is rounded by every rule of `accuracy_variants.BLENDS`, and
the relative error is kept by site, for all groups and for those near one-sidedness apart.

Leaves out: feedback; the rules act on the exact model's values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accuracy_texts import Windows
from accuracy_variants import BLENDS
from echoreduce.config import QuantConfig, preset
from echoreduce.feedback.compensator import FeedbackState
from echoreduce.integrations.transformers import attach
from echoreduce.recording import Recording
from echoreduce.virtual import VirtualBackend

#: A group is near one-sidedness if its short side is less than this part of its range, or zero lies less than one range outside it.
NEAR = 2 / 15


class RoundingBackend(VirtualBackend):
    """Exact sums; what each rule would do to contributions and sum is added up by site.

    Attributes:
        sums: by site, fp64 [rules + 1, 4]: squared error of (all groups, groups near one-sidedness) of the contributions and of the sum;
            the last row holds the squared values instead.
        shares: by site, (one-sided, near one-sidedness) parts of the contributions' groups, summed over passes.
        calls: all-reduces so far.
    """

    def __init__(self, world_size: int, sites: int) -> None:
        super().__init__(world_size)
        self.sums: list[Tensor] = [torch.zeros(len(BLENDS) + 1, 4, dtype=torch.float64) for _ in range(sites)]
        self.shares: list[Tensor] = [torch.zeros(2, dtype=torch.float64) for _ in range(sites)]
        self.calls = 0

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
        """As `VirtualBackend.all_reduce` at 16 bits."""
        total = super().all_reduce(x, quant, algorithm, state, out, recording=recording, rescale=rescale)
        site = self.calls % len(self.sums)
        self.calls += 1
        for column, values in ((0, x.float()), (2, total.float())):
            flat = values.flatten(1) if column == 0 else values.reshape(1, -1)
            flat = flat[:, : flat.shape[1] // 128 * 128]
            near, one_sided = near_one_sided(flat.unflatten(-1, (-1, 128)))
            if column == 0:
                self.shares[site] += torch.stack((one_sided.double().mean(), near.double().mean())).cpu()
            for row, form in enumerate(BLENDS.values()):
                self._add(site, row, column, form.encode_decode(flat) - flat, near)
            self._add(site, len(BLENDS), column, flat, near)
        return total

    def _add(self, site: int, row: int, column: int, values: Tensor, near: Tensor) -> None:
        groups = values.unflatten(-1, (-1, 128)).square().sum(-1).double()
        self.sums[site][row, column] += groups.sum().cpu()
        self.sums[site][row, column + 1] += groups[near].sum().cpu()


def near_one_sided(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Which groups [*batch, g] are near one-sidedness, and which lie on one side of zero."""
    low, high = groups.amin(-1), groups.amax(-1)
    inside = torch.minimum(-low, high) / (high - low).clamp_min(1e-30)
    return (inside > -1.0) & (inside < NEAR), (low > 0) | (high < 0)


def rounding_errors(model: Any, windows: Windows, world_size: int, sites: int, batch: int) -> list[dict[str, Any]]:
    """Relative rms error by site and rule over all windows.

    Returns:
        One record a site and one for all sites ("all"): shares of one-sided groups and of those near it, and for each rule the relative
        rms error of contributions and sums, of all groups and of those near one-sidedness.
    """
    backend = RoundingBackend(world_size, sites)
    device = next(model.parameters()).device
    with attach(model, preset("exact"), backend=backend), torch.inference_mode():
        for tokens, _ in windows.batches(batch, device):
            model(input_ids=tokens[:, :-1], use_cache=False)
    passes = backend.calls / sites
    records = [record(site, backend.sums[site], backend.shares[site] / passes) for site in range(sites)]
    relative = [sums / sums[-1].clamp_min(1e-300) for sums in backend.sums]  # every site counts alike
    mean = sum(relative, torch.zeros_like(relative[0])) / sites
    return [record("all", mean, sum(backend.shares, torch.zeros(2)) / passes / sites), *records]


def record(site: int | str, sums: Tensor, shares: Tensor) -> dict[str, Any]:
    """Figures of a site as data."""
    errors = (sums[:-1] / sums[-1].clamp_min(1e-300)).sqrt()
    columns = ("push", "push near", "sum", "sum near")
    rules = {name: dict(zip(columns, errors[row].tolist())) for row, name in enumerate(BLENDS)}
    return {"site": site, "one_sided": shares[0].item(), "near": shares[1].item(), "errors": rules}
