"""Which path an all-reduce takes, and why: a pure function of (bytes, dtype, P, device, table), and the backend that follows it.

    p2p      the low-bit kernels over peer-to-peer memory
    exact    16-bit values through the process group's own all-reduce: below the crossover, where latency counts and bytes do not
    c10d     the low-bit all-reduce over torch.distributed: where peer-to-peer memory cannot be had on every rank

All ranks hold the same table (rank 0's, sent once), so all choose alike. The choice depends on the size alone and all sites of a pass have
one size, so a compensated pass goes one way from end to end. The exact path touches no feedback state: it makes no error to return.

Leaves out: the algorithm (two-shot or one-shot), which changes the numbers and belongs to the configuration.
Source: docs/design.md, Section 7; figures in docs/kernels.md.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.config import FeedbackConfig, QuantConfig
from echoreduce.errors import BackendUnavailable, ConfigError, EchoReduceWarning
from echoreduce.measure.timing import summarize, time_graph
from echoreduce.runtime.c10d import C10dBackend
from echoreduce.runtime.p2p import P2PBackend

Path = Literal["p2p", "exact", "c10d"]
BACKENDS = ("auto", "p2p", "c10d")

#: Crossover where nobody has measured: below it latency decides and 16 bits are the safe choice.
UNMEASURED = 1 << 20

#: Crossover in bytes by (device name, P, bytes of a value), measured under CUDA graphs; 0: low-bit wins at every size of the table.
MEASURED: dict[tuple[str, int, int], int] = {
    ("NVIDIA H200", 2, 2): 0,
}


@dataclass(frozen=True)
class Table:
    """What decides: messages of fewer than `crossover` bytes go exact.

    Attributes:
        crossover: bytes.
        source: where the figure comes from, for `explain`.
    """

    crossover: int
    source: str


@dataclass(frozen=True)
class Choice:
    """A path and its reason."""

    path: Path
    reason: str


def built_in_table(device: str, world_size: int, itemsize: int) -> Table:
    """The table that comes with the package."""
    crossover = MEASURED.get((device, world_size, itemsize))
    if crossover is None:
        return Table(UNMEASURED, f"not measured for {world_size} x {device} and {itemsize}-byte values: the default")
    return Table(crossover, f"measured on {world_size} x {device}")


def choose(nbytes: int, bits: int, table: Table) -> Choice:
    """The path of one all-reduce; pure, so equal on all ranks."""
    if bits == 16:
        return Choice("exact", "16 bits were asked for")
    if nbytes < table.crossover:
        return Choice("exact", f"{nbytes} bytes are below the crossover of {table.crossover} bytes ({table.source})")
    return Choice("p2p", f"{nbytes} bytes are not below the crossover of {table.crossover} bytes ({table.source})")


class AutoBackend:
    """The low-bit kernels above the crossover, exact 16-bit sums below it. Collective: construction, `all_reduce`, `tune`, `close`.

    Args:
        inner: the peer-to-peer backend that it drives.
    """

    name = "auto"

    def __init__(self, inner: P2PBackend) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        cuda = inner.device.type == "cuda"
        self._device_name = torch.cuda.get_device_name(inner.device) if cuda else "cpu"
        tables: list[Any] = [{size: built_in_table(self._device_name, self.world_size, size) for size in (2, 4)}]
        dist.broadcast_object_list(tables, src=dist.get_global_rank(inner.group, 0), group=inner.group)
        self._tables: dict[int, Table] = tables[0]

    def new_state(self, feedback: FeedbackConfig) -> Any:
        """Empty feedback state."""
        return self.inner.new_state(feedback)

    def choice(self, nbytes: int, dtype: torch.dtype, bits: int = 4) -> Choice:
        """The path of a message of so many bytes."""
        return choose(nbytes, bits, self._tables[dtype.itemsize])

    def explain(self, nbytes: int, dtype: torch.dtype, bits: int = 4) -> str:
        """Which path a message takes, and why."""
        found = self.choice(nbytes, dtype, bits)
        return f"{found.path}: {found.reason}"

    def all_reduce(self, x: Tensor, quant: QuantConfig, algorithm: str, state: Any = None, out: Tensor | None = None) -> Tensor:
        """See `Backend.all_reduce`; the exact path leaves the state as it is."""
        table = self._tables.get(x.element_size())
        if table is not None and choose(x.numel() * x.element_size(), quant.bits, table).path == "exact":
            return self.inner.all_reduce(x, quant.with_bits(16), algorithm, None, out)
        return self.inner.all_reduce(x, quant, algorithm, state, out)

    def tune(self, quant: QuantConfig, algorithm: str, dtype: torch.dtype = torch.bfloat16) -> Table:
        """Measure the crossover for this group and use it from now on. Collective; takes about a second, under CUDA graphs.

        Returns:
            The new table: the smallest size from which the low-bit path is at least as fast on the slowest rank.
        """
        crossover = 0
        for power in range(13, 25):
            nbytes = 1 << power
            x = torch.randn(nbytes // dtype.itemsize, device=self.inner.device, dtype=dtype)
            exact = self._slowest(x, quant.with_bits(16), algorithm)
            low = self._slowest(x, quant, algorithm)
            if low > exact:
                crossover = 2 * nbytes
        table = Table(crossover, f"measured on this group ({quant.bits} bits, {algorithm})")
        self._tables[dtype.itemsize] = table
        return table

    def _slowest(self, x: Tensor, quant: QuantConfig, algorithm: str) -> float:
        y = torch.empty_like(x)
        device = self.inner.device
        median = summarize(time_graph(lambda: self.inner.all_reduce(x, quant, algorithm, None, y), 3, 10, device)).median
        longest = torch.tensor([median], device=device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.inner.group)
        return float(longest)

    def synchronize(self) -> None:
        """See `P2PBackend.synchronize`."""
        self.inner.synchronize()

    def close(self) -> None:
        """See `P2PBackend.close`."""
        self.inner.close()


def open_backend(
    group: dist.ProcessGroup | None = None,
    name: str = "auto",
    *,
    device: torch.device | str | None = None,
    timeout: timedelta | None = None,
    check_headers: bool | None = None,
) -> tuple[Any, str]:
    """The backend that serves a group, and the reason for it. Collective, but for `c10d` and for `auto` on a group without NCCL.

    Args:
        check_headers: of `c10d`, see there.
        name: `p2p` (or an error), `c10d`, or `auto`: peer-to-peer kernels where every rank can have them, else c10d with one warning.
    Raises:
        ConfigError: another name. BackendUnavailable: `p2p` was asked for and cannot be had.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "c10d":
        return C10dBackend(group, timeout=timeout, check_headers=check_headers), "asked for"
    if name == "p2p":
        return P2PBackend(group, device=device, timeout=timeout), "asked for"
    fallback = partial(C10dBackend, group, timeout=timeout, check_headers=check_headers)
    if device is None and not _over_nccl(group):
        return fallback(), "the group is not over NCCL, so its tensors are not on CUDA"
    try:
        return AutoBackend(P2PBackend(group, device=device, timeout=timeout)), "every rank can write to every peer"
    except BackendUnavailable as error:
        if torch.cuda.is_available():
            warnings.warn(f"c10d is used instead of peer-to-peer kernels: {error}", EchoReduceWarning, stacklevel=2)
        return fallback(), str(error)


def _over_nccl(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank is a member of a group with NCCL for CUDA tensors; the backends say what is wrong where it is not."""
    return dist.is_initialized() and dist.get_rank(group) >= 0 and "nccl" in dist.get_backend(group)
