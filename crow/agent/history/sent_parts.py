"""Notices when parts of earlier messages are sent to an endpoint in another way than before."""

from __future__ import annotations

from collections.abc import Sequence

from crow.domain.entries import Assistant, Entry
from crow.domain.messages import WireName
from crow.llm import WIRE_TITLES, ModelInfo


class SentParts:
    """For each endpoint, the parts of a session's messages that are left out, and the API."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._left_out: dict[str, frozenset[str]] = {}
        self._wires: dict[str, WireName] = {}

    def watch(self, info: ModelInfo, entries: Sequence[Entry]) -> None:
        """Remember which parts of messages are left out for this endpoint, so that `changed` can report changes. Do
        nothing if the parts for this endpoint are already remembered. The API is that of the endpoint's last answer
        in `entries`."""
        self._left_out.setdefault(info.endpoint, self._left_out_for(info))
        if info.endpoint not in self._wires:
            bodies = (entry.body for entry in reversed(entries))
            answers = (body.wire for body in bodies if isinstance(body, Assistant) and body.endpoint == info.endpoint)
            self._wires[info.endpoint] = next(answers, info.wire)

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
