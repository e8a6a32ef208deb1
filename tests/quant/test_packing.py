"""Codes survive packing at every width, and the wire size is what the function says."""

from __future__ import annotations

import pytest
import torch

from echoreduce import QuantConfig
from echoreduce.errors import ConfigError
from echoreduce.quant import codec
from echoreduce.quant.grid import fit
from echoreduce.quant.packing import decode, encode, pack, segment_bytes, unpack


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("numel", [8, 16, 128, 4096])
def test_codes_survive(bits: int, numel: int) -> None:
    codes = torch.randint(0, 2**bits, (3, numel), dtype=torch.uint8)
    data = pack(codes, bits)
    assert data.shape == (3, numel * bits // 8)
    assert torch.equal(unpack(data, bits, numel), codes)


def test_first_value_has_the_low_bits() -> None:
    assert pack(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8), 4).tolist() == [[0x21, 0x43, 0x65, 0x87]]
    assert pack(torch.tensor([[5, 2, 7, 0, 1, 1, 6, 3]], dtype=torch.uint8), 3).tolist() == [
        [0b00_11_10_01, 0b11_10_01_01, 0b0100_0101],
    ]


def test_the_documented_wire_sizes() -> None:
    assert QuantConfig().group_bytes() == 68
    assert QuantConfig(policy="symmetric").group_bytes() == 66
    assert QuantConfig(bits=8).group_bytes() == 132
    assert QuantConfig().bits_per_value() == 4.25
    assert QuantConfig(group_size=64).bits_per_value() == 4.5


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("policy", ["symmetric", "asymmetric", "zero_aware"])
@pytest.mark.parametrize("qparams", [torch.bfloat16, torch.float16])
def test_a_segment_survives_the_wire(bits: int, policy: str, qparams: torch.dtype) -> None:
    quant = QuantConfig(bits=bits, group_size=32, policy=policy)
    groups = torch.randn(2, 5, 32)
    groups[0, 1] = 0
    groups[1, 2] += 50
    groups[1, 3, 0] = torch.nan
    grid = fit(groups, quant, qparams)
    level = codec.quantize(groups, grid, quant)
    data = encode(level, grid, quant, qparams)
    assert data.dtype == torch.uint8
    assert data.shape == (2, segment_bytes(5, quant))
    back, back_grid = decode(data, 5, quant, qparams)
    torch.testing.assert_close(codec.dequantize(back, back_grid), codec.dequantize(level, grid), rtol=0, atol=0, equal_nan=True)
    assert codec.dequantize(back, back_grid)[1, 3].isnan().all()


def test_groups_that_fill_no_whole_byte_are_refused() -> None:
    with pytest.raises(ConfigError, match="whole bytes"):
        QuantConfig(bits=3, group_size=4)
    assert QuantConfig(bits=4, group_size=2).group_bytes() == 5
