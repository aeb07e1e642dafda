"""The user's own commands: prompts that they keep as files and send by name.

Strategy: a Markdown file below the user's directory is a prompt; `$ARGUMENTS` in it stands for what follows the name,
and without one that is added at the end. Read anew each time, so that an edit holds at once. Only the user's directory
is read, never a workspace. What cannot be read is left out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crow.domain.errors import ArgumentError
from crow.domain.messages import Part, Text
from crow.tools.front_matter import front_matter

if TYPE_CHECKING:
    from crow.tools import ServerPrompt, ServerPrompts

__all__ = ["CalledPrompt", "Template", "TemplateArguments", "called", "filled", "filling", "hint_of", "read_templates"]

MOST_BYTES = 256 * 1024
MOST_TEMPLATES = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One of them; `hint` describes its argument, empty if it takes none."""

    name: str
    description: str
    hint: str
    text: str

    def prompt(self, argument: str) -> str:
        """What is sent for `/name argument`."""
        if "$ARGUMENTS" in self.text:
            return self.text.replace("$ARGUMENTS", argument)
        return f"{self.text}\n\n{argument}" if argument else self.text


def read_templates(directory: Path, *, taken: Collection[str] = ()) -> tuple[Template, ...]:
    """The templates in `directory` by name, without those whose name is `taken`; none if there is no directory."""
    try:
        files = sorted(file for file in directory.iterdir() if file.suffix == ".md")
    except OSError:
        return ()
    found: list[Template] = []
    for file in files:
        if _NAME.fullmatch(file.stem) and file.stem not in taken and len(found) < MOST_TEMPLATES:
            template = _read(file)
            if template is not None:
                found.append(template)
    return tuple(found)


def _read(file: Path) -> Template | None:
    try:
        if not file.is_file() or file.stat().st_size > MOST_BYTES:
            return None
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    fields, begin = front_matter(text, ("description", "argument-hint"))
    body = text[begin:].strip()
    if not body:
        return None
    first = body.splitlines()[0].lstrip("# ").strip()
    hint = one_line(fields.get("argument-hint", "")) or ("arguments" if "$ARGUMENTS" in body else "")
    description = one_line(fields.get("description", "")) or first[:100] or file.stem
    return Template(name=file.stem, description=description[:200], hint=hint[:200], text=body)


def one_line(text: str) -> str:
    """`text` without line breaks."""
    return " ".join(text.split())


# FROM agent.server_prompts: A prompt of an MCP server, as it is typed: `/server:prompt` and what it is to be filled
# in with.
#
# Strategy: words fill the arguments in order, quotes keep words together, `name=value` names one, and the last
# argument
# takes all that is left; so a single argument may be any text. What no argument takes follows the prompt.


_CALL = re.compile(r"/([A-Za-z0-9_-]+:[A-Za-z0-9_-]+)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledPrompt:
    """What looks like a prompt of a server, as it was typed."""

    name: str
    argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateArguments:
    """What a prompt is filled in with; `rest` is what no argument takes."""

    arguments: Mapping[str, str]
    rest: str = ""


def called(text: str) -> CalledPrompt | None:
    """The call that `text` is, None for anything else."""
    found = _CALL.fullmatch(text)
    return None if found is None else CalledPrompt(name=found[1], argument=(found[2] or "").strip())


async def filled(source: ServerPrompts, typed: CalledPrompt, parts: Sequence[Part]) -> tuple[Part, ...]:
    """What a server makes of a prompt of these `parts`; the same parts where no server has it.

    :raises ArgumentError: a required argument is missing.
    :raises ~crow.domain.errors.ToolServerError: the server failed.
    """
    prompt = await source.prompt(typed.name)
    if prompt is None:
        return tuple(parts)
    given = filling(prompt, typed.argument)
    rest = (Text(text=given.rest),) if given.rest else ()
    return (*await source.fill(prompt, given.arguments), *rest, *parts[1:])


def hint_of(prompt: ServerPrompt) -> str:
    """The arguments as a client shows them, those in brackets that may be left out."""
    return " ".join(one.name if one.required else f"[{one.name}]" for one in prompt.arguments)


def filling(prompt: ServerPrompt, text: str) -> TemplateArguments:
    """What `text` fills `prompt` in with. :raises ArgumentError: a required argument is missing; says which."""
    names = [argument.name for argument in prompt.arguments]
    if not names:
        return TemplateArguments(arguments={}, rest=text)
    arguments, plain = {}, []
    for word in split(text):
        name, equals, value = word.partition("=")
        if equals and name in names and name not in arguments:
            arguments[name] = value
        else:
            plain.append(word)
    free = [name for name in names if name not in arguments]
    if free == names and len(free) == 1:
        plain = [text] if text and len(plain) > 1 else plain  # as it was typed, blanks and all
    for name in free[:-1]:
        if plain:
            arguments[name] = plain.pop(0)
    rest = " ".join(plain)
    if free and rest:
        arguments[free[-1]], rest = rest, ""
    for argument in prompt.arguments:
        if argument.required and not arguments.get(argument.name):
            raise ArgumentError(
                f"`/{prompt.name}` needs `{argument.name}`. Type `/{prompt.name} {hint_of(prompt)}`, with quotes "
                f"around what has blanks, or name it: `{argument.name}=...`."
            )
    return TemplateArguments(arguments=arguments, rest=rest)


def split(text: str) -> list[str]:
    """Words, those in quotes kept together; a quotation mark without its other half is a character like any."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
