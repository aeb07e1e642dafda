"""Server-sent events: response bytes in, the `data` of each event out.

The decoding rules of WHATWG HTML 9.2.6, incrementally: whole lines are cut out of what arrived, a rest without its
line end waits. Bytes are decoded per event, invalid UTF-8 becomes U+FFFD. Event names, ids and retry times carry
nothing for chat completions and are dropped.
"""

from __future__ import annotations

import json
import re

from crow.domain.errors import AnswerTooLong

__all__ = ["MAX_EVENT_BYTES", "EventTooLarge", "SseDecoder", "chunks_in", "is_end", "is_filler"]

MAX_EVENT_BYTES = 8 * 1024 * 1024
"""Twice the characters that are taken of one answer; a line without end is held up to this."""
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(AnswerTooLong):
    """One event (or one line) is larger than the decoder's bound."""


class SseDecoder:
    """Feed bytes as they arrive; every call gives the events that became whole.

    Events without data are not events. A line ends at LF, CR or CRLF only, wherever the pieces are cut.
    """

    __slots__ = ("_at_start", "_data", "_data_bytes", "_max_bytes", "_rest", "_skip_lf")

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._at_start = True
        self._skip_lf = False
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> list[str]:
        """The events that `piece` completes. :raises EventTooLarge: one grew beyond the bound."""
        if self._at_start:
            piece = self._without_bom(piece)
        if self._skip_lf and piece:
            self._skip_lf = False
            if piece.startswith(b"\n"):
                piece = piece[1:]
        if not piece:
            return []
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        if not end:
            self._keep(piece)
            return []
        if end == len(piece):
            # A CR ends its line at once; should an LF follow in the next piece, it belongs to that CR.
            self._skip_lf = piece.endswith(b"\r")
            rest = b""
        else:
            rest = piece[end:]
            piece = piece[:end]
        if self._rest:
            piece = bytes(self._rest) + piece
            self._rest.clear()
        events = self._events_of(piece.splitlines())
        if rest:
            self._keep(rest)
        return events

    def finish(self) -> list[str]:
        """The bytes have ended: the last event, if its blank line never came (it may be cut anywhere)."""
        lines = [bytes(self._rest), b""] if self._rest else [b""]
        self._rest.clear()
        return self._events_of(lines)

    def _without_bom(self, piece: bytes) -> bytes:
        piece = bytes(self._rest) + piece
        self._rest.clear()
        if len(piece) < len(_BOM) and _BOM.startswith(piece):
            if piece:
                self._keep(piece)
            return b""
        self._at_start = False
        return piece.removeprefix(_BOM)

    def _keep(self, rest: bytes) -> None:
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
            if self._data_bytes > self._max_bytes:
                self._check_size()
        return events

    def _check_size(self) -> None:
        if len(self._rest) + self._data_bytes > self._max_bytes:
            raise EventTooLarge(
                f"The endpoint sent more than {self._max_bytes:,} bytes as one event, which is no chat completion. "
                "Check the base URL and the server's log."
            )


# FROM llm.framing: Data of events that is not one JSON object: the end, nothing at all, or chunks whose framing is
# amiss. Pure.


_DECODER = json.JSONDecoder(strict=False)
_FILLERS = frozenset({"ping", "pong", "keep-alive", "keepalive", "heartbeat", "connected"})
_BETWEEN = re.compile(r"(?:\s|,|\ufeff|data:)*")
_END = re.compile(r"\[DONE\]", re.IGNORECASE)


def is_end(data: str) -> bool:
    """Whether nothing follows."""
    return _END.match(data) is not None


def is_filler(data: str) -> bool:
    """Whether the event only keeps the connection open."""
    return data.lower() in _FILLERS


def chunks_in(data: str) -> tuple[list[dict[str, object]], bool]:
    """`(chunks, whether the end follows)` of data that holds several, or one with something around; none if it is
    anything else besides."""
    chunks: list[dict[str, object]] = []
    at = 0
    while True:
        between = _BETWEEN.match(data, at)
        at = between.end() if between is not None else at
        if at >= len(data) or _END.match(data, at):
            return chunks, at < len(data)
        try:
            value, at = _DECODER.raw_decode(data, at)
        except (ValueError, RecursionError):
            return [], False
        if not isinstance(value, dict):
            return [], False
        chunks.append(value)
