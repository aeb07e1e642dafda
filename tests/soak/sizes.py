"""Measures what open sessions cost a server, and steps a database: `python -m tests.soak.sizes [SESSIONS] [STEPS]`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import asyncpg

from benchmarks.postgres import begin, step
from crow.store.postgres.store import PostgresStore
from tests.support.postgres import new_database
from tests.support.server import ServerProcess, server_environment

IDLE_S = 30.0
TABLES = ("entries", "texts", "sessions", "blobs")


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_sessions(count: int) -> None:
    """Open sessions on one server, one prompt in each, and look at the server while it is idle."""
    with tempfile.TemporaryDirectory() as directory:
        async with new_database() as url:
            env = server_environment(Path(directory), CROW_SANDBOX="off", CROW_DATABASE_URL=url)
            async with ServerProcess(env=env, cwd=Path(directory)) as server, server.client() as client:
                client.follows_order = client.checks_schema = False
                await client.initialize()
                await client.prompt(await client.new_session(Path(directory)), "say hello")
                before = (await server.metrics())["process_resident_memory_bytes"]
                for _ in range(count):
                    await client.prompt(await client.new_session(Path(directory)), "say hello")
                    client.log.clear()
                await asyncio.sleep(5)  # memory is returned some seconds after the last turn
                after = (await server.metrics())["process_resident_memory_bytes"]
                admin = await asyncpg.connect(url)
                query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                connections = await admin.fetchval(query + " AND pid <> pg_backend_pid()")
                await admin.close()
                since, used = time.monotonic(), cpu_s(server.pid)
                await asyncio.sleep(IDLE_S)
                share = (cpu_s(server.pid) - used) / (time.monotonic() - since)
    print(f"{count:,} open sessions: {before / 2**20:.0f} -> {after / 2**20:.0f} MiB, {connections} connections")
    print(f"idle for {IDLE_S:.0f} s with one client on all of them: {share * 100:.1f} % of a core")


async def measure_steps(count: int) -> None:
    """Store steps, each an answer with a call, its start and its result, and look at the tables."""
    async with new_database() as url:
        store = await PostgresStore.open(url)
        sizes = " + ".join(f"pg_total_relation_size('crow.{table}')" for table in TABLES)
        admin = await asyncpg.connect(url)
        before = await admin.fetchval(f"SELECT {sizes}")
        user = leaf = await begin(store, "s")
        for _ in range(count):
            leaf = (await store.append("s", leaf=leaf, turn=1, entries=step(user)))[-1].id
        rows = await admin.fetchval("SELECT count(*) FROM crow.entries")
        after = await admin.fetchval(f"SELECT {sizes}")
        await admin.close()
        await store.close()
    print(f"{count:,} steps: {rows:,} entries, {(after - before) / 2**20:.2f} MiB with their indexes")


if __name__ == "__main__":
    sessions, steps = [int(argument) for argument in sys.argv[1:3]] or (1000, 1000)
    asyncio.run(measure_steps(steps))
    asyncio.run(measure_sessions(sessions))
