"""Tool calls as clients see them, and the size limits of everything that is sent to a client.

Live updates, replay and permission requests use the same functions, so that a call looks the same everywhere.
"""

from __future__ import annotations

import json
import re
import textwrap
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from crow.domain.entries import Announcement, Attachment, Diff, ToolResult
from crow.domain.rendering import in_title

Fields: TypeAlias = dict[str, Any]

LINE_BYTES = 1_000_000
"""The maximum size of a line that crow sends: the limits of an update's parts add up to less. Sizes: bytes of JSON."""

_TEXT_BYTES = 50_000
OUTPUT_BYTES = 100_000
_INPUT_BYTES = 150_000
_DIFF_BYTES = 400_000
PIECE_BYTES = 400_000

PART_BYTES = 900_000
"""The size limit of a value that can be neither cut nor split. It leaves room for the rest of the line."""

_TITLE_CHARS = 200
_MAX_LOCATIONS = 40
_MAX_ATTACHMENTS = 40
_URI_CHARS = 2_000
_SUBJECTS = ("path", "pattern", "url", "query", "description")
_CONTEXT_LINES = 3


def call_fields(call_id: str, announcement: Announcement, *, name: str = "", arguments: str | None = None) -> Fields:
    """Id, title, kind and locations of a call; also its name and input if they are given."""
    fields: Fields = {
        "toolCallId": call_id,
        "title": _one_line(announcement.title) or name or "Tool call",
        "kind": announcement.kind,
        "locations": [
            {"path": location.path} | ({} if location.line is None else {"line": max(1, location.line)})
            for location in announcement.locations[:_MAX_LOCATIONS]
        ],
    }
    if name:
        fields["name"] = name
        fields["_meta"] = {"tool_name": name}
    if arguments is not None:
        fields["rawInput"] = raw_input(arguments)
    return fields


def raw_input(arguments: str) -> object:
    """The arguments as an object with long texts cut."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return limit_json(value if isinstance(value, dict) else {"arguments": arguments}, _INPUT_BYTES)


def announcement_from(name: str, arguments: str) -> Announcement:
    """Makes an announcement for a call stored without one, from its command or from its name and main argument."""
    value = raw_input(arguments)
    texts = {key: item for key, item in value.items() if isinstance(item, str)} if isinstance(value, dict) else {}
    if texts.get("command"):
        return Announcement(title=" ".join(texts["command"].split()), kind="execute")
    subject = next((texts[key] for key in _SUBJECTS if texts.get(key)), None)
    return Announcement(title=name if subject is None else f"{name} {in_title(subject)}")


def result_contents(result: ToolResult) -> list[Fields]:
    """The content of a finished call: its diffs, or the result's text followed by images and attachments."""
    if result.announcement.diffs and not result.is_error:
        return diff_contents(result.announcement.diffs)
    images = [Attachment(name="image", mime_type=image.mime_type, data=image.data) for image in result.images]
    room = PIECE_BYTES
    contents = []
    for attachment in (*images, *result.attachments[:_MAX_ATTACHMENTS]):
        block = _attachment_block(attachment, room)
        room -= len(attachment.data) if "data" in block or "resource" in block else 0
        contents.append({"type": "content", "content": block})
    text = _result_text(result)
    return [text_content(text), *contents] if text else contents


def output_text(result: ToolResult) -> str:
    """What a command printed, if the tool returned that separately; else the result's text for the model."""
    output = result.raw_output.get("output")
    return output if isinstance(output, str) and output else result.text


def raw_output(result: ToolResult, *, with_text: bool = True) -> Fields:
    """The field `rawOutput`, if there is any. `with_text=False` leaves out what a terminal already shows."""
    value = {key: item for key, item in result.raw_output.items() if with_text or key != "output"}
    if result.announcement.kind == "execute" and with_text:
        value["output"] = output_text(result)
    return {"rawOutput": limit_json(value, OUTPUT_BYTES)} if value else {}


def text_content(text: str) -> Fields:
    """A text as tool call content."""
    return {"type": "content", "content": {"type": "text", "text": text}}


def console_block(text: str) -> str:
    """Command output as a Markdown code block."""
    return fenced(limit_text(text), "console")


def fenced(text: str, language: str = "") -> str:
    """A text as a Markdown code block; the fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _result_text(result: ToolResult) -> str:
    """The result's text for clients that render Markdown; a code block where Markdown would change characters."""
    kind = result.announcement.kind
    text = output_text(result) if kind == "execute" else result.text
    if not text.strip():
        return ""
    if kind == "execute":
        return console_block(text)
    text = limit_text(text)
    if kind == "search" and not result.is_error:
        return fenced(text)
    if kind == "read" and not result.is_error:
        return textwrap.indent(text, "    ")  # a code block too; some clients add their own fence around files
    return text


def _one_line(title: str) -> str:
    lines = [line.strip() for line in title.splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[0]
    if len(line) > _TITLE_CHARS:
        return line[: _TITLE_CHARS - 1] + "…"
    return f"{line} …" if len(lines) > 1 else line


def _attachment_block(attachment: Attachment, room: int) -> Fields:
    """The attachment as a content block; if its data takes more than `room` bytes, as a link or in words."""
    name, mime_type = attachment.name[:_TITLE_CHARS], (attachment.mime_type or "")[:_TITLE_CHARS]
    mime_field = {"mimeType": mime_type} if mime_type else {}
    uri = attachment.uri if attachment.uri is not None and len(attachment.uri) <= _URI_CHARS else None
    if attachment.data and len(attachment.data) <= room:
        if mime_type.startswith(("audio/", "image/")):
            return {"type": mime_type[:5], "data": attachment.data, "mimeType": mime_type}
        if uri is not None:
            return {"type": "resource", "resource": {"uri": uri, "blob": attachment.data} | mime_field}
    if uri is not None:
        return {"type": "resource_link", "uri": uri, "name": name} | mime_field
    size = f"{len(attachment.data) * 3 // 4:,} bytes"
    return {"type": "text", "text": f"({name}, {mime_type or 'unknown type'}, {size}: not shown)"}


def diff_contents(diffs: Iterable[Diff]) -> list[Fields]:
    """Diffs of whole texts or, if these are too large together, the changed regions and a note that says so."""
    diffs = tuple(diffs)
    if sum(json_bytes(diff.old_text or "") + json_bytes(diff.new_text) for diff in diffs) <= _DIFF_BYTES:
        return [_diff(diff.path, diff.old_text or "", diff.new_text) for diff in diffs]
    contents, room = [], _DIFF_BYTES
    for diff in diffs:
        regions = changed_regions(diff.old_text or "", diff.new_text)
        lines: list[str] = []
        for region in regions:
            content = _diff(diff.path, region.old_text, region.new_text)
            if json_bytes(content) > room:
                if lines or room <= _DIFF_BYTES // 2:
                    continue
                # A single change that is larger than the limit: both sides are cut.
                old_text, new_text = (limit_text(text, room // 3) for text in (region.old_text, region.new_text))
                content = _diff(diff.path, old_text, new_text)
            room -= json_bytes(content)
            contents.append(content)
            lines.append(str(region.new_line))
        size = len(diff.new_text.encode(errors="replace"))
        note = f"{diff.path} is large ({size:,} bytes); shown: {len(lines)} of {len(regions)} changed regions"
        where = f", from lines {', '.join(lines[:20])}" if lines else ""
        contents.append(text_content(f"{note}{where}."))
    return contents


def _diff(path: str, old_text: str, new_text: str) -> Fields:
    # Some clients show no diff without the key oldText, even for a new file.
    return {"type": "diff", "path": path, "oldText": old_text, "newText": new_text}


def json_bytes(value: object) -> int:
    """The size of `value` as JSON on the wire, in bytes."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def limit_text(text: str, limit: int = _TEXT_BYTES) -> str:
    """`text`, or its beginning and end around a marker if it is larger than `limit` bytes of JSON."""
    if _fits(text, limit):
        return text
    keep = min(limit, len(text))
    while True:
        head, tail = text[: keep // 2], text[len(text) - keep // 2 :]
        omitted = len(text) - len(head) - len(tail)
        shown = f"{head}\n[… {omitted:,} characters are not shown here …]\n{tail}"
        if keep < 2 or json_bytes(shown) <= limit:
            return shown
        keep = keep * 3 // 4


def split_text(text: str, limit: int = PIECE_BYTES) -> list[str]:
    """`text` in pieces of at most `limit` bytes of JSON each; none for an empty text."""
    if _fits(text, limit):
        return [text] if text else []
    step = max(1, (limit - 2) // 6)  # a character takes at most six bytes
    return [text[at : at + step] for at in range(0, len(text), step)]


def limit_json(value: object, limit: int) -> object:
    """A JSON value with long strings and lists cut until it takes at most `limit` bytes."""
    max_items = 10_000
    for max_bytes in (limit // 2, 20_000, 5_000, 1_000, 200):
        if _fits(value, limit):
            return value
        value = _shorten(value, max_bytes, max_items)
        max_items //= 4
    return value if _fits(value, limit) else {"note": "too large to show here"}


def _fits(value: object, limit: int) -> bool:
    """Whether `value` takes at most `limit` bytes. Encodes it only if counting characters does not decide this."""
    if isinstance(value, str) and 6 * len(value) + 2 <= limit:
        return True
    return _chars(value) <= limit and json_bytes(value) <= limit


def _chars(value: object) -> int:
    """Counts the characters of all strings in `value`, except keys: a lower bound of its size."""
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_chars, items))


def _shorten(value: object, max_bytes: int, max_items: int) -> object:
    match value:
        case str():
            return limit_text(value, max_bytes)
        case dict():
            return {key: _shorten(item, max_bytes, max_items) for key, item in list(value.items())[:max_items]}
        case list() | tuple():
            return [_shorten(item, max_bytes, max_items) for item in value[:max_items]]
        case _:
            return value


@dataclass(frozen=True, slots=True)
class DiffHunk:
    """A changed region of a file with its context: the number of its first line (from 1) and its text, old and new."""

    old_line: int
    new_line: int
    old_text: str
    new_text: str


def changed_regions(old: str, new: str) -> tuple[DiffHunk, ...]:
    """Where `new` differs from `old`, each region with three lines of context.

    This is a patience diff. difflib takes quadratic time, which is too long for the large files that are compared here.
    """
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    spans: list[tuple[int, int, int, int]] = []
    i = k = 0
    for at, new_at, size in [*_equal_runs(before, after), (len(before), len(after), 0)]:
        if i < at or k < new_at:
            lead = min(_CONTEXT_LINES, i, k)
            trail = min(_CONTEXT_LINES, len(before) - at, len(after) - new_at)
            span = (i - lead, at + trail, k - lead, new_at + trail)
            if spans and (span[0] <= spans[-1][1] or span[2] <= spans[-1][3]):
                last = spans.pop()
                span = (last[0], span[1], last[2], span[3])
            spans.append(span)
        i, k = at + size, new_at + size
    return tuple(
        DiffHunk(start + 1, new_start + 1, "".join(before[start:end]), "".join(after[new_start:new_end]))
        for start, end, new_start, new_end in spans
    )


def _equal_runs(a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yields runs of equal lines in order, as (start in a, start in b, length).

    These are the common head and tail and, between them, runs around lines that occur exactly once in each text.
    """
    shorter = min(len(a), len(b))
    head = next((n for n in range(shorter) if a[n] != b[n]), shorter)
    tail = next((n for n in range(shorter - head) if a[-1 - n] != b[-1 - n]), shorter - head)
    a_end, b_end = len(a) - tail, len(b) - tail
    yield 0, 0, head
    i = k = head
    for at, new_at in _anchors(a[head:a_end], b[head:b_end]):
        start, new_start = at + head, new_at + head
        if start < i or new_start < k:
            continue
        while start > i and new_start > k and a[start - 1] == b[new_start - 1]:
            start, new_start = start - 1, new_start - 1
        size = 1
        while start + size < a_end and new_start + size < b_end and a[start + size] == b[new_start + size]:
            size += 1
        yield start, new_start, size
        i, k = start + size, new_start + size
    yield a_end, b_end, tail


def _anchors(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs (index in a, index in b) of equal lines that occur once in each text.

    Returns the longest sequence of such pairs in which both indexes increase.
    """
    in_a, in_b = Counter(a), Counter(b)
    place = {line: n for n, line in enumerate(b) if in_b[line] == 1}
    pairs = [(n, place[line]) for n, line in enumerate(a) if in_a[line] == 1 and line in place]
    ends: list[int] = []  # for each length, the smallest index in b at which a sequence can end
    sequences: list[Any] = []  # for each length, such a sequence: its last pair and the sequence before that
    for at, new_at in pairs:
        length = bisect_left(ends, new_at)
        sequence = (at, new_at, sequences[length - 1] if length else None)
        ends[length : length + 1], sequences[length : length + 1] = [new_at], [sequence]
    chosen, rest = [], sequences[-1] if sequences else None
    while rest is not None:
        at, new_at, rest = rest
        chosen.append((at, new_at))
    return chosen[::-1]
