"""Random orders of what can happen to subagents: they end, are cancelled, loaded and killed."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Protocol

import anyio

from tests.support import fake_endpoint as fake
from tests.support.acp_client import Call, CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint, Gate, Recorded, Reply

__all__ = ["Orders"]

GUARD_S = 60.0
DIRECTIVE = re.compile(r"<(bg|fg|kid|say) (\d+)>")


class StartCrow(Protocol):
    """Starts a process whose model is `endpoint`."""

    def __call__(self, *, endpoint: FakeEndpoint) -> CrowProcess: ...


@dataclass(slots=True, kw_only=True)
class Kid:
    """A subagent. It ends when `gate` is opened. `was_killed` is set if its process was killed while it worked."""

    number: int
    session: str
    is_background: bool
    gate: Gate = field(default_factory=Gate)
    id: str = ""
    was_killed: bool = False


@dataclass(slots=True, kw_only=True)
class Orders:
    """Runs random orders in one database, each with a session of its own.

    `offered` are the capabilities of the client. `done` counts what was done.
    """

    crow: StartCrow
    endpoint: FakeEndpoint
    place: Path
    database: Path
    chance: Random
    offered: Mapping[str, Any]
    done: Counter[str] = field(default_factory=Counter)
    kids: list[Kid] = field(default_factory=list)

    async def run(self, orders: int, *, steps: int = 7) -> None:
        """Run this many orders, then open each subagent as a session of its own in a new process and prompt it."""
        self.endpoint.answer_with(self._reply)
        agent = await self._started()
        try:
            for _ in range(orders):
                agent = await self._order(agent, steps)
        finally:
            await agent.__aexit__(None, None, None)
        async with self.crow(endpoint=self.endpoint) as agent:
            await agent.initialize()
            for kid in self.kids:
                if kid.id:
                    await agent.request("session/resume", self._opening(kid.id))
                    assert await agent.prompt(kid.id, "<say 0>") == {"stopReason": "end_turn"}
                    await agent.request("session/close", {"sessionId": kid.id})
                    self.done["subagents resumed"] += 1

    async def _started(self) -> CrowProcess:
        agent = self.crow(endpoint=self.endpoint)
        await agent.__aenter__()
        await agent.initialize(**self.offered)
        return agent

    def _opening(self, session: str) -> dict[str, Any]:
        return {"sessionId": session, "cwd": str(self.place), "mcpServers": []}

    def _reply(self, request: Recorded) -> Reply:
        """The answer to the newest prompt with a directive."""
        kind, number, answers = "say", 0, 0
        for message in request.body["messages"][1:]:
            if message["role"] == "assistant":
                answers += 1
            elif message["role"] == "user" and (found := DIRECTIVE.search(json.dumps(message["content"]))):
                kind, number, answers = found[1], int(found[2]), 0
        if kind == "kid" and answers == 0:
            kid = self.kids[number]
            return fake.text(f"Kid {number} begins", " and ends.", between=[kid.gate])
        if kind in ("bg", "fg") and answers == 0:
            order = {"description": f"Work {number}", "prompt": f"<kid {number}>", "background": kind == "bg"}
            return fake.calls(("task", order))
        return fake.text("Yes.")

    async def _order(self, agent: CrowProcess, steps: int) -> CrowProcess:
        session = await agent.new_session(self.place)
        kids: list[Kid] = []
        turn: Call | None = None
        is_ending = False  # whether updates of the turn may be on their way
        await agent.prompt(session, "<say 0>")
        for _ in range(steps):
            running = [kid for kid in kids if self._state(kid) == "running"]
            does = self.chance.choice(
                ["start"] * 3 + ["end"] * 2 + ["cancel", "cancel all", "load", "resume", "kill", "prompt"]
            )
            self.done[does] += 1
            match does:
                case "start":
                    kid = Kid(number=len(self.kids), session=session, is_background=self.chance.random() < 0.7)
                    self.kids.append(kid)
                    word = "bg" if kid.is_background else "fg"
                    if turn is not None and not turn.outcome.done():
                        await self._end(kids)
                        await self._answered(turn)
                    kids.append(kid)
                    is_ending = kid.is_background
                    turn = await agent.start_prompt(session, f"<{word} {kid.number}>")
                    await self._until(partial(self._has_begun, agent, kid, turn))
                case "end" if running:
                    chosen = self.chance.choice(running)
                    is_ending = is_ending or not chosen.is_background
                    chosen.gate.open()
                case "cancel" if running:
                    chosen = self.chance.choice(running)
                    is_ending = is_ending or not chosen.is_background
                    await agent.notify("session/cancel", {"sessionId": chosen.id})
                case "cancel all":
                    is_ending = True
                    await agent.notify("session/cancel", {"sessionId": session})
                case "load" | "resume":
                    if turn is not None and is_ending:
                        await self._answered(turn)  # a client that loads forgets a call whose result is on its way
                    await agent.request(f"session/{does}", self._opening(session))
                case "kill":
                    await agent.kill()
                    await agent.__aexit__(None, None, None)
                    turn = None
                    for kid in kids:  # the row says so until somebody opens it
                        kid.was_killed = kid.was_killed or self._state(kid) == "running"
                    agent = await self._started()
                    await agent.request(f"session/{self.chance.choice(['load', 'resume'])}", self._opening(session))
                case "prompt" if turn is None or turn.outcome.done():
                    is_ending = True
                    turn = await agent.start_prompt(session, "<say 0>")
                case _:
                    pass
            if self.chance.random() < 0.5:
                await agent.request("session/list", {})
        await self._finish(agent, session, kids, turn)
        return agent

    async def _finish(self, agent: CrowProcess, session: str, kids: list[Kid], turn: Call | None) -> None:
        """End everything, and check what the client and the model were told."""
        await self._end(kids)
        if turn is not None:
            await self._answered(turn)
        await self._until(lambda: all(self._state(kid) != "running" for kid in kids))
        began = [kid for kid in kids if kid.id]
        if self.offered:
            for kid in began:
                states = states_shown(agent, session, kid.id)
                if states:  # after a resume in a new process, the client knows only what has worked since
                    await self._until(lambda: states_shown(agent, session, kid.id)[-1] == "idle")  # noqa: B023
        assert await agent.prompt(session, "<say 0>") == {"stopReason": "end_turn"}
        with anyio.fail_after(GUARD_S):
            while self._is_waiting(session):  # it ended a moment ago, and the prompt came before its message
                assert await agent.prompt(session, "<say 0>") == {"stopReason": "end_turn"}
        request = json.dumps(self.endpoint.asked[-1].body["messages"])
        for kid in began:
            told = len(
                re.findall(rf"The task .{{1,3}}Work {kid.number}.{{1,3}} \({kid.id}\), which you started", request)
            )
            assert told == kid.is_background, f"{kid}: told {told} times"
        since = len(agent.log)
        await agent.request("session/load", self._opening(session))
        for kid in began if self.offered else ():
            stored = self._text(kid)
            shown = agent.text(kid.id, since=since)
            assert shown.startswith(stored), f"{kid}: {shown!r} shown, {stored!r} stored"
        agent.check()
        self.done["orders"] += 1
        self.done["subagents"] += len(began)

    async def _end(self, kids: list[Kid]) -> None:
        for kid in kids:
            kid.gate.open()

    async def _answered(self, turn: Call) -> None:
        try:
            await turn.result()
        except (ConnectionError, RpcError) as error:
            raise AssertionError(f"a turn failed: {error}") from error

    async def _until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(GUARD_S):
            while not condition():  # noqa: ASYNC110  # the other process sets no event here
                await anyio.sleep(0.005)

    def _has_begun(self, agent: CrowProcess, kid: Kid, turn: Call) -> bool:
        """Whether no update of the turn is on its way."""
        words = f"Kid {kid.number} begins"
        return turn.outcome.done() or (
            not kid.is_background and any(words in json.dumps(logged.message) for logged in agent.log[turn.index :])
        )

    def _state(self, kid: Kid) -> str:
        """The stored state of a subagent; empty before it has got its order."""
        with sqlite3.connect(self.database) as db:
            row = db.execute(
                "SELECT id, state FROM sessions WHERE parent_id = ? AND title = ? AND has_prompt",
                (kid.session, f"Work {kid.number}"),
            ).fetchone()
        if row is None:
            return ""
        kid.id = row[0]
        return "killed" if kid.was_killed else str(row[1])

    def _is_waiting(self, session: str) -> bool:
        """Whether the model has not been told something yet."""
        with sqlite3.connect(self.database) as db:
            (left,) = db.execute("SELECT count(*) FROM inbox WHERE session = ?", (session,)).fetchone()
        return bool(left)

    def _text(self, kid: Kid) -> str:
        with sqlite3.connect(self.database) as db:
            rows = db.execute(
                "SELECT json_extract(body, '$.text') FROM entries WHERE session = ? AND kind = 'assistant'"
                " AND json_extract(body, '$.finish') <> 'interrupted' ORDER BY id",
                (kid.id,),
            ).fetchall()
        return "".join(text for (text,) in rows)


def states_shown(agent: CrowProcess, session: str, kid: str) -> list[str]:
    """The states of a subagent that the client was told."""
    return [
        update["state"]["state"]
        for update in agent.updates(session, "subagent_update")
        if update["sessionId"] == kid and update.get("state")
    ]
