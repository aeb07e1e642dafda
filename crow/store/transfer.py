"""Writes and reads the lines of export files, for both engines."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from crow.domain.entries import Body, Entry
from crow.domain.errors import ArgumentError, StoreUnavailable
from crow.store import portable
from crow.store.codec import Encoded, encode
from crow.store.portable import EntryRecord, MoveRecord, Record, SessionRecord

WRITTEN_LATER = frozenset({"title", "leaf", "listed"})
"""Fields of a `SessionRecord` that an import does not simply copy into the session's new row. It cleans the title, sets
the leaf later, and `listed` is not a column."""

EXTRA_COLUMNS = ("model", "mode", "additional_directories", "config", "metadata", "calibration", "principal")
"""Columns of `sessions` that an export does not contain. `SessionExtras` has fields with the same names."""

_COPIED = ("turn", "model", "usage", "cost", "estimate")
"""Fields of an entry that have the same value in the file and in the database."""

Piece: TypeAlias = Sequence[MoveRecord | tuple[EntryRecord, Encoded]]
"""Records of a conversation, ready to be written. Each entry is paired with its encoded body."""


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
    """Those of the `ids` whose entries are missing from a damaged database."""
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
        """Return the lines of one entry. `written_blobs` are the hashes of the blobs that are already in the file, to
        which this method adds."""
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
    """Return the number of an entry's parent. Return None if the entry has no parent, or one that is not older than the
    entry or is no id. The latter two happen only in a damaged database."""
    return None if entry.parent is None or entry.parent >= entry.id else number_of(ids, entry.parent) or None


def _bound(ids: array[int], entry: int) -> int:
    """Return the number in the file of the first exported entry whose id is at least `entry`."""
    return bisect_left(ids, entry) + 1


def next_piece(
    records: Iterator[tuple[Record, Body | None]],
    named: Callable[[int], int],
    bound: Callable[[int], int],
    *,
    most_records: int,
    most_characters: int,
) -> Piece | None:
    """Return the next piece of a conversation (entries and moves), or None at its end. A piece ends as soon as it has
    `most_records` records or `most_characters` characters. `named` and `bound` are passed to `portable.renumbered`.

    :raises InvalidExport: a record is not valid.
    :raises ArgumentError: the file was changed after it was checked.
    """
    piece: list[MoveRecord | tuple[EntryRecord, Encoded]] = []
    characters = 0
    for record, body in records:
        if isinstance(record, EntryRecord) and body is not None:
            stored = encode(portable.renumbered(body, named, bound))
            characters += len(stored.text or "") + sum(map(len, stored.blobs.values()))
            piece.append((record, stored))
        elif isinstance(record, MoveRecord):
            piece.append(record)
        if len(piece) >= most_records or characters >= most_characters:
            break
    return piece or None
