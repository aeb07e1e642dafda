"""The log port: what tools may ask of the session's own log.

Strategy: `recall` searches the session's stored path, compacted entries included: what was said through the index,
calls and what they gave by a bounded scan. It returns places with the ids of their entries, or one entry as text;
`before_change` stores what a file held before a call changes it. Reads through the store, writes through the branch.
"""

from __future__ import annotations

import hashlib
import json
import re
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
    Skill,
    ToolResult,
    User,
)
from crow.domain.messages import Image, Link, Resource, Text
from crow.store import Store

__all__ = ["BranchLog"]

RECALLS = frozenset({"recall"})
AROUND = 300


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
        """See :class:`crow.tools.Log`. With both, the places of `query` in that entry."""
        if entry is None:
            return await self._search(query or "", limit)
        found = await self._store.entry(entry, session_id=self._branch.row.id)
        if found is None:
            return f"There is no entry {entry} in this conversation. Search with a query instead."
        text = text_of(found)
        if not query:
            return f"Entry {found.id} ({kind_of(found)}):\n{text}"
        places = places_in(text, query, limit)
        if not places:
            return f"Entry {found.id} ({kind_of(found)}, {len(text):,} characters) does not hold {quoted(query)}."
        return "\n".join([f"Entry {found.id} ({kind_of(found)}, {len(text):,} characters):", *places])

    async def _search(self, query: str, limit: int) -> str:
        session = self._branch.row.id
        said = await self._store.search(query, session_id=session, limit=limit)
        # its own calls hold the words that it looks for
        rest = await self._store.scan(query, session_id=session, limit=limit, without=RECALLS)
        # what was said wins over the same entry's calls; a title is no entry
        hits = {hit.entry: hit for hit in (*rest.hits, *said) if hit.kind != "title"}
        newest = [hits[entry] for entry in sorted(hits, reverse=True)[:limit]]
        lines = [f"entry {hit.entry} ({hit.kind}): {' '.join(hit.snippet.split())}" for hit in newest]
        if lines:
            lines.append("Give an entry's number to read it whole, with a query to see only the places in it.")
        else:
            lines.append(f"Nothing in this conversation holds {quoted(query)}.")
        if rest.stopped_at is not None and len(newest) < limit:
            lines.append(f"Calls and their outputs before entry {rest.stopped_at} were not looked through.")
        return "\n".join(lines)

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
                        recorded_here=True,
                    )
                )
            ]
        )


def quoted(query: str) -> str:
    return json.dumps(query, ensure_ascii=False)


def places_in(text: str, query: str, limit: int) -> list[str]:
    """Lines with the surroundings of each word of `query` in `text`, in order, and where each begins."""
    words = "|".join(re.escape(word) for word in query.split())
    places: list[str] = []
    end = 0
    for match in re.finditer(words, text, re.IGNORECASE) if words else ():
        if match.start() < end:
            continue  # shown with the one before
        start, end = max(0, match.start() - AROUND), match.end() + AROUND
        if len(places) == limit:
            places.append("There are more; narrow the query.")
            break
        places.append(f"[at character {start:,}] {text[start:end]}")
    return places


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
        case Reminder(text=text) | Skill(text=text):
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
