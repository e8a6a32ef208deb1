"""What a b-bit wire does to the sum, by algorithm: the tensor interpreter with the package's quantizer on every hop.

Why here: the interpreter knows no torch and the quantizer is torch, so the layer above both joins them. The prediction beside each
measurement is `counters.Roundings.relative_error`: one rounding's error times sqrt(noise / N).
Leaves out: error feedback, which needs more than one all-reduce (see `reference`), and real models (`evaluate`).
Source: the paper, Table 1 (roundings); docs/collectives.md for the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from echoreduce.collectives.catalogue import build
from echoreduce.collectives.counters import count_roundings
from echoreduce.collectives.interpreter import Requantize, execute
from echoreduce.config import QuantConfig
from echoreduce.errors import ShapeError
from echoreduce.quant.codec import dequantize, quantize
from echoreduce.quant.grid import fit, qparams_dtype

#: Compared by default; all keep their rounding pattern at one piece.
ALGORITHMS = ("ring", "binary_tree", "double_binary_tree", "halving_doubling", "pat", "two_shot", "one_shot")


@dataclass(frozen=True)
class TopologyError:
    """One measurement.

    Attributes:
        algorithm: name in the catalogue.
        world_size: ranks.
        roundings: most roundings on the way of a contribution.
        measured: norm of the error over the norm of the sum, worst rank.
        predicted: the noise law's value for it.
    """

    algorithm: str
    world_size: int
    roundings: int
    measured: float
    predicted: float


def requantizer(quant: QuantConfig) -> Requantize:
    """A wire that quantizes and dequantizes each chunk as the package's backends do (bf16 qparams for fp32 data).

    Raises:
        ShapeError: (when called) a chunk is not a whole number of groups.
    """
    qparams = qparams_dtype(quant, torch.float32)

    def requantize(values: NDArray) -> NDArray:
        if values.size % quant.group_size:
            raise ShapeError(f"a chunk of {values.size} values is not a multiple of the group size {quant.group_size}")
        groups = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(-1, quant.group_size)
        grid = fit(groups, quant, qparams)
        return dequantize(quantize(groups, grid, quant), grid).view(-1).numpy()

    return requantize


def measure_error(algorithm: str, contributions: NDArray, quant: QuantConfig) -> TopologyError:
    """Relative error of one all-reduce of the rows of `contributions`, every hop quantized.

    Args:
        algorithm: name in the catalogue.
        contributions: fp32, shape [world_size, numel], numel a multiple of group_size and of the program's chunks times it.
        quant: the quantizer.
    """
    world_size = contributions.shape[0]
    program = build(algorithm, world_size)
    wire = requantizer(quant)
    exact = contributions.astype(np.float64)
    total = exact.sum(axis=0)
    outputs = execute(program, contributions.astype(np.float32), wire)
    once = np.stack([wire(row) for row in contributions.astype(np.float32)])
    one_rounding = float(np.linalg.norm(once - exact) / np.linalg.norm(exact))
    counted = count_roundings(program)
    worst = max(float(np.linalg.norm(row - total)) for row in outputs) / float(np.linalg.norm(total))
    return TopologyError(algorithm, world_size, counted.most, worst, counted.relative_error(one_rounding))


def gaussian_errors(
    world_sizes: tuple[int, ...], quant: QuantConfig, numel: int = 1 << 14, seed: int = 0, algorithms: tuple[str, ...] = ALGORITHMS
) -> list[TopologyError]:
    """Errors for independent standard normal contributions; the size is rounded up so that every program's chunks are whole groups."""
    rows = []
    for world_size in world_sizes:
        generator = np.random.default_rng([seed, world_size])
        for algorithm in algorithms:
            unit = build(algorithm, world_size).chunks * quant.group_size
            size = -(-numel // unit) * unit
            rows.append(measure_error(algorithm, generator.standard_normal((world_size, size), dtype=np.float32), quant))
    return rows
