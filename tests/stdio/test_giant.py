"""A long session over stdio: what is said comes whole, tool results as excerpts, and all of them on demand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from benchmarks.giant import SESSION, Size, make
from benchmarks.process.client import Agent
from crow.domain.entries import Assistant, ToolResult, User
from crow.domain.messages import Text
from crow.frontend.calls import REPLAY_RESULT_BYTES, REPLAY_RESULTS_BYTES
from crow.protocol.sizes import LINE_BYTES
from crow.store.sqlite.store import SqliteStore
from tests.stdio.conftest import ROOT, StartCrow
from tests.store.scenes import add, begin, history, new_session, result, said
from tests.support.acp_client import RpcError
from tests.support.fork_server import command

SMALL = Size(entries=1_500, output_bytes=30_000_000, compactions=8, branches=3, sessions=2, other_bytes=10_000)


async def fill(home: Path, size: Size = SMALL) -> list[Any]:
    """Makes the session; returns the bodies on its path."""
    store = await SqliteStore.open(home / "crow.db")
    try:
        made = await make(store, size)
        assert (made["compactions"], made["branches"]) == (size.compactions, size.branches)
        return [entry.body for entry in await history(store, SESSION)]
    finally:
        await store.close()


def texts(updates: list[dict[str, Any]], kind: str) -> list[str]:
    """The texts of all chunks of a kind, joined by message."""
    joined: dict[str, str] = {}
    for update in updates:
        if update["sessionUpdate"] == kind:
            joined[update["messageId"]] = joined.get(update["messageId"], "") + update["content"]["text"]
    return list(joined.values())


def output(call: dict[str, Any]) -> str:
    return "".join(block["content"]["text"] for block in call["content"] if block["type"] == "content")


@pytest.mark.long
async def test_a_long_session_is_replayed_in_order_with_excerpts_of_its_results(
    crow: StartCrow, home: Path, place: Path
) -> None:
    bodies = await fill(home)
    results = [body for body in bodies if isinstance(body, ToolResult)]
    most = max(REPLAY_RESULT_BYTES, REPLAY_RESULTS_BYTES * 3 // len(bodies))
    async with crow() as agent:
        await agent.initialize()
        await agent.request("session/load", {"sessionId": SESSION, "cwd": str(place), "mcpServers": []})
        updates = agent.updates(SESSION)
        assert texts(updates, "user_message_chunk") == [
            part.text for body in bodies if isinstance(body, User) for part in body.parts if isinstance(part, Text)
        ]
        answers = texts(updates, "agent_message_chunk")
        assert [text for text in answers if not text.startswith("(Context compacted: ")] == [
            body.text for body in bodies if isinstance(body, Assistant) and body.text
        ]
        calls = [update for update in updates if update["sessionUpdate"] == "tool_call"]
        assert [call["toolCallId"] for call in calls] == [body.call.call_id for body in results]
        long = [
            (call, body)
            for call, body in zip(calls, results, strict=True)
            if len(body.text.encode()) > most + 1_000 and not body.announcement.diffs
        ]
        assert len(long) > 100
        for call, body in long:
            assert f"/show {body.call.call_id} …]" in output(call)
            assert len(output(call).encode()) < 2 * most + 1_000
            assert "output" not in call.get("rawOutput", {})
        sent = sum(len(json.dumps(call, ensure_ascii=False)) for call in calls)
        assert sent < REPLAY_RESULTS_BYTES + 2_000 * len(calls)

        call, body = max((one for one in long if len(one[1].text) < 300_000), key=lambda one: len(one[1].text))
        await agent.prompt(SESSION, f"/show {body.call.call_id}")
        shown = "".join(texts(agent.updates(SESSION)[-5:], "agent_message_chunk"))
        assert body.text.strip() in shown


@pytest.mark.long
async def test_a_client_gets_all_results_if_it_asks_for_them(crow: StartCrow, home: Path, place: Path) -> None:
    bodies = await fill(home, Size(entries=900, output_bytes=9_000_000, compactions=2, branches=1, sessions=0))
    results = [body for body in bodies if isinstance(body, ToolResult) and not body.announcement.diffs]
    async with crow() as agent:
        await agent.initialize()
        full = {"_meta": {"crow": {"replay": "full"}}}
        await agent.request("session/load", {"sessionId": SESSION, "cwd": str(place), "mcpServers": [], **full})
        calls = {one["toolCallId"]: one for one in agent.updates(SESSION) if one["sessionUpdate"] == "tool_call"}
        for body in results:
            lines = "\n".join(line.removeprefix("    ") for line in output(calls[body.call.call_id]).splitlines())
            whole = len(body.text.encode()) < 250_000
            assert (body.text.strip() in lines) is whole
            assert "output" not in calls[body.call.call_id].get("rawOutput", {})
            assert len(json.dumps(calls[body.call.call_id])) < LINE_BYTES


@pytest.mark.parametrize("value", [1, "", "FULL", ["full"], {}, True])
async def test_an_unknown_kind_of_replay_is_refused_and_nothing_is_opened(
    crow: StartCrow, home: Path, place: Path, value: object
) -> None:
    store = await SqliteStore.open(home / "crow.db")
    await store.create_session(new_session(cwd=str(place)))
    await store.close()
    async with crow() as agent:
        await agent.initialize()
        params = {"sessionId": "s1", "cwd": str(place), "mcpServers": [], "_meta": {"crow": {"replay": value}}}
        with pytest.raises(RpcError, match=r"_meta\.crow\.replay") as refused:
            await agent.request("session/load", params)
        assert refused.value.code == -32602
        with pytest.raises(RpcError) as refused:
            await agent.request("session/close", {"sessionId": "s1"})
        assert refused.value.code == -32002


async def stuck_load(home: Path, place: Path) -> tuple[Agent, BinaryIO, int]:
    """An agent whose replay of `s1` waits for a client that does not read, its output, and the id of the request."""
    store = await SqliteStore.open(home / "crow.db")
    await store.create_session(new_session(cwd=str(place)))
    await store.create_session(new_session("s2", cwd=str(place)))
    user = await begin(store, "s1", "go")
    for number in range(40):
        (answer,) = await add(store, "s1", said(f"{number} " + "x" * 100_000, calls=1), turn=user.turn)
        await add(store, "s1", result(answer.id, "y" * 50_000), turn=user.turn)
    await add(store, "s1", turn=user.turn, release=True)
    await store.close()
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), "CROW_MODEL": "offline"}
    agent = Agent([*command(), "acp"], env, place)
    agent.initialize()
    request = agent.send_request("session/load", {"sessionId": "s1", "cwd": str(place), "mcpServers": []})
    assert agent.process.stdout is not None
    output = os.fdopen(os.dup(agent.process.stdout.fileno()), "rb")  # with a buffer
    assert b"session/update" in output.readline()  # the rest does not fit into pipe and buffer
    return agent, output, request


@pytest.mark.long
@pytest.mark.parametrize("method", ["session/close", "session/delete"])
async def test_closing_a_session_ends_its_load(home: Path, place: Path, method: str) -> None:
    agent, output, loading = await stuck_load(home, place)
    try:
        closing = agent.send_request(method, {"sessionId": "s1"})
        other = agent.send_request("session/load", {"sessionId": "s2", "cwd": str(place), "mcpServers": []})
        answers: dict[int, dict[str, Any]] = {}
        while not {loading, closing, other} <= answers.keys():
            message = json.loads(output.readline())
            if "id" in message:
                answers[message["id"]] = message
        assert answers[loading]["error"]["code"] == -32800
        assert answers[closing]["result"] == {}
        assert "result" in answers[other]
    finally:
        output.close()
        agent.close()
