"""Converts lines of bytes into JSON-RPC messages, and messages into lines. Does no I/O."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from crow.domain.errors import ArgumentError
from crow.domain.messages import MAX_DEPTH, is_too_deep
from crow.domain.text import describe

Message: TypeAlias = dict[str, Any]
RequestId: TypeAlias = int | str | None

MAX_LINE_BYTES = 32 * 1024 * 1024
_MAX_ID_CHARS = 1000
"""The maximum length of an id, in characters. The length is limited because responses and error messages repeat the
id."""

_PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603

_KINDS = {type(None): "missing or null", dict: "an object", list: "a list"}
_BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Without its own check for cycles, the encoder is an eighth faster. It then raises RecursionError for a cycle.
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False)


@dataclass(frozen=True, slots=True)
class FrameError:
    """The JSON-RPC error for a line that is not a valid message."""

    code: int
    """The code of the error."""
    message: str
    """A sentence for the client's user about what is wrong."""
    id: RequestId = None
    """The id of the request. None if it is unknown."""

    def response(self) -> Message:
        """Return the complete error response."""
        error = {"code": self.code, "message": self.message, "data": {"details": self.message}}
        return {"jsonrpc": "2.0", "id": self.id, "error": error}


class RequestError(Exception):
    """A JSON-RPC error that is the response to a request, either sent by crow or received from the client."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


def line_too_long(size: int, limit: int) -> FrameError:
    """Return the error for a line of `size` bytes, which is longer than `limit`."""
    message = (
        f"The line is {size} bytes long; crow reads at most {limit} bytes ({limit / 1024 / 1024:g} MiB) in one "
        "message. Send a shorter message, and refer to large files with resource_link."
    )
    return FrameError(INVALID_REQUEST, message)


@dataclass(slots=True)
class LineSplitter:
    """Splits a stream of bytes into lines."""

    limit: int
    """The maximum length of a line in bytes. Nothing of a longer line is kept."""
    _parts: list[bytes] = field(default_factory=list)
    """The parts of the unfinished line."""
    _size: int = 0
    """The length of the unfinished line in bytes, including the bytes that were not kept."""

    def feed(self, data: bytes) -> list[bytes | FrameError]:
        """Add `data`, and return the lines that are now complete, without newlines. A line that is longer than the
        limit is replaced by an error."""
        head, *rest = data.split(b"\n")
        self._add(head)
        lines: list[bytes | FrameError] = []
        for part in rest:
            lines.append(self._take())
            self._add(part)
        return lines

    def finish(self) -> list[bytes | FrameError]:
        """Return a list with the last line if that line does not end with a newline, else an empty list. Must be
        called at the end of the stream."""
        return [self._take()] if self._size else []

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self.limit:
            self._parts.clear()
        elif part:
            self._parts.append(part)

    def _take(self) -> bytes | FrameError:
        size, parts = self._size, self._parts
        self._size, self._parts = 0, []
        return b"".join(parts) if size <= self.limit else line_too_long(size, self.limit)


def parse(line: bytes) -> Message | FrameError | None:
    """Parse a line. Return its message if the line is valid, an error to send if the line is invalid, and None if the
    line must be ignored.

    The SDK's connection can handle every message that this function returns: in a request or notification, the method
    is a string and the parameters are an object. In a request, the id is valid. In an error response, the error is an
    object.
    """
    line = line.strip().removeprefix(_BOM).strip()
    if not line:
        return None
    try:
        value = _decode(line)
    except UnicodeDecodeError as error:
        return FrameError(_PARSE_ERROR, f"The line is not UTF-8 (byte {error.start}): {error.reason}.")
    except RecursionError:
        return FrameError(_PARSE_ERROR, f"The line is nested deeper than {MAX_DEPTH} levels.")
    except json.JSONDecodeError as error:
        return FrameError(_PARSE_ERROR, f"The line is not JSON: {error.msg} at character {error.pos}.")
    except ValueError:  # Python refuses to parse integers of thousands of digits
        return FrameError(_PARSE_ERROR, "The line contains a number that is too long.")
    if isinstance(value, list):
        return FrameError(INVALID_REQUEST, "ACP does not allow batches. Send one object per line.")
    if not isinstance(value, dict):
        return FrameError(INVALID_REQUEST, f"A message must be a JSON object, not {describe_member(value)}.")
    is_response = value.get("method") is None and (
        "result" in value or "error" in value or ("id" in value and "method" not in value)
    )
    return _response(value) if is_response else _call(value)


def encode(message: Message) -> bytes:
    """Return `message` as a line of UTF-8 that ends with a newline. Lone surrogates become U+FFFD. NaN and infinities
    become null.

    :raises TypeError: a value cannot be represented in JSON.
    """
    try:
        text = _encoder.encode(message)
    except ValueError:
        text = _encoder.encode(_map_leaves(message, _finite))
    try:
        return (text + "\n").encode()
    except UnicodeEncodeError:
        return (_SURROGATE.sub("\ufffd", text) + "\n").encode()


def describe_member(value: object) -> str:
    """Describe a member of a message for an error message. An object or list is described by its type."""
    return _KINDS.get(type(value)) or describe(value)


def text_in(parent: Mapping[str, Any], key: str, where: str = "") -> str:
    """Return the member `key`, which must be a string. :raises ArgumentError: the member is missing or is not a
    string."""
    value = parent.get(key)
    if not isinstance(value, str):
        raise ArgumentError(f"{where}{key} is {describe_member(value)}; expected a string.")
    return value


def _decode(line: bytes) -> Any:
    value = json.loads(line.decode(), parse_constant=_reject_constant)
    # Counting brackets is cheap, and only a line with many brackets can be nested too deeply.
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and is_too_deep(value):
        raise RecursionError
    # Lone surrogates cannot be encoded as UTF-8, so neither the store nor a request to a model could contain them.
    return _map_leaves(value, _without_surrogates) if _SURROGATE_ESCAPE.search(line) else value


def _reject_constant(name: str) -> Any:
    raise json.JSONDecodeError(f"{name} is not a JSON value", name, 0)


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a JSON value, with `change` applied to each key, string, number and constant."""
    match value:
        case list() | tuple():
            return [_map_leaves(item, change) for item in value]
        case dict():
            return {change(key): _map_leaves(item, change) for key, item in value.items()}
        case _:
            return change(value)


def _without_surrogates(value: Any) -> Any:
    return _SURROGATE.sub("\ufffd", value) if isinstance(value, str) else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _call(value: Message) -> Message | FrameError | None:
    """Check a request or notification. Return the message if it is valid, an error to send if it is invalid, and None
    if crow must ignore it."""
    request_id, method, params = value.get("id"), value.get("method"), value.get("params")
    if "id" in value and not _is_id(request_id):
        problem = f"A request's id is {describe_member(request_id)}; expected a whole number or a short string."
        return FrameError(INVALID_REQUEST, problem)
    if not isinstance(method, str):
        return FrameError(INVALID_REQUEST, f"method is {describe_member(method)}; expected a string.", request_id)
    if value.get("jsonrpc") != "2.0":
        problem = f'jsonrpc is {describe_member(value.get("jsonrpc"))}; expected "2.0".'
        return FrameError(INVALID_REQUEST, problem, request_id)
    if params is not None and not isinstance(params, dict):
        if "id" not in value:
            return None  # notifications are never answered
        return FrameError(INVALID_PARAMS, f"params is {describe_member(params)}; expected an object.", request_id)
    message: Message = {"jsonrpc": "2.0", "method": method, "params": {} if params is None else params}
    return message | {"id": request_id} if "id" in value else message


def _response(value: Message) -> Message | FrameError | None:
    response_id, error = value.get("id"), value.get("error")
    if response_id is None and ("result" in value or "error" in value):
        return None  # the client could not read one of crow's lines, so its error has no id
    if not _is_id(response_id):
        problem = f"A response's id is {describe_member(response_id)}; expected a whole number or a short string."
        return FrameError(INVALID_REQUEST, problem)
    response: Message = {"jsonrpc": "2.0", "id": response_id}
    if error is None:
        # A message without a result is either no response, or a response with a null result from a client that leaves
        # out nulls. The transport decides, because it knows whether a request with this id is open.
        return response | {"result": value["result"]} if "result" in value else response
    if not isinstance(error, dict):
        error = {"message": error if isinstance(error, str) else json.dumps(error)}
    code, text = error.get("code"), error.get("message")
    complete = {
        "code": code if isinstance(code, int) and not isinstance(code, bool) else INTERNAL_ERROR,
        "message": text if isinstance(text, str) else "Error",
        "data": error.get("data"),
    }
    return response | {"error": complete}


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_ID_CHARS
    return isinstance(value, int) and not isinstance(value, bool)
