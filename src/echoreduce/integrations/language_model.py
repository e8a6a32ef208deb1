"""Loading a causal language model and a text, and cutting the text into windows.

Models: a Hugging Face folder, or a GGUF file (read by transformers through the `gguf` package, weights dequantized). Texts: a UTF-8
file, or a JSON file of strings or of lists of strings (the Wikipedia lead sections of the demo).

Leaves out: downloading anything. Source: docs/reproduce.md names the packages that carry the demo's model and text.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echoreduce.errors import ConfigError, ShapeError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def require(module: str, extra: str) -> None:
    """Raise ConfigError with the pip line if an optional dependency is missing."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"this needs {module}: pip install 'echoreduce[{extra}]'")


def load(path: str | Path, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """Model (in eval mode) and tokenizer.

    Args:
        path: folder with a `config.json`, or a `.gguf` file.
        dtype: `float32`, `bfloat16` or `float16`.
        device: torch device.
    Raises:
        ConfigError: no model at that path, an unknown dtype, or a missing optional dependency.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {tuple(DTYPES)}, got {dtype!r}")
    require("transformers", "transformers")
    source = Path(path)
    arguments = model_arguments(source)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # slow to import, and optional
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(**arguments, dtype=DTYPES[dtype])
    return model.to(device).eval(), AutoTokenizer.from_pretrained(**arguments)


def model_arguments(source: Path) -> dict[str, str]:
    """Arguments of `from_pretrained` for a folder or a GGUF file."""
    if source.is_file() and source.suffix == ".gguf":
        require("gguf", "gguf")
        return {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    if (source / "config.json").is_file():
        return {"pretrained_model_name_or_path": str(source)}
    raise ConfigError(f"{source} is neither a folder with a config.json nor a .gguf file")


def read_text(path: str | Path) -> str:
    """Text of a UTF-8 file, or the texts of a JSON file, joined by blank lines.

    In JSON, a record with an `extract` or `text` gives that alone; otherwise every string counts.
    """
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"no text at {source}")
    text = source.read_text(encoding="utf-8")
    if source.suffix != ".json":
        return text
    return "\n\n".join(_strings(json.loads(text)))


def _strings(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    if isinstance(node, dict) and (isinstance(node.get("extract"), str) or isinstance(node.get("text"), str)):
        return [node["extract"] if "extract" in node else node["text"]]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [text for child in children for text in _strings(child)]


def windows(tokenizer: Any, text: str, length: int, count: int | None = None, bos: bool = False) -> Tensor:
    """Cut a text into windows that share one token with their neighbour, so that every token but the first is predicted once.

    Args:
        tokenizer: Hugging Face tokenizer; no special tokens are added but, with `bos`, the first one of a window.
        text: any text with at least length + 1 tokens.
        length: predicted tokens a window.
        count: at most this many windows, from the start.
        bos: begin each window with the tokenizer's <bos> instead of the last token of the one before.
    Returns:
        Token ids, int64 [windows, length + 1].
    Raises:
        ShapeError: the text is too short for one window.
        ConfigError: `bos` and a tokenizer that has none.
    """
    if bos and tokenizer.bos_token_id is None:
        raise ConfigError("this tokenizer has no <bos>")
    # Only as much text as is needed is tokenized: no tokenizer in use makes more than one token of a character.
    if count is not None:
        text = text[: 16 * (count * length + 1)]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    found = (ids.numel() - 1) // length
    if found < 1:
        raise ShapeError(f"the text has {ids.numel()} tokens, one window of {length} needs {length + 1}")
    if count is not None:
        found = min(found, count)
    rows = torch.stack([ids[i * length : (i + 1) * length + 1] for i in range(found)])
    if bos:
        rows[:, 0] = tokenizer.bos_token_id
    return rows
