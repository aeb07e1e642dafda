"""The rules that the offline model follows: a request in plain words to the calls and texts that answer it.

Strategy: a prompt is cut at " then " into steps, each matched against a short table; how many calls were made since
the prompt tells which step is next, so that the same messages always give the same reply. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from crow.domain.messages import AssistantMessage, JsonObject, Message, Text, ToolMessage, UserMessage
from crow.llm.digest import is_summary_wanted, recap, summary

__all__ = ["Reply", "reply_to"]

ABOUT = (
    "I am crow's offline model: I follow fixed rules and am no language model. I can: read FILE, write FILE: TEXT, "
    "edit FILE: OLD -> NEW, run COMMAND, list files, search WORDS, plan: A; B; C, recall WORDS, count to N, think "
    "about WORDS, say WORDS, call TOOL {JSON}, and summarise. Several requests can be joined with the word then. For "
    "real work, set OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL."
)
_SHOWN_LINES = 12
_SHOWN_CHARS = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What to answer: a thought, a text, at most one call; `is_slow` streams the text at reading pace."""

    text: str = ""
    thought: str = ""
    call: tuple[str, JsonObject] | None = None
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One request: a call with words to go before it, or words alone."""

    words: str
    thought: str = ""
    tool: str = ""
    arguments: JsonObject = field(default_factory=dict)
    is_slow: bool = False


def reply_to(messages: Sequence[Message], offered: Sequence[str], *, may_call: bool) -> Reply:
    """The reply to the last prompt in `messages`, given which tools are offered."""
    at = _last_prompt(messages)
    prompt = _prompt_text(messages[at]) if at is not None else ""
    if is_summary_wanted(prompt):
        return Reply(text=summary(messages, prompt))
    since = messages[at + 1 :] if at is not None else ()
    steps = _steps(prompt, messages)
    if not steps:
        return Reply(text=_unknown(prompt))
    calls_made = sum(len(message.calls) for message in since if isinstance(message, AssistantMessage))
    results = [message for message in since if isinstance(message, ToolMessage)]
    words: list[str] = [_shown(results[-1].text)] if results else []
    thought = ""
    is_slow = False
    for step in _after_calls(steps, calls_made):
        words.append(step.words)
        thought = thought or step.thought
        is_slow = is_slow or step.is_slow
        if not step.tool:
            continue
        if may_call and step.tool in offered:
            return Reply(text="\n\n".join(words), thought=thought, call=(step.tool, step.arguments))
        words[-1] = f"I cannot do that: the tool {step.tool} is not offered to me."
    return Reply(text="\n\n".join(words) or "Done.", thought=thought, is_slow=is_slow)


def _after_calls(steps: Sequence[_Step], calls: int) -> Sequence[_Step]:
    """The steps that are left after so many calls."""
    for position, step in enumerate(steps):
        if calls <= 0:
            return steps[position:]
        if step.tool:
            calls -= 1
    return ()


def _last_prompt(messages: Sequence[Message]) -> int | None:
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        if isinstance(message, UserMessage) and _prompt_text(message):
            return position
    return None


def _prompt_text(message: Message) -> str:
    """What the user wrote, without what was added for the model (reminders, skills, notes in brackets)."""
    if not isinstance(message, UserMessage):
        return ""
    texts = (part.text.strip() for part in message.parts if isinstance(part, Text))
    return "\n".join(text for text in texts if text and not text.startswith(("<", "[The ", "[This ", "[No ")))


def _steps(prompt: str, messages: Sequence[Message]) -> list[_Step]:
    """The steps of a prompt; the words after a "then" that begin no step belong to the one before."""
    steps: list[_Step] = []
    pending = ""
    for piece in re.split(r"(?<!\s)\s++then\s+", prompt.strip()):
        step = _step(piece, messages)
        if step is None and not pending:
            return []
        if step is None:
            pending = f"{pending} then {piece}"
            steps[-1] = _step(pending, messages) or steps[-1]
            continue
        pending = piece
        steps.append(step)
    return steps


def _step(piece: str, messages: Sequence[Message]) -> _Step | None:
    piece = re.sub(r"^(?:please|can you|could you|now|and)\s+", "", piece.strip(), flags=re.IGNORECASE)
    for pattern, make in _RULES:
        match = pattern.fullmatch(piece)
        if match is not None:
            return make(match)
    if re.fullmatch(r"(?:summari[sz]e|recap|sum up)\b.{0,80}", piece, re.IGNORECASE | re.DOTALL):
        return _Step(words=recap(messages))
    return None


def _read(match: re.Match[str]) -> _Step:
    arguments: dict[str, object] = {"path": _plain(match["path"])}
    if match["line"]:
        arguments["line"] = int(match["line"])
    return _Step(words=f"I read {arguments['path']}.", tool="read_file", arguments=arguments)


def _write(match: re.Match[str]) -> _Step:
    path = _plain(match["path"])
    return _Step(words=f"I write {path}.", tool="write_file", arguments={"path": path, "content": match["text"] + "\n"})


def _edit(match: re.Match[str]) -> _Step:
    path = _plain(match["path"])
    arguments = {"path": path, "old_text": match["old"], "new_text": match["new"]}
    return _Step(words=f"I edit {path}.", tool="edit_file", arguments=arguments)


def _run(match: re.Match[str]) -> _Step:
    command = match["command"].strip().strip("`")
    return _Step(words=f"I run `{command}`.", tool="shell", arguments={"command": command})


def _list(match: re.Match[str]) -> _Step:
    arguments = {"path": _plain(match["path"])} if match["path"] else {}
    return _Step(words="I list the files.", tool="list_files", arguments=arguments)


def _search(match: re.Match[str]) -> _Step:
    arguments = {"pattern": _plain(match["words"])}
    if match["path"]:
        arguments["path"] = _plain(match["path"])
    return _Step(words=f'I search for "{arguments["pattern"]}".', tool="grep", arguments=arguments)


def _plan(match: re.Match[str]) -> _Step:
    lines = [line.strip() for line in match["items"].split(";") if line.strip()]
    items = [
        {"content": line, "status": "pending" if position else "in_progress", "priority": "medium"}
        for position, line in enumerate(lines)
    ]
    return _Step(words="I write the plan down.", tool="update_plan", arguments={"items": items})


def _recall(match: re.Match[str]) -> _Step:
    words = _plain(match["words"])
    arguments: dict[str, object] = {"entry": int(words)} if words.isdecimal() else {"query": words}
    return _Step(words=f'I look up "{words}" in the log.', tool="recall", arguments=arguments)


def _count(match: re.Match[str]) -> _Step:
    last = min(int(match["last"]), 1_000_000)
    return _Step(words="\n".join(map(str, range(1, last + 1))), is_slow=True)


def _think(match: re.Match[str]) -> _Step:
    return _Step(words="I have thought about it.", thought=f"A rule says: think about {match['words'].strip()}.")


def _say(match: re.Match[str]) -> _Step:
    return _Step(words=match["words"].strip())


def _call(match: re.Match[str]) -> _Step:
    try:
        arguments = json.loads(match["arguments"] or "{}")
    except ValueError:
        return _Step(words=f"{match['arguments']} is no JSON.")
    if not isinstance(arguments, Mapping):
        return _Step(words=f"{match['arguments']} is no JSON object.")
    return _Step(words=f"I call {match['tool']}.", tool=match["tool"], arguments=arguments)


_Make: TypeAlias = Callable[[re.Match[str]], _Step]
_RULES: tuple[tuple[re.Pattern[str], _Make], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), make)
    for pattern, make in (
        (r"(?:read|show|open)\s+(?:the\s+)?(?:file\s+)?(?P<path>\S+?)(?:\s+from\s+line\s+(?P<line>\d+))?[.!]?", _read),
        (r"(?:write|create)\s+(?:the\s+)?(?:file\s+)?(?P<path>[^\s:]+):\s?(?P<text>.*)", _write),
        (r"edit\s+(?:the\s+)?(?:file\s+)?(?P<path>[^\s:]+):\s?(?P<old>.+?)\s->\s(?P<new>.*)", _edit),
        (r"(?:run|execute)\s+(?P<command>.+)", _run),
        (r"list\s+(?:the\s+|all\s+)?files(?:\s+(?:in|of|under)\s+(?P<path>\S+?))?[.!]?", _list),
        (r"(?:search|grep)\s+(?:for\s+)?(?P<words>.+?)(?:\s+in\s+(?P<path>\S+))?", _search),
        (r"plan:\s*(?P<items>.+)", _plan),
        (r"recall\s+(?:entry\s+)?(?P<words>.+)", _recall),
        (r"count\s+to\s+(?P<last>\d{1,9})[.!]?", _count),
        (r"think(?:\s+about|:)\s*(?P<words>.+)", _think),
        (r"(?:say|echo)\s+(?P<words>.+)", _say),
        (r"call\s+(?P<tool>[A-Za-z0-9_-]+)\s*(?P<arguments>\{.*\})?", _call),
    )
)


def _plain(words: str) -> str:
    return words.strip().strip("`\"'")


def _shown(result: str) -> str:
    """The beginning of what a tool said."""
    lines = result.strip("\n").rstrip().splitlines()
    head = "\n".join(lines[:_SHOWN_LINES])[:_SHOWN_CHARS]
    more = len(lines) - _SHOWN_LINES
    if not head:
        return "The tool said nothing."
    return f"The tool said:\n\n{head}" + (f"\n... and {more} more lines" if more > 0 else "")


def _unknown(prompt: str) -> str:
    first = prompt.splitlines()[0][:120] if prompt else ""
    return f'I have no rule for "{first}".\n\n{ABOUT}' if first else ABOUT
