"""Text files in whatever encoding they have, and which of them the model has seen."""

from __future__ import annotations

import codecs
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from crow.domain.errors import ArgumentError
from crow.tools import Workspace

_MAX_SEEN_CHARS = 1_000_000
_MAX_ALL_SEEN_CHARS = 8_000_000
"""Longer texts, and those seen longest ago, are remembered only by their fingerprint."""

WIDE_ENCODINGS = {
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
}
_KANA = re.compile("[\u3041-\u3096\u30a1-\u30fa]")
_CONTROL = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_WINDOWS_ONLY = re.compile(rb"[\x80-\x9f]")
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_SURROGATE = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """The text of a file."""

    text: str
    """The text. Bytes that the encoding does not explain are lone surrogates."""
    encoding: str = "utf-8"
    """The name of the encoding."""

    @property
    def shown(self) -> str:
        """The text for people and models: U+FFFD stands for bytes that the encoding does not explain."""
        return self.text if self.text.isascii() else _SURROGATE.sub("�", self.text)

    @property
    def is_utf8(self) -> bool:
        """Whether the whole file is UTF-8."""
        return self.encoding == "utf-8" and self.shown == self.text

    def encode(self, text: str, what: str) -> bytes:
        """Return `text` in the encoding of this file.

        :raises ~crow.domain.errors.ArgumentError: the encoding does not have a character; the message names `what`.
        """
        try:
            return text.encode(self.encoding, "surrogateescape" if self.encoding == "utf-8" else "strict")
        except UnicodeEncodeError as error:
            character = text[error.start]
            raise ArgumentError(
                f"{what} has {character!r} (U+{ord(character):04X}), which {self.encoding}, the encoding of the file, "
                "does not have; write it in another way"
            ) from None


async def read_text_file(workspace: Workspace, path: Path) -> TextFile | None:
    """Read a file. An open editor gives the text of a file in UTF-8. Return None for a binary file.

    :raises OSError: the file cannot be read.
    """
    text = await workspace.read_text(path)
    if "�" not in text and "\0" not in text:
        return TextFile(text=text)
    saved = _decode(await workspace.read_bytes(path))
    if saved is not None and saved.is_utf8 and saved.text != text:
        return TextFile(text=text)  # an open editor has text with U+FFFD that is not saved yet
    return saved


def _decode(data: bytes) -> TextFile | None:
    """Return the text in `data`, so that `encode` gives `data` again. Return None if it is not text."""
    for encoding in _candidates(data):
        try:
            text = data.decode(encoding, "surrogateescape" if encoding == "utf-8" else "strict")
        except UnicodeDecodeError:
            continue
        file = TextFile(text=text, encoding=encoding)
        if _is_plausible(file, data) and file.encode(text, "") == data:
            return file
    return None


def _candidates(data: bytes) -> tuple[str, ...]:
    wide = next((encoding for encoding, mark in WIDE_ENCODINGS.items() if data.startswith(mark)), None)
    if wide is not None:
        return (wide,)
    return ("utf-8", "cp932", "euc_jp", "cp1252" if _WINDOWS_ONLY.search(data) else "latin-1", "latin-1")


def _is_plausible(file: TextFile, data: bytes) -> bool:
    if file.encoding in WIDE_ENCODINGS:
        return len(file.text) > 1
    if _CONTROL.search(data):
        return False
    match file.encoding:
        case "utf-8":
            # A few stray bytes do not make another encoding of a text that is UTF-8 otherwise.
            strays = len(_SURROGATE.findall(file.text))
            others = sum(not character.isascii() for character in file.text) - strays
            return strays <= others
        case "cp932" | "euc_jp":
            # Western text could be read as Japanese by chance, but hardly with kana.
            return _KANA.search(file.text) is not None and _PRIVATE.search(file.text) is None
    high = sum(byte > 0x7F for byte in data)
    return high * 3 <= len(data)


class SeenFiles:
    """Remembers the text of each file that the model read or wrote, so that the model does not overwrite later changes
    by others.

    The model may edit a file that it has never read, because an edit must match the file's text anyway.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[Path, tuple[int, int]] = {}
        self._texts: OrderedDict[Path, str] = OrderedDict()
        self._chars = 0

    def note(self, path: Path, text: str) -> None:
        """Remember that the model knows this text of the file."""
        self._fingerprints[path] = (len(text), hash(text))
        self._chars -= len(self._texts.pop(path, ""))
        if len(text) <= _MAX_SEEN_CHARS:
            self._texts[path] = text
            self._chars += len(text)
        while self._chars > _MAX_ALL_SEEN_CHARS:
            self._chars -= len(self._texts.popitem(last=False)[1])

    def forget(self, path: Path) -> None:
        """Forget a file that was removed."""
        self._fingerprints.pop(path, None)
        self._chars -= len(self._texts.pop(path, ""))

    def knows(self, path: Path) -> bool:
        """Return whether the model read or wrote the file."""
        return path in self._fingerprints

    def has_changed(self, path: Path, text: str) -> bool:
        """Return whether the file, which now holds `text`, has changed since the model read or wrote it."""
        return self._fingerprints.get(path) not in (None, (len(text), hash(text)))

    def changed_lines(self, path: Path, text: str) -> range | None:
        """Return the lines of `text` (counted from 0) within which the file has changed since then. The range is empty
        where lines were only removed. Return None if the old text is no longer known."""
        known = self._texts.get(path)
        if known is None:
            return None
        old, new = known.split("\n"), text.split("\n")
        shorter = min(len(old), len(new))
        first = next((at for at in range(shorter) if old[at] != new[at]), shorter)
        same = next((at for at in range(shorter - first) if old[-1 - at] != new[-1 - at]), shorter - first)
        return range(first, len(new) - same)
