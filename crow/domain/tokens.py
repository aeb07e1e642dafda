"""Estimates token counts and shortens texts.

There is no tokenizer, because every endpoint has a different one. Instead, characters are counted by kind (Python's
codecs do that fast), and each kind has a weight. The estimate should be right within a factor of two for any script and
for base64. Callers calibrate the estimate with the counts that the provider reports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import assert_never

from crow.domain import messages
from crow.domain.messages import Message, Part, ToolSpec

IMAGE_TOKENS = 1_500
"""The estimate for an image of any size. For one megapixel, the large providers charge about as many tokens."""

_FILE_TOKENS = 2_000
_BASE64_PER_FILE_TOKEN = 100
"""This many characters of base64 count as one token of a file, in addition to `_FILE_TOKENS`. Pages with pictures have
more characters for each token."""

MESSAGE_TOKENS = 4
"""The estimate for the role and the delimiters of a message."""
_CALL_TOKENS = 8
"""The estimate for the delimiters of a call, a result or a tool spec."""

_RUN_CHARS = 60
_RUN = re.compile(r"[A-Za-z0-9+/=_\-]{60,}+")
"""Matches a run of characters that may be encoded data. A line of base64 has 64 or 76 characters."""
# Most texts have no such run, and this table finds that out twenty times faster than the pattern.
_IN_RUNS = bytes(88 if re.fullmatch(rb"[A-Za-z0-9+/=_\-]", bytes((byte,))) else 32 for byte in range(256))
_ENCODED_LETTERS = 12
"""A run with at least this many different characters is base64, hex or a key. A run with fewer different characters is
a separator line."""
_LONG_RUN = 100
_SHORT_ENCODED = re.compile(r"[0-9a-fA-F]+|(?=(?:.*?[0-9]){4})(?=(?:.*?[A-Z]){4}).*")
"""If a run is shorter than `_LONG_RUN`, it counts as encoded only if it matches this pattern: it is hex, or it has at
least four digits and four capital letters. Most paths and names do not match."""


def estimate_text(text: str) -> int:
    """Estimate the tokens of `text`.

    An ASCII character counts as a quarter of a token, or as half a token in an encoded run. Other characters count by
    their size in UTF-8: two bytes (such as Greek or Cyrillic) as half a token, three bytes (such as CJK or Indic) as
    one token, and four bytes (such as emoji) as two tokens.
    """
    if not text:
        return 0
    data = text.encode("utf-8", "surrogatepass")
    encoded = 0
    if b"X" * _RUN_CHARS in data.translate(_IN_RUNS):
        encoded = sum(len(run) for run in _RUN.findall(text) if _is_encoded(run))
    if text.isascii():
        return (len(text) + encoded + 3) // 4
    ascii_chars = len(text.encode("ascii", "ignore"))
    size = len(data)
    astral = len(text.encode("utf-16-le", "surrogatepass")) // 2 - len(text)
    others = len(text) - ascii_chars - astral
    three_bytes = size - ascii_chars - 4 * astral - 2 * others
    two_bytes = others - three_bytes
    return (ascii_chars + encoded + 2 * two_bytes + 4 * three_bytes + 8 * astral + 3) // 4


def _is_encoded(run: str) -> bool:
    """Return whether a run of characters without blanks is base64, hex or a key."""
    if len(set(run[:1000])) < _ENCODED_LETTERS:
        return False
    return len(run) >= _LONG_RUN or _SHORT_ENCODED.fullmatch(run) is not None


def estimate_message(message: Message) -> int:
    """Return how many tokens one message uses in a request, including its role and delimiters."""
    match message:
        case messages.SystemMessage(text=text):
            return MESSAGE_TOKENS + estimate_text(text)
        case messages.UserMessage(parts=parts):
            return MESSAGE_TOKENS + sum(map(_estimate_part, parts))
        case messages.AssistantMessage():
            return MESSAGE_TOKENS + _estimate_assistant(message)
        case messages.ToolMessage(text=text, images=images, files=files):
            attached = IMAGE_TOKENS * len(images) + sum(map(_estimate_file, files))
            return MESSAGE_TOKENS + _CALL_TOKENS + estimate_text(text) + attached
        case _ as never:
            assert_never(never)


def _estimate_file(file: messages.File) -> int:
    """Return about how many tokens a file uses. Models read the text of its pages, and a picture of each."""
    return _FILE_TOKENS + len(file.data) // _BASE64_PER_FILE_TOKEN


def estimate_tools(tools: Sequence[ToolSpec]) -> int:
    """Return how many tokens the tool specs use in a request."""
    tokens = _CALL_TOKENS * len(tools)
    for tool in tools:
        schema = json.dumps(tool.input_schema, default=str)
        tokens += sum(map(estimate_text, (tool.name, tool.description, schema)))
    return tokens


def _estimate_part(part: Part) -> int:
    match part:
        case messages.Text(text=text):
            return estimate_text(text)
        case messages.Image():
            return IMAGE_TOKENS
        case messages.File():
            return _estimate_file(part)
        case messages.Resource(uri=uri, text=text) | messages.Link(uri=uri, name=text):
            return 2 * MESSAGE_TOKENS + estimate_text(uri) + estimate_text(text)
        case _ as never:
            assert_never(never)


def _estimate_assistant(message: messages.AssistantMessage) -> int:
    """Return the estimated tokens of an answer. The answer's reasoning counts only if it may be sent back, either in a
    field of its own or in opaque fields."""
    # The items of an answer repeat its text; crow.llm.items says what they are.
    tokens = 0 if "items" in message.opaque else estimate_text(message.text)
    for call in message.calls:
        tokens += _CALL_TOKENS + estimate_text(call.name) + estimate_text(call.arguments)
    if message.opaque:
        tokens += estimate_text(json.dumps(message.opaque, default=str))
    elif message.reasoning_field is not None:
        tokens += estimate_text(message.thought)
    return tokens


_CUT_SLACK = 200
"""A cut is moved by at most this many characters to the end of a line."""


def head_and_tail(text: str, chars: int, entry: int) -> str:
    """Shorten `text` to at most `chars` characters: two thirds from its head, one third from its tail.

    A line between the two parts says how many characters are left out, and which entry has the whole text. This line
    is not counted.
    """
    if len(text) <= chars:
        return text
    head = max(0, chars) * 2 // 3
    tail = max(0, chars) - head
    # Whole lines, unless they are long.
    head = line_end if (line_end := text.rfind("\n", max(0, head - _CUT_SLACK), head)) >= 0 else head
    start = len(text) - tail
    line_start = text.find("\n", start, start + _CUT_SLACK)
    tail = tail - (line_start + 1 - start) if line_start >= 0 else tail
    marker = (
        f"\n[... {len(text) - head - tail} of {len(text)} characters are left out here; "
        f"recall with entry {entry} gives all of it ...]\n"
    )
    return f"{text[:head]}{marker}{text[len(text) - tail :]}"


def fit(text: str, tokens: int, entry: int) -> str:
    """Shorten `text` so that its estimate is at most `tokens`. If `text` fits, return it unchanged. Otherwise return
    its head and tail with a marker between them, or only the marker if there is no room for more."""
    whole = estimate_text(text)
    if whole <= max(0, tokens):
        return text
    chars = len(text) * max(0, tokens) // whole
    while chars > 0:
        cut = head_and_tail(text, chars, entry)
        if estimate_text(cut) <= tokens:
            return cut
        chars = min(chars - 1, chars * 4 // 5)
    return head_and_tail(text, 0, entry)
