"""A session as a document: what was said and done, one piece of Markdown for each entry. Pure."""

from __future__ import annotations

from crow.domain.entries import Assistant, Command, Entry, Remark, ToolResult, User
from crow.domain.messages import Image, Link, Part, Resource, Text

__all__ = ["transcript"]

RESULT_CHARS = 2_000


def transcript(entry: Entry) -> str:
    """What `entry` adds to the document; empty for what no reader asks about."""
    match entry.body:
        case User(parts=parts):
            return "## You\n\n" + "\n\n".join(_part(part) for part in parts)
        case Assistant(text=text):
            return f"## Crow\n\n{text.strip()}" if text.strip() else ""
        case ToolResult() as result:
            title = " ".join((result.announcement.title or result.name).split())
            failed = " (failed)" if result.is_error else ""
            return f"### {title}{failed}\n\n{_indented(result.text)}"
        case Remark(text=text):
            return f"> {text}"
        case Command(text=text, answer=answer):
            return f"## You\n\n`{text}`\n\n{answer}"
        case _:
            return ""


def _part(part: Part) -> str:
    match part:
        case Text(text=text):
            return text
        case Image(mime_type=mime_type):
            return f"(an image: {mime_type})"
        case Resource(uri=uri, text=text):
            return f"{uri}\n\n{_indented(text)}"
        case Link(uri=uri, name=name):
            return f"[{name}]({uri})"


def _indented(text: str) -> str:
    """A code block that no text can end."""
    cut = (
        text
        if len(text) <= RESULT_CHARS
        else f"{text[:RESULT_CHARS]}\n(… {len(text) - RESULT_CHARS:,} characters more)"
    )
    return "\n".join(f"    {line}" for line in cut.splitlines())
