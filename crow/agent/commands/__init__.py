"""Slash commands: what a user may type instead of a prompt.

Strategy: a prompt whose text begins with a known name is a command; it claims the turn like a prompt, is stored with
its answer, and the model never sees it. An unknown name is a prompt like any other, since paths begin with a slash
too. One file per theme gives its rows to the one table here.
"""

from __future__ import annotations

from dataclasses import dataclass

from crow.agent.commands.choosing import CHOOSING_COMMANDS
from crow.agent.commands.context import CONTEXT_COMMANDS
from crow.agent.commands.desk import CommandSpec, Desk
from crow.agent.commands.looking import LOOKING_COMMANDS
from crow.agent.commands.naming import NAMING_COMMANDS
from crow.agent.commands.permissions import PERMISSION_COMMANDS
from crow.agent.commands.places import PLACE_COMMANDS
from crow.agent.commands.tools import TOOL_COMMANDS
from crow.agent.commands.walk import WALK_COMMANDS
from crow.domain.errors import ArgumentError

__all__ = ["COMMANDS", "CommandSpec", "Desk", "Typed", "answer", "help_text", "parse"]


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
    if name not in BY_NAME or not text.startswith(f"/{name}"):
        return None
    return Typed(name=name, argument=rest[0].strip() if rest else "")


async def answer(desk: Desk, typed: Typed) -> str:
    """Run it; what is told to the user."""
    try:
        return await BY_NAME[typed.name].run(desk, typed.argument)
    except ArgumentError as error:
        return str(error)


def help_text() -> str:
    """The list of commands, in Markdown."""
    return "\n".join(
        f"- `/{spec.name}{f' [{spec.hint}]' if spec.hint else ''}`: {spec.description}" for spec in COMMANDS
    )


async def show_help(_: Desk, argument: str) -> str:
    found = BY_NAME.get(argument.removeprefix("/"))
    if argument and found is None:
        raise ArgumentError(
            f"There is no command /{argument.removeprefix('/')}. These are the commands:\n{help_text()}"
        )
    return help_text() if found is None else f"`/{found.name} {found.hint}`: {found.description}"


COMMANDS = (
    *WALK_COMMANDS,
    *PLACE_COMMANDS,
    *NAMING_COMMANDS,
    *CONTEXT_COMMANDS,
    *TOOL_COMMANDS,
    *CHOOSING_COMMANDS,
    *PERMISSION_COMMANDS,
    *LOOKING_COMMANDS,
    CommandSpec(name="help", description="List the commands", hint="a command", run=show_help),
)
BY_NAME = {spec.name: spec for spec in COMMANDS}
