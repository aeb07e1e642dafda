"""The store of a turn that is replayed. It stores nothing: when the turn appends an entry, it gets back the next such
entry of the log.

The appended entry must be of the same kind as the entry of the log, whose id, time and content are used. Only
compactions, shortenings and reminders keep the content that today's code gave them. If that content differs from the
log, the bytes of the next request differ too, and the replay reports this request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
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
"""How a turn ends if the user cancels it, crow is killed or the disk is full. A replay cannot repeat that, so today's
turn may end in another way."""
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
    """Today's code does something other than the log says. The message says what."""


class LoggedLimits(BaseModel):
    """The limits that decided about compactions when a request was sent, as `Gauge.recorded` stored them. They may come
    from an imported file, so each value is checked."""

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


def _read_limits(entry: Entry) -> LoggedLimits | None:
    """Return the limits stored with a request. Return None if there are none or if a value is out of range."""
    sent = sent_by(entry)
    try:
        return LoggedLimits.model_validate(sent.limits) if sent is not None else None
    except ValidationError:
        return None


def sent_by(entry: Entry) -> SentRequest | None:
    """If an entry holds the answer to a request, or the usage of a request without an answer, return how this request
    was sent. Return None for other entries, and if the log does not tell."""
    body = entry.body
    return body.sent if isinstance(body, Assistant | ModelRequest) else None


def is_request(entry: Entry) -> bool:
    """Return whether an entry holds the answer to a request of the conversation, or the usage of such a request that
    failed. Requests for summaries and titles do not count."""
    return isinstance(entry.body, Assistant) or (
        isinstance(entry.body, ModelRequest) and entry.body.purpose == "answer"
    )


class LoggedStore:
    """The log of one path of a session, with the methods of a store that a :class:`crow.agent.history.branch.Branch`
    calls while a turn runs.

    The replay goes through the path once. `ahead` has the entries that it has not reached. `append` takes the next
    entries from `ahead` and gives them to the branch.

    Some entries are made by the turn itself, which must append each of them: answers, results, reminders, the end of
    the turn, and compactions if `decides` is true. All other entries, such as prompts and notes, come from outside the
    turn. `append` takes them when it reaches them, even if the turn does not append them.
    """

    def __init__(
        self,
        row: SessionRow,
        path: Callable[[], AsyncIterator[Entry]],
        *,
        is_from_file: bool,
    ) -> None:
        """Each call of `path` yields all entries of the path."""
        self.row = replace(row, calibration=1.0, mode="ask", leaf=None, config={}, permissions=())
        self.ahead: deque[Entry] = deque()
        """The entries that were not taken yet: the rest of this turn, and the next turns."""
        self.has_parked = False
        """Whether the turn has reached the point at which the log says that it was cancelled or killed."""
        self.difference: str | None = None
        """How the turn differs from the log, in words. None: it does not differ. Empty: the turn was ended, but there
        is nothing to report, because the log does not tell how the turn went on, or because a request that differs was
        already reported."""
        self.decides = False
        """Whether compactions and shortened results are used as today's code makes them. Otherwise, they come from the
        log, because the log was imported from a file or does not say which limits held."""
        self.changed: Entry | None = None
        """The first taken entry whose content, as today's code makes it, differs from its content in the log."""
        self.limits: LoggedLimits | None = None
        """The limits of the newest request that was taken."""
        self.endpoint = ""
        """The endpoint of the newest answer that was taken."""
        self.sent = 0
        """The id of the log's entry for the newest request that the turn has sent."""
        self._path, self._source, self._is_from_file = path, path(), is_from_file
        self._key = ("", 0)
        """The session and the number of the turn that is replayed."""
        self._turns_ahead = 0
        """The number of turns with entries in `ahead`."""
        self._to_take = 0
        """How many entries the next call of `append` takes. If 0, `append` decides this itself."""

    async def fill(self) -> bool:
        """Read the next turns into `ahead`. Return False at the end of the path."""
        while self._turns_ahead < _TURNS_AHEAD and (entry := await anext(self._source, None)) is not None:
            newest = self.ahead[-1] if self.ahead else None
            self._turns_ahead += newest is None or _turn_of(newest) != _turn_of(entry)
            self.ahead.append(entry)
        return bool(self.ahead)

    def begin_turn(self) -> None:
        """Prepare for the turn that the next entry belongs to."""
        self._key, self.has_parked, self.difference = _turn_of(self.ahead[0]), False, None
        ahead = next(filter(is_request, self.upcoming()), None)
        if ahead is not None and (sent := sent_by(ahead)) is not None and sent.endpoint != self.endpoint:
            self.endpoint, self.limits = sent.endpoint, None
        self.decides = self.limits_ahead() is not None and not self._is_from_file

    def upcoming(self) -> Iterator[Entry]:
        """Yield the entries of the turn that are still to come, until its end."""
        for entry in self.ahead:
            if _turn_of(entry) != self._key:
                return
            yield entry
            if isinstance(entry.body, TurnEnd):
                return

    def before_next(self) -> list[Entry]:
        """Return the entries before the next entry that the turn makes itself."""
        return list(takewhile(lambda entry: not self._is_made(entry.body), self.upcoming()))

    def next_made(self, after: Entry | None = None) -> Body | None:
        """Return the body of the next entry that the turn makes itself. If `after` is given, look only at the entries
        behind that entry. Return None if there is no such entry."""
        ahead = self.upcoming()
        if after is not None:
            ahead = islice(dropwhile(lambda entry: entry is not after, ahead), 1, None)
        return next((entry.body for entry in ahead if self._is_made(entry.body)), None)

    def fate_of(self, call: CallRef) -> tuple[bool, tuple[Entry, ToolResult] | None]:
        """Return whether the log says that a call was started, and the entry and body of the call's result. Instead of
        the entry and body, return None if the log has no result."""
        was_started = False
        for entry in self.upcoming():
            if isinstance(entry.body, ToolResult) and entry.body.call == call:
                return was_started, (entry, entry.body)
            was_started = was_started or (isinstance(entry.body, Started) and entry.body.call == call)
        return was_started, None

    def limits_ahead(self, *, after: int = 0) -> LoggedLimits | None:
        """Return the limits stored with the turn's next request whose entry id is greater than `after`. Requests
        without a record of how they were sent are skipped."""
        requests = (entry for entry in self.upcoming() if is_request(entry) and entry.id > after)
        request = next(filter(sent_by, requests), None)
        return _read_limits(request) if request is not None else None

    def limits_now(self) -> LoggedLimits | None:
        """Return the limits that decide about compactions now.

        Normally, these are the limits stored with the next request. If there are none, or if the log first has a
        compaction because the endpoint refused a request as too long, the limits of the last request still hold. But
        crow may have been restarted since the last request, and may then have assumed another window. So if a
        compaction for another reason comes before the next request, the window is the one stored with this compaction.
        """
        before = [entry.body for entry in takewhile(lambda entry: not is_request(entry), self.upcoming())]
        ahead = self.limits_ahead()
        if ahead is not None and not any(map(_is_overflow, before)):
            return ahead
        limits = self.limits or ahead
        following = next((body for body in before if isinstance(body, Checkpoint | Mask)), None)
        window = None if following is None or _is_overflow(following) else following.window
        return limits.model_copy(update={"window": window, "cautious": window}) if window and limits else limits

    def next_checkpoint(self) -> Checkpoint | None:
        """Return the next checkpoint in the log, even if it belongs to a later turn."""
        bodies = (entry.body for entry in self.ahead)
        return next((body for body in bodies if isinstance(body, Checkpoint)), None)

    def _is_made(self, body: Body) -> bool:
        if isinstance(body, Checkpoint | Mask):
            return self.decides
        return isinstance(body, Assistant | ToolResult | Reminder | TurnEnd)

    def take_next(self, count: int) -> None:
        """Let the next call of `append` take this many entries, whatever they are."""
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
        """Take the entries of the log that correspond to `entries`, and the entries before them that came from outside:
        prompts of the user, texts of hooks, notes. If `entries` is empty, take only the next entries from outside.
        After `take_next`, take exactly the number of entries given there. Return the taken entries.

        :raises Diverged: the log has other entries here.
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
        """Check that `new`, the body that the turn appends, is of the same kind as `logged`. `logged` is the next entry
        of the log that the turn makes itself, or an earlier entry of a request that today's turn has not sent. It is
        None if the log has neither.

        :raises Diverged: the kinds differ, or the log does not tell how the turn went on.
        """
        then = logged.body if logged is not None else None
        match new, then:
            case Checkpoint(), TurnEnd(stop="cancelled" | "interrupted"):
                # The turn may have been cancelled during this compaction, which stores nothing until it is complete.
                self.has_parked, is_same = True, False
            case Checkpoint() | Mask(), Assistant(sent=None):
                self.diverge("")  # a kill left no record of the limits with which crow decided not to compact
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
        """End the turn because it does not do what the log says. `words` are the reason. If this is called again, the
        first reason counts. If the logged turn was cancelled or killed here, the reason becomes empty, since the log
        does not tell how that turn would have gone on.

        :raises Diverged: always.
        """
        if self.difference is None:
            self.difference = "" if self.has_parked else words
        raise Diverged(self.difference)

    def _take(self, count: int) -> tuple[Entry, ...]:
        return tuple(self._take_one() for _ in range(count))

    def _take_one(self) -> Entry:
        entry = self.ahead.popleft()
        self._turns_ahead -= not self.ahead or _turn_of(self.ahead[0]) != _turn_of(entry)
        self.row = replace(self.row, leaf=entry.id, mode=_mode_at(self.row.mode, entry))
        if isinstance(entry.body, Assistant):
            self.endpoint = entry.body.endpoint or self.endpoint
        if is_request(entry):
            self.limits = _read_limits(entry) or self.limits
        return entry

    def _outside(self) -> int:
        """Return how many entries from outside come next. Failed attempts of the next request do not count, and neither
        do the prompt entry and the requests that are stored together with a checkpoint."""
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
        """If the log has compactions here because the endpoint refused the next request as too long, return the number
        of entries up to and including the last of them. Return 0 if there is no such compaction, or if today's code
        decides about compactions."""
        before = enumerate(self.before_next(), 1)
        return max((number for number, entry in before if _is_overflow(entry.body)), default=0)

    def mode_ahead(self) -> str:
        """Return the mode that the log sets before the next request, or an empty string if it sets none."""
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
        """Return all entries of the path up to here, as they are in the log."""
        self.changed = None
        entries = [entry async for entry in self._path() if entry.id <= (self.row.leaf or 0)]
        return Tail(row=self.row, entries=tuple(entries))

    async def save_draft(self, session_id: str, **piece: object) -> None:
        """Save nothing."""


def _turn_of(entry: Entry) -> tuple[str, int]:
    return entry.session, entry.turn


def _is_overflow(body: Body) -> bool:
    return isinstance(body, Checkpoint | Mask) and body.reason == "overflow"


def _mode_at(mode: str, entry: Entry) -> str:
    """Return the mode after an entry. Before it, the mode was `mode`."""
    match entry.body:
        case Note(about="mode", value=value) | Checkpoint(mode=value) if value:
            return value
        case _:
            return mode


def _as_decided(new: Body, logged: Body) -> Body:
    """Combine `new`, the body that today's turn appends, with the body in the log. Answers and results come from the
    log, except for the place where a text is cut. Reminders and compactions are `new`, but a summary keeps the id,
    method and number of model calls that it has in the log."""
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
