"""How a tensor is cut: values into groups, groups into segments, segments to owners.

A tensor of n values is read flat. It is cut into `world_size` segments of equally many groups of `group_size` values; segment j
belongs to rank j. What is missing to the full size is filled with the tensor's last value, not with zeros, so that the padding
never widens the range of the group that it completes. No torch here: this is arithmetic that the reference, the c10d backend,
the kernels and the cost model share.

Source: the paper, Section 4.1 (segments) and 4.3 (groups); docs/design.md, Section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from echoreduce.config import QuantConfig
from echoreduce.errors import ShapeError


@dataclass(frozen=True)
class Partition:
    """The cut of one tensor.

    Attributes:
        numel: values of the caller's tensor.
        world_size: number of ranks, P.
        group_size: values per group, g.
        segment_groups: groups of one segment; equal for all segments.
    """

    numel: int
    world_size: int
    group_size: int
    segment_groups: int

    @property
    def groups(self) -> int:
        """Groups of the padded tensor."""
        return self.segment_groups * self.world_size

    @property
    def segment(self) -> int:
        """Values of one segment, padding included."""
        return self.segment_groups * self.group_size

    @property
    def padded(self) -> int:
        """Values of the padded tensor."""
        return self.segment * self.world_size

    def bounds(self, rank: int) -> tuple[int, int]:
        """First value and one past the last value of `rank`'s segment in the caller's tensor (may be empty)."""
        start = min(rank * self.segment, self.numel)
        return start, min(start + self.segment, self.numel)


def partition(numel: int, world_size: int, group_size: int) -> Partition:
    """Cut `numel` values for `world_size` ranks in groups of `group_size`.

    Every segment has ceil(ceil(numel / group_size) / world_size) groups, so the padding is less than world_size * group_size values.

    Raises:
        ShapeError: a negative number of values or no rank.
    """
    if numel < 0 or world_size < 1 or group_size < 1:
        raise ShapeError(f"cannot cut {numel} values into groups of {group_size} for {world_size} ranks")
    groups = -(-numel // group_size)
    return Partition(numel, world_size, group_size, -(-groups // world_size))


def wire_bytes(numel: int, world_size: int, quant: QuantConfig, algorithm: str) -> int:
    """Bytes that one rank sends over links in one call: codes and qparams, padding included.

    two_shot: 2 (P - 1) segments; one_shot: (P - 1) whole tensors (docs/design.md, Section 3). With 16 bits, where nothing is
    quantized and the library's own all-reduce runs, the bandwidth-optimal 2 (P - 1) / P of the message (Patarasuk and Yuan, 2009),
    at 2 bytes a value.
    """
    cut = partition(numel, world_size, quant.group_size)
    segment = cut.segment_groups * quant.group_bytes()
    if algorithm == "one_shot" and quant.bits != 16:
        return (world_size - 1) * world_size * segment
    return 2 * (world_size - 1) * segment
