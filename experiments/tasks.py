"""Table 6: accuracy on multiple-choice tasks, from the JSON lines of `echoreduce evaluate --tasks ... --out`.

    python experiments/tasks.py results.jsonl

prints markdown: for each P a row a task and a column a variant, with the change of accuracy in points, answers that turned right and wrong,
and the p-value of the two-sided exact test; then all tasks pooled, and how many tests of how many are below 5 %, paired (McNemar's exact
test, which the other rows show) and unpaired (the paper's test, with the binomial error of each accuracy).

Leaves out: measuring (docs/tasks.md has the command). Source: the paper, Table 6.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from echoreduce.cli.tasks import Line, read_lines
from echoreduce.errors import ConfigError
from echoreduce.measure.paired import SIGNIFICANCE, Comparison, pool

EXACT = "16-bit"


def main(path: Annotated[Path, typer.Argument(help="JSON lines of echoreduce evaluate --tasks --out")]) -> None:
    """Print Table 6 as markdown."""
    lines = read_lines(path)
    if not lines:
        raise ConfigError(f"no results in {path}")
    for conditions in dict.fromkeys(line.key.conditions for line in lines):
        print(", ".join(f"{name} {value}" for name, value in json.loads(conditions).items() if value is not None))
        chosen = [line for line in lines if line.key.conditions == conditions]
        for world_size in sorted({line.key.world_size for line in chosen}):
            print_table([line for line in chosen if line.key.world_size == world_size], world_size)


def print_table(lines: list[Line], world_size: int) -> None:
    """One P."""
    variants = [name for name in dict.fromkeys(line.key.variant for line in lines) if name != EXACT]
    print(f"\nP = {world_size}\n\n| task | n | 16 bits, % | {' | '.join(variants)} |")
    print(f"|---|---:|---:|{'---:|' * len(variants)}")
    found = {(line.key.task, line.key.variant): line.comparison for line in lines}
    for task in dict.fromkeys(line.key.task for line in lines):
        print_row(task, found[task, EXACT], [found.get((task, name)) for name in variants])
    pooled = [pool(c for (_, variant), c in found.items() if variant == name) for name in [EXACT, *variants]]
    print_row("**all**", pooled[0], list(pooled[1:]))
    for kind, counts in counted(found, variants):
        print(f"| {kind} | | | {' | '.join(map(str, counts))} |")
    print(f"| KL, nats | | | {' | '.join(f'{c.divergence:.2g}' for c in pooled[1:])} |")


def counted(found: dict[tuple[str, str], Comparison], variants: list[str]) -> list[tuple[str, list[int]]]:
    """How many tasks of each variant a test tells from 16 bits, for both tests."""
    kinds = {"tests below 5 %": lambda c: c.p_value, "... unpaired": lambda c: c.unpaired_p_value}
    return [
        (kind, [sum(p_of(c) < SIGNIFICANCE for (_, variant), c in found.items() if variant == name) for name in variants])
        for kind, p_of in kinds.items()
    ]


def print_row(name: str, exact: Comparison, variants: list[Comparison | None]) -> None:
    """Accuracy of 16 bits with its standard error, and what each variant changes."""
    cells = [cell(found) if found is not None else "not measured" for found in variants]
    accuracy = f"{100 * exact.accuracy:.1f} ± {100 * exact.standard_error:.1f}"
    print(f"| {label(name)} | {exact.examples} | {accuracy} | {' | '.join(cells)} |")


def label(task: str) -> str:
    """A task's name in words: bigbench_hyperbaton -> hyperbaton, bigbench_physics__easy_ones -> physics, easy ones."""
    return task.removeprefix("bigbench_").removesuffix("_1000perparadigm_min").replace("__", ", ").replace("_", " ")


def cell(found: Comparison) -> str:
    """Change in points (flips; p)."""
    p = f"p {found.p_value:.2g}"
    return f"{100 * (found.accuracy - found.exact):+.1f} (+{found.gained} / -{found.lost}; {f'**{p}**' if found.significant else p})"


if __name__ == "__main__":
    typer.run(main)
