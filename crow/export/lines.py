"""Writes entries as lines of JSON that people can search, follow and commit."""

from __future__ import annotations

import json

from crow.domain.entries import Entry
from crow.domain.text import safe_json
from crow.export.redact import Redactor, masked_json
from crow.store import SessionRow
from crow.store.codec import encode
from crow.store.transcript import time_text

_KINDS = {
    "checkpoint": "compaction (summary)",
    "mask": "compaction (hidden outputs)",
    "restore": "compaction (undone)",
}
"""Maps stored kinds of entries to the words for users. Users see all other kinds under their stored names."""


def session_line(row: SessionRow, database: str, redact: Redactor) -> str:
    """Return the first line of a session's file. `database` says where the session is stored. Ids and `database` are
    not masked, because the mirror recognises its files by them."""
    values = {
        "kind": "session",
        "session": row.id,
        "database": database,
        "directory": redact(row.cwd),
        "created": time_text(row.created_ms, "seconds"),
        "parent": row.parent_id,
        "forked_from": row.forked_from,
    }
    return _line(values)


def entry_line(entry: Entry, redact: Redactor) -> str:
    """Return an entry as one line that begins with its id. Images, system messages and the earlier contents of files
    are left out: `{"blob": HASH}` stands for each."""
    body = encode(entry.body, shares_texts=False)
    text = body.text if body.spilled is None else body.blobs[body.spilled].decode()
    usage = entry.usage
    values: dict[str, object] = {
        "id": entry.id,
        "parent": entry.parent,
        "turn": entry.turn,
        "kind": _KINDS.get(body.kind, body.kind),
        "model": entry.model,
        "created": time_text(entry.created_ms, "seconds"),
    }
    if usage is not None:
        values |= {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
    if entry.cost is not None:
        values["cost"] = entry.cost
    return _line(masked_json({**values, "body": json.loads(text or "{}")}, redact))


def _line(values: object) -> str:
    return safe_json(json.dumps(values, ensure_ascii=False)) + "\n"
