"""Training with 4-bit all-reduces in both directions: loss curves of 16 bits, no feedback, `paper` and `default` at the same learning rate.

    python experiments/training.py tokenize --corpus pretrain.txt.xz --tokenizer SmolLM2-135M-Instruct --out corpus_tokens.bin
    torchrun --nproc-per-node 2 experiments/training.py run --tokens corpus_tokens.bin --out docs/results/training
    python experiments/training.py table --out docs/results/training
    python experiments/training.py plot --out docs/results/training
    python experiments/training.py gaps --out SEED_0 SEED_1 SEED_2

`pretrain` is the Qwen3-0.6B shape of the paper's Appendix B from scratch (vocabulary: SmolLM2's), `finetune` is SmolLM2. Same
initialization, same data order, same optimizer for every variant; `default_high` is `default` at the paper's larger rate. Curves are JSON
lines in OUT.jsonl, a summary with conditions is OUT.json. Variants that have a summary are skipped, so a killed run goes on where it was.

Backends on GPUs: `p2p`, never `auto`, so that no site is sent in 16 bits because it is small. `paper` as published (fp16 qparams and a
shared power of two for gradients) exists on `c10d` only, which is slower; `paper_bf16` is the same feedback on `p2p`, where bf16 qparams
need no factor.

Source: the paper, Section 7.3 and Appendix B; docs/training.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import training_report
from echoreduce.config import PRESETS, QuantConfig
from training_data import tokenize
from training_run import Plan, Variant, run

HIGH = 3.5 / 3.0
VARIANTS = {
    "exact": Variant(PRESETS["exact"]),
    "default": Variant(PRESETS["default"]),
    "fast": Variant(PRESETS["fast"]),
    "no_feedback": Variant(PRESETS["no_feedback"]),
    "paper": Variant(PRESETS["paper"], backend="c10d"),
    "paper_bf16": Variant(replace(PRESETS["paper"], quant=QuantConfig(qparams="bf16"), rescale="none")),
    "default_high": Variant(PRESETS["default"], rate=HIGH),
}
TASKS = {
    "pretrain": {"variants": "exact,default,no_feedback,paper,default_high", "rate": 3e-4, "steps": 400, "warmup": 100},
    "finetune": {"variants": "exact,default,no_feedback", "rate": 3e-5, "steps": 200, "warmup": 20},
}


def main() -> None:
    options = arguments(sys.argv[1:])
    if options.command == "tokenize":
        written = tokenize(Path(options.corpus), Path(options.tokenizer), options.count, Path(options.out))
        print(f"{written} tokens in {options.out}")
    elif options.command == "run":
        run(plan_of(options))
    elif options.command == "table":
        print(training_report.table(Path(options.out), options.tail))
    elif options.command == "gaps":
        print(training_report.gaps([Path(out) for out in options.out], options.tail))
    else:
        training_report.plot(Path(options.out), Path(options.figure or f"{options.out}.png"), options.tail)


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    token = commands.add_parser("tokenize", help="make the uint16 file of tokens")
    data = os.environ.get("ECHOREDUCE_DATA", "")
    token.add_argument("--corpus", default=str(Path(data) / "corpus" / "pretrain.txt.xz"), help="text or .xz; default: in $ECHOREDUCE_DATA")
    token.add_argument("--tokenizer", required=True, help="folder with tokenizer.json")
    token.add_argument("--count", type=int, default=8_300_000, help="tokens; 400 steps of 8 x 2,048 and 16 held-out windows need 6.6 M")
    token.add_argument("--out", required=True)
    train = commands.add_parser("run", help="train, under torchrun")
    train.add_argument("--task", choices=TASKS, default="pretrain")
    train.add_argument("--tokens", required=True, help="file of `tokenize`")
    train.add_argument("--model", default="", help="transformers folder of SmolLM2, for finetune")
    train.add_argument("--shape", default="qwen3-0.6b", help="for pretrain; see decoder.SHAPES")
    train.add_argument("--variants", default="", help=f"of {', '.join(VARIANTS)}; default: those of the task")
    train.add_argument("--steps", type=int, default=0, help="0: 400, finetune 200")
    train.add_argument("--batch", type=int, default=8, help="sequences a step, all ranks together")
    train.add_argument("--length", type=int, default=2048)
    train.add_argument("--rate", type=float, default=0.0, help="peak learning rate; 0: 3e-4, finetune 3e-5")
    train.add_argument("--warmup", type=int, default=-1, help="steps; -1: 100, finetune 20")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products; weights are fp32")
    train.add_argument("--held-out", type=int, default=16, help="validation windows")
    train.add_argument("--validate-every", type=int, default=100)
    train.add_argument("--checkpoint-every", type=int, default=0, help="steps; 0: none")
    train.add_argument("--limit-seconds", type=float, default=0.0, help="stop after so long, checkpoint included if any; 0: never")
    train.add_argument("--emulate", type=int, default=0, help="virtual ranks in one process (torchrun --nproc-per-node 1); 0: real ones")
    train.add_argument("--out", required=True, help="path without suffix: OUT.jsonl, OUT.json")
    for name in ("table", "plot"):
        command = commands.add_parser(name)
        command.add_argument("--out", required=True)
        command.add_argument("--tail", type=int, default=100, help="steps that are averaged")
        command.add_argument("--figure", default="", help="plot: OUT.png")
    several = commands.add_parser("gaps", help="mean gaps of runs that differ by seed")
    several.add_argument("--out", nargs="+", required=True)
    several.add_argument("--tail", type=int, default=100, help="steps that are averaged")
    return parser.parse_args(words)


def plan_of(options: argparse.Namespace) -> Plan:
    task = TASKS[options.task]
    names = (options.variants or task["variants"]).split(",")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise SystemExit(f"--variants: {', '.join(unknown)} unknown; accepted are {', '.join(VARIANTS)}")
    if options.task == "finetune" and not options.model:
        raise SystemExit("--task finetune needs --model FOLDER")
    return Plan(
        task=options.task,
        variants={name: VARIANTS[name] for name in names},
        tokens=Path(options.tokens),
        model=Path(options.model) if options.task == "finetune" else None,
        shape=options.shape,
        steps=options.steps or int(task["steps"]),
        batch=options.batch,
        length=options.length,
        rate=options.rate or float(task["rate"]),
        warmup=int(task["warmup"]) if options.warmup < 0 else options.warmup,
        seed=options.seed,
        dtype=options.dtype,
        held_out=options.held_out,
        validate_every=options.validate_every,
        checkpoint_every=options.checkpoint_every,
        limit=options.limit_seconds,
        virtual=options.emulate,
        out=Path(options.out),
    )


if __name__ == "__main__":
    main()
