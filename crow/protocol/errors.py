"""The error responses to a client's requests, and the words of a client's own errors."""

from __future__ import annotations

from crow.domain.errors import (
    NO_MEMORY,
    ArgumentError,
    AuthError,
    CrowError,
    FilesElsewhere,
    NoSuchSession,
    lacks_memory,
)
from crow.domain.text import safe
from crow.protocol.frames import INTERNAL_ERROR, INVALID_PARAMS, RequestError
from crow.protocol.sizes import limit_text

AUTH_REQUIRED = -32000
RESOURCE_NOT_FOUND = -32002
REQUEST_CANCELLED = -32800

ID_BYTES = 1_000
"""At most this many bytes of a client's own text are repeated in an error response."""

_MESSAGE_BYTES = 8_000


def request_error(code: int, message: str, **data: object) -> RequestError:
    """Return an error with the text in both `message` and `data.details`, because some clients show only one of the
    two."""
    message = limit_text(safe(message), _MESSAGE_BYTES)
    return RequestError(code, message, {**data, "details": message})


def error_response(error: CrowError) -> RequestError:
    """Return the error response to a request that failed with `error`."""
    match error:
        case NoSuchSession():
            return request_error(RESOURCE_NOT_FOUND, str(error), sessionId=limit_text(error.session_id, ID_BYTES))
        case ArgumentError() | FilesElsewhere():
            return request_error(INVALID_PARAMS, str(error), **({"reason": error.reason} if error.reason else {}))
        case AuthError():
            return request_error(AUTH_REQUIRED, str(error), authRequired=True)
        case _:
            return request_error(INTERNAL_ERROR, str(error))


def turn_error(error: Exception) -> RequestError:
    """Return the error response for a turn that failed with `error`."""
    if isinstance(error, CrowError):
        return error_response(error)
    words = NO_MEMORY if lacks_memory(error) else "Internal error."
    return request_error(INTERNAL_ERROR, f"{words} Crow's log has the details.")


def refusal_text(error: RequestError) -> str:
    """Return the editor's explanation of an error. Some editors put the explanation into `data`, and send a useless
    `message`."""
    match error.data:
        case {"details": str(text)} | {"error": str(text)} | str(text) if text:
            return text
        case _:
            return str(error)
