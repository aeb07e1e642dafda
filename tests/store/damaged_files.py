"""A database with a bit of everything, and many damaged copies of it, for the tests of repair.

`check` opens a damaged copy, lists, loads, repairs and loads again. Nothing readable may be lost, every change must be
named, and no id may change.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import count
from pathlib import Path

import pytest

from crow.domain.entries import Entry, Prompt, TurnEnd
from crow.domain.errors import StoreError, StoreUnavailable
from crow.domain.messages import ToolSpec
from crow.store import SessionRow
from crow.store.codec import encode
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.pages import Pages
from crow.store.sqlite.repair import Repaired, repair
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, compress_all, converse, history, new_session, result, said

PAGE_BYTES = 4096
TOKEN = re.compile(r"<\d{5}>")
SESSIONS = ("s1", "s2", "s3", "quiet", "f1", "f2")
NAMED = ("is damaged", "is not a crow database", "could not be read", "is missing from the database", "interrupted")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A database before it is damaged, and what is in it."""

    content: bytes
    rows: Mapping[str, SessionRow]
    histories: Mapping[str, tuple[Entry, ...]]
    entries: Mapping[int, Entry]
    log: bytes = b""
    """A write-ahead log beside the file. `rows` and the rest are what is in both."""

    def __repr__(self) -> str:
        return f"Whole({self.pages} pages)"

    @property
    def pages(self) -> int:
        return len(self.content) // PAGE_BYTES

    def page(self, number: int) -> bytes:
        return self.content[(number - 1) * PAGE_BYTES : number * PAGE_BYTES]

    def entries_on(self, number: int) -> set[int]:
        """The entries of which a part is on this page, or the name of a blob that holds some of them."""
        page = self.page(number).decode("latin-1")
        tokens = set(TOKEN.findall(page))
        return {
            number
            for number, (token, blobs) in self.marks.items()
            if token in tokens or any(name in page for name in blobs)
        }

    @cached_property
    def marks(self) -> Mapping[int, tuple[str, tuple[str, ...]]]:
        """The token of each entry, and the names of the blobs that hold some of it."""
        return {entry.id: (token_of(entry), tuple(encode(entry.body).blobs)) for entry in self.entries.values()}

    def sessions_on(self, number: int) -> set[str]:
        """The sessions whose row is on this page."""
        return {row.id for row in self.rows.values() if f"Title of {row.id}".encode() in self.page(number)}


def words(number: int, size: int) -> str:
    """A text of which every piece says whose it is."""
    return f"<{number:05}> of twigs, " * (size // 18 + 1)


def token_of(entry: Entry) -> str:
    found = TOKEN.search(str(entry.body))
    assert found is not None
    return found[0]


async def build(path: Path, turns: int = 8) -> None:
    """Sessions with small and large results, old ones compressed, an undone turn, forks, a session that was deleted, a
    queued prompt, a share and a token."""
    store = await SqliteStore.open(path)
    await store.learn("http://127.0.0.1:1/v1", "m1", {"context_window": 4_000})
    numbers = count(1)
    for name in ("s1", "s2", "gone", "s3", "quiet"):
        await store.create_session(new_session(name, title=f"Title of {name}", cwd=f"/home/{name}"))
    for turn in range(turns):
        for name in ("s1", "s2", "gone", "s3"):
            user = await begin(store, name, words(next(numbers), 60))
            if turn == 0:
                system = words(next(numbers), 200)
                tools = (ToolSpec(name=system[:7], description=system, input_schema={}),)
                await add(store, name, Prompt(system=system, tools=tools, cwd=system, model="m1"), turn=user.turn)
            for size in (200, 3_000, 6_000, 45_000 if turn % 4 == 0 else 400):
                (answer,) = await add(store, name, said(words(next(numbers), 100), calls=1), turn=user.turn)
                number = next(numbers)
                done = replace(result(answer.id, words(number, size)), raw_output={"end": f"<{number:05}>"})
                await add(store, name, done, turn=user.turn)
            end = TurnEnd(stop="end_turn", detail=words(next(numbers), 1))
            await add(store, name, end, turn=user.turn, release=True)
        if turn == turns // 2 - 1:
            await compress_all(store)
    source, middle = await store.session("s1"), (await history(store, "s1"))[30]
    for name, leaf in (("f1", middle.id), ("f2", source.leaf)):
        await store.create_session(
            new_session(name, conversation=source.conversation, leaf=leaf, title=f"Title of {name}", forked_from="s1")
        )
    user = await begin(store, "f1", words(next(numbers), 90))
    end = TurnEnd(stop="end_turn", detail=words(next(numbers), 1))
    await add(store, "f1", said(words(next(numbers), 90)), end, turn=user.turn, release=True)
    row, before = await store.session("s2"), (await history(store, "s2"))[-15]
    await store.move_leaf("s2", leaf=row.leaf, to=before.id, reason="undo")
    await store.delete_session("gone")
    await store.tidy()
    await store.close()


async def build_whole(path: Path, turns: int = 8) -> Whole:
    """Build the database at `path` and return what is in it."""
    await build(path, turns)
    return await whole_at(path)


async def whole_at(path: Path) -> Whole:
    """Return what is in the closed database at `path`."""
    (content,) = read(path)
    store = await SqliteStore.open(path)
    whole = await content_of(store, content)
    await store.close()
    return whole


async def content_of(store: SqliteStore, content: bytes, log: bytes = b"") -> Whole:
    rows = {name: await store.session(name) for name in SESSIONS}
    histories = {name: await history(store, name) for name in rows}
    found = {entry.id: entry for entries in histories.values() for entry in entries}
    return Whole(content=content, rows=rows, histories=histories, entries=found, log=log)


def read(path: Path, *suffixes: str) -> tuple[bytes, ...]:
    return tuple(Path(f"{path}{suffix}").read_bytes() for suffix in ("", *suffixes))


def write(path: Path, content: bytes, log: bytes = b"") -> None:
    path.write_bytes(content)
    Path(f"{path}-shm").unlink(missing_ok=True)
    if log:
        Path(f"{path}-wal").write_bytes(log)


async def with_log(path: Path, whole: Whole, *turns: str) -> Whole:
    """Return the database with further turns of s1, which only its write-ahead log has."""
    write(path, whole.content)
    store = await SqliteStore.open(path)
    for turn in turns:
        await converse(store, "s1", turn)
    logged = await content_of(store, *read(path, "-wal"))
    await store.close()
    return logged


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A damaged copy. `touched` are its pages that differ, or None if any may. `log` is its write-ahead log."""

    name: str
    content: bytes
    touched: frozenset[int] | None
    log: bytes = b""
    is_empty: bool = False
    """Whether nothing of crow's is left, so that repair refuses the file."""

    of_logged: bool = False
    """Whether this is a copy of the database with a log."""

    may_lack_log: bool = False
    """Whether what only the log had may be lost."""


def corpus(whole: Whole, logged: Whole, other: Whole, seed: int = 0, every: int = 1) -> Iterator[Damaged]:
    """Yield damaged copies: of `whole`, and of `logged`, which has a log. `other` is another database with a log. Of
    the flipped bits, take each `every`-th; if that is not each of them, take a third of the others, too."""
    noise = random.Random(seed)
    step = 3 if every > 1 else 1
    yield from list(_flips(whole, noise))[seed % every :: every]
    yield from list(_cuts(whole))[::step]
    yield from _pages(whole, noise, every)
    yield from list(_logs(logged, other, noise))[::step]
    yield from list(_headers(whole))[::step]


def _flips(whole: Whole, noise: random.Random) -> Iterator[Damaged]:
    """One flipped bit in each kind of cell: in its sizes, types and values, for each table and index."""
    pages = Pages(whole.content)
    for tree, root in sorted(pages.roots.items()):
        leaves = [number for number in pages_of(pages, root) if pages._cells(number)[2]]
        for number in noise.sample(leaves, min(2, len(leaves))):
            _, _, cells = pages._cells(number)
            start = (number - 1) * PAGE_BYTES
            cell = noise.choice(cells)
            places = [0, 4, 8, cell, cell + 1, cell + 2, cell + 3, *(cell + noise.randrange(4, 90) for _ in range(5))]
            for place in places:
                if place < PAGE_BYTES:
                    bit = noise.randrange(8)
                    content = bytearray(whole.content)
                    content[start + place] ^= 1 << bit
                    yield Damaged(
                        name=f"bit {bit} of byte {place} (cell {cell}) of page {number} ({tree})",
                        content=bytes(content),
                        touched=frozenset({number}),
                    )


def pages_of(pages: Pages, root: int) -> Sequence[int]:
    waiting, found = [root], list[int]()
    while waiting:
        number = waiting.pop()
        found.append(number)
        waiting += pages._children(number)
    return found


def _cuts(whole: Whole) -> Iterator[Damaged]:
    size = len(whole.content)
    for part in range(1, 11):
        for more in (0, 1_500):
            end = size * part // 11 // PAGE_BYTES * PAGE_BYTES + more
            yield Damaged(
                name=f"cut at {end} of {size}",
                content=whole.content[:end],
                touched=frozenset(range(end // PAGE_BYTES + 1, whole.pages + 1)),
                is_empty=not has_rows(whole.content[:end]),
            )
            yield Damaged(
                name=f"zeros from {end} of {size}",
                content=whole.content[:end] + bytes(size - end),
                touched=frozenset(range(end // PAGE_BYTES + 1, whole.pages + 1)),
                is_empty=not has_rows(whole.content[:end]),
            )


def _pages(whole: Whole, noise: random.Random, every: int) -> Iterator[Damaged]:
    for number in range(1, whole.pages + 1)[noise.randrange(every) :: every]:
        content = bytearray(whole.content)
        content[(number - 1) * PAGE_BYTES : number * PAGE_BYTES] = bytes(PAGE_BYTES)
        yield Damaged(name=f"page {number} zeroed", content=bytes(content), touched=frozenset({number}))
    for _ in range(40 // every + 2):
        one, two = sorted(noise.sample(range(2, whole.pages + 1), 2))
        content = bytearray(whole.content)
        first = slice((one - 1) * PAGE_BYTES, one * PAGE_BYTES)
        second = slice((two - 1) * PAGE_BYTES, two * PAGE_BYTES)
        content[first], content[second] = content[second], content[first]
        yield Damaged(name=f"pages {one} and {two} swapped", content=bytes(content), touched=frozenset({one, two}))


def _logs(logged: Whole, other: Whole, noise: random.Random) -> Iterator[Damaged]:
    base = Damaged(name="", content=logged.content, touched=frozenset(), log=logged.log, of_logged=True)
    frame = PAGE_BYTES + 24
    frames = (len(logged.log) - 32) // frame
    yield replace(base, name="no log", log=b"", may_lack_log=True)
    for part in (1, 2, 3):
        end = 32 + frames * part // 4 * frame + 700
        yield replace(base, name=f"log cut at {end}", log=logged.log[:end], may_lack_log=True)
    for number in (0, frames // 3, frames // 2, frames - 1):
        for place in (5, 18, 24 + noise.randrange(PAGE_BYTES)):
            log = bytearray(logged.log)
            log[32 + number * frame + place] ^= 1 << noise.randrange(8)
            yield replace(base, name=f"bit in byte {place} of frame {number}", log=bytes(log), may_lack_log=True)
    log = bytearray(logged.log)
    log[9] ^= 4
    yield replace(base, name="bit in the header of the log", log=bytes(log), may_lack_log=True)
    yield replace(base, name="log of another file", log=other.log, may_lack_log=True)
    yield replace(base, name="log of zeros", log=bytes(len(logged.log)), may_lack_log=True)


def _headers(whole: Whole) -> Iterator[Damaged]:
    yield Damaged(name="zeros", content=bytes(len(whole.content)), touched=None, is_empty=True)
    yield Damaged(name="empty", content=b"", touched=None, is_empty=True)
    for at, value in (
        (0, b"X"),
        (16, b"\0\1"),
        (18, b"\7"),
        (20, b"\xff"),
        (28, b"\0\0\0\1"),
        (32, b"\xff\xff\xff\xff"),
    ):
        changed = whole.content[:at] + value + whole.content[at + len(value) :]
        yield Damaged(name=f"header has {value!r} at {at}", content=changed, touched=frozenset({1}))
    for at in (36, 44, 52, 56, 60, 64, 68, 92, 96):
        content = bytearray(whole.content)
        content[at + 3] ^= 0x10
        yield Damaged(name=f"bit in byte {at + 3} of the header", content=bytes(content), touched=frozenset({1}))
    changed = bytes(100) + whole.content[100:]
    yield Damaged(name="no header", content=changed, touched=frozenset({1}))


# what must hold for each of them


async def check(path: Path, damaged: Damaged, whole: Whole) -> Repaired | None:
    """Open, list, load, repair and load again. Return the result of the repair."""
    write(path, damaged.content, damaged.log)
    before = stored_rows(path)
    await check_reads(path)
    write(path, damaged.content, damaged.log)  # opening the file may have emptied the log
    if damaged.is_empty:
        with pytest.raises(StoreUnavailable, match=r"no crow data|is empty"):
            repair(path)
        assert read(path) == (damaged.content,)
        return None
    done = repair(path)
    await check_entries(path, damaged, whole, done)
    again = repair(path)
    assert (again.outcome, again.changes) == ("whole", ()), again
    assert again.sessions == done.sessions
    await check_sessions(path, damaged, whole, done, before)
    return done


async def check_reads(path: Path) -> None:
    """Listing and loading work, or say that the database is damaged."""
    with suppress_named("database of another program", "newer crow"):
        store = await SqliteStore.open(path)
        try:
            with suppress_named():
                for row in (await store.sessions()).rows:
                    with suppress_named():
                        await history(store, row.id)
                        await store.open_session(row.id)
        finally:
            await store.close()


@contextmanager
def suppress_named(*more: str) -> Iterator[None]:
    """What fails in the block says that the database is damaged."""
    try:
        yield
    except StoreError as error:
        if not any(words in str(error) for words in (*NAMED, *more)):
            raise


def stored_rows(path: Path) -> Mapping[int, Mapping[str, object]]:
    """What SQLite reads as rows of sessions before a repair, by number. Empty if SQLite cannot read them."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
            connection.row_factory = sqlite3.Row
            rows = connection.execute("SELECT * FROM sessions NOT INDEXED").fetchall()
            return {row["number"]: dict(row) for row in rows}
    except (sqlite3.Error, UnicodeDecodeError):
        return {}


async def check_entries(path: Path, damaged: Damaged, whole: Whole, done: Repaired) -> None:
    store = await SqliteStore.open(path)
    touched = None if damaged.touched is None else set[int]().union(*map(whole.entries_on, damaged.touched))
    counted = any(" more of the " in line for line in done.lost)
    try:
        for entry in whole.entries.values():
            found = await store.entry(entry.id)
            is_named = any(line.startswith(f"entry {entry.id} ") for line in done.lost)
            if found is None:
                assert damaged.may_lack_log or counted or is_named, entry
            elif found.body != entry.body:
                assert is_named, (entry.id, done)
            else:
                continue
            assert damaged.may_lack_log or touched is None or entry.id in touched, (entry.id, done)
        for name in SESSIONS:
            try:
                await history(store, name)
                await store.open_session(name)
            except StoreError:
                assert damaged.may_lack_log or any(name in line or "sessions" in line for line in done.lost), name
    finally:
        await store.close()


async def check_sessions(
    path: Path, damaged: Damaged, whole: Whole, done: Repaired, before: Mapping[int, Mapping[str, object]]
) -> None:
    store = await SqliteStore.open(path)
    lines = (*done.changes, *done.lost)
    try:
        found = set(await SessionAdmin(store).ids())
        assert found <= set(whole.rows), (found, done)
        for name in set(whole.rows) - found:
            assert any(f"session {name}" in line or "more sessions" in line for line in lines), (name, done)
        for name in found:
            row = await store.session(name)
            for field in fields(row):
                value, truth = getattr(row, field.name), getattr(whole.rows[name], field.name)
                if value != truth and not damaged.may_lack_log:
                    assert any(name in line for line in lines) or is_unseen(name, field.name, before, value), (
                        f"{name}: {field.name} is {value!r}, was {truth!r}",
                        done,
                    )
            await store.open_session(name)
        if "s3" in found:
            await converse(store, "s3", "and on it goes")
    finally:
        await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")


def is_unseen(name: str, column: str, before: Mapping[int, Mapping[str, object]], value: object) -> bool:
    """Whether the damaged row already had this value, so that nothing shows that it is wrong."""
    return any(
        str(row.get(column)) in (str(value), str(int(value)) if isinstance(value, bool) else "")
        for row in before.values()
    )


def has_rows(content: bytes) -> bool:
    """Whether a row of a session or an entry is in these pages."""
    return any(len(row.values) >= 18 for row in Pages(content).rows())
