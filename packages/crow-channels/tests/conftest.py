"""The fixtures: a crow that a whole module shares, and a Discord for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.crow import Crow, serving
from tests.fake_discord import FakeDiscord


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def crow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crow]:
    """A server that nobody kills. Each test has sessions of its own, because its chat has a name of its own."""
    with serving(tmp_path_factory.mktemp("crow")) as server:
        yield server


@pytest.fixture
async def discord() -> AsyncIterator[FakeDiscord]:
    async with FakeDiscord() as fake:
        yield fake
