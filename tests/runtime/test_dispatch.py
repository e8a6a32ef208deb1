"""The path is a pure function of the size and a table that all ranks share, and can be asked for its reason."""

from __future__ import annotations

import pytest

from echoreduce.errors import ConfigError
from echoreduce.runtime.dispatch import UNMEASURED, Table, built_in_table, choose, open_backend


def test_the_crossover_divides():
    table = Table(4096, "here")
    assert choose(4095, 4, table).path == "exact"
    assert choose(4096, 4, table).path == "p2p"
    assert "4095 bytes are below the crossover of 4096 bytes (here)" in choose(4095, 4, table).reason


def test_sixteen_bits_are_exact_at_every_size():
    assert choose(1 << 30, 16, Table(0, "")).path == "exact"


def test_unmeasured_machines_say_so():
    table = built_in_table("Some Card", 7, 2)
    assert table.crossover == UNMEASURED
    assert "not measured for 7 x Some Card" in table.source
    assert built_in_table("NVIDIA H200", 2, 2).crossover < UNMEASURED


def test_unknown_backends_are_named():
    with pytest.raises(ConfigError, match="auto, p2p, c10d"):
        open_backend(name="nvshmem")
