"""Prompts that are called by name: the user's own, stored as files, and those of MCP servers.

A Markdown file in the user's `commands` directory defines a command. `$ARGUMENTS` in it stands for the text after the
command's name. If a file does not contain `$ARGUMENTS`, the text after the command's name is added at the end. Files
are read again for each use, so an edit takes effect at once. Workspaces cannot define commands. `/server:prompt` calls
a server's prompt.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crow.domain.errors import ArgumentError
from crow.domain.messages import Part, Text
from crow.tools.front_matter import front_matter
from crow.tools.servers import ServerPrompt, ServerPrompts

_MAX_BYTES = 256 * 1024
_MAX_TEMPLATES = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_CALL = re.compile(r"/([A-Za-z0-9_-]+:[A-Za-z0-9_-]+)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A command that the user defined."""

    name: str
    description: str
    hint: str
    """Describes its argument. Empty if the command takes none."""
    text: str

    def prompt(self, argument: str) -> str:
        """Return the prompt that `/name argument` stands for."""
        if "$ARGUMENTS" in self.text:
            return self.text.replace("$ARGUMENTS", argument)
        return f"{self.text}\n\n{argument}" if argument else self.text


def read_templates(directory: Path, *, taken: Collection[str] = ()) -> tuple[Template, ...]:
    """Return the templates in `directory`, sorted by name, except those named in `taken`. Unreadable files are left
    out."""
    try:
        files = sorted(file for file in directory.iterdir() if file.suffix == ".md")
    except OSError:
        return ()
    named = (file for file in files if _NAME.fullmatch(file.stem) and file.stem not in taken)
    templates = [template for file in named if (template := _read_template(file)) is not None]
    return tuple(templates[:_MAX_TEMPLATES])


def expand_template(text: str, parts: Sequence[Part], templates: Sequence[Template]) -> Sequence[Part]:
    """Return the parts of a prompt. `text` is its first part. If the text calls one of the templates, the template's
    text replaces it."""
    name, *rest = text[1:].split(maxsplit=1) or [""]
    for template in templates:
        if template.name == name:
            return (Text(text=template.prompt(rest[0] if rest else "")), *parts[1:])
    return parts


def _read_template(file: Path) -> Template | None:
    try:
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            return None
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    fields, begin = front_matter(text, ("description", "argument-hint"))
    description, hint = (" ".join(fields.get(key, "").split()) for key in ("description", "argument-hint"))
    body = text[begin:].strip()
    if not body:
        return None
    first_line = body.splitlines()[0].lstrip("# ").strip()
    description = description or first_line[:100] or file.stem
    hint = hint or ("arguments" if "$ARGUMENTS" in body else "")
    return Template(name=file.stem, description=description[:200], hint=hint[:200], text=body)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCommand:
    """A command as the user typed it: a name and an argument. The name has the form of a command of crow, or
    `server:prompt`. There may be no command with this name."""

    name: str
    argument: str


def parse_prompt_call(text: str) -> ParsedCommand | None:
    """Parse `text` as a call of a server's prompt. Return None if it is anything else."""
    found = _CALL.fullmatch(text)
    return None if found is None else ParsedCommand(name=found[1], argument=(found[2] or "").strip())


async def fill_prompt(source: ServerPrompts, typed: ParsedCommand, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the prompt of a server that `typed` names, with its arguments filled in, followed by the `parts` after the
    first one. If no server has the prompt, return `parts` unchanged.

    :raises ArgumentError: a required argument is missing.
    :raises ~crow.domain.errors.ToolServerError: the server failed.
    """
    prompt = await source.prompt(typed.name)
    if prompt is None:
        return tuple(parts)
    arguments, rest = parse_arguments(prompt, typed.argument)
    added = (Text(text=rest),) if rest else ()
    return (*await source.fill(prompt, arguments), *added, *parts[1:])


def hint_of(prompt: ServerPrompt) -> str:
    """Format the arguments of a server's prompt for a client. Optional arguments are in brackets."""
    return " ".join(one.name if one.required else f"[{one.name}]" for one in prompt.arguments)


def parse_arguments(prompt: ServerPrompt, text: str) -> tuple[Mapping[str, str], str]:
    """Return the arguments in `text`, and the text after them.

    Words fill the arguments in order. Quotes keep words together, and `name=value` names an argument. The last argument
    takes the rest of the text. So if a prompt has only one argument, its value may be any text.

    :raises ArgumentError: a required argument is missing.
    """
    names = [argument.name for argument in prompt.arguments]
    if not names:
        return {}, text
    arguments: dict[str, str] = {}
    plain: list[str] = []
    for word in _split_words(text):
        name, equals, value = word.partition("=")
        if equals and name in names and name not in arguments:
            arguments[name] = value
        else:
            plain.append(word)
    free = [name for name in names if name not in arguments]
    if free == names and len(free) == 1 and len(plain) > 1:
        plain = [text]  # as typed, with all its spaces
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
                f"around values that contain spaces, or name the argument: `{argument.name}=...`."
            )
    return arguments, rest


def _split_words(text: str) -> list[str]:
    """Split text into words. Quoted words stay together. Backslashes are ordinary characters, as in paths of Windows,
    and so are all quotation marks if one has no partner."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    try:
        return list(lexer)
    except ValueError:
        return text.split()
