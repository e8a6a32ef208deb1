"""What a row of an accuracy table is: a configuration of the library, or the same with an emulated wire (`emulation`).

Leaves out: which rows a table has (`accuracy_variants`, `accuracy_searches`) and measuring (`accuracy_run`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from echoreduce.config import EchoConfig, FeedbackConfig, QuantConfig
from echoreduce.integrations.evaluation import bits_per_value
from echoreduce.sites import edges
from echoreduce.virtual import VirtualBackend
from emulation import EmulatedBackend, Emulation, Wire, emulated_bits
from wire_formats import Format, LibraryGrid

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
