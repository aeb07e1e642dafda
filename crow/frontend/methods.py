"""The methods of version 1 of the protocol."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import anyio.abc

from crow.agent import new_message_id
from crow.agent.history.options import set_mode, set_model, set_option
from crow.domain.errors import ArgumentError, AuthError, CrowError, NoSuchSession
from crow.domain.text import title_line
from crow.frontend.calls import ViewLimits
from crow.frontend.cursors import CURSOR_KEY, cursor_in
from crow.frontend.endpoints import LOGGED_OUT_STATUS, set_provider
from crow.frontend.host import SessionHost
from crow.frontend.missed import missed_since
from crow.frontend.opening import SessionOpener
from crow.frontend.options import mode_named, option_value
from crow.frontend.prompts import PromptRun
from crow.frontend.requests import Method, Requests
from crow.frontend.sessions import ConnectionSession, ConnectionSessions, iso_time
from crow.frontend.stored import StoredSessions
from crow.frontend.subagents import Family
from crow.protocol import ClientConnection, RequestParams
from crow.protocol.content import parts_from, without_repeated_prompts
from crow.protocol.params import (
    ClientCapabilities,
    OpenRequest,
    archived_filter,
    client_capabilities,
    fork_entry,
    open_request_from,
    prompt_name,
    sent_prompts,
    session_alias,
    session_metadata,
    session_name,
    wants_directories,
    wants_full_replay,
)
from crow.protocol.sizes import PART_BYTES, json_bytes
from crow.protocol.updates import usage_object
from crow.runtime import own_command
from crow.store import SessionRow, Store, node_of
from crow.version import __version__

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1

_CONFIGURED = "configured"
"""The authentication method that uses the endpoint in the user's configuration."""

_LOGGED_OUT = (
    f'You have logged out of crow. Authenticate with "{_CONFIGURED}" to use the configured endpoint again, or run '
    '"crow login" to set up another.'
)

_SYSTEM_PROMPT_MODES: dict[str, Any] = {"mode": {"override": {}}}
"""The modes of `systemPrompt` that crow supports in addition to `append`."""

CheckParams: TypeAlias = Callable[[str, Mapping[str, Any]], object]
"""A function that gets a method and the parameters of a request, and raises RequestError if the parameters are not
valid in version 1 of the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodTable:
    """The methods that a client may call."""

    requests: Mapping[str, Method]
    """The methods of requests."""
    cancel: Callable[[object], Awaitable[None]]
    """Carries out `session/cancel` for the session with the given id."""
    check: CheckParams | None
    """Checks the parameters of each request. None if the methods check them all themselves."""


class Methods:
    """The methods of version 1. Their parameters have already been checked against the protocol."""

    def __init__(
        self,
        host: SessionHost,
        connection: ClientConnection,
        tasks: anyio.abc.TaskGroup,
        sessions: ConnectionSessions,
        requests: Requests,
        check: CheckParams | None,
    ) -> None:
        self.host = host
        self.sessions = sessions
        self.opener = SessionOpener(sessions)
        self.stored = StoredSessions(sessions, requests)
        self.requests = requests
        self._connection = connection
        self._tasks = tasks
        self._is_logged_out = False
        self._told_auth_status: dict[str, Any] | None = None
        self.table = self._table(check)
        """The methods that the client may call now. `VersionTwo` replaces this table if the client chooses version
        2."""

    def _table(self, check: CheckParams | None) -> MethodTable:
        return MethodTable(
            requests={
                "initialize": self.initialize,
                "authenticate": self.authenticate,
                "logout": self.logout,
                "session/new": self._new,
                "session/fork": self._fork,
                "session/load": self._load,
                "session/resume": self._resume,
                "session/list": self.list,
                "session/close": self._close,
                "session/delete": self.stored.delete,
                "session/prompt": self._prompt,
                "session/set_mode": self._set_mode,
                "session/set_config_option": self.set_config_option,
                "session/set_title": self.stored.set_title,
                "session/archive": self.stored.archive,
                "session/unarchive": self.stored.unarchive,
                "session/status": self.stored.status,
                "auth/status": self._auth_status,
                "providers/list": self._list_providers,
                "providers/set": self._set_provider,
                "providers/disable": self._disable_provider,
                "_session/steering": self._steer,
                "_session/prompts": self.stored.prompts,
            },
            cancel=self.cancel,
            check=check,
        )

    def refuse_logged_out(self) -> None:
        """Check that the client has not logged out. :raises AuthError: it has."""
        if self._is_logged_out:
            raise AuthError(_LOGGED_OUT)

    def tell_auth_status(self) -> None:
        """Send the authentication status if it has changed since the client last got it. Send nothing to a client that
        never asked for it."""
        if self._told_auth_status is not None and (status := self._present_auth_status()) != self._told_auth_status:
            self._told_auth_status = status
            self._tasks.start_soon(self._connection.notify, "auth/status_update", status)

    async def cancel(self, session_id: object) -> None:
        """Cancel the turn of a session. Do nothing if the client may not do that."""
        with suppress(CrowError):
            await self.sessions.store.require(session_id, "write")
            self.sessions.cancel(session_id)

    async def initialize(self, params: RequestParams) -> dict[str, Any]:
        self.sessions.use_capabilities(client_capabilities(params))
        logger.info("Client: %s", " ".join(map(str, self.sessions.caps.client.values())) or "no name")
        features = ("list", "resume", "close", "delete", "fork", "additionalDirectories", "archive", "status", "title")
        # Unsupported features are left out, because some clients only check whether the key exists.
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentInfo": {"name": "crow", "title": "Crow", "version": __version__},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
                "mcpCapabilities": {"http": True, "sse": True},
                "sessionCapabilities": {feature: {} for feature in features} | {"systemPrompt": _SYSTEM_PROMPT_MODES},
                "auth": {"logout": {}, "status": {}},
                **({"providers": {}} if self.sessions.requester.may_configure else {}),
            },
            "authMethods": auth_methods(self.sessions.caps),
            "_meta": {"steering": {"supported": True}, "crow": {"promptId": {}}}
            | ({CURSOR_KEY: {}} if self.host.is_lasting else {}),
        }

    async def authenticate(self, params: RequestParams) -> dict[str, Any]:
        if params["methodId"] != _CONFIGURED:
            raise ArgumentError(
                f'There is no authentication method "{params["methodId"]}"; the only one is "{_CONFIGURED}".'
            )
        # A client that shows error objects shows only errors of prompts readably, so it gets this error with a prompt.
        if not self.sessions.caps.shows_error_objects:
            self.host.dependencies.check_model()
        self._is_logged_out = False
        return {}

    async def logout(self, _params: RequestParams) -> dict[str, Any]:
        """Refuse to open sessions on this connection until the client authenticates again.

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
        status = self.host.dependencies.endpoints.credentials().as_json()
        return status if self.sessions.requester.may_configure else status | {"accounts": []}

    async def _list_providers(self, _params: RequestParams) -> dict[str, Any]:
        return {"providers": [provider.as_json() for provider in self.host.dependencies.endpoints.providers()]}

    async def _set_provider(self, params: RequestParams) -> dict[str, Any]:
        set_provider(self.host.dependencies.endpoints, params)
        self.host.reload_settings()
        return {}

    async def _disable_provider(self, params: RequestParams) -> dict[str, Any]:
        self.host.dependencies.endpoints.disable_provider(params["providerId"])
        self.host.reload_settings()
        return {}

    async def _new(self, params: RequestParams) -> dict[str, Any]:
        opened = await self.opener.create(open_request_from(params), alias=session_alias(params))
        return {"sessionId": opened.session.id, **self.opener.introduce(opened)}

    async def _fork(self, params: RequestParams) -> dict[str, Any]:
        request, entry = open_request_from(params), fork_entry(params)
        opened = await self.opener.fork(params["sessionId"], request, entry=entry)
        return {"sessionId": opened.session.id, **self.opener.introduce(opened)}

    async def _load(self, params: RequestParams) -> dict[str, Any]:
        async with self.loaded(params, open_request_from(params, may_be_missing=True)) as opened:
            return self.opener.introduce(opened)

    @asynccontextmanager
    async def loaded(self, params: RequestParams, request: OpenRequest) -> AsyncIterator[ConnectionSession]:
        """Open a stored session and send its history. If the client closes or deletes the session while a long history
        is sent, the request is cancelled."""
        limits, session_id = ViewLimits(is_full=wants_full_replay(params)), params["sessionId"]
        with self.requests.loading(session_id, params.request_id) as load:
            store = await self.sessions.store.get()
            async with self.opener.reopened(session_id, request) as opened:
                session = opened.session
                family = Family(session_id=session.id) if self.sessions.caps.subagents else None
                if family is not None:
                    await opened.client.subagents.load(store, family, limits)
                history = load.watch(store.history(session.id, result_bytes=limits.result_bytes))
                await opened.client.load(history, is_running=lambda: session.is_running, limits=limits, family=family)
                yield opened

    async def _resume(self, params: RequestParams) -> dict[str, Any]:
        async with self.resumed(params, open_request_from(params, may_be_missing=True)) as opened:
            return self.opener.introduce(opened)

    @asynccontextmanager
    async def resumed(self, params: RequestParams, request: OpenRequest) -> AsyncIterator[ConnectionSession]:
        """Open a stored session. If the request has a cursor, also send the updates that the client missed after that
        cursor, except the prompts that the client has sent itself."""
        cursor, sent = cursor_in(params), sent_prompts(params)
        async with self.opener.reopened(params["sessionId"], request) as opened:
            if cursor is not None:
                store, session = await self.sessions.store.get(), opened.session
                await opened.client.resume(
                    lambda: missed_since(cursor, store, session.id, session.branch.entries),
                    is_running=lambda: session.is_running,
                    is_own=lambda prompt: (
                        opened.has_sent(prompt.message_id) or (prompt.name is not None and prompt.name.id in sent)
                    ),
                )
            yield opened

    async def list(self, params: RequestParams) -> dict[str, Any]:
        store = await self.sessions.store.get()
        limit, archived = 50, archived_filter(params)
        if (name := session_name(params)) is not None:
            found = await self.stored.named(name)
            return {"sessions": [session_info(row, tells_archived="archived" in params) for row in found[:limit]]}
        while True:
            page = await store.sessions(
                cwd=params.get("cwd"), cursor=params.get("cursor"), limit=limit, archived=archived
            )
            sessions = [session_info(row, tells_archived="archived" in params) for row in page.rows]
            answer: dict[str, Any] = {"sessions": sessions}
            if page.cursor is not None:
                answer["nextCursor"] = page.cursor
            if wants_directories(params):
                answer["_meta"] = {"crow": {"directories": await self._directories(store)}}
            if limit == 1 or json_bytes(answer) < PART_BYTES:
                return answer
            limit = max(1, limit // 8)

    async def _directories(self, store: Store) -> Sequence[dict[str, Any]]:
        """Return the directories of all sessions that are not hidden from lists, for the response to
        `session/list`."""
        found = await store.directories()
        return [{"cwd": one.cwd, "sessions": one.sessions, "updatedAt": iso_time(one.updated_ms)} for one in found]

    async def _close(self, params: RequestParams) -> dict[str, Any]:
        was_loading = self.requests.cancel_loading(params["sessionId"])
        try:
            await self.sessions.close(params["sessionId"])
        except NoSuchSession:
            if not was_loading:  # a cancelled load closes its session itself
                raise
        return {}

    async def _prompt(self, params: RequestParams) -> dict[str, Any]:
        opened, run = await self.start_prompt(params)
        run.prompt.repeat.on_joined = lambda known: opened.note_sent(known.message_id)
        try:
            with self.requests.cancelled_by(params.request_id, partial(run.session.withdraw, run.prompt)):
                prompt = await run.wait()
        except Exception:
            await opened.flushed()
            raise
        await opened.flushed()
        return {"stopReason": prompt.stop} | ({} if prompt.usage is None else {"usage": usage_object(prompt.usage)})

    async def start_prompt(self, params: RequestParams) -> tuple[ConnectionSession, PromptRun]:
        """Run a prompt in the host.

        If a client sends a prompt again after its connection broke, or with the same name, crow does not run the prompt
        again. The client gets the response to the original prompt.
        """
        # Over stdio, the prompt is submitted without any wait, so a cancellation sent right after it takes effect.
        opened = await self.writable(params["sessionId"])
        key = (self.sessions.requester.connection_id, opened.session.id, params.request_id)
        blocks = params.get("prompt")
        run = self.host.prompts.again(self._connection, key, blocks)
        if run is None:
            session, metadata = opened.session, session_metadata(params)
            is_first = session.branch.projection.prompt is None
            parts = without_repeated_prompts(parts_from(blocks), is_first=is_first)
            prompt = session.submit(parts, metadata, prompt_name(params))
            run = PromptRun(session, prompt, self._connection, blocks)
            self.host.prompts.run(run, key)
        opened.note_sent(run.prompt.message_id)
        return opened, run

    async def writable(self, session_id: object) -> ConnectionSession:
        """Return an open session that this client may change. :raises CrowError: the session is not open, or the
        client may not change it."""
        await self.sessions.store.require(session_id, "write")
        opened = self.sessions.opened(session_id)
        self.sessions.refuse_watcher(session_id)
        return opened

    @asynccontextmanager
    async def _locked(self, session_id: str) -> AsyncIterator[ConnectionSession]:
        """Yield an open session that this client may change, and keep it open during the block. :raises CrowError: see
        `writable`."""
        # Checked first, so that a user without access cannot find out whether the session is locked.
        await self.sessions.store.require(session_id, "write")
        async with self.host.lock(session_id):
            opened = self.sessions.opened(session_id)
            self.sessions.refuse_watcher(session_id)
            yield opened

    async def _steer(self, params: RequestParams) -> dict[str, Any]:
        """Add a prompt to the running turn. Do not start a turn if none is running.

        The protocol allows updates of a turn only while a `session/prompt` request waits for its response, so a
        steering request cannot start a turn.
        """
        opened, message_id = await self.writable(params["sessionId"]), new_message_id()
        opened.note_sent(message_id)
        if await opened.session.steer(parts_from(params["prompt"]), message_id, prompt_name(params)):
            return {"outcome": "injected"}
        return {"outcome": "promptRequired", "reason": "noRunningTurn"}

    async def _set_mode(self, params: RequestParams) -> dict[str, Any]:
        mode = mode_named(params["modeId"])
        async with self._locked(params["sessionId"]) as opened:
            await set_mode(opened.session.branch, mode)
            await opened.flushed()
        return {}

    async def set_config_option(self, params: RequestParams) -> dict[str, Any]:
        if params["configId"] == "model" and params["value"] not in self.host.models:
            await self.host.list_models()  # an editor may choose an earlier session's model before models are listed
        async with self._locked(params["sessionId"]) as opened:
            branch, option = opened.session.branch, params["configId"]
            value = option_value(option, params["value"], model=branch.row.model, models=self.host.models)
            match option:
                case "mode":
                    await set_mode(branch, str(value))
                case "model":
                    await set_model(branch, str(value))
                case _:
                    await set_option(branch, option, value)
            await opened.flushed()
            return {"configOptions": self.sessions.options(opened.session)}


def session_info(row: SessionRow, *, tells_archived: bool = False) -> dict[str, Any]:
    """Return a session as an item of the response to `session/list`. The member `archived` is not part of the stable
    protocol, and is included only for a client that asked for archived sessions."""
    info: dict[str, Any] = {"sessionId": row.id, "cwd": row.cwd, "updatedAt": iso_time(row.updated_ms)}
    if tells_archived:
        info["archived"] = row.archived
    if row.title is not None:
        info["title"] = title_line(row.title)
    if row.additional_directories:
        info["additionalDirectories"] = list(row.additional_directories)
    about: dict[str, Any] = {"metadata": dict(row.metadata)} if row.metadata else {}
    if row.alias is not None:
        about["alias"] = row.alias
    if node := node_of(row):
        about["node"] = node
    if about:
        info["_meta"] = {"crow": about}
    return info


def auth_methods(caps: ClientCapabilities) -> list[dict[str, Any]]:
    """Return the authentication methods that the client can use."""
    text = "Uses OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL, or [model] in config.toml."
    configured = {"id": _CONFIGURED, "name": "Endpoint from the configuration", "description": text}
    if not caps.terminal_auth:
        return [configured]
    text = "Asks for endpoint, key and model in a terminal, tests them, and writes them to config.toml."
    login: dict[str, Any] = {"id": "login", "name": "Set up endpoint, key and model", "description": text}
    login |= {"type": "terminal", "args": ["--setup"]}
    if caps.terminal_auth_by_meta:
        program, *arguments = own_command("login")
        command = {"label": "crow login", "command": program, "args": arguments, "env": {}}
        login["_meta"] = {"terminal-auth": command}
    return [configured, login]
