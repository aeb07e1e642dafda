"""Kills a process at a given SQL statement, then checks the database.

`killed` starts a process that imports everything once, then forks. Each child runs one scene on a database, counts
the statements that SQLite starts on any connection, and sends itself SIGKILL at the n-th. It reports stored entries
through a pipe at once. Another child then checks the database. The forking process opens no database and has no
threads; it prints a report as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import traceback
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import asyncpg

import crow.store.sqlite.compression
import crow.store.transfer
from crow.domain.conversation import Projection, for_model
from crow.domain.entries import Checkpoint, File, Mask, NewEntry, Restore, Started, TurnEnd
from crow.domain.errors import NoSuchSession
from crow.domain.events import EntryStored, Event
from crow.domain.messages import Usage, UserMessage
from crow.domain.rendering import parts_text
from crow.llm import ModelInfo, Request
from crow.store import SessionChanges, Store
from crow.store.admin import ImportDefaults
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.repair import damaged_entries
from crow.store.sqlite.store import SqliteStore
from tests.agent.harness import NoteTaker, Tool, opened, text
from tests.store.scenes import add, begin, compress_all, converse, new_session, result, said
from tests.support import fork_server
from tests.support.compaction import AnsweringModel
from tests.support.paths import problems
from tests.support.postgres import server_url
from tests.support.scripted_model import Say, ScriptedModel, call

__all__ = ["Report", "killed"]

Tell = Callable[[list[int]], None]
Place: TypeAlias = "Path | str"
"""A SQLite file, or the URL of a PostgreSQL database."""

Scene = Callable[[Any, Tell], Coroutine[None, None, None]]

HALVES = (
    "SELECT * FROM blob_refs WHERE entry NOT IN (SELECT id FROM entries) OR blob NOT IN (SELECT hash FROM blobs)",
    "SELECT hash FROM blobs WHERE hash NOT IN (SELECT blob FROM blob_refs)",
    "SELECT blob FROM compressed_bodies WHERE blob NOT IN (SELECT hash FROM blobs)",
    (
        "SELECT id FROM entries JOIN blobs ON hash = body_blob"
        " WHERE length(data) < size AND hash NOT IN (SELECT blob FROM compressed_bodies)"
    ),
    "SELECT id FROM entries WHERE body_blob IS NOT NULL AND body_blob NOT IN (SELECT hash FROM blobs)",
    "SELECT id FROM entries WHERE parent IS NOT NULL AND parent NOT IN (SELECT id FROM entries)",
    (
        "SELECT id FROM sessions s WHERE deleted_ms IS NULL"
        " AND entries <> (SELECT total(session = s.id AND conversation = s.conversation) FROM entries)"
    ),
    "SELECT id FROM searchable WHERE text <> '' AND id NOT IN (SELECT id FROM entries_fts_docsize)",
    "SELECT id FROM entries_fts_docsize WHERE id NOT IN (SELECT id FROM searchable)",
    "SELECT seq FROM drafts",
    "SELECT id FROM sessions WHERE deleted_ms IS NOT NULL",
    "SELECT id FROM conversations WHERE id NOT IN (SELECT conversation FROM sessions)",
    "SELECT hash FROM imports WHERE conversation NOT IN (SELECT conversation FROM sessions)",
    # a prompt whose move out of the inbox was stored only in part would be on the path twice
    "SELECT content FROM messages WHERE content LIKE 'do it %' GROUP BY content HAVING count(*) > 1",
)
"""Each query finds traces of a partly stored transaction and must return no rows."""

POSTGRES_HALVES = (
    "SELECT 1 FROM crow.blob_refs r WHERE NOT EXISTS (SELECT 1 FROM crow.entries e WHERE e.id = r.entry)",
    "SELECT 1 FROM crow.blob_refs r WHERE NOT EXISTS (SELECT 1 FROM crow.blobs b WHERE b.hash = r.blob)",
    "SELECT 1 FROM crow.blobs b WHERE NOT EXISTS (SELECT 1 FROM crow.blob_refs r WHERE r.blob = b.hash)",
    "SELECT 1 FROM crow.blobs WHERE hash <> encode(sha256(data), 'hex') OR size <> length(data)",
    (
        "SELECT 1 FROM crow.entries WHERE body_blob IS NOT NULL"
        " AND body_blob NOT IN (SELECT blob FROM crow.blob_refs WHERE entry = id)"
    ),
    "SELECT 1 FROM crow.entries WHERE parent IS NOT NULL AND parent NOT IN (SELECT id FROM crow.entries)",
    "SELECT 1 FROM crow.sessions WHERE leaf IS NOT NULL AND leaf NOT IN (SELECT id FROM crow.entries)",
    (
        "SELECT 1 FROM crow.sessions s WHERE deleted_ms IS NULL AND entries <> (SELECT count(*) FROM crow.entries e"
        " WHERE e.session = s.id AND e.conversation = s.conversation)"
    ),
    "SELECT 1 FROM crow.texts WHERE entry NOT IN (SELECT id FROM crow.entries)",
    "SELECT 1 FROM crow.drafts",
    "SELECT 1 FROM crow.sessions WHERE deleted_ms IS NOT NULL",
    "SELECT 1 FROM crow.conversations WHERE id NOT IN (SELECT conversation FROM crow.sessions)",
    # a prompt whose move out of the inbox was stored only in part would be on the path twice
    "SELECT 1 FROM crow.entries WHERE kind = 'user' AND body LIKE '%do it %' GROUP BY body HAVING count(*) > 1",
)
"""The same for PostgreSQL."""

GUEST_ENTRIES = 7
"""The number of entries in each session that `intake` imports."""

FRESH_AFTER = 25
"""How many kills one database is used for."""


@dataclass
class Report:
    """`kills` counts by scene; `failures` are the tracebacks of failed checks."""

    kills: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def killed(
    directory: Path,
    *,
    create: int = 0,
    log: int = 0,
    turn: int = 0,
    intake: int = 0,
    compaction: int = 0,
    compression: int = 0,
    postgres_create: int = 0,
    postgres_log: int = 0,
) -> Report:
    """Run scenes on databases below `directory`, and on the PostgreSQL server that tests use. Each number is a step: 1
    kills the scene at every statement, 2 at every second one, 0 leaves it out. On PostgreSQL there are two kills for
    each message to the server: before it is sent, and after."""
    steps = (create, log, turn, intake, compaction, compression, postgres_create, postgres_log)
    code = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
    command = [*fork_server.command(code), str(directory), *map(str, steps)]
    environment = {**os.environ, **({"CROW_TEST_DATABASE_URL": server_url()} if any(steps[6:]) else {})}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=root, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return Report(**json.loads(done.stdout))


async def open_store(place: Place) -> SqliteStore | PostgresStore:
    return await (PostgresStore.open(place) if isinstance(place, str) else SqliteStore.open(place))


async def log(place: Place, tell: Tell) -> None:
    """Every kind of write of the store."""
    store = await open_store(place)
    if not await _has_session(store):
        await store.create_session(new_session())
    leaf = (await store.open_session("s1")).row.leaf
    user = await begin(store, "s1", f"do it {os.urandom(8).hex()}")
    tell([user.id])
    leaf, turn = user.id, user.turn
    await store.save_draft("s1", after_leaf=leaf, turn=turn, message_id="m", text="I ", thought="")

    async def add(*bodies: Any, release: bool = False) -> int:
        nonlocal leaf
        entries = [NewEntry(body=body, model="m1", usage=Usage(input_tokens=1)) for body in bodies]
        stored = await store.append("s1", leaf=leaf, turn=turn, entries=entries, release=release)
        tell([entry.id for entry in stored])
        leaf = stored[-1].id
        return leaf

    answer = await add(said("I do", calls=1))
    done = result(answer, "x" * 40_000)
    await add(Started(call=done.call, why="free", announcement=done.announcement))
    await add(File(call=done.call, path="/proj/a", before=os.urandom(40_000), after_hash="0"), done)
    await add(Mask(before=leaf, tokens_before=9, tokens_after=1))
    summary = Checkpoint(
        compaction_id="c", summary="so far", first_kept=None, method="prefix", tokens_before=9, tokens_after=1
    )
    restored = await add(summary)
    await add(Restore(entry=restored))
    await add(said("Done."), TurnEnd(stop="end_turn"), release=True)
    await store.update_session("s1", SessionChanges(title="named"))
    await store.learn("http://127.0.0.1", "m", {"context_window": 8_000})
    await store.move_leaf("s1", leaf=leaf, to=answer, reason="undo")
    await store.move_leaf("s1", leaf=answer, to=leaf, reason="redo")
    await _fork_and_delete(store, leaf)
    await store.close()


async def turn(path: Path, tell: Tell) -> None:
    """A turn with a tool call and streamed text."""

    async def act(**_: object) -> str:
        return "acted " * 10_000

    model = ScriptedModel(Say(text=["I ", "act"], calls=(call("act"),)), Say(thought="well", text=["Done", "."]))
    async with opened(
        path.parent, model, tools={"act": Tool("write", act)}, client=Teller(tell), session_id="s1"
    ) as run:
        await run.session.prompt(text("Act, please"))


class Teller(NoteTaker):
    """A client that reports every entry it receives."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    async def publish(self, event: Event) -> None:
        if isinstance(event, EntryStored):
            self._tell([event.entry.id])


async def compaction(path: Path, tell: Tell) -> None:
    """Turns in a small window: a summary before a prompt, a mask or summary after a large output, `/compact` and its
    undo."""

    async def read(**_: object) -> str:
        return "line " * 3_000

    model = AnsweringModel(_summing, ModelInfo(name="scripted", endpoint="test scripted", context_window=8_000))
    tools = {"read": Tool("read", read)}
    async with opened(path.parent, model, tools=tools, client=Teller(tell), session_id="s1") as run:
        for words in ("go on " * 1_500, "read, please", "/compact", "/compact undo"):
            await run.session.prompt(text(words))


def _summing(request: Request) -> Say:
    """A summary if the request asks for one, a call if the prompt says so, else text."""
    last = request.messages[-1]
    said = parts_text(last.parts) if isinstance(last, UserMessage) else ""
    if "## Goal" in said and "## Next" in said:
        return Say(text=["## Goal\nGo on.\n## Next\nGo on."])
    return Say(text=[""], calls=(call("read"),)) if said.startswith("read") else Say(text=["Well. " * 50])


async def look(place: Place, told: list[int]) -> None:
    """Check what must hold after every kill."""
    store = await open_store(place)
    try:
        if not await _has_session(store):
            assert told == []
            await store.create_session(new_session())
        tail = await store.open_session("s1")
        while isinstance(place, str) and tail.row.state == "running":  # its server has not noticed the kill yet
            tail = await store.open_session("s1")
        assert (tail.row.state, await store.queued("s1")) == ("idle", ())
        assert await store.open_session("s1") == tail
        path_ids = [entry.id async for batch in store.history("s1") for entry in batch]
        for entry_id in told:
            assert await store.entry(entry_id) is not None
        assert set(told) <= set(path_ids) or tail.row.leaf in told, "only a move takes stored entries off the path"
        before = Projection(tail.entries).context()
        assert problems(before.messages) == []
        assert for_model([entry async for batch in store.history("s1") for entry in batch]) == before
        await converse(store, "s1", "and on it goes")
        after = Projection((await store.tail("s1")).entries).context()
        assert len(after.messages) > len(before.messages)
        await store.tidy()
        guests = sorted(row.id for row in (await store.sessions()).rows if row.id.startswith("guest"))
        assert guests in ([], ["guest", "guest-fork"]), "an import appears only when complete"
        for guest in guests:
            assert [len(batch) async for batch in store.history(guest)] == [GUEST_ENTRIES]
    finally:
        await store.close()
    if isinstance(place, str):
        server = await asyncpg.connect(place)
        for query in POSTGRES_HALVES:
            assert await server.fetch(query) == [], query
        await server.close()
        return
    with closing(sqlite3.connect(place)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
        for query in HALVES:
            assert connection.execute(query).fetchall() == [], query
        assert damaged_entries(connection) == ()


async def intake(path: Path, _: Tell) -> None:
    """Import a file in pieces, and remove the imported sessions."""
    store = await SqliteStore.open(path)
    upkeep = SessionAdmin(store)
    if (await store.sessions()).rows[0].id.startswith("guest"):
        await upkeep.remove(["guest", "guest-fork"])
    await upkeep.import_file(path.parent / "guests.jsonl", ImportDefaults(model="m1", mode="ask"))
    await store.close()


async def prepare_intake(path: Path, tell: Tell) -> None:
    """Like `prepare`, with a file to import."""
    await prepare(path, tell)
    store = await SqliteStore.open(path.parent / "elsewhere.db")
    source = await store.create_session(new_session("guest", title="A guest"))
    entries = await converse(store, "guest", "one", "two")
    await add(store, "guest", result(entries[1].id, "x" * 40_000))
    leaf = (await store.session("guest")).leaf
    await store.create_session(
        new_session("guest-fork", conversation=source.conversation, leaf=leaf, forked_from="guest")
    )
    await store.move_leaf("guest", leaf=leaf, to=entries[0].id, reason="undo")
    await store.move_leaf("guest", leaf=entries[0].id, to=leaf, reason="redo")
    with (path.parent / "guests.jsonl").open("wb") as file:
        async for line in SessionAdmin(store).export(None):
            file.write(line)
    await store.close()


async def prepare(place: Place, _: Tell) -> None:
    """Make a database with one session."""
    store = await open_store(place)
    cwd = "/proj" if isinstance(place, str) else str(place.parent)
    await store.create_session(new_session(cwd=cwd))
    await converse(store, "s1", "hello")
    await store.close()


async def compression(path: Path, _: Tell) -> None:
    """Compress outputs, a batch at a time, after another one was stored."""
    store = await SqliteStore.open(path)
    (answer,) = await add(store, "s1", said("look", calls=1))
    await add(store, "s1", result(answer.id, os.urandom(8).hex() * 3_000), release=True)
    await compress_all(store)
    await store.close()


async def prepare_compression(path: Path, tell: Tell) -> None:
    """Like `prepare`, with outputs of which one is the whole body of its entry."""
    await prepare(path, tell)
    store = await SqliteStore.open(path)
    (answer,) = await add(store, "s1", said("look", calls=3))
    for index in range(2):
        await add(store, "s1", result(answer.id, f"{index} of many " * 2_000, index=index))
    spilled = replace(result(answer.id, "short", index=2), raw_output={"all": "long " * 9_000})
    await add(store, "s1", spilled, TurnEnd(stop="end_turn"), release=True)
    await store.close()


async def _has_session(store: SqliteStore | PostgresStore) -> bool:
    if isinstance(store, PostgresStore):
        try:
            return bool(await store.session("s1"))
        except NoSuchSession:
            return False

    def found(sql: sqlite3.Connection) -> bool:
        return sql.execute("SELECT 1 FROM sessions WHERE id = 's1'").fetchone() is not None

    return await store.database.read(found)


async def _fork_and_delete(store: Store, leaf: int) -> None:
    source = await store.session("s1")
    name = f"f{os.getpid()}"
    await store.create_session(new_session(name, conversation=source.conversation, leaf=leaf, forked_from="s1"))
    await converse(store, name, "private words")
    await store.delete_session(name)
    await store.tidy()


def fork(scene: Callable[[Tell], Coroutine[None, None, None]], *, kill_at: int | None) -> tuple[int, list[int], str]:
    """Run `scene` in a child. Returns its exit code, the entries it reported, and a traceback if it failed."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            if kill_at is not None:
                _kill_at(kill_at)
            asyncio.run(scene(lambda ids: _write(write_end, {"told": ids})))
        except BaseException:  # noqa: BLE001  whatever it is, the parent reports it
            _write(write_end, {"failure": traceback.format_exc()})
            os._exit(1)
        os._exit(0)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as pipe:
        lines = [json.loads(line) for line in pipe if line.endswith("\n")]
    _, status = os.waitpid(pid, 0)
    told = [entry for line in lines for entry in line.get("told", [])]
    return os.waitstatus_to_exitcode(status), told, "".join(line.get("failure", "") for line in lines)


def _write(descriptor: int, value: object) -> None:
    os.write(descriptor, json.dumps(value).encode() + b"\n")


def _kill_at(number: int) -> None:
    """Make this process kill itself when SQLite starts its `number`th statement on any connection, or when it sends
    half as many messages to PostgreSQL: after the last message if `number` is even, else before."""
    connect, numbers, messages = sqlite3.connect, count(1), count(1)

    def trace(_: str) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(transport: Any, data: bytes) -> None:
        is_last = next(messages) == number // 2
        if not (is_last and number % 2):
            send(transport, data)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    send = _SelectorSocketTransport.write
    _SelectorSocketTransport.write = write

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(trace)
        return connection

    sqlite3.connect = traced  # type: ignore[assignment]


async def _look(place: Place, told: list[int], _: Tell) -> None:
    await look(place, told)


def kill_in(
    name: str, scene: Scene, start: Scene | None, directory: Path, report: Report, *, step: int, first: int = 1
) -> None:
    """Kill `scene` at every `step`th statement until it finishes."""
    for number, place in zip(count(first, step), _places(directory / name, start), strict=False):
        ended, told, failure = fork(partial(scene, place), kill_at=number)
        if ended == 0:
            return
        if ended == -signal.SIGKILL:
            report.kills[name] = report.kills.get(name, 0) + 1
            _, _, failure = fork(partial(_look, place, told), kill_at=None)
        if failure:
            report.failures.append(f"{name}, killed at statement {number}:\n{failure}")


def _places(directory: Path, start: Scene | None) -> Iterator[Place]:
    """Databases. Each is used for several kills; without `start` for one, and not created yet."""
    if directory.name.startswith("postgres"):
        yield from _urls(start)
        return
    for number in count():
        place = directory / str(number if start is None else number // FRESH_AFTER) / "crow.db"
        if start is not None and not place.exists():
            fork(partial(start, place), kill_at=None)
        yield place
        if start is None:
            shutil.rmtree(place.parent, ignore_errors=True)


def _urls(start: Scene | None) -> Iterator[str]:
    name = ""
    for number in count():
        if number % FRESH_AFTER == 0 or start is None:
            if name:
                fork(partial(_make_database, name, is_over=True), kill_at=None)
            name = f"crow_kills_{os.getpid()}_{number}"
            fork(partial(_make_database, name), kill_at=None)
        url = urlsplit(os.environ["CROW_TEST_DATABASE_URL"])._replace(path=f"/{name}").geturl()
        if start is not None and number % FRESH_AFTER == 0:
            fork(partial(start, url), kill_at=None)
        yield url


async def _make_database(name: str, _: Tell, *, is_over: bool = False) -> None:
    admin = await asyncpg.connect(os.environ["CROW_TEST_DATABASE_URL"])
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)" if is_over else f"CREATE DATABASE {name}")
    await admin.close()


def main(directory: str, *steps: str) -> None:
    """Entry point of the process that `killed` starts."""
    report = Report()
    crow.store.transfer.PIECE_RECORDS = 2
    crow.store.sqlite.compression._BATCH_BYTES = 10_000
    gc.freeze()  # keeps the children from copying the pages of all imported modules
    scenes: tuple[tuple[str, Scene, Scene | None], ...] = (
        ("create", _create, None),
        ("log", log, prepare),
        ("turn", turn, prepare),
        ("intake", intake, prepare_intake),
        ("compaction", compaction, prepare),
        ("compression", compression, prepare_compression),
        ("postgres create", _create, None),
        ("postgres log", log, prepare),
    )
    for (name, scene, start), step in zip(scenes, map(int, steps), strict=True):
        if step:
            kill_in(name, scene, start, Path(directory), report, step=step, first=2 if "postgres" in name else 1)
    print(json.dumps(asdict(report)))


async def _create(place: Place, _: Tell) -> None:
    store = await open_store(place)
    await store.create_session(new_session())
    await store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
