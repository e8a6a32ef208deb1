"""Sets of variants in search of a better default: single features, fewer bits a group, combinations, bits by site, ranges, feedback off.

Leaves out: the paper's tables, others' formats (`accuracy_variants`). Source: issue 6; results in docs/accuracy.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accuracy_trials import HADAMARD, LOCAL, Shape, Trial, emulated, local
from echoreduce.config import NO_FEEDBACK, PRESETS, QuantConfig
from echoreduce.sites import edges, uniform
from wire_formats import ALWAYS, Codebook, GroupGrid, LibraryGrid


def default_search(shape: Shape) -> list[Trial]:
    """One feature at a time, or two, from the base (`local`)."""
    rows = [Trial("16-bit", PRESETS["exact"])]
    for mark, rotation in HADAMARD.items():
        quant = QuantConfig(rotation=rotation)  # type: ignore[arg-type]
        for first in range(4):
            for last in range(4):
                rows.append(Trial(f"edges {first}+{last}{mark}", local(quant, sites=edges(first, last, 8))))
        rows += [Trial(f"edges 2+2 at {bits} bits{mark}", local(quant, sites=edges(2, 2, bits))) for bits in (5, 6, 16)]
        rows += [Trial(f"g{g}{mark}", local(replace(quant, group_size=g))) for g in (16, 32, 64, 256)]
        rows += [Trial(f"{policy}{mark}", local(replace(quant, policy=policy))) for policy in ("symmetric", "asymmetric")]  # type: ignore[arg-type]
        rows += [Trial(f"{bits} bits{mark}", local(quant.with_bits(bits))) for bits in (3, 5, 6)]
        rows.append(Trial(f"one-shot{mark}", local(quant, algorithm="one_shot")))
        rows.append(Trial(f"one-shot uniform{mark}", local(quant, algorithm="one_shot", sites=uniform())))
        rows.append(Trial(f"no feedback edges 2+2{mark}", local(quant, feedback=NO_FEEDBACK)))
        rows += [
            Trial(f"state {state}{mark}", local(quant, feedback=replace(LOCAL, state=state)))  # type: ignore[arg-type]
            for state in ("bf16", "float8_e4m3", "float8_e5m2")
        ]
        rows += feedback_search(mark, quant)
    return rows


def feedback_search(mark: str, quant: QuantConfig) -> list[Trial]:
    """What the library does not offer, on its own grid."""
    grid = LibraryGrid(replace(quant, rotation="none"))
    rotation = quant.group_size if mark else 0
    rows = [emulated(f"gain {a} to {b}{mark}", grid, rotation=rotation, gain=(a, b)) for a, b in ((0.0, 1.0), (0.5, 1.0), (1.0, 0.5))]
    rows.append(emulated(f"gain 0.9{mark}", grid, rotation=rotation, gain=(0.9, 0.9)))
    rows.append(emulated(f"attention and MLP apart{mark}", grid, rotation=rotation, lag=2))
    rows.append(emulated(f"own segment rounded{mark}", grid, rotation=rotation, quantize_own=True))
    rows.append(emulated(f"own segment rounded uniform{mark}", grid, rotation=rotation, quantize_own=True, sites=uniform()))
    for bits in (5, 6, 8):
        finer = LibraryGrid(grid.quant.with_bits(bits))
        rows.append(emulated(f"gather {bits} bits{mark}", grid, gather=finer, rotation=rotation))
        rows.append(emulated(f"push {bits} bits{mark}", finer, gather=grid, rotation=rotation))
    rows.append(emulated(f"diffusion in a group{mark}", GroupGrid(diffusion=True), rotation=rotation))
    return rows


def compact(shape: Shape) -> list[Trial]:
    """Fewer bits or a smaller error a group; edges 2 + 2 at 8 bits, local feedback."""
    rows = []
    for g in (32, 64, 128):
        word = GroupGrid(group_size=g, gap=ALWAYS, one_word=True)
        for mark, rotation in (("", 0), (" H", g), (" H256", 256), (" H512", 512)):
            rows.append(emulated(f"two words g{g}{mark}", GroupGrid(group_size=g), rotation=rotation))
            rows.append(emulated(f"one word g{g}{mark}", word, rotation=rotation))
        shrink = (1.0, 0.95, 0.9, 0.85, 0.8)
        for mark, rotation in (("", 0), (" H", g)):
            rows.append(emulated(f"shrink g{g}{mark}", GroupGrid(group_size=g, shrink=shrink), rotation=rotation))
            rows.append(emulated(f"one word shrink g{g}{mark}", replace(word, shrink=shrink), rotation=rotation))
            rows.append(emulated(f"one spike g{g}{mark}", GroupGrid(group_size=g, spikes=1), rotation=rotation))
            rows.append(emulated(f"one word one spike g{g}{mark}", replace(word, spikes=1), rotation=rotation))
            rows.append(emulated(f"symmetric g{g}{mark}", LibraryGrid(QuantConfig(group_size=g, policy="symmetric")), rotation=rotation))
        for mark, rotation in ((" H", g), (" H256", 256)):
            rows.append(emulated(f"nf4 g{g}{mark}", Codebook(g), rotation=rotation))
            rows.append(emulated(f"lloyd g{g}{mark}", Codebook(g, "lloyd"), rotation=rotation))
            stretch = Codebook(g, "lloyd", (1.0, 0.9, 0.95, 1.05, 1.1, 1.2))
            rows.append(emulated(f"lloyd stretch g{g}{mark}", stretch, rotation=rotation))
    rows += [emulated(f"one word {b} bits g128 H", GroupGrid(bits=b, gap=ALWAYS, one_word=True), rotation=128) for b in (3, 5)]
    return rows


def combined(shape: Shape) -> list[Trial]:
    """What the other two searches suggest together: rotated groups with one word, edges, finer gather, a fixed or searched range."""
    rows = []
    for g in (64, 128):
        word = GroupGrid(group_size=g, gap=ALWAYS, one_word=True)
        searched = replace(word, shrink=(1.0, 0.95, 0.9, 0.85, 0.8))
        for label, form in (("one word", word), ("one word searched range", searched)):
            for first, last in ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (4, 2)):
                rows.append(emulated(f"{label} g{g} H edges {first}+{last}", form, rotation=g, sites=edges(first, last, 8)))
            finer = replace(form, bits=5)
            rows.append(emulated(f"{label} g{g} H gather 5 bits", form, gather=finer, rotation=g))
            rows.append(emulated(f"{label} g{g} H 5 bits", finer, rotation=g))
        rows += [emulated(f"one word range {f} g{g} H", replace(word, shrink=(f,)), rotation=g) for f in (0.95, 0.9, 0.85)]
        rows.append(emulated(f"one word range 1 or 0.9 g{g} H", replace(word, shrink=(1.0, 0.9)), rotation=g))
        rows.append(emulated(f"one word signs g{g} H", word, rotation=g, signs=True))
        rows.append(emulated(f"one word g{g} H{2 * g}", word, rotation=2 * g))
        rows.append(emulated(f"two words signs g{g} H", GroupGrid(group_size=g), rotation=g, signs=True))
    return rows


#: Bits of single sites, from the start (0, 1, ...) or the end (-1, ...); the others send 4.
SINGLE_SITES: dict[str, dict[int, int]] = {
    "66-8": {0: 6, 1: 6, -1: 8},
    "666-68": {0: 6, 1: 6, 2: 6, -2: 6, -1: 8},
    "6655-68": {0: 6, 1: 6, 2: 5, 3: 5, -2: 6, -1: 8},
    "6663-68": {0: 6, 1: 6, 2: 6, 3: 5, -2: 6, -1: 8},
    "777-78": {0: 7, 1: 7, 2: 7, -2: 7, -1: 8},
    "7765-68": {0: 7, 1: 7, 2: 6, 3: 5, -2: 6, -1: 8},
    "8766-78": {0: 8, 1: 7, 2: 6, 3: 6, -2: 7, -1: 8},
    "7765-68 +23,48@6": {0: 7, 1: 7, 2: 6, 3: 5, -2: 6, -1: 8, 23: 6, 48: 6},
    "7765-68 +23,48,57,47@5": {0: 7, 1: 7, 2: 6, 3: 5, -2: 6, -1: 8, 23: 5, 48: 5, 57: 5, 47: 5},
}


def per_site(shape: Shape) -> list[Trial]:
    """Which sites get more bits, and how many: rotated, one or two words a group; rotations of part of a group."""
    rows = []
    for first, last in ((2, 2), (3, 2), (3, 3), (2, 1), (4, 2)):
        word = GroupGrid(group_size=64, gap=ALWAYS, one_word=True)
        rows.append(emulated(f"one word g64 H edges {first}+{last}", word, rotation=64, sites=edges(first, last, 8)))
        rotated = QuantConfig(rotation="hadamard")
        rows.append(Trial(f"two words g128 H edges {first}+{last}", local(rotated, sites=edges(first, last, 8))))
    for name, single in SINGLE_SITES.items():
        bits = tuple(single.get(site, single.get(site - shape.sites, 4)) for site in range(shape.sites))
        for g in (64, 128):
            config = local(QuantConfig(group_size=g, rotation="hadamard"), sites=bits)
            rows.append(Trial(f"two words g{g} H sites {name}", config))
    for g in (64, 128):
        for rotation in (16, 32, 64, 128):
            if rotation <= g:
                rows.append(emulated(f"two words g{g} H{rotation}", GroupGrid(group_size=g), rotation=rotation))
                form = GroupGrid(group_size=g, gap=ALWAYS, one_word=True)
                rows.append(emulated(f"one word g{g} H{rotation}", form, rotation=rotation))
    return rows


#: The same for `default`, at most 4.6 bits a value: groups of 64 leave room for 19 more bits in 60 sites, groups of 128 for 27.
EDGE_BITS: dict[int, dict[str, dict[int, int]]] = {
    64: {
        "7777-77": {0: 7, 1: 7, 2: 7, 3: 7, -2: 7, -1: 7},
        "777-777": {0: 7, 1: 7, 2: 7, -3: 7, -2: 7, -1: 7},
        "777-78": {0: 7, 1: 7, 2: 7, -2: 7, -1: 8},
        "877-78": {0: 8, 1: 7, 2: 7, -2: 7, -1: 8},
        "66655-55568": {0: 6, 1: 6, 2: 6, 3: 5, 4: 5, -5: 5, -4: 5, -3: 5, -2: 6, -1: 8},
        "77755-5578": {0: 7, 1: 7, 2: 7, 3: 5, 4: 5, -4: 5, -3: 5, -2: 7, -1: 8},
    },
    128: {"777666-66678": {0: 7, 1: 7, 2: 7, 3: 6, 4: 6, 5: 6, -5: 6, -4: 6, -3: 6, -2: 7, -1: 8}},
}


def edge_bits(shape: Shape) -> list[Trial]:
    """`default`, and with the bits of its edges spread otherwise."""
    chosen = PRESETS["default"]
    rows = [Trial("default", chosen)]
    for g, patterns in EDGE_BITS.items():
        for name, single in patterns.items():
            bits = tuple(single.get(site, single.get(site - shape.sites, 4)) for site in range(shape.sites))
            rows.append(Trial(f"default g{g} sites {name}", replace(chosen, quant=replace(chosen.quant, group_size=g), sites=bits)))
    return rows


def ranges(shape: Shape) -> list[Trial]:
    """A smaller range than a group has: one factor for all groups, or the best of some; the same by steps of the scale on the wire."""
    word = GroupGrid(group_size=64, gap=ALWAYS, one_word=True)
    site_bits = edges(3, 2, 8)

    def row(name: str, form: GroupGrid) -> Trial:
        return emulated(name, form, rotation=64, sites=site_bits)

    rows = [row(f"factor {f}", replace(word, shrink=(f,))) for f in (1.0, 0.97, 0.94)]
    rows.append(row("factor 1 or 0.9", replace(word, shrink=(1.0, 0.9))))
    for below in ((1,), (0, 1), (0, 2), (0, 1, 2), (1, 2), (1, 3)):
        rows.append(row(f"steps below {' or '.join(map(str, below))}", replace(word, below=below)))
    for bits in (4, 5, 6):
        for rounding in ("up", "nearest", "down"):
            rows.append(row(f"{bits} bits, scale rounded {rounding}", replace(word, bits=bits, rounding=rounding)))
    return rows


def no_feedback(shape: Shape) -> list[Trial]:
    """Bits, groups and rotation without feedback, and weak feedback: for models that norm the sum before it joins the residual stream."""
    rows = []
    for mark, rotation in HADAMARD.items():
        for bits in (4, 5, 6, 8):
            for g in (32, 64, 128):
                quant = QuantConfig(bits, g, rotation=rotation)  # type: ignore[arg-type]
                rows.append(Trial(f"off {bits} bits g{g}{mark}", local(quant, feedback=NO_FEEDBACK, sites=uniform())))
        for gain in (0.1, 0.25, 0.5, 1.0):
            grid = LibraryGrid(QuantConfig())
            weak: dict[str, Any] = {"rotation": 128 if mark else 0, "sites": uniform(), "gain": (gain, gain)}
            rows.append(emulated(f"gain {gain}, next site{mark}", grid, **weak))
            rows.append(emulated(f"gain {gain}, two sites later{mark}", grid, lag=2, **weak))
    return rows
