"""What a session is made of: the adapters that it is given, as protocols, and what the configuration says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from crow.agent.compaction.hooks import Hooks
    from crow.agent.compaction.limits import CompactionSettings
    from crow.agent.permission import Rule
    from crow.agent.templates import Template
    from crow.agent.toolset import WaitableToolbox
    from crow.llm import Model, ModelInfo
    from crow.store import Store
    from crow.tools import McpServer, Ports, Workspace

__all__ = ["Adapters", "OpenToolbox", "SessionSettings"]


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
    compaction: CompactionSettings
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
