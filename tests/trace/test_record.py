"""Recordings of the real process: made, shown and valid."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from acp_check.__main__ import main as acp_check
from crow.cli import main
from crow.trace.record import Recorder
from tests.stdio.conftest import StartCrow, crow, home, place

__all__ = ["crow", "home", "place"]


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
    assert acp_check(["--strict", "--recording", str(trace)]) == 0
    assert capsys.readouterr().out.startswith(f"{crossed + 1} messages, ")
    assert main(["trace", "show", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "-> initialize #1" in shown
    assert "<- session/request_permission #0" in shown
    assert "session/prompt #3 answered after" in shown
    assert "(not a message) {broken …" in shown


def test_a_file_that_is_no_recording_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"at": 1, "from": "agent", "message": {"id": 1, "result": {}}}\n\n{"jsonrpc": "2.0"}\n')
    assert main(["trace", "show", str(file)]) == 2
    assert f'{file}, line 3: not a line of a recording: {{"jsonrpc": "2.0"}}' in capsys.readouterr().err


def test_a_recording_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"at": 1, "from": "agent", "line": "\x1b]52;c;eA==\x07"},
        {"at": 1, "from": "agent", "message": ["\u009b2J\u202e"]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["trace", "show", str(file)]) == 0
    assert [c for c in capsys.readouterr().out if not (c.isprintable() or c == "\n")] == []


def test_a_missing_recording_is_an_error_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "show", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_a_list_of_secrets_is_masked_like_one(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace.jsonl")
    recorder(
        "in", json.dumps({"method": "_x", "params": {"api_keys": ["hush-1", ["hush-2"]], "plain": ["said"]}}).encode()
    )
    recorder.close()
    text = (tmp_path / "trace.jsonl").read_text()
    assert "hush" not in text
    assert "said" in text


def test_a_trace_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "no" / "such" / "place")
    record("in", b'{"a": 1}')
    record("out", b'{"a": 1}')
    record.close()
