"""The user's own commands: prompts that they keep as files and send by name.

Strategy: a Markdown file below the user's directory is a prompt; `$ARGUMENTS` in it stands for what follows the name,
and without one that is added at the end. Read anew each time, so that an edit holds at once. Only the user's directory
is read, never a workspace. What cannot be read is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from crow.tools.front_matter import front_matter

__all__ = ["Template", "read_templates"]

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
