"""The sets of variants that `accuracy.py` measures. Names are stable, and one name always means one configuration.

Each set is a function of the model's hidden size and number of sites. Those of the wire sets without "edges" send every site alike.

Leaves out: what a variant is (`accuracy_trials`), searches (`accuracy_searches`), measuring. Source: the paper, Tables 4, 5 and 8; issue 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from accuracy_searches import combined, compact, default_search, edge_bits, no_feedback, per_site, ranges
from accuracy_trials import LOCAL, Shape, Trial, emulated, local
from echoreduce.config import NO_FEEDBACK, PRESETS, FeedbackConfig, QuantConfig, preset
from echoreduce.sites import early_half, uniform
from wire_formats import ALWAYS, Float8Blocks, Format, GroupGrid, LibraryGrid, OutlierChannels

# --- the paper's tables -------------------------------------------------------------------------------------------------------


def table4(shape: Shape) -> list[Trial]:
    """Perplexity at 16, 8 and 4 bits."""
    names = {"16-bit": "exact", "8-bit": "int8", "no feedback": "no_feedback"}
    return [Trial(name, PRESETS[names.get(name, name)]) for name in (*names, "paper", "paper_early", "fast", "default", "accurate")]


def table5(shape: Shape) -> list[Trial]:
    """The early-site policy."""
    return [Trial(name, PRESETS[name]) for name in ("paper", "paper_early")] + [
        Trial("default, early half", replace(PRESETS["default"], sites=early_half(8))),
        Trial("default", PRESETS["default"]),
    ]


def table8(shape: Shape) -> list[Trial]:
    """Component ablations at 4 bits."""
    return ablations(4)


def table8_8bit(shape: Shape) -> list[Trial]:
    """Component ablations at 8 bits."""
    return ablations(8)


def ablations(bits: int) -> list[Trial]:
    """Policies and group sizes without and with feedback; coefficients of the two residuals. Uniform bits, two-shot."""
    bases = {
        "paper": preset("paper", bits=bits),
        "local": local(QuantConfig(bits=bits), sites=uniform()),
    }
    off = replace(bases["local"], feedback=NO_FEEDBACK)
    rows = []
    for name, base in {"off": off, **bases}.items():
        for policy in ("symmetric", "asymmetric", "zero_aware"):
            for group_size in (32, 64, 128, 256):
                quant = replace(base.quant, policy=policy, group_size=group_size)  # type: ignore[arg-type]
                rows.append(Trial(f"b{bits} {name} {policy} g{group_size}", replace(base, quant=quant)))
    for name, base in bases.items():
        for label, change in coefficients(base.feedback):
            rows.append(Trial(f"b{bits} {name} {label}", replace(base, feedback=replace(base.feedback, **change))))
    return rows


def claims(shape: Shape) -> list[Trial]:
    """Of both ablations, what the claims about feedback compare and few windows leave undecided."""
    names = ("paper zero_aware g128", "paper single average a 1", "paper single average a 0", "paper gain 0.7", "paper gain 0.9")
    names += ("paper gain 1.0", "local zero_aware g128", "local gain 0.75", "local betas 0.7 0.3", "paper asymmetric g128")
    return [trial for bits in (4, 8) for trial in ablations(bits) if trial.name.split(" ", 1)[1] in names]


def coefficients(feedback: FeedbackConfig) -> Iterable[tuple[str, dict[str, Any]]]:
    """What is changed about a compensator, one thing at a time; what it has already is left out."""
    for gain in (0.25, 0.5, 0.7, 0.75, 0.9, 1.0):
        if gain != feedback.gain:
            yield f"gain {gain}", {"gain": gain}
    if feedback.averages == 2:
        yield "single average a 1", {"blend": 1.0}
        yield "single average a 0", {"blend": 0.0}
        for blend in (0.2, 0.5, 0.65):
            yield f"a {blend}", {"blend": blend}
    for decays in ((0.7, 0.3), (0.5, 0.3), (0.9, 0.3), (0.7, 0.1), (0.7, 0.5), (0.0, 0.0), (0.3, 0.3), (0.1, 0.1)):
        if decays != feedback.decays:
            yield f"betas {decays[0]} {decays[1]}", {"decays": decays}


# --- others' formats ----------------------------------------------------------------------------------------------------------


def wire(shape: Shape) -> list[Trial]:
    """Formats of other systems, re-written: without and with local feedback, all sites alike and with 8-bit edges."""
    count = max(1, shape.hidden // 64)
    formats: dict[str, tuple[Format, int]] = {
        "zero-aware g128": (LibraryGrid(QuantConfig()), 0),
        "zero-aware g128 H": (LibraryGrid(QuantConfig()), 128),
        "QuickReduce-like INT4 g32": (LibraryGrid(QuantConfig(4, 32, "symmetric")), 0),
        "QuickReduce-like INT6 g32": (LibraryGrid(QuantConfig(6, 32, "symmetric")), 0),
        "QuickReduce-like INT8 g32": (LibraryGrid(QuantConfig(8, 32, "symmetric")), 0),
        "FlashInfer-like FP8 256": (Float8Blocks(256), 0),
        "TACO-like FP8 H two-level": (Float8Blocks(64, two_level=True), 64),
        "Dong-like outlier channels": (OutlierChannels(LibraryGrid(QuantConfig()), shape.hidden, count), 0),
        "FlashComm-like INT4 g128": (LibraryGrid(QuantConfig(4, 128, "asymmetric")), 0),
        "FlashComm V2-like spikes g32": (GroupGrid(group_size=32, slide=ALWAYS, spikes=2), 0),
        "FlashComm V2-like spikes g128": (GroupGrid(slide=ALWAYS, spikes=2), 0),
        "FlashComm V2-like spikes 3 bits g32": (GroupGrid(3, 32, slide=ALWAYS, spikes=2), 0),
    }
    rows = []
    for name, (form, rotation) in formats.items():
        for mark, feedback in (("", NO_FEEDBACK), (" +feedback", LOCAL)):
            rows.append(emulated(f"{name}{mark}", form, rotation=rotation, feedback=feedback, sites=uniform()))
            if form.bits_per_value < 8:
                rows.append(emulated(f"{name}{mark} +edges", form, rotation=rotation, feedback=feedback))
    return rows


# --- the zero-aware blend -----------------------------------------------------------------------------------------------------

#: Rules for a group near one-sidedness; `zero_aware` is the library's.
BLENDS: dict[str, GroupGrid] = {
    "zero_aware": GroupGrid(),
    "always zero": GroupGrid(gap=ALWAYS),
    "always offset": GroupGrid(slide=ALWAYS),
    **{f"offset beyond {gap} ranges": GroupGrid(gap=gap) for gap in (0.25, 1.0)},
    **{f"slide {steps} steps": GroupGrid(slide=steps) for steps in (0.5, 1.0, 2.0)},
}


def blend(shape: Shape) -> list[Trial]:
    """Each rule without feedback, with it, and with edges."""
    rows = []
    for name, form in BLENDS.items():
        rows.append(emulated(f"blend {name}, off", form, feedback=NO_FEEDBACK, sites=uniform()))
        rows.append(emulated(f"blend {name}, feedback", form, sites=uniform()))
        rows.append(emulated(f"blend {name}, edges", form))
    return rows


# --- one site at a time -------------------------------------------------------------------------------------------------------


def sites(shape: Shape) -> list[Trial]:
    """Sensitivity: site k alone at 4 bits, the others exact; and site k alone at 8 bits, the others at 4 with local feedback."""
    everywhere = local(QuantConfig(), sites=uniform())
    rows = [Trial("b4 local zero_aware g128", everywhere)]
    for k in range(shape.sites):
        only = tuple(4 if site == k else 16 for site in range(shape.sites))
        rows.append(Trial(f"only site {k} at 4 bits", replace(everywhere, sites=only)))
        but = tuple(8 if site == k else 4 for site in range(shape.sites))
        rows.append(Trial(f"all at 4 but site {k} at 8", replace(everywhere, sites=but)))
    return rows


SETS: dict[str, Callable[[Shape], list[Trial]]] = {
    f.__name__: f
    for f in (
        table4,
        table5,
        table8,
        table8_8bit,
        claims,
        default_search,
        compact,
        combined,
        per_site,
        edge_bits,
        ranges,
        no_feedback,
        wire,
        blend,
        sites,
    )
}


def trials(names: Iterable[str], shape: Shape) -> list[Trial]:
    """The trials of several sets, each once.

    Raises:
        KeyError: unknown set.
    """
    found: dict[str, Trial] = {}
    for name in names:
        for trial in SETS[name](shape):
            assert found.setdefault(trial.name, trial) == trial, f"two configurations are called {trial.name!r}"
    return list(found.values())
