"""Does each theorem hold on a measured pass? Left and right side of every bound, and for a bound that does not, the assumption that fails.

A bound that holds says nothing of its assumptions, so those are judged by themselves (`assumptions`), each with its figure.

Leaves out: Proposition 1, whose stopping level kappa_p leaves no realistic error (docs/theory.md, Section 7, item 6): Corollary 2 with the
measured remainders is judged instead; and the backward pass. Source: the paper, Section 6 and Appendix A; docs/theory.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from echoreduce.config import FeedbackConfig
from echoreduce.errors import ConfigError
from echoreduce.integrations.estimate import Probes, Trajectory
from echoreduce.theory import bounds, measured
from echoreduce.theory.source import source_bound, source_maximum, theorem_1
from echoreduce.theory.weights import Array, effective_gain

#: Probability with which Theorem 2 (ii) may fail where it is judged.
P_FAIL = 0.05

#: Relative slack for the rounding of the measurement itself (fp32 sums of norms).
SLACK = 1e-5

#: Departure from Eq. 13 above which the feedback counts as inexact.
INEXACT = 1e-3


@dataclass(frozen=True)
class Check:
    """One bound on one pass.

    Attributes:
        name: the bound, with its equation.
        left: measured.
        right: the bound; None where an assumption fails that its formula needs.
        verdict: `holds`, or `violated: ASSUMPTION, FIGURE`.
    """

    name: str
    left: float
    right: float | None
    verdict: str

    @property
    def holds(self) -> bool:
        """Whether the bound holds."""
        return self.verdict == "holds"


@dataclass(frozen=True)
class Assumption:
    """A condition of the theory: whether it holds on this pass, and by which figure."""

    name: str
    holds: bool
    figure: str


def network_assumptions(probes: Probes) -> list[Assumption]:
    """R1, R2 and Assumption 1: what depends on the network alone."""
    network = probes.network()
    added, epsilon = network.added, network.reinforcement
    falling = int((added <= 0).sum())
    r1 = f"Delta_k from {added.min():.4g} (site {int(added.argmin())}) to {added.max():.4g}; {falling} of {added.size} take energy away"
    spread = f"sum form c = {network.spread:.4g} +- {probes.spread(lambda one: one.spread):.1g} (Lemma S10)"
    r2 = f"C_0 = {network.constants().c0:.4g}; {spread}" if falling == 0 else f"no C_0 where Delta_k <= 0; {spread}"
    largest = f"largest epsilon_k {epsilon.max():.4g} (site {int(epsilon.argmax())})"
    budget = f"Lambda = {network.budget:.4g} +- {probes.spread(lambda one: one.budget):.1g}, {largest}"
    arriving = f"Lambda_N = {network.arriving:.4g} +- {probes.spread(lambda one: one.arriving):.1g} (Lemma S11)"
    found = [Assumption("R1", falling == 0, r1), Assumption("R2", falling == 0, r2)]
    return [*found, Assumption("Assumption 1 (Eq. 24)", True, f"{budget}; {arriving}")]


def network_checks(probes: Probes) -> list[Check]:
    """Lemma 6, whose left side the probes see: sum_t ||Phi_{N,t+2} J_{t+1}||_F**2 / d."""
    network, last = probes.network(), probes.scales.size - 1
    left = float(probes.second[:, 1:last, last].mean(0).sum())
    flat = network.spread * (probes.scales[-1] / probes.scales[1]) ** 2
    return [
        _check(f"Lemma 6 without R1, R2, {name}", left, measured.grown(budget) * flat, f"Assumption 1, {name} {budget:.3g}")
        for name, budget in (("Lambda", network.budget), ("Lambda_N", network.arriving))
    ]


def pass_assumptions(trajectory: Trajectory, probes: Probes, normed: bool) -> list[Assumption]:
    """What depends on the errors: noise model, exact feedback, curvature, and how errors join the stream."""
    away = off_diagonal(trajectory.correlation)
    noise = (
        f"mean square of delta_k over tokens: largest over mean {np.median(trajectory.unevenness):.3g} (median site), "
        f"{trajectory.unevenness.max():.3g} (worst); isotropic errors have 1"
    )
    apart = (
        f"largest |correlation| {away.max():.3g}, rms {np.sqrt(np.mean(away**2)):.2g}, neighbours {neighbours(trajectory.correlation):.2g}"
    )
    found = [
        Assumption("noise model: isotropic (Eq. 22)", bool(trajectory.unevenness.max() < 1.5), noise),
        Assumption("noise model: uncorrelated sites (Eq. 22)", bool(away.max() < 0.1), apart),
        Assumption(
            "exact feedback (Eq. 13)", trajectory.departure <= INEXACT, f"||S_t - sum phi delta|| is {trajectory.departure:.2g} of ||S_t||"
        ),
        Assumption("R3", True, f"h_bar at least {curvature(trajectory, probes):.4g} on this pass"),
    ]
    if normed:
        ratio = trajectory.joined_partial.max() / trajectory.partial.max()
        figure = f"a norm follows the sum; max ||S_t|| is {ratio:.3g} times as large in the stream as in the messages"
        found.append(Assumption("errors join the stream as they are (Eq. 14)", False, figure))
    return found


def off_diagonal(correlation: Array) -> Array:
    """|correlation| of all pairs of different sites, as a vector; zero if there is one site."""
    upper = np.abs(correlation[np.triu_indices_from(correlation, 1)])
    return upper if upper.size else np.zeros(1)


def neighbours(correlation: Array) -> float:
    """Mean correlation of consecutive sites."""
    return float(np.diagonal(correlation, 1).mean()) if correlation.shape[0] > 1 else 0.0


def curvature(trajectory: Trajectory, probes: Probes) -> float:
    """The h_bar that R3 needs at least: max_k 2 ||r_k|| sigma_k**2 sqrt(d) / ||E_k||**2 (Eq. 16)."""
    size = trajectory.deviation[:-1]
    there = size > 0
    needed = 2.0 * trajectory.remainders[there] * probes.scales[:-1][there] ** 2 * np.sqrt(probes.dim) / size[there] ** 2
    return float(needed.max(initial=0.0))


def judge(feedback: FeedbackConfig, trajectory: Trajectory, probes: Probes, coefficients: Array, normed: bool) -> list[Check]:
    """Every bound on one pass.

    Args:
        feedback: of the configuration that ran.
        coefficients: ||K_s||_F**2 / d for it, one row a probe, [probes, N].
        normed: a norm follows the sums, so the bounds on the output take what joins the stream, and Eq. 13 does not describe it.
    """
    return source_checks(feedback, trajectory) + output_checks(feedback, trajectory, probes, coefficients, normed)


def source_checks(feedback: FeedbackConfig, trajectory: Trajectory) -> list[Check]:
    """Theorem 1, Eq. 21 and the variance form: the partial sums in the messages."""
    q, sites = float(trajectory.injected.max()), trajectory.injected.size
    largest, inexact = float(trajectory.partial.max()), f"exact feedback (Eq. 13), departure {trajectory.departure:.2g}"
    full = effective_gain(feedback) == 1.0
    worst = theorem_1(feedback, q) if full else source_bound(feedback, q, sites)
    away = f"uncorrelated sites (Eq. 22), rms correlation {np.sqrt(np.mean(off_diagonal(trajectory.correlation) ** 2)):.2g}"
    uneven = inexact if trajectory.departure > INEXACT else away
    last = float(trajectory.partial[-1] ** 2)
    return [
        _check("Theorem 1 (Eq. 19): max ||S_t||" if full else "Eq. 21: max ||S_t||", largest, worst, inexact),
        _check("Eq. 21 sharp, q_s by site: max ||S_t||", largest, source_maximum(feedback, trajectory.injected), inexact),
        _check("Section 6.3, q_s by site: ||S_N-1||^2", last, measured.source_energy(feedback, trajectory.injected), uneven),
    ]


def output_checks(feedback: FeedbackConfig, trajectory: Trajectory, probes: Probes, coefficients: Array, normed: bool) -> list[Check]:
    """Lemma 4, Theorem 2, Corollaries 1 and 2, Remark 2: the deviation at the output, relative to d sigma_N**2 but for Corollary 2."""
    network, sigma_n = probes.network(), float(probes.scales[-1])
    scale = probes.dim * sigma_n**2
    linear = float(trajectory.linear[-1] ** 2 / scale)
    q = float(trajectory.joined.max())
    gain = effective_gain(feedback)
    noise = f"noise model (Eq. 22), unevenness over tokens {np.median(trajectory.unevenness):.3g} (median site)"
    if normed:
        noise = "errors join the stream behind a norm (Eq. 14)"
    predicted = float(np.sum(trajectory.joined**2 * coefficients.mean(0)) / scale)
    checks = [_check("Lemma 4 (Eq. 20), q_s by site: ||E^lin||^2", linear, predicted, noise)]
    paper = "Theorem 2 (i)" if gain == 1.0 else "Remark 2" if gain == 0.0 else "Corollary 1"
    checks.append(_paper_check(paper, feedback, probes, linear, q, noise))
    for name, budget in (("Lambda", network.budget), ("Lambda_N", network.arriving)):
        checks.append(_check(f"{paper} without R1, R2, {name}", linear, measured.mean(feedback, network, q, budget), noise))
        if gain == 1.0:
            right = measured.tail(feedback, network, q, budget, P_FAIL)
            checks.append(_check(f"Theorem 2 (ii), p = {P_FAIL}, without R1, R2, {name}", linear, right, noise))
    by_site = measured.mean_by_site(feedback, network, trajectory.joined, network.arriving)
    checks.append(_check(f"{paper} without R1, R2, Lambda_N, q_s by site", linear, by_site, noise))
    remainder = measured.second_order(network, trajectory.remainders)
    third = f"Assumption 1 for second-order responses (Eq. 23, third collection), Lambda {network.budget:.3g} of the first two"
    checks.append(_check("Corollary 2 (Eq. 25): ||E - E^lin||", float(trajectory.second_order[-1]), remainder, third))
    return checks


def _paper_check(name: str, feedback: FeedbackConfig, probes: Probes, linear: float, q: float, noise: str) -> Check:
    """The paper's own form, which needs R1 and R2 (Remark 2: neither)."""
    network = probes.network()
    gain = effective_gain(feedback)
    if gain == 0.0:
        right = measured.grown(network.budget) * network.relative_step(q) ** 2 * np.sum((probes.scales[1] / probes.scales[1:]) ** 2)
        return _check(name, linear, float(right), noise)
    try:
        constants = network.constants()
    except ConfigError:
        worst = int(network.added.argmin())
        return Check(name, linear, None, f"violated: R1, Delta_{worst} = {network.added[worst]:.4g}")
    sigma_n = float(probes.scales[-1])
    bound = (
        bounds.theorem_2_mean(feedback, constants, q, sigma_n) if gain == 1.0 else bounds.corollary_1(feedback, constants, q, probes.scales)
    )
    return _check(name, linear, bound, noise)


def _check(name: str, left: float, right: float, assumption: str) -> Check:
    right = min(right, sys.float_info.max)  # e**Lambda may overflow; JSON has no infinity
    return Check(name, left, right, "holds" if left <= right * (1.0 + SLACK) else f"violated: {assumption}")
