"""Groups stored entries into turns, and gives each turn its place in a trace.

All ids are digests of ids in the log, so the same entries always give the same trace, live and later.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crow.domain.entries import CallRef, Entry, ToolResult, TurnEnd, User
from crow.domain.subagents import task_of
from crow.domain.text import shorten
from crow.store import SessionRow

AGENT = "crow"
"""The name of the agent in traces. A subagent without a kind has the name `task`."""

_TRACEPARENT = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2}).*")
_REMEMBERED = 10_000


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """Entries of one turn in the order in which they were stored."""

    trace_id: int
    span_id: int
    parent_id: int | None = None
    is_sampled: bool | None = None
    """If the turn belongs to a trace of the client: whether the client records that trace. Otherwise None."""
    agent: str = AGENT
    number: int
    entries: list[Entry] = field(default_factory=list)
    has_prompt: bool = False
    """Whether the turn has a prompt. Only then does it have a span. The turn of a slash command has neither."""
    is_over: bool = False
    is_held: bool = False
    """Whether this turn of a subagent is held back until the `task` call that started it has a result. The call's span
    then becomes the turn's parent."""
    subagents: list[Turn] = field(default_factory=list)
    """The turns of subagents that began during this turn."""
    before_ms: int = 0
    """The time of the entry before the first one of `entries`, in Unix ms, or 0 if the first one begins the turn."""

    @property
    def root(self) -> int | None:
        """The id of the span that is the parent of everything in the turn, or None if the turn has no span."""
        return self.span_id if self.has_prompt else None

    def take(self) -> Turn:
        """Return a copy of the turn with the entries so far, and remove these entries from this object."""
        taken = replace(self, subagents=[])
        self.entries, self.before_ms = [], self.entries[-1].created_ms
        return taken


class Turns:
    """Groups entries into turns. The entries must be added in the order of their ids."""

    def __init__(self) -> None:
        self._parents: dict[str, tuple[str, str]] = {}
        """Maps a subagent to its parent session and its kind."""
        self._current: dict[str, Turn] = {}
        """Maps each session to its newest turn."""
        self._calls: dict[str, int] = {}
        """Maps a subagent in the background to the span id of the call that started it."""

    def know(self, row: SessionRow) -> None:
        """Remember the parent and the kind of a session if it is a subagent."""
        if row.parent_id:
            kind = row.config.get("agent")
            name = kind.get("name") if isinstance(kind, dict) else None
            self._parents[row.id] = (row.parent_id, shorten(name, 80) if isinstance(name, str) and name else "task")
            _forget_oldest(self._parents)

    def add(self, entries: Iterable[Entry], traceparent: str = "") -> list[Turn]:
        """Add entries that were stored together, and return the turns that are complete now. If entries are added to a
        turn that was returned before, the turn is returned again, with only these entries.

        A turn that begins with one of the entries belongs to the client's trace in the W3C header `traceparent`.
        """
        done: list[Turn] = []
        for entry in entries:
            turn, body = self._current.get(entry.session), entry.body
            if turn is None or turn.number != entry.turn or (turn.is_over and isinstance(body, User)):
                turn = self._begin(entry, traceparent)
            turn.entries.append(entry)
            turn.has_prompt = turn.has_prompt or isinstance(body, User)
            turn.is_over = turn.is_over or isinstance(body, TurnEnd)
            if isinstance(body, ToolResult) and (task := task_of(body)) is not None:
                done += self._link(task, id_of_call(body.call))
            if turn.is_over:
                done += [turn, *turn.subagents]
                for subagent in turn.subagents:
                    subagent.is_held = False
                turn.subagents = []
        return [turn.take() for turn in done if turn.is_over and not turn.is_held and turn.entries]

    def rest(self) -> list[Turn]:
        """Return the turns that have not ended, with the entries that were not returned yet."""
        return [turn.take() for turn in self._current.values() if turn.entries]

    def _begin(self, entry: Entry, traceparent: str) -> Turn:
        turn = Turn(
            trace_id=_digest(16, "trace", entry.session, entry.id), span_id=span_id("turn", entry.id), number=entry.turn
        )
        parent_id, kind = self._parents.get(entry.session, ("", AGENT))
        parent = self._current.get(parent_id)
        turn.agent = kind
        if parent is not None:
            turn.trace_id, turn.is_sampled = parent.trace_id, parent.is_sampled
            call = self._calls.pop(entry.session, None)
            turn.parent_id = parent.root if call is None else call
            turn.is_held = call is None and not parent.is_over
            if turn.is_held:
                parent.subagents.append(turn)
        elif found := _TRACEPARENT.fullmatch(traceparent):
            turn.trace_id, turn.parent_id = int(found[1], 16), int(found[2], 16)
            turn.is_sampled = bool(int(found[3], 16) & 1)
        self._current[entry.session] = turn
        _forget_oldest(self._current)
        return turn

    def _link(self, task: str, call: int) -> Sequence[Turn]:
        """Let the span of a `task` call be the parent of the turn that this call started in the subagent. Return that
        turn if it was held back until now."""
        turn = self._current.get(task)
        if turn is None or not turn.is_held:
            self._calls[task] = call
            _forget_oldest(self._calls)
            return ()
        turn.parent_id, turn.is_held = call, False
        return (turn,)


def id_of_call(call: CallRef) -> int:
    """Return the id of the span of a tool call."""
    return span_id("call", call.assistant, call.index)


def span_id(*parts: object) -> int:
    """Return the id of a span: a digest of `parts`, which are ids in the log."""
    return _digest(8, *parts)


def _digest(size: int, *parts: object) -> int:
    """Return a number of `size` bytes that is not 0."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:size], "big") or 1


def _forget_oldest(known: dict[str, Any]) -> None:
    if len(known) > _REMEMBERED:
        del known[next(iter(known))]
