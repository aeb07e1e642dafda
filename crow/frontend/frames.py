"""JSON-RPC lines, without I/O: bytes to messages, messages to bytes.

Strategy: a splitter cuts the stream into bounded lines; `parse` turns a line into a message that the SDK's connection
can take without harm, or into the fault to answer, or into nothing. Whatever `parse` lets through is an object with a
string method, a usable id and object parameters, or a response whose error is an object. Knows no method and no
descriptor.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = [
    "INVALID_REQUEST",
    "MAX_DEPTH",
    "MAX_LINE_BYTES",
    "FrameError",
    "LineSplitter",
    "Message",
    "Oversized",
    "RequestId",
    "encode",
    "parse",
]

Message: TypeAlias = dict[str, Any]
RequestId: TypeAlias = int | str | None

MAX_LINE_BYTES = 32 * 1024 * 1024
MAX_DEPTH = 200
"""How deep objects and arrays may nest: far above any real message, far below what a recursive walk can bear."""

MAX_ID_CHARS = 1000
"""An id goes into the answer, and into whatever else speaks of the request."""

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
INVALID_PARAMS = -32602

_BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameError:
    """A line that is no message: the JSON-RPC error to answer it with. `id` is None where it cannot be known."""

    code: int
    words: str
    id: RequestId = None

    def response(self) -> Message:
        """The whole response."""
        error = {"code": self.code, "message": self.words, "data": {"details": self.words}}
        return {"jsonrpc": "2.0", "id": self.id, "error": error}


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversized:
    """A line longer than the bound, dropped while it came; `size` in bytes."""

    size: int
    limit: int

    def fault(self) -> FrameError:
        """Its answer."""
        words = (
            f"The line is {self.size} bytes long; crow reads at most {self.limit} bytes ({_mebibytes(self.limit)}) "
            "in one message. Send less at once, or name large files by resource_link."
        )
        return FrameError(code=INVALID_REQUEST, words=words)


@dataclass(slots=True)
class LineSplitter:
    """Cuts a byte stream at newlines; holds at most `limit` bytes of an unfinished line."""

    limit: int = MAX_LINE_BYTES
    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def feed(self, data: bytes) -> list[bytes | Oversized]:
        """The lines that `data` completes, without their newline."""
        head, *rest = data.split(b"\n")
        if not rest:
            self._keep(head)
            return []
        *whole, tail = rest
        self._keep(head)
        lines = [self._take()]
        lines += [line if len(line) <= self.limit else Oversized(size=len(line), limit=self.limit) for line in whole]
        self._keep(tail)
        return lines

    def finish(self) -> list[bytes | Oversized]:
        """What is left at the end of the stream: a last line without a newline."""
        return [self._take()] if self._size else []

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self.limit:
            self._parts.clear()
        elif piece:
            self._parts.append(piece)

    def _take(self) -> bytes | Oversized:
        size, parts = self._size, self._parts
        self._size, self._parts = 0, []
        if size > self.limit:
            return Oversized(size=size, limit=self.limit)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def parse(line: bytes) -> Message | FrameError | None:
    """A message fit for the connection, the fault to answer, or None for what needs neither."""
    line = line.strip().removeprefix(_BOM).strip()
    if not line:
        return None
    try:
        value = _decode(line)
    except UnicodeDecodeError as error:
        return FrameError(code=PARSE_ERROR, words=f"The line is not UTF-8 (byte {error.start}): {error.reason}.")
    except RecursionError:
        return FrameError(code=PARSE_ERROR, words=f"The line nests deeper than {MAX_DEPTH} levels.")
    except json.JSONDecodeError as error:
        return FrameError(code=PARSE_ERROR, words=f"The line is not JSON: {error.msg} at character {error.pos}.")
    except ValueError:
        # Python refuses to read whole numbers of thousands of digits, and names its own setting for that.
        return FrameError(code=PARSE_ERROR, words="The line holds a number that is too long.")
    match value:
        case dict():
            return _message(value)
        case list():
            return FrameError(code=INVALID_REQUEST, words="Batches are no part of ACP; send one object per line.")
        case _:
            name = "null" if value is None else type(value).__name__
            return FrameError(
                code=INVALID_REQUEST, words=f"A message is a JSON object, not {_JSON_NAMES.get(name, name)}."
            )


def encode(message: Message) -> bytes:
    """One line with its newline: UTF-8 unescaped, lone surrogates as U+FFFD, NaN and infinities as null.

    :raises TypeError: a value that has no JSON.
    """
    try:
        text = _encoder.encode(message)
    except ValueError:
        text = _encoder.encode(_finite(message))
    try:
        return (text + "\n").encode()
    except UnicodeEncodeError:
        return (_SURROGATE.sub("\ufffd", text) + "\n").encode()


_JSON_NAMES = {"str": "a string", "int": "a number", "float": "a number", "bool": "a boolean"}


def _decode(line: bytes) -> Any:
    text = line.decode()
    value = json.loads(text, parse_constant=_refuse_constant)
    # Only a line with that many brackets can be so deep: nearly all are spared the walk.
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_too_deep(value):
        raise RecursionError
    return _whole_text(value) if _SURROGATE_ESCAPE.search(line) else value


def _refuse_constant(name: str) -> Any:
    raise json.JSONDecodeError(f"{name} is no value", name, 0)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return False
        level = below
    return True


def _whole_text(value: Any) -> Any:
    """`value` with lone surrogates replaced: they have no UTF-8, so neither the store nor a request could take them."""
    match value:
        case str():
            return _SURROGATE.sub("\ufffd", value)
        case list():
            return [_whole_text(item) for item in value]
        case dict():
            return {_whole_text(key): _whole_text(item) for key, item in value.items()}
        case _:
            return value


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [_finite(item) for item in value]
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case _:
            return value


def _message(value: Message) -> Message | FrameError | None:
    method = value.get("method")
    if method is None and ("result" in value or "error" in value or ("id" in value and "method" not in value)):
        return _response(value)
    given = value.get("id")
    usable = _is_id(given) and given is not None
    request_id = given if usable else None
    if "id" in value and not usable:
        words = f"A request's id is a whole number or a short string, not {_shown(given)}."
        return FrameError(code=INVALID_REQUEST, words=words)
    if not isinstance(method, str):
        words = f"method is {_shown(method)}; expected a string." if "method" in value else "The object has no method."
        return FrameError(code=INVALID_REQUEST, words=words, id=request_id)
    if value.get("jsonrpc") != "2.0":
        words = f'jsonrpc is {_shown(value.get("jsonrpc"))}; expected "2.0".'
        return FrameError(code=INVALID_REQUEST, words=words, id=request_id)
    params = value.get("params")
    if params is not None and not isinstance(params, dict):
        if "id" not in value:
            return None  # a notification is never answered
        return FrameError(code=INVALID_PARAMS, words=f"params is {_shown(params)}; expected an object.", id=request_id)
    message: Message = {"jsonrpc": "2.0", "method": method, "params": {} if params is None else params}
    if "id" in value:
        message["id"] = request_id
    return message


def _response(value: Message) -> Message | FrameError | None:
    given = value.get("id")
    if given is None and len(value.keys() & {"result", "error"}) > 0:
        return None  # it answers a line of ours that the client could not take; there is nobody to tell
    if given is None or not _is_id(given):
        return FrameError(code=INVALID_REQUEST, words=f"A response's id is a number or a string, not {_shown(given)}.")
    error = value.get("error")
    if error is None:
        answer: Message = {"jsonrpc": "2.0", "id": given}
        # Without either member it may be a null result (clients that drop nulls) or no message at all: the
        # transport knows whether this id was asked.
        return answer | {"result": value["result"]} if "result" in value else answer
    if not isinstance(error, dict):
        error = {"message": error if isinstance(error, str) else json.dumps(error)}
    code, text = error.get("code"), error.get("message")
    whole = {
        "code": code if isinstance(code, int) and not isinstance(code, bool) else -32603,
        "message": text if isinstance(text, str) else "Error",
        "data": error.get("data"),
    }
    return {"jsonrpc": "2.0", "id": given, "error": whole}


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_ID_CHARS
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _shown(value: Any, limit: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False) if _is_small(value) else f"{type(value).__name__}"
    return text if len(text) <= limit else text[:limit] + "…"


def _is_small(value: Any) -> bool:
    return not isinstance(value, dict | list) or not value


def _mebibytes(size: int) -> str:
    return f"{size / 1024 / 1024:g} MiB"
