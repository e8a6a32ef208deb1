"""Four interpreter ranks for all kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interpreted import InterpretedPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[InterpretedPool]:
    pool = InterpretedPool(4)
    yield pool
    pool.close()
