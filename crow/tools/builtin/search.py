"""`list_files` and `grep`.

git names the files where there is a repository, so that what it ignores is left out; everywhere else the directory is
walked. The work is done by a program of its own (`scan.py`), run through the workspace and ended with the call, since a
bad regular expression would otherwise hold up the whole process. git and ripgrep are used where there are some outside
of the workspace; git is kept from running anything that the repository's own configuration names.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from crow.domain.entries import Announcement, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.domain.rendering import code, in_title
from crow.tools import Outcome, PlannedCall, Workspace
from crow.tools.builtin import scan
from crow.tools.builtin.files import missing
from crow.tools.builtin.tool import Arguments, Builtin, ToolContext, ToolInvocation, path_names, shown_name, shown_path
from crow.tools.process import found_program

__all__ = ["GREP", "LIST_FILES"]

LISTED = 500
MATCHES = 200
TIMEOUT_S = 60.0
CHECKED_CHARS = 200
"""A longer pattern is checked by the program alone: some thousand characters can take seconds to compile."""

ENTER = (
    "cd {place} && {{ [ \"$(pwd -P; echo .)\" = {shown} ] || {{ echo 'the path leads elsewhere by now'; exit 1; }}; }}"
)
"""To a directory, if no link leads out of the way to it by now."""

GIT_FILES = (
    "{{ unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE; "
    "GIT_OPTIONAL_LOCKS=0 GIT_NO_LAZY_FETCH=1 GIT_ALLOW_PROTOCOL=none "
    "{git} -c core.fsmonitor=false -c core.untrackedCache=false ls-files -z -co --exclude-standard 2>/dev/null; }} | "
)


async def look_at_list(around: ToolContext, args: Arguments) -> PlannedCall:
    workspace = around.workspace
    path = workspace.resolve(args.get("path") or ".")
    pattern = args.get("pattern")
    what = f"files matching {in_title(pattern)}" if pattern else "files"
    name = shown_name(workspace, path)
    return looked(workspace, path, f"List {what}{within(in_title(name))}")


async def look_at_grep(around: ToolContext, args: Arguments) -> PlannedCall:
    pattern = args["pattern"]
    if len(pattern) <= CHECKED_CHARS:
        with warnings.catch_warnings(action="ignore"):
            check_pattern(pattern, scan.fault_in(pattern))
    workspace = around.workspace
    path = workspace.resolve(args.get("path") or ".")
    name = shown_name(workspace, path)
    return looked(workspace, path, f"Search {code(args['pattern'])}{within(in_title(name))}")


def looked(workspace: Workspace, path: Path, title: str) -> PlannedCall:
    return PlannedCall(
        announcement=Announcement(title=title, kind="search", locations=(Location(path=shown_path(workspace, path)),)),
        access="read",
        outside=not workspace.contains(path),
        paths=path_names(workspace, path),
    )


def within(name: str) -> str:
    """Where a search looks, unless that goes without saying."""
    return "" if name == "." else f" in {name}"


def check_pattern(pattern: str, fault: str) -> None:
    """:raises ~crow.domain.errors.ArgumentError: there is a `fault`, so that the pattern is no regular expression."""
    if fault:
        shown = pattern if len(pattern) <= CHECKED_CHARS else f"{pattern[:CHECKED_CHARS]}…"
        raise ArgumentError(
            f'grep: pattern is "{shown}"; expected a Python regular expression: {fault}. '
            "Put a backslash before characters that stand for themselves"
        )


async def run_list(running: ToolInvocation, args: Arguments) -> Outcome:
    workspace = running.workspace
    path = running.resolve(args.get("path") or ".")
    name = shown_name(workspace, path)
    stat = await workspace.stat(path)
    if stat.kind == "missing":
        raise await missing("list_files", workspace, path)
    if stat.kind != "directory":
        raise ArgumentError(f"list_files: {name} is no directory; use read_file")
    pattern = args.get("pattern")
    answer = await scanned("list_files", workspace, path, {"glob": pattern, "limit": LISTED})
    names, total = [clean(line) for line in answer["names"]], answer["total"]
    if not names:
        return Outcome(text=f"No files{f' matching {pattern}' if pattern else ''}{within(name)}.")
    lines = names if name == "." else [f"Paths are relative to {name}.", *names]
    if any(line.endswith(" files)") for line in names) and total > len(names):
        lines.append(f"[{total:,} files; directories with a count are not listed: name one with path, or use pattern]")
    elif total > len(names):
        lines.append(f"[the first {len(names)} of {total:,} files; narrow it with path or pattern]")
    return Outcome(text="\n".join(lines))


async def run_grep(running: ToolInvocation, args: Arguments) -> Outcome:
    workspace = running.workspace
    path = running.resolve(args.get("path") or ".")
    name = shown_name(workspace, path)
    stat = await workspace.stat(path)
    if stat.kind == "missing":
        raise await missing("grep", workspace, path)
    if stat.kind == "other":
        raise ArgumentError(f"grep: {name} is a device, pipe or socket; expected a file or directory")
    is_file = stat.kind == "file"
    request = {
        "file": path.name if is_file else None,
        "glob": None if is_file else args.get("glob"),
        "pattern": args["pattern"],
        "ignore_case": args.get("ignore_case", False),
        "limit": MATCHES,
    }
    top = path.parent if is_file else path
    answer = await scanned("grep", workspace, top, request)
    check_pattern(args["pattern"], answer.get("fault", ""))
    prefix = "" if (where := shown_name(workspace, top)) == "." else where + os.sep
    lines = [f"{prefix}{clean(file)}:{line}: {clean(text)}" for file, line, text in answer["matches"]]
    if not lines:
        lines = [f"No line matches `{args['pattern']}`{within(name)}."]
    if answer["more"]:
        lines.append(f"[the first {MATCHES} matches; narrow it with path, glob or a longer pattern]")
    if answer["large"]:
        lines.append(f"[{answer['large']} files larger than {scan.FILE_BYTES:,} bytes were left out]")
    return Outcome(text="\n".join(lines))


async def scanned(tool: str, workspace: Workspace, top: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """What the scanning program answers for the directory `top`.

    :raises ~crow.domain.errors.ArgumentError: it took too long, or may not look there.
    """
    git, ripgrep = await anyio.to_thread.run_sync(programs, workspace)
    whole = {**request, "seconds": math.ceil(TIMEOUT_S) + 1, "ripgrep": ripgrep}
    program = [sys.executable, "-I", "-S", "-W", "ignore", scan.__file__, json.dumps(whole)]
    walks = git is None or request.get("file") is not None
    source = "" if walks else GIT_FILES.format(git=shlex.quote(str(git)))
    enter = ENTER.format(place=shlex.quote(str(top)), shown=shlex.quote(f"{top}\n."))
    command = f"{enter} && {source}{shlex.join(program)}"
    if walks:
        command += " </dev/null"
    code, output = await workspace.run(command, timeout_s=TIMEOUT_S, on_output=unwatched)
    if code is None:
        raise ArgumentError(f"{tool}: stopped after {TIMEOUT_S:.0f} s; narrow it with path, or a simpler pattern")
    if code != 0:
        raise ArgumentError(f"{tool}: the search failed: {output.strip().rpartition(chr(10))[2]}")
    answer: dict[str, Any] = json.loads(output)
    return answer


def programs(workspace: Workspace) -> tuple[str | None, str | None]:
    """git and ripgrep, where there are some that may be run."""
    return found_program("git", workspace.contains), found_program("rg", workspace.contains)


async def unwatched(_output: str) -> None:
    """Nobody looks at the output of these commands while they run."""


def clean(text: str) -> str:
    """One line of valid text: control characters as escapes, bytes that are no UTF-8 as U+FFFD."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(char if char.isprintable() or char in "\t " else repr(char)[1:-1] for char in text)


LIST_FILES = Builtin(
    spec=ToolSpec(
        name="list_files",
        description=(
            "List the files below a directory, without those that git ignores. Large trees are summarised by directory."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "The directory. Default: the working directory."},
                "pattern": {
                    "type": "string",
                    "description": "A glob: *.py matches names anywhere, src/**/*.py whole paths below the directory.",
                },
            },
        },
    ),
    kind="search",
    access="read",
    look=look_at_list,
    run=run_list,
)

GREP = Builtin(
    spec=ToolSpec(
        name="grep",
        description=(
            "Search files for lines that match a Python regular expression, without those that git ignores and binary "
            f"ones. Gives path:line: text, at most {MATCHES} matches."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "pattern": {"type": "string", "minLength": 1, "description": "The regular expression."},
                "path": {"type": "string", "description": "A directory or file. Default: the working directory."},
                "glob": {"type": "string", "description": "Search only files that match, such as *.py."},
                "ignore_case": {"type": "boolean", "description": "Default false."},
            },
            "required": ["pattern"],
        },
    ),
    kind="search",
    access="read",
    look=look_at_grep,
    run=run_grep,
)
