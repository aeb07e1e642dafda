"""What the offline model says of a conversation: an extract, made by rules, that keeps names and order.

Strategy: what was asked, what was called and what came of it, in the words of the messages themselves; an earlier
summary is carried over heading by heading. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from crow.domain.messages import AssistantMessage, Message, Text, ToolMessage, UserMessage

__all__ = ["is_summary_wanted", "recap", "summary"]

_HEADINGS = ("Goal", "Constraints", "Done", "In progress", "Blocked", "Decisions and why", "Next", "Facts")
_BOUND = re.compile(r"at most (\d[\d,]*) (word|token)", re.IGNORECASE)
_DEFAULT_WORDS = 400
_LINE_CHARS = 160


def is_summary_wanted(prompt: str) -> bool:
    """Whether a prompt is the instruction of a compaction: it names the headings."""
    return "## Goal" in prompt and "## Next" in prompt


def summary(messages: Sequence[Message], instruction: str) -> str:
    """A summary under the fixed headings, within the number of words (or tokens) that the instruction names."""
    match = _BOUND.search(instruction)
    words = _DEFAULT_WORDS
    if match is not None:
        words = int(match[1].replace(",", "")) if match[2].lower() == "word" else int(match[1].replace(",", "")) // 2
    asked, done = _asked(messages), _done(messages)
    sections = _earlier(messages)
    if asked:
        sections.setdefault("Goal", [asked[0]])
        sections["Next"] = [f"Answer the newest request: {asked[-1]}"]
        sections["In progress"] = [asked[-1]]
    sections["Done"] = [*sections.get("Done", ()), *done]
    paths = dict.fromkeys([*(line[2:] for line in sections.get("Facts", ())), *_paths(messages)])
    sections["Facts"] = [f"- {path}" for path in paths]
    return _within(sections, max(20, words))


def recap(messages: Sequence[Message]) -> str:
    """A few lines for the user."""
    asked, done = _asked(messages)[:-1], _done(messages)
    if not asked and not done:
        return "Nothing has happened in this session yet."
    lines = ["By my rules, this session so far:"]
    lines += [f"- you asked: {line}" for line in asked[-8:]]
    lines += [f"- done: {line}" for line in done[-8:]]
    return "\n".join(lines)


def _within(sections: dict[str, list[str]], words: int) -> str:
    """The sections as text; the oldest lines of the longest section go first where there are too many words."""
    kept = {heading: list(sections.get(heading, ())) for heading in _HEADINGS}
    while True:
        text = "\n".join(line for heading, lines in kept.items() if lines for line in (f"## {heading}", *lines))
        longest = max(kept.values(), key=len)
        if len(text.split()) <= words or not longest:
            return text
        del longest[0]


def _asked(messages: Sequence[Message]) -> list[str]:
    """The first lines of the user's prompts, oldest first."""
    lines: list[str] = []
    for message in messages:
        if not isinstance(message, UserMessage):
            continue
        texts = (part.text.strip() for part in message.parts if isinstance(part, Text))
        own = [text for text in texts if text and not text.startswith(("<", "[")) and not is_summary_wanted(text)]
        lines.extend(_line(text) for text in own[:1])
    return lines


def _done(messages: Sequence[Message]) -> list[str]:
    """One line for each call: its name, its arguments, and how its result begins."""
    results = {message.call_id: message.text for message in messages if isinstance(message, ToolMessage)}
    return [
        _line(f"{call.name} {call.arguments}: {results.get(call.id, 'no result').strip()}")
        for message in messages
        if isinstance(message, AssistantMessage)
        for call in message.calls
    ]


def _paths(messages: Sequence[Message]) -> list[str]:
    paths: list[str] = []
    for message in messages:
        for call in message.calls if isinstance(message, AssistantMessage) else ():
            path = json.loads(call.arguments).get("path")
            if isinstance(path, str):
                paths.append(path)
    return paths


def _earlier(messages: Sequence[Message]) -> dict[str, list[str]]:
    """The sections of the summary that a compacted conversation begins with."""
    sections: dict[str, list[str]] = {}
    first = next((message for message in messages if isinstance(message, UserMessage)), None)
    text = "\n".join(part.text for part in first.parts if isinstance(part, Text)) if first is not None else ""
    if not text.startswith("["):
        return sections
    heading = ""
    for line in text.splitlines():
        if line.startswith(("#", "[", "<")):
            heading = line.removeprefix("## ")
        elif heading in _HEADINGS and line.strip():
            sections.setdefault(heading, []).append(line)
    return sections


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"
