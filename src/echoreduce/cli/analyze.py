"""`echoreduce analyze MODEL`: the constants of the paper's theory on a real model, and whether its bounds hold there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from echoreduce.cli import analysis_figures
from echoreduce.cli.report import console
from echoreduce.config import PRESETS, preset
from echoreduce.config_file import load_config
from echoreduce.errors import ConfigError
from echoreduce.integrations.analysis import PROBE, analyze
from echoreduce.integrations.evaluation import Variant
from echoreduce.integrations.language_model import load, read_text, windows
from echoreduce.integrations.residual_stream import find_blocks
from echoreduce.measure.report import write_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("analyze")(command)


def command(
    model: Annotated[Path | None, typer.Argument(help="Hugging Face folder, or a .gguf file")] = None,
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text, or JSON of strings")] = None,
    world_size: Annotated[int, typer.Option("--world-size", "-P", min=2, help="number of virtual ranks")] = 4,
    presets: Annotated[list[str] | None, typer.Option("--preset", help=f"only these ({', '.join(PRESETS)}); repeatable")] = None,
    configs: Annotated[list[Path] | None, typer.Option("--config", help="a configuration file; repeatable")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of a window, the vector of the theory being all of them")] = 128,
    count: Annotated[int, typer.Option("--windows", min=1, help="windows, each analyzed by itself")] = 1,
    probes: Annotated[int, typer.Option(min=1, help="isotropic vectors for the Jacobians; two or more give standard errors")] = 2,
    bos: Annotated[bool, typer.Option("--bos", help="begin each window with the tokenizer's <bos> (Gemma needs it)")] = False,
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="torch threads")] = None,
    results: Annotated[Path | None, typer.Option("--json", help="write everything here, by site too")] = None,
    read: Annotated[Path | None, typer.Option("--from", help="show and plot an earlier --json file instead of measuring")] = None,
    plot: Annotated[Path | None, typer.Option(help="folder for the pictures: error by depth, who injects, who amplifies")] = None,
) -> None:
    """Measure what the paper's theory assumes and says, site by site, and judge every bound on real passes."""
    if read is not None:
        report = read_report(read)
    elif model is None or text is None:
        raise ConfigError("give MODEL and --text to measure, or --from with an earlier --json file")
    else:
        if threads is not None:
            torch.set_num_threads(threads)
        chosen = [Variant(name, preset(name)) for name in presets or ([] if configs else ["no_feedback", "paper", "default"])]
        chosen += [Variant(path.stem, load_config(path)) for path in configs or []]
        report = measure(model, text, chosen, world_size, tokens, count, probes, bos, device)
        if results is not None:
            write_json(results, **report)
            console.print(f"json: {results}")
    for index in range(len(report["windows"])):
        show(report, index)
    if plot is not None:
        for path in analysis_figures.draw(report, plot):
            console.print(f"plot: {path}")


def read_report(path: Path) -> dict[str, Any]:
    """A --json file of an earlier run.

    Raises:
        ConfigError: there is none, or it is something else.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from {path}: {error}") from error
    if not isinstance(report, dict) or not {"conditions", "windows"} <= set(report):
        raise ConfigError(f"--from {path} is not a --json file of `echoreduce analyze`")
    return report


def measure(
    model: Path, text: Path, variants: list[Variant], world_size: int, tokens: int, count: int, probes: int, bos: bool, device: str
) -> dict[str, Any]:
    """Analyze each window, with a progress bar."""
    with console.status("reading model and text"):
        loaded, tokenizer = load(model, "float32", device)
        cut = windows(tokenizer, read_text(text), tokens, count, bos)
    starts = len(find_blocks(loaded)) - 1
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(PROBE, total=cut.shape[0] * (starts + len(variants)))

        def step(label: str) -> None:
            progress.update(task, description=label, advance=1)

        analyzed = [analyze(loaded, window[:-1], variants, world_size, probes, step, seed) for seed, window in enumerate(cut)]
    conditions = {
        "model": model.name,
        "bos": bos,
        "text": {"name": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()},
        "world_size": world_size,
        "tokens": tokens,
        "probes": probes,
        "device": device,
    }
    return {"conditions": conditions, "windows": analyzed}


def show(report: dict[str, Any], index: int) -> None:
    """The network's constants, then each configuration: deviation predicted and measured, and every bound."""
    window, conditions = report["windows"][index], report["conditions"]
    network = window["network"]
    where = f"{conditions['model']} on {conditions['text']['name']}, window {index + 1}: {conditions['tokens']} tokens"
    console.print(
        f"{where}, P = {conditions['world_size']}, {len(network['sites'])} sites, d = {network['dim']}, {network['probes']} probes"
    )
    if window["sandwich"]:
        console.print(f"not covered: {window['sandwich']}", style="yellow")
    sigma, share = network["sigma"], max(network["largest_token_share"])
    scales = f"sigma_0 {sigma[0]:.4g}, sigma_1 {sigma[1]:.4g}, sigma_N {sigma[-1]:.4g} (Appendix A.1)"
    console.print(f"{scales}; one token holds up to {100 * share:.1f} % of the energy", soft_wrap=True)
    _show_assumptions(network["assumptions"])
    console.print(_checks("network", network["checks"]))
    console.print(_outputs(window["variants"]))
    for variant in window["variants"]:
        console.print(f"\n{variant['name']}", style="bold")
        _show_assumptions(variant["assumptions"])
        console.print(_checks(variant["name"], variant["checks"]))


def _show_assumptions(assumptions: list[dict[str, Any]]) -> None:
    for one in assumptions:
        console.print(f"  {one['name']}: {'' if one['holds'] else 'violated; '}{one['figure']}", soft_wrap=True, markup=False)


def _checks(name: str, checks: list[dict[str, Any]]) -> Table:
    table = Table(title=f"bounds, {name}", title_justify="left")
    table.add_column("bound")
    table.add_column("measured", justify="right")
    table.add_column("at most", justify="right")
    table.add_column("verdict")
    for one in checks:
        right = "-" if one["right"] is None else f"{one['right']:.4g}"
        table.add_row(one["name"], f"{one['left']:.4g}", right, one["verdict"], style="" if one["verdict"] == "holds" else "yellow")
    return table


def _outputs(variants: list[dict[str, Any]]) -> Table:
    """Deviation at the output, in per cent of the hidden state's norm, and what was injected."""
    table = Table(title="deviation at the output, ||.|| / (sqrt(d) sigma_N)", title_justify="left")
    table.add_column("configuration")
    for name in (
        "real E_N",
        "linear E_N^lin (Eq. 15)",
        "predicted (Lemma 4)",
        "E_N - E_N^lin",
        "median token",
        "max q_k/|sum x|",
        "neighbours' corr.",
    ):
        table.add_column(name, justify="right")
    for one in variants:
        output = one["output"]
        shown = [output["measured"], output["linear"], output["predicted"], output["second_order"], output["median_token"]]
        injected = max(one["by_site"]["relative"])
        columns = [f"{100 * value**0.5:.2f} %" for value in shown]
        table.add_row(one["name"], *columns, f"{100 * injected:.1f} %", f"{one['correlation']['neighbours']:+.4f}")
    return table
