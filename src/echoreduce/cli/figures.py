"""The pictures of docs/collectives.md; each function also returns its data.

Leaves out: what is drawn of a model's accuracy (`report`) and of the theory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from echoreduce.collectives.catalogue import ALGORITHMS
from echoreduce.config import QuantConfig
from echoreduce.cost.selection import candidates, price
from echoreduce.cost.topology import PLAIN, PRESETS, Topology, Wire
from echoreduce.errors import ConfigError

Data = dict[str, Any]

#: File of each picture.
FIGURES = {
    "size": "collectives_time_size.png",
    "ranks": "collectives_time_ranks.png",
    "ratio": "collectives_latency_ratio.png",
    "error": "collectives_error.png",
}


def draw(name: str, out: Path, topology: Topology, world_size: int, bits: int) -> Data:
    """Draw one of FIGURES into the folder; returns what it shows.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError('plots need matplotlib: pip install "echoreduce[plot]"') from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2 if name in ("ratio", "error", "size") else 1, figsize=(11, 4.2), constrained_layout=True)
    for axis in np.atleast_1d(axes):
        axis.set_prop_cycle(color=[plt.get_cmap("tab20")(i) for i in (*range(0, 20, 2), *range(1, 20, 2))])
    data = _DRAWERS[name](figure, np.atleast_1d(axes), topology, world_size, bits)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / FIGURES[name], dpi=130)
    plt.close(figure)
    return data


def _times(topology: Topology, world_size: int, sizes: list[int], wire: Wire = PLAIN) -> dict[str, list[float]]:
    return {a.name: [price(a, topology, world_size, b, wire).seconds for b in sizes] for a in candidates(topology, world_size)}


def _by_size(figure: Any, axes: Any, topology: Topology, world_size: int, bits: int) -> Data:
    """Time against message size on the machine, and where 4 bits move the crossover on one node of H200."""
    sizes = [1 << i for i in range(8, 34)]
    data: Data = {"sizes": sizes, "machine": _times(topology, world_size, sizes)}
    for name, seconds in data["machine"].items():
        axes[0].loglog(sizes, seconds, label=name)
    axes[0].set_title(f"{world_size:,} ranks, {topology.name}", fontsize=8)
    node = PRESETS["h200"]
    factor = QuantConfig(bits=bits).bits_per_value() / 16
    for width, style, wire in ((16, "-", PLAIN), (bits, "--", Wire(factor, factor))):
        data[f"node_{width}"] = _times(node, 8, sizes, wire)
        for color, name in enumerate(("one_shot", "two_shot", "ring", "nvls")):
            axes[1].loglog(sizes, data[f"node_{width}"][name], style, color=f"C{color}", label=f"{name}, {width} bits")
    axes[1].set_title(f"8 ranks, {node.name}", fontsize=8)
    for axis in axes:
        axis.set_xlabel("message, bytes")
        axis.set_ylabel("seconds")
        axis.legend(fontsize=6)
    return data


def _by_ranks(figure: Any, axes: Any, topology: Topology, world_size: int, bits: int) -> Data:
    """Time of 1 MiB against ranks."""
    per_node = topology.ranks_per_node or 1
    ranks = [per_node << i for i in range(1, 15) if per_node << i <= 2 * max(world_size, 1)]
    data: Data = {"ranks": ranks, "nbytes": 1 << 20}
    names = [a.name for a in candidates(topology, ranks[-1])]
    for name in names:
        data[name] = [price(ALGORITHMS[name], topology, n, 1 << 20).seconds for n in ranks]
        axes[0].loglog(ranks, data[name], "o-", markersize=3, label=name)
    axes[0].set_xlabel("ranks")
    axes[0].set_ylabel("seconds for 1 MiB")
    axes[0].set_title(topology.name, fontsize=8)
    axes[0].legend(fontsize=7, ncols=2)
    return data


def ratio(topology: Topology, world_size: int, nbytes: int) -> float:
    """Time of the flat ring over that of NCCL's tree, each with its best protocol and pieces."""
    ring, tree = (price(ALGORITHMS[name], topology, world_size, nbytes).seconds for name in ("ring", "nccl_tree"))
    return ring / tree


def _ratios(figure: Any, axes: Any, topology: Topology, world_size: int, bits: int) -> Data:
    """Ring over tree against ranks (8 bytes) and against message size."""
    per_node = topology.ranks_per_node or 1
    ranks = [per_node << i for i in range(1, 15) if per_node << i <= world_size]
    sizes = [1 << i for i in range(3, 34)]
    two_d = ALGORITHMS["ring_2d"]
    data: Data = {"ranks": ranks, "sizes": sizes}
    data["ring over tree, 8 B"] = [ratio(topology, n, 8) for n in ranks]
    data["2D ring over tree, 8 B"] = [
        price(two_d, topology, n, 8).seconds / price(ALGORITHMS["nccl_tree"], topology, n, 8).seconds for n in ranks
    ]
    data["by size"] = [ratio(topology, world_size, b) for b in sizes]
    for name in ("ring over tree, 8 B", "2D ring over tree, 8 B"):
        axes[0].loglog(ranks, data[name], "o-", markersize=3, label=name)
    axes[0].set_xlabel("ranks")
    axes[1].loglog(sizes, data["by size"], label=f"ring over tree, {world_size:,} ranks")
    axes[1].set_xlabel("message, bytes")
    for axis in axes:
        axis.axhline(180, color="black", linewidth=0.8, linestyle=":", label="180 (reported for Summit)")
        axis.set_ylabel("time of the ring over time of the tree")
        axis.legend(fontsize=7)
    figure.suptitle(topology.name, fontsize=8)
    return data


def _errors(figure: Any, axes: Any, topology: Topology, world_size: int, bits: int) -> Data:
    """Roundings and relative error against ranks, Gaussian contributions, every hop at `bits` bits, measured and predicted."""
    from echoreduce.cli.topology_error import gaussian_errors

    rows = gaussian_errors((2, 4, 8, 16, 32, 64), QuantConfig(bits=bits))
    for color, name in enumerate(dict.fromkeys(row.algorithm for row in rows)):
        mine = [row for row in rows if row.algorithm == name]
        ranks = [row.world_size for row in mine]
        axes[0].loglog(ranks, [row.roundings for row in mine], "o-", markersize=3, color=f"C{color}", label=name)
        axes[1].semilogx(ranks, [row.measured for row in mine], "o", markersize=4, color=f"C{color}", label=name)
        axes[1].semilogx(ranks, [row.predicted for row in mine], "-", linewidth=0.8, color=f"C{color}")
    axes[0].set_ylabel("roundings on the way of a contribution")
    axes[1].set_ylabel("relative error: measured (dots), noise law (lines)")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, [str(n) for n in ranks])
        axis.set_xlabel("ranks")
        axis.legend(fontsize=7)
    axes[0].set_yticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    figure.suptitle(f"{bits} bits, groups of 128, standard normal contributions, every hop requantized", fontsize=8)
    return {"rows": [vars(row) for row in rows]}


_DRAWERS: dict[str, Callable[[Any, Any, Topology, int, int], Data]] = {
    "size": _by_size,
    "ranks": _by_ranks,
    "ratio": _ratios,
    "error": _errors,
}
