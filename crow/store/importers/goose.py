"""Imports sessions of goose: from its SQLite database, or from the JSONL files of older versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crow.domain.messages import Image, Part, Text
from crow.store.importers.builder import ConversationBuilder, NewConversation
from crow.store.importers.databases import ForeignDatabase
from crow.store.importers.files import (
    Damaged,
    Problems,
    objects,
    parse,
    parse_object,
    read_lines,
    text,
    time_ms,
)
from crow.store.importers.files import obj as as_object
from crow.store.importers.parts import image_of, stable_id

TOOL = "goose"
"""The beginning of the ids of imported sessions."""
NAME = "goose"
"""The name for users."""
DATABASE = "sessions.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class GooseSession:
    """A session in goose's database. Times are Unix milliseconds."""

    name: str
    """The id that goose uses."""
    session_id: str
    """The id that the session gets in crow."""
    title: str
    title_by_user: bool
    cwd: str
    model: str
    created_ms: int | None
    updated_ms: int | None


def recognise(path: Path, lines: Sequence[Mapping[str, Any]]) -> tuple[str, str | None] | None:
    """Return the id of the session in a file, paired with None, because goose's sessions have no parents. If goose did
    not write the file, return None instead of a pair."""
    if not lines:
        return None
    first = lines[0]
    has_head = isinstance(first.get("working_dir"), str) and "message_count" in first
    if not has_head and not _is_message(first):
        return None
    return _session_id(path.stem, text(first.get("working_dir")), str(first.get("created", ""))), None


def is_database(tables: Mapping[str, frozenset[str]]) -> bool:
    """Return whether a database with these tables belongs to goose."""
    return {"sessions", "messages"} <= tables.keys() and {"session_id", "content_json"} <= tables["messages"]


def sessions_in_database(database: ForeignDatabase) -> Iterator[GooseSession]:
    """Yield the sessions in a database.

    :raises ArgumentError: the database is damaged.
    """
    columns = ("id", "working_dir", "created_at", "updated_at", "session_type", "model_config_json", "name")
    for row in database.columns("sessions", (*columns, "description", "user_set_name"), "ORDER BY id"):
        name, cwd, created = text(row["id"]), text(row.get("working_dir")), str(row.get("created_at"))
        if not name or row.get("session_type") == "hidden":
            continue
        try:
            model = text(parse_object(text(row.get("model_config_json"))).get("model_name"))
        except Damaged:
            model = ""
        yield GooseSession(
            name=name,
            session_id=_session_id(name, cwd, created),
            title=text(row.get("name")) or text(row.get("description")),
            title_by_user=bool(row.get("user_set_name")),
            cwd=cwd,
            model=model,
            created_ms=time_ms(row.get("created_at")),
            updated_ms=time_ms(row.get("updated_at")),
        )


def read_database(database: ForeignDatabase, session: GooseSession, new: NewConversation, problems: Problems) -> None:
    """Import a session from a database.

    :raises ArgumentError: the database is damaged.
    """
    to = new(session.session_id)
    to.set_cwd(session.cwd)
    to.set_title(session.title, by_user=session.title_by_user)
    to.set_model(session.model)
    to.at(session.created_ms)
    columns = ("id", "role", "content_json", "created_timestamp", "timestamp", "metadata_json")
    rows = database.columns("messages", columns, "WHERE session_id = ? ORDER BY id", (session.name,))
    _read(to, _messages_of(rows, database.path, problems), problems)
    to.at(session.updated_ms)


def read_file(path: Path, session_id: str, parent_id: str | None, new: NewConversation, problems: Problems) -> None:
    """Import a file. Usually the first line describes the session. Each other line is a message."""
    to = new(session_id, parent_id=parent_id)

    def messages() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, line in read_lines(path, problems):
            if _is_message(line):
                yield f"{path}, line {number}", line
            elif number == 1:
                to.set_cwd(line.get("working_dir"))
                to.set_title(line.get("description"))
            else:
                problems.skip_line(path, number, "it is not a goose message")

    _read(to, messages(), problems)


def _read(to: ConversationBuilder, messages: Iterable[tuple[str, Mapping[str, Any]]], problems: Problems) -> None:
    reader = _GooseReader(to, problems)
    for place, message in messages:
        try:
            reader.add(place, message)
        except RecursionError:
            problems.skip_line(place, None, "its JSON is nested too deeply")


class _GooseReader:
    """Adds messages of goose to a conversation. A compaction by goose hides older messages from the model and inserts a
    summary that only the model sees."""

    def __init__(self, conversation: ConversationBuilder, problems: Problems) -> None:
        self._to = conversation
        self._problems = problems
        self._has_hidden = False
        """Whether some message so far is hidden from the model."""
        self._is_after_summary = False
        """Whether the message before this one was a summary, or a remark of goose about a summary."""

    def add(self, place: str, message: Mapping[str, Any]) -> None:
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
            self._add_user(place, content, for_user=for_user)

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

    def _add_user(self, place: str, content: Sequence[Mapping[str, Any]], *, for_user: bool) -> None:
        for part in content:
            if part.get("type") == "toolResponse":
                output, images, is_error = _output(as_object(part.get("toolResult")))
                if not self._to.result(text(part.get("id")), output, images=images, is_error=is_error):
                    self._problems.skip_line(place, None, "a tool result without its call")
        parts = _parts(content)
        if for_user:
            self._to.user(parts)
        else:
            self._to.remind("\n".join(part.text for part in parts if isinstance(part, Text)))


def _messages_of(
    rows: Iterable[Mapping[str, Any]], path: Path, problems: Problems
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for row in rows:
        place = f"{path}, message {row['id']}"
        try:
            value = parse(content if isinstance(content := row["content_json"], str | bytes) else "")
            seen = parse_object(row["metadata_json"]) if text(row.get("metadata_json")) else {}
        except Damaged as error:
            problems.skip_line(place, None, str(error))
            continue
        yield (
            place,
            {
                "role": row.get("role"),
                "created": row.get("created_timestamp") or row.get("timestamp"),
                "content": value,
                "metadata": seen,
            },
        )


def _is_message(line: Mapping[str, Any]) -> bool:
    content = line.get("content")
    return "created" in line and line.get("role") in ("user", "assistant") and isinstance(content, list)


def _session_id(name: str, cwd: str, created: str) -> str:
    """Return the id of a session. goose names sessions by day and number, so two sessions on different machines can
    have the same name. To keep them apart, the id also depends on the session's directory and time."""
    mark = hashlib.sha256(f"{name}\0{cwd}\0{created}".encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return stable_id(TOOL, name, mark)


def _parts(content: Sequence[Mapping[str, Any]]) -> list[Part]:
    found: list[Part | None] = []
    for part in content:
        if part.get("type") == "text":
            found.append(Text(text=text(part.get("text"))))
        elif part.get("type") == "image":
            found.append(image_of(part.get("data"), part.get("mimeType")))
        elif part.get("type") == "resource":
            found.append(Text(text=text(as_object(part.get("resource")).get("text"))))
    return [part for part in found if part is not None]


def _output(result: Mapping[str, Any]) -> tuple[str, list[Image], bool]:
    if result.get("status") == "error":
        return text(result.get("error")), [], True
    value = result.get("value")
    is_error = isinstance(value, dict) and value.get("isError") is True
    parts = _parts(objects(value["content"] if isinstance(value, dict) and "content" in value else value))
    texts = [part.text for part in parts if isinstance(part, Text)]
    return "\n".join(texts), [part for part in parts if isinstance(part, Image)], is_error
