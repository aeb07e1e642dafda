"""How a caller follows a session that another process writes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import anyio

from crow.domain.entries import Entry
from crow.domain.errors import StoreUnavailable
from crow.store import SessionRow

_PAUSE_S = 0.5
_LARGEST_ID = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The saved part of an answer that is still streaming, from its beginning."""

    message_id: str
    text: str
    thought: str


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What has changed in a session.

    `entries` are those that the session has stored since the last news, in the order in which they were stored. The
    parent of the first of them is not the last entry of the news before if the session was moved to another leaf in
    between; a move that stored no entry shows only in `row.leaf`. `draft` is None while no answer is streaming.

    If `is_elsewhere`, another store runs a turn. If `is_orphaned`, that store is dead; `open_session` repairs that. If
    `is_cancelled`, another store has asked to cancel the turn that is running.
    """

    row: SessionRow
    entries: tuple[Entry, ...]
    draft: Draft | None
    is_elsewhere: bool
    is_orphaned: bool
    is_cancelled: bool


class Watcher(Protocol):
    """A store that tells of changes."""

    def watch(self, session_id: str, *, after: int = 0) -> AsyncGenerator[News, None]:
        """Follow a session, whichever process writes it. The first news come at once. They have the entries that the
        session has stored with ids greater than `after`, in batches of bounded size. More news come whenever something
        has changed. A caller that is slow gets fewer and larger ones. The changes that this store makes are included.

        While the database cannot be reached, no news come. The next ones continue where the last ones ended.

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
class Look:
    """What one read found: `entries` after an entry, with `has_more` if that is not all, and the `pieces` after a piece
    of the draft at the leaf. Without `has_draft`, no answer is streaming."""

    row: SessionRow
    entries: tuple[Entry, ...]
    has_more: bool
    pieces: Sequence[Piece]
    has_draft: bool
    is_elsewhere: bool
    is_orphaned: bool
    is_cancelled: bool


async def follow(
    look: Callable[[int, int], Awaitable[Look]],
    wait: Callable[[], Awaitable[object]],
    is_closed: Callable[[], bool],
    *,
    after: int,
) -> AsyncGenerator[News, None]:
    """Yield news from what `look` finds after an entry and after a piece of the draft. `wait` returns when something
    may have changed since the last look."""
    after = max(0, min(after, _LARGEST_ID))
    draft: Draft | None = None
    last_piece = 0
    told: News | None = None
    while True:
        try:
            found = await look(after, last_piece)
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
        news = News(
            row=found.row,
            entries=found.entries,
            draft=draft,
            is_elsewhere=found.is_elsewhere,
            is_orphaned=found.is_orphaned,
            is_cancelled=found.is_cancelled,
        )
        if found.entries:
            after = found.entries[-1].id
        state = replace(news, entries=())
        if news.entries or state != told:
            told = state
            yield news
        if not (found.has_more and found.entries):
            await wait()
