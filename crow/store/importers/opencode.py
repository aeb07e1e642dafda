"""Imports sessions of opencode: from its SQLite database, or from the JSON files of older versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from crow.domain.messages import FinishReason, Part, Usage
from crow.store.importers.builder import ConversationBuilder, NewConversation, Source
from crow.store.importers.databases import ForeignDatabase
from crow.store.importers.files import (
    Damaged,
    Problems,
    as_object,
    cost,
    count,
    modified_ms,
    objects,
    parse_object,
    read_document,
    readable,
    text,
    time_ms,
    total,
)
from crow.store.importers.parts import linked_part, parts_of, stable_id

TOOL = "opencode"
"""The beginning of the ids of imported sessions."""
NAME = "opencode"
"""The name for users."""
DATABASE = "opencode.db"

_FINISH: Mapping[str, FinishReason] = {"length": "length", "content-filter": "refusal"}


Messages = Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]
"""The messages of a session in order, each with its parts. Each message and each part has a member `id`."""


def is_storage(directory: Path) -> bool:
    """Return whether a directory is the `storage` directory of opencode."""
    # Unlike `Path.is_dir`, `os.path.isdir` never raises an OSError.
    return all(os.path.isdir(directory / name) for name in ("session", "message", "part"))


def is_database(tables: Mapping[str, frozenset[str]]) -> bool:
    """Return whether a database with these tables belongs to opencode."""
    return {"session", "message", "part"} <= tables.keys() and {"id", "directory"} <= tables["session"]


def sessions_in_files(storage: Path, problems: Problems) -> Iterator[Source]:
    """Yield the sessions in a `storage` directory."""
    folders = _members(storage / "session", problems)
    for path in [file for folder in folders for file in _json_files(folder, problems)]:
        session = _document(path, problems)
        if session is not None:
            messages = partial(_messages_in_files, storage, path.stem)
            yield _source(path.stem, session, str(path), messages, modified_ms(path))


def sessions_in_database(database: ForeignDatabase) -> Iterator[Source]:
    """Yield the sessions in a database.

    :raises ArgumentError: the database is damaged.
    """
    columns = ("id", "directory", "parent_id", "title", "revert", "time_created", "time_updated", "time_archived")
    for row in database.columns("session", columns, "ORDER BY id"):
        name = text(row["id"])
        try:
            undone = parse_object(text(row.get("revert"))) if row.get("revert") else {}
        except Damaged:
            undone = {}
        session = {
            "directory": row["directory"],
            "parentID": row.get("parent_id"),
            "title": row.get("title"),
            "time": {kind: row.get(f"time_{kind}") for kind in ("created", "updated", "archived")},
            "revert": undone,
        }
        if name:
            messages = partial(_messages_in_database, database, name)
            yield _source(name, session, f"{database.path}, session {name}", messages, 0)


def _source(
    name: str,
    session: Mapping[str, Any],
    place: str,
    messages: Callable[[Problems], Messages],
    changed_ms: int,
) -> Source:
    """Return a session. `name` is the id that opencode uses. `session` has the members that older versions of opencode
    write to the file of a session."""
    session_id, parent = stable_id(TOOL, name), text(session.get("parentID"))
    parent_id = stable_id(TOOL, parent) if parent else None
    return Source(
        tool=NAME,
        place=place,
        session_id=session_id,
        parent_id=parent_id,
        updated_ms=time_ms(as_object(session.get("time")).get("updated")) or changed_ms,
        read=partial(_read, session, place, messages, session_id, parent_id),
    )


def _messages_in_files(storage: Path, session: str, problems: Problems) -> Messages:
    """Yield the messages of a session in a `storage` directory."""
    found: list[tuple[int, str, Mapping[str, Any]]] = []
    for path in _json_files(storage / "message" / session, problems):
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


def _messages_in_database(database: ForeignDatabase, session: str, problems: Problems) -> Messages:
    """Yield the messages of a session in a database.

    :raises ArgumentError: the database is damaged.
    """

    def documents(table: str, column: str, name: str, order: str) -> Iterator[Mapping[str, Any]]:
        for row in database.columns(table, ("id", "data"), f"WHERE {column} = ? ORDER BY {order}", (name,)):
            data = row.get("data")
            try:
                yield {**parse_object(data if isinstance(data, str | bytes) else ""), "id": text(row["id"])}
            except Damaged as error:
                problems.skip_line(f"{database.path}, {table} {text(row['id'])}", str(error))

    for message in documents("message", "session_id", session, "time_created, id"):
        yield message, list(documents("part", "message_id", message["id"], "id"))


def _read(
    session: Mapping[str, Any],
    place: str,
    messages: Callable[[Problems], Messages],
    session_id: str,
    parent_id: str | None,
    new: NewConversation,
    problems: Problems,
) -> None:
    to = new(session_id, parent_id)
    times = as_object(session.get("time"))
    to.set_cwd(session.get("directory"))
    to.at(time_ms(times.get("created")))
    # Skip the automatic titles of new sessions and subagents. The first prompt is a better title.
    if not text(session.get("title")).startswith(("New session - ", "Child session - ")):
        to.set_title(session.get("title"))
    to.archived = bool(times.get("archived"))
    reader = _OpencodeReader(to)
    # The user has undone the message with this id and all later ones. The id is empty if no message is undone.
    undone_from = text(as_object(session.get("revert")).get("messageID"))
    undone: int | None = None
    is_undone = False
    for message, parts in messages(problems):
        if undone_from and message["id"] == undone_from and not is_undone:
            is_undone, undone = True, to.end_step()
        with problems.importing(f"{place}, message {message['id']}"):
            reader.add(message, parts)
    if is_undone:
        to.go(undone)
    to.at(time_ms(times.get("updated")))


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
        shown: list[Part] = []
        added: list[str] = []
        for part in parts:
            match part.get("type"):
                case "text" if part.get("ignored") is True:
                    pass
                case "text" if part.get("synthetic") is True:
                    added.append(text(part.get("text")))
                case "text":
                    shown += parts_of(part.get("text"))
                case "file":
                    shown += filter(None, [linked_part(part.get("url"), part.get("filename"))])
                case "subtask":
                    shown += parts_of(part.get("prompt"))
        model = as_object(message.get("model"))
        self._to.set_model(model.get("modelID"))
        number = self._to.user(shown)
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
                    parts = parts_of(state.get("error" if state.get("status") == "error" else "output"))
                    for file in objects(state.get("attachments")):
                        parts += filter(None, [linked_part(file.get("url"))])
                    failed = state.get("status") == "error"
                    to.result(
                        call_id,
                        parts,
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
        cache_write_tokens=count(cache.get("write")),
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
