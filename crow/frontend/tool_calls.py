"""A tool call as the client sees it: the fields of `tool_call`, `tool_call_update` and of a permission request.

Strategy: one function per part (title, input, content, output), all pure and all bounded, used by live updates,
replay and permission requests alike, so that a call looks the same everywhere. Knows no state.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from crow.domain.entries import Announcement, Attachment, Diff, Location, ToolResult
from crow.domain.messages import Image
from crow.domain.rendering import in_title

__all__ = [
    "DIFF_BYTES",
    "INPUT_BYTES",
    "LINE_BYTES",
    "OUTPUT_BYTES",
    "PART_BYTES",
    "PIECE_BYTES",
    "TEXT_BYTES",
    "DiffHunk",
    "Fields",
    "announcement_of",
    "bounded",
    "call_fields",
    "changed_regions",
    "console_block",
    "diff_contents",
    "fenced",
    "head_and_tail",
    "output_text",
    "pieces",
    "raw_input",
    "raw_output",
    "result_contents",
    "text_content",
    "weight",
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


# FROM frontend.bounds: How much of a thing is put on one line to the client.
#
# Strategy: sizes are bytes as JSON on the wire, escapes included. What is too long is shown head and tail with a
# marker
# that says so; the whole stays in the session's log. Large changes of files become their changed regions. Pure.


LINE_BYTES = 1_000_000
"""No line of ours is longer: the sum of the parts of any update stays below."""

TEXT_BYTES = 50_000
OUTPUT_BYTES = 100_000
INPUT_BYTES = 150_000
DIFF_BYTES = 400_000
PIECE_BYTES = 400_000

PART_BYTES = 900_000
"""What one value that can be neither cut nor divided may weigh, with room for what goes around it."""

_CONTEXT_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffHunk:
    """A changed stretch of a file with its surroundings: first lines (from 1) and texts, before and after."""

    old_line: int
    new_line: int
    old_text: str
    new_text: str


def weight(value: object) -> int:
    """Bytes of `value` as JSON on the wire."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def head_and_tail(text: str, limit: int = TEXT_BYTES) -> str:
    """`text`, or its beginning and end around a marker when it is heavier than `limit` bytes."""
    if _fits(text, limit):
        return text
    keep = min(limit, len(text))
    while True:
        head, tail = text[: keep // 2], text[len(text) - keep // 2 :]
        left_out = len(text) - len(head) - len(tail)
        shown = f"{head}\n[… {left_out:,} characters are not shown here …]\n{tail}"
        if weight(shown) <= limit or keep < 2:
            return shown
        keep = keep * 3 // 4


def pieces(text: str, limit: int = PIECE_BYTES) -> list[str]:
    """`text` in parts of at most `limit` bytes each; together they are the text."""
    if _fits(text, limit):
        return [text] if text else []
    step = max(1, (limit - 2) // 6)
    return [text[at : at + step] for at in range(0, len(text), step)]


def bounded(value: object, limit: int) -> object:
    """JSON `value`, its long strings cut head and tail and its long lists shortened until it weighs at most `limit`."""
    most_items = 10_000
    for longest in (limit // 2, 20_000, 5_000, 1_000, 200):
        if _fits(value, limit):
            return value
        value = _shortened(value, longest, most_items)
        most_items //= 4
    return value if _fits(value, limit) else {"note": "too large to show here"}


def changed_regions(old: str, new: str) -> tuple[DiffHunk, ...]:
    """Where `new` differs from `old`, each with three lines around it; linear in their length."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    spans: list[tuple[int, int, int, int]] = []
    for start, end, new_start, new_end in _changes(before, after):
        lead = min(_CONTEXT_LINES, start, new_start)
        trail = min(_CONTEXT_LINES, len(before) - end, len(after) - new_end)
        span = (start - lead, end + trail, new_start - lead, new_end + trail)
        if spans and (span[0] <= spans[-1][1] or span[2] <= spans[-1][3]):
            span = (spans[-1][0], span[1], spans[-1][2], span[3])
            spans.pop()
        spans.append(span)
    return tuple(
        DiffHunk(
            old_line=start + 1,
            new_line=new_start + 1,
            old_text="".join(before[start:end]),
            new_text="".join(after[new_start:new_end]),
        )
        for start, end, new_start, new_end in spans
    )


def _fits(value: object, limit: int) -> bool:
    """Whether `value` weighs at most `limit`; the exact count, which costs, is made only where it can matter."""
    if isinstance(value, str) and 6 * len(value) + 2 <= limit:
        return True
    return _least(value, limit) <= limit and weight(value) <= limit


def _least(value: object, enough: int) -> int:
    """Bytes that `value` weighs at the very least; counting stops above `enough`."""
    match value:
        case str():
            return len(value)
        case dict() | list() | tuple():
            least = 0
            for item in value.values() if isinstance(value, dict) else value:
                least += 2 + _least(item, enough)
                if least > enough:
                    break
            return least
        case _:
            return 0


def _shortened(value: object, longest: int, most_items: int) -> object:
    match value:
        case str():
            return head_and_tail(value, longest)
        case dict():
            return {key: _shortened(item, longest, most_items) for key, item in list(value.items())[:most_items]}
        case list() | tuple():
            return [_shortened(item, longest, most_items) for item in value[:most_items]]
        case _:
            return value


def _changes(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """The stretches `a[i:j]` that became `b[k:l]`, in order."""
    changes = []
    i = k = 0
    for at, new_at, size in [*_matches(a, b), (len(a), len(b), 0)]:
        if i < at or k < new_at:
            changes.append((i, at, k, new_at))
        i, k = at + size, new_at + size
    return changes


def _matches(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int, int]]:
    """Runs of equal lines (start in a, start in b, length), in order: the common head and tail, and between them
    those around lines that stand exactly once on either side."""
    shorter = min(len(a), len(b))
    head = next((n for n in range(shorter) if a[n] != b[n]), shorter)
    tail = next((n for n in range(shorter - head) if a[-1 - n] != b[-1 - n]), shorter - head)
    a_end, b_end = len(a) - tail, len(b) - tail
    runs = [(0, 0, head)] if head else []
    i = k = head
    for at, new_at in _anchors(a, b, head, a_end, b_end):
        if at < i or new_at < k:
            continue
        start, new_start = at, new_at
        while start > i and new_start > k and a[start - 1] == b[new_start - 1]:
            start, new_start = start - 1, new_start - 1
        end, new_end = at + 1, new_at + 1
        while end < a_end and new_end < b_end and a[end] == b[new_end]:
            end, new_end = end + 1, new_end + 1
        runs.append((start, new_start, end - start))
        i, k = end, new_end
    return [*runs, (a_end, b_end, tail)] if tail else runs


def _anchors(a: Sequence[str], b: Sequence[str], start: int, a_end: int, b_end: int) -> list[tuple[int, int]]:
    """Pairs of equal lines that are unique in both, the longest choice of them that rises on both sides."""
    once_in_a = Counter(a[start:a_end])
    once_in_b = Counter(b[start:b_end])
    place = {line: n for n, line in enumerate(b[start:b_end], start) if once_in_b[line] == 1}
    pairs = [(n, place[a[n]]) for n in range(start, a_end) if once_in_a[a[n]] == 1 and a[n] in place]
    # Patience: each pile's top is the smallest end of a rising sequence of that length.
    tops: list[int] = []
    piles: list[int] = []
    before: list[int] = []
    for index, (_, new_at) in enumerate(pairs):
        pile = bisect_left(tops, new_at)
        before.append(piles[pile - 1] if pile else -1)
        if pile == len(tops):
            tops.append(new_at)
            piles.append(index)
        else:
            tops[pile], piles[pile] = new_at, index
    chosen: list[tuple[int, int]] = []
    index = piles[-1] if piles else -1
    while index >= 0:
        chosen.append(pairs[index])
        index = before[index]
    return chosen[::-1]
