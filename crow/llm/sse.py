"""Decodes server-sent events: takes the bytes of a response and returns the data of each event.

Follows WHATWG HTML 9.2.6. Bytes are decoded per event, and invalid UTF-8 becomes U+FFFD. Event names are repeated in
the data, and IDs and retry times have no meaning here, so all of them are dropped. This module also repairs invalid
Unicode in text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping

from crow.domain.errors import AnswerTooLong

MAX_EVENT_BYTES = 8 * 1024 * 1024
"""The limit for one event. It allows two bytes for each character that an answer may have."""
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(AnswerTooLong):
    """An event, or a line, is larger than the limit."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"The endpoint sent more than {MAX_EVENT_BYTES:,} bytes as one event, which is not {kind}. Check the base "
            "URL and the server's log."
        )


class SseDecoder:
    """Decodes the events of one response. Call `feed` with bytes as they arrive. Each call returns the events that
    became complete. `kind` names the expected content in error messages, such as `a chat completion`.

    Events without data are skipped. Only LF, CR and CRLF end a line. A piece may end anywhere, even within CRLF.
    """

    def __init__(self, kind: str = "a model's answer") -> None:
        self._kind = kind
        self._at_start = True
        self._skip_lf = False
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of the events that `piece` completes.

        :raises EventTooLarge: an event or a line exceeds the limit.
        """
        if self._at_start:
            piece = self._without_bom(piece)
        if self._skip_lf and piece:
            self._skip_lf = False
            piece = piece.removeprefix(b"\n")
        if not piece:
            return []
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        if not end:
            self._hold(piece)
            return []
        # A CR ends its line at once; an LF at the start of the next piece belongs to that CR.
        self._skip_lf = end == len(piece) and piece.endswith(b"\r")
        lines, rest = piece[:end], piece[end:]
        if self._rest:
            lines = bytes(self._rest) + lines
            self._rest.clear()
        events = self._events_of(lines.splitlines())
        if rest:
            self._hold(rest)
        return events

    def finish(self) -> list[str]:
        """Tell the decoder that no more bytes follow. Return the data of the last event if no blank line has ended it.
        This event may be incomplete."""
        lines = [bytes(self._rest), b""] if self._rest else [b""]
        self._rest.clear()
        return self._events_of(lines)

    def _without_bom(self, piece: bytes) -> bytes:
        piece = bytes(self._rest) + piece
        self._rest.clear()
        if len(piece) < len(_BOM) and _BOM.startswith(piece):
            self._rest += piece
            return b""
        self._at_start = False
        return piece.removeprefix(_BOM)

    def _hold(self, rest: bytes) -> None:
        self._rest += rest
        self._check_size()

    def _events_of(self, lines: list[bytes]) -> list[str]:
        events: list[str] = []
        data = self._data
        for line in lines:
            if not line:
                if data:
                    text = (data[0] if len(data) == 1 else b"\n".join(data)).decode("utf-8", "replace")
                    data.clear()
                    self._data_bytes = 0
                    if text:
                        events.append(text)
                continue
            if line.startswith(b"data: "):
                data.append(line[6:])
            elif line.startswith(b"data:"):
                data.append(line[5:])
            elif line == b"data":
                data.append(b"")
            else:
                continue
            self._data_bytes += len(line)
            if self._data_bytes > MAX_EVENT_BYTES:
                self._check_size()
        return events

    def _check_size(self) -> None:
        if len(self._rest) + self._data_bytes > MAX_EVENT_BYTES:
            raise EventTooLarge(self._kind)


# Reads event data that is not one JSON object.

_DECODER = json.JSONDecoder(strict=False)
_BETWEEN = re.compile(r"(?:\s|,|\ufeff|data:)*")
_END = re.compile(r"\[DONE\]", re.IGNORECASE)


def is_end(data: str) -> bool:
    """Return whether this event is the last one."""
    return _END.match(data) is not None


def is_keep_alive(data: str) -> bool:
    """Return whether the event has no content and only keeps the connection open."""
    return data.lower() in {"ping", "pong", "keep-alive", "keepalive", "heartbeat", "connected"}


def chunks_in(data: str) -> tuple[list[dict[str, object]], bool]:
    """Return the chunks in `data`, and whether the end marker follows them. `data` may contain several chunks, because
    some servers frame events incorrectly. If `data` contains anything other than chunks, return no chunks."""
    chunks: list[dict[str, object]] = []
    at = 0
    while True:
        if between := _BETWEEN.match(data, at):
            at = between.end()
        if at >= len(data) or _END.match(data, at):
            return chunks, at < len(data)
        try:
            value, at = _DECODER.raw_decode(data, at)
        except (ValueError, RecursionError):
            return [], False
        if not isinstance(value, dict):
            return [], False
        chunks.append(value)


# Replaces lone UTF-16 surrogates. JSON may contain half of a pair (`\ud83d`) and Python accepts it, but strict parsers
# refuse it. Therefore lone halves are replaced where text enters crow and again where requests leave crow.

_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_lone(text: str) -> str:
    """Return `text` with adjacent halves of surrogate pairs joined and lone halves replaced by U+FFFD."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def replace_lone_in(members: Mapping[str, object]) -> dict[str, object]:
    """Apply `replace_lone` to all texts in `members`. Members that cannot be written as JSON are removed."""
    clean: dict[str, object] = {}
    for key, value in members.items():
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            continue
        clean[replace_lone(key)] = value if text.isascii() else json.loads(replace_lone(text))
    return clean


class SurrogateJoiner:
    """Applies `replace_lone` to a text that arrives in pieces. If a piece ends with the high half of a surrogate pair,
    this half is held back until the next piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-16-le")("replace")

    def feed(self, piece: str) -> str:
        """Return the text that can be shown now."""
        if piece.isascii() and not self._decoder.getstate()[0]:
            return piece
        return self._decoder.decode(piece.encode("utf-16-le", "surrogatepass"))

    def finish(self) -> str:
        """Return the replacement for a half that is still held back."""
        return self._decoder.decode(b"", final=True)
