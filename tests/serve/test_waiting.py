"""A server whose database cannot be reached when it starts."""

from __future__ import annotations

import asyncio
import signal
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from websockets.exceptions import InvalidStatus

from tests.support.postgres import OwnServer
from tests.support.server import ServerProcess, server_environment

pytestmark = pytest.mark.anyio

WAITS = "The server waits for its database"


@asynccontextmanager
async def starting(directory: Path, url: str) -> AsyncIterator[ServerProcess]:
    """A server that has begun to wait for its database."""
    server = ServerProcess(
        env=server_environment(directory / "home", CROW_DATABASE_URL=url, CROW_SANDBOX="off"), cwd=directory
    )
    server.is_started = False
    async with server:
        line = await server.wait_for_log("The server listens and is not ready")
        server.address = str(line["address"])
        yield server


@pytest.mark.long
async def test_a_server_waits_for_its_database_and_then_serves(tmp_path: Path) -> None:
    async with OwnServer.open() as database:
        await database.stop("fast")
        async with starting(tmp_path, database.url) as server:
            first = await server.wait_for_log(WAITS, seconds=0.5)
            await server.wait_for_log(WAITS, seconds=1.0)
            assert "PostgreSQL database" in first["problem"]
            assert (await server.get("/healthz")).status_code == 200
            assert (await server.get("/readyz")).json()["problem"] == "the database cannot be reached; see the log"
            with pytest.raises(InvalidStatus) as refused:
                async with server.client():
                    pass
            assert (refused.value.response.status_code, refused.value.response.headers["Retry-After"]) == (503, "5")
            await database.start()
            address = (await server.wait_for_log("The server listens"))["address"]
            assert address == server.address
            assert (await server.get("/readyz")).status_code == 200
            async with server.client() as client:
                await client.initialize()
                assert (await client.request("session/list", {}))["sessions"] == []


async def test_a_signal_ends_a_server_that_waits(tmp_path: Path) -> None:
    async with starting(tmp_path, "postgresql://crow@127.0.0.1:1/crow") as server:
        await server.wait_for_log(WAITS)
        server.send_signal(signal.SIGTERM)
        assert await server.wait() == 0


@asynccontextmanager
async def refusing(code: str, words: str) -> AsyncIterator[str]:
    """The URL of a PostgreSQL server that refuses every connection with this error."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (size,) = struct.unpack("!I", await reader.readexactly(4))
                (version,) = struct.unpack("!I", (await reader.readexactly(size - 4))[:4])
                if version >> 16 == 3:
                    break
                writer.write(b"N")  # no TLS
            fields = b"".join(
                key + value.encode() + b"\0" for key, value in ((b"S", "FATAL"), (b"C", code), (b"M", words))
            )
            writer.write(b"E" + struct.pack("!I", len(fields) + 5) + fields + b"\0")
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield f"postgresql://crow:secret@127.0.0.1:{port}/nest"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("28P01", 'password authentication failed for user "crow"'),
        ("28000", 'no pg_hba.conf entry for host "127.0.0.1"'),
        ("3D000", 'database "nest" does not exist'),
        ("42501", "permission denied for database nest"),
    ],
)
async def test_what_waiting_does_not_mend_is_said_at_once(tmp_path: Path, code: str, words: str) -> None:
    async with refusing(code, words) as url:
        server = ServerProcess(env=server_environment(tmp_path, CROW_DATABASE_URL=url), cwd=tmp_path)
        server.is_started = server.is_checked = False
        async with server:
            with anyio.fail_after(60):
                assert await server.wait() == 1
        (line,) = [str(line["message"]) for line in server.logged if words in str(line["message"])]
        assert "PostgreSQL database nest on 127.0.0.1" in line
        assert "secret" not in line
        assert not any(each["message"] == WAITS for each in server.logged)


@pytest.mark.parametrize("code", ["57P03", "53300", "08006"])
async def test_a_database_that_is_starting_or_full_is_waited_for(tmp_path: Path, code: str) -> None:
    async with refusing(code, "not now") as url, starting(tmp_path, url) as server:
        assert "not now" in (await server.wait_for_log(WAITS))["problem"]
