"""The store on SQLite.

Strategy: every method is one function on one connection, given to the thread of the writer (in a transaction) or of the
reader (on a snapshot); what the functions do is said in the files that they come from. Bodies are turned into JSON
before the transaction begins. Knows the clock and who owns this store; no SQL of its own.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crow.domain.entries import Entry, NewEntry
from crow.domain.errors import LeafMoved, NoSuchSession, SessionBusy, StoreUnavailable
from crow.domain.messages import Part
from crow.store import (
    Hit,
    Move,
    NewSession,
    Outline,
    QueuedPrompt,
    Scan,
    Scope,
    SessionChanges,
    SessionPage,
    SessionRow,
    Store,
    Tail,
    TurnStart,
)
from crow.store.codec import Encoded, encode, encode_parts
from crow.store.sqlite import append as turns
from crow.store.sqlite import maintenance as removal
from crow.store.sqlite import paths, sessions
from crow.store.sqlite import paths as branches
from crow.store.sqlite import sessions as endpoints
from crow.store.sqlite.database import Database, JournalMode
from crow.store.sqlite.lease import Owner, enlist, retire
from crow.store.sqlite.paths import missing_entry, session_row
from crow.store.sqlite.search import scan, search

__all__ = ["SqliteStore"]

logger = logging.getLogger(__name__)

_IDS_PER_READ = 4_096
_ENTRIES_PER_REMOVAL = 50
_LARGEST_ID = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """The end of a turn that could not be stored."""

    leaf: int | None
    turn: int
    entries: tuple[tuple[NewEntry, Encoded], ...]


class SqliteStore(Store):
    """A :class:`~crow.store.Store` in one file. Closed by whoever opened it."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._owner = owner
        self._disowned: dict[str, _End] = {}
        # facts by base URL and model, each with when they were read: after what others wrote, and this store learned
        self._learned: dict[tuple[str, str], tuple[tuple[int, int], Mapping[str, object]]] = {}
        self._times_learned = 0

    @classmethod
    async def open(
        cls, path: Path, *, owner: str | None = None, journal_mode: JournalMode = "wal", busy_timeout_s: float = 10.0
    ) -> SqliteStore:
        """Open the database, made if there is none.

        `owner` is the text of an :class:`~crow.store.sqlite.lease.Owner`, by default this process. `busy_timeout_s`
        bounds how long a write waits for other programs.

        :raises ~crow.domain.errors.StoreUnavailable: it cannot be made, opened or read, or is no crow database.
        :raises ~crow.domain.errors.StoreTooNew: a newer crow wrote it.
        """
        database = await Database.open(path, journal_mode=journal_mode, busy_timeout_s=busy_timeout_s)
        try:
            store = cls(database, owner or str(await database.call(Owner.current)))
        except BaseException:  # whoever fails to open closes what was opened
            await database.close()
            raise
        enlist(store._owner)
        return store

    @property
    def owner(self) -> str:
        """The text of who this store is."""
        return self._owner

    @property
    def warning(self) -> str:
        return self._database.warning

    @property
    def database(self) -> Database:
        """The file, for what people do with old sessions."""
        return self._database

    async def create_session(self, new: NewSession) -> SessionRow:
        return await self._database.write(lambda sql: sessions.create_session(sql, new, now_ms=_now_ms()), begins=True)

    async def fork_session(
        self, session_id: str, new_id: str, *, entry: int | None, cwd: str, additional_directories: tuple[str, ...]
    ) -> SessionRow:
        return await self._database.write(
            lambda sql: sessions.fork_session(
                sql,
                session_id,
                new_id,
                entry=entry,
                cwd=cwd,
                additional_directories=additional_directories,
                now_ms=_now_ms(),
            ),
            begins=True,
        )

    async def named(self, alias: str) -> SessionRow | None:
        return await self._database.read(lambda sql: sessions.named(sql, alias), begins=True)

    async def move_alias(self, session_id: str, to: str) -> None:
        await self._database.write(lambda sql: sessions.move_alias(sql, session_id, to, now_ms=_now_ms()))

    async def session(self, session_id: str) -> SessionRow:
        return await self._database.read(lambda sql: session_row(sql, session_id))

    async def sessions(
        self, *, cwd: str | None = None, cursor: str | None = None, limit: int = 50, archived: bool = False
    ) -> SessionPage:
        return await self._database.read(
            lambda sql: sessions.list_sessions(sql, cwd=cwd, cursor=cursor, limit=limit, archived=archived),
            begins=True,
        )

    async def update_session(self, session_id: str, changes: SessionChanges) -> SessionRow:
        def change(sql: sqlite3.Connection) -> SessionRow:
            session_row(sql, session_id)
            sessions.change_session(sql, session_id, changes, now_ms=_now_ms())
            return session_row(sql, session_id)

        return await self._database.write(change)

    async def delete_session(self, session_id: str) -> None:
        await self._database.write(lambda sql: sessions.delete_session(sql, session_id, now_ms=_now_ms()), begins=True)

    async def open_session(self, session_id: str) -> Tail:
        def look(sql: sqlite3.Connection) -> Tail | None:
            if session_id in self._disowned or turns.is_abandoned(sql, self._owner, session_id, now_ms=_now_ms()):
                return None
            return paths.tail(sql, session_id)

        tail = await self._database.read(look, begins=True)
        if tail is None and self._database.is_read_only:
            tail = await self.tail(session_id)
        if tail is None:

            def repair(sql: sqlite3.Connection) -> None:
                self._leave(sql, session_id)
                turns.repair(sql, self._owner, session_id, now_ms=_now_ms())

            try:
                await self._database.write(repair)
                self._disowned.pop(session_id, None)
            except StoreUnavailable as error:  # a full disk, say: what is there can be read
                logger.warning("Session %s is opened as it is: %s", session_id, error)
            tail = await self.tail(session_id)
        return tail

    async def tail(self, session_id: str) -> Tail:
        return await self._database.read(lambda sql: paths.tail(sql, session_id))

    async def history(self, session_id: str) -> AsyncIterator[Sequence[Entry]]:
        row = await self.session(session_id)
        start, missing = row.leaf, None
        newest_first = array("q")  # eight bytes an entry: a path may have a hundred thousand
        while start is not None:
            ids, start, missing = await self._database.read(_ids_before(start, row.conversation))
            newest_first.extend(ids)
        newest_first.reverse()
        if missing is not None:
            yield (missing_entry(missing, row.conversation, session_id),)
        done = 0
        while done < len(newest_first):
            batch, taken = await self._database.read(_entries_of(newest_first[done : done + _IDS_PER_READ]))
            done += taken
            yield batch

    async def entry(self, entry_id: int, *, session_id: str | None = None) -> Entry | None:
        if not 0 < entry_id <= _LARGEST_ID:
            return None

        def look(sql: sqlite3.Connection) -> Entry | None:
            if session_id is None or paths.is_on_path(sql, session_row(sql, session_id).leaf, entry_id):
                return paths.entry(sql, entry_id)
            return None

        return await self._database.read(look)

    async def enqueue(self, session_id: str, parts: Sequence[Part], message_id: str) -> None:
        encoded = encode_parts(parts)
        await self._database.write(
            lambda sql: turns.enqueue(
                sql, self._owner, session_id, parts=encoded, message_id=message_id, now_ms=_now_ms()
            ),
            begins=True,
        )

    async def queued(self, session_id: str) -> tuple[QueuedPrompt, ...]:
        def look(sql: sqlite3.Connection) -> tuple[QueuedPrompt, ...]:
            session_row(sql, session_id)
            return turns.queued(sql, session_id)

        return await self._database.read(look)

    async def drop_prompt(self, session_id: str, message_id: str) -> None:
        await self._database.write(lambda sql: turns.drop_prompt(sql, session_id, message_id))

    async def take_turn(
        self,
        session_id: str,
        message_id: str | None,
        *,
        leaf: int | None,
        parts: Sequence[Part] | None = None,
        cut: int | None = None,
    ) -> TurnStart:
        def take(sql: sqlite3.Connection) -> TurnStart:
            self._leave(sql, session_id)
            return turns.take_turn(
                sql, self._owner, session_id, message_id, parts=parts, leaf=leaf, cut=cut, now_ms=_now_ms()
            )

        start = await self._database.write(take, begins=True)
        self._disowned.pop(session_id, None)
        return start

    async def append(
        self,
        session_id: str,
        *,
        leaf: int | None,
        turn: int,
        entries: Sequence[NewEntry],
        release: bool = False,
        changes: SessionChanges | None = None,
    ) -> tuple[Entry, ...]:
        encoded = [(entry, encode(entry.body)) for entry in entries]

        def work(sql: sqlite3.Connection) -> tuple[Entry, ...]:
            now_ms = _now_ms()
            stored = turns.append(
                sql, self._owner, session_id, leaf=leaf, turn=turn, entries=encoded, release=release, now_ms=now_ms
            )
            if changes is not None:
                sessions.change_session(sql, session_id, changes, now_ms=now_ms)
            return stored

        return await self._database.write(work)

    async def renew_lease(self, session_id: str) -> None:
        await self._database.write(lambda sql: turns.renew_lease(sql, self._owner, session_id, now_ms=_now_ms()))

    def disown(self, session_id: str, *, leaf: int | None, turn: int, end: Sequence[NewEntry]) -> None:
        encoded = tuple((entry, encode(entry.body)) for entry in end)
        self._disowned[session_id] = _End(leaf=leaf, turn=turn, entries=encoded)

    def _leave(self, sql: sqlite3.Connection, session_id: str) -> None:
        """Store the end of a turn that nobody runs any more; else make it one whose owner is dead."""
        end = self._disowned.get(session_id)
        if end is None:
            return
        try:
            turns.append(
                sql,
                self._owner,
                session_id,
                leaf=end.leaf,
                turn=end.turn,
                entries=end.entries,
                release=True,
                now_ms=_now_ms(),
            )
        except (LeafMoved, SessionBusy, NoSuchSession):
            turns.leave(sql, self._owner, session_id)

    async def move_leaf(self, session_id: str, *, leaf: int | None, to: int | None, reason: str) -> None:
        await self._database.write(
            lambda sql: turns.move_leaf(sql, self._owner, session_id, leaf=leaf, to=to, reason=reason, now_ms=_now_ms())
        )

    async def count_messages(self, session_ids: Sequence[str]) -> Mapping[str, int]:
        return await self._database.read(lambda sql: paths.count_messages(sql, session_ids))

    async def moves(self, session_id: str) -> tuple[Move, ...]:
        return await self._database.read(lambda sql: branches.moves(sql, session_id))

    async def outline(self, session_id: str) -> Outline:
        return await self._database.read(lambda sql: branches.outline(sql, session_id))

    async def left_behind(self, leaf: int | None, to: int | None, kinds: Collection[str]) -> tuple[Entry, ...]:
        return await self._database.read(lambda sql: branches.left_behind(sql, leaf, to, kinds))

    async def file_changes(self, leaf: int | None, to: int | None) -> tuple[Entry, ...]:
        return await self._database.read(lambda sql: branches.file_changes(sql, leaf, to))

    async def save_draft(
        self, session_id: str, *, after_leaf: int | None, turn: int, message_id: str, text: str, thought: str
    ) -> None:
        await self._database.write(
            lambda sql: turns.save_draft(
                sql,
                self._owner,
                session_id,
                after_leaf=after_leaf,
                turn=turn,
                message_id=message_id,
                text=text,
                thought=thought,
                now_ms=_now_ms(),
            )
        )

    async def search(
        self, query: str, *, session_id: str | None = None, scope: Scope | None = None, limit: int = 20
    ) -> tuple[Hit, ...]:
        return await self._database.read(
            lambda sql: search(sql, query, session_id=session_id, scope=scope or Scope(), limit=limit)
        )

    async def scan(
        self, query: str, *, session_id: str, limit: int = 20, without: Collection[str] = frozenset()
    ) -> Scan:
        return await self._database.read(
            lambda sql: scan(sql, query, session_id=session_id, limit=limit, without=without)
        )

    async def learned(self, base_url: str, model: str) -> Mapping[str, object]:
        version = (self._database.foreign_version, self._times_learned)
        known = self._learned.get((base_url, model))
        if known is None or known[0] != version:
            known = version, await self._database.read(lambda sql: endpoints.learned(sql, base_url, model))
            self._learned[base_url, model] = known
        return known[1]

    async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        try:
            await self._database.write(lambda sql: endpoints.learn(sql, base_url, model, facts))
        finally:
            self._times_learned += 1

    async def tidy(self) -> None:
        undisturbed, has_removed = True, False
        while undisturbed and (found := await self._database.read(_next_removal)) is not None:
            undisturbed, has_removed = await self._remove(found), True
        is_first = has_removed
        while has_removed:
            has_removed = await self._database.write(_forget_words(is_first))
            is_first = False
        while await self._database.vacuum():
            pass
        await self._database.checkpoint()

    async def _remove(self, found: removal.Removal) -> bool:
        """Remove it all; false if a session that lives came in between: the next `tidy` goes on."""
        for start in range(0, len(found.entries), _ENTRIES_PER_REMOVAL):
            some = found.entries[start : start + _ENTRIES_PER_REMOVAL]
            if not await self._database.write(_remove_entries(found, some)):
                return False
        return await self._database.write(lambda sql: removal.remove_rows(sql, found))

    def hurry(self) -> None:
        self._database.hurry()

    async def close(self) -> None:
        try:
            await self._database.close()
        finally:
            retire(self._owner)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _ids_before(
    start: int, conversation: int
) -> Callable[[sqlite3.Connection], tuple[list[int], int | None, int | None]]:
    return lambda sql: paths.ids_before(sql, start, _IDS_PER_READ, conversation=conversation)


def _entries_of(ids: Sequence[int]) -> Callable[[sqlite3.Connection], tuple[tuple[Entry, ...], int]]:
    return lambda sql: paths.entries_of(sql, ids)


def _next_removal(sql: sqlite3.Connection) -> removal.Removal | None:
    return removal.next_removal(sql, now_ms=_now_ms())


def _remove_entries(found: removal.Removal, ids: Sequence[int]) -> Callable[[sqlite3.Connection], bool]:
    return lambda sql: removal.remove_entries(sql, found, ids)


def _forget_words(is_first: bool) -> Callable[[sqlite3.Connection], bool]:
    return lambda sql: removal.forget_words(sql, is_first=is_first)
