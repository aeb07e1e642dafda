"""The requests that change or look up stored sessions, whether these are open or not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from crow.domain.errors import NoSuchSession
from crow.domain.events import SessionChange, SessionListChanged, TitleChanged
from crow.domain.text import first_line
from crow.frontend.requests import Requests
from crow.frontend.sessions import ConnectionSessions
from crow.protocol import RequestParams
from crow.protocol.frames import text_in
from crow.protocol.params import new_title
from crow.store import SessionChanges, SessionRow

_LISTED_PROMPTS = 500
_SCANNED_SESSIONS = 1_000


class StoredSessions:
    """The stored sessions that a connection may see. A method with `params` carries out the request of its name."""

    def __init__(self, sessions: ConnectionSessions, requests: Requests) -> None:
        self._sessions = sessions
        self._requests = requests
        self._host = sessions.host

    async def delete(self, params: RequestParams) -> dict[str, Any]:
        """Delete a session. If it is open, close it first. Do nothing if the session is unknown."""
        session_id = params["sessionId"]
        self._requests.cancel_loading(session_id)
        store = await self._sessions.store.get()
        with suppress(NoSuchSession):
            await self._sessions.store.require(session_id, "own")
            async with self._host.lock(session_id):
                self._host.refuse_if_running(session_id)
                await self._close_everywhere(session_id)  # first, so that a later request finds no open session
                row = await store.session(session_id)
                await store.delete_session(session_id)
                self._announce(row, "deleted")
        self._host.idle.tidy_soon()
        return {}

    async def archive(self, params: RequestParams) -> dict[str, Any]:
        """Archive a session: close it if it is open, and hide it from lists from now on.

        :raises NoSuchSession: the session does not exist.
        """
        store, session_id = await self._sessions.store.get(), params["sessionId"]
        await self._sessions.store.require(session_id, "own")
        async with self._host.lock(session_id):
            self._host.refuse_if_running(session_id)
            await self._close_everywhere(session_id)  # first, so that a later request finds no open session
            row = await store.session(session_id)
            if not row.archived:
                await store.update_session(session_id, SessionChanges(archived=True))
                self._announce(row, "archived")
        return {}

    async def unarchive(self, params: RequestParams) -> dict[str, Any]:
        """Show an archived session in lists again. :raises NoSuchSession: the session does not exist."""
        store, session_id = await self._sessions.store.get(), params["sessionId"]
        await self._sessions.store.require(session_id, "own")
        async with self._host.lock(session_id):
            if (row := await store.session(session_id)).archived:
                await self._host.change(session_id, SessionChanges(archived=False))
                self._announce(row, "unarchived")
        return {}

    async def set_title(self, params: RequestParams) -> dict[str, Any]:
        """Store a title that the user chose. Crow never replaces such a title with its own. :raises NoSuchSession:
        the session does not exist."""
        title, session_id = new_title(params["title"]), params["sessionId"]
        store = await self._sessions.store.get()
        await self._sessions.store.require(session_id, "write")
        if self._sessions.find(session_id) is not None:
            self._sessions.refuse_watcher(session_id)
        async with self._host.lock(session_id):
            row = await store.session(session_id)
            await self._host.change(session_id, SessionChanges(title=title, title_by_user=True))
            if session_id in self._host.open:
                await self._host.open[session_id].session.branch.publish(TitleChanged(title=title))
            else:
                self._announce(replace(row, title=title), "renamed")
        if (opened := self._sessions.find(session_id)) is not None:
            await opened.flushed()  # the client gets the update before the response
        return {"title": title}

    async def status(self, params: RequestParams) -> dict[str, Any]:
        """Return whether a session is open in this process, or only saved. :raises NoSuchSession: the session does not
        exist."""
        session_id = params["sessionId"]
        hosted = self._host.open.get(session_id)
        is_open = hosted is not None and not hosted.session.closing
        await (await self._sessions.store.get()).session(session_id)
        return {"status": "open" if is_open else "saved"}

    async def prompts(self, params: RequestParams) -> dict[str, Any]:
        """Return the newest prompts of the session's branch, oldest first, with the numbers that `/rewind` takes.

        :raises NoSuchSession: the session does not exist.
        """
        prompts = (await (await self._sessions.store.get()).outline(text_in(params, "sessionId"))).prompts
        numbered = list(enumerate((first_line(prompt.text) for prompt in prompts), 1))[-_LISTED_PROMPTS:]
        return {"prompts": [{"number": number, "text": text} for number, text in numbered]}

    async def named(self, name: str) -> Sequence[SessionRow]:
        """Return the sessions that `name` may mean: the session with this id, or else the session with this alias, or
        else all sessions whose id begins with `name` or whose title is `name`, most recently used first."""
        store = await self._sessions.store.get()
        with suppress(NoSuchSession):
            return [await store.session(name)]
        if (known := await store.session_by_alias(name)) is not None:
            return [known]
        found: list[SessionRow] = []
        cursor: str | None = None
        while True:
            page = await store.sessions(cursor=cursor, limit=_SCANNED_SESSIONS, archived=None)
            found += [row for row in page.rows if row.id.startswith(name) or row.title == name]
            if (cursor := page.cursor) is None:
                return found

    def _announce(self, row: SessionRow, change: SessionChange) -> None:
        event = SessionListChanged(session_id=row.id, change=change, title=row.title)
        self._host.announce(event, row.principal, besides=self._sessions.origin)

    async def _close_everywhere(self, session_id: str) -> None:
        """Close a session on all connections, if it is open."""
        hosted = self._host.open.get(session_id)
        if hosted is not None:
            self._sessions.forget(session_id)
            await self._host.close(hosted)
