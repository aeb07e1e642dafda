"""Changes stored sessions for one connection, whether they are open or not."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from crow.domain.errors import NoSuchSession
from crow.domain.events import TitleChanged
from crow.frontend.sessions import ClientSessions
from crow.store import SessionChanges


class StoredSessions:
    """The stored sessions that a connection may see."""

    def __init__(self, sessions: ClientSessions) -> None:
        self._sessions = sessions
        self._host = sessions.host

    async def delete(self, session_id: str) -> None:
        """Delete a session. If it is open, close it first. Do nothing if the session is unknown."""
        store = await self._sessions.store()
        with suppress(NoSuchSession):
            await self._sessions.require(session_id, "own")
            async with self._host.lock(session_id):
                self._host.refuse_if_running(session_id)
                await self._close_everywhere(session_id)
                await store.delete_session(session_id)

    async def archive(self, session_id: str) -> None:
        """Archive a session: close it if it is open, and hide it from lists from now on.

        :raises NoSuchSession: the session does not exist.
        """
        store = await self._sessions.store()
        await self._sessions.require(session_id, "own")
        async with self._host.lock(session_id):
            self._host.refuse_if_running(session_id)
            row = await store.session(session_id)
            await self._close_everywhere(session_id)
            if not row.archived:
                await store.update_session(session_id, SessionChanges(archived=True))

    async def unarchive(self, session_id: str) -> None:
        """Show an archived session in lists again. :raises NoSuchSession: the session does not exist."""
        store = await self._sessions.store()
        await self._sessions.require(session_id, "own")
        async with self._host.lock(session_id):
            if (await store.session(session_id)).archived:
                await self._host.change(session_id, SessionChanges(archived=False))

    async def set_title(self, session_id: str, title: str) -> None:
        """Store a title that the user chose. Crow never replaces such a title with its own. :raises NoSuchSession:
        the session does not exist."""
        store = await self._sessions.store()
        await self._sessions.require(session_id, "write")
        if self._sessions.find(session_id) is not None:
            self._sessions.refuse_watcher(session_id)
        async with self._host.lock(session_id):
            await store.session(session_id)
            await self._host.change(session_id, SessionChanges(title=title, title_by_user=True))
            if session_id in self._host.open:
                await self._host.open[session_id].session.branch.publish(TitleChanged(title=title))
        if (opened := self._sessions.find(session_id)) is not None:
            await opened.flushed()  # the client gets the update before the response

    async def status(self, session_id: str) -> Literal["open", "saved"]:
        """Return "open" if a session is open in this process, else "saved". :raises NoSuchSession: the session does
        not exist."""
        hosted = self._host.open.get(session_id)
        is_open = hosted is not None and not hosted.session.closing
        await (await self._sessions.store()).session(session_id)
        return "open" if is_open else "saved"

    async def _close_everywhere(self, session_id: str) -> None:
        """Close a session on all connections, if it is open."""
        hosted = self._host.open.get(session_id)
        if hosted is not None:
            self._sessions.forget(session_id)
            await self._host.close(hosted)
