"""Opens sessions for one connection: new ones, forks, and those that are stored or already open."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
import anyio.abc

from crow.agent.history.interrupted import take_back_at_open
from crow.agent.sessions.first_use import offer_import_soon
from crow.agent.sessions.following import Follower, draft_of
from crow.agent.sessions.opening import new_session, store_fork, store_setup
from crow.agent.sessions.session import Session
from crow.agent.workspace import WorkspaceContents, notice_of_workspace
from crow.domain.errors import ArgumentError, CrowError
from crow.domain.events import CommandsChanged, NoticeShown, SessionListChanged
from crow.domain.text import title_line
from crow.frontend.clients import SessionClients
from crow.frontend.cursors import CURSOR_KEY
from crow.frontend.host import HostSession
from crow.frontend.options import mode_state
from crow.frontend.sessions import ConnectionSession, ConnectionSessions, iso_time
from crow.frontend.workspace import SharedWorkspace
from crow.protocol.params import OpenRequest
from crow.protocol.updates import turn_state
from crow.store import SessionChanges, Store, Tail, node_of
from crow.store.codec import changed_config
from crow.store.watching import Draft
from crow.tools.servers import merge_servers
from crow.version import __version__

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The data that the host needs to start a session."""

    tail: Tail
    """The session as it is stored, with its newest entries."""
    request: OpenRequest
    """The request that opens the session."""
    contents: WorkspaceContents | None = None
    """Describes the session's directory, if the user has not worked there before."""
    draft: Draft | None = None
    """The unfinished answer, if another process runs a turn of the session."""


class SessionOpener:
    """Opens sessions for one connection.

    A stored session is opened in one of three ways. If it is not open in this process, it is *started*. If it is open,
    this connection *joins* it, or it is *restarted* so that the request takes effect. All of that happens under the
    session's lock. A prompt needs no lock, so it may arrive meanwhile.
    """

    def __init__(self, sessions: ConnectionSessions) -> None:
        self._sessions = sessions
        self._host = sessions.host

    async def create(self, request: OpenRequest, *, alias: str | None = None) -> ConnectionSession:
        """Create and open a session. If a session already has the alias, open that session instead."""
        self._sessions.requester.check(request)
        store = await self._sessions.store.get()
        row = None if alias is None else await store.session_by_alias(alias)
        if row is None:
            created = self._with_programs(request)
            contents = await self._inspect_if_new(store, request)
            defaults = self._host.dependencies
            new = new_session(created, model=defaults.model, mode=defaults.mode, alias=alias)
            try:
                tail = Tail(row=await store.create_session(new), entries=())
                self._announce(SessionListChanged(session_id=new.id, change="created"))
                return self._start(_Start(tail=tail, request=replace(created, is_watcher=False), contents=contents))
            except ArgumentError:  # another process may have just created a session with this alias
                row = None if alias is None else await store.session_by_alias(alias)
                if row is None:
                    raise
        async with self.reopened(row.id, request) as opened:
            return opened

    async def fork(self, session_id: str, request: OpenRequest, *, entry: int | None) -> ConnectionSession:
        """Create and open a session that continues another session from `entry`. If `entry` is None, continue from
        the last entry."""
        request = self._with_programs(request)
        self._sessions.requester.check(request)
        store = await self._sessions.store.get()
        # Checked first, so that a user without access cannot find out whether the session is open or locked.
        await self._sessions.store.require(session_id, "read")
        self._host.refuse_if_running(session_id)
        contents = await self._inspect_if_new(store, request)
        async with self._host.lock(session_id):
            tail = await store_fork(store, session_id, request, entry=entry, models=self._host.models)
        self._announce(SessionListChanged(session_id=tail.row.id, change="created", title=tail.row.title))
        return self._start(_Start(tail=tail, request=replace(request, is_watcher=False), contents=contents))

    def _with_programs(self, request: OpenRequest) -> OpenRequest:
        """Return the request with the client's name and crow's version in its `config`, for the view `session_list`."""
        programs = {"client": self._sessions.caps.client or None, "crow": __version__}
        return replace(request, config={**request.config, **programs})

    @asynccontextmanager
    async def reopened(self, session_id: str, request: OpenRequest) -> AsyncIterator[ConnectionSession]:
        """Open a stored session for the block. If the block fails and this connection had not opened the session
        before, the connection leaves the session again. If the host is not lasting, it then closes the session."""
        self._sessions.requester.check(request)
        store, host = await self._sessions.store.get(), self._host
        await self._sessions.store.require(session_id, "read")
        async with host.lock(session_id):
            host.refuse_if_running(session_id)
            if request.missing:
                await self._check_missing(store, session_id, request)
            hosted = await self._caught_up(store, session_id)
            if hosted is None:  # otherwise, the session keeps the name of the client that opened it
                request = self._with_programs(request)
            access = await self._sessions.store.access(session_id)
            if access != "own":  # only the owner can move a session or give it servers
                row = await store.session(session_id)
                request = replace(request, cwd=row.cwd, directories=row.additional_directories, servers=())
            request = replace(request, is_watcher=request.is_watcher or access == "read")
            if not request.is_watcher:
                await self._apply(store, hosted, session_id, request)
            was_known = self._sessions.find(session_id) is not None
            opened = await self._open(store, session_id, hosted, request)
            try:
                yield opened
                if opened.hosted is hosted:
                    self._warn_about_cwd(opened, request)
                await self._warn_about_files(opened)
            except BaseException:
                if was_known:
                    opened.client.open()  # the client already knows the session and may get updates
                else:
                    self._sessions.detach(opened)
                    if not host.is_lasting:
                        host.tasks.start_soon(host.close, opened.hosted)
                raise

    async def _open(
        self, store: Store, session_id: str, hosted: HostSession | None, request: OpenRequest
    ) -> ConnectionSession:
        """Start the session, or join or restart `hosted`, which is the session if it is open in the host."""
        if hosted is not None and self._may_join(hosted, request):
            return self._join(hosted, request)
        start = await self._prepare(store, session_id, request)
        if hosted is not None and self._may_join(hosted, request):  # a prompt may have arrived meanwhile
            return self._join(hosted, request)
        # There is no await before this line, because the next request can be a prompt for this session.
        opened = self._start(start)
        if hosted is not None:
            with anyio.CancelScope(shield=True):
                await self._host.close(hosted)
        return opened

    def _join(self, hosted: HostSession, request: OpenRequest) -> ConnectionSession:
        """Add this connection to a session that is open in the host and stays as it is. If the connection has opened
        the session before, hold back its updates until `introduce`."""
        known = self._sessions.find(hosted.session.id)
        if known is not None and known.queue.may_write == request.is_watcher:
            self._sessions.detach(known)  # attach the client again, so that it gets or loses the open questions
            known = None
        opened = known if known is not None else self._sessions.attach(hosted, is_watcher=request.is_watcher)
        opened.client.hold()
        return opened

    async def _caught_up(self, store: Store, session_id: str) -> HostSession | None:
        """Return the session if it is open in this process, else None. Before that, store its entries that wait to be
        stored, and read what other processes have added. If the session is being closed, wait until it is closed.

        :raises NoSuchSession: the session was deleted, or this connection may not see it.
        """
        hosted = self._host.open.get(session_id)
        if hosted is not None and hosted.session.closing:
            await hosted.closed.wait()
            hosted = self._host.open.get(session_id)
        if hosted is not None:
            await hosted.session.branch.try_to_settle()
            if self._host.is_lasting:
                row = await store.session(session_id)
                if hosted.follower is not None:  # another process may have shown the client more than this one has
                    await hosted.follower.catch_up(row)
        return hosted

    def _may_join(self, hosted: HostSession, request: OpenRequest) -> bool:
        """Return whether to join an open session without restarting it. This is so if the session is busy, or has a
        result that could not be stored yet.

        On a lasting host, it is also so if this client only watches the session, if other clients use it, or if it
        already has everything that the request asks for. A host for an editor on stdio does not follow other processes,
        so it reads an idle session again from the store.
        """
        session = hosted.session
        is_kept = request.is_watcher or hosted.is_watched_without(self._sessions.origin) or hosted.satisfies(request)
        return (self._host.is_lasting and is_kept) or session.busy or not session.branch.is_settled

    async def _prepare(self, store: Store, session_id: str, request: OpenRequest) -> _Start:
        """Read everything that `_start` needs, and store what the request changes."""
        contents = None
        if request.is_watcher:
            tail = await (await self._host.store()).open_session(session_id)
            row = tail.row
            request = OpenRequest(cwd=row.cwd, directories=row.additional_directories, servers=(), is_watcher=True)
        else:
            contents = await self._inspect_if_new(store, request)
            model = self._host.dependencies.model
            tail = await store_setup(store, await store.open_session(session_id), request, model=model)
            node = self._host.adapters.node
            if not node or node_of(tail.row) == node:
                place = partial(self._host.dependencies.workspace, request.cwd, request.directories)
                tail = await take_back_at_open(self._host.adapters_for(tail.row).store, tail, place)
        draft = await draft_of(self._host.adapters_for(tail.row).store, tail) if self._host.is_lasting else None
        return _Start(tail=tail, request=request, contents=contents, draft=draft)

    async def _check_missing(self, store: Store, session_id: str, request: OpenRequest) -> None:
        """Check a request whose directory does not exist here. The request is valid only if the session's files are on
        another machine, and if the request does not change the session's directories. :raises ArgumentError: the
        request is not valid."""
        row = await store.session(session_id)
        is_elsewhere = node_of(row) not in ("", self._host.adapters.node) and self._host.adapters.node
        if not is_elsewhere or (row.cwd, row.additional_directories) != (request.cwd, request.directories):
            raise ArgumentError(request.missing)

    def _announce(self, change: SessionListChanged) -> None:
        self._host.announce(change, self._sessions.store.principal, besides=self._sessions.origin)

    async def _inspect_if_new(self, store: Store, request: OpenRequest) -> WorkspaceContents | None:
        """See `FirstUse.inspect`."""
        return await self._host.first_use.inspect(
            store,
            self._sessions.store.principal,
            request.cwd,
            request.directories,
            open_workspace=self._host.dependencies.workspace,
            rules=lambda: self._host.adapters.settings().rules,
        )

    async def _apply(self, store: Store, hosted: HostSession | None, session_id: str, request: OpenRequest) -> None:
        """Store the metadata in `request`. If the session is open, also store the configuration in `request`."""
        if request.metadata:
            if hosted is None:
                await store.merge_metadata(session_id, request.metadata)
            else:
                await hosted.session.branch.merge_metadata(request.metadata)
        if hosted is not None:
            known = hosted.session.branch.row.config
            if changed_config(known, request.config) != known:
                await hosted.session.branch.change(SessionChanges(config=request.config))

    def _start(self, start: _Start) -> ConnectionSession:
        """Start a session in the host and open it on this connection. The method contains no await, so no other
        request can run in between."""
        tail, request, contents = start.tail, start.request, start.contents
        host, row, dependencies = self._host, tail.row, self._host.dependencies
        disk = dependencies.workspace(row.cwd, row.additional_directories)
        servers = merge_servers(dependencies.servers, request.servers)
        workspace = SharedWorkspace(disk)
        clients = SessionClients(row.id, host.tasks, workspace, wait_s=dependencies.user_timeout_s, leaf=row.leaf)
        session = Session(host.adapters_for(row), clients, workspace, servers, tail)
        if host.is_lasting:
            clients.announce = partial(host.announce, principal=row.principal)
        follower = None
        if host.is_lasting and session.conversation.adapters.store.notifies:
            session.conversation.follower = follower = Follower(session, clients.feed)
            follower.begin(tail, start.draft)
        hosted = HostSession(session=session, clients=clients, request=request, follower=follower)
        opened = self._sessions.attach(hosted, contents=contents, is_watcher=request.is_watcher)
        workspace.use(opened.queue.editor)
        if contents is not None and contents.concerns_agents and not self._sessions.caps.notices:
            session.claims.remark_later(notice_of_workspace(contents))
        host.run(hosted)
        if contents is not None and self._sessions.store.principal is None and not self._sessions.caps.marked_remarks:
            host.tasks.start_soon(offer_import_soon, session, host.store)  # crow's terminal client has its own offer
        return opened

    def introduce(self, opened: ConnectionSession) -> dict[str, Any]:
        """Return the modes and config options of a session, for the response to the request that has just opened it.

        Right after that response has been sent, send the session's commands, usage and title, and then all other
        updates.
        """
        self._sessions.after_response(self._introduce, opened)
        session = opened.session
        meta: dict[str, Any] = {}
        if self._sessions.caps.cursors:
            meta[CURSOR_KEY] = str(opened.client.view.cursor)
        if self._host.is_lasting:
            meta["acp/turnState"] = turn_state(opened.hosted.clients.feed.last_turn)
        answer = {"modes": mode_state(session.branch.row.mode), "configOptions": self._sessions.options(session)}
        return answer | ({"_meta": meta} if meta else {})

    async def _introduce(self, opened: ConnectionSession) -> None:
        client, session = opened.client, opened.session
        await client.show(CommandsChanged())
        try:
            await client.show(await session.conversation.measured())
        except CrowError as error:
            logger.warning("The context could not be measured: %s", error)
        row = session.branch.row
        if row.title is not None:
            title = {"title": title_line(row.title), "updatedAt": iso_time(row.updated_ms)}
            await client.send({"sessionUpdate": "session_info_update", **title})
        await client.subagents.tell()
        if opened.contents is not None and opened.contents.concerns_agents and client.caps.notices:
            await client.show(notice_of_workspace(opened.contents))
        client.open()
        if self._host.is_warm:
            session.runner.warm()
            await self._host.check_first_session()

    def _warn_about_cwd(self, opened: ConnectionSession, request: OpenRequest) -> None:
        """Warn the user if the request asks for another directory but the session is busy and cannot move now. Send
        the warning after the response."""
        cwd = opened.session.branch.row.cwd
        if request.cwd != cwd and opened.session.busy:
            title = (
                f"A turn of this session is running in {cwd} and continues there. To work in {request.cwd}, load the "
                "session again after the turn."
            )
            notice = NoticeShown(severity="warning", title=title)
            self._sessions.after_response(opened.client.show, notice)

    async def _warn_about_files(self, opened: ConnectionSession) -> None:
        """Warn the user if the session's files are on another machine and the session can only be read here. Send the
        warning after the response."""
        problem = await opened.session.conversation.files_elsewhere()
        if problem is not None:
            notice = NoticeShown(severity="warning", title=str(problem))
            self._sessions.after_response(opened.client.show, notice)
