"""The method table: what each ACP method does.

Strategy: parameters are checked by the SDK's models, but read from the raw object, since the models drop what they do
not know; `_meta` is data and can override nothing. Every failure becomes a JSON-RPC error in one place, with the
sentence a person can act on. Sessions that are open here are in one dict. Knows the protocol and sessions; not models,
SQL or tools.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from acp import PROTOCOL_VERSION, RequestError, schema
from acp.connection import Connection
from pydantic import BaseModel, ValidationError

from crow.agent import new_session_id
from crow.agent.commands import COMMANDS
from crow.agent.idle import Idle
from crow.agent.session import Adapters, Session
from crow.domain.errors import ArgumentError, AuthError, CrowError, NoSuchSession
from crow.domain.events import OptionsChanged
from crow.frontend.client import SessionClient
from crow.frontend.content import parts_from
from crow.frontend.crow_meta import alias_named, entry_named, wants_archived
from crow.frontend.options import config_options, mode_named, mode_state, option_chosen
from crow.frontend.params import ClientCapabilities, client_capabilities, client_name, mcp_servers_from
from crow.frontend.server import Wire
from crow.frontend.workspace import EditorWorkspace
from crow.store import NewSession, SessionChanges, SessionRow, Store, Tail
from crow.tools import McpServer, StdioServer, Workspace

__all__ = ["AcpAgent", "Kit"]

logger = logging.getLogger(__name__)

WARM_AFTER_S = 0.2
LIST_PAGE = 50
DRAIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """What the composition root gives the front end.

    `open_store` raises StoreError; `check` raises AuthError or ConfigError when no prompt could be answered, and costs
    nothing. `models` are the names offered, the default first. `servers` are the user's own, for every
    session. `log_hint` says where the log is.
    """

    version: str
    open_store: Callable[[], Awaitable[Store]]
    adapters: Callable[[Store], Adapters]
    workspace: Callable[[str, Sequence[str]], Workspace]
    check: Callable[[], None]
    warm_up: Callable[[], Awaitable[None]]
    models: Sequence[str]
    mode: str
    log_hint: str
    servers: Sequence[McpServer] = ()


Method = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session that is open in this process, and the editor as it sees it."""

    session: Session
    client: SessionClient


class AcpAgent:
    """Serves one connection."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._caps = ClientCapabilities()
        self._sessions: dict[str, Opened] = {}
        self._store: Store | None = None
        self._adapters: Adapters | None = None
        self._opening = asyncio.Lock()
        self._idle = Idle(self._tidy)
        self._answering: set[asyncio.Task[Any]] = set()
        self._quiet_since = asyncio.get_running_loop().time()
        self._requests: dict[str, tuple[type[BaseModel], Method]] = {
            "initialize": (schema.InitializeRequest, self._initialize),
            "authenticate": (schema.AuthenticateRequest, self._authenticate),
            "session/new": (schema.NewSessionRequest, self._new),
            "session/fork": (schema.ForkSessionRequest, self._fork),
            "session/load": (schema.LoadSessionRequest, self._load),
            "session/resume": (schema.ResumeSessionRequest, self._resume),
            "session/list": (schema.ListSessionsRequest, self._list),
            "session/close": (schema.CloseSessionRequest, self._close),
            "session/delete": (schema.DeleteSessionRequest, self._delete),
            "session/prompt": (schema.PromptRequest, self._prompt),
            "session/set_mode": (schema.SetSessionModeRequest, self._set_mode),
            "session/set_config_option": (schema.SetSessionConfigOptionSelectRequest, self._set_config_option),
        }

    def attach(self, connection: Connection, wire: Wire, tasks: anyio.abc.TaskGroup) -> None:
        """See :class:`crow.frontend.server.Handler`."""
        self._connection, self._wire, self._tasks = connection, wire, tasks
        tasks.start_soon(self._idle.run)

    async def handle(self, method: str, params: Any, is_notification: bool) -> Any:
        """See :class:`crow.frontend.server.Handler`."""
        self._quiet_since = asyncio.get_running_loop().time()
        raw = params if isinstance(params, dict) else {}
        if is_notification:
            if method == "session/cancel":
                self._cancel(raw)
            return None
        if method not in self._requests:
            raise RequestError.method_not_found(method)
        model, answer = self._requests[method]
        task = asyncio.current_task()
        assert task is not None
        try:
            model.model_validate(raw)
            if method != "session/prompt":
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            return await answer(raw)
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
        """Import what the first prompt needs, once nobody has asked anything for a while."""
        while True:
            quiet = asyncio.get_running_loop().time() - self._quiet_since
            if quiet >= WARM_AFTER_S:
                break
            await anyio.sleep(WARM_AFTER_S - quiet)
        await self._kit.warm_up()
        for opened in self._sessions.values():
            opened.session.warm()

    async def close(self) -> None:
        """See :class:`crow.frontend.server.Handler`. What was asked before the end is still answered, prompts by
        `cancelled`."""
        self._idle.stop()
        if self._answering:
            await asyncio.wait(self._answering, timeout=DRAIN_S)
        async with anyio.create_task_group() as tasks:
            for opened in self._sessions.values():
                tasks.start_soon(opened.session.close)
        if self._store is not None:
            await self._store.close()

    async def _initialize(self, params: dict[str, Any]) -> dict[str, Any]:
        self._caps = client_capabilities(params)
        logger.info("Client: %s", client_name(params) or "not named")
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentInfo": {"name": "crow", "title": "Crow", "version": self._kit.version},
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
            },
            "authMethods": [
                {
                    "id": "configured",
                    "name": "Endpoint from the configuration",
                    "description": "Uses OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL, or [model] in config.toml.",
                }
            ],
        }

    async def _authenticate(self, params: dict[str, Any]) -> dict[str, Any]:
        if params["methodId"] != "configured":
            raise ArgumentError(f'No authentication method "{params["methodId"]}"; there is only "configured".')
        self._kit.check()
        return {}

    async def _new(self, params: dict[str, Any]) -> dict[str, Any]:
        alias = alias_named(params)
        opened = await self._create(params, alias) if alias is None else await self._open_named(params, alias)
        self._wire.after_response(lambda: self._introduce(opened.client))
        return {"sessionId": opened.session.id, **self._state(opened.session)}

    async def _create(self, params: dict[str, Any], alias: str | None) -> Opened:
        cwd, directories, servers = places(params)
        store = await self._opened_store()
        row = await store.create_session(
            NewSession(
                id=new_session_id(),
                cwd=cwd,
                model=self._kit.models[0] if self._kit.models else "",
                mode=self._kit.mode,
                additional_directories=directories,
                alias=alias,
            )
        )
        return self._start(Tail(row=row, entries=()), servers)

    async def _open_named(self, params: dict[str, Any], alias: str) -> Opened:
        """The session that has the alias, made if there is none."""
        store = await self._opened_store()
        row = await store.named(alias)
        if row is None:
            try:
                return await self._create(params, alias)
            except ArgumentError:
                row = await store.named(alias)  # another process may have made it just now
                if row is None:
                    raise
        return await self._reopen(params | {"sessionId": row.id})

    async def _fork(self, params: dict[str, Any]) -> dict[str, Any]:
        cwd, directories, servers = places(params)
        store = await self._opened_store()
        row = await store.fork_session(
            params["sessionId"],
            new_session_id(),
            entry=entry_named(params),
            cwd=cwd,
            additional_directories=directories,
        )
        opened = self._start(await store.open_session(row.id), servers)
        self._wire.after_response(lambda: self._introduce(opened.client))
        return {"sessionId": row.id, **self._state(opened.session)}

    async def _load(self, params: dict[str, Any]) -> dict[str, Any]:
        opened = await self._reopen(params)
        store = await self._opened_store()
        session = opened.session
        await opened.client.replay(store.history(session.id), goes_on=session.busy)
        self._wire.after_response(lambda: self._introduce(opened.client))
        return self._state(opened.session)

    async def _resume(self, params: dict[str, Any]) -> dict[str, Any]:
        opened = await self._reopen(params)
        self._wire.after_response(lambda: self._introduce(opened.client))
        return self._state(opened.session)

    async def _list(self, params: dict[str, Any]) -> dict[str, Any]:
        store = await self._opened_store()
        page = await store.sessions(
            cwd=params.get("cwd"), cursor=params.get("cursor"), limit=LIST_PAGE, archived=wants_archived(params)
        )
        answer: dict[str, Any] = {"sessions": [session_info(row) for row in page.rows]}
        if page.cursor is not None:
            answer["nextCursor"] = page.cursor
        return answer

    async def _close(self, params: dict[str, Any]) -> dict[str, Any]:
        session = self._open_session(params["sessionId"])
        await session.close()
        self._sessions.pop(session.id, None)
        return {}

    async def _delete(self, params: dict[str, Any]) -> dict[str, Any]:
        opened = self._sessions.pop(params["sessionId"], None)
        if opened is not None:
            await opened.session.close()
        store = await self._opened_store()
        await store.delete_session(params["sessionId"])
        self._idle.tidy_soon()
        return {}

    async def _tidy(self) -> None:
        if self._store is not None:
            await self._store.tidy()

    async def _prompt(self, params: dict[str, Any]) -> dict[str, Any]:
        session = self._open_session(params["sessionId"])
        with self._idle.turn():
            return {"stopReason": await session.prompt(parts_from(params["prompt"]))}

    def _cancel(self, params: dict[str, Any]) -> None:
        opened = self._sessions.get(str(params.get("sessionId")))
        if opened is not None:
            opened.session.cancel()

    async def _set_mode(self, params: dict[str, Any]) -> dict[str, Any]:
        session = self._open_session(params["sessionId"])
        await session.set_mode(mode_named(params["modeId"]))
        return {}

    async def _set_config_option(self, params: dict[str, Any]) -> dict[str, Any]:
        session = self._open_session(params["sessionId"])
        row = session.branch.row
        choice = option_chosen(params["configId"], params["value"], model=row.model, models=self._kit.models)
        if choice.option == "mode":
            await session.set_mode(choice.value)
        else:
            await session.set_model(choice.value)
            await session.branch.publish(OptionsChanged())
        return {"configOptions": self._options(session)}

    async def _opened_store(self) -> Store:
        async with self._opening:
            if self._store is None:
                self._store = await self._kit.open_store()
                self._adapters = self._kit.adapters(self._store)
            return self._store

    async def _reopen(self, params: dict[str, Any]) -> Opened:
        """Open a stored session here; one that is open here already and idle is opened anew, a busy one stays."""
        cwd, directories, servers = places(params)
        store = await self._opened_store()
        live = self._sessions.get(params["sessionId"])
        if live is not None and live.session.busy:
            return live
        tail = await store.open_session(params["sessionId"])
        if live is not None:
            await live.session.close()
        if (tail.row.cwd, tail.row.additional_directories) != (cwd, directories):
            row = await store.update_session(tail.row.id, SessionChanges(cwd=cwd, additional_directories=directories))
            tail = Tail(row=row, entries=tail.entries)
        return self._start(tail, servers)

    def _start(self, tail: Tail, servers: Sequence[McpServer]) -> Opened:
        assert self._adapters is not None, "the store is open"
        row = tail.row
        client = SessionClient(
            row.id, self._connection, self._wire, self._caps, row.cwd, lambda: self._options(opened.session)
        )
        workspace = self._kit.workspace(row.cwd, row.additional_directories)
        if self._caps.reads_files or self._caps.writes_files:
            workspace = EditorWorkspace(workspace, row.id, client.request, self._caps)
        session = Session(self._adapters, client, workspace, with_users_own(self._kit.servers, servers), tail)
        opened = Opened(session=session, client=client)
        self._sessions[row.id] = opened
        self._tasks.start_soon(self._host, session)
        return opened

    async def _host(self, session: Session) -> None:
        try:
            await session.run()
        except Exception:
            logger.exception("Session %s ended with a failure", session.id)
            self._sessions.pop(session.id, None)

    def _open_session(self, session_id: str) -> Session:
        opened = self._sessions.get(session_id)
        if opened is None:
            raise NoSuchSession(session_id)
        return opened.session

    def _introduce(self, client: SessionClient) -> None:
        """The session's id is known to the editor: let updates pass, the list of commands first."""
        commands = [
            {
                "name": spec.name,
                "description": spec.description,
                **({"input": {"hint": spec.hint}} if spec.hint else {}),
            }
            for spec in COMMANDS
        ]

        async def introduce() -> None:
            await client.send({"sessionUpdate": "available_commands_update", "availableCommands": commands})
            client.open()

        self._tasks.start_soon(introduce)

    def _state(self, session: Session) -> dict[str, Any]:
        return {"modes": mode_state(session.branch.row.mode), "configOptions": self._options(session)}

    def _options(self, session: Session) -> list[dict[str, Any]]:
        row = session.branch.row
        return config_options(mode=row.mode, model=row.model, models=self._kit.models)


def with_users_own(own: Sequence[McpServer], given: Sequence[McpServer]) -> tuple[McpServer, ...]:
    """The user's servers, then those of the editor that are not the same; of two with one name both stay, as the
    user's rules about a server of theirs must never hold for another."""
    known = {(server.name, address(server)) for server in own}
    return (*own, *(server for server in given if (server.name, address(server)) not in known))


def address(server: McpServer) -> tuple[str, ...]:
    """What tells whether two servers are the same one."""
    return (server.command, *server.args) if isinstance(server, StdioServer) else (server.url,)


def places(params: Mapping[str, Any]) -> tuple[str, tuple[str, ...], tuple[McpServer, ...]]:
    """cwd, additional directories and MCP servers of a request that opens a session."""
    cwd = existing_directory("cwd", params["cwd"])
    directories = tuple(
        existing_directory("additionalDirectories", path) for path in params.get("additionalDirectories") or ()
    )
    return cwd, directories, mcp_servers_from(params.get("mcpServers"))


def existing_directory(name: str, path: str) -> str:
    """`path`, if sessions can work there. :raises ArgumentError: relative, missing, or no directory."""
    if not Path(path).is_absolute():
        raise ArgumentError(f'{name} is "{path}"; expected an absolute path, such as "/home/me/project".')
    if not Path(path).is_dir():
        raise ArgumentError(f'{name} is "{path}", which is not a directory that exists here.')
    return path


def session_info(row: SessionRow) -> dict[str, Any]:
    """A row as `session/list` shows it."""
    updated = datetime.datetime.fromtimestamp(row.updated_ms / 1000, datetime.UTC)
    info: dict[str, Any] = {
        "sessionId": row.id,
        "cwd": row.cwd,
        "updatedAt": updated.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    if row.title is not None:
        info["title"] = row.title
    if row.additional_directories:
        info["additionalDirectories"] = list(row.additional_directories)
    return info


def invalid_params(method: str, error: ValidationError) -> RequestError:
    """-32602 with the first fault's place and reason; what was sent is not repeated, it may hold secrets."""
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
    """-32603; clients show the message or `data.details`, so both are the sentence."""
    return RequestError(-32603, words, {"details": words})
