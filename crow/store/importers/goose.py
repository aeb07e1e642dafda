"""Imports sessions of goose: from its SQLite database, or from the JSONL files of older versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from crow.store.importers.builder import ConversationBuilder, NewConversation, Source
from crow.store.importers.databases import ForeignDatabase
from crow.store.importers.files import (
    Damaged,
    Problems,
    as_object,
    modified_ms,
    objects,
    parse,
    parse_object,
    read_lines,
    text,
    time_ms,
)
from crow.store.importers.parts import parts_of, stable_id, words_of

TOOL = "goose"
"""The beginning of the ids of imported sessions."""
NAME = "goose"
"""The name for users."""
DATABASE = "sessions.db"


def recognise(path: Path, lines: Sequence[Mapping[str, Any]]) -> Source | None:
    """Return the session in a file, or None if goose did not write the file. `lines` are the first lines."""
    if not lines:
        return None
    first = lines[0]
    has_head = isinstance(first.get("working_dir"), str) and "message_count" in first
    if not has_head and not _is_message(first):
        return None
    session_id = _session_id(path.stem, text(first.get("working_dir")), str(first.get("created", "")))
    read = partial(_read_file, path, session_id)
    return Source(tool=NAME, place=str(path), session_id=session_id, updated_ms=modified_ms(path), read=read)


def is_database(tables: Mapping[str, frozenset[str]]) -> bool:
    """Return whether a database with these tables belongs to goose."""
    return {"sessions", "messages"} <= tables.keys() and {"session_id", "content_json"} <= tables["messages"]


def sessions_in_database(database: ForeignDatabase) -> Iterator[Source]:
    """Yield the sessions in a database.

    :raises ArgumentError: the database is damaged.
    """
    columns = ("id", "working_dir", "created_at", "updated_at", "session_type", "model_config_json", "name")
    for row in database.columns("sessions", (*columns, "description", "user_set_name"), "ORDER BY id"):
        name = text(row["id"])
        if name and row.get("session_type") != "hidden":
            session_id = _session_id(name, text(row.get("working_dir")), str(row.get("created_at")))
            yield Source(
                tool=NAME,
                place=f"{database.path}, session {name}",
                session_id=session_id,
                updated_ms=time_ms(row.get("updated_at")) or 0,
                read=partial(_read_database, database, row, session_id),
            )


def _read_database(
    database: ForeignDatabase, session: Mapping[str, Any], session_id: str, new: NewConversation, problems: Problems
) -> None:
    """Import a session from a database. `session` is its row.

    :raises ArgumentError: the database is damaged.
    """
    to = new(session_id)
    to.set_cwd(session.get("working_dir"))
    to.set_title(session.get("name") or session.get("description"), by_user=bool(session.get("user_set_name")))
    with suppress(Damaged):
        to.set_model(parse_object(text(session.get("model_config_json"))).get("model_name"))
    to.at(time_ms(session.get("created_at")))
    reader = _GooseReader(to)
    columns = ("id", "role", "content_json", "created_timestamp", "timestamp", "metadata_json")
    for row in database.columns("messages", columns, "WHERE session_id = ? ORDER BY id", (session["id"],)):
        with problems.importing(f"{database.path}, message {row['id']}"):
            try:
                reader.add(_message_of(row))
            except Damaged as error:
                problems.skip(str(error))
    to.at(time_ms(session.get("updated_at")))


def _read_file(path: Path, session_id: str, new: NewConversation, problems: Problems) -> None:
    """Import a file. Usually the first line describes the session. Each other line is a message."""
    to = new(session_id)
    reader = _GooseReader(to)
    is_first = True
    for place, line in read_lines(path, problems):
        with problems.importing(place):
            if _is_message(line):
                reader.add(line)
            elif is_first:
                to.set_cwd(line.get("working_dir"))
                to.set_title(line.get("description"))
            else:
                problems.skip("it is not a goose message")
        is_first = False


class _GooseReader:
    """Adds messages of goose to a conversation. A compaction by goose hides older messages from the model and inserts a
    summary that only the model sees."""

    def __init__(self, conversation: ConversationBuilder) -> None:
        self._to = conversation
        self._has_hidden = False
        """Whether some message so far is hidden from the model."""
        self._is_after_summary = False
        """Whether the message before this one was a summary, or a remark of goose about a summary."""

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a message."""
        self._to.at(time_ms(message.get("created")))
        seen = as_object(message.get("metadata"))
        for_user, for_model = seen.get("userVisible") is not False, seen.get("agentVisible") is not False
        content = objects(message.get("content"))
        words = "\n".join(text(part.get("text")) for part in content if part.get("type") == "text")
        after_summary, self._is_after_summary = self._is_after_summary, False
        self._has_hidden |= not for_model
        if not for_user and message.get("role") == "user" and self._has_hidden and words.strip() and not after_summary:
            self._to.checkpoint(words)
            self._is_after_summary = True
        elif not for_user and (after_summary or not for_model):
            self._is_after_summary = after_summary  # leave out the message: goose made it for the model only
        elif message.get("role") == "assistant":
            self._add_answer(content)
        else:
            self._add_user(content, for_user=for_user)

    def _add_answer(self, content: Sequence[Mapping[str, Any]]) -> None:
        to = self._to
        to.answer()
        for part in content:
            match part.get("type"):
                case "text":
                    to.say(text(part.get("text")))
                case "thinking" | "reasoning":
                    to.think(text(part.get("thinking")) or text(part.get("text")))
                case "toolRequest" | "frontendToolRequest":
                    call = as_object(part.get("toolCall"))
                    value = as_object(call.get("value"))
                    name = text(value.get("name")) or "invalid_call"
                    arguments = value.get("arguments") if value else {"error": text(call.get("error"))}
                    to.call(text(part.get("id")), name, arguments)
        for part in content:
            if part.get("type") == "systemNotification":
                to.remark(text(part.get("msg")))

    def _add_user(self, content: Sequence[Mapping[str, Any]], *, for_user: bool) -> None:
        for part in content:
            if part.get("type") == "toolResponse":
                output, is_error = _output(as_object(part.get("toolResult")))
                self._to.result(text(part.get("id")), parts_of(output), is_error=is_error)
        parts = parts_of(content)
        if for_user:
            self._to.user(parts)
        else:
            self._to.remind(words_of(parts))


def _message_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of the database in the form of goose's files. :raises Damaged: it is not JSON."""
    content = row["content_json"]
    return {
        "role": row.get("role"),
        "created": row.get("created_timestamp") or row.get("timestamp"),
        "content": parse(content if isinstance(content, str | bytes) else ""),
        "metadata": parse_object(row["metadata_json"]) if text(row.get("metadata_json")) else {},
    }


def _is_message(line: Mapping[str, Any]) -> bool:
    content = line.get("content")
    return "created" in line and line.get("role") in ("user", "assistant") and isinstance(content, list)


def _session_id(name: str, cwd: str, created: str) -> str:
    """Return the id of a session. goose names sessions by day and number, so two sessions on different machines can
    have the same name. To keep them apart, the id also depends on the session's directory and time."""
    mark = hashlib.sha256(f"{name}\0{cwd}\0{created}".encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return stable_id(TOOL, name, mark)


def _output(result: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the content of a result, and whether it is an error."""
    if result.get("status") == "error":
        return result.get("error"), True
    value = result.get("value")
    if isinstance(value, dict) and "content" in value:
        return value["content"], value.get("isError") is True
    return value, False
