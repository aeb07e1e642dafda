"""Text files in whatever encoding they have."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

from crow.domain.errors import ArgumentError
from crow.tools import Workspace

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
    """The text. Bytes that cannot be decoded are lone surrogates."""
    encoding: str = "utf-8"
    """The name of the encoding."""

    @property
    def shown(self) -> str:
        """The text for people and models: U+FFFD stands for bytes that cannot be decoded."""
        return self.text if self.text.isascii() else _SURROGATE.sub("�", self.text)

    @property
    def is_utf8(self) -> bool:
        """Whether the whole file is UTF-8."""
        return self.encoding == "utf-8" and self.shown == self.text

    def encode(self, text: str, what: str) -> bytes:
        """Return `text` in the encoding of this file.

        :raises ~crow.domain.errors.ArgumentError: the encoding does not have a character of `text`; the message names
            `what`.
        """
        try:
            return text.encode(self.encoding, "surrogateescape" if self.encoding == "utf-8" else "strict")
        except UnicodeEncodeError as error:
            character = text[error.start]
            raise ArgumentError(
                f"{what} has {character!r} (U+{ord(character):04X}), but the encoding of the file, {self.encoding}, "
                "does not have this character; write it in another way"
            ) from None


async def read_text_file(workspace: Workspace, path: Path) -> TextFile | None:
    """Read a file. If it is UTF-8 and open in the editor, the text comes from the editor. Return None for a binary
    file.

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
            # A text that is UTF-8 apart from a few stray bytes is probably not in another encoding.
            strays = len(_SURROGATE.findall(file.text))
            others = sum(not character.isascii() for character in file.text) - strays
            return strays <= others
        case "cp932" | "euc_jp":
            # Western text could be read as Japanese by chance, but hardly with kana.
            return _KANA.search(file.text) is not None and _PRIVATE.search(file.text) is None
    high = sum(byte > 0x7F for byte in data)
    return high * 3 <= len(data)
