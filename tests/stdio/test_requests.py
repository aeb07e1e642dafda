"""Cancelled requests, logins, options and `_meta` in the real process."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint

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
        assert answer["agentCapabilities"]["auth"] == {"logout": {}}
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
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        created = await agent.request("session/new", {"cwd": str(place), "mcpServers": []})
        model = next(option for option in created["configOptions"] if option["id"] == "model")
        assert [one["value"] for one in model["options"]] == ["fake-model"]
        at = await agent.wait_for_update("config_option_update")
        options = agent.log[at].message["params"]["update"]["configOptions"]
        model = next(option for option in options if option["id"] == "model")
        assert [one["value"] for one in model["options"]] == ["fake-model", "other-model"]
        params = {"sessionId": created["sessionId"], "configId": "model", "value": "other-model"}
        await agent.request("session/set_config_option", params)
        await agent.prompt(created["sessionId"], "hello")
        assert endpoint.asked[-1].body["model"] == "other-model"


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
        assert answer["_meta"] == {"steering": {"supported": True}}
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
