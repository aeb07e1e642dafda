"""The methods of `Admin` that are the same for both engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from crow.domain.entries import Entry
from crow.store import SessionRow, Store
from crow.store.admin import Admin, ListedSession, SessionFilter, UnusedSession
from crow.store.codec import from_json, tags_of
from crow.store.portable import FORMAT, Header
from crow.store.transfer import ExportSelection, Lines

UsedRow: TypeAlias = tuple[SessionRow, int]
"""A session, and the time of its last use in Unix milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Sessions to list."""

    rows: Sequence[UsedRow]
    subagents: Mapping[str, Sequence[UsedRow]]
    """Maps the ids of these sessions to their subagents at any depth."""


class SharedAdmin(Admin, ABC):
    """An `Admin` without the methods that depend on the engine. Each abstract method is one transaction."""

    store: Store

    @abstractmethod
    async def listing(self, chosen: SessionFilter, limit: int | None) -> Listing:
        """Return the sessions that `chosen` selects, at most `limit`."""

    @abstractmethod
    async def hide(self, ids: Sequence[str]) -> None:
        """Hide sessions and their subagents. `tidy` removes their data.

        :raises ~crow.domain.errors.SessionBusy: a living process runs a turn in one of these sessions; no session was
            hidden.
        """

    @abstractmethod
    async def hide_unused(self, before_ms: int, cwd: str | None) -> tuple[UnusedSession, ...]:
        """Hide the sessions that `unused_since` lists, and return them."""

    @abstractmethod
    async def family(self, ids: Sequence[str] | None) -> Mapping[int, tuple[str, ...]]:
        """Return the chosen sessions and their subagents, grouped by conversation. If `ids` is None, all sessions that
        `crow sessions` lists are chosen."""

    @abstractmethod
    async def selection(self, conversation: int, sessions: Sequence[str], known: frozenset[str]) -> ExportSelection:
        """Return the part of a conversation that is exported if these sessions are exported. `known` are the ids of all
        sessions in the export file."""

    @abstractmethod
    async def next_entries(self, selected: ExportSelection, start: int) -> tuple[Sequence[Entry], int]:
        """Return the entries for some ids, beginning with `selected.ids[start]`, and how many ids were read.

        :raises ~crow.store.transfer.ExportedSessionDeleted: a session was deleted meanwhile.
        """

    async def listed(self, chosen: SessionFilter, *, limit: int | None = None) -> tuple[ListedSession, ...]:
        found = await self.listing(chosen, limit)
        every = [*found.rows, *(one for several in found.subagents.values() for one in several)]
        ids = [row.id for row, _ in every]
        counts, compacted = await self.store.count_messages(ids), await self.store.compacted(ids)

        def listed(row: SessionRow, used_ms: int) -> ListedSession:
            return ListedSession(
                row=row,
                used_ms=used_ms,
                messages=counts[row.id],
                is_compacted=row.id in compacted,
                subagents=tuple(listed(*one) for one in found.subagents.get(row.id, ())),
            )

        return tuple(listed(*one) for one in found.rows)

    async def prune(self, before_ms: int, cwd: str | None = None) -> tuple[UnusedSession, ...]:
        old = await self.hide_unused(before_ms, cwd)
        await self.store.tidy()
        return old

    async def remove(self, ids: Sequence[str]) -> None:
        await self.hide(ids)
        await self.store.tidy()

    async def export(self, ids: Sequence[str] | None) -> AsyncIterator[bytes]:
        lines = Lines()
        chosen = await self.family(ids)
        known = frozenset(session_id for sessions in chosen.values() for session_id in sessions)
        for sessions in chosen.values():
            for session_id in sessions:
                await self.store.open_session(session_id)  # closes a turn that a dead process left open
        yield lines.records(Header(format=FORMAT))
        for conversation, sessions in chosen.items():
            async for line in self._lines(lines, conversation, sessions, known):
                yield line
        yield lines.end()

    def lines(self, conversation: int, ids: Sequence[str], known: frozenset[str]) -> AsyncIterator[bytes]:
        return self._lines(Lines(), conversation, ids, known)

    async def _lines(
        self, lines: Lines, conversation: int, sessions: Sequence[str], known: frozenset[str]
    ) -> AsyncIterator[bytes]:
        selected = await self.selection(conversation, sessions, known)
        yield lines.records(*selected.head)
        done = 0
        while done < len(selected.ids):
            entries, taken = await self.next_entries(selected, done)
            done += taken
            for line in lines.entries(selected, entries):
                yield line
        yield lines.records(*selected.moves)


def taken_by(chosen: SessionFilter, rows: Iterable[UsedRow], limit: int | None) -> Sequence[UsedRow]:
    """Return the first `limit` of the sessions that `chosen` takes, or all of them if `limit` is None."""
    return list(islice((one for one in rows if chosen.takes(one[0])), limit))


def subagents_by_root(rows: Iterator[tuple[SessionRow, int, str]]) -> Mapping[str, Sequence[UsedRow]]:
    """Group subagents, each with the time of its last use, by the id of the session to which they belong."""
    subagents: dict[str, list[UsedRow]] = {}
    for row, used_ms, root in rows:
        subagents.setdefault(root, []).append((row, used_ms))
    return subagents


def counted_tags(rows: Iterable[Sequence[str]]) -> Mapping[str, int]:
    """Map each tag to the number of sessions that have it, in alphabetical order. Each row has the metadata of a
    session."""
    return dict(sorted(Counter(tag for (metadata,) in rows for tag in tags_of(from_json(metadata, {}))).items()))
