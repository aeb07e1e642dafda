"""The transport to an MCP server over HTTP, with limits for what the server sends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any

import anyio.to_thread
import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from crow.tools.mcp.stdio import LINE_BYTES
from crow.tools.servers import HttpServer

_HTTP_S = 30.0
_POST_S = 300.0
"""Over the older transport, a server has this many seconds to confirm a message. The answer comes in the stream."""


async def http_transport(
    server: HttpServer, auth: httpx2.Auth | None, stack: AsyncExitStack
) -> AbstractAsyncContextManager[Any]:
    """Return the transport to `server`. If the transport needs a separate HTTP client, the client is closed when
    `stack` is closed.

    A response may be silent for any time: a stream of notifications often is, and a call has a time limit of its own.
    """
    is_older = server.transport == "sse"
    make = partial(
        httpx2.AsyncClient,
        # a small compressed body could expand without limit
        headers={"Accept-Encoding": "identity", **dict(server.headers)},
        timeout=httpx2.Timeout(_HTTP_S, read=None),
        event_hooks={"request": [_limit_post] if is_older else [], "response": [_limit_body]},
        auth=auth,
    )
    # making the client reads the system's certificates, which would block the event loop for 25 ms
    http = await anyio.to_thread.run_sync(make)
    if is_older:  # this transport closes the client itself
        return sse_client(server.url, httpx_client_factory=lambda *_, **__: http)
    await stack.enter_async_context(http)
    return streamable_http_client(server.url, http_client=http, max_sse_event_size=LINE_BYTES)


async def _limit_post(request: httpx2.Request) -> None:
    """Limit the wait for the response to a message over the older transport, because further messages wait for this
    response."""
    if request.method == "POST":
        request.extensions["timeout"]["read"] = _POST_S


async def _limit_body(response: httpx2.Response) -> None:
    """Limit the body of a response to `LINE_BYTES`. The library itself limits the bodies of event streams."""
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        response.stream = _LimitedBody(response)


class _LimitedBody(httpx2.AsyncByteStream):
    """The body of a response. Reading it raises an error if it is larger than `LINE_BYTES`, or compressed."""

    def __init__(self, response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream), "the client is asynchronous"
        self._body = response.stream
        self._encoding = response.headers.get("content-encoding", "identity").lower()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the body. :raises httpx2.StreamError: the body is too large or compressed."""
        if self._encoding != "identity":
            raise httpx2.StreamError(f"it is compressed ({self._encoding[:20]}), although crow did not ask for that")
        size = 0
        async for chunk in self._body:
            size += len(chunk)
            if size > LINE_BYTES:
                raise httpx2.StreamError(f"it has more than {LINE_BYTES:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()
