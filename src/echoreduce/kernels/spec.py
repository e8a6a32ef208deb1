"""What a kernel is specialized for: one frozen object, passed as a compile-time constant.

Everything that shapes the machine code stands here and nothing else does; sizes, addresses and limits that change from call to call are
run-time arguments, so that a new size compiles nothing. This module imports no Triton, so that schedules can be made and tested
without it.

How a thread holds a group. A group of g values is cut into chunks of 8 consecutive values, the longest piece of 16-bit data that one
16-byte load brings in. `lanes` threads share a group and each holds `pieces` chunks: thread t has chunks t, t + lanes, t + 2 lanes ...,
so that neighbouring threads read neighbouring chunks. Many values a thread make the arithmetic that is done once a group (two IEEE
divisions, the rounding of scale and offset) cheap, and leave few shuffles. The words of a thread travel side by side, so that it
sends and reads them 16 bytes at a time: on the wire the chunks of a group are transposed (`wire_chunk`), the planes and qparams are
those of `quant.packing`.

Source: docs/kernels.md; docs/design.md, Section 4.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import sys
from dataclasses import dataclass, replace
from types import ModuleType

from echoreduce import config
from echoreduce.config import CLIPPED_BITS

#: Widths of the planes that carry a code, lowest bits first; the same table as `quant.packing.PLANES` (a test compares them).
PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}

CHUNK = 8

#: Flags a (stage, source) pair has: the most chunks that one call may cut a segment into.
SLOTS = 4096

#: Bytes that a rank leaves in each peer's workspace to say what it called, one entry a (buffer half, source); see `runtime.workspace`.
CARD_BYTES = 64


def digest(*modules: ModuleType) -> str:
    """Of the text of modules; of what is there, where an installation has no text."""
    text = ""
    for module in modules:
        with contextlib.suppress(OSError):
            text += inspect.getsource(module)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


#: Triton's cache on disk knows a kernel by its own source and by the fields of its constants, not by what their properties return: without
#: this field the machine code of an older version of a property would be taken for today's.
VERSION = digest(sys.modules[__name__], config)


@dataclass(frozen=True)
class Spec:
    """Compile-time constants of one kernel.

    Attributes:
        world_size: ranks, P.
        rank: this rank in its group.
        bits: 2 to 8.
        group_size: values per group, g: 16 to 256.
        policy: `symmetric`, `asymmetric`, `zero_aware` or `compact` (as `QuantConfig.layout` says).
        rotate: Hadamard rotation inside each group.
        half_qparams: qparams are fp16 (else bf16).
        dtype: of the data: `bf16`, `fp16` or `fp32`.
        even: the tensor fills its segments, no value is padding.
        residual: `none`, `local` or `group`.
        averages: moving averages kept: 0, 1 or 2.
        plain: the correction is the one average itself (weight 1).
        decaying: bit j says that average j has a decay other than 0.
        state: `fp32`, `bf16`, `float8_e4m3` or `float8_e5m2`.
        first: first site of a pass: the stored averages count as zero and are not read.
        rows: groups that a block handles at a time, a power of two.
        native: use instructions that the interpreter lacks (NaN-propagating maxima, 16-bit and 8-bit float conversions, the clock).
        native_float8: likewise for the float8 conversions, which need compute capability 8.9.
        version: of the code below, see `VERSION`.
    """

    world_size: int
    rank: int
    bits: int = 4
    group_size: int = 128
    policy: str = "zero_aware"
    rotate: bool = False
    half_qparams: bool = False
    dtype: str = "bf16"
    even: bool = True
    residual: str = "none"
    averages: int = 0
    plain: bool = True
    decaying: int = 0
    state: str = "bf16"
    first: bool = True
    rows: int = 32
    native: bool = True
    native_float8: bool = True
    version: str = VERSION

    @property
    def pieces(self) -> int:
        """Chunks of 8 values that a thread holds of each group: 1, 2 or 4."""
        return pieces_of(self.group_size)

    def peer(self, distance: int) -> int:
        """Rank at `distance` behind this one, cyclically: every rank starts with another peer."""
        return (self.rank + distance) % self.world_size

    @property
    def lanes(self) -> int:
        """Threads that share a group."""
        return self.group_size // (CHUNK * self.pieces)

    def near(self, run: int) -> int:
        """How contiguous a tile's lanes are called where its last dimension has `run` neighbours, see `tile.at_values`; for 1 the truth."""
        return self.lanes if run == 1 else 2 if self.lanes > 1 and run > 2 else 1

    @property
    def norm(self) -> float:
        """Factor that makes the Hadamard matrix orthonormal."""
        return 1.0 / math.sqrt(self.group_size)

    @property
    def exact_norm(self) -> bool:
        """`norm` is a power of two."""
        return self.group_size in (16, 64, 256)

    @property
    def unit(self) -> float:
        """How much larger a tile's values are kept than the reference's: sqrt(group_size) where the rotation's norm is a power of two.

        The norm is then applied once a group, to the parameters of the grid, instead of to every value. Exact: 16-bit data and float8 state
        are multiples of 2**-142, so no result is rounded as a subnormal number, and `compact` scales stay below 2**111.
        """
        plain = self.averages == 0 or (self.averages == 1 and self.plain and self.decaying == 0 and self.float8)
        exact = self.capped and self.dtype != "fp32" and self.residual != "group" and plain
        return math.sqrt(self.group_size) if exact and self.exact_norm else 1.0

    @property
    def lane_stages(self) -> int:
        """log2(lanes)."""
        return self.lanes.bit_length() - 1

    @property
    def piece_stages(self) -> int:
        """log2(pieces)."""
        return self.pieces.bit_length() - 1

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the code planes."""
        return PLANES[self.bits]

    @property
    def plane_count(self) -> int:
        """Number of code planes."""
        return len(self.planes)

    def width(self, index: int) -> int:
        """Bits of a code in plane `index`."""
        return self.planes[index]

    def below(self, index: int) -> int:
        """Bits of a code in the planes before plane `index`."""
        return sum(self.planes[:index])

    def plane_mask(self, index: int) -> int:
        """Mask of a code's part in plane `index`, moved to bit 0."""
        return (1 << self.width(index)) - 1

    @property
    def top(self) -> int:
        """Largest code, 2**bits - 1."""
        return (1 << self.bits) - 1

    @property
    def limit(self) -> int:
        """Largest magnitude of a symmetric code."""
        return (1 << (self.bits - 1)) - 1

    @property
    def symmetric(self) -> bool:
        """The grid has zero in its middle and no zero point."""
        return self.policy == "symmetric"

    @property
    def compact(self) -> bool:
        """Scale and zero point share one 16-bit word."""
        return self.policy == "compact"

    @property
    def capped(self) -> bool:
        """Products of levels and scales are exact and finite and may be fused with the addition that follows, `QuantConfig.capped`."""
        return self.compact and self.rotate

    @property
    def clipped(self) -> bool:
        """The scale is rounded down and the grid centred, `QuantConfig.clipped`."""
        return self.compact and self.bits <= CLIPPED_BITS

    @property
    def reach(self) -> float:
        """Largest rounding error of a value in steps, `QuantConfig.reach`."""
        return 1.0 if self.clipped else 0.5

    @property
    def one_word(self) -> bool:
        """One 16-bit word of qparams a group instead of two."""
        return self.symmetric or self.compact

    @property
    def integer_turn(self) -> bool:
        """The sum is turned back on its codes, four to a word (`rotation.turn_codes`): a sum of group_size / 4 of them fits a byte."""
        return self.capped and self.bits == 4 and self.top * self.group_size // 4 <= 255

    @property
    def mantissa(self) -> int:
        """Mantissa bits of a compact scale."""
        return 8 - self.bits

    @property
    def slots(self) -> int:
        """Flags a (stage, source) pair has."""
        return SLOTS

    @property
    def cards_at(self) -> int:
        """Byte offset of the cards in a workspace."""
        return flag_bytes(self.world_size)

    @property
    def data_at(self) -> int:
        """Byte offset of the data in a workspace."""
        return data_offset(self.world_size)

    @property
    def code_bytes(self) -> int:
        """Bytes of a group's codes."""
        return self.group_size * self.bits // 8

    @property
    def qparams_bytes(self) -> int:
        """Bytes of a group's qparams."""
        return 2 if self.one_word else 4

    @property
    def float8(self) -> bool:
        """The state is stored in 8 bits with one exponent a group."""
        return self.state.startswith("float8")

    def bounded(self, index: int) -> bool:
        """The float8 exponent of average `index` follows from the step (local residual, no decay); else from the data."""
        return self.residual == "local" and not self.decays(index)

    @property
    def clear_groups(self) -> bool:
        """Residuals are finite in every group whose scale is, so the float8 conversion clears whole groups."""
        return self.capped and self.float8 and self.decaying == 0 and self.residual == "local"

    @property
    def clear_bytes(self) -> bool:
        """The float8 conversion clears each value that is not finite."""
        return not self.capped and self.float8 and self.decaying == 0 and self.residual == "local"

    def decays(self, index: int) -> bool:
        """Whether average `index` keeps part of its old value."""
        return bool(self.decaying >> index & 1)

    def with_rows(self, rows: int) -> Spec:
        """The same kernel at another block size."""
        return replace(self, rows=rows)


def pieces_of(group_size: int) -> int:
    """`Spec.pieces`: as many as leave two threads a group, which keeps a thread's values 32 and what is done once a group rare."""
    return max(1, min(4, group_size // (2 * CHUNK)))


def flag_bytes(world_size: int) -> int:
    """Bytes of the flags at the start of a workspace: two stages, one int64 a (source, chunk)."""
    return 2 * world_size * SLOTS * 8


def data_offset(world_size: int) -> int:
    """Where the data begins in a workspace, behind flags and cards; a multiple of 128."""
    return flag_bytes(world_size) + -(-2 * world_size * CARD_BYTES // 128) * 128


def landing_bytes(spec: Spec, groups: int) -> int:
    """Bytes of a landing area that holds the codes and qparams of `groups` groups: code planes, then qparams, both 16-byte aligned."""
    return -(-groups * spec.code_bytes // 16) * 16 + -(-groups * spec.qparams_bytes // 16) * 16


def wire_chunk(spec: Spec, chunk: int) -> int:
    """Place of chunk `chunk` (8 consecutive values) of a group among the chunks of that group on the wire."""
    return (chunk % spec.lanes) * spec.pieces + chunk // spec.lanes
