"""The session host: it holds the open sessions, the store and the offered models. All connections of a process share
these."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias
from weakref import WeakValueDictionary

import anyio
import anyio.abc
import anyio.to_thread

from crow.agent.idle import IdleTimer
from crow.agent.sessions.first_use import FirstUse
from crow.agent.sessions.following import Follower
from crow.agent.sessions.session import Session
from crow.agent.turns.adapters import Adapters
from crow.domain.errors import ArgumentError, StoreError
from crow.domain.events import OptionsChanged, SessionListChanged
from crow.domain.trace_context import use_trace_context
from crow.frontend.clients import SessionClients
from crow.frontend.endpoints import Endpoints
from crow.frontend.prompts import RunningPrompts
from crow.frontend.queue import ClientQueue, Origin
from crow.protocol.params import OpenRequest
from crow.store import SessionChanges, SessionRow, Store
from crow.tools import Workspace
from crow.tools.servers import McpServer

logger = logging.getLogger(__name__)

_SHUT_DOWN_S = 5.0
"""A lasting host has this many seconds to close its sessions and its store."""

_FLUSH_S = 0.5
"""When a session is closed, its clients have this many seconds to read its last updates."""

SessionView: TypeAlias = Callable[[Store, SessionRow], Store]
"""A function that wraps a store, so that the tools of a session find only what the owner of the session may see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDependencies:
    """The functions and values that the front end gets from the composition root, `crow/app.py`."""

    open_store: Callable[[], Awaitable[Store]]
    """Opens the store. Raises StoreError if the store cannot be used."""
    adapters: Callable[[Store], Adapters]
    """Returns the adapters that sessions use besides the store."""
    workspace: Callable[[str, Sequence[str]], Workspace]
    """Returns the workspace with this working directory and these additional directories."""
    check_model: Callable[[], None]
    """Raises AuthError or ConfigError if a setting that every prompt needs is missing. It is fast."""
    import_rest: Callable[[], Awaitable[None]]
    """Imports the packages that a request to a model needs, outside the event loop."""
    import_for_calls: Callable[[], Awaitable[None]]
    """Imports the further packages that tool calls need, outside the event loop."""
    trim: Callable[[], None]
    """Returns free memory to the system. It blocks."""
    more_models: Callable[[], Awaitable[Sequence[str]]]
    """Asks the endpoint for its models, and returns their names. Returns no names if the request fails or takes too
    long."""
    reload: Callable[[], ServerDependencies | None]
    """Returns new dependencies if the user's settings have changed, else None. It is fast."""
    endpoints: Endpoints
    """The endpoints that the client may see and set."""
    models: Sequence[str]
    """The names of the models to offer."""
    model: str
    """The default model. Empty if there is none."""
    mode: str
    """The mode of new sessions."""
    auto_compact: bool
    """The default of the config option `auto_compact`."""
    editor_terminals: bool
    """Whether commands run in the editor's terminals."""
    log_hint: str
    """A sentence that says where the log is."""
    editor_timeout_s: float
    """The time limit for responses of the editor, in seconds."""
    user_timeout_s: float
    """The time limit for answers of the editor's user, in seconds."""
    has_network: bool = False
    """Whether confined commands with the access `write` may use the network."""
    unattended_s: float = 600.0
    """A lasting host closes a session that no client has open about this many seconds after the session's work ends."""
    hidden_variables: Callable[[], Sequence[str]] = tuple
    """Returns the environment variables that commands in the editor's terminals do not get."""
    servers: Sequence[McpServer] = ()
    """The user's own MCP servers. Every session gets them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostSession:
    """A session that is open in this process."""

    session: Session
    """The session."""
    clients: SessionClients
    """Its clients."""
    request: OpenRequest
    """The request that opened the session."""
    follower: Follower | None = None
    """Shows what other processes do with the session, if the host follows other processes."""
    closed: anyio.Event = field(default_factory=anyio.Event)
    """Set when the session has been closed."""

    def satisfies(self, request: OpenRequest) -> bool:
        """Whether the open session already has the directories, servers and model that `request` asks for."""
        row = self.session.branch.row
        return (
            (row.cwd, row.additional_directories) == (request.cwd, request.directories)
            and request.servers == self.request.servers
            and request.model in (None, row.model)
        )

    def is_watched_without(self, origin: Origin) -> bool:
        """Whether any client other than the one with the identity `origin` has opened the session."""
        return any(queue.origin != origin for queue in self.clients.queues)


class _OfferedModels:
    """The names of the models that clients may choose."""

    def __init__(self, dependencies: ServerDependencies) -> None:
        self._current = dependencies
        """The settings that are in use."""
        self.names: tuple[str, ...] = tuple(dependencies.models)
        self._told = self.names
        self._lock = anyio.Lock()
        self._listed: ServerDependencies | None = None
        """The settings for which the models of the endpoint were listed."""

    def use(self, dependencies: ServerDependencies) -> None:
        """Offer only the models of these settings, until `list` adds those of the endpoint."""
        self._current, self.names = dependencies, tuple(dependencies.models)

    async def list(self) -> bool:
        """Add the models that the endpoint lists. Return False if that was done for the current settings before. Later
        calls wait for the first one."""
        async with self._lock:
            settings = self._current
            if self._listed is settings:
                return False
            more = await settings.more_models()
            self._listed = settings
            if self._current is settings:  # otherwise, these are the models of an endpoint that is no longer used
                self.names = tuple(dict.fromkeys([*self.names, *more]))
        return True

    def has_changed(self) -> bool:
        """Return whether the names have changed since the last call."""
        told, self._told = self._told, self.names
        return told != self.names


class SessionHost:
    """The part of a process that all connections share: the open sessions, the store and the offered models.

    Each session runs as a task in `tasks`, and may have several clients. With `is_lasting`, sessions outlive the
    connections that opened them, and follow what other processes do.
    """

    def __init__(
        self,
        dependencies: ServerDependencies,
        tasks: anyio.abc.TaskGroup,
        *,
        is_lasting: bool = False,
        session_view: SessionView | None = None,
    ) -> None:
        self.dependencies = dependencies
        self._offered = _OfferedModels(dependencies)
        self.tasks = tasks
        self.is_lasting = is_lasting
        self.open: dict[str, HostSession] = {}
        self._closing: set[HostSession] = set()
        self.is_warm = False
        self.idle = IdleTimer(self.tidy)
        self.prompts = RunningPrompts(tasks, self.idle)
        self._session_view = session_view
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._store: Store | None = None
        self._adapters: Adapters | None = None
        self._opening_store = asyncio.Lock()
        self.first_use = FirstUse()

    async def store(self) -> Store:
        """Return the store. The first call opens it. :raises StoreError: the store cannot be used."""
        async with self._opening_store:
            if self._store is None:
                self._store = await self.dependencies.open_store()
                self._adapters = self.dependencies.adapters(self._store)
            return self._store

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models to offer."""
        return self._offered.names

    @property
    def adapters(self) -> Adapters:
        """The adapters for all sessions. The store must be open."""
        assert self._adapters is not None, "the store is open"
        return self._adapters

    def adapters_for(self, row: SessionRow) -> Adapters:
        """Return the adapters for this session. The store must be open."""
        assert self._store is not None, "the store is open"
        view = self._store if self._session_view is None else self._session_view(self._store, row)
        return self.adapters if view is self._store else self.dependencies.adapters(view)

    def lock(self, session_id: str) -> asyncio.Lock:
        """Return the lock of a session. Requests that open, close or delete the session must hold it."""
        return self._locks.setdefault(session_id, asyncio.Lock())

    def refuse_if_running(self, session_id: str) -> None:
        """Check that the session is not a running subagent.

        :raises ArgumentError: the session is a subagent that works for an open session.
        """
        for hosted in self.open.values():
            if session_id in hosted.session.runner.subagents:
                raise ArgumentError(
                    f"{session_id} is a subagent that works for session {hosted.session.id}. Cancel it with "
                    "session/cancel, or wait until it is idle."
                )

    def run(self, hosted: HostSession) -> None:
        """Start the task of a session that was just opened."""
        self.open[hosted.session.id] = hosted
        self.tasks.start_soon(self._run, hosted)

    def close_when_idle(self, hosted: HostSession) -> None:
        """Close a session that no client has open, about `unattended_s` seconds after its work has ended. If a client
        opens the session before that, the session stays open."""
        if not hosted.clients.queues and hosted not in self._closing:
            self._closing.add(hosted)
            self.tasks.start_soon(self._close_when_idle, hosted)

    async def _close_when_idle(self, hosted: HostSession) -> None:
        use_trace_context({})
        session = hosted.session
        try:
            while not hosted.clients.queues and self.open.get(session.id) is hosted:
                await anyio.sleep(self.dependencies.unattended_s)
                async with self.lock(session.id):
                    if not (hosted.clients.queues or session.busy or not session.branch.is_settled or session.closing):
                        await self.close(hosted)
        finally:
            self._closing.discard(hosted)

    async def close(self, hosted: HostSession) -> None:
        """Cancel the work of a session and close the session."""
        # Close in a task of the host: the connection that sent this request may break before the session is closed.
        self.tasks.start_soon(self._close, hosted)
        await hosted.closed.wait()

    async def _close(self, hosted: HostSession) -> None:
        try:
            await hosted.session.close()
            with anyio.move_on_after(_FLUSH_S):
                await hosted.clients.flushed()
        finally:
            hosted.clients.close()
            self._forget(hosted)
            hosted.closed.set()

    async def change(self, session_id: str, changes: SessionChanges) -> None:
        """Change the stored row of a session, which may be open. The caller must hold the session's lock."""
        if session_id in self.open:
            await self.open[session_id].session.branch.change(changes)
        else:
            await (await self.store()).update_session(session_id, changes)

    async def close_all(self) -> None:
        """Close every session, then the store."""
        async with anyio.create_task_group() as tasks:
            for hosted in tuple(self.open.values()):
                tasks.start_soon(self._close, hosted)
        if self._store is not None:
            await self._store.close()

    def hurry(self) -> None:
        """Stop tidying, and shorten the time that the store waits for a database that another process has locked. Must
        be called when this process is about to end."""
        self.idle.stop()
        if self._store is not None:
            self._store.hurry()

    async def tidy(self) -> None:
        """Return memory to the system, and remove the data of deleted sessions from the store.

        :raises StoreError: the data cannot be removed.
        """
        await anyio.to_thread.run_sync(self.dependencies.trim)
        if self._store is not None:
            await self._store.tidy()

    async def warm(self) -> None:
        """Import the packages that prompts need, and ask the endpoint which models it has. Only log an error, such as
        too little memory: the first prompt will tell the user."""
        try:
            await self.dependencies.import_rest()
            self.is_warm = True
            for hosted in self.open.values():
                hosted.session.runner.warm()
            # A running turn imports the packages for tool calls itself, while the model answers.
            if not any(hosted.session.busy for hosted in self.open.values()):
                await self.dependencies.import_for_calls()
            await self.check_first_session()
            await self.list_models()
        except Exception:
            logger.exception("The first prompt could not be prepared")

    def reload_settings(self) -> None:
        """Reload the user's settings. If they have changed, sessions that are opened from now on use the new settings,
        and all sessions offer the new models."""
        dependencies = self.dependencies.reload()
        if dependencies is not None:
            self.dependencies = dependencies
            self._offered.use(dependencies)
            self._tell_models()
            if self.is_warm:
                self.tasks.start_soon(self.list_models)

    def announce(self, event: SessionListChanged, principal: str | None, *, besides: Origin = None) -> None:
        """Tell the clients of a principal, except the one with the identity `besides`, that their list of sessions has
        changed. Each client is told once: through the changed session if the client has it open, else through another
        session that it has open. Without a lasting host, do nothing: the only client has made the change itself."""
        told: dict[Origin, tuple[ClientQueue, str]] = {}
        for hosted in self.open.values() if self.is_lasting else ():
            session = hosted.session
            for queue in hosted.clients.queues if session.branch.row.principal == principal else ():
                if queue.origin not in told or session.id == event.session_id:
                    told[queue.origin] = queue, session.id
        for origin, (queue, session_id) in told.items():
            # the clients of a renamed session get its new title with `TitleChanged`
            if origin != besides and not (event.change == "renamed" and session_id == event.session_id):
                queue.publish(queue.client, event, is_own=False)

    async def check_first_session(self) -> None:
        """See `FirstUse.check`. Log an error of the disk or the store: no client waits for this check."""
        hosted = next(iter(self.open.values()), None)
        if hosted is not None:
            try:
                await self.first_use.check(hosted.session, hosted.clients, self._store)
            except (StoreError, OSError) as error:
                logger.warning("Old contents of changed files could not be removed: %s", error)

    async def _run(self, hosted: HostSession) -> None:
        use_trace_context({})  # the session outlives the request that opened it
        try:
            await self.first_use.recover_changes(hosted.session)
            if hosted.follower is None:
                await hosted.session.run()
            else:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(hosted.follower.run, partial(self.tasks.start_soon, self._close, hosted))
                    await hosted.session.run()
                    tasks.cancel_scope.cancel()
        except Exception:
            logger.exception("Session %s failed", hosted.session.id)
            self._forget(hosted)

    def _forget(self, hosted: HostSession) -> None:
        if self.open.get(hosted.session.id) is hosted:
            del self.open[hosted.session.id]

    async def list_models(self) -> None:
        """Add the models that the endpoint lists to those that clients may choose."""
        if await self._offered.list():
            has_levels = any(hosted.session.conversation.thought_levels is not None for hosted in self.open.values())
            self._tell_models(has_levels=has_levels)

    def _tell_models(self, *, has_levels: bool = False) -> None:
        if self._offered.has_changed() or has_levels:
            for hosted in self.open.values():
                self.tasks.start_soon(hosted.session.branch.publish, OptionsChanged())


@asynccontextmanager
async def share_host(
    dependencies: ServerDependencies, *, session_view: SessionView | None = None
) -> AsyncIterator[SessionHost]:
    """Yield a lasting host. Its sessions stay open after the connections that opened them have ended. On exit from the
    `with` block, close all sessions and the store."""
    async with anyio.create_task_group() as tasks:
        host = SessionHost(dependencies, tasks, is_lasting=True, session_view=session_view)
        tasks.start_soon(host.idle.run)
        try:
            yield host
        finally:
            host.hurry()
            with anyio.move_on_after(_SHUT_DOWN_S, shield=True):
                await host.close_all()
            tasks.cancel_scope.cancel()
