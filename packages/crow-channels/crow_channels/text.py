"""Splits long answers into messages, and takes the effect from mentions. Does no I/O."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_ZERO_WIDTH = "\u200b"
_EVERYONE = re.compile(r"@(?=(?:everyone|here|channel|all)\b)", re.IGNORECASE)
_BY_ID = re.compile(r"<(?=[@#!])")
_UNFINISHED = re.compile(r"(?:@\w{0,8}|<)\Z")
_FENCE = re.compile(r" {0,3}(?P<mark>`{3,20}|~{3,20})[ \t]*(?P<info>[^`\n]{0,30})")
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_CLOSE_UNITS = 21
"""Room for the end of the longest fence and its line break."""

MIN_CHARS = 200
"""The smallest limit to which a text can be split."""


def units(text: str) -> int:
    """Return the length in UTF-16 code units, which no chat counts as fewer than it does."""
    return len(text) + sum(character > "\uffff" for character in text)


def harmless(text: str) -> str:
    """Return the text without control characters, and with a zero-width space in everything that would notify people:
    `@everyone` and the like, and mentions by id."""
    text = _HIDDEN.sub("", text.replace("\r\n", "\n"))
    return _BY_ID.sub(f"<{_ZERO_WIDTH}", _EVERYONE.sub(f"@{_ZERO_WIDTH}", text))


def settled(text: str) -> str:
    """Return a growing text without an end that may become a mention."""
    return _UNFINISHED.sub("", text)


def line(text: str, chars: int) -> str:
    """Return the text on one line, shortened to `chars` characters."""
    text = " ".join(text.split())
    return text if len(text) <= chars else text[: chars - 1] + "…"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text that fits into one message."""

    text: str
    """What to send."""
    body: str
    """The part of the text that it shows, without added fences."""


def split(text: str, limit: int) -> tuple[Piece, ...]:
    """Split a text into pieces of at most `limit` UTF-16 code units.

    A code block that goes on in the next piece is closed, and opened again there. All pieces except the last stay the
    same if the text grows. The bodies together are the text, except line breaks and spaces at the cuts.

    :raises ValueError: the limit is less than `MIN_CHARS`.
    """
    if limit < MIN_CHARS:
        raise ValueError(f"limit is {limit}; expected at least {MIN_CHARS}")
    pieces: list[Piece] = []
    fence, rest, is_at_line = "", text.strip("\n"), True
    while rest:
        opening = f"{fence}\n" if fence else ""
        # A cut line does not go on as a fence, so the room for the end of one is enough.
        room = limit - units(opening) - _CLOSE_UNITS
        end, begins_line = (len(rest), True) if units(rest) <= room else _cut(rest, room)
        body, rest = rest[:end], rest[end:]
        if rest and begins_line:
            body, rest = body.rstrip("\n"), rest.lstrip("\n")
        after = _fence_after(body, fence, is_at_line)
        closing = f"\n{_mark(after)}" if after else ""
        if body.strip():
            pieces.append(Piece(opening + body + closing, body))
        fence, is_at_line = after, begins_line
    return tuple(pieces)


def _cut(text: str, room: int) -> tuple[int, bool]:
    """Return where to cut a text that is too long, and whether the rest begins a line."""
    used = 0
    for end, character in enumerate(text):  # noqa: B007  # the place is used below
        used += 1 + (character > "\uffff")
        if used > room:
            break
    window = text[: end + 1]
    for separator, least in (("\n\n", end // 2), ("\n", end // 4)):
        if (at := window.rfind(separator, least)) > 0:
            return at, True
    for at in range(end, end // 4, -1):
        if text[at].isspace():
            return at + (text[at] != "\n" and at < end), False
    while end > room // 2 and _continues(text, end):
        end -= 1
    return end, False


def _continues(text: str, at: int) -> bool:
    """Whether the character at this place belongs to the one before it."""
    joiners = "\u200d\ufe0f"
    return bool(unicodedata.combining(text[at])) or text[at] in joiners or text[at - 1] == "\u200d"


def _mark(fence: str) -> str:
    found = _FENCE.match(fence)
    assert found is not None
    return found["mark"]


def _fence_after(body: str, fence: str, is_at_line: bool) -> str:
    """Return the line that opens the code block which is open at the end of `body`. Empty if there is none. `fence` is
    that line for the beginning of `body`."""
    lines = body.split("\n")
    for each in lines if is_at_line else lines[1:]:
        found = _FENCE.match(each)
        if found is None:
            continue
        mark, after = found["mark"], each[found.end("mark") :]
        if not fence and not (mark[0] == "`" and "`" in after):  # "```x```" on one line opens nothing
            fence = f"{mark}{found['info'].strip().split(' ')[0]}"
        elif fence and mark[0] == fence[0] and len(mark) >= len(_mark(fence)) and not after.strip():
            fence = ""
    return fence
