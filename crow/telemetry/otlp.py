"""Writes the spans of stored sessions as OTLP in JSON: one line for each turn."""

from __future__ import annotations

import heapq
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

from crow.domain.entries import Entry, TurnEnd
from crow.store import Store
from crow.store.branches import own_entries
from crow.telemetry.spans import Redact, Span, Value, spans_of
from crow.telemetry.turns import AGENT, Turn, Turns
from crow.version import __version__

_KINDS = {False: 1, True: 3}  # INTERNAL, CLIENT
_ERROR = 2
_RESULT_BYTES = 100_000


async def otlp_lines(store: Store, sessions: Sequence[str], redact: Redact | None) -> AsyncIterator[bytes]:
    """Yield a line for each turn of `sessions`, with the turn's spans. With `redact`, the spans also have the content
    of messages and calls, masked by `redact`."""
    turns, result_bytes = Turns(), 0 if redact is None else _RESULT_BYTES
    paths = []
    for session_id in sessions:
        turns.know(await store.session(session_id))
        paths.append(own_entries(store, session_id, result_bytes=result_bytes))
    stored: list[Entry] = []
    async for entry in _merged(paths):
        if stored and not _is_stored_with(stored[-1], entry):
            for line in _lines(turns.add(stored), redact):
                yield line
            stored = []
        stored.append(entry)
    for line in _lines((*turns.add(stored), *turns.rest()), redact):
        yield line


async def _merged(paths: Sequence[AsyncIterator[Entry]]) -> AsyncIterator[Entry]:
    """Yield the entries of all paths in the order of their ids."""
    first = [await anext(path, None) for path in paths]
    waiting = [(entry.id, at, entry) for at, entry in enumerate(first) if entry is not None]
    heapq.heapify(waiting)
    while waiting:
        _, at, entry = waiting[0]
        yield entry
        following = await anext(paths[at], None)
        if following is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (following.id, at, following))


def _is_stored_with(entry: Entry, following: Entry) -> bool:
    """Return whether two entries come from one transaction. They then have the same time. The end of a turn is the last
    entry of its transaction."""
    is_same = (entry.session, entry.created_ms) == (following.session, following.created_ms)
    return is_same and not isinstance(entry.body, TurnEnd)


def _lines(turns: Iterable[Turn], redact: Redact | None) -> Iterator[bytes]:
    for turn in turns:
        if spans := spans_of(turn, redact):
            yield otlp_line(spans)


def otlp_line(spans: Sequence[Span]) -> bytes:
    """Return a line with one `TracesData` message in the JSON of OTLP."""
    scope = {"name": "crow", "version": __version__}
    resource = {"attributes": _attributes({"service.name": AGENT, "service.version": __version__})}
    spoken = {"resource": resource, "scopeSpans": [{"scope": scope, "spans": [_span(span) for span in spans]}]}
    return json.dumps({"resourceSpans": [spoken]}, separators=(",", ":")).encode() + b"\n"


def _span(span: Span) -> dict[str, object]:
    return {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        **({} if span.parent_id is None else {"parentSpanId": f"{span.parent_id:016x}"}),
        "name": span.name,
        "kind": _KINDS[span.is_client],
        "startTimeUnixNano": str(span.start_ms * 1_000_000),
        "endTimeUnixNano": str(span.end_ms * 1_000_000),
        "attributes": _attributes(span.attributes),
        "status": {"code": _ERROR} if span.error else {},
    }


def _attributes(values: Mapping[str, Value]) -> list[dict[str, object]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, object]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case tuple():
            return {"arrayValue": {"values": [_value(one) for one in value]}}
