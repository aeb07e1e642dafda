"""Separates reasoning from the answer, in all forms in which endpoints send reasoning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

# First form: reasoning is in a field of its own.

_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_text", "thought")
_THOUGHT_TYPES = ("thinking", "reasoning", "thought", "reasoning_text")
_GROWING_KEYS = frozenset({"text", "summary", "data"})


def thought_of(delta: Mapping[str, object]) -> tuple[str | None, str]:
    """Return `(field, piece)`: the name and the text of the first reasoning field that has text. If no field has text,
    `piece` is empty, and `field` is the first reasoning field with an empty text, or None if there is none."""
    present: str | None = None
    for field in _FIELDS:
        if (value := delta.get(field)) is None:
            continue
        if piece := _text_of(value):
            return field, piece
        if isinstance(value, str) and present is None:
            present = field
    return present, ""


def content_pieces(content: object) -> Iterator[tuple[Literal["thought", "text"], str]]:
    """Yield the pieces of a message's content, which is a single part or a list of parts."""
    for part in content if isinstance(content, list) else (content,):
        if isinstance(part, (str, Mapping)):
            is_thought = isinstance(part, Mapping) and part.get("type") in _THOUGHT_TYPES
            yield "thought" if is_thought else "text", _text_of(part)


def details_text(details: object) -> str:
    """Return the readable part of `reasoning_details`: texts and summaries, without encrypted items."""
    pieces = (
        item.get("text") or item.get("summary")
        for item in (details if isinstance(details, list) else ())
        if isinstance(item, Mapping) and item.get("type") != "reasoning.encrypted"
    )
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _text_of(value: object) -> str:
    """Return the text in a part, in a list of parts, or in parts nested inside a part."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_text_of(item) for item in value)
    if isinstance(value, Mapping):
        for key in ("text", "thinking", "reasoning", "content", "summary"):
            if value.get(key):
                return _text_of(value[key])
    return ""


class ReasoningDetails:
    """Joins the `reasoning_details` of a stream, so that they can be sent back. `size` is the number of characters in
    them."""

    def __init__(self) -> None:
        self._items: list[dict[str, object]] = []
        self._growing: dict[str, list[str]] = {}
        self.size = 0

    def add(self, details: object) -> None:
        """Add the list in one delta. An item continues the item before it if both have the same index and type."""
        for item in details if isinstance(details, list) else ():
            if not isinstance(item, Mapping):
                continue
            last = self._items[-1] if self._items else None
            if last is None or any(last.get(key) != item.get(key) for key in ("index", "type")) or "index" not in item:
                self._join()
                self._items.append(last := {})
            for key, value in item.items():
                self.size += len(key) + len(str(value))
                if key in _GROWING_KEYS and isinstance(value, str):
                    last.setdefault(key, "")
                    self._growing.setdefault(key, []).append(value)
                elif value is not None or key not in last:
                    last[key] = value

    def opaque(self) -> dict[str, object]:
        """Return the joined details as the member that is sent back with the message. If there were no details, return
        an empty dict."""
        self._join()
        return {"reasoning_details": self._items} if self._items else {}

    def _join(self) -> None:
        """Join the pieces of the last item."""
        for key, pieces in self._growing.items():
            self._items[-1][key] = "".join(pieces)
        self._growing = {}


class ThinkingBlocks:
    """Joins the `thinking_blocks` in which LiteLLM streams Claude's thoughts, so that they can be sent back. `size` is
    the number of characters in them."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, object]] = []
        self._pieces: list[str] = []
        self.size = 0

    def add(self, blocks: object) -> None:
        """Add the list in one delta. A thought continues until its signature comes. Some versions send all of its text
        again with the signature."""
        for block in blocks if isinstance(blocks, list) else ():
            if not isinstance(block, Mapping):
                continue
            self.size += sum(len(str(value)) for value in block.values())
            if block.get("type") != "thinking":
                self._blocks.append(dict(block))
                continue
            text, signature = block.get("thinking"), block.get("signature")
            is_signed = isinstance(signature, str) and signature != ""
            if isinstance(text, str) and not (is_signed and text == "".join(self._pieces)):
                self._pieces.append(text)
            if is_signed:
                self._blocks.append({"type": "thinking", "thinking": "".join(self._pieces), "signature": signature})
                self._pieces = []

    def opaque(self) -> dict[str, object]:
        """Return the signed and redacted blocks as the member that is sent back with the message. If there are none,
        return an empty dict."""
        return {"thinking_blocks": self._blocks} if self._blocks else {}


def signatures_in(extra: object) -> dict[str, object]:
    """Return the signatures in Gemini's `extra_content`, by provider. Its other members are not sent back."""
    return {
        str(provider): {"thought_signature": members["thought_signature"]}
        for provider, members in (extra.items() if isinstance(extra, Mapping) else ())
        if isinstance(members, Mapping) and isinstance(members.get("thought_signature"), str)
    }


# Second form: reasoning is in the answer itself, such as `<think>...</think>`. An opening tag has a meaning only at the
# start of the answer; elsewhere it is text. A closing tag without an opening tag is also text, because everything
# before it was already shown. When such an answer is sent back, the model's own chat template removes the reasoning.
# Some formats put tokens before the answer; these are removed.

_THINK_ENDS = ("</think>", "</thinking>")
_TAGS: dict[str, tuple[str, ...]] = {
    "<think>": _THINK_ENDS,
    "<thinking>": _THINK_ENDS,
    "<thought>": ("</thought>",),
    "<reasoning>": ("</reasoning>",),
    "<mm:think>": ("</mm:think>",),
    "<seed:think>": ("</seed:think>",),
    "[think]": ("[/think]",),
    "◁think▷": ("◁/think▷",),
    "<|channel|>analysis<|message|>": ("<|end|>",),
    "<|channel>thought\n": ("<channel|>",),
    "<|start_thinking|>": ("<|end_thinking|>",),
    "<|begin_of_thought|>": ("<|end_of_thought|>",),
}
"""Tokens that open a thought, each with the tokens that can end the thought. Letter case is ignored."""
_END_OF = {ends: re.compile("|".join(map(re.escape, ends)), re.IGNORECASE) for ends in _TAGS.values()}

_OPENING_TOKENS = (
    *_THINK_ENDS,  # the thought came in a field of its own, but its closing tag came in the answer
    *("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
    *("<|start_response|>", "<|begin_of_solution|>"),
)
"""Tokens that some formats put before an answer. They are removed from the text."""

_BEGINNINGS = (*_TAGS, *_OPENING_TOKENS)
_LONGEST = max(map(len, _BEGINNINGS))
_MAX_BLANKS = 4096
_SLICE_CHARS = 16_384
"""Text is read in slices of this size. Reading a tag copies the rest of its slice, so slices must be short."""


class ThinkSplitter:
    """Separates thoughts from text. Call `feed` with pieces of the content: each call returns `(thought, text)` as far
    as crow can tell them apart.

    The states are `start` (no word yet), `thought` (after an opening tag), `after` (a thought or a removed token has
    ended), and finally `text`. Only text that may become a tag, and blanks at the very start, are held back. Blanks
    before the first word of a thought, and between a thought and the answer, are removed.
    """

    def __init__(self) -> None:
        self._state = "start"
        self._ends: tuple[str, ...] = ()
        """The tags that can end the current thought."""
        self._has_words = False
        """Whether a word of the current thought was returned."""
        self.held = ""
        """The content that is held back."""
        self.found = False
        """Whether there was a thought."""
        self.has_removed_tokens = False
        """Whether tokens before the answer were removed. Their formats have tokens at the end of the answer, too."""

    def feed(self, piece: str) -> tuple[str, str]:
        """Return `(thought, text)`. Either may be empty."""
        if self._state == "text":
            return "", piece
        thought: list[str] = []
        for start in range(0, len(piece), _SLICE_CHARS):
            self.held += piece[start : start + _SLICE_CHARS]
            while self._read_thought(thought) if self._state == "thought" else self._read_start():
                pass
            if self._state == "text":
                text, self.held = self.held + piece[start + _SLICE_CHARS :], ""
                return "".join(thought), text
        return "".join(thought), ""

    def finish(self) -> tuple[str, str]:
        """Return `(thought, text)` for the content that was held back. An unfinished tag is returned as it was written.
        If only blanks were held back, they are dropped."""
        held, self.held = self.held, ""
        if not held.strip():
            return "", ""
        return (held, "") if self._state == "thought" else ("", held)

    def _read_start(self) -> bool:
        """Decide whether the held text starts with a tag, a token or the answer. If it starts with a tag or a token,
        remove it and return True, so that the text after it can be read."""
        begun = self.held.lstrip()
        if not begun:
            if self._state == "after":
                self.held = ""
            if len(self.held) < _MAX_BLANKS:
                return False
        head = begun[:_LONGEST].lower()
        for beginning in _BEGINNINGS:
            if not head.startswith(beginning):
                continue
            self.held = begun[len(beginning) :]
            if beginning in _TAGS:
                self._state, self._ends, self._has_words, self.found = "thought", _TAGS[beginning], False, True
            else:
                self._state, self.has_removed_tokens = "after", True
            return True
        if begun and any(beginning.startswith(head) for beginning in _BEGINNINGS):
            return False
        if self._state == "after":
            self.held = begun
        self._state = "text"
        return False

    def _read_thought(self, thought: list[str]) -> bool:
        """Move the held text that certainly belongs to the thought into `thought`. Return True if the thought has
        ended."""
        if not self._has_words:
            self.held = self.held.lstrip()
        if end := _END_OF[self._ends].search(self.held):
            thought.append(self.held[: end.start()])
            self.held = self.held[end.end() :]
            self._state = "after"
            return True
        cut = len(self.held) - max(_overlap(self.held, each) for each in self._ends)
        thought.append(self.held[:cut])
        self._has_words = self._has_words or cut > 0
        self.held = self.held[cut:]
        return False


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `tag`, ignoring case."""
    tail = text[1 - len(tag) :].lower()
    return next((length for length in range(len(tail), 0, -1) if tag.startswith(tail[-length:])), 0)
