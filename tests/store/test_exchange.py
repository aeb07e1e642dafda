"""Sessions are exported from one database and imported into another; damaged and foreign files are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import random
import sqlite3
import tempfile
import typing
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from crow.domain import entries as domain
from crow.domain.conversation import for_model
from crow.domain.entries import Assistant, Body, CallRef, Checkpoint, File, Mask, NewEntry, Note, Pin, Restore, User
from crow.domain.errors import ArgumentError, StoreUnavailable
from crow.domain.messages import Image, Text, ToolCall, Usage
from crow.frontend.methods import session_info
from crow.store import NewSession, Scope, SessionChanges
from crow.store.admin import ImportDefaults, Imported
from crow.store.portable import ExportFile
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore
from crow.store.sqlite.transfer import Importer
from tests.store.scenes import add, begin, converse, history, ids, new_session, result, row_ids, said
from tests.store.test_codec import record
from tests.support.amounts import IS_SOAK, examples, some

SCHEMA = Draft202012Validator(json.loads((Path(__file__).parents[2] / "schemas/export.schema.json").read_text()))
DEFAULTS = ImportDefaults(model="mine", mode="ask")
SMALL = st.integers(-3, 12)
IDS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=5)
PRINTABLE = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=5)


async def exported(store: SqliteStore, names: tuple[str, ...] | None = None) -> bytes:
    return b"".join([line async for line in SessionAdmin(store).export(names)])


async def imported(store: SqliteStore, path: Path, data: bytes) -> tuple[Imported, ...]:
    await anyio.Path(path).write_bytes(data)
    return await SessionAdmin(store).import_file(path, DEFAULTS)


def resealed(lines: list[bytes]) -> bytes:
    """The lines (without an end) with an end that fits."""
    return b"".join(lines) + b'{"type":"end","lines":%d,"sha256":"%s"}\n' % (
        len(lines),
        hashlib.sha256(b"".join(lines)).hexdigest().encode(),
    )


def rows_of(store: SqliteStore, path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        tables = ("conversations", "sessions", "entries", "blobs", "blob_refs", "moves", "imports")
        return [row for table in tables for row in connection.execute(f"SELECT * FROM {table}").fetchall()]


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """Any body, its references to entries near enough to hit some and miss some."""
    body: Body = draw(st.sampled_from(typing.get_args(Body)).flatmap(record))
    match body:
        case domain.Started() | domain.File() | domain.ToolResult():
            return dataclasses.replace(body, call=CallRef(assistant=draw(SMALL), index=draw(st.integers(0, 3))))
        case Checkpoint():
            pins = tuple(Pin(entry=draw(SMALL), text=pin.text) for pin in body.pins)
            first_kept = draw(st.none() | SMALL)
            return dataclasses.replace(body, first_kept=first_kept, pins=pins, compaction_id=draw(IDS))
        case Mask():
            exceptions = tuple(draw(st.lists(SMALL, max_size=3)))
            return dataclasses.replace(body, before=draw(SMALL), exceptions=exceptions)
        case Restore():
            return Restore(entry=draw(SMALL))
        case domain.Note():
            return dataclasses.replace(body, entry=draw(st.none() | st.integers(0, 12)))
        case domain.User() | domain.Assistant() | domain.Remark() | domain.Command() | domain.Custom():
            return dataclasses.replace(body, message_id=draw(IDS))
        case _:
            return body


@st.composite
def new_entries(draw: st.DrawFn) -> NewEntry:
    tokens = st.none() | st.integers(-1, 2**63 - 1)
    return NewEntry(
        body=draw(bodies()),
        model=draw(st.text(max_size=5)),
        usage=draw(st.none() | st.builds(Usage, input_tokens=tokens, output_tokens=tokens, cached_tokens=tokens)),
        cost=draw(st.none() | st.floats(0, 10)),
        estimate=draw(st.none() | st.integers(0, 10**6)),
    )


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 9), new_entries()),
        st.tuples(st.just("move"), st.integers(0, 9), st.integers(0, 30)),
        st.tuples(st.just("fork"), st.integers(0, 9), st.integers(0, 30)),
        st.tuples(st.just("sub"), st.integers(0, 9), PRINTABLE.map("/{}".format)),
        st.tuples(st.just("title"), st.integers(0, 9), PRINTABLE),
    ),
    max_size=14,
)


async def build(store: SqliteStore, operations: list[tuple[str, int, typing.Any]]) -> None:
    """Sessions of one or more conversations: branches, forks, subagents, moves."""
    names = ["s0"]
    await store.create_session(new_session("s0"))
    entries: dict[int, list[int]] = {}
    for kind, which, value in operations:
        row = await store.session(names[which % len(names)])
        known = entries.setdefault(row.conversation, [])
        name = f"s{len(names)}"
        match kind:
            case "append":
                stored = await store.append(row.id, leaf=row.leaf, turn=1, entries=[value])
                known.append(stored[0].id)
            case "move":
                to = [None, *known][value % (len(known) + 1)]
                await store.move_leaf(row.id, leaf=row.leaf, to=to, reason="undo")
            case "fork" if known:
                leaf = known[value % len(known)]
                fork = new_session(name, conversation=row.conversation, leaf=leaf, forked_from=row.id)
                await store.create_session(fork)
                names.append(name)
            case "sub":
                await store.create_session(new_session(name, parent_id=row.id, cwd=value))
                names.append(name)
            case "title":
                await store.update_session(row.id, SessionChanges(title=value))


async def round_trip(operations: list[tuple[str, int, typing.Any]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        first = await SqliteStore.open(Path(directory) / "a.db")
        second = await SqliteStore.open(Path(directory) / "b.db")
        try:
            await build(first, operations)
            before = await exported(first, ("s0",))
            for line in before.splitlines():
                SCHEMA.validate(json.loads(line))
            file = Path(directory) / "x.jsonl"
            assert all(one.is_new for one in await imported(second, file, before))
            assert await exported(second, ("s0",)) == before
            assert [e.body for e in await history(second, "s0") if not refers(e.body)] == [
                as_foreign(e.body) for e in await history(first, "s0") if not refers(e.body)
            ]
            # another one, where ids are taken: the same all the same
            third = await SqliteStore.open(Path(directory) / "c.db")
            try:
                await third.create_session(new_session("other"))
                await converse(third, "other", "one", "two")
                await imported(third, file, before)
                assert await exported(third, ("s0",)) == before
            finally:
                await third.close()
        finally:
            await first.close()
            await second.close()


def as_foreign(body: Body) -> Body:
    return dataclasses.replace(body, recorded_here=False) if isinstance(body, domain.Prompt) else body


def refers(body: Body) -> bool:
    """Whether the body may name other entries, whose ids differ in another database."""
    return isinstance(body, domain.Note | domain.Started | File | domain.ToolResult | Checkpoint | Mask | Restore)


@settings(max_examples=examples(6), database=None)
@given(operations=OPERATIONS)
def test_any_imported_conversation_is_exported_byte_for_byte(operations: list[tuple[str, int, typing.Any]]) -> None:
    anyio.run(round_trip, operations)


@pytest.fixture
async def other(tmp_path: Path) -> typing.AsyncIterator[SqliteStore]:
    """A database of another machine."""
    store = await SqliteStore.open(tmp_path / "other.db")
    yield store
    await store.close()


async def told(store: SqliteStore) -> None:
    """A session with an image, a large result, a call and a file; a fork of it; an undone turn."""
    source = await store.create_session(
        NewSession(
            id="s1",
            cwd="/repo",
            model="m1",
            mode="auto",
            title="T",
            config={"system_prompt": "evil"},
            additional_directories=("/",),
        )
    )
    await store.update_session(
        "s1", SessionChanges(permissions=({"tool": "shell"},), alias="cli:default", metadata={"k": 1})
    )
    await store.enqueue("s1", (Text(text="hi"), Image(data="aGVsbG8=", mime_type="image/png")), "u1")
    start = await store.take_turn("s1", "u1", leaf=None)
    (asked,) = await add(store, "s1", said("look", calls=1), turn=start.turn)
    call = CallRef(assistant=asked.id, index=0)
    stored = await add(
        store,
        "s1",
        File(call=call, path="/proj/a", before=b"\xff\0", after_hash="h"),
        result(asked.id, "x" * 40_000),
        Note(about="thought_level", value="high", previous="low"),
        release=True,
    )
    await converse(store, "s1", "second")
    row = await store.session("s1")
    await store.move_leaf("s1", leaf=row.leaf, to=stored[-1].id, reason="undo")
    await store.create_session(
        new_session("f1", conversation=source.conversation, leaf=stored[-1].id, forked_from="s1", title="T (fork 1)")
    )
    await converse(store, "f1", "elsewhere")


async def test_an_imported_session_has_the_settings_of_a_new_one(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path
) -> None:
    await told(sqlite_store)
    done = await imported(other, tmp_path / "x.jsonl", await exported(sqlite_store, ("s1", "f1")))
    before, row = await sqlite_store.session("s1"), await other.session("s1")
    assert done == (Imported(sessions=("s1", "f1"), entries=11, is_new=True),)
    assert (row.model, row.mode, row.permissions, row.config, row.alias, row.additional_directories, row.metadata) == (
        "mine", "ask", (), {}, None, (), {},
    )  # fmt: skip
    counted = ("title", "cwd", "entries", "created_ms", "updated_ms", "has_prompt", "tokens_in", "cost", "state")
    assert [getattr(row, name) for name in counted] == [getattr(before, name) for name in counted]
    assert [entry.body for entry in await history(other, "f1")] == [
        entry.body for entry in await history(sqlite_store, "f1")
    ]
    assert row_ids((await other.sessions()).rows) == row_ids((await sqlite_store.sessions()).rows) == ["f1", "s1"]
    assert [hit.kind for hit in await other.search("elsewhere")] == ["assistant", "user"]
    assert (await converse(other, "s1", "goes on"))[0].turn == 3


@pytest.mark.parametrize("claim", [b',"recorded_here":true', b""])
async def test_an_imported_file_entry_is_not_marked_as_recorded_here(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path, claim: bytes
) -> None:
    await told(sqlite_store)
    lines = (await exported(sqlite_store, ("s1",))).splitlines(keepends=True)[:-1]
    claiming = [line.replace(b',"recorded_here":false', claim) for line in lines]
    assert claiming != lines
    await imported(other, tmp_path / "x.jsonl", resealed(claiming))
    user = await begin(other, "s1", "go on")
    call = CallRef(assistant=user.id, index=0)
    mine = File(call=call, path="/b", before=None, after_hash="", recorded_here=True)
    (last,) = await add(other, "s1", mine, turn=user.turn)
    bodies = [entry.body for entry in await other.file_changes(last.id, None)]
    assert {body.path: body.recorded_here for body in bodies if isinstance(body, File)} == {
        "/proj/a": False,
        "/b": True,
    }


async def test_a_session_is_exported_with_its_own_branches_but_not_those_of_its_forks(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path
) -> None:
    await told(sqlite_store)
    data = await exported(sqlite_store, ("s1",))
    assert b"elsewhere" not in data
    assert b"second" in data
    alone = await exported(sqlite_store, ("f1",))
    assert b"second" not in alone
    assert [record["session"] for record in map(json.loads, alone.splitlines()) if record["type"] == "entry"] == [
        *[None] * 5,
        *["f1"] * 3,
    ]
    await imported(other, tmp_path / "x.jsonl", alone)
    assert await exported(other, ("f1",)) == alone
    assert [hit.session for hit in await other.search("look")] == ["f1"]


async def test_a_second_import_changes_nothing(sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path) -> None:
    await told(sqlite_store)
    file = tmp_path / "x.jsonl"
    data = await exported(sqlite_store)
    await imported(other, file, data)
    await converse(other, "s1", "goes on")
    before = rows_of(other, tmp_path / "other.db")
    (again,) = await imported(other, file, data)
    (at_home,) = await imported(sqlite_store, file, data)
    assert (again.is_new, at_home.is_new) == (False, False)
    assert rows_of(other, tmp_path / "other.db") == before
    assert file.read_bytes() == data
    await SessionAdmin(other).remove(["s1", "f1"])
    assert rows_of(other, tmp_path / "other.db") == []
    assert [one.is_new for one in await imported(other, file, data)] == [True]


@pytest.mark.long
async def test_small_conversations_share_transactions_and_large_ones_do_not(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path
) -> None:
    for number in range(150):
        await sqlite_store.create_session(new_session(f"s{number}"))
        await converse(sqlite_store, f"s{number}", *(f"{number} {turn}" for turn in range(100 if number == 70 else 1)))
    statements: list[str] = []
    await other.database.write(lambda sql: sql.set_trace_callback(statements.append))
    done = await imported(other, tmp_path / "x.jsonl", await exported(sqlite_store))
    await other.database.write(lambda sql: sql.set_trace_callback(None))
    assert sum(one.is_new for one in done) == 150
    # Small entries come in groups of at most 200, the large conversation in two pieces.
    assert 6 <= statements.count("COMMIT") <= 12
    for number in (0, 69, 70, 71, 149):
        name = f"s{number}"
        told, source = await history(other, name), await history(sqlite_store, name)
        assert [entry.body for entry in told] == [entry.body for entry in source]


async def test_a_turn_of_a_dead_process_is_closed_before_the_export(tmp_path: Path, other: SqliteStore) -> None:
    dead = await SqliteStore.open(tmp_path / "crow.db")
    await dead.create_session(new_session())
    user = await begin(dead, "s1", "hi")
    await dead.save_draft("s1", after_leaf=user.id, turn=user.turn, message_id="a1", text="half", thought="")
    await dead.close()
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await imported(other, tmp_path / "x.jsonl", await exported(store, ("s1",)))
    finally:
        await store.close()
    (answer,) = [e.body for e in await history(other, "s1") if isinstance(e.body, Assistant)]
    assert (answer.text, answer.finish) == ("half", "interrupted")


async def test_entry_ids_in_a_checkpoint_are_renumbered(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path
) -> None:
    await other.create_session(new_session("other"))
    await converse(other, "other", "one")
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one", "two")
    pin = Pin(entry=entries[3].id, text=f"tw\n[... recall with entry {entries[3].id} gives all of it ...]")
    checkpoint = Checkpoint(compaction_id="k", summary="s", first_kept=entries[3].id, pins=(pin,))
    mask = Mask(before=entries[4].id, exceptions=(entries[2].id,))
    await add(sqlite_store, "s1", checkpoint, mask, Restore(entry=entries[-1].id + 1))
    await imported(other, tmp_path / "x.jsonl", await exported(sqlite_store, ("s1",)))
    there = await history(other, "s1")
    assert [e.body for e in there[-3:]] == [
        dataclasses.replace(
            checkpoint,
            first_kept=there[3].id,
            pins=(Pin(entry=there[3].id, text=f"tw\n[... recall with entry {there[3].id} gives all of it ...]"),),
        ),
        Mask(before=there[4].id, exceptions=(there[2].id,)),
        Restore(entry=there[-3].id),
    ]
    assert ids((await other.tail("s1")).entries) == ids(there)


def edited(lines: list[bytes], kind: str, change: Mapping[str, object], which: int = 0) -> list[bytes]:
    """The lines, with other values in one record of that type."""
    at = [index for index, line in enumerate(lines) if json.loads(line)["type"] == kind][which]
    return [*lines[:at], json.dumps({**json.loads(lines[at]), **change}).encode() + b"\n", *lines[at + 1 :]]


FOREIGN = [
    (b"", "line 1: it is empty"),
    (b"# Notes\n", 'line 1: it is not a crow export; expected {"type":"crow","format":1}'),
    (b"\x89PNG\r\n" + b"x" * 5000, "line 1: it is not a crow export"),
    (b'{"type":"crow","format":2}\n', "line 1: format is 2, but this version of crow only knows 1: upgrade crow"),
    (b'{"type":"crow","format":1}\n', "line 2: the file is truncated: its last line is missing"),
]


@pytest.mark.parametrize(("data", "words"), FOREIGN)
async def test_a_foreign_file_is_refused_with_the_line(
    other: SqliteStore, tmp_path: Path, data: bytes, words: str
) -> None:
    with pytest.raises(ArgumentError) as refused:
        await imported(other, tmp_path / "x.jsonl", data)
    assert f"{tmp_path / 'x.jsonl'}, {words}" in str(refused.value)


async def test_a_damaged_file_is_refused_with_the_line_and_nothing_is_written(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path
) -> None:
    await told(sqlite_store)
    data = await exported(sqlite_store)
    lines = data.splitlines(keepends=True)[:-1]
    blob = next(index for index, line in enumerate(lines) if b'"type":"blob"' in line)
    cases = [
        (b"".join(lines), f"line {len(lines) + 1}: the file is truncated: its last line is missing"),
        (data[:-20], f"line {len(lines) + 1}: the file is truncated"),
        (data + b"{}\n", f"line {len(lines) + 1}: end: something comes after it"),
        (data.replace(b'"second"', b'"secund"'), f"line {len(lines) + 1}: end: sha256 does not match the lines"),
        (resealed(lines[:-1]).replace(b'"lines":', b'"lines":9'), "lines are missing or were added"),
        (resealed([*lines[:3], b"{nonsense}\n", *lines[3:]]), "line 4: it is not JSON"),
        (resealed([*lines[:3], b'{"type":"hologram"}\n']), 'line 4: its type is "hologram"; expected one of crow, con'),
        (resealed([lines[0], *lines[2:]]), "line 2: it comes before any conversation"),
        (resealed(lines[:2]), "line 2: conversation: it has no session"),
        (resealed([*lines[:blob], *lines[blob + 1 :]]), "the blob for {"),
        (
            resealed(edited(lines, "blob", {"base64": None, "text": "other"})),
            f"line {blob + 1}: blob: its content is damaged: its sha256 is not",
        ),
        (resealed(edited(lines, "entry", {"id": 7})), "entry: id is 7; expected 1, the next number"),
        (resealed(edited(lines, "entry", {"parent": 2}, 1)), "entry: parent is 2; expected an entry before 2, or null"),
        (
            resealed(edited(lines, "entry", {"session": "s9"})),
            'entry: session is "s9", which is not a session of this co',
        ),
        (resealed(edited(lines, "entry", {"cost": "free"})), 'entry: cost is "free"; expected a number'),
        (resealed(edited(lines, "entry", {"cost": 10**400})), "expected a number"),
        (
            resealed(edited(lines, "entry", {"turn": 2**60})),
            "entry: turn is 1152921504606846976; expected a whole numb",
        ),
        (
            resealed(edited(lines, "move", {"reason": 7})),
            "move: reason is 7; expected a string of at most 1,000 characters",
        ),
        (resealed([*lines[:2], b'{"type":"blob","sha256":"x","text":null}\n']), "line 3: blob: base64 is missing"),
        (resealed(edited(lines, "entry", {"kind": "hologram"})), "entry 1 (hologram): its kind 'hologram' is unknown"),
        (resealed(edited(lines, "entry", {"body": {}})), "entry 1 (user): it is damaged"),
        (
            resealed(edited(lines, "session", {"leaf": 99})),
            'line 3: session "s1": leaf is 99, but the conversation has',
        ),
        (
            resealed(edited(lines, "session", {"parent_id": "mine"})),
            'line 3: session "s1": parent_id or forked_from is',
        ),
        (resealed(edited(lines, "session", {"id": "f1"})), 'line 4: session: id is "f1"; expected an id that no other'),
        (resealed(edited(lines, "session", {"title": "\ud800"})), "line 3: it has half of a surrogate pair"),
        (resealed(edited(lines, "session", {"id": "s" * 100_000})), 'session: id is "sss'),
        (
            resealed(edited(lines, "session", {"id": "s\x1b]0;x"})),
            'session: id is "s\\u001b]0;x"; expected 1 to 200 ch',
        ),
        (resealed(edited(lines, "session", {"id": "s\u202e1"})), "expected 1 to 200 characters: ASCII letters"),
        (resealed(edited(lines, "session", {"id": "--all"})), "expected 1 to 200 characters: ASCII letters"),
        (resealed(edited(lines, "session", {"id": "$(id)"})), "expected 1 to 200 characters: ASCII letters"),
        (
            resealed(edited(lines, "session", {"cwd": "work"})),
            'session: cwd is "work"; expected an absolute path of at',
        ),
        (resealed(edited(lines, "session", {"cwd": "/w\x1b[2J"})), "expected an absolute path of at most 4,096 char"),
        (resealed(edited(lines, "session", {"cwd": "/" + "w" * 5000})), "expected an absolute path of at most 4,096"),
        (
            resealed(edited(lines, "session", {"updated_ms": 2**53})),
            "session: updated_ms is 9007199254740992; expected",
        ),
        (resealed(edited(lines, "entry", {"created_ms": 2**53})), "expected a time in milliseconds before the year"),
        (resealed(edited(lines, "entry", {"model": "m" * 2000})), "expected a string of at most 1,000 characters"),
        (resealed(edited(lines, "move", {"reason": "r" * 2000})), "expected a string of at most 1,000 characters"),
        (
            resealed(edited(lines, "entry", {"body": {"parts": [], "message_id": "m" * 100_000}})),
            'entry 1: message_id is "mmm',
        ),
        (
            resealed(edited(lines, "entry", {"body": {"parts": [], "message_id": "\x1b]0;x"}})),
            "expected at most 200 characters, all of them visible",
        ),
        (
            resealed(edited(lines, "entry", {"body": {"parts": [], "message_id": "u", "cut": 10**400}})),
            f"entry 1 (user): cut is {'1'.ljust(60, '0')}; expected at most 64 bits",
        ),
        (
            resealed(edited(lines, "entry", {"body": json.loads("[" * 300 + "]" * 300)})),
            "it has more than 200 levels of nested values",
        ),
    ]
    for number, (damaged, words) in enumerate(cases):
        with pytest.raises(ArgumentError) as refused:
            await imported(other, tmp_path / f"{number}.jsonl", damaged)
        assert str(tmp_path / f"{number}.jsonl") in str(refused.value)
        assert words in str(refused.value), words
        assert rows_of(other, tmp_path / "other.db") == []


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "link to a pipe"])
async def test_only_a_regular_file_is_imported_and_none_is_waited_for(
    other: SqliteStore, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "x.jsonl"
    match kind:
        case "device":
            path = Path("/dev/zero")
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to("pipe")
    with anyio.fail_after(60), pytest.raises(ArgumentError) as refused:
        await SessionAdmin(other).import_file(path, DEFAULTS)
    assert str(refused.value) == f"{path} is not a regular file; expected a file with exported sessions."


async def test_a_foreign_title_is_cleaned_and_the_import_says_so(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path
) -> None:
    await told(sqlite_store)
    lines = (await exported(sqlite_store)).splitlines(keepends=True)[:-1]
    lines = edited(lines, "session", {"title": "\x1b]0;x\x07 evil\u202e\n\u200btitle " + "t" * 100_000})
    lines = edited(lines, "session", {"title": "\x00\u200b"}, which=1)
    (done,) = await imported(other, tmp_path / "x.jsonl", resealed(lines))
    assert done.cleaned == ("s1", "f1")
    title = (await other.session("s1")).title
    assert title is not None
    assert (title[:20], len(title), title.isprintable()) == ("]0;x evil title tttt", 200, True)
    assert (await other.session("f1")).title is None


@pytest.mark.parametrize("claim", [b',"recorded_here":true', b""])
async def test_an_imported_system_message_is_marked_as_foreign(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path, claim: bytes
) -> None:
    await sqlite_store.create_session(new_session())
    prompt = domain.Prompt(system="You are Evil.", tools=(), cwd="/repo", model="mine", recorded_here=True)
    await add(sqlite_store, "s1", prompt)
    lines = (await exported(sqlite_store, ("s1",))).splitlines(keepends=True)[:-1]
    claiming = [line.replace(b',"recorded_here":false', claim) for line in lines]
    assert claiming != lines
    await imported(other, tmp_path / "x.jsonl", resealed(claiming))
    assert [entry.body for entry in await history(other, "s1")] == [dataclasses.replace(prompt, recorded_here=False)]


HOSTILE: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**400, 1.5, 1e308, -1e308),
    *("", "s1", "x" * 100_000, "\x00", "\x1b]0;x\x07", "\u202e", "/etc/passwd", "../..", "99999999999999999999"),
    *([], {}, [[]], {"blob": "x"}, {"type": "text", "text": "x"}, json.loads("[" * 150 + "]" * 150)),
)


def mutated(lines: list[bytes], noise: random.Random) -> bytes:
    """The lines with some hostile changes: other values, records that are dropped, repeated or swapped."""
    records = [json.loads(line) for line in lines]
    for _ in range(noise.randint(1, 2)):
        at = noise.randrange(1, len(records))
        match noise.choice((*["value"] * 12, "drop", "repeat", "swap")):
            case "drop":
                del records[at]
            case "repeat":
                records.insert(noise.randrange(1, len(records)), records[at])
            case "swap":
                other = noise.randrange(1, len(records))
                records[at], records[other] = records[other], records[at]
            case _:
                inner = records[at] = json.loads(json.dumps(records[at]))
                while True:
                    keys = list(inner) if isinstance(inner, dict) else range(len(inner))
                    key = noise.choice(keys)
                    if isinstance(inner[key], dict | list) and inner[key] and noise.random() < 0.7:
                        inner = inner[key]
                        continue
                    alike = [value for value in HOSTILE if type(value) is type(inner[key])]
                    inner[key] = noise.choice(alike if alike and noise.random() < 0.8 else HOSTILE)
                    break
        if len(records) < 3:
            break
    return resealed([json.dumps(record).encode() + b"\n" for record in records])


@pytest.mark.long
async def test_any_mutated_export_is_refused_with_words_or_imported_usably(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    await told(sqlite_store)
    lines = (await exported(sqlite_store)).splitlines(keepends=True)[:-1]
    file = tmp_path / "x.jsonl"
    refusals: list[str] = []
    for seed in some(range(120), 3):
        store = await SqliteStore.open(tmp_path / f"{seed}.db")
        try:
            done = await imported(store, file, mutated(lines, random.Random(seed)))
            for row in (await store.sessions(limit=100)).rows:
                assert session_info(row), seed
            for name in (name for one in done for name in one.sessions):
                row = await store.session(name)
                assert (row.permissions, row.mode, row.config, row.alias) == ((), "ask", {}, None)
                assert for_model((await store.open_session(name)).entries), seed
                assert json.dumps(dataclasses.asdict(row), allow_nan=False), seed
                await converse(store, name, f"go on {seed}")
        except ArgumentError as error:
            refusals.append(str(error))
        finally:
            await store.close()
    assert 6 < len(refusals) < (116 if IS_SOAK else 40)
    assert [words for words in refusals if not words.startswith(f"{file}, line ") or len(words) > 1000] == []
    assert [words for words in refusals if "\x1b" in words] == []


async def test_an_edited_file_without_its_hash_is_imported(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path
) -> None:
    await told(sqlite_store)
    data = (await exported(sqlite_store)).replace(b'"second"', b'"a secret"')
    lines = data.splitlines(keepends=True)
    await imported(other, tmp_path / "x.jsonl", b"".join(edited(lines, "end", {"sha256": None})))
    assert len(await other.search("secret")) == 1


async def test_results_refer_to_their_calls_after_an_import(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path
) -> None:
    await told(sqlite_store)
    await imported(other, tmp_path / "x.jsonl", await exported(sqlite_store))
    entries = await history(other, "s1")
    (asked,) = [entry for entry in entries if isinstance(entry.body, Assistant)]
    assert [e.body.call for e in entries if isinstance(e.body, domain.ToolResult)] == [
        CallRef(assistant=asked.id, index=0)
    ]
    assert isinstance(entries[0].body, User)
    assert isinstance(asked.body, Assistant)
    assert asked.body.calls == (ToolCall(id="c0", name="read_file", arguments='{"path":"x"}'),)


async def test_a_label_of_an_entry_that_is_not_exported_stays_in_the_export(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path
) -> None:
    await sqlite_store.create_session(new_session())
    one = await converse(sqlite_store, "s1", "one", "two")
    await sqlite_store.move_leaf("s1", leaf=one[5].id, to=one[2].id, reason="undo")
    await add(sqlite_store, "s1", Note(about="label", value="far", entry=one[3].id), release=True)
    await sqlite_store.fork_session("s1", "f1", entry=None, cwd="/repo", additional_directories=())

    async def labels(store: SqliteStore) -> list[tuple[str, ...]]:
        return [point.labels for point in (await store.outline("f1")).points]

    assert await labels(sqlite_store) == [(), ("far",)]
    await imported(other, tmp_path / "x.jsonl", await exported(sqlite_store, ("f1",)))
    assert await labels(other) == [(), ("far",)]


@pytest.mark.parametrize("change", ["body = '{'", "parent = 0", "parent = -1"])
async def test_an_unreadable_entry_is_exported_as_a_message_that_says_so(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path, change: str
) -> None:
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one")
    with closing(sqlite3.connect(tmp_path / "crow.db", isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER entries_never_change")
        connection.execute(f"UPDATE entries SET {change} WHERE id = ?", (entries[1].id,))
    await imported(other, tmp_path / "x.jsonl", await exported(sqlite_store, ("s1",)))
    *_, unreadable, end = [entry.body for entry in await history(other, "s1")]
    assert isinstance(unreadable, domain.Assistant)
    assert unreadable.text.startswith(f"[Entry {entries[1].id} (assistant) could not be read: it is damaged: ")
    assert end == entries[2].body


async def test_a_session_can_be_imported_twice_while_a_fork_keeps_its_old_entries(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    await told(sqlite_store)
    for number in range(2):
        data = await exported(sqlite_store, ("s1",))
        assert b"is missing from the database" not in data
        await SessionAdmin(sqlite_store).remove(["s1"])
        await imported(sqlite_store, tmp_path / f"{number}.jsonl", data)


async def test_search_tells_an_imported_session_from_the_fork_with_its_old_entries(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    await told(sqlite_store)
    data = await exported(sqlite_store, ("s1",))
    await SessionAdmin(sqlite_store).remove(["s1"])
    await imported(sqlite_store, tmp_path / "x.jsonl", data)
    hits = {hit.session: hit.entry for hit in await sqlite_store.search("look")}
    assert hits.keys() == {"f1", "s1"}
    for session, entry in hits.items():
        assert entry in ids(await history(sqlite_store, session))


# others, meanwhile


async def test_others_can_write_during_an_import_and_see_it_only_when_it_is_complete(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.store.transfer.PIECE_RECORDS", 2)
    await told(sqlite_store)
    data = await exported(sqlite_store)
    await anyio.Path(tmp_path / "x.jsonl").write_bytes(data)
    bystander = await SqliteStore.open(tmp_path / "other.db")
    seen: list[object] = []

    async def meanwhile() -> None:
        await converse(bystander, "mine", "meanwhile")
        await bystander.tidy()
        await bystander.delete_session("s1")
        seen.append([row_ids((await bystander.sessions()).rows), await bystander.search("elsewhere")])
        seen.append([total.session for total in await SessionAdmin(bystander).totals(("session",), Scope())])
        with pytest.raises(ArgumentError, match='Session "s1" is being imported or removed by another process'):
            await SessionAdmin(bystander).import_file(tmp_path / "x.jsonl", DEFAULTS)

    def add_piece(piece: Any, sql: sqlite3.Connection) -> None:
        intake.add(sql, other.owner, piece, now_ms=2)

    try:
        await bystander.create_session(new_session("mine"))
        file = ExportFile(tmp_path / "x.jsonl")
        (block,) = file.check()
        intake = Importer(file, block, DEFAULTS)
        assert await other.database.write(lambda sql: intake.begin(sql, other.owner, now_ms=1))
        while (piece := intake.next_piece()) is not None:
            await other.database.write(partial(add_piece, piece))
            await meanwhile()
        await other.database.write(intake.show)
        file.close()
        assert seen == [[["mine"], ()], []] * (len(seen) // 2)
        assert len(seen) > 8
        assert sorted(row_ids((await bystander.sessions()).rows)) == ["f1", "mine", "s1"]
        assert await exported(bystander, ("s1", "f1")) == data
    finally:
        await bystander.close()


async def test_a_cancelled_import_leaves_nothing_and_can_be_repeated(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.store.transfer.PIECE_RECORDS", 2)
    await told(sqlite_store)
    data = await exported(sqlite_store)
    file = tmp_path / "x.jsonl"
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        for entries in (0, 2, 6, 10):
            task = asyncio.create_task(imported(other, file, data))
            while connection.execute("SELECT count(*) FROM entries").fetchone()[0] < entries:  # noqa: ASYNC110
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert (await other.sessions()).rows == ()
            assert await other.search("elsewhere") == ()
            await other.tidy()
            assert rows_of(other, tmp_path / "other.db") == []
    assert [one.is_new for one in await imported(other, file, data)] == [True]
    assert await exported(other) == data


async def test_the_import_of_a_dead_process_is_removed_by_the_next_one(
    sqlite_store: SqliteStore, other: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.store.transfer.PIECE_RECORDS", 2)
    await told(sqlite_store)
    data = await exported(sqlite_store)
    await anyio.Path(tmp_path / "x.jsonl").write_bytes(data)
    dead = await SqliteStore.open(tmp_path / "other.db")
    with closing(ExportFile(tmp_path / "x.jsonl")) as file:
        (block,) = file.check()
        intake, here = Importer(file, block, DEFAULTS), dead.owner
        assert await dead.database.write(lambda sql: intake.begin(sql, here, now_ms=1))
        piece = intake.next_piece()
        assert piece is not None
        await dead.database.write(lambda sql: intake.add(sql, here, piece, now_ms=1))
        await dead.close()
        assert len(rows_of(other, tmp_path / "other.db")) > 2
        assert [one.is_new for one in await imported(other, tmp_path / "x.jsonl", data)] == [True]
        assert await exported(other) == data
        with pytest.raises(StoreUnavailable, match="Import the file again"):
            await other.database.write(lambda sql: intake.add(sql, here, piece, now_ms=1))
