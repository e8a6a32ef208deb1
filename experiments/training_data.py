"""Tokens of the training experiment: the corpus as one uint16 file, made once, and the same windows for every variant.

The file is a prefix of the corpus, documents in order, each followed by the separator's token. The first windows are held out, the
others are taken in order, so data order does not depend on variant, seed or number of ranks.

Leaves out: masks between documents of a window.
"""

from __future__ import annotations

import lzma
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SEPARATOR = "<|endoftext|>"
#: Documents that the tokenizer's threads take at a time.
BATCH = 512


def documents(corpus: Path) -> Iterator[str]:
    """Texts between the separator's lines of an .xz or plain text file."""
    lines: list[str] = []
    with (lzma.open if corpus.suffix == ".xz" else open)(corpus, "rt", encoding="utf-8") as file:
        for line in file:
            if line.rstrip("\n") == SEPARATOR:
                yield "".join(lines)
                lines = []
            else:
                lines.append(line)
    if lines:
        yield "".join(lines)


def tokenize(corpus: Path, tokenizer: Path, count: int, out: Path) -> int:
    """Write at least `count` tokens (all of a shorter corpus) as uint16; returns how many. The tokenizer uses all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    codec = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = codec.token_to_id(SEPARATOR)
    written, batch = 0, []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:

        def flush() -> int:
            pieces = [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in codec.encode_batch(batch, add_special_tokens=False)]
            for piece in pieces:
                piece.tofile(file)
            return sum(piece.size for piece in pieces)

        for text in documents(corpus):
            batch.append(text)
            if len(batch) == BATCH:
                written += flush()
                batch = []
                print(f"{written} of {count} tokens", file=sys.stderr, flush=True)
                if written >= count:
                    break
        if batch:
            written += flush()
    return written


class Windows:
    """Windows of `length` tokens and their successors, from a file of `tokenize`.

    Args:
        path: the file.
        length: tokens of a window.
        held_out: windows at the start that are for validation only.
        device: where batches go.
    """

    def __init__(self, path: Path, length: int, held_out: int, device: torch.device) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self._length = length
        self._held_out = held_out
        self._device = device
        self.count = (self._tokens.size - 1) // length - held_out

    def batch(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, int64 [rows, length]; past the end it starts again."""
        return self._stack([self._held_out + (step * rows + row) % self.count for row in range(rows)])

    def validation(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The held-out windows, `rows` at a time; all batches are full."""
        for first in range(0, self._held_out - rows + 1, rows):
            yield self._stack(list(range(first, first + rows)))

    def _stack(self, windows: list[int]) -> tuple[Tensor, Tensor]:
        rows = [torch.from_numpy(self._tokens[w * self._length : (w + 1) * self._length + 1].astype(np.int64)) for w in windows]
        both = torch.stack(rows)
        if self._device.type == "cuda":
            both = both.pin_memory()
        both = both.to(self._device, non_blocking=True)
        return both[:, :-1], both[:, 1:]
