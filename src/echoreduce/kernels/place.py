"""Where things are in the workspaces of a group: landing areas, flags, cards.

A workspace is [flags | cards | half 0 | half 1]; the call's epoch picks the half. A half holds landing areas of `area` bytes: area
(stage, source) = stage * world_size + source. Stage 0 is push (the source's codes for us), stage 1 gather (the sum that the source
owns). `table` holds the address at which this process sees each rank's workspace.

A call travels through the stages as one tuple, in this order:
    table, control, record     pointers: addresses [P]; control block; record in pinned host memory
    numel, groups              values of the tensor; groups of each segment (one-shot: of the whole padded tensor) that this launch
                               handles: all, unless the tensor is larger than the workspace and goes in pieces
    pitch, origin              groups from one segment to the next; first group of the piece inside its segment
    half, area                 bytes of a half and of a landing area
    digest, patience           of (shape, dtype, configuration); bound of every wait, ns
    steps                      steps of a chunk: one flag is raised for so many tiles

Source: docs/design.md, Section 7; the paper, Appendix C (workspace layout).
"""

import triton
import triton.language as tl

PUSH = tl.constexpr(0)
GATHER = tl.constexpr(1)


@triton.jit
def describe(table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps):
    """The call's tuple; counts and sizes as int64, whatever width the launch gave them."""
    return (
        table, control, record,
        numel.to(tl.int64), groups.to(tl.int64), pitch.to(tl.int64), origin.to(tl.int64), half.to(tl.int64), area.to(tl.int64),
        digest, patience.to(tl.int64), steps,
    )  # fmt: skip


@triton.jit
def workspace(table, rank):
    """Address of a rank's workspace, int64; of a rank known at compile time or at run time."""
    return tl.multiple_of(tl.load(table + rank), 16)


@triton.jit
def landing(table, rank, stage: tl.constexpr, source, epoch, half, area, spec: tl.constexpr):
    """Address of a landing area in the workspace of `rank`, int64, 16-byte aligned."""
    start = workspace(table, rank) + spec.data_at + (epoch & 1).to(tl.int64) * half
    return tl.multiple_of(start + (stage * spec.world_size + source) * area, 16)


@triton.jit
def flag_slot(stage: tl.constexpr, source, chunk, spec: tl.constexpr):
    """Index of the flag that `source` raises when it has done `stage` for `chunk`."""
    return (stage * spec.world_size + source) * spec.slots + chunk


@triton.jit
def flag(table, stage: tl.constexpr, source, chunk, spec: tl.constexpr):
    """Our own copy of that flag: pointer to int64."""
    return workspace(table, spec.rank).to(tl.pointer_type(tl.int64)) + flag_slot(stage, source, chunk, spec)


@triton.jit
def leave_card(table, rank, numel, code, epoch, spec: tl.constexpr):
    """Tell `rank` what this call is about, for the text of a MismatchError: (numel, code, epoch)."""
    at = workspace(table, rank) + spec.cards_at + ((epoch & 1) * spec.world_size + spec.rank) * 64
    card = at.to(tl.pointer_type(tl.int64))
    tl.store(card, numel)
    tl.store(card + 1, code)
    tl.store(card + 2, epoch)
