"""The paper's schedule: one launch a stage and tile, ordered by streams and events inside a rank and by flags between ranks.

Every tile pays launches and drains the device (docs/kernels.md); kept as the documented alternative and as the slow twin of `two_shot`,
which runs the same stages.

Source: the paper, Appendix C (stream and event schedule).
"""

import triton
import triton.language as tl

from echoreduce.kernels.place import describe
from echoreduce.kernels.push import push
from echoreduce.kernels.reduce import reduce
from echoreduce.kernels.signal import EPOCH, finish
from echoreduce.kernels.tail import tail

RUNTIME = ["numel", "groups", "pitch", "origin", "half", "area", "digest", "code", "patience", "steps", "start", "stop"]


@triton.jit(do_not_specialize=RUNTIME)
def stage_kernel(
    x, y, m0, e0, m1, e1, w0, w1, d0, r0, d1, r1,
    table, control, record, numel, groups, pitch, origin, half, area, digest, code, patience, steps, start, stop,
    stage: tl.constexpr, last: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """One stage (`push`, `reduce` with gather, or `tail`) of one tile: chunks start .. stop - 1; `last` ends the call.

    The launches of a call must end in order (stream, event), so that all of them see the same epoch.
    """
    epoch = tl.load(control + EPOCH) + 1
    state = (m0, e0, m1, e1, w0, w1, d0, r0, d1, r1)
    call = describe(table, control, record, numel, groups, pitch, origin, half, area, digest, patience, steps)
    first = start + tl.program_id(0)
    if stage == "push":
        push(first, stop, tl.num_programs(0), x, state, call, code, epoch, spec)
    if stage == "reduce":
        reduce(first, stop, tl.num_programs(0), x, y, state, call, epoch, spec)
    if stage == "tail":
        tail(first, stop, tl.num_programs(0), y, call, epoch, spec)
    if last:
        finish(control, epoch)
