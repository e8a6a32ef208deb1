"""What a session knows about its passes: where the open ones stand, and what a forward pass left for its backward.

A forward pass has a number, from 1 in the order of `begin`. Its `ForwardPass` is kept until its backward has ended, so that the backward
passes may come in any order: with F1 F2 B1 B2 the first backward finds what F1 left. A recomputed site (activation checkpointing) is
found by (number of its pass, key of its site), not by counting, because regions are recomputed from the last to the first and a region
may stop early.

Leaves out: what is done at a site (`session`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from echoreduce.errors import PassError
from echoreduce.recording import Recording
from echoreduce.runtime.backend import State


@dataclass
class PassState:
    """One direction's pass.

    Attributes:
        state: feedback state; None without feedback.
        open: whether a pass is open.
        site: its next site.
        numel: message size that the state belongs to; -1 before the first site.
        number: of the forward pass that this is, or whose backward this is; 0: none.
        lock: held inside an all-reduce.
    """

    state: State | None
    open: bool = False
    site: int = 0
    numel: int = -1
    number: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, number: int) -> None:
        """Open the pass: site 0 comes next and nothing is owed."""
        if self.state is not None:
            self.state.reset()
        self.open, self.site, self.numel, self.number = True, 0, -1, number

    def stop(self) -> None:
        """Close the pass and drop its state."""
        if self.state is not None:
            self.state.reset()
        self.open = False


@dataclass
class ForwardPass:
    """What a forward pass left for its backward.

    Attributes:
        recordings: results of its sites by key, where something may be recomputed.
        entries: gradients that its backward will reduce, as far as they were counted.
        counted: whether `entries` is complete: no part of the pass ran without grad (frozen layers: complete; reentrant
            checkpoints: not).
    """

    recordings: dict[str, Recording] = field(default_factory=dict)
    entries: int = 0
    counted: bool = True


class OpenForwards:
    """Forward passes whose backward has not ended, by number.

    Args:
        limit: most passes that are kept; the oldest goes first. A pass whose loss was thrown away never has a backward.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._passes: dict[int, ForwardPass] = {}

    def add(self, number: int) -> None:
        """Keep forward pass `number`."""
        self._passes[number] = ForwardPass()
        while len(self._passes) > self.limit:
            del self._passes[next(iter(self._passes))]

    def get(self, number: int) -> ForwardPass | None:
        """What forward pass `number` left, if it is still kept."""
        return self._passes.get(number)

    def drop(self, number: int) -> None:
        """Free what forward pass `number` left."""
        self._passes.pop(number, None)

    def only(self) -> int | None:
        """The number of the only pass that is kept; None if there are several or none."""
        return next(iter(self._passes)) if len(self._passes) == 1 else None

    def recording(self, number: int, key: str) -> Recording:
        """The recording of one site.

        Raises:
            PassError: there is none; the text says why.
        """
        kept = self._passes.get(number)
        if kept is None:
            raise PassError(
                f"a recomputed all-reduce belongs to forward pass {number}, whose recordings are gone: its backward has ended (a second "
                f"backward through a checkpoint needs a second forward), or more than {self.limit} passes waited for theirs"
            )
        if key not in kept.recordings:
            raise PassError(
                f"an all-reduce is recomputed under key {key!r}, which forward pass {number} did not record; give the sites inside an "
                "activation checkpoint a key, the same one each time (integrations do), and with torch.compile set session.record = True"
            )
        return kept.recordings[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all recordings."""
        return sum(recording.nbytes for kept in self._passes.values() for recording in kept.recordings.values())


def recomputing() -> bool:
    """Whether this code runs inside a backward: then a forward site is one that an activation checkpoint runs again."""
    return torch._C._current_graph_task_id() != -1


def may_be_recomputed(grad: bool) -> bool:
    """Whether a site of a pass that began with grad may come again.

    Args:
        grad: whether grad is enabled where the site is called. A reentrant checkpoint switches it off; a non-reentrant one hooks the
            saved tensors. Both can be something else (frozen layers, offloading): then a recording is made for nothing.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return not grad or top is None or top(True) is not None


class EndOfBackward:
    """Calls `ended` when the backward that runs now has ended; `running` is false afterwards, also when it failed.

    The autograd engine holds the callback until the backward is over, so a dead reference says that it is, even where an exception kept the
    callback from being called.
    """

    def __init__(self) -> None:
        self._callback: weakref.ref[_Callback] | None = None

    @property
    def watched(self) -> bool:
        """Whether a backward was ever watched since `forget`."""
        return self._callback is not None

    @property
    def running(self) -> bool:
        """Whether the watched backward still runs."""
        return self._callback is not None and self._callback() is not None

    def watch(self, ended: Callable[[], None]) -> None:
        """Call from inside a backward."""
        callback = _Callback(ended)
        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def forget(self) -> None:
        """Nothing is watched any more."""
        self._callback = None


class _Callback:
    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __call__(self) -> None:
        self._ended()
