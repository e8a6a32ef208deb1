"""Two-shot in one launch: blocks specialized by stage, ordered by stage so that no grid can lock up.

Blocks 0 .. pushers - 1 push, the next `reducers` reduce and gather, the rest are the tail. Push waits for nothing, reduce for the peers'
push, tail for the peers' gather. Blocks start in order of their number, so whatever part of the grid fits on the device holds the
push blocks first, and these end by themselves: the call completes on any grid, also while other kernels hold part of the device. It
is also what lets Triton's interpreter run it, one block after the other.

Source: docs/kernels.md (why this schedule and not streams and events); docs/design.md, Section 6 (trial).
"""

import triton
import triton.language as tl

from echoreduce.kernels.place import describe
from echoreduce.kernels.push import push
from echoreduce.kernels.reduce import reduce
from echoreduce.kernels.signal import EPOCH, finish
from echoreduce.kernels.tail import tail

RUNTIME = ["numel", "groups", "pitch", "origin", "half", "area", "digest", "code", "patience", "steps", "pushers", "reducers"]


@triton.jit(do_not_specialize=RUNTIME)
def two_shot_kernel(
    x, y, m0, e0, m1, e1, w0, w1, d0, r0, d1, r1,
    table, control, record, numel, groups, pitch, origin, half, area, digest, code, patience, steps, pushers, reducers,
    spec: tl.constexpr,
):  # fmt: skip
    """One rank's whole call; see the stages for what each reads, writes, waits for and publishes.

    A program owns chunks of one stage. Tensor passes: x once, y once, state once each way, codes (2 (P - 1) segments) out and in.
    """
    epoch = tl.load(control + EPOCH) + 1
    state = (m0, e0, m1, e1, w0, w1, d0, r0, d1, r1)
    call = describe(table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps)
    chunks = tl.cdiv(tl.cdiv(groups, spec.rows), steps)
    pid = tl.program_id(0)
    if pid < pushers:
        push(pid, chunks, pushers, x, state, call, code, epoch, spec)
    elif pid < pushers + reducers:
        reduce(pid - pushers, chunks, reducers, x, y, state, call, epoch, spec)
    else:
        first = pid - pushers - reducers
        tail(first, chunks, tl.num_programs(0) - pushers - reducers, y, call, epoch, spec)
    finish(control, epoch)
