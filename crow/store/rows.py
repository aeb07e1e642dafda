"""Converts rows of sessions, entries and tokens to values and back, for both engines."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from crow.domain.entries import Body, CallRef, Entry, File, NewEntry, Prompt, Started, ToolResult, User
from crow.domain.errors import ArgumentError
from crow.domain.messages import Message, SystemMessage, Usage, UserMessage
from crow.domain.rendering import tool_message, user_parts
from crow.domain.tokens import estimate_message
from crow.store import SessionRow, Token, UsageTotal
from crow.store.codec import Encoded, Load, Unreadable, check_blob, decode, from_json, mend, stand_in
from crow.store.owner import readable

_LARGEST = 2**63 - 1
_LARGEST_COUNT = 2**53
_YEAR_10000_MS = 253_402_300_800_000
_FORK_TITLE = re.compile(r" \(fork ([0-9]{1,9})\)$")

_SESSION_FIELDS = tuple(one.name for one in fields(SessionRow))

SESSION_COLUMNS = ", ".join(_SESSION_FIELDS)
"""Columns of `sessions` that `session_of` expects."""

JSON_COLUMNS = frozenset({"additional_directories", "permissions", "config", "metadata"})
"""Columns of `sessions` that hold JSON."""

_NUMBERS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("conversation", "leaf", "entries", "tokens_in", "tokens_out", "tokens_cached"), (int,)),
    **dict.fromkeys(("newest_entry", "created_ms", "updated_ms"), (int,)),
    **dict.fromkeys(("files_changed", "lines_added", "lines_removed"), (int,)),
    **dict.fromkeys(("title_by_user", "has_prompt", "archived"), (int,)),
    **dict.fromkeys(("calibration", "cost"), (float, int)),
}

_SESSION_TYPES: Mapping[str, tuple[type, ...]] = {name: _NUMBERS.get(name, (str,)) for name in _SESSION_FIELDS}
"""Maps the columns of `sessions` to the types that their values may have, apart from NULL."""

_NOT_SET: Mapping[str, object] = {
    **{name: 0 for name in _NUMBERS if name != "leaf"},
    "calibration": 1.0,
    "id": "(damaged)",
    "cwd": "/",
    "model": "",
    "mode": "ask",
    "owner": "",
}
"""The values that `session_of` uses in place of values of the wrong type. For columns that are not here, it uses
None."""

TOKEN_FIELDS = tuple(one.name for one in fields(Token))
TOKEN_COLUMNS = ", ".join(TOKEN_FIELDS)
"""Columns of `tokens` that `token_of` expects."""

COUNTERS = ("entries", "tokens_in", "tokens_out", "tokens_cached", "files_changed", "lines_added", "lines_removed")
"""Columns of `sessions` that hold sums over the session's entries."""

_TOKEN_COUNTS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "cache_write_tokens")
"""Columns of `entries` that hold the counts of a `Usage`."""

_token_counts = attrgetter(*_TOKEN_COUNTS)
_NO_COUNTS = (None,) * len(_TOKEN_COUNTS)

USAGE_COLUMNS = (*_TOKEN_COUNTS, "estimated")
"""Columns of `entries` that hold a `Usage`. Bit 0 of `estimated` says whether the input is estimated, and bit 1 whether
the output is."""

IS_REQUEST = "e.kind <> 'tool' AND (e.input_tokens IS NOT NULL OR e.output_tokens IS NOT NULL OR e.cost IS NOT NULL)"
"""The SQL condition that an entry `e` holds the usage of a request. It is false for tool results, because the result of
a task repeats the usage of its subagent."""

_SUMS = {
    "requests": "count(*)",
    **{
        # SQLite refuses a sum of integers that takes more than 64 bits.
        name: f"coalesce(sum(e.{column} * 1.0), 0)"
        for name, column in (
            ("tokens_in", "input_tokens"),
            ("tokens_out", "output_tokens"),
            ("tokens_cached", "cached_tokens"),
            ("tokens_reasoning", "reasoning_tokens"),
            ("tokens_cache_written", "cache_write_tokens"),
        )
    },
    "estimated": "count(nullif(e.estimated, 0))",
    "cost": "sum(e.cost)",
}

_SUM_NAMES = tuple(_SUMS)

SUM_COLUMNS = ", ".join(f"{expression} AS {name}" for name, expression in _SUMS.items())
"""Columns with sums over entries `e`, for `usage_totals`. The last one is the cost, or NULL if no cost is known."""

SUM_COUNT = len(_SUMS)
"""The number of `SUM_COLUMNS`."""


def session_of(row: Sequence[Any]) -> SessionRow:
    """Return the session in a row of `SESSION_COLUMNS`.

    In a damaged SQLite file, a value can have any type. A value of the wrong type is read as if it were not set, a
    damaged JSON column as empty, and an impossible time as 0. So one damaged row does not keep the other sessions from
    being listed.
    """
    values: dict[str, Any] = {
        name: value if isinstance(value, _SESSION_TYPES[name]) else _NOT_SET.get(name)
        for name, value in zip(_SESSION_FIELDS, row, strict=True)
    }
    if values["state"] != "running":
        values["state"] = "idle"
    for name in ("title_by_user", "has_prompt", "archived"):
        values[name] = bool(values[name])
    for name, kind in (("additional_directories", str), ("permissions", dict)):
        values[name] = tuple(item for item in from_json(values[name], []) if isinstance(item, kind))
    for name in ("config", "metadata"):
        values[name] = from_json(values[name], {})
    for name in ("created_ms", "updated_ms"):
        values[name] = possible_time(values[name])
    values["owner"] = readable(values["owner"]) if values["owner"] else ""
    return SessionRow(**values)


def possible_count(value: object) -> int:
    """Return a count unchanged, or 0 for a value that can only come from damage."""
    return value if isinstance(value, int) and 0 <= value < _LARGEST_COUNT else 0


def possible_time(value: object) -> int:
    """Return a time in Unix milliseconds unchanged. Return 0 for a value that is no integer or no time from 1970 to the
    year 9999. Such a value comes from damage, and Python cannot show it as a time."""
    return value if isinstance(value, int) and 0 <= value < _YEAR_10000_MS else 0


def cursor_after(row: SessionRow) -> str:
    """Return the cursor of the page that follows this session."""
    return base64.urlsafe_b64encode(f"{row.newest_entry}:{row.id}".encode()).decode()


def parse_cursor(cursor: str) -> tuple[int, str]:
    """Return `newest_entry` and `id` of the last session on the previous page.

    :raises ArgumentError: `cursor` is not a cursor.
    """
    try:
        newest, separator, session_id = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().partition(":")
        if separator and 0 <= int(newest) < 2**63:
            return int(newest), session_id
    except ValueError:
        pass
    raise ArgumentError(
        f'cursor is "{cursor}", but no page of the list has this cursor. Leave it out to begin with the newest session.'
    )


def title_of_fork(title: str | None, others: Sequence[str | None]) -> str | None:
    """Return the title of a fork, such as `Title (fork 2)`. The number in it is one more than the largest number in
    `others`, the titles of the conversation's sessions. Return None if the original session has no title."""
    if title is None:
        return None
    base = _FORK_TITLE.sub("", title)
    taken = [0]
    for other in others:
        found = _FORK_TITLE.search(other or "")
        if found and (other or "")[: found.start()] == base:
            taken.append(int(found[1]))
    return f"{base} (fork {max(taken) + 1})"


def token_of(row: Sequence[Any]) -> Token:
    """Return the token in a row of `TOKEN_COLUMNS`."""
    return Token(**dict(zip(TOKEN_FIELDS, row, strict=True)))


@dataclass(slots=True)
class EntryRow:
    """A row of `entries` with the columns that `columns_of` returns. In a damaged SQLite file, a value can have any
    type."""

    id: int
    conversation: int
    session: str
    parent: int | None
    turn: int
    kind: str
    body: bytes | None
    """The JSON of the body, from this table or from the blob `body_blob`."""
    body_blob: str | None
    model: str
    call_entry: int | None
    """For a tool result: the id of the answer with the call."""
    call_index: int | None
    """For a tool result: the index of the call in that answer."""
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    reasoning_tokens: int | None
    cache_write_tokens: int | None
    estimated: int | None
    """See `USAGE_COLUMNS`."""
    cost: float | None
    estimate: int
    """The estimated size of the entry, in tokens."""
    created_ms: int
    """Unix milliseconds."""


def columns_of(row: type[EntryRow], **expressions: str) -> str:
    """Return the column list of a SELECT that reads rows of this type from a table `e`. `expressions` maps fields that
    are not columns of `e` to SQL expressions."""
    return ", ".join(expressions.get(one.name, f"e.{one.name}") for one in fields(row))


def body_of(row: EntryRow, data: bytes | None, load: Load) -> Body:
    """Return the body of an entry. `data` is the body's JSON, or None if the blob with the JSON is missing.

    :raises Unreadable: the body is damaged, or this version does not know its kind.
    """
    if row.body_blob is not None:
        if data is None:
            raise Unreadable(f"its content (blob {row.body_blob:.12}) is missing")
        check_blob(row.body_blob, data)
    return decode(row.kind, data, load)


def entry_of(row: EntryRow, read_body: Callable[[], Body]) -> Entry:
    """Return the entry in a row. If `read_body` raises `Unreadable`, the entry's body is a text that gives the
    reason."""
    try:
        body = read_body()
    except Unreadable as error:
        words, name = f"Entry {row.id} ({row.kind}) could not be read: {error}.", f"unreadable-{row.id}"
        call = (row.call_entry, row.call_index)
        body = stand_in(row.kind, words, message_id=name, title="(damaged)", call=call)
        parent, turn = (value if isinstance(value, int) else None for value in (row.parent, row.turn))
        return Entry(
            id=row.id, conversation=row.conversation, session=row.session, parent=parent, turn=turn or 0, body=body
        )
    return _entry_with(row, body)


def _entry_with(row: EntryRow, body: Body) -> Entry:
    """Return the entry in a row, with this body."""
    return Entry(
        id=row.id,
        conversation=row.conversation,
        session=row.session,
        parent=row.parent,
        turn=row.turn,
        body=body,
        model=row.model,
        usage=_usage_of(row),
        cost=row.cost,
        estimate=row.estimate,
        created_ms=row.created_ms,
    )


def _usage_of(row: EntryRow) -> Usage | None:
    found = _token_counts(row)
    if found == _NO_COUNTS:
        return None
    counts = dict(zip(_TOKEN_COUNTS, found, strict=True))
    estimated = row.estimated if isinstance(row.estimated, int) else 0
    return Usage(**counts, is_input_estimated=bool(estimated & 1), is_output_estimated=bool(estimated & 2))


def usage_totals(rows: Iterable[Sequence[Any]], keys: Sequence[str]) -> tuple[UsageTotal, ...]:
    """Return the sums in `rows`. Each row has `SUM_COLUMNS`, followed by the fields of `UsageTotal` that `keys` names.
    The result is sorted by day if there are days, and then by input tokens, largest first."""
    totals: list[UsageTotal] = []
    for row in rows:
        *counts, cost = row[:SUM_COUNT]
        values: dict[str, Any] = {name: storable(int(count)) for name, count in zip(_SUM_NAMES, counts, strict=False)}
        totals.append(UsageTotal(**values, cost=cost, **dict(zip(keys, row[SUM_COUNT:], strict=True))))
    return tuple(sorted(totals, key=lambda one: (one.day or "", -one.tokens_in, one.model or "", one.session or "")))


def plain(text: str) -> str:
    """Return `text` with U+FFFD in place of each NUL and each lone surrogate, because PostgreSQL cannot store these in
    a text column."""
    return mend(text).replace("\0", "\ufffd")


def is_plain(text: str) -> bool:
    """Return whether `plain` leaves the text unchanged."""
    return plain(text) == text


def plain_or_none(text: str | None) -> str | None:
    """Return `plain(text)`, or None if there is no text."""
    return None if text is None else plain(text)


def entry_values(new: NewEntry, encoded: Encoded, usage: Usage | None) -> dict[str, Any]:
    """Return the values of the columns of `entries` that do not depend on where the entry is inserted. `encoded` is
    the encoded body, and `usage` is the result of `storable_usage`."""
    call = _call_of(new.body)
    estimated = usage.is_input_estimated + 2 * usage.is_output_estimated if usage is not None else 0
    return {
        "kind": encoded.kind,
        "model": plain(new.model),
        "body": encoded.text,
        "body_blob": encoded.spilled,
        "call_entry": call.assistant if call else None,
        "call_index": call.index if call else None,
        **{name: getattr(usage, name, None) for name in _TOKEN_COUNTS},
        "estimated": estimated or None,
        "cost": storable_cost(new.cost),
        "estimate": new.estimate,
    }


def sized(new: NewEntry) -> NewEntry:
    """Return the entry with the estimated size of its message, if it is a prompt, a result or a system message."""
    match new.body:
        case User() as body:
            message: Message = UserMessage(parts=user_parts(body, 0))
        case ToolResult() as body:
            message = tool_message(body, 0, "")
        case Prompt(system=system):
            message = SystemMessage(text=system)
        case _:
            return new
    return replace(new, estimate=estimate_message(message))


def _call_of(body: Body) -> CallRef | None:
    """Return the tool call that a body belongs to."""
    return body.call if isinstance(body, Started | File | ToolResult) else None


def storable_usage(usage: Usage | None) -> Usage | None:
    """Return the usage with its numbers limited to what the columns can hold, or None if no number is known."""
    if usage is None:
        return None
    counts: dict[str, Any] = {
        name: storable(count) for name in _TOKEN_COUNTS if (count := getattr(usage, name)) is not None
    }
    if not counts:
        return None
    return Usage(**counts, is_input_estimated=usage.is_input_estimated, is_output_estimated=usage.is_output_estimated)


def storable_cost(cost: float | None) -> float | None:
    """Return the cost as a float that both engines store unchanged. NaN becomes None, and negative zero becomes
    zero."""
    return None if cost is None or cost != cost else float(cost) + 0.0


def storable(count: int) -> int:
    """Return the nearest number that a column of 64 bits can hold."""
    return max(-_LARGEST, min(count, _LARGEST))


@dataclass(slots=True)
class SessionCounts:
    """The sums that entries add to the row of their session."""

    numbers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    """One sum for each column in `COUNTERS`."""
    cost: float = 0.0
    """In US dollars."""
    has_prompt: bool = False

    def add(self, new: NewEntry, usage: Usage | None) -> None:
        """Count an entry. `usage` is the entry's usage from `storable_usage`."""
        numbers = self.numbers
        numbers["entries"] += 1
        # The result of a task repeats usage that the subagent's entries have already added.
        if not isinstance(new.body, ToolResult):
            self.cost += storable_cost(new.cost) or 0.0
            if usage is not None:
                numbers["tokens_in"] += usage.input_tokens or 0
                numbers["tokens_out"] += usage.output_tokens or 0
                numbers["tokens_cached"] += usage.cached_tokens or 0
        match new.body:
            case User():
                self.has_prompt = True
            case File():
                numbers["files_changed"] += 1
            case ToolResult(is_error=False, announcement=announcement):
                for diff in announcement.diffs:  # a moved line counts neither as added nor as removed
                    before, after = Counter((diff.old_text or "").splitlines()), Counter(diff.new_text.splitlines())
                    numbers["lines_added"] += (after - before).total()
                    numbers["lines_removed"] += (before - after).total()

    def storable(self) -> dict[str, int]:
        """Return `numbers`, each limited to what a column can hold."""
        return {name: storable(number) for name, number in self.numbers.items()}
