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
from crow.store import Store
from crow.tools import Toolbox, Workspace

FollowUp: TypeAlias = Callable[[Entry], Awaitable[StopReason]]
"""A function that runs after the command's entry was stored and shown. It gets that entry and returns how the turn
ended."""


@dataclass(slots=True, kw_only=True)
class CommandContext:
    """The parts of a session that a command may use. `models` are the names of the available models, and `rules` are
    the permission rules in config.toml.

    `compactor` prepares everything that a turn needs, as the start of a turn does, and returns the compactor. It can
    raise the same errors as the start of a turn. `toolbox` opens the session's tools. `set_mode` and `set_model` change
    the session and tell the client. `move` moves the session to another entry (None: before all entries) and returns a
    sentence about restored options, or an empty string. `run_prompt` stores a prompt and answers it. `instructions`
    returns the instruction files that `compactor` has read, and `user_instructions` is the path of the user's own file.
    A handler may set `follow_up`.
    """

    branch: Branch
    store: Store
    client: Client
    workspace: Workspace
    models: Sequence[str]
    rules: Sequence[PermissionRule]
    compactor: Callable[[], Awaitable[Compactor]]
    set_mode: Callable[[str], Awaitable[None]]
    set_model: Callable[[str], Awaitable[None]]
    move: Callable[[int | None, str], Awaitable[str]]
    run_prompt: Callable[[User], Awaitable[StopReason]]
    toolbox: Callable[[], Awaitable[Toolbox]]
    instructions: Callable[[], Sequence[InstructionSource]]
    user_instructions: Path | None
    follow_up: FollowUp | None = None


Handler: TypeAlias = Callable[[CommandContext, str], Awaitable[str]]
"""A function that runs a command. It gets the argument of the command and returns the answer, in Markdown.

:raises ~crow.domain.errors.ArgumentError: the argument is wrong; the message becomes the answer.
"""
