"""The sessions that are open in this process, and what the front end gets from the composition root."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import anyio
import anyio.abc
import anyio.to_thread

from crow.agent import Adapters, config_of_own, new_session_id
from crow.agent.branch import option_changes, options_at, usable_options
from crow.agent.commands import COMMANDS
from crow.agent.permissions import bind_rules, may_attach
from crow.agent.session import Session
from crow.agent.templates import hint_of
from crow.agent.workspace import WorkspaceContents, inspect_workspace, notice_of_sandbox, notice_of_workspace
from crow.domain.entries import NewEntry, Note
from crow.domain.errors import (
    ArgumentError,
    CrowError,
    LeafMoved,
    NoSuchSession,
    SessionBusy,
    StoreError,
    StoreUnavailable,
)
from crow.domain.events import NoticeShown, OptionsChanged, TitleChanged
from crow.domain.messages import JsonObject
from crow.domain.rendering import title_line
from crow.domain.trace_context import use_trace_context
from crow.frontend.client import ClientConnection, SessionClient
from crow.frontend.endpoints import Endpoints
from crow.frontend.options import config_options, mode_state
from crow.frontend.params import ClientCapabilities, OpenRequest
from crow.frontend.updates import usage_update
from crow.frontend.workspace import EditorRequests, EditorWorkspace
from crow.store import NewSession, SessionChanges, SessionRow, Store, Tail
from crow.store.codec import merged_metadata
from crow.tools import Workspace
from crow.tools.servers import McpServer, StdioServer

logger = logging.getLogger(__name__)

IDLE_S = 3.0
"""The store is tidied this long after the last turn, usually while the user is still reading the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDependencies:
    """What the composition root gives the front end.

    - `open_store` raises StoreError.
    - `check_model` raises AuthError or ConfigError if crow could not answer any prompt. The check is cheap.
    - `import_rest` imports what the model request of a prompt needs, outside the event loop. `import_for_calls` imports
      what tool calls need in addition.
    - `trim` returns free memory to the system; it blocks.
    - `more_models` asks the endpoint for its models, with a time limit; it returns none if that fails.
    - `reload` returns new dependencies if the user's settings have changed, else None; it is cheap.
    - `endpoints` are what the client may see and set of the endpoints.
    - `models` are the names of models to offer. `model` is the default model, or empty if no default is set.
    - `auto_compact` is the default of the session option.
    - `editor_terminals`: whether commands run in the editor's terminals, without the variables `hidden_variables`.
    - `editor_timeout_s` and `user_timeout_s`: how long the editor itself and its user may take to answer.
    - `has_network`: whether confined commands with the access `write` may use the network.
    - `servers` are the user's own MCP servers, for every session.
    - `log_hint` is a sentence that says where the log is.
    """

    open_store: Callable[[], Awaitable[Store]]
    adapters: Callable[[Store], Adapters]
    workspace: Callable[[str, Sequence[str]], Workspace]
    check_model: Callable[[], None]
    import_rest: Callable[[], Awaitable[None]]
    import_for_calls: Callable[[], Awaitable[None]]
    trim: Callable[[], None]
    more_models: Callable[[], Awaitable[Sequence[str]]]
    reload: Callable[[], ServerDependencies | None]
    endpoints: Endpoints
    models: Sequence[str]
    model: str
    mode: str
    auto_compact: bool
    editor_terminals: bool
    log_hint: str
    editor_timeout_s: float
    user_timeout_s: float
    has_network: bool = False
    hidden_variables: Callable[[], Sequence[str]] = tuple
    servers: Sequence[McpServer] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """An open session and the client object that sends its updates to the editor. `contents` describes the session's
    directory if the user has not worked there before, else it is None."""

    session: Session
    client: SessionClient
    contents: WorkspaceContents | None = None


class OpenSessions:
    """The open sessions by id, and the store.

    Requests that open, close or delete the same session wait for each other. Each session runs as a task in `tasks`.
    """

    client_type: type[SessionClient] = SessionClient

    def __init__(
        self, dependencies: ServerDependencies, connection: ClientConnection, tasks: anyio.abc.TaskGroup
    ) -> None:
        self.caps = ClientCapabilities()
        """The client's capabilities, set at `initialize`."""
        self.models: tuple[str, ...] = tuple(dependencies.models)
        """The names of the models to offer."""
        self._dependencies = dependencies
        self._connection = connection
        self._tasks = tasks
        self._open: dict[str, OpenSession] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._store: Store | None = None
        self._adapters: Adapters | None = None
        self._opening_store = asyncio.Lock()
        self._known_directories: set[str] = set()
        self._has_checked_sandbox = False
        self._is_warm = False

    @property
    def is_used(self) -> bool:
        """Whether any request has needed the store yet."""
        return self._store is not None or self._opening_store.locked()

    async def store(self) -> Store:
        """The store, opened by the first call. :raises StoreError: it cannot be used."""
        async with self._opening_store:
            if self._store is None:
                self._store = await self._dependencies.open_store()
                self._adapters = self._dependencies.adapters(self._store)
            return self._store

    def get(self, session_id: object) -> Session:
        """The open session with this id. :raises NoSuchSession: it is not open, or is being closed."""
        opened = self._open.get(session_id) if isinstance(session_id, str) else None
        if opened is None or opened.session.closing:
            raise NoSuchSession(str(session_id))
        return opened.session

    def cancel(self, session_id: object) -> None:
        """Cancels what runs in an open session, or the work of a sub-agent that runs in one.

        :raises NoSuchSession: neither has this id.
        """
        for opened in self._open.values():
            if isinstance(session_id, str) and opened.session.cancel_subagent(session_id):
                return
        self.get(session_id).cancel()

    def _refuse_if_running(self, session_id: str) -> None:
        """:raises ArgumentError: the session is a sub-agent that works for an open session."""
        for opened in self._open.values():
            if opened.session.has_subagent(session_id):
                raise ArgumentError(
                    f"{session_id} is a sub-agent that works for session {opened.session.id}. Cancel it with "
                    "session/cancel, or wait until it is idle."
                )

    @asynccontextmanager
    async def locked(self, session_id: str) -> AsyncIterator[Session]:
        """The open session with this id, kept open during the block. :raises NoSuchSession: see `get`."""
        async with self._lock(session_id):
            yield self.get(session_id)

    async def create(self, request: OpenRequest, *, alias: str | None = None) -> OpenSession:
        """Creates and opens a session. If a session already has the alias, opens that session instead."""
        store = await self.store()
        row = None if alias is None else await store.session_by_alias(alias)
        if row is None:
            contents = await self._inspect_if_new(store, request)
            new = NewSession(
                id=new_session_id(),
                cwd=request.cwd,
                model=request.model or self._dependencies.model,
                mode=self._dependencies.mode,
                additional_directories=request.directories,
                alias=alias,
                config=changed_config({}, request.config),
                metadata=merged_metadata({}, request.metadata),
            )
            try:
                tail = Tail(row=await store.create_session(new), entries=())
                return self._start(tail, request, contents)
            except ArgumentError:  # another process may have just created it
                row = None if alias is None else await store.session_by_alias(alias)
                if row is None:
                    raise
        async with self.reopened(row.id, request) as opened:
            return opened

    async def fork(self, session_id: str, request: OpenRequest, *, entry: int | None) -> OpenSession:
        """Creates and opens a session that continues another session from `entry` (None: from its current entry)."""
        store = await self.store()
        self._refuse_if_running(session_id)
        contents = await self._inspect_if_new(store, request)
        async with self._lock(session_id):
            row = await store.fork_session(
                session_id,
                new_session_id(),
                entry=entry,
                cwd=request.cwd,
                additional_directories=request.directories,
                metadata=request.metadata,
            )
            if entry is not None:
                original = await store.session(session_id)
                options = usable_options(await options_at(store, original, original.leaf, entry), self.models)
                if options:
                    row = await store.update_session(row.id, option_changes(row, options))
            if (config := changed_config(config_of_own(row.config), request.config)) != row.config:
                await store.update_session(row.id, SessionChanges(config=config))
        return self._start(await store.open_session(row.id), request, contents)

    @asynccontextmanager
    async def reopened(self, session_id: str, request: OpenRequest) -> AsyncIterator[OpenSession]:
        """Opens a stored session. If the block fails, a session that was not open before is closed again.

        A session that is already open in this process is closed and opened again, unless it is busy or has a result
        that could not be stored yet.
        """
        store = await self.store()
        async with self._lock(session_id):
            self._refuse_if_running(session_id)
            live = self._open.get(session_id)
            has_unstored = live is not None and not await live.session.settle()
            if request.metadata:
                if live is None:
                    await store.merge_metadata(session_id, request.metadata)
                else:
                    await live.session.branch.merge_metadata(request.metadata)
            if live is not None:
                known = live.session.branch.row.config
                if (config := changed_config(known, request.config)) != known:
                    await live.session.branch.change(SessionChanges(config=config))

            def stays_open() -> bool:
                return live is not None and (has_unstored or live.session.busy)

            if not stays_open():
                contents = await self._inspect_if_new(store, request)
                tail = await self._update(store, await store.open_session(session_id), request)
            if live is not None and stays_open():  # a prompt may have arrived during the awaits above
                yield live
                self._warn_about_cwd(live, request)
                return
            # Start the session before the next await: the next request may already be a prompt for this session.
            opened = self._start(tail, request, contents)
            if live is not None:
                with anyio.CancelScope(shield=True):
                    await self._close(live)
            try:
                yield opened
            except BaseException:
                if live is None:
                    self._tasks.start_soon(self._close, opened)
                else:
                    opened.client.open()  # the client already knows the session and may get updates
                raise

    async def close(self, session_id: str) -> None:
        """Cancels what runs in a session and closes it. :raises NoSuchSession: it is not open here."""
        async with self.locked(session_id):
            await self._close(self._open[session_id])

    async def delete(self, session_id: str) -> None:
        """Closes a session if it is open, and deletes it. Unknown sessions are ignored."""
        store = await self.store()
        async with self._lock(session_id):
            self._refuse_if_running(session_id)
            if session_id in self._open:
                await self._close(self._open[session_id])
            await store.delete_session(session_id)

    async def archive(self, session_id: str) -> None:
        """Closes a session if it is open, and leaves it out of lists from now on.

        :raises NoSuchSession: it does not exist.
        """
        store = await self.store()
        async with self._lock(session_id):
            self._refuse_if_running(session_id)
            row = await store.session(session_id)
            if session_id in self._open:
                await self._close(self._open[session_id])
            if not row.archived:
                await store.update_session(session_id, SessionChanges(archived=True))

    async def unarchive(self, session_id: str) -> None:
        """Puts an archived session back on the list. :raises NoSuchSession: it does not exist."""
        store = await self.store()
        async with self._lock(session_id):
            if (await store.session(session_id)).archived:
                await self._change(session_id, SessionChanges(archived=False))

    async def set_title(self, session_id: str, title: str) -> None:
        """Stores a title that crow does not replace. :raises NoSuchSession: the session does not exist."""
        await self.store()
        async with self._lock(session_id):
            await self._change(session_id, SessionChanges(title=title, title_by_user=True))
            if session_id in self._open:
                await self._open[session_id].session.branch.publish(TitleChanged(title=title))

    async def status(self, session_id: str) -> Literal["open", "saved"]:
        """Whether a session is open in this process. Changes nothing. :raises NoSuchSession: it does not exist."""
        opened = self._open.get(session_id)
        if opened is not None and not opened.session.closing:
            return "open"
        await (await self.store()).session(session_id)
        return "saved"

    async def close_all(self) -> None:
        """Closes every session, then the store."""
        async with anyio.create_task_group() as tasks:
            for opened in self._open.values():
                tasks.start_soon(opened.session.close)
        if self._store is not None:
            await self._store.close()

    def hurry(self) -> None:
        """Shortens the wait for a database that another process has locked, because this process is about to end."""
        if self._store is not None:
            self._store.hurry()

    async def tidy(self) -> None:
        """Returns memory to the system, and removes what deleted sessions left behind.

        :raises StoreError: the removal failed.
        """
        await anyio.to_thread.run_sync(self._dependencies.trim)
        if self._store is not None:
            await self._store.tidy()

    async def warm(self) -> None:
        """Prepares the first prompt of every session, also of later sessions, and asks the endpoint for more models."""
        await self._dependencies.import_rest()
        self._is_warm = True
        for opened in self._open.values():
            opened.session.warm()
        # A running turn imports the packages for tool calls itself, while the model answers.
        if not any(opened.session.busy for opened in self._open.values()):
            await self._dependencies.import_for_calls()
        await self._warn_about_sandbox()
        await self._add_models()

    def reload_settings(self) -> None:
        """Applies changed settings to sessions that are opened from now on, and offers new models in all sessions."""
        dependencies = self._dependencies.reload()
        if dependencies is not None:
            self._dependencies = dependencies
            self._set_models(tuple(dependencies.models))
            if self._is_warm:
                self._tasks.start_soon(self._add_models)

    def introduce(self, opened: OpenSession) -> dict[str, Any]:
        """The modes and config options, for the response to the request that has just opened a session.

        Right after that response, the commands, usage and title are sent, followed by all other updates.
        """
        self._connection.after_response(lambda: self._tasks.start_soon(self._introduce, opened))
        session = opened.session
        return {"modes": mode_state(session.branch.row.mode), "configOptions": self.options(session)}

    def options(self, session: Session) -> list[dict[str, Any]]:
        """All config options of a session."""
        row, caps = session.branch.row, self.caps
        model = row.model or self._dependencies.model
        config = {"auto_compact": self._dependencies.auto_compact, **row.config}
        return config_options(
            mode=row.mode, model=model, models=self.models, config=config, booleans=caps.boolean_options
        )

    def _start(self, tail: Tail, request: OpenRequest, contents: WorkspaceContents | None) -> OpenSession:
        assert self._adapters is not None, "the store is open"
        row, dependencies, caps = tail.row, self._dependencies, self.caps
        client = self.client_type(
            row.id,
            self._connection,
            caps,
            cwd=row.cwd,
            options=lambda: self.options(session),
            commands=lambda: self._commands(session),
            user_timeout_s=dependencies.user_timeout_s,
            has_network=dependencies.has_network,
        )
        workspace = dependencies.workspace(row.cwd, row.additional_directories)
        in_terminals = dependencies.editor_terminals and caps.terminals
        if caps.reads_files or caps.writes_files or in_terminals:
            editor = EditorRequests(row.id, self._connection.request, answer_s=dependencies.editor_timeout_s)
            hidden = dependencies.hidden_variables() if in_terminals else None
            workspace = EditorWorkspace(workspace, editor, caps, hidden)
        servers = _merge_servers(dependencies.servers, request.servers)
        session = Session(self._adapters, client, workspace, servers, tail)
        if contents is not None and contents.concerns_agents and not caps.notices:
            session.remark_later(notice_of_workspace(contents))
        self._open[row.id] = opened = OpenSession(session=session, client=client, contents=contents)
        self._tasks.start_soon(self._run, opened)
        return opened

    async def _run(self, opened: OpenSession) -> None:
        use_trace_context({})  # the session outlives the request that opened it
        try:
            await opened.session.run()
        except Exception:
            logger.exception("Session %s failed", opened.session.id)
            self._forget(opened)

    async def _close(self, opened: OpenSession) -> None:
        await opened.session.close()
        opened.client.close()
        self._forget(opened)

    async def _change(self, session_id: str, changes: SessionChanges) -> None:
        """Changes the row of a session, which may be open. The caller holds the session's lock."""
        assert self._store is not None, "the caller has opened it"
        if session_id in self._open:
            await self._open[session_id].session.branch.change(changes)
        else:
            await self._store.update_session(session_id, changes)

    def _forget(self, opened: OpenSession) -> None:
        if self._open.get(opened.session.id) is opened:
            del self._open[opened.session.id]

    async def _update(self, store: Store, tail: Tail, request: OpenRequest) -> Tail:
        """Store the directories, model and configuration of `request`, and return the changed session. A change of the
        model is also stored as an entry.

        If the database cannot be written, directories and model change only in the returned row.

        :raises StoreUnavailable: the configuration cannot be stored.
        """
        row = tail.row
        known = row.config if row.parent_id is None else config_of_own(row.config)
        if (config := changed_config(known, request.config)) != row.config:
            row = await store.update_session(row.id, SessionChanges(config=config))
            tail = replace(tail, row=row)
        cwd, directories = request.cwd, request.directories
        model = request.model or row.model or self._dependencies.model
        if (row.cwd, row.additional_directories, row.model) == (cwd, directories, model):
            return tail
        rules = bind_rules(row.permissions, row.cwd) if cwd != row.cwd else row.permissions
        changes = SessionChanges(cwd=cwd, additional_directories=directories, model=model, permissions=rules)
        try:
            if row.model not in ("", model) and tail.entries:
                with suppress(LeafMoved, SessionBusy):
                    note = NewEntry(body=Note(about="model", value=model, previous=row.model))
                    turn = tail.entries[-1].turn
                    stored = await store.append(row.id, leaf=row.leaf, turn=turn, entries=[note], changes=changes)
                    return replace(tail, row=await store.session(row.id), entries=(*tail.entries, *stored))
            return replace(tail, row=await store.update_session(row.id, changes))
        except StoreUnavailable as error:
            logger.warning("The directory %s of session %s is not stored: %s", cwd, row.id, error)
            row = replace(row, cwd=cwd, additional_directories=directories, model=model, permissions=rules)
            return replace(tail, row=row)

    async def _inspect_if_new(self, store: Store, request: OpenRequest) -> WorkspaceContents | None:
        """What is in the directory; None if the user has worked there before or this process has inspected it."""
        cwd = request.cwd
        if cwd in self._known_directories:
            return None
        self._known_directories.add(cwd)
        paths = (cwd, await anyio.to_thread.run_sync(os.path.realpath, cwd))
        if await store.is_known_directory(paths):
            return None
        assert self._adapters is not None, "the store is open"
        workspace = self._dependencies.workspace(cwd, request.directories)
        may_read = partial(may_attach, workspace=workspace, rules=self._adapters.settings().rules)
        return await anyio.to_thread.run_sync(inspect_workspace, cwd, may_read)

    async def _warn_about_sandbox(self) -> None:
        """Warns once per process, in the first session, if commands are not confined.

        If the editor shows no notices, the warning goes into the history of the session, but only of a new session.
        """
        opened = next(iter(self._open.values()), None)
        if opened is None or self._has_checked_sandbox:
            return
        self._has_checked_sandbox = True
        is_new = opened.session.branch.leaf is None
        notice = notice_of_sandbox(await opened.session.workspace.sandbox_status())
        if notice is not None and opened.client.takes_notices:
            await opened.client.publish(notice)
        elif notice is not None and is_new:
            opened.session.remark_later(notice)

    def _warn_about_cwd(self, live: OpenSession, request: OpenRequest) -> None:
        """Tells the user, after the response, that a running session cannot move to another directory."""
        cwd = live.session.branch.row.cwd
        if request.cwd != cwd and live.session.busy:
            title = (
                f"A turn of this session is running in {cwd} and continues there. To work in {request.cwd}, load the "
                "session again after the turn."
            )
            notice = NoticeShown(severity="warning", title=title)
            self._connection.after_response(lambda: self._tasks.start_soon(live.client.publish, notice))

    async def _introduce(self, opened: OpenSession) -> None:
        client, session = opened.client, opened.session
        commands = self._commands(session)
        await client.send({"sessionUpdate": "available_commands_update", "availableCommands": commands})
        try:
            await client.send(usage_update(await session.measured()))
        except CrowError as error:
            logger.warning("The context could not be measured: %s", error)
        row = session.branch.row
        if row.title is not None:
            title = {"title": title_line(row.title), "updatedAt": _iso_time(row.updated_ms)}
            await client.send({"sessionUpdate": "session_info_update", **title})
        await client.tell_subagents()
        client.open()
        if opened.contents is not None and client.takes_notices:
            await client.publish(notice_of_workspace(opened.contents))
        if self._is_warm:
            session.warm()
            await self._warn_about_sandbox()

    def _commands(self, session: Session) -> list[dict[str, Any]]:
        """Slash commands, the user's templates and MCP prompts for `available_commands_update`."""
        assert self._adapters is not None, "the store is open"
        commands = [
            *((spec.name, spec.description, spec.hint) for spec in COMMANDS),
            *((template.name, template.description, template.hint) for template in self._adapters.templates()),
            *((prompt.name, f"{prompt.server}: {prompt.description}", hint_of(prompt)) for prompt in session.prompts),
        ]
        return [
            {"name": name, "description": title_line(text), **({"input": {"hint": title_line(hint)}} if hint else {})}
            for name, text, hint in commands
        ]

    async def _add_models(self) -> None:
        more = await self._dependencies.more_models()
        self._set_models(tuple(dict.fromkeys([*self.models, *more])))

    def _set_models(self, models: tuple[str, ...]) -> None:
        if models != self.models:
            self.models = models
            for opened in self._open.values():
                self._tasks.start_soon(opened.client.publish, OptionsChanged())

    def _lock(self, session_id: str) -> asyncio.Lock:
        return self._locks.setdefault(session_id, asyncio.Lock())


class IdleTimer:
    """Calls `tidy` when no turn has run for `after_s` seconds, and cancels it when a turn begins.

    The caller must run `run` as a task.
    """

    def __init__(self, tidy: Callable[[], Awaitable[None]], *, after_s: float = IDLE_S) -> None:
        self._tidy = tidy
        self._after_s = after_s
        self._turns = 0
        self._delay_s = 0.0
        self._wanted = anyio.Event()
        self._waiting = anyio.CancelScope()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context manager around each turn."""
        self._turns += 1
        self._waiting.cancel()
        try:
            yield
        finally:
            self._turns -= 1
            self._schedule(self._after_s)

    def tidy_soon(self) -> None:
        """Tidies at once if no turn is running, otherwise after the last running turn."""
        self._schedule(0.0)

    def stop(self) -> None:
        """Cancels tidying for good; the store is about to close."""
        self._turns += 1
        self._waiting.cancel()

    async def run(self) -> None:
        """Waits for each scheduled time, then tidies. Runs until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            with anyio.CancelScope() as self._waiting:
                await anyio.sleep(self._delay_s)
                if self._turns:  # the end of the turn schedules the tidying again
                    continue
                try:
                    await self._tidy()
                except StoreError as error:
                    logger.warning("Tidying failed: %s", error)

    def _schedule(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._waiting.cancel()
        self._wanted.set()


def changed_config(config: JsonObject, changes: JsonObject) -> JsonObject:
    """A session's configuration with changes; None removes a member."""
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def session_info(row: SessionRow, *, tells_archived: bool = False) -> dict[str, Any]:
    """A session as `session/list` shows it. `archived` is unstable, so only a client that asked about it gets it."""
    info: dict[str, Any] = {"sessionId": row.id, "cwd": row.cwd, "updatedAt": _iso_time(row.updated_ms)}
    if tells_archived:
        info["archived"] = row.archived
    if row.title is not None:
        info["title"] = title_line(row.title)
    if row.additional_directories:
        info["additionalDirectories"] = list(row.additional_directories)
    if row.metadata:
        info["_meta"] = {"crow": {"metadata": dict(row.metadata)}}
    return info


def _iso_time(ms: int) -> str:
    time = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _merge_servers(own: Sequence[McpServer], offered: Sequence[McpServer]) -> tuple[McpServer, ...]:
    """The user's servers, followed by the editor's servers. A server that both have is included only once.

    Two different servers with the same name are both included, because the user's rules for one server must not apply
    to the other.
    """

    def identity(server: McpServer) -> tuple[str, ...]:
        address = (server.command, *server.args) if isinstance(server, StdioServer) else (server.url,)
        return (server.name, *address)

    known = {identity(server) for server in own}
    return (*own, *(server for server in offered if identity(server) not in known))
