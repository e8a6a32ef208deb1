"""Tensors through programs: the sum exactly, any size, and the quantized wire."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.cases import NAMES, shapes
from echoreduce.cli.topology_error import gaussian_errors, measure_error, requantizer
from echoreduce.collectives.catalogue import ALGORITHMS, build
from echoreduce.collectives.counters import between_nodes
from echoreduce.collectives.interpreter import execute
from echoreduce.config import QuantConfig
from echoreduce.errors import ShapeError
from echoreduce.reference import all_reduce


@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_the_sum(name: str) -> None:
    generator = np.random.default_rng(0)
    for n in (1, 2, 3, 4, 5, 8, 12):
        for program in shapes(name, n):
            for numel in (0, 1, 2, 11, 97):
                values = generator.integers(-1000, 1000, (n, numel))
                given_values = values.copy()
                result = execute(program, values)
                assert (result == values.sum(axis=0)).all(), (name, n, numel)
                assert (values == given_values).all()


@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(0, 70), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_any_rank_count_size_and_pieces(name: str, n: int, numel: int, pieces: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(-(2**40), 2**40, (n, numel))
    per_node = 3 if n % 3 == 0 else 1
    assert (execute(ALGORITHMS[name].build(n, per_node, pieces), values) == values.sum(axis=0)).all()


def test_all_ranks_agree_bit_for_bit_in_floating_point() -> None:
    values = np.random.default_rng(1).standard_normal((7, 60)).astype(np.float32)
    for name in NAMES:
        result = execute(build(name, 7, 1, 2), values)
        assert (result == result[0]).all(), name
        assert np.allclose(result[0], values.sum(axis=0), atol=1e-5)


def test_wrong_rows_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[3, numel\]"):
        execute(build("ring", 3), np.zeros((2, 4)))


def halve_precision(values: np.ndarray) -> np.ndarray:
    return np.round(values * 4) / 4


@pytest.mark.parametrize("name", NAMES)
def test_a_lossy_wire_leaves_all_ranks_equal(name: str) -> None:
    for n in (2, 4, 6):
        values = np.random.default_rng(n).standard_normal((n, 48))
        result = execute(build(name, n, 2, 3), values, halve_precision)
        assert (result == result[0]).all()
        assert not np.array_equal(result[0], values.sum(axis=0))
        assert np.abs(result[0] - values.sum(axis=0)).max() <= 0.125 * (2 * n)  # at most 2 N roundings reach an output


def test_quantized_links_only_between_nodes() -> None:
    values = np.random.default_rng(3).standard_normal((8, 64))
    within = execute(build("ring", 8), values, halve_precision, between_nodes(8))
    assert np.allclose(within, values.sum(axis=0))
    between = execute(build("echo_2d", 8, 4), values, halve_precision, between_nodes(4))
    assert (between == between[0]).all()
    assert not np.allclose(between[0], values.sum(axis=0))


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_the_programs_of_echo_equal_the_reference_bit_for_bit(algorithm: str) -> None:
    quant = QuantConfig(bits=4, group_size=32)
    values = np.random.default_rng(4).standard_normal((4, 4 * 64)).astype(np.float32)
    result = execute(build(algorithm, 4), values, requantizer(quant))
    expected = all_reduce(torch.from_numpy(values), quant, algorithm).output.numpy()
    assert (result == expected).all()


def test_chunks_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ShapeError, match="group size 32"):
        measure_error("ring", np.zeros((2, 48), dtype=np.float32), QuantConfig(group_size=32))


def test_error_by_topology_follows_the_noise_law() -> None:
    """Measured errors stand in the order of the roundings, within 6 % of one rounding times sqrt(noise / N)."""
    rows = {(r.algorithm, r.world_size): r for r in gaussian_errors((2, 8), QuantConfig(bits=4), numel=8192)}
    for row in rows.values():
        assert row.measured == pytest.approx(row.predicted, rel=0.06)
    at8 = {name: rows[name, 8].measured for name in ("one_shot", "two_shot", "halving_doubling", "binary_tree", "ring")}
    assert list(at8.values()) == sorted(at8.values())
    assert at8["ring"] / at8["one_shot"] == pytest.approx((36 / 8) ** 0.5, rel=0.06)


def test_collectives_cost_and_theory_import_no_torch() -> None:
    modules = ["program", "catalogue", "proof", "interpreter", "counters", "bound"]
    names = [f"echoreduce.collectives.{m}" for m in modules]
    names += [f"echoreduce.cost.{m}" for m in ("topology", "queues", "simulator", "model", "selection", "calibrate")]
    names += ["echoreduce.theory.weights", "echoreduce.theory.bounds"]
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
