"""Cursors: places in a session's log, from which a client can resume the session after its connection broke."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crow.domain import entries
from crow.domain.entries import CallRef
from crow.domain.errors import ArgumentError
from crow.protocol.frames import describe_member

CURSOR_KEY = "acp/cursor"
"""The name of the member of `_meta` that holds a cursor."""

_MAX_CALLS = 64
"""A cursor contains at most this many open calls."""

PIECEMEAL = (entries.User, entries.Remark, entries.Custom, entries.Command)
"""The kinds of entries whose updates must not be sent twice, because clients join these updates into one text. For all
other kinds, sending the updates twice does no harm."""

_CURSOR = re.compile(
    r"e(?P<entry>\d{1,18})\.(?P<pieces>\d{1,9})"
    r"(?:;m(?P<message>[\w-]{1,80}):(?P<thought>\d{1,12}):(?P<text>\d{1,12}))?"
    r"(?:;c(?P<calls>\d{1,18}\.\d{1,9}(?:=\d{1,12})?(?:,\d{1,18}\.\d{1,9}(?:=\d{1,12})?)*))?",
    re.ASCII,
)


class CursorGap(ArgumentError):
    """The error for a cursor from which crow cannot resume a session. The client must load the session."""

    reason = "cursor_gap"

    def __init__(self, problem: str) -> None:
        super().__init__(f"resume_failed: {problem} Load the session to get its whole history.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in the log of a session: the point up to which the client has been sent everything."""

    entry: int = 0
    """The id of the last entry whose updates were all sent."""
    pieces: int = 0
    """How many updates were sent of the first entry after `entry` whose kind is in `PIECEMEAL`."""
    message: str = ""
    """The id of a later message that was sent in part, or of a slash command whose text was sent. Empty if there is
    neither."""
    thought: int = 0
    """How many characters were sent of the thought of `message`."""
    text: int = 0
    """How many characters were sent of the text of `message`."""
    calls: Mapping[CallRef, int] = field(default_factory=dict)
    """The calls that have not ended, each with the length of the output that the client's terminal has shown."""

    def __str__(self) -> str:
        message = f";m{self.message}:{self.thought}:{self.text}" if self.message else ""
        shown = [
            f"{call.assistant}.{call.index}" + (f"={chars}" if chars else "")
            for call, chars in list(self.calls.items())[-_MAX_CALLS:]
        ]
        calls = f";c{','.join(shown)}" if shown else ""
        return f"e{self.entry}.{self.pieces}{message}{calls}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse the text of a cursor. :raises CursorGap: crow did not make this text."""
        found = _CURSOR.fullmatch(text[:8_000])
        if found is None:
            raise CursorGap("crow did not make this cursor.")
        calls: dict[CallRef, int] = {}
        for call in (found["calls"] or "").split(",") if found["calls"] else ():
            name, _, chars = call.partition("=")
            assistant, _, index = name.partition(".")
            calls[CallRef(assistant=int(assistant), index=int(index))] = int(chars or 0)
        if len(calls) > _MAX_CALLS:
            raise CursorGap(f"the cursor has {len(calls)} open calls, but crow's cursors have at most {_MAX_CALLS}.")
        return cls(
            entry=int(found["entry"]),
            pieces=int(found["pieces"]),
            message=found["message"] or "",
            thought=int(found["thought"] or 0),
            text=int(found["text"] or 0),
            calls=calls,
        )


def cursor_in(params: Mapping[str, Any]) -> Cursor | None:
    """Read the cursor in `_meta` of the parameters of a request, or return None if there is none.

    :raises CursorGap: crow did not make this cursor.
    :raises ArgumentError: the cursor is not a string.
    """
    meta = params.get("_meta")
    cursor = meta.get(CURSOR_KEY) if isinstance(meta, dict) else None
    if cursor is not None and not isinstance(cursor, str):
        raise ArgumentError(f'_meta["{CURSOR_KEY}"] is {describe_member(cursor)}; expected the cursor of an update.')
    return None if cursor is None else Cursor.parse(cursor)
