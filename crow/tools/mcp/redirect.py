"""Waits on this machine for the browser to come back from an authorization server.

Any program and any user of this machine can connect here. So crow accepts only an answer with the secret `state` of the
login; anything else gets an error page and changes nothing.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import anyio
import anyio.abc

from crow.domain.errors import ToolServerError
from crow.domain.text import on_one_line

_HOST = "127.0.0.1"
_PATH = "/callback"
_HEAD_BYTES = 32_768
_VISITOR_S = 10.0
"""A connection is closed after this many seconds."""
_MAX_VISITORS = 64
"""At most this many connections are open at once. Further ones are closed."""
_SHOWN_CHARS = 300

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Crow</title></head>\
<body style="font-family: sans-serif; margin: 3em"><p>{words}</p></body></html>"""
_ACCEPTED = "Crow got the answer. You can close this page."
_REFUSED = "Crow is not waiting for this answer."


class RedirectListener:
    """Takes the answer of the authorization server to one login. `uri` is where that server sends the browser.

    It has no answer until `take` accepts one. Then `answered` is set, and either `code` or `problem` has a value.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.uri = f"http://{_HOST}:{port}{_PATH}"
        self.answered = anyio.Event()
        self.code = ""
        """The authorization code, which is exchanged for tokens."""
        self.issuer: str | None = None
        """The authorization server, as the answer names it; None if it does not."""
        self.problem = ""
        """Why the authorization server refused the login."""
        self.state = ""
        """The `state` that an answer must contain. While this is empty, no answer is accepted."""
        self._visitors = 0

    def take(self, target: str) -> bool:
        """Take the answer of the authorization server from the URL to which the browser was sent, or from only the path
        and query of that URL. Return False if the URL does not belong to this login or holds no answer, or if
        an answer was already taken."""
        try:
            parts = urlsplit(target.strip())
            given = parse_qs(parts.query, max_num_fields=50)
        except ValueError:
            return False
        values = {name: texts[0] for name, texts in given.items() if len(texts) == 1}
        is_own = parts.path == _PATH and bool(self.state) and values.get("state") == self.state
        if not is_own or self.answered.is_set() or not values.keys() & {"code", "error"}:
            return False
        self.issuer = values.get("iss")
        if "error" in values:
            reason = ": ".join(filter(None, (values["error"], values.get("error_description", ""))))
            self.problem = f"the authorization server refused the login: {on_one_line(reason)[:_SHOWN_CHARS]}"
        else:
            self.code = values["code"]
        self.answered.set()
        return True

    async def handle(self, visitor: anyio.abc.SocketStream) -> None:
        """Answer one connection of a browser or another program."""
        if self._visitors >= _MAX_VISITORS:
            await visitor.aclose()
            return
        self._visitors += 1
        try:
            async with visitor:
                with anyio.move_on_after(_VISITOR_S):
                    await visitor.send(self._answer(await _read_head(visitor)))
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # the other side has closed the connection
        finally:
            self._visitors -= 1

    def _answer(self, head: str) -> bytes:
        """Return the HTTP response to a request with this head."""
        lines = head.split("\r\n")
        method, _, rest = lines[0].partition(" ")
        target, _, version = rest.partition(" ")
        hosts = [line.partition(":")[2].strip() for line in lines[1:] if line.lower().startswith("host:")]
        # the host is checked, because a web page could point its own host name at this port
        is_here = method == "GET" and version.startswith("HTTP/1.") and hosts == [f"{_HOST}:{self.port}"]
        is_taken = is_here and target.startswith("/") and self.take(target)
        body = _PAGE.format(words=_ACCEPTED if is_taken else _REFUSED).encode()
        fields = (
            f"HTTP/1.1 {'200 OK' if is_taken else '400 Bad Request'}",
            "Content-Type: text/html; charset=utf-8",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
            "Referrer-Policy: no-referrer",
            "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'",
            "Connection: close",
        )
        return "\r\n".join((*fields, "", "")).encode() + body


async def _read_head(visitor: anyio.abc.SocketStream) -> str:
    """Read the head of an HTTP request. :raises anyio.EndOfStream: the connection ended before the end of the head."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
        head += await visitor.receive(4096)
    return head.partition(b"\r\n\r\n")[0].decode("latin-1")


@asynccontextmanager
async def listening(port: int) -> AsyncIterator[RedirectListener]:
    """Listen on a port of this machine until the block ends. If `port` is 0, the system chooses a free port.

    :raises OSError: the port is in use.
    """
    # an address instead of localhost, because another user could listen on ::1
    listener = await anyio.create_tcp_listener(local_host=_HOST, local_port=port, family=socket.AF_INET)
    async with listener:
        redirect = RedirectListener(listener.extra(anyio.abc.SocketAttribute.local_port))  # noqa: S610 - not Django's
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, redirect.handle)
            failure: BaseException | None = None
            try:
                yield redirect
            except Exception as error:  # noqa: BLE001 - raised again below; the task group would wrap it
                failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def code_from(redirect: RedirectListener, timeout_s: float) -> str:
    """Wait for the authorization code. :raises ToolServerError: the login was refused, or took too long."""
    with anyio.move_on_after(timeout_s):
        await redirect.answered.wait()
    if redirect.problem or not redirect.answered.is_set():
        raise ToolServerError(redirect.problem or f"nobody finished the login within {timeout_s / 60:g} minutes")
    return redirect.code
