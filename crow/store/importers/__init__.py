"""Imports sessions of other tools.

Each importer translates sessions into a crow export. Then crow imports this export like any other export. So the
importers know the form of an export, and nothing else of the store. They never change the files of other tools, and
treat the content of these files as hostile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from crow.domain.errors import ArgumentError
from crow.store.importers import claude_code, codex, goose, openai_json, opencode, pi
from crow.store.importers.builder import ConversationBuilder, Source
from crow.store.importers.databases import MAGIC, count_rows, opened_copy
from crow.store.importers.files import (
    Damaged,
    Problems,
    as_object,
    first_lines,
    modified_ms,
    open_regular,
    parse_object,
    readable,
    real_path,
    text,
)
from crow.store.portable import FORMAT, End, Header, line_of

__all__ = [
    "TOOLS",
    "Batch",
    "Problems",
    "SessionScan",
    "Source",
    "default_path",
    "importable",
    "importable_at",
    "is_crow_export",
]

_PREFIXES = {tool.NAME: tool.TOOL for tool in (claude_code, codex, pi, opencode, goose, openai_json)}
"""Maps each tool to the prefix of its session ids."""

TOOLS = tuple(_PREFIXES)
"""The names of the tools whose sessions can be imported, as `crow sessions import --from` takes them."""

_SKIPPED_FOLDERS = frozenset({"node_modules", ".git", ".venv", "__pycache__"})
_ENDINGS = (".jsonl", ".json", ".db", ".sqlite", ".sqlite3")
_PEEK_BYTES = 64 * 1024
"""The format of a JSON file is guessed from this many bytes, unless the user named the file."""
_FIRST_LINE_BYTES = 256 * 1024
_MOST_PEEKED = 300
_CLAUDE_FILES = "????????-*.jsonl"
"""Matches the files of Claude Code's sessions, which are named by UUIDs. Files of subagents, such as
`agent-a1b2.jsonl`, do not match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importable:
    """A tool whose usual directory has sessions."""

    tool: str
    path: Path
    """The directory."""
    sessions: int
    """The number of sessions."""


class SessionScan:
    """A search for the sessions below a path. Use it as a context manager, because it keeps copies of databases
    open."""

    def __init__(self, path: Path, *, tool: str | None = None) -> None:
        """:raises ArgumentError: `path` cannot be read."""
        self._root = real_path(path)
        self._tool = tool
        """The only tool to look for, or None to look for all tools."""
        self._stack = ExitStack()
        """Closes the copies of databases."""
        self.problems = Problems()
        self.groups: list[tuple[Source, ...]] = []
        """Each group is a session followed by its subagents. The oldest group is first."""

    def __enter__(self) -> SessionScan:
        with ExitStack() as stack:
            self._stack = stack
            self.groups = _grouped(list(self._sources()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _sources(self) -> Iterator[Source]:
        if self._root.is_file():
            yield from self._in_file(self._root, is_named=True)
        elif not self._root.is_dir():
            raise ArgumentError(f"{self._root} is neither a file nor a directory.")
        elif opencode.is_storage(self._root / "storage") and os.path.isfile(self._root / opencode.DATABASE):
            # The database has everything that the files have, because opencode moved their contents into it.
            yield from self._in_file(self._root / opencode.DATABASE, is_named=True)
        else:
            yield from self._in_directory()

    def _in_directory(self) -> Iterator[Source]:
        def report(error: OSError) -> None:
            self.problems.skip_file(error.filename, readable(error))

        for folder, folders, names in os.walk(self._root, onerror=report):
            directory = Path(folder)
            folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
            if self._wants(opencode.NAME) and opencode.is_storage(directory):
                folders.clear()
                yield from opencode.sessions_in_files(directory, self.problems)
                continue
            for name in sorted(names):
                if name.endswith(_ENDINGS) and name != codex.INDEX:
                    yield from self._in_file(directory / name, is_named=False)

    def _in_file(self, path: Path, *, is_named: bool) -> Iterator[Source]:
        """Yield the sessions in a file. `is_named` is true if the user named the file.

        :raises ArgumentError: the user named the file, and the file cannot be read or has no sessions.
        """
        try:
            with open_regular(path) as file:
                start = file.read(_PEEK_BYTES)
            if start.startswith(MAGIC):
                found = list(self._in_database(path))
            elif path.name.endswith(".json"):
                found = list(self._in_document(path, start, is_named=is_named))
            else:
                found = list(self._in_lines(path))
        except (OSError, Damaged, ArgumentError) as error:
            words = str(error) if isinstance(error, ArgumentError) else f"{path} cannot be read: {readable(error)}."
            if is_named:
                raise ArgumentError(words) from error
            if not isinstance(error, Damaged):  # pipes and devices have no sessions
                self.problems.skip_file(path, readable(error).removeprefix(f"{path} "))
            return
        if not found and is_named:
            expected = (
                f"sessions of {self._tool}" if self._tool else f"a crow export, or sessions of {', '.join(TOOLS)}"
            )
            raise ArgumentError(f"{path} has no sessions; expected {expected}.")
        yield from found

    def _in_lines(self, path: Path) -> Iterator[Source]:
        lines = first_lines(path)
        for module in (claude_code, codex, pi, goose, openai_json):
            if self._wants(module.NAME) and (found := module.recognise(path, lines)) is not None:
                yield found
                return

    def _in_document(self, path: Path, start: bytes, *, is_named: bool) -> Iterator[Source]:
        can_fit = b'"role"' in start and start.lstrip(b"\xef\xbb\xbf \r\n\t")[:1] in b"[{"
        if self._wants(openai_json.NAME) and (can_fit or is_named):
            # A directory can contain unrelated JSON files. So a file without messages is reported only if the user
            # named the file or the tool.
            yield openai_json.document(path, is_expected=is_named or self._tool is not None)

    def _in_database(self, path: Path) -> Iterator[Source]:
        with ExitStack() as stack:
            database = stack.enter_context(opened_copy(path))
            for module in (opencode, goose):
                if self._wants(module.NAME) and module.is_database(database.tables()):
                    yield from module.sessions_in_database(database)
                    self._stack.enter_context(stack.pop_all())
                    return
            # The copy is deleted now: a directory can have many large databases of other programs.

    def _wants(self, tool: str) -> bool:
        return self._tool is None or self._tool == tool


class Batch:
    """Translates sessions into one crow export. Import this export before you begin the next batch. The caller
    opens and closes the file."""

    def __init__(self, file: BinaryIO, *, cwd: str) -> None:
        self._file = file
        self._cwd = cwd
        """The directory of sessions that have none of their own."""
        self._file.write(line_of(Header(format=FORMAT)))
        self._lines = 1
        self._ids: set[str] = set()
        """The ids of the sessions in the export."""
        self.tools: dict[str, str] = {}
        """Maps the ids of translated sessions to their tools."""
        self.empty = 0
        """The number of sessions without messages."""

    @property
    def size(self) -> int:
        """The size of the file so far, in bytes."""
        return self._file.tell()

    def add(self, group: Sequence[Source], problems: Problems) -> None:
        """Translate a session and its subagents. Lines and files that cannot be translated are reported to
        `problems`."""
        built: list[ConversationBuilder] = []

        def new(session_id: str, parent_id: str | None = None) -> ConversationBuilder:
            built.append(ConversationBuilder(session_id, cwd=self._cwd, parent_id=parent_id, problems=problems))
            return built[-1]

        try:
            for source in group:
                before = len(built)
                try:
                    source.read(new, problems)
                except ArgumentError as error:
                    problems.skip_file(source.place, str(error))
                    for one in built[before:]:
                        one.close()
                    del built[before:]
                self.tools |= {one.session_id: source.tool for one in built[before:]}
            self._write(built)
        finally:
            for one in built:
                one.close()

    def end(self) -> None:
        """Complete the export."""
        # A hash is not needed, because only this process reads the file, and the import checks every record.
        self._file.write(line_of(End(lines=self._lines, sha256=None)))
        self._file.flush()

    def _write(self, built: Sequence[ConversationBuilder]) -> None:
        for one in built:
            one.end_turn()
        full = {one.session_id: one for one in built if not one.is_empty and one.session_id not in self._ids}
        self._ids |= full.keys()
        self.empty += sum(one.is_empty for one in built)
        for one in full.values():
            if one.parent_id not in full:
                one.parent_id = None
            self._lines += one.write_to(self._file)


def is_crow_export(path: Path) -> bool:
    """Return whether crow has exported the file."""
    try:
        with open_regular(real_path(path)) as file:
            return parse_object(file.readline(_PEEK_BYTES)).get("type") == "crow"
    except (OSError, Damaged):
        return False


def default_path(tool: str) -> Path | None:
    """Return the directory in which a tool keeps its sessions, or None if the directory does not exist."""
    return next((home.path for home in _homes() if home.tool == tool), None)


def importable(known: Collection[str] = ()) -> list[Importable]:
    """Return the tools that have sessions in their usual directories, each with the number of its sessions. `known` are
    the ids of crow's sessions. A tool is left out if at least one of its sessions is in `known`. To be quick, this
    function opens only databases. It counts all other sessions by the names of their files, so a number can be too
    high."""
    return _counted((), known)


def importable_at(paths: Sequence[str], known: Collection[str] = ()) -> list[Importable]:
    """Return the tools that have sessions of one working directory, each with the number of these sessions.

    `paths` are the spellings of the working directory, for example with and without symbolic links. `known` are the
    ids of crow's sessions in this directory. A tool is left out if at least one of its sessions is in `known`. To be
    quick, this function reads only the newest `_MOST_PEEKED` files of a tool.
    """
    return _counted(paths, known)


def _counted(paths: Sequence[str], known: Collection[str]) -> list[Importable]:
    prefixes = {name.partition("-")[0] for name in known}
    found = []
    for home in _homes():
        with suppress(OSError):
            if _PREFIXES[home.tool] not in prefixes and (number := home.count(paths)):
                found.append(Importable(tool=home.tool, path=home.path, sessions=number))
    return found


@dataclass(frozen=True, slots=True)
class _Home:
    """The usual directory of a tool."""

    tool: str
    path: Path
    globs: tuple[str, ...]
    """The files of sessions below `path`."""
    database: str = ""
    """The name of the database that newer versions of the tool use in place of these files, or empty if the tool has
    none."""
    table: str = ""
    """The table of sessions in the database."""
    column: str = ""
    """The column of this table with the sessions' directories."""

    def count(self, paths: Sequence[str]) -> int:
        """Count the sessions that ran in one of the directories `paths`, or all sessions if `paths` is empty."""
        database = self.path / self.database
        if os.path.isfile(database):
            return count_rows(database, self.table, self.column if paths else "", paths)
        globs = self.globs
        if paths and self.tool == claude_code.NAME:  # its folders are named after the directories
            globs = tuple({f"{re.sub('[^A-Za-z0-9]', '-', path)}/{_CLAUDE_FILES}" for path in paths})
        files = [file for glob in globs for file in self.path.glob(glob)]
        if not paths or self.tool == claude_code.NAME:
            return len(files)
        newest = sorted(files, key=modified_ms, reverse=True)[:_MOST_PEEKED]
        return sum(_directory_of(file) in paths for file in newest)


def _homes() -> Iterator[_Home]:
    """Yield the usual directories of tools that exist."""
    try:
        home = Path.home()
    except RuntimeError:
        return
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    claude = Path(os.environ.get("CLAUDE_CONFIG_DIR") or home / ".claude") / "projects"
    codex_home = Path(os.environ.get("CODEX_HOME") or home / ".codex")
    pi_home = Path(os.environ.get("PI_CODING_AGENT_DIR") or home / ".pi/agent") / "sessions"
    rollouts = ("sessions/**/rollout-*.jsonl", "archived_sessions/**/rollout-*.jsonl")
    opencode_files, goose_home = ("storage/session/*/*.json",), data / "goose/sessions"
    for one in (
        _Home(claude_code.NAME, claude, (f"*/{_CLAUDE_FILES}",)),
        _Home(codex.NAME, codex_home, rollouts),
        _Home(pi.NAME, pi_home, ("*/*.jsonl",)),
        _Home(opencode.NAME, data / "opencode", opencode_files, opencode.DATABASE, "session", "directory"),
        _Home(goose.NAME, goose_home, ("*.jsonl",), goose.DATABASE, "sessions", "working_dir"),
    ):
        if os.path.isdir(one.path):
            yield one


def _directory_of(file: Path) -> str:
    """Return the directory of a session of Codex, pi, opencode or goose, or an empty string if the file does not name
    the directory. A JSON file is read whole. In a JSONL file, the first line has the directory."""
    try:
        with open_regular(file) as opened:
            is_whole = file.suffix == ".json"
            value = parse_object((opened.read if is_whole else opened.readline)(_FIRST_LINE_BYTES))
    except (OSError, Damaged, RecursionError):
        return ""
    value = as_object(value.get("payload")) or value
    return next((place for key in ("cwd", "directory", "working_dir") if (place := text(value.get(key)))), "")


def _grouped(sources: Sequence[Source]) -> list[tuple[Source, ...]]:
    """Return the sessions, oldest first. Each session is followed by its subagents. If several sessions have the same
    id, only the newest is returned."""
    known = {one.session_id: one for one in sorted(sources, key=lambda one: one.updated_ms) if one.session_id}
    children: dict[str, list[Source]] = {}
    roots = [one for one in sources if not one.session_id]
    for one in known.values():
        if one.parent_id in known and not _is_own_ancestor(one, known):
            children.setdefault(one.parent_id or "", []).append(one)
        else:
            roots.append(one)

    def family(one: Source) -> Iterator[Source]:
        waiting = [one]
        while waiting:
            yield (member := waiting.pop())
            waiting += reversed(children.get(member.session_id, ()) if member.session_id else ())

    return [tuple(family(one)) for one in sorted(roots, key=lambda one: one.updated_ms)]


def _is_own_ancestor(one: Source, known: Mapping[str, Source]) -> bool:
    seen: set[str] = set()
    parent = one.parent_id
    while parent is not None and parent in known and parent not in seen:
        if parent == one.session_id:
            return True
        seen.add(parent)
        parent = known[parent].parent_id
    return False
