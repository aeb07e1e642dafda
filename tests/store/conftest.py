"""Fixtures that open stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from crow.store import Store
from crow.store.sqlite.database import JournalMode
from crow.store.sqlite.store import SqliteStore


class Stores:
    """Opens any number of stores on one database; closes them at the end of the test."""

    def __init__(self, path: Path, journal_mode: JournalMode) -> None:
        self.path = path
        self._journal_mode = journal_mode
        self._opened: list[SqliteStore] = []

    async def open(self, *, busy_timeout_s: float = 10.0) -> SqliteStore:
        store = await SqliteStore.open(self.path, journal_mode=self._journal_mode, busy_timeout_s=busy_timeout_s)
        self._opened.append(store)
        return store

    async def close(self) -> None:
        for store in self._opened:
            await store.close()


@pytest.fixture(params=["wal", "delete"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    """Stores on a database with each journal mode."""
    made = Stores(tmp_path / "crow.db", request.param)
    yield made
    await made.close()


@pytest.fixture
async def store(stores: Stores) -> Store:
    """One store."""
    return await stores.open()


@pytest.fixture
async def sqlite_store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """One store with default settings."""
    opened = await SqliteStore.open(tmp_path / "crow.db")
    yield opened
    await opened.close()
