"""A turn that a program runs in a stored session. The program holds the session until the turn ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import anyio
import anyio.lowlevel

from crow.agent import new_message_id
from crow.domain.entries import Announcement, Assistant, Body, CallRef, NewEntry, Prompt, ToolResult, TurnEnd, User
from crow.domain.errors import ArgumentError, StoreUnavailable
from crow.domain.messages import Part, ToolCall
from crow.sessions.openai import AnswerParts, ReadMessage, ResultParts, SystemText, UserParts, read_message, read_spent
from crow.store import SessionRow, Store, TurnStart

_RENEW_S = 20.0
_T = TypeVar("_T")


class Turn:
    """A turn of a session. No other process can run a turn of the session before this one ends. The methods may be
    called by several tasks at the same time."""

    def __init__(self, store: Store, row: SessionRow, start: TurnStart, leaf: int | None) -> None:
        self.number = start.turn
        """The number of the turn in its session."""
        self.leaf = leaf
        """The id of the entry that was stored last, or None if the session is empty."""
        self._store = store
        self._row = row
        self._lock = asyncio.Lock()
        """Lets one task at a time check and store messages."""
        self._open: dict[str, tuple[CallRef, ToolCall]] = {}
        """The calls of the last answer that have no result yet."""
        self._is_over = False

    @property
    def open_calls(self) -> tuple[str, ...]:
        """The ids of the calls that have no result yet."""
        return tuple(self._open)

    async def append(
        self, *messages: object, usage: object = None, model: str | None = None, cost: float | None = None
    ) -> tuple[int, ...]:
        """Store messages, and return the ids of their entries. Each message is on disk when this method returns.

        A message is a mapping in the form of OpenAI's chat completions API, or such an object of the package `openai`.
        `usage` (also in OpenAI's form), `model` and `cost` (US dollars) belong to the last message, which must then be
        an answer. An answer may also have members with these names.

        :raises ~crow.domain.errors.ArgumentError: a message is not valid, or does not fit here: the error names the
            member and its value. Nothing was stored.
        :raises ~crow.domain.errors.LeafMoved: another process took over the session, because this process was stopped
            or cut off for too long.
        """
        read = [read_message(message, _place(index, messages)) for index, message in enumerate(messages)]
        if (usage, model, cost) != (None, None, None):
            last = read[-1] if read else None
            if not isinstance(last, AnswerParts):
                raise ArgumentError("usage, model and cost belong to an assistant message, which must be the last one.")
            given, own = read_spent(usage, model, cost), last.spent
            spent = replace(given, usage=given.usage or own.usage, model=given.model or own.model)
            read[-1] = replace(last, spent=replace(spent, cost=own.cost if spent.cost is None else spent.cost))
        async with self._lock:
            if self._is_over:
                raise ArgumentError("The turn is over; begin another one.")
            _check_pairs(read, self._open)
            return await self.store(read)

    async def store(self, messages: Sequence[ReadMessage]) -> tuple[int, ...]:
        """Store messages that `read_message` and `_check_pairs` have checked, and return the ids of their entries."""
        ids: list[int] = []
        waiting: list[NewEntry] = []
        for message in messages:
            waiting.append(self._entry(message))
            if isinstance(message, AnswerParts) and message.calls:  # results name the entry of their answer
                ids += await self._store_entries(waiting)
                waiting = []
                self._open = {
                    call.id: (CallRef(assistant=ids[-1], index=at), call) for at, call in enumerate(message.calls)
                }
        return (*ids, *await self._store_entries(waiting))

    async def _store_entries(self, entries: Sequence[NewEntry]) -> list[int]:
        if not entries:
            return []
        stored = await _finished(self._store.append(self._row.id, leaf=self.leaf, turn=self.number, entries=entries))
        self.leaf = stored[-1].id
        answered = {entry.body.call for entry in stored if isinstance(entry.body, ToolResult)}
        self._open = {call_id: (ref, call) for call_id, (ref, call) in self._open.items() if ref not in answered}
        return [entry.id for entry in stored]

    def _entry(self, message: ReadMessage) -> NewEntry:
        body: Body
        match message:
            case SystemText(text=text):
                body = Prompt(system=text, tools=(), cwd=self._row.cwd, model=self._row.model)
            case UserParts(parts=parts):
                body = User(parts=parts, message_id=new_message_id())
            case AnswerParts(spent=spent):
                body = Assistant(
                    text=message.text,
                    thought=message.thought,
                    reasoning_field=message.reasoning_field,
                    message_id=new_message_id(),
                    calls=message.calls,
                    finish=message.finish,
                    announcements=tuple(Announcement(title=call.name) for call in message.calls),
                )
                model = spent.model or self._row.model
                return NewEntry(body=body, model=model, usage=spent.usage, cost=spent.cost)
            case ResultParts():
                ref, call = self._open[message.call_id]
                body = ToolResult(
                    call=ref,
                    name=call.name,
                    text=message.text,
                    images=message.images,
                    is_error=message.is_error,
                    announcement=Announcement(title=call.name),
                )
        return NewEntry(body=body, model=self._row.model)

    async def end(self, end: TurnEnd) -> None:
        """End the turn, so that other processes can run the next one. A second call has no effect."""
        await _finished(self._end(end))

    async def _end(self, end: TurnEnd) -> None:
        async with self._lock:
            if self._is_over:
                return
            self._is_over = True
            entries = [NewEntry(body=end)]
            try:
                await self._store.append(self._row.id, leaf=self.leaf, turn=self.number, entries=entries, release=True)
            except BaseException:
                self._store.disown(self._row.id, leaf=self.leaf, turn=self.number, end=entries)
                raise


@asynccontextmanager
async def turn_of(store: Store, session_id: str, parts: tuple[Part, ...] | None) -> AsyncIterator[Turn]:
    """Claim a turn for the block, and end it after the block. `parts` is the prompt of the turn, if it has one.

    :raises ~crow.domain.errors.SessionBusy: another living process runs a turn; nothing was stored.
    :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
    """
    turn = await _claim(store, session_id, parts)
    renewing = asyncio.create_task(_renew(store, session_id))
    try:
        yield turn
    except BaseException as error:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        detail = "" if is_cancelled else type(error).__name__
        with suppress(Exception):  # raise the error of the block, even if the turn cannot be ended
            await turn.end(TurnEnd(stop="cancelled" if is_cancelled else "error", detail=detail))
        raise
    else:
        await turn.end(TurnEnd(stop="end_turn"))
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])


async def _claim(store: Store, session_id: str, parts: tuple[Part, ...] | None) -> Turn:
    async def claim() -> Turn:
        row = await store.session(session_id)
        message_id = None if parts is None else new_message_id()
        start = await store.take_turn(session_id, message_id, leaf=row.leaf, parts=parts)
        leaf = start.entries[-1].id if start.entries else row.leaf
        if start.moved and not start.entries:
            leaf = (await store.session(session_id)).leaf  # this store owns the turn, so nobody moves the leaf now
        return Turn(store, row, start, leaf)

    claiming = asyncio.ensure_future(claim())
    try:
        return await _finished(claiming)
    except asyncio.CancelledError:
        with suppress(Exception):  # the caller was cancelled, so nobody will use the turn
            await claiming.result().end(TurnEnd(stop="cancelled"))
        raise


async def _renew(store: Store, session_id: str) -> None:
    """Renew the session's claim until cancelled, so that other machines see that this process is alive."""
    while True:
        await asyncio.sleep(_RENEW_S)
        with suppress(StoreUnavailable):
            await store.renew_lease(session_id)


async def _finished(work: Awaitable[_T]) -> _T:
    """Await `work` to its end and return its result. If the caller is cancelled meanwhile, raise the cancellation only
    after the end, so that the state of the turn matches the database."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # a cancelled scope of anyio would cancel each of the next awaits, too
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
    try:
        if cancelled is not None:
            raise cancelled
        await anyio.lowlevel.checkpoint_if_cancelled()
    except asyncio.CancelledError:
        with suppress(BaseException):  # the cancellation is the error to raise
            running.result()
        raise
    return running.result()


def turns_in(messages: Sequence[object]) -> list[list[ReadMessage]]:
    """Check messages, and divide them into turns. Each prompt begins a turn. System messages before the first prompt
    belong to the turn of that prompt.

    :raises ~crow.domain.errors.ArgumentError: a message is not valid, or does not fit there.
    """
    turns: list[list[ReadMessage]] = []
    for index, message in enumerate(messages):
        read = read_message(message, _place(index, messages))
        is_first_prompt = bool(turns) and all(isinstance(one, SystemText) for one in turns[-1])
        if not turns or (isinstance(read, UserParts) and not is_first_prompt):
            turns.append([])
        turns[-1].append(read)
    for turn in turns:
        _check_pairs(turn, {})
    return turns


def _check_pairs(messages: Sequence[ReadMessage], waiting: Mapping[str, object]) -> None:
    """Check that each result answers a call of the answer before it. `waiting` are the calls that have no result yet.

    :raises ~crow.domain.errors.ArgumentError: a result has no call, or an answer or a prompt comes before the results
        of all earlier calls.
    """
    calls = set(waiting)
    for message in messages:
        match message:
            case ResultParts(call_id=call_id, place=place):
                if call_id not in calls:
                    expected = ", ".join(sorted(calls)) or "no call waits for a result"
                    raise ArgumentError(
                        f'{place}.tool_call_id is "{call_id:.80}"; expected a call without a result ({expected}).'
                    )
                calls.remove(call_id)
            case AnswerParts() | UserParts() if calls:
                missing = ", ".join(sorted(calls))
                raise ArgumentError(f"The results of earlier calls must come before the next message: {missing:.200}.")
            case AnswerParts():
                calls = {call.id for call in message.calls}
            case SystemText() | UserParts():
                pass


def _place(index: int, messages: Sequence[object]) -> str:
    return "message" if len(messages) == 1 else f"messages[{index}]"
