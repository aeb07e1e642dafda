"""The Agent Client Protocol (ACP): lines, JSON-RPC, and how values are encoded. It knows nothing about sessions.

This file has the interface of a connection to a client, such as an editor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from crow.protocol.frames import RequestId

SendRequest: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""A function that sends a request to the client and returns the result. It raises RequestError if the client answers
with an error, and ConnectionError if the client is gone."""

Handler: TypeAlias = Callable[[str, Any, bool], Awaitable[Any]]
"""A function that handles a message. Its arguments are the method, the parameters, and whether the message is a
notification. It returns the result of the response, or raises RequestError to send an error response."""


class RequestParams(dict[str, Any]):
    """The parameters of a request, and the request's id, which the sender may use later to cancel the request."""

    __slots__ = ("request_id",)

    def __init__(self, params: dict[str, Any], request_id: RequestId) -> None:
        super().__init__(params)
        self.request_id = request_id


class Outlet(Protocol):
    """The destination of the messages about a session: the connection to the client, or an object that translates them
    for a client with another version of the protocol."""

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        """See `SendRequest`. If cancelled, the request is withdrawn."""
        ...

    async def notify(self, method: str, params: dict[str, Any]) -> None:
        """Send a notification. If the client is gone, this raises no error, because running turns still send
        updates."""
        ...


class ClientConnection(Outlet, Protocol):
    """The connection to one client. For an editor, this is :class:`crow.protocol.connection.EditorConnection`."""

    @property
    def is_patient(self) -> bool:
        """Whether crow waits for a client that reads slowly. Otherwise, crow disconnects such a client."""

    async def run(self, handle: Handler) -> None:
        """Call `handle` for each request and notification, until the client is gone. Each call runs in a task of its
        own.

        For a request, the parameters are passed to `handle` as `RequestParams`.
        """
        ...

    async def end(self) -> None:
        """Send the pending messages, close the connection and cancel the remaining handlers."""
        ...

    def stop(self, reason: str = "") -> None:
        """Treat the client as disconnected, but still send the pending messages and, if the transport can do so,
        `reason`."""
        ...

    def after_response(self, action: Callable[[], object]) -> None:
        """Call `action` right after the response to the current task's request has been sent."""
        ...
