"""Cancelled requests, logins, options and `_meta` in the real process."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint, Gate

TERMINAL_AUTH = {"auth": {"terminal": True}, "_meta": {"terminal-auth": True}}


async def failed(awaitable: Any) -> tuple[int, str]:
    """Code and message of the error that is expected."""
    with pytest.raises(RpcError) as raised:
        await awaitable
    return raised.value.code, raised.value.message


def values(options: list[dict[str, Any]]) -> dict[str, Any]:
    return {option["id"]: option["currentValue"] for option in options}


async def test_a_cancelled_prompt_request_answers_cancelled_and_the_next_one_runs(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        running = await agent.start_prompt(session, "count to 1000")
        waiting = await agent.start_prompt(session, "say waiting")
        last = await agent.start_prompt(session, "say last")
        await agent.wait_for_text(session, "3")
        await agent.notify("$/cancel_request", {"requestId": waiting.id})
        assert await waiting.result() == {"stopReason": "cancelled"}
        await agent.notify("$/cancel_request", {"requestId": running.id})
        assert await running.result() == {"stopReason": "cancelled"}
        assert await last.result() == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("last")
        assert "waiting" not in agent.text(session)


async def test_a_cancelled_request_is_answered_once_and_leaves_the_session_usable(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "say hello")
        place_params = {"cwd": str(place), "mcpServers": []}
        requests: dict[str, dict[str, Any]] = {
            "session/new": place_params,
            "session/load": place_params | {"sessionId": session},
            "session/list": {},
            "session/resume": place_params | {"sessionId": session},
            "session/close": {"sessionId": session},
        }
        for method, params in requests.items():
            call = await agent.start(method, params)
            await agent.notify("$/cancel_request", {"requestId": call.id})
            outcome = (await asyncio.gather(call.result(), return_exceptions=True))[0]
            assert isinstance(outcome, dict) or (isinstance(outcome, RpcError) and outcome.code == -32800)
            if method != "session/close":  # it is still open
                assert (await agent.prompt(session, f"say after {method}"))["stopReason"] == "end_turn"
        await agent.load_session(session, place)
        assert (await agent.prompt(session, "say still here"))["stopReason"] == "end_turn"


async def test_a_second_request_with_an_open_id_is_refused(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "say once")
        line = {"jsonrpc": "2.0", "id": call.id, "method": "session/list", "params": {}}
        await agent.send_raw(json.dumps(line).encode() + b"\n")
        at = await agent.wait_for(lambda message: message.get("id", 0) is None)
        assert agent.log[at].message["error"]["code"] == -32600
        assert await call.result() == {"stopReason": "end_turn"}


async def test_after_a_logout_sessions_open_again_once_authenticated(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        answer = await agent.initialize()
        assert answer["agentCapabilities"]["auth"] == {"logout": {}, "status": {}}
        session = await agent.new_session(place)
        assert await agent.request("logout", {}) == {}
        assert (await failed(agent.new_session(place)))[0] == -32000
        assert (await failed(agent.load_session(session, place)))[0] == -32000
        assert (await agent.prompt(session, "say on"))["stopReason"] == "end_turn"
        assert await agent.request("authenticate", {"methodId": "configured"}) == {}
        await agent.new_session(place)


async def test_the_login_program_is_offered_to_clients_that_run_one(crow: StartCrow) -> None:
    async with crow() as agent:
        assert [method["id"] for method in (await agent.initialize())["authMethods"]] == ["configured"]
        _, login = (await agent.initialize(**TERMINAL_AUTH))["authMethods"]
        assert (login["type"], login["args"]) == ("terminal", ["--setup"])
        assert login["_meta"]["terminal-auth"]["args"] == ["-P", "-m", "crow", "login"]
        code, message = await failed(agent.request("authenticate", {"methodId": "login"}))
        assert (code, '"configured"' in message) == (-32602, True)


async def test_null_servers_and_directories_count_as_empty(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        agent.checks_schema = False  # the schema does not allow null here, but clients send it
        session = await agent.new_session(place, mcpServers=None, additionalDirectories=None)
        assert (await agent.prompt(session, "say fine"))["stopReason"] == "end_turn"


async def test_commands_usage_and_title_updates_keep_their_order(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        at = await agent.wait_for_update("usage_update")
        assert agent.log[at].message["params"]["update"]["size"] == 32_768
        await agent.prompt(session, "say hello")
    async with crow() as agent:
        await agent.initialize()
        loaded = await agent.start("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []})
        await loaded.result()
        await agent.wait_for_update("session_info_update", title="say hello")
        later = agent.updates(session, since=agent.response_index(loaded))
        kinds = [update["sessionUpdate"] for update in later]
        assert kinds == ["available_commands_update", "usage_update", "session_info_update"]
        assert later[1]["used"] > 0


async def test_options_last_through_a_load_and_reach_the_model(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    async def choose(agent: CrowProcess, option: str, value: object, **more: Any) -> dict[str, Any]:
        params = {"sessionId": session, "configId": option, "value": value, **more}
        return values((await agent.request("session/set_config_option", params))["configOptions"])

    boolean: dict[str, Any] = {"session": {"configOptions": {"boolean": {}}}}
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**boolean)
        session = await agent.new_session(place)
        assert (await choose(agent, "thought_level", "high"))["thought_level"] == "high"
        assert (await choose(agent, "auto_compact", False, type="boolean"))["auto_compact"] is False
        await agent.prompt(session, "hello")
        assert endpoint.asked[-1].body["reasoning_effort"] == "high"
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(**boolean)
        kept = values((await agent.load_session(session, place))["configOptions"])
        assert (kept["thought_level"], kept["auto_compact"]) == ("high", False)
        assert "reasoning_effort" not in {**endpoint.asked[-1].body, "reasoning_effort": 1}.keys() - {
            "reasoning_effort"
        }


async def test_the_endpoints_models_are_offered_once_they_are_known(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.models = ["fake-model", "other-model"]
    endpoint.listing.clear()
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        created = await agent.request("session/new", {"cwd": str(place), "mcpServers": []})
        model = next(option for option in created["configOptions"] if option["id"] == "model")
        assert [one["value"] for one in model["options"]] == ["fake-model"]
        endpoint.listing.set()
        at = await agent.wait_for_update("config_option_update")
        options = agent.log[at].message["params"]["update"]["configOptions"]
        model = next(option for option in options if option["id"] == "model")
        assert [one["value"] for one in model["options"]] == ["fake-model", "other-model"]
        params = {"sessionId": created["sessionId"], "configId": "model", "value": "other-model"}
        await agent.request("session/set_config_option", params)
        await agent.prompt(created["sessionId"], "hello")
        assert endpoint.asked[-1].body["model"] == "other-model"


async def test_the_listed_thought_levels_of_the_model_are_offered(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    def levels(options: list[dict[str, Any]]) -> list[str]:
        found = (each["options"] for each in options if each["id"] == "thought_level")
        return [one["value"] for one in next(found, [])]

    reasoning = {"mandatory": True, "supported_efforts": ["high", "low"]}
    endpoint.models = [{"id": "fake-model", "reasoning": reasoning}, {"id": "plain", "supported_parameters": ["tools"]}]
    endpoint.listing.clear()
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        created = await agent.request("session/new", {"cwd": str(place), "mcpServers": []})
        assert levels(created["configOptions"]) == ["default", "off", "low", "medium", "high"]
        endpoint.listing.set()
        at = await agent.wait_for_update("config_option_update")
        assert levels(agent.log[at].message["params"]["update"]["configOptions"]) == ["default", "low", "high"]
        params = {"sessionId": created["sessionId"], "configId": "model", "value": "plain"}
        changed = await agent.request("session/set_config_option", params)
        assert levels(changed["configOptions"]) == []
        # A level that is not offered is still taken: the list may be wrong.
        params |= {"configId": "thought_level", "value": "medium"}
        changed = await agent.request("session/set_config_option", params)
        assert levels(changed["configOptions"]) == ["default", "medium"]
        await agent.prompt(created["sessionId"], "hello")
        assert endpoint.asked[-1].body["reasoning_effort"] == "medium"


async def test_meta_options_are_honoured(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        whole = await agent.new_session(place, _meta={"systemPrompt": "You are a poet.", "model": "poet-1"})
        await agent.prompt(whole, "hello")
        assert endpoint.asked[-1].body["model"] == "poet-1"
        assert endpoint.asked[-1].body["messages"][0]["content"].startswith("You are a poet.")
        meta = {
            "systemPrompt": {"append": "Answer in rhymes."},
            "claudeCode": {"options": {"model": "m2", "maxTurns": 1}},
        }
        added = await agent.new_session(place, _meta=meta)
        await agent.prompt(added, "hello")
        assert endpoint.asked[-1].body["model"] == "m2"
        assert endpoint.asked[-1].body["messages"][0]["content"].endswith("Answer in rhymes.")
        for wrong in ({"systemPrompt": 7}, {"model": 7}, {"claudeCode": {"options": {"maxTurns": 0}}}):
            assert (await failed(agent.new_session(place, _meta=wrong)))[0] == -32602


async def test_max_turns_limits_the_steps_of_a_turn(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place, _meta={"claudeCode": {"options": {"maxTurns": 1}}})
        assert await agent.prompt(session, "read README.md then say done") == {"stopReason": "max_turn_requests"}
        words = "Stopped after 1 step (maxTurns, set by the editor for this session). Send another prompt to continue."
        assert agent.text(session).strip().endswith(words)


async def test_steering_joins_the_running_turn_and_fails_without_one(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        answer = await agent.initialize()
        assert answer["_meta"] == {"steering": {"supported": True}, "crow": {"promptId": {}}}
        session = await agent.new_session(place)
        steering = {"sessionId": session, "prompt": [{"type": "text", "text": "say turned"}]}
        idle = await agent.request("_session/steering", steering | {"idleBehavior": "promptRequired"})
        assert idle == {"outcome": "promptRequired", "reason": "noRunningTurn"}
        call = await agent.start_prompt(session, "count to 5")
        await agent.wait_for_text(session, "2")
        assert await agent.request("_session/steering", steering) == {"outcome": "injected"}
        assert await call.result() == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("turned")


async def test_the_users_own_commands_are_listed_and_sent_as_prompts(crow: StartCrow, place: Path, home: Path) -> None:
    (home / "commands").mkdir(parents=True)
    head = "---\n# mine\ndescription: >  # folded\n  Greet\n  somebody\nargument-hint: [name] [title]\n---\n"
    (home / "commands" / "greet.md").write_text(f"{head}say hello $ARGUMENTS")
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        at = await agent.wait_for_update("available_commands_update")
        listed = agent.log[at].message["params"]["update"]["availableCommands"]
        names = [command["name"] for command in listed]
        assert {"compact", "search", "model", "mode", "usage", "export", "help"} <= set(names)
        assert listed[-1] == {"name": "greet", "description": "Greet somebody", "input": {"hint": "[name] [title]"}}
        await agent.prompt(session, "/greet Ada")
        assert agent.text(session) == "hello Ada"


async def test_server_prompts_are_listed_when_the_server_is_up_and_can_be_sent(crow: StartCrow, place: Path) -> None:
    server = Path(__file__).parents[1] / "tools" / "servers" / "various.py"
    mcp = [{"name": "srv", "command": sys.executable, "args": [str(server), "prompts"], "env": []}]

    def offered(message: dict[str, Any], name: str) -> bool:
        update = message.get("params", {}).get("update", {})
        return any(command["name"].startswith(name) for command in update.get("availableCommands", ()))

    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place, mcpServers=mcp)
        at = await agent.wait_for(lambda message: offered(message, "srv:talk"))
        listed = agent.log[at].message["params"]["update"]["availableCommands"]
        (review,) = [one for one in listed if "input" in one and one["name"].startswith("srv:")]
        assert (review["description"], review["input"]) == ("srv: Review a file", {"hint": "path [focus]"})
        assert await agent.prompt(session, f"/{review['name']} a.py") == {"stopReason": "end_turn"}
        assert agent.text(session) == 'reviewed {"path": "a.py"}'
        since = len(agent.log)
        for text in (f"/{review['name']}", "/srv:refuse", "/srv:all_kinds please", "/srv:unknown x"):
            assert await agent.prompt(session, text) == {"stopReason": "end_turn"}
        said = agent.text(session, since=since)
        assert f"`/{review['name']}` needs `path`." in said
        assert "`/srv:refuse` could not be used: MCP server srv did not return the prompt: no such method" in said
        since = len(agent.log)
        await agent.prompt(session, "/srv:more")
        await agent.wait_for(lambda message: offered(message, "srv:extra"), since=since)
        call = await agent.start_prompt(session, "/srv:wait now")
        await agent.request("session/list", {})
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
    async with crow() as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        told = agent.text(session, "user_message_chunk")
        assert told.startswith('say reviewed {"path": "a.py"}')
        for part in ("/srv:refuse", "look", "please", "/srv:unknown x", "say more", "/srv:wait now"):
            assert part in told
        kinds = [one["content"]["type"] for one in agent.updates(session, "user_message_chunk")]
        assert {"image", "resource", "resource_link"} <= set(kinds)
        assert (await agent.request("session/list", {}))["sessions"][0]["title"].startswith("say reviewed")


def instructions(mode: str, *texts: str) -> dict[str, Any]:
    return {"mode": mode, "content": [{"type": "text", "text": text} for text in texts]}


async def test_a_system_prompt_applies_to_each_way_of_opening_a_session(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    opening = {"cwd": str(place), "mcpServers": []}

    async def system(session: str) -> str:
        await agent.prompt(session, "hello")
        return str(endpoint.asked[-1].body["messages"][0]["content"])

    async with crow(endpoint=endpoint) as agent:
        capabilities = (await agent.initialize())["agentCapabilities"]["sessionCapabilities"]
        assert capabilities["systemPrompt"] == {"mode": {"override": {}}}
        session = await agent.new_session(place, systemPrompt=instructions("append", "Be brief.", "Be kind."))
        appended = await system(session)
        assert appended.startswith("You are Crow")
        assert appended.endswith("\n\nBe brief.\n\nBe kind.")
        poet = await agent.new_session(place, systemPrompt=instructions("override", "You are a poet."))
        replaced = await system(poet)
        assert replaced.startswith("You are a poet.\n\n<environment>\n")
        assert "You are Crow" not in replaced
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        for method, extra in (
            ("session/load", {}),
            ("session/resume", {"systemPrompt": None}),
            ("session/load", {"systemPrompt": instructions("append", "Be brief.", "Be kind.")}),
        ):
            await agent.request(method, {**opening, "sessionId": session, **extra})
            assert await system(session) == appended
        fork = (await agent.request("session/fork", {**opening, "sessionId": session}))["sessionId"]
        assert await system(fork) == appended
        other = {**opening, "sessionId": session, "systemPrompt": instructions("append", "Be kind.")}
        fork = (await agent.request("session/fork", other))["sessionId"]
        assert (await system(fork)).endswith("</date>\n\nBe kind.")
        assert await system(session) == appended
        await agent.request("session/resume", {**other, "systemPrompt": instructions("override", "You are a cook.")})
        replaced = await system(session)
        assert replaced.startswith("You are a cook.\n\n<environment>\n")
        assert "Be kind." not in replaced
        assert await system(session) == replaced
        await agent.request("session/load", other)
        assert (await system(session)).startswith("You are Crow")
        assert endpoint.asked[-1].body["messages"][0]["content"].endswith("</date>\n\nBe kind.")
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.request("session/resume", {**other, "systemPrompt": instructions("append", "Be quick.")})
        assert (await system(session)).endswith("</date>\n\nBe quick.")


async def test_a_system_prompt_for_a_running_session_applies_to_its_next_turn(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("so far", ", and the rest", between=[gate]), fake.text("done"))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        running = await agent.start_prompt(session, "hello")
        await agent.wait_for_text(session, "so far")
        opening = {"cwd": str(place), "mcpServers": [], "sessionId": session}
        await agent.request("session/resume", {**opening, "systemPrompt": instructions("append", "Be brief.")})
        gate.open()
        assert (await running.result())["stopReason"] == "end_turn"
        await agent.prompt(session, "again")
        assert endpoint.asked[-1].body["messages"][0]["content"].endswith("\n\nBe brief.")


PICTURE = {"type": "image", "data": "", "mimeType": "image/png"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("Be brief.", 'systemPrompt is "Be brief."; expected an object with "mode" and "content".'),
        ([], 'systemPrompt is a list; expected an object with "mode" and "content".'),
        ({"content": []}, 'systemPrompt.mode is missing or null; expected "append" or "override".'),
        (instructions("prepend", "a"), 'systemPrompt.mode is "prepend"; expected "append" or "override".'),
        (instructions("_mine", "a"), 'systemPrompt.mode is "_mine"; expected "append" or "override".'),
        ({"mode": ["append"], "content": []}, 'systemPrompt.mode is a list; expected "append" or "override".'),
        ({"mode": "append"}, "systemPrompt.content is missing or null; expected a list of text blocks."),
        (instructions("append"), "systemPrompt.content contains no text. To send no instructions, omit systemPrompt."),
        (instructions("override", " "), "systemPrompt.content contains no text."),
        (
            {"mode": "append", "content": [{"type": "text", "text": "a"}, PICTURE]},
            "systemPrompt.content[1]: expected a text block, such as",
        ),
        ({"mode": "append", "content": [{"type": "text", "text": 7}]}, "systemPrompt.content[0]: expected a text"),
    ],
)
async def test_a_system_prompt_that_cannot_be_applied_is_an_error_and_changes_nothing(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint, wrong: object, words: str
) -> None:
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place, systemPrompt=instructions("append", "Be brief."))
        await agent.prompt(session, "hello")
        at_place = {"cwd": str(place), "mcpServers": [], "systemPrompt": wrong}
        agent.checks_schema = False
        for method in ("session/new", "session/load", "session/resume", "session/fork"):
            known = {} if method == "session/new" else {"sessionId": session}
            code, message = await failed(agent.request(method, {**at_place, **known}))
            assert code == -32602
            assert message.startswith(words)
        agent.checks_schema = True
        assert len((await agent.request("session/list", {}))["sessions"]) == 1
        await agent.prompt(session, "hello again")
        first, second = (asked.body["messages"][0] for asked in endpoint.asked)
        assert first == second


TRACE = {
    "traceparent": "00-80e1afed08e019fc1110464cfa66635c-7a085853722dc6d2-01",
    "tracestate": "a=1,b=2",
    "baggage": "user=ann",
}
SERVER = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    match message.get("method"):
        case "initialize":
            version = message["params"]["protocolVersion"]
            result = {"protocolVersion": version, "serverInfo": {"name": "v", "version": "1"}}
            result["capabilities"] = {"tools": {}, "prompts": {}}
        case "tools/list":
            result = {"tools": [{"name": "meta", "inputSchema": {"type": "object"}}]}
        case "prompts/list":
            result = {"prompts": [{"name": "meta"}]}
        case "tools/call" | "prompts/get" as method:
            content = {"type": "text", "text": json.dumps(message["params"].get("_meta"))}
            result = {"content": [content], "messages": [{"role": "user", "content": content}]}
        case _:
            continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def configured(home: Path, toml: str) -> None:
    home.mkdir()
    (home / "config.toml").write_text(toml, "utf-8")


def traces(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in TRACE if name in values}


async def test_the_trace_context_of_a_prompt_reaches_the_endpoint_servers_subagents_and_the_log(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint, home: Path
) -> None:
    servers = (
        f"[mcp_servers.srv]\ncommand = {json.dumps(sys.executable)}\nargs = {json.dumps(['-c', SERVER])}\n"
        "start_timeout_s = 300\n"
    )
    servers += '[mcp_servers.gone]\ncommand = "/no/such/server"\n'
    configured(home, f'[permissions]\nallow = ["srv__*"]\n{servers}')
    task = {"description": "look", "prompt": "look around"}
    endpoint.script(
        fake.calls(("srv__meta", {}), ("task", task)),
        fake.text("task done"),
        fake.text("done"),
        fake.text("prompted"),
        fake.calls(("srv__meta", {})),
        fake.text("no trace"),
    )
    async with crow(endpoint=endpoint, env={"CROW_LOG": "info"}) as agent:
        await agent.initialize()
        stale = {"traceparent": TRACE["traceparent"].replace("8", "9"), "baggage": "opened"}
        session = await agent.new_session(place, _meta=stale)

        async def prompt(text: str, meta: dict[str, Any] | None = None) -> None:
            content = [{"type": "text", "text": text}]
            await agent.request("session/prompt", {"sessionId": session, "prompt": content, "_meta": meta})

        await prompt("go", {**TRACE, "other": "x"})
        await prompt("/srv:meta", {"traceparent": TRACE["traceparent"]})
        await prompt("again")
    posted = endpoint.asked
    assert [traces(dict(asked.headers)) for asked in posted] == [
        *[TRACE] * 3,
        {"traceparent": TRACE["traceparent"]},
        *[{}] * 2,
    ]

    def results(body: dict[str, Any]) -> list[str]:
        return [message["content"] for message in body["messages"] if message["role"] == "tool"]

    assert traces(json.loads(results(posted[2].body)[0])) == TRACE
    filled = next(message["content"] for message in reversed(posted[3].body["messages"]) if message["role"] == "user")
    assert traces(json.loads(filled)) == {"traceparent": TRACE["traceparent"]}
    assert traces(json.loads(results(posted[5].body)[-1])) == {}
    assert all("x" not in asked.headers.values() for asked in posted)
    log = (home / "crow.log").read_text().splitlines()
    assert not any("MCP server gone" in line and "opened" in line for line in log)
    assert any("crow.tools.mcp.connection: MCP server gone" in line for line in log)
    lines = [line for line in log if "a turn begins" in line]
    assert [line.split("crow.agent.sessions.session:")[1].split(" Session")[0] for line in lines] == [
        f" traceparent={TRACE['traceparent']} tracestate=a=1,b=2 baggage=user=ann",
        f" traceparent={TRACE['traceparent']}",
    ]


async def test_a_prompt_with_an_id_runs_once_also_in_another_process(crow: StartCrow, place: Path) -> None:
    meta = {"_meta": {"crow": {"promptId": "p-1"}}}
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        words = {"sessionId": session, "prompt": [{"type": "text", "text": "say once"}]}
        running = [asyncio.create_task(agent.request("session/prompt", words | meta)) for _ in range(3)]
        assert {(await each)["stopReason"] for each in running} == {"end_turn"}
        assert agent.text(session) == "once"
    async with crow() as agent:
        await agent.initialize()
        await agent.request("session/resume", {"sessionId": session, "cwd": str(place), "mcpServers": []})
        assert await agent.request("session/prompt", words | meta) == await running[0]
        assert agent.text(session) == ""
        unusable: list[object] = ["a\nb", 5, {}, "x" * 201]
        for odd in unusable:
            with pytest.raises(RpcError, match=r"_meta.crow.promptId is"):
                await agent.request("session/prompt", words | {"_meta": {"crow": {"promptId": odd}}})
        with pytest.raises(RpcError, match="other content"):
            await agent.request("session/prompt", words | {"prompt": [{"type": "text", "text": "say two"}]} | meta)
