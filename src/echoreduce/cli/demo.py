"""`echoreduce demo`: the main job in one command, real processes and a real model, on a laptop."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from echoreduce.cli.evaluate import Backend, Plan, run
from echoreduce.cli.report import console, plot_results, print_results, save_results
from echoreduce.integrations.demo_data import find_model, find_text
from echoreduce.integrations.evaluation import summary_variants
from echoreduce.integrations.language_model import load, read_text, windows


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder or .gguf (default: SmolLM2-135M from its package)")] = None,
    text: Annotated[Path | None, typer.Option(help="text file (default: Wikipedia lead sections from their package)")] = None,
    world_size: Annotated[int, typer.Option("--world-size", "-P", min=2, help="number of processes")] = 2,
    group_size: Annotated[int | None, typer.Option(help="values a quantization group; default: each preset's own")] = None,
    window: Annotated[int, typer.Option(min=1, help="predicted tokens a window")] = 512,
    count: Annotated[int, typer.Option("--windows", min=1, help="number of windows")] = 4,
    output: Annotated[Path, typer.Option(help="folder for demo.png and demo.json")] = Path(),
) -> None:
    """SmolLM2-135M in real gloo processes: 16-bit, 8-bit, 4-bit without feedback, the paper's, and the default."""
    source = model or find_model()
    words = text or find_text()
    with console.status("reading model and text"):
        loaded, tokenizer = load(source)
        tokens = windows(tokenizer, read_text(words), window, count)
    plan = Plan(source, tokens, summary_variants(group_size), world_size, 1, "float32", "cpu", Backend.processes, observe=True)
    results = run(plan, loaded)
    grouped = "" if group_size is None else f", g = {group_size}"
    shown = f"SmolLM2-135M, {count} windows of {window} tokens of Wikipedia, {world_size} gloo processes{grouped}"
    if model is not None or text is not None:
        shown = f"{source.name} on {words.name}, {count} windows of {window} tokens, {world_size} gloo processes{grouped}"
    print_results(results, shown, "16-bit is the exact sum; the weights were 4-bit already (Q4_1, dequantized)")
    console.print("Every rank computed the same likelihood, bit for bit. error/site: injected by one all-reduce; a pass has 60.")
    save_results(results, output / "demo.json", model=source.name, text=words.name, windows=count, window=window, world_size=world_size)
    if importlib.util.find_spec("matplotlib") is not None:
        plot_results(results, output / "demo.png", shown)
