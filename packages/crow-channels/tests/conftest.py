"""The fixtures: a crow that a whole module shares, and a Discord for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from crow_channels import delivery, discord_chat, link
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


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon. A real chat is given more time."""
    for module in (delivery, discord_chat, link):
        monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.02)
        monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.1)


@pytest.fixture
async def discord() -> AsyncIterator[FakeDiscord]:
    async with FakeDiscord() as fake:
        yield fake
