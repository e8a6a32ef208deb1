"""The sets of variants that `accuracy.py` measures. Names are stable, and one name always means one configuration.

Each set is a function of the model's hidden size and number of sites. A variant is a configuration of the library, or the same with an
emulated wire (`emulation`). Those of the wire sets without "edges" send every site alike.

Leaves out: measuring. Source: the paper, Tables 4, 5 and 8; issue 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from echoreduce.config import NO_FEEDBACK, PRESETS, EchoConfig, FeedbackConfig, QuantConfig, preset
from echoreduce.integrations.evaluation import bits_per_value
from echoreduce.sites import early_half, edges, uniform
from echoreduce.virtual import VirtualBackend
from emulation import EmulatedBackend, Emulation, Wire, emulated_bits
from wire_formats import ALWAYS, Codebook, Float8Blocks, Format, GroupGrid, LibraryGrid, OutlierChannels

LOCAL = FeedbackConfig(state="fp32")
EDGES = edges(2, 2, 8)
HADAMARD = {"": "none", " H": "hadamard"}


@dataclass(frozen=True)
class Trial:
    """A row of a table: its name and what it sends."""

    name: str
    config: EchoConfig
    emulation: Emulation | None = None

    def backend(self, world_size: int, sites: int) -> VirtualBackend:
        """Virtual ranks that do it."""
        return VirtualBackend(world_size) if self.emulation is None else EmulatedBackend(world_size, self.emulation, sites)

    def bits_per_value(self, world_size: int, numel: int, sites: int) -> float:
        """Bits on the links per value of a message of `numel` values; a 16-bit all-reduce has 16."""
        if self.emulation is None:
            return bits_per_value(self.config, world_size, numel, sites)
        return emulated_bits(self.emulation, self.config, world_size, numel, sites)

    def as_data(self) -> dict[str, Any]:
        """The whole configuration, for JSON; with an emulation only algorithm, sites and whether there is feedback count of `config`."""
        return {"config": as_data(self.config), "emulation": as_data(self.emulation)}


@dataclass(frozen=True)
class Shape:
    """What a set needs to know about a model."""

    hidden: int
    sites: int


def as_data(value: Any) -> Any:
    """Dataclasses with their kind, tuples as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **{f.name: as_data(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, (tuple, list)):
        return [as_data(part) for part in value]
    return value


def local(quant: QuantConfig, **changes: Any) -> EchoConfig:
    """The base of our rows: two-shot, local residual, single step, gain 1, fp32 state, edges 2 + 2 at 8 bits."""
    return replace(EchoConfig(quant=quant, feedback=LOCAL, algorithm="two_shot", sites=EDGES), **changes)


def emulated(
    name: str, push: Format, *, gather: Format | None = None, sites: Any = EDGES, feedback: FeedbackConfig = LOCAL, **setting: Any
) -> Trial:
    """A trial of a format at all sites but the 8-bit ones, which have the library's grid at g = 128."""
    edge = LibraryGrid(QuantConfig(bits=8))
    emulation = Emulation(Wire(push, gather or push), Wire(edge, edge), **setting)
    return Trial(name, EchoConfig(feedback=feedback, algorithm="two_shot", sites=sites), emulation)


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


# --- a better default ---------------------------------------------------------------------------------------------------------


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
