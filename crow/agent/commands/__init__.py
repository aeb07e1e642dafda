"""Slash commands: what a user may type instead of a prompt.

Strategy: a prompt whose text begins with a known name is a command; it claims the turn like a prompt, is stored with
its answer, and the model never sees it. An unknown name is a prompt like any other, since paths begin with a slash
too. Here is what every session offers from its first moment; what commands do is in `answering` and one file per theme,
and is imported with the first one that is typed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crow.agent import Client
from crow.agent.branch import Branch
from crow.agent.compaction.compactor import Compactor
from crow.agent.permissions import Rule
from crow.domain.entries import Entry, StopReason, User
from crow.store import Store
from crow.tools import Toolbox, Workspace

__all__ = [
    "COMMANDS",
    "OPTIONS_HINT",
    "PLACE_HINT",
    "CommandContext",
    "CommandSpec",
    "FollowUp",
    "Handler",
    "Typed",
    "parse",
]

PLACE_HINT = "prompt number | label | #entry"
OPTIONS_HINT = "files | keep, summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A command as it is offered; `hint` describes its argument, empty if it takes none."""

    name: str
    description: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A command as it was typed."""

    name: str
    argument: str


def parse(text: str) -> Typed | None:
    """The command that `text` is, None for an ordinary prompt."""
    if not text.startswith("/"):
        return None
    name, *rest = text[1:].split(maxsplit=1)[:2] or [""]
    if name not in NAMES or not text.startswith(f"/{name}"):
        return None
    return Typed(name=name, argument=rest[0].strip() if rest else "")


COMMANDS = (
    CommandSpec(name="undo", description="Take back the last turn", hint=OPTIONS_HINT),
    CommandSpec(name="redo", description="Go back to before the last undo or rewind", hint=OPTIONS_HINT),
    CommandSpec(
        name="rewind",
        description="Go back to before a prompt, to a label, or to any entry",
        hint=f"{PLACE_HINT}, {OPTIONS_HINT}",
    ),
    CommandSpec(name="retry", description="Ask the last prompt again, on a new branch", hint=OPTIONS_HINT),
    CommandSpec(name="new", description="Begin anew; a named session's name moves to a new session"),
    CommandSpec(name="clear", description="Begin anew in this session; nothing is deleted"),
    CommandSpec(name="history", description="List the prompts of this branch, with labels", hint="all"),
    CommandSpec(name="tree", description="List all branches, the ones left by undo included", hint="all"),
    CommandSpec(name="label", description="Give this place a name to come back to", hint="name"),
    CommandSpec(name="fork", description="Make a session of its own from here or a place", hint=PLACE_HINT),
    CommandSpec(name="title", description="Show or set the session's title", hint="new title"),
    CommandSpec(
        name="compact",
        description="Replace older messages by a summary to make room; nothing is deleted",
        hint='what the summary should keep in particular, or "undo"',
    ),
    CommandSpec(
        name="context",
        description="Show what fills the context window, or forget what was learned of its size",
        hint="forget",
    ),
    CommandSpec(
        name="mcp", description="Show the MCP servers and how they are, or start them again", hint="restart [server]"
    ),
    CommandSpec(name="model", description="Show or choose the model", hint="a model"),
    CommandSpec(name="mode", description="Show or choose the permission mode", hint="a mode"),
    CommandSpec(
        name="permissions",
        description="Show what may run unasked and what may not, or change it for this session",
        hint="allow RULE, deny RULE or forget NUMBER",
    ),
    CommandSpec(name="search", description="Search all sessions", hint="words"),
    CommandSpec(name="usage", description="Show the tokens that this session used"),
    CommandSpec(name="export", description="Write this session to a Markdown file", hint="a file in the workspace"),
    CommandSpec(name="help", description="List the commands", hint="a command"),
)
NAMES = frozenset(spec.name for spec in COMMANDS)


# FROM agent.commands.desk: What a slash command is, and what it may use of its session.
#
# Strategy: a command is a row of the table with an async function that takes the desk and the argument and gives the
# answer. A bad argument is an :class:`~crow.domain.errors.ArgumentError`, whose words become the answer. What is to
# happen after the answer was stored and shown is left on the desk. Knows the session's parts, never the session.


FollowUp: TypeAlias = Callable[[Entry], Awaitable[StopReason]]
"""Goes on after the command's entry, which it is given, was stored and shown; how the turn ended."""


@dataclass(slots=True, kw_only=True)
class CommandContext:
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


Handler: TypeAlias = Callable[[CommandContext, str], Awaitable[str]]
"""The answer, in Markdown. :raises ~crow.domain.errors.ArgumentError: the argument; its words are the answer."""
