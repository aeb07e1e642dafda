"""Writes a session as a case file: a redacted export that anyone can replay.

Masking changes the bytes of requests, so the digests of the requests that were sent no longer fit. Each request is
built from the masked entries to get its new digest. A request gets a digest only if, built from the original entries,
it is identical to the request that was sent.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import anyio.to_thread

from crow.domain.entries import Assistant, Attachment, Body, File, ModelRequest
from crow.domain.errors import ArgumentError
from crow.domain.messages import File as PromptFile
from crow.domain.messages import Image, SentRequest, ToolCall
from crow.export.redact import Redactor, masked_arguments, masked_json
from crow.llm.sent import read_dialect, sent_request
from crow.replay.requests import LoggedRequest, Rebuilder, logged_requests, request_of
from crow.store import Store
from crow.store.admin import Admin, ImportDefaults
from crow.store.portable import FORMAT, BlobRecord, EntryRecord, ExportFile, Header, Record, SessionRecord
from crow.store.transfer import Lines

_MAX_CASE_BYTES = 2 * 1024 * 1024 * 1024
"""Larger files are not replayed."""

_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel, in place of each image: a picture cannot be masked."""

_IDS = frozenset({"limits", "message_id", "compaction_id", "digest", "checks", "version", "mime_type", "after_hash"})
"""Fields that are never masked, because a replay needs them as they are."""


async def write_case(
    source: tuple[Store, Admin],
    session_id: str,
    scratch: tuple[Store, Admin],
    folder: Path,
    *,
    redact: Redactor,
    rebuilder: Rebuilder,
) -> AsyncIterator[bytes]:
    """Yield the lines of a case file with a session and its subagents. `folder` is an empty directory for drafts of the
    file, and `scratch` an empty database."""
    store, admin = source
    exported, masked = folder / "exported.jsonl", folder / "masked.jsonl"
    with exported.open("wb") as file:
        async for line in admin.export([session_id]):
            file.write(line)
    with masked.open("wb") as file:
        file.writelines(_lines(_masked(exported, redact)))
    sessions = await import_case(scratch[1], masked)
    digests: dict[int, SentRequest] = {}
    for session in sessions:
        outcomes = {each.entry.id: rebuilder.replay(each).outcome async for each in logged_requests(store, session)}
        masked_ids = sorted([each.entry.id async for each in logged_requests(scratch[0], session)])
        # Entries have the same order in both databases. Entries that were stored since the export come last.
        outcome_of = dict(zip(masked_ids, (outcomes[entry_id] for entry_id in sorted(outcomes)), strict=False))
        async for each in logged_requests(scratch[0], session):
            if each.sent is not None:
                is_proved = outcome_of.get(each.entry.id) == "identical"
                digests[each.entry.id] = _case_digest(each, each.sent, is_proved=is_proved)
    for line in _lines(_with_digests(masked, digests)):
        yield line


async def with_subagents(store: Store, session_id: str) -> list[str]:
    """Return the id of a session, then those of its subagents, of their subagents, and so on."""
    found = [session_id]
    for one in found:
        found += [row.id for row in await store.subagents(one) if row.id not in found]
    return found


async def import_case(admin: Admin, path: Path) -> list[str]:
    """Import a case file into an empty database, and return the ids of its sessions: the session itself first.

    :raises ArgumentError: the file is too large, or is not a valid export.
    """
    size = await anyio.to_thread.run_sync(os.path.getsize, path)
    if size > _MAX_CASE_BYTES:
        raise ArgumentError(f"{path} has {size:,} bytes; a case file has at most {_MAX_CASE_BYTES:,}.")
    imported = await admin.import_file(path, ImportDefaults())
    return [session for each in imported for session in each.sessions]


def _masked(path: Path, redact: Redactor) -> Iterable[tuple[Record, Body | None]]:
    """Return the records of an export with masked texts."""
    for record, body in _records(path):
        match record:
            case SessionRecord():
                cwd = redact(record.cwd)
                title = None if record.title is None else redact(record.title)
                yield replace(record, cwd=f"/{cwd}" if cwd.startswith("~") else cwd, title=title), None
            case EntryRecord():
                assert body is not None, "an entry has a body"
                yield record, _masked_value(body, redact)
            case _:
                yield record, None


def _masked_value(value: Any, redact: Redactor) -> Any:
    """Return a value with every text masked."""
    match value:
        case str():
            return redact(value)
        case Image():
            return replace(value, data=_PIXEL, mime_type="image/png", uri=value.uri and redact(value.uri))
        case Attachment() | PromptFile():  # no pattern finds a secret in a PDF
            return replace(value, name=redact(value.name), uri=value.uri and redact(value.uri), data="")
        case File(before=bytes() as before):
            value = replace(value, before=redact(before.decode(errors="replace")).encode())
        case tuple() | list():
            return type(value)(_masked_value(each, redact) for each in value)
        case Mapping():
            return masked_json(value, redact)
    if is_dataclass(value) and not isinstance(value, type):
        named = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in _IDS}
        masked = {name: _masked_value(each, redact) for name, each in named.items()}
        if isinstance(value, ToolCall):  # its arguments must stay valid JSON
            masked["arguments"] = masked_arguments(value.arguments, redact)
        return replace(value, **masked)
    return value


def _case_digest(logged: LoggedRequest, sent: SentRequest, *, is_proved: bool) -> SentRequest:
    """Return how a masked request was sent, with its new digest. Without `is_proved`, the digest is empty, and a replay
    says that the request already differed."""
    dialect = read_dialect(sent.dialect)
    body = Rebuilder().body(logged, replace(sent, extra=""), dialect) if dialect is not None else None
    if dialect is None or body is None or not is_proved:
        return replace(sent, digest="", checks="", extra="", is_case=True)
    new = sent_request(body, request_of(logged, sent), endpoint=sent.endpoint, dialect=dialect, limit=sent.limit)
    return replace(new, version=sent.version, limits=sent.limits, is_case=True)


def _with_digests(path: Path, digests: Mapping[int, SentRequest]) -> Iterable[tuple[Record, Body | None]]:
    """Return the records of a masked export with the digests of its requests. `digests` has the ids that an empty
    database gives the entries: it numbers them from 1, through all conversations of the file."""
    number = 0
    for record, body in _records(path):
        if isinstance(record, EntryRecord):
            number += 1
        if isinstance(body, Assistant | ModelRequest):
            yield record, replace(body, sent=digests.get(number))
        else:
            yield record, body


def _records(path: Path) -> Iterable[tuple[Record, Body | None]]:
    file = ExportFile(path)
    try:
        for block in file.scan():
            yield from file.records(block)
    finally:
        file.close()


def _lines(records: Iterable[tuple[Record, Body | None]]) -> Iterable[bytes]:
    """Return the lines of an export file with these records. The blobs of the entries are added."""
    lines, written = Lines(), set[str]()
    yield lines.records(Header(format=FORMAT))
    for record, body in records:
        if isinstance(record, EntryRecord) and body is not None:
            yield from lines.entry(record, body, written)
        elif not isinstance(record, BlobRecord):
            if not isinstance(record, SessionRecord):
                written.clear()  # each conversation must have its blobs, even if an earlier one has them
            yield lines.records(record)
    yield lines.end()
