"""Imports sessions of opencode: from its SQLite database, or from the JSON files of older versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crow.domain.messages import FinishReason, Image, Part, Text, Usage
from crow.store.importers.builder import ConversationBuilder, NewConversation
from crow.store.importers.databases import ForeignDatabase
from crow.store.importers.files import (
    Damaged,
    Problems,
    cost,
    count,
    objects,
    parse_object,
    read_document,
    readable,
    text,
    time_ms,
    total,
)
from crow.store.importers.files import obj as as_object
from crow.store.importers.parts import linked_part, stable_id

TOOL = "opencode"
"""The beginning of the ids of imported sessions."""
NAME = "opencode"
"""The name for users."""
DATABASE = "opencode.db"

_FINISH: Mapping[str, FinishReason] = {"length": "length", "content-filter": "refusal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpencodeSession:
    """A session as opencode describes it. Times are Unix milliseconds."""

    name: str
    """The id that opencode uses."""
    session_id: str
    """The id that the session gets in crow."""
    parent_id: str | None
    title: str
    cwd: str
    created_ms: int | None
    updated_ms: int | None
    archived: bool
    undone_from: str
    """The id of the first message that the user has undone, or empty if no message is undone. All later messages are
    undone, too."""


Messages = Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]
"""The messages of a session in order, each with its parts. Each message and each part has a member `id`."""


def is_storage(directory: Path) -> bool:
    """Return whether a directory is the `storage` directory of opencode."""
    return all(os.path.isdir(directory / name) for name in ("session", "message", "part"))  # raises no OSError


def is_database(tables: Mapping[str, frozenset[str]]) -> bool:
    """Return whether a database with these tables belongs to opencode."""
    return {"session", "message", "part"} <= tables.keys() and {"id", "directory"} <= tables["session"]


def sessions_in_files(storage: Path, problems: Problems) -> Iterator[tuple[OpencodeSession, Path]]:
    """Yield the sessions in a `storage` directory. Each session is paired with its file."""
    folders = _members(storage / "session", problems)
    for path in [file for folder in folders for file in _json_files(folder, problems)]:
        value = _document(path, problems)
        if value is not None:
            times = as_object(value.get("time"))
            undone = as_object(value.get("revert"))
            parent = text(value.get("parentID"))
            yield (
                OpencodeSession(
                    name=path.stem,
                    session_id=stable_id(TOOL, path.stem),
                    parent_id=stable_id(TOOL, parent) if parent else None,
                    title=text(value.get("title")),
                    cwd=text(value.get("directory")),
                    created_ms=time_ms(times.get("created")),
                    updated_ms=time_ms(times.get("updated")),
                    archived=bool(times.get("archived")),
                    undone_from=text(undone.get("messageID")),
                ),
                path,
            )


def sessions_in_database(database: ForeignDatabase) -> Iterator[OpencodeSession]:
    """Yield the sessions in a database.

    :raises ArgumentError: the database is damaged.
    """
    columns = ("id", "directory", "parent_id", "title", "revert", "time_created", "time_updated", "time_archived")
    for row in database.columns("session", columns, "ORDER BY id"):
        name, parent = text(row["id"]), text(row.get("parent_id"))
        try:
            undone = parse_object(text(row.get("revert"))) if row.get("revert") else {}
        except Damaged:
            undone = {}
        if name:
            yield OpencodeSession(
                name=name,
                session_id=stable_id(TOOL, name),
                parent_id=stable_id(TOOL, parent) if parent else None,
                title=text(row.get("title")),
                cwd=text(row["directory"]),
                created_ms=time_ms(row.get("time_created")),
                updated_ms=time_ms(row.get("time_updated")),
                archived=bool(row.get("time_archived")),
                undone_from=text(undone.get("messageID")),
            )


def messages_in_files(storage: Path, session: OpencodeSession, problems: Problems) -> Messages:
    """Yield the messages of a session in a `storage` directory."""
    found: list[tuple[int, str, Mapping[str, Any]]] = []
    for path in _json_files(storage / "message" / session.name, problems):
        value = _document(path, problems)
        if value is not None:
            created = time_ms(as_object(value.get("time")).get("created"))
            found.append((created or 0, path.stem, {**value, "id": path.stem}))
    for _, name, message in sorted(found, key=lambda one: one[:2]):
        parts: list[Mapping[str, Any]] = []
        for path in _json_files(storage / "part" / name, problems):
            part = _document(path, problems)
            if part is not None:
                parts.append({**part, "id": path.stem})
        yield message, parts


def messages_in_database(database: ForeignDatabase, session: OpencodeSession, problems: Problems) -> Messages:
    """Yield the messages of a session in a database.

    :raises ArgumentError: the database is damaged.
    """

    def documents(table: str, column: str, name: str, order: str) -> Iterator[Mapping[str, Any]]:
        for row in database.columns(table, ("id", "data"), f"WHERE {column} = ? ORDER BY {order}", (name,)):
            data = row.get("data")
            try:
                yield {**parse_object(data if isinstance(data, str | bytes) else ""), "id": text(row["id"])}
            except Damaged as error:
                problems.skip_line(f"{database.path}, {table} {text(row['id'])}", None, str(error))

    for message in documents("message", "session_id", session.name, "time_created, id"):
        yield message, list(documents("part", "message_id", message["id"], "id"))


def read(
    session: OpencodeSession, messages: Callable[[], Messages], place: str, new: NewConversation, problems: Problems
) -> None:
    """Import a session. `place` tells the user where the session is."""
    to = new(session.session_id, parent_id=session.parent_id)
    to.set_cwd(session.cwd)
    to.at(session.created_ms)
    # Skip the automatic titles of new sessions and subagents. The first prompt is a better title.
    if not session.title.startswith(("New session - ", "Child session - ")):
        to.set_title(session.title)
    to.archived = session.archived
    reader = _OpencodeReader(to)
    undone: int | None = None
    is_undone = False
    for message, parts in messages():
        if session.undone_from and message["id"] == session.undone_from and not is_undone:
            is_undone, undone = True, to.end_step()
        try:
            reader.add(message, parts)
        except RecursionError:
            problems.skip_line(f"{place}, message {message['id']}", None, "its JSON is nested too deeply")
    if is_undone:
        to.go(undone)
    to.at(session.updated_ms)


class _OpencodeReader:
    """Adds messages of opencode to a conversation. opencode stores a compaction as two messages: one of the user with a
    part `compaction`, and an answer that is the summary."""

    def __init__(self, conversation: ConversationBuilder) -> None:
        self._to = conversation
        self._first: dict[str, int] = {}
        """Maps the id of a message to its first entry. Messages that crow left out are missing."""
        self._is_compacting = False
        """Whether the summary of a compaction is still to come. The next two values describe that compaction."""
        self._tail = ""
        """The id of the first message that the compaction keeps, or empty if it keeps none."""
        self._is_automatic = True
        """Whether opencode, not the user, started the compaction."""

    def add(self, message: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> None:
        """Add a message."""
        times = as_object(message.get("time"))
        self._to.at(time_ms(times.get("created")))
        if message.get("role") == "user":
            self._add_user(message, parts)
        elif message.get("role") == "assistant":
            self._add_answer(message, parts)

    def _add_user(self, message: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> None:
        compaction = next((part for part in parts if part.get("type") == "compaction"), None)
        if compaction is not None:
            self._is_compacting = True
            self._is_automatic = compaction.get("auto") is not False
            self._tail = text(compaction.get("tail_start_id"))
            return
        shown: list[Part | None] = []
        added: list[str] = []
        for part in parts:
            match part.get("type"):
                case "text" if part.get("ignored") is True:
                    pass
                case "text" if part.get("synthetic") is True:
                    added.append(text(part.get("text")))
                case "text":
                    shown.append(Text(text=text(part.get("text"))))
                case "file":
                    shown.append(linked_part(part.get("url"), part.get("filename")))
                case "subtask":
                    shown.append(Text(text=text(part.get("prompt"))))
        model = as_object(message.get("model"))
        self._to.set_model(model.get("modelID"))
        number = self._to.user([part for part in shown if part is not None])
        for words in filter(str.strip, added):
            self._to.remind(words)
            number = number or self._to.leaf
        if number is not None:
            self._first[message["id"]] = number

    def _add_answer(self, message: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> None:
        to = self._to
        error = as_object(message.get("error"))
        words = "\n\n".join(text(part.get("text")) for part in parts if part.get("type") == "text")
        if message.get("summary") is True:
            if self._is_compacting and not error:
                to.checkpoint(words, first_kept=self._first.get(self._tail), by_user=not self._is_automatic)
            self._is_compacting = False
            return
        to.end_step()
        before = to.leaf
        to.set_model(message.get("modelID"))
        steps = sum(part.get("type") == "step-finish" for part in parts)
        for part in parts:
            self._add_part(part, has_several_steps=steps > 1)
        if steps <= 1:
            to.report_usage(_usage(message.get("tokens")), cost(message.get("cost")), again=True)
        to.finish_answer(_FINISH.get(text(message.get("finish")), "stop"))
        if error.get("name") == "MessageAbortedError":
            to.finish_answer("interrupted")
            to.stop("cancelled")
        elif error:
            detail = text(as_object(error.get("data")).get("message")) or text(error.get("name"))
            to.remark(detail)
            to.stop("error", detail)
        if to.end_step() != before and before is not None:
            self._first[message["id"]] = before + 1

    def _add_part(self, part: Mapping[str, Any], *, has_several_steps: bool) -> None:
        to = self._to
        match part.get("type"):
            case "step-start":
                to.end_step()
                to.answer()
            case "step-finish" if has_several_steps:
                to.report_usage(_usage(part.get("tokens")), cost(part.get("cost")), again=True)
            case "text" if part.get("ignored") is not True:
                to.say(text(part.get("text")))
            case "reasoning":
                to.think(text(part.get("text")))
            case "tool":
                state = as_object(part.get("state"))
                call_id = text(part.get("callID")) or text(part.get("id"))
                to.call(call_id, text(part.get("tool")), state.get("input"))
                if state.get("status") in ("completed", "error"):
                    times = as_object(state.get("time"))
                    started, ended = count(times.get("start")), count(times.get("end"))
                    duration = max(0, ended - started) if started is not None and ended is not None else 0
                    images = [linked_part(file.get("url")) for file in objects(state.get("attachments"))]
                    failed = state.get("status") == "error"
                    to.result(
                        call_id,
                        text(state.get("error" if failed else "output")),
                        images=[image for image in images if isinstance(image, Image)],
                        is_error=failed,
                        duration_ms=duration,
                        title="" if failed else text(state.get("title")),
                    )


def _usage(tokens: Any) -> Usage:
    """Return the usage of an answer. In opencode, the numbers of input and output tokens do not include cached tokens
    and reasoning. In crow, they do."""
    values = as_object(tokens)
    cache = as_object(values.get("cache"))
    cached, reasoning = count(cache.get("read")), count(values.get("reasoning"))
    return Usage(
        input_tokens=total(values.get("input"), cached, cache.get("write")),
        output_tokens=total(values.get("output"), reasoning),
        cached_tokens=cached,
        reasoning_tokens=reasoning,
    )


def _json_files(folder: Path, problems: Problems) -> list[Path]:
    """Return the JSON files in a folder, sorted. The result is empty if the folder is a symbolic link, because a link
    can lead to any directory."""
    if os.path.islink(folder):
        return []
    return [path for path in _members(folder, problems) if path.suffix == ".json"]


def _members(folder: Path, problems: Problems) -> list[Path]:
    """Return the members of a folder, sorted. If the folder cannot be read, report it. The result is empty then, and
    also if there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problems.skip_file(folder, readable(error))
        return []


def _document(path: Path, problems: Problems) -> Mapping[str, Any] | None:
    try:
        value = read_document(path)
    except (OSError, Damaged) as error:
        problems.skip_file(path, readable(error))
        return None
    if isinstance(value, dict):
        return value
    problems.skip_file(path, "it is not a JSON object")
    return None
