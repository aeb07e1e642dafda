"""What a slash command is, and what it may use of its session.

Strategy: a command is a row of the table with an async function that takes the desk and the argument and gives the
answer. A bad argument is an :class:`~crow.domain.errors.ArgumentError`, whose words become the answer. What is to
happen after the answer was stored and shown is left on the desk. Knows the session's parts, never the session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crow.agent import Client
from crow.agent.branch import Branch
from crow.agent.compaction.compactor import Compactor
from crow.agent.permission import Rule
from crow.domain.entries import Entry, StopReason, User
from crow.store import Store
from crow.tools import Toolbox, Workspace

__all__ = ["Desk", "FollowUp", "Handler"]

FollowUp: TypeAlias = Callable[[Entry], Awaitable[StopReason]]
"""Goes on after the command's entry, which it is given, was stored and shown; how the turn ended."""


@dataclass(slots=True, kw_only=True)
class Desk:
    """What commands may use, for one command. `models` are the names offered, `rules` those of the user's file.

    `compactor` opens what a turn needs (it may fail as a turn does) and gives what makes room in the context.
    `toolbox` opens the session's tools. `set_mode` and `set_model` change the row and tell the client. `move` stands
    the session on another entry (None: before all); `run_prompt` stores a prompt under the leaf and answers it. A
    handler may leave a `follow_up`.
    """

    branch: Branch
    store: Store
    client: Client
    workspace: Workspace
    models: Sequence[str]
    rules: Sequence[Rule]
    compactor: Callable[[], Awaitable[Compactor]]
    set_mode: Callable[[str], Awaitable[None]]
    set_model: Callable[[str], Awaitable[None]]
    move: Callable[[int | None, str], Awaitable[None]]
    run_prompt: Callable[[User], Awaitable[StopReason]]
    toolbox: Callable[[], Awaitable[Toolbox]]
    follow_up: FollowUp | None = None


Handler: TypeAlias = Callable[[Desk, str], Awaitable[str]]
"""The answer, in Markdown. :raises ~crow.domain.errors.ArgumentError: the argument; its words are the answer."""
