"""What people do with old sessions: find, count, export, import, archive, remove, back up.

Strategy: as `sqlite`: each method is a function of another file, run in the thread of the reader or the writer. The
agent knows nothing of this; the command line is the only caller. Whatever removes or overwrites is asked for by name.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from crow.domain.entries import Entry
from crow.domain.errors import StoreUnavailable
from crow.store import Scope
from crow.store.backup import Backup, back_up
from crow.store.export import Chosen, Lines, choose, family, next_entries
from crow.store.export_file import ExportFile
from crow.store.intake import Defaults, Intake, Piece, abandon, show
from crow.store.retention import Old, find, prune, remove, session_ids, unused_since
from crow.store.sqlite import SqliteStore
from crow.store.totals import Group, Total, totals

__all__ = ["Imported", "Upkeep"]

_IDS_PER_READ = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import did with one conversation: `is_new` false if it was here and stayed as it is."""

    sessions: tuple[str, ...]
    entries: int
    is_new: bool


class Upkeep:
    """The upkeep of an open store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._database = store.database

    async def find(self, name: str) -> str:
        """The id of the session that `name` means: an id, an alias, or the beginning of one id.

        :raises ~crow.domain.errors.ArgumentError: none, or several.
        """
        return await self._database.read(lambda sql: find(sql, name))

    async def ids(self) -> tuple[str, ...]:
        """Every session's id, in order."""
        return await self._database.read(session_ids)

    async def totals(self, by: Sequence[Group], scope: Scope) -> tuple[Total, ...]:
        """Tokens and cost, summed by the groups."""
        return await self._database.read(lambda sql: totals(sql, by, scope))

    async def unused_since(self, before_ms: int, cwd: str | None = None) -> tuple[Old, ...]:
        """Sessions that were last used before that time, oldest first."""
        return await self._database.read(lambda sql: unused_since(sql, before_ms, cwd, now_ms=_now_ms()))

    async def prune(self, before_ms: int, cwd: str | None = None) -> tuple[Old, ...]:
        """Remove those, and say which."""
        old = await self._database.write(lambda sql: prune(sql, before_ms, cwd, now_ms=_now_ms()))
        await self._store.tidy()
        return old

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove sessions with all that no other one needs.

        :raises ~crow.domain.errors.SessionBusy: a living process runs a turn in one; none is removed.
        """
        await self._database.write(lambda sql: remove(sql, ids, now_ms=_now_ms()))
        await self._store.tidy()

    async def back_up(self, path: Path) -> Backup:
        """Copy the database to `path` while it is in use, and verify the copy.

        :raises ~crow.domain.errors.ArgumentError: `path` exists or cannot be made.
        """
        return await self._database.read(lambda sql: back_up(sql, path))

    async def export(self, ids: Sequence[str] | None) -> AsyncIterator[bytes]:
        """The lines of a file with these sessions and their sub-agents; None: with every one that is listed."""
        lines = Lines()
        chosen = await self._database.read(lambda sql: family(sql, ids))
        for session_id in (name for names in chosen.values() for name in names):
            await self._store.open_session(session_id)  # closes what a dead process left open
        known = frozenset(name for names in chosen.values() for name in names)
        yield lines.header()
        for conversation, sessions in chosen.items():
            part = await self._choose(conversation, sessions, known)
            yield lines.head(part)
            done = 0
            while done < len(part.ids):
                entries, taken = await self._read(part, done)
                done += taken
                for line in lines.entries(part, entries):
                    yield line
            yield lines.moves(part)
        yield lines.end()

    async def import_file(self, path: Path, defaults: Defaults) -> tuple[Imported, ...]:
        """Check the whole file, then take in what is not here yet: a little at a time, since others write too, and
        nothing of it is seen before all of it is.

        :raises ~crow.domain.errors.ArgumentError: it is damaged or foreign, or what is in it is on its way in or out;
            nothing was imported.
        """
        await self._store.tidy()  # ids of sessions that were deleted are free after it
        file = await self._database.call(lambda: ExportFile(path))
        try:
            blocks = await self._database.call(file.check)
            intakes = [Intake(file, block, defaults) for block in blocks]
            new = [intake for intake in intakes if await self._take_in(intake)]
            await self._database.write(lambda sql: show(sql, new))
        except BaseException:
            with (
                anyio.CancelScope(shield=True),
                suppress(StoreUnavailable),
            ):  # else it is removed when this process ends
                await self._database.write(lambda sql: abandon(sql, self._store.owner))
            raise
        finally:
            await self._database.call(file.close)
        return tuple(
            Imported(sessions=block.sessions, entries=block.entries, is_new=intake in new)
            for block, intake in zip(blocks, intakes, strict=True)
        )

    async def _take_in(self, intake: Intake) -> bool:
        """Write all of it, hidden; false if it is here."""
        here = self._store.owner
        if not await self._database.write(lambda sql: intake.begin(sql, here, now_ms=_now_ms())):
            return False
        while (piece := await self._database.call(intake.next_piece)) is not None:
            await self._database.write(_addition(intake, here, piece))
        return True

    async def _choose(self, conversation: int, sessions: Sequence[str], known: frozenset[str]) -> Chosen:
        return await self._database.read(lambda sql: choose(sql, conversation, sessions, known))

    async def _read(self, chosen: Chosen, start: int) -> tuple[Sequence[Entry], int]:
        return await self._database.read(lambda sql: next_entries(sql, chosen, start, _IDS_PER_READ))


def _addition(intake: Intake, here: str, piece: Piece) -> Callable[[sqlite3.Connection], None]:
    return lambda sql: intake.add(sql, here, piece, now_ms=_now_ms())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
