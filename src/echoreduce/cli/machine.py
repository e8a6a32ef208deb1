"""The machine of `simulate`, `choose` and `plot`: a preset or a calibration, with single figures replaced by options.

Leaves out: what the figures do (`echoreduce.cost`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from echoreduce.config import QuantConfig
from echoreduce.cost.topology import PRESETS, Host, Link, Topology, Wire, preset
from echoreduce.errors import ConfigError


@dataclass(frozen=True)
class Changes:
    """Options that replace a preset's figures; None keeps them. Times in microseconds, bandwidths in GB/s (10^9 bytes)."""

    ranks_per_node: int | None = None
    nics: int | None = None
    alpha: float | None = None
    bandwidth: float | None = None
    across_alpha: float | None = None
    across_bandwidth: float | None = None
    oversubscription: float | None = None
    nodes_per_pod: int | None = None


def machine(name: str, changes: Changes, world_size: int) -> Topology:
    """The named preset, or the constants that `echoreduce calibrate --json` wrote to the named file, with the changes.

    Raises:
        ConfigError: neither a preset nor a readable calibration, or figures out of range.
    """
    base = preset(name) if name in PRESETS else _calibrated(name, world_size)
    inside = _link(base.inside, changes.alpha, changes.bandwidth)
    across = base.across if changes.across_alpha is None and changes.across_bandwidth is None else base.network
    return replace(
        base,
        inside=inside,
        across=None if across is None else _link(across, changes.across_alpha, changes.across_bandwidth),
        ranks_per_node=changes.ranks_per_node or base.ranks_per_node,
        nics_per_node=changes.nics or base.nics_per_node,
        nodes_per_pod=changes.nodes_per_pod or base.nodes_per_pod,
        oversubscription=changes.oversubscription or base.oversubscription,
    )


def _link(link: Link, alpha: float | None, bandwidth: float | None) -> Link:
    if bandwidth is not None and bandwidth <= 0.0:
        raise ConfigError(f"--bandwidth: must be more than 0 GB/s, got {bandwidth}")
    return Link(
        link.alpha if alpha is None else alpha * 1e-6,
        link.beta if bandwidth is None else 1e-9 / bandwidth,
        link.overhead if alpha is None or link.overhead is None else min(link.overhead, alpha * 1e-6),
    )


def _calibrated(name: str, world_size: int) -> Topology:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--topology: {name!r} is neither a file of `calibrate --json` nor one of {', '.join(PRESETS)}")
    try:
        rows = json.loads(path.read_text())["calibrations"]
        row = min(rows, key=lambda r: abs(int(r["world_size"]) - world_size))
        beta = float(row["beta_host"])
        large = float(row.get("beta_large", beta))
        host = Host(float(row["wakeup"]), beta, float(row["overhead"]), large) if beta else None
        return Topology(str(path.name), Link(float(row["alpha"]), float(row["beta"]), 0.0), host=host, gamma=float(row["gamma"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--topology: {name!r} is not a file of `calibrate --json`: {error!r}") from None


def wire(bits: int, group_size: int, across_only: bool) -> Wire:
    """Bytes on the wire for each byte of a 16-bit message; 16 bits is uncompressed.

    Raises:
        ConfigError: bits or group size without a wire format.
    """
    factor = 1.0 if bits == 16 else QuantConfig(bits=bits, group_size=group_size).bits_per_value() / 16
    return Wire(inside=1.0 if across_only else factor, across=factor)
