"""What went wrong as a JSON-RPC error: one place, so that every client gets the sentence a person can act on.

Strategy: the code says whose turn it is (the client's parameters, a login, a session that is not there, or anything
else); the message and `data.details` are both the sentence, since clients show one or the other. What was sent is never
repeated: it may hold secrets. Pure.
"""

from __future__ import annotations

from acp import RequestError
from pydantic import ValidationError

from crow.domain.errors import ArgumentError, AuthError, CrowError, NoSuchSession

__all__ = ["REQUEST_CANCELLED", "cancelled_request", "internal_error", "invalid_params", "request_error"]

REQUEST_CANCELLED = -32800


def invalid_params(method: str, error: ValidationError) -> RequestError:
    """-32602 with the first fault's place and reason."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(step) for step in first["loc"]) or "params"
    words = f"{method}: {place}: {first['msg']}."
    return RequestError(-32602, words, {"details": words})


def request_error(error: CrowError) -> RequestError:
    """The JSON-RPC error for one of ours."""
    words = str(error)
    match error:
        case NoSuchSession():
            return RequestError(-32002, words, {"sessionId": error.session_id, "details": words})
        case ArgumentError():
            return RequestError(-32602, words, {"details": words})
        case AuthError():
            return RequestError(-32000, words, {"details": words, "authRequired": True})
        case _:
            return internal_error(words)


def internal_error(words: str) -> RequestError:
    """-32603."""
    return RequestError(-32603, words, {"details": words})


def cancelled_request(method: str) -> RequestError:
    """-32800: the client took the request back."""
    words = f"{method} was cancelled by the client."
    return RequestError(REQUEST_CANCELLED, words, {"details": words})
