"""Follows a session that any process may change."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import anyio

from crow.domain.entries import Entry
from crow.domain.errors import StoreUnavailable
from crow.store import SessionRow

_REPAIR_AGAIN_S = 1.0
"""If the store that runs a turn is dead, the session is reported again at this interval until the turn is repaired."""
_PAUSE_S = 0.5
_LARGEST_ID = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The part of a streaming answer that has been saved so far."""

    message_id: str
    text: str
    thought: str


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The changes in a session since the previous news."""

    row: SessionRow
    """If the session was moved without new entries, only `row.leaf` has changed."""
    entries: tuple[Entry, ...]
    """The entries that the session has stored since the previous news, oldest first. If the session was moved to
    another leaf since then, the first of these entries does not follow the last entry of the previous news."""
    draft: Draft | None
    """None while no answer is streaming. It is also None if the next `News` has further entries, because the draft
    comes after all entries."""
    is_elsewhere: bool
    """Whether another store runs a turn of the session."""
    is_orphaned: bool
    """Whether the store that ran the turn is dead. If so, `open_session` will repair the turn."""
    cancelled_turn: int | None
    """The number of the running turn, if another store has asked to cancel it."""


class Watcher(Protocol):
    """A store whose sessions can be followed."""

    def watch(self, session_id: str, *, after: int = 0) -> AsyncGenerator[News, None]:
        """Yield a `News` whenever this or another process has changed the session. The first `News` comes immediately.
        The session's entries with ids greater than `after` come in batches of bounded size. If the caller is slow, one
        `News` may cover several changes. While `is_orphaned` is true, a `News` comes now and then although nothing has
        changed, so that a failed repair is tried again.

        While the database cannot be reached, nothing is yielded. When it can be reached again, the next `News` contains
        all changes since the last one.

        :raises ~crow.domain.errors.NoSuchSession: the session does not exist, or was deleted.
        :raises ~crow.domain.errors.StoreUnavailable: this store was closed.
        """


class Piece(NamedTuple):
    """A piece of a draft."""

    seq: int
    message_id: str
    text: str
    thought: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRead:
    """The result of one read of a session."""

    row: SessionRow
    entries: tuple[Entry, ...]
    """The next entries after a given entry."""
    has_more: bool
    """Whether more entries follow."""
    pieces: Sequence[Piece]
    """The pieces of the draft at the leaf that follow a given piece."""
    has_draft: bool
    """False if no answer is streaming."""
    is_elsewhere: bool
    """See `News.is_elsewhere`."""
    is_orphaned: bool
    """See `News.is_orphaned`."""
    cancelled_turn: int | None
    """See `News.cancelled_turn`."""


async def follow(
    read: Callable[[int, int], Awaitable[SessionRead]],
    wait: Callable[[], Awaitable[object]],
    is_closed: Callable[[], bool],
    *,
    after: int,
) -> AsyncGenerator[News, None]:
    """Read a session repeatedly, and yield its changes as news. The arguments of `read` are the id of the last known
    entry and the number of the last known piece of the draft. `wait` returns when the session may have changed. Entries
    with ids up to `after` are known at the beginning."""
    after = max(0, min(after, _LARGEST_ID))
    draft: Draft | None = None
    last_piece = 0
    last_state: News | None = None
    while True:
        try:
            found = await read(after, last_piece)
        except StoreUnavailable:
            if is_closed():
                raise
            await anyio.sleep(_PAUSE_S)
            continue
        if not found.has_draft:
            draft = None
        for piece in found.pieces:
            last_piece = piece.seq
            text, thought = piece.text, piece.thought
            if draft is not None and draft.message_id == piece.message_id:
                text, thought = draft.text + text, draft.thought + thought
            draft = Draft(message_id=piece.message_id, text=text, thought=thought)
        has_more = found.has_more and bool(found.entries)
        news = News(
            row=found.row,
            entries=found.entries,
            draft=None if has_more else draft,
            is_elsewhere=found.is_elsewhere,
            is_orphaned=found.is_orphaned,
            cancelled_turn=found.cancelled_turn,
        )
        if found.entries:
            after = found.entries[-1].id
        state = replace(news, entries=())
        if news.entries or state != last_state or news.is_orphaned:
            last_state = state
            yield news
        if not has_more:
            with anyio.move_on_after(_REPAIR_AGAIN_S if news.is_orphaned else None):
                await wait()
