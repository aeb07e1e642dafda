"""Compares texts with the words of a query, and makes hits, for both engines."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from crow.domain.entries import Assistant, Body, Checkpoint, Command, Custom, Entry, Reminder, Skill, ToolResult, User
from crow.domain.messages import Text
from crow.store import Hit
from crow.store.rows import possible_time

SCANNED_KINDS = ("assistant", "tool", "checkpoint", "skill", "reminder", "custom", "command")
"""The kinds of entries for which `_unindexed_text` may return a text."""

SCAN_ENTRIES = 20_000
"""A scan stops after this many entries."""

SCAN_CHARACTERS = 8 * 1024 * 1024
"""A scan stops after this many characters of text."""

SCAN_BATCH = 64

LAST_MS = 2**62
"""A time in Unix milliseconds that is later than every entry."""

SNIPPET_MARGIN = 80
"""The number of characters that a snippet shows before and after the match."""


def patterns_of(words: Sequence[str]) -> list[re.Pattern[str]]:
    """Return a pattern for each word. A pattern matches its word anywhere in a text. Case does not matter."""
    return [re.compile(re.escape(word), re.IGNORECASE) for word in words]


def hit_of(entry: int, session: str, kind: str, created_ms: int, text: str, patterns: Sequence[re.Pattern[str]]) -> Hit:
    """Return a hit with a snippet around the first pattern that matches `text`. If none matches, the snippet is the
    beginning of the text."""
    place = next((found for pattern in patterns if (found := pattern.search(text))), None)
    start = max(0, place.start() - SNIPPET_MARGIN) if place else 0
    end = (place.end() if place else 0) + SNIPPET_MARGIN
    snippet = snippet_of(text[start:end], start=start, length=len(text))
    return Hit(entry=entry, session=session, kind=kind, snippet=snippet, created_ms=possible_time(created_ms))


def snippet_of(part: str, *, start: int, length: int) -> str:
    """Return a snippet on one line. `part` is the part of a text that begins at the index `start`. The whole text has
    `length` characters. An ellipsis stands for the text before the part, and another for the text after it."""
    return f"{'…' if start else ''}{' '.join(part.split())}{'…' if start + len(part) < length else ''}"


class Scan:
    """The progress of a scan of a session's path. The entries are added newest first."""

    def __init__(
        self, session_id: str, patterns: Sequence[re.Pattern[str]], *, limit: int, without: Collection[str]
    ) -> None:
        self.hits: list[Hit] = []
        self._session_id = session_id
        self._patterns = patterns
        self._limit = limit
        self._without = without
        self._characters = 0

    def add(self, entry: Entry, kind: str) -> bool:
        """Compare an entry of this kind with the patterns. Return whether the scan must stop at this entry."""
        text = _unindexed_text(entry, self._without)
        self._characters += len(text)
        if all(pattern.search(text) for pattern in self._patterns):
            self.hits.append(hit_of(entry.id, self._session_id, kind, entry.created_ms, text, self._patterns))
        return len(self.hits) >= self._limit or self._characters > SCAN_CHARACTERS


def searchable_text(body: Body) -> str:
    """Return the text that the full-text index holds. The text is empty for entries other than prompts and answers."""
    match body:
        case Assistant(text=text):
            return text
        case User(parts=parts):
            return "\n".join(part.text for part in parts if isinstance(part, Text))
        case _:
            return ""


def _unindexed_text(entry: Entry, without: Collection[str]) -> str:
    """Return the text that a scan compares: the part of an entry that the full-text index does not hold. For calls and
    results of the tools in `without`, this text is empty."""
    match entry.body:
        case Assistant(calls=calls):
            return "\n".join(f"{call.name} {call.arguments}" for call in calls if call.name not in without)
        case ToolResult(name=name, text=text):
            return "" if name in without else f"{name}\n{text}"
        case Checkpoint(summary=text) | Reminder(text=text) | Skill(text=text) | Custom(text=text):
            return text
        case Command(text=text, answer=answer):
            return f"{text}\n{answer}"
        case _:
            return ""
