"""Serves ACP over one connection: carries out each method, and turns errors into error responses."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import anyio.abc

from crow import __version__
from crow.agent import new_message_id
from crow.agent.history.options import set_mode, set_model, set_option
from crow.domain.entries import Entry
from crow.domain.errors import ArgumentError, AuthError, CrowError, FilesElsewhere, NoSuchSession, StoreError
from crow.domain.trace_context import use_trace_context
from crow.frontend.client import ClientConnection, RequestParams, request_error
from crow.frontend.content import parts_from, without_repeated_prompts
from crow.frontend.cursors import CURSOR_KEY, CursorGap, cursor_in
from crow.frontend.endpoints import LOGGED_OUT_STATUS, set_provider
from crow.frontend.frames import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    RequestError,
    RequestId,
)
from crow.frontend.host import PromptRun, ServerDependencies, SessionHost
from crow.frontend.missed import missed_since
from crow.frontend.options import mode_named, option_value
from crow.frontend.params import (
    ClientCapabilities,
    OpenRequest,
    archived_filter,
    client_capabilities,
    client_name,
    fork_entry,
    new_title,
    open_request_from,
    prompt_name,
    session_alias,
    session_metadata,
    trace_context,
    wants_full_replay,
)
from crow.frontend.requester import Requester
from crow.frontend.sessions import ClientSession, ClientSessions, session_info
from crow.frontend.subagents import Family
from crow.frontend.tool_calls import PART_BYTES, json_bytes, limit_text
from crow.frontend.updates import ViewLimits, usage_object

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1

AUTH_REQUIRED = -32000
RESOURCE_NOT_FOUND = -32002
REQUEST_CANCELLED = -32800

ID_BYTES = 1_000

WARM_AFTER_S = 0.2
DRAIN_S = 0.5
"""The number of seconds for which unfinished requests may still run after stdin has ended."""

CHECK_SHARES_S = 2.0
"""The number of seconds between two checks of whether a client may still see its sessions. A client that loses
access to a session still gets updates until the next check."""

SHORT_ENTRIES = 30
"""If a client closes or deletes a session while crow sends the session's history, crow stops sending only if the
history has more than this many entries. Sending a shorter history takes only a moment."""

CLOSE_S = 0.8
"""The time limit in seconds for closing all sessions and the store. Work that is not finished by then is cancelled."""

CONFIGURED = "configured"
"""The authentication method that uses the endpoint in the user's configuration."""

LOGGED_OUT = (
    f'You have logged out of crow. Authenticate with "{CONFIGURED}" to use the configured endpoint again, or run '
    '"crow login" to set up another.'
)

SYSTEM_PROMPT_MODES: dict[str, Any] = {"mode": {"override": {}}}
"""The modes of `systemPrompt` that crow supports in addition to `append`."""

OPENING = frozenset({"session/new", "session/fork", "session/load", "session/resume"})
"""Requests that open a session."""

CANCELLABLE = OPENING | {"session/list"}
"""In addition to prompts, `$/cancel_request` can cancel these requests. All other requests end too quickly to be
cancelled."""

UNSTABLE = frozenset(
    {
        *("session/archive", "session/unarchive", "session/set_title", "session/status"),
        *("auth/status", "providers/list", "providers/set", "providers/disable"),
    }
)
"""Requests that are not part of the stable protocol. The response to `initialize` offers them, so crow refuses them
before `initialize`."""

Method = Callable[[RequestParams], Awaitable[dict[str, Any]]]


async def serve(
    connection: ClientConnection,
    dependencies: ServerDependencies,
    *,
    host: SessionHost | None = None,
    requester: Requester | None = None,
    is_warmed: bool = True,
    agent_type: type[AcpAgent] | None = None,
) -> None:
    """Serves a connection until the client is gone or the connection is stopped. After that, closes the sessions and
    the store within `CLOSE_S` seconds.

    If `host` is given, it is a lasting host: its sessions and its store stay open after the connection has ended. In
    this case, `requester` describes the user of the connection.

    With `is_warmed`, crow prepares for the first prompt while the client sends nothing. A client that sends a prompt at
    once does not need this. `agent_type` is the class that serves the methods, by default `AcpAgent`.

    Without such a host, each session runs in this function's task group, so it outlives the request that opens it.
    """
    if host is not None:
        await _serve_lasting(connection, host, requester, agent_type or AcpAgent)
        return
    async with anyio.create_task_group() as tasks:
        host = SessionHost(dependencies, tasks)
        agent = (agent_type or AcpAgent)(host, connection, tasks)
        tasks.start_soon(host.idle.run)
        if is_warmed:
            tasks.start_soon(agent.warm_when_quiet)
        try:
            await connection.run(agent.handle)
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await agent.close()
            tasks.cancel_scope.cancel()
    await connection.end()


async def _serve_lasting(
    connection: ClientConnection, host: SessionHost, requester: Requester | None, agent_type: type[AcpAgent]
) -> None:
    async with anyio.create_task_group() as tasks:
        agent = agent_type(host, connection, tasks, requester)
        if requester is not None and not requester.may_configure:
            tasks.start_soon(agent.check_shares)
        try:
            await connection.run(agent.handle)
        finally:
            agent.leave()
            tasks.cancel_scope.cancel()
    await connection.end()


class AcpAgent:
    """Answers the requests of one connection. The parameters of these requests have already been checked against the
    protocol."""

    sessions_type: type[ClientSessions] = ClientSessions

    def __init__(
        self,
        host: SessionHost,
        connection: ClientConnection,
        tasks: anyio.abc.TaskGroup,
        requester: Requester | None = None,
    ) -> None:
        self._host = host
        self._dependencies = host.dependencies
        self._connection = connection
        self._tasks = tasks
        self._sessions = self.sessions_type(host, connection, tasks, requester)
        self._is_initialized = False
        self._is_logged_out = False
        self._told_auth_status: dict[str, Any] | None = None
        self._is_closing = False
        self._running: dict[asyncio.Task[Any], anyio.CancelScope] = {}
        self._prompting: set[asyncio.Task[Any]] = set()
        self._cancel_by_id: dict[RequestId, Callable[[], None]] = {}
        self._loading: dict[RequestId, Load] = {}
        self._last_message_at = asyncio.get_running_loop().time()
        self._methods: dict[str, Method] = {
            "initialize": self._initialize,
            "authenticate": self._authenticate,
            "logout": self._logout,
            "session/new": self._new,
            "session/fork": self._fork,
            "session/load": self._load,
            "session/resume": self._resume,
            "session/list": self._list,
            "session/close": self._close,
            "session/delete": self._delete,
            "session/prompt": self._prompt,
            "session/set_mode": self._set_mode,
            "session/set_config_option": self._set_config_option,
            "session/set_title": self._set_title,
            "session/archive": self._archive,
            "session/unarchive": self._unarchive,
            "session/status": self._status,
            "auth/status": self._auth_status,
            "providers/list": self._list_providers,
            "providers/set": self._set_provider,
            "providers/disable": self._disable_provider,
            "_session/steering": self._steer,
        }

    async def handle(self, method: str, params: Any, is_notification: bool) -> Any:
        """Answers a request or acts on a notification. :raises RequestError: the error response to send."""
        self._last_message_at = asyncio.get_running_loop().time()
        if is_notification:
            match method, params:
                case "session/cancel", _:
                    with suppress(CrowError):
                        await self._sessions.require(params.get("sessionId"), "write")
                        self._sessions.cancel(params.get("sessionId"))
                case "$/cancel_request", {"requestId": int() | str() as request_id} if not isinstance(request_id, bool):
                    self._cancel(request_id)
            return None
        if method not in self._methods:
            raise RequestError(METHOD_NOT_FOUND, "Method not found", {"method": limit_text(method, ID_BYTES)})
        if method.startswith("providers/") and not self._sessions.requester.may_configure:
            raise RequestError(METHOD_NOT_FOUND, "Method not found", {"method": method})
        if method in UNSTABLE and not self._is_initialized:
            raise request_error(INVALID_REQUEST, f"{method} came before initialize; send initialize first.")
        use_trace_context(trace_context(params))
        try:
            check = self._sessions.requester.check_params
            if check is not None and method != "initialize":
                await check(method, params, await self._sessions.store())
            return await self._answer(method, params)
        except CrowError as error:
            response = error_response(error)
            if self._sessions.caps.shows_error_objects:
                response = RequestError(INTERNAL_ERROR, str(response), response.data)
            raise response from error
        except RequestError:
            raise
        except Exception as error:
            logger.exception("%s failed", method)
            raise request_error(INTERNAL_ERROR, f"Internal error in {method}. {self._dependencies.log_hint}") from error

    async def warm_when_quiet(self) -> None:
        """Waits until the client has sent nothing for `WARM_AFTER_S`, then imports the packages that the first prompt
        needs. If crow did not wait, the imports would delay responses."""
        loop = asyncio.get_running_loop()
        while (quiet_s := loop.time() - self._last_message_at) < WARM_AFTER_S:  # noqa: ASYNC110 - no event marks silence
            await anyio.sleep(WARM_AFTER_S - quiet_s)
        await self._host.warm()

    async def close(self) -> None:
        """Closes every session and the store. Unfinished prompts end with `cancelled`, and other unfinished requests
        with an error."""
        self._host.idle.stop()
        self._host.hurry()
        if self._running:
            await asyncio.wait(self._running, timeout=DRAIN_S)
        self._is_closing = True
        for scope in tuple(self._running.values()):
            scope.cancel()
        await self._host.close_all()
        if self._prompting:  # their turns have ended, so each is about to respond
            await asyncio.wait(self._prompting, timeout=DRAIN_S)

    async def check_shares(self) -> None:
        """Checks every `CHECK_SHARES_S` seconds whether the user of this connection may still see the connection's
        sessions."""
        while True:
            await anyio.sleep(CHECK_SHARES_S)
            try:
                await self._sessions.check_again()
            except StoreError as error:
                logger.warning("Crow could not check which sessions are shared: %s", error)

    def leave(self) -> None:
        """Leaves all sessions of this connection. Running requests other than prompts end with an error."""
        self._is_closing = True
        for scope in tuple(self._running.values()):
            scope.cancel()
        self._sessions.detach_all()

    async def _answer(self, method: str, params: RequestParams) -> dict[str, Any]:
        answer = self._methods[method]
        self._host.reload_settings()
        self._connection.after_response(self._tell_auth_status)
        if method in OPENING and self._is_logged_out:
            raise AuthError(LOGGED_OUT)
        task = asyncio.current_task()
        assert task is not None
        if method == "session/prompt":
            self._prompting.add(task)
            task.add_done_callback(self._prompting.discard)
            return await answer(params)
        with anyio.CancelScope() as scope:
            self._running[task] = scope
            # The task counts as running until it has sent the response.
            task.add_done_callback(self._running.pop)
            if method in CANCELLABLE:
                self._cancel_by_id[params.request_id] = scope.cancel
            try:
                return await answer(params)
            finally:
                self._cancel_by_id.pop(params.request_id, None)
        if self._is_closing:
            problem = f"The connection was closed before {method} had ended. Start crow again and repeat the request."
            raise request_error(INTERNAL_ERROR, problem)
        raise request_error(REQUEST_CANCELLED, f"The client cancelled {method}.")

    async def _initialize(self, params: RequestParams) -> dict[str, Any]:
        self._is_initialized = True
        self._sessions.use_capabilities(client_capabilities(params))
        logger.info("Client: %s", client_name(params) or "no name")
        features = ("list", "resume", "close", "delete", "fork", "additionalDirectories", "archive", "status", "title")
        # Unsupported features are left out, because some clients only check whether the key exists.
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentInfo": {"name": "crow", "title": "Crow", "version": __version__},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
                "mcpCapabilities": {"http": True, "sse": True},
                "sessionCapabilities": {feature: {} for feature in features} | {"systemPrompt": SYSTEM_PROMPT_MODES},
                "auth": {"logout": {}, "status": {}},
                **({"providers": {}} if self._sessions.requester.may_configure else {}),
            },
            "authMethods": auth_methods(self._sessions.caps),
            "_meta": {"steering": {"supported": True}, "crow": {"promptId": {}}}
            | ({CURSOR_KEY: {}} if self._host.is_lasting else {}),
        }

    async def _authenticate(self, params: RequestParams) -> dict[str, Any]:
        if params["methodId"] != CONFIGURED:
            raise ArgumentError(
                f'There is no authentication method "{params["methodId"]}"; the only one is "{CONFIGURED}".'
            )
        if not self._sessions.caps.shows_error_objects:  # such a client shows only the error of a prompt as a sentence
            self._dependencies.check_model()
        self._is_logged_out = False
        return {}

    async def _logout(self, _params: RequestParams) -> dict[str, Any]:
        """Makes crow refuse to open sessions until the client authenticates again.

        Open sessions continue, and no key is deleted.
        """
        self._is_logged_out = True
        return {}

    async def _auth_status(self, _params: RequestParams) -> dict[str, Any]:
        self._told_auth_status = self._present_auth_status()
        return self._told_auth_status

    def _present_auth_status(self) -> dict[str, Any]:
        if self._is_logged_out:
            return LOGGED_OUT_STATUS
        status = self._dependencies.endpoints.credentials().as_json()
        return status if self._sessions.requester.may_configure else status | {"accounts": []}

    def _tell_auth_status(self) -> None:
        """Sends the authentication status if it has changed since the client last got it. Sends nothing to a client
        that never asked for it."""
        if self._told_auth_status is not None and (status := self._present_auth_status()) != self._told_auth_status:
            self._told_auth_status = status
            self._tasks.start_soon(self._connection.notify, "auth/status_update", status)

    async def _list_providers(self, _params: RequestParams) -> dict[str, Any]:
        return {"providers": [provider.as_json() for provider in self._dependencies.endpoints.providers()]}

    async def _set_provider(self, params: RequestParams) -> dict[str, Any]:
        set_provider(self._dependencies.endpoints, params)
        self._host.reload_settings()
        return {}

    async def _disable_provider(self, params: RequestParams) -> dict[str, Any]:
        self._dependencies.endpoints.disable_provider(params["providerId"])
        self._host.reload_settings()
        return {}

    async def _new(self, params: RequestParams) -> dict[str, Any]:
        opened = await self._sessions.create(open_request_from(params), alias=session_alias(params))
        return {"sessionId": opened.session.id, **self._sessions.introduce(opened)}

    async def _fork(self, params: RequestParams) -> dict[str, Any]:
        request, entry = open_request_from(params), fork_entry(params)
        opened = await self._sessions.fork(params["sessionId"], request, entry=entry)
        return {"sessionId": opened.session.id, **self._sessions.introduce(opened)}

    async def _load(self, params: RequestParams) -> dict[str, Any]:
        async with self._loaded(params, open_request_from(params, may_be_missing=True)) as opened:
            return self._sessions.introduce(opened)

    @asynccontextmanager
    async def _loaded(self, params: RequestParams, request: OpenRequest) -> AsyncIterator[ClientSession]:
        """Opens a stored session and sends its history. If the client closes or deletes the session while a long
        history is sent, the request is cancelled."""
        limits, session_id = ViewLimits(is_full=wants_full_replay(params)), params["sessionId"]
        self._loading[params.request_id] = load = Load(session_id, partial(self._cancel, params.request_id))
        try:
            store = await self._sessions.store()
            async with self._sessions.reopened(session_id, request) as opened:
                session = opened.session
                family = Family(session_id=session.id) if self._sessions.caps.subagents else None
                if family is not None:
                    await opened.client.load_subagents(store, family, limits)
                history = load.watch(store.history(session.id, result_bytes=limits.result_bytes))
                await opened.client.load(history, is_running=lambda: session.is_running, limits=limits, family=family)
                yield opened
        finally:
            del self._loading[params.request_id]

    async def _resume(self, params: RequestParams) -> dict[str, Any]:
        async with self._resumed(params, open_request_from(params, may_be_missing=True)) as opened:
            return self._sessions.introduce(opened)

    @asynccontextmanager
    async def _resumed(self, params: RequestParams, request: OpenRequest) -> AsyncIterator[ClientSession]:
        """Opens a stored session. If the request has a cursor, also sends the updates that the client missed after that
        cursor."""
        cursor = cursor_in(params)
        async with self._sessions.reopened(params["sessionId"], request) as opened:
            if cursor is not None:
                store, session = await self._sessions.store(), opened.session
                await opened.client.resume(
                    lambda: missed_since(cursor, store, session.id, session.branch.entries),
                    is_running=lambda: session.is_running,
                    is_own=opened.has_sent,
                )
            yield opened

    async def _list(self, params: RequestParams) -> dict[str, Any]:
        store = await self._sessions.store()
        limit, archived = 50, archived_filter(params)
        while True:
            page = await store.sessions(
                cwd=params.get("cwd"), cursor=params.get("cursor"), limit=limit, archived=archived
            )
            sessions = [session_info(row, tells_archived="archived" in params) for row in page.rows]
            answer: dict[str, Any] = {"sessions": sessions}
            if page.cursor is not None:
                answer["nextCursor"] = page.cursor
            if limit == 1 or json_bytes(answer) < PART_BYTES:
                return answer
            limit = max(1, limit // 8)

    async def _close(self, params: RequestParams) -> dict[str, Any]:
        was_loading = self._cancel_loading(params["sessionId"])
        try:
            await self._sessions.close(params["sessionId"])
        except NoSuchSession:
            if not was_loading:  # a cancelled load closes its session itself
                raise
        return {}

    def _cancel_loading(self, session_id: str) -> bool:
        """Cancels the requests that load this session, if its history is long. Returns whether any request was loading
        this session."""
        loads = [load for load in self._loading.values() if load.session_id == session_id]
        for load in loads:
            load.end()
        return bool(loads)

    def _cancel(self, request_id: RequestId) -> None:
        self._cancel_by_id.get(request_id, lambda: None)()

    async def _delete(self, params: RequestParams) -> dict[str, Any]:
        self._cancel_loading(params["sessionId"])
        await self._sessions.delete(params["sessionId"])
        self._host.idle.tidy_soon()
        return {}

    async def _archive(self, params: RequestParams) -> dict[str, Any]:
        await self._sessions.archive(params["sessionId"])
        return {}

    async def _unarchive(self, params: RequestParams) -> dict[str, Any]:
        await self._sessions.unarchive(params["sessionId"])
        return {}

    async def _status(self, params: RequestParams) -> dict[str, Any]:
        return {"status": await self._sessions.status(params["sessionId"])}

    async def _set_title(self, params: RequestParams) -> dict[str, Any]:
        title = new_title(params["title"])
        await self._sessions.set_title(params["sessionId"], title)
        return {"title": title}

    async def _prompt(self, params: RequestParams) -> dict[str, Any]:
        """Runs a prompt in the host, and waits until the prompt's turn ends.

        If a client sends a prompt again after its connection broke, or with the same name, crow does not run the prompt
        again. The client gets the response to the original prompt.
        """
        # Over stdio, the prompt is submitted without any wait, so a cancellation sent right after it takes effect.
        opened = await self._writable(params["sessionId"])
        key = (self._sessions.requester.connection_id, opened.session.id, params.request_id)
        run = self._host.prompt_again(self._connection, key)
        if run is None:
            session, metadata = opened.session, session_metadata(params)
            parts = without_repeated_prompts(parts_from(params["prompt"]), is_first=session.branch.prompt is None)
            prompt = session.submit(parts, metadata, prompt_name(params))
            run = PromptRun(session, prompt, self._connection)
            self._host.run_prompt(run, key)
        opened.note_sent(run.prompt.message_id)
        run.prompt.on_joined = lambda known: opened.note_sent(known.message_id)
        self._cancel_by_id[params.request_id] = partial(run.session.withdraw, run.prompt)
        try:
            prompt = await run.wait()
        except Exception:
            await opened.flushed()
            raise
        finally:
            del self._cancel_by_id[params.request_id]
        await opened.flushed()
        return {"stopReason": prompt.stop} | ({} if prompt.usage is None else {"usage": usage_object(prompt.usage)})

    async def _writable(self, session_id: object) -> ClientSession:
        """Returns an open session that this client may change. :raises CrowError: the session is not open, or the
        client may not change it."""
        await self._sessions.require(session_id, "write")
        opened = self._sessions.opened(session_id)
        self._sessions.refuse_watcher(session_id)
        return opened

    async def _steer(self, params: RequestParams) -> dict[str, Any]:
        """Adds a prompt to the running turn. Does not start a turn if none is running.

        The protocol allows updates of a turn only while a `session/prompt` request waits for its response, so a
        steering request cannot start a turn.
        """
        opened, message_id = await self._writable(params["sessionId"]), new_message_id()
        opened.note_sent(message_id)
        if await opened.session.steer(parts_from(params["prompt"]), message_id, prompt_name(params)):
            return {"outcome": "injected"}
        return {"outcome": "promptRequired", "reason": "noRunningTurn"}

    async def _set_mode(self, params: RequestParams) -> dict[str, Any]:
        mode = mode_named(params["modeId"])
        async with self._sessions.locked(params["sessionId"]) as opened:
            await set_mode(opened.session.branch, mode)
            await opened.flushed()
        return {}

    async def _set_config_option(self, params: RequestParams) -> dict[str, Any]:
        async with self._sessions.locked(params["sessionId"]) as opened:
            branch, option = opened.session.branch, params["configId"]
            value = option_value(option, params["value"], model=branch.row.model, models=self._host.models)
            match option:
                case "mode":
                    await set_mode(branch, str(value))
                case "model":
                    await set_model(branch, str(value))
                case _:
                    await set_option(branch, option, value)
            await opened.flushed()
            return {"configOptions": self._sessions.options(opened.session)}


def auth_methods(caps: ClientCapabilities) -> list[dict[str, Any]]:
    """Returns the authentication methods that the client can use."""
    text = "Uses OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL, or [model] in config.toml."
    configured = {"id": CONFIGURED, "name": "Endpoint from the configuration", "description": text}
    if not caps.terminal_auth:
        return [configured]
    text = "Asks for endpoint, key and model in a terminal, tests them, and writes them to config.toml."
    login: dict[str, Any] = {"id": "login", "name": "Set up endpoint, key and model", "description": text}
    login |= {"type": "terminal", "args": ["--setup"]}
    if caps.terminal_auth_by_meta:
        # -P: the terminal starts in a workspace, and Python must not import anything from there.
        arguments = ["-P", "-m", "crow", "login"]
        command = {"label": "crow login", "command": sys.executable, "args": arguments, "env": {}}
        login["_meta"] = {"terminal-auth": command}
    return [configured, login]


def error_response(error: CrowError) -> RequestError:
    """Returns the error response to a request that failed with `error`."""
    match error:
        case NoSuchSession():
            return request_error(RESOURCE_NOT_FOUND, str(error), sessionId=limit_text(error.session_id, ID_BYTES))
        case CursorGap():
            return request_error(INVALID_PARAMS, str(error), reason="cursor_gap")
        case FilesElsewhere():
            return request_error(INVALID_PARAMS, str(error), reason="files_elsewhere")
        case ArgumentError():
            return request_error(INVALID_PARAMS, str(error))
        case AuthError():
            return request_error(AUTH_REQUIRED, str(error), authRequired=True)
        case _:
            return request_error(INTERNAL_ERROR, str(error))


class Load:
    """A running request that loads a session. `cancel` is the function that cancels the request."""

    def __init__(self, session_id: str, cancel: Callable[[], None]) -> None:
        self.session_id = session_id
        self._cancel = cancel
        self._is_long = False
        self._is_unwanted = False

    async def watch(self, history: AsyncIterator[Sequence[Entry]]) -> AsyncIterator[Sequence[Entry]]:
        """Yields the batches of `history` unchanged, and notes when more than `SHORT_ENTRIES` entries have been
        loaded."""
        count = 0
        async for batch in history:
            self._is_long = count >= SHORT_ENTRIES
            if self._is_long and self._is_unwanted:
                self._cancel()
            yield batch
            count += len(batch)

    def end(self) -> None:
        """Cancels the request once more than `SHORT_ENTRIES` entries have been loaded. A request that loads fewer
        entries is not cancelled."""
        self._is_unwanted = True
        if self._is_long:
            self._cancel()
