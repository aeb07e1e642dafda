"""Finds and reads agent files: Markdown files that describe kinds of subagents.

The user's folders are searched first, then the folders of the workspace. Files of the workspace are untrusted until the
user allows them, as with skills. They are ignored if they are outside the workspace after links are resolved. Only the
beginning of each file is read in advance. Files that cannot be used are returned too, with the reason, so that crow can
report them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from crow.domain.errors import ArgumentError
from crow.tools import AGENT_CONTEXT, AGENT_FOLDERS, AGENT_MODES, AgentKind
from crow.tools.disk import read_file
from crow.tools.front_matter import front_matter
from crow.tools.skills import HEAD_BYTES, NAME, clean_line

_SUFFIX = ".md"
FILE_BYTES = 64 * 1024
_MAX_AGENTS = 50
_MAX_TOOLS = 100
_MODEL_CHARS = 200
_TOOL_NAME = re.compile(r"[A-Za-z0-9_*?-]{1,64}")
_KEYS = ("description", "tools", "model", "mode", "isolated", "context")

_OTHER_NAMES: Mapping[str, str] = {
    "Read": "read_file",
    "Write": "write_file",
    "Edit": "edit_file",
    "MultiEdit": "edit_file",
    "Bash": "shell",
    "Grep": "grep",
    "Glob": "list_files",
    "LS": "list_files",
    "WebFetch": "fetch",
    "Skill": "skill",
}
"""Maps the names of tools in agent files written for Claude Code to crow's names of the same tools."""


def find_agents(user_folders: Sequence[Path], cwd: Path, is_inside: Callable[[Path], bool]) -> tuple[AgentKind, ...]:
    """Return all agent files, sorted by name. If several have the same name, the first one found is used. The user's
    folders are searched first, so a workspace cannot replace a user's file.

    `is_inside` tells whether a resolved path is in the workspace and may be read without asking the user.
    """
    found: dict[str, AgentKind] = {}
    places = [(folder, False) for folder in user_folders] + [(cwd / folder, True) for folder in AGENT_FOLDERS]
    for folder, is_from_workspace in places:
        for kind in _agents_in(folder, is_inside if is_from_workspace else None):
            if len(found) < _MAX_AGENTS:
                found.setdefault(kind.name, kind)
    return tuple(found[name] for name in sorted(found))


def _agents_in(folder: Path, is_inside: Callable[[Path], bool] | None) -> Iterator[AgentKind]:
    """Return the agent files in a folder; `is_inside` is None for a user's folder."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(10 * _MAX_AGENTS), strict=False))
    except OSError:  # usually there is no such folder
        return
    for file_name in names:
        name, suffix = os.path.splitext(file_name)
        path = Path(os.path.realpath(folder / file_name))
        if suffix != _SUFFIX or not NAME.fullmatch(name) or (is_inside is not None and not is_inside(path)):
            continue
        is_from_workspace = is_inside is not None
        try:
            yield _agent_kind(name, read_file(path, 0, HEAD_BYTES), path, is_from_workspace=is_from_workspace)
        except OSError as error:
            problem = f"it cannot be read: {error.strerror}"
            yield AgentKind(name=name, source=str(path), is_from_workspace=is_from_workspace, problem=problem)


def _agent_kind(name: str, head: bytes, path: Path, *, is_from_workspace: bool) -> AgentKind:
    """Return the kind that an agent file describes. `head` is the beginning of the file, or the whole file."""
    text = head.decode("utf-8", "replace")
    fields, end = front_matter(text, _KEYS)
    description = clean_line(fields.get("description", ""))
    model, mode = clean_line(fields.get("model", "")), fields.get("mode", "")
    words = re.split(r"[\s,\[\]]+", fields.get("context", " ".join(AGENT_CONTEXT)))
    context = tuple(word for each in words if (word := each.strip("\"'-")) and word != "none")
    tools, problem = _tools_in(fields["tools"]) if "tools" in fields else (None, "")
    if not end:
        problem = "it does not begin with front matter between two lines `---`"
    elif not description:
        problem = "its front matter has no description"
    elif mode and mode not in AGENT_MODES:
        problem = f"its mode is {clean_line(mode)[:40]}; expected one of {', '.join(AGENT_MODES)}"
    elif fields.get("isolated", "false") not in ("true", "false"):
        problem = f"its isolated is {clean_line(fields['isolated'])[:40]}; expected true or false"
    elif not set(context) <= {*AGENT_CONTEXT}:
        expected = f"expected {' and '.join(AGENT_CONTEXT)}, one of them, or none"
        problem = f"its context is {clean_line(fields['context'])[:40]}; {expected}"
    elif len(model) > _MODEL_CHARS:
        problem = "the name of its model is too long"
    elif len(head) < HEAD_BYTES and not text[end:].strip():
        problem = "it has no prompt below its front matter"
    return AgentKind(
        name=name,
        description=description,
        source=str(path),
        is_from_workspace=is_from_workspace,
        tools=tools,
        model="" if model == "inherit" else model,
        mode=mode,
        isolated=fields.get("isolated") == "true",
        context=context,
        problem=problem,
    )


def _tools_in(text: str) -> tuple[tuple[str, ...], str]:
    """Return the tool names and globs in a list, and a text that says what is wrong with the list. The text is empty if
    nothing is wrong. Commas, spaces or dashes separate the names."""
    words = [word.strip("\"'") for word in re.split(r"[\s,\[\]]+", text)]
    names = [_OTHER_NAMES.get(word, word) for word in words if word.strip("-")]
    wrong = next((name for name in names if not _TOOL_NAME.fullmatch(name)), None)
    if wrong is not None:
        return (), f"its tools contain {clean_line(wrong)[:40]}, which is not the name of a tool"
    if not names or len(names) > _MAX_TOOLS:
        return (), f"its tools contain {len(names)} names; expected 1 to {_MAX_TOOLS}, or no line `tools`"
    return tuple(dict.fromkeys(names)), ""


def read_agent(kind: AgentKind) -> tuple[str, str]:
    """Return the whole text of an agent file, and the sha256 (hex) of the file.

    :raises ~crow.domain.errors.ArgumentError: the file is too large or cannot be read any more, or its path now
        contains a link.
    """
    try:
        data = read_file(Path(kind.source), 0, FILE_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"{kind.source} cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES:
        raise ArgumentError(f"{kind.source} is larger than {FILE_BYTES:,} bytes")
    return data.decode("utf-8", "replace"), hashlib.sha256(data).hexdigest()


def prompt_of(kind: AgentKind, text: str) -> tuple[AgentKind, str]:
    """Read the kind again from `text`, the whole text of its agent file. Return the kind as the file describes it now,
    and the prompt below the front matter.

    :raises ~crow.domain.errors.ArgumentError: the file cannot be used any more.
    """
    now = _agent_kind(kind.name, text.encode(), Path(kind.source), is_from_workspace=kind.is_from_workspace)
    prompt = text[front_matter(text, ())[1] :].strip()
    if now.problem or not prompt:
        raise ArgumentError(f"{kind.source} cannot be used: {now.problem or 'it has no prompt'}")
    return now, prompt
