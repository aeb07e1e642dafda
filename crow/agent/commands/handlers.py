"""Runs slash commands: finds the handler and checks the argument."""

from __future__ import annotations

from collections.abc import Mapping

from crow.agent.commands import COMMANDS, CommandSpec, branches, inspect, memory, sessions
from crow.agent.commands.context import CommandContext, Handler
from crow.agent.templates import ParsedCommand
from crow.domain.errors import ArgumentError

_SPECS: Mapping[str, CommandSpec] = {spec.name: spec for spec in COMMANDS}


async def answer(context: CommandContext, typed: ParsedCommand) -> str:
    """Run the command and return the answer for the user."""
    spec, argument = _SPECS[typed.name], typed.argument
    if spec.is_literal and argument not in ("", spec.hint):
        return f"`/{spec.name} {argument}`: expected no argument, or `{spec.hint}`."
    if argument and not spec.hint:
        return f"`/{spec.name}` takes no argument."
    try:
        return await HANDLERS[spec.name](context, argument)
    except ArgumentError as error:
        return str(error)


async def _show_help(_: CommandContext, argument: str) -> str:
    all_commands = "\n".join(
        f"- `/{spec.name}{f' [{spec.hint}]' if spec.hint else ''}`: {spec.description}" for spec in COMMANDS
    )
    if not argument:
        return all_commands
    spec = _SPECS.get(argument.removeprefix("/"))
    if spec is None:
        raise ArgumentError(f"There is no command /{argument.removeprefix('/')}. The commands are:\n{all_commands}")
    return f"`/{spec.name}{f' {spec.hint}' if spec.hint else ''}`: {spec.description}"


_NAMED_LIKE_THEIR_COMMANDS: tuple[Handler, ...] = (
    *branches.HANDLERS,
    *sessions.HANDLERS,
    *inspect.HANDLERS,
    *memory.HANDLERS,
)
HANDLERS: Mapping[str, Handler] = {handler.__name__: handler for handler in _NAMED_LIKE_THEIR_COMMANDS} | {
    "context": inspect.show_context,
    "help": _show_help,
}
