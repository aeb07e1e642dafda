"""Methods and updates of the protocol's unstable version, in the real process."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint, Gate

SESSION_METHODS = ("session/archive", "session/unarchive", "session/status", "session/set_title")


async def refused(agent: CrowProcess, method: str, params: Any) -> tuple[int, str]:
    """The code and the message of the error that answers a request."""
    with pytest.raises(RpcError) as caught:
        await agent.request(method, params)
    return caught.value.code, caught.value.message


async def listed(agent: CrowProcess, **params: Any) -> list[tuple[str, bool]]:
    """The listed sessions: their titles, and whether they are archived."""
    sessions = (await agent.request("session/list", params))["sessions"]
    return [(one.get("title"), one["archived"]) for one in sessions]


def rows(home: Path) -> list[tuple[Any, ...]]:
    """What the database says about the sessions."""
    with sqlite3.connect(home / "crow.db") as database:
        return database.execute(
            "SELECT id, title, title_by_user, archived, updated_ms FROM sessions WHERE deleted_ms IS NULL"
        ).fetchall()


async def test_initialize_offers_the_methods(crow: StartCrow) -> None:
    async with crow() as agent:
        capabilities = (await agent.initialize())["agentCapabilities"]
        assert capabilities["sessionCapabilities"].items() >= {"archive": {}, "status": {}, "title": {}}.items()


async def test_an_archived_session_is_hidden_until_it_is_put_back(crow: StartCrow, place: Path, home: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        first, second = await agent.new_session(place), await agent.new_session(place)
        await agent.prompt(first, "say one")
        await agent.prompt(second, "say two")
        assert await listed(agent) == [("say two", False), ("say one", False)]
        (used_ms,) = [row[-1] for row in rows(home) if row[0] == first]
        for _ in range(2):
            assert await agent.request("session/archive", {"sessionId": first}) == {}
            assert await listed(agent) == await listed(agent, archived="exclude") == [("say two", False)]
            assert await listed(agent, archived="only") == [("say one", True)]
            assert await listed(agent, archived=None, _meta={"crow": {"archived": True}}) == [("say one", True)]
            assert await listed(agent, archived="exclude", _meta={"crow": {"archived": True}}) == [("say two", False)]
            assert await listed(agent, archived="include") == [("say two", False), ("say one", True)]
            assert await listed(agent, archived="include", cwd="/elsewhere") == []
        assert [row[-1] for row in rows(home) if row[0] == first] == [used_ms]
        assert (await refused(agent, "session/prompt", {"sessionId": first, "prompt": []}))[0] == -32002
    async with crow() as agent:
        await agent.initialize()
        assert await listed(agent) == [("say two", False)]
        await agent.load_session(first, place)
        assert await agent.prompt(first, "say three") == {"stopReason": "end_turn"}
        assert await listed(agent, archived="only") == [("say one", True)]
        for _ in range(2):
            assert await agent.request("session/unarchive", {"sessionId": first}) == {}
            assert await listed(agent) == [("say one", False), ("say two", False)]
        assert await agent.prompt(first, "say four") == {"stopReason": "end_turn"}


async def test_archiving_cancels_the_running_turn_and_closes_the_session(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("first", " second", between=(gate,)))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "hello")
        await agent.wait_for_text(session, "first")
        assert await agent.request("session/archive", {"sessionId": session}) == {}
        assert await call.result() == {"stopReason": "cancelled"}
        assert await agent.request("session/status", {"sessionId": session}) == {"status": "saved"}
        assert (await refused(agent, "session/close", {"sessionId": session}))[0] == -32002
        gate.open()


async def test_pages_of_the_list_keep_the_filter(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        for number in range(52):
            session = await agent.new_session(place)
            await agent.prompt(session, f"say {number}")
            if number % 2:
                await agent.request("session/archive", {"sessionId": session})
        page = await agent.request("session/list", {"archived": "include"})
        rest = await agent.request("session/list", {"archived": "include", "cursor": page["nextCursor"]})
        found = [(one["title"], one["archived"]) for one in (*page["sessions"], *rest["sessions"])]
        assert found == [(f"say {number}", bool(number % 2)) for number in reversed(range(52))]


async def test_status_tells_open_from_saved_and_changes_nothing(crow: StartCrow, place: Path, home: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "say one")
        assert await agent.request("session/status", {"sessionId": session}) == {"status": "open"}
        await agent.request("session/close", {"sessionId": session})
        before = rows(home)
        assert await agent.request("session/status", {"sessionId": session}) == {"status": "saved"}
        assert rows(home) == before
        await agent.request("session/delete", {"sessionId": session})
        with pytest.raises(RpcError) as caught:
            await agent.request("session/status", {"sessionId": session})
        assert (caught.value.code, caught.value.data["sessionId"]) == (-32002, session)


async def test_a_title_set_by_the_client_is_stored_and_stays(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "hello")
        since = len(agent.log)
        answer = await agent.request("session/set_title", {"sessionId": session, "title": "  The\n nest\u202e "})
        assert answer == {"title": "The nest\\u202e"}
        (update,) = agent.updates(session, "session_info_update", since=since)
        assert update["title"] == "The nest\\u202e"
        assert await listed(agent) == [("The nest\\u202e", False)]
        await agent.prompt(session, "again")
        assert await listed(agent) == [("The nest\\u202e", False)]
        await agent.request("session/close", {"sessionId": session})
        await agent.request("session/archive", {"sessionId": session})
        long = await agent.request("session/set_title", {"sessionId": session, "title": "x" * 5000})
        assert long == {"title": "x" * 199 + "…"}
        assert await listed(agent, archived="only") == [(long["title"], True)]
        assert [row[1:4] for row in rows(home)] == [(long["title"], 1, 1)]


async def test_bad_requests_get_the_published_errors_and_change_nothing(
    crow: StartCrow, place: Path, home: Path
) -> None:
    async with crow() as agent:
        agent.checks_schema = False
        for method in SESSION_METHODS:
            assert (await refused(agent, method, {"sessionId": "x", "title": "t"}))[0] == -32600
        await agent.initialize()
        session, gone = await agent.new_session(place), await agent.new_session(place)
        await agent.prompt(session, "say one")
        await agent.prompt(gone, "say two")
        await agent.request("session/delete", {"sessionId": gone})
        before = rows(home)
        for method in SESSION_METHODS:
            for name in (None, 7, ["x"], {"id": session}, True):
                assert (await refused(agent, method, {"sessionId": name, "title": "t"}))[0] == -32602
            assert (await refused(agent, method, {"title": "t"}))[0] == -32602
            for name in ("", "no such session", gone, "x" * 5000):
                assert (await refused(agent, method, {"sessionId": name, "title": "t"}))[0] == -32002
        for title in (None, 7, ["t"], "", " \n\t "):
            assert (await refused(agent, "session/set_title", {"sessionId": session, "title": title}))[0] == -32602
        assert (await refused(agent, "session/set_title", {"sessionId": session}))[0] == -32602
        for archived in ("all", "", "_mine", True, 7, ["only"], {"only": True}):
            assert (await refused(agent, "session/list", {"archived": archived}))[0] == -32602
        assert rows(home) == before
        assert await listed(agent) == [("say one", False)]
        assert await agent.prompt(session, "say three") == {"stopReason": "end_turn"}


async def test_a_client_that_asks_gets_plans_by_id(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    items = [{"content": "Twigs", "status": "in_progress", "priority": "high"}]
    plan = {"type": "items", "planId": "plan", "entries": items}
    for capabilities, shown in (({"plan": {}}, "plan_update"), ({"plan": None}, "plan"), ({"plan": True}, "plan")):
        endpoint.script(
            fake.calls(("update_plan", {"items": items})),
            fake.text("planned"),
            fake.calls(("update_plan", {"items": []})),
            fake.text("done"),
        )
        async with crow(endpoint=endpoint) as agent:
            agent.checks_schema = shown == "plan_update"
            await agent.initialize(**capabilities)
            session = await agent.new_session(place)
            await agent.prompt(session, "plan it")
            await agent.prompt(session, "do it")
            agent.checks_schema = True
            call = await agent.start("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []})
            await call.result()
            kinds = ("plan", "plan_update", "plan_removed")
            by_id = [
                {"sessionUpdate": "plan_update", "plan": plan},
                {"sessionUpdate": "plan_removed", "planId": "plan"},
            ]
            plain = [{"sessionUpdate": "plan", "entries": items}, {"sessionUpdate": "plan", "entries": []}]
            expected = by_id if shown == "plan_update" else plain
            assert agent.updates(session, *kinds) == [*expected, *expected]
