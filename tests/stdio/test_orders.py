"""Several requests about one session in one write are answered in their order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow
from tests.support.acp_client import Call, CrowProcess, RpcError

GONE = -32002
CHANGES = ("session/set_mode", "session/set_config_option")
OPENINGS = ("session/load", "session/resume", "session/fork")
REQUESTS = ("session/prompt", *CHANGES, *OPENINGS, "_session/steering")
TEXT = [{"type": "text", "text": "say more"}]


def params_of(method: str, session: str, place: Path) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {method: {"cwd": str(place), "mcpServers": []} for method in OPENINGS}
    more |= {
        "session/prompt": {"prompt": TEXT},
        "_session/steering": {"prompt": TEXT},
        "session/set_mode": {"modeId": "plan"},
        "session/set_config_option": {"configId": "thought_level", "value": "high"},
    }
    return {"sessionId": session} | more.get(method, {})


async def outcome(call: Call, session: str) -> Any:
    """The stop reason, the code of an error (which must name the session), or True for another result."""
    answer = (await asyncio.gather(call.result(), return_exceptions=True))[0]
    if isinstance(answer, dict):
        return answer.get("stopReason", True)
    assert isinstance(answer, RpcError)
    assert answer.data["sessionId"] == session
    return answer.code


async def outcomes(agent: CrowProcess, session: str, place: Path, *methods: str) -> list[Any]:
    """The outcomes of these requests. If the last one closes the session, no update may follow its answer."""
    calls = await agent.start_at_once(*((method, params_of(method, session, place)) for method in methods))
    found = [await outcome(call, session) for call in calls]
    if methods[-1] in ("session/close", "session/delete"):
        await agent.request("session/list", {})
        assert agent.updates(session, since=agent.response_index(calls[-1])) == []
    return found


@pytest.mark.long
@pytest.mark.parametrize("running", [False, True], ids=["idle", "running"])
async def test_requests_racing_the_end_of_a_session_are_answered_as_before_or_after_it(
    crow: StartCrow, place: Path, running: bool
) -> None:
    async with crow() as agent:
        await agent.initialize()
        for end in ("session/close", "session/delete"):
            for method in REQUESTS:
                behind: Any = GONE
                if end == "session/close" and method in OPENINGS:
                    behind = True
                before: Any = "cancelled" if method == "session/prompt" else True
                for methods, expected in (((end, method), [True, behind]), ((method, end), [before, True])):
                    session = await agent.new_session(place)
                    await agent.prompt(session, "say hello")
                    turn = await agent.start_prompt(session, "count to 20000") if running else None
                    if turn is not None:
                        await agent.wait_for_update("agent_message_chunk", since=turn.index)
                    assert await outcomes(agent, session, place, *methods) == expected, methods
                    if turn is not None:
                        assert await turn.result() == {"stopReason": "cancelled"}


async def test_requests_racing_the_opening_of_a_session_find_it_open(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "say hello")
        for opening in ("session/load", "session/resume"):
            for method in REQUESTS:
                expected = "end_turn" if method == "session/prompt" else True
                assert await outcomes(agent, session, place, opening, method) == [True, expected], (opening, method)
        assert await outcomes(agent, session, place, "session/load", "session/load", "session/prompt") == [
            True,
            True,
            "end_turn",
        ]
        loaded = await agent.load_session(session, place)
        assert loaded["modes"]["currentModeId"] == "plan"
        assert await outcomes(agent, session, place, "session/close", "session/close") == [True, GONE]
        assert await outcomes(agent, session, place, "session/load", "session/set_mode", "session/close") == [
            True,
            True,
            True,
        ]


async def test_options_set_at_the_same_time_are_all_kept(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize(session={"configOptions": {"boolean": {}}})
        session = await agent.new_session(place)
        chosen: list[tuple[str, str | bool]] = [("thought_level", "high"), ("auto_compact", False), ("mode", "plan")]
        calls = await agent.start_at_once(
            *(
                (
                    "session/set_config_option",
                    {"sessionId": session, "configId": option, "value": value}
                    | ({"type": "boolean"} if isinstance(value, bool) else {}),
                )
                for option, value in chosen
            )
        )
        await asyncio.gather(*(call.result() for call in calls))
        options = (await agent.load_session(session, place))["configOptions"]
        kept = {option["id"]: option["currentValue"] for option in options}
        assert [(option, kept[option]) for option, _ in chosen] == chosen
