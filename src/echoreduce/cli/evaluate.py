"""`echoreduce evaluate MODEL`: what low-bit tensor parallelism does to a language model's perplexity (here) and answers (`cli.tasks`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from echoreduce.cli.report import console, plot_results, print_results
from echoreduce.cli.tasks import TaskPlan, print_lines
from echoreduce.cli.tasks import run as run_tasks
from echoreduce.config import PRESETS, QParams, preset
from echoreduce.config_file import load_config
from echoreduce.errors import ConfigError
from echoreduce.integrations import processes
from echoreduce.integrations.choice import find_tasks, load_task
from echoreduce.integrations.evaluation import (
    Result,
    Variant,
    bits_per_value,
    observe,
    perplexity,
    variants_of,
)
from echoreduce.integrations.language_model import load, read_text, windows
from echoreduce.integrations.transformers import attach, row_parallel_linears
from echoreduce.integrations.transformers_tp import norms_sums
from echoreduce.measure.report import write_json
from echoreduce.sites import SitePolicy, early_half, edges, uniform


class Backend(StrEnum):
    """Where the ranks live."""

    virtual = "virtual"
    processes = "processes"


@dataclass(frozen=True)
class Plan:
    """A validated evaluation."""

    model: Path
    tokens: Tensor
    variants: list[Variant]
    world_size: int
    batch: int
    dtype: str
    device: str
    backend: Backend
    observe: bool


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("evaluate")(evaluate)


def evaluate(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder, or a .gguf file")],
    text: Annotated[Path | None, typer.Option("--text", help="UTF-8 text, or JSON of strings")] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="multiple choice: FILE or NAME in the data folder, or all; :N limits one; comma-separated"),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="folder of the tasks that names mean (default: ECHOREDUCE_DATA)")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="at most this many questions a task, evenly spread")] = None,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, help="tokens a forward, for --tasks")] = 4096,
    prefix: Annotated[
        str | None, typer.Option("--prefix-token", help="token that stands for an empty prompt (default: the tokenizer's first)")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON lines of --tasks; a second run resumes from them")] = None,
    world_size: Annotated[
        list[int] | None, typer.Option("--world-size", "-P", min=1, help="number of ranks (default 4); repeatable with --tasks")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="virtual ranks in this process, or real gloo processes")] = Backend.virtual,
    device: Annotated[str, typer.Option(help="torch device of the virtual ranks: cpu, cuda, cuda:1")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    table: Annotated[str, typer.Option(help="summary (five rows) or ablation (every row of docs/design.md, Section 6)")] = "summary",
    presets: Annotated[list[str] | None, typer.Option("--preset", help=f"only these ({', '.join(PRESETS)}); repeatable")] = None,
    configs: Annotated[
        list[Path] | None, typer.Option("--config", help="a configuration file (echoreduce recommend writes them); repeatable")
    ] = None,
    bits: Annotated[int, typer.Option(help="bits of the sites that the site policy leaves alone, 2 to 8")] = 4,
    group_size: Annotated[
        int | None, typer.Option(help="values a quantization group: 16, 32, 64, 128, 256; default: each preset's own, 128 in tables")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="site policy for all low-bit rows: uniform, early_half, edges, or edges:FIRST:LAST:BITS")
    ] = None,
    qparams: Annotated[str | None, typer.Option(help="16-bit type of scale and offset for all low-bit rows: auto, bf16, fp16")] = None,
    window: Annotated[int, typer.Option(min=1, help="predicted tokens a window")] = 1024,
    count: Annotated[int | None, typer.Option("--windows", min=1, help="at most this many windows (default: the whole text)")] = None,
    bos: Annotated[bool, typer.Option("--bos", help="begin each window of --text with the tokenizer's <bos> (Gemma needs it)")] = False,
    batch: Annotated[int, typer.Option(min=1, help="windows a forward")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="torch threads (of each process)")] = None,
    observed: Annotated[bool, typer.Option("--errors/--no-errors", help="also measure injected and accumulated error")] = True,
    json: Annotated[Path | None, typer.Option("--json", help="write the results here")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="write a picture (PNG, SVG, PDF) here")] = None,
) -> None:
    """Perplexity of MODEL on a text, and its answers to multiple choice, with row-parallel sums in few bits, beside the exact model."""
    if threads is not None:
        torch.set_num_threads(threads)
    sizes = world_size or [4]
    if text is None and not tasks:
        raise ConfigError("give --text, --tasks or both")
    if text is not None and len(sizes) > 1:
        raise ConfigError(f"--text takes one --world-size, got {sizes}")
    variants = [overridden(variant, policy, qparams) for variant in choose_variants(table, presets, configs, bits, group_size)]
    questions = [load_task(path, own or limit) for names in tasks or [] for path, own in find_tasks(names, data)]
    with console.status("reading model"):
        loaded, tokenizer = load(model, dtype, device)
    if not presets and not configs and norms_sums(loaded):
        variants.append(overridden(Variant("post_norm", preset("post_norm", group_size=group_size)), policy, qparams))
    grouped = "" if group_size is None else f", g = {group_size}"
    conditions = {"model": model.name, "group_size": group_size, "backend": backend.value, "device": device, "dtype": dtype}
    written: dict[str, Any] = {}
    if text is not None:
        tokens = windows(tokenizer, read_text(text), window, count, bos)
        plan = Plan(model, tokens, variants, sizes[0], batch, dtype, device, backend, observed)
        results = run(plan, loaded)
        shown = f"{model.name} on {text.name}: {len(tokens)} windows of {window} tokens, P = {sizes[0]}{grouped}, {backend.value}"
        print_results(results, shown, f"16-bit is the exact sum in the model's dtype, {dtype} here")
        of_text = {"text": text.name, "windows": len(tokens), "window": window, "bos": bos, "world_size": sizes[0]}
        written |= {"conditions": conditions | of_text, "rows": [row.as_dict() for row in results]}
        if plot is not None:
            plot_results(results, plot, shown)
    if questions:
        of_tasks = conditions | {"batch_tokens": batch_tokens, "prefix_token": prefix}
        in_processes = backend is Backend.processes
        lines = run_tasks(TaskPlan(model, questions, variants, sizes, of_tasks, in_processes, out), loaded, tokenizer)
        print_lines(lines, f"{model.name}{grouped}, {backend.value}")
        written["tasks"] = [line.as_dict() for line in lines]
    if json is not None:
        write_json(json, **written)
        console.print(f"json: {json}")


def choose_variants(table: str, presets: list[str] | None, configs: list[Path] | None, bits: int, group_size: int | None) -> list[Variant]:
    """The rows that the options ask for; 16-bit is always the first. Files are taken as they are, whatever bits and group size say."""
    if not presets and not configs:
        return variants_of(table, group_size, bits)
    named = [name for name in presets or [] if name != "exact"]
    chosen = [Variant("16-bit", preset("exact", group_size=group_size))]
    chosen += [Variant(name, preset(name, bits=None if name == "int8" else bits, group_size=group_size)) for name in named]
    return chosen + [Variant(path.stem, load_config(path)) for path in configs or []]


def overridden(variant: Variant, policy: str | None, qparams: str | None) -> Variant:
    """The variant with another site policy or type of qparams; the 16-bit row stays as it is."""
    config = variant.config
    if config is None or config.quant.bits == 16:
        return variant
    if policy is not None:
        config = replace(config, sites=parse_policy(policy))
    if qparams is not None:
        config = replace(config, quant=replace(config.quant, qparams=cast("QParams", qparams)))
    return Variant(variant.name, config)


def parse_policy(text: str) -> SitePolicy:
    """`uniform`, `early_half`, `edges`, `edges:2:2:8`.

    Raises:
        ConfigError: anything else.
    """
    name, *numbers = text.split(":")
    try:
        values = [int(number) for number in numbers]
        if name == "uniform" and not values:
            return uniform()
        if name == "early_half" and len(values) <= 1:
            return early_half(*values)
        if name == "edges" and len(values) <= 3:
            return edges(*values)
    except ValueError as error:
        raise ConfigError(f"--policy {text}: {error}") from error
    raise ConfigError(f"--policy must be uniform, early_half[:BITS] or edges[:FIRST[:LAST[:BITS]]], got {text!r}")


def run(plan: Plan, model: Any) -> list[Result]:
    """Measure every variant, with a progress bar."""
    sites = len(row_parallel_linears(model))
    numel = plan.tokens[: plan.batch, :-1].numel() * model.config.get_text_config().hidden_size
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("windows", total=len(plan.variants) * plan.tokens.shape[0])

        def advance(done: int) -> None:
            progress.advance(task, done)

        measure = _in_processes if plan.backend is Backend.processes else _virtually
        measured = measure(plan, model, advance, lambda name: progress.update(task, description=name))
        results = []
        for variant, (value, seconds) in zip(plan.variants, measured):
            injected: float | None = None
            accumulated: list[float] = []
            if plan.observe and variant.config is not None and plan.world_size > 1:
                progress.update(task, description=f"errors of {variant.name}")
                injected, accumulated = observe(model, plan.tokens, variant.config, plan.world_size)
            wire = bits_per_value(variant.config, plan.world_size, numel, sites)
            results.append(Result(variant.name, value, value - measured[0][0], wire, injected, accumulated, seconds))
    return results


Measured = list[tuple[float, float]]


def _virtually(plan: Plan, model: Any, advance: Callable[[int], None], describe: Callable[[str], None]) -> Measured:
    """(perplexity, seconds) of each variant with virtual ranks in this process."""
    measured = []
    for variant in plan.variants:
        describe(variant.name)
        started = time.perf_counter()
        assert variant.config is not None, "every row of a table has a configuration"
        with attach(model, variant.config, world_size=plan.world_size):
            value = perplexity(model, plan.tokens, plan.batch, advance)
        measured.append((value, time.perf_counter() - started))
    return measured


def _in_processes(plan: Plan, model: Any, advance: Callable[[int], None], describe: Callable[[str], None]) -> Measured:
    """(perplexity, seconds) of each variant in real gloo processes."""
    threads = max(1, torch.get_num_threads() // plan.world_size)
    job = processes.Job(
        str(plan.model), plan.dtype, plan.tokens, plan.batch, plan.variants, plan.world_size, processes.rendezvous_file(), threads
    )
    describe("processes read the model")

    def on_event(event: processes.Event) -> None:
        if event.kind == "advanced":
            describe(plan.variants[event.variant].name)
            advance(event.windows)

    return [(event.perplexity, event.seconds) for event in processes.evaluate(job, on_event)]
