"""Imports conversations in the message format of OpenAI's Chat Completions API, from JSON or JSONL files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crow.domain.messages import Usage
from crow.store.importers.builder import ConversationBuilder, NewConversation, Source
from crow.store.importers.files import (
    Damaged,
    Problems,
    as_object,
    count,
    items,
    modified_ms,
    objects,
    read_document,
    read_lines,
    readable,
    text,
    time_ms,
)
from crow.store.importers.parts import parts_of, stable_id, words_of

TOOL = "openai"
"""The beginning of the ids of imported sessions."""
NAME = "openai-json"
"""The name for users."""

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def recognise(path: Path, lines: Sequence[Mapping[str, Any]]) -> Source | None:
    """Return the conversations in a JSONL file with one conversation per line, or None if the file is not of that kind.
    `lines` are the first lines."""
    if not lines or not _is_conversation(lines[0]):
        return None
    return Source(tool=NAME, place=str(path), updated_ms=modified_ms(path), read=partial(_read_lines, path))


def document(path: Path, *, is_expected: bool) -> Source:
    """Return the conversations in a JSON file. With `is_expected`, a file without conversations is reported."""
    read = partial(_read_document, path, is_expected)
    return Source(tool=NAME, place=str(path), updated_ms=modified_ms(path), read=read)


def _read_document(path: Path, is_expected: bool, new: NewConversation, problems: Problems) -> None:
    """Import a JSON file. The file may contain the list of messages of one conversation, an object with the member
    `messages`, or a list of such objects."""
    try:
        value = read_document(path)
    except (OSError, Damaged) as error:
        problems.skip_file(path, readable(error))
        return
    if _is_message_list(value):
        value = [{"messages": value}]
    elif isinstance(value, dict):
        value = [value]
    found = False
    for number, one in enumerate(items(value), 1):
        if isinstance(one, dict) and _is_conversation(one):
            place = f"{path}, conversation {number}" if len(value) > 1 else str(path)
            with problems.importing(place):
                _read(one, path, place, new, problems)
            found = True
    if is_expected and not found:
        problems.skip_file(path, "it has no messages")


def _read_lines(path: Path, new: NewConversation, problems: Problems) -> None:
    """Import a JSONL file. Each line is an object with the member `messages`."""
    for place, line in read_lines(path, problems):
        with problems.importing(place):
            if _is_conversation(line):
                _read(line, path, place, new, problems)
            else:
                problems.skip("it has no messages")


def _is_conversation(value: Mapping[str, Any]) -> bool:
    return _is_message_list(value.get("messages"))


def _is_message_list(value: Any) -> bool:
    return bool(items(value)) and all(
        isinstance(one, dict) and text(one.get("role")) in _ROLES and ("content" in one or "tool_calls" in one)
        for one in value[:20]
    )


def _read(value: Mapping[str, Any], path: Path, place: str, new: NewConversation, problems: Problems) -> None:
    """Import a conversation. `place` tells the user where in the file the conversation is."""
    messages = value["messages"]
    name = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:24]
    to = new(stable_id(TOOL, name))
    to.set_title(value.get("title"))
    to.set_cwd(value.get("cwd"))
    to.set_model(value.get("model"))
    created, updated = (
        next((time_ms(value[key]) for key in keys if key in value), None)
        for keys in (("created_at", "created"), ("updated_at", "updated"))
    )
    to.at(created or updated or modified_ms(path) or None)
    for number, message in enumerate(messages, 1):
        with problems.importing(f"{place}, message {number}"):
            _add(to, message, problems)
    to.at(updated)


def _add(to: ConversationBuilder, message: Any, problems: Problems) -> None:
    """Add a message, or report why it cannot be added."""
    if not isinstance(message, dict) or text(message.get("role")) not in _ROLES:
        problems.skip("a message without a known role")
        return
    to.at(time_ms(message.get("created_at", message.get("timestamp"))))
    parts = parts_of(message.get("content"))
    match message["role"]:
        case "user":
            to.user(parts)
        case "assistant":
            to.set_model(message.get("model"))
            to.answer()
            to.think(text(message.get("reasoning_content")) or text(message.get("reasoning")))
            to.say(words_of(parts) or text(message.get("refusal")))
            for call in objects(message.get("tool_calls")):
                function = as_object(call.get("function")) or as_object(call.get("custom"))
                arguments = function.get("arguments", function.get("input"))
                to.call(text(call.get("id")), text(function.get("name")), arguments)
            if function := as_object(message.get("function_call")):
                to.call(text(function.get("name")), text(function.get("name")), function.get("arguments"))
            to.report_usage(_usage(message.get("usage")), again=True)
        case "tool" | "function":
            call_id = text(message.get("tool_call_id")) or text(message.get("name"))
            to.result(call_id, parts)


def _usage(value: Any) -> Usage:
    usage = as_object(value)
    return Usage(
        input_tokens=count(usage.get("prompt_tokens")),
        output_tokens=count(usage.get("completion_tokens")),
        cached_tokens=count(as_object(usage.get("prompt_tokens_details")).get("cached_tokens")),
        reasoning_tokens=count(as_object(usage.get("completion_tokens_details")).get("reasoning_tokens")),
    )
