"""Reads the beginning and the end of a long tool result, without the rest of it.

After a year, a session may have hundreds of megabytes of tool output. A client that opens the session shows only the
beginning and the end of each output. The sha256 of an output is checked only when the whole output is read. If the JSON
of a result does not have the form that crow writes, the whole result is read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Protocol

from crow.domain.entries import ToolResult
from crow.domain.rendering import EXCERPT_SLACK_BYTES, excerpt
from crow.store.codec import Load, Unreadable, decode_value

# JSON escapes quotation marks in strings. So these bytes occur only between the members of an object.
_BEFORE_TEXT = b',"text":"'
_AFTER_TEXT = b'","is_error":'

_OTHER_BYTES = 2_048
"""The members before the text usually take fewer bytes than this, and so do the members after the text."""

_MOST_OTHER_BYTES = 64 * 1024
"""If the members after the text take more bytes than this, the whole result is read."""

_ESCAPE_BYTES = 6
"""The length of the longest escape in JSON."""


SHARED_TEXT = re.compile(rb'"text":\{"blob":"([0-9a-f]{64})"\}')
"""Finds the hash of the blob that holds the text of a result."""


class BlobReader(Protocol):
    """Reads a blob in parts. `sqlite3.Blob` has these methods. `read` may raise `Unreadable`."""

    def __len__(self) -> int: ...

    def read(self, length: int = -1, /) -> bytes: ...

    def seek(self, offset: int, origin: int = 0, /) -> None: ...


@dataclass
class BlobEnds:
    """Reads a blob of which only the first and the last bytes are known. To read other bytes raises `Unreadable`."""

    size: int
    """The size of the whole blob, in bytes."""
    head: bytes
    tail: bytes
    _at: int = 0

    def __len__(self) -> int:
        return self.size

    def read(self, length: int = -1, /) -> bytes:
        start, end = self._at, self.size if length < 0 else min(self.size, self._at + length)
        self._at = end
        in_tail = self.size - len(self.tail)
        if end <= len(self.head):
            return self.head[start:end]
        if start >= in_tail:
            return self.tail[start - in_tail : end - in_tail]
        raise Unreadable("only its ends were read")

    def seek(self, offset: int, origin: int = 0, /) -> None:
        self._at = max(0, offset if origin == 0 else self.size + offset)


def text_blob_of(body: bytes) -> str | None:
    """Return the hash of the blob that holds the text of a result with this JSON. Return None if the JSON has the text
    itself, or if another member of the result, such as an attachment, is in the same blob."""
    found = SHARED_TEXT.search(body)
    return found[1].decode() if found and body.count(found[1]) == 1 else None


def excerpt_of_text(blob: BlobReader, most_bytes: int, call_id: str) -> bytes | None:
    """Return an excerpt of about `most_bytes` bytes of the text in `blob`, as UTF-8. Return None if the text is not
    much longer than the excerpt would be."""
    half = max(1, most_bytes // 2)
    omitted = len(blob) - 2 * half
    if omitted <= EXCERPT_SLACK_BYTES:
        return None
    head = blob.read(half).decode(errors="ignore")
    blob.seek(-half, 2)
    return excerpt(head, blob.read().decode(errors="ignore"), omitted, call_id).encode()


def excerpt_of_result(blob: BlobReader, most_bytes: int, load: Load) -> ToolResult | None:
    """Return the result whose JSON is in `blob`. Its text is replaced by an excerpt of about `most_bytes` bytes. Only
    older versions of crow stored a whole long result in one blob.

    Return None if the whole result must be read, because its text is short or its other members are long.
    """
    size, half = len(blob), max(1, most_bytes // 2)
    head = blob.read(half + _OTHER_BYTES)
    members, found, text = head.partition(_BEFORE_TEXT)
    if not found or _AFTER_TEXT in text or size < _MOST_OTHER_BYTES // 2:
        return None
    wanted = half + _OTHER_BYTES
    while wanted <= min(half + _MOST_OTHER_BYTES, size - len(head)):
        blob.seek(-wanted, 2)
        parsed = _parse_end(blob.read())
        if parsed is None or len(parsed[0]) < half:
            wanted *= 2
            continue
        end, more = parsed
        first, last = _readable_head(text[:half]), _readable_tail(end[-half - 4 * _ESCAPE_BYTES :])
        if first is None or last is None:
            return None
        omitted = size - len(members) - (wanted - len(end)) - 2 * half
        return _result(members, more, first, last, omitted, load)
    return None


def _result(
    members: bytes, more: dict[str, object], head: str, tail: str, omitted: int, load: Load
) -> ToolResult | None:
    try:
        value = {**json.loads(members + b"}"), "text": "", **more}
        body = decode_value("tool", value, load)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, ToolResult):
        return None
    value["text"] = excerpt(head, tail, omitted, body.call.call_id)
    shortened = decode_value("tool", value, load)
    return shortened if isinstance(shortened, ToolResult) else None


def _parse_end(end: bytes) -> tuple[bytes, dict[str, object]] | None:
    """Split the last bytes of a result's JSON, in which the text is followed by other members. Return the last part of
    the text, still escaped, and the other members. Return None if the bytes contain no part of the text."""
    at = end.find(_AFTER_TEXT)
    while at >= 0:
        try:
            members = json.loads(b"{" + end[at + 2 :])
        except (ValueError, RecursionError):
            at = end.find(_AFTER_TEXT, at + 1)  # another member contains these bytes
            continue
        return end[:at], members
    return None


def _readable_head(text: bytes) -> str | None:
    """Decode JSON text that may end within a character or an escape."""
    for dropped in range(_ESCAPE_BYTES):
        try:
            return str(json.loads(b'"%b"' % text[: len(text) - dropped]))
        except ValueError:
            continue
    return None


def _readable_tail(text: bytes) -> str | None:
    """Decode JSON text that may begin within a character or an escape. A few bytes at the beginning are dropped."""
    for start in range(_ESCAPE_BYTES, len(text)):
        is_inside = text[start] & 0xC0 == 0x80 or b"\\" in text[start - _ESCAPE_BYTES : start]
        if not is_inside:
            try:
                return str(json.loads(b'"%b"' % text[start:]))
            except ValueError:
                return None
    return None
