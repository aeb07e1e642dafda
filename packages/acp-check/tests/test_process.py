"""`acp-check` with real processes: exit codes, reports, and nothing left behind."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from acp_check.__main__ import main
from acp_check.endpoint import MODEL, ScriptedEndpoint
from acp_check.process import AgentProcess
from acp_check.recording import read_recording
from acp_check.report import check
from acp_check.rules import RULES
from acp_check.rules.turns import SPOKEN

ROOT = Path(__file__).parents[1]
AGENT = [sys.executable, "-m", "tests.agent"]
OPTIONS = ["--env", f"PYTHONPATH={ROOT}", "--env", "ACP_CHECK_DISK={home}/disk.json"]
NOT_TRIED = {
    "cancel.leaves-model",
    "prompt.slow-client",
    "prompt.text-shown",
    "prompt.two-sessions",
    "session.mcp-environment",
    "shape.authenticate",
    "shape.logout",
}
"""The small agent has no model at the endpoint and starts no MCP server."""


def test_a_process_that_keeps_the_rules_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    assert main(["--json", "--trace", str(trace), *OPTIONS, "--", *AGENT]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["rule"] for row in rows] == [rule.id for rule in RULES]
    assert [row["rule"] for row in rows if row["state"] == "failed"] == ["session.mcp-connected"]
    assert {row["rule"] for row in rows if row["state"] == "not applicable"} == NOT_TRIED
    again = check(read_recording(trace))
    assert [verdict.rule.id for verdict in again.verdicts if verdict.findings] == []


def test_a_process_that_breaks_a_rule_fails_with_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.xml"
    broken = [*AGENT, "cancel.no-error"]
    assert main(["--junit", str(report), *OPTIONS, "--", *broken]) == 1
    told = capsys.readouterr().out
    assert "FAILED MUST   cancel.no-error: A cancelled prompt is answered with a result, not with an error." in told
    assert '"error": {"code": -32603, "message": "The request was aborted"}}' in told
    suite = ElementTree.parse(report).getroot()
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    assert "cancel.no-error" in failed
    assert suite.get("tests") == str(len(RULES))
    assert suite.get("failures") == str(len(failed))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "/nonexistent/agent"], "/nonexistent/agent: cannot be started: No such file"),
        (["--", "a\0b"], "cannot be started: embedded null byte"),
        ([], "acp-check -- COMMAND"),
        (["--timeout", "nan", "--", "true"], "--timeout nan: expected a number of seconds"),
        (["--env", "=x", "--", "true"], "--env =x: expected NAME=VALUE"),
        (
            ["--junit", "/nonexistent/report.xml", "--timeout", "0.1", "--", "sleep", "1000"],
            "--junit /nonexistent/report.xml",
        ),
        (["--trace", "/nonexistent/trace", "--", "true"], "/nonexistent/trace: cannot be written"),
    ],
)
def test_wrong_arguments_are_the_users_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_the_check_ends_its_agent_when_it_is_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    mute = ["sh", "-c", f"echo $$ >> {pids}; exec sleep 1000"]
    with subprocess.Popen([sys.executable, "-m", "acp_check", "--", *mute], cwd=ROOT) as check_process:
        while not pids.exists() or not pids.read_text().endswith("\n"):
            assert check_process.poll() is None
        check_process.terminate()
        assert check_process.wait(60) == 143
    assert [pid for pid in pids.read_text().split() if is_alive(int(pid))] == []


def test_a_mute_agent_fails_and_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pids = tmp_path / "pids"
    mute = ["sh", "-c", f"echo $$ >> {pids}; exec sleep 1000"]
    assert main(["--timeout", "0.3", "--", *mute]) == 1
    told = capsys.readouterr().out
    assert "FAILED MUST   initialize.answered" in told
    assert " 1 failed (1 MUST, 0 SHOULD)" in told.replace("2 failed (1 MUST, 1 SHOULD)", " 1 failed (1 MUST, 0 SHOULD)")
    assert [pid for pid in pids.read_text().split() if is_alive(int(pid))] == []


def test_an_agent_that_dies_before_it_answers_is_the_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", "sh", "-c", "echo 'no key: set MY_KEY' >&2; exit 7"]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == (
        "",
        "acp-check: The agent ended with exit code 7 before it answered initialize. Its stderr: no key: set MY_KEY\n",
    )


def test_an_agent_that_writes_anything_but_messages_fails(capsys: pytest.CaptureFixture[str]) -> None:
    noisy = "head -c 1000000 /dev/zero; echo; yes | head -999; exec sleep 1000"
    assert main(["--timeout", "0.3", "--", "sh", "-c", noisy]) == 1
    told = capsys.readouterr().out
    assert "FAILED MUST   framing.json: " in told
    assert "<- y\n" in told
    assert "\0" not in told


def test_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rules"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [rule.id for rule in RULES]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def started(place: Path, script: str) -> AgentProcess:
    return AgentProcess(["sh", "-c", script], dict(os.environ), place, place / "stderr")


@pytest.mark.parametrize(
    ("script", "is_stuck"),
    [("sleep 1000 & echo $!; wait", True), ("sleep 1000 > /dev/null 2>&1 & echo $!", False)],
)
def test_no_process_of_an_agent_is_left(tmp_path: Path, script: str, is_stuck: bool) -> None:
    process = started(tmp_path, script)
    pid = int(process.read_line(30) or b"0")
    ended = process.close(0.2 if is_stuck else 30)
    assert (ended.code is None, ended.leftovers) == (is_stuck, not is_stuck)
    assert not is_alive(pid)


def test_lines_arrive_whole_and_the_end_is_told(tmp_path: Path) -> None:
    process = started(tmp_path, "cat; printf 'no newline'")
    process.write(b"one\ntw")
    process.write(b"o\n")
    assert (process.read_line(30), process.read_line(30)) == (b"one\n", b"two\n")
    assert process.close(30).code == 0
    assert (process.read_line(30), process.read_line(30)) == (b"no newline", b"")


@contextmanager
def asked(endpoint: ScriptedEndpoint, body: bytes) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(endpoint.base_url.split("/")[2], timeout=120)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with closing(connection), connection.getresponse() as response:
        yield response


def answer(endpoint: ScriptedEndpoint, word: str, **more: Any) -> bytes:
    with asked(endpoint, prompt(word, **more)) as response:
        return response.read()


def prompt(word: str, **more: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"acp-check:{word} now"}]}
    return json.dumps(body | more).encode()


def test_the_endpoint_speaks_calls_tools_and_notices_who_leaves(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}
    tools = [{"type": "function", "function": {"name": "ReadFile", "parameters": schema}}]
    with ScriptedEndpoint(str(tmp_path)) as endpoint:
        said = json.loads(answer(endpoint, "say"))["choices"][0]
        called = json.loads(answer(endpoint, "tool", tools=tools))["choices"][0]
        streamed = answer(endpoint, "say", stream=True).decode()
        with asked(endpoint, prompt("hang", stream=True)) as hanging:
            assert hanging.readline().startswith(b"data: ")
        endpoint.wait_until_left(30)
        assert (endpoint.log.requests, endpoint.log.hung, endpoint.log.left) == (4, 1, 1)
    assert (said["message"]["content"], said["finish_reason"]) == (SPOKEN, "stop")
    (call,) = called["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"file_path": f"{tmp_path}/acp-check.txt"}
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]]
    assert "".join(pieces) == SPOKEN


@pytest.mark.parametrize("body", [b"", b"[]", b'{"messages": 5}', b"{" * 100_000])
def test_the_endpoint_refuses_what_is_no_chat_completion(tmp_path: Path, body: bytes) -> None:
    with ScriptedEndpoint(str(tmp_path)) as endpoint, asked(endpoint, body) as response:
        assert response.status == 400
