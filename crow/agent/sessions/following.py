"""Shows the clients of an open session how other processes work on the same session."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import cast, get_args

import anyio

from crow.agent.feed import Feed
from crow.agent.sessions.session import Session
from crow.domain.entries import Command, Entry, StopReason, TurnEnd, User
from crow.domain.errors import CrowError, NoSuchSession, StoreError, StoreUnavailable
from crow.domain.events import EntryStored, Event, PlanChanged, TurnBegan, TurnEnded
from crow.domain.trace_context import use_trace_context
from crow.store import SessionRow, Store, Tail
from crow.store.watching import Draft, News, Watcher

logger = logging.getLogger(__name__)

_OWN_TURN_S = 0.2
"""While this process runs a turn, it checks at this interval, in seconds, for changes by other processes, such as a new
title or a cancellation."""

_TRY_AGAIN_S = 1.0
"""While a prompt waits for another process to end its turn, crow tries at least once in this many seconds to begin the
prompt's turn."""

CATCH_UP_S = 5.0
"""A wait for entries of other processes lasts at most this many seconds."""
_PAUSE_S = 0.5
"""If the store cannot be read, crow tries again after this many seconds."""


class Follower:
    """Follows a session in the store, and shows its clients the entries that other processes add.

    This class implements :class:`crow.agent.sessions.conversation.SessionFollower`. The store reports each entry of the
    session exactly once and in order. Entries that this process stored are skipped, because the clients of this process
    got the updates when the entries were stored. For entries of another process, the clients here get the same updates
    as the clients of that process. They do not get questions or the progress of calls.

    What happens to an entry of another process depends on the state of the session here:

    - If no turn runs in this process, the entry is published at once.
    - If a turn of this process runs, the entries up to `Branch.claimed_to` are published at once, because they were
      stored before the turn. Any later entry means that another process has taken over the turn. Such entries are held,
      and the turn here is ended with an error.
    - When that turn has ended, the held entries are published.

    The owner must call `begin` before the session runs, and then run `run` until the session is closed.
    """

    def __init__(self, session: Session, feed: Feed) -> None:
        self._session = session
        self._feed = feed
        self._turn_number = 0
        """The number of the newest turn of another process whose begin was published."""
        self._message_id: str | None = None
        """The message id of the prompt whose turn another process runs. Empty if it is unknown, None if no such turn
        runs."""
        self._read_to = 0
        """The id of the newest entry that the store has reported."""
        self._seen = 0
        """The id of the newest entry that is published, or that this process stored itself."""
        self._awaited = 0
        """The highest entry id that a caller of `reached` has waited for."""
        self._held: list[Entry] = []
        """Entries of another process that has taken over this process's turn. They are published when the turn here has
        ended."""
        self._lost: int | None = None
        """The `claimed_to` of the newest turn that this process has lost to another process."""
        self._cancelled_turn: int | None = None
        """The number of the newest turn of this process that another process has cancelled."""
        self._is_free = True
        """Whether a turn can be claimed now, according to the last report of the store."""
        self._news = anyio.Event()
        """Set, and replaced by a new event, whenever the store has reported something."""
        self._wake = anyio.Event()
        """Ends the pause of `_rest`."""
        session.branch.be_followed()
        session.branch.on_release = self._hurry

    def begin(self, tail: Tail, draft: Draft | None) -> None:
        """Begin to follow a session that was just opened. If another process runs a turn, `draft` is the unfinished
        answer of that turn."""
        row = tail.row
        self._seen = self._read_to = max(row.newest_entry, row.leaf or 0)
        if row.state != "running":
            return
        self._session.runs_elsewhere, self._is_free = True, False
        self._feed.put(TurnBegan(message_id=""))
        self._message_id = ""
        self._turn_number = tail.entries[-1].turn if tail.entries else 0
        entries = [entry for entry in tail.entries if entry.turn == self._turn_number]
        if any(isinstance(entry.body, TurnEnd) for entry in entries):  # the running turn has stored nothing yet
            entries = []
        for entry in entries:
            if isinstance(entry.body, User) and not self._message_id:
                self._message_id = entry.body.message_id
            self._feed.put(EntryStored(entry=entry))
        if draft is not None:
            for item in self._growth(draft):
                self._feed.put(item)

    async def until_free(self) -> None:
        """See :class:`crow.agent.sessions.conversation.SessionFollower`."""
        with anyio.move_on_after(_TRY_AGAIN_S):
            if self._is_free:  # the store has not reported the other turn yet
                await self._news.wait()
            while not self._is_free:
                await self._news.wait()

    async def reached(self, entry_id: int) -> None:
        """See :class:`crow.agent.sessions.conversation.SessionFollower`."""
        self._awaited = max(self._awaited, entry_id)
        self._hurry()
        with anyio.move_on_after(CATCH_UP_S):
            while self._seen < entry_id:
                await self._news.wait()

    async def catch_up(self, row: SessionRow) -> None:
        """Wait until all entries up to the newest entry of `row` have been published.

        :raises StoreUnavailable: these entries cannot be read now.
        """
        await self.reached(row.newest_entry)
        if self._seen < row.newest_entry:
            raise StoreUnavailable(f"Session {row.id} cannot be read now: the database does not answer. Try again.")

    async def run(self, on_deleted: Callable[[], object]) -> None:
        """Follow the session. If the session is deleted, call `on_deleted` and return."""
        use_trace_context({})
        session = self._session
        while not session.closing:
            try:
                store = cast(Watcher, session.conversation.adapters.store)
                async with aclosing(store.watch(session.id, after=self._read_to)) as all_news:
                    async for news in all_news:
                        await self._take(news)
                        await self._rest(news)
            except NoSuchSession:
                on_deleted()
                return
            except StoreUnavailable as error:
                logger.warning("The changes of other processes to session %s cannot be read now: %s", session.id, error)
            except Exception:
                logger.exception("The changes of other processes to session %s could not be shown", session.id)
            await anyio.sleep(_PAUSE_S)

    def _hurry(self) -> None:
        """Let the loop read the next report of the store at once."""
        self._wake.set()

    async def _rest(self, news: News) -> None:
        """Wait a moment while this process runs a turn, because the store also reports each entry that this process
        writes.

        If another process has taken over the turn, wait until this process has given up the turn, and then show the
        held entries. This method shows them itself, because the store may report nothing more.
        """
        branch = self._session.branch
        self._wake = anyio.Event()
        if self._held:
            while branch.claimed_to is not None:
                with anyio.move_on_after(_OWN_TURN_S):
                    await self._wake.wait()
                self._wake = anyio.Event()
            await self._take(replace(news, entries=()))
        elif branch.claimed_to is not None and self._seen >= self._awaited:
            with anyio.move_on_after(_OWN_TURN_S):
                await self._wake.wait()

    async def _take(self, news: News) -> None:
        """Publish the entries of other processes in `news`, and everything else that has changed with them."""
        session, branch = self._session, self._session.branch
        plan = branch.projection.plan
        foreign = await branch.follow(news)
        claimed_to = branch.claimed_to
        self._held += foreign
        is_foreign = bool(self._held)
        self._read_to = max(self._read_to, news.entries[-1].id if news.entries else 0)
        while self._held and (claimed_to is None or self._held[0].id <= claimed_to):
            await self._show(self._held.pop(0))
        if self._held and claimed_to is not None and claimed_to != self._lost:
            self._lost = claimed_to
            session.lose_turn()
        if claimed_to is None and news.is_elsewhere and news.draft is not None:
            for item in self._growth(news.draft):
                await branch.publish(item)
        for event in branch.told.missing(branch.row):  # other methods of the branch read the row, too
            await branch.publish(event)
        if is_foreign and branch.projection.plan != plan:
            await branch.publish(PlanChanged(plan=branch.projection.plan))
        if is_foreign and not self._held and not news.is_elsewhere:
            with suppress(CrowError):
                await branch.publish(await session.conversation.measured())
        await self._note_state(news, is_own=claimed_to is not None)
        self._seen = self._read_to
        self._news.set()
        self._news = anyio.Event()

    async def _note_state(self, news: News, *, is_own: bool) -> None:
        """Note whether another process runs a turn. Cancel this process's turn if another process asked for it, and end
        a turn whose process has died. `is_own` says whether this process runs a turn."""
        session = self._session
        self._is_free = not news.is_elsewhere or news.is_orphaned
        session.runs_elsewhere = news.is_elsewhere and not is_own
        turn = news.cancelled_turn
        if is_own and turn is not None and turn == session.branch.turn and turn != self._cancelled_turn:
            self._cancelled_turn = turn
            session.cancel()
        # This process claimed or ended the turn, but got no confirmation from the store.
        is_lost = news.row.state == "running" and not news.is_elsewhere
        # If prompts wait, the next turn ends the dead one when it is claimed.
        if (news.is_orphaned or is_lost) and not is_own and not session.queue:
            with suppress(StoreError):
                await session.conversation.adapters.store.open_session(session.id)

    async def _show(self, entry: Entry) -> None:
        """Publish the events of an entry that another process has stored."""
        publish, began = self._session.branch.publish, _began(entry)
        if began is not None and entry.turn > self._turn_number:
            self._turn_number, self._message_id = entry.turn, began.message_id
            await publish(began)
        await publish(EntryStored(entry=entry))
        if isinstance(entry.body, TurnEnd) and self._message_id is not None:
            message_id, self._message_id = self._message_id, None
            await publish(_ended(message_id, entry.body))

    def _growth(self, draft: Draft) -> tuple[Event, ...]:
        """Return the events for the part of `draft` that has not been published yet."""
        return self._feed.growth(draft.message_id, text=draft.text, thought=draft.thought)


async def draft_of(store: Store, tail: Tail) -> Draft | None:
    """Return the unfinished answer of another process's turn, which comes after the entries of `tail`. Return None if
    there is no such answer, or if it cannot be read now."""
    if not store.notifies or tail.row.state != "running":
        return None
    with anyio.move_on_after(CATCH_UP_S):
        async with aclosing(cast(Watcher, store).watch(tail.row.id, after=tail.row.newest_entry)) as all_news:
            async for news in all_news:
                return news.draft if news.row.leaf == tail.row.leaf else None
    return None


def _began(entry: Entry) -> TurnBegan | None:
    """Return the event for clients that a turn began, or None if `entry` does not begin a turn."""
    match entry.body:
        case User(message_id=message_id):
            return TurnBegan(message_id=message_id, stored=entry)
        case Command(text=text, message_id=message_id):
            return TurnBegan(message_id=message_id, typed=text)
        case _:
            return None


def _ended(message_id: str, end: TurnEnd) -> TurnEnded:
    if end.stop in get_args(StopReason):
        return TurnEnded(message_id=message_id, stop=cast(StopReason, end.stop))
    return TurnEnded(message_id=message_id, error=CrowError(end.detail or "The turn was interrupted."))
