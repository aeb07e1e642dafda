"""`list_files` and `grep`.

A separate program (`scan.py`) does the work, so that a bad regular expression cannot block the whole process. The
program is killed when the call is cancelled or times out. In a git repository, git lists the files, so ignored files
are left out. Crow uses git or ripgrep only if it is installed outside the workspace. It also prevents git from running
programs that the repository's configuration names.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import anyio.to_thread

from crow.domain.errors import ArgumentError
from crow.domain.rendering import code, in_title
from crow.domain.text import plural, shorten
from crow.tools import Outcome, PlannedCall
from crow.tools.builtin import scan
from crow.tools.builtin.files import stat_kind
from crow.tools.builtin.tool import Arguments, Builtin, PathTarget, ToolContext, ToolInvocation, argument, tool_spec
from crow.tools.limits import SEARCHES
from crow.tools.protection import SECRET_PLACES

_MAX_LISTED = 200
_MAX_MATCHING = 500
"""At most this many names are listed: `_MAX_LISTED`, or `_MAX_MATCHING` with a pattern. If there are more, they are
summarized."""
_MAX_MATCHES = 200
_MAX_CONTEXT = 20
_MAX_CONTEXT_LINES = 500
"""With context, fewer matches are shown, so that the answer has at most about this many lines."""
_MAX_FOLDERS = 3
"""At most this many of the directories that were left out are named."""
TIMEOUT_S = 60.0
_SECRET_PATHS = rf".*/(?:{'|'.join(map(re.escape, SECRET_PLACES))})(?:/.*)?"
_PATTERN_CHARS = 20_000
"""A pattern is a part of a command line, in which nearly all characters take at most 6 bytes. Linux accepts 131,071."""
_CHECKED_CHARS = 200
"""A pattern with more characters than this is checked only in the scanning program, because compiling a pattern of some
thousand characters can take seconds."""

_HINTS = (
    (r"\\[nr]|[\r\n]", r"grep searches each line by itself, without its line end: \n and \r match nothing"),
    (r"\\\|", r"\| matches the character |; write | between alternatives"),
    (r"\\[<>]", r"\< and \> match the characters < and >; write \b for the edge of a word"),
    (r"\[\[:\w+:\]", r"classes such as [[:space:]] are not known; write \s, \w or \d"),
)
"""Regular expressions for the parts of patterns that other programs read in another way than Python, each with the note
that the model gets if nothing matches."""

# This command fails if a link has been put into the path since the call was allowed.
_ENTER = "cd {path} && {{ [ \"$(pwd -P; echo .)\" = {shown} ] || {{ echo 'the path has changed'; exit 1; }}; }}"

_GIT_FILES = (
    "{{ unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT GCONV_PATH; "
    "GIT_OPTIONAL_LOCKS=0 GIT_NO_LAZY_FETCH=1 GIT_ALLOW_PROTOCOL=none "
    "{git} -c core.fsmonitor=false -c core.untrackedCache=false ls-files -z -co --exclude-standard 2>/dev/null; }} | "
)


async def _plan_list(context: ToolContext, args: Arguments) -> PlannedCall:
    target = context.target(args.get("path") or ".")
    matching = f" matching {in_title(args['pattern'])}" if args.get("pattern") else ""
    return target.plan(f"List files{matching}{_in_place(in_title(target.name))}", "search", "read")


async def _run_list(invocation: ToolInvocation, args: Arguments) -> Outcome:
    workspace, target = invocation.context.workspace, invocation.target(args.get("path") or ".")
    await stat_kind(workspace, target, ("directory",), "a directory; use read_file for files")
    pattern = args.get("pattern")
    limit = _MAX_MATCHING if pattern else _MAX_LISTED
    answer = await _scan_directory(invocation, target, {"glob": pattern, "limit": limit})
    total = answer["total"]
    # In a summary of a large tree, a line is a name, often with numbers in brackets behind it.
    found = {line: line.partition(" (")[0] if total > limit else line for line in answer["names"]}
    hidden = await _find_hidden(invocation, target, set(found.values()))
    names = [clean(line) for line, name in found.items() if name not in hidden]
    left_out = _describe_left_out(answer, len(hidden))
    if not names:
        text = f"No files{f' matching {pattern}' if pattern else ''}{_in_place(target.name)}."
        return Outcome(text="\n".join([text, *left_out]))
    lines = names if target.name == "." else [f"Paths are relative to {target.name}.", *names]
    if total > len(names) + len(hidden):
        lines.append(f"[{total:,} files in all; set path or pattern to list the files of one directory]")
    return Outcome(text="\n".join([*lines, *left_out]))


async def _plan_grep(context: ToolContext, args: Arguments) -> PlannedCall:
    pattern = args["pattern"]
    if len(pattern) <= _CHECKED_CHARS:
        with warnings.catch_warnings(action="ignore"):
            _check_pattern(pattern, scan.find_pattern_fault(pattern))
    target = context.target(args.get("path") or ".")
    return target.plan(f"Search {code(pattern)}{_in_place(in_title(target.name))}", "search", "read")


async def _run_grep(invocation: ToolInvocation, args: Arguments) -> Outcome:
    workspace, target = invocation.context.workspace, invocation.target(args.get("path") or ".")
    stat = await stat_kind(workspace, target, ("file", "directory"), "a file or directory")
    is_file = stat.kind == "file"
    request = {
        "file": target.path.name if is_file else None,
        "glob": None if is_file else args.get("glob"),
        "pattern": args["pattern"],
        "ignore_case": args.get("ignore_case", False),
        "context": (context := min(args.get("context", 0), _MAX_CONTEXT)),
        "limit": (limit := min(_MAX_MATCHES, _MAX_CONTEXT_LINES // (2 * context + 1))),
    }
    top = PathTarget.at(workspace, target.path.parent) if is_file else target
    answer = await _scan_directory(invocation, top, request)
    _check_pattern(args["pattern"], answer.get("fault", ""))
    hidden = set() if is_file else await _find_hidden(invocation, top, {file for file, _, _ in answer["matches"]})
    prefix, place = "" if top.name == "." else top.name + os.sep, _in_place(target.name)
    matches = [match for match in answer["matches"] if match[0] not in hidden]
    around = [line for line in answer["around"] if line[0] not in hidden]
    lines = _found_lines(matches, around, prefix, has_context=context > 0)
    if not lines and not answer["files"]:
        matching = f" that match {args['glob']}" if args.get("glob") else ""
        lines = [f"There are no files{matching} to search{place}."]
    elif not lines:
        lines = [f"No matches for `{args['pattern']}`{place}."]
        found = (note for part, note in _HINTS if re.search(rf"(?<!\\)(?:\\\\)*(?:{part})", args["pattern"]))
        lines += [f"[{note}]" for note in found]
    if answer["more"]:
        lines.append(f"[only the first {limit} matches; narrow the search with path, glob or a more specific pattern]")
    if around and args["context"] > _MAX_CONTEXT:
        lines.append(f"[context is at most {_MAX_CONTEXT} lines]")
    if is_file and answer["skipped"].get("binary"):
        lines.append(f"[{target.name} is binary; grep searches only text]")
    return Outcome(text="\n".join([*lines, *_describe_left_out(answer, len(hidden))]))


def _found_lines(
    matches: Sequence[Sequence[Any]], around: Sequence[Sequence[Any]], prefix: str, *, has_context: bool
) -> list[str]:
    """Return the lines to show in the style of grep: the number of a match has a colon after it, the number of a line
    around a match has a dash, and `--` separates lines that are not neighbours. If there are several lines of a file,
    its path is shown once, above them."""
    order = {file: index for index, (file, _, _) in enumerate(matches)}
    rows = [(order[file], file, line, ":", text) for file, line, text in matches]
    rows += [(order[file], file, line, "-", text) for file, line, text in around]
    lines: list[str] = []
    for file, group in groupby(sorted(rows), lambda row: row[1]):
        if has_context and lines:
            lines.append("--")
        path, found = prefix + clean(file), list(group)
        if len(found) == 1:
            _, _, line, sign, text = found[0]
            lines.append(f"{path}{sign}{line}{sign} {clean(text)}")
            continue
        lines.append(path)
        last = found[0][2]
        for _, _, line, sign, text in found:
            if has_context and line > last + 1:
                lines.append("--")
            lines.append(f"{line}{sign} {clean(text)}")
            last = line
    return lines


def _describe_left_out(answer: Mapping[str, Any], hidden: int) -> list[str]:
    """Return notes about what was left out, apart from files that are binary or that git ignores. `hidden` is the
    number of files that :func:`_find_hidden` returned."""
    skipped, folders, forbidden = Counter(answer["skipped"]), answer["folders"], answer["left_out"] + hidden
    notes = []
    if skipped["large"]:
        notes.append(f"skipped {plural(skipped['large'], 'file')} larger than {scan.FILE_BYTES:,} bytes")
    if skipped["walked"]:
        notes.append(f"only the first {scan.MAX_WALKED:,} files were looked at; set path to one of the directories")
    if folders:
        named = ", ".join(map(clean, folders[:_MAX_FOLDERS])) + (", ..." if len(folders) > _MAX_FOLDERS else "")
        notes.append(f"left out installed packages in {named}; set path to look there")
    if skipped["links"]:
        notes.append(f"did not follow {plural(skipped['links'], 'link')} to places outside the directory")
    if skipped["unreadable"]:
        notes.append(f"could not read {skipped['unreadable']:,} of the files and directories")
    if skipped["not_utf8"]:
        files = plural(skipped["not_utf8"], "file")
        notes.append(f"characters outside ASCII cannot be found in {files} with an encoding other than UTF-8")
    if forbidden:
        notes.append(f"left out {plural(forbidden, 'file')} that the user's rules forbid or that may hold keys")
    return [f"[{note}]" for note in notes]


async def _find_hidden(invocation: ToolInvocation, top: PathTarget, names: Collection[str]) -> set[str]:
    """Return those of the found names that may not be shown, although the scanning program did not leave them out:
    secret files, crow's own files, and hard links to excluded files. `names` are relative to `top`."""
    workspace, paths = invocation.context.workspace, {name: top.path / name.rstrip("/") for name in names}
    hidden = {
        name for name, path in paths.items() if workspace.read_protection(path) not in ("none", top.read_protection)
    }
    if invocation.excluded.patterns:
        root = workspace.resolve(".")
        excluded = re.compile(
            "|".join(f"(?:{each})" for each in invocation.excluded.patterns), re.IGNORECASE | re.DOTALL
        )
        known = await workspace.find_names(paths.values())
        for name, path in paths.items():
            others, is_complete = known.get(path, ((), True))
            spelled = [*others, *(other.removeprefix(f"{root}{os.sep}") for other in others)]
            if not is_complete or any(map(excluded.fullmatch, spelled)):
                hidden.add(name)
    return hidden


def _in_place(name: str) -> str:
    return "" if name == "." else f" in {name}"


def _check_pattern(pattern: str, fault: str) -> None:
    """Refuse a pattern that is not a regular expression. `fault` says why it is not one, and is empty if it is one.
    :raises ~crow.domain.errors.ArgumentError: `fault` is not empty."""
    if fault:
        shown = shorten(pattern, _CHECKED_CHARS + 1)
        raise ArgumentError(
            f'the pattern "{shown}" is not a Python regular expression: {fault}. '
            "Put a backslash before special characters to match them literally"
        )


async def _scan_directory(invocation: ToolInvocation, target: PathTarget, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of the scanning program for a directory. The program leaves out excluded files. It also leaves
    out secret files, unless the directory itself is secret.

    :raises ~crow.domain.errors.ArgumentError: the program took too long, or failed, for example because the directory
        may not be read.
    """
    workspace, top = invocation.context.workspace, target.path
    patterns = [*invocation.excluded.patterns, *([_SECRET_PATHS] if target.read_protection == "none" else ())]
    excluded = {"top": str(top), "root": str(workspace.resolve(".")), "patterns": patterns}
    if request.get("file") is not None:  # the user or a rule has allowed this file
        excluded = {}
    git, ripgrep = await anyio.to_thread.run_sync(lambda: (workspace.find_program("git"), workspace.find_program("rg")))
    whole = {**request, "excluded": excluded, "seconds": math.ceil(TIMEOUT_S) + 1, "ripgrep": ripgrep}
    program = shlex.join([sys.executable, "-I", "-S", "-W", "ignore", scan.__file__, json.dumps(whole)])
    enter = _ENTER.format(path=shlex.quote(str(top)), shown=shlex.quote(f"{top}\n."))
    if git is None or request.get("file") is not None:
        command = f"{enter} && {program} </dev/null"
    else:
        command = f"{enter} && {_GIT_FILES.format(git=shlex.quote(git))}{program}"
    exit_code, output = await workspace.run(command, access="full", timeout_s=TIMEOUT_S, on_output=_ignore_output)
    if exit_code is None:
        raise ArgumentError(f"timed out after {TIMEOUT_S:g} s; narrow the search with path, or use a simpler pattern")
    if exit_code != 0:
        raise ArgumentError(f"the search failed: {output.strip().rpartition(chr(10))[2]}")
    # Before the answer, the shell may have printed warnings, such as one about a locale that is not installed.
    answer: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    return answer


async def _ignore_output(_output: str) -> None: ...


def clean(text: str) -> str:
    """Return one line of valid text: control characters become escapes, and bytes that are not UTF-8 become U+FFFD."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(char if char.isprintable() or char in "\t " else repr(char)[1:-1] for char in text)


_LIST_FILES_SPEC = tool_spec(
    "list_files",
    "List the files below a directory, except those that git ignores. A large tree is summarized.",
    path=argument("string", "The directory. Default: the working directory."),
    pattern=argument("string", "A glob: *.py matches names in any directory, src/**/*.py paths."),
)
LIST_FILES = Builtin(_LIST_FILES_SPEC, "search", "read", _plan_list, _run_list, SEARCHES)

_GREP_SPEC = tool_spec(
    "grep",
    "Search files for lines that match a Python regular expression, except binary files and those that git ignores.",
    required="pattern",
    pattern=argument("string", minLength=1, maxLength=_PATTERN_CHARS),
    path=argument("string", "A directory or file. Default: the working directory."),
    glob=argument("string", "Only files that match, such as *.py."),
    ignore_case=argument("boolean", "Default false."),
    context=argument("integer", "Lines to show around each match.", minimum=0),
)
GREP = Builtin(_GREP_SPEC, "search", "read", _plan_grep, _run_grep, SEARCHES)
