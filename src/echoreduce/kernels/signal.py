"""Flags between ranks, in a kernel: publish, wait (bounded), report; and the epoch that every call advances by itself.

A flag is one int64 in the consumer's memory: the call's epoch in the upper half, the digest of (shape, dtype, configuration) in the
lower. There is one for each (stage, source rank, chunk); the slot depends on the chunk, never on the block that works on it, so the
grid may change from call to call. Flags are never cleared: they compare by signed difference of epochs.

Publishing: all threads' stores, then a block barrier (Triton's release orders the stores of one thread only, the barrier makes those
of the others happen before it), then one `atom.release.sys.exch`. Waiting: one thread polls with `ld.acquire.sys`; a barrier hands
the value, and with it the order, to the block. A wait ends when the flag has arrived, when another wait of this rank was given up
(the abort word), or when the time is over; in the last case, and if the digest is another one, the first wait to notice writes the
record in pinned host memory. The host turns it into an exception; the kernel goes on without waiting any more and marks what it
could not read as NaN.

Source: docs/design.md, Section 7; docs/kernels.md has the proof that two buffers suffice.
"""

import triton
import triton.language as tl

# int32 words of the control block, in local device memory.
EPOCH = tl.constexpr(0)
TICKET = tl.constexpr(1)
ABORT = tl.constexpr(2)

# int64 words of the record, in pinned host memory (see runtime.workspace, which reads it).
KIND = tl.constexpr(0)
PEER = tl.constexpr(1)
STAGE = tl.constexpr(2)
TILE = tl.constexpr(3)
EXPECTED = tl.constexpr(4)
SEEN = tl.constexpr(5)
THEIRS = tl.constexpr(6)

TIMEOUT = tl.constexpr(1)
MISMATCH = tl.constexpr(2)


@triton.jit
def now(spins, spec: tl.constexpr):
    """Nanoseconds on the device; the interpreter, which has no clock, counts polls."""
    if spec.native:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        return spins.to(tl.int64)


@triton.jit
def publish(address, slot, epoch, digest):
    """Release flag `slot` at `address` (a peer's flags or our own) with this call's word. The caller has put a barrier before it."""
    word = (epoch.to(tl.int64) << 32) | (digest.to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)) + slot, word, sem="release", scope="sys")


@triton.jit
def wait(flag, epoch, digest, control, record, stage: tl.constexpr, peer, tile, patience, spec: tl.constexpr):
    """Wait until `flag` carries this epoch or a later one, acquire; whether it does, and with this call's digest.

    Args:
        flag: pointer to int64.
        patience: nanoseconds (the interpreter: polls) until the wait is given up.
    """
    zero = (epoch * 0).to(tl.int64)
    word = tl.atomic_add(flag, zero, sem="acquire", scope="sys")
    if (word >> 32).to(tl.int32) - epoch < 0:
        spins = epoch * 0
        start = now(spins, spec)
        hopeless = spins
        while ((word >> 32).to(tl.int32) - epoch < 0) & (hopeless == 0):
            word = tl.atomic_add(flag, zero, sem="acquire", scope="sys")
            spins += 1
            if (spins & 31) == 0:
                if now(spins, spec) - start > patience:
                    hopeless = spins
                if tl.atomic_add(control + ABORT, 0, sem="relaxed", scope="gpu") != 0:
                    hopeless = spins
    seen = (word >> 32).to(tl.int32)
    late = seen - epoch < 0
    differs = (seen == epoch) & (word.to(tl.int32) != digest)
    if late | differs:
        report(tl.where(late, TIMEOUT, MISMATCH), word, epoch, control, record, stage, peer, tile)
    return ~(late | differs)


@triton.jit
def report(kind, word, epoch, control, record, stage: tl.constexpr, peer, tile):
    """Set the abort word; the first to do so writes the record, its kind last and with release to the whole system."""
    if tl.atomic_cas(control + ABORT, 0, 1, sem="relaxed", scope="gpu") == 0:
        tl.store(record + PEER, peer)
        tl.store(record + STAGE, stage)
        tl.store(record + TILE, tile)
        tl.store(record + EXPECTED, epoch)
        tl.store(record + SEEN, word >> 32)
        tl.store(record + THEIRS, word & 0xFFFFFFFF)
        tl.debug_barrier()
        tl.atomic_xchg(record + KIND, kind.to(tl.int64), sem="release", scope="sys")


@triton.jit
def finish(control, epoch):
    """Count this block as done; the last block of the grid advances the epoch and clears the count for the next launch."""
    tl.debug_barrier()
    if tl.atomic_add(control + TICKET, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(control + TICKET, 0)
        tl.store(control + EPOCH, epoch)
