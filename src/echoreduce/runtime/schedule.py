"""How one call is cut for the device: tile height, warps, tiles a flag, blocks a stage, and pieces of a message larger than the workspace.

A pure function of (algorithm, groups, P, device limits), cached; all ranks get the same answer for the same device, and the kernels check
that they did (the schedule is part of the digest). Small messages want many small chunks (latency: a chunk is a hop), large ones chunks
of many tiles (a flag costs a fence over the link), and never more chunks than there are flags.

Leaves out: whether the low-bit path is taken at all (`dispatch`).
Source: measured on two H200, see docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echoreduce.kernels.spec import SLOTS, Spec, landing_bytes
from echoreduce.partition import Partition


@dataclass(frozen=True)
class Device:
    """Limits of one device that the schedule depends on.

    Attributes:
        multiprocessors: 132 on H100 and H200.
        threads: resident threads of a multiprocessor that a schedule may count on.
    """

    multiprocessors: int = 132
    threads: int = 640


@dataclass(frozen=True)
class Schedule:
    """One launch.

    Attributes:
        rows: groups a block handles at a time.
        warps: of a block.
        steps: tiles of a chunk; a flag is raised for each chunk.
        pushers, reducers, tails: blocks of each stage (one-shot: `tails` add up, no reducers).
    """

    rows: int
    warps: int
    steps: int
    pushers: int
    reducers: int
    tails: int
    registers: int = 0

    @property
    def grid(self) -> int:
        """Blocks of the launch."""
        return self.pushers + self.reducers + self.tails


@dataclass(frozen=True)
class Tuning:
    """What `schedule` starts from; the built-in values are the best of docs/kernels.md.

    Attributes:
        warps: of a block at large sizes.
        chunk_values: most values of a chunk.
        waves: chunks that each push block is to have, so that the stages overlap; fewer where tiles are few.
        blocks: blocks a multiprocessor and stage: push, reduce, tail.
        registers: bound of a thread's registers, 0 for the compiler's choice.
    """

    warps: int = 4
    chunk_values: int = 65536
    waves: int = 4
    blocks: tuple[int, int, int] = (2, 3, 1)
    registers: int = 0


@dataclass(frozen=True)
class UpdateTuning:
    """How the group residual's update runs beside the caller's next kernels.

    Attributes:
        blocks: of the launch, at most; few leave more multiprocessors to the kernel beside it.
        warps: of a block.
        priority: of its stream; -1 lets its blocks start before those of the kernel beside it.
    """

    blocks: int = 528
    warps: int = 4
    priority: int = 0


#: Best found schedules by (algorithm, feedback state in registers or not); see docs/kernels.md.
BUILT_IN = {
    ("two_shot", False): Tuning(),
    ("two_shot", True): Tuning(blocks=(3, 3, 2)),
    ("one_shot", False): Tuning(blocks=(3, 3, 2), chunk_values=131072),
    ("one_shot", True): Tuning(blocks=(3, 3, 2), chunk_values=131072, registers=80),
}


@lru_cache(maxsize=4096)
def schedule(algorithm: str, groups: int, group_size: int, device: Device, tuning: Tuning) -> Schedule:
    """Cut one launch.

    Args:
        algorithm: `two_shot` or `one_shot`.
        groups: of one segment (two-shot) or of the whole tensor (one-shot) in this launch.
    """
    rows_of_warp = 1024 // group_size
    warps = tuning.warps
    while warps > 1 and groups <= device.multiprocessors * rows_of_warp * warps // 4:
        warps //= 2
    rows = rows_of_warp * warps
    tiles = -(-groups // rows)
    blocks = device.multiprocessors * tuning.blocks[0]
    most = max(1, tuning.chunk_values // (rows * group_size))
    waves = max(-(-tiles // (blocks * most)), min(tuning.waves, max(1, tiles // (2 * blocks))))
    steps = max(-(-tiles // (waves * blocks)), -(-tiles // SLOTS))
    chunks = -(-tiles // steps)
    push, reduce, tail = (max(1, min(chunks, device.multiprocessors * count)) for count in tuning.blocks)
    if algorithm == "one_shot":
        return Schedule(rows, warps, steps, push, 0, reduce, tuning.registers)
    return Schedule(rows, warps, steps, push, reduce, tail, tuning.registers)


def half_bytes(algorithm: str, groups: int, spec: Spec) -> int:
    """Bytes of a workspace half for a launch of `groups` groups a segment (one-shot: of the whole tensor)."""
    stages = 2 if algorithm == "two_shot" else 1
    return stages * spec.world_size * landing_bytes(spec, groups)


def pieces(algorithm: str, cut: Partition, spec: Spec, largest_half: int) -> list[tuple[int, int]]:
    """(first group, groups) of each launch of a call, so that each fits `largest_half` bytes.

    A piece takes the same range of groups from every segment, so the partition, and with it every bit of the result, is that of
    the whole tensor.
    """
    total = cut.segment_groups if algorithm == "two_shot" else cut.groups
    if half_bytes(algorithm, total, spec) <= largest_half:
        return [(0, total)]
    unit = 16  # groups; their codes and qparams fill whole 16-byte units, so sizes are proportional
    size = largest_half // half_bytes(algorithm, unit, spec) * unit
    assert size > 0, f"a workspace half of {largest_half} bytes holds {unit} groups"
    return [(start, min(size, total - start)) for start in range(0, total, size)]
