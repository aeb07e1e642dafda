"""A path of the log as the store of a turn that runs again.

What the turn appends is compared with the next entry of the log, and the turn gets that entry: its id, its time, its
text. So the turn works on the entries of the log, however much of it is decided again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import dropwhile, islice, takewhile
from typing import NoReturn

from crow.agent.compaction.budget import CompactionPolicy
from crow.domain.entries import (
    Assistant,
    Body,
    Checkpoint,
    Entry,
    Mask,
    ModelRequest,
    NewEntry,
    Note,
    Prompt,
    Reminder,
    ToolResult,
    TurnEnd,
)
from crow.domain.errors import StoreError
from crow.domain.messages import JsonObject, SentRequest
from crow.domain.text import describe, on_one_line, quote, shorten
from crow.store import SessionChanges, SessionRow, Tail

_TURNS_AHEAD = 5
_MOST_TOKENS = 10**9
_CALIBRATION = (0.01, 100.0)
_FROM_THE_MODEL = frozenset({"compaction_id", "method", "model_calls", "summary"})
"""Fields of a checkpoint that are not computed, except for the summary of notes taken without a model."""


class Diverged(StoreError):
    """Today's code does something else than the log says. The message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLimits:
    """What decided about compactions when a request was sent; see `Gauge.recorded`."""

    window: int
    cautious: int
    is_configured: bool
    output: int | None
    calibration: float
    policy: CompactionPolicy

    @classmethod
    def read(cls, stored: JsonObject) -> LoggedLimits | None:
        """Return the record, or None if there is none or if a value in it cannot be true."""
        window, calibration = _tokens(stored.get("window")), stored.get("calibration")
        low, high = _CALIBRATION
        if window is None or not isinstance(calibration, int | float) or not low <= calibration <= high:
            return None
        return cls(
            window=window,
            cautious=_tokens(stored.get("cautious")) or window,
            is_configured=stored.get("configured") is True,
            output=_tokens(stored.get("output")),
            calibration=float(calibration),
            policy=CompactionPolicy(
                auto=stored.get("manual") is not True,
                threshold=_share(stored.get("threshold")),
                target=_share(stored.get("target")),
                keep_tokens=_tokens(stored.get("keep_tokens")),
            ),
        )


def _tokens(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _MOST_TOKENS else None


def _share(value: object) -> float | None:
    """Return a setting that is a share of the window (a float) or a number of tokens (an integer)."""
    if isinstance(value, float):
        return value if math.isfinite(value) and 0 <= value <= 1 else None
    return _tokens(value)


def sent_by(entry: Entry) -> SentRequest | None:
    """Return how the request of an entry was sent, or None if it holds none or the log does not tell."""
    body = entry.body
    return body.sent if isinstance(body, Assistant | ModelRequest) else None


def is_request(entry: Entry) -> bool:
    """Return whether an entry is that of a request in the conversation."""
    return isinstance(entry.body, Assistant) or (
        isinstance(entry.body, ModelRequest) and entry.body.purpose == "answer"
    )


class LoggedStore:
    """One path of a session. It has what a :class:`crow.agent.history.branch.Branch` needs while a turn runs."""

    def __init__(
        self,
        row: SessionRow,
        source: AsyncIterator[Entry],
        until: Callable[[int], Awaitable[Sequence[Entry]]],
        *,
        is_case: bool,
    ) -> None:
        """`source` yields the entries of the path. `until` returns those up to an entry again."""
        self.row = replace(row, calibration=1.0, mode="ask", leaf=None, config={}, permissions=())
        self.ahead: deque[Entry] = deque()
        """The entries that the turn has not made yet: this turn, and some that follow."""
        self.taken = 0
        """How many entries the branch has got."""
        self.has_parked = False
        """The log does not go on where the turn is, because it was cancelled or killed there."""
        self.difference = ""
        """What the turn does that the log does not say."""
        self.decides = False
        """Whether compactions are decided again. Otherwise, they are those of the log."""
        self.limits: LoggedLimits | None = None
        """Those of the newest request that the branch has got."""
        self.endpoint = ""
        """That of the newest answer."""
        self.sent = 0
        """The id of the newest request that the turn has sent."""
        self._source, self._until, self._is_case = source, until, is_case
        self._key = ("", 0)
        self._turns_ahead = 0
        self._to_take = 0

    async def fill(self) -> bool:
        """Read ahead. Return False at the end of the path."""
        while self._turns_ahead < _TURNS_AHEAD and (entry := await anext(self._source, None)) is not None:
            newest = self.ahead[-1] if self.ahead else None
            self._turns_ahead += newest is None or _turn_of(newest) != _turn_of(entry)
            self.ahead.append(entry)
        return bool(self.ahead)

    def begin_turn(self) -> None:
        """Begin with the turn of the next entry."""
        first = self.ahead[0]
        self._key, self.has_parked, self.difference = _turn_of(first), False, ""
        ahead = next(filter(is_request, self.upcoming()), None)
        if ahead is not None and (sent := sent_by(ahead)) is not None and sent.endpoint != self.endpoint:
            self.endpoint, self.limits = sent.endpoint, None
        self.decides = self.limits_ahead() is not None and not self._is_case

    def upcoming(self) -> Iterator[Entry]:
        """Yield the entries of the turn that are still to come, until its end."""
        for entry in self.ahead:
            if _turn_of(entry) != self._key:
                return
            yield entry
            if isinstance(entry.body, TurnEnd):
                return

    def next_compared(self, after: Entry | None = None) -> Entry | None:
        """Return the next entry that a turn makes by itself."""
        ahead = (
            self.upcoming()
            if after is None
            else islice(dropwhile(lambda entry: entry is not after, self.upcoming()), 1, None)
        )
        return next((entry for entry in ahead if self._is_compared(entry.body)), None)

    def limits_ahead(self, *, after: int = 0) -> LoggedLimits | None:
        """Return what was recorded with the next request of the turn, or with the next one after the entry `after`."""
        requests = (entry for entry in self.upcoming() if is_request(entry) and entry.id > after)
        sent = next((sent for entry in requests if (sent := sent_by(entry))), None)
        return LoggedLimits.read(sent.limits) if sent is not None else None

    def limits_now(self) -> LoggedLimits | None:
        """Return what decides about compactions now: what was recorded with the next request or, until an endpoint
        refuses a request as too long, with the last one. A compaction before that refusal names its own window, because
        crow may have been started again since the last request."""
        before = [entry.body for entry in takewhile(lambda entry: not is_request(entry), self.upcoming())]
        if self.limits is None or not any(map(_is_overflow, before)):
            return self.limits_ahead() or self.limits
        following = next(body for body in before if isinstance(body, Checkpoint | Mask))
        window = None if _is_overflow(following) else _tokens(following.window)
        return replace(self.limits, window=window, cautious=window) if window is not None else self.limits

    def next_checkpoint(self) -> Checkpoint | None:
        """Return the next checkpoint, also that of the next turn."""
        bodies = (entry.body for entry in self.ahead)
        return next((body for body in bodies if isinstance(body, Checkpoint)), None)

    def _is_compared(self, body: Body) -> bool:
        if isinstance(body, Checkpoint | Mask):
            return self.decides
        return isinstance(body, Assistant | ToolResult | Reminder | TurnEnd)

    def take_next(self, count: int) -> None:
        """Take this many entries with the next call of `append`, whatever they are."""
        self._to_take = count

    async def append(
        self,
        session_id: str,  # noqa: ARG002
        *,
        leaf: int | None,  # noqa: ARG002
        turn: int,  # noqa: ARG002
        entries: Sequence[NewEntry],
        release: bool = False,
        changes: SessionChanges | None = None,
    ) -> tuple[Entry, ...]:
        """Return the entries of the log in place of `entries`, after those that came from outside: prompts of the user,
        texts of hooks, notes. Without `entries`, return only the latter.

        :raises Diverged: the log has something else.
        """
        count, self._to_take = self._to_take, 0
        if count:
            return self._take(count)
        if release and self.has_parked:
            return ()
        if not entries:
            return self._take(self._outside())
        ahead = self.upcoming()
        for new in entries:
            if self._is_compared(new.body):
                logged = None
                for found in ahead:
                    count += 1
                    if self._is_compared(found.body) or (is_request(found) and found.id > self.sent):
                        logged = found
                        break
                self._compare(new.body, logged)
        if changes is not None and "calibration" in changes:
            self.row = replace(self.row, calibration=changes["calibration"])
        return self._take(count)

    def _compare(self, new: Body, logged: Entry | None) -> None:
        """Compare what the turn stores with the next entry that it makes by itself, or with a request before that which
        it has not sent.

        :raises Diverged: they differ, or the log does not tell.
        """
        end = logged.body if logged is not None else None
        if isinstance(new, Checkpoint) and isinstance(end, TurnEnd) and end.stop in ("cancelled", "interrupted"):
            # perhaps during the compaction: nothing of it is stored before its summary is complete
            self.has_parked = True
            self.diverge("")
        if words := _difference(new, logged, are_sizes_known=self.decides):
            self.diverge(words)

    def diverge(self, words: str) -> NoReturn:
        """End the turn, because it does not do what the log says. The first reason counts. There are no words if the
        log does not tell how the turn went on.

        :raises Diverged: always.
        """
        self.difference = self.difference or ("" if self.has_parked else words)
        raise Diverged(self.difference)

    def _take(self, count: int) -> tuple[Entry, ...]:
        return tuple(self._take_one() for _ in range(count))

    def _take_one(self) -> Entry:
        entry = self.ahead.popleft()
        self.taken += 1
        self._turns_ahead -= not self.ahead or _turn_of(self.ahead[0]) != _turn_of(entry)
        self.row = replace(self.row, leaf=entry.id, mode=_mode_at(self.row.mode, entry))
        if isinstance(entry.body, Assistant):
            self.endpoint = entry.body.endpoint or self.endpoint
        if (sent := sent_by(entry)) and is_request(entry) and (limits := LoggedLimits.read(sent.limits)):
            self.limits = limits
        return entry

    def _outside(self) -> int:
        """Return how many entries come from outside before the next request. Its own failed attempts do not count, nor
        does what was stored with a checkpoint."""
        before: list[Entry] = []
        for entry in self.upcoming():
            if self._is_compared(entry.body) or is_request(entry) or _is_overflow(entry.body):
                if isinstance(entry.body, Checkpoint) and before and isinstance(before[-1].body, Prompt):
                    before.pop()
                while isinstance(entry.body, Checkpoint) and before and isinstance(before[-1].body, ModelRequest):
                    before.pop()
                break
            before.append(entry)
        return len(before)

    def overflowed(self) -> int:
        """Return how many entries come up to the last compaction that follows the refusal of the next request, if that
        compaction is not decided again."""
        before = list(takewhile(lambda entry: not self._is_compared(entry.body), self.upcoming()))
        return max((number for number, entry in enumerate(before, 1) if _is_overflow(entry.body)), default=0)

    def mode_ahead(self) -> str:
        """Return the mode at the next request if the log has a new one before it, or an empty string."""
        before = takewhile(lambda entry: not isinstance(entry.body, Assistant), self.upcoming())
        return reduce(_mode_at, before, "")

    async def session(self, session_id: str) -> SessionRow:  # noqa: ARG002
        """Return the row."""
        return self.row

    async def update_session(self, session_id: str, changes: SessionChanges) -> SessionRow:  # noqa: ARG002
        """Change the row's calibration. Nothing else is changed while a turn runs."""
        self.row = replace(self.row, calibration=changes.get("calibration", self.row.calibration))
        return self.row

    async def tail(self, session_id: str) -> Tail:  # noqa: ARG002
        """Return the whole path up to here."""
        return Tail(row=self.row, entries=tuple(await self._until(self.row.leaf or 0)))

    async def save_draft(self, session_id: str, **piece: object) -> None:
        """Save nothing."""


def _turn_of(entry: Entry) -> tuple[str, int]:
    return entry.session, entry.turn


def _is_overflow(body: Body) -> bool:
    return isinstance(body, Checkpoint | Mask) and body.reason == "overflow"


def _mode_at(mode: str, entry: Entry) -> str:
    """Return the mode after an entry."""
    match entry.body:
        case Note(about="mode", value=value) | Checkpoint(mode=value) if value:
            return value
        case _:
            return mode


def _difference(new: Body, entry: Entry | None, *, are_sizes_known: bool = True) -> str:
    """Say how an entry that today's code makes differs from that of the log. Return an empty string if it does not.

    What is shortened is compared only if `are_sizes_known`."""
    match new, entry.body if entry is not None else None:
        case TurnEnd(), None:
            return ""  # the session went back to the middle of the turn
        case TurnEnd(stop=now), TurnEnd(stop=then):
            # the user, a kill or a full disk may end a turn at any moment
            is_same = now == then or then in ("cancelled", "interrupted", "error")
            return "" if is_same else f"the turn ends with {now} today, with {then} in the log"
        case Reminder(text=now), Reminder(text=then):
            return "" if now == then else f"{named(entry)} differs: {_apart(now, then)}"
        case (Assistant(cut=now), Assistant(cut=then)):
            is_same = now == then or not are_sizes_known
            return "" if is_same else f"the calls of {named(entry)} are {_cut(now)} today, {_cut(then)} in the log"
        case (ToolResult(call=call, cut=now), ToolResult(call=other, cut=then)) if call == other:
            is_same = now == then or not are_sizes_known
            return "" if is_same else f"{named(entry)} is {_cut(now)} today, {_cut(then)} in the log"
        case (Checkpoint() as now, Checkpoint() as then) | (Mask() as now, Mask() as then):
            return _between(now, then, entry)
        case _:
            return f"today {_added(new)} comes where the log has {named(entry)}"


def _between(now: Checkpoint | Mask, then: Checkpoint | Mask, entry: Entry | None) -> str:
    """Say in which field a compaction differs."""
    is_computed = isinstance(then, Checkpoint) and then.method == "fallback"
    left_out = _FROM_THE_MODEL - ({"summary"} if is_computed else set())
    for field in fields(now):
        one, other = getattr(now, field.name), getattr(then, field.name)
        if field.name not in left_out and one != other:
            name = field.name.replace("_", " ")
            return f"{named(entry)} differs in its {name}: {describe(one)} today, {describe(other)} in the log"
    return ""


def _added(body: Body) -> str:
    match body:
        case Checkpoint() | Mask():
            full = f"; the context has {body.tokens_before:,} tokens, the threshold is {body.threshold or 0:,}"
            return f"{_kind(body)} (reason: {body.reason}{full})"
        case Reminder(text=text):
            return f"{_kind(body)} ({quote(on_one_line(text))})"
        case _:
            return _kind(body)


def named(entry: Entry | None) -> str:
    """Name an entry of the log in words."""
    return "no further entry" if entry is None else f"{_kind(entry.body)} (entry {entry.id})"


def _kind(body: Body) -> str:
    match body:
        case Checkpoint():
            return "a compaction (summary)"
        case Mask():
            return "a compaction (hidden outputs)"
        case Reminder():
            return "a reminder"
        case Assistant():
            return "an answer"
        case ModelRequest():
            return "a request without an answer"
        case ToolResult(name=name):
            return f"the result of {shorten(name, 60)}"
        case TurnEnd(stop=stop):
            return f"the end of the turn ({stop})"
        case _:
            return f"an entry of the kind {type(body).__name__}"


def _cut(chars: int | None) -> str:
    return "whole" if chars is None else f"shortened to {chars:,} characters"


def _apart(now: str, then: str) -> str:
    """Quote where two texts begin to differ."""
    at = next((at for at, (one, other) in enumerate(zip(now, then, strict=False)) if one != other), None)
    start = max(0, (min(len(now), len(then)) if at is None else at) - 20)
    return f"{quote(on_one_line(now[start:]))} today, {quote(on_one_line(then[start:]))} in the log"
