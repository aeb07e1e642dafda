"""The SQLite store, combined from the other modules of this package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from sqlite3 import Connection

from crow.store import Store
from crow.store.codec import from_json, to_json
from crow.store.owner import Owner, open_stores
from crow.store.sqlite.append import TurnMethods
from crow.store.sqlite.compression import CompressionMethods
from crow.store.sqlite.database import Database, snapshot, transaction
from crow.store.sqlite.file import JournalMode
from crow.store.sqlite.principals import PrincipalMethods
from crow.store.sqlite.search import SearchMethods, UsageMethods
from crow.store.sqlite.sessions import SessionMethods
from crow.store.sqlite.watch import WatchMethods
from crow.store.watching import Watcher


class SqliteStore(
    TurnMethods,
    SessionMethods,
    SearchMethods,
    UsageMethods,
    PrincipalMethods,
    WatchMethods,
    CompressionMethods,
    Store,
    Watcher,
):
    """A :class:`~crow.store.Store` in one file. Whoever opens it must close it."""

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        owner: str | None = None,
        journal_mode: JournalMode = "wal",
        busy_timeout_s: float = 10.0,
        compress_after_days: int | None = None,
    ) -> SqliteStore:
        """Open the database, or create it if there is none.

        `owner` is an :class:`~crow.store.owner.Owner` as text, by default one for this process. A write waits for other
        programs for at most `busy_timeout_s`. `tidy` compresses the blobs of entries that are older than
        `compress_after_days`.

        :raises ~crow.domain.errors.StoreUnavailable: the file cannot be created, opened or read, or is not a crow
            database.
        :raises ~crow.domain.errors.StoreTooNew: a newer crow wrote the file.
        """
        database = await Database.open(path, journal_mode=journal_mode, busy_timeout_s=busy_timeout_s)
        try:
            store = cls(database, owner or str(await database.call(Owner.current)))
        except BaseException:
            await database.close()
            raise
        store.compress_after_days = compress_after_days
        open_stores.add(store.owner)
        return store

    @classmethod
    async def open_to_read(cls, path: Path, *, busy_timeout_s: float = 10.0) -> SqliteStore:
        """Open an existing database of this version only for reading. Other processes may write to the database at the
        same time. Methods that write raise :class:`~crow.domain.errors.StoreUnavailable`.

        :raises ~crow.domain.errors.StoreUnavailable: there is no such file, it cannot be read, it is not a crow
            database, or an older crow wrote it.
        :raises ~crow.domain.errors.StoreTooNew: a newer crow wrote the file.
        """
        return cls(await Database.open_to_read(path, busy_timeout_s=busy_timeout_s), owner="")

    @property
    def warning(self) -> str:
        return self.database.warning

    @property
    def is_read_only(self) -> bool:
        """Whether the file was opened only for reading, or cannot be written now."""
        return self.database.is_read_only

    @property
    def notifies(self) -> bool:
        return False

    @snapshot()
    def learned(self, sql: Connection, base_url: str, model: str) -> Mapping[str, object]:
        return _facts(sql, base_url, model)

    @transaction()
    def learn(self, sql: Connection, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        sql.execute(
            "INSERT INTO endpoints (base_url, model, learned) VALUES (?, ?, ?)"
            " ON CONFLICT (base_url, model) DO UPDATE SET learned = excluded.learned",
            (base_url, model, to_json({**_facts(sql, base_url, model), **facts})),
        )

    async def tidy(self) -> None:
        await self.remove_deleted()
        await self.compress_old()
        await self.database.compact()

    def hurry(self) -> None:
        self.database.lock_timeout.end()

    async def close(self) -> None:
        try:
            await self.database.close()
        finally:
            open_stores.discard(self.owner)


def _facts(sql: Connection, base_url: str, model: str) -> Mapping[str, object]:
    query = "SELECT learned FROM endpoints WHERE base_url = ? AND model = ?"
    row = sql.execute(query, (base_url, model)).fetchone()
    facts: Mapping[str, object] = from_json(row[0], {}) if row else {}
    return facts
