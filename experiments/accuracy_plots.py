"""Pictures of `accuracy.py`'s result lines: the frontier of bits against damage, formats with and without feedback, sites by depth.

Leaves out: tables (`accuracy_report`). Needs matplotlib, which the measuring does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from accuracy_report import Line, Run, frontier, runs
from accuracy_variants import SETS

mpl.use("Agg")
from matplotlib import pyplot as plt

COLORS = {
    "table4": "black",
    "default_search": "tab:blue",
    "compact": "tab:green",
    "combined": "tab:purple",
    "wire": "tab:orange",
    "table8": "tab:gray",
    "no_feedback": "tab:brown",
}
LABELS = {"increase_percent": "increase of perplexity, %", "kl": "KL from the exact model, nats a token"}
MARKS = {"": "tab:gray", " +feedback": "tab:blue", " +edges": "tab:olive", " +feedback +edges": "tab:green"}


def draw(lines: list[Line], folder: Path) -> list[Path]:
    """Every picture that the lines allow, one a model, P and text; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for run in runs(lines):
        for text, found in run.texts.items():
            ending = f"{run.model}_p{run.world_size}_{text}.png"
            for name, drawer in (("frontier", frontier_picture), ("wire", wire_picture), ("sites", sites_picture)):
                figure = drawer(run, text, found)
                if figure is not None:
                    figure.suptitle(f"{run.model}, P = {run.world_size}, {text}", fontsize=9)
                    written.append(folder / f"accuracy_{name}_{ending}")
                    figure.savefig(written[-1], dpi=130)
                    plt.close(figure)
    return written


def frontier_picture(run: Run, text: str, found: dict[str, Line]) -> Any:
    """Bits per value against increase of perplexity and KL, both axes logarithmic; the frontier of the KL with names."""
    points = {name: [found[t.name] for t in SETS[name](run.shape) if t.name in found] for name in COLORS}
    if not any(points.values()):
        return None
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    for axis, (measure, label) in zip(axes, LABELS.items()):
        low_bit = {name: [line for line in lines if line[measure] > 0 and line["bits_per_value"] < 9] for name, lines in points.items()}
        for name, lines in ((name, lines) for name, lines in low_bit.items() if lines):
            xs, ys = ([line[part] for line in lines] for part in ("bits_per_value", measure))
            axis.scatter(xs, ys, s=12, color=COLORS[name], label=name)
        best = frontier([line for lines in low_bit.values() for line in lines], measure)
        axis.plot([line["bits_per_value"] for line in best], [line[measure] for line in best], color="tab:red", linewidth=0.8)
        if measure == "kl":
            for number, line in enumerate(best, 1):
                axis.annotate(str(number), (line["bits_per_value"], line[measure]), (3, 3), textcoords="offset points", fontsize=7)
            names = "\n".join(f"{number} {line['name']}" for number, line in enumerate(best, 1))
            axis.text(1.02, 1.0, names, transform=axis.transAxes, va="top", fontsize=7)
        axis.set(xscale="log", yscale="log", xlabel="bits per value of the message", ylabel=label)
        axis.set_xticks([3, 4, 5, 6, 8], ["3", "4", "5", "6", "8"])
        axis.minorticks_off()
        axis.legend(fontsize=7)
    return figure


def wire_picture(run: Run, text: str, found: dict[str, Line]) -> Any:
    """KL of each wire format: without and with feedback and edges."""
    names = [trial.name for trial in SETS["wire"](run.shape) if trial.name in found]
    formats = list(dict.fromkeys(name.split(" +")[0] for name in names))
    if not formats:
        return None
    figure, axis = plt.subplots(figsize=(9, 0.55 * len(formats) + 1.6), constrained_layout=True)
    for offset, (mark, color) in enumerate(MARKS.items()):
        rows = [(row, found[name + mark]) for row, name in enumerate(formats) if name + mark in found]
        label = mark.strip() or "as it is"
        bars = axis.barh([row + 0.2 * offset for row, _ in rows], [line["kl"] for _, line in rows], 0.2, color=color, label=label)
        axis.bar_label(bars, [f"{line['bits_per_value']:.2f} bits" for _, line in rows], fontsize=5)
    axis.set_yticks([row + 0.3 for row in range(len(formats))], formats, fontsize=7)
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="KL from the exact model, nats a token")
    axis.legend(fontsize=7)
    return figure


def sites_picture(run: Run, text: str, found: dict[str, Line]) -> Any:
    """KL of one site alone at 4 bits, and what one site at 8 bits saves, by depth; attention and MLP apart."""
    alone = [found.get(f"only site {k} at 4 bits") for k in range(run.shape.sites)]
    saved = [found.get(f"all at 4 but site {k} at 8") for k in range(run.shape.sites)]
    everywhere = found.get("b4 local zero_aware g128")
    if everywhere is None or None in alone or None in saved:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for parity, name in enumerate(("attention", "MLP")):
        sites = range(parity, run.shape.sites, 2)
        axes[0].semilogy(sites, [alone[k]["kl"] for k in sites], "o-", markersize=3, label=name)  # type: ignore[index]
        axes[1].plot(sites, [saved[k]["kl"] for k in sites], "o-", markersize=3, label=name)  # type: ignore[index]
    axes[1].axhline(everywhere["kl"], color="black", linewidth=0.8, linestyle=":", label="all sites at 4 bits")
    axes[0].set(xlabel="site", ylabel="KL, this site alone at 4 bits")
    axes[1].set(xlabel="site", ylabel="KL, all at 4 bits but this at 8")
    for axis in axes:
        axis.legend(fontsize=7)
    return figure
