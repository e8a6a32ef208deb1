"""What the two residuals do to the step: how the range that a site must quantize, and with it q, depends on the compensator.

Theorem 1 takes q as given. But a site quantizes x' = x + c, and c is made of earlier residuals:

    local   |u| <= half a step, so x' is wider than x by at most one earlier step: p* = W / (L - eta)
    group   u_i = x'_i - y/P = (x'_i - mean_j x'_j) - delta/P: the deviations of the ranks come back,
            x'_i - mean = d_i + eta sum_r w_r (x'_i - mean) of earlier sites, whose worst case is D / (1 - eta)

`compact` codes of up to 4 bits clip: |u| is bounded by one step there (`QuantConfig.reach`) and p* = W / (L - 2 eta).

So with the group residual q grows with the gain and has no bound independent of the number of sites at gain one.

Units: widths (max - min over a quantization group) and steps in the unit of x; L = steps that the grid lays over the width.
Leaves out: float8 state (adds 2**-4 of half a step), the rounding of the output to 16 bits, rotation (take the widths after it).
Source: docs/design.md, Section 5; docs/theory.md, Lemmas S1 to S5. Not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echoreduce.config import FeedbackConfig, QuantConfig
from echoreduce.errors import ConfigError, ShapeError
from echoreduce.theory.stream import Compensator
from echoreduce.theory.weights import Array, effective_gain, weight


@dataclass(frozen=True)
class Widths:
    """Widths (max - min over a group, the largest over sites and groups) of what the ranks contribute, before compensation.

    Attributes:
        world_size: P.
        contribution: W, of one rank's x_i.
        total: W_sum, of the exact sum over ranks; the mean over ranks has W_sum / P.
        deviation: D, of x_i - mean_j x_j.
    """

    world_size: int
    contribution: float
    total: float
    deviation: float

    def __post_init__(self) -> None:
        if self.world_size < 2 or min(self.contribution, self.total, self.deviation) < 0:
            raise ConfigError(f"world_size must be at least 2 and widths not negative, got {self}")


@dataclass(frozen=True)
class Steps:
    """Bounds on the steps of each site.

    Attributes:
        push: p_k, step at which contributions are rounded, shape [N] (or a scalar array at the fixed point).
        gather: g_k, step at which the sum is rounded; zero for one-shot.
        error: bound on |delta_k| per element: ((P - 1) p + g) / 2 for two-shot, P p / 2 for one-shot.
    """

    push: Array
    gather: Array
    error: Array


def grid_steps(quant: QuantConfig) -> float:
    """L: steps over the width of a group, 2**bits - 1; symmetric grids lay 2**bits - 2 over twice the largest magnitude (their width)."""
    return float(2**quant.bits - (2 if quant.policy == "symmetric" else 1))


def step_bounds(
    widths: Widths, feedback: FeedbackConfig, steps: float, sites: int, *, one_shot: bool = False, rounding: float = 1.0
) -> Steps:
    """The recursion of the steps, site by site (Lemmas S3 and S4).

    Args:
        widths: of the contributions; the bound is for any contributions within them.
        feedback: its residual, `group`, `local` or `none`, says which recursion.
        steps: L, see `grid_steps`.
        sites: N.
        one_shot: one-shot instead of two-shot.
        rounding: factor by which a stored scale may exceed width / L (1 + 2**-7 for bf16, 1 + 2**-10 for fp16, groups that straddle zero).
    Returns:
        Steps with arrays of shape [N].
    """
    ranks = widths.world_size
    pushers = ranks if one_shot else ranks - 1
    grid = rounding / steps
    group = feedback.residual == "group" and feedback.enabled
    states = {name: Compensator(feedback, ()) for name in ("push", "error", "deviation")}
    push, gather, width_of_error = np.zeros(sites), np.zeros(sites), np.zeros(sites)
    for k in range(sites):
        fed_push, fed_error, fed_deviation = (states[name].correction() for name in ("push", "error", "deviation"))
        deviation = widths.deviation + fed_deviation
        if group:
            push[k] = grid * min(
                widths.total / ranks + fed_error / ranks + deviation, widths.contribution + fed_error / ranks + fed_deviation
            )
        else:
            push[k] = grid * (widths.contribution + fed_push)
        if not one_shot:
            gather[k] = grid * (widths.total + fed_error + pushers * push[k])
        width_of_error[k] = pushers * push[k] + gather[k]
        states["push"].update(push[k])
        states["error"].update(width_of_error[k])
        states["deviation"].update(deviation)
    return Steps(push, gather, width_of_error / 2.0)


def step_limit(widths: Widths, feedback: FeedbackConfig, steps: float, *, one_shot: bool = False, rounding: float = 1.0) -> Steps:
    """Fixed point of `step_bounds`: what the steps stay below for any number of sites; infinite where no such bound exists.

    local  p* = W / (L - eta)          group  L p* = min(W_sum / P + D / (1 - eta), W + eta D / (1 - eta)) + eta E* / P
    both   L g* = W_sum + eta E* + (P - 1) p*,   E* = (P - 1) p* + g* = 2 max |delta|               (L divided by `rounding`)

    Args: as `step_bounds`.
    """
    gain, ranks = effective_gain(feedback), widths.world_size
    grid = steps / rounding
    pushers = ranks if one_shot else ranks - 1
    group = feedback.residual == "group" and feedback.enabled
    if group and gain == 1.0 and widths.deviation > 0:
        infinite = np.asarray(np.inf)
        return Steps(infinite, np.asarray(0.0) if one_shot else infinite, infinite)
    fed = 0.0 if not group or widths.deviation == 0 else gain * widths.deviation / (1.0 - gain)
    source = min(widths.total / ranks + widths.deviation, widths.contribution) + fed if group else widths.contribution
    shared = gain / ranks if group else 0.0  # weight of E* in the push's equation
    own = 0.0 if group else gain
    matrix = np.array([[grid - own - shared * pushers, -shared], [-(gain + 1.0) * pushers, grid - gain]])
    right = np.array([source, widths.total])
    if one_shot:
        push, gather = source / matrix[0, 0], 0.0
    else:
        push, gather = np.linalg.solve(matrix, right)
    stable = np.linalg.det(matrix) > 0 and matrix[0, 0] > 0 and matrix[1, 1] > 0
    if not stable:
        push, gather = np.inf, 0.0 if one_shot else np.inf
    return Steps(np.asarray(push), np.asarray(gather), np.asarray((pushers * push + gather) / 2.0))


def fed_back_deviations(deviations: Array, feedback: FeedbackConfig) -> Array:
    """Group residual: x'_i - mean_j x'_j of every site from x_i - mean_j x_j, exactly and whatever the quantizer does (Lemma S4).

    Args:
        deviations: x_i - mean_j x_j, shape [N, P, *shape], summing to zero over the ranks.
    Returns:
        x'_i - mean_j x'_j, shape as `deviations`.
    Raises:
        ShapeError: the deviations of a site do not sum to zero.
    """
    if deviations.ndim < 2 or not np.allclose(deviations.sum(1), 0.0, atol=1e-9 * (1.0 + np.abs(deviations).max(initial=0.0))):
        raise ShapeError(f"deviations have shape [N, P, ...] and sum to zero over the ranks, got shape {deviations.shape}")
    compensator = Compensator(feedback, deviations.shape[1:])
    result = np.empty_like(deviations)
    for k, deviation in enumerate(deviations):
        result[k] = deviation + compensator.correction()
        compensator.update(result[k])
    return result


def deviation_response(feedback: FeedbackConfig, sites: int) -> Array:
    """g_m: how much of a rank's deviation is in its x' m sites later; g_0 = 1, g_m = eta sum_{r < m} w_r g_{m-1-r}. Shape [N].

    Its sum is 1 / (1 - eta); at gain one it tends to 1 / (1 + mu_w), so that deviations never leave.
    """
    gain = effective_gain(feedback)
    w = weight(feedback, np.arange(sites))
    response = np.zeros(sites)
    response[:1] = 1.0
    for m in range(1, sites):
        response[m] = gain * np.dot(w[:m], response[m - 1 :: -1])
    return response


def range_growth(feedback: FeedbackConfig, world_size: int, sites: int) -> Array:
    """Root mean square of x'_i over that of x_i at each site, group residual, contributions independent between ranks and sites.

    sqrt(1/P + (1 - 1/P) sum_{m <= k} g_m**2): the mean over ranks is not fed back, the deviations are. One at every site for the
    local residual (to within a step).

    Args:
        world_size: P.
        sites: N.
    Returns:
        One factor a site, shape [N].
    """
    if feedback.residual != "group":
        return np.ones(sites)
    power = np.cumsum(deviation_response(feedback, sites) ** 2)
    return np.asarray(np.sqrt(1.0 / world_size + (1.0 - 1.0 / world_size) * power))
