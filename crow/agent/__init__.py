"""The agent: sessions, turns, compaction, the system message, permissions.

This file defines, as protocols, what a session needs from outside. `crow.app` provides the adapters that implement
them.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from crow.agent.permissions import PermissionRule
from crow.agent.templates import Template
from crow.domain.entries import CallRef, NewEntry, Remark
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind, Event
from crow.domain.messages import JsonObject
from crow.llm import Model, ModelInfo
from crow.store import Store
from crow.tools import PlannedCall, Ports, Toolbox, Workspace
from crow.tools.servers import McpServer, ServerPrompts

if TYPE_CHECKING:  # circular at run time: the two modules import `Client` from here
    from crow.agent.compaction.budget import CompactionPolicy
    from crow.agent.hooks import Hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionQuestion:
    """A question to the user: may an announced call run?"""

    call: CallRef
    name: str
    arguments: str
    plan: PlannedCall
    always: str
    """What the answer "always allow" would cover. If empty, that answer is not offered."""
    never: str = ""
    """What the answer "always reject" would cover. If empty, that answer is not offered."""
    reason: str = ""
    """Why crow asks. Empty if the mode and the call make that clear."""
    offers_writes: bool = False
    """The user may also allow all commands that are confined to `write` access."""
    rule: str = ""
    """A rule that the user could add to the settings to allow the call. Empty if no rule can allow the call."""
    changes: str = ""
    """A diff of a tool that the user allowed before its server changed it."""


PermissionAnswer: TypeAlias = Literal[
    "allow_once",
    "allow_always",
    "allow_writes",
    "reject_once",
    "reject_always",
    "cancelled",
    "cannot_ask",
    "unanswered",
]


class Client(Protocol):
    """The connection of one session to the editor."""

    async def publish(self, event: Event) -> None:
        """Send an event and return when it has been written. Raise no error if the editor has disconnected."""

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """Ask the user and return the answer. If the answer is invalid, return `reject_once`. If the editor fails,
        return `cannot_ask`. After a timeout, return `unanswered`."""

    @property
    def takes_notices(self) -> bool:
        """Whether the editor shows notices (`NoticeShown`). If it does not, crow stores notices in the history."""

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """The kinds of questions that `elicit` supports."""

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """Ask the user, without a time limit. If the editor fails or sends an invalid answer, return `cancel`."""

    async def finish_question(self, question_id: str) -> None:
        """Tell the editor that the page of a `UrlQuestion` is no longer needed."""

    @property
    def shows_subagents(self) -> bool:
        """Whether the editor shows each sub-agent as a session of its own."""

    def open_subagent(self, session_id: str) -> Client:
        """Return the client that the sub-agent `session_id` uses to reach the editor. Call this only if
        `shows_subagents` is true."""

    def close_subagent(self, session_id: str) -> None:
        """Forget a sub-agent whose work has ended."""


class WaitableToolbox(Toolbox, ServerPrompts, Protocol):
    """A toolbox whose MCP servers start in the background."""

    async def wait_ready(self, timeout_s: float, *, beside: Callable[[], None] | None = None) -> None:
        """Wait until every server is ready or has failed, but no longer than `timeout_s` seconds. During the wait, run
        `beside` in a thread."""


class OpenToolbox(Protocol):
    """Opens a session's tools. The call returns a context manager, which must be entered and left in the session's
    task.

    The tools call `on_change` when a server becomes ready, fails, or changes what it offers.
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
    steps_set_by: str = "limits.steps_per_turn"
    """Where the user has set `steps_per_turn`: the name of a setting or of an option."""
    compaction: CompactionPolicy
    server_wait_s: float = 1.0
    """The time that a turn waits for MCP servers that are still starting, in seconds."""
    rules: tuple[PermissionRule, ...] = ()
    title_model: str = ""
    """Empty if the user has set no model for titles."""
    cost_per_turn: float | None = None
    """A limit in USD. None means no limit."""
    cost_per_session: float | None = None
    """A limit in USD. None means no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Everything that a session needs from outside. `settings`, `default_model` and `models` are read again for each
    turn because the user may change them."""

    store: Store
    load: Callable[[], Awaitable[None]]
    """Uses a thread to import the packages that turns need."""
    model: Callable[[str], Awaitable[Model]]
    """Returns the model with a given name, or raises AuthError or ConfigError."""
    info: Callable[[str], ModelInfo]
    """Describes a model without loading anything."""
    open_toolbox: OpenToolbox
    settings: Callable[[], SessionSettings]
    default_model: Callable[[], str] = str
    """Returns an empty string if the user has set no default."""
    fallback: Callable[[str], str] = lambda _: ""
    """Takes the name of a model and returns the name of its fallback model, which answers while the first model's
    endpoint is down. The result is empty if there is no fallback model."""
    models: Sequence[str] = ()
    """The names to choose from."""
    templates: Callable[[], Sequence[Template]] = tuple
    user_instructions: Path | None = None
    """The path of the user's own AGENTS.md, which need not exist."""
    hooks: Hooks | None = None
    node: str = ""
    """The name of this machine, or empty if no other machine uses the store."""


SUBAGENT_ROLE = (
    "You are a sub-agent: another agent gave you this task and reads your last answer, nothing else of what you do. "
    "Answer with all that it needs to know, and do not ask back."
)
"""The text that ends a sub-agent's system message. If a client opens the sub-agent as a session of its own, this text
is left out."""


def changes_of_own(config: JsonObject) -> JsonObject:
    """Return the changes to a sub-agent's configuration when a client opens the sub-agent as a session of its own."""
    append = config.get("system_prompt_append")
    before, role, after = append.rpartition(SUBAGENT_ROLE) if isinstance(append, str) else ("", "", "")
    if not role:
        return {}
    rest = f"{before.rstrip()}\n\n{after.lstrip()}".strip()  # `after` has the instructions of the sub-agent's kind
    return {"system_prompt_append": rest or None}


def new_session_id() -> str:
    """Return a random id for a session."""
    return f"crow-{secrets.token_hex(12)}"


def new_message_id() -> str:
    """Return a random id for a message. When a session is replayed, its messages keep their ids."""
    return f"msg_{secrets.token_hex(12)}"


def new_remark(text: str) -> NewEntry:
    """Return a history entry with a remark by crow. The user sees the remark; the model does not."""
    return NewEntry(body=Remark(text=text, message_id=new_message_id()))
