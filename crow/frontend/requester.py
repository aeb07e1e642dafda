"""The user of a connection, and what this user may see and do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from crow.protocol.params import OpenRequest
from crow.store import Access, Store


class GuardedStore(Store, Protocol):
    """A store that shows one principal only the sessions that this principal may see."""

    principal: str | None

    async def access(self, session_id: str) -> Access | None:
        """Return the principal's access to a session, or None if the session is unknown or hidden."""

    async def require(self, session_id: str, need: Access) -> Access:
        """Return the principal's access to a session, which must be at least `need`.

        :raises NoSuchSession: the session is unknown or hidden.
        :raises ArgumentError: the principal has less access than `need`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Requester:
    """The user of a connection to a lasting host, with this user's rights."""

    view: Callable[[Store], GuardedStore] | None = None
    """Wraps the store, so that it shows only the sessions that this user may see. If it is None, the user may see and
    do everything."""
    check: Callable[[OpenRequest], None] = lambda _request: None
    """Raises an error if the user may not send the given request to open a session."""
    check_params: Callable[[str, Any, Store], Awaitable[None]] | None = None
    """Gets the method, the parameters and the store, and raises an error if the user may not send these parameters.
    Crow calls it before it uses any path in the parameters."""
    connection_id: str = ""
    """The id of the connection. It stays the same when the client connects again. It may be empty."""
    may_configure: bool = True
    """Whether the user may change settings of the whole process, such as endpoints."""


class ConnectionStore:
    """The store as the user of one connection sees it."""

    def __init__(self, requester: Requester, open_store: Callable[[], Awaitable[Store]]) -> None:
        self._requester = requester
        self._open = open_store
        self._guarded: GuardedStore | None = None
        self.is_used = False
        """Whether a request has needed the store yet."""

    async def get(self) -> Store:
        """Return the store, limited to the sessions that the user may see.

        :raises StoreError: the store cannot be used.
        """
        self.is_used = True
        guarded = await self._for_user()
        return await self._open() if guarded is None else guarded

    @property
    def principal(self) -> str | None:
        """Who the user is. None if the user may see everything, or has not used the store yet."""
        return None if self._guarded is None else self._guarded.principal

    async def require(self, session_id: object, access: Access) -> None:
        """Check that the user has at least the access `access` to a session.

        :raises NoSuchSession: the session is unknown, or the user may not see it.
        :raises ArgumentError: the user has less access.
        """
        guarded = await self._for_user()
        if guarded is not None and isinstance(session_id, str):
            await guarded.require(session_id, access)

    async def access(self, session_id: str) -> Access | None:
        """Return the user's access to a session, or None if the user may not even see the session."""
        guarded = await self._for_user()
        return "own" if guarded is None else await guarded.access(session_id)

    async def _for_user(self) -> GuardedStore | None:
        """Return the user's own view of the store, or None if the user may see everything."""
        if self._guarded is None and self._requester.view is not None:
            self._guarded = self._requester.view(await self._open())
        return self._guarded
