"""Recordings of the real process and of other agents: made, shown and checked."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from crow.cli import main
from crow.trace.check import check
from crow.trace.record import Recorder, read_recording
from tests.stdio.conftest import StartCrow, crow, home, place

__all__ = ["crow", "home", "place"]

TEXT = {"type": "text", "text": "hi"}
BARE: list[dict[str, Any]] = [
    {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": 1}},
    {"jsonrpc": "2.0", "id": 0, "result": {"protocolVersion": 1}},
    {"jsonrpc": "2.0", "id": 1, "method": "session/new", "params": {"cwd": "/w", "mcpServers": []}},
    {"jsonrpc": "2.0", "id": 1, "result": {"sessionId": "s"}},
    {"jsonrpc": "2.0", "id": 2, "method": "session/prompt", "params": {"sessionId": "s", "prompt": [TEXT]}},
    {
        "jsonrpc": "2.0",
        "method": "session/update",
        "params": {"sessionId": "s", "update": {"sessionUpdate": "tool_call", "toolCallId": "c", "title": "t"}},
    },
    {
        "jsonrpc": "2.0",
        "id": 2,
        "method": "fs/read_text_file",
        "params": {"sessionId": "s", "path": "/w/a"},
    },
    {"jsonrpc": "2.0", "id": 2, "result": {"stopReason": "end_turn"}},
]


def written(file: Path, messages: list[Any]) -> Path:
    file.write_text("".join(json.dumps(message) + "\n" for message in messages))
    return file


async def test_a_recorded_connection_is_valid_and_contains_no_secret(
    crow: StartCrow, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    server = {"name": "x", "command": "/nonexistent", "args": [], "env": [{"name": "T", "value": "hush-hush"}]}
    async with crow(env={"CROW_TRACE": str(trace), "OPENAI_API_KEY": "known-secret-1"}) as agent:
        await agent.initialize()
        session = await agent.new_session(place, mcpServers=[server])
        await agent.prompt(session, "run echo a then say known-secret-1 and sk-abcdefgh12345")
        await agent.request(
            "session/set_title", {"sessionId": session, "title": "http://me:pass-1@host https://:pass-2@h"}
        )
        await agent.send_raw(b"{broken sk-abcdefgh12345\n")
        await agent.request("session/list", {})
        crossed = len(agent.log)
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600
    text = trace.read_text()
    assert [word for word in ("hush-hush", "known-secret-1", "sk-abcdefgh", "pass-") if word in text] == []
    assert len(text.splitlines()) == crossed + 1
    assert main(["trace", "check", str(trace)]) == 0
    assert capsys.readouterr().out == f"{crossed + 1} messages, 0 faults\n"
    assert main(["trace", "show", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "-> initialize #1" in shown
    assert "<- session/request_permission #0" in shown
    assert "session/prompt #3 answered after" in shown
    assert "(not a message) {broken …" in shown


def test_bare_messages_of_any_agent_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "bare.jsonl", BARE)
    result = check(read_recording(file))
    assert [fault.partition("\n")[0] for fault in result.faults] == [
        "line 8: the turn ends, but these tool calls have not ended: ['c']"
    ]
    assert result.unanswered == ("fs/read_text_file (2)",)
    assert main(["trace", "check", str(file)]) == 1
    assert capsys.readouterr().out.endswith("8 messages, 1 faults\n")


@pytest.mark.parametrize(
    "line",
    ["not json", '"text"', '{"jsonrpc":"2.0","id":0,"result":{}}', '{"method":"session/update","params":7}', "[]"],
)
def test_a_line_that_is_not_a_message_is_a_fault_of_the_agent(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(BARE[0]) + f"\n\n{line}\n")
    (fault,) = check(read_recording(file)).faults
    assert fault.startswith("line 3: ")


def test_faults_of_the_client_are_shown_but_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [*BARE[:5], BARE[6], {"jsonrpc": "2.0", "id": 2, "result": None}, BARE[7]]
    recorded = [{"from": "agent" if n in (1, 3, 5, 7) else "client", "message": m} for n, m in enumerate(messages)]
    assert main(["trace", "check", str(written(tmp_path / "null.jsonl", recorded))]) == 0
    told = capsys.readouterr().out
    assert told.startswith("(the client, line 7: $: None is not of type 'object'")
    assert told.endswith("8 messages, 0 faults\n")


def test_a_missing_recording_is_an_error_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "show", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "no" / "such" / "place")
    record("in", b'{"a": 1}')
    record("out", b'{"a": 1}')
    record.close()
