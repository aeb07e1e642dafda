"""The connection to an editor, built on the connection and the models of the protocol's SDK, `acp`. Only this module
imports `acp`.

Importing the SDK takes 300 ms, and a client that runs in this process does not need it, so this module is separate.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
from pydantic import BaseModel, Field, ValidationError

from crow.protocol import Handler, RequestParams
from crow.protocol.errors import request_error
from crow.protocol.frames import INVALID_PARAMS, INVALID_REQUEST, FrameError, Message, RequestError, RequestId
from crow.protocol.transport import Transport
from crow.runtime import models_built_on_use

with models_built_on_use():
    import acp
    from acp import schema
    from acp.connection import Connection

_DEFAULTS = {"mcpServers": (), "additionalDirectories": ()}
"""The values that replace null in these two parameters before validation, because the SDK's models reject null
there."""


class _ConfigOptionRequest(BaseModel, strict=True, defer_build=True):
    """The parameters of `session/set_config_option`. The value is a boolean or a string, depending on the option."""

    session_id: str = Field(alias="sessionId")
    config_id: str = Field(alias="configId")
    value: str | bool


class _PromptRequest(BaseModel, strict=True, defer_build=True):
    """The parameters of `session/prompt` and `_session/steering`. Content blocks are checked later."""

    session_id: str = Field(alias="sessionId")
    prompt: list[Any]


class _SessionRequest(BaseModel, strict=True, defer_build=True):
    """The parameters of a request that only names a session."""

    session_id: str = Field(alias="sessionId")


class _ProviderRequest(BaseModel, strict=True, defer_build=True):
    """The parameters of `providers/disable`."""

    provider_id: str = Field(alias="providerId")


class _SetProviderRequest(_ProviderRequest):
    """The parameters of `providers/set`."""

    api_type: str = Field(alias="apiType")
    base_url: str = Field(alias="baseUrl")
    headers: dict[str, str] = {}


class _TitleRequest(_SessionRequest):
    """The parameters of `session/set_title`."""

    title: str


MODELS: Mapping[str, type[BaseModel]] = {
    "initialize": schema.InitializeRequest,
    "authenticate": schema.AuthenticateRequest,
    "logout": schema.LogoutRequest,
    "session/new": schema.NewSessionRequest,
    "session/fork": schema.ForkSessionRequest,
    "session/load": schema.LoadSessionRequest,
    "session/resume": schema.ResumeSessionRequest,
    "session/list": schema.ListSessionsRequest,
    "session/close": schema.CloseSessionRequest,
    "session/delete": schema.DeleteSessionRequest,
    "session/prompt": _PromptRequest,
    "session/set_mode": schema.SetSessionModeRequest,
    "session/set_config_option": _ConfigOptionRequest,
    "session/set_title": _TitleRequest,
    "session/archive": _SessionRequest,
    "session/unarchive": _SessionRequest,
    "session/status": _SessionRequest,
    "providers/set": _SetProviderRequest,
    "providers/disable": _ProviderRequest,
    "_session/steering": _PromptRequest,
}
"""The models that check the parameters of requests, by method. Crow uses these models only for the check, because they
drop members that they do not know."""


class EditorConnection:
    """The JSON-RPC connection to the editor.

    This object is also the transport of the SDK's connection, so it sees every message. The SDK passes parameters on as
    they are. So crow learns the ids of requests, in both directions, from `RequestParams`.
    """

    def __init__(self, transport: Transport, *, ends_on_signals: bool = True) -> None:
        self.is_patient = ends_on_signals
        """See `ClientConnection`. Crow can wait for a slow reader of this process's own pipes, because it always
        notices when they are closed."""
        self._transport = transport
        self._ends_on_signals = ends_on_signals
        self._unanswered: set[RequestId] = set()
        """The ids of the editor's requests that have no response yet."""
        self._handling: dict[asyncio.Task[Any] | None, RequestId] = {}
        """The ids of the requests that are being handled, by the task that handles each."""
        self._after_response: dict[RequestId, list[Callable[[], object]]] = {}
        """The functions to call after the response to a request, by the request's id."""

    async def run(self, handle: Handler) -> None:
        """See `ClientConnection`. With `ends_on_signals`, SIGTERM, SIGINT and SIGHUP have the same effect as the end of
        stdin."""
        for name in ("SIGTERM", "SIGINT", "SIGHUP") if self._ends_on_signals else ():
            if hasattr(signal, name):
                with suppress(NotImplementedError):  # event loops on Windows do not support signal handlers
                    asyncio.get_running_loop().add_signal_handler(getattr(signal, name), self.stop)
        self._rpc = Connection(partial(self._handled, handle), self, listening=False)
        await self._rpc.main_loop()

    async def end(self) -> None:
        """See `ClientConnection`."""
        await self._rpc.close()

    def stop(self, reason: str = "") -> None:
        """See `ClientConnection`."""
        self._transport.stop(reason)

    def after_response(self, action: Callable[[], object]) -> None:
        """See `ClientConnection`."""
        self._after_response.setdefault(self._handling[asyncio.current_task()], []).append(action)

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        """See `SendRequest`. If the caller is cancelled, withdraw the request with `$/cancel_request`."""
        sent = RequestParams(params, None)  # `send` sets the id
        try:
            return await self._rpc.send_request(method, sent)
        except acp.RequestError as error:
            raise RequestError(error.code, str(error), error.data) from error
        except asyncio.CancelledError:
            if sent.request_id is not None:
                with anyio.move_on_after(1, shield=True):
                    await self.notify("$/cancel_request", {"requestId": sent.request_id})
            raise

    async def notify(self, method: str, params: dict[str, Any]) -> None:
        """Send a notification, even after stdin has ended.

        The SDK's connection stops sending when stdin ends, but running turns still send updates.
        """
        await self._transport.send({"jsonrpc": "2.0", "method": method, "params": params})

    async def receive(self) -> Message | None:
        """See the SDK's `Transport`. Refuse a request that reuses the id of an unanswered request."""
        while True:
            message = await self._transport.receive()
            if message is None or "method" not in message or "id" not in message:
                return message
            request_id = message["id"]
            if request_id not in self._unanswered:
                self._unanswered.add(request_id)
                return message | {"params": RequestParams(message["params"], request_id)}
            # This error has the id null, since the client could not tell two responses with the same id apart.
            problem = "An earlier request with this id has no response yet. Give each request its own id."
            await self._transport.send(FrameError(INVALID_REQUEST, problem).response())

    async def send(self, message: Message) -> None:
        """See the SDK's `Transport`."""
        if "method" in message:
            if isinstance(params := message["params"], RequestParams):
                params.request_id = message["id"]
            await self._transport.send(message)
            return
        self._unanswered.discard(message["id"])
        actions = self._after_response.pop(message["id"], ())
        await self._transport.send(message)
        for action in actions:
            action()

    async def close(self) -> None:
        """See the SDK's `Transport`."""
        await self._transport.close()

    async def _handled(self, handle: Handler, method: str, params: Any, is_notification: bool) -> Any:
        """Call `handle`. Convert its error into one that the SDK understands."""
        task = asyncio.current_task()
        if isinstance(params, RequestParams):
            self._handling[task] = params.request_id
        try:
            return await handle(method, params, is_notification)
        except RequestError as error:
            raise acp.RequestError(error.code, str(error), error.data) from error
        finally:
            self._handling.pop(task, None)


def check_parameters(method: str, params: Mapping[str, Any]) -> None:
    """Check the parameters of a request against the protocol. Parameters of unknown methods are not checked.

    :raises RequestError: a parameter is not valid.
    """
    if (model := MODELS.get(method)) is not None:
        try:
            model.model_validate({key: _DEFAULTS.get(key) if value is None else value for key, value in params.items()})
        except ValidationError as error:
            raise _invalid_params(method, error) from None


def _invalid_params(method: str, error: ValidationError) -> RequestError:
    """Return an error that names the first invalid parameter. The error does not show the parameter's value, because
    the value may be a secret."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(step) for step in first["loc"]) or "params"
    problem = "unknown type" if "tag" in first["type"] else first["msg"]
    return request_error(INVALID_PARAMS, f"{method}: {place}: {problem}.")
