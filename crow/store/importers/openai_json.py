"""Imports conversations in the message format of OpenAI's Chat Completions API, from JSON or JSONL files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crow.domain.messages import Image, Part, Text, Usage
from crow.store.importers.builder import ConversationBuilder, NewConversation
from crow.store.importers.files import (
    Damaged,
    Problems,
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
from crow.store.importers.files import obj as as_object
from crow.store.importers.parts import linked_part, stable_id

TOOL = "openai"
"""The beginning of the ids of imported sessions."""
NAME = "openai-json"
"""The name for users."""

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def recognise(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether `lines` are the first lines of a JSONL file with one conversation per line."""
    return bool(lines) and _is_conversation(lines[0])


def read_json(path: Path, new: NewConversation, problems: Problems) -> bool:
    """Import a JSON file. The file may contain the list of messages of one conversation, an object with the member
    `messages`, or a list of such objects. Return false if it contains something else."""
    try:
        value = read_document(path)
    except (OSError, Damaged) as error:
        problems.skip_file(path, readable(error))
        return True
    if _is_message_list(value):
        value = [{"messages": value}]
    elif isinstance(value, dict):
        value = [value]
    found = False
    for number, one in enumerate(items(value), 1):
        if isinstance(one, dict) and _is_conversation(one):
            place = f"{path}, conversation {number}" if len(value) > 1 else str(path)
            _read(one, path, place, new, problems)
            found = True
    return found


def read_jsonl(path: Path, new: NewConversation, problems: Problems) -> None:
    """Import a JSONL file. Each line is an object with the member `messages`."""
    for number, line in read_lines(path, problems):
        if _is_conversation(line):
            _read(line, path, f"{path}, line {number}", new, problems)
        else:
            problems.skip_line(path, number, "it has no messages")


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
    try:
        name = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:24]
    except RecursionError:
        problems.skip_line(place, None, "its JSON is nested too deeply")
        return
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
        try:
            problem = _add(to, message)
        except RecursionError:
            problem = "its JSON is nested too deeply"
        if problem:
            problems.skip_line(f"{place}, message {number}", None, problem)
    to.at(updated)


def _add(to: ConversationBuilder, message: Any) -> str:
    """Add a message. Return why it cannot be added, or an empty string."""
    if not isinstance(message, dict) or text(message.get("role")) not in _ROLES:
        return "a message without a known role"
    to.at(time_ms(message.get("created_at", message.get("timestamp"))))
    parts = _parts(message.get("content"))
    words = "\n".join(part.text for part in parts if isinstance(part, Text))
    match message["role"]:
        case "user":
            to.user(parts)
        case "assistant":
            to.set_model(message.get("model"))
            to.answer()
            to.think(text(message.get("reasoning_content")) or text(message.get("reasoning")))
            to.say(words or text(message.get("refusal")))
            for call in objects(message.get("tool_calls")):
                function = as_object(call.get("function")) or as_object(call.get("custom"))
                arguments = function.get("arguments", function.get("input"))
                to.call(text(call.get("id")), text(function.get("name")), arguments)
            if function := as_object(message.get("function_call")):
                to.call(text(function.get("name")), text(function.get("name")), function.get("arguments"))
            to.report_usage(_usage(message.get("usage")), again=True)
        case "tool" | "function":
            call_id = text(message.get("tool_call_id")) or text(message.get("name"))
            images = [part for part in parts if isinstance(part, Image)]
            if not to.result(call_id, words, images=images):
                return "a tool result without its call"
    return ""


def _parts(content: Any) -> list[Part]:
    if isinstance(content, str):
        return [Text(text=content)] if content else []
    found: list[Part | None] = []
    for part in objects(content):
        match part.get("type"):
            case "text" | "input_text" | "output_text":
                found.append(Text(text=text(part.get("text"))))
            case "refusal":
                found.append(Text(text=text(part.get("refusal"))))
            case "image_url" | "input_image":
                url = part.get("image_url")
                found.append(linked_part(as_object(url).get("url", url)))
            case "input_audio" | "file":
                found.append(Text(text="[A file that was attached here was not imported.]"))
    return [part for part in found if part is not None]


def _usage(value: Any) -> Usage:
    usage = as_object(value)
    return Usage(
        input_tokens=count(usage.get("prompt_tokens")),
        output_tokens=count(usage.get("completion_tokens")),
        cached_tokens=count(as_object(usage.get("prompt_tokens_details")).get("cached_tokens")),
        reasoning_tokens=count(as_object(usage.get("completion_tokens_details")).get("reasoning_tokens")),
    )
