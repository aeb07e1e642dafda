"""Keeps a directory with one readable file for each session up to date (`store.mirror`).

A separate thread reads new entries over a separate connection to the database, and appends them to the files. So no
prompt waits for the mirror. Crow may be killed at any time: the next start removes a line that was cut off, and adds
missing entries. Processes that use the same directory take turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from crow.domain.entries import Entry
from crow.domain.errors import CrowError, NoSuchSession
from crow.export.lines import entry_line, session_line
from crow.export.redact import Redactor
from crow.store import SessionRow, Store
from crow.store.admin import Admin

if TYPE_CHECKING:
    from crow.store.watching import Watcher

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2
"""The mirror waits this many seconds after an entry was stored, so that it writes the entries of a step together, and
not while the step still runs."""

_STATE = ".crow-mirror.json"
_LOCK = ".crow-mirror.lock"
_SPARE = 1_000
"""The mirror checks this many of the newest entries again at its next start, because a database server may finish
writing an entry after one with a higher id."""

_PLAIN_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,119}")
_HEAD_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024
_LINE_END = b"}}\n"
_ENTRY_ID = re.compile(rb'\{"id": ([0-9]{1,19}),')


class MirrorFolder:
    """The directory of a mirror. Files are opened relative to it, and never through links, so nothing outside of the
    directory is written.

    The caller must call `close`.
    """

    def __init__(self, path: Path) -> None:
        """:raises OSError: the directory cannot be created or used, is a link, or belongs to another user."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if os.fstat(self._handle).st_uid != os.geteuid():
            self.close()
            raise PermissionError(1, "it belongs to another user", str(path))

    def close(self) -> None:
        """Close the directory. Open files stay open."""
        os.close(self._handle)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process writes to the directory, and keep others from writing during the block."""
        with self.opened(_LOCK) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def opened(self, name: str, *, is_new: bool = False) -> Iterator[BinaryIO]:
        """Open a file for reading and writing, and create it if there is none. With `is_new`, empty the file first.

        :raises OSError: the file is a link, has a second name, or is not a regular file of this user.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(name, flags, 0o600, dir_fd=self._handle)
        with open(handle, "r+b", buffering=0) as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
                raise PermissionError(1, "it is a link, or not a file of this user", name)
            os.fchmod(handle, 0o600)
            if is_new:
                os.ftruncate(handle, 0)
            yield file

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file. A file that has the new name is replaced."""
        os.rename(name, new_name, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def remove(self, name: str) -> None:
        """Remove a file. Do nothing if there is none with this name."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._handle)

    def names(self) -> Sequence[str]:
        """Return the names of the sessions' files."""
        return [name for name in os.listdir(self._handle) if name.endswith(".jsonl")]

    def exists(self, name: str) -> bool:
        """Return whether there is a file or a link with this name."""
        try:
            os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True


def file_name(session_id: str) -> str:
    """Return the name of a session's file. Different ids get different names, even if the file system ignores case."""
    if _PLAIN_NAME.fullmatch(session_id):
        return f"{session_id}.jsonl"
    digest = hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{re.sub('[^a-z0-9_-]', '_', session_id[:80].lower())}-{digest}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSource:
    """The database that a mirror shows."""

    open: Callable[[], Awaitable[tuple[Store, Admin]]]
    """Opens the database for reading."""
    database: str
    """Names the database in the files, without secrets."""
    redact: Callable[[], Redactor]
    """Returns a function that masks secrets."""


class MirrorWriter:
    """Writes the files of one directory."""

    def __init__(self, folder: MirrorFolder, store: Store, admin: Admin, source: MirrorSource) -> None:
        self.is_closing = False
        """Set when the process ends: `catch_up` then leaves the rest of its work to the next start."""
        self.is_stopping = False
        """Set to end all work after the current batch."""
        self._folder = folder
        self._store = store
        self._admin = admin
        self._source = source

    async def catch_up(self) -> None:
        """Write the entries that the files still lack, and remove the files of deleted sessions."""
        with self._folder.locked(), self._folder.opened(_STATE) as file:
            state = _json_of(file.read())
        known = state.get(self._source.database)
        written = await self._admin.written_after(known if isinstance(known, int) else 0)
        for session_id in written:
            began = time.monotonic()
            await self.update(session_id)
            if self.is_closing:
                return
            await asyncio.sleep(
                min(0.2, time.monotonic() - began)
            )  # a first start writes all sessions; leave time for prompts
        await self.remove_deleted()
        if written:
            state[self._source.database] = max(0, max(written.values()) - _SPARE)
            with self._folder.locked():
                with self._folder.opened(f"{_STATE}.new", is_new=True) as file:
                    file.write(json.dumps(state).encode())
                self._folder.rename(f"{_STATE}.new", _STATE)

    async def update(self, session_id: str) -> None:
        """Append the new entries of a session to its file. Do not change a file that was written for another session or
        another database."""
        try:
            row = await self._store.session(session_id)
            with self._folder.locked():
                await self._write(row)
        except NoSuchSession:
            await self.remove_deleted()
        except (CrowError, OSError) as error:
            logger.warning("The mirror of session %s was not written: %s", session_id, error)

    async def _write(self, row: SessionRow) -> None:
        name = file_name(row.id)
        if not self._folder.exists(name):
            part = f".{name}.part"  # renamed when it has all entries of the sessions from which this one was forked
            with self._folder.opened(part, is_new=True) as file:
                file.write(session_line(row, self._source.database, self._source.redact()).encode())
                if row.forked_from is not None:
                    async for batch in self._store.history(row.id):
                        self._add(file, [entry for entry in batch if entry.session != row.id])
            self._folder.rename(part, name)
        with self._folder.opened(name) as file:
            head = _head_of(file)
            if (head.get("session"), head.get("database")) != (row.id, self._source.database):
                raise FileExistsError(17, "it was not written for this session", name)
            last = _last_entry(file)
            await self._append(file, row, last)

    async def _append(self, file: BinaryIO, row: SessionRow, last: int) -> None:
        async with aclosing(cast("Watcher", self._store).watch(row.id, after=last)) as changes:
            async for news in changes:
                self._add(file, news.entries)
                is_last = not news.entries or news.entries[-1].id >= news.row.newest_entry
                if is_last or self.is_stopping:
                    return

    def _add(self, file: BinaryIO, entries: Sequence[Entry]) -> None:
        redact = self._source.redact()
        data, end = "".join(entry_line(entry, redact) for entry in entries).encode(), file.seek(0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        except OSError:  # for example a full disk
            os.ftruncate(file.fileno(), end)
            raise

    async def remove_deleted(self) -> None:
        """Remove the files of sessions that were deleted from the database. Files that were written for another
        database stay."""
        with self._folder.locked():
            names = self._folder.names()
            ids = {file_name(session_id) for session_id in await self._admin.ids()}
            for name in names:
                if name not in ids:
                    with suppress(OSError), self._folder.opened(name) as file:
                        head = _head_of(file)
                        if head.get("kind") == "session" and head.get("database") == self._source.database:
                            self._folder.remove(name)


class Mirror:
    """Runs a `MirrorWriter` in a thread."""

    def __init__(self, path: Path, source: MirrorSource) -> None:
        self._path = path
        self._source = source
        self._pending: dict[str, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._writer: MirrorWriter | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="crow-mirror", daemon=True)

    def start(self) -> None:
        """Begin. Problems are only logged."""
        self._thread.start()

    def note(self, session_id: str) -> None:
        """Say that a session has new entries. This may be called from any thread, and returns at once."""
        if session_id not in self._pending:
            self._pending[session_id] = None
            self._wake_up()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write the pending entries for at most `timeout_s`. After that, wait up to `timeout_s` for the current batch
        to end. The next start writes the rest."""
        self._is_stopping = True
        if self._writer is not None:
            self._writer.is_closing = True
        self._wake_up()
        self._thread.join(timeout_s)
        if self._writer is not None and self._thread.is_alive():
            self._writer.is_stopping = True
            self._thread.join(timeout_s)

    def _wake_up(self) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the thread has just ended
                loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except (CrowError, OSError) as error:
            logger.warning("store.mirror: %s is not kept up to date: %s", self._path, error)
        except Exception:
            logger.exception("store.mirror: %s is not kept up to date", self._path)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        folder = MirrorFolder(self._path)
        try:
            store, admin = await self._source.open()
            try:
                self._writer = writer = MirrorWriter(folder, store, admin, self._source)
                await writer.catch_up()
                while self._pending or not self._is_stopping:
                    if not self._pending:
                        await self._wake.wait()
                    self._wake.clear()
                    if not self._is_stopping:
                        await asyncio.sleep(_PAUSE_S)
                    for session_id in tuple(self._pending):  # a copy, because other threads add sessions
                        if writer.is_stopping:
                            break
                        del self._pending[session_id]
                        await writer.update(session_id)
                    if writer.is_stopping:
                        break
            finally:
                await store.close()
        finally:
            folder.close()


def _json_of(data: bytes) -> dict[str, object]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _head_of(file: BinaryIO) -> dict[str, object]:
    """Return the JSON object in the first line of a file. Return an empty object if the line is anything else."""
    file.seek(0)
    return _json_of(file.read(_HEAD_BYTES).partition(b"\n")[0])


def _last_entry(file: BinaryIO) -> int:
    """Return the id of the entry in the last line, or 0 if there is only the first line. Remove a line that was cut off
    when a process was killed, and everything after the first line if the last one is damaged."""
    size = file.seek(0, os.SEEK_END)
    end = _line_start(file, size)  # the end of the file, unless its last line was cut off
    if end < size:
        os.ftruncate(file.fileno(), end)
    start = _line_start(file, end - 1)
    if start == 0:
        return 0
    file.seek(start)
    found = _ENTRY_ID.match(file.read(64))
    file.seek(end - len(_LINE_END))
    if found is None or file.read() != _LINE_END:
        file.seek(0)
        os.ftruncate(file.fileno(), len(file.read(_HEAD_BYTES).partition(b"\n")[0]) + 1)
        return 0
    return int(found[1])


def _line_start(file: BinaryIO, end: int) -> int:
    """Return the position after the last line end before `end`."""
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
