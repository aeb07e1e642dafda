"""Settings shared by all tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Everything runs on asyncio: the protocol's SDK does."""
    return "asyncio"
