"""The web page that shows and continues sessions in a browser, and the pairing of browsers.

The page is an ACP client over the same WebSocket as every other client. A browser cannot send an Authorization header
with a WebSocket, so its token is in a cookie that scripts cannot read. The cookie counts only for requests from the
page itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from crow.domain.errors import StoreError
from crow.serve.listen import client_address, is_own_origin
from crow.serve.tokens import Authenticator, BadToken, TooManyFailures

_COOKIE = "crow_token"
_BROWSER_S = 90 * 86_400
"""A paired browser must be paired again after this many seconds."""

_MAX_BODY_BYTES = 4096
_MAX_LABEL_CHARS = 100
_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The files of the page by their paths, each with its content type."""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_routes(authenticator: Authenticator, needs_tokens: Callable[[], Awaitable[bool]]) -> list[Route]:
    """Return the routes of the page and of pairing. `needs_tokens` tells whether clients need a token."""
    pairing = _Pairing(authenticator, needs_tokens)
    return [
        *(Route(path, _file(*each)) for path, each in _FILES.items()),
        Route("/paired", pairing.paired),
        Route("/pair", pairing.pair, methods=["POST"]),
        Route("/unpair", pairing.unpair, methods=["POST"]),
    ]


def cookie_token(connection: HTTPConnection) -> str | None:
    """Return the token in the cookie of a paired browser, or None. A request of another web page gets None, although
    the browser may send the cookie with it."""
    return connection.cookies.get(_COOKIE) if is_own_origin(connection) else None


class _Pairing:
    """Gives browsers tokens of their own."""

    def __init__(self, authenticator: Authenticator, needs_tokens: Callable[[], Awaitable[bool]]) -> None:
        self._authenticator = authenticator
        self._needs_tokens = needs_tokens

    async def paired(self, request: Request) -> Response:
        """Answer 204 if this browser may connect, else 401."""
        try:
            if await self._needs_tokens():
                await self._authenticator.authenticate(request.cookies.get(_COOKIE), client_address(request))
        except BadToken:
            return _answer(401, "This browser is not paired.")
        except TooManyFailures as error:
            return _answer(429, str(error))
        except StoreError:
            return _answer(503, "The server cannot read its database now. Try again in a moment.")
        return Response(status_code=204, headers=_HEADERS)

    async def pair(self, request: Request) -> Response:
        """Take a pairing token, and set the cookie with a token for this browser."""
        if not is_own_origin(request):
            return _answer(403, "Only the page itself may pair.")
        try:
            body = await _json_body(request)
            agent = request.headers.get("user-agent", "")
            text = await self._authenticator.pair(
                body.get("token"),
                client_address(request),
                label=_label(agent),
                expires_ms=(int(time.time()) + _BROWSER_S) * 1000,
            )
        except (BadToken, ValueError):
            return _answer(401, "This link was used before, or has expired. Run `crow serve pair` again.")
        except TooManyFailures as error:
            return _answer(429, str(error))
        except StoreError:
            return _answer(503, "The server cannot write to its database now. Try again in a moment.")
        response = Response(status_code=204, headers=_HEADERS)
        _set_cookie(response, request, text, max_age_s=_BROWSER_S)
        return response

    async def unpair(self, request: Request) -> Response:
        """Revoke this browser's token, and remove the cookie."""
        if not is_own_origin(request):
            return _answer(403, "Only the page itself may unpair.")
        try:
            await self._authenticator.forget(request.cookies.get(_COOKIE))
        except StoreError:
            return _answer(503, "The server cannot write to its database now. Try again in a moment.")
        response = Response(status_code=204, headers=_HEADERS)
        _set_cookie(response, request, "", max_age_s=0)
        return response


def _file(name: str, content_type: str) -> Callable[[Request], Response]:
    def answer(_request: Request) -> Response:
        content = resources.files(__package__).joinpath("page", name).read_bytes()
        return Response(content, media_type=content_type, headers=_HEADERS)

    return answer


async def _json_body(request: Request) -> Mapping[str, Any]:
    """Return the object in the body of a request. :raises ValueError: there is none, or it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise ValueError("the body is too large")
    try:
        found = json.loads(body)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("the body is not an object")  # noqa: TRY004 - one error for the caller
    return found


def _set_cookie(response: Response, request: Request, value: str, *, max_age_s: int) -> None:
    response.set_cookie(
        _COOKIE,
        value,
        max_age=max_age_s,
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.headers.get("origin", "").startswith("https:"),
    )


def _label(agent: str) -> str:
    """Return the label of a browser's token. `agent` is the browser's User-Agent header."""
    shown = "".join(char for char in agent if char.isprintable())[: _MAX_LABEL_CHARS - 9]
    return f"browser: {shown}" if shown else "browser"


def _answer(status: int, words: str) -> Response:
    return JSONResponse({"message": words}, status_code=status, headers=_HEADERS)
