"""A tool call as the client sees it: the fields of `tool_call`, `tool_call_update` and of a permission request.

Strategy: one function per part (title, input, content, output), all pure and all bounded, used by live updates,
replay and permission requests alike, so that a call looks the same everywhere. Knows no state.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterable
from typing import Any, TypeAlias

from crow.domain.entries import Announcement, Attachment, Diff, Location, ToolResult
from crow.domain.messages import Image
from crow.domain.titles import in_title
from crow.frontend.bounds import (
    DIFF_BYTES,
    INPUT_BYTES,
    OUTPUT_BYTES,
    PIECE_BYTES,
    bounded,
    changed_regions,
    head_and_tail,
    weight,
)

__all__ = [
    "Fields",
    "announcement_of",
    "call_fields",
    "console_block",
    "diff_contents",
    "fenced",
    "output_text",
    "raw_input",
    "raw_output",
    "result_contents",
    "text_content",
]

Fields: TypeAlias = dict[str, Any]

_TITLE_CHARS = 200
_MOST_LOCATIONS = 40
_MOST_ATTACHMENTS = 40
_URI_CHARS = 2_000
_SUBJECTS = ("path", "pattern", "url", "query", "description")


def call_fields(call_id: str, announcement: Announcement, *, name: str = "", arguments: str | None = None) -> Fields:
    """What a call is: id, title, kind, locations; name and input where they are known."""
    fields: Fields = {
        "toolCallId": call_id,
        "title": _one_line(announcement.title) or name or "Tool call",
        "kind": announcement.kind,
        "locations": [_location(location) for location in announcement.locations[:_MOST_LOCATIONS]],
    }
    if name:
        fields["name"] = name
        fields["_meta"] = {"tool_name": name}
    if arguments is not None:
        fields["rawInput"] = raw_input(arguments)
    return fields


def raw_input(arguments: str) -> object:
    """The arguments as an object, long texts in them cut."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return bounded(value if isinstance(value, dict) else {"arguments": arguments}, INPUT_BYTES)


def announcement_of(name: str, arguments: str) -> Announcement:
    """What to show of a call whose announcement is not stored: its command, or its name and what it is about."""
    value = raw_input(arguments)
    told = {key: item for key, item in value.items() if isinstance(item, str)} if isinstance(value, dict) else {}
    if told.get("command"):
        return Announcement(title=" ".join(told["command"].split()), kind="execute")
    subject = next((told[key] for key in _SUBJECTS if told.get(key)), None)
    return Announcement(title=name if subject is None else f"{name} {in_title(subject)}")


def diff_contents(diffs: Iterable[Diff]) -> list[Fields]:
    """Diff contents: whole texts, or where they are too heavy together, the changed regions and a line that says so."""
    diffs = tuple(diffs)
    if sum(weight(diff.old_text or "") + weight(diff.new_text) for diff in diffs) <= DIFF_BYTES:
        return [_diff(diff.path, diff.old_text or "", diff.new_text) for diff in diffs]
    contents, room = [], DIFF_BYTES
    for diff in diffs:
        shown, room = _regions(diff, room)
        contents += shown
    return contents


def result_contents(result: ToolResult) -> list[Fields]:
    """What a result shows: the diff of a change that was made, else its text; then its images."""
    announcement = result.announcement
    if announcement.diffs and not result.is_error:
        return diff_contents(announcement.diffs)
    text = output_text(result) if announcement.kind == "execute" else result.text
    contents = [text_content(_drawn(text, result))] if text.strip() else []
    room = PIECE_BYTES - sum(len(image.data) for image in result.images)
    return contents + _images(result.images) + _attachments(result.attachments, room)


def _drawn(text: str, result: ToolResult) -> str:
    """A result's text for clients that render Markdown, which would eat characters of code.

    What was read is indented, which is code too, as some clients put a fence of their own around it.
    """
    match result.announcement.kind:
        case "execute":
            return console_block(text)
        case "search" if not result.is_error:
            return fenced(head_and_tail(text))
        case "read" if not result.is_error:
            return textwrap.indent(head_and_tail(text), "    ")
        case _:
            return head_and_tail(text)


def output_text(result: ToolResult) -> str:
    """What a command printed, where the tool gives it apart from its text for the model."""
    output = result.raw_output.get("output")
    return output if isinstance(output, str) and output else result.text


def raw_output(result: ToolResult, *, with_text: bool = True) -> object | None:
    """The `rawOutput`; None for none. Without text, what a terminal shows already is left out."""
    value = {key: item for key, item in result.raw_output.items() if with_text or key != "output"}
    if result.announcement.kind == "execute" and with_text:
        value["output"] = output_text(result)
    return bounded(value, OUTPUT_BYTES) if value else None


def console_block(text: str) -> str:
    """Output fenced for clients that render Markdown."""
    return fenced(head_and_tail(text), "console")


def fenced(text: str, language: str = "") -> str:
    """A text as a code block, whatever runs of backticks are in it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def text_content(text: str) -> Fields:
    """A text as tool call content."""
    return {"type": "content", "content": {"type": "text", "text": text}}


def _one_line(title: str) -> str:
    lines = [line.strip() for line in title.splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[0]
    if len(line) > _TITLE_CHARS:
        return line[: _TITLE_CHARS - 1] + "…"
    return f"{line} …" if len(lines) > 1 else line


def _location(location: Location) -> Fields:
    if location.line is None:
        return {"path": location.path}
    return {"path": location.path, "line": max(1, location.line)}


def _diff(path: str, old_text: str, new_text: str) -> Fields:
    # Some clients show no diff unless the key oldText is there, also for a new file.
    return {"type": "diff", "path": path, "oldText": old_text, "newText": new_text}


def _regions(diff: Diff, room: int) -> tuple[list[Fields], int]:
    shown, lines = [], []
    regions = changed_regions(diff.old_text or "", diff.new_text)
    for region in regions:
        content = _diff(diff.path, region.old_text, region.new_text)
        size = weight(content)
        if size <= room:
            shown.append(content)
            lines.append(str(region.new_line))
            room -= size
        elif not shown and room > DIFF_BYTES // 2:
            # A single change larger than any line: its beginning and end on both sides.
            half = room // 3
            content = _diff(diff.path, head_and_tail(region.old_text, half), head_and_tail(region.new_text, half))
            shown.append(content)
            lines.append(str(region.new_line))
            room -= weight(content)
    size = len(diff.new_text.encode(errors="replace"))
    note = f"{diff.path} is large ({size:,} bytes): shown are {len(shown)} of {len(regions)} changed regions"
    where = f", from lines {', '.join(lines[:20])}" if lines else ""
    return [*shown, text_content(f"{note}{where}.")], room


def _attachments(attachments: Iterable[Attachment], room: int) -> list[Fields]:
    contents = []
    for attachment in itertools.islice(attachments, _MOST_ATTACHMENTS):
        block = _block(attachment, room)
        room -= len(attachment.data) if "data" in block or "resource" in block else 0
        contents.append({"type": "content", "content": block})
    return contents


def _block(attachment: Attachment, room: int) -> Fields:
    """The attachment as a content block; one that is too heavy, as a link or in words."""
    name, mime_type = attachment.name[:_TITLE_CHARS], (attachment.mime_type or "")[:_TITLE_CHARS]
    uri = attachment.uri if attachment.uri is not None and len(attachment.uri) <= _URI_CHARS else None
    if attachment.data and len(attachment.data) <= room:
        if mime_type.startswith(("audio/", "image/")):
            return {"type": mime_type[:5], "data": attachment.data, "mimeType": mime_type}
        if uri is not None:
            resource = {"uri": uri, "blob": attachment.data} | ({"mimeType": mime_type} if mime_type else {})
            return {"type": "resource", "resource": resource}
    if uri is None:
        size = f"{len(attachment.data) * 3 // 4:,} bytes"
        return {"type": "text", "text": f"({name}, {mime_type or 'of unknown type'}, {size}: not shown)"}
    link: Fields = {"type": "resource_link", "uri": uri, "name": name}
    return link | ({"mimeType": mime_type} if mime_type else {})


def _images(images: Iterable[Image]) -> list[Fields]:
    contents, room = [], PIECE_BYTES
    for image in images:
        if len(image.data) > room:
            contents.append(text_content(f"({image.mime_type}, {len(image.data) * 3 // 4:,} bytes: too large to show)"))
            continue
        room -= len(image.data)
        block = {"type": "image", "data": image.data, "mimeType": image.mime_type}
        contents.append({"type": "content", "content": block})
    return contents
