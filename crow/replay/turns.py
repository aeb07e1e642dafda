"""Replays a session: runs each of its turns again, and compares each request with the log.

If a turn does something other than the log says, the result names the turn and the difference. The later requests of
this turn are built from the entries of the log without running it. The next turn is run again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from crow.domain.conversation import Context
from crow.domain.entries import Entry, ModelRequest, User
from crow.llm import Request
from crow.replay.log import Diverged, LoggedStore, is_request, named, sent_by
from crow.replay.loop import LoggedTurns
from crow.replay.requests import LoggedRequest, Rebuilder, Replayed, paths
from crow.store import Store
from crow.tools import Workspace


async def replayed_requests(
    store: Store, session_id: str, rebuilder: Rebuilder, workspace: Workspace
) -> AsyncIterator[Replayed]:
    """Yield the requests of a session and of all its branches, and the turns that run differently today. The current
    branch comes first. `workspace` is an empty directory."""
    known: set[int] = set()
    row = await store.session(session_id)
    async for path in paths(store, session_id):
        logged = LoggedStore(row, path, is_from_file=rebuilder.is_from_file)
        async for each in _PathReplay(logged, workspace, rebuilder, known).requests():
            yield each


class _PathReplay:
    """Replays one path of a session. Paths share their first entries, so requests whose entry ids are in `known` are
    skipped, and those replayed here are added to it."""

    def __init__(self, store: LoggedStore, workspace: Workspace, rebuilder: Rebuilder, known: set[int]) -> None:
        self._store, self._rebuilder, self._known = store, rebuilder, known
        self._turns = LoggedTurns(store, workspace, self._sent)
        self._found: list[Replayed] = []
        """The results of the turn so far."""
        self._reason = ""
        """Why the turn does not do what the log says. It becomes the `words` of the result for the turn's next
        request."""

    async def requests(self) -> AsyncIterator[Replayed]:
        """Yield the requests of the path."""
        while await self._store.fill():
            self._store.begin_turn()
            try:
                await self._run()
            except Diverged as words:
                self._reason = str(words)
                await self._turns.begin()
            while entry := next(self._store.upcoming(), None):
                await self._take(entry)
            if self._reason:  # the turn has no further request
                self._add(self._turns.branch.entries[-1], self._reason)
            for each in self._found:
                yield each
            self._found.clear()

    async def _run(self) -> None:
        """Run the turn that begins here, if it has requests that can be compared."""
        entries = list(self._store.upcoming())
        is_unknown = any(is_request(entry) and entry.id not in self._known and sent_by(entry) for entry in entries)
        prompts = [number for number, entry in enumerate(entries) if isinstance(entry.body, User)]
        if prompts and is_unknown:
            if self._turns.lacks_summary:
                await self._turns.prepare()
            for entry in entries[: prompts[0] + 1]:
                await self._take(entry)
            await self._turns.run()

    async def _take(self, entry: Entry) -> None:
        """Append the next entry of the log without running anything. If it holds a request, build the request from the
        entries before it and compare it."""
        body = entry.body
        if is_request(entry):
            self._compare(entry, self._turns.branch.context())
        elif isinstance(body, ModelRequest) and body.purpose == "summary":
            await self._turns.prepare()
        await self._turns.take(1)

    def _sent(self, entry: Entry, request: Request) -> None:
        """Compare a request that a turn sends. If it differs and today's code has made an entry differently, end the
        turn, so that its later requests are built from the log."""
        context = self._turns.branch.context()
        is_same = self._compare(entry, replace(context, messages=request.messages, tools=request.tools))
        if not is_same and self._store.changed:
            self._store.diverge("")

    def _compare(self, entry: Entry, context: Context) -> bool:
        """Compare a request, unless it was already compared on another path. Return False if it differs from what was
        sent."""
        if entry.id in self._known:
            return True
        self._known.add(entry.id)
        logged = LoggedRequest(entry=entry, context=context, projection=self._turns.branch.projection)
        found = self._rebuilder.replay(logged)
        if found.outcome == "different" and (changed := self._store.changed):
            found = replace(found, words=f"{named(changed)} is made differently today: {found.words}")
        if self._reason:
            found = replace(found, outcome="different", words=self._reason)
        self._reason = ""
        self._found.append(found)
        return found.outcome != "different"

    def _add(self, entry: Entry, words: str) -> None:
        self._reason = ""
        if entry.id not in self._known:
            self._known.add(entry.id)
            found = Replayed(session=entry.session, entry=entry.id, turn=entry.turn, outcome="different", words=words)
            self._found.append(found)
