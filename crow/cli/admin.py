"""Commands on sessions that write: export, import, archive, delete, prune, vacuum, backup.

Strategy: each says what it did, session by session. Whatever is removed was named, or listed by age on request; no file
that exists is ever written over.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from crow.cli.output import Column, counted, in_terminal, on_one_line, show, show_json, time_text
from crow.cli.sessions import OpenStore, ago_ms, directory, shortener, when
from crow.domain.errors import ArgumentError
from crow.store import SessionChanges

if TYPE_CHECKING:
    from crow.store.sqlite.admin import UnusedSession

__all__ = ["NewFile", "archive", "back_up", "delete", "export", "import_file", "prune", "unarchive", "vacuum"]

_MEGABYTE = 1024 * 1024


async def export(opened: OpenStore) -> None:
    """`crow sessions export`: JSONL, which loses nothing, or Markdown, to read."""
    options = opened.options
    if bool(options.ids) == options.all:
        raise ArgumentError("Name the sessions to export, or give --all.")
    ids = None if options.all else await opened.found()
    lines = opened.upkeep.export(ids) if options.format == "jsonl" else _markdown(opened, ids)
    if options.output is None:
        async for line in lines:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        return
    with NewFile(Path(options.output)) as file:
        async for line in lines:
            file.write(line)
    if options.json:
        show_json([{"path": str(file.path), "bytes": file.size}])
    else:
        _say(f"Wrote {file.path} ({file.size:,} bytes).")


async def import_file(opened: OpenStore) -> None:
    """`crow sessions import`: what is here already stays as it is."""
    from crow.store.sqlite.transfer import ImportDefaults

    settings = opened.loaded.settings
    defaults = ImportDefaults(model=settings.model.name or "", mode=settings.permissions.mode)
    done = await opened.upkeep.import_file(Path(opened.options.file), defaults)
    if opened.options.json:
        return show_json({"sessions": one.sessions, "entries": one.entries, "imported": one.is_new} for one in done)
    for one in done:
        what = f"imported with {counted(one.entries, 'entry')}" if one.is_new else "is here already; left as it is"
        for name in one.sessions:
            _say(f"{name}: {what}")
    return None


async def archive(opened: OpenStore) -> None:
    """`crow sessions archive`."""
    await _set_archived(opened, archived=True)


async def unarchive(opened: OpenStore) -> None:
    """`crow sessions unarchive`."""
    await _set_archived(opened, archived=False)


async def delete(opened: OpenStore) -> None:
    """`crow sessions delete`: all of the named ones, or none."""
    ids = await opened.found()
    titles = {name: (await opened.store.session(name)).title for name in ids}
    await opened.upkeep.remove(ids)
    _report(opened, ({"id": name, "title": titles[name], "deleted": True} for name in ids), "deleted")


async def prune(opened: OpenStore) -> None:
    """`crow sessions prune`: what was not used for long."""
    options = opened.options
    before_ms = ago_ms("--older-than", options.older_than, now=datetime.now().astimezone())
    shorten = await shortener(opened)
    if options.dry_run:
        old = await opened.upkeep.unused_since(before_ms, opened.cwd)
    else:
        old = await opened.upkeep.prune(before_ms, opened.cwd)
    if options.json:
        return show_json(_as_json(one, is_gone=not options.dry_run) for one in old)
    show(
        (
            Column(name="Id", style="fixed"),
            Column(name="Last used", style="fixed"),
            Column(name="Entries", style="right"),
            Column(name="Directory", style="fold"),
            Column(name="Title"),
        ),
        [(shorten(one.id), when(one.used_ms), str(one.entries), directory(one.cwd), one.title or "") for one in old],
        empty=f"No session was last used before {time_text(before_ms)}.",
    )
    if in_terminal() and old:
        _say(f"{counted(len(old), 'session')} {'would be' if options.dry_run else 'were'} removed.")
    return None


async def vacuum(opened: OpenStore) -> None:
    """`crow sessions vacuum`: while others go on working."""
    before = _size(opened.loaded.paths.database)
    await opened.store.tidy()
    after = _size(opened.loaded.paths.database)
    if opened.options.json:
        show_json([{"bytes_before": before, "bytes_after": after}])
    else:
        _say(f"{before / _MEGABYTE:.1f} MB before, {after / _MEGABYTE:.1f} MB now.")


async def back_up(opened: OpenStore) -> None:
    """`crow sessions backup`: into a new file."""
    done = await opened.upkeep.back_up(_backup_path(opened.options.path))
    if opened.options.json:
        show_json([asdict(done)])
    else:
        size = f"{done.bytes / _MEGABYTE:.1f} MB, {counted(done.sessions, 'session')}"
        _say(f"Wrote {done.path} ({size}); it passes the integrity check.")


async def _set_archived(opened: OpenStore, *, archived: bool) -> None:
    changes = SessionChanges(archived=archived)
    rows = [await opened.store.update_session(name, changes) for name in await opened.found()]
    values = ({"id": row.id, "title": row.title, "archived": row.archived} for row in rows)
    _report(opened, values, "archived" if archived else "back on the list")


async def _markdown(opened: OpenStore, ids: list[str] | None) -> AsyncIterator[bytes]:
    from crow.cli.transcript import Transcript

    if ids is None:
        ids = []
        for archived in (False, True):
            cursor: str | None = None
            while True:
                page = await opened.store.sessions(cursor=cursor, limit=200, archived=archived)
                ids += [row.id for row in page.rows]
                cursor = page.cursor
                if cursor is None:
                    break
    for name in ids:
        transcript = Transcript(is_full=True)
        yield transcript.head(await opened.store.session(name)).encode()
        async for batch in opened.store.history(name):
            for entry in batch:
                yield transcript.feed(entry).encode()


def _backup_path(text: str) -> Path:
    """The file that `text` names, or one by the time in the directory that it names."""
    path = Path(text)
    return path / f"crow-{datetime.now().astimezone():%Y%m%d-%H%M%S}.db" if path.is_dir() else path


def _report(opened: OpenStore, values: Iterable[Mapping[str, object]], what: str) -> None:
    if opened.options.json:
        show_json(values)
        return
    for value in values:
        title = f' "{value["title"]}"' if value["title"] else ""
        _say(f"{value['id']}{title}: {what}")


def _say(text: str) -> None:
    print(on_one_line(text))


def _as_json(old: UnusedSession, *, is_gone: bool) -> Mapping[str, object]:
    return {**asdict(old), "used": time_text(old.used_ms, "seconds"), "deleted": is_gone}


def _size(path: Path) -> int:
    return sum(part.stat().st_size for part in (path, Path(f"{path}-wal")) if part.exists())


# FROM cli.new_file: A file that is there whole or not at all, and never in the place of another.
#
# Strategy: written under another name beside the wanted one, flushed to disk, then renamed. Readable by its owner
# alone.


class NewFile:
    """A context: leaving it in peace puts the file at `path`; `size` is then its bytes."""

    def __init__(self, path: Path) -> None:
        """:raises ArgumentError: `path` exists."""
        if path.exists() or path.is_symlink():
            raise ArgumentError(f"{path} exists already. Name a file that does not, so that nothing is overwritten.")
        self.path = path
        self.size = 0
        self._part = path.with_name(f"{path.name}.part-{os.getpid()}")
        self._file: BinaryIO | None = None

    def __enter__(self) -> NewFile:
        """:raises ArgumentError: it cannot be made."""
        try:
            number = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        self._file = open(number, "wb")  # it is closed when this context is left
        return self

    def write(self, data: bytes) -> None:
        """:raises ArgumentError: it cannot be written."""
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            raise self._unwritable(error) from error

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """:raises ArgumentError: it cannot be written."""
        assert self._file is not None
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self.size = self._file.tell()
            self._file.close()
            if kind is None:
                self._part.rename(self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            with suppress(OSError):
                self._part.unlink()

    def _unwritable(self, error: OSError) -> ArgumentError:
        return ArgumentError(f"{self.path} cannot be written: {error.strerror}.")
