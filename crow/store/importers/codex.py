"""Imports sessions of Codex: one `rollout-*.jsonl` file per session."""

from __future__ import annotations

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
    objects,
    parse_object,
    read_lines,
    text,
    time_ms,
)
from crow.store.importers.files import obj as as_object
from crow.store.importers.parts import linked_part, short_line, stable_id

TOOL = "codex"
"""The beginning of the ids of imported sessions."""
NAME = "codex"
"""The name for users."""
INDEX = "session_index.jsonl"
"""The name of the file in which Codex keeps the titles of its sessions."""

_ITEMS = frozenset(
    [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "local_shell_call",
        "web_search_call",
    ]
)
"""The kinds of items of a conversation."""
_INJECTED = (
    "<environment_context>",
    "<user_instructions>",
    "<permissions instructions>",
    "<collaboration_mode>",
    "<skills_instructions>",
    "<INSTRUCTIONS>",
    "# AGENTS.md instructions",
    "<apps_instructions>",
    "<plugins_instructions>",
    "<personality_spec>",
)
"""The beginnings of messages that Codex sends as the user's, but the user did not write."""
_REMOTE_SUMMARY = "[Codex compacted the conversation here. It stored the summary encrypted.]"
"""Stands for the summary."""
_INDEX_DEPTH = 5
"""Crow looks for the index in this many directories, beginning with the directory of the session's file."""


def recognise(path: Path, lines: Sequence[Mapping[str, Any]]) -> tuple[str, str | None] | None:
    """Return the id of the session in a file, and the id of its parent if the session has one. Return None if Codex did
    not write the file."""
    if not lines:
        return None
    first = lines[0]
    if first.get("type") == "session_meta":
        meta = as_object(first.get("payload"))
        spawn = as_object(as_object(as_object(meta.get("source")).get("subagent")).get("thread_spawn"))
        parent = text(spawn.get("parent_thread_id"))
    elif "type" not in first and "id" in first and "timestamp" in first and path.name.startswith("rollout-"):
        meta, parent = first, ""
    else:
        return None
    name = text(meta.get("id")) or path.stem.removeprefix("rollout-")
    return stable_id(TOOL, name), stable_id(TOOL, parent) if parent and parent != name else None


def index_near(path: Path) -> Path | None:
    """Return the index of the Codex directory that contains the file `path`, or None if there is no index."""
    return next((file for folder in [*path.parents][:_INDEX_DEPTH] if (file := folder / INDEX).is_file()), None)


def titles_in(index: Path) -> dict[str, str]:
    """Map the ids of sessions to their titles in an index. Damaged lines are ignored."""
    lines = read_lines(index, Problems())
    return {stable_id(TOOL, text(line.get("id"))): text(line.get("thread_name")) for _, line in lines}


def read(
    path: Path, session_id: str, parent_id: str | None, title: str, new: NewConversation, problems: Problems
) -> None:
    """Import a file. `title` is the session's title in the index, or empty if the session is not in the index."""
    to = new(session_id, parent_id=parent_id)
    to.archived = "archived_sessions" in path.parts
    rollout = _Rollout(to, path, problems)
    for number, line in read_lines(path, problems):
        try:
            rollout.add(number, line)
        except RecursionError:
            problems.skip_line(path, number, "its JSON is nested too deeply")
    rollout.end(title)


class _Rollout:
    """A file of Codex that is being imported. Codex calls such a file a rollout."""

    def __init__(self, conversation: ConversationBuilder, path: Path, problems: Problems) -> None:
        self._to = conversation
        self._path = path
        self._problems = problems
        self._has_meta = False
        """Whether the line with the session's own directory was read."""
        self._total: Mapping[str, Any] = {}
        """The session's total token counts, as the newest event with token counts reported them."""

    def add(self, number: int, line: Mapping[str, Any]) -> None:
        """Add a line. Old versions of Codex wrote items without an enclosing object."""
        self._to.at(time_ms(line.get("timestamp")))
        kind, payload = text(line.get("type")), as_object(line.get("payload"))
        match kind:
            case "session_meta":
                if not self._has_meta:  # a subagent's file repeats its parent's `session_meta`
                    self._has_meta = True
                    self._to.set_cwd(payload.get("cwd"))
            case "turn_context":
                self._to.set_model(payload.get("model"))
                if not self._has_meta:
                    self._to.set_cwd(payload.get("cwd"))
            case "response_item":
                self._add_item(number, payload)
            case "event_msg":
                self._add_event(payload)
            case "compacted":
                self._compact(payload)
            case _ if kind in _ITEMS:
                self._add_item(number, line)

    def end(self, title: str) -> None:
        """Set the title. Call this after the last line."""
        self._to.set_title(title, by_user=True)

    def _add_item(self, number: int, item: Mapping[str, Any]) -> None:
        to = self._to
        match item.get("type"):
            case "message":
                self._add_message(item)
            case "reasoning":
                to.continue_answer()
                for part in [*objects(item.get("summary")), *objects(item.get("content"))]:
                    to.think(text(part.get("text")))
            case "function_call":
                to.continue_answer()
                to.call(text(item.get("call_id")), text(item.get("name")), item.get("arguments"))
            case "custom_tool_call":
                to.continue_answer()
                to.call(text(item.get("call_id")), text(item.get("name")), {"input": item.get("input")})
            case "local_shell_call":
                to.continue_answer()
                call_id = text(item.get("call_id")) or text(item.get("id"))
                to.call(call_id, "local_shell", as_object(item.get("action")))
            case "web_search_call":
                to.continue_answer()
                call_id = text(item.get("id")) or f"web_search_{number}"
                to.call(call_id, "web_search", as_object(item.get("action")))
                to.result(call_id, "[Codex does not store the results of web searches.]")
            case "function_call_output" | "custom_tool_call_output":
                output, images, is_error, duration_ms = _output(item.get("output"))
                found = to.result(
                    text(item.get("call_id")), output, images=images, is_error=is_error, duration_ms=duration_ms
                )
                if not found:
                    self._problems.skip_line(self._path, number, "a tool result without its call")

    def _add_message(self, item: Mapping[str, Any]) -> None:
        parts = _parts(item.get("content"))
        words = "\n".join(part.text for part in parts if isinstance(part, Text))
        if item.get("role") == "assistant":
            self._to.continue_answer()
            self._to.say(words)
        elif item.get("role") == "user" and words.lstrip().startswith("<turn_aborted>"):
            self._to.stop("cancelled")
        elif item.get("role") == "user" and not words.lstrip().startswith(_INJECTED):
            self._to.user(parts)

    def _add_event(self, event: Mapping[str, Any]) -> None:
        match event.get("type"):
            case "token_count":
                info = as_object(event.get("info"))
                total, last = as_object(info.get("total_token_usage")), as_object(info.get("last_token_usage"))
                # When only the rate limits have changed, the event repeats the token counts of the previous one.
                if total != self._total or not total:
                    self._total = total
                    usage = Usage(
                        input_tokens=count(last.get("input_tokens")),
                        output_tokens=count(last.get("output_tokens")),
                        cached_tokens=count(last.get("cached_input_tokens")),
                        reasoning_tokens=count(last.get("reasoning_output_tokens")),
                    )
                    self._to.report_usage(usage)
            case "thread_rolled_back":
                self._to.undo_turns(count(event.get("num_turns")) or 0)
            case "turn_aborted":
                self._to.stop("cancelled")
            case "thread_name_updated":
                self._to.set_title(event.get("thread_name"), by_user=True)
            case "error":
                message = text(event.get("message"))
                self._to.remark(message)
                self._to.stop("error", message)

    def _compact(self, item: Mapping[str, Any]) -> None:
        history = [as_object(part.get("item")) or part for part in objects(item.get("replacement_history"))]
        prompts = []
        for message in history:
            words = "\n".join(part.text for part in _parts(message.get("content")) if isinstance(part, Text))
            if message.get("type", "message") == "message" and message.get("role") == "user" and words.strip():
                prompts.append(words)
        self._to.checkpoint(text(item.get("message")) or _REMOTE_SUMMARY, kept_prompts=prompts)


def _parts(content: Any) -> tuple[Part, ...]:
    found: list[Part | None] = []
    for part in [{"text": content}] if isinstance(content, str) else objects(content):
        if "image_url" in part:
            url = part["image_url"]
            found.append(linked_part(as_object(url).get("url", url)))
        else:
            found.append(Text(text=text(part.get("text"))))
    return tuple(part for part in found if part is not None and part != Text(text=""))


def _output(output: Any) -> tuple[str, list[Image], bool, int]:
    """Return a result's text and images, whether it is an error, and the duration of the call in milliseconds. For a
    command, `output` is a string of JSON with the output, exit code and duration of the command."""
    if isinstance(output, dict) and "content" in output:
        is_error = output.get("success") is False
        inner, images, failed, duration_ms = _output(output["content"])
        return inner, images, is_error or failed, duration_ms
    if isinstance(output, list):
        parts = _parts(output)
        texts = [part.text for part in parts if isinstance(part, Text)]
        return "\n".join(texts), [part for part in parts if isinstance(part, Image)], False, 0
    words = output if isinstance(output, str) else "" if output is None else short_line(json.dumps(output), 4000)
    if words.startswith("{") and '"metadata"' in words:
        try:
            value = parse_object(words)
        except Damaged:
            value = {}
        meta = as_object(value.get("metadata"))
        if isinstance(value.get("output"), str) and meta:
            seconds = meta.get("duration_seconds")
            is_time = isinstance(seconds, int | float) and 0 <= seconds < 1e9
            duration_ms = round(float(seconds) * 1000) if is_time and seconds is not None else 0
            return value["output"], [], meta.get("exit_code", 0) != 0, duration_ms
    return words, [], False, 0
