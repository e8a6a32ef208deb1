"""Probe: a real write into every peer's workspace, because "peer access" on paper has been seen to fail at the first store.

Source: docs/design.md, Section 7; case O18 of the field.
"""

import triton
import triton.language as tl

from echoreduce.kernels.place import workspace


@triton.jit
def probe_kernel(table, rank, token):
    """Program p writes token + rank into word `rank` of rank p's workspace, release.sys."""
    peer = tl.program_id(0)
    at = workspace(table, peer).to(tl.pointer_type(tl.int64)) + rank
    tl.atomic_xchg(at, (token + rank).to(tl.int64), sem="release", scope="sys")
