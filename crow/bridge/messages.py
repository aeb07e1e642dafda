"""Reads and writes JSON-RPC messages for the bridge. Does no I/O.

The module uses the C functions under `json`, because importing `json`, which imports `re`, takes 4 ms.
"""

from __future__ import annotations

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Message: TypeAlias = dict[str, Any]

INTERNAL_ERROR, NOT_FOUND = -32603, -32002

_SPACES = " \t\n\r"


class _AsUsual:
    """The options of `json.loads`."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_int, parse_float, parse_constant = int, float, float


def _refuse_value(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is no part of a message")


try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    _scan = make_scanner(_AsUsual)  # type: ignore[arg-type]
    _dump = make_encoder(None, _refuse_value, encode_basestring_ascii, None, ":", ",", False, False, True)
except (ImportError, AttributeError):  # some Pythons have no such scanner, or one with more options
    from json import JSONDecoder, JSONEncoder

    _scan = JSONDecoder().scan_once  # type: ignore[attr-defined]

    def _dump(message: Message, _level: int) -> tuple[str, ...]:  # type: ignore[misc]
        return (JSONEncoder(separators=(",", ":")).encode(message),)


def parse(line: bytes) -> Message:
    """Return the message in `line`, or an empty dict if `line` is not a message. The bridge passes such a line on, and
    its receiver refuses it."""
    try:
        text = line.decode().strip(_SPACES)
        message, end = _scan(text, 0)
    except (StopIteration, ValueError, RecursionError):
        return {}
    return as_object(message) if end == len(text) else {}


def encode(message: Message) -> bytes:
    """Return the message as one line of JSON, without a line break."""
    return "".join(_dump(message, 0)).encode()


def error_response(request_id: Any, problem: str) -> bytes:
    """Return the response that refuses a request because of `problem`, as a line."""
    error = {"code": INTERNAL_ERROR, "message": problem, "data": {"details": problem}}
    return encode({"jsonrpc": "2.0", "id": request_id, "error": error})


def as_object(value: Any) -> Message:
    """Return `value` if it is a JSON object, else an empty dict."""
    return value if isinstance(value, dict) else {}


def is_id(value: Any) -> bool:
    """Return whether `value` can be the id of a request."""
    return isinstance(value, int | str) and not isinstance(value, bool)


def params_of(message: Message) -> Message:
    """Return the parameters of a message, or an empty dict if they are not an object."""
    return as_object(message.get("params"))


def crow_meta(holder: Message) -> Message:
    """Return crow's own member of `_meta` in the parameters or the result `holder`, or an empty dict."""
    return as_object(as_object(holder.get("_meta")).get("crow"))
