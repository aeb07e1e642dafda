"""The Python API for stored sessions; see `docs/python-api.md`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from crow.agent import new_session_id
from crow.domain.errors import ArgumentError
from crow.domain.text import describe
from crow.sessions.session import Session, TreeNode, check_json, session_of, sessions_of, time_of
from crow.sessions.turns import Turn
from crow.settings import load_settings
from crow.store import NewSession, Scope, SessionRow, Store
from crow.store.admin import Admin, SessionFilter
from crow.store.codec import merged_metadata, new_tag, tag_name
from crow.store.portable import clean_title
from crow.version import __version__

__all__ = ["SearchHit", "Session", "Sessions", "Totals", "TreeNode", "Turn"]

_ALIAS_CHARS = 200


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
class Totals:
    """Sums over sessions. Tokens and cost include subagents."""

    sessions: int
    messages: int
    """Prompts and answers."""
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost: float
    """In US dollars."""


class Sessions:
    """The stored sessions. Other processes may write to the database at the same time."""

    def __init__(self, store: Store, admin: Admin) -> None:
        self._store = store
        self._admin = admin

    @classmethod
    @asynccontextmanager
    async def open(cls, path: str | os.PathLike[str] | None = None, *, write: bool = False) -> AsyncIterator[Sessions]:
        """Open the database at `path`, which is the path of a SQLite file or the URL of a PostgreSQL database.

        The default is the database that crow itself uses. `crow config` prints its path or URL. With `write`, sessions
        can be changed, and the database is created or updated if need be.

        :raises ~crow.domain.errors.StoreUnavailable: the database cannot be read, or is not a database of crow. Without
            `write` also: there is no such database, or an older crow wrote it.
        :raises ~crow.domain.errors.StoreTooNew: a newer crow wrote it.
        :raises ~crow.domain.errors.ArgumentError: the URL is not valid, or the driver for PostgreSQL is not installed.
        """
        from crow import adapters  # this import takes longer than all others here

        place = None if path is None else os.fspath(path)
        store = await adapters.open_store_at(load_settings({}, os.environ), place, to_read=not write)
        try:
            yield cls(store, adapters.open_admin(store))
        finally:
            await store.close()

    async def create(
        self,
        *,
        workspace: str | os.PathLike[str] | None = None,
        model: str = "",
        title: str | None = None,
        alias: str | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        parent: str | None = None,
    ) -> Session:
        """Create a session and return it. The default of `workspace` is the current directory. Without `model`, crow
        uses its default model when it opens the session. With `parent`, the session is a subagent of that session.

        A session without a prompt, title, alias, tag or metadata is removed after this process has ended.

        :raises ~crow.domain.errors.ArgumentError: a value is not valid, or the alias is taken.
        :raises ~crow.domain.errors.NoSuchSession: there is no session `parent`.
        """
        if alias is not None and not (alias.strip() and len(alias) <= _ALIAS_CHARS and alias.isprintable()):
            raise ArgumentError(f"alias is {describe(alias)}; expected 1 to {_ALIAS_CHARS} visible characters.")
        cleaned = None if title is None else clean_title(title)
        if title is not None and cleaned is None:
            raise ArgumentError(f"title is {describe(title)}; expected at least one visible character.")
        check_json(metadata or {}, "metadata")
        marks = {"tags": dict.fromkeys(map(new_tag, tags), True)} if tags else {}
        if parent is not None:
            await self._store.session(parent)
        new = NewSession(
            id=new_session_id(),
            cwd=str(Path.cwd()) if workspace is None else str(_path(workspace)),
            model=model,
            mode="ask",
            config={"crow": __version__},
            metadata=merged_metadata(merged_metadata({}, metadata or {}), marks),
            parent_id=parent,
            title=cleaned,
            alias=alias,
        )
        row = await self._store.create_session(new)
        return session_of(self._store, self._admin, row, 0, is_compacted=False)

    async def list(
        self,
        *,
        workspace: str | os.PathLike[str] | None = None,
        model: str | None = None,
        title: str = "",
        tags: Sequence[str] = (),
        since: datetime | None = None,
        until: datetime | None = None,
        parent: str | None = None,
        archived: bool = False,
        limit: int | None = None,
    ) -> tuple[Session, ...]:
        """Return the sessions that have at least one prompt and meet all conditions. The one that was used last comes
        first. Subagents are left out. With `parent`, return only the subagents of that session.

        `workspace` is the directory of the sessions. `model` is a part of the name of a model that a session uses or
        has used. `title` is a part of the title. A session must have all `tags`. It must have been used last at or
        after `since`, and before `until`. A time without a time zone is local time. With `archived`, only archived
        sessions are returned. Without it, archived sessions are left out.

        :raises ~crow.domain.errors.ArgumentError: `limit` is below 1.
        """
        if limit is not None:
            _check_limit(limit)
        chosen = SessionFilter(
            directories=None if workspace is None else (str(_path(workspace)),),
            model=model,
            title=title,
            tags=tuple(map(tag_name, tags)),
            since_ms=_unix_ms(since),
            before_ms=_unix_ms(until),
            archived=archived,
        )
        if parent is not None:
            rows = [row for row in await self._store.subagents(parent) if row.has_prompt and _takes(chosen, row)]
            rows.sort(key=lambda row: row.newest_entry, reverse=True)
            return await sessions_of(self._store, self._admin, rows[:limit])
        return tuple(
            session_of(self._store, self._admin, one.row, one.messages, is_compacted=one.is_compacted)
            for one in await self._admin.listed(chosen, limit=limit)
        )

    async def totals(self, **conditions: Any) -> Totals:
        """Return sums over the sessions that `list` returns for the same conditions."""
        found = await self.list(**conditions)
        return Totals(
            sessions=len(found),
            messages=sum(one.message_count for one in found),
            tokens_in=sum(one.tokens_in for one in found),
            tokens_out=sum(one.tokens_out for one in found),
            tokens_cached=sum(one.tokens_cached for one in found),
            cost=sum(one.cost for one in found),
        )

    async def get(self, name: str) -> Session:
        """Return the session with this id or alias. `name` may also be the beginning of an id, or a whole title, if it
        fits no other session.

        :raises ~crow.domain.errors.ArgumentError: `name` matches no session, or several.
        """
        row = await self._store.session(await self._admin.find(name))
        return (await sessions_of(self._store, self._admin, [row]))[0]

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
        entries. Newer entries come before older ones. Return at most `limit` results.

        With `model`, search only the sessions whose model has `model` in its name. With `since`, matches before that
        time are left out. With `until`, matches at or after that time are left out. A time without a time zone is local
        time.

        :raises ~crow.domain.errors.ArgumentError: `limit` is below 1.
        """
        _check_limit(limit)
        cwd = None if workspace is None else str(_path(workspace))
        scope = Scope(cwd=cwd, model=model, since_ms=_unix_ms(since), before_ms=_unix_ms(until))
        hits = await self._store.search(query, scope=scope, limit=limit)
        return tuple(
            SearchHit(
                session_id=hit.session,
                entry=hit.entry,
                kind=hit.kind,
                snippet=hit.snippet,
                created_at=time_of(hit.created_ms),
            )
            for hit in hits
        )

    def export(self) -> AsyncIterator[bytes]:
        """Yield the parts of one file from which `crow sessions import` can import all sessions, including archived
        ones."""
        return self._admin.export(None)


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; expected 1 or more.")


def _takes(chosen: SessionFilter, row: SessionRow) -> bool:
    """Return whether a subagent meets the conditions. Of its models, only the current one counts."""
    return (
        row.archived == chosen.archived
        and (chosen.directories is None or row.cwd in chosen.directories)
        and (chosen.model or "").lower() in row.model.lower()
        and (chosen.since_ms is None or row.updated_ms >= chosen.since_ms)
        and (chosen.before_ms is None or row.updated_ms < chosen.before_ms)
        and chosen.takes(row)
    )


def _path(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


def _unix_ms(time: datetime | None) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)
