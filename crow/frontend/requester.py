"""The user of a connection, and what this user may do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from crow.frontend.params import OpenRequest
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
    """Stays the same when the client connects again. It may be empty."""
    may_configure: bool = True
    """Whether the user may change settings of the whole process, such as endpoints."""
