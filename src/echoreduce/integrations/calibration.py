"""Finding a configuration for a model: what a bit is worth at each site, and which sites get the bits that a budget allows.

    1. sensitivity   KL_k(b): site k sends b bits and returns its error at the next site, every other site is exact
    2. assignment    bits b_k with the smallest sum_k KL_k(b_k) whose mean on the wire keeps to the budget, an exact knapsack
    3. verification  the assigned bits for each group size and rotation, beside edges at 8 bits, on windows that step 1 has not seen
    4. choice        the smallest KL of step 3 under the budget

KL is the mean over tokens of KL(exact || variant) between next-token distributions, in nats. Why the sum predicts the whole: KL is
quadratic in a small deviation, and errors of different sites are nearly uncorrelated, so their shares add (Lemma 4 of the paper, where
||K_s||**2 / d is the share of a site). Measured against it was "all sites at 4 bits, one of them changed", whose differences drown in
what the change does to all later roundings: over 21 assignments on SmolLM2 the two predict KL with correlation 0.997 and 0.41, and with
rms errors of 5 % and 157 % (experiments/sensitivity.py, docs/results/sensitivity_smollm2_p4.json).

The session's single-step state makes step 1 possible: `ReturningBackend` sums exactly and still returns what the site before it owes.

Leaves out: searching gains, decays, policies (docs/accuracy.md), timing. Source: docs/design.md, Section 5; the paper, Appendix A.3.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echoreduce import reference
from echoreduce.config import NO_FEEDBACK, EchoConfig, QuantConfig, Rotation, preset
from echoreduce.errors import ConfigError, EchoReduceWarning
from echoreduce.feedback import compensator
from echoreduce.feedback.compensator import FeedbackState
from echoreduce.integrations.evaluation import bits_per_value
from echoreduce.integrations.transformers import attach, row_parallel_linears
from echoreduce.integrations.transformers_tp import norms_sums
from echoreduce.partition import partition
from echoreduce.recording import Recording
from echoreduce.sites import edges, uniform
from echoreduce.virtual import VirtualBackend

#: Bits that a site may be given.
BITS = (4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
ROTATIONS: tuple[Rotation, ...] = ("none", "hadamard")

#: What `recommend` calls its first step: sites * len(BITS) * windows forwards.
SENSITIVITY = "bits of each site"

Table = NDArray[np.float64]
Step = Callable[[], None]


class ReturningBackend(VirtualBackend):
    """Virtual ranks whose 16-bit sites still return what earlier sites owe: exact sum plus corrections, residual zero."""

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
        owed = compensator.correction(state) if state is not None and quant.bits == 16 else None
        result = super().all_reduce(x, quant, algorithm, state, out, recording=recording, rescale=rescale)
        if state is None or owed is None:
            return result
        cut = partition(x[0].numel(), self.world_size, quant.group_size)
        returned = reference.leave(reference.in_rank_order(owed), quant, cut, x.shape[1:], torch.float32)
        compensator.update(state, torch.zeros_like(owed), torch.zeros_like(owed[..., 0]))
        return result.copy_(reference.in_rank_order(x.float()) + returned)


@dataclass(frozen=True)
class Subject:
    """What is calibrated: a model split over virtual ranks.

    Attributes:
        model: Hugging Face causal language model with a tensor-parallel plan.
        world_size: P.
    """

    model: Any
    world_size: int

    @property
    def sites(self) -> list[str]:
        """Names of the sites in the order of a pass."""
        return list(row_parallel_linears(self.model))

    def numel(self, length: int) -> int:
        """Values of one message for a window of `length` tokens."""
        return int(length * self.model.config.get_text_config().hidden_size)

    def logits(self, window: Tensor, config: EchoConfig) -> Tensor:
        """Logits of one window, model's dtype, [length, vocabulary]; sites at 16 bits return what earlier ones owe."""
        device = next(self.model.parameters()).device
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EchoReduceWarning)  # that feedback harms some models is measured here, not assumed
            with attach(self.model, config, backend=ReturningBackend(self.world_size)), torch.inference_mode():
                logits: Tensor = self.model(input_ids=window[None, :-1].to(device), use_cache=False).logits[0]
        return logits


@dataclass(frozen=True)
class Text:
    """Windows of a text with the exact model's logits on them.

    Attributes:
        tokens: int64 [windows, length + 1].
        exact: logits of the exact sum over P ranks, one [length, vocabulary] a window.
    """

    tokens: Tensor
    exact: list[Tensor]

    @classmethod
    def of(cls, subject: Subject, tokens: Tensor) -> Text:
        """Run the exact model over the windows."""
        return cls(tokens, [subject.logits(window, preset("exact")) for window in tokens])

    def judge(self, subject: Subject, config: EchoConfig, step: Step | None = None) -> tuple[float, float]:
        """(KL(exact || config), perplexity over the exact model's), means over all tokens.

        The ratio is exp(mean over tokens of log p_exact - log p_config) at the tokens that came. `step` is called after each window.
        """
        total, lost, count = 0.0, 0.0, 0
        for window, exact in zip(self.tokens, self.exact):
            was, now = (values.float().log_softmax(-1) for values in (exact, subject.logits(window, config)))
            total += (was.exp() * (was - now)).sum().item()
            came = window[1:, None].to(was.device)
            lost += (was.gather(1, came) - now.gather(1, came)).sum().item()
            count += was.shape[0]
            if step is not None:
                step()
        return total / count, math.exp(lost / count)


def sensitivity(subject: Subject, text: Text, base: EchoConfig, bits: Sequence[int] = BITS, step: Step | None = None) -> Table:
    """KL_k(b): site k at b bits with its error returned at the next site, all others exact.

    Args:
        base: quantizer, feedback and algorithm; its site policy is not used.
        step: called after each of the sites * len(bits) * windows forwards.
    Returns:
        float64 [sites, len(bits)], nats a token.
    """
    count = len(subject.sites)
    table = np.zeros((count, len(bits)))
    for site in range(count):
        for column, width in enumerate(bits):
            policy = tuple(width if other == site else 16 for other in range(count))
            table[site, column] = text.judge(subject, replace(base, sites=policy), step)[0]
    return table


#: Costs of the knapsack are whole multiples of 1 / COST_UNIT bits a value: qparams of 16 and 32 bits a group of up to 256 are.
COST_UNIT = 64


def assign(table: Table, budget: int, bits: Sequence[int] = BITS, costs: Sequence[int] | None = None) -> tuple[int, ...]:
    """Bits of each site with the smallest sum of KL_k(b_k) and sum_k cost(b_k) <= budget: a knapsack, solved exactly.

    Args:
        table: KL_k(b), shape [sites, len(bits)].
        budget: sum of the costs over sites.
        costs: of each of `bits` at a site, whole numbers; None: the bits themselves.
    Raises:
        ConfigError: not even the fewest bits at every site fit.
    """
    sites = table.shape[0]
    prices = list(bits if costs is None else costs)
    spare = budget - min(prices) * sites
    if spare < 0:
        raise ConfigError(f"{budget} bits over {sites} sites are fewer than {min(prices)} a site")
    extra = [price - min(prices) for price in prices]
    best = np.zeros(spare + 1)
    choice = np.zeros((sites, spare + 1), dtype=int)
    for site in range(sites):
        options = np.full((len(bits), spare + 1), np.inf)
        for column, more in enumerate(extra):
            options[column, more:] = best[: max(0, spare + 1 - more)] + table[site, column]
        choice[site], best = options.argmin(0), options.min(0)
    assigned = []
    for site in reversed(range(sites)):
        column = int(choice[site, spare])
        assigned.append(bits[column])
        spare -= extra[column]
    return tuple(reversed(assigned))


@dataclass(frozen=True)
class Candidate:
    """A configuration and what it did on the held-out windows.

    Attributes:
        name: for tables.
        config: the configuration.
        bits_per_value: on the wire, qparams included.
        fits: whether that keeps to the budget.
        divergence: mean KL(exact || candidate), nats a token; NaN before it is measured.
        perplexity_ratio: perplexity over the exact model's.
    """

    name: str
    config: EchoConfig
    bits_per_value: float
    fits: bool
    divergence: float = math.nan
    perplexity_ratio: float = math.nan


def candidates(table: Table, base: EchoConfig, budget: float, world_size: int, numel: int, bits: Sequence[int] = BITS) -> list[Candidate]:
    """`default` as it is; and for each group size and rotation that the budget allows: assigned bits, and edges at 8 bits where they fit.

    Args:
        base: policy, feedback and algorithm of all but `default`.
        budget: bits per value on the wire, qparams included.
        numel: values of one message.
    Raises:
        ConfigError: the budget is below what the fewest bits need at every group size.
    """
    sites = table.shape[0]
    known = preset("default")
    found = [Candidate("default", known, bits_per_value(known, world_size, numel, sites), False)]
    cheapest = math.inf
    for group_size in GROUP_SIZES:
        for rotation in ROTATIONS:
            flat = replace(base, quant=replace(base.quant, group_size=group_size, rotation=rotation, bits=min(bits)), sites=uniform())
            price = bits_per_value(flat, world_size, numel, sites)
            cheapest = min(cheapest, price)
            if price > budget + 1e-9:
                continue
            prices = [bits_per_value(replace(flat, sites=uniform(width)), world_size, numel, sites) - price for width in bits]
            costs = [round(extra * COST_UNIT) for extra in prices]
            spare = min(math.floor((budget - price) * sites * COST_UNIT + 1e-6), max(costs) * sites)
            policy = assign(table, spare, bits, costs)
            named = f"g = {group_size}" + (", Hadamard" if rotation == "hadamard" else "")
            for name, sites_policy in ((f"assigned, {named}", policy), (f"edges 2 + 2, {named}", edges(2, 2, 8))):
                config = replace(flat, sites=sites_policy)
                if all(config != other.config for other in found):
                    found.append(Candidate(name, config, bits_per_value(config, world_size, numel, sites), False))
    if len(found) == 1:
        raise ConfigError(f"budget of {budget} bits a value is below the least that the wire takes, {cheapest:.2f}")
    marked = [replace(one, fits=one.bits_per_value <= budget + 1e-9) for one in found]
    return [one for one in marked if one.fits or one.name == "default"]


@dataclass(frozen=True)
class Recommendation:
    """What a calibration found.

    Attributes:
        chosen: the candidate with the smallest divergence under the budget.
        candidates: all that were verified.
        table: KL_k(b), float64 [sites, len(bits)].
        sites: names of the sites.
        bits: columns of the table.
    """

    chosen: Candidate
    candidates: list[Candidate]
    table: Table
    sites: list[str]
    bits: tuple[int, ...]

    def evidence(self) -> dict[str, Any]:
        """For the configuration file: candidates, and KL of each site by bits."""
        calibrated = [one.config for one in self.candidates if one.name != "default"]  # all share the feedback of the calibration
        returned = "its error returned at the next site" if calibrated[0].feedback.enabled else "no feedback"
        rows = [{key: value for key, value in asdict(one).items() if key != "config"} for one in self.candidates]
        return {
            "chosen": self.chosen.name,
            "bits_per_value": self.chosen.bits_per_value,
            "candidates": rows,
            "method": f"KL(exact || site k at b bits, {returned}, all others exact), nats a token",
            "site_divergence": {
                name: dict(zip(map(str, self.bits), map(float, row), strict=True)) for name, row in zip(self.sites, self.table, strict=True)
            },
        }


def recommend(subject: Subject, calibration: Tensor, held_out: Tensor, budget: float, advance: Callable[[str], None]) -> Recommendation:
    """Calibrate, assign, verify, choose. On a model that norms its sums only `default` has feedback, which does harm there.

    Args:
        calibration: windows for the sensitivities, int64 [windows, length + 1].
        held_out: windows for the verification, int64 [windows, length + 1].
        budget: bits per value on the wire, qparams included.
        advance: told after each forward what it was for: `SENSITIVITY` or the name of a candidate.
    Raises:
        ConfigError: nothing fits the budget.
    """
    base = preset("default")
    if norms_sums(subject.model):
        base = replace(base, feedback=NO_FEEDBACK)
    numel = subject.numel(calibration.shape[1] - 1)
    candidates(np.zeros((len(subject.sites), len(BITS))), base, budget, subject.world_size, numel)  # refuses a budget before the work
    table = sensitivity(subject, Text.of(subject, calibration), base, BITS, partial(advance, SENSITIVITY))
    text = Text.of(subject, held_out)
    verified = []
    for one in candidates(table, base, budget, subject.world_size, numel):
        divergence, ratio = text.judge(subject, one.config, partial(advance, one.name))
        verified.append(replace(one, divergence=divergence, perplexity_ratio=ratio))
    chosen = min((one for one in verified if one.fits), key=lambda one: one.divergence)
    return Recommendation(chosen, verified, table, subject.sites, BITS)
