"""Opens, changes and closes sessions for one connection, and remembers which sessions the connection has opened."""

from __future__ import annotations

import datetime
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import anyio
import anyio.abc

from crow.agent import new_session_id
from crow.agent.history.options import option_changes, options_at, usable_options
from crow.agent.permissions.rules import bind_rules
from crow.agent.sessions.session import Session
from crow.agent.subagents.kinds import changes_of_own
from crow.agent.workspace import WorkspaceContents, notice_of_workspace
from crow.domain.entries import NewEntry, Note
from crow.domain.errors import ArgumentError, CrowError, LeafMoved, NoSuchSession, SessionBusy, StoreUnavailable
from crow.domain.events import NoticeShown, TitleChanged
from crow.domain.text import title_line
from crow.frontend.client import ClientConnection, Outlet, SessionClient
from crow.frontend.clients import ClientQueue, Origin, SessionClients
from crow.frontend.cursors import CURSOR_KEY
from crow.frontend.following import HostedFollower, draft_of
from crow.frontend.host import HostSession, SessionHost
from crow.frontend.options import config_options, mode_state
from crow.frontend.params import ClientCapabilities, OpenRequest
from crow.frontend.questions import Dialogs
from crow.frontend.requester import GuardedStore, Requester
from crow.frontend.updates import usage_update
from crow.frontend.workspace import EditorRequests, EditorWorkspace, SharedWorkspace
from crow.store import Access, NewSession, SessionChanges, Store, Tail, node_of
from crow.store.codec import changed_config, merged_metadata
from crow.store.watching import Draft
from crow.tools import Workspace
from crow.tools.servers import merge_servers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSession:
    """A session that a connection has opened."""

    session: Session
    """The session."""
    hosted: HostSession
    """What all its clients share."""
    attachment: ClientQueue
    """The queue of updates for this connection's client."""
    contents: WorkspaceContents | None = None
    """Describes the session's directory, if the user has not worked there before."""

    @property
    def client(self) -> SessionClient:
        """The client that sends the session's updates over this connection."""
        return self.attachment.client

    async def flushed(self) -> None:
        """Wait until all updates that were published before this call have been sent to the client."""
        await self.attachment.flushed()

    def note_sent(self, message_id: str) -> None:
        """Remember that this client sent the prompt with this id."""
        self.hosted.clients.note_sender(message_id, self.attachment)

    def has_sent(self, message_id: str) -> bool:
        """Whether crow remembers that the client sent the prompt with this id. Crow forgets old prompts."""
        return self.hosted.clients.has_sent(self.attachment.origin, message_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the host needs to start a session."""

    tail: Tail
    """The session as it is stored, with its newest entries."""
    request: OpenRequest
    """The request that opens the session."""
    contents: WorkspaceContents | None = None
    """Describes the session's directory, if the user has not worked there before."""
    draft: Draft | None = None
    """The unfinished answer, if another process runs a turn of the session."""


class ClientSessions:
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
        self.is_used = False
        """Whether a request has needed the store yet."""
        self.host = host
        self._connection = connection
        self._tasks = tasks
        self.requester = requester or Requester()
        self.translate: Callable[[Outlet, Session], Outlet] | None = None
        """Puts a translation before the connection. None if the client uses version 1 of the protocol."""
        self._view: GuardedStore | None = None
        self._opened: dict[str, ClientSession] = {}

    def use_capabilities(self, caps: ClientCapabilities) -> None:
        """Set the client's capabilities. If the host is not lasting, the client gets no cursors."""
        self.caps = replace(caps, cursors=caps.cursors and self.host.is_lasting)

    @property
    def origin(self) -> Origin:
        """The identity of the client of this connection."""
        return self.requester.connection_id or self._connection

    async def store(self) -> Store:
        """Return the store, limited to the sessions that this connection may see.

        :raises StoreError: the store cannot be used.
        """
        self.is_used = True
        guarded = await self._guarded()
        return await self.host.store() if guarded is None else guarded

    async def _guarded(self) -> GuardedStore | None:
        """Return the store of this connection's principal, or None if the connection may see everything."""
        if self._view is None and self.requester.view is not None:
            self._view = self.requester.view(await self.host.store())
        return self._view

    async def require(self, session_id: object, access: Access) -> None:
        """Check that this connection has at least the access `access` to a session.

        :raises NoSuchSession: the session is unknown, or the connection may not see it.
        :raises ArgumentError: the connection has less access.
        """
        guarded = await self._guarded()
        if guarded is not None and isinstance(session_id, str):
            await guarded.require(session_id, access)

    def opened(self, session_id: object) -> ClientSession:
        """Return the session with this id.

        :raises NoSuchSession: this connection has not opened the session, or the session is being closed.
        """
        opened = self.find(session_id)
        if opened is None or opened.attachment.is_detached or opened.session.closing:
            raise NoSuchSession(str(session_id))
        return opened

    def find(self, session_id: object) -> ClientSession | None:
        """Return the session with this id if this connection has opened it, or None. The session may be closing."""
        return self._opened.get(session_id) if isinstance(session_id, str) else None

    def cancel(self, session_id: object) -> None:
        """Cancel the turn of an open session, or the work of a subagent of an open session. Do nothing to
        a session that this connection only watches.

        :raises NoSuchSession: the id belongs neither to a session that this connection has opened nor to a running
        subagent of such a session.
        """
        for opened in self._opened.values():
            if isinstance(session_id, str) and self._may_write(opened) and opened.session.cancel_subagent(session_id):
                return
        if self._may_write(opened := self.opened(session_id)):
            opened.session.cancel()
            if opened.session.runs_elsewhere:
                self.host.tasks.start_soon(opened.session.conversation.cancel_elsewhere)

    def refuse_watcher(self, session_id: object) -> None:
        """Check that this connection may change the session. :raises ArgumentError: the connection only watches the
        session."""
        if not self._may_write(self.opened(session_id)):
            raise ArgumentError(
                f"This client only watches session {session_id}. To send prompts, load the session without "
                "_meta.crow.watch."
            )

    def _may_write(self, opened: ClientSession) -> bool:
        return opened.attachment.may_write

    @asynccontextmanager
    async def locked(self, session_id: str) -> AsyncIterator[ClientSession]:
        """Yield the open session with this id, and keep it open during the block.

        :raises NoSuchSession: see `opened`.
        """
        await self.require(session_id, "write")
        async with self.host.lock(session_id):
            self.refuse_watcher(session_id)
            yield self.opened(session_id)

    async def create(self, request: OpenRequest, *, alias: str | None = None) -> ClientSession:
        """Create and opens a session. If a session already has the alias, opens that session instead."""
        self.requester.check(request)
        store = await self.store()
        row = None if alias is None else await store.session_by_alias(alias)
        if row is None:
            contents = await self._inspect_if_new(store, request)
            new = NewSession(
                id=new_session_id(),
                cwd=request.cwd,
                model=request.model or self.host.dependencies.model,
                mode=self.host.dependencies.mode,
                additional_directories=request.directories,
                alias=alias,
                config=changed_config({}, request.config),
                metadata=merged_metadata({}, request.metadata),
            )
            try:
                tail = Tail(row=await store.create_session(new), entries=())
                return self._start(Start(tail=tail, request=request, contents=contents))
            except ArgumentError:  # another process may have just created a session with this alias
                row = None if alias is None else await store.session_by_alias(alias)
                if row is None:
                    raise
        async with self.reopened(row.id, request) as opened:
            return opened

    async def fork(self, session_id: str, request: OpenRequest, *, entry: int | None) -> ClientSession:
        """Create and opens a session that continues another session from `entry`. If `entry` is None, continues from
        the last entry."""
        self.requester.check(request)
        store = await self.store()
        await self.require(session_id, "read")  # others must not notice whether the session is open or locked
        self.host.refuse_if_running(session_id)
        contents = await self._inspect_if_new(store, request)
        async with self.host.lock(session_id):
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
                options = usable_options(await options_at(store, original, original.leaf, entry), self.host.models)
                if options:
                    row = await store.update_session(row.id, option_changes(options))
            config = {**changes_of_own(row.config), **request.config}
            if changed_config(row.config, config) != row.config:
                await store.update_session(row.id, SessionChanges(config=config))
        return self._start(Start(tail=await store.open_session(row.id), request=request, contents=contents))

    @asynccontextmanager
    async def reopened(self, session_id: str, request: OpenRequest) -> AsyncIterator[ClientSession]:
        """Open a stored session for the block. If the block fails and the session was not open before, the session is
        closed again.

        A session that is open in this process is joined if `_may_join` says so. Otherwise it is closed and started
        again, so that the request takes effect.
        """
        self.requester.check(request)
        store, host = await self.store(), self.host
        await self.require(session_id, "read")
        async with host.lock(session_id):
            host.refuse_if_running(session_id)
            if request.missing:
                await self._check_missing(store, session_id, request)
            hosted = await self._caught_up(store, session_id)
            access = await self._access(session_id)
            if access != "own":  # only the owner can move a session or give it servers
                row = await store.session(session_id)
                request = replace(request, cwd=row.cwd, directories=row.additional_directories, servers=())
            is_watcher = request.is_watcher or access == "read"
            if not is_watcher:
                await self._apply(store, hosted, session_id, request)
            start: Start | None = None
            if hosted is None or not self._may_join(hosted, request, is_watcher=is_watcher):
                start = await self._prepare(store, session_id, request, is_watcher=is_watcher)
            # A prompt may have arrived during the awaits above.
            if hosted is not None and (start is None or self._may_join(hosted, request, is_watcher=is_watcher)):
                outcome = self._joined(hosted, request, is_watcher=is_watcher)
            else:
                assert start is not None, "a session that is not joined is started"
                outcome = self._started(start, hosted, is_watcher=is_watcher)
            async with outcome as opened:
                yield opened
                await self._warn_about_files(opened)

    async def _caught_up(self, store: Store, session_id: str) -> HostSession | None:
        """Return the session if it is open in this process, with everything that can be stored and read now. Wait for
        a session that is being closed.

        :raises NoSuchSession: the session was deleted, or this connection may not see it.
        """
        hosted = self.host.open.get(session_id)
        if hosted is not None and hosted.session.closing:
            await hosted.closed.wait()
            hosted = self.host.open.get(session_id)
        if hosted is not None:
            await hosted.session.settle()
            if self.host.is_lasting:
                row = await store.session(session_id)
                if hosted.follower is not None:  # the client may have been sent more by another process
                    await hosted.follower.catch_up(row)
        return hosted

    def _may_join(self, hosted: HostSession, request: OpenRequest, *, is_watcher: bool) -> bool:
        """Return whether an open session stays as it is: it is busy, or it has a result that could not be stored yet.

        On a lasting host, it also stays if this client only watches it, if other clients use it, or if it already has
        everything that the request asks for. For an editor on stdio, nothing follows other processes, so an idle
        session is read again from the store.
        """
        session = hosted.session
        is_kept = is_watcher or hosted.is_watched_without(self.origin) or hosted.satisfies(request)
        return (self.host.is_lasting and is_kept) or session.busy or session.owes

    async def _prepare(self, store: Store, session_id: str, request: OpenRequest, *, is_watcher: bool) -> Start:
        """Read everything that `_started` needs, and stores what the request changes."""
        contents = None
        if is_watcher:
            tail = await (await self.host.store()).open_session(session_id)
            request = OpenRequest(cwd=tail.row.cwd, directories=tail.row.additional_directories, servers=())
        else:
            contents = await self._inspect_if_new(store, request)
            tail = await self._update(store, await store.open_session(session_id), request)
        draft = await draft_of(self.host.adapters_for(tail.row).store, tail) if self.host.is_lasting else None
        return Start(tail=tail, request=request, contents=contents, draft=draft)

    @asynccontextmanager
    async def _started(
        self, start: Start, before: HostSession | None, *, is_watcher: bool
    ) -> AsyncIterator[ClientSession]:
        """Start a session in the host, in place of `before`. If the block fails and this connection has not opened the
        session before, closes the session again."""
        session_id = start.tail.row.id
        known = self._opened.get(session_id)
        # Start the session before the next await: the next request may already be a prompt for this session.
        opened = self._start(start, is_watcher=is_watcher)
        if before is not None:
            with anyio.CancelScope(shield=True):
                await self.host.close(before)
        try:
            yield opened
        except BaseException:
            if known is not None:
                opened.client.open()  # the client already knows the session and may get updates
            else:
                self.detach(opened)
                if not self.host.is_lasting:
                    self.host.tasks.start_soon(self.host.close, opened.hosted)
            raise

    async def _check_missing(self, store: Store, session_id: str, request: OpenRequest) -> None:
        """Check a request whose directory does not exist here. The request is valid only if the session's files are on
        another machine, and if the request does not change the session's directories. :raises ArgumentError: the
        request is not valid."""
        row = await store.session(session_id)
        is_elsewhere = node_of(row) not in ("", self.host.adapters.node) and self.host.adapters.node
        if not is_elsewhere or (row.cwd, row.additional_directories) != (request.cwd, request.directories):
            raise ArgumentError(request.missing)

    @asynccontextmanager
    async def _joined(
        self, hosted: HostSession, request: OpenRequest, *, is_watcher: bool
    ) -> AsyncIterator[ClientSession]:
        """Add this connection to a session that is already open in the host. If the block fails and this connection
        has not opened the session before, removes it again."""
        known = self._opened.get(hosted.session.id)
        opened = known if known is not None else self._attach(hosted, is_watcher=is_watcher)
        opened.client.hold()
        try:
            yield opened
            self._warn_about_cwd(opened, request)
        except BaseException:
            if known is None:
                self.detach(opened)
            else:
                known.client.open()
            raise

    async def _access(self, session_id: str) -> Access | None:
        """Return this connection's access to a session, or None if the connection may not even see the session."""
        guarded = await self._guarded()
        return "own" if guarded is None else await guarded.access(session_id)

    async def _inspect_if_new(self, store: Store, request: OpenRequest) -> WorkspaceContents | None:
        """See `SessionHost.inspect_if_new`."""
        principal = None if self._view is None else self._view.principal
        return await self.host.inspect_if_new(store, request, principal=principal)

    async def check_again(self) -> None:
        """Check this connection's access to each open session again. Leave a session that the connection may no
        longer see. If the connection may now only read a session, it only watches the session from now on."""
        for opened in tuple(self._opened.values()):
            access = await self._access(opened.session.id)
            if access is None:
                self.detach(opened)
            elif access == "read":
                opened.attachment.may_write = False

    async def _apply(self, store: Store, hosted: HostSession | None, session_id: str, request: OpenRequest) -> None:
        """Store the metadata in `request`. If the session is open, also stores the configuration in `request`."""
        if request.metadata:
            if hosted is None:
                await store.merge_metadata(session_id, request.metadata)
            else:
                await hosted.session.branch.merge_metadata(request.metadata)
        if hosted is not None:
            known = hosted.session.branch.row.config
            if changed_config(known, request.config) != known:
                await hosted.session.branch.change(SessionChanges(config=request.config))

    async def close(self, session_id: str) -> None:
        """Cancel the turn of a session and closes the session. If other clients use the session too, or if this
        connection only watches it, only leaves the session.

        :raises NoSuchSession: this connection has not opened the session.
        """
        await self.require(session_id, "read")  # others must not notice whether the session is locked
        async with self.host.lock(session_id):
            opened = self.opened(session_id)
            if opened.hosted.is_watched_without(self.origin) or not self._may_write(opened):
                self.detach(opened)
            else:
                self._opened.pop(session_id, None)
                await self.host.close(opened.hosted)

    def detach(self, opened: ClientSession) -> None:
        """Leave a session, which stays open."""
        if self._opened.get(opened.session.id) is opened:
            del self._opened[opened.session.id]
        opened.hosted.clients.detach(opened.attachment)
        self.host.close_when_idle(opened.hosted)

    def detach_all(self) -> None:
        """Leave all sessions, because the connection has ended."""
        for opened in tuple(self._opened.values()):
            self.detach(opened)

    async def delete(self, session_id: str) -> None:
        """Delete a session. If it is open, closes it first. Do nothing if the session is unknown."""
        store = await self.store()
        with suppress(NoSuchSession):
            await self.require(session_id, "own")
            async with self.host.lock(session_id):
                self.host.refuse_if_running(session_id)
                await self._close_everywhere(session_id)
                await store.delete_session(session_id)

    async def archive(self, session_id: str) -> None:
        """Archive a session: closes it if it is open, and hide it from lists from now on.

        :raises NoSuchSession: the session does not exist.
        """
        store = await self.store()
        await self.require(session_id, "own")
        async with self.host.lock(session_id):
            self.host.refuse_if_running(session_id)
            row = await store.session(session_id)
            await self._close_everywhere(session_id)
            if not row.archived:
                await store.update_session(session_id, SessionChanges(archived=True))

    async def unarchive(self, session_id: str) -> None:
        """Show an archived session in lists again. :raises NoSuchSession: the session does not exist."""
        store = await self.store()
        await self.require(session_id, "own")
        async with self.host.lock(session_id):
            if (await store.session(session_id)).archived:
                await self.host.change(session_id, SessionChanges(archived=False))

    async def set_title(self, session_id: str, title: str) -> None:
        """Store a title that the user chose. Crow never replaces such a title with its own. :raises NoSuchSession:
        the session does not exist."""
        store = await self.store()
        await self.require(session_id, "write")
        if session_id in self._opened:
            self.refuse_watcher(session_id)
        async with self.host.lock(session_id):
            await store.session(session_id)
            await self.host.change(session_id, SessionChanges(title=title, title_by_user=True))
            if session_id in self.host.open:
                await self.host.open[session_id].session.branch.publish(TitleChanged(title=title))
        if session_id in self._opened:  # the client gets the update before the response
            await self._opened[session_id].flushed()

    async def status(self, session_id: str) -> Literal["open", "saved"]:
        """Return "open" if a session is open in this process, else "saved". :raises NoSuchSession: the session does
        not exist."""
        hosted = self.host.open.get(session_id)
        is_open = hosted is not None and not hosted.session.closing
        await (await self.store()).session(session_id)
        return "open" if is_open else "saved"

    async def _close_everywhere(self, session_id: str) -> None:
        """Close a session on all connections, if it is open."""
        hosted = self.host.open.get(session_id)
        if hosted is not None:
            self._opened.pop(session_id, None)
            await self.host.close(hosted)

    def introduce(self, opened: ClientSession) -> dict[str, Any]:
        """Return the modes and config options of a session, for the response to the request that has just opened it.

        Right after that response has been sent, sends the session's commands, usage and title, and then all other
        updates.
        """
        self._connection.after_response(lambda: self._tasks.start_soon(self._introduce, opened))
        session = opened.session
        meta: dict[str, Any] = {}
        if self.caps.cursors:
            meta[CURSOR_KEY] = str(opened.client.view.cursor)
        if self.host.is_lasting:
            meta["acp/turnState"] = opened.hosted.clients.last_turn
        answer = {"modes": mode_state(session.branch.row.mode), "configOptions": self.options(session)}
        return answer | ({"_meta": meta} if meta else {})

    def options(self, session: Session) -> list[dict[str, Any]]:
        """Return all config options of a session."""
        row, host, levels = session.branch.row, self.host, session.thought_levels
        model, booleans = row.model or host.dependencies.model, self.caps.boolean_options
        config = {"auto_compact": host.dependencies.auto_compact, **row.config}
        return config_options(
            mode=row.mode, model=model, models=host.models, config=config, booleans=booleans, levels=levels
        )

    def _start(self, start: Start, *, is_watcher: bool = False) -> ClientSession:
        """Start a session in the host and opens it on this connection. The method contains no await, so no other
        request can run in between."""
        tail, request, contents = start.tail, start.request, start.contents
        host, row, dependencies = self.host, tail.row, self.host.dependencies
        disk = dependencies.workspace(row.cwd, row.additional_directories)
        servers = merge_servers(dependencies.servers, request.servers)
        workspace = SharedWorkspace(disk)
        clients = SessionClients(row.id, host.tasks, workspace, wait_s=dependencies.user_timeout_s)
        session = Session(host.adapters_for(row), clients, workspace, servers, tail)
        session.listener = clients
        clients.follow(session)
        follower = None
        if host.is_lasting and session.conversation.adapters.store.notifies:
            session.conversation.follower = follower = HostedFollower(session, clients)
            follower.begin(tail, start.draft)
        hosted = HostSession(session=session, clients=clients, request=request, follower=follower)
        opened = self._attach(hosted, contents=contents, is_watcher=is_watcher)
        workspace.use(opened.attachment.editor)
        if contents is not None and contents.concerns_agents and not self.caps.notices:
            session.remark_later(notice_of_workspace(contents))
        host.run(hosted)
        return opened

    def _attach(
        self, hosted: HostSession, *, contents: WorkspaceContents | None = None, is_watcher: bool = False
    ) -> ClientSession:
        """Add this connection's client to a session. Updates are held back until `introduce` is called."""
        session = hosted.session
        client = self._client(hosted)
        attachment = hosted.clients.attach(
            client,
            origin=self.origin,
            may_write=not is_watcher,
            is_patient=self._connection.is_patient,
            drop=self._drop,
        )
        if self.requester.view is not None:
            attachment.check = partial(self.require, session.id)
        # The editor of a remote user has other files, so only the editor of a local user serves files.
        if self.requester.may_configure and isinstance(session.workspace, SharedWorkspace):
            attachment.editor = self._through_editor(session.id, session.workspace.disk)
        opened = ClientSession(session=session, hosted=hosted, contents=contents, attachment=attachment)
        self._opened[session.id] = opened
        return opened

    def _through_editor(self, session_id: str, disk: Workspace) -> EditorWorkspace | None:
        """Return a workspace in which this connection's editor serves files and terminals, and `disk` serves
        everything else.

        Return None if the editor serves neither files nor terminals.
        """
        dependencies, caps = self.host.dependencies, self.caps
        in_terminals = dependencies.editor_terminals and caps.terminals
        if not (caps.reads_files or caps.writes_files or in_terminals):
            return None
        editor = EditorRequests(session_id, self._connection.request, answer_s=dependencies.editor_timeout_s)
        return EditorWorkspace(disk, editor, caps, dependencies.hidden_variables() if in_terminals else None)

    def _client(self, hosted: HostSession) -> SessionClient:
        session, dependencies = hosted.session, self.host.dependencies
        return SessionClient(
            session.id,
            self._connection if self.translate is None else self.translate(self._connection, session),
            self.caps,
            cwd=session.branch.row.cwd,
            feed=hosted.clients.feed,
            options=lambda: self.options(session),
            commands=lambda: self.host.commands(session),
            dialogs=Dialogs(answer_s=dependencies.user_timeout_s, has_network=dependencies.has_network),
        )

    def _drop(self, reason: str) -> None:
        logger.warning("A client is disconnected: %s", reason)
        self._connection.stop(reason)

    async def _update(self, store: Store, tail: Tail, request: OpenRequest) -> Tail:
        """Store the directories, model and configuration of `request`, and return the changed session.

        A change of the model is also stored as an entry.

        If the database cannot be written, the new directories and the new model are not stored, but the returned
        session has them.

        :raises StoreUnavailable: the configuration cannot be stored.
        """
        row = tail.row
        config = {**({} if row.parent_id is None else changes_of_own(row.config)), **request.config}
        if changed_config(row.config, config) != row.config:
            row = await store.update_session(row.id, SessionChanges(config=config))
            tail = replace(tail, row=row)
        cwd, directories = request.cwd, request.directories
        model = request.model or row.model or self.host.dependencies.model
        if (row.cwd, row.additional_directories, row.model) == (cwd, directories, model):
            return tail
        rules = bind_rules(row.permissions, row.cwd) if cwd != row.cwd else row.permissions
        changes = SessionChanges(model=model)
        if (row.cwd, row.additional_directories) != (cwd, directories):
            changes |= SessionChanges(cwd=cwd, additional_directories=directories, permissions=rules)
        try:
            if row.model not in ("", model) and tail.entries:
                with suppress(LeafMoved, SessionBusy):
                    note = NewEntry(body=Note(about="model", value=model, previous=row.model))
                    turn = tail.entries[-1].turn
                    stored = await store.append(row.id, leaf=row.leaf, turn=turn, entries=[note], changes=changes)
                    return replace(tail, row=await store.session(row.id), entries=(*tail.entries, *stored))
            return replace(tail, row=await store.update_session(row.id, changes))
        except StoreUnavailable as error:
            logger.warning("The directory %s of session %s could not be stored: %s", cwd, row.id, error)
            row = replace(row, cwd=cwd, additional_directories=directories, model=model, permissions=rules)
            return replace(tail, row=row)

    def _warn_about_cwd(self, live: ClientSession, request: OpenRequest) -> None:
        """Warn the user if the request asks for another directory but the session is busy and cannot move now. Send
        the warning after the response."""
        cwd = live.session.branch.row.cwd
        if request.cwd != cwd and live.session.busy:
            title = (
                f"A turn of this session is running in {cwd} and continues there. To work in {request.cwd}, load the "
                "session again after the turn."
            )
            notice = NoticeShown(severity="warning", title=title)
            self._connection.after_response(lambda: self._tasks.start_soon(live.client.show, notice))

    async def _warn_about_files(self, opened: ClientSession) -> None:
        """Warn the user if the session's files are on another machine and the session can only be read here. Send the
        warning after the response."""
        problem = await opened.session.conversation.files_elsewhere()
        if problem is not None:
            notice = NoticeShown(severity="warning", title=str(problem))
            self._connection.after_response(lambda: self._tasks.start_soon(opened.client.show, notice))

    async def _introduce(self, opened: ClientSession) -> None:
        client, session = opened.client, opened.session
        commands = self.host.commands(session)
        await client.send({"sessionUpdate": "available_commands_update", "availableCommands": commands})
        try:
            await client.send(usage_update(await session.conversation.measured()))
        except CrowError as error:
            logger.warning("The context could not be measured: %s", error)
        row = session.branch.row
        if row.title is not None:
            title = {"title": title_line(row.title), "updatedAt": iso_time(row.updated_ms)}
            await client.send({"sessionUpdate": "session_info_update", **title})
        await client.tell_subagents()
        await client.join()
        if opened.contents is not None and opened.contents.concerns_agents and client.takes_notices:
            await client.show(notice_of_workspace(opened.contents))
        client.open()
        if self.host.is_warm:
            session.warm()
            await self.host.warn_about_sandbox()
            await self.host.recover_changes()


def iso_time(ms: int) -> str:
    """Return a time in milliseconds as the protocol writes times."""
    time = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
