"""Queues in numpy: when messages that arrive at shared resources begin to be served, in order of arrival.

Why: the simulator handles thousands of messages a round; a heap of events in Python would take minutes where this takes milliseconds.
For messages of one resource sorted by arrival, begin_i = max(arrive_i, begin_(i-1) + width_(i-1)), which is a running maximum of
arrive_i - W_i with W the widths before i. Leaves out: fair sharing; the last of several equal messages ends at the same time under both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def serve(resource: Ints, arrive: Floats, width: Floats, free: Floats) -> Floats:
    """Begin of service of each message, first come first served; ties in array order.

    Args:
        resource: which resource each message needs, shape [messages].
        arrive: when it gets there, seconds.
        width: how long it occupies the resource, seconds.
        free: when each resource becomes free, shape [resources]; updated in place.
    Returns:
        Begin of service, seconds, shape [messages].
    """
    counts = np.bincount(resource, minlength=free.size)
    if counts.max(initial=0) <= 1:
        begin = np.maximum(arrive, free[resource])
        free[resource] = begin + width
        return begin
    order = np.lexsort((arrive, resource))
    begin = np.empty_like(arrive)
    first = np.cumsum(counts) - counts
    for count in np.unique(counts[counts > 0]):
        which = np.flatnonzero(counts == count)
        rows = order[first[which][:, None] + np.arange(count)]
        at, wide = arrive[rows], width[rows]
        at[:, 0] = np.maximum(at[:, 0], free[which])
        before = np.cumsum(wide, axis=1) - wide
        start = before + np.maximum.accumulate(at - before, axis=1)
        begin[rows] = start
        free[which] = start[:, -1] + wide[:, -1]
    return begin
