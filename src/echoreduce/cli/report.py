"""Tables, plots and JSON of an evaluation; printing only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from echoreduce.integrations.evaluation import Result
from echoreduce.integrations.language_model import require
from echoreduce.measure.report import write_json

console = Console(emoji=False, highlight=False)


def print_results(results: list[Result], title: str, caption: str) -> None:
    """One row a variant: perplexity, increase, bits per value on the wire, relative injected error of a site."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("variant")
    for name in ("perplexity", "increase", "bits/value", "error/site"):
        table.add_column(name, justify="right")
    for row in results:
        injected = "-" if row.injected is None else f"{100 * row.injected:.2f} %"
        table.add_row(
            row.name,
            f"{row.perplexity:.3f}",
            f"{row.increase:+.3f} ({100 * row.increase / (row.perplexity - row.increase):+.1f} %)",
            f"{row.bits_per_value:.2f}",
            injected,
        )
    console.print(table)


def plot_results(results: list[Result], path: Path, title: str) -> None:
    """Bars of perplexity, and S_t by site for the variants that were observed, as one picture.

    Raises:
        ConfigError: matplotlib is missing.
    """
    require("matplotlib", "plot")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    bars = left.bar([row.name for row in results], [row.perplexity for row in results], color="#4477aa")
    left.bar_label(bars, [f"{row.perplexity:.2f}" for row in results], fontsize=8)
    left.axhline(results[0].perplexity, color="black", linewidth=0.8, linestyle=":")
    left.set_ylabel("perplexity")
    left.tick_params(axis="x", labelrotation=25)
    for row in results:
        if any(row.accumulated):
            right.plot(range(1, len(row.accumulated) + 1), row.accumulated, label=row.name)
    right.set_yscale("log")
    right.set_xlabel("site (all-reduce of the pass)")
    right.set_ylabel("accumulated error, rms of S$_t$")
    right.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    console.print(f"plot: {path}")


def save_results(results: list[Result], path: Path, **conditions: Any) -> None:
    """JSON with environment, conditions and rows."""
    write_json(path, conditions=conditions, rows=[row.as_dict() for row in results])
    console.print(f"json: {path}")
