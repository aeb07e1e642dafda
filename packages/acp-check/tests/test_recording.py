"""Recordings of any agent are read and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from acp_check.__main__ import main
from acp_check.recording import read_recording
from acp_check.report import Report, check
from acp_check.rules import RULES

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


def found(report: Report) -> dict[str, list[str]]:
    """The words of the findings, by rule."""
    failed = (verdict for verdict in report.verdicts if verdict.findings)
    return {verdict.rule.id: [finding.words for finding in verdict.findings] for verdict in failed}


def late(file: Path, *after: dict[str, Any]) -> dict[str, list[str]]:
    """The findings about updates that come after the answer to a prompt, and after these messages."""
    return {
        rule: words
        for rule, words in found(check(read_recording(written(file, [*BARE[:6], BARE[7], *after])))).items()
        if "first" in rule
    }


def written(file: Path, messages: list[Any]) -> Path:
    file.write_text("".join(json.dumps(message) + "\n" for message in messages))
    return file


def test_bare_messages_of_any_agent_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "bare.jsonl", BARE)
    report = check(read_recording(file))
    assert found(report) == {
        "initialize.agent-info": ["agentInfo is None"],
        "initialize.agent-capabilities": ["agentCapabilities is None"],
        "tool.final": ["the turn ends, but these tool calls have not ended: ['c']"],
        "offered.fs-read": ["the client did not offer fs.readTextFile"],
    }
    assert report.unanswered == ("fs/read_text_file (2)",)
    assert main(["--recording", str(file)]) == 1
    told = capsys.readouterr().out
    assert "FAILED MUST   offered.fs-read: Files are read only if the client offers fs.readTextFile.\n" in told
    assert '       line 7: the client did not offer fs.readTextFile\n         7 <- {"jsonrpc"' in told
    assert told.endswith(f"8 messages, {len(RULES)} rules: {told.rpartition(' rules: ')[2]}")


@pytest.mark.parametrize(
    "line",
    ["not json", '"text"', '{"jsonrpc":"2.0","id":0,"result":{}}', '{"method":"session/update","params":7}', "[]"],
)
def test_a_line_that_is_not_a_message_is_a_fault_of_the_agent(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(BARE[0]) + f"\n\n{line}\n")
    report = check(read_recording(file))
    assert 3 in {line.line for verdict in report.verdicts for finding in verdict.findings for line in finding.lines}


def answer(request_id: int, **result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def show(**update: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": "s", "update": update}}


@pytest.mark.parametrize("method", ["authenticate", "logout"])
def test_a_recorded_login_is_compared_with_the_schema(tmp_path: Path, method: str) -> None:
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"methodId": "m"} if method != "logout" else {}}
    for member, expected in ((5, ["extensibility.meta"]), ({}, [])):
        report = check(read_recording(written(tmp_path / "login.jsonl", [request, answer(1, _meta=member)])))
        assert set(found(report)) == set(expected)


def test_a_load_during_a_prompt_replays_it_and_the_prompt_continues(tmp_path: Path) -> None:
    words = {"sessionUpdate": "agent_message_chunk", "content": TEXT, "messageId": "m"}
    call = {"sessionUpdate": "tool_call", "toolCallId": "c", "title": "t", "status": "pending"}
    offered = {"agentCapabilities": {"loadSession": True}, "agentInfo": {"name": "a", "version": "1"}}
    load = {"sessionId": "s", "cwd": "/w", "mcpServers": []}
    messages = [
        BARE[0],
        answer(0, protocolVersion=1, **offered),
        *BARE[2:5],
        show(**words),
        show(**call),
        {"jsonrpc": "2.0", "id": 3, "method": "session/load", "params": load},
        show(sessionUpdate="user_message_chunk", content=TEXT, messageId="u"),
        show(**words),
        show(**call),
        answer(3),
        show(sessionUpdate="tool_call_update", toolCallId="c", status="completed"),
        show(**words | {"messageId": "m2"}),
        answer(2, stopReason="end_turn"),
    ]
    report = check(read_recording(written(tmp_path / "load.jsonl", messages)))
    assert found(report) == {}
    assert report.unanswered == ()


def test_a_subagent_is_known_and_works_when_its_session_says_so(tmp_path: Path) -> None:
    def child(**update: Any) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": "task", "update": update}}

    capabilities = {"clientCapabilities": {"subagents": {}}, "clientInfo": {"name": "c", "version": "1"}}
    offered = {"agentCapabilities": {"loadSession": True}, "agentInfo": {"name": "a", "version": "1"}}
    begun = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": 1, **capabilities}}
    announced = show(sessionUpdate="subagent_update", sessionId="task", title="t")
    call = {"sessionUpdate": "tool_call", "toolCallId": "c", "title": "t", "status": "completed"}
    at = {"cwd": "/w", "mcpServers": []}
    messages = [
        begun,
        answer(0, protocolVersion=1, **offered),
        *BARE[2:5],
        announced,
        child(sessionUpdate="agent_message_chunk", content=TEXT, messageId="m0"),
        {"jsonrpc": "2.0", "id": 3, "method": "session/prompt", "params": {"sessionId": "task", "prompt": [TEXT]}},
        {"jsonrpc": "2.0", "id": 3, "error": {"code": -32002, "message": "task is not open"}},
        child(**call),
        child(sessionUpdate="agent_message_chunk", content=TEXT, messageId="m"),
        answer(2, stopReason="end_turn"),
        {"jsonrpc": "2.0", "id": 4, "method": "session/load", "params": {"sessionId": "s", **at}},
        announced,
        child(**call),
        show(sessionUpdate="user_message_chunk", content=TEXT, messageId="u"),
        answer(4),
        {"jsonrpc": "2.0", "id": 5, "method": "session/load", "params": {"sessionId": "task", **at}},
        child(**call),
        answer(5),
    ]
    report = check(read_recording(written(tmp_path / "subagents.jsonl", messages)))
    assert found(report) == {}


def test_faults_of_the_client_are_shown_but_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offered = {"protocolVersion": 1, "clientCapabilities": {"fs": {"readTextFile": True}}}
    messages = [
        BARE[0] | {"params": offered},
        *BARE[1:5],
        BARE[6],
        {"jsonrpc": "2.0", "id": 2, "result": None},
        BARE[7],
    ]
    recorded = [{"from": "agent" if n in (1, 3, 5, 7) else "client", "message": m} for n, m in enumerate(messages)]
    assert main(["--recording", str(written(tmp_path / "null.jsonl", recorded))]) == 0
    told = capsys.readouterr().out
    assert '(the client, line 7: $: null is not of type "object"' in told
    assert "FAILED MUST" not in told


def test_a_missing_recording_is_an_error_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recording", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_a_late_update_is_judged_against_the_request_that_it_belongs_to(tmp_path: Path) -> None:
    file, params = tmp_path / "late.jsonl", {"sessionId": "s", "modeId": "m"}
    other: dict[str, Any] = {"sessionUpdate": "tool_call", "toolCallId": "d", "title": "The model changed"}
    own = {"sessionUpdate": "tool_call_update", "toolCallId": "c", "status": "completed"}
    request = {"jsonrpc": "2.0", "id": 3, "method": "session/set_mode", "params": params}
    updates = [
        {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": "s", "update": each}}
        for each in (other, own)
    ]
    words = {"prompt.updates-first": ["1 updates of the turn came after the response"]}
    assert late(file, updates[0]) == words
    assert late(file, request, updates[0]) == {}
    assert late(file, request, *updates) == words


def test_a_result_of_a_later_version_is_not_judged_by_the_first(tmp_path: Path) -> None:
    asked = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 9}}
    methods = [{"methodId": "a", "name": "A"}, {"methodId": "b", "name": "B"}]
    recording = [asked, answer(1, protocolVersion=2, info={"name": "x"}, authMethods=methods)]
    assert found(check(read_recording(written(tmp_path / "two.jsonl", recording)))) == {}
