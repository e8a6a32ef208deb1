"""Wire formats that the library does not have, emulated: what a receiver would read, and the bits that it would take.

Why: a format is judged by a model's perplexity long before anybody packs its bits. A format here is a frozen dataclass with
`encode_decode` (values -> what is read back) and `bits_per_value`; `emulation` runs the compensated all-reduce over any of them.

The formats of others are written from their descriptions, not from their code: "like" in a name means this. Leaves out: bytes, speed,
non-finite values. Source: QuickReduce (Li et al., 2025a), FlashComm and FlashComm V2 (Li et al., 2024 and 2025b), Dong et al. (2024),
TACO (Liu et al., 2026), NF4 (Dettmers et al., 2023), Lloyd-Max levels (Max, 1960).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echoreduce import reference
from echoreduce.config import QuantConfig
from echoreduce.quant.grid import SMALLEST_BF16_SCALE, divide, levels, qparams_dtype, round_down, round_up

#: A `gap` or `slide` that no group reaches.
ALWAYS = 1e12

FLOAT8_MAX = 448.0

#: Levels of least mean squared error for a standard normal variable, positive half (Max, 1960).
LLOYD_MAX = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326)


class Format(Protocol):
    """How values cross a link.

    Attributes:
        block: values that are coded together; rows are a multiple of it.
        bits_per_value: on the wire, everything counted.
    """

    @property
    def block(self) -> int: ...
    @property
    def bits_per_value(self) -> float: ...

    def encode_decode(self, values: Tensor) -> Tensor:
        """What the receiver reads: fp32 [*batch, n] to the same shape, n a multiple of `block`."""
        ...


@dataclass(frozen=True)
class LibraryGrid:
    """The library's own quantizer (its rotation is ignored: `emulation` turns the values)."""

    quant: QuantConfig

    @property
    def block(self) -> int:
        """Group size."""
        return self.quant.group_size

    @property
    def bits_per_value(self) -> float:
        """4.25 for 4 bits, g = 128."""
        return self.quant.bits_per_value()

    def encode_decode(self, values: Tensor) -> Tensor:
        """See `Format`."""
        groups = values.unflatten(-1, (-1, self.block))
        return reference.round_groups(groups, self.quant, qparams_dtype(self.quant, torch.float32)).values().flatten(-2)


@dataclass(frozen=True)
class GroupGrid:
    """A uniform grid a group, with what could be changed about it.

    Attributes:
        bits: of a code.
        group_size: values a grid.
        gap: a group on one side of zero keeps an offset if zero is farther than this many ranges from it; else its range is widened to
            include zero. 0: zero_aware; ALWAYS: every group has an integer zero point.
        slide: a straddling group with less than this many steps on its short side slides from the integer zero point to the minimum
            anchor, in proportion. 0: zero_aware; ALWAYS: the naive asymmetric grid.
        one_word: scale and zero point share 16 bits: zero point in `bits` bits, scale in 8 exponent and 8 - bits mantissa bits, rounded
            up; needs gap = ALWAYS. Else two words.
        spikes: values a group sent apart in 16 bits with an 8-bit index: 1 the largest magnitude, 2 the minimum and the maximum.
        shrink: factors of the range that are tried; the one with the least squared error is kept.
        rounding: of a one-word scale: `up` covers the range, `nearest` and `down` cut a little off both ends (the grid is then centred).
        below: with one word: how many of the scale's steps below the one that covers the range are tried; the zero point stays.
        diffusion: the rounding error of a value is added to the next value of its group before that is rounded.
    """

    bits: int = 4
    group_size: int = 128
    gap: float = 0.0
    slide: float = 0.0
    one_word: bool = False
    spikes: int = 0
    shrink: tuple[float, ...] = (1.0,)
    rounding: str = "up"
    below: tuple[int, ...] = (0,)
    diffusion: bool = False

    def __post_init__(self) -> None:
        assert not self.one_word or self.gap == ALWAYS, "one word has no room for an offset"
        assert not (self.gap and self.slide), "gap widens groups, slide anchors them: one or the other"
        assert self.spikes in (0, 1, 2), f"spikes must be 0, 1 or 2, got {self.spikes}"

    @property
    def block(self) -> int:
        """Group size."""
        return self.group_size

    @property
    def bits_per_value(self) -> float:
        """Codes, one or two words, and 24 bits a spike."""
        return self.bits + (16 * (1 if self.one_word else 2) + 24 * self.spikes) / self.group_size

    def encode_decode(self, values: Tensor) -> Tensor:
        """See `Format`."""
        groups = values.unflatten(-1, (-1, self.group_size))
        apart = spike_mask(groups, self.spikes)
        low = (groups if apart is None else groups.masked_fill(apart, torch.inf)).amin(-1)
        high = (groups if apart is None else groups.masked_fill(apart, -torch.inf)).amax(-1)
        tried = [self._round(groups, *shrunk(low, high, factor), below) for factor in self.shrink for below in self.below]
        read = least_error(groups, tried, apart)
        if apart is not None:
            read = torch.where(apart, groups.bfloat16().float(), read)
        return read.flatten(-2)

    def _round(self, groups: Tensor, low: Tensor, high: Tensor, below: int) -> Tensor:
        scale, offset, zero = (part.unsqueeze(-1) for part in self._grid(low, high))
        if below:
            scale = (scale.view(torch.int32) - (below << self._dropped)).view(torch.float32).clamp_min(0.0)
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
        bottom, top = -zero, levels(self.bits) - zero
        if not self.diffusion:
            level = torch.round((groups - offset) * inverse).clamp_(bottom, top)
            return level * scale + offset
        read = torch.empty_like(groups)
        error = torch.zeros_like(scale)
        for i in range(self.group_size):
            wanted = groups[..., i : i + 1] + error
            value = torch.round((wanted - offset) * inverse).clamp_(bottom, top) * scale + offset
            error = wanted - value
            read[..., i : i + 1] = value
        return read

    def _grid(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(scale, offset, zero): levels are (code - zero) * scale + offset, code 0 .. 2**bits - 1."""
        top = levels(self.bits)
        # Where zero lies inside the range the left side is negative.
        widened = (torch.maximum(low, -high) <= self.gap * (high - low)) | (self.gap >= ALWAYS)
        share = torch.zeros_like(low)
        if self.slide:
            steps = torch.minimum(-low, high) * (top / (high - low).clamp_min(SMALLEST_BF16_SCALE))
            share = (1.0 - steps / self.slide).clamp_(0.0, 1.0)
            widened &= share < 1.0
        low, high = torch.where(widened, low.clamp(max=0.0), low), torch.where(widened, high.clamp(min=0.0), high)
        offset = torch.where(widened, 0.0, round_down(low, torch.bfloat16))
        scale = self._stored(divide(0.5 * high - 0.5 * torch.where(widened, low, offset), 0.5 * top))
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
        zero = -low * inverse if self.rounding == "up" else 0.5 * top - (0.5 * low + 0.5 * high) * inverse
        zero = torch.round(zero).clamp_(0, top)
        zero = torch.where(widened, zero, 0.0)
        if self.slide:
            anchor = round_down(share * low - (1.0 - share) * zero * scale, torch.bfloat16)
            between = widened & (share > 0.0)
            offset, zero = torch.where(between, anchor, offset), torch.where(between, 0.0, zero)
        return scale, offset, zero

    @property
    def _dropped(self) -> int:
        """Mantissa bits of fp32 that do not fit a scale beside its zero point."""
        return 23 - (8 - self.bits)

    def _stored(self, raw: Tensor) -> Tensor:
        if not self.one_word:
            scale = round_up(raw.abs(), torch.bfloat16)
        else:
            raised = {"up": (1 << self._dropped) - 1, "nearest": 1 << (self._dropped - 1), "down": 0}[self.rounding]
            scale = ((raw.abs().view(torch.int32) + raised) >> self._dropped << self._dropped).view(torch.float32)
        return torch.where((scale > 0) & (scale < SMALLEST_BF16_SCALE), SMALLEST_BF16_SCALE, scale)


@dataclass(frozen=True)
class Codebook:
    """A non-uniform 4-bit grid a group, one 16-bit scale, meant for rotated values.

    Attributes:
        group_size: values a scale.
        kind: `nf4`: quantiles of the normal distribution, scale = amax; `lloyd`: levels of least squared error for a normal
            variable, scale = rms.
        stretch: factors of the scale that are tried; the one with the least squared error is kept.
    """

    group_size: int = 128
    kind: str = "nf4"
    stretch: tuple[float, ...] = (1.0,)

    @property
    def block(self) -> int:
        """Group size."""
        return self.group_size

    @property
    def bits_per_value(self) -> float:
        """Codes and one word."""
        return 4 + 16 / self.group_size

    def encode_decode(self, values: Tensor) -> Tensor:
        """See `Format`."""
        groups = values.unflatten(-1, (-1, self.group_size))
        book = normal_quantiles(groups) if self.kind == "nf4" else lloyd_max(groups)
        size = groups.abs().amax(-1) if self.kind == "nf4" else groups.square().mean(-1).sqrt()
        return least_error(groups, [nearest(groups, size * factor, book) for factor in self.stretch]).flatten(-2)


@dataclass(frozen=True)
class Float8Blocks:
    """e4m3 with a scale a block.

    Attributes:
        block_size: values a scale.
        two_level: the scale of a block is itself e4m3, in units of the largest scale of the row (one fp32, not counted); else 16 bits.
    """

    block_size: int = 256
    two_level: bool = False

    @property
    def block(self) -> int:
        """Block size."""
        return self.block_size

    @property
    def bits_per_value(self) -> float:
        """8 and the scale."""
        return 8 + (8 if self.two_level else 16) / self.block_size

    def encode_decode(self, values: Tensor) -> Tensor:
        """See `Format`."""
        blocks = values.unflatten(-1, (-1, self.block_size))
        scale = round_up(divide(blocks.abs().amax(-1, keepdim=True), FLOAT8_MAX), torch.bfloat16)
        if self.two_level:
            unit = divide(scale.amax(-2, keepdim=True), FLOAT8_MAX).clamp_min(SMALLEST_BF16_SCALE)
            scale = (scale / unit).clamp(2.0**-9, FLOAT8_MAX).to(torch.float8_e4m3fn).float() * unit
            scale = scale.clamp_min(SMALLEST_BF16_SCALE)
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
        codes = (blocks * inverse).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
        return (codes.float() * scale).flatten(-2)


@dataclass(frozen=True)
class OutlierChannels:
    """The channels of largest magnitude at 16 bits, the others in `inner`.

    The channels are chosen anew at each call from the values themselves, which is more than a calibration can know.

    Attributes:
        inner: format of the rest; it codes zeros in place of the outliers.
        hidden: channels of a row.
        count: channels kept.
    """

    inner: Format
    hidden: int
    count: int

    @property
    def block(self) -> int:
        """Whole rows and whole blocks of `inner`."""
        return math.lcm(self.inner.block, self.hidden)

    @property
    def bits_per_value(self) -> float:
        """The channel numbers are known beforehand."""
        return self.inner.bits_per_value + 16 * self.count / self.hidden

    def encode_decode(self, values: Tensor) -> Tensor:
        """See `Format`."""
        rows = values.unflatten(-1, (-1, self.hidden))
        kept = torch.zeros(self.hidden, dtype=torch.bool, device=values.device)
        kept[rows.abs().flatten(0, -2).amax(0).topk(self.count).indices] = True
        rest = self.inner.encode_decode(rows.masked_fill(kept, 0.0).flatten(-2)).unflatten(-1, (-1, self.hidden))
        return torch.where(kept, rows.bfloat16().float(), rest).flatten(-2)


def spike_mask(groups: Tensor, spikes: int) -> Tensor | None:
    """Which values of each group are sent apart; None: none."""
    if spikes == 0:
        return None
    if spikes == 1:
        chosen = groups.abs().argmax(-1, keepdim=True)
    else:
        chosen = torch.stack((groups.argmin(-1), groups.argmax(-1)), dim=-1)
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, chosen, True)


def shrunk(low: Tensor, high: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The range times `factor`: about zero where it straddles zero, else about its middle."""
    if factor == 1.0:
        return low, high
    straddles = (low <= 0) & (high >= 0)
    middle, half = 0.5 * low + 0.5 * high, 0.5 * high - 0.5 * low
    return torch.where(straddles, low * factor, middle - factor * half), torch.where(straddles, high * factor, middle + factor * half)


def least_error(groups: Tensor, tried: list[Tensor], apart: Tensor | None = None) -> Tensor:
    """For each group the candidate of least squared error; values of `apart` do not count."""
    best = tried[0]
    if len(tried) == 1:
        return best

    def loss(candidate: Tensor) -> Tensor:
        error = (candidate - groups).square_()
        return (error if apart is None else error.masked_fill_(apart, 0.0)).sum(-1, keepdim=True)

    least = loss(best)
    for candidate in tried[1:]:
        error = loss(candidate)
        best = torch.where(error < least, candidate, best)
        least = torch.minimum(error, least)
    return best


def nearest(groups: Tensor, size: Tensor, book: Tensor) -> Tensor:
    """The nearest of the levels `book` (ascending) times the group's scale."""
    scale = size.bfloat16().float().unsqueeze(-1)
    scaled = groups * torch.where(scale == 0, 0.0, 1.0 / scale)
    return book[torch.bucketize(scaled, 0.5 * book[1:] + 0.5 * book[:-1])] * scale


def normal_quantiles(like: Tensor) -> Tensor:
    """The 16 levels of NF4: zero, 8 quantiles above and 7 below, largest 1 (Dettmers et al., 2023)."""
    outermost = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    above = torch.special.ndtri(torch.linspace(outermost, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(outermost, 0.5, 8, dtype=torch.float64)[:-1])
    book = torch.cat((above, below, torch.zeros(1, dtype=torch.float64))).sort().values
    return (book / book.max()).to(like)


def lloyd_max(like: Tensor) -> Tensor:
    """The 16 levels of least mean squared error for a standard normal variable."""
    half = torch.tensor(LLOYD_MAX)
    return torch.cat((-half.flip(0), half)).to(like)
