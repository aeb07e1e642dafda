"""Shortens, quotes, counts, encodes and escapes text that people and models read."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from functools import cache

TITLE_CHARS = 200
"""The maximum length of a title, not counting the note that says how much is left out."""


def shorten(text: str, chars: int) -> str:
    """Return `text`, or its beginning with an ellipsis. The result has at most `chars` characters, at least one."""
    return text if len(text) <= chars else text[: max(0, chars - 1)].rstrip() + "…"


def shorten_end(text: str, chars: int) -> str:
    """Return `text`, or its first `chars` characters and a line with the number of characters that are not shown."""
    if len(text) <= chars:
        return text
    return f"{text[:chars]}\n[… {len(text) - chars:,} of {len(text):,} characters are not shown]"


def shorten_middle(text: str, chars: int) -> str:
    """Return `text`, or about `chars` characters of it: its beginning, a line with the number of characters that are
    not shown, and its end."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters are not shown here …]\n{text[len(text) - half :]}"


def first_line(text: str) -> str:
    """Return the first line of `text` that is not blank, without the spaces around it. Return an empty string if all
    lines are blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def quote(text: str, chars: int = 60) -> str:
    """Return the first line of `text` in quotation marks, shortened to `chars` characters."""
    return f"“{shorten(first_line(text), chars)}”"


def is_number(text: str) -> bool:
    """Return whether `text` is a whole number in ASCII digits that fits into 64 bits. Python raises an error for
    thousands of digits, and SQLite for more than 64 bits."""
    return text.isdecimal() and text.isascii() and len(text) <= 18


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 entry`, `2 entries`, `10,000 sessions`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in ("a", "e", "o", "u"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def base32(data: bytes) -> str:
    """Return `data` in base32, as people can type it: in lower case, without padding."""
    return base64.b32encode(data).decode().rstrip("=").lower()


def describe(value: object, chars: int = 80) -> str:
    """Return a value that was read from JSON as JSON text for a message, shortened to `chars` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "nested too deeply to show"
    return shorten(text.encode("utf-8", "replace").decode(), chars)


def safe(text: str) -> str:
    """Replace each character that could hide, reorder or forge text with an escape such as `\\u202e`.

    These are control characters (except line ends and tabs), marks that change the direction of writing, characters
    that draw nothing, and unusual line separators. Joiners are kept inside emoji and inside words of scripts other
    than Latin.
    """
    if "\r" in text:
        text = _LONE_CR.sub(r"\\r", text)
    if not _HIDDEN.search(text):
        return text
    return _SOMETIMES_HIDDEN.sub(_escape_unless_joined, text).translate(_escapes())


def safe_json(text: str) -> str:
    """Return JSON text with the characters that `safe` escapes written as escapes of JSON, such as `\\u202e`."""
    if safe(text) == text:
        return text
    return _NOT_PLAIN.sub(lambda found: json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f", text)


def on_one_line(text: str) -> str:
    """Return `text` without line ends and tabs, and with hidden characters escaped."""
    return safe(" ".join(text.split()))


def title_line(text: str, limit: int = TITLE_CHARS) -> str:
    """Return the first line of `text` as a title, with hidden characters escaped. If anything is left out, the end of
    the title says how much: `make … (+2 lines)`."""
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text.strip(" ")
    first, *more = [line.strip(" \t\r") for line in text.split("\n") if line.strip(" \t\r")] or [""]
    shown = limit
    while len(title := safe(first[:shown])) > limit:  # an escape is longer than its character
        shown = shown * 3 // 4
    marks = [f"+{len(first) - shown:,} characters"] if len(first) > shown else []
    if more:
        marks.append(f"+{plural(len(more), 'line')}")
    title = title.replace("\t", " ")
    return f"{title} … ({', '.join(marks)})" if marks else title


_ALWAYS_HIDDEN = (
    *((0x00, 0x08), (0x0B, 0x0C), (0x0E, 0x1F), (0x7F, 0x9F)),  # control characters, except line ends and tabs
    *((0x061C, 0x061C), (0x200E, 0x200F), (0x202A, 0x202E), (0x2066, 0x2069)),  # change the direction of writing
    (0x2028, 0x2029),  # line ends for some programs only
    # These draw nothing.
    *((0xAD, 0xAD), (0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200B)),
    *((0x2060, 0x2065), (0x206A, 0x206F), (0x2800, 0x2800), (0x3164, 0x3164), (0xFE00, 0xFE0E), (0xFEFF, 0xFEFF)),
    *((0xFFA0, 0xFFA0), (0xFFF0, 0xFFFB), (0xFFFE, 0xFFFF), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A)),
    (0xE0000, 0xE0FFF),
    (0xD800, 0xDFFF),  # halves of surrogate pairs
)
"""Ranges of code points that `safe` always escapes."""

_JOINERS = "\u200c\u200d"
_EMOJI_STYLE = "\ufe0f"
_LAST_LATIN = "\u02ff"
_HIDDEN = re.compile(
    f"[{_JOINERS}{_EMOJI_STYLE}" + "".join(f"{chr(first)}-{chr(last)}" for first, last in _ALWAYS_HIDDEN) + "]"
)
_LONE_CR = re.compile(r"\r(?!\n)")
_SOMETIMES_HIDDEN = re.compile(f"[{_JOINERS}]+|{_EMOJI_STYLE}")
_NOT_PLAIN = re.compile(r"[^\n\x20-\x7e]")


@cache
def _escapes() -> Mapping[int, str]:
    """Return the escape of each code point in `_ALWAYS_HIDDEN`. A table is much faster than a function call for each
    match."""
    return {point: _escape(point) for first, last in _ALWAYS_HIDDEN for point in range(first, last + 1)}


def _escape(point: int) -> str:
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def _escape_unless_joined(found: re.Match[str]) -> str:
    """Return the characters in `found` as escapes. Two kinds of characters stay unchanged: a joiner inside a word or
    emoji, and the character that turns a symbol into an emoji."""
    chars, text = found[0], found.string
    before, after = text[max(0, found.start() - 1) : found.start()], text[found.end() : found.end() + 1]
    if chars == _EMOJI_STYLE and before > _LAST_LATIN and not _HIDDEN.match(before):
        return chars
    if chars in (*_JOINERS,) and _is_joined(before) and _is_joined(after):
        return chars
    return "".join(_escape(ord(char)) for char in chars)


def _is_joined(char: str) -> bool:
    """Return whether this character, next to a joiner, may be part of a word or an emoji."""
    return char > _LAST_LATIN and (char == _EMOJI_STYLE or not _HIDDEN.match(char))


def in_format_of(saved: str, text: str) -> str:
    """Return `text` with the byte order mark, the line endings and the final newline of `saved`. Not every editor keeps
    these three when it reads a file."""
    if saved.endswith("\n") and not text.endswith("\n"):
        text += "\r\n" if "\r\n" in text else "\n"
    if "\r\n" in saved and "\r\n" not in text:
        text = text.replace("\n", "\r\n")
    if saved.startswith("\ufeff") and not text.startswith("\ufeff"):
        text = f"\ufeff{text}"
    return text
