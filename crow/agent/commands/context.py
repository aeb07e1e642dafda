"""The types that the handlers of slash commands receive and return."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from crow.agent import Client
from crow.agent.compaction.compactor import Compactor
from crow.agent.history.branch import Branch
from crow.agent.instructions import InstructionSource
from crow.agent.permissions.rules import PermissionRule
from crow.domain.entries import Entry, StopReason, User
from crow.export.links import PageLinks
from crow.store import Store
from crow.tools import Toolbox, Workspace

FollowUp: TypeAlias = Callable[[Entry], Awaitable[StopReason]]
"""A function that runs after the command's entry was stored and shown. It gets that entry and returns how the turn
ended."""


@dataclass(slots=True, kw_only=True)
class CommandContext:
    """The parts of a session that a command may use."""

    branch: Branch
    store: Store
    client: Client
    workspace: Workspace
    models: Sequence[str]
    """The names of the available models."""
    rules: Sequence[PermissionRule]
    """The permission rules in config.toml."""
    compactor: Callable[[], Awaitable[Compactor]]
    """Prepares everything that a turn needs, as the start of a turn does, and returns the compactor. It can raise the
    same errors as the start of a turn."""
    set_mode: Callable[[str], Awaitable[None]]
    """Changes the mode of the session and tells the client."""
    set_model: Callable[[str], Awaitable[None]]
    """Changes the model of the session and tells the client."""
    move: Callable[[int | None, str], Awaitable[str]]
    """Moves the session to an entry (None: before the first one). The text is the reason, such as `undo`. Returns a
    sentence about the options that the move has restored, such as the model, or an empty string."""
    run_prompt: Callable[[User], Awaitable[StopReason]]
    """Stores a prompt and answers it."""
    toolbox: Callable[[], Awaitable[Toolbox]]
    """Opens the session's tools."""
    instructions: Callable[[], Sequence[InstructionSource]]
    """Returns the instruction files that `compactor` has read."""
    links: PageLinks | None
    """Makes links to pages of sessions. None if sessions cannot be shared as pages here."""
    user_instructions: Path | None
    """The path of the user's own instruction file."""
    follow_up: FollowUp | None = None
    """A handler may set this."""


Handler: TypeAlias = Callable[[CommandContext, str], Awaitable[str]]
"""A function that runs a command. It gets the argument of the command and returns the answer, in Markdown.

:raises ~crow.domain.errors.ArgumentError: the argument is wrong; the message becomes the answer.
"""
