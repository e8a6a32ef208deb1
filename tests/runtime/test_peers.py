"""Adapters of DeepSpeed's and FlashInfer's kernels: data flow, bytes, padding and order, with the kernels' functions written in torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echoreduce.cli.bench import check_peer, contribution, make_peers
from echoreduce.errors import BackendUnavailable, CheckError, ConfigError
from echoreduce.runtime import peers
from echoreduce.runtime.baselines import Peer
from ranks import run_fresh

GROUP = peers.DEEPSPEED_GROUP
SIZES = (1, 1000, 2 * GROUP - 1, 12 * GROUP, 12 * GROUP + 17)


class TorchQuantizer:
    """What DeepSpeed 0.19.8's quantizer module does, read off its CUDA source: fp16 only, symmetric, scales fp32 [groups, 1].

    Four-bit codes lie two in a byte, the first in the upper half. With one node and one pipeline stage the swizzle changes no order.
    """

    Symmetric = "symmetric"

    def swizzle_quant(
        self, values: Tensor, groups: int, bits: int, kind: str, pipeline: int, nodes: int, devices: int
    ) -> tuple[Tensor, Tensor]:
        assert (values.dtype, values.is_contiguous()) == (torch.float16, True), "the kernel reads __half and no strides"
        assert (kind, pipeline, nodes, groups % devices) == (self.Symmetric, 1, 1, 0)
        grouped = values.reshape(groups, -1).float()
        assert grouped.shape[1] in range(256, 16385, 8), "a warp at least, loads of 8 values, at most 10 unrolled steps"
        largest = grouped.abs().amax(dim=1, keepdim=True)
        scale = torch.where(largest == 0, 1.0, 2.0**bits / (2 * largest))
        limit = 1 << (bits - 1)
        codes = (grouped * scale).round().clamp(-limit, limit - 1).to(torch.int32).reshape(-1)
        packed = codes if bits == 8 else (codes[0::2] & 15) << 4 | codes[1::2] & 15
        return (packed & 255).to(torch.uint8).view(torch.int8), 1 / scale

    def dequantize(self, codes: Tensor, scales: Tensor, groups: int, bits: int, kind: str) -> Tensor:
        assert (kind, codes.dtype, tuple(scales.shape)) == (self.Symmetric, torch.int8, (groups, 1))
        wide = codes.to(torch.int32)
        if bits == 4:
            wide = torch.stack((wide >> 4, ((wide & 15) ^ 8) - 8), dim=-1)
        return (wide.reshape(groups, -1).float() * scales).half().reshape(-1)

    def quantized_reduction(
        self, codes: Tensor, scales: Tensor, groups_in: int, groups_out: int, bits: int, kind: str, devices: int
    ) -> tuple[Tensor, Tensor]:
        each = self.dequantize(codes, scales, groups_in, bits, kind).reshape(devices, -1)
        total = torch.zeros_like(each[0])
        for one in each:
            total = total + one
        return self.swizzle_quant(total, groups_out, bits, kind, 1, 1, 1)


def torch_quantized_all_reduce(x: Tensor, group: Any, *, output: Tensor) -> Tensor:
    """FlashInfer's arithmetic in one gather: FP8 with a scale per 256 values, fp32 sum, FP8 again but for this rank's stripes."""
    assert (x.dtype, x.is_contiguous(), output.shape) == (torch.bfloat16, True, x.shape)
    size, tile, world_size = peers.FLASHINFER_GROUP, peers.FLASHINFER_TILE, dist.get_world_size(group)

    def rounded(values: Tensor) -> Tensor:
        grouped = torch.nn.functional.pad(values, (0, -values.numel() % size)).reshape(-1, size)
        largest = grouped.abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
        return ((grouped * (448.0 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448.0)).reshape(-1)[: values.numel()]

    every = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(every, x, group=group)
    total = torch.stack([rounded(one.float()) for one in every]).sum(dim=0)
    own = torch.arange(x.numel()) // tile % world_size == dist.get_rank(group)
    return output.copy_(torch.where(own, total, rounded(total)))


@contextmanager
def installed(builder: Any = None, flashinfer: Any = torch_quantized_all_reduce) -> Iterator[None]:
    """Modules in this process as the packages would put them there."""
    found = {
        "deepspeed": {"__version__": "fake"},
        "deepspeed.ops": {},
        "deepspeed.ops.op_builder": {"QuantizerBuilder": lambda: SimpleNamespace(load=builder or TorchQuantizer)},
        "flashinfer": {"__version__": "fake"},
        "flashinfer.comm": {"quantized_all_reduce": flashinfer},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, content in found.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        yield


def inputs(numel: int, dtype: torch.dtype, world_size: int) -> tuple[list[Tensor], Tensor]:
    every = [contribution(numel, dtype, torch.device("cpu"), rank) for rank in range(world_size)]
    return every, torch.stack([x.float() for x in every]).sum(dim=0)


def in_one_process(every: list[Tensor], bits: int) -> Tensor:
    """The same stages on all ranks' tensors here: what the collectives must deliver, in fp16."""
    kernels, world_size, numel = TorchQuantizer(), len(every), every[0].numel()
    groups = -(-numel // (GROUP * world_size)) * world_size
    segment = groups * GROUP // world_size
    total = torch.zeros(groups * GROUP, dtype=torch.float16)
    for x in every:
        padded = torch.nn.functional.pad(x.half(), (0, groups * GROUP - numel))
        codes, scales = kernels.swizzle_quant(padded, groups, bits, "symmetric", 1, 1, world_size)
        total = total + kernels.dequantize(codes, scales, groups, bits, "symmetric")
    segments = [kernels.swizzle_quant(part, groups // world_size, bits, "symmetric", 1, 1, 1) for part in total.split(segment)]
    return torch.cat([kernels.dequantize(*part, groups // world_size, bits, "symmetric") for part in segments])[:numel]


class Meter:
    """Counts the bytes that this rank sends to others through the collectives of the adapter."""

    def __init__(self, world_size: int) -> None:
        self.sent, self._others, self._all_to_all, self._all_gather = 0, world_size - 1, dist.all_to_all_single, peers.all_gather_single
        dist.all_to_all_single, peers.all_gather_single = self.all_to_all, self.all_gather

    def all_to_all(self, output: Tensor, values: Tensor, group: Any) -> None:
        self.sent += values.nbytes * self._others // (self._others + 1)
        self._all_to_all(output, values, group=group)

    def all_gather(self, output: Tensor, values: Tensor, group: Any) -> None:
        self.sent += values.nbytes * self._others
        self._all_gather(output, values, group=group)

    def close(self) -> None:
        dist.all_to_all_single, peers.all_gather_single = self._all_to_all, self._all_gather


def deepspeed_case(group: Any, numel: int, dtype: torch.dtype, bits: int) -> tuple[Tensor, bool]:
    """One call against the stages in one process, with its bytes and its bound."""
    world_size = dist.get_world_size(group)
    every, exact = inputs(numel, dtype, world_size)
    meter = Meter(world_size)
    try:
        with installed():
            peer = peers.deepspeed_two_collective(every[dist.get_rank(group)], group, bits)
        peer.call()
    finally:
        meter.close()
    assert meter.sent == peer.wire
    result = peer.result[:numel].clone()
    assert result.dtype == dtype
    assert torch.equal(result, in_one_process(every, bits).to(dtype))
    peer.call()
    assert torch.equal(peer.result[:numel], result), "a second call gives the same: the input was not touched"
    error = (result.double() - exact.double()).abs()
    return result, bool((error <= peer.allowed(every, exact)).all())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_deepspeed_flow_is_that_of_one_process(pool, world_size, bits, dtype):
    for numel in SIZES:
        answers = pool.run(deepspeed_case, world_size, numel, dtype, bits)
        assert all(torch.equal(result, answers[0][0]) for result, _ in answers)
        assert all(within for _, within in answers)


def flashinfer_case(group: Any, numel: int) -> tuple[float, int]:
    every, exact = inputs(numel, torch.bfloat16, dist.get_world_size(group))
    with installed():
        peer = peers.flashinfer_fp8(every[dist.get_rank(group)], group)
    peer.call()
    noise = check_peer(peer, every, exact)
    peer.result[: peers.FLASHINFER_GROUP] = 0
    with pytest.raises(CheckError, match="value"):
        check_peer(peer, every, exact)
    return noise, peer.wire


@pytest.mark.parametrize("numel", [4096, 4096 * 4 + 8, 100_000])
def test_flashinfer_result_is_checked_and_its_bytes_are_named(pool, numel):
    for noise, wire in pool.run(flashinfer_case, 2, numel):
        assert 25.0 < noise < 40.0
        assert wire == numel + 4 * -(-numel // 256)


def refusals(group: Any) -> list[str]:
    texts = []
    half = torch.bfloat16
    for x, offered in (
        (torch.zeros(8192), torch_quantized_all_reduce),
        (torch.zeros(8193, dtype=half), torch_quantized_all_reduce),
        (torch.zeros(64, dtype=half), torch_quantized_all_reduce),
        (torch.zeros(8192, dtype=half), None),
    ):
        with installed(flashinfer=offered), pytest.raises(BackendUnavailable) as caught:
            peers.flashinfer_fp8(x, group)
        texts.append(str(caught.value))
    return texts


def test_flashinfer_refuses_what_its_kernel_does_not_take(pool):
    *taken, old = pool.run(refusals, 2)[0]
    assert all("bf16" in text and "P = 2" in text for text in taken)
    assert "pip install flashinfer-python" in old


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("fault", ["swapped segments", "one rank missing", "first code in the lower half", "not a number"])
def test_a_wrong_sum_fails_the_check(bits, fault):
    every, exact = inputs(8 * GROUP, torch.bfloat16, 2)
    total = in_one_process(every, bits).to(torch.bfloat16)
    if fault == "swapped segments":
        total = torch.cat((total[4 * GROUP :], total[: 4 * GROUP]))
    elif fault == "one rank missing":
        total = every[0].clone()
    elif fault == "first code in the lower half":
        total = total.reshape(-1, 2).flip(1).reshape(-1)
    else:
        total[-1] = float("nan")
    peer = Peer("fault", lambda: None, total, 0, exact=False, allowed=lambda e, s: peers.deepspeed_bound(e, s, bits, torch.bfloat16))
    with pytest.raises(CheckError, match="fault"):
        check_peer(peer, every, exact)


def test_one_wrong_group_that_sqnr_would_pass_fails_the_bound():
    every, exact = inputs(64 * GROUP, torch.bfloat16, 2)
    total = in_one_process(every, 8).to(torch.bfloat16)
    total[:GROUP] = total[GROUP : 2 * GROUP].clone()
    blind = Peer("group", lambda: None, total, 0, exact=False)
    assert check_peer(blind, every, exact) > 10.0
    seeing = replace(blind, allowed=lambda e, s: peers.deepspeed_bound(e, s, 8, torch.bfloat16))
    with pytest.raises(CheckError, match="value"):
        check_peer(seeing, every, exact)


def absent(group: Any, blocked_rank: int) -> tuple[list[str], dict[str, str]]:
    """DeepSpeed on all ranks but one."""
    left_out: dict[str, str] = {}
    with installed():
        if dist.get_rank(group) == blocked_rank:
            sys.modules["deepspeed"] = None  # importing it raises ImportError
        made = make_peers(torch.ones(8192), ["deepspeed_4", "none"], left_out)
        with pytest.raises(ConfigError, match="--peers"):
            make_peers(torch.ones(8192), ["deepspeed_5"], left_out)
    return [peer.name for peer in made], left_out


def test_a_peer_that_one_rank_cannot_run_is_left_out_on_all():
    first, second = run_fresh(absent, 2, 0)
    assert first[0] == second[0] == []
    assert "pip install deepspeed==" in first[1]["deepspeed_4"]
    assert "another rank" in second[1]["deepspeed_4"]
    assert run_fresh(absent, 2, -1)[0] == (["DeepSpeed fake 4-bit"], {})


def test_missing_packages_come_with_their_pip_line(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "flashinfer" else object())
    assert peers.missing() == {"flashinfer": "not installed: pip install flashinfer-python==0.7.4"}


def test_kernels_that_do_not_compile_are_a_reason_not_a_crash():
    def load() -> None:
        raise OSError("no nvcc")

    with installed(builder=load), pytest.raises(BackendUnavailable, match="no nvcc"):
        peers.deepspeed_two_collective(torch.ones(8), None, 4)
