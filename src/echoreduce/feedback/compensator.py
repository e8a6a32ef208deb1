"""The compensator: what the error of one site adds to the contribution of the next.

    c_k = sum_j weight_j m_j,   m_j <- decay_j m_j + (1 - decay_j) u_k                                               (Eq. 10, 11)

State lives in the quantizer's own domain: cut into segments and groups, rotated if the quantizer rotates. One object serves one
direction of one pass; `reset` at the start of a pass frees nothing and clears nothing, the first site simply ignores what is there.

Storage: fp32 and bf16 as they are. The float8 types keep a power of two a group, 2**e >= bound / 256, so that neither a massive
activation (step over 448) nor a tiny gradient (step under 2**-9) leaves the range; scaling by it is exact. With the local residual
and single-step feedback the bound is that of the rounding, known without a look at the data; else it is the group's largest magnitude.
A non-finite residual is stored as zero: it never enters the next site.

Source: the paper, Section 5.1; docs/design.md, Section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from echoreduce.config import FeedbackConfig

STATE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}

#: Exponents kept in int8 for the float8 types; both 2**e and 2**-e are normal fp32 numbers.
EXPONENT_RANGE = (-126, 126)


@dataclass
class Average:
    """One stored moving average.

    Attributes:
        values: shape [*batch, groups, group_size], in the state's dtype.
        exponent: int8, shape [*batch, groups], float8 types only: stored value times 2**exponent is the average.
    """

    values: Tensor
    exponent: Tensor | None = None


@dataclass
class FeedbackState:
    """Moving averages of one direction; empty before the first site of a pass.

    Attributes:
        config: the compensator's setting.
        averages: as many as `config.averages`, or none at the start of a pass.
    """

    config: FeedbackConfig
    averages: list[Average] = field(default_factory=list)

    def reset(self) -> None:
        """Start a pass: the averages are zero."""
        self.averages = []


def correction(state: FeedbackState) -> Tensor | None:
    """c_k of Eq. 10, fp32, shape of the state's tensors; None at the first site of a pass, where it is zero."""
    total: Tensor | None = None
    for (weight, _), average in zip(state.config.weights, state.averages):
        value = load(average)
        if weight != 1.0:
            value = value * weight
        total = value if total is None else total + value
    return total


def update(state: FeedbackState, residual: Tensor, bound: Tensor) -> None:
    """Refresh the averages with u_k (Eq. 11).

    Args:
        state: changed in place.
        residual: u_k, fp32, shape [*batch, groups, group_size]; non-finite values count as zero.
        bound: largest error of the rounding that made it (`Grid.largest_error`), fp32, shape [*batch, groups].
    """
    residual = residual.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    bounded = state.config.residual == "local"
    fresh = []
    for index, (_, decay) in enumerate(state.config.weights):
        value = residual
        if decay != 0.0:
            value = residual * (1.0 - decay)
            if state.averages:
                value = load(state.averages[index]) * decay + value
        fresh.append(store(value, state.config, bound if bounded and decay == 0.0 else None))
    state.averages = fresh


def store(value: Tensor, config: FeedbackConfig, bound: Tensor | None = None) -> Average:
    """Bring an average to the state's dtype.

    Args:
        value: fp32, shape [*batch, groups, group_size], finite.
        bound: if given, |value| <= bound is known, and bound (shape [*batch, groups]) sets the float8 exponent.
    """
    dtype = STATE_DTYPES[config.state]
    if dtype in (torch.float32, torch.bfloat16):
        return Average(value.to(dtype))
    bound = value.abs().amax(-1) if bound is None else torch.where(torch.isfinite(bound), bound, 0.0)
    exponent = (ceil_log2(bound) - 8).clamp_(*EXPONENT_RANGE)
    scaled = value * power_of_two(-exponent).unsqueeze(-1)
    return Average(scaled.to(dtype), exponent.to(torch.int8))


def load(average: Average) -> Tensor:
    """The average as fp32."""
    value = average.values.float()
    if average.exponent is not None:
        value = value.mul_(power_of_two(average.exponent.to(torch.int32)).unsqueeze(-1))
    return value


def ceil_log2(x: Tensor) -> Tensor:
    """Smallest integer e with 2**e >= x, for fp32 x >= 0 (int32; -127 for zero and subnormals), from the bits alone."""
    bits = x.view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def power_of_two(exponent: Tensor) -> Tensor:
    """2.0**exponent as fp32 for int32 exponents in -126 .. 127, from the bits alone."""
    return ((exponent + 127) << 23).view(torch.float32)
