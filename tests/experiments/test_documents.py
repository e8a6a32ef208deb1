"""The tables of docs/tasks.md and docs/accuracy.md are those of the recorded results, cell by cell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from accuracy_report import claims_by_size, claims_by_text, claims_counted
from accuracy_run import read_lines
from echoreduce.cli import tasks as results
from echoreduce.measure.paired import Comparison, pool
from tasks import EXACT, cell, counted, label
from training_report import gaps

DOCS = Path(__file__).parents[2] / "docs"
ALL = "**all**"


@cache
def recorded(name: str) -> dict[tuple[str, str, int], Comparison]:
    """Comparisons of a result file by label, variant and P; `ALL` are all tasks pooled."""
    found = {
        (label(line.key.task), line.key.variant, line.key.world_size): line.comparison
        for line in results.read_lines(DOCS / "results" / name)
    }
    for variant, size in {key[1:] for key in found}:
        found[ALL, variant, size] = pool([found[key] for key in found if key[1:] == (variant, size)])
    return found


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Header and rows of the tables of tasks in a text."""
    for block in re.findall(r"^\| task .*\n\|-.*\n(?:\|.*\n)+", text, flags=re.MULTILINE):
        header, _, *rows = [[part.strip() for part in line.strip("|").split("|")] for line in block.splitlines()]
        yield header, rows


def columns(header: list[str]) -> list[tuple[str, int]]:
    """(variant, P) of each column; what a heading leaves out is as in the column before."""
    found: list[tuple[str, int]] = []
    for heading in header[3:]:
        variant, size = re.search(r"`(\w+)`", heading), re.search(r"P = (\d+)", heading)
        found.append((variant[1] if variant else found[-1][0], int(size[1]) if size else found[-1][1]))
    return found


@pytest.mark.parametrize(
    ("heading", "file", "count"),
    [("Table 6: SmolLM2-135M-Instruct", "tasks_smollm2.jsonl", 4), ("Table 6: Gemma 3 270M", "tasks_gemma3_270m.jsonl", 3)],
)
def test_the_tables_of_tasks_are_those_of_the_results(heading: str, file: str, count: int) -> None:
    section = (DOCS / "tasks.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    found, shown = recorded(file), list(tables(section))
    assert len(shown) == count
    for header, rows in shown:
        places = columns(header)
        for name, questions, accuracy, *cells in rows[:-3]:
            exact = found[name, EXACT, places[0][1]]
            assert int(questions) == exact.examples
            assert accuracy == f"{100 * exact.accuracy:.1f} ± {100 * exact.standard_error:.1f}"
            assert cells == [cell(found[name, *place]) for place in places], name
        tasks = {name for name, *_ in found} - {ALL}
        assert {row[0] for row in rows[:-4]} == tasks
        variants = {f"{variant} {size}": (variant, size) for variant, size in places}
        chosen = {(task, key): found[task, *place] for key, place in variants.items() for task in tasks}
        tests = [(kind, [str(count) for count in counts]) for kind, counts in counted(chosen, list(variants))]
        assert [(row[0], row[3:]) for row in rows[-3:-1]] == tests
        assert rows[-1][3:] == [f"{found[ALL, *place].divergence:.2g}" for place in places]


TEXTS = {
    "WikiText-2 test": "wikitext2_test_raw",
    "Wikipedia": "wikipedia_1000_snippets",
    "web": "owt_1000_snippets",
    "Jane Austen": "jane_austen_6_novels",
}


def test_the_table_of_whole_texts_is_that_of_the_results() -> None:
    lines = {(line["text"], line["world_size"]): line for line in read_lines(DOCS / "results" / "accuracy_smollm2_whole.jsonl")}
    assert len(lines) == 12
    text = (DOCS / "accuracy.md").read_text(encoding="utf-8").replace("**", "")
    for name, file in TEXTS.items():
        found = [lines[file, size] for size in (2, 4, 8)]
        cells = [f"{line['increase_percent']:+.2f} ± {line['increase_percent_error']:.2f} % ({line['kl']:.4f})" for line in found]
        assert f"| {name} | {' | '.join(cells)} |" in text


TABLE_8 = ("smollm2_table8", "smollm2_claims", "smollm2_table8_texts", "gemma3_270m_table8", "gemma3_270m_table8_texts")


def test_the_claims_about_table_8_are_those_of_the_results() -> None:
    lines = [line for name in TABLE_8 for line in read_lines(DOCS / "results" / f"accuracy_{name}.jsonl")]
    accuracy, claims = (table_rows((DOCS / page).read_text(encoding="utf-8")) for page in ("accuracy.md", "claims.md"))
    assert set(table_rows(claims_by_size(lines, "wikitext2_test_raw"))) | set(table_rows(claims_counted(lines))) <= set(accuracy)
    assert claims == [row for size in (2, 4, 8) for row in table_rows(claims_by_text(lines, size))]
    assert len(claims) == 6 * 17
    assert not any("not measured" in row for row in claims)


def test_the_gaps_over_seeds_are_those_of_the_results() -> None:
    outs = sorted((DOCS / "results" / "training_seeds").glob("seed_*.json"))
    assert len(outs) == 10
    text = (DOCS / "training.md").read_text(encoding="utf-8").replace("**", "")
    assert [row for row in gaps([out.with_suffix("") for out in outs], 100).splitlines() if row not in text] == []


def table_rows(text: str) -> list[str]:
    return [row for row in text.splitlines() if row.startswith("|")]
