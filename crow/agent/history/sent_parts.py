"""Notices when crow begins or stops leaving out parts of earlier messages for an endpoint."""

from __future__ import annotations

from collections.abc import Sequence

from crow.domain.entries import Assistant, Entry, ToolResult
from crow.domain.messages import WireName
from crow.llm import WIRE_TITLES, ModelInfo


class SentParts:
    """For each endpoint, the parts of a session's messages that are not sent to it, and the API that is used."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._left_out: dict[str, frozenset[str]] = {}
        self._wires: dict[str, WireName] = {}

    def watch(self, info: ModelInfo, entries: Sequence[Entry]) -> None:
        """Remember which parts of messages are left out for this endpoint, so that `changed` can report changes. Do
        nothing if the parts for this endpoint are already remembered. The API is that of the endpoint's last answer
        in `entries`. If an older version of crow got this answer, marks of failed results were left out."""
        if info.endpoint in self._wires:
            return
        bodies = [entry.body for entry in entries]
        answers = (body for body in reversed(bodies) if isinstance(body, Assistant) and body.endpoint == info.endpoint)
        last, left_out = next(answers, None), self._left_out_for(info)
        self._wires[info.endpoint] = last.wire if last is not None else info.wire
        is_older = last is not None and last.sent is not None and "marks_failures" not in last.sent.dialect
        can_mark = info.wire == "messages" and "messages.is_error" not in left_out
        if is_older and can_mark and any(isinstance(body, ToolResult) and body.is_error for body in bodies):
            left_out |= {"is_error"}
        self._left_out[info.endpoint] = left_out

    def changed(self, info: ModelInfo) -> tuple[str, ...]:
        """Return the parts of messages whose treatment for this endpoint has changed since the previous call, or since
        `watch`: the parts that are left out only now, and the parts that are no longer left out. If the API has
        changed, return only that."""
        known, now = self._left_out.get(info.endpoint, frozenset()), self._left_out_for(info)
        self._left_out[info.endpoint] = now
        wire, self._wires[info.endpoint] = self._wires.get(info.endpoint, info.wire), info.wire
        return tuple(sorted(known ^ now)) if wire == info.wire else (f"API {WIRE_TITLES[info.wire]}",)

    def _left_out_for(self, info: ModelInfo) -> frozenset[str]:
        return frozenset(each.part for each in info.refused if each.applies_to(self._session_id))
