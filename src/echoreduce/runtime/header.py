"""The fixed-size header that ranks exchange before any payload, so that a mismatch is an exception and not a hang or silent garbage.

gloo aborts the process on some shape mismatches and adds garbage on others, NCCL hangs or returns wrong tails. A header of a fixed
number of int64 words can never mismatch in size; every rank sees all headers and raises the same text. It goes out as an all-to-all,
not as an all-gather, because then every rank talks to every other one directly and notices a dead peer at once.

Leaves out: a rank that calls another collective altogether (order of calls on one group is the caller's contract).
Source: cases O14, O16 and O17 of the field (gloo, NCCL and vLLM threads).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from echoreduce.config import QuantConfig
from echoreduce.errors import MismatchError

MAX_DIMS = 8
WORDS = 6 + MAX_DIMS
MAGIC = 0x4543484F  # "ECHO"

#: dtypes by header code; the position is part of the header's version.
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
VERSION = 1


@dataclass(frozen=True)
class Header:
    """What one rank is about to do.

    Attributes:
        shape: of the tensor; of more than 8 dimensions the first 7 and the product of the rest are compared.
        dtype: of the tensor.
        settings: text of quantizer, algorithm and feedback.
        call: number of this call on the backend.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    settings: str
    call: int

    def words(self) -> list[int]:
        """The header as int64 words."""
        shape = self.shape
        if len(shape) > MAX_DIMS:
            rest = 1
            for size in shape[MAX_DIMS - 1 :]:
                rest *= size
            shape = (*shape[: MAX_DIMS - 1], rest)
        code = DTYPES.index(self.dtype) if self.dtype in DTYPES else -1
        padded = [*shape, *([-1] * (MAX_DIMS - len(shape)))]
        return [MAGIC, VERSION, code, digest(self.settings), self.call, len(self.shape), *padded]


def digest(text: str) -> int:
    """63-bit hash of a settings text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def settings_text(quant: QuantConfig, algorithm: str, feedback: object) -> str:
    """Everything besides the tensor that ranks must agree on."""
    return f"{quant} {algorithm} {feedback}"


def compare(table: Tensor, own: Header) -> None:
    """Raise the same MismatchError on every rank if the headers differ.

    Args:
        table: int64 [P, WORDS] on the CPU, row i is rank i's header.
        own: this rank's header; its settings are quoted only where all ranks agree that settings differ.
    Raises:
        MismatchError: names each field that differs and every rank's value.
    """
    if bool((table == table[0]).all()):
        return
    rows: list[list[int]] = table.tolist()
    parts = []
    for name, values in (
        ("protocol", [f"{row[0]:x}/{row[1]}" for row in rows]),
        ("shape", [_shape(row) for row in rows]),
        ("dtype", [_dtype(row[2]) for row in rows]),
        ("settings", [f"#{row[3]:016x}" for row in rows]),
        ("call number", [str(row[4]) for row in rows]),
    ):
        if len(set(values)) > 1:
            parts.append(f"{name}: " + ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values)))
    raise MismatchError("ranks disagree before an all-reduce, nothing was sent; " + "; ".join(parts))


def _shape(row: list[int]) -> str:
    dims = [size for size in row[6:] if size >= 0][: row[5]]
    return "(" + ", ".join(map(str, dims)) + ("," if len(dims) == 1 else "") + ")"


def _dtype(code: int) -> str:
    return str(DTYPES[code]) if 0 <= code < len(DTYPES) else "unknown dtype"
