"""Imports sessions of other tools.

Each importer translates sessions into a crow export. Then crow imports this export like any other export. So the
importers know the form of an export, and nothing else of the store. They never change the files of other tools, and
treat the content of these files as hostile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

from crow.domain.errors import ArgumentError
from crow.store.importers import claude_code, codex, goose, openai_json, opencode, pi
from crow.store.importers.builder import ConversationBuilder, ExportWriter, NewConversation
from crow.store.importers.databases import MAGIC, count_rows, opened_copy
from crow.store.importers.files import (
    Damaged,
    Problems,
    first_lines,
    modified_ms,
    obj,
    open_regular,
    parse_object,
    readable,
    real_path,
    text,
)

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
_OPENCODE_FILES = "storage/session/*/*.json"
"""The files in which older versions of opencode keep their sessions."""
_ROLLOUTS = ("sessions", "archived_sessions")
"""The folders in which Codex keeps the files of its sessions."""

Read: TypeAlias = Callable[[NewConversation, Problems], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A session of another tool that can be imported."""

    tool: str
    place: str
    """Tells the user where the session is."""
    session_id: str
    """The session's id in crow, or empty if this id is not known until the session is read."""
    parent_id: str | None = None
    updated_ms: int
    """Unix milliseconds. Sessions are sorted by this time."""
    read: Read = field(repr=False)
    """Builds the session's conversations."""


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
        self._titles: dict[Path, Mapping[str, str]] = {}
        """Maps each index of Codex to the titles in it."""
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
            # The files have nothing that the database does not have, because opencode moved their contents into it.
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
                yield from self._in_storage(directory)
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
        for module in (claude_code, codex, pi, goose):
            if self._wants(module.NAME) and (found := module.recognise(path, lines)) is not None:
                name, parent = found
                read: Read
                if module is codex:
                    title = self._codex_titles(path).get(name, "")
                    read = partial(codex.read, path, name, parent, title)
                elif module is goose:
                    read = partial(goose.read_file, path, name, parent)
                else:
                    read = partial(module.read, path, name, parent)
                yield _source(module.NAME, path, name, parent, read)
                return
        if self._wants(openai_json.NAME) and openai_json.recognise(lines):
            yield _source(openai_json.NAME, path, "", None, partial(openai_json.read_jsonl, path))

    def _in_document(self, path: Path, start: bytes, *, is_named: bool) -> Iterator[Source]:
        def read(new: NewConversation, problems: Problems) -> None:
            is_other = not openai_json.read_json(path, new, problems)
            if is_other and (is_named or self._tool is not None):  # a directory can contain unrelated JSON files
                problems.skip_file(path, "it has no messages")

        can_fit = b'"role"' in start and start.lstrip(b"\xef\xbb\xbf \r\n\t")[:1] in b"[{"
        if self._wants(openai_json.NAME) and (can_fit or is_named):
            yield _source(openai_json.NAME, path, "", None, read)

    def _in_database(self, path: Path) -> Iterator[Source]:
        with ExitStack() as stack:
            database = stack.enter_context(opened_copy(path))
            tables = database.tables()
            if self._wants(opencode.NAME) and opencode.is_database(tables):
                for one in opencode.sessions_in_database(database):
                    messages = partial(opencode.messages_in_database, database, one)
                    yield _opencode_source(one, f"{path}, session {one.name}", messages, one.updated_ms or 0)
            elif self._wants(goose.NAME) and goose.is_database(tables):
                for session in goose.sessions_in_database(database):
                    yield Source(
                        tool=goose.NAME,
                        place=f"{path}, session {session.name}",
                        session_id=session.session_id,
                        updated_ms=session.updated_ms or 0,
                        read=partial(goose.read_database, database, session),
                    )
            else:
                return  # delete the copy now: a directory can have many large databases of other programs
            self._stack.enter_context(stack.pop_all())

    def _in_storage(self, storage: Path) -> Iterator[Source]:
        for one, path in opencode.sessions_in_files(storage, self.problems):
            messages = partial(opencode.messages_in_files, storage, one)
            yield _opencode_source(one, str(path), messages, one.updated_ms or modified_ms(path))

    def _codex_titles(self, path: Path) -> Mapping[str, str]:
        index = codex.index_near(path)
        if index is None:
            return {}
        if index not in self._titles:
            self._titles[index] = codex.titles_in(index)
        return self._titles[index]

    def _wants(self, tool: str) -> bool:
        return self._tool is None or self._tool == tool


class Batch:
    """Translates sessions into one crow export. Import this export before you begin the next batch. The caller
    opens and closes the file."""

    def __init__(self, file: BinaryIO, *, cwd: str) -> None:
        self._file = file
        self._cwd = cwd
        """The directory of sessions that have none of their own."""
        self._writer = ExportWriter(file)
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
            built.append(ConversationBuilder(session_id, cwd=self._cwd, parent_id=parent_id))
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
        self._writer.end()

    def _write(self, built: Sequence[ConversationBuilder]) -> None:
        for one in built:
            one.end_turn()
        full = {one.session_id: one for one in built if not one.is_empty and one.session_id not in self._ids}
        self._ids |= full.keys()
        self.empty += sum(one.is_empty for one in built)
        for one in full.values():
            if one.parent_id not in full:
                one.parent_id = None
            self._writer.add(one)


def is_crow_export(path: Path) -> bool:
    """Return whether crow has exported the file."""
    try:
        with open_regular(real_path(path)) as file:
            return parse_object(file.readline(_PEEK_BYTES)).get("type") == "crow"
    except (OSError, Damaged):
        return False


def default_path(tool: str) -> Path | None:
    """Return the directory in which a tool keeps its sessions, or None if the directory does not exist."""
    return next((one.path for one in _places() if one.tool == tool), None)


def importable(known: Collection[str] = ()) -> list[Importable]:
    """Return the tools that have sessions in their usual directories, each with the number of its sessions. `known` are
    the ids of crow's sessions. A tool is left out if at least one of its sessions is in `known`. To be quick, this
    function opens only databases. It counts all other sessions by the names of their files, so a number can be too
    high."""
    prefixes = {name.partition("-")[0] for name in known}
    return [one for one in _places() if one.sessions and _PREFIXES[one.tool] not in prefixes]


def importable_at(paths: Sequence[str], known: Collection[str] = ()) -> list[Importable]:
    """Return the tools that have sessions of one working directory, each with the number of these sessions.

    `paths` are the spellings of the working directory, for example with and without symbolic links. `known` are the
    ids of crow's sessions in this directory. A tool is left out if at least one of its sessions is in `known`. To be
    quick, this function reads only the newest `_MOST_PEEKED` files of a tool.
    """
    prefixes = {name.partition("-")[0] for name in known}
    found = []
    for place in _places():
        count: Callable[[], int] | None = None
        match place.tool:
            case _ if _PREFIXES[place.tool] in prefixes:
                continue
            case claude_code.NAME:
                names = {re.sub(r"[^A-Za-z0-9]", "-", path) for path in paths}
                count = partial(_files_below, [place.path / name for name in names], "*.jsonl", besides="agent-")
            case codex.NAME:
                count = partial(_files_at, place.path, [f"{folder}/**/rollout-*.jsonl" for folder in _ROLLOUTS], paths)
            case pi.NAME:
                count = partial(_files_at, place.path, ["*/*.jsonl"], paths)
            case opencode.NAME:
                count = partial(_opencode_at, place.path, paths)
            case goose.NAME:
                count = partial(_goose_at, place.path, paths)
        with suppress(OSError):
            if count is not None and (number := count()):
                found.append(Importable(tool=place.tool, path=place.path, sessions=number))
    return found


def _files_below(folders: Sequence[Path], pattern: str, *, besides: str) -> int:
    return sum(_files(folder, pattern, besides=besides) for folder in folders)


def _opencode_at(root: Path, paths: Sequence[str]) -> int:
    if os.path.isfile(root / opencode.DATABASE):
        return count_rows(root / opencode.DATABASE, "session", "directory", paths)
    return _files_at(root, [_OPENCODE_FILES], paths)


def _goose_at(root: Path, paths: Sequence[str]) -> int:
    return count_rows(root / goose.DATABASE, "sessions", "working_dir", paths) or _files_at(root, ["*.jsonl"], paths)


def _files_at(root: Path, patterns: Sequence[str], paths: Sequence[str]) -> int:
    """Count the files below `root` whose sessions ran in one of the directories `paths`."""
    files = sorted((file for pattern in patterns for file in root.glob(pattern)), key=modified_ms, reverse=True)
    return sum(_directory_of(file) in paths for file in files[:_MOST_PEEKED])


def _directory_of(file: Path) -> str:
    """Return the directory of a session of Codex, pi, opencode or goose, or an empty string if its file does not say.
    A JSON file is read whole. In a JSONL file, the first line has the directory."""
    try:
        with open_regular(file) as opened:
            is_whole = file.suffix == ".json"
            value = parse_object((opened.read if is_whole else opened.readline)(_FIRST_LINE_BYTES))
    except (OSError, Damaged, RecursionError):
        return ""
    value = obj(value.get("payload")) or value
    return next((place for key in ("cwd", "directory", "working_dir") if (place := text(value.get(key)))), "")


def _places() -> Iterator[Importable]:
    """Yield each tool whose usual directory exists, with the number of its sessions."""
    try:
        home = Path.home()
    except RuntimeError:
        return
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    claude = Path(os.environ.get("CLAUDE_CONFIG_DIR") or home / ".claude") / "projects"
    codex_home = Path(os.environ.get("CODEX_HOME") or home / ".codex")
    pi_home = Path(os.environ.get("PI_CODING_AGENT_DIR") or home / ".pi/agent") / "sessions"
    opencode_home, goose_home = data / "opencode", data / "goose/sessions"
    places: Sequence[tuple[str, Path, Callable[[], int]]] = (
        (claude_code.NAME, claude, lambda: _files(claude, "*/*.jsonl", besides="agent-")),
        (codex.NAME, codex_home, lambda: sum(_files(codex_home, f"{one}/**/rollout-*.jsonl") for one in _ROLLOUTS)),
        (pi.NAME, pi_home, lambda: _files(pi_home, "*/*.jsonl")),
        (
            opencode.NAME,
            opencode_home,
            lambda: count_rows(opencode_home / opencode.DATABASE, "session") or _files(opencode_home, _OPENCODE_FILES),
        ),
        (
            goose.NAME,
            goose_home,
            lambda: count_rows(goose_home / goose.DATABASE, "sessions") or _files(goose_home, "*.jsonl"),
        ),
    )
    for tool, path, count in places:
        with suppress(OSError):
            if path.is_dir():
                yield Importable(tool=tool, path=path, sessions=count())


def _files(directory: Path, pattern: str, *, besides: str = "\0") -> int:
    """Count the files that match a glob, except those whose names begin with `besides`."""
    return sum(not path.name.startswith(besides) for path in directory.glob(pattern))


def _source(tool: str, path: Path, session_id: str, parent_id: str | None, read: Read) -> Source:
    return Source(
        tool=tool,
        place=str(path),
        session_id=session_id,
        parent_id=parent_id,
        updated_ms=modified_ms(path),
        read=read,
    )


def _opencode_source(
    session: opencode.OpencodeSession, place: str, messages: Callable[[Problems], opencode.Messages], updated_ms: int
) -> Source:
    def read(new: NewConversation, problems: Problems) -> None:
        opencode.read(session, lambda: messages(problems), place, new, problems)

    return Source(
        tool=opencode.NAME,
        place=place,
        session_id=session.session_id,
        parent_id=session.parent_id,
        updated_ms=updated_ms,
        read=read,
    )


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
