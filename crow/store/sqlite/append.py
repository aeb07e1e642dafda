"""Turns: prompts that wait, who may run, what is appended, and the repair after a death.

Strategy: a session runs one turn at a time, for the store named in its row. Every function here is the body of one
write transaction. An append names the leaf it expects; a claim takes an idle session, or one whose owner is dead,
after closing that turn by appending: the draft as an interrupted answer, the turn's end, then the prompts that waited
with the dead as messages that were never run. Nothing is ever rewritten. Knows what a living owner is from `owner`.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence

from crow.domain.entries import Assistant, Body, Diff, Entry, File, NewEntry, Started, ToolResult, TurnEnd, User
from crow.domain.errors import ArgumentError, LeafMoved, NoSuchSession, SessionBusy
from crow.domain.messages import Part, Text, Usage
from crow.store import QueuedPrompt, TurnStart
from crow.store.codec import Encoded, decode_parts, encode, mend
from crow.store.sqlite.lease import dead_twin, is_alive, readable
from crow.store.sqlite.paths import checksum

__all__ = [
    "SessionState",
    "append",
    "drop_prompt",
    "enqueue",
    "is_abandoned",
    "leave",
    "move_leaf",
    "queued",
    "renew_lease",
    "repair",
    "save_draft",
    "take_turn",
]


def enqueue(
    connection: sqlite3.Connection, here: str, session_id: str, *, parts: str, message_id: str, now_ms: int
) -> None:
    """Put a prompt (its parts as JSON) into the inbox."""
    cursor = connection.execute(
        "INSERT INTO inbox (session, owner, message_id, parts, created_ms)"
        " SELECT id, ?, ?, ?, ? FROM sessions WHERE id = ? AND deleted_ms IS NULL",
        (here, message_id, parts, now_ms, session_id),
    )
    if not cursor.rowcount:
        raise NoSuchSession(session_id)


def queued(connection: sqlite3.Connection, session_id: str) -> tuple[QueuedPrompt, ...]:
    """The prompts that wait."""
    rows = connection.execute(
        "SELECT parts, message_id FROM inbox WHERE session = ? ORDER BY seq", (session_id,)
    ).fetchall()
    return tuple(QueuedPrompt(parts=decode_parts(parts), message_id=name) for parts, name in rows)


def take_turn(
    connection: sqlite3.Connection,
    here: str,
    session_id: str,
    message_id: str | None,
    *,
    parts: Sequence[Part] | None,
    leaf: int | None,
    cut: int | None,
    now_ms: int,
) -> TurnStart:
    """Claim the turn and put the prompt, if it is for one, into the path; repairs first what a dead owner left."""
    tip = SessionState(connection, session_id, now_ms=now_ms)
    if tip.state == "running" and (tip.owner == here or _is_alive(tip)):
        raise SessionBusy(session_id, readable(tip.owner))
    was_moved = tip.leaf != leaf
    entries = _repair(tip, here)
    tip.turn += 1
    if message_id is not None:
        body = User(parts=_taken(tip, message_id) if parts is None else tuple(parts), message_id=message_id, cut=cut)
        entries = (*entries, tip.add(NewEntry(body=body, model=tip.model), turn=tip.turn))
    tip.state, tip.owner = "running", here
    tip.save()
    return TurnStart(turn=tip.turn, entries=entries, moved=was_moved)


def drop_prompt(connection: sqlite3.Connection, session_id: str, message_id: str) -> None:
    """Take a prompt out of the inbox; unknown ones are fine."""
    connection.execute("DELETE FROM inbox WHERE session = ? AND message_id = ?", (session_id, message_id))


def append(
    connection: sqlite3.Connection,
    here: str,
    session_id: str,
    *,
    leaf: int | None,
    turn: int,
    entries: Sequence[tuple[NewEntry, Encoded]],
    release: bool,
    now_ms: int,
) -> tuple[Entry, ...]:
    """Append a chain under `leaf`. The draft goes when its answer comes; other entries (a mode changed) leave it. A
    user entry takes its prompt out of the inbox."""
    tip = SessionState(connection, session_id, now_ms=now_ms)
    _check_writable(tip, here, leaf)
    stored = tuple(tip.add(new, turn=turn, encoded=encoded) for new, encoded in entries)
    for entry in stored:
        if isinstance(entry.body, User):
            drop_prompt(connection, session_id, entry.body.message_id)
    if release or any(isinstance(entry.body, Assistant | TurnEnd) for entry in stored):
        tip.drop_draft()
    else:
        tip.carry_draft(leaf)
    if release:
        tip.state, tip.owner = "idle", ""
    tip.save()
    return stored


def move_leaf(
    connection: sqlite3.Connection,
    here: str,
    session_id: str,
    *,
    leaf: int | None,
    to: int | None,
    reason: str,
    now_ms: int,
) -> None:
    """Stand on another entry of the conversation."""
    tip = SessionState(connection, session_id, now_ms=now_ms)
    _check_writable(tip, here, leaf)
    if to is not None:
        found = connection.execute("SELECT conversation FROM entries WHERE id = ?", (to,)).fetchone()
        if found != (tip.conversation,):
            raise ArgumentError(f"Entry {to} is not in the conversation of session {session_id}.")
    connection.execute(
        "INSERT INTO moves (session, from_leaf, to_leaf, reason, created_ms) VALUES (?, ?, ?, ?, ?)",
        (session_id, leaf, to, reason, now_ms),
    )
    tip.leaf = to
    tip.save()


def save_draft(
    connection: sqlite3.Connection,
    here: str,
    session_id: str,
    *,
    after_leaf: int | None,
    turn: int,
    message_id: str,
    text: str,
    thought: str,
    now_ms: int,
) -> None:
    """Add a piece of the running stream; a sign of life."""
    renew_lease(connection, here, session_id, now_ms=now_ms)
    cursor = connection.execute(
        "INSERT INTO drafts (session, after_leaf, turn, message_id, text, thought, created_ms)"
        " SELECT id, ?, ?, ?, ?, ?, ? FROM sessions WHERE id = ? AND deleted_ms IS NULL",
        (after_leaf, turn, message_id, text, thought, now_ms, session_id),
    )
    if not cursor.rowcount:
        raise NoSuchSession(session_id)


def renew_lease(connection: sqlite3.Connection, here: str, session_id: str, *, now_ms: int) -> None:
    """`here` lives, and runs the turn if it owns it."""
    connection.execute("UPDATE sessions SET lease_ms = ? WHERE id = ? AND owner = ?", (now_ms, session_id, here))


def is_abandoned(connection: sqlite3.Connection, here: str, session_id: str, *, now_ms: int) -> bool:
    """Whether a dead owner left a turn or a prompt behind, and no living one runs."""
    tip = SessionState(connection, session_id, now_ms=now_ms)
    if tip.state == "running":
        return tip.owner != here and not _is_alive(tip)
    return bool(_orphans(tip, here))


def repair(connection: sqlite3.Connection, here: str, session_id: str, *, now_ms: int) -> None:
    """Close what a dead owner left; does nothing if there is nothing, or somebody lives."""
    tip = SessionState(connection, session_id, now_ms=now_ms)
    if tip.state == "running" and (tip.owner == here or _is_alive(tip)):
        return
    if tip.state == "running" or _orphans(tip, here):
        _repair(tip, here)
        tip.save()


def leave(connection: sqlite3.Connection, here: str, session_id: str) -> None:
    """Make the turn that `here` owns one whose owner is dead; without effect if it owns none."""
    connection.execute("UPDATE sessions SET owner = ? WHERE id = ? AND owner = ?", (dead_twin(here), session_id, here))


def _taken(tip: SessionState, message_id: str) -> tuple[Part, ...]:
    """The parts of a prompt that waits, out of the inbox."""
    row = tip.connection.execute(
        "SELECT parts FROM inbox WHERE session = ? AND message_id = ?", (tip.session_id, message_id)
    ).fetchone()
    if row is None:
        raise ArgumentError(f"Prompt {message_id} no longer waits in session {tip.session_id}. Send it again.")
    drop_prompt(tip.connection, tip.session_id, message_id)
    return decode_parts(row[0])


def _check_writable(tip: SessionState, here: str, leaf: int | None) -> None:
    """A turn of somebody who lives is not disturbed, one of somebody who died is repaired first (by `open`)."""
    if tip.state == "running" and tip.owner != here:
        if _is_alive(tip):
            raise SessionBusy(tip.session_id, readable(tip.owner))
        raise LeafMoved(f"Session {tip.session_id} was left in the middle of a turn. Load it again, then repeat this.")
    if tip.leaf != leaf:
        raise LeafMoved(
            f"Session {tip.session_id} went on elsewhere: it stands on entry {tip.leaf}, not {leaf}. Nothing was"
            " written; load it again, then repeat this."
        )


def _is_alive(tip: SessionState) -> bool:
    return is_alive(tip.owner, lease_age_ms=tip.now_ms - tip.lease_ms)


def _repair(tip: SessionState, here: str) -> tuple[Entry, ...]:
    """Append what closes a dead owner's turn and the prompts that waited with it; the session is idle then."""
    entries: list[Entry] = []
    if tip.state == "running":
        detail = f"{readable(tip.owner)} ended in the middle of this turn"
        answer = _draft(tip)
        if answer is not None:
            entries.append(tip.add(NewEntry(body=answer, model=tip.model), turn=tip.turn))
        if not _has_ended(tip):
            entries.append(tip.add(NewEntry(body=TurnEnd(stop="interrupted", detail=detail)), turn=tip.turn))
    for seq, owner, parts, message_id in _orphans(tip, here):
        tip.turn += 1
        detail = f"{readable(owner)} ended before this prompt had its turn"
        body = User(parts=decode_parts(parts), message_id=message_id)
        entries.append(tip.add(NewEntry(body=body, model=tip.model), turn=tip.turn))
        entries.append(tip.add(NewEntry(body=TurnEnd(stop="interrupted", detail=detail)), turn=tip.turn))
        tip.connection.execute("DELETE FROM inbox WHERE seq = ?", (seq,))
    tip.drop_draft()
    tip.state, tip.owner = "idle", ""
    return tuple(entries)


def _draft(tip: SessionState) -> Assistant | None:
    """The answer that was being streamed, as far as it was saved; None without text."""
    pieces = tip.connection.execute(
        "SELECT message_id, text, thought FROM drafts WHERE session = ? AND after_leaf IS ? ORDER BY seq",
        (tip.session_id, tip.leaf),
    ).fetchall()
    pieces = [piece for piece in pieces if piece[0] == pieces[-1][0]]
    text, thought = "".join(piece[1] for piece in pieces), "".join(piece[2] for piece in pieces)
    if not text and not thought:
        return None
    return Assistant(text=text, thought=thought, message_id=pieces[0][0], finish="interrupted")


def _has_ended(tip: SessionState) -> bool:
    """Whether the turn's end is stored already: its owner died between that and giving the turn back."""
    row = tip.connection.execute("SELECT kind, turn FROM entries WHERE id = ?", (tip.leaf,)).fetchone()
    return bool(row == ("turn_end", tip.turn))


def _orphans(tip: SessionState, here: str) -> list[tuple[int, str, str, str]]:
    """Prompts in the inbox whose owner is dead: seq, owner, parts, message id."""
    rows = tip.connection.execute(
        "SELECT seq, owner, parts, message_id, created_ms FROM inbox WHERE session = ? ORDER BY seq", (tip.session_id,)
    ).fetchall()
    return [
        (seq, owner, parts, message_id)
        for seq, owner, parts, message_id, created_ms in rows
        if owner != here and not is_alive(owner, lease_age_ms=tip.now_ms - max(created_ms, tip.lease_ms))
    ]


# FROM store.tip: The end of a session's path inside a write transaction: where entries are added.
#
# Strategy: the row is read once, entries are inserted under the leaf one after another, and the row is written once,
# with
# the new leaf and all counters. Everything that grows a path, an append, a claim, a repair, goes through here, so
# that
# blobs, full text and counters cannot be forgotten. Knows nothing of who may do it.


_LARGEST = 2**63 - 1


class SessionState:
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
