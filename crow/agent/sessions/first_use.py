"""Runs the checks that each process makes once, and describes directories that are new to their user."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import anyio
import anyio.to_thread

from crow.agent import Client
from crow.agent.permissions.decisions import may_attach
from crow.agent.permissions.rules import PermissionRule
from crow.agent.sessions.session import Session
from crow.agent.workspace import WorkspaceContents, inspect_workspace, notice_of_recovery, notice_of_sandbox
from crow.domain.entries import CallRef
from crow.domain.errors import NoSuchSession, StoreError
from crow.domain.events import NoticeShown
from crow.domain.text import plural
from crow.domain.trace_context import use_trace_context
from crow.store import Store
from crow.tools import Workspace

logger = logging.getLogger(__name__)

_KNOWN_SESSIONS = 200
"""At most this many of crow's sessions in a directory are compared with the sessions that could be imported."""

_OFFER_AFTER_S = 0.5
"""Crow looks for sessions of other tools this many seconds after a session in a new directory was opened."""


class FirstUse:
    """Describes new directories, warns if commands are not confined, and tidies up after killed processes. Each process
    has one instance."""

    def __init__(self) -> None:
        self._known_directories: set[tuple[str | None, str]] = set()
        self._has_checked_sandbox = False
        self._recovering = anyio.Lock()
        self._has_recovered = False
        self._has_pruned = False

    async def inspect(
        self,
        store: Store,
        principal: str | None,
        cwd: str,
        directories: Sequence[str],
        *,
        open_workspace: Callable[[str, Sequence[str]], Workspace],
        rules: Callable[[], tuple[PermissionRule, ...]],
    ) -> WorkspaceContents | None:
        """Return a description of the directory `cwd`. Return None if the principal has already worked there,
        or if this process has already described the directory for this principal. The principal is the user of a
        server, or None without one. `open_workspace` takes a working directory and additional directories; `rules`
        returns the user's rules."""
        if (principal, cwd) in self._known_directories:
            return None
        self._known_directories.add((principal, cwd))
        paths = (cwd, await anyio.to_thread.run_sync(os.path.realpath, cwd))
        if await store.is_known_directory(paths):
            return None
        may_read = partial(may_attach, workspace=open_workspace(cwd, directories), rules=rules())
        return await anyio.to_thread.run_sync(inspect_workspace, cwd, may_read)

    async def check(self, session: Session, client: Client, store: Store | None) -> None:
        """Warn the user if commands are not confined, and remove stored old contents of files whose call or session was
        deleted. Only the first session of a process does this."""
        await self._warn_about_sandbox(session, client)
        await self._prune_changes(session, store)

    async def _warn_about_sandbox(self, session: Session, client: Client) -> None:
        """Warn the user if commands are not confined.

        If the editor shows no notices, the warning becomes part of the session's history instead, but only in a new
        session.
        """
        if self._has_checked_sandbox:
            return
        self._has_checked_sandbox = True
        is_new = session.branch.leaf is None
        notice = notice_of_sandbox(await session.workspace.sandbox_status())
        if notice is not None and client.takes_notices:
            await client.publish(notice)
        elif notice is not None and is_new:
            session.claims.remark_later(notice)

    async def recover_changes(self, session: Session) -> None:
        """If an earlier crow was killed while it moved the changes of commands into a workspace, complete these
        changes or take them back, and say so in the history of the session. Only the first session with layers in this
        process does this, before its first turn."""
        layers = session.workspace.layers
        async with self._recovering:
            if layers is None or self._has_recovered:
                return
            self._has_recovered = True
            try:
                for each in await layers.recover():
                    session.claims.remark_later(notice_of_recovery(each))
            except (OSError, ValueError) as error:
                logger.warning("The changes of a killed process could not be completed or taken back: %s", error)

    async def _prune_changes(self, session: Session, store: Store | None) -> None:
        layers = session.workspace.layers
        if layers is None or self._has_pruned:
            return
        self._has_pruned = True

        async def has_call(about: Mapping[str, str]) -> bool:
            """Return whether the call of a change set is still stored."""
            call = CallRef.parse(about.get("call", ""))
            return call is None or store is None or await store.entry(call.assistant) is not None

        async def has_session(session_id: str) -> bool:
            """Return whether a session is still stored."""
            try:
                return store is None or (await store.session(session_id)).id == session_id
            except NoSuchSession:
                return False

        await layers.prune(has_call)
        await layers.prune_children(has_session)


async def offer_import_soon(session: Session, open_store: Callable[[], Awaitable[Store]]) -> None:
    """Call `offer_import` after a moment, because the user waits for other work first. Raise no error."""
    use_trace_context({})
    await anyio.sleep(_OFFER_AFTER_S)
    try:
        await offer_import(session, await open_store())
    except StoreError as error:  # for example, crow is ending
        logger.warning("Sessions of other tools could not be looked up: %s", error)
    except Exception:
        logger.exception("Sessions of other tools could not be looked up")


async def offer_import(session: Session, store: Store) -> None:
    """If other tools have sessions in the session's directory, say so with the first prompt, with the command that
    imports them. A tool is left out if sessions of it were imported before."""
    from crow.store.importers import importable_at  # takes 25 ms, and only a new directory needs it

    cwd = session.branch.row.cwd
    paths = tuple(dict.fromkeys((cwd, await anyio.to_thread.run_sync(os.path.realpath, cwd))))
    known = [row.id for path in paths for row in (await store.sessions(cwd=path, limit=_KNOWN_SESSIONS)).rows]
    for one in await anyio.to_thread.run_sync(importable_at, paths, known):
        title = f"{plural(one.sessions, 'session')} of {one.tool} in this directory can be imported"
        words = f"To import all its sessions, run: crow sessions import --from {one.tool}"
        session.claims.notice_later(NoticeShown(severity="info", title=title, description=words))
