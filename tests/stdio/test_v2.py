"""The draft of protocol version 2 in the real process. Every line is checked against the pinned schema."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.stdio.conftest import StartCrow
from tests.stdio.test_turns import wait_until_gone
from tests.support import fake_endpoint as fake
from tests.support.acp_client import Call, CrowProcess, RpcError
from tests.support.acp_v2 import CrowProcessV2, SessionView
from tests.support.amounts import some
from tests.support.fake_endpoint import FakeEndpoint, Gate

INVALID_PARAMS, METHOD_NOT_FOUND, INVALID_REQUEST = -32602, -32601, -32600
NOT_FOUND, CANCELLED = -32002, -32800
TEXT = [{"type": "text", "text": "say more"}]

Start = Callable[..., CrowProcessV2]


@pytest.fixture
def crow_v2(crow: StartCrow) -> Start:
    """Creates `crow acp --experimental-v2` processes."""

    def start(**options: Any) -> CrowProcessV2:
        agent = crow(client=CrowProcessV2, **options)
        assert isinstance(agent, CrowProcessV2)
        return agent

    return start


async def opened(agent: CrowProcess, place: Path, **capabilities: Any) -> str:
    await agent.initialize(**capabilities)
    return await agent.new_session(place)


async def code_of(request: Awaitable[Any]) -> int:
    """The code of the error that a request gets."""
    with pytest.raises(RpcError) as refused:
        await request
    return refused.value.code


def prompts_of(agent: CrowProcess, session: str, *, since: int = 0) -> list[str]:
    """The texts of the user's messages."""
    view = SessionView(agent.updates(session, since=since))
    return [content[0]["text"] for (kind, _), content in view.items.items() if kind == "user_message"]


def history(agent: CrowProcess, session: str, *, since: int = 0) -> dict[tuple[str, str], Any]:
    """The messages as text, and the title and status of each call."""
    view = SessionView(agent.updates(session, since=since))
    return {
        key: "".join(block.get("text", "") for block in item)
        if isinstance(item, list)
        else (item["title"], item["status"])
        for key, item in view.items.items()
    }


def rows(home: Path, table: str) -> int:
    """How many rows a table of the database has."""
    with contextlib.closing(sqlite3.connect(f"{(home / 'crow.db').as_uri()}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(count)


@pytest.mark.parametrize(("asked", "agreed"), [(0, 1), (1, 1), (2, 2), (3, 2), (65_535, 2)])
async def test_each_client_gets_the_newest_version_that_both_know(crow_v2: Start, asked: int, agreed: int) -> None:
    async with crow_v2() as agent:
        agent.checks_schema = agreed == 2
        info = {"name": "t", "version": "0"}
        answer = await agent.request("initialize", {"protocolVersion": asked, "info": info})
        assert answer["protocolVersion"] == agreed


async def test_without_the_option_there_is_only_version_1(crow: StartCrow) -> None:
    async with crow() as agent:
        answer = await agent.request("initialize", {"protocolVersion": 2, "clientInfo": {"name": "t", "version": "0"}})
        assert answer["protocolVersion"] == 1


async def test_a_client_of_version_1_gets_the_same_with_and_without_the_option(
    crow: StartCrow, place: Path, home: Path
) -> None:
    class Optional(CrowProcess):
        arguments = ("acp", "--experimental-v2")

    said = []
    for client in (CrowProcess, Optional):
        async with crow(client=client, env={"CROW_HOME": str(home / client.__name__)}) as agent:
            session = await opened(agent, place)
            await agent.prompt(session, "read README.md then write notes.txt: Kept.")
            (place / "notes.txt").unlink()
            since = len(agent.log)
            await agent.load_session(session, place)
            await agent.wait_for_update("available_commands_update", since=since)
            await agent.wait_for_update("usage_update", since=since)
            await agent.wait_for_update("session_info_update", since=since)
            await agent.request("session/close", {"sessionId": session})
            lines = [entry.message for entry in agent.log[:2]] + [entry.message for entry in agent.log[since:]]
        ids = {"sessionId", "messageId", "updatedAt"}
        said.append([without(line, ids) for line in lines])
    assert said[0] == said[1]


def without(value: Any, keys: set[str]) -> Any:
    """A value without the members of these names."""
    match value:
        case dict():
            return {key: without(item, keys) for key, item in value.items() if key not in keys}
        case list():
            return [without(item, keys) for item in value]
        case _:
            return value


async def test_initialize_says_what_is_served_and_may_be_repeated(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        await agent.initialize()
        answer = await agent.initialize(auth={"terminal": {}})
        assert answer["capabilities"] == {
            "session": {
                "prompt": {"image": {}, "embeddedContext": {}},
                "mcp": {"stdio": {}, "http": {}},
                "delete": {},
                "additionalDirectories": {},
            }
        }
        assert [(method["type"], method["methodId"]) for method in answer["authMethods"]] == [
            ("agent", "configured"),
            ("terminal", "login"),
        ]
        assert await code_of(agent.request("initialize", {"protocolVersion": 1})) == INVALID_REQUEST
        await agent.new_session(place)


async def test_the_version_is_settled_once_a_session_was_needed(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        agent.checks_schema = False
        await agent.request("initialize", {"protocolVersion": 1})
        await agent.new_session(place)
        info = {"name": "t", "version": "0"}
        assert await code_of(agent.request("initialize", {"protocolVersion": 2, "info": info})) == INVALID_REQUEST
        await agent.request("session/list", {})


async def test_a_request_right_behind_initialize_is_of_the_same_version(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        hello = {"protocolVersion": 2, "info": {"name": "t", "version": "0"}}
        calls = await agent.start_at_once(("initialize", hello), ("session/new", {"cwd": str(place)}))
        assert (await calls[0].result())["protocolVersion"] == 2
        assert "availableCommands" in await calls[1].result()


async def test_a_prompt_is_answered_when_it_is_inserted_and_the_state_tells_the_rest(
    crow_v2: Start, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("one ", "two", between=[gate]))
    async with crow_v2(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        since = len(agent.log)
        answer = await agent.prompt(session, "Count.")
        assert "idle" not in agent.states(session)
        gate.open()
        assert (await agent.idle(session))["stopReason"] == "end_turn"
        assert agent.states(session, since=since) == ["running", "idle"]
        assert history(agent, session)["user_message", answer["messageId"]] == "Count."
        assert "one two" in history(agent, session).values()


async def test_prompts_wait_for_the_running_turn_and_are_inserted_in_order(
    crow_v2: Start, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("one ", "two", between=[gate]), fake.text("three"), fake.text("four"))
    async with crow_v2(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "first")
        held = [await agent.start_prompt(session, text) for text in ("second", "third")]
        await agent.request("session/list", {})
        assert not any(map(agent.is_answered, held))
        gate.open()
        ids = [(await call.result())["messageId"] for call in held]
        await agent.wait_for(lambda _: agent.states(session).count("idle") == 3)
        assert prompts_of(agent, session) == ["first", "second", "third"]
        assert [history(agent, session)["user_message", message_id] for message_id in ids] == ["second", "third"]
        assert agent.states(session) == ["running", "idle"] * 3


async def wait_for_inbox(home: Path) -> None:
    """Waits until a prompt is in the inbox; no message reports that."""
    with anyio.fail_after(60):
        while not await anyio.to_thread.run_sync(rows, home, "inbox"):  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def stop_with_cancel(agent: CrowProcess, session: str, _held: Call) -> None:
    await agent.notify("session/cancel", {"sessionId": session})


async def stop_with_close(agent: CrowProcess, session: str, _held: Call) -> None:
    call = await agent.start("session/close", {"sessionId": session})
    await call.result()
    idle = await agent.wait_for_update("state_update", state="idle", stopReason="cancelled")
    assert idle < agent.response_index(call)
    await agent.request("session/list", {})
    assert agent.updates(session, since=agent.response_index(call)) == []


async def stop_with_delete(agent: CrowProcess, session: str, _held: Call) -> None:
    await agent.request("session/delete", {"sessionId": session})


@pytest.mark.long
@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "at once"])
@pytest.mark.parametrize("stop", [stop_with_cancel, stop_with_close, stop_with_delete])
async def test_what_ends_the_turn_takes_back_the_prompts_that_wait(
    crow_v2: Start,
    place: Path,
    home: Path,
    endpoint: FakeEndpoint,
    stop: Callable[..., Awaitable[None]],
    is_stored: bool,
) -> None:
    endpoint.script(fake.text("one ", "never", between=[Gate()]))
    async with crow_v2(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "first")
        await agent.wait_for_text(session, "one")
        held = await agent.start_prompt(session, "second")
        if is_stored:
            await wait_for_inbox(home)
        await stop(agent, session, held)
        assert await code_of(held.result()) == CANCELLED
        assert (await agent.idle(session))["stopReason"] == "cancelled"
        assert rows(home, "inbox") == 0
        if stop is stop_with_delete:
            assert await code_of(agent.resume(session, place)) == NOT_FOUND
            return
        since = len(agent.log)
        await agent.resume(session, place)
        assert prompts_of(agent, session, since=since) == ["first"]


async def test_a_prompt_that_waits_can_be_cancelled_alone(
    crow_v2: Start, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("one ", "two", between=[gate]), fake.text("three"))
    async with crow_v2(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "first")
        second = await agent.start_prompt(session, "second")
        await wait_for_inbox(home)
        third = await agent.start_prompt(session, "third")
        await agent.notify("$/cancel_request", {"requestId": second.id})
        assert await code_of(second.result()) == CANCELLED
        gate.open()
        await third.result()
        await agent.wait_for(lambda _: agent.states(session).count("idle") == 2)
        assert prompts_of(agent, session) == ["first", "third"]
        assert rows(home, "inbox") == 0


async def test_a_prompt_that_is_cancelled_at_once_is_inserted_or_taken_back(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "count to 1000")
        await agent.notify("session/cancel", {"sessionId": session})
        message_id = (await call.result())["messageId"]
        assert (await agent.idle(session))["stopReason"] == "cancelled"
        since = len(agent.log)
        await agent.resume(session, place)
        assert history(agent, session, since=since)["user_message", message_id] == "count to 1000"
        assert (await agent.say(session, "say on"))["stopReason"] == "end_turn"


async def test_a_question_is_an_action_that_the_turn_requires(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        session = await opened(agent, place)
        assert (await agent.say(session, "write notes.txt: Kept."))["stopReason"] == "end_turn"
        assert agent.states(session) == ["running", "requires_action", "running", "idle"]
        assert (place / "notes.txt").read_text() == "Kept.\n"


async def test_the_error_of_a_turn_is_in_its_state_and_the_next_prompt_works(
    crow_v2: Start, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.failing(400, "That is no good"), fake.text("fine"))
    async with crow_v2(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        idle = await agent.say(session, "one")
        assert (idle["stopReason"], idle["error"]["code"]) == ("error", -32603)
        assert "That is no good" in idle["error"]["message"]
        assert (await agent.say(session, "two"))["stopReason"] == "end_turn"


async def test_a_call_can_be_cancelled_alone_and_the_turn_goes_on(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "run echo $$ > pid; echo begun; sleep 1000")
        await agent.wait_for(lambda _: SessionView(agent.updates(session)).terminals != {})
        (call,) = {update["toolCallId"] for update in agent.updates(session, "tool_call_update")}
        advertised = [update.get("capabilities") for update in agent.updates(session, "tool_call_update")]
        assert advertised[-1] == {"cancel": {}}
        cancel = {"sessionId": session, "toolCallId": call}
        assert await agent.request("tool_call/cancel", cancel) == {}
        assert (await agent.idle(session))["stopReason"] == "end_turn"
        await wait_until_gone(int((place / "pid").read_text()))
        ended = agent.updates(session, "tool_call_update")[-1]
        assert (ended["status"], ended["capabilities"]) == ("cancelled", None)
        assert "begun" in str(history(agent, session).values())  # the model sees the output until then
        assert await code_of(agent.request("tool_call/cancel", cancel)) == INVALID_PARAMS
        since = len(agent.log)
        await agent.resume(session, place)
        assert [update["status"] for update in agent.updates(session, "tool_call_update", since=since)] == ["cancelled"]


async def test_a_new_process_replays_what_was_shown_and_version_1_loads_the_same(
    crow: StartCrow, crow_v2: Start, place: Path
) -> None:
    async with crow_v2() as agent:
        session = await opened(agent, place)
        for text in ("think about nests", "read README.md then write a.txt: One.", "plan: build; rest", "/help undo"):
            await agent.say(session, text)
        shown = history(agent, session)
    async with crow_v2() as agent:
        await agent.initialize()
        answer = await agent.resume(session, place)
        assert agent.states(session) == ["idle"]
        assert {option["configId"] for option in answer["configOptions"]} >= {"mode", "model"}
        assert "undo" in {command["name"] for command in answer["availableCommands"]}
        assert history(agent, session) == shown
    async with crow() as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        view = SessionView(
            update | {"sessionUpdate": "tool_call_update"} if update["sessionUpdate"] == "tool_call" else update
            for update in agent.updates(session, "user_message_chunk", "agent_message_chunk", "tool_call")
        )
        kept = [key for key in shown if key[0] in ("user_message", "agent_message", "call")]
        assert list(view.items) == kept


async def test_resume_without_replay_sends_the_state_and_no_history(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        session = await opened(agent, place)
        await agent.say(session, "say hello")
        call = await agent.start("session/resume", {"sessionId": session, "cwd": str(place), "replayFrom": None})
        await call.result()
        before = [entry.message["params"]["update"] for entry in agent.log[call.index + 1 : agent.response_index(call)]]
        assert before == [{"sessionUpdate": "state_update", "state": "idle"}]


async def test_resume_of_a_running_session_says_that_it_runs(
    crow_v2: Start, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("one ", "two", between=[gate]))
    async with crow_v2(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "Count.")
        await agent.wait_for_text(session, "one")
        since = len(agent.log)
        await agent.resume(session, place)
        assert agent.states(session, since=since) == ["running"]
        gate.open()
        await agent.idle(session)
        assert list(history(agent, session, since=since).values()) == ["Count.", "one two"]
        assert history(agent, session) == history(agent, session, since=since)


async def test_a_killed_turn_is_replayed_as_far_as_it_came(crow_v2: Start, place: Path) -> None:
    agent = crow_v2()
    await agent.__aenter__()
    session = await opened(agent, place)
    answer = await agent.prompt(session, "count to 1000")
    await agent.wait_for_text(session, "3")
    await agent.kill()
    async with crow_v2() as agent:
        await agent.initialize()
        await agent.resume(session, place)
        assert history(agent, session)["user_message", answer["messageId"]] == "count to 1000"
        assert (await agent.say(session, "say on"))["stopReason"] == "end_turn"


async def test_the_prompts_of_servers_are_inserted_when_the_server_has_filled_them_in(
    crow_v2: Start, place: Path
) -> None:
    server = Path(__file__).parents[1] / "tools" / "servers" / "various.py"
    mcp = [{"type": "stdio", "name": "srv", "command": sys.executable, "args": [str(server), "prompts"]}]
    async with crow_v2() as agent:
        session = await opened_with(agent, place, mcp)
        ids = []
        for text in ("/srv:talk", "/srv:refuse"):
            since = len(agent.log)
            ids.append((await agent.prompt(session, text))["messageId"])
            assert (await agent.idle(session, since=since))["stopReason"] == "end_turn"
        since = len(agent.log)
        wait = await agent.start_prompt(session, "/srv:wait now")
        await agent.wait_for_update("state_update", state="running", since=since)
        await agent.notify("session/cancel", {"sessionId": session})
        await agent.wait_for_update("state_update", stopReason="cancelled")
        ended: Any = (await asyncio.gather(wait.result(), return_exceptions=True))[0]
        if isinstance(ended, RpcError):
            assert ended.code == CANCELLED  # before the server was asked
        else:
            ids.append(ended["messageId"])
        shown = [key for key in history(agent, session) if key[0] == "user_message"]
        assert [message_id for _, message_id in shown] == ids
        since = len(agent.log)
        await agent.resume(session, place)
        assert [key for key in history(agent, session, since=since) if key[0] == "user_message"] == shown


async def opened_with(agent: CrowProcessV2, place: Path, servers: list[dict[str, Any]]) -> str:
    """Opens a session and waits until its MCP servers are ready."""
    await agent.initialize()
    session = await agent.new_session(place, mcpServers=servers)
    await agent.wait_for_update("available_commands_update")
    return session


ACTIONS = ("prompt", "prompt", "prompt", "cancel", "cancel one", "close", "resume", "wait")


@pytest.mark.parametrize("seed", some(range(8), 2))
async def test_in_any_order_each_prompt_is_inserted_once_or_refused(crow_v2: Start, place: Path, seed: int) -> None:
    """After each order of requests, the history has what was answered, and nothing else."""
    random = Random(seed)
    async with crow_v2() as agent:
        session = await opened(agent, place)
        sent: list[tuple[str, Call]] = []
        for number in range(20):
            match random.choice(ACTIONS):
                case "prompt":
                    text = random.choice(["say", "think about", "read README.md then say", "/help"]) + f" {number}"
                    sent.append((text, await agent.start_prompt(session, text)))
                case "cancel":
                    await agent.notify("session/cancel", {"sessionId": session})
                case "cancel one" if sent:
                    await agent.notify("$/cancel_request", {"requestId": random.choice(sent)[1].id})
                case "close" if random.random() < 0.3:
                    await agent.request("session/close", {"sessionId": session})
                    await agent.resume(session, place)
                case "resume" if random.random() < 0.5:
                    await agent.resume(session, place)
                case "wait" if sent:
                    await asyncio.wait([sent[-1][1].outcome])
        answers = await asyncio.gather(*(call.result() for _, call in sent), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, RpcError)]
        assert {error.code for error in refused} <= {CANCELLED}
        inserted = {
            answer["messageId"]: text
            for answer, (text, _) in zip(answers, sent, strict=True)
            if isinstance(answer, dict)
        }
        assert len(refused) + len(inserted) == len(sent)
        await agent.wait_for(lambda _: agent.states(session)[-1:] in ([], ["idle"]))
        await agent.request("session/close", {"sessionId": session})
        shown = [key for key in history(agent, session) if key[0] == "user_message"]
        since = len(agent.log)
        await agent.resume(session, place)
        replayed = {key: item for key, item in history(agent, session, since=since).items() if key[0] == "user_message"}
        assert list(replayed) == shown
        assert {key[1]: text for key, text in replayed.items()} == inserted
        assert agent.states(session, since=since) == ["idle"]


async def test_login_and_logout(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        await agent.initialize()
        assert await agent.request("auth/logout", {}) == {}
        assert await code_of(agent.request("session/new", {"cwd": str(place)})) == -32000
        assert await code_of(agent.request("auth/login", {"methodId": "other"})) == INVALID_PARAMS
        assert await agent.request("auth/login", {"methodId": "configured"}) == {}
        await agent.request("session/new", {"cwd": str(place)})


async def test_options_are_changed_by_type_and_sessions_are_listed(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        session = await opened(agent, place)
        await agent.say(session, "say hello")
        change: dict[str, Any] = {"sessionId": session, "configId": "mode", "type": "id", "value": "plan"}
        answer = await agent.request("session/set_config_option", change)
        assert answer["configOptions"][0]["currentValue"] == "plan"
        change = {"sessionId": session, "configId": "auto_compact", "type": "boolean", "value": False}
        await agent.request("session/set_config_option", change)
        await agent.wait_for_update("config_option_update")
        (listed,) = (await agent.request("session/list", {"cwd": str(place)}))["sessions"]
        assert (listed["sessionId"], listed["title"]) == (session, "say hello")


PARAMS: dict[str, dict[str, Any]] = {
    "session/new": {"cwd": "/"},
    "session/resume": {"sessionId": "SESSION", "cwd": "/"},
    "session/list": {},
    "session/close": {"sessionId": "SESSION"},
    "session/delete": {"sessionId": "SESSION"},
    "session/prompt": {"sessionId": "SESSION", "prompt": TEXT},
    "session/set_config_option": {"sessionId": "SESSION", "configId": "mode", "type": "id", "value": "plan"},
    "tool_call/cancel": {"sessionId": "SESSION", "toolCallId": "call_1_0"},
    "auth/login": {"methodId": "configured"},
}
"""Valid parameters, except that no call runs."""

WRONG: list[tuple[str, str, Sequence[Any]]] = [
    ("session/new", "cwd", (None, 7, "here", "/no/such/place", ["/"])),
    ("session/new", "additionalDirectories", ("/", 0, [1], ["here"])),
    ("session/new", "mcpServers", ({}, "x", [7], [{"name": "a", "command": "/a"}], [{"type": "_own", "name": "a"}])),
    ("session/new", "mcpServers", ([{"type": "sse", "name": "a", "url": "http://localhost"}],)),
    ("session/new", "systemPrompt", ({"mode": "append", "content": TEXT}, 7)),
    ("session/resume", "replayFrom", ("start", {}, {"type": "end"}, {"type": "_own"}, 7, [])),
    ("session/resume", "sessionId", (None, 7)),
    ("session/list", "cwd", (7, "here", [])),
    ("session/list", "cursor", (7, "no cursor", {})),
    ("session/prompt", "prompt", (None, "hi", [], [7], [{"type": "text"}], [{"type": "_own"}])),
    ("session/prompt", "sessionId", (None, 7, {})),
    ("session/set_config_option", "type", (None, "boolean", "_own", 7)),
    ("session/set_config_option", "value", (None, "other", True, [])),
    ("session/set_config_option", "configId", (None, "other", 7)),
    ("tool_call/cancel", "toolCallId", ("call_1_0", "", None, 7)),
    ("tool_call/cancel", "sessionId", (None, 7)),
    ("session/close", "sessionId", (None, 7)),
    ("session/delete", "sessionId", (None, 7)),
    ("auth/login", "methodId", (None, 7, "login")),
]


async def test_wrong_parameters_are_refused_and_change_nothing(crow_v2: Start, place: Path, home: Path) -> None:
    async with crow_v2() as agent:
        session = await opened(agent, place)
        await agent.say(session, "say hello")
        before = {table: rows(home, table) for table in ("sessions", "entries", "inbox")}
        since = len(agent.log)
        for method, name, values in WRONG:
            valid = {key: session if value == "SESSION" else value for key, value in PARAMS[method].items()}
            for value in values:
                code = await code_of(agent.request(method, valid | {name: value}))
                assert (method, name, value, code) == (method, name, value, INVALID_PARAMS)
        assert agent.updates(session, since=since) == []
        assert {table: rows(home, table) for table in before} == before
        assert (await agent.say(session, "say on"))["stopReason"] == "end_turn"


@pytest.mark.parametrize("state", ["unknown", "closed", "deleted"])
async def test_sessions_that_are_not_open_are_not_found(crow_v2: Start, place: Path, state: str) -> None:
    async with crow_v2() as agent:
        session = await opened(agent, place)
        await agent.say(session, "say hello")
        if state == "unknown":
            session = "crow-none"
        else:
            await agent.request("session/close" if state == "closed" else "session/delete", {"sessionId": session})
        for method in ("session/prompt", "session/set_config_option", "tool_call/cancel"):
            params = PARAMS[method] | {"sessionId": session}
            assert await code_of(agent.request(method, params)) == NOT_FOUND
        await agent.notify("session/cancel", {"sessionId": session})
        assert await agent.request("session/close", {"sessionId": session}) == {}
        if state != "closed":
            assert await code_of(agent.resume(session, place)) == NOT_FOUND
        assert await agent.request("session/delete", {"sessionId": session}) == {}


async def test_methods_of_version_1_and_of_no_version_are_unknown(crow_v2: Start, place: Path) -> None:
    gone = ("authenticate", "logout", "session/load", "session/fork", "session/set_mode", "_session/steering")
    async with crow_v2() as agent:
        session = await opened(agent, place)
        for method in (*gone, "terminal/cancel", "session/archive", "providers/list", "_own"):
            params = {"sessionId": session, "cwd": str(place), "mcpServers": [], "modeId": "plan", "prompt": TEXT}
            assert (method, await code_of(agent.request(method, params))) == (method, METHOD_NOT_FOUND)


INTRODUCTIONS: list[dict[str, Any]] = [
    {"protocolVersion": 2},
    {"protocolVersion": 2, "info": {"name": "t"}},
    {"protocolVersion": 2, "info": "t"},
    {"protocolVersion": 2, "info": {"name": "t", "version": 7}},
    {"protocolVersion": 2, "info": {"name": "t", "version": "0"}, "capabilities": []},
    {"protocolVersion": 65_536, "info": {"name": "t", "version": "0"}},
    {"protocolVersion": -1, "info": {"name": "t", "version": "0"}},
    {"protocolVersion": True, "info": {"name": "t", "version": "0"}},
    {"protocolVersion": "2", "info": {"name": "t", "version": "0"}},
]


async def test_a_wrong_introduction_leaves_version_1(crow_v2: Start, place: Path) -> None:
    async with crow_v2() as agent:
        agent.checks_schema = False
        for params in INTRODUCTIONS:
            assert (params, await code_of(agent.request("initialize", params))) == (params, INVALID_PARAMS)
        answer = await agent.request("session/new", {"cwd": str(place), "mcpServers": []})
        assert "modes" in answer  # version 1
        async with crow_v2() as other:
            await other.initialize(elicitation=7, auth=[])
            for params in INTRODUCTIONS:
                assert (params, await code_of(other.request("initialize", params))) == (params, INVALID_PARAMS)
            assert "modes" not in await other.request("session/new", {"cwd": str(place)})
