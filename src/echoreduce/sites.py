"""Site policies: how many bits the k-th all-reduce ("site") of a pass sends.

Why: with single-step feedback at gain 1 only the error of the last site survives a pass (Lemma 2 of the paper: S_N reaches the
output by the identity path), and the first sites of a real model carry its largest activations. A few sites at 8 bits therefore
buy more than finer quantization everywhere. A policy is any callable `(site, sites) -> bits | None`, or a sequence with one entry
a site; None means the `bits` of `QuantConfig`.

Leaves out: how a policy is found for a model (see `echoreduce recommend`), and what the bits do (`quant`).
Source: the paper, Section 7.2 (early-site 8-bit) and Appendix A.3; docs/design.md, Section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echoreduce.errors import ConfigError

#: Bits of one site: 2 to 8, or 16 for an exact (unquantized) all-reduce; None leaves the choice to `QuantConfig.bits`.
SitePolicy = Callable[[int, int], int | None] | Sequence[int | None]

BITS = (2, 3, 4, 5, 6, 7, 8, 16)


@dataclass(frozen=True)
class Uniform:
    """Every site of the pass sends the same number of bits (None: `QuantConfig.bits`)."""

    bits: int | None = None

    def __call__(self, site: int, sites: int) -> int | None:
        return self.bits


@dataclass(frozen=True)
class Edges:
    """The first and the last sites of a pass send `bits`, the others `QuantConfig.bits`.

    Attributes:
        first: number of sites at the start of the pass.
        last: number of sites at its end.
        bits: what those sites send.
    """

    first: int = 2
    last: int = 2
    bits: int = 8

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < 0:
            raise ConfigError(f"edges: first and last count sites and cannot be negative, got {self.first}, {self.last}")
        check_bits(self.bits)

    def __call__(self, site: int, sites: int) -> int | None:
        return self.bits if site < self.first or site >= sites - self.last else None


@dataclass(frozen=True)
class EarlyHalf:
    """The first half of the sites sends `bits` (the paper's early-site policy, Section 7.2)."""

    bits: int = 8

    def __post_init__(self) -> None:
        check_bits(self.bits)

    def __call__(self, site: int, sites: int) -> int | None:
        return self.bits if 2 * site < sites else None


def uniform(bits: int | None = None) -> Uniform:
    """Same bits at every site."""
    return Uniform(bits)


def edges(first: int = 2, last: int = 2, bits: int = 8) -> Edges:
    """`bits` at the first `first` and the last `last` sites of a pass."""
    return Edges(first, last, bits)


def early_half(bits: int = 8) -> EarlyHalf:
    """`bits` at the first half of the sites (the paper, Section 7.2)."""
    return EarlyHalf(bits)


def check_bits(bits: int) -> int:
    """Return `bits` if the wire has a format for it, else raise `ConfigError`."""
    if bits not in BITS:
        raise ConfigError(f"bits must be one of {BITS} (16 is an exact pass-through), got {bits!r}")
    return bits


def needs_sites(policy: SitePolicy) -> bool:
    """Whether the policy depends on the number of sites of the pass (all but `Uniform` may)."""
    return not isinstance(policy, Uniform)


def bits_at(policy: SitePolicy, site: int, sites: int | None, default: int) -> int:
    """Bits that site `site` (from 0) of a pass of `sites` sites sends.

    Args:
        policy: callable or sequence, see the module's text.
        site: index of the site in its pass, from 0.
        sites: number of sites of the pass; None is accepted for `Uniform` only.
        default: bits where the policy says None.
    Raises:
        ConfigError: the policy needs the number of sites and does not get it, a sequence has another length,
            or the policy returns a number of bits that no wire format exists for.
    """
    if sites is None and needs_sites(policy):
        raise ConfigError(f"site policy {policy!r} needs the number of sites of a pass; give sites=")
    if callable(policy):
        bits = policy(site, -1 if sites is None else sites)
    else:
        if len(policy) != sites:
            raise ConfigError(f"site policy lists {len(policy)} sites, but the pass has {sites}")
        bits = policy[site]
    return check_bits(default if bits is None else int(bits))
