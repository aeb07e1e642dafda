"""The store, models, tools and settings that a session gets from outside. `crow.app` provides them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crow.agent.compaction.budget import CompactionPolicy
from crow.agent.hooks import Hooks
from crow.agent.permissions.rules import PermissionRule
from crow.agent.templates import Template
from crow.export.links import PageLinks
from crow.llm import Model, ModelInfo
from crow.store import Store
from crow.tools import Ports, Toolbox, Workspace
from crow.tools.servers import McpServer, ServerPrompts


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
    checks: tuple[str, ...] = ()
    """Commands that the user calls checks; see :mod:`crow.domain.receipts`."""
    shows_receipts: bool = True
    """Whether the user is shown the receipt of each turn that changed files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Everything that a session needs from outside."""

    store: Store
    load: Callable[[], Awaitable[None]]
    """Uses a thread to import the packages that turns need."""
    model: Callable[[str], Awaitable[Model]]
    """Returns the model with a given name, or raises AuthError or ConfigError."""
    info: Callable[[str], ModelInfo]
    """Describes a model without loading anything."""
    open_toolbox: OpenToolbox
    settings: Callable[[], SessionSettings]
    """Called again for each turn, because the user may change the settings."""
    default_model: Callable[[], str] = str
    """Returns the model for new sessions, or an empty string if the user has set no default. Called again for each
    turn."""
    fallback: Callable[[str], str] = lambda _: ""
    """Takes the name of a model and returns the name of its fallback model, which answers while the first model's
    endpoint is down. The result is empty if there is no fallback model."""
    edit_tool: Callable[[str], str] = lambda _: "edit_file"
    """Takes the name of a model and returns the name of the tool with which it edits files: `edit_file` or
    `apply_patch`."""
    models: Sequence[str] = ()
    """The names of the models to choose from. This is a live view: the names may change later."""
    templates: Callable[[], Sequence[Template]] = tuple
    user_instructions: Path | None = None
    """The path of the user's own AGENTS.md, which need not exist."""
    hooks: Hooks | None = None
    links: PageLinks | None = None
    """The pages that `crow serve` shows."""
    node: str = ""
    """The name of this machine, or empty if no other machine uses the store."""
