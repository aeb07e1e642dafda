"""Subagents as sessions of their own, for clients that support them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError, allow_once
from tests.support.fake_endpoint import FakeEndpoint, Gate, Recorded, Reply
from tests.support.random_tasks import Orders

SUBAGENTS: Mapping[str, Any] = {"subagents": {}}
INVALID, GONE = -32602, -32002
OPENING = ("session/load", "session/resume", "session/fork")


def cast(**scripts: Sequence[Reply]) -> Callable[[Recorded], Reply]:
    """Replies by actor: the first word of the newest prompt names a script, and its answers so far are counted."""

    def reply(request: Recorded) -> Reply:
        name, answers = "", 0
        for message in request.body["messages"]:
            if message["role"] == "assistant":
                answers += 1
            elif message["role"] == "user":
                content = message["content"]
                words = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
                first = next((word for word in words.split() if word in scripts), None)
                if first is not None:
                    name, answers = first, 0
        return scripts[name][answers]

    return reply


def task(prompt: str, title: str = "Look into it", **more: object) -> tuple[str, Mapping[str, object]]:
    return ("task", {"description": title, "prompt": prompt, **more})


def read() -> Reply:
    return fake.calls(("read_file", {"path": "README.md"}), say="I look.")


def write(text: str = "x") -> Reply:
    return fake.calls(("write_file", {"path": "new.txt", "content": text}))


def child_of(agent: CrowProcess, session: str) -> str:
    """The newest subagent that was announced in a session."""
    return str(agent.updates(session, "subagent_update")[-1]["sessionId"])


def states(agent: CrowProcess, session: str, child: str, *, since: int = 0) -> list[str]:
    """The states of a subagent that its session showed, with the reason for an idle one."""
    found = []
    for update in agent.updates(session, "subagent_update", since=since):
        state = update.get("state")
        if update["sessionId"] == child and state is not None:
            found.append(" ".join(filter(None, (state["state"], state.get("stopReason")))))
    return found


def order(agent: CrowProcess, session: str, *, since: int = 0) -> list[tuple[str, str]]:
    """All updates of a session and of its subagents, as pairs of who and what."""
    return [
        ("parent" if params["sessionId"] == session else "child", params["update"]["sessionUpdate"])
        for logged in agent.log[since:]
        if logged.sender == "agent" and logged.message.get("method") == "session/update"
        for params in [logged.message["params"]]
    ]


def text_of(update: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in update["content"])


async def test_a_subagent_is_a_session_of_its_own(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.answer_with(
        cast(
            parent=[fake.calls(task("child go")), fake.text("All done.")],
            child=[read(), write(), fake.text("Twigs ", "and string.")],
        )
    )
    asked: list[dict[str, Any]] = []

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        return allow_once(params)

    async with crow(endpoint=endpoint, answers={"session/request_permission": answer}) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        since = len(agent.log)
        await agent.prompt(session, "parent go")
        child = child_of(agent, session)
        kinds = order(agent, session, since=since)
        announced, *_ = agent.updates(session, "subagent_update")
        sent, answered = agent.updates(session, "session_message")
        got, told = agent.updates(child, "session_message")
        (call,) = agent.updates(session, "tool_call")
        calls = agent.updates(session, "tool_call_update")
        read_call, write_call = agent.updates(child, "tool_call")
        said = agent.text(child)
        shown = states(agent, session, child)
        idle = agent.updates(session, "subagent_update")[-1]["state"]
    assert announced == {
        "sessionUpdate": "subagent_update",
        "sessionId": child,
        "title": "Look into it",
        "capabilities": {"cancel": {}},
    }
    first = kinds.index(("parent", "subagent_update"))
    assert all(who == "parent" for who, _ in kinds[:first])
    assert kinds[first : first + 5] == [
        ("parent", "subagent_update"),
        ("parent", "session_message"),
        ("child", "session_message"),
        ("parent", "subagent_update"),
        ("parent", "tool_call_update"),
    ]
    assert (text_of(sent), text_of(got)) == ("child go", "child go")
    assert (text_of(told), text_of(answered)) == ("Twigs and string.", "Twigs and string.")
    for message, sender, recipient in ((sent, session, child), (answered, child, session)):
        assert (message["senderSessionId"], message["recipientSessionId"]) == (sender, recipient)
    assert sent["recipientMessageId"] == got["messageId"]
    assert got["senderMessageId"] == sent["messageId"]
    assert answered["senderMessageId"] == told["messageId"]
    assert told["recipientMessageId"] == answered["messageId"]
    assert said == "I look.Twigs and string."
    assert shown == ["running", "requires_action", "running", "idle end_turn"]
    assert idle["usage"]["outputTokens"] == 15
    assert [update["toolCallId"] for update in calls] == [call["toolCallId"]] * len(calls)
    assert {"type": "session", "sessionId": child} in calls[-1]["content"]
    assert calls[-1]["status"] == "completed"
    assert [one["sessionId"] for one in asked] == [child]
    assert asked[0]["toolCall"]["toolCallId"] == write_call["toolCallId"]
    assert read_call["title"] == "Read README.md"
    with sqlite3.connect(home / "crow.db") as db:
        rows = db.execute("SELECT id, parent_id, tokens_out, permissions FROM sessions ORDER BY created_ms").fetchall()
    assert rows == [(session, None, 25, "[]"), (child, session, 15, "[]")]


async def test_a_client_without_the_capability_sees_no_subagent(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.answer_with(
        cast(parent=[fake.calls(task("child go")), fake.text("All done.")], child=[read(), fake.text("Twigs.")])
    )
    for offered in ({}, {"subagents": None}, {"subagents": True}):
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize(**offered)
            session = await agent.new_session(place)
            await agent.prompt(session, "parent go")
            await agent.load_session(session, place)
            seen = {
                logged.message["params"]["sessionId"]
                for logged in agent.log
                if logged.message.get("method") == "session/update"
            }
            titles = [update["title"] for update in agent.updates(session, "tool_call")]
        assert seen == {session}
        assert titles == ["Task: Look into it", "Read README.md", "Task: Look into it"]
        assert '"type": "session"' not in json.dumps([logged.message for logged in agent.log])


def shown_history(agent: CrowProcess, session_id: str, *, since: int, until: int | None = None) -> list[Any]:
    """What a client shows of a session: texts by message, and the final state of each call."""
    texts: dict[str, str] = {}
    calls: dict[str, dict[str, Any]] = {}
    for logged in agent.log[since:until]:
        params = logged.message.get("params", {})
        if logged.sender != "agent" or "update" not in params or params["sessionId"] != session_id:
            continue
        update = params["update"]
        match update["sessionUpdate"]:
            case "agent_message_chunk" | "user_message_chunk" | "agent_thought_chunk":
                texts[update["messageId"]] = texts.get(update["messageId"], "") + update["content"]["text"]
            case "session_message":
                texts[f"{update['senderSessionId']} {update['messageId']}"] = text_of(update)
            case "tool_call" | "tool_call_update":
                call = calls.setdefault(update["toolCallId"], {})
                call |= {name: update[name] for name in ("title", "status", "content", "rawInput") if name in update}
    return [texts, calls]


async def test_a_load_shows_the_subagents_as_they_were(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    endpoint.answer_with(
        cast(
            parent=[
                fake.calls(task("child go"), task("other go", "The other")),
                fake.calls(task("again go", resume="?")),
                fake.text("All done."),
            ],
            child=[read(), fake.text("Twigs.")],
            other=[fake.failing(400, "no credit")],
            again=[fake.text("Still twigs.")],
        )
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        await agent.prompt(session, "parent go")
        ids = list(dict.fromkeys(update["sessionId"] for update in agent.updates(session, "subagent_update")))
        live = {one: shown_history(agent, one, since=0) for one in (session, *ids)}
        replays = []
        for _ in range(2):
            since = len(agent.log)
            loading = await agent.start("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []})
            await loading.result()
            until = agent.response_index(loading)
            await agent.wait_for_update("subagent_update", since=until, sessionId=ids[-1])
            replays.append({one: shown_history(agent, one, since=since, until=until) for one in (session, *ids)})
            before = agent.updates(session, "subagent_update", since=since)[: len(ids)]
            after = agent.updates(session, "subagent_update", since=until)
    assert replays[0] == replays[1]
    for one in ids:
        assert replays[0][one][1] == live[one][1]
    assert replays[0][ids[0]] == live[ids[0]]
    prompt = replays[0][session][0].popitem  # the client does not show its own prompt live
    assert prompt is not None
    assert [set(update) for update in before] == [{"sessionUpdate", "sessionId", "title"}] * len(ids)
    assert [update["capabilities"] for update in after] == [{"cancel": {}}] * len(ids)
    assert [update["state"]["state"] for update in after] == ["idle"] * len(ids)
    assert {update["state"].get("stopReason") for update in after} == {"end_turn", "error"}


async def test_a_task_that_goes_on_keeps_its_session(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    child = ""

    def resumed(_: Recorded) -> Reply:
        return fake.calls(task("again go", resume=child), prefix="later")

    endpoint.script(
        fake.calls(task("child go")),
        fake.text("Twigs."),
        fake.text("Done."),
        resumed,
        fake.text("Still."),
        fake.text("!"),
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        await agent.prompt(session, "parent go")
        child = child_of(agent, session)
        await agent.prompt(session, "more")
        assert states(agent, session, child) == ["running", "idle end_turn"] * 2
        assert [text_of(one) for one in agent.updates(child, "session_message")] == [
            "child go",
            "Twigs.",
            "again go",
            "Still.",
        ]
        live = shown_history(agent, child, since=0)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        await agent.load_session(session, place)
        assert shown_history(agent, child, since=0) == live
        links = [
            part["sessionId"]
            for update in agent.updates(session, "tool_call")
            for part in update["content"]
            if part["type"] == "session"
        ]
        assert links == [child, child]


@pytest.mark.parametrize("while_asking", [False, True], ids=["answering", "asking"])
async def test_one_subagent_is_cancelled_alone(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint, while_asking: bool
) -> None:
    gate, asked = Gate(), Gate()
    stuck = write() if while_asking else fake.text("I ", "wait.", between=[gate])
    endpoint.answer_with(
        cast(
            parent=[fake.calls(task("child go", "Stuck"), task("other go", "Fine")), fake.text("One of two.")],
            child=[stuck],
            other=[read(), fake.text("Twigs.", "", between=[asked])],
        )
    )

    async def never(_: dict[str, Any]) -> Any:
        await Gate().pass_through()

    async with crow(endpoint=endpoint, answers={"session/request_permission": never}) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        turn = await agent.start_prompt(session, "parent go")
        await agent.wait_for_update("subagent_update", title="Fine")
        stuck_id, fine_id = (
            next(u["sessionId"] for u in agent.updates(session, "subagent_update") if u.get("title") == title)
            for title in ("Stuck", "Fine")
        )
        if while_asking:
            await agent.wait_for(lambda message: message.get("method") == "session/request_permission")
        else:
            await agent.wait_for_text(stuck_id, "I ")
        await agent.notify("session/cancel", {"sessionId": stuck_id})
        await agent.wait_for(lambda _: "idle cancelled" in states(agent, session, stuck_id))
        asked.open()
        assert await turn.result() == {"stopReason": "end_turn"}
        assert states(agent, session, fine_id) == ["running", "idle end_turn"]
        assert agent.text(session) == "One of two."
        results = {
            update["toolCallId"]: (update["status"], update["content"][-1]["content"]["text"])
            for update in agent.updates(session, "tool_call_update")
            if update["status"] in ("completed", "failed")
        }
        # cancelling it again, when it has nothing to do, changes nothing
        await agent.notify("session/cancel", {"sessionId": stuck_id})
        await agent.request("session/list", {})
        gate.open()
    (failed,) = [words for status, words in results.values() if status == "failed"]
    assert "the task ended early: cancelled" in failed


async def test_cancelling_the_session_cancels_its_subagents(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.answer_with(
        cast(parent=[fake.calls(task("child go"))], child=[read(), fake.text("I ", "wait.", between=[gate])])
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        turn = await agent.start_prompt(session, "parent go")
        await agent.wait_for_update("subagent_update")
        await agent.wait_for_text(child_of(agent, session), "I ")
        await agent.notify("session/cancel", {"sessionId": session})
        assert await turn.result() == {"stopReason": "cancelled"}
        child = child_of(agent, session)
        assert states(agent, session, child) == ["running", "idle cancelled"]
        gate.open()


async def test_a_load_in_the_middle_shows_what_runs(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    gate = Gate()
    endpoint.answer_with(
        cast(
            parent=[fake.calls(task("child go")), fake.text("All done.")],
            child=[read(), fake.text("Twigs", " and string.", between=[gate])],
        )
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        turn = await agent.start_prompt(session, "parent go")
        await agent.wait_for_update("subagent_update")
        child = child_of(agent, session)
        await agent.wait_for_text(child, "Twigs")
        since = len(agent.log)
        loading = await agent.start("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []})
        await loading.result()
        until = agent.response_index(loading)
        await agent.wait_for_update("subagent_update", since=until, sessionId=child)
        assert agent.text(child, since=since) == "I look.Twigs"
        assert states(agent, session, child, since=since) == ["running"]
        gate.open()
        assert await turn.result() == {"stopReason": "end_turn"}
        assert agent.text(child, since=since) == "I look.Twigs and string."
        assert states(agent, session, child, since=since) == ["running", "idle end_turn"]
        # what came after the response began with the announcement
        first = next(
            logged.message["params"]
            for logged in agent.log[until:]
            if logged.sender == "agent" and logged.message.get("params", {}).get("sessionId") == child
        )
        announced = agent.log.index(
            next(
                one for one in agent.log[until:] if one.message.get("params", {}).get("update", {}).get("capabilities")
            )
        )
        assert agent.log.index(next(one for one in agent.log[until:] if one.message.get("params") is first)) > announced


async def test_a_subagent_goes_on_as_a_session_of_its_own(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.answer_with(
        cast(
            parent=[fake.calls(task("child go")), fake.text("All done.")],
            child=[read(), fake.text("Twigs", ".", between=[gate])],
            mine=[write("mine"), fake.text("Written.")],
        )
    )
    open_it = {"cwd": str(place), "mcpServers": []}
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        turn = await agent.start_prompt(session, "parent go")
        await agent.wait_for_update("subagent_update")
        child = child_of(agent, session)
        for method in (*OPENING, "session/delete", "session/archive"):
            params = {"sessionId": child} | (open_it if method in OPENING else {})
            with pytest.raises(RpcError, match=f"{child} is a subagent that works for session {session}") as error:
                await agent.request(method, params)
            assert error.value.code == INVALID
        for method, more in (
            ("session/prompt", {"prompt": [{"type": "text", "text": "mine go"}]}),
            ("session/set_mode", {"modeId": "plan"}),
            ("session/close", {}),
        ):
            with pytest.raises(RpcError) as error:
                await agent.request(method, {"sessionId": child} | more)
            assert error.value.code == GONE
        gate.open()
        assert await turn.result() == {"stopReason": "end_turn"}
        assert states(agent, session, child) == ["running", "idle end_turn"]
        since = len(agent.log)
        await agent.load_session(child, place)
        assert agent.text(child, "user_message_chunk", since=since) == "child go"
        assert agent.text(child, since=since) == "I look.Twigs."
        assert await agent.prompt(child, "mine go") == {"stopReason": "end_turn"}
        assert (place / "new.txt").read_text() == "mine"
        systems = [request.body["messages"][0]["content"] for request in endpoint.asked]
        listed = (await agent.request("session/list", {}))["sessions"]
    assert ["You are a subagent" in system for system in systems] == [False, True, True, False, False, False]
    assert [one["sessionId"] for one in listed] == [session]
    # the session shows that history too, and another process resumes the subagent
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        await agent.load_session(session, place)
        assert "Written.\n\nReceipt: not verified" in agent.text(child)
        await agent.request("session/resume", {"sessionId": child} | open_it)
        assert await agent.prompt(child, "mine go") == {"stopReason": "end_turn"}
    with sqlite3.connect(home / "crow.db") as db:
        used = dict(db.execute("SELECT id, tokens_out FROM sessions"))
    assert used == {child: 30, session: 40}


async def test_after_a_kill_the_subagent_is_idle_and_goes_on(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.answer_with(
        cast(
            parent=[fake.calls(task("child go")), fake.text("All done.")],
            child=[read(), fake.text("Twigs", ".", between=[gate])],
            mine=[fake.text("I go on.")],
        )
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        await agent.start_prompt(session, "parent go")
        await agent.wait_for_update("subagent_update")
        child = child_of(agent, session)
        await agent.wait_for_text(child, "Twigs")
        await agent.kill()
    gate.open()
    for _ in range(2):
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize(**SUBAGENTS)
            await agent.load_session(session, place)
            await agent.wait_for(lambda _: bool(states(agent, session, child)))
            assert states(agent, session, child) == ["idle"]
            assert agent.text(child).startswith("I look.")
            (call,) = agent.updates(session, "tool_call")
            assert call["status"] == "failed"
            assert call["content"][0] == {"type": "session", "sessionId": child}
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(child, place)
        assert await agent.prompt(child, "mine go") == {"stopReason": "end_turn"}


# in the background


ORDERS = 4


@pytest.mark.long
@pytest.mark.parametrize("offered", [SUBAGENTS, {}], ids=["shown", "hidden"])
async def test_random_orders_of_ends_cancels_loads_and_kills_lose_nothing(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint, offered: Mapping[str, Any]
) -> None:
    orders = Orders(
        crow=crow, endpoint=endpoint, place=place, database=home / "crow.db", chance=Random(19), offered=offered
    )
    await orders.run(ORDERS)
    assert orders.done["orders"] == ORDERS


def results(endpoint: FakeEndpoint, script: str) -> list[str]:
    """The results of tools that the model has seen since the prompt `script`."""
    found: list[str] = []
    for request in endpoint.asked:
        messages = request.body["messages"]
        at = [index for index, each in enumerate(messages) if each["role"] == "user" and script in str(each["content"])]
        if at:
            found = [each["content"] for each in messages[at[-1] :] if each["role"] == "tool"] or found
    return found


@pytest.mark.long
@pytest.mark.parametrize("background", [True, False], ids=["background", "waiting"])
async def test_a_kind_limits_its_subagent_at_work_and_as_a_session_of_its_own(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint, *, background: bool
) -> None:
    (home / "agents").mkdir(parents=True)
    kind = "---\ndescription: Reviews\ntools: Read, Write, task\nmode: plan\n---\nLook for twigs.\n"
    (home / "agents" / "reviewer.md").write_text(kind)
    file = ("write_file", {"path": "new.txt", "content": "x"})
    command = ("shell", {"command": "true"})
    endpoint.answer_with(
        cast(
            parent=[fake.calls(task("child go", agent="reviewer", background=background)), fake.text("Started.")],
            child=[fake.calls(file, command), fake.text("No twigs.")],
            mine=[fake.calls(file, command, task("grand go")), fake.text("Done.")],
            grand=[fake.calls(file, command), fake.text("Nothing.")],
        )
    )
    async with crow(endpoint=endpoint, answers={"session/request_permission": allow_once}) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        await agent.request("session/set_mode", {"sessionId": session, "modeId": "auto"})
        assert await agent.prompt(session, "parent go") == {"stopReason": "end_turn"}
        child = child_of(agent, session)
        await agent.wait_for(lambda _: "idle end_turn" in states(agent, session, child))
        open_it = {"sessionId": child, "cwd": str(place), "mcpServers": []}
        fork = (await agent.request("session/fork", open_it))["sessionId"]
        assert await agent.prompt(fork, "mine go") == {"stopReason": "end_turn"}
        assert "You are a subagent" not in endpoint.asked[-1].body["messages"][0]["content"]
        await agent.load_session(child, place)
        await agent.request("session/set_mode", {"sessionId": child, "modeId": "auto"})
        assert await agent.prompt(child, "mine go") == {"stopReason": "end_turn"}
    for script in ("child go", "grand go"):
        refused, missing, *_ = results(endpoint, script)
        assert "plan mode" in refused.lower()
        assert missing == 'This task has no tool "shell". It has: read_file, write_file.'
    refused, missing, answer = results(endpoint, "mine go")
    assert "plan mode" in refused.lower()
    assert missing == 'This task has no tool "shell". It has: read_file, write_file, task.'
    assert answer.startswith("Nothing.")
    assert not (place / "new.txt").exists()
    systems = [request.body["messages"][0]["content"] for request in endpoint.asked]
    (own,) = {each for each in systems if each.endswith("Look for twigs.") and "You are a subagent" not in each}
    assert own.count("Look for twigs.") == 1


def notices(agent: CrowProcess, session: str) -> str:
    return " ".join(update["title"] for update in agent.updates(session, "notice"))


def is_running(message: dict[str, Any]) -> bool:
    """Whether a message is the update of a call that runs."""
    update = message.get("params", {}).get("update", {})
    return bool(
        update.get("sessionUpdate") in ("tool_call", "tool_call_update") and update.get("status") == "in_progress"
    )


def model_saw(endpoint: FakeEndpoint, words: str) -> int:
    """How many messages of the newest request contain these words."""
    return json.dumps(endpoint.asked[-1].body["messages"]).count(words)


@pytest.mark.parametrize("offered", [SUBAGENTS, {}], ids=["shown", "hidden"])
async def test_a_task_in_the_background_ends_after_the_turn_and_the_next_one_is_told(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint, offered: Mapping[str, Any]
) -> None:
    gate = Gate()
    endpoint.answer_with(
        cast(
            parent=[fake.calls(task("child go", background=True)), fake.text("Started.")],
            child=[read(), write(), fake.text("Twigs", ".", between=[gate])],
            next=[fake.text("I see.")],
            last=[fake.text("Yes.")],
        )
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**offered)
        session = await agent.new_session(place)
        assert await agent.prompt(session, "parent go") == {"stopReason": "end_turn"}
        since = len(agent.log)
        with sqlite3.connect(home / "crow.db") as db:
            ((child, waiting),) = db.execute(
                "SELECT s.id, i.parts FROM sessions s, inbox i WHERE s.parent_id = i.session"
            )
        assert "was interrupted" in waiting
        # a load shows the same session, and the task goes on
        await agent.load_session(session, place)
        gate.open()
        if offered:
            await agent.wait_for(lambda _: "idle end_turn" in states(agent, session, child, since=since))
            assert text_of(agent.updates(session, "session_message")[-1]) == "Twigs."
            assert (place / "new.txt").read_text() == "x"
        else:
            while "has ended" not in waiting:
                await anyio.sleep(0.01)
                with sqlite3.connect(home / "crow.db") as db:
                    ((waiting,),) = db.execute("SELECT parts FROM inbox")
            assert not (place / "new.txt").exists()  # nobody could be asked
            assert {one["sessionId"] for one in (await agent.request("session/list", {}))["sessions"]} == {session}
        assert await agent.prompt(session, "next go") == {"stopReason": "end_turn"}
        assert model_saw(endpoint, "has ended. Its answer:") == 1
        assert agent.text(session).count(f'(The task \\"Look into it\\" ({child}) has ended.)'.replace("\\", "")) == 1
        assert await agent.prompt(session, "last go") == {"stopReason": "end_turn"}
        assert model_saw(endpoint, "has ended. Its answer:") == 1
    with sqlite3.connect(home / "crow.db") as db:
        assert db.execute("SELECT count(*) FROM inbox").fetchone() == (0,)
        ((state,),) = db.execute("SELECT state FROM sessions WHERE id = ?", (child,))
    assert state == "idle"


async def test_a_turn_goes_on_if_a_task_ends_before_it_does(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.answer_with(
        cast(
            parent=[
                fake.calls(task("child go", background=True)),
                fake.text("I ", "wait.", between=[gate]),
                fake.text(" Now I know."),
            ],
            child=[fake.text("Twigs.")],
        )
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        turn = await agent.start_prompt(session, "parent go")
        await agent.wait_for_text(session, "I ")
        child = child_of(agent, session)
        await agent.wait_for(lambda _: "idle end_turn" in states(agent, session, child))
        await agent.request("session/list", {})
        gate.open()
        assert await turn.result() == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("Now I know.")
    assert model_saw(endpoint, "Its answer:") == 1


@pytest.mark.long
@pytest.mark.parametrize("way", ["child", "session", "close", "kill"])
async def test_a_task_in_the_background_can_be_stopped(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint, way: str
) -> None:
    gate = Gate()
    endpoint.answer_with(
        cast(
            parent=[fake.calls(task("child go", background=True)), fake.text("Started.")],
            child=[fake.text("Twigs", ".", between=[gate])],
            next=[fake.text("I see.")],
            again=[fake.text("Still twigs.")],
        )
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        session = await agent.new_session(place)
        await agent.prompt(session, "parent go")
        child = child_of(agent, session)
        await agent.wait_for_text(child, "Twigs")
        if way == "kill":
            await agent.kill()
        elif way == "close":
            await agent.request("session/close", {"sessionId": session})
            assert states(agent, session, child) == ["running", "idle cancelled"]
            await agent.load_session(session, place)
        else:
            await agent.notify("session/cancel", {"sessionId": child if way == "child" else session})
            await agent.wait_for(lambda _: "idle cancelled" in states(agent, session, child))
        if way != "kill":
            await agent.prompt(session, "next go")
    gate.open()
    if way == "kill":
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize(**SUBAGENTS)
            await agent.load_session(session, place)
            await agent.wait_for(lambda _: states(agent, session, child) == ["idle"])
            await agent.prompt(session, "next go")
    assert model_saw(endpoint, "interrupted" if way == "kill" else "has ended early: cancelled") == 1
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**SUBAGENTS)
        await agent.load_session(child, place)
        assert await agent.prompt(child, "again go") == {"stopReason": "end_turn"}


@pytest.mark.long
@pytest.mark.parametrize("way", ["ended", "read", "killed"])
async def test_the_model_is_told_once_that_a_background_command_has_ended(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint, way: str
) -> None:
    line = "while [ ! -e go ]; do sleep 0.02; done; echo done; exit 3"
    endpoint.answer_with(
        cast(
            parent=[fake.calls(("shell", {"command": line, "background": True})), fake.text("Started.")],
            read=[fake.calls(("shell_output", {"job": "job1", "wait_s": 60}), prefix="out"), fake.text("Read.")],
            next=[fake.text("I see.")],
            last=[fake.text("Yes.")],
        )
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(session={"notices": {}})
        session = await agent.new_session(place)
        await agent.prompt(session, "parent go")
        if way == "killed":
            await agent.kill()
        elif way == "ended":
            (place / "go").touch()
            await agent.wait_for(lambda _: "The background command job1" in notices(agent, session))
        else:
            reading = await agent.start_prompt(session, "read go")
            await agent.wait_for(is_running, since=reading.index)
            (place / "go").touch()  # if it ended before the call, the request with the call would tell it
            await reading.result()
        if way != "killed":
            for words in ("next go", "last go"):
                await agent.prompt(session, words)
    (place / "go").touch()
    if way == "killed":
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            await agent.load_session(session, place)
            for words in ("next go", "last go"):
                await agent.prompt(session, words)
    assert model_saw(endpoint, "has ended with exit code 3") == (way == "ended")
    assert model_saw(endpoint, "because crow ended while it ran") == (way == "killed")
    with sqlite3.connect(home / "crow.db") as db:
        assert db.execute("SELECT count(*) FROM inbox").fetchone() == (0,)
