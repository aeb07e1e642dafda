"""Many clients of one `crow serve`: CLIENTS (10000) connected, as many that never finish a request, and what it costs.

`make soak-connections` runs it. It fails if a prompt or a health check is not answered meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from crow.serve.server import raise_file_limit
from tests.support.server import ServerProcess, WebSocketClient, server_environment

AT_ONCE = 50
MAX_PROMPT_S = 30.0


async def main(count: int) -> None:
    """Prints what each step took."""
    raise_file_limit()
    with tempfile.TemporaryDirectory() as directory:
        home, place = prepare(Path(directory), count)
        fresh = [sys.executable, "-m", "crow"]
        env = server_environment(home, CROW_SANDBOX="off", PYTHONPATH=os.fspath(Path(__file__).parents[2]))
        async with ServerProcess(env=env, cwd=place, argv=fresh) as server, server.client() as worker:
            await worker.initialize()
            session = await worker.new_session(place)
            await report("1 client", server, worker, session)
            clients = [server.client(ping_interval=None) for _ in range(count)]
            await in_batches(connected, clients)
            await report(f"{count} clients", server, worker, session)
            for client in clients:
                client.break_off()
            while (await server.metrics())["crow_connections"] > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await report("after they broke off", server, worker, session)
            writers: list[asyncio.StreamWriter] = []

            async def begin(_number: int) -> None:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(b"GET /acp HTTP/1.1\r\n")
                writers.append(writer)

            await in_batches(begin, list(range(count)))
            await report(f"{count} unfinished requests", server, worker, session)
            for writer in writers:
                writer.transport.abort()


def prepare(directory: Path, count: int) -> tuple[Path, Path]:
    """Makes a CROW_HOME for a server with room for all clients, and a workspace."""
    home, place = directory / "home", directory / "work"
    home.mkdir()
    place.mkdir()
    (home / "config.toml").write_text(f"[serve]\nmax_connections = {count + 100}\n")
    return home, place


async def connected(client: WebSocketClient) -> None:
    """Connects and initializes a client."""
    client.checks_schema = False
    await client.__aenter__()
    await client.initialize()


async def in_batches(act: Callable[..., Awaitable[None]], items: list[WebSocketClient] | list[int]) -> None:
    """Calls `act` for all items, some at once, and prints how long it took."""
    started = time.monotonic()
    for at in range(0, len(items), AT_ONCE):
        await asyncio.gather(*map(act, items[at : at + AT_ONCE]))
    seconds = time.monotonic() - started
    print(f"  {len(items)} in {seconds:.1f} s, {1000 * seconds / len(items):.2f} ms each")


async def report(name: str, server: ServerProcess, worker: WebSocketClient, session: str) -> None:
    """Prints memory and latencies; fails if the server does not serve its working client."""
    started = time.monotonic()
    assert (await server.get("/healthz")).status_code == 200
    health_ms = 1000 * (time.monotonic() - started)
    started = time.monotonic()
    assert await worker.prompt(session, "say hello") == {"stopReason": "end_turn"}
    prompt_s = time.monotonic() - started
    assert prompt_s < MAX_PROMPT_S
    found = await server.metrics()
    memory = found["process_resident_memory_bytes"] / 1024 / 1024
    files, cpu_s = found["process_open_fds"], found["process_cpu_seconds_total"]
    costs = f"{memory:.0f} MiB, {files:.0f} descriptors, {cpu_s:.1f} s CPU"
    print(f"{name}: {costs}, health check {health_ms:.0f} ms, prompt {1000 * prompt_s:.0f} ms")


if __name__ == "__main__":
    asyncio.run(main(int(os.environ.get("CLIENTS", "10000"))))
