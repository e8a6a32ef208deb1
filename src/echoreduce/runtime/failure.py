"""What a kernel's record means: turns it into PeerError or MismatchError.

Source: docs/design.md, Section 7 (bounded waits, mismatch detection); `kernels.signal` writes the record.
"""

from __future__ import annotations

from echoreduce.errors import EchoReduceError, MismatchError, PeerError
from echoreduce.runtime.pipeline import settings_text
from echoreduce.runtime.workspace import Workspace

STAGES = ("push", "gather")
TIMEOUT, MISMATCH = 1, 2


def failure(workspace: Workspace, seconds: float, own: str) -> EchoReduceError | None:
    """The exception that the record calls for, or None.

    Args:
        seconds: the bound of a wait.
        own: this rank's last call, as `settings_text` would put it.
    """
    kind = int(workspace.record[0])
    if kind == 0:
        return None
    peer, stage, tile, expected, seen = (int(word) for word in workspace.record[1:6])
    rank = workspace.rank
    if kind == TIMEOUT:
        return PeerError(
            f"rank {rank} of {workspace.world_size} gave up waiting for rank {peer} after {seconds:g} s: stage {STAGES[stage]}, "
            f"tile {tile}, expected epoch {expected}, seen {seen}; the group cannot be used any more",
            (peer,),
        )
    numel, code, _ = workspace.card(peer, expected & 1)
    texts = sorted(((rank, own), (peer, settings_text(numel, code))))
    if texts[0][1] == texts[1][1]:
        texts = [(which, f"{text} (another site of a pass, decay, gain, state type or schedule)") for which, text in texts]
    return MismatchError("ranks disagree about an all-reduce; " + "; ".join(f"rank {which}: {text}" for which, text in texts))
