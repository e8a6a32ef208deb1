"""Other ways to all-reduce the same tensor, for the same run: NCCL, torch symmetric memory, the two-collective quantized all-reduce.

Each gives a call without arguments that leaves the sum of the ranks' tensors in its `result`. A peer that cannot run says why.

Leaves out: competitors that come with other packages (`peers`).
Source: the paper, Table 2; torch.distributed._symmetric_memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.config import QuantConfig
from echoreduce.errors import BackendUnavailable
from echoreduce.kernels.spec import Spec, landing_bytes
from echoreduce.measure.numeric import bound
from echoreduce.partition import partition
from echoreduce.runtime.c10d import all_gather_single
from echoreduce.runtime.pipeline import COMPILE_OPTIONS, DTYPE_NAMES

#: Smallest tensor that symmetric-memory collectives of torch take without padding: 16 bytes a rank.
SYMMETRIC_ALIGNMENT = 16


@dataclass(frozen=True)
class Peer:
    """One prepared competitor.

    Attributes:
        name: as in tables.
        call: one all-reduce on the current stream.
        result: tensor that holds the sum afterwards; calls repeated on their own result grow, so checks use the first call only.
        wire: bytes that one rank sends over links in one call.
        exact: whether the sum is 16-bit (else quantized).
        allowed: (contributions of all ranks, exact sum) -> largest error of each value, fp32, flat; None: judged by SQNR alone.
    """

    name: str
    call: Callable[[], Any]
    result: Tensor
    wire: int
    exact: bool = True
    allowed: Callable[[list[Tensor], Tensor], Tensor] | None = None


def nccl(x: Tensor, group: dist.ProcessGroup) -> Peer:
    """The process group's own all-reduce, in place on a copy."""
    copy = x.clone()
    return Peer(dist.get_backend(group), lambda: dist.all_reduce(copy, group=group), copy, _sent(x, group))


def symmetric(x: Tensor, group: dist.ProcessGroup, which: str) -> Peer:
    """Torch symmetric memory, `one_shot` or `two_shot`; the input already lies in a symmetric buffer, which favours it.

    Raises:
        BackendUnavailable: the operator is missing or does not take this size.
    """
    import torch.distributed._symmetric_memory as memory

    operators = torch.ops.symm_mem
    if x.numel() * x.element_size() % (SYMMETRIC_ALIGNMENT * dist.get_world_size(group)):
        raise BackendUnavailable(f"symmetric-memory {which} needs a multiple of 16 bytes a rank, got {x.numel()} values")
    whole = (dist.get_world_size(group) - 1) * x.numel() * x.element_size()
    buffer = memory.empty(x.numel(), dtype=x.dtype, device=x.device)
    memory.rendezvous(buffer, group)
    buffer.copy_(x.reshape(-1))
    name = group.group_name
    if which == "one_shot":
        result = torch.empty_like(buffer)
        return Peer("symm_mem one-shot", lambda: operators.one_shot_all_reduce_out(buffer, "sum", name, result), result, whole)
    return Peer("symm_mem two-shot", lambda: operators.two_shot_all_reduce_(buffer, "sum", name), buffer, _sent(x, group))


def _sent(x: Tensor, group: dist.ProcessGroup) -> int:
    """Bytes a rank sends in a bandwidth-optimal 16-bit all-reduce, 2 (P - 1) / P of the tensor (Patarasuk and Yuan, 2009)."""
    world_size = dist.get_world_size(group)
    return 2 * (world_size - 1) * x.numel() * x.element_size() // world_size


def two_collective(x: Tensor, group: dist.ProcessGroup, quant: QuantConfig) -> Peer:
    """Quantize, all_to_all_single, reduce, all_gather, dequantize; nothing overlaps."""
    from echoreduce.kernels import two_collective as kernels

    world_size, warps = dist.get_world_size(group), 4
    cut = partition(x.numel(), world_size, quant.group_size)
    rows = warps * 1024 // quant.group_size
    spec = Spec(
        world_size,
        dist.get_rank(group),
        bits=quant.bits,
        group_size=quant.group_size,
        policy=quant.layout,
        dtype=DTYPE_NAMES[x.dtype],
        half_qparams=x.dtype == torch.float16,
        even=cut.padded == cut.numel,
        rows=rows,
    )
    area = landing_bytes(spec, cut.segment_groups)
    sent, arrived = (torch.empty(world_size * area, dtype=torch.uint8, device=x.device) for _ in range(2))
    rounded = torch.empty(area, dtype=torch.uint8, device=x.device)
    result = torch.empty_like(x)
    grid, shape = (-(-cut.segment_groups // rows),), (cut.segment_groups, area)
    options: Any = {"num_warps": warps, **COMPILE_OPTIONS}
    quantize: Any = kernels.quantize_kernel[grid]
    reduce: Any = kernels.reduce_kernel[grid]
    dequantize: Any = kernels.dequantize_kernel[grid]

    def call() -> None:
        quantize(x, sent.data_ptr(), x.numel(), *shape, spec, **options)
        dist.all_to_all_single(arrived, sent, group=group)
        reduce(arrived.data_ptr(), rounded.data_ptr(), *shape, spec, **options)
        all_gather_single(sent, rounded, group=group)
        dequantize(sent.data_ptr(), result, x.numel(), *shape, spec, **options)

    def allowed(every: list[Tensor], exact: Tensor) -> Tensor:
        return bound(every, exact, quant, x.dtype)

    return Peer(f"two-collective {quant.bits}-bit", call, result, 2 * (world_size - 1) * area, exact=False, allowed=allowed)
