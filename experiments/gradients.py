"""Error of the gradients of a real model whose sums, forward and backward, go through the collective.

    torchrun --nproc-per-node 3 experiments/gradients.py --model SmolLM2-135M-Instruct --text wikitext2_test_raw.txt --out gradients.json

The model is sharded by transformers (P must divide its heads) over gloo on the CPU, NCCL on GPUs, in fp32. The gradient of each window's
loss is compared with that of the 16-bit path, which equals a single process (tests/integrations/test_transformers_tp.py): relative error of
all parameters as one vector. Windows differ by far more than configurations do, so the table has the median and all are kept. The
row `bf16` is the yardstick: the 16-bit path of the same model in bf16. `accurate_8` is preset `accurate` at 8 bits, `accurate_8_alone` that
without feedback.

Leaves out: training (`training.py`). Source: issue 5; the paper, Section 5.4.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from echoreduce.config import NO_FEEDBACK, PRESETS, preset
from echoreduce.errors import EchoReduceWarning
from echoreduce.integrations.language_model import windows
from echoreduce.integrations.transformers import distributed_config
from echoreduce.measure.report import write_json
from launch import ranks

ROTATED_8 = preset("accurate", bits=8)
CONFIGS = {**PRESETS, "accurate_8": ROTATED_8, "accurate_8_alone": replace(ROTATED_8, feedback=NO_FEEDBACK)}


def whole(gradient: Tensor) -> Tensor:
    """The gradient of a whole parameter, fp64, a copy."""
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().double().clone()


def gradient(model: Any, window: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss of a window, and its gradient by parameter."""
    model.zero_grad()
    loss = model(input_ids=window[None], labels=window[None], use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def error(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative error of all parameters as one vector."""
    difference = sum(float((ours[name] - g).square().sum()) for name, g in exact.items())
    return (difference / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


def load(model: str, config: str, world_size: int) -> Any:
    """The model, sharded, with a configuration's sums; `bf16` is the model in bf16 with exact ones."""
    rules = distributed_config(model, tp_size=world_size, config=CONFIGS["exact" if config == "bf16" else config])
    dtype = torch.bfloat16 if config == "bf16" else torch.float32
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, distributed_config=rules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face causal language model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--bos", action="store_true", help="begin each window with the tokenizer's first token")
    parser.add_argument("--configs", default="bf16,accurate_8,accurate_8_alone,int8,accurate,default,fast,paper,no_feedback")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore", EchoReduceWarning)
    with ranks() as here:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        batches = windows(tokenizer, Path(options.text).read_text(), options.window, options.windows, options.bos).to(here.device)
        exact = load(options.model, "exact", here.world_size)
        rows = []
        for name in options.configs.split(","):
            model = load(options.model, name, here.world_size)
            losses, errors = [], []
            for window in batches:
                (loss, g), (exact_loss, exact_g) = gradient(model, window), gradient(exact, window)
                losses.append(loss - exact_loss)
                errors.append(error(g, exact_g))
            rows.append({"config": name, "errors": errors, "losses": losses})
            middle, mean = statistics.median(errors), statistics.fmean(losses)
            here.say(f"{name:12} loss {mean:+.4f}, gradient: median {middle:.4f}, {min(errors):.4f} to {max(errors):.4f}")
        if here.rank == 0 and options.out:
            write_json(options.out, rows=rows, model=Path(options.model).name, window=options.window, world_size=here.world_size)


if __name__ == "__main__":
    main()
