"""The PostgreSQL store, combined from the other modules of this package."""

from __future__ import annotations

from collections.abc import Mapping

from crow.store import Store
from crow.store.codec import from_json, to_json
from crow.store.owner import Owner
from crow.store.postgres.append import TurnMethods
from crow.store.postgres.database import Database, Sql, snapshot, transaction
from crow.store.postgres.principals import PrincipalMethods
from crow.store.postgres.search import SearchMethods
from crow.store.postgres.sessions import SessionMethods
from crow.store.rows import plain
from crow.store.watching import Watcher


class PostgresStore(TurnMethods, SessionMethods, SearchMethods, PrincipalMethods, Store, Watcher):
    """A :class:`~crow.store.Store` in a PostgreSQL database. Whoever opens it must close it."""

    @classmethod
    async def open(cls, url: str, *, lock_url: str | None = None, to_read: bool = False) -> PostgresStore:
        """Connect to the database at `url`, and create or update crow's schema. If `url` is the URL of a pooler in
        transaction mode, `lock_url` must be the URL of the server itself. With `to_read`, the schema is not changed,
        and methods that write raise :class:`~crow.domain.errors.StoreUnavailable`.

        :raises ~crow.domain.errors.ArgumentError: a URL is not valid.
        :raises ~crow.domain.errors.StoreUnavailable: the server cannot be reached, or refuses the request.
        :raises ~crow.domain.errors.StoreTooNew: a newer crow migrated the database.
        """
        owner = Owner.current()
        # The function crow.is_alive computes the same number: the token as a signed number of 64 bits.
        lock = int.from_bytes(bytes.fromhex(owner.token), "big", signed=True)
        database = await Database.open(url, owner=str(owner), lock=lock, lock_url=lock_url, to_read=to_read)
        return cls(database, str(owner))

    @property
    def warning(self) -> str:
        return ""

    @property
    def is_read_only(self) -> bool:
        """Whether the database was opened only for reading."""
        return self.database.is_read_only

    @property
    def notifies(self) -> bool:
        return True

    @snapshot
    async def learned(self, sql: Sql, base_url: str, model: str) -> Mapping[str, object]:
        query = "SELECT learned FROM crow.endpoints WHERE base_url = $1 AND model = $2"
        facts: Mapping[str, object] = from_json(await sql.fetchval(query, plain(base_url), plain(model)) or "{}", {})
        return facts

    @transaction
    async def learn(self, sql: Sql, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        key = plain(base_url), plain(model)
        await sql.execute("INSERT INTO crow.endpoints VALUES ($1, $2) ON CONFLICT DO NOTHING", *key)
        query = "SELECT learned FROM crow.endpoints WHERE base_url = $1 AND model = $2 FOR UPDATE"
        known = from_json(await sql.fetchval(query, *key), {})
        query = "UPDATE crow.endpoints SET learned = $3 WHERE base_url = $1 AND model = $2"
        await sql.execute(query, *key, to_json({**known, **facts}))

    def hurry(self) -> None:
        self.database.hurry()

    async def close(self) -> None:
        await self.database.close()
