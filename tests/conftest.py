"""Shared fixtures: GPU skips with the count found, and one pool of gloo processes for all distributed tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ranks import RankPool

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None:
            needed = marker.args[0] if marker.args else 1
            if found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, found {found}"))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight gloo ranks that live as long as the test run; groups of the first P of them for P = 1 .. 8."""
    ranks = RankPool(8)
    yield ranks
    ranks.close()
