"""Finds and reads the instruction files that the model gets as text.

The user's own AGENTS.md, beside `config.toml`, comes first. The files of the workspace follow, from the root of the
repository down to the working directory. A workspace may belong to a stranger, so each of its files is checked, and
`@path` can only include files that are inside the workspace after links are resolved.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from crow.domain.rendering import code
from crow.domain.text import safe

INSTRUCTION_FILE = "AGENTS.md"
FALLBACK_FILE = "CLAUDE.md"
"""The file that is read if a directory has no AGENTS.md."""

FILE_BYTES = 64 * 1024
_TOTAL_BYTES = 128 * 1024
MAX_DEPTH = 5
MAX_INCLUDES = 50
_MAX_NAMES = 500
"""In each file, crow looks up only this many `@path` mentions, from the start of the file."""

_INCLUDE = re.compile(r"(?<!\S)@([^\s@`]+)")
_CODE_SPAN = re.compile(r"`[^`]*`")
_FENCES = ("```", "~~~")
OUTSIDE = "it is outside the workspace"
TOO_DEEP = f"files include each other more than {MAX_DEPTH} levels deep"
TOO_MANY = f"crow includes at most {MAX_INCLUDES} files"
TOO_MUCH = f"crow reads at most {_TOTAL_BYTES // 1024} KiB of instructions"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSource:
    """An instruction file."""

    path: str
    size: int = 0
    """The number of bytes that the model gets."""
    left_out: str = ""
    """Why the file is left out. Empty if it is not."""
    included_by: str = ""
    """The path of the file that includes this one, if another file does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """The instructions as text for the model, and the files that contain them, in the order of the text."""

    text: str = ""
    sources: tuple[InstructionSource, ...] = ()


def anything(_path: Path) -> bool:
    """Return true for every path. This is the default of `may_read`."""
    return True


def read_instructions(
    cwd: Path,
    may_read: Callable[[Path], bool] = anything,
    *,
    contains: Callable[[Path], bool] | None = None,
    user_file: Path | None = None,
) -> Instructions:
    """Read the user's file and the files of the workspace. This call blocks.

    If a file is not trusted, the text contains the reason instead of the file's content. `may_read` and `contains` take
    a resolved path. `may_read` returns whether the rules let the model read that path, and `contains` returns whether
    the path is inside the workspace.
    """
    root = Path(os.path.realpath(cwd))
    reader = _InstructionReader(cwd, may_read, contains or (lambda path: path.is_relative_to(root)))
    if user_file is not None:
        reader.add_users(user_file)
    for folder in instruction_folders(cwd):
        reader.add_folder(folder)
    return Instructions(text="\n\n".join(reader.blocks), sources=tuple(reader.sources))


class _InstructionReader:
    """Collects instruction files, each at most once."""

    def __init__(self, cwd: Path, may_read: Callable[[Path], bool], contains: Callable[[Path], bool]) -> None:
        self.blocks: list[str] = []
        self.sources: list[InstructionSource] = []
        self._cwd = cwd
        self._may_read = may_read
        self._contains = contains
        self._seen: set[Path] = set()
        self._left = _TOTAL_BYTES
        self._includes = 0

    def add_users(self, file: Path) -> None:
        """Add the user's own file. The file may be a link. An `@path` in it is ignored."""
        try:
            path = file.resolve()
            if path.is_file():
                reason = distrust(path, file.parent, file.parent, anything)
                self._add(file, path, reason, note="the user's own, for every workspace")
        except OSError:
            return

    def add_folder(self, folder: Path) -> None:
        """Add the instruction file of one directory of the workspace, and the files that it includes."""
        file = instruction_file(folder)
        if file is None:
            return
        try:
            path = file.resolve()
            reason = distrust(path, folder, self._cwd, self._may_read)
            text = self._add(file, path, reason)
        except OSError:
            return
        self._include(file, text, 1)

    def _include(self, file: Path, text: str, depth: int) -> None:
        """Add the files that the text of `file` includes."""
        for name in islice(included_names(text), _MAX_NAMES):
            path = Path(os.path.realpath(file.parent / name))
            if path in self._seen:
                continue
            is_inside = self._contains(path)
            if is_inside and not file_size(path):
                continue  # no such file, so this is not an include but something like `@someone` or `@scope/package`
            self._includes += 1
            if self._includes > MAX_INCLUDES + 1:
                return
            if not is_inside:  # tell only the user, not the model: perhaps the word after `@` is no path
                self._seen.add(path)
                self.sources.append(InstructionSource(path=str(path), left_out=OUTSIDE, included_by=str(file)))
                continue
            try:
                if self._includes > MAX_INCLUDES:
                    reason = TOO_MANY
                elif depth > MAX_DEPTH:
                    reason = TOO_DEEP
                else:
                    reason = distrust(path, path.parent, self._cwd, self._may_read)
                included = self._add(path, path, reason, note=f"included by {file}", included_by=str(file))
            except OSError:
                continue
            self._include(path, included, depth + 1)

    def _add(self, file: Path, path: Path, reason: str, *, note: str = "", included_by: str = "") -> str:
        """Add one file, and return its text. `path` is the resolved path of `file`. `reason` says why the file must be
        left out. It is empty if the file may be used.

        :raises OSError: the file cannot be read.
        """
        if path in self._seen:
            return ""
        self._seen.add(path)
        reason = reason or ("" if self._left > 0 else TOO_MUCH)
        most = min(FILE_BYTES, self._left)
        data = b"" if reason else _read_start(path, most + 1)
        if b"\0" in data:  # binary files are ignored
            return ""
        text = data[:most].decode("utf-8", "replace").strip()
        if not text and not reason:
            return ""
        self._left -= len(data[:most])
        shown = f"(left out: {reason})" if reason else text
        if len(data) > FILE_BYTES:
            shown += f"\n(cut: {file} is larger than {FILE_BYTES // 1024} KiB)"
        elif len(data) > most:
            shown += f"\n(cut: {TOO_MUCH})"
        self.blocks.append(f"# {file}{f' ({note})' if note else ''}\n\n{shown}")
        self.sources.append(
            InstructionSource(path=str(file), size=len(data[:most]), left_out=reason, included_by=included_by)
        )
        return text


def instruction_folders(cwd: Path) -> tuple[Path, ...]:
    """Return the directories to search for instruction files, outermost first: from the root of the repository down to
    `cwd`. Outside a repository, return only `cwd`."""
    folders = (cwd, *cwd.parents)
    try:
        depth = next((at for at, folder in enumerate(folders) if os.path.lexists(folder / ".git")), 0)
    except ValueError:  # not a valid path
        depth = 0
    return folders[depth::-1]


def instruction_file(folder: Path) -> Path | None:
    """Return the instruction file of a directory, or None. Empty files are ignored. A link that leads out of the
    directory is ignored too, because it could expose any file to the endpoint."""
    files = (folder / INSTRUCTION_FILE, folder / FALLBACK_FILE)
    return next((file for file in files if file_size(file) and stays_in_folder(file)), None)


def included_names(text: str) -> Iterator[str]:
    """Yield each `path` that the text includes as `@path`, except in code."""
    fence = ""
    for line in text.splitlines():
        opening = line.lstrip()[:3]
        if fence or opening in _FENCES:
            fence = "" if fence == opening else fence or opening
            continue
        for found in _INCLUDE.finditer(_CODE_SPAN.sub("` `", line)):
            name = found[1].rstrip(".,;:!?)\"'")
            if name:
                yield name


def distrust(path: Path, directory: Path, cwd: Path, may_read: Callable[[Path], bool]) -> str:
    """Return why the instruction file at `path` must not go to the model, or "" if it may. `path` is resolved.

    A file is trusted if it belongs to the user, to root or to the owner of the workspace, and if neither the file nor
    its directory is writable for all users. `may_read` returns whether the rules let the model read the file.

    :raises OSError: the status of the file or of a directory cannot be read.
    """
    if hasattr(os, "geteuid"):  # not on Windows
        found = path.stat()
        if found.st_uid not in (os.geteuid(), 0, cwd.stat().st_uid):
            return f"it belongs to another user, with the id {found.st_uid}"
        if any(each.stat().st_mode & stat.S_IWOTH for each in (directory, path.parent)):
            return "all users can write to its directory"
        if found.st_mode & stat.S_IWOTH:
            return "all users can write to it"
    return "" if may_read(path) else "a rule forbids reading it, or it may hold keys"


def stays_in_folder(path: Path) -> bool:
    """Return whether `path`, after links are resolved, is still inside its parent directory."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Return 0 for anything else."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _read_start(path: Path, limit: int) -> bytes:
    """Return at most `limit` bytes of a regular file. :raises OSError: `path` contains links, does not lead to a
    regular file, or was changed to lead to another file during the call."""
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, os.O_RDONLY | flags), "rb") as file:
        opened = os.fstat(file.fileno())
        if not stat.S_ISREG(opened.st_mode) or os.path.realpath(path) != str(path):
            raise OSError(f"{path} is not a regular file")
        if not os.path.samestat(opened, path.lstat()):
            raise OSError(f"{path} now leads elsewhere")
        return file.read(limit)


def append_text(file: Path, before: bytes | None, added: bytes) -> None:
    """Append `added` to the user's own file, which may be a link. A new file has mode 0600. This call blocks.

    :raises OSError: the content of the file is no longer `before`, or the file cannot be written.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b") as opened:
        if opened.read() != (before or b""):
            raise OSError("somebody changed the file just now")
        opened.write(added)
        opened.flush()
        os.fsync(opened.fileno())


def describe_sources(sources: Sequence[InstructionSource]) -> str:
    """Return a Markdown list of the instruction files, for the user."""
    if not sources:
        return "The model gets no instruction files."
    lines = []
    for source in sources:
        by = f", included by {code(safe(source.included_by))}" if source.included_by else ""
        what = f": left out, because {source.left_out}" if source.left_out else f" ({source.size:,} bytes)"
        lines.append(f"- {code(safe(source.path))}{what}{by}")
    return "\n".join(["Instruction files:", *lines])
