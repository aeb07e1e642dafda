"""The protocol of the real process: handshake, ordering, hostile input, clean exits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import ROOT, StartCrow
from tests.support.acp_client import Call, CrowProcess, RpcError, allow_once
from tests.support.fork_server import command

MEBIBYTE = 1024 * 1024
INTRUDER = """
import os, stat, threading, time

def shout():
    while threading.main_thread().is_alive():
        if stat.S_ISCHR(os.fstat(1).st_mode):
            print("STRAY", flush=True)
            os.write(1, b"STRAY\\n")
        time.sleep(0.001)

threading.Thread(target=shout).start()
"""
"""Writes to stdout from inside the process as soon as the protocol has its own descriptor."""


async def failed(awaitable: Any) -> tuple[int, str]:
    """Code and message of the error that is expected."""
    with pytest.raises(RpcError) as raised:
        await awaitable
    assert raised.value.data is None or raised.value.data.get("details", raised.value.message) == raised.value.message
    return raised.value.code, raised.value.message


async def test_initialize_answers_version_1_to_any_version(crow: StartCrow) -> None:
    async with crow() as agent:
        for version in (1, 0, 2, 65535):
            result = await agent.request("initialize", {"protocolVersion": version})
            assert result["protocolVersion"] == 1
            assert result["agentInfo"]["name"] == "crow"
            assert result["agentCapabilities"]["loadSession"] is True
            assert result["agentCapabilities"]["sessionCapabilities"].items() >= {"list": {}, "resume": {}}.items()
            assert result["authMethods"][0].get("type", "agent") == "agent"
        assert [logged.sender for logged in agent.log] == ["client", "agent"] * 4


async def test_session_new_works_without_waiting_for_initialize(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        handshake = await agent.start("initialize", {"protocolVersion": 1})
        session = await agent.new_session(place)
        await handshake.result()
        assert (await agent.prompt(session, "say hello"))["stopReason"] == "end_turn"


async def test_updates_follow_session_creation_and_commands_come_first(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        created = await agent.start("session/new", {"cwd": str(place), "mcpServers": []})
        result = await created.result()
        first = await agent.wait_for_update("available_commands_update")
        assert first > agent.response_index(created)
        modes = [mode["id"] for mode in result["modes"]["availableModes"]]
        option = next(option for option in result["configOptions"] if option["category"] == "mode")
        assert [value["value"] for value in option["options"]] == modes
        assert all(
            not command["name"].startswith("/")
            for command in agent.updates(result["sessionId"])[0]["availableCommands"]
        )


async def test_all_updates_of_a_turn_precede_its_response(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "read README.md then say done with it")
        assert await call.result() == {"stopReason": "end_turn"}
        await agent.request("session/list", {})
        after = agent.updates(session, since=agent.response_index(call))
        assert after == []
        assert agent.text(session).endswith("done with it")
        ids = [update["messageId"] for update in agent.updates(session, "agent_message_chunk")]
        assert len(set(ids)) == 2


async def test_hostile_lines_are_answered_and_a_prompt_works_afterwards(crow: StartCrow, place: Path) -> None:
    lines = [b"{bad", b"\xff\xfe", b"[]", b"null", b"42", b'"x"', b"{}", b"[" * 100_000, b'{"id":[],"result":1}']
    lines += [b'{"jsonrpc":"2.0","id":null,"method":"initialize"}', b'{"jsonrpc":"2.0","method":7}']
    codes = [-32700, -32700, -32600, -32600, -32600, -32600, -32600, -32700, -32600, -32600, -32600]
    async with crow() as agent:
        await agent.initialize()
        since = len(agent.log)
        await agent.send_raw(b"\n".join(lines) + b"\n\n  \n")
        session = await agent.new_session(place)
        answers = [logged.message for logged in agent.log[since:] if logged.message.get("id", 0) is None]
        assert [answer["error"]["code"] for answer in answers] == codes
        assert (await agent.prompt(session, "say still here"))["stopReason"] == "end_turn"
        assert agent.text(session) == "still here"


async def test_a_line_over_32_mib_is_refused_and_one_of_10_is_read(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.send_raw(b'{"jsonrpc":"2.0","id":99,"method":"x","params":"' + b"x" * (33 * MEBIBYTE) + b'"}\n')
        at = await agent.wait_for(lambda message: message.get("id", 0) is None and "error" in message)
        assert "32 MiB" in agent.log[at].message["error"]["message"]
        link = {"type": "resource", "resource": {"uri": "file:///big", "text": "y" * (10 * MEBIBYTE)}}
        blocks = [{"type": "text", "text": "say read"}, link]
        await agent.request("session/prompt", {"sessionId": session, "prompt": blocks})


async def test_odd_envelopes_and_unknown_messages_do_no_harm(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.send_raw(
            b'\xef\xbb\xbf{"type":"com.example.JsonRpcRequest","jsonrpc":"2.0","id":"a-1","method":"initialize",'
            b'"params":{"protocolVersion":1,"extra":true}}\r\n'
        )
        await agent.wait_for(lambda message: message.get("id") == "a-1" and "result" in message)
        await agent.notify("_something/new", {"x": 1})
        await agent.notify("$/cancel_request", {"requestId": 12345})
        await agent.send_raw(b'{"jsonrpc":"2.0","method":"unheard/of"}\n')
        await agent.send_raw(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32602,"message":"Invalid params"}}\n')
        await agent.send_raw(b'{"jsonrpc":"2.0","id":77,"result":{}}\n')
        assert (await failed(agent.request("_something/else", {})))[0] == -32601
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "say fine"))["stopReason"] == "end_turn"
        # The client sent this string id as raw bytes, so its checks did not expect the answer.
        agent._faults = [fault for fault in agent._faults if "a-1" not in fault]


async def test_meta_cannot_override_a_parameter(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        one, other = await agent.new_session(place), await agent.new_session(place)
        await agent.request(
            "session/prompt",
            {
                "sessionId": one,
                "prompt": [{"type": "text", "text": "say mine"}],
                "_meta": {"session_id": other, "sessionId": other, "self": 1, "prompt": []},
            },
        )
        assert (agent.text(one), agent.text(other)) == ("mine", "")


async def test_an_unknown_session_is_named_in_the_error(crow: StartCrow, place: Path) -> None:
    requests: dict[str, dict[str, Any]] = {
        "session/prompt": {"prompt": [{"type": "text", "text": "hi"}]},
        "session/load": {"cwd": str(place), "mcpServers": []},
        "session/resume": {"cwd": str(place), "mcpServers": []},
        "session/set_mode": {"modeId": "plan"},
        "session/set_config_option": {"configId": "mode", "value": "plan"},
    }
    async with crow() as agent:
        await agent.initialize()
        for method, params in requests.items():
            code, message = await failed(agent.request(method, {"sessionId": "nobody"} | params))
            assert (method, code) == (method, -32002)
            assert message.startswith("Session not found: nobody")


async def test_an_unknown_session_may_be_cancelled_and_deleted(crow: StartCrow) -> None:
    async with crow() as agent:
        await agent.initialize()
        await agent.notify("session/cancel", {"sessionId": "nobody"})
        assert await agent.request("session/delete", {"sessionId": "nobody"}) == {}


async def test_bad_directories_and_blocks_are_refused_and_lose_nothing(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        for cwd in ("relative/path", str(place / "missing"), str(place / "README.md")):
            code, message = await failed(agent.request("session/new", {"cwd": cwd, "mcpServers": []}))
            assert (code, cwd in message) == (-32602, True)
        session = await agent.new_session(place)
        agent.checks_schema = False  # the messages below are invalid on purpose
        for prompt in ([], [{"type": "video"}], [{"type": "image", "data": "no!", "mimeType": "image/png"}], "hi"):
            code, _ = await failed(agent.request("session/prompt", {"sessionId": session, "prompt": prompt}))
            assert code == -32602
        assert (await failed(agent.request("session/set_mode", {"sessionId": session, "modeId": "yolo"})))[0] == -32602
        long, here = "x" * 1_100_000, {"cwd": str(place), "mcpServers": []}
        for method, params in (
            ("authenticate", {"methodId": long}),
            ("session/load", {"sessionId": long, **here}),
            ("session/new", {**here, "cwd": f"/{long}"}),
            ("session/new", {**here, "_meta": {"model": long}}),
            ("session/new", {**here, "mcpServers": [{"name": long, "type": long}]}),
            ("session/prompt", {"sessionId": session, "prompt": [{"type": long}]}),
            (f"_{long}", {}),
        ):
            assert len((await failed(agent.request(method, params)))[1]) < 10_000
        await agent.prompt(session, f"/export {long}")
        assert "path has 1,100,000 characters; expected at most 16,384" in agent.text(session)
        assert (await agent.prompt(session, "say whole"))["stopReason"] == "end_turn"
        assert agent.text(session).endswith("whole")


async def test_a_mode_change_moves_both_selectors_and_lasts_through_a_load(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "say hello")
        await agent.request("session/set_mode", {"sessionId": session, "modeId": "plan"})
        await agent.wait_for_update("current_mode_update", currentModeId="plan")
        await agent.wait_for_update("config_option_update")
        params = {"sessionId": session, "configId": "mode", "value": "auto"}
        options = (await agent.request("session/set_config_option", params))["configOptions"]
        assert {option["id"]: option["currentValue"] for option in options}["mode"] == "auto"
        await agent.wait_for_update("current_mode_update", currentModeId="auto")
    async with crow() as agent:
        await agent.initialize()
        loaded = await agent.load_session(session, place)
        assert loaded["modes"]["currentModeId"] == "auto"


async def test_prompts_sent_during_a_turn_run_in_order_and_are_each_answered(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        calls = [await agent.start_prompt(session, f"say number {number}") for number in range(3)]
        assert [await call.result() for call in calls] == [{"stopReason": "end_turn"}] * 3
        assert agent.text(session) == "number 0number 1number 2"
        assert [agent.response_index(call) for call in calls] == sorted(agent.response_index(call) for call in calls)


async def test_a_session_is_listed_from_its_first_prompt_until_its_deletion(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        old, new, _ = [await agent.new_session(place) for _ in range(3)]
        await agent.prompt(old, "say old")
        await agent.prompt(new, "say new")
        listed = (await agent.request("session/list", {"cwd": str(place)}))["sessions"]
        assert [(info["sessionId"], info["cwd"]) for info in listed] == [(new, str(place)), (old, str(place))]
        assert all(info["title"] and info["updatedAt"].endswith("Z") for info in listed)
        assert (await failed(agent.request("session/list", {"cursor": "nonsense"})))[0] == -32602
        assert await agent.request("session/delete", {"sessionId": new}) == {}
        listed = (await agent.request("session/list", {}))["sessions"]
        assert [info["sessionId"] for info in listed] == [old]


async def test_without_a_model_only_the_prompt_fails_and_says_what_to_do(crow: StartCrow, place: Path) -> None:
    async with crow(env={"CROW_MODEL": None}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        code, message = await failed(agent.prompt(session, "hello"))
        assert code == -32000
        assert "OPENAI_API_KEY" in message
        code, _ = await failed(agent.request("authenticate", {"methodId": "configured"}))
        assert code == -32000


@pytest.fixture(params=["no database", "a directory"])
def unusable_database(home: Path, request: pytest.FixtureRequest) -> Path:
    """Put something else where the database should be."""
    home.mkdir()
    database = home / "crow.db"
    if request.param == "a directory":
        database.mkdir()
    else:
        database.write_bytes(b"this is no database, " * 500)
    return database


async def test_an_unusable_database_is_named(crow: StartCrow, unusable_database: Path, place: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        code, message = await failed(agent.new_session(place))
        assert (code, str(unusable_database) in message) == (-32603, True)


async def test_nothing_is_imported_from_the_workspace(crow: StartCrow, place: Path) -> None:
    (place / "h2.py").write_text("raise SystemExit('imported')\n")
    (place / "httpx2.py").write_text("raise SystemExit('imported')\n")
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "say fine"))["stopReason"] == "end_turn"


async def test_stray_prints_and_writes_never_reach_the_protocol(crow: StartCrow, place: Path) -> None:
    async with crow(before=INTRUDER) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "run echo out; cat then say done")
        assert agent.text(session).endswith("done")


async def start_waiting_turn(agent: CrowProcess, place: Path) -> tuple[str, Call]:
    """A session whose turn waits for a permission that never comes, and the turn."""

    async def silent(_: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    agent.answers["session/request_permission"] = silent
    session = await agent.new_session(place)
    call = await agent.start_prompt(session, "write a.txt: one")
    await agent.wait_for(lambda message: message.get("method") == "session/request_permission", since=call.index)
    return session, call


async def ends_as_cancelled(agent: CrowProcess, session: str, call: Call) -> bool:
    """Whether the turn was answered as cancelled after its call was shown as failed."""
    ended = agent.updates(session, "tool_call_update")[-1]
    return (await call.result(), ended["status"]) == ({"stopReason": "cancelled"}, "failed")


async def test_eof_exits_cleanly_even_during_a_turn(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        assert await agent.close_stdin_and_wait() == 0
    async with crow() as agent:
        await agent.initialize()
        asking = await start_waiting_turn(agent, place)
        session = await agent.new_session(place)
        await agent.start_prompt(session, "count to 1000")
        await agent.wait_for_text(session, "3")
        assert await agent.close_stdin_and_wait() == 0
        assert await ends_as_cancelled(agent, *asking)
    async with crow() as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        assert agent.text(session, "user_message_chunk") == "count to 1000"
        assert agent.text(session).startswith("1\n2\n3")
        assert (await agent.prompt(session, "say on we go"))["stopReason"] == "end_turn"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_exits_cleanly_and_reports_the_call_before_the_prompt(
    crow: StartCrow, place: Path, number: signal.Signals
) -> None:
    async with crow(answers={"session/request_permission": allow_once}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "run sleep 600")
        await agent.wait_for_update("tool_call_update", status="in_progress")
        agent.send_signal(number)
        assert await agent.wait() == 0
        assert agent.updates(session, "tool_call_update")[-1]["status"] == "failed"
        assert agent.log[agent.response_index(call)].message["result"]["stopReason"] == "cancelled"
        agent.check()


def test_files_work_in_place_of_pipes(home: Path, place: Path, tmp_path: Path) -> None:
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}
    (tmp_path / "in").write_text(json.dumps(request) + "\n[]\n")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), "CROW_MODEL": "offline"}
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("wb") as sink:
        done = subprocess.run(
            [*command(), "acp"],
            stdin=source,
            stdout=sink,
            stderr=subprocess.PIPE,
            cwd=place,
            env=env,
            timeout=60,
            check=False,
        )
    answers = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted((str(answer["id"]), "result" in answer) for answer in answers) == [("1", True), ("None", False)]


async def test_an_editor_that_vanishes_leaves_nothing_running(crow: StartCrow, place: Path) -> None:
    async with crow(argv=[*command(), "acp"]) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.start_prompt(session, "run echo begun; sleep 600")  # it prints nothing more, so no write can fail
        await agent.wait_for_update("tool_call_update", status="in_progress")
        transport = agent._process._transport  # type: ignore[union-attr]
        transport.get_pipe_transport(1).close()
        await asyncio.wait_for(agent._process.wait(), 60)
        assert agent.returncode == 0


POOR_SYSTEM = """
import asyncio, concurrent.futures, importlib, multiprocessing, os, signal, socket, subprocess, tempfile

real = importlib.import_module

def poor(name, package=None):
    if name == "fcntl":
        raise ImportError(name)
    return real(name, package)

importlib.import_module = poor
for name in ("killpg", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "fchmod", "fchown"):
    delattr(os, name)
del signal.SIGKILL
"""
"""Removes what only POSIX systems have, so libraries cannot find it."""


@pytest.mark.long
async def test_tools_commands_and_cancel_work_without_posix_calls(crow: StartCrow, place: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(POOR_SYSTEM)
    async with crow(env={"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}) as agent:
        await agent.initialize()
        session = await agent.new_session(place, _meta={"crow": {"alias": "poor"}})
        await agent.request("session/set_mode", {"sessionId": session, "modeId": "auto"})
        await agent.prompt(session, "read README.md then write a.txt: one then run echo two")
        assert "Twigs" in agent.text(session)
        assert agent.text(session).partition("\n\nReceipt: ")[0].endswith("two")
        assert (place / "a.txt").read_text() == "one\n"
        call = await agent.start_prompt(session, "run echo be''gun; sleep 600")
        # before it has started, asyncio itself would end it with SIGKILL
        await agent.wait_for(lambda message: "begun" in str(message), since=call.index)
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
