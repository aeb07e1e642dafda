"""Imports sessions of pi: one JSONL file per session. The entries in a file form a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crow.domain.messages import FinishReason, Usage
from crow.store.importers.builder import ConversationBuilder, NewConversation, Source
from crow.store.importers.files import (
    Problems,
    as_object,
    cost,
    count,
    items,
    modified_ms,
    objects,
    read_lines,
    text,
    time_ms,
    total,
)
from crow.store.importers.parts import parts_of, stable_id, words_of

TOOL = "pi"
"""The beginning of the ids of imported sessions."""
NAME = "pi"
"""The name for users."""

_FINISH: Mapping[str, FinishReason] = {"length": "length", "aborted": "interrupted"}
_BRANCH_SUMMARY = "[A summary of a branch that the user left before this point.]\n\n"


def recognise(path: Path, lines: Sequence[Mapping[str, Any]]) -> Source | None:
    """Return the session in a file, or None if pi did not write the file. `lines` are the first lines."""
    if not lines or lines[0].get("type") != "session" or not isinstance(lines[0].get("cwd"), str):
        return None
    session_id = stable_id(TOOL, text(lines[0].get("id")) or path.stem)
    read = partial(_read, path, session_id)
    return Source(tool=NAME, place=str(path), session_id=session_id, updated_ms=modified_ms(path), read=read)


def _read(path: Path, session_id: str, new: NewConversation, problems: Problems) -> None:
    tree = _Tree(new(session_id), problems)
    for place, line in read_lines(path, problems):
        with problems.importing(place):
            tree.add(line)


class _Tree:
    """Converts pi's entries to crow's. One entry of pi can become several entries of crow, or none. If an entry of pi
    is left out, its children become children of its parent."""

    def __init__(self, conversation: ConversationBuilder, problems: Problems) -> None:
        self._to = conversation
        self._problems = problems
        self._version: int | None = None
        """The version of the format, or None before the line of the session."""
        self._lines = 0
        """The number of lines so far."""
        self._first: dict[str, int] = {}
        """Maps the id of an entry of pi to its first entry in crow. Entries of pi that crow left out
        are missing."""
        self._last: dict[str, int | None] = {}
        """Maps the id of an entry of pi to the leaf after it, or to None if the conversation was still empty."""
        self._parents: dict[str, str] = {}
        """Maps the id of an entry of pi to the id of its parent."""
        self._newest = ""
        """The id of the line before this one."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. In version 1 of the format, entries have no ids and do not form a tree."""
        to, index = self._to, self._lines
        self._lines += 1
        if line.get("type") == "session":
            if self._version is None:
                self._version = count(line.get("version")) or 1
                to.at(time_ms(line.get("timestamp")))
                to.set_cwd(line.get("cwd"))
            return
        name = text(line.get("id")) or f"#{index}"
        parent = text(line.get("parentId"))
        if parent in self._last:
            to.go(self._last[parent])
        elif "parentId" in line and line["parentId"] is None:
            to.go(None)
        else:
            parent = self._newest
            if "parentId" in line:
                self._problems.skip("the entry before it is missing, so it was put at the end")
        self._parents[name], self._newest = parent, name
        to.at(time_ms(line.get("timestamp")))
        before = to.leaf
        first = self._add(name, line)
        to.end_step()
        if to.leaf is not None and to.leaf != before:
            self._first[name] = first or to.leaf
        self._last[name] = to.leaf

    def _add(self, name: str, line: Mapping[str, Any]) -> int | None:
        """Add the entries of a line. `name` is the id of the line. If the line is a prompt, return the number of the
        prompt's entry, otherwise None."""
        to = self._to
        match line.get("type"):
            case "message":
                return self._add_message(as_object(line.get("message")))
            case "compaction":
                details = as_object(line.get("details"))
                kept = text(line.get("firstKeptEntryId")) or f"#{line.get('firstKeptEntryIndex')}"
                to.checkpoint(
                    text(line.get("summary")),
                    first_kept=self._first_from(kept, name),
                    tokens_before=count(line.get("tokensBefore")),
                    files_read=[path for path in items(details.get("readFiles")) if isinstance(path, str)],
                    files_modified=[path for path in items(details.get("modifiedFiles")) if isinstance(path, str)],
                )
            case "branch_summary":
                summary = text(line.get("summary"))
                to.remind(f"{_BRANCH_SUMMARY}{summary}" if summary.strip() else "")
            case "custom_message":
                self._add_custom(line)
            case "session_info":
                to.set_title(line.get("name"), by_user=True)
            case "model_change":
                to.set_model(line.get("modelId"))
            case "label":
                label = text(line.get("label"))
                if label and to.leaf is not None and self._last.get(text(line.get("targetId"))) == to.leaf:
                    to.label(label)
        return None

    def _first_from(self, start: str, end: str) -> int | None:
        """Return the first entry in crow of the path from `start` to `end`, or None if `start` is not above `end`.
        `start` itself may have no entry in crow, for example if it only changes the model."""
        found, name, seen = None, end, set[str]()
        while name not in seen and name in self._parents:
            seen.add(name)
            found = self._first.get(name, found)
            if name == start:
                return found
            name = self._parents[name]
        return None

    def _add_message(self, message: Mapping[str, Any]) -> int | None:
        to = self._to
        to.at(time_ms(message.get("timestamp")))
        match message.get("role"):
            case "user":
                return to.user(parts_of(message.get("content")))
            case "assistant":
                self._add_answer(message)
            case "toolResult":
                parts = parts_of(message.get("content"))
                to.result(text(message.get("toolCallId")), parts, is_error=message.get("isError") is True)
            case "bashExecution":
                command, output = text(message.get("command")), text(message.get("output"))
                if message.get("excludeFromContext") is not True:
                    code = count(message.get("exitCode"))
                    ended = f"\n\nIt ended with exit code {code}." if code else ""
                    to.remind(f"The user ran this command:\n{command}\n\nIts output:\n{output}{ended}")
                to.command(f"!{command}", output)
            case "custom" | "hookMessage":
                self._add_custom(message)
            case "branchSummary":
                to.remind(f"{_BRANCH_SUMMARY}{text(message.get('summary'))}")
            case "compactionSummary":
                to.checkpoint(text(message.get("summary")), tokens_before=count(message.get("tokensBefore")))
        return None

    def _add_answer(self, message: Mapping[str, Any]) -> None:
        to = self._to
        to.set_model(message.get("model"))
        to.answer()
        for part in objects(message.get("content")):
            match part.get("type"):
                case "text":
                    to.say(text(part.get("text")))
                case "thinking":
                    to.think(text(part.get("thinking")))
                case "toolCall":
                    to.call(text(part.get("id")), text(part.get("name")), part.get("arguments"))
        usage = as_object(message.get("usage"))
        cached = count(usage.get("cacheRead"))
        spent = Usage(
            input_tokens=total(usage.get("input"), cached, usage.get("cacheWrite")),
            output_tokens=count(usage.get("output")),
            cached_tokens=cached,
            cache_write_tokens=count(usage.get("cacheWrite")),
        )
        reason = text(message.get("stopReason"))
        to.report_usage(spent, cost(as_object(usage.get("cost")).get("total")), again=True)
        to.finish_answer(_FINISH.get(reason, "stop"))
        if reason == "aborted":
            to.stop("cancelled")
        elif reason == "error":
            words = text(message.get("errorMessage"))
            to.remark(words)
            to.stop("error", words)

    def _add_custom(self, message: Mapping[str, Any]) -> None:
        words = words_of(parts_of(message.get("content")))
        self._to.remind(words)
        if message.get("display") is True:
            self._to.remark(words)
