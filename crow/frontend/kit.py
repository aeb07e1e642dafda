"""What the composition root gives the front end: functions and settings, so that it needs to know no adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crow.frontend.asking import Timeouts
from crow.store import Store

if TYPE_CHECKING:
    from crow.agent.adapters import Adapters
    from crow.tools import McpServer, Workspace

__all__ = ["Kit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """`open_store` raises StoreError; `check` raises AuthError or ConfigError when no prompt could be answered, and
    costs nothing. `renewed` gives another of these when the user has changed their settings since, None when they have
    not, and costs hardly more. `models` are the names offered, `model` is the default, empty if none is set;
    `more_models` asks the endpoint for further ones, bounded in time, and gives none where it fails. `auto_compact` is
    whether sessions compact by themselves unless they were told otherwise, `editor_terminals` whether commands run in
    the editor's terminals, `hidden_variables` which variables these commands must not see, `timeouts` how long the
    editor and its user may take for an answer. `servers` are the user's own, for every session. `log_hint` says where
    the log is. `warm_up` imports, off the event loop, what a prompt needs; `trim` gives memory back that lies free, and
    blocks meanwhile.
    """

    version: str
    open_store: Callable[[], Awaitable[Store]]
    adapters: Callable[[Store], Adapters]
    workspace: Callable[[str, Sequence[str]], Workspace]
    check: Callable[[], None]
    warm_up: Callable[[], Awaitable[None]]
    trim: Callable[[], None]
    more_models: Callable[[], Awaitable[Sequence[str]]]
    renewed: Callable[[], Kit | None]
    models: Sequence[str]
    model: str
    mode: str
    auto_compact: bool
    editor_terminals: bool
    timeouts: Timeouts
    log_hint: str
    hidden_variables: Callable[[], Sequence[str]] = tuple
    servers: Sequence[McpServer] = ()
