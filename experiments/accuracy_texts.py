"""Texts of the accuracy experiments as windows of tokens, some of them scored.

A plain text is cut into windows of equal length in which every token is scored. `gsm8k` is a set of documents "Question: ... Answer: ...":
one a window, padded on the right, and only the tokens of the solution are scored. With `bos` each window begins with that token. Paths: as
given, or below `heldout` or `choice` of the data folder (--data or $ECHOREDUCE_DATA).

Leaves out: downloading; multiple choice (`echoreduce.integrations`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echoreduce.errors import ConfigError
from echoreduce.integrations.language_model import read_text, windows

GSM8K = "gsm8k"


@dataclass
class Windows:
    """Tokens int64 [windows, length + 1], and which predictions are scored, bool [windows, length]."""

    tokens: Tensor
    scored: Tensor

    def batches(self, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """(tokens, scored) of `size` windows at a time, on the device."""
        for start in range(0, self.tokens.shape[0], size):
            yield self.tokens[start : start + size].to(device), self.scored[start : start + size].to(device)


def find(name: str, data: Path | None) -> Path:
    """The file of a text.

    Raises:
        ConfigError: it is nowhere; the message lists the places.
    """
    file = "gsm8k_test.jsonl" if name == GSM8K else name
    places = [Path(file)] + ([data / folder / file for folder in ("", "heldout", "choice")] if data is not None else [])
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(f"no text {name!r} at {', '.join(map(str, places))}; name the data folder by --data or ECHOREDUCE_DATA")


def load_windows(name: str, data: Path | None, tokenizer: Any, length: int, count: int | None, bos: bool = False) -> Windows:
    """Windows of a text, at most `count`; with `bos` the first prediction of a window, which knows nothing, is not scored."""
    path = find(name, data)
    inner = length - bos
    found = solutions(path, tokenizer, inner, count) if path.suffix == ".jsonl" else plain(path, tokenizer, inner, count)
    if not bos:
        return found
    rows = found.tokens.shape[0]
    first = torch.full((rows, 1), tokenizer.bos_token_id, dtype=torch.int64)
    return Windows(torch.cat((first, found.tokens), dim=1), torch.cat((torch.zeros(rows, 1, dtype=torch.bool), found.scored), dim=1))


def plain(path: Path, tokenizer: Any, length: int, count: int | None) -> Windows:
    """Windows of running text."""
    tokens = windows(tokenizer, read_text(path), length, count)
    return Windows(tokens, torch.ones(tokens.shape[0], length, dtype=torch.bool))


def solutions(path: Path, tokenizer: Any, length: int, count: int | None) -> Windows:
    """One question and solution a window; only the solution is scored. What is longer than `length` is cut off."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    rows, starts = [], []
    for record in records:
        question = tokenizer(f"Question: {record['question']}\nAnswer:", add_special_tokens=False)["input_ids"]
        answer = tokenizer(f" {record['answer']}", add_special_tokens=False)["input_ids"]
        rows.append((question + answer)[: length + 1])
        starts.append(len(question))
    longest = max(map(len, rows))
    filler = tokenizer.eos_token_id or 0
    tokens = torch.tensor([row + [filler] * (longest - len(row)) for row in rows], dtype=torch.int64)
    position = torch.arange(1, longest)
    ends = torch.tensor([len(row) for row in rows])
    scored = (position >= torch.tensor(starts)[:, None]) & (position < ends[:, None])
    return Windows(tokens, scored)
