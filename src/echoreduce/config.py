"""Configuration: one small frozen dataclass a concern, validated once, and the named presets.

`QuantConfig` says how values become codes, `FeedbackConfig` how the error of one site is returned at the next, `EchoConfig` puts
the two together with the algorithm and the site policy. All are hashable by content (`EchoConfig.digest`), so that ranks can
check that they agree before any payload moves.

Leaves out: where a call runs (`communicator`), and everything that depends on a tensor (`partition`).
Source: docs/design.md, Sections 3 to 5; the paper, Sections 4.3, 5 and 7.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal

from echoreduce.errors import ConfigError
from echoreduce.sites import SitePolicy, Uniform, check_bits, early_half, edges, uniform

Policy = Literal["symmetric", "asymmetric", "zero_aware", "compact"]
Rotation = Literal["none", "hadamard"]
QParams = Literal["auto", "bf16", "fp16"]
Residual = Literal["none", "group", "local"]
StateDType = Literal["fp32", "bf16", "float8_e4m3", "float8_e5m2"]
Algorithm = Literal["two_shot", "one_shot", "auto"]
Rescale = Literal["none", "backward"]

#: 2, 4 and 8 are for worked examples and tests; the kernels take 16 and more.
GROUP_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)

#: Widest codes that `compact` packs: 16 bits hold a zero point of 6 bits and a scale of 8 exponent and 2 mantissa bits.
COMPACT_BITS = 6

#: Widest `compact` codes whose scale is rounded down and not up: a group then loses up to half a step at each end, and all its other
#: values gain. With more bits the scale keeps too few mantissa bits for that (docs/accuracy.md).
CLIPPED_BITS = 4

#: Scales of rotated `compact` groups stay below 2**111; a group that needs a larger one counts as not finite. So a level times a scale, a
#: residual and a sum of a whole group of them are finite in every order of operations, which lets a kernel choose the order.
LARGEST_COMPACT_EXPONENT = 110

#: `algorithm="auto"` takes one-shot at P = 2 for messages of fewer values (128 MiB in 16 bits). One-shot has half the error there and
#: sends the same bytes; above, its sum over all values instead of half of them costs a tenth of the time (docs/kernels.md).
ONE_SHOT_VALUES = 1 << 26


def _one_of(name: str, value: object, accepted: tuple[object, ...]) -> None:
    if value not in accepted:
        raise ConfigError(f"{name} must be one of {accepted}, got {value!r}")


@dataclass(frozen=True)
class QuantConfig:
    """How a group of values becomes codes on the wire.

    Attributes:
        bits: bits of a code, 2 to 8; 16 sends the values as they are (an exact pass-through).
        group_size: consecutive values that share one scale: 16, 32, 64, 128 or 256 (smaller ones for worked examples).
        policy: `symmetric` (Eq. 8), `asymmetric` (grid anchored at the group's minimum), or `zero_aware` (integer zero point
            where the group straddles zero, the minimum as offset where it lies on one side; Section 4.3), or `compact` (always an
            integer zero point, which shares one 16-bit word with the scale; for rotated values, which straddle zero; codes of
            7 and 8 bits leave the scale too little room and are sent as `zero_aware`).
        rotation: `hadamard` turns each group by the orthonormal Walsh-Hadamard matrix before it is quantized.
        qparams: 16-bit type of scale and offset; `auto` is fp16 for fp16 data and bf16 for bf16 and fp32 data.
    """

    bits: int = 4
    group_size: int = 128
    policy: Policy = "zero_aware"
    rotation: Rotation = "none"
    qparams: QParams = "auto"

    def __post_init__(self) -> None:
        check_bits(self.bits)
        _one_of("group_size", self.group_size, GROUP_SIZES)
        _one_of("policy", self.policy, ("symmetric", "asymmetric", "zero_aware", "compact"))
        _one_of("rotation", self.rotation, ("none", "hadamard"))
        _one_of("qparams", self.qparams, ("auto", "bf16", "fp16"))
        narrowest = {2: 2, 4: 4, 8: 8, 16: 8}.get(self.bits, 1)  # bits of the narrowest code plane, see `quant.packing`
        if self.group_size * narrowest % 8:
            raise ConfigError(f"groups of {self.group_size} values at {self.bits} bits do not fill whole bytes")

    def with_bits(self, bits: int) -> QuantConfig:
        """The same quantizer at another number of bits."""
        return self if bits == self.bits else replace(self, bits=bits)

    @property
    def layout(self) -> Policy:
        """The policy by which groups are really sent: `policy`, but `zero_aware` for `compact` codes of more than 6 bits."""
        return "zero_aware" if self.policy == "compact" and self.bits > COMPACT_BITS else self.policy

    @property
    def clipped(self) -> bool:
        """Whether the scale is rounded down to a number on the wire (else up), and the grid centred on the group's range."""
        return self.layout == "compact" and self.bits <= CLIPPED_BITS

    @property
    def capped(self) -> bool:
        """Whether a group whose scale would reach 2**(LARGEST_COMPACT_EXPONENT + 1) counts as not finite."""
        return self.layout == "compact" and self.rotation == "hadamard"

    @property
    def reach(self) -> float:
        """Largest rounding error of a value in steps: a half, and another half at the ends of a group whose scale was rounded down."""
        return 1.0 if self.clipped else 0.5

    @property
    def qparams_per_group(self) -> int:
        """16-bit words a group sends: 1 (`symmetric`: scale, `compact`: scale and zero point), else 2 (scale, and zero point or offset)."""
        return 1 if self.layout in ("symmetric", "compact") else 2

    def group_bytes(self) -> int:
        """Bytes of one group on the wire: codes and qparams. 68 for 128 values at 4 bits with zero point."""
        if self.bits == 16:
            return 2 * self.group_size
        return self.group_size * self.bits // 8 + 2 * self.qparams_per_group

    def bits_per_value(self) -> float:
        """Bits on the wire per value, qparams included: 4.25 for the default."""
        return 8 * self.group_bytes() / self.group_size


@dataclass(frozen=True)
class FeedbackConfig:
    """How the error injected at one site is returned at the following ones (the paper, Section 5.1).

    c_k = gain * (blend * m1 + (1 - blend) * m2),   m_j <- decay_j * m_j + (1 - decay_j) * u_k        (Eq. 10, 11)

    Attributes:
        residual: `none`; `group`: u_i = x'_i - y/P (the paper); `local`: u_i = the rounding errors that rank i itself made
            at the site. Both sum to -delta over the group (Eq. 4).
        gain: eta, 0 to 1.
        blend: a, weight of the first average, 0 to 1.
        decays: (beta_1, beta_2), each in [0, 1). Equal decays need one average only; (0, 0) is single-step feedback, c_k = gain * u_{k-1}.
        state: dtype in which the averages are kept. The float8 types keep one scale a group beside them, so that neither large
            activations nor tiny gradients leave their range.
    """

    residual: Residual = "local"
    gain: float = 1.0
    blend: float = 0.35
    decays: tuple[float, float] = (0.0, 0.0)
    state: StateDType = "bf16"

    def __post_init__(self) -> None:
        _one_of("residual", self.residual, ("none", "group", "local"))
        _one_of("state", self.state, ("fp32", "bf16", "float8_e4m3", "float8_e5m2"))
        if not 0.0 <= self.gain <= 1.0:
            raise ConfigError(f"gain must lie in [0, 1], got {self.gain!r}")
        if not 0.0 <= self.blend <= 1.0:
            raise ConfigError(f"blend must lie in [0, 1], got {self.blend!r}")
        if len(self.decays) != 2 or not all(0.0 <= b < 1.0 for b in self.decays):
            raise ConfigError(f"decays must be two numbers in [0, 1), got {self.decays!r}")

    @property
    def enabled(self) -> bool:
        """Whether anything is fed back at all."""
        return self.residual != "none" and self.gain > 0.0

    @property
    def averages(self) -> int:
        """How many moving averages are kept: 0, 1 or 2 (equal decays, or a blend of 0 or 1, need one)."""
        if not self.enabled:
            return 0
        return 1 if self.decays[0] == self.decays[1] or self.blend in (0.0, 1.0) else 2

    @property
    def weights(self) -> tuple[tuple[float, float], ...]:
        """(weight in the correction, decay) of each average that is kept; the weights sum to the gain."""
        if not self.enabled:
            return ()
        if self.averages == 1:
            return ((self.gain, self.decays[1] if self.blend == 0.0 else self.decays[0]),)
        return ((self.gain * self.blend, self.decays[0]), (self.gain * (1.0 - self.blend), self.decays[1]))


NO_FEEDBACK = FeedbackConfig(residual="none")


@dataclass(frozen=True)
class EchoConfig:
    """One compensated all-reduce: quantizer, feedback, algorithm, and bits a site.

    Attributes:
        quant: the quantizer.
        feedback: the compensator; `NO_FEEDBACK` switches it off.
        algorithm: `two_shot` (reduce-scatter and all-gather, at most two roundings a value), `one_shot` (every rank sums the same
            P codes: one rounding a contribution), or `auto` (one-shot at P = 2 below `ONE_SHOT_VALUES`, else two-shot).
        sites: site policy, see `sites`.
        rescale: `backward` multiplies gradients by a shared power of two around the collective (the paper, Section 5.4);
            needed with fp16 qparams only.
    """

    quant: QuantConfig = field(default_factory=QuantConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    algorithm: Algorithm = "auto"
    sites: SitePolicy = field(default_factory=Uniform)
    rescale: Rescale = "none"

    def __post_init__(self) -> None:
        _one_of("algorithm", self.algorithm, ("two_shot", "one_shot", "auto"))
        _one_of("rescale", self.rescale, ("none", "backward"))
        if not callable(self.sites):
            object.__setattr__(self, "sites", tuple(self.sites))

    def algorithm_for(self, world_size: int, numel: int | None = None) -> Literal["two_shot", "one_shot"]:
        """The algorithm that runs on `world_size` ranks for messages of `numel` values (None: of common size)."""
        if self.algorithm == "auto":
            return "one_shot" if world_size == 2 and (numel is None or numel < ONE_SHOT_VALUES) else "two_shot"
        return self.algorithm

    def digest(self) -> int:
        """63-bit hash of the whole configuration, equal on ranks that agree (sha256 of its text)."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "big") >> 1


def _paper(quant: QuantConfig | None = None, sites: SitePolicy | None = None) -> EchoConfig:
    return EchoConfig(
        quant=quant or QuantConfig(qparams="fp16"),
        feedback=FeedbackConfig(residual="group", gain=0.75, blend=0.35, decays=(0.7, 0.3), state="fp32"),
        algorithm="two_shot",
        sites=sites or uniform(),
        rescale="backward",
    )


_ROTATED = QuantConfig(group_size=64, policy="compact", rotation="hadamard")
_FLOAT8 = FeedbackConfig(state="float8_e4m3")

#: Named configurations. `paper` and `paper_early` are the paper's (Sections 5 and 7.2). `default` loses at most 1 % of perplexity at 4.5
#: bits a value, `fast` takes the fewest instructions on a GPU, `accurate` spends a bit more; docs/accuracy.md has the frontier.
#: `post_norm` is for models that norm each sum before it joins the residual stream (Gemma 2 and 3, OLMo 2), where feedback does harm.
PRESETS: dict[str, EchoConfig] = {
    "paper": _paper(),
    "paper_early": _paper(sites=early_half(8)),
    "default": EchoConfig(quant=_ROTATED, feedback=_FLOAT8, sites=edges(first=3, last=2, bits=7)),
    "fast": EchoConfig(feedback=_FLOAT8, sites=edges(first=2, last=2, bits=8)),
    "accurate": EchoConfig(quant=_ROTATED.with_bits(5), feedback=_FLOAT8, sites=edges(first=3, last=2, bits=8)),
    "post_norm": EchoConfig(quant=QuantConfig(bits=6, group_size=64, rotation="hadamard"), feedback=NO_FEEDBACK, algorithm="two_shot"),
    "no_feedback": EchoConfig(feedback=NO_FEEDBACK, algorithm="two_shot"),
    "int8": EchoConfig(quant=QuantConfig(bits=8), feedback=NO_FEEDBACK, algorithm="two_shot"),
    "exact": EchoConfig(quant=QuantConfig(bits=16), feedback=NO_FEEDBACK, algorithm="two_shot"),
}


def preset(name: str, *, bits: int | None = None, group_size: int | None = None) -> EchoConfig:
    """A named configuration, optionally at other bits or another group size.

    Args:
        name: a key of `PRESETS`.
        bits: bits of the sites that the preset's site policy leaves alone.
        group_size: values per quantization group.
    Raises:
        ConfigError: unknown name; the text lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")
    config = PRESETS[name]
    quant = replace(
        config.quant,
        bits=config.quant.bits if bits is None else bits,
        group_size=config.quant.group_size if group_size is None else group_size,
    )
    return replace(config, quant=quant)
