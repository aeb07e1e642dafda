"""Records how a request was sent, so that it can be built again and compared.

The record has no content of the request: only digests, and the form in which the request was written.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from itertools import pairwise

from pydantic import TypeAdapter

from crow.domain.messages import JsonObject, SentRequest
from crow.llm import Request
from crow.llm.dialect import Dialect
from crow.version import __version__

_DIGEST_CHARS = 32
_BOUNDARIES = 16
"""The record has a checksum of the bytes before each of the last messages of the request, at most this many."""

_MAX_STEPS = 24
"""The record also has a checksum of the bytes before each of at most this many earlier positions. Each of these
positions is twice as far from the end of the request as the position after it."""

_FIRST_STEP = 128
"""The distance in bytes from which the doubling starts if no message was found."""

_STARTS = (b',{"role":"', b',{"type":"', b'[{"role":"', b'[{"type":"')
"""The bytes with which messages begin, and sometimes their parts. No string in JSON contains these bytes, because
quotes in strings are escaped."""
_CHECKS = re.compile(r"(?:[0-9a-f]{1,12}\.[0-9a-f]{1,8}(?: (?!$)|$)){1,48}")


def sent_request(
    body: bytes,
    request: Request,
    *,
    endpoint: str,
    dialect: Dialect,
    limit: int | None,
    extra: Mapping[str, object] | None = None,
) -> SentRequest:
    """Return the record of a request whose bytes are `body`. The other arguments are those with which the encoder wrote
    the bytes."""
    return SentRequest(
        digest=digest_of(body),
        size=len(body),
        checks=_checks(body),
        endpoint=endpoint,
        dialect=_dialect_json(dialect),
        limit=limit,
        thought_level=request.thought_level or "",
        extra=extra_digest(extra),
        version=__version__,
    )


def digest_of(body: bytes) -> str:
    """Return the digest (hex) of the bytes of a request."""
    return hashlib.sha256(body).hexdigest()[:_DIGEST_CHARS]


def extra_digest(extra: Mapping[str, object] | None) -> str:
    """Return the digest of the members that the user adds to every request, or an empty string if there are none. The
    members themselves are not stored, because they may contain secrets."""
    return digest_of(json.dumps(extra, sort_keys=True).encode()) if extra else ""


def first_difference(sent: SentRequest, body: bytes) -> tuple[int, int, bool]:
    """Return the range of positions in which `body` first differs from the request that was sent, and whether this
    range is one message or a part of it. The end of the range is a position in the request that was sent."""
    before = check = 0
    checks = _read_checks(sent)
    for number, (position, expected) in enumerate(checks):
        check = zlib.crc32(body[before:position], check)
        if position > len(body) or check != expected:
            return before, position, number > len(checks) - _BOUNDARIES
        before = position
    return before, max(before, sent.size, len(body)), bool(checks)


def _read_checks(sent: SentRequest) -> list[tuple[int, int]]:
    """Return the positions in a request that was sent, each with the checksum of the bytes before it. Return nothing if
    `sent.checks` is damaged."""
    if not _CHECKS.fullmatch(sent.checks):
        return []
    pairs = (each.split(".") for each in sent.checks.split())
    found = [(sent.size - int(left, 16), int(check, 16)) for left, check in pairs]
    is_sorted = all(one < other for (one, _), (other, _) in pairwise([(0, 0), *found]))
    return found if is_sorted else []


def _checks(body: bytes) -> str:
    """Return checksums of the bytes before several positions in `body`: the starts of the last messages, and earlier
    positions whose distance to the end doubles. Each checksum is written as `DISTANCE.CHECKSUM`, in hex."""
    size, starts, end = len(body), list[int](), len(body)
    while len(starts) < _BOUNDARIES and (end := max(body.rfind(start, 0, end) for start in _STARTS)) > 0:
        starts.append(end + 1)
    first = size - starts[-1] if starts else _FIRST_STEP
    steps = (first << step for step in range(1, _MAX_STEPS))
    positions = sorted({*starts, *(size - step for step in steps if step < size)})
    found, before, check = list[str](), 0, 0
    for position in positions:
        check = zlib.crc32(body[before:position], check)
        found.append(f"{size - position:x}.{check:x}")
        before = position
    return " ".join(found)


def _dialect_json(dialect: Dialect) -> JsonObject:
    """Return the members of a dialect that are not the default."""
    found: dict[str, object] = {}
    for each in fields(Dialect):
        value = getattr(dialect, each.name)
        if value != each.default:
            found[each.name] = sorted(value) if isinstance(value, frozenset) else value
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def read_dialect(stored: JsonObject) -> Dialect | None:
    """Return the dialect that was stored with a request, or None if this version does not know it."""
    if not stored.keys() <= Dialect.__dataclass_fields__.keys():
        return None
    try:
        found = _dialects().validate_json(json.dumps(stored), strict=True)
    except (ValueError, RecursionError):
        return None
    return found if found.wires else None


@cache
def _dialects() -> TypeAdapter[Dialect]:
    return TypeAdapter(Dialect)
