"""Processes that keep their sessions in one PostgreSQL database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from crow.domain.rendering import INTERRUPTED
from tests.stdio.conftest import StartCrow
from tests.stdio.test_recovery import named, texts, told
from tests.stdio.test_tools import configured
from tests.stdio.test_turns import opened, reloaded
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint, Gate
from tests.support.postgres import create_database, drop_database

PASSWORD = "sk-database-password"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """An empty database. Its server does not ask for the password in the URL."""
    made = await create_database()
    yield made.replace("postgres:@", f"postgres:{PASSWORD}@")
    await drop_database(made)


async def wait_for_draft(url: str, wanted: str) -> None:
    """Wait until the drafts have this text; no message reports when they are saved."""
    connection = await asyncpg.connect(url)
    with anyio.fail_after(60):
        while wanted not in str(await connection.fetch("SELECT piece FROM crow.drafts")):  # noqa: ASYNC110
            await anyio.sleep(0.01)
    await connection.close()


async def prompted(agent: CrowProcess, session: str, text: str) -> Any:
    """Prompt until the server has noticed that the process that ran the session's turn is gone."""
    with anyio.fail_after(60):
        while True:
            try:
                return await agent.prompt(session, text)
            except RpcError as error:
                if "is busy" not in error.message:
                    raise
            await anyio.sleep(0.01)


async def test_a_turn_of_a_killed_process_is_taken_over_with_the_part_that_was_stored(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint, url: str, home: Path
) -> None:
    gate = Gate()
    endpoint.script(fake.text("ready"), fake.text("partial ", "never", between=[gate]), fake.text("taken over"))
    env = {"CROW_DATABASE_URL": url}
    async with crow(endpoint=endpoint, env=env) as one, crow(endpoint=endpoint, env=env) as other:
        session = await opened(one, place)
        await one.prompt(session, "first")
        await reloaded(other, session, place)
        assert texts(other, session) == ["first", "ready"]
        await one.start_prompt(session, "second")
        await one.wait_for_text(session, "partial")
        await wait_for_draft(url, "partial ")
        with pytest.raises(RpcError) as raised:
            await other.prompt(session, "me too")
        assert raised.value.message.startswith(f"Session {session} is busy: {named(one)} is running a turn in it.")
        await one.kill()
        assert await prompted(other, session, "me then") == {"stopReason": "end_turn"}
        assert [(message["role"], message["content"]) for message in told(endpoint)][2:] == [
            ("user", "second"),
            ("assistant", f"partial \n\n{INTERRUPTED}"),
            ("user", "me then"),
        ]
        assert "taken over" in other.text(session)
        (listed,) = (await other.request("session/list", {}))["sessions"]
        assert (listed["sessionId"], listed["title"], listed["cwd"]) == (session, "first", str(place))
    assert not (home / "crow.db").exists()


async def test_a_new_process_loads_lists_and_searches_what_others_stored(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint, url: str, home: Path
) -> None:
    def allow(params: dict[str, Any]) -> dict[str, Any]:
        option = next(one["optionId"] for one in params["options"] if one["kind"] == "allow_once")
        return {"outcome": {"outcome": "selected", "optionId": option}}

    configured(home, f'[database]\nurl = "{url}"\n')
    endpoint.script(fake.text("The nest needs string."))
    async with crow(endpoint=endpoint) as agent:
        earlier = await opened(agent, place)
        await agent.prompt(earlier, "What does the nest need?")
        await agent.kill()
    endpoint.script(
        fake.calls(("recall", {"query": "nest", "scope": "workspace"})),
        fake.calls(("shell", {"command": "env; echo url $CROW_DATABASE_URL", "access": "full"})),
        fake.text("String."),
    )
    trace = home / "trace.jsonl"
    env = {"CROW_TRACE": str(trace), "CROW_LOG": "debug", "CROW_DATABASE_URL": url}
    async with crow(endpoint=endpoint, env=env, answers={"session/request_permission": allow}) as agent:
        await reloaded(agent, earlier, place)
        assert texts(agent, earlier) == ["What does the nest need?", "The nest needs string."]
        session = await agent.new_session(place)
        await agent.prompt(session, "Look it up")
        await agent.request("session/set_title", {"sessionId": session, "title": "Second"})
        page = await agent.request("session/list", {"cwd": str(place)})
        assert [(one["sessionId"], one["title"]) for one in page["sessions"]] == [
            (session, "Second"),
            (earlier, "What does the nest need?"),
        ]
        await agent.request("session/delete", {"sessionId": earlier})
        assert len((await agent.request("session/list", {}))["sessions"]) == 1
    results = [message["content"] for message in told(endpoint) if message["role"] == "tool"]
    assert f'session {earlier} "What does the nest need?" in {place}' in results[0]
    assert results[1].endswith("\nurl")
    assert PASSWORD not in results[1]
    for file in (trace, home / "crow.log"):
        assert PASSWORD not in file.read_text()


async def test_a_database_that_cannot_be_reached_is_named_in_the_editor(crow: StartCrow, place: Path) -> None:
    url = f"postgresql://me:{PASSWORD}@127.0.0.1:1/team"
    async with crow(env={"CROW_DATABASE_URL": url}) as agent:
        await agent.initialize()
        with pytest.raises(RpcError) as raised:
            await agent.new_session(place)
        assert "PostgreSQL database team on 127.0.0.1:1 cannot be used" in raised.value.message
        assert PASSWORD not in f"{raised.value.message} {raised.value.data}"
    async with crow(env={"CROW_DATABASE_URL": f"mysql://me:{PASSWORD}@127.0.0.1/team"}) as agent:
        await agent.initialize()
        with pytest.raises(RpcError) as raised:
            await agent.new_session(place)
        assert 'The database URL begins with "mysql:".' in raised.value.message
        assert PASSWORD not in f"{raised.value.message} {raised.value.data}"
