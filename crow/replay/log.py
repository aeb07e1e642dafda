"""A path of the log as the store of a turn that runs again.

What the turn appends must be of the kind that the log has next, and gets its id and time. Texts, results and answers
come from the log. What crow decided (compactions, shortenings, reminders) is what it decides today: if that differs,
the bytes of the next request do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import dropwhile, islice, takewhile
from typing import Annotated, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from crow.agent.compaction.budget import CompactionPolicy
from crow.domain.entries import (
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Entry,
    Mask,
    ModelRequest,
    NewEntry,
    Note,
    Prompt,
    Reminder,
    Started,
    ToolResult,
    TurnEnd,
)
from crow.domain.errors import StoreError
from crow.domain.messages import SentRequest
from crow.domain.text import shorten
from crow.store import SessionChanges, SessionRow, Tail

_TURNS_AHEAD = 5
_STOPPED = ("cancelled", "interrupted", "error")
"""The user, a kill or a full disk may end a turn in this way at any moment."""
_KINDS: dict[type, str] = {
    Checkpoint: "a compaction (summary)",
    Mask: "a compaction (hidden outputs)",
    Reminder: "a reminder",
    Assistant: "an answer",
    ModelRequest: "a request without an answer",
}
_Tokens = Annotated[int, Field(gt=0, le=10**9)]
_Share = Annotated[float, Field(ge=0, le=1)]


class Diverged(StoreError):
    """Today's code does something else than the log says. The message says what."""


class LoggedLimits(BaseModel):
    """What decided about compactions when a request was sent; see `Gauge.recorded`. The record may be hostile."""

    model_config = ConfigDict(frozen=True, strict=True)

    window: _Tokens
    cautious: _Tokens | None = None
    configured: bool = False
    output: _Tokens | None = None
    calibration: float = Field(ge=0.01, le=100.0)
    manual: bool = False
    threshold: _Tokens | _Share | None = None
    target: _Tokens | _Share | None = None
    keep_tokens: _Tokens | None = None

    @property
    def policy(self) -> CompactionPolicy:
        """The user's settings."""
        return CompactionPolicy(
            auto=not self.manual, threshold=self.threshold, target=self.target, keep_tokens=self.keep_tokens
        )


def read_limits(entry: Entry) -> LoggedLimits | None:
    """Return what was recorded with a request, or None if there is no record or if a value in it cannot be true."""
    sent = sent_by(entry)
    try:
        return LoggedLimits.model_validate(sent.limits) if sent is not None else None
    except ValidationError:
        return None


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
        self.difference: str | None = None
        """What the turn does that the log does not say."""
        self.decides = False
        """Whether compactions and shortenings are decided again. Otherwise, they are those of the log."""
        self.changed: Entry | None = None
        """The first entry that the branch has got otherwise than it is in the log."""
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
        self._key, self.has_parked, self.difference = _turn_of(self.ahead[0]), False, None
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

    def before_next(self) -> list[Entry]:
        """Return the entries before the next one that a turn makes by itself."""
        return list(takewhile(lambda entry: not self._is_made(entry.body), self.upcoming()))

    def next_made(self, after: Entry | None = None) -> Body | None:
        """Return the next entry that a turn makes by itself, or the next one after the entry `after`."""
        ahead = self.upcoming()
        if after is not None:
            ahead = islice(dropwhile(lambda entry: entry is not after, ahead), 1, None)
        return next((entry.body for entry in ahead if self._is_made(entry.body)), None)

    def fate_of(self, call: CallRef) -> tuple[bool, tuple[Entry, ToolResult] | None]:
        """Return whether a call was started, and the entry with its result."""
        was_started = False
        for entry in self.upcoming():
            if isinstance(entry.body, ToolResult) and entry.body.call == call:
                return was_started, (entry, entry.body)
            was_started = was_started or (isinstance(entry.body, Started) and entry.body.call == call)
        return was_started, None

    def limits_ahead(self, *, after: int = 0) -> LoggedLimits | None:
        """Return what was recorded with the next request of the turn, or with the next one after the entry `after`."""
        requests = (entry for entry in self.upcoming() if is_request(entry) and entry.id > after)
        request = next(filter(sent_by, requests), None)
        return read_limits(request) if request is not None else None

    def limits_now(self) -> LoggedLimits | None:
        """Return what decides about compactions now: what was recorded with the next request. If nothing was, or until
        an endpoint refuses a request as too long, it is what was recorded with the last one. Then a compaction names
        its own window, because crow may have been started again since the last request."""
        before = [entry.body for entry in takewhile(lambda entry: not is_request(entry), self.upcoming())]
        ahead = self.limits_ahead()
        if ahead is not None and not any(map(_is_overflow, before)):
            return ahead
        limits = self.limits or ahead
        following = next((body for body in before if isinstance(body, Checkpoint | Mask)), None)
        window = None if following is None or _is_overflow(following) else following.window
        return limits.model_copy(update={"window": window, "cautious": window}) if window and limits else limits

    def next_checkpoint(self) -> Checkpoint | None:
        """Return the next checkpoint, also that of the next turn."""
        bodies = (entry.body for entry in self.ahead)
        return next((body for body in bodies if isinstance(body, Checkpoint)), None)

    def _is_made(self, body: Body) -> bool:
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
        ahead, made = self.upcoming(), dict[int, Body]()
        for new in entries:
            if self._is_made(new.body):
                logged = None
                for found in ahead:
                    count += 1
                    if self._is_made(found.body) or (is_request(found) and found.id > self.sent):
                        logged = found
                        break
                self._check_kind(new.body, logged)
                if logged is not None and (self.decides or isinstance(new.body, Reminder)):
                    made[logged.id] = _as_decided(new.body, logged.body)
        if changes is not None and "calibration" in changes:
            self.row = replace(self.row, calibration=changes["calibration"])
        taken = self._take(count)
        today = tuple(replace(entry, body=made.get(entry.id, entry.body)) for entry in taken)
        changed = (now for now, then in zip(today, taken, strict=True) if now != then)
        self.changed = self.changed or next(changed, None)
        return today

    def _check_kind(self, new: Body, logged: Entry | None) -> None:
        """Compare what the turn stores with the next entry that it makes by itself, or with a request before that which
        it has not sent.

        :raises Diverged: it is something else, or the log does not tell.
        """
        then = logged.body if logged is not None else None
        match new, then:
            case Checkpoint(), TurnEnd(stop="cancelled" | "interrupted"):
                # perhaps during the compaction: nothing of it is stored before its summary is complete
                self.has_parked, is_same = True, False
            case TurnEnd(stop=now), TurnEnd(stop=stop):
                is_same = now == stop or stop in _STOPPED
            case TurnEnd(), None:
                is_same = True  # the session went back to the middle of the turn
            case ToolResult(call=call), ToolResult(call=other):
                is_same = call == other
            case _:
                is_same = type(new) is type(then)
        if not is_same:
            self.diverge(f"today {_kind(new)} comes where the log has {named(logged)}")

    def diverge(self, words: str) -> NoReturn:
        """End the turn, because it does not do what the log says. The first reason counts. There are no words if the
        log does not tell how the turn went on.

        :raises Diverged: always.
        """
        if self.difference is None:
            self.difference = "" if self.has_parked else words
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
        if is_request(entry):
            self.limits = read_limits(entry) or self.limits
        return entry

    def _outside(self) -> int:
        """Return how many entries come from outside before the next request. Its own failed attempts do not count, nor
        does what was stored with a checkpoint."""
        before: list[Entry] = []
        for entry in self.upcoming():
            if self._is_made(entry.body) or is_request(entry) or _is_overflow(entry.body):
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
        before = enumerate(self.before_next(), 1)
        return max((number for number, entry in before if _is_overflow(entry.body)), default=0)

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

    async def tail(self, session_id: str = "") -> Tail:  # noqa: ARG002
        """Return the whole path up to here, as it is in the log."""
        self.changed = None
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


def _as_decided(new: Body, logged: Body) -> Body:
    """Return an entry of the log with what today's code decides."""
    if isinstance(new, Assistant | ToolResult) and isinstance(logged, Assistant | ToolResult):
        return replace(logged, cut=new.cut)
    if isinstance(new, Checkpoint) and isinstance(logged, Checkpoint):
        names = {name: getattr(logged, name) for name in ("compaction_id", "method", "model_calls")}
        return replace(new, **names)
    return new if isinstance(new, Mask | Reminder) else logged


def named(entry: Entry | None) -> str:
    """Name an entry of the log in words."""
    return "no further entry" if entry is None else f"{_kind(entry.body)} (entry {entry.id})"


def _kind(body: Body) -> str:
    match body:
        case ToolResult(name=name):
            return f"the result of {shorten(name, 60)}"
        case TurnEnd(stop=stop):
            return f"the end of the turn ({stop})"
        case _:
            return _KINDS.get(type(body), f"an entry of the kind {type(body).__name__}")
