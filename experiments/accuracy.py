"""What low-bit all-reduces do to real models: one JSON line a result.

    python experiments/accuracy.py run --model FOLDER --name smollm2 --data DIR --set table4 --set wire --out accuracy.jsonl

`run` skips what the output file holds already, so the same command continues a run that was stopped. Virtual ranks: the bits of real ones.

Leaves out: task accuracy (`echoreduce.integrations`). Source: the paper, Section 7.2 and 7.4.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from accuracy_run import Job, groups, key, measure, missing, read_lines
from accuracy_texts import load_windows
from accuracy_variants import SETS, Shape, trials
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
    return top


def model_arguments(command: argparse.ArgumentParser) -> None:
    """Options of every command that runs a model."""
    command.add_argument("--model", type=Path, required=True, help="Hugging Face folder or .gguf file")
    command.add_argument("--name", required=True, help="of the model in the results")
    command.add_argument("--data", type=Path, default=os.environ.get("ECHOREDUCE_DATA"), help="folder of texts")
    command.add_argument("--windows", type=int, help="at most so many of a text")
    command.add_argument("--window", type=int, default=1024, help="predicted tokens a window")
    command.add_argument("--batch", type=int, default=8, help="windows a forward")
    command.add_argument("--device", default="cpu")
    command.add_argument("--dtype", default="float32")
    command.add_argument("--out", type=Path, required=True, help="JSON lines")


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing, text by text, P by P, group by group."""
    started = time.perf_counter()
    model, tokenizer = load(arguments.model, arguments.dtype, arguments.device)
    sites = len(row_parallel_linears(model))
    chosen = trials(arguments.sets, Shape(model.config.get_text_config().hidden_size, sites))
    chosen = [trial for trial in chosen if arguments.only is None or arguments.only in trial.name]
    done = {key(line) for line in read_lines(arguments.out)}
    print(f"{len(chosen)} variants, {len(done)} lines present, model read in {time.perf_counter() - started:.0f} s", flush=True)
    slowest = 0.0  # seconds of a variant
    for text in arguments.texts:
        windows = load_windows(text, arguments.data, tokenizer, arguments.window, arguments.windows)
        for world_size in map(int, arguments.world_sizes.split(",")):
            conditions = {"model": arguments.name, "text": Path(text).stem, "world_size": world_size, "windows": windows.tokens.shape[0]}
            conditions |= {"window": windows.tokens.shape[1] - 1, "batch": arguments.batch, "dtype": arguments.dtype}
            job = Job(conditions, environment(), model, sites, windows, arguments.batch, arguments.out)
            for group in groups(missing(job, chosen, done), arguments.group):
                elapsed = time.perf_counter() - started
                if arguments.limit_seconds is not None and elapsed + slowest * len(group) > arguments.limit_seconds:
                    print(f"stopped after {elapsed:.0f} s: the limit; the same command continues", flush=True)
                    return
                lines = measure(job, group)
                slowest = max(slowest, (time.perf_counter() - started - elapsed) / len(group))
                report(lines)


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
