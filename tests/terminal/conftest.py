"""A shell with its own home, workspace and endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_endpoint import FakeEndpoint
from tests.support.terminal import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with FakeEndpoint.in_thread() as endpoint:
        yield Shell(tmp_path, endpoint)
