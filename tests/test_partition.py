"""Every value has one owner, segments are equal, and the wire sizes follow design.md, Section 3."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echoreduce import QuantConfig
from echoreduce.errors import ShapeError
from echoreduce.partition import partition, wire_bytes


@given(numel=st.integers(0, 10**7), world_size=st.integers(1, 64), group_size=st.sampled_from([16, 64, 128, 256]))
def test_every_value_has_one_owner(numel: int, world_size: int, group_size: int) -> None:
    cut = partition(numel, world_size, group_size)
    assert cut.padded == cut.segment * world_size >= numel
    assert cut.padded - numel < max(1, world_size) * group_size + group_size * (numel == 0)
    bounds = [cut.bounds(rank) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(before[1] == after[0] for before, after in zip(bounds, bounds[1:]))


def test_wire_bytes() -> None:
    quant = QuantConfig()
    numel = 4 * 128 * 100
    for world_size in (2, 4):
        message = 2 * numel
        assert wire_bytes(numel, world_size, quant, "two_shot") == 2 * (world_size - 1) / world_size * message * 4.25 / 16
        assert wire_bytes(numel, world_size, quant, "one_shot") == (world_size - 1) * message * 4.25 / 16
        assert wire_bytes(numel, world_size, QuantConfig(bits=16), "two_shot") == 2 * (world_size - 1) / world_size * message
    assert wire_bytes(numel, 2, quant, "two_shot") == wire_bytes(numel, 2, quant, "one_shot")
    assert wire_bytes(numel, 1, quant, "two_shot") == 0


def test_nonsense_is_refused() -> None:
    for arguments in ((-1, 2, 128), (5, 0, 128), (5, 2, 0)):
        with pytest.raises(ShapeError):
            partition(*arguments)
