"""The PostgreSQL schema, as SQL files. Each file migrates the database by one version."""

from __future__ import annotations

from pathlib import Path

import asyncpg

from crow.domain.errors import StoreTooNew, StoreUnavailable

_FILES = (
    "0001_initial.sql",
    "0002_principals.sql",
    "0003_views.sql",
    "0004_nodes.sql",
    "0005_prompts.sql",
    "0006_views.sql",
)
"""File number n migrates from version n - 1 to n. A file that was released never changes."""

VERSION = len(_FILES)

_LOCK = int.from_bytes(b"crow", "big")
"""The number of the advisory lock that a migration holds."""


async def migrate(connection: asyncpg.Connection, name: str) -> None:
    """Migrate the schema `crow` to the version `VERSION`. If several stores do this at the same time, one of them runs
    the SQL files and the others wait.

    `name` is the name of the database in error messages. If the schema already has this version, the database user does
    not need the right to change the schema.

    :raises StoreTooNew: a newer crow migrated the database.
    """
    if await _version(connection, name) == VERSION:
        return
    async with connection.transaction():
        await connection.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        await connection.execute("CREATE SCHEMA IF NOT EXISTS crow")
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS crow.migrations (version int PRIMARY KEY, file text NOT NULL)"
        )
        for version in range(await _version(connection, name) + 1, VERSION + 1):
            file = _FILES[version - 1]
            await connection.execute((Path(__file__).parent / file).read_text(encoding="utf-8"))
            await connection.execute("INSERT INTO crow.migrations VALUES ($1, $2)", version, file)


async def check_readable(connection: asyncpg.Connection, name: str) -> None:
    """Check that the schema `crow` has the version `VERSION`.

    :raises StoreUnavailable: the database has no schema of crow, or the schema of an older crow.
    :raises StoreTooNew: a newer crow migrated the database.
    """
    version = await _version(connection, name)
    if version < VERSION:
        has = f"version {version} of crow's schema, and this crow needs version {VERSION}" if version else "no sessions"
        raise StoreUnavailable(f"{name} has {has}. Start crow with this database to set it up.")


async def _version(connection: asyncpg.Connection, name: str) -> int:
    if await connection.fetchval("SELECT to_regclass('crow.migrations')") is None:
        return 0
    version = int(await connection.fetchval("SELECT coalesce(max(version), 0) FROM crow.migrations"))
    if version > VERSION:
        raise StoreTooNew(
            f"{name} has version {version} of crow's schema; this crow knows versions up to {VERSION}. Update crow."
        )
    return version
