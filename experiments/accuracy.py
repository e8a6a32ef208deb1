"""What low-bit all-reduces do to real models: one JSON line a result, tables and figures from the lines.

    python experiments/accuracy.py run --model FOLDER --name smollm2 --data DIR --set table4 --set wire --out accuracy.jsonl
    python experiments/accuracy.py table --in accuracy.jsonl [--set wire | --claims wikitext2_test_raw]
    python experiments/accuracy.py plot --in accuracy.jsonl --folder docs/figures
    python experiments/accuracy.py blend --model FOLDER --name smollm2 --data DIR --out blend.jsonl

`run` skips what the output file holds already, so the same command continues a run that was stopped. Virtual ranks: the bits of real ones.

Leaves out: task accuracy (`echoreduce.integrations`). Source: the paper, Section 7.2 and 7.4.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from accuracy_run import Job, groups, key, measure, missing, read_lines
from accuracy_texts import load_windows
from accuracy_trials import Shape
from accuracy_variants import SETS, trials
from echoreduce.integrations.language_model import load
from echoreduce.integrations.transformers import row_parallel_linears
from echoreduce.measure.report import environment

TEXTS = ["wikitext2_test_raw.txt", "owt_1000_snippets.txt", "wikipedia_1000_snippets.txt", "jane_austen_6_novels.txt"]


def main() -> None:
    arguments = parser().parse_args()
    arguments.command(arguments)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True)
    run_parser = commands.add_parser("run", help="measure variants")
    model_arguments(run_parser)
    run_parser.add_argument("--texts", nargs="+", default=TEXTS, help="files, or gsm8k")
    run_parser.add_argument("--world-sizes", default="4", help="comma-separated P")
    run_parser.add_argument("--set", dest="sets", action="append", choices=SETS, required=True, help="repeatable")
    run_parser.add_argument("--only", help="only variants whose name contains this")
    run_parser.add_argument("--group", type=int, default=16, help="variants that share one run of the exact model and are saved together")
    run_parser.add_argument("--limit-seconds", type=float, help="start no group that would end later")
    run_parser.set_defaults(command=run)
    blend_parser = commands.add_parser("blend", help="rounding error of the zero-point rules on a model's activations")
    model_arguments(blend_parser)
    blend_parser.add_argument("--texts", nargs="+", default=TEXTS[:1])
    blend_parser.add_argument("--world-sizes", default="4")
    blend_parser.set_defaults(command=blend)
    table_parser = commands.add_parser("table", help="print Markdown tables")
    table_parser.add_argument("--in", dest="files", type=Path, nargs="+", required=True)
    table_parser.add_argument("--set", dest="sets", action="append", choices=SETS, help="repeatable (default: all that were measured)")
    table_parser.add_argument("--claims", metavar="TEXT", help="only the claims about Table 8 on this text, every P side by side")
    table_parser.add_argument("--claims-at", metavar="P", type=int, help="the same at one P, every text side by side")
    table_parser.add_argument("--claims-counted", action="store_true", help="verdicts on each claim, counted over all texts and P")
    table_parser.set_defaults(command=table)
    plot_parser = commands.add_parser("plot", help="draw the frontier, the wire formats and the sites")
    plot_parser.add_argument("--in", dest="files", type=Path, nargs="+", required=True)
    plot_parser.add_argument("--folder", type=Path, default=Path("docs/figures"))
    plot_parser.set_defaults(command=plot)
    return top


def model_arguments(command: argparse.ArgumentParser) -> None:
    """Options of every command that runs a model."""
    command.add_argument("--model", type=Path, required=True, help="Hugging Face folder or .gguf file")
    command.add_argument("--name", required=True, help="of the model in the results")
    command.add_argument("--data", type=Path, default=os.environ.get("ECHOREDUCE_DATA"), help="folder of texts")
    command.add_argument("--windows", type=int, help="at most so many of a text")
    command.add_argument("--window", type=int, default=1024, help="predicted tokens a window")
    command.add_argument("--bos", action="store_true", help="begin each window with the tokenizer's <bos> (Gemma needs it)")
    command.add_argument("--batch", type=int, default=8, help="windows a forward")
    command.add_argument("--device", default="cpu")
    command.add_argument("--dtype", default="float32")
    command.add_argument("--out", type=Path, required=True, help="JSON lines")


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing, text by text, P by P, group by group."""
    started = time.perf_counter()
    model, tokenizer = load(arguments.model, arguments.dtype, arguments.device)
    sites = len(row_parallel_linears(model))
    shape = Shape(model.config.get_text_config().hidden_size, sites)
    chosen = trials(arguments.sets, shape)
    chosen = [trial for trial in chosen if arguments.only is None or arguments.only in trial.name]
    done = {key(line) for line in read_lines(arguments.out)}
    print(f"{len(chosen)} variants, {len(done)} lines present, model read in {time.perf_counter() - started:.0f} s", flush=True)
    slowest = 0.0  # seconds of a variant
    for text in arguments.texts:
        windows = load_windows(text, arguments.data, tokenizer, arguments.window, arguments.windows, arguments.bos)
        for world_size in map(int, arguments.world_sizes.split(",")):
            conditions = {"model": arguments.name, "text": Path(text).stem, "world_size": world_size, "windows": windows.tokens.shape[0]}
            conditions |= {"window": windows.tokens.shape[1] - 1, "batch": arguments.batch, "dtype": arguments.dtype}
            conditions |= {"hidden": shape.hidden, "sites": sites}
            job = Job(conditions, environment(), model, sites, windows, arguments.batch, arguments.out)
            for group in groups(missing(job, chosen, done), arguments.group):
                elapsed = time.perf_counter() - started
                if arguments.limit_seconds is not None and elapsed + slowest * len(group) > arguments.limit_seconds:
                    print(f"stopped after {elapsed:.0f} s: the limit; the same command continues", flush=True)
                    return
                lines = measure(job, group)
                slowest = max(slowest, (time.perf_counter() - started - elapsed) / len(group))
                report(lines)


def blend(arguments: argparse.Namespace) -> None:
    """Append one line a site, text and P."""
    from accuracy_blend import rounding_errors

    model, tokenizer = load(arguments.model, arguments.dtype, arguments.device)
    sites = len(row_parallel_linears(model))
    for text in arguments.texts:
        windows = load_windows(text, arguments.data, tokenizer, arguments.window, arguments.windows, arguments.bos)
        for world_size in map(int, arguments.world_sizes.split(",")):
            conditions = {"model": arguments.name, "text": Path(text).stem, "world_size": world_size, "windows": windows.tokens.shape[0]}
            records = rounding_errors(model, windows, world_size, sites, arguments.batch)
            with arguments.out.open("a") as file:
                file.writelines(json.dumps({**conditions, "blend": record, "environment": environment()}) + "\n" for record in records)
            print(conditions, json.dumps(records[0], indent=1), flush=True)


def table(arguments: argparse.Namespace) -> None:
    """Print what the files hold: the sets, then the frontier, then the zero-point rules."""
    from accuracy_report import blend_table, claims_by_size, claims_by_text, claims_counted, frontier_table, tables

    lines = [line for path in arguments.files for line in read_lines(path)]
    results = [line for line in lines if "kl" in line]
    if arguments.claims is not None:
        print(claims_by_size(results, arguments.claims))
        return
    if arguments.claims_at is not None:
        print(claims_by_text(results, arguments.claims_at))
        return
    if arguments.claims_counted:
        print(claims_counted(results))
        return
    print(tables(results, arguments.sets or SETS))
    if arguments.sets is None:
        print(frontier_table(results))
        print(blend_table([line for line in lines if "blend" in line]))


def plot(arguments: argparse.Namespace) -> None:
    """Draw what the files hold."""
    from accuracy_plots import draw

    lines = [line for path in arguments.files for line in read_lines(path) if "kl" in line]
    for path in draw(lines, arguments.folder):
        print(path)


def report(lines: list[dict[str, Any]]) -> None:
    """One line a variant, as it is measured."""
    for line in lines:
        print(
            f"{line['model']} {line['text']} P={line['world_size']} {line['name']}: {line['perplexity']:.3f} "
            f"({line['increase_percent']:+.2f} %) KL {line['kl']:.5f} ± {line['kl_error']:.5f} "
            f"top-1 {line['agreement']:.4f} bits {line['bits_per_value']:.3f} {line['seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
