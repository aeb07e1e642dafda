"""Completes slash commands, their arguments and `@files` in prompts, and finds the files that a prompt mentions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from crow.domain.text import on_one_line

_MAX_WALKED = 20_000
"""The maximum number of files and directories that are examined to complete an `@` without a directory."""

_MAX_COMPLETIONS = 50

_SKIPPED = frozenset({".git", "node_modules", ".venv", "__pycache__"})

_TYPED_FILE = re.compile(r"(?:^|(?<=\s))@(\"[^\"\n]*|[^\s\"@]*)$")

_MENTION = re.compile(r"(?:^|(?<=\s))@(?:\"([^\"\n]+)\"|([^\s\"@]+))")


@dataclass(slots=True)
class Choices:
    """The words that completion offers."""

    cwd: Path | None
    """The workspace. None if its files are elsewhere, so that they cannot be completed."""
    commands: dict[str, str] = field(default_factory=dict)
    """Maps the names of slash commands to descriptions."""
    arguments: dict[str, dict[str, str]] = field(default_factory=dict)
    """Maps names of commands to their arguments with descriptions."""


def is_completed(text: str) -> bool:
    """Return whether the end of a prompt is a word that :class:`ChoicesCompleter` completes."""
    return _TYPED_FILE.search(text) is not None or (text.startswith("/") and "\n" not in text)


class ChoicesCompleter(Completer):
    """Completes slash commands, their arguments, and `@files` of the workspace."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:  # noqa: ARG002
        """See `Completer`."""
        text = document.text_before_cursor
        if found := _TYPED_FILE.search(text):
            yield from self._files(found[1].removeprefix('"'), len(found[1]))
        elif text.startswith("/") and "\n" not in text:
            name, space, argument = text[1:].partition(" ")
            known = self._choices.arguments.get(name, {}) if space else self._choices.commands
            typed = argument if space else name
            for value, words in known.items():
                if value.startswith(typed) or (space and typed.lower() in f"{value} {words}".lower()):
                    shown = value if space else f"/{value}"
                    meta = on_one_line(words)[:60]
                    yield Completion(value, -len(typed), display=on_one_line(shown), display_meta=meta)

    def _files(self, typed: str, length: int) -> Iterator[Completion]:
        if self._choices.cwd is None:
            return
        for path in islice(find_files(self._choices.cwd, typed), _MAX_COMPLETIONS):
            text = f'"{path}"' if " " in path else path
            yield Completion(text, -length, display=path)


def find_files(cwd: Path, typed: str) -> Iterator[str]:
    """Yield the files and directories of the workspace whose paths begin with `typed`, the text after `@`. If `typed`
    has no slash, also yield the files in all subdirectories whose own names contain `typed`. The yielded paths are
    relative to `cwd`. Paths with hidden characters or quotation marks are left out."""
    folder, _, name = typed.rpartition("/")
    if os.path.isabs(typed) or ".." in folder.split("/"):
        return
    found = set()
    with suppress(OSError):
        for entry in sorted(os.scandir(cwd / folder), key=lambda entry: entry.name.lower()):
            if entry.name.lower().startswith(name.lower()) and (name.startswith(".") or entry.name[0] != "."):
                path = f"{folder}/{entry.name}" if folder else entry.name
                path += "/" if entry.is_dir() else ""
                if _is_typable(path):
                    found.add(path)
                    yield path
    if folder or len(name) < 2:
        return
    left = _MAX_WALKED
    for parent, folders, files in os.walk(cwd):
        folders[:] = sorted(each for each in folders if each not in _SKIPPED and not each.startswith("."))
        left -= len(folders) + len(files)
        for file in sorted(files):
            path = os.path.relpath(os.path.join(parent, file), cwd)
            if name.lower() in file.lower() and path not in found and _is_typable(path):
                yield path
        if left < 0:
            return


def _is_typable(path: str) -> bool:
    return on_one_line(path) == path and '"' not in path


def mentions_file(text: str) -> bool:
    """Return whether a prompt mentions something with `@` that looks like a file, and not like a resource of an MCP
    server."""
    names = (match[1] or match[2] for match in _MENTION.finditer(text))
    return any(":" not in name and re.search(r"[./]\w", name) for name in names)


def mentioned_files(text: str, cwd: Path) -> list[str]:
    """Return the files of the workspace that a prompt mentions with `@`, as absolute paths without duplicates."""
    found: dict[str, None] = {}
    for match in _MENTION.finditer(text):
        name = match[1] or match[2]
        for each in (name, name.rstrip(".,;:!?)")):
            with suppress(OSError, ValueError):
                path = (cwd / each).resolve()
                if path.exists() and path.is_relative_to(cwd.resolve()):
                    found[str(path)] = None
                    break
    return list(found)
