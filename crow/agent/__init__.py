"""What an agent does, in terms of protocols only: sessions, turns, compaction, the system prompt, permissions."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from crow.domain.elicitation import Elicitation, ElicitationAnswer, ElicitationKind
    from crow.domain.entries import CallRef
    from crow.domain.events import Event
    from crow.tools import Offer

__all__ = ["Client", "PermissionQuestion", "new_message_id", "new_session_id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionQuestion:
    """May this announced call run? `always` says in words what an "always" answer would cover; empty: none is offered,
    the question is about this once."""

    call: CallRef
    name: str
    arguments: str
    offer: Offer
    always: str


class Client(Protocol):
    """The editor, as one session sees it."""

    async def publish(self, event: Event) -> None:
        """Tell the editor; returns when it was written. A vanished editor is no error here."""
        ...

    async def ask(
        self, question: PermissionQuestion
    ) -> Literal["allow_once", "allow_always", "reject_once", "reject_always", "cancelled", "cannot_ask", "unanswered"]:
        """Ask the user. An editor that answers nonsense means `reject_once`, one that fails `cannot_ask`; `unanswered`:
        nobody answered in all the time there is for it."""
        ...

    @property
    def takes_notices(self) -> bool:
        """Whether a `NoticeShown` is shown as what it is; else what the user should know is better part of the
        history."""
        ...

    @property
    def elicits(self) -> frozenset[ElicitationKind]:
        """The kinds of questions that `elicit` can put to the user."""
        ...

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """Put a question to the user and wait for them, however long. A kind that the editor does not take, an editor
        that fails, or nonsense means `cancel`."""
        ...

    async def elicited(self, question_id: str) -> None:
        """Tell the editor that what a `UrlQuestion` led to is done."""
        ...


def new_session_id() -> str:
    """A random id, the client's name for a session for ever."""
    return f"crow-{secrets.token_hex(12)}"


def new_message_id() -> str:
    """A random id for a message, the client's name for it live and in replay."""
    return f"msg_{secrets.token_hex(12)}"
