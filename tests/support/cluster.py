"""Several `crow serve` on one PostgreSQL server, and a record of who wrote what.

As a program, this module is `crow` with a shorter lease and with a clock that the test can set: `python -m
tests.support.cluster CLOCK LEASE_S serve ...`.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import asyncpg

from crow.store.postgres.store import PostgresStore
from tests.support.postgres import OwnServer, Wire
from tests.support.server import ServerProcess, server_environment

PRODUCT_LEASE_S = 20.0
"""The lease of the product; see crow.is_alive in the schema."""

LOST = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

_AUDIT = """
CREATE SCHEMA audit;

-- Each claim or repair of a turn: the node that raised the epoch, and whether it took a running turn from another one.
CREATE TABLE audit.epochs (
    session text, epoch bigint, turn bigint, state text, was_running boolean, was_turn bigint, node text, tx text,
    at_s float8
);
CREATE FUNCTION audit.epoch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit.epochs VALUES (
        NEW.id, NEW.epoch, NEW.turn, NEW.state, OLD.state = 'running', OLD.turn, current_setting('application_name'),
        pg_current_xact_id()::text, extract(epoch FROM clock_timestamp())
    );
    RETURN NULL;
END $$;
CREATE TRIGGER audit AFTER UPDATE ON crow.sessions
    FOR EACH ROW WHEN (NEW.epoch <> OLD.epoch) EXECUTE FUNCTION audit.epoch();

-- Each stored entry and each piece of a draft: the node that wrote it, and what the session's row said at that moment.
CREATE TABLE audit.writes (
    session text, entry bigint, kind text, turn bigint, node text, tx text, epoch bigint, state text
);
CREATE FUNCTION audit.write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit.writes SELECT
        NEW.session, CASE TG_TABLE_NAME WHEN 'entries' THEN (to_json(NEW) ->> 'id')::bigint END,
        CASE TG_TABLE_NAME WHEN 'entries' THEN to_json(NEW) ->> 'kind' ELSE 'draft' END,
        NEW.turn, current_setting('application_name'), pg_current_xact_id()::text, s.epoch, s.state
    FROM crow.sessions s WHERE s.id = NEW.session;
    RETURN NULL;
END $$;
CREATE TRIGGER audit AFTER INSERT ON crow.entries FOR EACH ROW EXECUTE FUNCTION audit.write();
CREATE TRIGGER audit AFTER INSERT ON crow.drafts FOR EACH ROW EXECUTE FUNCTION audit.write();
"""


class Node:
    """A `crow serve` that can be killed, stopped and started again. Its clients and its database are behind wires.

    `name` with a number is the name of one process of the node, as the database knows it.
    """

    def __init__(self, name: str, folder: Path, database: Wire, front: Wire, lease_s: float) -> None:
        self.name = name
        self.database = database
        self.front = front
        self.process_name = ""
        self.logs: dict[str, list[dict[str, Any]]] = {}
        """The log of each process."""
        self.troubles: set[str] = set()
        """What is the matter with the node now."""
        self._folder = folder
        self._lease_s = lease_s
        self._server: ServerProcess | None = None
        self._starts = 0
        self._home = folder / name
        self._home.mkdir()
        (self._home / "config.toml").write_text('[permissions]\nallow = ["shell"]\n')
        clock = self._home / "clock"
        clock.write_bytes(bytes(8))
        with clock.open("r+b") as file:
            self._clock = mmap.mmap(file.fileno(), 8)

    @property
    def url(self) -> str:
        """The address for clients, which survives restarts."""
        return f"ws://127.0.0.1:{self.front.port}/acp"

    @property
    def is_healthy(self) -> bool:
        """Whether a load balancer would choose this node."""
        return not self.troubles

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._server is not None
        return self._server.pid

    def set_clock(self, hours: float) -> None:
        """Set the wall clock of the node this many hours ahead."""
        struct.pack_into("d", self._clock, 0, hours * 3600)

    async def start(self, model_url: str) -> None:
        """Start a process, or several until one finds the database."""
        while True:
            self._starts += 1
            self.process_name = f"{self.name}.{self._starts}"
            env = server_environment(
                self._home,
                CROW_SANDBOX="off",
                CROW_MODEL="fake-model",
                OPENAI_BASE_URL=model_url,
                CROW_DATABASE_URL=f"{self.database.url}&application_name={self.process_name}",
            )
            server = ServerProcess(
                env=env,
                cwd=self._folder,
                program="tests.support.cluster",
                before=(str(self._home / "clock"), str(self._lease_s)),
            )
            server.is_checked = False
            self.logs[self.process_name] = server.logged
            try:
                await server.__aenter__()
            except BaseException as error:
                if hasattr(server, "process"):
                    server.process.kill()
                    await server.__aexit__(type(error), error, None)
                if not isinstance(error, AssertionError):
                    raise
                await asyncio.sleep(0.1)
            else:
                self._server = server
                self.front.lead_to(f"tcp://127.0.0.1:{server.port}")
                return

    async def end(self, number: int = signal.SIGKILL) -> None:
        """End the process with a signal."""
        server, self._server = self._server, None
        if server is not None:
            server.send_signal(number)
            await server.__aexit__(None, None, None)

    def stop(self) -> None:
        """Freeze the process."""
        if self._server is not None:
            self._server.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kill the process; `end` waits for its end."""
        if self._server is not None:
            self._server.send_signal(signal.SIGKILL)

    def wake(self) -> None:
        """Let the frozen process go on."""
        if self._server is not None:
            self._server.send_signal(signal.SIGCONT)

    def heal(self) -> None:
        """Repair the wires."""
        for wire in (self.database, self.front):
            wire.refuses, wire.delay_s = False, 0.0
            wire.release()


class Probe:
    """Asks the database whether a process is alive."""

    def __init__(self, connection: Any, owner: str) -> None:
        self._connection, self._owner = connection, owner

    async def until_dead(self, limit_s: float) -> float | None:
        """Wait until other processes may take the turns of this one. Returns the seconds since the call; None if it
        takes longer, or if the database cannot be asked."""
        began = time.monotonic()
        try:
            while await self._connection.fetchval("SELECT crow.is_alive($1)", self._owner):
                if time.monotonic() - began > limit_s:
                    return None
                await asyncio.sleep(0.01)
        except LOST:
            return None
        finally:
            self._connection.terminate()
        return time.monotonic() - began


class Cluster:
    """Nodes on a database of their own. Use `open`."""

    def __init__(self, server: OwnServer, url: str, nodes: Sequence[Node], model_url: str, lease_s: float) -> None:
        self.server = server
        self.url = url
        self.nodes = nodes
        self.model_url = model_url
        self.lease_s = lease_s

    @classmethod
    @asynccontextmanager
    async def open(
        cls, server: OwnServer, folder: Path, model_url: str, *, nodes: int = 3, lease_s: float = 3.0
    ) -> AsyncIterator[Self]:
        """Started nodes on an empty database. At the end, they are killed."""
        name = f"cluster_{random.randbytes(6).hex()}"
        admin = await asyncpg.connect(server.url)
        await admin.execute(f"CREATE DATABASE {name}")
        await admin.close()
        url = server.url.replace("/postgres?", f"/{name}?")
        assert url != server.url
        await (await PostgresStore.open(url)).close()
        await _prepare(url, lease_s)
        wires = [(Wire.open(url), Wire.open(url)) for _ in range(nodes)]
        made: list[Node] = []
        async with _all_open(wires) as pairs:
            for number, (database, front) in enumerate(pairs, start=1):
                made.append(Node(f"n{number}", folder, database, front, lease_s))
            try:
                await asyncio.gather(*(node.start(model_url) for node in made))
                yield cls(server, url, made, model_url, lease_s)
            finally:
                await asyncio.gather(*(node.end() for node in made))

    async def read(self, statement: str, *arguments: object) -> list[Any]:
        """The rows of a query, past all wires."""
        connection = await asyncpg.connect(self.url, timeout=120, server_settings={"application_name": "test"})
        try:
            return list(await connection.fetch(statement, *arguments))
        finally:
            await connection.close()

    async def probe(self, node: Node) -> Probe | None:
        """A probe of the present process of a node; None if the database cannot be asked."""
        owner = "SELECT owner FROM crow.owners WHERE owner::json ->> 'pid' = $1 ORDER BY signed_ms DESC LIMIT 1"
        try:
            connection = await asyncpg.connect(self.url, timeout=120, server_settings={"application_name": "test"})
        except LOST:
            return None
        try:
            found = await connection.fetchval(owner, str(node.pid))
        except LOST:
            found = None
        if found is None:
            connection.terminate()
            return None
        return Probe(connection, found)

    def heal(self) -> None:
        """Repair all wires."""
        for node in self.nodes:
            node.heal()


@asynccontextmanager
async def _all_open(wires: Sequence[tuple[Any, Any]]) -> AsyncIterator[list[tuple[Wire, Wire]]]:
    if not wires:
        yield []
        return
    async with wires[0][0] as database, wires[0][1] as front, _all_open(wires[1:]) as others:
        yield [(database, front), *others]


async def _prepare(url: str, lease_s: float) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_AUDIT)
        function = await connection.fetchval("SELECT pg_get_functiondef('crow.is_alive'::regproc)")
        product, shorter = f"< {PRODUCT_LEASE_S * 1000:.0f}", f"< {lease_s * 1000:.0f}"
        assert product in function
        await connection.execute(function.replace(product, shorter))
    finally:
        await connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """A running turn that one process took from another."""

    session: str
    dead: str
    by: str
    at_s: float


async def takeovers(cluster: Cluster) -> list[Takeover]:
    """The turns that were taken over, oldest first."""
    holders: dict[str, str] = {}
    found = []
    for row in await cluster.read("SELECT * FROM audit.epochs ORDER BY session, epoch"):
        if row["was_running"]:
            found.append(
                Takeover(session=row["session"], dead=holders[row["session"]], by=row["node"], at_s=row["at_s"])
            )
        holders[row["session"]] = row["node"]
    return sorted(found, key=lambda each: each.at_s)


async def log_of(cluster: Cluster, session: str) -> list[str]:
    """The stored entries of a session, each with the node that wrote it, and the claims of the session."""
    found = await cluster.read(
        """SELECT extract(epoch FROM now()) now, w.node, w.epoch, e.*
        FROM crow.entries e LEFT JOIN audit.writes w ON w.entry = e.id WHERE e.session = $1 ORDER BY e.id""",
        session,
    )
    claims = await cluster.read("SELECT * FROM audit.epochs WHERE session = $1 ORDER BY epoch", session)
    return [str(dict(row))[:700] for row in (*found, *claims)]


async def fenced_writes(cluster: Cluster) -> list[str]:
    """The writes that a process made without holding the session's turn; there must be none.

    A process may write in the transaction in which it raises the epoch, and as long as nobody raised it again. Between
    two turns, any process may add what belongs to no turn.
    """
    epochs = await cluster.read("SELECT session, epoch, turn, state, node, tx FROM audit.epochs")
    claims = {(row["session"], row["tx"]) for row in epochs}
    holders = {(row["session"], row["epoch"]): row for row in epochs}
    wrong = []
    for row in await cluster.read("SELECT * FROM audit.writes"):
        if (row["session"], row["tx"]) in claims:
            continue
        holder = holders.get((row["session"], row["epoch"]))
        is_held = (
            row["state"] == "running"
            and holder is not None
            and (holder["node"], holder["turn"], holder["state"]) == (row["node"], row["turn"], "running")
        )
        is_between = row["state"] == "idle" and row["kind"] in ("note", "request", "remark")
        if not (is_held or is_between):
            wrong.append(f"{dict(row)}, held by {dict(holder) if holder else None}")
    return wrong


async def broken_chains(cluster: Cluster) -> list[str]:
    """Entries of sessions that are not on the one path that ends at the session's leaf; there must be none."""
    rows = await cluster.read(
        "WITH RECURSIVE path AS ("
        " SELECT s.id AS session, e.id, e.parent FROM crow.sessions s JOIN crow.entries e ON e.id = s.leaf"
        " UNION ALL SELECT p.session, e.id, e.parent FROM path p JOIN crow.entries e ON e.id = p.parent)"
        " SELECT e.session, e.id, e.parent, e.turn, e.kind FROM crow.entries e"
        " WHERE NOT EXISTS (SELECT 1 FROM path WHERE path.session = e.session AND path.id = e.id) ORDER BY e.id"
    )
    return [f"not on the path: {dict(row)}" for row in rows]


def main(arguments: list[str]) -> int:
    """Run `crow` with the arguments after the first two."""
    clock, lease_s, *rest = arguments
    _use_clock(Path(clock))
    _shorten_times(float(lease_s) / PRODUCT_LEASE_S)
    from crow.cli import main as run

    return run(rest)


def _use_clock(path: Path) -> None:
    with path.open("rb") as file:
        ahead = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    now, now_ns = time.time, time.time_ns

    def seconds() -> float:
        return float(struct.unpack_from("d", ahead)[0])

    time.time = lambda: now() + seconds()
    time.time_ns = lambda: now_ns() + int(seconds() * 1e9)


def _shorten_times(factor: float) -> None:
    """Shorten what depends on the lease, in proportion."""
    from crow.store.postgres import database, presence

    presence.SIGN_S *= factor
    presence._ANSWER_TIMEOUT_S *= factor
    presence.CONNECT_TIMEOUT_S *= factor
    database.CONNECT_TIMEOUT_S *= factor  # type: ignore[attr-defined]
    database._STATEMENT_TIMEOUT_S *= factor
    database._IDLE_TIMEOUT_S *= factor


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
