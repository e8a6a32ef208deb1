"""Table and figure of a training run: tail loss, gap to 16 bits, step time; curves and the smoothed gap.

Leaves out: measuring (`training_run`). matplotlib is imported by `plot` only.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from echoreduce.errors import ConfigError

BASE = "exact"
LABELS = {
    "exact": "16-bit",
    "default": "`default`",
    "no_feedback": "4-bit, no feedback",
    "paper": "`paper`",
    "paper_bf16": "`paper`, bf16 qparams",
    "default_high": "`default`, larger rate",
}


def curves(out: Path) -> dict[str, dict[int, float]]:
    """Training loss by variant and step. A step that a resumed run made again counts once, the later one."""
    found: dict[str, dict[int, float]] = {}
    for line in out.with_suffix(".jsonl").read_text().splitlines():
        row = json.loads(line)
        if "loss" in row:
            found.setdefault(row["variant"], {})[row["step"]] = row["loss"]
    return found


def tail_mean(curve: dict[int, float], tail: int) -> float:
    """Mean loss over the last `tail` steps."""
    steps = sorted(curve)[-tail:]
    return sum(curve[step] for step in steps) / len(steps)


def gap(curve: dict[int, float], base: dict[int, float], window: int) -> dict[int, float]:
    """Relative difference to `base` over `window` steps that end at each step."""
    common = sorted(curve.keys() & base.keys())
    result = {}
    for end in range(window, len(common) + 1):
        steps = common[end - window : end]
        below = sum(base[step] for step in steps)
        result[steps[-1]] = (sum(curve[step] for step in steps) - below) / below
    return result


def table(out: Path, tail: int) -> str:
    """Markdown: a row a variant that has ended."""
    summaries: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())["variants"]
    losses = {name: tail_mean(curve, tail) for name, curve in curves(out).items() if name in summaries}
    base, held = losses.get(BASE), (summaries.get(BASE) or {}).get("validation_loss")
    lines = [
        f"| variant | peak rate | loss, last {tail} steps | gap to 16-bit | held-out loss | gap | ms a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in summaries.items():
        loss, validation = losses[name], row["validation_loss"]
        cells = (
            LABELS.get(name, name),
            f"{row['peak_rate']:.2e}",
            f"{loss:.4f}",
            percent(loss, base if name != BASE else None),
            "-" if validation is None else f"{validation:.4f}",
            percent(validation, held if name != BASE else None),
            f"{1e3 * row['step_seconds']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gaps(outs: list[Path], tail: int) -> str:
    """Markdown over several runs that differ by seed: mean gap of each variant to 16 bits of the same run, and its standard error.

    The row of 16 bits has the spread of its loss over the runs, which is what a gap of one run has to be held against.

    Raises:
        ConfigError: one run, which has no spread.
    """
    if len(outs) < 2:
        raise ConfigError("gaps compares runs that differ by seed: name at least two (table shows one)")
    runs = [{name: tail_mean(curve, tail) for name, curve in curves(out).items()} for out in outs]
    summaries = [json.loads(out.with_suffix(".json").read_text())["variants"] for out in outs]
    held = [{name: row["validation_loss"] for name, row in variants.items()} for variants in summaries]
    lines = [f"| variant | runs | loss, last {tail} steps: gap to 16-bit | held-out loss: gap |", "|---|---|---|---|"]
    for name in runs[0]:
        cells = [LABELS.get(name, name), str(sum(name in run for run in runs))]
        for losses in (runs, held):
            if name == BASE:
                values = [loss[name] for loss in losses]
                cells.append(f"{statistics.fmean(values):.4f}, spread {100 * statistics.stdev(values) / statistics.fmean(values):.2f} %")
            else:
                values = [100 * (loss[name] / loss[BASE] - 1) for loss in losses if name in loss]
                error = statistics.stdev(values) / len(values) ** 0.5
                cells.append(f"{statistics.fmean(values):+.2f} ± {error:.2f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def percent(value: float | None, base: float | None) -> str:
    """Relative difference as text."""
    return "-" if value is None or base is None else f"{100 * (value - base) / base:+.2f} %"


def plot(out: Path, figure: Path, window: int) -> None:
    """Curves on the left, gap to 16 bits on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = curves(out)
    drawing, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for name, curve in found.items():
        steps = sorted(curve)
        (line,) = left.plot(steps, [curve[step] for step in steps], linewidth=0.8, label=LABELS.get(name, name).replace("`", ""))
        if name != BASE and BASE in found:
            relative = gap(curve, found[BASE], min(window, len(curve)))
            right.plot(relative.keys(), [100 * value for value in relative.values()], color=line.get_color())
    left.set(xlabel="step", ylabel="training loss, nats")
    left.legend()
    right.axhline(0, color="gray", linewidth=0.8)
    right.set(xlabel="step", ylabel=f"gap to 16-bit, %, mean of {window} steps")
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(figure, dpi=120)
    plt.close(drawing)
