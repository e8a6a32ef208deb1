"""Time to first token and training step of 8B shapes with tensor parallelism: NCCL against `paper`, `default` and no feedback, under load.

    torchrun --nproc-per-node 2 experiments/end_to_end.py --out docs/results/end_to_end_h200x2

As the paper's Table 3: speedup T_nccl / T, share of time that the 16-bit all-reduce blocks (T_nccl - T_none) / T_nccl, and how much of that
share is recovered, (T_nccl - T) / (T_nccl - T_none), where T_none is the same pass without the all-reduces of its sites. Weights and tokens
are random; prefill is --batch sequences, logits of the last token only, no KV cache is kept; a training step is --train-batch sequences in
micro-batches of --train-micro and AdamW with bf16 states. Variants take turns, so that drift meets all. Rows are appended to OUT.jsonl
as they are measured and those that are there are skipped; OUT.json is the report, also printed.

Before anything is timed each preset's all-reduce must lie within the bound of `measure.numeric`, ranks must agree bit for bit, and a short
prefill through the whole model must stay near the exact one. On gloo (CPU) the backend is c10d and the figures mean nothing.

`paper` in training has bf16 qparams, which need no shared factor: fp16 qparams with the factor exist on c10d only.
Source: the paper, Section 7.1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from end_to_end_run import VARIANTS, Study, report
from launch import ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama3-8b,qwen3-8b", help="see decoder.SHAPES")
    parser.add_argument("--train-models", default="llama3-8b", help="those of --models whose training step is timed; empty: none")
    parser.add_argument("--layers", type=int, default=0, help="0: all")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a prefill")
    parser.add_argument("--micro", type=int, default=0, help="sequences of a forward; 0: all of --batch")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--train-batch", type=int, default=16)
    parser.add_argument("--train-micro", type=int, default=8)
    parser.add_argument("--loads", default="0,50,75,100", help="percent of the time with peer-to-peer copies")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="nccl and none are always measured")
    parser.add_argument("--repetitions", type=int, default=3, help="timed passes, after one untimed")
    parser.add_argument("--limit-seconds", type=float, default=0.0, help="begin no measurement that would end later; 0: no limit")
    parser.add_argument("--out", required=True, help="path without suffix: OUT.jsonl, OUT.json")
    options = parser.parse_args()
    with ranks() as who:
        Study(options, who).run()
        if who.rank == 0:
            print(report(Path(options.out)), flush=True)


if __name__ == "__main__":
    main()
