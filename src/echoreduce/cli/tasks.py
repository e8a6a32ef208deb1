"""`echoreduce evaluate MODEL --tasks ...`: what low-bit tensor parallelism does to multiple-choice answers, beside the exact all-reduce.

For each world size and task the 16-bit all-reduce runs first, on the same batches; each variant is compared with it question by question.
With `--out` each result is appended to a JSON-lines file as soon as it is there, and a second run of the command skips what it finds.

Leaves out: scoring (`integrations.choice`), statistics (`measure.paired`), markdown of the JSON lines (`experiments/tasks.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from echoreduce.cli.report import console
from echoreduce.errors import ConfigError
from echoreduce.integrations import processes
from echoreduce.integrations.choice import Requests, Task, encode, score
from echoreduce.integrations.evaluation import Variant
from echoreduce.integrations.transformers import attach
from echoreduce.measure.paired import SIGNIFICANCE, Comparison, compare, pool
from echoreduce.measure.report import environment


@dataclass(frozen=True)
class TaskPlan:
    """A validated evaluation on tasks.

    Attributes:
        model: folder or GGUF file.
        tasks: to score.
        variants: the first is the exact all-reduce.
        world_sizes: each P is a comparison of its own.
        conditions: what a result depends on beside task, variant and P, and part of each line's key: `dtype`, `batch_tokens` and
            `prefix_token` (the token's text; None: the tokenizer's own) are read here.
        in_processes: real gloo processes instead of virtual ranks.
        out: JSON-lines file to append to and to resume from.
    """

    model: Path
    tasks: list[Task]
    variants: list[Variant]
    world_sizes: list[int]
    conditions: dict[str, Any]
    in_processes: bool = False
    out: Path | None = None


@dataclass(frozen=True)
class Key:
    """What a result is of: equal keys are equal measurements."""

    task: str
    examples: int
    variant: str
    digest: int
    world_size: int
    conditions: str


@dataclass(frozen=True)
class Line:
    """One result: its key, the comparison with 16-bit, wall time in seconds and input tokens."""

    key: Key
    comparison: Comparison
    seconds: float
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the key's fields stand beside the others."""
        return asdict(self.key) | {"seconds": self.seconds, "tokens": self.tokens} | asdict(self.comparison)

    @staticmethod
    def of(record: dict[str, Any]) -> Line:
        """The inverse of `as_dict`."""
        key = Key(**{field.name: record[field.name] for field in fields(Key)})
        comparison = Comparison(**{field.name: record[field.name] for field in fields(Comparison)})
        return Line(key, comparison, record["seconds"], record["tokens"])


def read_lines(path: Path | None) -> list[Line]:
    """Results of a JSON-lines file; none if there is no file. A last line that was cut off by a kill is left out."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path is not None and path.is_file() else ():
        try:
            record = json.loads(text)
        except ValueError:
            continue
        if "task" in record:
            found.append(Line.of(record))
    return found


@dataclass
class Writer:
    """Collects results and appends each to the file at once; a file that ends in half a line gets a line end first."""

    path: Path | None
    lines: list[Line] = field(default_factory=list)
    _opened: bool = False

    def add(self, line: Line) -> None:
        """Keep and write a result."""
        self.lines.append(line)
        if not console.is_terminal:  # a terminal has the progress bar
            console.print(
                f"P = {line.key.world_size}, {line.key.task}, {line.key.variant}: {line.comparison.accuracy:.3f}, {line.seconds:.1f} s"
            )
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+", encoding="utf-8") as file:
            if not self._opened:
                if file.tell():
                    file.write("\n")
                file.write(json.dumps({"environment": environment()}) + "\n")
                self._opened = True
            file.write(json.dumps(line.as_dict()) + "\n")


def run(plan: TaskPlan, model: Any, tokenizer: Any) -> list[Line]:
    """Measure what the file does not hold yet, and return all results of the plan: by P, task and variant."""
    known = {line.key: line for line in read_lines(plan.out)}
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    prefix = token_id(tokenizer, plan.conditions["prefix_token"])
    with console.status("tokenizing"):
        requests = [encode(tokenizer, task, plan.conditions["batch_tokens"], length, prefix) for task in plan.tasks]
    writer = Writer(plan.out)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        sequences = sum(request.sequences for request in requests)
        bar = progress.add_task("sequences", total=sequences * len(plan.variants) * len(plan.world_sizes))
        for world_size in plan.world_sizes:
            measurement = Measurement(plan, requests, world_size, known, writer, bar_of(progress, bar))
            if plan.in_processes:
                measurement.in_processes()
            else:
                measurement.virtually(model)
    known |= {line.key: line for line in writer.lines}
    return [known[key_of(plan, task, variant, p)] for p in plan.world_sizes for task in plan.tasks for variant in plan.variants]


def token_id(tokenizer: Any, token: str | None) -> int | None:
    """Id of a token of the vocabulary; None of None.

    Raises:
        ConfigError: the vocabulary lacks it.
    """
    if token is None:
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if token not in vocabulary:
        raise ConfigError(f"--prefix-token {token!r} is not a token of this model")
    return vocabulary[token]


def bar_of(progress: Progress, bar: Any) -> Callable[[int, str], None]:
    """Function that advances the bar by rows and names what is running."""

    def advance(rows: int, name: str) -> None:
        progress.update(bar, advance=rows, description=name)

    return advance


def key_of(plan: TaskPlan, task: Task, variant: Variant, world_size: int) -> Key:
    """Key of one result."""
    assert variant.config is not None, "every row of a table has a configuration"
    conditions = json.dumps(plan.conditions, sort_keys=True)
    return Key(task.name, len(task), variant.name, variant.config.digest(), world_size, conditions)


@dataclass
class Measurement:
    """All tasks at one world size."""

    plan: TaskPlan
    requests: list[Requests]
    world_size: int
    known: dict[Key, Line]
    writer: Writer
    advance: Callable[[int, str], None]

    def missing(self, task: Task) -> list[Variant]:
        """Variants that the file lacks; with the exact one in front, as it is what they are compared with."""
        exact, *others = self.plan.variants
        left = [v for v in others if key_of(self.plan, task, v, self.world_size) not in self.known]
        return [exact, *left] if left or key_of(self.plan, task, exact, self.world_size) not in self.known else []

    def record(self, index: int, variant: Variant, exact: Tensor, scores: Tensor, seconds: float) -> None:
        """Compare and write, if it is new."""
        task = self.plan.tasks[index]
        key = key_of(self.plan, task, variant, self.world_size)
        if key not in self.known:
            comparison = compare(exact, scores, torch.tensor(task.labels), task.characters())
            self.writer.add(Line(key, comparison, round(seconds, 3), self.requests[index].tokens))

    def virtually(self, model: Any) -> None:
        """Virtual ranks in this process, task by task."""
        for index, task in enumerate(self.plan.tasks):
            variants = self.missing(task)
            self.advance((len(self.plan.variants) - len(variants)) * self.requests[index].sequences, task.name)
            exact = torch.empty(0)
            for variant in variants:
                name = f"P = {self.world_size}, {task.name}, {variant.name}"
                started = time.perf_counter()
                with self.attached(model, variant):
                    scores = score(model, self.requests[index], lambda rows, name=name: self.advance(rows, name))  # type: ignore[misc]
                exact = scores if variant is variants[0] else exact
                self.record(index, variant, exact, scores, time.perf_counter() - started)

    def attached(self, model: Any, variant: Variant) -> AbstractContextManager[Any]:
        """The model with the variant's virtual ranks."""
        assert variant.config is not None, "every row of a table has a configuration"
        return attach(model, variant.config, world_size=self.world_size)

    def in_processes(self) -> None:
        """Real gloo processes, all tasks of a variant after the other; results that the file holds already are not written again."""
        if not any(self.missing(task) for task in self.plan.tasks):
            return
        plan, exact = self.plan, dict[int, Tensor]()
        threads = max(1, torch.get_num_threads() // self.world_size)
        rendezvous = processes.rendezvous_file()
        dtype = plan.conditions["dtype"]
        job = processes.Job(
            str(plan.model), dtype, None, 1, plan.variants, self.world_size, rendezvous, threads, tasks=tuple(self.requests)
        )

        def on_event(event: processes.Event) -> None:
            variant = plan.variants[event.variant]
            self.advance(event.windows, f"P = {self.world_size}, {variant.name}")
            if event.scores is not None:
                scores = torch.tensor(event.scores, dtype=torch.float64)
                self.record(event.task, variant, exact.setdefault(event.task, scores), scores, event.seconds)

        processes.evaluate(job, on_event)


# --- printing -------------------------------------------------------------------------------------------------------------------------


def print_lines(lines: list[Line], title: str) -> None:
    """A table for each world size: every task and variant, then all tasks as one."""
    for world_size in dict.fromkeys(line.key.world_size for line in lines):
        here = [line for line in lines if line.key.world_size == world_size]
        table = Table(
            box=SIMPLE_HEAD,
            padding=(0, 0, 0, 1),
            title=f"{title}, P = {world_size}",
            caption=f"acc and norm (by characters) in %; p: two-sided exact test against 16-bit, * below {SIGNIFICANCE:g}; KL in nats",
            title_justify="left",
            caption_justify="left",
        )
        table.add_column("task (n), variant", min_width=16, overflow="fold")
        for name in ("acc", "change", "norm", "flips", "KL", "p"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, group in grouped(here):
            table.add_row(f"{name.removeprefix('bigbench_')} ({group[0][1].examples})")
            for index, (variant, found) in enumerate(group):
                table.add_row(f"  {variant}", *cells(found), end_section=index == len(group) - 1)
        console.print(table)


def grouped(lines: list[Line]) -> Iterator[tuple[str, list[tuple[str, Comparison]]]]:
    """(task, its variants), and at the end all tasks pooled if there are several."""
    for task in dict.fromkeys(line.key.task for line in lines):
        yield task, [(line.key.variant, line.comparison) for line in lines if line.key.task == task]
    if len({line.key.task for line in lines}) > 1:
        variants = dict.fromkeys(line.key.variant for line in lines)
        yield "all", [(variant, pool(line.comparison for line in lines if line.key.variant == variant)) for variant in variants]


def cells(found: Comparison) -> tuple[str, ...]:
    """Accuracy and its standard error, change, acc_norm, flips, KL, p."""
    return (
        f"{100 * found.accuracy:.1f} ± {100 * found.standard_error:.1f}",
        f"{100 * (found.accuracy - found.exact):+.1f}",
        f"{100 * found.accuracy_norm:.1f}",
        f"+{found.gained}/-{found.lost}",
        f"{found.divergence:.2g}",
        f"{found.p_value:.2g}{'*' if found.significant else ' '}",
    )
