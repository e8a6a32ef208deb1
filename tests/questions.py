"""A two-layer Llama with a byte-level tokenizer, and small tasks, for tests of multiple choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers


def tokenizer() -> Any:
    """One token a byte; the first special token, `<s>`, is 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<s>"])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", pad_token="<s>")


def model() -> Any:
    """Random weights, large enough that choices differ; the same in every process."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=16, initializer_range=0.1)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def write(folder: Path, count: int = 12) -> tuple[Path, Path]:
    """(questions with two to four choices, minimal pairs of three kinds), as JSON lines."""
    words = ["red", "a green one", "blue, or so", "it is white"]
    questions = [
        {"prompt": f"Q: what is number {i * i}?{' ' * (i % 2)}", "choices": words[: 2 + i % 3], "label": i % 2} for i in range(count)
    ]
    pairs = [{"uid": f"kind {i % 3}", "good": f"Who sees {i} of us?", "bad": f"Who see {i} of us us?"} for i in range(count)]
    paths = folder / "questions.jsonl", folder / "pairs.jsonl"
    for path, rows in zip(paths, (questions, pairs)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths
