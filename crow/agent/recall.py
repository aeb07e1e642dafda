"""The log port: what tools may ask of the session's own log.

Strategy: `recall` searches the stored path, compacted entries included, and returns entries as text with their ids;
`before_change` stores what a file held before a call changes it. Reads through the store, writes through the branch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from crow.agent.branch import Branch
from crow.domain.entries import (
    Assistant,
    CallRef,
    Checkpoint,
    Command,
    Entry,
    File,
    NewEntry,
    Reminder,
    ToolResult,
    User,
)
from crow.domain.messages import Image, Link, Resource, Text
from crow.store import Store

__all__ = ["BranchLog"]


class BranchLog:
    """The log of one branch, as its tools see it."""

    def __init__(self, store: Store, branch: Branch) -> None:
        self._store = store
        self._branch = branch
        self._others: dict[int, Branch] = {}

    def adopt(self, assistant: int, branch: Branch) -> None:
        """Calls of this answer belong to another branch: that of a sub-agent."""
        self._others[assistant] = branch

    def forget(self, assistants: Iterable[int]) -> None:
        """No call of these answers runs any more."""
        for assistant in assistants:
            self._others.pop(assistant, None)

    async def recall(self, *, query: str | None, entry: int | None, limit: int) -> str:
        """See :class:`crow.tools.Log`."""
        if entry is not None:
            found = await self._store.entry(entry)
            if found is None or found.conversation != self._branch.row.conversation:
                return f"There is no entry {entry} in this conversation. Search with a query instead."
            return f"Entry {found.id} ({kind_of(found)}):\n{text_of(found)}"
        hits = await self._store.search(query or "", session_id=self._branch.row.id, limit=limit)
        if not hits:
            return f"Nothing in this conversation matches {json.dumps(query, ensure_ascii=False)}."
        lines = [f"entry {hit.entry} ({hit.kind}): {' '.join(hit.snippet.split())}" for hit in hits]
        return "\n".join([*lines, "Give an entry's number to read it whole."])

    async def before_change(self, call_id: str, path: Path, before: bytes | None, after: bytes) -> None:
        """See :class:`crow.tools.Log`."""
        _, assistant, index = call_id.split("_")
        await self._others.get(int(assistant), self._branch).record(
            [
                NewEntry(
                    body=File(
                        call=CallRef(assistant=int(assistant), index=int(index)),
                        path=str(path),
                        before=before,
                        after_hash=hashlib.sha256(after).hexdigest(),
                    )
                )
            ]
        )


def kind_of(entry: Entry) -> str:
    return type(entry.body).__name__.lower()


def text_of(entry: Entry) -> str:
    """All text of an entry, as the model may read it."""
    match entry.body:
        case User(parts=parts):
            return "\n".join(part_text(part) for part in parts)
        case Assistant(text=text, calls=calls):
            return "\n".join([text, *(f"{call.name}({call.arguments})" for call in calls)]).strip()
        case ToolResult(name=name, text=text):
            return f"{name}:\n{text}"
        case Checkpoint(summary=summary):
            return summary
        case Reminder(text=text):
            return text
        case Command(text=text, answer=answer):
            return f"{text}\n{answer}"
        case _:
            return "(an entry without text for you)"


def part_text(part: Text | Image | Resource | Link) -> str:
    match part:
        case Text(text=text):
            return text
        case Resource(uri=uri, text=text):
            return f"{uri}:\n{text}"
        case Link(uri=uri, name=name):
            return f"{name} ({uri})"
        case Image(mime_type=mime_type):
            return f"(an image, {mime_type})"
