"""Imports sessions of Codex: one `rollout-*.jsonl` file per session."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from crow.domain.messages import Usage
from crow.store.importers.builder import ConversationBuilder, NewConversation, Source
from crow.store.importers.files import (
    Damaged,
    Problems,
    as_object,
    count,
    modified_ms,
    objects,
    parse_object,
    read_lines,
    text,
    time_ms,
)
from crow.store.importers.parts import parts_of, short_line, stable_id, words_of

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
"""The beginnings of messages that Codex sends with the role `user`, although the user did not write them."""
_REMOTE_SUMMARY = "[Codex compacted the conversation here. It stored the summary encrypted.]"
"""Replaces a summary that Codex stored encrypted."""
_INDEX_DEPTH = 5
"""Crow looks for the index in this many directories, beginning with the directory of the session's file."""


def recognise(path: Path, lines: Sequence[Mapping[str, Any]]) -> Source | None:
    """Return the session in a file, or None if Codex did not write the file. `lines` are the first lines."""
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
    session_id, parent_id = stable_id(TOOL, name), stable_id(TOOL, parent) if parent and parent != name else None
    return Source(
        tool=NAME,
        place=str(path),
        session_id=session_id,
        parent_id=parent_id,
        updated_ms=modified_ms(path),
        read=partial(_read, path, session_id, parent_id),
    )


def _read(path: Path, session_id: str, parent_id: str | None, new: NewConversation, problems: Problems) -> None:
    to = new(session_id, parent_id)
    to.archived = "archived_sessions" in path.parts
    rollout = _Rollout(to)
    for place, line in read_lines(path, problems):
        with problems.importing(place):
            rollout.add(line)
    index = next((file for folder in [*path.parents][:_INDEX_DEPTH] if (file := folder / INDEX).is_file()), None)
    if index is not None:
        to.set_title(_titles_in(index, modified_ms(index)).get(session_id), by_user=True)


@lru_cache(maxsize=1)
def _titles_in(index: Path, _modified_ms: int) -> Mapping[str, str]:
    """Map the ids of sessions to their titles in an index. Damaged lines are ignored. The index is read only once for
    all sessions in it, unless it changes meanwhile."""
    lines = read_lines(index, Problems())
    return {stable_id(TOOL, text(line.get("id"))): text(line.get("thread_name")) for _, line in lines}


class _Rollout:
    """A file of Codex that is being imported. Codex calls such a file a rollout."""

    def __init__(self, conversation: ConversationBuilder) -> None:
        self._to = conversation
        self._has_meta = False
        """Whether the line with the session's own directory was read."""
        self._total: Mapping[str, Any] = {}
        """The session's total token counts, as the newest event with token counts reported them."""

    def add(self, line: Mapping[str, Any]) -> None:
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
                self._add_item(payload)
            case "event_msg":
                self._add_event(payload)
            case "compacted":
                self._compact(payload)
            case _ if kind in _ITEMS:
                self._add_item(line)

    def _add_item(self, item: Mapping[str, Any]) -> None:
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
                call_id = text(item.get("id"))
                to.call(call_id, "web_search", as_object(item.get("action")))
                to.result(call_id, parts_of("[Codex does not store the results of web searches.]"))
            case "function_call_output" | "custom_tool_call_output":
                output, is_error, duration_ms = _output(item.get("output"))
                call_id = text(item.get("call_id"))
                to.result(call_id, parts_of(output), is_error=is_error, duration_ms=duration_ms)

    def _add_message(self, item: Mapping[str, Any]) -> None:
        parts = parts_of(item.get("content"))
        words = words_of(parts)
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
        prompts = [
            words_of(parts_of(message.get("content")))
            for message in history
            if message.get("type", "message") == "message" and message.get("role") == "user"
        ]
        self._to.checkpoint(text(item.get("message")) or _REMOTE_SUMMARY, kept_prompts=prompts)


def _output(output: Any) -> tuple[Any, bool, int]:
    """Return a result's content, whether it is an error, and the duration of the call in milliseconds. For a command,
    `output` is a string of JSON with the output, exit code and duration of the command."""
    if isinstance(output, dict) and "content" in output:
        content, failed, duration_ms = _output(output["content"])
        return content, failed or output.get("success") is False, duration_ms
    if output is None or isinstance(output, list):
        return output, False, 0
    words = output if isinstance(output, str) else short_line(json.dumps(output), 4000)
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
            return value["output"], meta.get("exit_code", 0) != 0, duration_ms
    return words, False, 0
