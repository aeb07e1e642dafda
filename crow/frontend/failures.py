"""What went wrong as a JSON-RPC error: one place, so that every client gets the sentence a person can act on.

Strategy: the code says whose turn it is (the client's parameters, a login, a session that is not there, or anything
else); the message and `data.details` are both the sentence, since clients show one or the other. Values of parameters
are never repeated: they may hold secrets. What is repeated is cut, as a line has a bound. Pure.
"""

from __future__ import annotations

from acp import RequestError
from pydantic import ValidationError

from crow.domain.errors import ArgumentError, AuthError, CrowError, NoSuchSession
from crow.frontend.bounds import head_and_tail

__all__ = [
    "REQUEST_CANCELLED",
    "cancelled_request",
    "ended_request",
    "internal_error",
    "invalid_params",
    "request_error",
    "unknown_method",
]

REQUEST_CANCELLED = -32800

WORDS_BYTES = 8_000
ID_BYTES = 1_000

EXPECTED = {
    "missing": "it is missing",
    "string_type": "expected a string",
    "int_type": "expected a whole number",
    "bool_type": "expected true or false",
    "list_type": "expected a list",
    "model_type": "expected an object",
    "dict_type": "expected an object",
}
"""What the commonest faults mean in the protocol's own words; others say it well enough."""


def invalid_params(method: str, error: ValidationError) -> RequestError:
    """-32602 with the first fault's place and reason."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(step) for step in first["loc"]) or "params"
    reason = "it is of a type that is not known" if "tag" in first["type"] else first["msg"]
    return _failed(-32602, f"{method}: {place}: {EXPECTED.get(first['type'], reason)}.")


def request_error(error: CrowError) -> RequestError:
    """The JSON-RPC error for one of ours."""
    words = str(error)
    match error:
        case NoSuchSession():
            return _failed(-32002, words, sessionId=head_and_tail(error.session_id, ID_BYTES))
        case ArgumentError():
            return _failed(-32602, words)
        case AuthError():
            return _failed(-32000, words, authRequired=True)
        case _:
            return internal_error(words)


def internal_error(words: str) -> RequestError:
    """-32603."""
    return _failed(-32603, words)


def unknown_method(method: str) -> RequestError:
    """-32601."""
    return RequestError(-32601, "Method not found", {"method": head_and_tail(method, ID_BYTES)})


def cancelled_request(method: str) -> RequestError:
    """-32800: the client took the request back."""
    return _failed(REQUEST_CANCELLED, f"{method} was cancelled by the client.")


def ended_request(method: str) -> RequestError:
    """-32603: the connection ended before the request was done."""
    return internal_error(f"The connection was closed before {method} was done. Start crow again and repeat it.")


def _failed(code: int, words: str, **data: object) -> RequestError:
    words = head_and_tail(words, WORDS_BYTES)
    return RequestError(code, words, {**data, "details": words})
