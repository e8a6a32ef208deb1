"""Pictures of an analysis, from its JSON: error by depth, who injects, who amplifies.

Leaves out: measuring (`integrations.analysis`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echoreduce.integrations.language_model import require


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the first window of a report; returns the files.

    Raises:
        ConfigError: matplotlib is missing.
    """
    require("matplotlib", "plot")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    conditions = report["conditions"]
    title = f"{conditions['model']}, {conditions['tokens']} tokens of {conditions['text']['name']}, P = {conditions['world_size']}"
    drawers: dict[str, Callable[[dict[str, Any], Any], None]] = {"depth": _depth, "injects": _injects, "amplifies": _amplifies}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, drawer in drawers.items():
        figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
        drawer(report["windows"][0], axes)
        for axis in axes:
            axis.legend(fontsize=7)
        figure.suptitle(title, fontsize=9)
        written.append(folder / f"analyze_{conditions['model'].lower()}_{name}.png")
        figure.savefig(written[-1], dpi=130)
        plt.close(figure)
    return written


def _depth(window: dict[str, Any], axes: Any) -> None:
    """Deviation of the stream and partial sums by depth."""
    network = window["network"]
    length = [network["dim"] ** 0.5 * sigma for sigma in network["sigma"]]
    axes[0].semilogy(length, color="black", linewidth=0.8, label="||z_k||, clean stream")
    for color, one in enumerate(window["variants"]):
        axes[0].semilogy(range(1, len(length)), one["by_site"]["deviation"][1:], color=f"C{color}", label=f"||E_k||, {one['name']}")
        axes[0].semilogy(
            range(1, len(length)), one["by_site"]["linear"][1:], "--", color=f"C{color}", linewidth=0.8, label="to first order"
        )
        axes[1].semilogy(range(1, len(length)), one["by_site"]["partial"], color=f"C{color}", label=f"||S_t||, {one['name']}")
    for axis in axes:
        axis.set_xlabel("sites passed")


def _injects(window: dict[str, Any], axes: Any) -> None:
    """Injected error by site, and its predicted share of the output's energy."""
    for color, one in enumerate(window["variants"]):
        sites = range(len(one["by_site"]["relative"]))
        axes[0].semilogy(sites, one["by_site"]["relative"], ".-", color=f"C{color}", linewidth=0.6, label=one["name"])
        axes[1].semilogy(sites, one["by_site"]["share_of_output"], ".-", color=f"C{color}", linewidth=0.6, label=one["name"])
    axes[0].set_ylabel("q_k = ||delta_k|| / ||sum x||")
    axes[1].set_ylabel("q_s$^2$ ||K_s||$^2$ / (d$^2$ sigma_N$^2$)  (Lemma 4)")
    for axis in axes:
        axis.set_xlabel("site")


def _amplifies(window: dict[str, Any], axes: Any) -> None:
    """What the network makes of an injection, and which blocks do it."""
    network = window["network"]
    sites = range(len(network["sites"]))
    axes[0].semilogy(sites, network["amplification"], color="black", linewidth=0.8, label="no feedback, ||Phi_N,s+1||$^2$ / d")
    for color, one in enumerate(window["variants"]):
        if one["gain"] > 0:
            axes[0].semilogy(
                sites, one["by_site"]["coefficient"], ".-", color=f"C{color}", linewidth=0.6, label=f"{one['name']}, ||K_s||$^2$ / d"
            )
    axes[0].set_ylabel("energy at the output of a unit injection")
    axes[1].semilogy(sites[1:], network["jacobian_energy"][1:], ".-", linewidth=0.6, label="||J_k||$^2$ / d, isotropic")
    axes[1].semilogy(
        sites[1:], [max(value, 1e-4) for value in network["epsilon"][1:]], ".-", linewidth=0.6, label="epsilon_k (Assumption 1)"
    )
    last = window["variants"][-1]
    growth = [value**2 for value in last["by_site"]["growth"]]
    axes[1].semilogy(sites[1:], growth[1:], ".-", linewidth=0.6, label=f"||J_k E_k||$^2$ / ||E_k||$^2$, {last['name']}")
    for axis in axes:
        axis.set_xlabel("site")
