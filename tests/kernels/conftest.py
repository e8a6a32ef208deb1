"""Four interpreter ranks for all kernel tests; the experiments, which compile kernels too, are scripts beside each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from interpreted import InterpretedPool

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[InterpretedPool]:
    pool = InterpretedPool(4)
    yield pool
    pool.close()
