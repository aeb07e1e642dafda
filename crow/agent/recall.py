"""Gives tools access to the log of a session's branch.

`recall` searches the stored path, including compacted entries. For messages it uses the index. For calls and their
results it scans the entries, up to a limit. `before_change` stores the content of a file before a call changes it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from crow.agent.branch import Branch
from crow.domain import entries
from crow.domain.rendering import parts_text
from crow.store import Store

RECALL_TOOLS = frozenset({"recall"})
CONTEXT_CHARS = 300


class BranchLog:
    """The log of one branch; see :class:`crow.tools.Log`."""

    def __init__(self, store: Store, branch: Branch) -> None:
        self._store = store
        self._branch = branch
        self._others: dict[int, Branch] = {}

    def adopt(self, assistant: int, branch: Branch) -> None:
        """From now on, file changes by the answer `assistant` are recorded on `branch`, a sub-agent's branch."""
        self._others[assistant] = branch

    def forget(self, assistants: Iterable[int]) -> None:
        """Undo `adopt` for these answers. Their calls have ended."""
        for assistant in assistants:
            self._others.pop(assistant, None)

    async def recall(self, *, query: str | None, entry: int | None, limit: int) -> str:
        """See :class:`crow.tools.Log`. With both `query` and `entry`, return the matches of `query` in that entry."""
        if entry is None:
            return await self._search(query or "", limit)
        found = await self._store.entry(entry, session_id=self._branch.row.id)
        if found is None:
            return f"There is no entry {entry} in this conversation. Search with a query instead."
        text, name = text_of(found), f"Entry {found.id} ({type(found.body).__name__.lower()}"
        if not query:
            return f"{name}):\n{text}"
        matches = matches_in(text, query, limit)
        if not matches:
            return f"{name}, {len(text):,} characters) has no match for {quoted(query)}."
        return "\n".join([f"{name}, {len(text):,} characters):", *matches])

    async def _search(self, query: str, limit: int) -> str:
        session = self._branch.row.id
        said = await self._store.search(query, session_id=session, limit=limit)
        # skip earlier calls of recall: they contain the words that it looks for
        scan = await self._store.scan(query, session_id=session, limit=limit, without=RECALL_TOOLS)
        # If an entry matches both as a message and by its calls, keep the message. Leave out titles: a title is not an
        # entry.
        hits = {hit.entry: hit for hit in (*scan.hits, *said) if hit.kind != "title"}
        newest = [hits[entry] for entry in sorted(hits, reverse=True)[:limit]]
        lines = [f"entry {hit.entry} ({hit.kind}): {' '.join(hit.snippet.split())}" for hit in newest]
        if lines:
            lines.append("Pass an entry's number to read all of it, or with a query to see only the matches in it.")
        else:
            lines.append(f"No matches for {quoted(query)} in this conversation.")
        if scan.stopped_at is not None and len(newest) < limit:
            lines.append(f"Calls and their outputs before entry {scan.stopped_at} were not searched.")
        return "\n".join(lines)

    async def before_change(self, call_id: str, path: Path, before: bytes | None, after: bytes) -> None:
        """See :class:`crow.tools.Log`."""
        _, assistant, index = call_id.split("_")
        file = entries.File(
            call=entries.CallRef(assistant=int(assistant), index=int(index)),
            path=str(path),
            before=before,
            after_hash=hashlib.sha256(after).hexdigest(),
            recorded_here=True,
        )
        await self._others.get(int(assistant), self._branch).record([entries.NewEntry(body=file)])


def quoted(query: str) -> str:
    return json.dumps(query, ensure_ascii=False)


def matches_in(text: str, query: str, limit: int) -> list[str]:
    """Return the places in `text` where a word of `query` occurs, in order, each with its position and the text around
    it."""
    words = "|".join(re.escape(word) for word in query.split())
    matches: list[str] = []
    end = 0
    for match in re.finditer(words, text, re.IGNORECASE) if words else ():
        if match.start() < end:
            continue  # the previous excerpt already contains this match
        start, end = max(0, match.start() - CONTEXT_CHARS), match.end() + CONTEXT_CHARS
        if len(matches) == limit:
            matches.append("There are more; narrow the query.")
            break
        matches.append(f"[at character {start:,}] {text[start:end]}")
    return matches


def text_of(entry: entries.Entry) -> str:
    """Return all text of an entry, formatted for the model."""
    match entry.body:
        case entries.User(parts=parts):
            return parts_text(parts)
        case entries.Assistant(text=text, calls=calls):
            return "\n".join([text, *(f"{call.name}({call.arguments})" for call in calls)]).strip()
        case entries.ToolResult(name=name, text=text):
            return f"{name}:\n{text}"
        case entries.Checkpoint(summary=summary):
            return summary
        case entries.Reminder(text=text) | entries.Skill(text=text):
            return text
        case entries.Command(text=text, answer=answer):
            return f"{text}\n{answer}"
        case _:
            return "(This entry has no text.)"
