"""Slash commands: what a user may type instead of a prompt.

Strategy: a prompt whose text begins with a known name is a command; it claims the turn like a prompt, is stored with
its answer, and the model never sees it. An unknown name is a prompt like any other, since paths begin with a slash
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COMMANDS", "CommandSpec", "Typed", "help_text", "parse"]


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


COMMANDS: Sequence[CommandSpec] = (
    CommandSpec(
        name="compact",
        description="Replace older messages by a summary to make room; nothing is deleted",
        hint="what the summary should keep in particular",
    ),
    CommandSpec(name="help", description="List the commands"),
)


def parse(text: str) -> Typed | None:
    """The command that `text` is, None for an ordinary prompt."""
    if not text.startswith("/"):
        return None
    name, _, argument = text[1:].partition(" ")
    if name not in {spec.name for spec in COMMANDS}:
        return None
    return Typed(name=name, argument=argument.strip())


def help_text() -> str:
    """The list of commands, in Markdown."""
    return "\n".join(
        f"- `/{spec.name}{f' [{spec.hint}]' if spec.hint else ''}`: {spec.description}" for spec in COMMANDS
    )
