"""What an agent does, in terms of protocols only: sessions, turns, compaction, the system prompt, permissions."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from crow.agent.compaction.budget import CompactionPolicy
    from crow.agent.compaction.hooks import Hooks
    from crow.agent.permissions import Rule
    from crow.agent.runner import WaitableToolbox
    from crow.agent.templates import Template
    from crow.domain.entries import CallRef
    from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind, Event
    from crow.llm import Model, ModelInfo
    from crow.store import Store
    from crow.tools import McpServer, PlannedCall, Ports, Workspace

__all__ = [
    "Adapters",
    "Client",
    "OpenToolbox",
    "PermissionQuestion",
    "SessionSettings",
    "new_message_id",
    "new_session_id",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionQuestion:
    """May this announced call run? `always` says in words what an "always" answer would cover; empty: none is offered,
    the question is about this once."""

    call: CallRef
    name: str
    arguments: str
    offer: PlannedCall
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


# FROM agent.adapters: What a session is made of: the adapters that it is given, as protocols, and what the
# configuration says of it.


class OpenToolbox(Protocol):
    """Opens a session's tools; entered and left in the session's task. `on_change` is told when a server became ready,
    failed, or changed what it offers."""

    def __call__(
        self,
        workspace: Workspace,
        ports: Ports,
        servers: Sequence[McpServer],
        *,
        on_change: Callable[[], Awaitable[None]],
    ) -> AbstractAsyncContextManager[WaitableToolbox]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What the configuration says about sessions."""

    steps_per_turn: int
    compaction: CompactionPolicy
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What a session is made of. `load` imports the heavy packages, off the event loop; `model` gives the model of a
    name, or raises AuthError or ConfigError; `info` says what is known of it without loading anything. `settings` and
    `default_model` (empty if none is set) are asked anew for each turn, as the user may change them meanwhile; so are
    `models`, the names offered."""

    store: Store
    load: Callable[[], Awaitable[None]]
    model: Callable[[str], Awaitable[Model]]
    info: Callable[[str], ModelInfo]
    open_toolbox: OpenToolbox
    settings: Callable[[], SessionSettings]
    default_model: Callable[[], str] = str
    models: Sequence[str] = ()
    templates: Callable[[], Sequence[Template]] = tuple
    hooks: Callable[[], Hooks] | None = None
