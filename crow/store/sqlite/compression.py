"""Compresses the blobs of old entries, and reads compressed blobs.

A compressed blob is a zlib stream that is shorter than the blob's `size`. SQLite's archives use the same format, so
`sqlar_uncompress(data, size)` decompresses a blob in the `sqlite3` shell. The name of a compressed blob is still the
sha256 of the uncompressed content. The last bytes of the content are compressed separately, so that an excerpt can be
read without decompressing the middle. For tool outputs, zstd would save 3 % more at the same speed, but that is not
worth a dependency.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from sqlite3 import Blob, Connection
from typing import Any

import anyio.to_thread

from crow.store.codec import Unreadable, check_blob, to_json
from crow.store.rows import possible_time
from crow.store.sqlite.database import UsesDatabase, now_ms, snapshot, transaction

_LEVEL = 6
_END_BYTES = 4 * 1024
"""The number of bytes at the end of the content that are compressed separately."""

_END_MARK = b"\0\0\xff\xff"
"""The bytes at the end of each flushed part of a zlib stream."""

_CHECKSUM_BYTES = 4
_MOST_ADDED_BYTES = 64
"""If compression cannot make a part smaller, the part grows by fewer bytes than this."""

_LEAST_BYTES = 1024
_MOST_BYTES = 64 * 1024 * 1024
"""Larger blobs are not compressed, because compression holds the whole blob in memory."""

_LEAST_SAVED = 8
"""A blob stays uncompressed if compression would save less than the blob's size divided by this number."""

_BATCH_ROWS = 256
_BATCH_BYTES = 1024 * 1024
_DAY_MS = 86_400_000


def compress(data: bytes) -> bytes | None:
    """Return the compressed form of a blob, or None if compression would save too little."""
    stream = zlib.compressobj(_LEVEL)
    parts = []
    if len(data) > _END_BYTES:
        parts += [stream.compress(memoryview(data)[:-_END_BYTES]), stream.flush(zlib.Z_FULL_FLUSH)]
    parts += [stream.compress(memoryview(data)[-_END_BYTES:]), stream.flush()]
    compressed = b"".join(parts)
    return compressed if len(compressed) <= len(data) - max(1, len(data) // _LEAST_SAVED) else None


def content_of(name: str, size: object, data: bytes) -> bytes:
    """Return the content of the blob `name`, from its columns `size` and `data`.

    :raises Unreadable: the content does not match the name.
    """
    content = decompressed(size, data)
    check_blob(name, content)
    return content


def decompressed(size: object, data: bytes) -> bytes:
    """Return the content of a blob from its columns `size` and `data`. The content is not checked."""
    if not (isinstance(size, int) and len(data) < size):
        return data
    # If the content is longer than `size`, the row is damaged, and so the sha256 is wrong, too.
    try:
        return zlib.decompressobj().decompress(data, size)
    except (zlib.error, OverflowError, MemoryError):
        return data  # perhaps only `size` is damaged


def ends_of_blob(sql: Connection, rowid: int, size: int, length: int) -> tuple[bytes, bytes]:
    """Return the first and the last `length` bytes of the content of the blob in this row of `blobs`. The content has
    `size` bytes, and its middle is read only if that is necessary.

    :raises Unreadable: the blob is damaged.
    """
    with sql.blobopen("blobs", "data", rowid, readonly=True) as blob:
        if len(blob) >= size:  # it is not compressed
            head = blob.read(length)
            blob.seek(-length, 2)
            return head, blob.read()
        end = _separate_end(blob) if length <= _END_BYTES else None
        beginning = _beginning(blob, size if end is None else length)
        return beginning[:length], (beginning if end is None else end)[-length:]


def _beginning(blob: Blob, wanted: int) -> bytes:
    """Return the first `wanted` bytes of the content of a compressed blob.

    :raises Unreadable: the blob is damaged.
    """
    stream, found = zlib.decompressobj(), bytearray()
    blob.seek(0)
    try:
        while len(found) < wanted and (data := stream.unconsumed_tail or blob.read(_END_BYTES)):
            found += stream.decompress(data, wanted - len(found))
    except zlib.error as error:
        raise Unreadable(f"it is damaged: {error}") from error
    if len(found) < wanted:
        raise Unreadable("it is damaged: its compressed content is too short")
    return bytes(found)


def _separate_end(blob: Blob) -> bytes | None:
    """Return the last `_END_BYTES` bytes of the content of a compressed blob, or None if they were not compressed
    separately."""
    part = min(len(blob), _END_BYTES + _MOST_ADDED_BYTES)
    blob.seek(-part, 2)
    data = blob.read()
    at = data.rfind(_END_MARK)
    while at >= 0:  # these bytes may also occur in compressed data
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            found = stream.decompress(data[at + len(_END_MARK) :], _END_BYTES + 1)
        except zlib.error:
            found = b""
        if len(found) == _END_BYTES and stream.eof and len(stream.unused_data) == _CHECKSUM_BYTES:
            return found
        at = data.rfind(_END_MARK, 0, at + len(_END_MARK) - 1)
    return None


def members_of(data: bytes) -> str | None:
    """Return, as JSON, the members of a tool result's body that SQL views show. Views cannot decompress a body, so
    these members are stored separately for each compressed body. Return None if the body is damaged."""
    try:
        body: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    return to_json({name: body[name] for name in ("call", "name", "is_error", "duration_ms") if name in body})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A blob to compress."""

    rowid: int
    name: str
    """The hash of the blob."""
    is_body: bool
    """Whether the blob is the body of a tool result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compressed:
    """A blob after its compression."""

    name: str
    """The hash of the blob."""
    data: bytes
    """The compressed content."""
    body: str | None
    """For the body of a tool result: the members to store beside the blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Blobs to compress."""

    before: tuple[int, str]
    """The position in `blob_refs` before these blobs: an entry id and a blob's name."""
    after: tuple[int, str]
    """The position in `blob_refs` after these blobs: an entry id and a blob's name."""
    blobs: Sequence[_Found]


class CompressionMethods(UsesDatabase):
    """Methods of the store that compress old blobs."""

    compress_after_days: int | None = None
    """If it is None, nothing is compressed."""

    async def compress_old(self) -> None:
        """Compress the blobs of entries that are older than `compress_after_days`. Each transaction compresses about a
        megabyte.

        The table `compression` stores the position that this method has reached. If this call is cancelled or the
        process is killed, the next call continues from that position.
        """
        if self.compress_after_days is None or self.database.is_read_only:
            return
        before_ms = now_ms() - self.compress_after_days * _DAY_MS
        while (batch := await self._next_batch(before_ms)) is not None:
            compressed = [one for found in batch.blobs if (one := await self._compress(found)) is not None]
            if not await self._replace(batch, compressed):
                return  # another process compresses, too

    @snapshot()
    def _next_batch(self, sql: Connection, before_ms: int) -> _Batch | None:
        """Return the next blobs that are old enough, or None if there are none."""
        position = sql.execute("SELECT entry, blob FROM compression").fetchone() or (0, "")
        rows = sql.execute(_REFERENCES, (*position, _BATCH_ROWS))
        after, size, blobs = position, 0, list[_Found]()
        for entry, name, rowid, length, created_ms, is_compressed, is_body in rows:
            # A time in the future is wrong and does not count. Imported entries can have such times.
            if before_ms <= possible_time(created_ms) <= now_ms() + _DAY_MS:
                break
            after = entry, name
            if is_compressed or not _LEAST_BYTES <= length <= _MOST_BYTES:
                continue
            if sql.execute(_NEEDED_BY_SQL, (name, name)).fetchone():
                continue
            blobs.append(_Found(rowid=rowid, name=name, is_body=bool(is_body)))
            size += length
            if size >= _BATCH_BYTES:
                break
        rows.close()
        return None if after == position else _Batch(before=position, after=after, blobs=blobs)

    async def _compress(self, found: _Found) -> _Compressed | None:
        """Return the compressed form of a blob. Return None if the blob was removed or is damaged, or if compression
        would save too little."""

        def read(sql: Connection) -> bytes | None:
            row = sql.execute("SELECT size, data FROM blobs WHERE rowid = ? AND hash = ?", (found.rowid, found.name))
            size, data = row.fetchone() or (None, None)
            return bytes(data) if isinstance(data, bytes) and len(data) == size else None

        data = await self.database.read(read)
        return None if data is None else await anyio.to_thread.run_sync(partial(_compressed, found, data))

    @transaction()
    def _replace(self, sql: Connection, batch: _Batch, compressed: Sequence[_Compressed]) -> bool:
        """Store the compressed forms. If another process has compressed these blobs meanwhile, store nothing and return
        false."""
        moved = sql.execute(
            "UPDATE compression SET entry = ?, blob = ? WHERE (entry, blob) = (?, ?)", (*batch.after, *batch.before)
        )
        if not moved.rowcount:
            return False
        for one in compressed:
            replaced = sql.execute(
                "UPDATE blobs SET data = ? WHERE hash = ? AND length(data) = size", (one.data, one.name)
            )
            if replaced.rowcount and one.body is not None:
                sql.execute("INSERT OR REPLACE INTO compressed_bodies (blob, body) VALUES (?, ?)", (one.name, one.body))
        return True


def _compressed(found: _Found, data: bytes) -> _Compressed | None:
    body = members_of(data) if found.is_body else None
    if (found.is_body and body is None) or hashlib.sha256(data).hexdigest() != found.name:
        return None  # damaged blobs are not changed
    smaller = compress(data)
    return None if smaller is None else _Compressed(name=found.name, data=smaller, body=body)


_REFERENCES = """
    SELECT r.entry, r.blob, b.rowid, b.size, e.created_ms, length(b.data) < b.size,
        e.kind = 'tool' AND e.body_blob IS r.blob
    FROM blob_refs r JOIN entries e ON e.id = r.entry JOIN blobs b ON b.hash = r.blob
    WHERE (r.entry, r.blob) > (?, ?) ORDER BY r.entry, r.blob LIMIT ?
"""

_NEEDED_BY_SQL = """
    SELECT 1 FROM blob_refs r JOIN entries e ON e.id = r.entry
    WHERE r.blob = ? AND e.body_blob = ? AND e.kind <> 'tool'
"""
"""Finds out whether a blob is the body of an entry that is not a tool result. Such bodies stay uncompressed, because
the search index and the views read them as text."""
