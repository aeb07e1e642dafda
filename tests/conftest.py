"""Settings shared by all tests."""

from __future__ import annotations

import pytest
from anyio import pytest_plugin

# In the process only tasks may use anyio, not the callbacks of timers. The plugin would let them pass for tasks.
setattr(pytest_plugin, "set_current_async_library", lambda _: None)  # noqa: B010  not a public name


@pytest.fixture
def anyio_backend() -> str:
    """Everything runs on asyncio: the protocol's SDK does."""
    return "asyncio"
