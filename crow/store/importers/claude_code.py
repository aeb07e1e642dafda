"""Imports sessions of Claude Code: one JSONL file per session, and one per subagent."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crow.domain.messages import FinishReason, Text, Usage
from crow.store.importers.builder import ConversationBuilder, NewConversation, Source
from crow.store.importers.files import (
    Problems,
    as_object,
    cost,
    count,
    modified_ms,
    objects,
    read_lines,
    text,
    time_ms,
    total,
)
from crow.store.importers.parts import parts_of, stable_id, words_of

TOOL = "claude"
"""The beginning of the ids of imported sessions."""
NAME = "claude-code"
"""The name for users."""

_TYPES = frozenset(
    [
        "user",
        "assistant",
        "system",
        "summary",
        "attachment",
        "progress",
        "file-history-snapshot",
        "queue-operation",
        "custom-title",
        "ai-title",
        "last-prompt",
        "agent-name",
        "mode",
        "permission-mode",
        "pr-link",
    ]
)
"""The types of the lines that Claude Code writes."""
_TAG = re.compile(
    r"\s*<(command-name|command-message|local-command-stdout|local-command-stderr|bash-input|bash-stdout)>"
)
"""Matches the beginning of a line that stands for a command of the user or its output."""
_CAVEATS = ("Caveat:", "<local-command-caveat>")
"""The beginnings of the messages that tell the model not to answer the commands below them."""
_INJECTED = ("<task-notification>", "<system-reminder>", "<teammate-message")
"""The beginnings of messages that Claude Code sends with the role `user`, although the user did not write them."""
_FINISH: Mapping[str, FinishReason] = {"max_tokens": "length", "refusal": "refusal"}


def recognise(path: Path, lines: Sequence[Mapping[str, Any]]) -> Source | None:
    """Return the session in a file, or None if Claude Code did not write the file. `lines` are the first lines."""
    typed = [line for line in lines if text(line.get("type")) in _TYPES]
    if not any("sessionId" in line or "leafUuid" in line or "messageId" in line for line in typed):
        return None
    session_id, parent_id = stable_id(TOOL, path.stem), None
    for line in typed:
        agent, session = text(line.get("agentId")), text(line.get("sessionId"))
        if line.get("isSidechain") is True and agent and session and session != path.stem:
            session_id, parent_id = _agent_id(session, agent), stable_id(TOOL, session)
            break
    return Source(
        tool=NAME,
        place=str(path),
        session_id=session_id,
        parent_id=parent_id,
        updated_ms=modified_ms(path),
        read=partial(_read, path, session_id, parent_id),
    )


def _read(path: Path, session_id: str, parent_id: str | None, new: NewConversation, problems: Problems) -> None:
    """Import a file. Older versions of Claude Code wrote subagents into the file of their session. Each such subagent
    becomes a separate session."""
    main = _Thread(new(session_id, parent_id))
    side: dict[str, _Thread] = {}
    side_of: dict[str, str] = {}
    for place, line in read_lines(path, problems):
        thread = main
        uuid, parent = text(line.get("uuid")), text(line.get("parentUuid"))
        if parent_id is None and line.get("isSidechain") is True and uuid:
            root = side_of[uuid] = side_of.get(parent, uuid)
            if root not in side:
                side[root] = _Thread(new(_agent_id(path.stem, root), session_id))
            thread = side[root]
        with problems.importing(place):
            thread.add(line)
    for thread in (main, *side.values()):
        thread.end()


class _Thread:
    """One conversation in a file.

    The lines form a tree, because each line names its parent (`parentUuid`). Tool calls that run at the same time have
    the same parent. So two lines with the same parent are not always two branches. Only a prompt can begin a branch.
    The prompt is then added after the end of the turn that contains its parent.
    """

    def __init__(self, conversation: ConversationBuilder) -> None:
        self._to = conversation
        self._turns: dict[str, int] = {}
        """Maps the id (`uuid`) of each line to its turn."""
        self._command = ""
        """The user's newest command while its output may still follow, otherwise empty."""
        self._boundary: Mapping[str, Any] = {}
        """The metadata of a compaction whose summary is still to come."""
        self._summaries: list[tuple[str, str]] = []
        """Titles, each with the id of the line for which it was made."""
        self._has_cwd = False
        """Whether the session's directory is known."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of the file."""
        self._to.at(time_ms(line.get("timestamp")))
        if not self._has_cwd and (cwd := text(line.get("cwd"))):
            self._has_cwd = True
            self._to.set_cwd(cwd)
        match line.get("type"):
            case "user":
                self._add_user(line)
            case "assistant":
                self._add_assistant(line)
            case "system":
                if line.get("subtype") == "compact_boundary":
                    self._boundary = as_object(line.get("compactMetadata"))
                elif line.get("subtype") == "local_command":
                    self._add_tagged(text(line.get("content")))
            case "attachment":
                queued = as_object(line.get("attachment"))
                if queued.get("type") == "queued_command" and queued.get("commandMode", "prompt") == "prompt":
                    self._to.user(parts_of(queued.get("prompt")))
            case "custom-title":
                self._to.set_title(line.get("customTitle"), by_user=True)
            case "ai-title":
                self._to.set_title(line.get("aiTitle"))
            case "summary":
                self._summaries.append((text(line.get("leafUuid")), text(line.get("summary"))))
        if uuid := text(line.get("uuid")):
            self._turns[uuid] = self._to.turn

    def end(self) -> None:
        """Finish the conversation."""
        self._end_command()
        for leaf, title in self._summaries:  # a file can also have titles of other sessions
            if leaf in self._turns and self._to.title is None:
                self._to.set_title(title)

    def _add_user(self, line: Mapping[str, Any]) -> None:
        content = as_object(line.get("message")).get("content")
        results = [block for block in objects(content) if block.get("type") == "tool_result"]
        for block in results:
            output, is_error = parts_of(block.get("content")), block.get("is_error") is True
            self._to.result(text(block.get("tool_use_id")), output, is_error=is_error)
        parts = parts_of(content)
        words = words_of(parts)
        if not parts:
            return
        if line.get("isCompactSummary") is True:
            boundary, self._boundary = self._boundary, {}
            by_user, before = boundary.get("trigger") == "manual", count(boundary.get("preTokens"))
            self._to.checkpoint(words, by_user=by_user, tokens_before=before)
        elif words.startswith("[Request interrupted by user"):
            self._to.stop("cancelled")
        elif self._add_tagged(words):
            pass
        elif results:
            self._to.remind(words)
        elif line.get("isMeta") is True:
            if words.lstrip().startswith(_CAVEATS):
                pass
            elif self._command:
                command, self._command = self._command, ""
                self._to.user((Text(text=command), *parts))  # `parts` is the text of a custom command
            else:
                self._to.remind(words)
        elif words.startswith(_INJECTED):
            self._to.remind(words)
        else:
            self._end_command()
            self._branch(line)
            self._to.user(parts)

    def _branch(self, line: Mapping[str, Any]) -> None:
        """Go to the end of the turn that the prompt in `line` follows."""
        self._to.end_step()
        parent = line.get("parentUuid", line.get("logicalParentUuid"))
        if parent is None and "parentUuid" in line:
            if self._to.turn and not line.get("logicalParentUuid"):
                self._to.go(None)
        elif isinstance(parent, str) and parent in self._turns:
            self._to.go_to_turn(self._turns[parent])

    def _add_assistant(self, line: Mapping[str, Any]) -> None:
        message = as_object(line.get("message"))
        content = message.get("content")
        if line.get("isApiErrorMessage") is True:
            words = words_of(parts_of(content))
            self._to.remark(words)
            self._to.stop("error", words)
            return
        self._end_command()
        if message.get("model") != "<synthetic>":
            self._to.set_model(message.get("model"))
        self._to.answer(text(message.get("id")) or None)
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else objects(content):
            match block.get("type"):
                case "text":
                    self._to.say(text(block.get("text")))
                case "thinking":
                    self._to.think(text(block.get("thinking")))
                case "tool_use":
                    self._to.call(text(block.get("id")), text(block.get("name")), block.get("input"))
        usage = as_object(message.get("usage"))
        cached = count(usage.get("cache_read_input_tokens"))
        spent = Usage(
            input_tokens=total(usage.get("input_tokens"), cached, usage.get("cache_creation_input_tokens")),
            output_tokens=count(usage.get("output_tokens")),
            cached_tokens=cached,
            cache_write_tokens=count(usage.get("cache_creation_input_tokens")),
        )
        self._to.report_usage(spent, cost(line.get("costUSD")), again=True)
        self._to.finish_answer(_FINISH.get(text(message.get("stop_reason")), "stop"))

    def _add_tagged(self, words: str) -> bool:
        """Add `words` if they are a slash command or shell command that the user typed, or the output of such a
        command. Return whether they were added."""
        match = _TAG.match(words)
        if match is None:
            return False
        match match[1]:
            case "command-name" | "command-message":
                self._end_command()
                name = _inside("command-name", words) or f"/{_inside('command-message', words)}"
                self._command = f"{name} {_inside('command-args', words)}".strip()
            case "bash-input":
                self._end_command()
                self._command = f"!{_inside('bash-input', words)}"
            case tag:
                output = _inside(tag, words)
                if tag == "bash-stdout":
                    output = f"{output}\n{_inside('bash-stderr', words)}".strip()
                    self._to.remind(f"The user ran this command:\n{self._command}\n\nIts output:\n{output}")
                command, self._command = self._command, ""
                self._to.command(command or "/", output)
        return True

    def _end_command(self) -> None:
        command, self._command = self._command, ""
        if command:
            self._to.command(command, "")


def _agent_id(session: str, agent: str) -> str:
    """Return the id of a subagent. This id does not begin with the id of the subagent's session. A user may name a
    session by the beginning of its id, and this beginning must not also match the subagent."""
    digest = hashlib.sha256(f"{session} {agent}".encode("utf-8", "surrogatepass")).hexdigest()
    return stable_id(TOOL, "agent", digest[:16])


def _inside(tag: str, words: str) -> str:
    start, _, rest = words.partition(f"<{tag}>")
    return rest.partition(f"</{tag}>")[0].strip() if rest or start != words else ""
