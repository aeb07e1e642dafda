"""The Python API for reading stored sessions; see `docs/python-api.md`."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio.to_thread

from crow.domain.conversation import for_model
from crow.domain.entries import Checkpoint, Entry, Mask, Restore
from crow.domain.errors import ArgumentError
from crow.llm.chat.encode import ChatEncoder
from crow.llm.dialect import Dialect
from crow.settings import load_settings
from crow.store import Scope, SessionRow, Store
from crow.store.admin import Admin
from crow.store.codec import tags_of
from crow.store.transcript import Transcript

__all__ = ["SearchHit", "Session", "Sessions"]

_PAGE = 200
_PLAIN = Dialect(reasoning="none", opaque=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    """A search result: a title, a prompt or an answer that matches."""

    session_id: str
    entry: int
    """The id of the matching entry."""
    kind: str
    """`title`, `user` (a prompt) or `assistant` (an answer)."""
    snippet: str
    """The text around the match."""
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A stored session. The attributes show the state at the time when this object was read. The methods read the
    current state.

    Times are in UTC. Tokens and cost include subagents.
    """

    id: str
    title: str | None
    alias: str | None
    workspace_path: str
    model: str
    mode: str
    message_count: int
    """The number of prompts and answers."""
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost: float
    """In US dollars."""
    created_at: datetime
    updated_at: datetime
    archived: bool
    parent_id: str | None
    """If this is the session of a subagent: the id of the session for which the subagent works."""
    forked_from: str | None
    """If this session is a fork: the id of the original session."""
    metadata: Mapping[str, Any]
    _admin: Admin = field(repr=False, compare=False)
    _store: Store = field(repr=False, compare=False)

    @property
    def tags(self) -> tuple[str, ...]:
        """The session's tags, in alphabetical order."""
        return tags_of(self.metadata)

    async def messages(self) -> list[dict[str, Any]]:
        """Return the whole conversation as messages of OpenAI's chat completions API. Compactions are ignored.

        The first message is the system message. Thoughts are left out. If a tool call has no result, the list contains
        a result that says so.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        compactions = (Checkpoint, Mask, Restore)
        return await _openai_messages([one async for one in self.entries() if not isinstance(one.body, compactions)])

    async def context(self) -> list[dict[str, Any]]:
        """Return the messages that the model would get now. After a compaction, the summary replaces the messages that
        were compacted.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        return await _openai_messages((await self._store.tail(self.id)).entries)

    async def entries(self) -> AsyncIterator[Entry]:
        """Yield all entries on the session's path, oldest first. `crow.domain.entries` lists the kinds of `Entry.body`.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        async for batch in self._store.history(self.id):
            for entry in batch:
                yield entry

    def export(self) -> AsyncIterator[bytes]:
        """Yield the parts of a file from which `crow sessions import` can import this session. The file contains all
        branches, subagents, images, and the earlier contents of changed files.

        :raises ~crow.domain.errors.StoreUnavailable: the session was deleted meanwhile.
        """
        return self._admin.export([self.id])

    async def markdown(self) -> AsyncIterator[str]:
        """Yield the parts of a Markdown transcript of the session, with thoughts, diffs and whole results.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        transcript = Transcript(is_full=True)
        yield transcript.head(await self._store.session(self.id))
        async for entry in self.entries():
            yield transcript.feed(entry)


class Sessions:
    """The stored sessions, for reading only. Other processes may write to the database at the same time."""

    def __init__(self, store: Store, admin: Admin) -> None:
        self._store = store
        self._admin = admin

    @classmethod
    @asynccontextmanager
    async def open(cls, path: str | os.PathLike[str] | None = None) -> AsyncIterator[Sessions]:
        """Open the database at `path`, which is the path of a SQLite file or the URL of a PostgreSQL database.

        The default is the database that crow itself uses. `crow config` prints its path or URL.

        :raises ~crow.domain.errors.StoreUnavailable: there is no such database, it cannot be read, it is not a database
            of crow, or an older crow wrote it.
        :raises ~crow.domain.errors.StoreTooNew: a newer crow wrote it.
        :raises ~crow.domain.errors.ArgumentError: the URL is not valid, or the driver for PostgreSQL is not installed.
        """
        from crow import adapters  # this import takes longer than all others here

        place = None if path is None else os.fspath(path)
        store = await adapters.open_store_at(load_settings({}, os.environ), place, to_read=True)
        try:
            yield cls(store, adapters.open_admin(store))
        finally:
            await store.close()

    async def list(
        self, *, workspace: str | os.PathLike[str] | None = None, archived: bool = False, limit: int | None = None
    ) -> tuple[Session, ...]:
        """Return the sessions that have at least one prompt, newest first, without subagents.

        With `workspace`, only sessions that work in this directory are returned. With `archived`, only archived
        sessions are returned. Without `archived`, archived sessions are left out.

        :raises ~crow.domain.errors.ArgumentError: `limit` is below 1.
        """
        if limit is not None and limit < 1:
            raise ArgumentError(f"limit is {limit}; expected 1 or more, or None for all sessions.")
        cwd, cursor = _directory(workspace), None
        found: list[Session] = []
        while True:
            size = _PAGE if limit is None else min(_PAGE, limit - len(found))
            page = await self._store.sessions(cwd=cwd, cursor=cursor, limit=size, archived=archived)
            found += await self._sessions(page.rows)
            cursor = page.cursor
            if cursor is None or len(found) == limit:
                return tuple(found)

    async def get(self, name: str) -> Session:
        """Return the session with this id or alias. `name` may also be the beginning of an id, or a whole title, if it
        fits no other session.

        :raises ~crow.domain.errors.ArgumentError: `name` matches no session, or several.
        """
        row = await self._store.session(await self._admin.find(name))
        return (await self._sessions([row]))[0]

    async def search(
        self,
        query: str,
        *,
        workspace: str | os.PathLike[str] | None = None,
        model: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 20,
    ) -> tuple[SearchHit, ...]:
        """Search titles, prompts and answers for all words of `query`. Matching titles come first, then matching
        entries. Newer entries come before older ones.

        With `model`, only sessions are searched whose model has `model` in its name. With `since`, matches before that
        time are left out. With `until`, matches at or after that time are left out. A time without a time zone is local
        time.
        """
        scope = Scope(
            cwd=_directory(workspace),
            model=model,
            since_ms=None if since is None else round(since.timestamp() * 1000),
            before_ms=None if until is None else round(until.timestamp() * 1000),
        )
        hits = await self._store.search(query, scope=scope, limit=limit)
        return tuple(
            SearchHit(
                session_id=hit.session,
                entry=hit.entry,
                kind=hit.kind,
                snippet=hit.snippet,
                created_at=_time(hit.created_ms),
            )
            for hit in hits
        )

    def export(self) -> AsyncIterator[bytes]:
        """Yield the parts of one file from which `crow sessions import` can import all sessions, including archived
        ones."""
        return self._admin.export(None)

    async def _sessions(self, rows: Sequence[SessionRow]) -> tuple[Session, ...]:
        counts = await self._store.count_messages([row.id for row in rows])
        return tuple(
            Session(
                id=row.id,
                title=row.title,
                alias=row.alias,
                workspace_path=row.cwd,
                model=row.model,
                mode=row.mode,
                message_count=counts[row.id],
                tokens_in=row.tokens_in,
                tokens_out=row.tokens_out,
                tokens_cached=row.tokens_cached,
                cost=row.cost,
                created_at=_time(row.created_ms),
                updated_at=_time(row.updated_ms),
                archived=row.archived,
                parent_id=row.parent_id,
                forked_from=row.forked_from,
                metadata=row.metadata,
                _admin=self._admin,
                _store=self._store,
            )
            for row in rows
        )


async def _openai_messages(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return entries as messages. The work is done in a thread, because it may take long for a long session."""

    def render() -> list[dict[str, Any]]:
        sent = ChatEncoder().messages(for_model(entries).messages, endpoint="", dialect=_PLAIN)
        messages: list[dict[str, Any]] = json.loads(b"[" + b",".join(sent) + b"]")
        return messages

    return await anyio.to_thread.run_sync(render)


def _directory(workspace: str | os.PathLike[str] | None) -> str | None:
    return None if workspace is None else str(_path(workspace))


def _path(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


def _time(unix_ms: int) -> datetime:
    return datetime.fromtimestamp(unix_ms / 1000, UTC)
