"""What crow says of itself at `initialize`: capabilities, and the ways to authenticate.

Strategy: constant but for what the client's own gates decide. The first authentication method is answered here at once;
the second is a program for the client's terminal, offered only where the client runs such programs. Pure.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
from acp import PROTOCOL_VERSION, RequestError, schema
from acp.connection import Connection
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from crow.domain.errors import ArgumentError, AuthError, CrowError, NoSuchSession
from crow.frontend.content import own_parts, parts_from
from crow.frontend.frames import RequestId
from crow.frontend.options import mode_named, option_chosen
from crow.frontend.params import ClientCapabilities, client_capabilities, client_name
from crow.frontend.server import ClientConnection, RequestParams, ServerDependencies
from crow.frontend.sessions import (
    NULLABLE,
    IdleTimer,
    OpenSessions,
    alias_named,
    entry_named,
    opening_from,
    session_info,
    wants_archived,
)
from crow.frontend.tool_calls import PART_BYTES, head_and_tail, weight

__all__ = [
    "CONFIGURED",
    "REQUEST_CANCELLED",
    "AcpAgent",
    "cancelled_request",
    "ended_request",
    "initialize_answer",
    "internal_error",
    "invalid_params",
    "request_error",
    "unknown_method",
]

CONFIGURED = "configured"
"""The id of the authentication method that needs nothing but a configuration."""


def initialize_answer(version: str, caps: ClientCapabilities) -> dict[str, Any]:
    """The result of `initialize`. What is not supported is left out: some clients look for keys, not values."""
    return {
        "protocolVersion": PROTOCOL_VERSION,
        "agentInfo": {"name": "crow", "title": "Crow", "version": version},
        "agentCapabilities": {
            "loadSession": True,
            "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
            "mcpCapabilities": {"http": True, "sse": True},
            "sessionCapabilities": {
                "list": {},
                "resume": {},
                "close": {},
                "delete": {},
                "fork": {},
                "additionalDirectories": {},
            },
            "auth": {"logout": {}},
        },
        "authMethods": auth_methods(caps),
        "_meta": {"steering": {"supported": True}},
    }


def auth_methods(caps: ClientCapabilities) -> list[dict[str, Any]]:
    """The ways in, the one that needs no user first."""
    methods: list[dict[str, Any]] = [
        {
            "id": CONFIGURED,
            "name": "Endpoint from the configuration",
            "description": "Uses OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL, or [model] in config.toml.",
        }
    ]
    if caps.terminal_auth:
        login: dict[str, Any] = {
            "id": "login",
            "name": "Set up endpoint, key and model",
            "description": "Asks for them in a terminal, tries them, and writes them to config.toml.",
            "type": "terminal",
            "args": ["--setup"],
        }
        if caps.terminal_auth_by_meta:
            # -P: the terminal stands in a workspace, from which nothing may be imported.
            start = ["-P", "-m", "crow", "login"]
            command = {"label": "crow login", "command": sys.executable, "args": start, "env": {}}
            login["_meta"] = {"terminal-auth": command}
        methods.append(login)
    return methods


# FROM frontend.failures: What went wrong as a JSON-RPC error: one place, so that every client gets the sentence a
# person can act on.
#
# Strategy: the code says whose turn it is (the client's parameters, a login, a session that is not there, or anything
# else); the message and `data.details` are both the sentence, since clients show one or the other. Values of
# parameters
# are never repeated: they may hold secrets. What is repeated is cut, as a line has a bound. Pure.


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


# FROM frontend.agent: The method table: what each ACP method does.
#
# Strategy: parameters are checked by the SDK's models, but read from the raw object, since the models drop what they
# do
# not know; `_meta` is data and can override nothing. Every failure becomes a JSON-RPC error in one place, with the
# sentence a person can act on. A request that the client takes back is answered all the same. Knows the protocol and
# sessions; not models, SQL or tools.


logger = logging.getLogger(__name__)

WARM_AFTER_S = 0.2
LIST_PAGE = 50
DRAIN_S = 0.5
LOGGED_OUT = (
    f'You have logged out of crow. Authenticate with "{CONFIGURED}" to use the configured endpoint again, or run '
    '"crow login" to set up another.'
)

Method = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]

WITHDRAWABLE = frozenset({"session/new", "session/fork", "session/load", "session/resume", "session/list"})
"""What `$/cancel_request` stops, besides prompts; the rest is done before such a notification can be read."""


class ConfigOptionRequest(BaseModel):
    """`session/set_config_option`, of either type of option."""

    model_config = ConfigDict(strict=True, defer_build=True)

    session_id: str = Field(alias="sessionId")
    config_id: str = Field(alias="configId")
    value: str | bool


class PromptRequest(BaseModel):
    """`session/prompt` and `_session/steering`; the blocks are checked as they become parts."""

    model_config = ConfigDict(strict=True, defer_build=True)

    session_id: str = Field(alias="sessionId")
    prompt: list[Any]


class AcpAgent:
    """Serves one connection."""

    def __init__(self, kit: ServerDependencies) -> None:
        self._kit = kit
        self._sessions = OpenSessions(kit)
        self._idle = IdleTimer(self._sessions.tidy)
        self._logged_out = False
        self._answering: set[asyncio.Task[Any]] = set()
        self._unanswered: set[anyio.CancelScope] = set()
        self._is_ending = False
        self._withdraw: dict[RequestId, Callable[[], None]] = {}
        self._quiet_since = asyncio.get_running_loop().time()
        self._requests: dict[str, tuple[type[BaseModel], Method]] = {
            "initialize": (schema.InitializeRequest, self._initialize),
            "authenticate": (schema.AuthenticateRequest, self._authenticate),
            "logout": (schema.LogoutRequest, self._logout),
            "session/new": (schema.NewSessionRequest, self._new),
            "session/fork": (schema.ForkSessionRequest, self._fork),
            "session/load": (schema.LoadSessionRequest, self._load),
            "session/resume": (schema.ResumeSessionRequest, self._resume),
            "session/list": (schema.ListSessionsRequest, self._list),
            "session/close": (schema.CloseSessionRequest, self._close),
            "session/delete": (schema.DeleteSessionRequest, self._delete),
            "session/prompt": (PromptRequest, self._prompt),
            "session/set_mode": (schema.SetSessionModeRequest, self._set_mode),
            "session/set_config_option": (ConfigOptionRequest, self._set_config_option),
            "_session/steering": (PromptRequest, self._steer),
        }

    def attach(self, connection: Connection, wire: ClientConnection, tasks: anyio.abc.TaskGroup) -> None:
        """See :class:`crow.frontend.server.Handler`."""
        self._sessions.attach(connection, wire, tasks)
        tasks.start_soon(self._idle.run)

    async def handle(self, method: str, params: Any, is_notification: bool) -> Any:
        """See :class:`crow.frontend.server.Handler`."""
        self._quiet_since = asyncio.get_running_loop().time()
        raw = params if isinstance(params, dict) else {}
        if is_notification:
            match method:
                case "session/cancel":
                    self._cancel(raw)
                case "$/cancel_request":
                    self._cancel_request(raw.get("requestId"))
            return None
        if method not in self._requests:
            raise unknown_method(method)
        try:
            return await self._answer(method, raw)
        except ValidationError as error:
            raise invalid_params(method, error) from None
        except CrowError as error:
            raise request_error(error) from error
        except RequestError:
            raise
        except Exception as error:
            logger.exception("%s failed", method)
            raise internal_error(f"Internal error in {method}. {self._kit.log_hint}") from error

    async def warm(self) -> None:
        """Import what the first prompt needs, once nobody has asked anything for a while; then ask for more models."""
        while True:
            quiet = asyncio.get_running_loop().time() - self._quiet_since
            if quiet >= WARM_AFTER_S:
                break
            await anyio.sleep(WARM_AFTER_S - quiet)
        await self._kit.warm_up()
        self._sessions.warm()
        await self._sessions.offer_more_models()

    async def close(self) -> None:
        """See :class:`crow.frontend.server.Handler`. What was asked before the end is still answered: prompts by
        `cancelled`, what takes longer than half a second by an error."""
        self._idle.stop()
        self._sessions.hurry()
        if self._answering:
            await asyncio.wait(self._answering, timeout=DRAIN_S)
        self._is_ending = True
        for scope in tuple(self._unanswered):
            scope.cancel()
        await self._sessions.close_all()

    async def _answer(self, method: str, raw: dict[str, Any]) -> dict[str, Any] | None:
        model, answer = self._requests[method]
        self._sessions.renew()
        model.model_validate({key: NULLABLE.get(key) if value is None else value for key, value in raw.items()})
        if method == "session/prompt":
            return await answer(raw)
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        request_id = raw.request_id if isinstance(raw, RequestParams) else None
        is_withdrawable = method in WITHDRAWABLE and request_id is not None
        with anyio.CancelScope() as scope:
            self._unanswered.add(scope)
            if is_withdrawable:
                self._withdraw[request_id] = scope.cancel
            try:
                return await answer(raw)
            finally:
                self._unanswered.discard(scope)
                if is_withdrawable:
                    del self._withdraw[request_id]
        raise ended_request(method) if self._is_ending else cancelled_request(method)

    async def _initialize(self, params: dict[str, Any]) -> dict[str, Any]:
        self._sessions.caps = client_capabilities(params)
        logger.info("Client: %s", client_name(params) or "not named")
        return initialize_answer(self._kit.version, self._sessions.caps)

    async def _authenticate(self, params: dict[str, Any]) -> dict[str, Any]:
        if params["methodId"] != CONFIGURED:
            raise ArgumentError(f'No authentication method "{params["methodId"]}" here; there is only "{CONFIGURED}".')
        self._kit.check()
        self._logged_out = False
        return {}

    async def _logout(self, _params: dict[str, Any]) -> dict[str, Any]:
        """Open no more sessions until somebody authenticates; those that are open go on. Keys stay where they are."""
        self._logged_out = True
        return {}

    async def _new(self, params: dict[str, Any]) -> dict[str, Any]:
        self._check_logged_in()
        opening, alias = opening_from(params), alias_named(params)
        opened = await (self._sessions.create(opening) if alias is None else self._sessions.aliased(alias, opening))
        self._sessions.introduce(opened)
        return {"sessionId": opened.session.id, **self._sessions.state(opened.session)}

    async def _fork(self, params: dict[str, Any]) -> dict[str, Any]:
        self._check_logged_in()
        opened = await self._sessions.fork(params["sessionId"], opening_from(params), entry=entry_named(params))
        self._sessions.introduce(opened)
        return {"sessionId": opened.session.id, **self._sessions.state(opened.session)}

    async def _load(self, params: dict[str, Any]) -> dict[str, Any]:
        self._check_logged_in()
        store = await self._sessions.store()
        async with self._sessions.reopened(params["sessionId"], opening_from(params)) as opened:
            session = opened.session
            await opened.client.replay(store.history(session.id), goes_on=session.busy or session.owes)
            self._sessions.introduce(opened)
            return self._sessions.state(session)

    async def _resume(self, params: dict[str, Any]) -> dict[str, Any]:
        self._check_logged_in()
        async with self._sessions.reopened(params["sessionId"], opening_from(params)) as opened:
            self._sessions.introduce(opened)
            return self._sessions.state(opened.session)

    async def _list(self, params: dict[str, Any]) -> dict[str, Any]:
        store = await self._sessions.store()
        limit = LIST_PAGE
        while True:
            page = await store.sessions(
                cwd=params.get("cwd"), cursor=params.get("cursor"), limit=limit, archived=wants_archived(params)
            )
            answer: dict[str, Any] = {"sessions": [session_info(row) for row in page.rows]}
            if page.cursor is not None:
                answer["nextCursor"] = page.cursor
            if limit == 1 or weight(answer) < PART_BYTES:
                return answer
            limit = max(1, limit // 8)

    async def _close(self, params: dict[str, Any]) -> dict[str, Any]:
        await self._sessions.close(params["sessionId"])
        return {}

    async def _delete(self, params: dict[str, Any]) -> dict[str, Any]:
        await self._sessions.delete(params["sessionId"])
        self._idle.tidy_soon()
        return {}

    async def _prompt(self, params: dict[str, Any]) -> dict[str, Any]:
        session = self._sessions.named(params["sessionId"])
        parts = own_parts(parts_from(params["prompt"]), is_first=session.branch.prompt is None)
        waiter = session.submit(parts)
        request_id = params.request_id if isinstance(params, RequestParams) else None
        self._withdraw[request_id] = lambda: session.withdraw(waiter)
        try:
            with self._idle.turn():
                return {"stopReason": await session.answer(waiter)}
        finally:
            del self._withdraw[request_id]

    async def _steer(self, params: dict[str, Any]) -> dict[str, Any]:
        """Never starts a turn: what belongs to a turn may only be shown while a prompt waits for its answer."""
        session = self._sessions.named(params["sessionId"])
        if await session.steer(parts_from(params["prompt"])):
            return {"outcome": "injected"}
        return {"outcome": "promptRequired", "reason": "noRunningTurn"}

    def _cancel(self, params: dict[str, Any]) -> None:
        opened = self._sessions.find(params.get("sessionId"))
        if opened is not None:
            opened.session.cancel()

    def _cancel_request(self, request_id: object) -> None:
        if isinstance(request_id, int | str) and not isinstance(request_id, bool):
            withdraw = self._withdraw.get(request_id)
            if withdraw is not None:
                withdraw()

    async def _set_mode(self, params: dict[str, Any]) -> dict[str, Any]:
        mode = mode_named(params["modeId"])
        async with self._sessions.settled(params["sessionId"]) as session:
            await session.branch.set_mode(mode)
        return {}

    async def _set_config_option(self, params: dict[str, Any]) -> dict[str, Any]:
        async with self._sessions.settled(params["sessionId"]) as session:
            choice = option_chosen(
                params["configId"], params["value"], model=session.branch.row.model, models=self._sessions.models
            )
            match choice.option:
                case "mode":
                    await session.branch.set_mode(str(choice.value))
                case "model":
                    await session.branch.set_model(str(choice.value))
                case _:
                    await session.branch.set_option(choice.option, choice.value)
            return {"configOptions": self._sessions.options(session)}

    def _check_logged_in(self) -> None:
        if self._logged_out:
            raise AuthError(LOGGED_OUT)
