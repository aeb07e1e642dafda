"""The sessions that one connection has opened."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
import anyio.abc

from crow.agent.sessions.session import Session
from crow.agent.workspace import WorkspaceContents
from crow.domain.errors import ArgumentError, NoSuchSession
from crow.frontend.client import SessionClient
from crow.frontend.host import HostSession, SessionHost
from crow.frontend.options import config_options, session_commands
from crow.frontend.questions import Dialogs
from crow.frontend.queue import ClientQueue, Origin
from crow.frontend.requester import ConnectionStore, Requester
from crow.frontend.workspace import ClientEditor, EditorRequests, EditorTerminals, SharedWorkspace
from crow.protocol import ClientConnection, Outlet
from crow.protocol.params import ClientCapabilities
from crow.tools import Workspace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSession:
    """A session that a connection has opened."""

    hosted: HostSession
    """The session and its clients, as all connections share them."""
    queue: ClientQueue
    """The queue of updates for this connection's client."""
    contents: WorkspaceContents | None = None
    """Describes the session's directory, if the user has not worked there before."""

    @property
    def session(self) -> Session:
        """The session."""
        return self.hosted.session

    @property
    def client(self) -> SessionClient:
        """The client that sends the session's updates over this connection."""
        return self.queue.client

    async def flushed(self) -> None:
        """Wait until all updates that were published before this call have been sent to the client."""
        await self.queue.flushed()

    def note_sent(self, message_id: str) -> None:
        """Remember that this client sent the prompt with this id."""
        self.hosted.clients.note_sender(message_id, self.queue)

    def has_sent(self, message_id: str) -> bool:
        """Whether crow remembers that the client sent the prompt with this id. Crow forgets old prompts."""
        return self.hosted.clients.senders.has_sent(self.queue.origin, message_id)


class ConnectionSessions:
    """The sessions that one connection has opened. The host runs them.

    Other connections may have opened the same sessions, and on a lasting host, a session may stay open after all its
    connections have ended.
    """

    def __init__(
        self,
        host: SessionHost,
        connection: ClientConnection,
        tasks: anyio.abc.TaskGroup,
        requester: Requester | None = None,
    ) -> None:
        self.caps = ClientCapabilities()
        """The client's capabilities, set at `initialize`."""
        self.host = host
        self._connection = connection
        self._tasks = tasks
        self.requester = requester or Requester()
        self.store = ConnectionStore(self.requester, host.store)
        self.translate: Callable[[Outlet, Session], Outlet] | None = None
        """Wraps the connection for one session, to translate the session's messages. None in protocol version 1."""
        self._opened: dict[str, ConnectionSession] = {}

    def use_capabilities(self, caps: ClientCapabilities) -> None:
        """Set the client's capabilities. If the host is not lasting, the client gets no cursors."""
        self.caps = replace(caps, cursors=caps.cursors and self.host.is_lasting)

    @property
    def origin(self) -> Origin:
        """The identity of the client of this connection."""
        return self.requester.connection_id or self._connection

    def opened(self, session_id: object) -> ConnectionSession:
        """Return the session with this id.

        :raises NoSuchSession: this connection has not opened the session, or the session is being closed.
        """
        opened = self.find(session_id)
        if opened is None or opened.session.closing:
            raise NoSuchSession(str(session_id))
        return opened

    def find(self, session_id: object) -> ConnectionSession | None:
        """Return the session with this id if this connection has opened it and is still attached to it, or None. The
        session may be closing."""
        opened = self._opened.get(session_id) if isinstance(session_id, str) else None
        return None if opened is None or opened.queue.is_detached else opened

    def cancel(self, session_id: object) -> None:
        """Cancel the turn of an open session, or the work of a subagent of an open session. Do nothing to
        a session that this connection only watches.

        :raises NoSuchSession: the id belongs neither to a session that this connection has opened nor to a running
        subagent of such a session.
        """
        for opened in self._opened.values():
            if (
                isinstance(session_id, str)
                and opened.queue.may_write
                and opened.session.runner.cancel_subagent(session_id)
            ):
                return
        if (opened := self.opened(session_id)).queue.may_write:
            opened.session.cancel()
            if opened.session.runs_elsewhere:
                self.host.tasks.start_soon(opened.session.conversation.cancel_elsewhere)

    def refuse_watcher(self, session_id: object) -> None:
        """Check that this connection may change the session. :raises ArgumentError: the connection only watches the
        session."""
        if not self.opened(session_id).queue.may_write:
            raise ArgumentError(
                f"This client only watches session {session_id}. To send prompts, load the session without "
                "_meta.crow.watch."
            )

    async def check_again(self) -> None:
        """Check this connection's access to each open session again. Leave a session that the connection may no
        longer see. If the connection may now only read a session, it only watches the session from now on."""
        for opened in tuple(self._opened.values()):
            access = await self.store.access(opened.session.id)
            if access is None:
                self.detach(opened)
            elif access == "read":
                opened.queue.may_write = False

    async def close(self, session_id: str) -> None:
        """Cancel the turn of a session and close the session. If other clients use the session too, or if this
        connection only watches it, only leave the session.

        :raises NoSuchSession: this connection has not opened the session.
        """
        # Checked first, so that a user without access cannot find out whether the session is locked.
        await self.store.require(session_id, "read")
        async with self.host.lock(session_id):
            opened = self.opened(session_id)
            if opened.hosted.is_watched_without(self.origin) or not opened.queue.may_write:
                self.detach(opened)
            else:
                self._opened.pop(session_id, None)
                await self.host.close(opened.hosted)

    def forget(self, session_id: str) -> None:
        """Forget a session that is being closed for all connections."""
        self._opened.pop(session_id, None)

    def after_response(self, action: Callable[..., Coroutine[Any, Any, object]], *args: object) -> None:
        """Run `action` in a task right after the response to the current request."""
        self._connection.after_response(lambda: self._tasks.start_soon(action, *args))

    def detach(self, opened: ConnectionSession) -> None:
        """Leave a session, which stays open."""
        if self._opened.get(opened.session.id) is opened:
            del self._opened[opened.session.id]
        opened.hosted.clients.detach(opened.queue)
        self.host.close_when_idle(opened.hosted)

    def detach_all(self) -> None:
        """Leave all sessions, because the connection has ended."""
        for opened in tuple(self._opened.values()):
            self.detach(opened)

    def options(self, session: Session) -> list[dict[str, Any]]:
        """Return all config options of a session."""
        row, host, levels = session.branch.row, self.host, session.conversation.thought_levels
        model, booleans = row.model or host.dependencies.model, self.caps.boolean_options
        config = {"auto_compact": host.dependencies.auto_compact, **row.config}
        return config_options(
            mode=row.mode, model=model, models=host.models, config=config, booleans=booleans, levels=levels
        )

    def attach(
        self, hosted: HostSession, *, contents: WorkspaceContents | None = None, is_watcher: bool = False
    ) -> ConnectionSession:
        """Add this connection's client to a session. Updates are held back until `SessionOpener.introduce` is
        called."""
        session = hosted.session
        client = self._client(hosted)
        queue = hosted.clients.attach(
            client,
            origin=self.origin,
            may_write=not is_watcher,
            is_patient=self._connection.is_patient,
            drop=self._drop,
        )
        if self.requester.view is not None:
            queue.check = partial(self.store.require, session.id)
        # The editor of a remote user has other files, so only the editor of a local user serves files.
        if self.requester.may_configure and isinstance(session.workspace, SharedWorkspace):
            queue.editor = self._editor(session.id, session.workspace.disk)
        opened = ConnectionSession(hosted=hosted, contents=contents, queue=queue)
        self._opened[session.id] = opened
        return opened

    def _editor(self, session_id: str, disk: Workspace) -> ClientEditor | None:
        """Return this connection's editor for a session, or None if it serves neither files nor terminals."""
        dependencies, caps = self.host.dependencies, self.caps
        in_terminals = dependencies.editor_terminals and caps.terminals
        if not (caps.reads_files or caps.writes_files or in_terminals):
            return None
        requests = EditorRequests(session_id, self._connection.request, answer_s=dependencies.editor_timeout_s)
        terminals = EditorTerminals(requests, dependencies.hidden_variables()) if in_terminals else None
        return ClientEditor(disk, requests, reads=caps.reads_files, writes=caps.writes_files, terminals=terminals)

    def _client(self, hosted: HostSession) -> SessionClient:
        session, dependencies = hosted.session, self.host.dependencies
        return SessionClient(
            session.id,
            self._connection if self.translate is None else self.translate(self._connection, session),
            self.caps,
            cwd=session.branch.row.cwd,
            feed=hosted.clients.feed,
            options=lambda: self.options(session),
            commands=lambda: session_commands(session),
            dialogs=Dialogs(answer_s=dependencies.user_timeout_s, has_network=dependencies.has_network),
        )

    def _drop(self, reason: str) -> None:
        logger.warning("A client is disconnected: %s", reason)
        self._connection.stop(reason)


def iso_time(ms: int) -> str:
    """Return a Unix time in milliseconds as text in ISO 8601, as the protocol requires."""
    time = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
