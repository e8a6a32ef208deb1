"""`echoreduce recommend MODEL`: a short calibration on one device, and a configuration file with its evidence."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from echoreduce.cli.report import console
from echoreduce.config_file import save_config
from echoreduce.errors import ConfigError
from echoreduce.integrations.calibration import BITS, SENSITIVITY, Recommendation, Subject, recommend
from echoreduce.integrations.language_model import load, read_text, windows
from echoreduce.measure.report import environment


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("recommend")(command)


def command(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder, or a .gguf file")],
    text: Annotated[Path, typer.Option("--text", help="UTF-8 text, or JSON of strings; text like the model's later use")],
    world_size: Annotated[int, typer.Option("--world-size", "-P", min=2, help="number of ranks")] = 4,
    budget: Annotated[float, typer.Option("--budget-bits", "-b", help="bits per value on the wire, qparams included")] = 4.6,
    count: Annotated[int, typer.Option("--windows", min=1, help="windows on which each site is judged")] = 2,
    held_out: Annotated[int, typer.Option("--held-out", min=1, help="further windows on which candidates are verified")] = 8,
    window: Annotated[int, typer.Option(min=1, help="predicted tokens a window")] = 128,
    device: Annotated[str, typer.Option(help="torch device of the virtual ranks: cpu, cuda, cuda:1")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    bos: Annotated[bool, typer.Option("--bos", help="begin each window with the tokenizer's <bos> (Gemma needs it)")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="torch threads")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="configuration file to write")] = Path("config.json"),
) -> None:
    """Measure what bits are worth at each site of MODEL, spend a budget on them, verify, and write a configuration file."""
    if threads is not None:
        torch.set_num_threads(threads)
    with console.status("reading model and text"):
        loaded, tokenizer = load(model, dtype, device)
        words = read_text(text)
        tokens = windows(tokenizer, words, window, count + held_out, bos)
    if tokens.shape[0] < count + held_out:
        raise ConfigError(
            f"{text.name} holds {tokens.shape[0]} windows of {window} tokens; --windows and --held-out ask for {count + held_out}"
        )
    subject = Subject(loaded, world_size)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {SENSITIVITY: progress.add_task(SENSITIVITY, total=len(subject.sites) * len(BITS) * count)}

        def advance(label: str) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(f"verify {label}", total=held_out)
            progress.advance(tasks[label])

        found = recommend(subject, tokens[:count], tokens[count:], budget, advance)
    show(found, f"{model.name} on {text.name}, P = {world_size}: {held_out} held-out windows of {window} tokens, budget {budget:g} bits")
    evidence = {
        "model": model.name,
        "world_size": world_size,
        "budget_bits": budget,
        "text": {"name": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()},
        "windows": {"length": window, "calibration": count, "held_out": held_out, "bos": bos},
        "dtype": dtype,
        "device": device,
        **found.evidence(),
        "environment": environment(),
    }
    save_config(output, found.chosen.config, evidence)
    console.print(f"configuration: {output} (echoreduce.load_config, echoreduce evaluate --config)", soft_wrap=True)


def show(found: Recommendation, title: str) -> None:
    """Candidates, the chosen one first; then its sites above the fewest bits."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("candidate")
    for name in ("bits/value", "KL, millinats", "perplexity"):
        shown.add_column(name, justify="right")
    for one in sorted(found.candidates, key=lambda one: (not one.fits, one.divergence)):
        style = "bold" if one is found.chosen else "" if one.fits else "dim"
        name = one.name if one.fits else f"{one.name} (over the budget)"
        values = (f"{one.bits_per_value:.3f}", f"{1e3 * one.divergence:.2f}", f"{100 * (one.perplexity_ratio - 1):+.2f} %")
        shown.add_row(name, *values, style=style)
    console.print(shown)
    policy = found.chosen.config.sites
    if not callable(policy):
        more = [f"{site} ({name}): {bits}" for site, (name, bits) in enumerate(zip(found.sites, policy)) if bits != min(found.bits)]
        console.print(f"sites above {min(found.bits)} bits: " + (", ".join(more) or "none"), soft_wrap=True)
