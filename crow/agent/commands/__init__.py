"""The table of slash commands, and what their handlers receive.

A prompt that begins with a known name is a command: it takes a turn like a prompt and is stored with its answer, but
the model never sees it. An unknown name is an ordinary prompt, since paths begin with a slash too. Handlers are in
other modules, which are imported with the first turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crow.agent import Client
from crow.agent.branch import Branch
from crow.agent.compaction.compactor import Compactor
from crow.agent.permissions import Rule
from crow.agent.templates import ParsedCommand
from crow.domain.entries import Entry, StopReason, User
from crow.store import Store
from crow.tools import Toolbox, Workspace

__all__ = ["COMMANDS", "CommandContext", "CommandSpec", "FollowUp", "Handler", "parse", "quoted"]

PLACE_HINT = "prompt number | label | #entry"
OPTIONS_HINT = "files | keep, summary"
QUOTE_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A command as clients list it. `hint` describes its argument; empty: it takes none. `is_literal`: the hint is
    the only argument that it accepts."""

    name: str
    description: str
    hint: str = ""
    is_literal: bool = False


COMMANDS = (
    CommandSpec(name="undo", description="Take back the last turn", hint=OPTIONS_HINT),
    CommandSpec(name="redo", description="Reverse the last undo or rewind", hint=OPTIONS_HINT),
    CommandSpec(
        name="rewind",
        description="Go back to before a prompt, to a label, or to any entry",
        hint=f"{PLACE_HINT}, {OPTIONS_HINT}",
    ),
    CommandSpec(name="retry", description="Send the last prompt again, on a new branch", hint=OPTIONS_HINT),
    CommandSpec(name="new", description="Start over; if the session has a name, a new session gets it"),
    CommandSpec(name="clear", description="Start over in this session; nothing is deleted"),
    CommandSpec(name="history", description="List the prompts and labels of this branch", hint="all", is_literal=True),
    CommandSpec(name="tree", description="List all branches, including undone ones", hint="all", is_literal=True),
    CommandSpec(name="label", description="Name this place so that you can return to it", hint="name"),
    CommandSpec(name="fork", description="Start another session from here or from a place", hint=PLACE_HINT),
    CommandSpec(name="title", description="Show or set the session's title", hint="new title"),
    CommandSpec(
        name="compact",
        description="Replace older messages by a summary to free context; nothing is deleted",
        hint='what the summary should focus on, or "undo"',
    ),
    CommandSpec(
        name="context",
        description="Show what fills the context window, or forget the size that crow learned",
        hint="forget",
        is_literal=True,
    ),
    CommandSpec(name="mcp", description="Show the state of the MCP servers, or restart them", hint="restart [server]"),
    CommandSpec(name="model", description="Show or choose the model", hint="a model"),
    CommandSpec(name="mode", description="Show or choose the permission mode", hint="a mode"),
    CommandSpec(
        name="permissions",
        description="Show the permission rules, or change them for this session",
        hint="allow RULE, deny RULE or forget NUMBER",
    ),
    CommandSpec(name="search", description="Search all sessions", hint="words"),
    CommandSpec(name="usage", description="Show the tokens that this session used"),
    CommandSpec(name="export", description="Write this session to a Markdown file", hint="a file in the workspace"),
    CommandSpec(name="help", description="List the commands", hint="a command"),
)
NAMES = frozenset(spec.name for spec in COMMANDS)


def parse(text: str) -> ParsedCommand | None:
    """The command in `text`; None for an ordinary prompt."""
    name, *rest = text[1:].split(maxsplit=1) or [""]
    if name not in NAMES or not text.startswith(f"/{name}"):
        return None
    return ParsedCommand(name=name, argument=rest[0].strip() if rest else "")


FollowUp: TypeAlias = Callable[[Entry], Awaitable[StopReason]]
"""Runs after the command's entry, its argument, was stored and shown. Returns how the turn ended."""


@dataclass(slots=True, kw_only=True)
class CommandContext:
    """What a command may use of its session. `models` are the model names on offer, `rules` those of config.toml.

    `compactor` opens what a turn needs, and may fail as a turn does. `toolbox` opens the session's tools. `set_mode`
    and `set_model` change the session and tell the client. `move` puts the session on another entry (None: before
    all); `run_prompt` stores a prompt and answers it. A handler may set a `follow_up`.
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
"""Takes the argument and returns the answer, in Markdown.

:raises ~crow.domain.errors.ArgumentError: the argument is wrong; the message becomes the answer.
"""


def quoted(text: str) -> str:
    """The first line of `text`, shortened, in quotation marks."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"“{line if len(line) <= QUOTE_CHARS else line[: QUOTE_CHARS - 1].rstrip() + '…'}”"
