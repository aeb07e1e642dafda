"""Writes and reads the lines of export files, for both engines."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias, TypeVar

from crow.domain.entries import Body, Entry
from crow.domain.errors import ArgumentError, StoreUnavailable
from crow.store import portable
from crow.store.admin import ImportDefaults, Imported
from crow.store.codec import Encoded, encode
from crow.store.portable import (
    Block,
    ConversationRecord,
    EntryRecord,
    ExportFile,
    MoveRecord,
    Record,
    SessionRecord,
)

WRITTEN_LATER = frozenset({"title", "leaf", "listed"})
"""Fields of a `SessionRecord` that an import does not simply copy into the session's new row. The title is cleaned
first, the leaf is set later, and `listed` is not a column."""

EXTRA_COLUMNS = ("model", "mode", "additional_directories", "config", "metadata", "calibration", "principal")
"""Columns of `sessions` that an export does not contain. `SessionExtras` has fields with the same names."""

PIECE_RECORDS = 200
"""A piece of an import ends as soon as it has this many records."""

_PIECE_CHARACTERS = 1024 * 1024
"""A piece of an import ends as soon as its entries have this many characters."""

_COPIED = ("turn", "model", "usage", "cost", "estimate")
"""Fields of an entry that have the same value in the file and in the database."""

Piece: TypeAlias = Sequence[MoveRecord | tuple[EntryRecord, Encoded]]
"""Records of a conversation, ready to be written. Each entry is paired with its encoded body."""


_I = TypeVar("_I", bound="ConversationImport")


class SessionTaken(ArgumentError):
    """Another process is importing or removing a session that is to be imported."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f'Session "{session_id}" is being imported or removed by another process now. Import the file again when'
            " that is done."
        )


class ImportRemoved(StoreUnavailable):
    """Other stores counted this store as dead, and removed the data that its import had written."""

    def __init__(self) -> None:
        super().__init__("The import was interrupted for too long and has been removed. Import the file again.")


class ExportedSessionDeleted(StoreUnavailable):
    """A session was deleted while it was exported."""

    def __init__(self, sessions: Collection[str]) -> None:
        """`sessions` are the exported sessions of the conversation. At least one of them was deleted."""
        names = ", ".join(sorted(sessions))
        super().__init__(
            f"A session was deleted while it was exported ({names}). The file is incomplete; export again."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSelection:
    """The part of a conversation that is exported: the current and former paths of the chosen sessions, and the entries
    that these sessions wrote."""

    conversation: int
    head: tuple[portable.ConversationRecord | SessionRecord, ...]
    """The first records, ready to be written."""
    moves: tuple[MoveRecord, ...]
    """Ready to be written."""
    ids: array[int]
    """The ids of the entries, ascending."""
    missing: frozenset[int]
    """The members of `ids` whose entries are missing because the database is damaged."""
    sessions: frozenset[str]
    written_blobs: set[str] = field(default_factory=set)
    """The hashes of the blobs that are already in the file."""


class Lines:
    """Produces the lines of one export file. First, call `records` with the header. Then, for each conversation, call
    `records` with its head, `entries` with its entries, and `records` with its moves. Call `end` last."""

    def __init__(self) -> None:
        self._count = 0
        self._hash = hashlib.sha256()

    def records(self, *records: Record) -> bytes:
        """Return the lines of records that are not entries."""
        return b"".join(self._counted(portable.line_of(record)) for record in records)

    def entries(self, chosen: ExportSelection, entries: Sequence[Entry]) -> Iterator[bytes]:
        """Return the lines of some entries of the selection. Each blob comes just before the first entry that refers to
        it."""
        for entry in entries:
            numbered = portable.renumbered(
                entry.body, lambda one: number_of(chosen.ids, one), lambda one: _bound(chosen.ids, one)
            )
            record = EntryRecord(
                id=number_of(chosen.ids, entry.id),
                parent=_parent_number(chosen.ids, entry),
                session=entry.session if entry.session in chosen.sessions else None,
                created_ms=entry.created_ms,
                kind="",
                body={},
                **{name: getattr(entry, name) for name in _COPIED},
            )
            yield from self.entry(record, numbered, chosen.written_blobs)

    def entry(self, record: EntryRecord, body: Body, written_blobs: set[str]) -> Iterator[bytes]:
        """Return the lines of one entry. `written_blobs` are the hashes of the blobs that are already in the file; this
        method adds to them."""
        encoded = encode(body, shares_texts=False)  # older versions of crow cannot import texts that are blobs
        text = encoded.text if encoded.spilled is None else encoded.blobs[encoded.spilled].decode()
        for name, data in encoded.blobs.items():
            if name != encoded.spilled and name not in written_blobs:
                written_blobs.add(name)
                yield self._counted(portable.line_of(portable.blob_record(name, data)))
        yield self._counted(portable.line_of(replace(record, kind=encoded.kind), body=text))

    def end(self) -> bytes:
        """Return the last line."""
        return portable.line_of(portable.End(lines=self._count, sha256=self._hash.hexdigest()))

    def _counted(self, line: bytes) -> bytes:
        self._count += 1
        self._hash.update(line)
        return line


def by_conversation(rows: Iterable[tuple[int, str]]) -> dict[int, tuple[str, ...]]:
    """Map each conversation to its sessions, in the order of the rows."""
    found: dict[int, list[str]] = {}
    for conversation, session_id in rows:
        found.setdefault(conversation, []).append(session_id)
    return {conversation: tuple(ids) for conversation, ids in found.items()}


def number_of(ids: array[int], entry: int) -> int:
    """Return the number of the entry with this id in the file, or 0 if the entry is not exported. `ids` are the ids of
    the exported entries, ascending."""
    at = _bound(ids, entry)
    return at if at <= len(ids) and ids[at - 1] == entry else 0


def _parent_number(ids: array[int], entry: Entry) -> int | None:
    """Return the number of an entry's parent in the file. Return None if the entry has no parent, if the parent is not
    exported, or if the parent is not older than the entry, which happens only in a damaged database."""
    return None if entry.parent is None or entry.parent >= entry.id else number_of(ids, entry.parent) or None


def _bound(ids: array[int], entry: int) -> int:
    """Return the number in the file of the first exported entry whose id is at least `entry`."""
    return bisect_left(ids, entry) + 1


class ConversationImport(ABC):
    """Reads one conversation of an export file, for an import. Call `read_head`, then `next_piece` until it returns
    None."""

    def __init__(self, file: ExportFile, block: Block, defaults: ImportDefaults) -> None:
        self.block = block
        self.defaults = defaults
        self.is_same = False
        """Whether the same conversation was imported before, according to its hash."""
        self._file = file
        self._cleaned: list[str] = []
        """The ids of the sessions whose titles were changed by the import."""
        self._records: Iterator[tuple[Record, Body | None]] = iter(())
        """The records of the conversation that were not read yet."""

    @abstractmethod
    def entry_id(self, number: int | None) -> int | None:
        """Return the database id of an entry of the file, or None if the file has no entry with this number."""

    @abstractmethod
    def bound(self, number: int) -> int:
        """Return the database id of an entry of the file. If the file has no entry with this number, return the nearest
        id that keeps the order."""

    def read_head(self) -> tuple[ConversationRecord, Sequence[SessionRecord]]:
        """Return the records before the first entry and the first move. Each call starts again at the beginning of the
        conversation."""
        self._cleaned = []
        self._records = self._file.records(self.block)
        conversations: list[ConversationRecord] = []
        sessions: list[SessionRecord] = []
        for record, body in self._records:
            match record:
                case ConversationRecord():
                    conversations.append(record)
                case SessionRecord():
                    sessions.append(record)
                case EntryRecord() | MoveRecord():
                    self._records = chain([(record, body)], self._records)
                    break
        return conversations[0], sessions

    def title_of(self, session: SessionRecord) -> str | None:
        """Return the title for an imported session. If the title in the file is too long or has invisible characters,
        it is changed. Titles of copied sessions are not changed."""
        if session.title is None or session.id in self.defaults.extras:
            return session.title
        title = portable.clean_title(session.title)
        if title != session.title:
            self._cleaned.append(session.id)
        return title

    def next_piece(self) -> Piece | None:
        """Return the next entries and moves of the conversation, or None at its end. This method does not use the
        database.

        :raises InvalidExport: a record is not valid.
        :raises ArgumentError: the file was changed meanwhile.
        """
        piece: list[MoveRecord | tuple[EntryRecord, Encoded]] = []
        characters = 0
        for record, body in self._records:
            if isinstance(record, EntryRecord) and body is not None:
                stored = encode(portable.renumbered(body, lambda number: self.entry_id(number) or 0, self.bound))
                characters += len(stored.text or "") + sum(map(len, stored.blobs.values()))
                piece.append((record, stored))
            elif isinstance(record, MoveRecord):
                piece.append(record)
            if len(piece) >= PIECE_RECORDS or characters >= _PIECE_CHARACTERS:
                break
        return piece or None

    def outcome(self, *, is_new: bool) -> Imported:
        """Return the result of the import. `is_new` says whether the conversation was new to the database."""
        return Imported(
            sessions=self.block.sessions,
            entries=self.block.entries,
            is_new=is_new,
            cleaned=tuple(self._cleaned),
            is_same=self.is_same,
        )


def groups_of(importers: Sequence[_I]) -> Iterator[Sequence[_I]]:
    """Yield the importers in groups. All conversations of a group fit together into one small transaction. A large
    conversation is alone in its group."""
    group: list[_I] = []
    entries = size = 0
    for importer in importers:
        block = importer.block
        if group and (entries + block.entries > PIECE_RECORDS or size + block.bytes > _PIECE_CHARACTERS):
            yield group
            group, entries, size = [], 0, 0
        group.append(importer)
        entries, size = entries + block.entries, size + block.bytes
    if group:
        yield group
