"""Kills the real process at random moments of a turn, many times in one session."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random

from tests.stdio.conftest import StartCrow
from tests.support.acp_client import Call, CrowProcess

__all__ = ["kill_in_turns"]

WORK = (
    "think about nests then write a.txt: twigs then run echo one; echo two then read README.md then plan: build; rest "
    "then count to 4 then say that was number"
)
LINES = 40
"""About as many lines as a whole turn has."""


async def kill_in_turns(crow: StartCrow, place: Path, database: Path, *, kills: int, chance: Random) -> None:
    """Start, load, check, prompt and kill `kills` times, then finish one turn."""
    session, shown = "", set[str]()
    for number in range(kills + 1):
        async with crow() as agent:
            await agent.initialize()
            if number == 0:
                session = await agent.new_session(place)
            else:
                await agent.load_session(session, place)
                check(agent, session, number, shown)
            since = len(agent.log)
            call = await agent.start_prompt(session, f"{WORK} {number}")
            if number == kills:
                assert await call.result() == {"stopReason": "end_turn"}
                continue
            wanted = since + chance.randint(1, LINES)
            await agent.wait_for(partial(_has_lines, agent, call, wanted))
            await asyncio.sleep(chance.random() * 0.02)
            await agent.kill()
            shown |= completed(agent, session, since=since)
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        turns = connection.execute(
            "SELECT kind, count(*) FROM entries WHERE kind IN ('user', 'turn_end') GROUP BY kind ORDER BY kind"
        ).fetchall()
        assert turns == [("turn_end", kills + 1), ("user", kills + 1)]
        assert connection.execute("SELECT state FROM sessions").fetchall() == [("idle",)]


def _has_lines(agent: CrowProcess, call: Call, wanted: int, _: object) -> bool:
    return len(agent.log) >= wanted or call.outcome.done()


def check(agent: CrowProcess, session: str, number: int, shown: set[str]) -> None:
    """The replay has every prompt and every call whose result was shown, and no open call."""
    prompts = [chunk["content"]["text"] for chunk in agent.updates(session, "user_message_chunk")]
    assert prompts == [f"{WORK} {earlier}" for earlier in range(number)]
    assert shown <= completed(agent, session)
    assert {call["status"] for call in agent.updates(session, "tool_call")} <= {"completed", "failed"}


def completed(agent: CrowProcess, session: str, *, since: int = 0) -> set[str]:
    """The calls whose results the client received."""
    return {
        update["toolCallId"]
        for update in agent.updates(session, "tool_call", "tool_call_update", since=since)
        if update.get("status") == "completed"
    }
