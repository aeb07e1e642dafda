"""What a branch needs of a store, in memory.

`tests/store/test_memory_store.py` compares it with the SQLite store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from crow.domain.conversation import Projection
from crow.domain.entries import CallRef, Entry, NewEntry, PromptName, ToolResult, User
from crow.domain.errors import LeafMoved, NoSuchSession
from crow.domain.messages import JsonObject, Part
from crow.store import BranchStore, SessionChanges, SessionRow, Tail, TurnStart
from crow.store.codec import merged_metadata
from crow.store.rows import sized

__all__ = ["MemoryStore"]


class MemoryStore(BranchStore):
    """`entries` is the log of all sessions; `appends` counts appends, which raise `fails` if it is set."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.appends = 0
        self.fails: BaseException | None = None
        self._newest = 0
        self._rows: dict[str, SessionRow] = {}
        self._leaves: dict[str, int | None] = {}

    def create(self, session_id: str, *, mode: str = "ask", leaf: int | None = None) -> Tail:
        self._rows[session_id] = SessionRow(
            id=session_id, conversation=1, leaf=leaf, cwd="/repo", model="scripted", mode=mode
        )
        self._leaves[session_id] = leaf
        return Tail(row=self._rows[session_id], entries=())

    def path(self, session_id: str) -> tuple[Entry, ...]:
        """The session's whole path, oldest entry first."""
        path: list[Entry] = []
        at = self._leaves[session_id]
        while at is not None:
            path.append(self.entries[at])
            at = self.entries[at].parent
        return tuple(reversed(path))

    def hold(self, session_id: str, entries: Sequence[Entry]) -> Tail:
        """Create a session with these entries, which may be invalid."""
        self.entries.update({entry.id: entry for entry in entries})
        self._newest = max(self.entries, default=0)
        row = self.create(session_id, leaf=entries[-1].id if entries else None).row
        return Tail(row=row, entries=tuple(entries))

    def fork(self, session_id: str, new_id: str, *, entry: int) -> str:
        """Create a session that points to an entry of another. Return its id."""
        original = self._rows[session_id]
        self._rows[new_id], self._leaves[new_id] = replace(original, id=new_id, leaf=entry), entry
        return new_id

    async def take_turn(
        self,
        session_id: str,
        message_id: str | None,
        *,
        leaf: int | None,
        parts: Sequence[Part] | None = None,
        cut: int | None = None,
        name: PromptName | None = None,
        command_id: str = "",
    ) -> TurnStart:
        del name, command_id
        turn = max((entry.turn for entry in self.path(session_id)), default=0) + 1
        prompt = (
            []
            if message_id is None
            else [NewEntry(body=User(parts=tuple(parts or ()), message_id=message_id, cut=cut))]
        )
        stored = await self.append(session_id, leaf=leaf, turn=turn, entries=prompt)
        return TurnStart(turn=turn, entries=stored, moved=False)

    def disown(self, session_id: str, *, leaf: int | None, turn: int, end: Sequence[NewEntry]) -> None:
        """Does nothing: there is no other process."""

    async def drop_prompt(self, session_id: str, message_id: str, *, is_cancelled: bool = False) -> None:
        """Does nothing: there is no inbox."""

    async def move_leaf(self, session_id: str, *, leaf: int | None, to: int | None, reason: str) -> None:
        del reason
        if self._leaves[session_id] != leaf:
            raise LeafMoved(f"Session {session_id} stands on {self._leaves[session_id]}, not on {leaf}.")
        self._leaves[session_id] = to

    async def entry(self, entry_id: int, *, session_id: str | None = None) -> Entry | None:
        path = self.entries.values() if session_id is None else self.path(session_id)
        return next((entry for entry in path if entry.id == entry_id), None)

    async def result(self, session_id: str, call: CallRef) -> Entry | None:
        for entry in self.entries.values():
            if isinstance(entry.body, ToolResult) and entry.body.call == call:
                return entry
        return None

    async def history(
        self, session_id: str, *, result_bytes: Callable[[int], int | None] | None = None
    ) -> AsyncIterator[Sequence[Entry]]:
        yield self.path(session_id)

    async def save_draft(
        self, session_id: str, *, after_leaf: int | None, turn: int, message_id: str, text: str, thought: str
    ) -> None:
        """Does nothing: no test kills a store in memory."""

    async def session(self, session_id: str) -> SessionRow:
        if session_id not in self._rows:
            raise NoSuchSession(session_id)
        return replace(self._rows[session_id], leaf=self._leaves[session_id])

    async def update_session(self, session_id: str, changes: SessionChanges) -> SessionRow:
        self._rows[session_id] = replace(await self.session(session_id), **changes)
        return self._rows[session_id]

    async def merge_metadata(self, session_id: str, patch: JsonObject) -> SessionRow:
        metadata = merged_metadata((await self.session(session_id)).metadata, patch)
        return await self.update_session(session_id, SessionChanges(metadata=metadata))

    async def open_session(self, session_id: str) -> Tail:
        return await self.tail(session_id)

    async def tail(self, session_id: str) -> Tail:
        row = await self.session(session_id)
        return Tail(row=row, entries=tuple(Projection(self.path(session_id)).entries))

    async def append(
        self,
        session_id: str,
        *,
        leaf: int | None,
        turn: int,
        entries: Sequence[NewEntry],
        release: bool = False,
        changes: SessionChanges | None = None,
    ) -> tuple[Entry, ...]:
        if self._leaves[session_id] != leaf:
            raise LeafMoved(f"Session {session_id} stands on {self._leaves[session_id]}, not on {leaf}.")
        if self.fails is not None:
            raise self.fails
        self.appends += 1
        stored: list[Entry] = []
        for new in entries:
            self._newest += 1
            entry = Entry(
                id=self._newest,
                conversation=1,
                session=session_id,
                parent=stored[-1].id if stored else leaf,
                turn=turn,
                body=new.body,
                model=new.model,
                usage=new.usage,
                cost=new.cost,
                estimate=sized(new).estimate,
            )
            self.entries[entry.id] = entry
            stored.append(entry)
        if stored:
            self._leaves[session_id] = stored[-1].id
        if changes is not None:
            await self.update_session(session_id, changes)
        return tuple(stored)
