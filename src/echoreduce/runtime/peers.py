"""Competitors that come with other packages: DeepSpeed's quantizer kernels between two collectives, FlashInfer's FP8 all-reduce.

Neither package is a dependency: each is imported when it is asked for, and what cannot run raises BackendUnavailable with the pip line.
Written against the versions of `INSTALL`.

Leaves out: what comes with torch and this package (`baselines`); FlashInfer's other all-reduces, which send 16 bits over the links
(its fusion patterns quantize what they write after the sum) or need Blackwell (NVFP4).
Source: DeepSpeed, `runtime/comm/coalesced_collectives.py` and `csrc/quantization` (ZeRO++: Wang et al., 2024); FlashInfer,
`comm/quantized_allreduce.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.errors import BackendUnavailable
from echoreduce.measure.numeric import SLACK
from echoreduce.partition import partition
from echoreduce.runtime.baselines import Peer
from echoreduce.runtime.c10d import all_gather_single

INSTALL = {"deepspeed": "pip install deepspeed==0.19.8", "flashinfer": "pip install flashinfer-python==0.7.4"}
#: Values per group of DeepSpeed's kernels. One block owns a group; below 256 values `quantized_reduction` starts less than one warp and
#: still reduces over 32 lanes. DeepSpeed's own groups have 2,000 to 8,000 values.
DEEPSPEED_GROUP = 2048
#: Values per group and per tile of FlashInfer's kernel, its defaults.
FLASHINFER_GROUP, FLASHINFER_TILE = 256, 4096
#: Largest relative error of one rounding to fp16 and to FP8 (e4m3), and FP8's largest absolute one below its normal numbers.
HALF_ROUNDING, FP8_ROUNDING, FP8_SUBNORMAL, FP8_MAX = 2.0**-11, 2.0**-4, 2.0**-10, 448.0


def missing() -> dict[str, str]:
    """Packages of this module that are not installed, each with the line that installs it."""
    return {name: f"not installed: {line}" for name, line in INSTALL.items() if importlib.util.find_spec(name) is None}


def deepspeed_two_collective(x: Tensor, group: dist.ProcessGroup, bits: int) -> Peer:
    """DeepSpeed's `swizzle_quant`, all-to-all, its `quantized_reduction`, all-gather, its `dequantize`; symmetric, groups of 2048 values.

    Codes and scales (fp32, one per group) travel in a collective each, as in DeepSpeed. Its kernels read and write fp16 only: another
    dtype is cast on the way in and out, and a size that is no multiple of P groups is copied into a padded buffer, both timed.

    Args:
        bits: 8 or 4.
    Raises:
        BackendUnavailable: DeepSpeed is not installed, or its kernels cannot be compiled here.
    """
    version, quantizer = _version("deepspeed"), _deepspeed_kernels()
    world_size, numel, symmetric = dist.get_world_size(group), x.numel(), quantizer.Symmetric
    cut = partition(numel, world_size, DEEPSPEED_GROUP)
    direct = x.dtype == torch.float16 and cut.padded == numel
    staged = x.reshape(-1) if direct else torch.zeros(cut.padded, dtype=torch.float16, device=x.device)
    codes = torch.empty(cut.padded * bits // 8, dtype=torch.int8, device=x.device)
    scales = torch.empty(cut.groups, 1, dtype=torch.float32, device=x.device)
    result = torch.empty(numel, dtype=x.dtype, device=x.device)

    def call() -> None:
        if not direct:
            staged[:numel].copy_(x.reshape(-1))
        sent, sent_scales = quantizer.swizzle_quant(staged, cut.groups, bits, symmetric, 1, 1, world_size)
        dist.all_to_all_single(codes, sent, group=group)
        dist.all_to_all_single(scales, sent_scales, group=group)
        own, own_scales = quantizer.quantized_reduction(codes, scales, cut.groups, cut.segment_groups, bits, symmetric, world_size)
        all_gather_single(codes, own, group=group)
        all_gather_single(scales, own_scales, group=group)
        total = quantizer.dequantize(codes, scales, cut.groups, bits, symmetric)
        if direct:
            result.set_(total)
        else:
            result.copy_(total[:numel])

    wire = 2 * (world_size - 1) * cut.segment_groups * (DEEPSPEED_GROUP * bits // 8 + 4)
    return Peer(
        f"DeepSpeed {version} {bits}-bit",
        call,
        result,
        exact=False,
        wire=wire,
        allowed=lambda every, exact: deepspeed_bound(every, exact, bits, x.dtype),
    )


def flashinfer_fp8(x: Tensor, group: dist.ProcessGroup) -> Peer:
    """FlashInfer's `quantized_all_reduce`: two-shot, FP8 (e4m3) with an fp32 scale per 256 values over symmetric memory.

    Each rank keeps its own stripes unrounded, so the ranks' results differ.

    Raises:
        BackendUnavailable: FlashInfer is not installed, or the dtype, the size, P or the device is not one that it takes.
    """
    version = _version("flashinfer")
    reduce = getattr(_imported("flashinfer", "flashinfer.comm"), "quantized_all_reduce", None)
    if reduce is None:
        raise BackendUnavailable(f"flashinfer {version} has no quantized_all_reduce: {INSTALL['flashinfer']}")
    world_size, numel = dist.get_world_size(group), x.numel()
    if x.dtype != torch.bfloat16 or numel % 8 or numel < FLASHINFER_TILE or world_size not in (2, 4, 8, 16):
        raise BackendUnavailable(
            f"flashinfer's quantized_all_reduce takes bf16, a multiple of 8 values from {FLASHINFER_TILE} on and P = 2, 4, 8 or 16; "
            f"got {x.dtype}, {numel} values, P = {world_size}"
        )
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        raise BackendUnavailable("flashinfer's quantized_all_reduce needs compute capability 9.0 or later")
    flat, result = x.reshape(-1), torch.empty(numel, dtype=x.dtype, device=x.device)
    bytes_whole = numel + 4 * -(-numel // FLASHINFER_GROUP)
    return Peer(
        f"FlashInfer {version} FP8",
        lambda: reduce(flat, group, output=result),
        result,
        exact=False,
        wire=2 * (world_size - 1) * bytes_whole // world_size,
        allowed=flashinfer_bound,
    )


def deepspeed_bound(contributions: list[Tensor], exact: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Largest error of a value of DeepSpeed's sum; fp32, flat.

    Its symmetric grid has steps of max |x| / 2**(bits - 1) and cuts the largest positive value to one step below, so a rounding errs by a
    whole step, for each contribution and for the sum. All in between is fp16: the cast, the dequantized value and P additions.

    Args:
        contributions: x of each rank, flat.
        exact: their sum, fp32 or wider, flat.
        dtype: of the result.
    """
    step = 2.0 ** (1 - bits)
    none = torch.zeros_like(exact, dtype=torch.float32)
    ranges = sum((_group_range(x, DEEPSPEED_GROUP) for x in contributions), none)
    brought = ranges * (step + (2 + len(contributions)) * HALF_ROUNDING)
    total = brought + (_group_range(exact, DEEPSPEED_GROUP) + brought) * (step + HALF_ROUNDING)
    smallest = torch.finfo(torch.float16).smallest_normal * HALF_ROUNDING * (2 * len(contributions) + 2)
    return SLACK * total + exact.abs().float() * torch.finfo(dtype).eps + smallest


def flashinfer_bound(contributions: list[Tensor], exact: Tensor) -> Tensor:
    """Largest error of a value of FlashInfer's FP8 sum (bf16); fp32, flat: half a unit in the last place of e4m3 for each contribution
    and for the sum, where a group's largest value is FP8's largest. Arguments as in `deepspeed_bound`."""
    none = torch.zeros_like(exact, dtype=torch.float32)
    lowest = FP8_SUBNORMAL / FP8_MAX
    ranges = sum((_group_range(x, FLASHINFER_GROUP) for x in contributions), none)
    brought = FP8_ROUNDING * sum((x.reshape(-1).float().abs() for x in contributions), none) + lowest * ranges
    total = brought + FP8_ROUNDING * (exact.abs().float() + brought) + lowest * ranges * (1 + FP8_ROUNDING + lowest)
    return SLACK * total + exact.abs().float() * torch.finfo(torch.bfloat16).eps + torch.finfo(torch.bfloat16).smallest_normal


def _group_range(values: Tensor, size: int) -> Tensor:
    """Largest magnitude of each group of `size` values, repeated for each value; fp32, flat."""
    flat = values.reshape(-1).float().abs()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % size))
    return padded.reshape(-1, size).amax(dim=-1).repeat_interleave(size)[: flat.numel()]


def _deepspeed_kernels() -> Any:
    """DeepSpeed's quantizer module, compiled by the first call of a machine (minutes), which the other ranks wait for."""
    builders = _imported("deepspeed", "deepspeed.ops.op_builder")
    try:
        return builders.QuantizerBuilder().load()
    except Exception as error:  # whatever a compiler, ninja or the loader raises
        raise BackendUnavailable(f"deepspeed's quantizer kernels cannot be built here: {error}") from error


def _version(package: str) -> str:
    return str(getattr(_imported(package, package), "__version__", "of unknown version"))


def _imported(package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that breaks while it is imported raises anything
        raise BackendUnavailable(f"{module} cannot be imported ({error}): {INSTALL[package]}") from error
