"""Shortens a conversation to a summary and its newest messages, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from crow.agent.compaction.summary import shorten_to_tokens
from crow.domain.entries import Assistant, Entry, User
from crow.domain.rendering import parts_text
from crow.domain.text import shorten_middle
from crow.domain.tokens import estimate_text

_MESSAGE_CHARS = 800
SINCE = "## Since that summary"
LEFT_OUT = "[Earlier messages are left out.]"


def with_newest(summary: str, entries: Sequence[Entry], budget: int) -> str:
    """Return a summary, followed by the newest prompts and answers in `entries`. Together they have at most `budget`
    estimated tokens."""
    text = shorten_to_tokens(summary.strip(), budget * 2 // 3)
    left = budget - estimate_text(text) - estimate_text(SINCE) - estimate_text(LEFT_OUT)
    newest: list[str] = []
    for said in filter(None, map(said_in, reversed(entries))):
        left -= estimate_text(said) + 2
        if left < 0:
            newest.append(LEFT_OUT)
            break
        newest.append(said)
    return "\n\n".join([text, SINCE, *reversed(newest)]) if newest else text


def said_in(entry: Entry) -> str:
    """Return the text of a prompt or an answer. Leave out the middle of a long text. Return "" for any other entry."""
    match entry.body:
        case User(parts=parts):
            return f"[user]\n{shorten_middle(parts_text(parts), _MESSAGE_CHARS)}"
        case Assistant(text=text) if text.strip():
            return f"[assistant]\n{shorten_middle(text.strip(), _MESSAGE_CHARS)}"
        case _:
            return ""
