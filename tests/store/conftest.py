"""Fixtures that open stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeAlias

import pytest

from crow.store import Store
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.file import JournalMode
from crow.store.sqlite.store import SqliteStore
from tests.support.postgres import new_database


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


class PostgresStores:
    """Opens any number of stores on one PostgreSQL database; closes them at the end of the test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._opened: list[PostgresStore] = []

    async def open(self, *, busy_timeout_s: float = 10.0) -> PostgresStore:  # nobody waits for the whole database
        store = await PostgresStore.open(self.url)
        self._opened.append(store)
        return store

    async def close(self) -> None:
        for store in self._opened:
            await store.close()


AnyStores: TypeAlias = Stores | PostgresStores


@pytest.fixture(params=["wal", "delete", "postgres"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AnyStores]:
    """Stores on an SQLite database with each journal mode, and on a PostgreSQL database."""
    if request.param == "postgres":
        async with new_database() as url, AsyncExitStack() as opened:
            postgres = PostgresStores(url)
            opened.push_async_callback(postgres.close)
            yield postgres
    else:
        made = Stores(tmp_path / "crow.db", request.param)
        yield made
        await made.close()


@pytest.fixture
async def store(stores: AnyStores) -> Store:
    """One store."""
    return await stores.open()


@pytest.fixture
async def sqlite_store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """One store with default settings."""
    opened = await SqliteStore.open(tmp_path / "crow.db")
    yield opened
    await opened.close()
