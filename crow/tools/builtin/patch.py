"""Converts patches to changes of files. It reads the form that OpenAI's models are trained to write, and git's form.

A patch names files in lines such as `*** Update File: a.py`. Below each, hunks begin with `@@`, and lines with a space,
`-` or `+` are kept, removed or added. Slips are understood only where nothing else can be meant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from crow.domain.errors import ArgumentError
from crow.domain.text import shorten

_MAX_LINES = 50_000
_MAX_FILES = 200
Mark: TypeAlias = Literal[" ", "-", "+", ""]
"""Says whether a line is kept (a space), removed or added. If the mark is empty, the line has no mark, and is kept."""

_FILE = re.compile(r"\*{3} (Add|Update|Delete) File: ?(.*)")
_MOVE = re.compile(r"\*{3} Move to: ?(.*)")
_RANGE = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@ ?(.*)")
_FENCE = re.compile(r"\s*```[\w+-]*\s*")
_HEREDOC = re.compile(r"\s*(?:apply_patch\s+)?<<-?\s*(['\"]?)(\w+)\1\s*")
_GIT_EXTRA = re.compile(r"(?:index [0-9a-f]+\.\.|(?:new|deleted) file mode |old mode |similarity index )")
_BEGIN, _END, _END_OF_FILE = "*** Begin Patch", "*** End Patch", "*** End of File"
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True, slots=True, kw_only=True)
class HunkLine:
    """A line of a hunk."""

    mark: Mark
    text: str
    """The line without its mark and its line end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One change within a file."""

    number: int
    """Counted from 1 within the file."""
    lines: tuple[HunkLine, ...] = ()
    headers: tuple[str, ...] = ()
    """Lines of the file above the change, the outermost first."""
    line: int | None = None
    """The line of the file, counted from 1, at which the hunk begins, if the patch says so."""
    is_at_end: bool = False
    """Whether the hunk ends at the end of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """The change that a patch makes to one file."""

    action: Literal["add", "update", "delete"]
    path: str
    hunks: tuple[Hunk, ...] = ()
    """The changes of an update. For a deletion, the removed lines, if the patch has them."""
    content: str = ""
    """The whole text of an added file."""
    move_to: str = ""
    """The new path of an updated file, or empty."""


def parse_patch(text: str) -> tuple[FileChange, ...]:
    """Return the changes of a patch.

    :raises ~crow.domain.errors.ArgumentError: the patch is malformed, ambiguous or too large. The message says where.
    """
    lines = _unwrapped([line.removesuffix("\r") for line in text.split("\n")])
    if len(lines) > _MAX_LINES:
        raise ArgumentError(f"the patch has {len(lines):,} lines; expected at most {_MAX_LINES:,}")
    is_git = not any(_FILE.fullmatch(line) for line in lines)
    changes = _Reader(lines).git_changes() if is_git else _Reader(lines).changes()
    if not changes:
        raise ArgumentError(
            f"the patch names no file; expected lines such as `{_BEGIN}`, `*** Update File: PATH`, `@@`, the changed "
            f"lines with a space, `-` or `+` in front, and `{_END}`"
        )
    if len(changes) > _MAX_FILES:
        raise ArgumentError(f"the patch changes {len(changes)} files; expected at most {_MAX_FILES}")
    return _joined(changes)


def _unwrapped(lines: list[str]) -> list[str]:
    """Remove the lines around the patch: `*** Begin Patch` and `*** End Patch`, a code fence, and a here-document.
    Return the same list."""

    def strip() -> None:
        while lines and not lines[0].strip():
            del lines[0]
        while lines and not lines[-1].strip():
            del lines[-1]

    strip()
    if lines and (heredoc := _HEREDOC.fullmatch(lines[0])):
        del lines[0]
        if lines and lines[-1].strip() == heredoc[2]:
            del lines[-1]
    strip()
    if lines and _FENCE.fullmatch(lines[0]):
        del lines[0]
        if lines and lines[-1].strip() == "```":
            del lines[-1]
    strip()
    if lines and lines[0].strip() == _BEGIN:
        del lines[0]
    if lines and lines[-1].strip() == _END:
        del lines[-1]
    for line in lines:
        if line.rstrip() in (_BEGIN, _END):  # with a space in front, it is a kept line of a file
            raise ArgumentError(f"`{line.strip()}` is in the middle of the patch; send one patch with all files")
    return lines


def _joined(changes: Sequence[FileChange]) -> tuple[FileChange, ...]:
    """Join several updates of one file into one change.

    :raises ~crow.domain.errors.ArgumentError: a file is named twice in any other way.
    """
    found: dict[str, FileChange] = {}
    for change in changes:
        known = found.get(change.path)
        if known is None:
            found[change.path] = change
        elif known.action == change.action == "update" and not known.move_to and not change.move_to:
            hunks = (*known.hunks, *change.hunks)
            numbered = tuple(replace(hunk, number=number) for number, hunk in enumerate(hunks, 1))
            found[change.path] = replace(known, hunks=numbered)
        else:
            raise ArgumentError(f"the patch names {change.path} twice; write all changes of a file in one section")
    return tuple(found.values())


class _Reader:
    """Reads the lines of a patch from the first to the last."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._at = 0

    def changes(self) -> list[FileChange]:
        """Return the changes of a patch with `***` lines."""
        changes: list[FileChange] = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            header = _FILE.fullmatch(line)
            if header is None:
                if line.strip():
                    raise self._error("expected a line such as `*** Update File: PATH`")
                self._at += 1
                continue
            self._at += 1
            path = header[2].strip()
            if not path:
                raise self._error("a path is missing", back=1)
            body = self._body()
            match header[1]:
                case "Add":
                    changes.append(FileChange(action="add", path=path, content=self._content(path, body)))
                case "Delete":
                    if any(each.strip() for each in body):
                        raise ArgumentError(f"*** Delete File: {path} is followed by lines; it takes none")
                    changes.append(FileChange(action="delete", path=path))
                case _:
                    changes.append(_update(path, body))
        return changes

    def git_changes(self) -> list[FileChange]:
        """Return the changes of a patch in git's form."""
        changes: list[FileChange] = []
        opened: int | None = None  # the index of a line `diff --git` below which no hunk has been read
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if _is_git_header(self._lines, self._at):
                opened = None
                old, new = (_git_path(self._lines[self._at + offset]) for offset in (0, 1))
                self._at += 2
                body = self._body(is_git=True)
                changes.append(_git_change(*_without_prefixes(old, new), body))
            elif line.startswith("rename "):
                raise self._error("use `*** Update File: OLD` with `*** Move to: NEW` to rename a file")
            elif line.startswith("new mode "):
                raise self._error("a patch cannot change a file's mode; use chmod in shell")
            elif line.startswith("diff --git ") and opened is None:
                opened = self._at
                self._at += 1
            elif not line.strip() or _GIT_EXTRA.match(line):
                self._at += 1
            else:
                break
        if opened is not None:
            self._at = opened
            raise self._error("no changed lines follow; use `*** Add File: PATH` or `*** Delete File: PATH`")
        if self._at < len(self._lines):
            raise self._error("expected a line such as `*** Update File: PATH`")
        return changes

    def _body(self, *, is_git: bool = False) -> list[str]:
        """Return the lines up to the next file."""
        start = self._at
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if is_git and (_is_git_header(self._lines, self._at) or line.startswith("diff --git ")):
                break
            if not is_git and _FILE.fullmatch(line):
                break
            self._at += 1
        return list(self._lines[start : self._at])

    def _content(self, path: str, body: list[str]) -> str:
        """Return the text of an added file."""
        if len(body) > 1 and body[0] == "--- /dev/null" and body[1].startswith("+++ "):
            body = body[2:]
        if body and _RANGE.fullmatch(body[0]):
            body = body[1:]
        body = [line for line in body if line not in (_END_OF_FILE, _NO_NEWLINE)]
        while body and not body[-1]:
            body.pop()
        if not any(line.startswith("+") for line in body):
            return "".join(f"{line}\n" for line in body)
        wrong = next((line for line in body if line and not line.startswith("+")), None)
        if wrong is not None:
            raise ArgumentError(f"a line of the new file {path} does not begin with `+`: {_shown(wrong)}")
        return "".join(f"{line[1:]}\n" for line in body)

    def _error(self, words: str, *, back: int = 0) -> ArgumentError:
        number = self._at - back
        return ArgumentError(f"line {number + 1} of the patch is {_shown(self._lines[number])}; {words}")


def _update(path: str, body: list[str]) -> FileChange:
    move_to = ""
    while body and not body[0].strip():
        body = body[1:]
    if body and (move := _MOVE.fullmatch(body[0])):
        move_to, body = move[1].strip(), body[1:]
    if _is_git_header([*body, "@@"], 0):  # `---` and `+++` below `*** Update File:` only repeat the path
        body = body[2:]
    hunks = _hunks(path, body)
    if not hunks and not move_to:
        raise ArgumentError(f"*** Update File: {path} has no lines that begin with `-` or `+`; nothing would change")
    return FileChange(action="update", path=path, move_to=move_to, hunks=hunks)


def _is_git_header(lines: Sequence[str], at: int) -> bool:
    """Return whether the two lines name a file in git's form. They do only if a hunk follows, because `--- x` can also
    remove the line `-- x`."""
    following = lines[at : at + 3]
    return (
        len(following) == 3
        and following[0].startswith("--- ")
        and following[1].startswith("+++ ")
        and following[2].startswith("@@")
    )


def _git_path(line: str) -> str:
    return line[4:].partition("\t")[0].strip()


def _without_prefixes(old: str, new: str) -> tuple[str, str]:
    """Return the two paths without the `a/` and `b/` that git puts in front of them. Paths are returned unchanged
    unless both have these prefixes, or one has and the other is `/dev/null`."""
    has_prefixes = (old.startswith("a/") or old == "/dev/null") and (new.startswith("b/") or new == "/dev/null")
    return (old.removeprefix("a/"), new.removeprefix("b/")) if has_prefixes else (old, new)


def _git_change(old: str, new: str, body: list[str]) -> FileChange:
    if old == new == "/dev/null":
        raise ArgumentError("the patch names /dev/null twice; expected the path of a file")
    hunks = _hunks(old if old != "/dev/null" else new, body)
    if old == "/dev/null":
        if any(line.mark != "+" for hunk in hunks for line in hunk.lines):
            raise ArgumentError(f"the patch adds {new}, but has lines without `+` for it")
        return FileChange(
            action="add", path=new, content="".join(f"{line.text}\n" for hunk in hunks for line in hunk.lines)
        )
    if new == "/dev/null":
        return FileChange(action="delete", path=old, hunks=hunks)
    return FileChange(action="update", path=old, hunks=hunks, move_to="" if old == new else new)


def _hunks(path: str, body: Sequence[str]) -> tuple[Hunk, ...]:
    """Return the hunks of one file. Blank lines that belong to no hunk are left out.

    :raises ~crow.domain.errors.ArgumentError: a hunk changes nothing, or a line cannot be read.
    """
    hunks: list[Hunk] = []
    headers: list[str] = []
    lines: list[HunkLine] = []
    first: int | None = None
    is_at_end = False

    def close() -> None:
        nonlocal headers, lines, first, is_at_end
        if any(line.mark in ("-", "+") for line in lines):
            hunks.append(
                Hunk(number=len(hunks) + 1, lines=tuple(lines), headers=tuple(headers), line=first, is_at_end=is_at_end)
            )
            headers, lines = [], []
        elif lines and any(line.text.strip() for line in lines):
            raise ArgumentError(
                f"hunk {len(hunks) + 1} of {path} changes nothing; mark removed lines with `-` and added ones with `+`"
            )
        lines, first, is_at_end = [], None, False

    for text in body:
        if text == _END_OF_FILE:
            is_at_end = True
            continue
        if text.startswith("*** "):
            raise ArgumentError(f"the patch has an unknown line for {path}: {_shown(text)}")
        if text == _NO_NEWLINE:
            continue
        if text.startswith("@@"):
            if lines or is_at_end:
                close()
            found = _RANGE.fullmatch(text)
            first = int(found[1]) if found else first
            header = found[2] if found else text[2:].removeprefix(" ").removesuffix("@@").rstrip()
            headers += [header] if header.strip() else []
            continue
        mark: Mark = text[:1] if text[:1] in (" ", "-", "+") else ""  # type: ignore[assignment]
        lines.append(HunkLine(mark=mark, text=text[len(mark) :]))
    close()
    return tuple(hunks)


def _shown(line: str) -> str:
    return f"`{shorten(line, 80)}`"
