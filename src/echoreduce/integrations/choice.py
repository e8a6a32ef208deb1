"""Multiple-choice tasks: read from files, tokenized once, every choice scored by a model.

A task is a file of JSON lines: {prompt, choices, label}, or BLiMP's {uid, good, bad}, which are two choices without a prompt. The score of
a choice is the summed log-likelihood of its tokens after the prompt, by the conventions of lm-eval's `multiple_choice`: one space between
prompt and choice, trailing white space of a prompt belongs to the choice, an empty prompt becomes one special token (`prefix_token`),
and what is too long loses its beginning.

Choices whose inputs are the same tokens (one-token choices of a question) share one row. Rows are sorted by length and padded on the right:
under a causal mask no scored position sees padding. Quantization groups do see it, and their neighbours in the batch, as they would in a
server; so `encode` fixes the batches once, and every variant and every rank gets the same ones. Comparisons are paired.

Leaves out: few-shot prompts, generation; what the scores mean (`measure.paired`); lm-eval itself (`integrations.lm_eval`).
Source: Gao et al., 2023 (lm-eval 0.4.13); Warstadt et al., 2020 (BLiMP); docs/tasks.md.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echoreduce.errors import ConfigError

#: Between a prompt and a choice.
DELIMITER = " "


@dataclass(frozen=True)
class Task:
    """Questions, in the order of the file.

    Attributes:
        name: the file's name without suffix.
        prompts: one a question; may be empty.
        choices: at least two a question, none empty.
        labels: index of the right choice.
        kinds: what `limit` spreads over: BLiMP's paradigm, else "".
    """

    name: str
    prompts: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]
    labels: tuple[int, ...]
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        """Most choices of a question."""
        return max(map(len, self.choices))

    def characters(self) -> Tensor:
        """Length of each choice's text, int64 [examples, width]; 1 where there is no choice."""
        return torch.tensor([[len(text) for text in row] + [1] * (self.width - len(row)) for row in self.choices])

    def take(self, indices: list[int]) -> Task:
        """The task with these questions only."""
        prompts, choices, labels, kinds = zip(*((self.prompts[i], self.choices[i], self.labels[i], self.kinds[i]) for i in indices))
        return Task(self.name, prompts, choices, labels, kinds)


# --- files ----------------------------------------------------------------------------------------------------------------------------


def find_tasks(names: str, folder: Path | None = None) -> Iterator[tuple[Path, int | None]]:
    """Files and limits that a list such as `blimp:4000,social_iqa,my.jsonl` means.

    Args:
        names: comma-separated; each a file, a part of one file's name in the folder, or `all`; `:N` after it is its own limit.
        folder: of the JSON lines, or above their folder `choice`; None: $ECHOREDUCE_DATA.
    Raises:
        ConfigError: a name fits no file or several; the text lists them.
    """
    for name in filter(None, (part.strip() for part in names.split(","))):
        stem, _, number = name.rpartition(":")
        wanted, limit = (stem, int(number)) if stem and number.isdigit() else (name, None)
        if wanted == "all":
            yield from ((path, limit) for path in known_tasks(folder))
        else:
            yield (Path(wanted) if Path(wanted).is_file() else _named(wanted, known_tasks(folder))), limit


def known_tasks(folder: Path | None) -> list[Path]:
    """Multiple-choice files of the data folder, by name.

    Raises:
        ConfigError: no folder is given, or it holds none.
    """
    where = folder or (Path(os.environ["ECHOREDUCE_DATA"]) if "ECHOREDUCE_DATA" in os.environ else None)
    if where is None:
        raise ConfigError("a task is a file, or a name in the folder that --data or ECHOREDUCE_DATA gives")
    where = where / "choice" if (where / "choice").is_dir() else where
    found = [path for path in sorted(where.glob("*.jsonl")) if _is_choice(path)]
    if not found:
        raise ConfigError(f"no multiple-choice *.jsonl in {where}")
    return found


def _named(name: str, paths: list[Path]) -> Path:
    fitting = [path for path in paths if path.stem == name] or [path for path in paths if name in path.stem]
    if len(fitting) != 1:
        listed = ", ".join(path.stem for path in fitting or paths)
        raise ConfigError(f"task {name!r} is {'ambiguous' if fitting else 'not known'}: {listed}")
    return fitting[0]


def _is_choice(path: Path) -> bool:
    with path.open(encoding="utf-8") as lines:
        record: dict[str, Any] = json.loads(next(lines, "{}"))
    return {"prompt", "choices", "label"} <= record.keys() or {"good", "bad"} <= record.keys()


def load_task(path: str | Path, limit: int | None = None) -> Task:
    """Read a task.

    Args:
        path: JSON lines.
        limit: at most this many questions, see `spread`.
    Raises:
        ConfigError: no such file, or a line that is no question; the text names it.
    """
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"no task at {source}")
    rows = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(_question(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{source.name}, line {number}: {type(error).__name__}: {error}") from error
    if not rows:
        raise ConfigError(f"{source} holds no question")
    task = Task(source.stem, *zip(*rows))
    return task.take(spread(task.kinds, limit))


def _question(record: dict[str, Any]) -> tuple[str, tuple[str, ...], int, str]:
    """(prompt, choices, label, kind) of a line."""
    if "good" in record:
        prompt, choices, label = "", (record["good"], record["bad"]), 0
    else:
        prompt, choices, label = record["prompt"], tuple(record["choices"]), record["label"]
    if len(choices) < 2 or not all(isinstance(text, str) and text.strip() for text in choices):
        raise ValueError(f"choices must be at least two texts that are not empty, got {choices!r}")
    if not isinstance(label, int) or not 0 <= label < len(choices):
        raise ValueError(f"label must be an index of the {len(choices)} choices, got {label!r}")
    return str(prompt), choices, label, str(record.get("uid", ""))


def spread(kinds: tuple[str, ...], limit: int | None) -> list[int]:
    """Indices of at most `limit` questions, evenly over kinds and over the file; the same at every call.

    Kinds of equal size get numbers that differ by at most one.
    """
    if limit is None or limit >= len(kinds):
        return list(range(len(kinds)))
    if limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    by_kind = sorted(range(len(kinds)), key=lambda i: kinds[i])
    return sorted(by_kind[i * len(kinds) // limit] for i in range(limit))


# --- tokens ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Rows of one forward, and what is read from its logits.

    Attributes:
        inputs: token ids padded on the right, int64 [rows, length].
        keep: number of last positions whose logits are needed.
        row, position, token: of each scored token, int64 [scored]; position counts in the kept ones.
        cell: example * width + choice that it belongs to, int64 [scored].
    """

    inputs: Tensor
    keep: int
    row: Tensor
    position: Tensor
    token: Tensor
    cell: Tensor


@dataclass(frozen=True)
class Requests:
    """A tokenized task in its batches.

    Attributes:
        batches: in the order in which they run.
        present: which choices there are, bool [examples, width].
        tokens: input tokens, padding not counted.
    """

    batches: tuple[Batch, ...]
    present: Tensor
    tokens: int

    @property
    def sequences(self) -> int:
        """Rows of all batches."""
        return sum(len(batch.inputs) for batch in self.batches)


Row = tuple[tuple[int, ...], list[tuple[int, list[int]]]]


def encode(
    tokenizer: Any, task: Task, batch_tokens: int = 4096, max_length: int | None = None, prefix_token: int | None = None
) -> Requests:
    """Tokenize a task and cut it into batches.

    Args:
        tokenizer: Hugging Face tokenizer; it adds its own special tokens to a prompt.
        task: see `load_task`.
        batch_tokens: most input tokens a batch, padding counted (one row may have more).
        max_length: longest input of the model; longer ones lose their beginning.
        prefix_token: stands for an empty prompt; None: the tokenizer's first special token, else its last (lm-eval's `prefix_token_id`).
    Returns:
        Requests; equal on every rank that calls it with the same arguments.
    """
    width = task.width
    rows: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for cell, context, continuation in _pairs(tokenizer, task, prefix_token):
        whole = (context + continuation)[-(max_length + 1) :] if max_length is not None else context + continuation
        rows.setdefault(tuple(whole[:-1]), []).append((cell, continuation[-len(whole[:-1]) :]))
    batches = tuple(_batch(rows_of_batch) for rows_of_batch in _cut(sorted(rows.items(), key=lambda r: (-len(r[0]), r[0])), batch_tokens))
    present = torch.tensor([[choice < len(row) for choice in range(width)] for row in task.choices])
    return Requests(batches, present, sum(map(len, rows)))


def _pairs(tokenizer: Any, task: Task, first: int | None) -> Iterator[tuple[int, list[int], list[int]]]:
    """(cell, context tokens, tokens of the choice) of every choice; contexts are never empty."""
    cells = [(i, i * task.width + j, text) for i, row in enumerate(task.choices) for j, text in enumerate(row)]
    prompted = [bool(prompt.strip()) for prompt in task.prompts]
    options = {"verbose": False, "return_attention_mask": False}
    contexts = tokenizer([prompt.rstrip() if has else "x" for prompt, has in zip(task.prompts, prompted)], **options)["input_ids"]
    bare = [DELIMITER + text for i, _, text in cells if not prompted[i]]
    full = [task.prompts[i] + DELIMITER + text for i, _, text in cells if prompted[i]]
    alone = iter(tokenizer(bare, add_special_tokens=False, **options)["input_ids"] if bare else ())
    whole = iter(tokenizer(full, **options)["input_ids"] if full else ())
    if first is None:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    for i, cell, text in cells:
        if prompted[i]:
            context, continuation = contexts[i], next(whole)[len(contexts[i]) :]
        else:
            ids = next(alone)
            context, continuation = ([first], ids) if ids[0] != first else (ids[:1], ids[1:])
        if not continuation:
            raise ConfigError(f"{task.name}: choice {text!r} adds no token to its prompt")
        yield cell, context, continuation


def _cut(rows: list[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Rows by falling length into batches of at most `batch_tokens` tokens, padding counted."""
    start = 0
    while start < len(rows):
        count = max(1, batch_tokens // len(rows[start][0]))
        yield rows[start : start + count]
        start += count


def _batch(rows: list[Row]) -> Batch:
    length = max(len(ids) for ids, _ in rows)
    inputs = torch.tensor([list(ids) + [0] * (length - len(ids)) for ids, _ in rows])
    scored = [
        (row, len(ids) - len(tokens) + offset, token, cell)
        for row, (ids, targets) in enumerate(rows)
        for cell, tokens in targets
        for offset, token in enumerate(tokens)
    ]
    row, position, token, cell = torch.tensor(scored).unbind(1)
    keep = length - int(position.min())
    return Batch(inputs, keep, row, position - (length - keep), token, cell)


# --- scores ---------------------------------------------------------------------------------------------------------------------------


def score(model: Any, requests: Requests, advance: Callable[[int], None] | None = None) -> Tensor:
    """Summed log-likelihood of every choice; a collective call where the model is spread over ranks, which must pass equal requests.

    Args:
        model: Hugging Face causal language model, attached or not.
        requests: see `encode`.
        advance: told the number of rows after each forward.
    Returns:
        Nats, float64 [examples, width] on the CPU; -inf where a question has fewer choices. Log-sum-exp in fp32, sums in float64.
    """
    device = next(model.parameters()).device
    scores = torch.zeros(requests.present.numel(), dtype=torch.float64)
    with torch.inference_mode():
        for batch in requests.batches:
            logits = model(input_ids=batch.inputs.to(device), use_cache=False, logits_to_keep=batch.keep).logits.float()
            row, position, token = (index.to(device) for index in (batch.row, batch.position, batch.token))
            scored = logits[row, position, token] - logits.logsumexp(-1)[row, position]
            scores.index_add_(0, batch.cell, scored.double().cpu())
            if advance is not None:
                advance(len(batch.inputs))
    return torch.where(requests.present, scores.view_as(requests.present), -math.inf)
