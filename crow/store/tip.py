"""The end of a session's path inside a write transaction: where entries are added.

Strategy: the row is read once, entries are inserted under the leaf one after another, and the row is written once, with
the new leaf and all counters. Everything that grows a path, an append, a claim, a repair, goes through here, so that
blobs, full text and counters cannot be forgotten. Knows nothing of who may do it.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable

from crow.domain.entries import Assistant, Body, Diff, Entry, File, NewEntry, Started, ToolResult, User
from crow.domain.errors import NoSuchSession
from crow.domain.messages import Text, Usage
from crow.store.codec import Encoded, encode
from crow.store.fields import mend
from crow.store.rows import checksum

__all__ = ["Tip"]

_LARGEST = 2**63 - 1


class Tip:
    """Where the session stands; `leaf`, `turn`, `state` and `owner` may be set, `save` writes them."""

    def __init__(self, connection: sqlite3.Connection, session_id: str, *, now_ms: int) -> None:
        """:raises NoSuchSession: there is none, or it is deleted."""
        row = connection.execute(
            "SELECT conversation, leaf, turn, state, owner, lease_ms, model FROM sessions"
            " WHERE id = ? AND deleted_ms IS NULL",
            (session_id,),
        ).fetchone()
        if row is None:
            raise NoSuchSession(session_id)
        self.connection = connection
        self.session_id = session_id
        self.now_ms = now_ms
        self.conversation: int = row[0]
        self.leaf: int | None = row[1]
        self.turn: int = row[2]
        self.state: str = row[3]
        self.owner: str = row[4]
        self.lease_ms: int = row[5]
        self.model: str = row[6]
        self._added: Counter[str] = Counter()
        self._cost = 0.0
        self._newest: int | None = None

    def add(self, new: NewEntry, *, turn: int, encoded: Encoded | None = None, entry_id: int | None = None) -> Entry:
        """Insert an entry under the leaf and stand on it; `encoded` is its body's stored form, if known already,
        `entry_id` an id that was reserved for it."""
        stored = encoded or encode(new.body)
        usage = _usage(new.usage)
        call = new.body.call if isinstance(new.body, Started | File | ToolResult) else None
        columns = (
            self.conversation,
            mend(self.session_id),
            self.leaf,
            turn,
            stored.kind,
            mend(new.model),
            call.assistant if call else None,
            call.index if call else None,
            usage.input_tokens if usage else None,
            usage.output_tokens if usage else None,
            usage.cached_tokens if usage else None,
            usage.reasoning_tokens if usage else None,
            _cost(new.cost),
            new.estimate,
            self.now_ms,
        )
        body = stored.spilled if stored.text is None else stored.text
        assert body is not None
        cursor = self.connection.execute(
            "INSERT INTO entries (id, body, body_blob, checksum, conversation, session, parent, turn, kind, model,"
            " call_entry, call_index, input_tokens, output_tokens, cached_tokens, reasoning_tokens, cost, estimate,"
            " created_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (entry_id, stored.text, stored.spilled, checksum(body.encode(), columns), *columns),
        )
        entry_id = cursor.lastrowid
        assert entry_id is not None
        for name, data in stored.blobs.items():
            self.connection.execute(
                "INSERT INTO blobs (hash, size, data) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (name, len(data), data)
            )
            self.connection.execute("INSERT INTO blob_refs (blob, entry) VALUES (?, ?)", (name, entry_id))
        self._index(entry_id, stored.body)
        parent, self.leaf, self._newest = self.leaf, entry_id, entry_id
        self._count(new, usage)
        return Entry(
            id=entry_id,
            conversation=self.conversation,
            session=self.session_id,
            parent=parent,
            turn=turn,
            body=stored.body,
            model=new.model,
            usage=usage,
            cost=new.cost,
            estimate=new.estimate,
            created_ms=self.now_ms,
        )

    def _index(self, entry_id: int, body: Body) -> None:
        """Make the text of an entry findable: what the view `searchable` gives for it."""
        match body:
            case Assistant(text=text):
                pass
            case User(parts=parts):
                text = "\n".join(part.text for part in parts if isinstance(part, Text))
            case _:
                return
        if "\0" in text:  # SQLite's functions for JSON take it for the end
            self.connection.execute(
                "INSERT INTO entries_fts (rowid, text) SELECT id, text FROM searchable WHERE id = ? AND text <> ''",
                (entry_id,),
            )
        elif text:
            self.connection.execute("INSERT INTO entries_fts (rowid, text) VALUES (?, ?)", (entry_id, text))

    def drop_draft(self) -> None:
        """The stream it was the draft of is stored, or given up."""
        self.connection.execute("DELETE FROM drafts WHERE session = ?", (self.session_id,))

    def carry_draft(self, old_leaf: int | None) -> None:
        """The stream goes on, after the entries that were added since it began."""
        self.connection.execute(
            "UPDATE drafts SET after_leaf = ? WHERE session = ? AND after_leaf IS ?",
            (self.leaf, self.session_id, old_leaf),
        )

    def save(self) -> None:
        """Write the row."""
        added = self._added
        self.connection.execute(
            "UPDATE sessions SET leaf = ?, turn = ?, state = ?, owner = ?, lease_ms = ?, updated_ms = ?,"
            " newest_entry = coalesce(?, newest_entry), has_prompt = has_prompt OR ?, entries = entries + ?,"
            " tokens_in = tokens_in + ?, tokens_out = tokens_out + ?, tokens_cached = tokens_cached + ?,"
            " cost = cost + ?, files_changed = files_changed + ?, lines_added = lines_added + ?,"
            " lines_removed = lines_removed + ? WHERE id = ?",
            (
                self.leaf,
                self.turn,
                self.state,
                self.owner,
                self.now_ms if self.owner else 0,
                self.now_ms,
                self._newest,
                added["prompts"] > 0,
                added["entries"],
                _storable(added["input"]),
                _storable(added["output"]),
                _storable(added["cached"]),
                self._cost,
                added["files"],
                added["lines_added"],
                added["lines_removed"],
                self.session_id,
            ),
        )

    def _count(self, new: NewEntry, usage: Usage | None) -> None:
        added = self._added
        added["entries"] += 1
        self._cost += _cost(new.cost) or 0.0
        if usage is not None:
            added["input"] += usage.input_tokens or 0
            added["output"] += usage.output_tokens or 0
            added["cached"] += usage.cached_tokens or 0
        match new.body:
            case User():
                added["prompts"] += 1
            case File():
                added["files"] += 1
            case ToolResult(is_error=False, announcement=announcement):
                lines_added, lines_removed = _lines_changed(announcement.diffs)
                added["lines_added"] += lines_added
                added["lines_removed"] += lines_removed
            case _:
                pass


def _usage(usage: Usage | None) -> Usage | None:
    """As columns can hold it: None if nothing is known, and no number that SQLite cannot take."""
    if usage is None:
        return None
    counts = (usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens)
    if all(count is None for count in counts):
        return None
    fitting = [None if count is None else _storable(count) for count in counts]
    if fitting == list(counts):
        return usage
    return Usage(
        input_tokens=fitting[0], output_tokens=fitting[1], cached_tokens=fitting[2], reasoning_tokens=fitting[3]
    )


def _cost(cost: float | None) -> float | None:
    """As SQLite gives it back: a float, no NaN, no negative zero."""
    return None if cost is None or cost != cost else float(cost) + 0.0


def _storable(count: int) -> int:
    """The nearest number that SQLite can take."""
    return max(-_LARGEST, min(count, _LARGEST))


def _lines_changed(diffs: Iterable[Diff]) -> tuple[int, int]:
    """Lines added and removed, by content: a line that only moved counts as neither."""
    added = removed = 0
    for diff in diffs:
        before, after = Counter((diff.old_text or "").splitlines()), Counter(diff.new_text.splitlines())
        added += (after - before).total()
        removed += (before - after).total()
    return added, removed
