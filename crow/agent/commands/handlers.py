"""The answer to a slash command: one handler for each that is offered."""

from __future__ import annotations

from collections.abc import Mapping

from crow.agent.commands import COMMANDS, CommandContext, Handler, Typed
from crow.agent.commands.branches import PLACE_COMMANDS, WALK_COMMANDS
from crow.agent.commands.inspect import CONTEXT_COMMANDS, LOOKING_COMMANDS, TOOL_COMMANDS
from crow.agent.commands.permissions import PERMISSION_COMMANDS
from crow.agent.commands.sessions import CHOOSING_COMMANDS, NAMING_COMMANDS
from crow.domain.errors import ArgumentError

__all__ = ["HANDLERS", "answer", "help_text"]


async def answer(desk: CommandContext, typed: Typed) -> str:
    """Run it; what is told to the user."""
    try:
        return await HANDLERS[typed.name](desk, typed.argument)
    except ArgumentError as error:
        return str(error)


def help_text() -> str:
    """The list of commands, in Markdown."""
    return "\n".join(
        f"- `/{spec.name}{f' [{spec.hint}]' if spec.hint else ''}`: {spec.description}" for spec in COMMANDS
    )


async def show_help(_: CommandContext, argument: str) -> str:
    name = argument.removeprefix("/")
    found = next((spec for spec in COMMANDS if spec.name == name), None)
    if argument and found is None:
        raise ArgumentError(f"There is no command /{name}. These are the commands:\n{help_text()}")
    return help_text() if found is None else f"`/{found.name} {found.hint}`: {found.description}"


HANDLERS: Mapping[str, Handler] = {
    **WALK_COMMANDS,
    **PLACE_COMMANDS,
    **NAMING_COMMANDS,
    **CONTEXT_COMMANDS,
    **TOOL_COMMANDS,
    **CHOOSING_COMMANDS,
    **PERMISSION_COMMANDS,
    **LOOKING_COMMANDS,
    "help": show_help,
}
