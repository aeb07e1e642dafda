"""The agent: sessions, turns, compaction, the system message, permissions.

This file holds what a session needs from outside, as protocols. The adapters behind them come from `crow.app`.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from crow.agent.permissions import Rule
from crow.agent.templates import Template
from crow.domain.entries import CallRef, NewEntry, Remark
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind, Event
from crow.llm import Model, ModelInfo
from crow.store import Store
from crow.tools import McpServer, PlannedCall, Ports, ServerPrompts, Toolbox, Workspace

if TYPE_CHECKING:  # cycles: both use `Client`
    from crow.agent.compaction.budget import CompactionPolicy
    from crow.agent.compaction.hooks import Hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionQuestion:
    """May this announced call run? `always` says what an "always" answer would cover; empty: it is not offered."""

    call: CallRef
    name: str
    arguments: str
    offer: PlannedCall
    always: str


class Client(Protocol):
    """The editor, as one session sees it."""

    async def publish(self, event: Event) -> None:
        """Send an event; returns when it was written. No error if the editor is gone."""

    async def ask(
        self, question: PermissionQuestion
    ) -> Literal["allow_once", "allow_always", "reject_once", "reject_always", "cancelled", "cannot_ask", "unanswered"]:
        """Ask the user. An invalid answer is `reject_once`, an editor that fails `cannot_ask`, a timeout
        `unanswered`."""

    @property
    def takes_notices(self) -> bool:
        """Whether the editor shows a `NoticeShown`. If not, such news belongs in the history."""

    @property
    def elicits(self) -> frozenset[ElicitationKind]:
        """The kinds of questions that `elicit` supports."""

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """Ask the user a question and wait without limit. An editor that fails or answers nonsense means `cancel`."""

    async def elicited(self, question_id: str) -> None:
        """Tell the editor that the page of a `UrlQuestion` is no longer needed."""


class WaitableToolbox(Toolbox, ServerPrompts, Protocol):
    """A toolbox whose MCP servers start in the background."""

    async def wait_ready(self, timeout_s: float, *, beside: Callable[[], None] | None = None) -> None:
        """Wait until every server is ready or has failed, for at most `timeout_s`. Calls `beside` in a thread."""


class OpenToolbox(Protocol):
    """Opens a session's tools. Entered and left in the session's task.

    Calls `on_change` when a server became ready, failed, or changed what it offers.
    """

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
    """The settings that concern sessions."""

    steps_per_turn: int
    compaction: CompactionPolicy
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Everything a session needs from outside.

    `load` imports the packages that turns need, in a thread. `model` returns the model of a name, or raises AuthError
    or ConfigError; `info` describes it without loading anything. `settings`, `default_model` (empty: none is set) and
    `models`, the names to choose from, are read anew for each turn because the user may change them.
    """

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


def new_session_id() -> str:
    """A random id for a session."""
    return f"crow-{secrets.token_hex(12)}"


def new_message_id() -> str:
    """A random id for a message, the same live and in replay."""
    return f"msg_{secrets.token_hex(12)}"


def new_remark(text: str) -> NewEntry:
    """A remark of crow in the history, for the user alone."""
    return NewEntry(body=Remark(text=text, message_id=new_message_id()))
