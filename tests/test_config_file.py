"""Configuration files come back as they were written, and a wrong one is refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echoreduce import PRESETS, EchoConfig, edges, load_config, preset, save_config, uniform
from echoreduce.config_file import FORMAT, config_from_dict, config_to_dict
from echoreduce.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip(name: str, tmp_path: Path) -> None:
    save_config(tmp_path / "new" / "a.json", preset(name), {"why": "a test"})
    assert load_config(tmp_path / "new" / "a.json") == preset(name)
    assert load_config(tmp_path / "new" / "a.json").digest() == preset(name).digest()
    assert json.loads((tmp_path / "new" / "a.json").read_text())["evidence"] == {"why": "a test"}


@given(st.lists(st.sampled_from([None, 2, 3, 4, 5, 6, 7, 8, 16]), min_size=1, max_size=9), st.sampled_from(["none", "hadamard"]))
def test_lists_of_bits_round_trip(bits: list[int | None], rotation: Any) -> None:
    config = replace(preset("default"), sites=bits)
    config = replace(config, quant=replace(config.quant, rotation=rotation))
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


@pytest.mark.parametrize("policy", [uniform(), uniform(6), edges(0, 3, 5)])
def test_policies_round_trip(policy: Any) -> None:
    assert config_from_dict(config_to_dict(EchoConfig(sites=policy))).sites == policy


def test_absent_keys_mean_the_defaults() -> None:
    assert config_from_dict({}) == EchoConfig()
    assert config_from_dict({"quant": {"bits": 6}, "feedback": {"gain": 1}}).quant.bits == 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other/2"}, "format must be 'echoreduce-config/1', got 'other/2'"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"config": 3}, "config must be an object, got 3"),
        ({"config": {"quantum": {}}}, "config: unknown key 'quantum'; known are quant"),
        ({"config": {"quant": {"bits": 9}}}, "got 9"),
        ({"config": {"quant": {"bits": "4"}}}, "quant.bits must be a whole number, got '4'"),
        ({"config": {"quant": {"bits": True}}}, "quant.bits must be a whole number, got True"),
        ({"config": {"quant": {"group": 64}}}, "quant: unknown key 'group'"),
        ({"config": {"feedback": {"gain": 1.5}}}, r"gain must lie in \[0, 1\], got 1.5"),
        ({"config": {"feedback": {"decays": [0.1]}}}, r"got \(0.1,\)"),
        ({"config": {"feedback": {"decays": ["a", 0]}}}, r"feedback.decays\[0\] must be a number, got 'a'"),
        ({"config": {"feedback": None}}, "feedback must be an object, got None"),
        ({"config": {"algorithm": "ring"}}, "got 'ring'"),
        ({"config": {"sites": []}}, "list is empty"),
        ({"config": {"sites": [4, 11]}}, "got 11"),
        ({"config": {"sites": [4, "8"]}}, r"sites\[1\] must be a whole number, got '8'"),
        ({"config": {"sites": {"policy": "middle"}}}, "got 'middle'"),
        ({"config": {"sites": {"policy": "edges", "first": -1}}}, "-1"),
        ({"config": {"sites": {"policy": "edges", "begin": 1}}}, "unknown key 'begin'"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"format": FORMAT, "config": config_to_dict(preset("default"))} | change))
    with pytest.raises(ConfigError, match=reason) as refused:
        load_config(path)
    assert "a.json" in str(refused.value)


def test_what_is_no_configuration_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file at"):
        load_config(tmp_path / "missing.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_config(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"got \[1\]"):
        load_config(tmp_path / "b.json")
    with pytest.raises(ConfigError, match="is a function"):
        save_config(tmp_path / "c.json", EchoConfig(sites=lambda site, sites: 4))
    assert not (tmp_path / "c.json").exists()
