"""Markdown tables of `accuracy.py`'s result lines, and the paper's claims about its Table 8 held against them.

Every figure comes from the lines; what the paper says is quoted in `PAPER` with its section. Leaves out: pictures (`accuracy_plots`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from accuracy_trials import Shape
from accuracy_variants import SETS

Line = dict[str, Any]

#: Llama-3-8B and Qwen3-8B, P = 4, WikiText perplexity as the prose of Section 7.2 gives it: (16-bit, value).
PAPER = {
    "no feedback": ((6.07, 6.73), (9.70, 10.45)),
    "paper": ((6.07, 6.36), (9.70, 9.80)),
}


@dataclass(frozen=True)
class Run:
    """Lines of one model at one P that were measured alike: by text, by variant."""

    model: str
    world_size: int
    dtype: str
    shape: Shape
    texts: dict[str, dict[str, Line]]

    @property
    def title(self) -> str:
        """Conditions, in words."""
        parts = []
        for text, lines in self.texts.items():
            line = next(iter(lines.values()))
            parts.append(f"{text} ({line['windows']} windows of {line['window']}, 16-bit {line['exact_perplexity']:.3f})")
        return f"{self.model}, P = {self.world_size}, {self.dtype}: " + "; ".join(parts)


def runs(lines: Iterable[Line]) -> list[Run]:
    """Sort lines into runs; a variant measured twice on a text counts once, with the most windows."""
    found: dict[tuple[str, int, str], Run] = {}
    for line in lines:
        place = (line["model"], line["world_size"], line["dtype"])
        run = found.setdefault(place, Run(*place, Shape(line["hidden"], line["sites"]), {}))
        kept = run.texts.setdefault(line["text"], {})
        if line["name"] not in kept or kept[line["name"]]["windows"] <= line["windows"]:
            kept[line["name"]] = line
    return list(found.values())


def tables(lines: Iterable[Line], names: Iterable[str]) -> str:
    """Markdown of the sets `names`, run by run."""
    parts = []
    for run in runs(lines):
        for name in names:
            body = set_table(run, name)
            if body:
                parts += [f"### {name}: {run.title}", "", body, ""]
                if name == "table4":
                    parts += [quoted(), ""]
                if name in ("table8", "table8_8bit"):
                    parts += [claims_table(run, 4 if name == "table8" else 8), ""]
    return "\n".join(parts)


def set_table(run: Run, name: str) -> str:
    """One row a variant of the set that was measured, by mean KL where the set is a search, else in the set's order."""
    rows = []
    for trial in SETS[name](run.shape):
        found = [lines.get(trial.name) for lines in run.texts.values()]
        measured = [line for line in found if line is not None and line["configuration"] == trial.as_data()]
        if measured:
            kl = sum(line["kl"] for line in measured) / len(measured)
            bits = measured[0]["bits_per_value"]
            rows.append((kl, [trial.name, f"{bits:.3f}", *(cell(line) for line in found)]))
    if not name.startswith("table"):
        rows.sort(key=lambda row: row[0])
    header = ["variant", "bits", *(f"{text}: increase, KL, top-1" for text in run.texts)]
    return markdown(header, [cells for _, cells in rows]) if rows else ""


def cell(line: Line | None) -> str:
    """Increase of the perplexity with its standard error, KL, agreement of the top token."""
    if line is None:
        return "not measured"
    increase = f"{line['increase_percent']:+.2f} ± {line['increase_percent_error']:.2f} %"
    return f"{increase}, {line['kl']:.5f}, {100 * line['agreement']:.1f} %"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table: first column left, the others right."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def quoted() -> str:
    """The paper's own figures as increases."""
    rows = [[name, *(f"{base:.2f} to {value:.2f}, {100 * (value / base - 1):+.1f} %" for base, value in PAPER[name])] for name in PAPER]
    return markdown(["the paper, Section 7.2, WikiText, P = 4", "Llama-3-8B", "Qwen3-8B"], rows)


# --- the paper's claims about Table 8 -----------------------------------------------------------------------------------------

#: (claim, the variant that should be better, the one that should be worse); b stands for the bits.
CLAIMS = (
    ("groups of 256 are worse than of 128, symmetric", "{b} off symmetric g128", "{b} off symmetric g256"),
    ("... and asymmetric", "{b} off asymmetric g128", "{b} off asymmetric g256"),
    ("naive asymmetric loses to symmetric (with the compensator)", "{b} paper symmetric g128", "{b} paper asymmetric g128"),
    ("... and without", "{b} off symmetric g128", "{b} off asymmetric g128"),
    ("zero-aware beats symmetric", "{b} paper zero_aware g128", "{b} paper symmetric g128"),
    ("zero-aware beats naive asymmetric", "{b} paper zero_aware g128", "{b} paper asymmetric g128"),
    ("the compensator beats none", "{b} paper zero_aware g128", "{b} off zero_aware g128"),
    ("two averages beat the slow one alone", "{b} paper zero_aware g128", "{b} paper single average a 1"),
    ("two averages beat the fast one alone", "{b} paper zero_aware g128", "{b} paper single average a 0"),
    ("gain 0.75 beats 0.9", "{b} paper zero_aware g128", "{b} paper gain 0.9"),
    ("gain 0.7 beats 0.9", "{b} paper gain 0.7", "{b} paper gain 0.9"),
    ("gain 0.75 beats 1", "{b} paper zero_aware g128", "{b} paper gain 1.0"),
    ("(ours) the local residual beats the group residual", "{b} local zero_aware g128", "{b} paper zero_aware g128"),
    ("(ours) with the local residual gain 1 beats 0.75", "{b} local zero_aware g128", "{b} local gain 0.75"),
    ("(ours) single step beats two averages, local", "{b} local zero_aware g128", "{b} local betas 0.7 0.3"),
)


def claims_table(run: Run, bits: int) -> str:
    """Each claim against each text: confirmed or contradicted by the KL, undecided within two standard errors of the difference."""
    rows = []
    for claim, better, worse in CLAIMS:
        pair = better.format(b=f"b{bits}"), worse.format(b=f"b{bits}")
        rows.append([claim, *(verdict(*(lines.get(name) for name in pair)) for lines in run.texts.values())])
    return markdown([f"claim, {bits} bits (KL of better and worse)", *run.texts], rows)


def verdict(better: Line | None, worse: Line | None) -> str:
    """In words, with both figures. Window by window where both lines hold them: what makes a window hard is the same for both."""
    if better is None or worse is None:
        return "not measured"
    margin = 2 * (better["kl_error"] ** 2 + worse["kl_error"] ** 2) ** 0.5
    pairs = list(zip(better.get("kl_windows", ()), worse.get("kl_windows", ())))
    if len(pairs) == better["windows"] == worse["windows"] > 2:
        margin = 2 * stdev(after - before for before, after in pairs) / len(pairs) ** 0.5
    gap = worse["kl"] - better["kl"]
    word = "undecided" if abs(gap) <= margin else "confirmed" if gap > 0 else "contradicted"
    return f"{word}: {better['kl']:.5f}, {worse['kl']:.5f} ({gap:+.2g} ± {margin / 2:.1g})"


def claims_by_size(lines: Iterable[Line], text: str) -> str:
    """Each claim at 4 and 8 bits and every P on one text, a table a model: verdict, and how far the worse one's KL is above."""
    return claims_side_by_side((line for line in lines if line["text"] == text), text, lambda line: f"P = {line['world_size']}")


def claims_by_text(lines: Iterable[Line], world_size: int) -> str:
    """As `claims_by_size`, with the texts side by side at one P."""
    chosen = (line for line in lines if line["world_size"] == world_size)
    return claims_side_by_side(chosen, f"P = {world_size}", lambda line: str(line["text"]))


def claims_side_by_side(lines: Iterable[Line], title: str, column: Callable[[Line], str]) -> str:
    """The tables of `claims_by_size`, with a column for each value of `column` and width."""
    found: dict[str, dict[tuple[str, str], list[Line]]] = {}
    for line in lines:
        found.setdefault(line["model"], {}).setdefault((column(line), line["name"]), []).append(line)
    parts = []
    for model, measured in found.items():
        columns = sorted({place for place, _ in measured})
        header = ["claim", *(f"{bits} bits, {place}" if place == columns[0] else place for bits in (4, 8) for place in columns)]
        rows = []
        for claim, *pair in CLAIMS:
            names = [[name.format(b=f"b{bits}") for name in pair] for bits in (4, 8)]
            rows.append([claim, *(short_verdict(*(measured.get((place, n), []) for n in both)) for both in names for place in columns)])
        parts += [f"### claims: {model}, {title}", "", markdown(header, rows), ""]
    return "\n".join(parts)


def claims_counted(lines: Iterable[Line]) -> str:
    """Over all texts and P of a model and width: how many verdicts confirm, leave undecided and contradict each claim."""
    found: dict[str, dict[tuple[str, int], dict[str, list[Line]]]] = {}
    for line in lines:
        place = found.setdefault(line["model"], {}).setdefault((line["text"], line["world_size"]), {})
        place.setdefault(line["name"], []).append(line)
    header = ["claim: confirmed / undecided / contradicted", *(f"{model}, {bits} bits" for model in found for bits in (4, 8))]
    rows = []
    for claim, *pair in CLAIMS:
        row = [claim]
        for places in found.values():
            for bits in (4, 8):
                names = [name.format(b=f"b{bits}") for name in pair]
                words = [short_verdict(*(measured.get(name, []) for name in names)).split(",")[0] for measured in places.values()]
                row.append(" / ".join(str(words.count(word)) for word in ("confirmed", "undecided", "contradicted")))
        rows.append(row)
    return markdown(header, rows)


def short_verdict(better: list[Line], worse: list[Line]) -> str:
    """The verdict of the two lines on the same windows, of those with the most tokens: one word and the difference."""
    pairs = [(a, b) for a in better for b in worse if all(a[name] == b[name] for name in ("windows", "window", "dtype"))]
    if not pairs:
        return "not measured"
    a, b = max(pairs, key=lambda pair: float(pair[0]["tokens"]))
    ratio = b["kl"] / a["kl"]
    return f"{verdict(a, b).split(':')[0]}, {f'{ratio:.3g} times' if ratio >= 2 else f'{100 * (ratio - 1):+.1f} %'}"


def frontier(lines: Iterable[Line], measure: str = "kl") -> list[Line]:
    """Lines that no other beats in both bits and `measure`, by bits."""
    best: list[Line] = []
    for line in sorted(lines, key=lambda line: (line["bits_per_value"], line[measure])):
        if not best or line[measure] < best[-1][measure]:
            best.append(line)
    return best


def frontier_table(lines: Iterable[Line]) -> str:
    """The frontier of each model, P and text by KL, with names."""
    parts = []
    for run in runs(lines):
        for text, found in run.texts.items():
            rows = [[line["name"], f"{line['bits_per_value']:.3f}", cell(line)] for line in frontier(found.values())]
            parts += [f"### frontier: {run.model}, P = {run.world_size}, {text}", "", markdown(["variant", "bits", "result"], rows), ""]
    return "\n".join(parts)


def blend_table(lines: Iterable[Line]) -> str:
    """Relative rms error of each zero-point rule, mean square over sites."""
    parts = []
    for line in lines:
        found = line["blend"]
        if found["site"] == "all":
            columns = list(next(iter(found["errors"].values())))
            rows = [[rule, *(f"{100 * values[column]:.3f} %" for column in columns)] for rule, values in found["errors"].items()]
            title = f"{line['model']}, P = {line['world_size']}, {line['text']}, {line['windows']} windows"
            shares = f"one-sided groups {100 * found['one_sided']:.2f} %, near one-sidedness {100 * found['near']:.2f} %"
            parts += [f"### zero-point rules: {title}; {shares}", "", markdown(["rule", *columns], rows), ""]
    return "\n".join(parts)
