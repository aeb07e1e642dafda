"""The program behind `list_files` and `grep`: lists files, or searches them for a regular expression.

Strategy: runs as a process of its own, by its path, with the standard library alone, since a regular expression that
never ends can be stopped only by ending its process. Argument: a JSON object (see `main`). Standard input: NUL-ended
names relative to the current directory, or nothing, then the directory is walked. Answer: one line of JSON. Symbolic
links are never followed. Knows nothing of crow.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator

VERSION_CONTROL = (".git", ".hg", ".svn", ".jj")
CACHES = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox")
SKIPPED = frozenset((*VERSION_CONTROL, *CACHES, ".venv", "venv", "node_modules"))
WALKED_FILES = 200_000
FILE_BYTES = 20_000_000
SNIFFED_BYTES = 8_192
LINE_CHARS = 400
UNSAFE_AS_A_WHOLE = re.compile(r"\\[AZ]|\(\?(?![:i])")


def main() -> None:
    """Answer the request in the first argument.

    `glob`: names to keep, or null. `limit`: how many to give. For grep also `pattern`, `ignore_case`, and `file`: a
    single name to search, or null. The answer of a list: `names`, `total`. Of grep: `matches` as [name, line, text],
    `more`, `large` (how many files were too large to look into).
    """
    request = json.loads(sys.argv[1])
    names = [request["file"]] if request.get("file") else list_names()
    if request["glob"]:
        keep = re.compile(glob_expression(request["glob"])).fullmatch
        names = [name for name in names if keep(name if "/" in request["glob"] else name.rpartition("/")[2])]
    if "pattern" in request:
        flags = re.IGNORECASE if request["ignore_case"] else 0
        answer = search(names, request["pattern"], flags, request["limit"])
    else:
        answer = {"names": summarised(names, request["limit"]), "total": len(names)}
    print(json.dumps(answer))  # noqa: T201


def list_names() -> list[str]:
    """Names from standard input that exist; else everything below the current directory; sorted."""
    given = [os.fsdecode(name) for name in sys.stdin.buffer.read().split(b"\0") if name]
    if not given:
        return sorted(walk("."))
    names: set[str] = set()
    for name in given:
        try:
            is_directory = stat.S_ISDIR(os.lstat(name).st_mode)
        except OSError:
            continue  # git still knows what was deleted
        if is_directory:  # a repository in the repository
            names.update(walk(name.rstrip("/")))
        else:
            names.add(name)
    return sorted(names)


def walk(top: str) -> Iterator[str]:
    """Files below `top`, without the directories that hold what tools made."""
    count = 0
    for directory, subdirectories, files in os.walk(top):
        subdirectories[:] = sorted(name for name in subdirectories if name not in SKIPPED)
        for name in files:
            yield os.path.normpath(os.path.join(directory, name))
            count += 1
            if count >= WALKED_FILES:
                return


def glob_expression(pattern: str) -> str:
    """A glob as a regular expression: `*` and `?` within a name, `**` across directories, `[...]`, `{a,b}`."""
    expression, at, braces = "", 0, 0
    pattern = pattern.removeprefix("./")
    while at < len(pattern):
        rest, char = pattern[at:], pattern[at]
        step = 1
        if rest.startswith("**/"):
            expression, step = expression + "(?:.*/)?", 3
        elif rest.startswith("**"):
            expression, step = expression + ".*", 2
        elif char == "*":
            expression += "[^/]*"
        elif char == "?":
            expression += "[^/]"
        elif char == "[" and (end := rest.find("]", 2)) > 0:
            inner = rest[1:end].replace("\\", "\\\\")
            expression, step = expression + f"[{'^' + inner[1:] if inner[0] == '!' else inner}]", end + 1
        elif char == "{" and "}" in rest:
            expression, braces = expression + "(?:", braces + 1
        elif char == "," and braces:
            expression += "|"
        elif char == "}" and braces:
            expression, braces = expression + ")", braces - 1
        else:
            expression += re.escape(char)
        at += step
    return expression + ")" * braces


def summarised(names: list[str], limit: int) -> list[str]:
    """At most `limit` lines that cover all names: deep directories are given as one line with their count, as far as
    needed; where even that is too much, the first `limit`."""
    if len(names) <= limit:
        return names
    deepest = max(name.count("/") for name in names)
    for depth in range(deepest, 0, -1):
        counts: dict[str, int] = {}
        for name in names:
            parts = name.split("/")
            line = name if len(parts) <= depth else "/".join(parts[:depth]) + "/"
            counts[line] = counts.get(line, 0) + 1
        if len(counts) <= limit:
            return [f"{line} ({count} files)" if line.endswith("/") else line for line, count in counts.items()]
    return names[:limit]


def search(names: list[str], pattern: str, flags: int, limit: int) -> dict[str, object]:
    expression = re.compile(pattern, flags)
    # a file without any match as a whole has none in a line, unless the pattern speaks of the ends of its text
    as_a_whole = None if UNSAFE_AS_A_WHOLE.search(pattern) else re.compile(pattern, flags | re.MULTILINE).search
    matches: list[tuple[str, int, str]] = []
    large = 0
    for name in names:
        text = text_of(name)
        if text is None:
            large += 1
        elif text and (as_a_whole is None or as_a_whole(text)):
            matches.extend(matching_lines(name, text, expression.search, limit + 1 - len(matches)))
            if len(matches) > limit:
                return {"matches": matches[:limit], "more": True, "large": large}
    return {"matches": matches, "more": False, "large": large}


def text_of(name: str) -> str | None:
    """The text of a regular file; "" for what is none, None for one that is too large."""
    try:
        file = os.open(name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return ""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return ""
        if status.st_size > FILE_BYTES:
            return None
        data = os.read(file, status.st_size)
    except OSError:
        return ""
    finally:
        os.close(file)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace")
    return "" if b"\0" in data[:SNIFFED_BYTES] else data.decode("utf-8", "replace")


def matching_lines(
    name: str, text: str, matches: Callable[[str], re.Match[str] | None], limit: int
) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    for number, line in enumerate(text.split("\n"), 1):
        match = matches(line.removesuffix("\r"))
        if match is not None:
            found.append((name, number, excerpt(line.removesuffix("\r"), match.start())))
            if len(found) >= limit:
                break
    return found


def excerpt(line: str, at: int) -> str:
    """The line, or the part of a long one around its match."""
    if len(line) <= LINE_CHARS:
        return line
    start = max(0, at - LINE_CHARS // 4)
    end = start + LINE_CHARS
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")


if __name__ == "__main__":
    main()
