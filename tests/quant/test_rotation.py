"""The rotation is orthonormal, its own inverse, and spreads an outlier."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import hadamard as hadamard_matrix

from echoreduce.quant.rotation import hadamard


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_equals_the_matrix_and_is_its_own_inverse(size: int) -> None:
    x = torch.randn(3, 4, size)
    matrix = torch.tensor(hadamard_matrix(size), dtype=torch.float64) / size**0.5
    torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix, rtol=0, atol=2e-6)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=2e-6)


def test_spreads_an_outlier() -> None:
    x = torch.zeros(1, 128)
    x[0, 9] = 1000.0
    assert hadamard(x).abs().max() < 1000 / 128**0.5 * 1.001
