"""Benchmark rows: limits, and the tables in BENCHMARKS.md."""

from __future__ import annotations

import datetime
import json
import tomllib
import urllib.request
from pathlib import Path

import pytest

from benchmarks import compare, write
from benchmarks.__main__ import NAMES, rows_over
from benchmarks.process import client
from benchmarks.process.endpoint import endpoint, prompt
from benchmarks.rows import ROOT, Row, of_times, report, table

ROWS = [
    of_times("a step", [0.004, 0.006, 0.009], limit=5, floor=0.25),
    of_times("  of which the disk", [0.001]),
    Row("text that is not exact", 0, 0, "", 0),
]


def test_a_row_is_over_its_limit_when_its_median_is() -> None:
    assert [row.is_over for row in ROWS] == [True, False, False]
    assert [line.split() for line in table(ROWS)] == [
        ["median", "worst", "limit", "floor"],
        ["a", "step", "6.00", "9.00", "ms", "5", "over", "0.25"],
        ["of", "which", "the", "disk", "1.00", "1.00", "ms"],
        ["text", "that", "is", "not", "exact", "0", "0", "0"],
    ]


def test_rows_written_as_json_come_back_and_stand_in_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(ROWS, tmp_path / "made" / "process.json")
    capsys.readouterr()
    assert rows_over(tmp_path / "made" / "process.json") == ROWS[:1]
    page = write.written(f"above\n{write.BEGIN}old\n{write.END}below\n", write.figures(tmp_path / "made"))
    assert page.startswith(f"above\n{write.BEGIN}\n")
    assert page.endswith(f"\n{write.END}below\n")
    assert "| a step | 6.00 ms | 9.00 | 5 **over** | 0.25 |" in page
    assert "| … of which the disk | 1.00 ms | 1.00 |  |  |" in page
    assert "old" not in page


def test_the_page_has_a_place_for_figures_and_tells_of_every_benchmark() -> None:
    text = (ROOT / "BENCHMARKS.md").read_text("utf-8")
    assert write.written(text, "").count(write.BEGIN + write.END) == 1
    assert [name for name in NAMES if f"**{name}**" not in text] == []


def test_agents_to_compare_are_found_on_the_path_and_in_the_setting(tmp_path: Path) -> None:
    for name in ("opencode", "pi-acp"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    found = compare.peers("pi-acp = /opt/pi-acp --fast; another='/opt/an agent' --model=x;", str(tmp_path))
    assert [(peer.name, list(peer.command)) for peer in found[1:]] == [
        ("another", ["/opt/an agent", "--model=x"]),
        ("opencode", ["opencode", "acp"]),
        ("pi-acp", ["/opt/pi-acp", "--fast"]),
    ]
    assert found[0].name == "crow"
    assert found[1].environment["OPENAI_BASE_URL"] == "{url}"
    assert found[3].files == compare.known()["pi-acp"].files
    assert [peer.name for peer in compare.peers("", "/nowhere")] == ["crow"]


@pytest.mark.parametrize("setting", ["opencode", "=opencode acp", "opencode=", "a=b; c", "a='b"])
def test_a_setting_without_names_and_commands_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=r"CROW_COMPARE|quotation"):
        compare.named(setting)


def test_the_settings_of_known_agents_name_the_endpoint_and_parse() -> None:
    for name, peer in compare.known().items():
        texts = [*peer.environment.values(), *peer.files.values()]
        assert any("{url}" in each for each in texts), name
        for file, content in peer.files.items():
            (json.loads if file.endswith(".json") else tomllib.loads)(content)


def test_the_shell_of_an_agent_is_found_among_its_tools() -> None:
    text = {"type": "string"}
    read = {"type": "function", "function": {"name": "read", "parameters": {"properties": {"path": text}}}}
    schema = {
        "properties": {"command": text, "why": text, "timeout": {"type": "number"}},
        "required": ["command", "why"],
    }
    bash = {"type": "function", "function": {"name": "bash", "parameters": schema}}
    argv = {"type": "function", "name": "shell", "parameters": {"properties": {"cmd": {"type": "array"}}}}
    assert compare.shell_call([read, bash, argv]) == ("bash", '{"command": "echo {i}", "why": "echo"}')
    assert compare.shell_call([{"type": "web_search"}, argv]) == ("shell", '{"cmd": ["echo", "{i}"]}')
    assert compare.shell_call([read]) is None


def test_the_tokens_of_a_request_are_those_of_its_messages_and_tools() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 400}], "tools": []}
    assert 100 < compare.request_tokens(body) == compare.request_tokens(body | {"model": "y" * 400}) < 120
    assert compare.request_tokens({"instructions": "x" * 400, "input": []}) > 100


def test_the_table_has_ratios_to_crow_in_the_same_round_and_names_who_is_missing() -> None:
    found = {
        "crow": compare.Measured("1.0", [{"start": 100.0, "tokens": 2000}, {"start": 300.0, "tokens": 2000}]),
        "fast": compare.Measured("2.0", [{"start": 50.0, "tokens": 8000}, {"start": 150.0}]),
        "odd": compare.Measured("", [{}, {"start": 6000.0}]),
        "dead": compare.Measured("3", [{}, {}]),
    }
    text = compare.text(found, datetime.date(2026, 3, 1), [0.1, 99.0])
    lines = text.strip().splitlines()
    assert lines[0].startswith("2026-03-01, 2 rounds, ")
    assert lines[0].endswith("load average 0.1 to 99.0. The machine was busy, so only the ratios count.")
    assert [[each.strip() for each in line.split("|")[1:-1]] for line in lines[4:7]] == [
        ["crow 1.0", "200", "-", "-", "-", "-", "-", "2,000"],
        ["fast 2.0", "100 (0.5 ×)", "-", "-", "-", "-", "-", "8,000 (4.0 ×)"],
        ["odd", "6,000 (20.0 ×)", "-", "-", "-", "-", "-", "-"],
    ]
    assert lines[-1] == "Not measured, because no session began: dead."
    assert "busy" not in compare.text(found, datetime.date(2026, 3, 1), [0.0])


def test_the_page_begins_with_the_comparison() -> None:
    page = (ROOT / "BENCHMARKS.md").read_text("utf-8")
    assert write.written(page, "", compare.BEGIN, compare.END).count(compare.BEGIN + compare.END) == 1
    assert page.index(compare.BEGIN) < page.index("|") < page.index("## Figures")


def test_questions_of_an_agent_are_allowed_and_other_requests_refused() -> None:
    options = [{"optionId": "no", "kind": "reject_once"}, {"optionId": "yes", "kind": "allow_once"}]
    asked = {"id": 1, "method": "session/request_permission", "params": {"options": options}}
    assert client.answer(asked) == {"result": {"outcome": {"outcome": "selected", "optionId": "yes"}}}
    asked["params"] = {"options": options[:1]}
    assert client.answer(asked) == {"result": {"outcome": {"outcome": "cancelled"}}}
    assert client.answer({"id": 2, "method": "fs/read_text_file", "params": {}})["error"]["code"] == -32601


def posted(url: str, body: object) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(("path", "key"), [("chat/completions", "messages"), ("responses", "input")])
def test_the_endpoint_streams_and_calls_tools_in_both_apis(path: str, key: str, tmp_path: Path) -> None:
    with endpoint(tmp_path) as fake:
        asked = {"role": "user", "content": prompt(tokens=2, calls=1, tool="shell", arguments='{"n": {i}}')}
        url, result = f"{fake.base_url}/{path}", {"role": "tool", "content": "ok"}
        if key == "input":
            result = {"type": "function_call_output", "output": "ok"}
        body = {key: [asked], "tools": [{}, {}]}
        called, told = posted(url, body), posted(url, {key: [asked, result]})
        served, later = fake.wait(), fake.wait()
    assert (served.tools, later.tools, later.result_chars) == (2, 0, 2)
    assert json.loads((tmp_path / f"{served.id}.json").read_bytes()) == body
    assert '"{\\"n\\": 1}"' in called
    assert "t0 " not in called
    assert '"t0 "' in told
    assert '"t1 "' in told
    assert "shell" not in told
