"""No command writes text of an endpoint, an MCP server, a session or a file to a terminal as it came."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from crow.domain.text import safe
from tests.support.fake_endpoint import Recorded, Reply, calls, failing, text
from tests.support.terminal import Shell

CONTROLS = "x\x1b]52;c;aGk=\x07\x1b[2J\x1b[1A\x9b31m\x90q\x9c\x08\x7f\u202e\u2066\u200b\U000e0041\u2028y"
EVIL = f"{CONTROLS}\nFAKE: all is well\rFAKE"
"""It sets the clipboard, clears the screen, moves up, changes colours, reverses text and begins a line of its own."""

SERVER = str(Path(__file__).parents[1] / "tools" / "servers" / "evil.py")
CALM = {"TERM": "dumb"}
"""In this terminal, crow itself uses no escape sequences."""


def server(name: str, how: str) -> str:
    arguments = json.dumps(["-I", "-S", SERVER, how, json.dumps(EVIL)])
    return f"[mcp_servers.{name}]\ncommand = {json.dumps(sys.executable)}\nargs = {arguments}\nstart_timeout_s = 300\n"


@pytest.fixture
def hostile(shell: Shell) -> Shell:
    """A shell with a hostile endpoint, three hostile servers, and a session that a hostile model has filled."""
    tables = "".join(server(how, how) for how in ("lists", "refuses", "dies"))
    (shell.home / "config.toml").write_text(tables)
    evil: dict[str, Any] = {"id": f"model {EVIL}", "object": "model"}
    shell.endpoint.models = ["fake-model", evil]
    (shell.place / "evil.txt").write_text(EVIL)
    return shell


def check(shown: str, *, is_fake_line_allowed: bool = False) -> None:
    """Check what a command wrote to a terminal."""
    shown = shown.replace("\r\n", "\n")
    hidden = [line for line in shown.split("\n") if safe(line) != line]
    assert hidden == []
    if not is_fake_line_allowed:
        assert not re.search(r"^FAKE", shown, re.MULTILINE), shown


@pytest.mark.long
def test_checks_and_lists_escape_what_endpoints_and_servers_say(hostile: Shell) -> None:
    for arguments in (
        *(["doctor"], ["doctor", "--json"], ["models"], ["models", "--json"], ["mcp"], ["mcp", "list", "--json"]),
        *(["mcp", "test"], ["mcp", "test", "--json"], ["config"]),
    ):
        with hostile.in_terminal(*arguments, **CALM) as terminal:
            terminal.wait()
        assert terminal.shown.strip(), arguments
        check(terminal.shown, is_fake_line_allowed=arguments == ["models"])  # a cell of a table is wrapped


def test_errors_of_an_endpoint_are_escaped(hostile: Shell) -> None:
    (hostile.home / "config.toml").write_text("")
    hostile.endpoint.answer_with(failing(400, EVIL))
    for arguments in (["doctor"], ["run", "hi"], ["run", "--json", "hi"]):
        with hostile.in_terminal(*arguments, **CALM) as terminal:
            terminal.wait()
        check(terminal.shown)


def test_a_login_escapes_names_and_errors(hostile: Shell) -> None:
    hostile.endpoint.answer_with(failing(400, EVIL))
    with hostile.in_terminal("login", **CALM) as terminal:
        for question, typed in (("Endpoint", hostile.endpoint.base_url), ("Key", ""), ("Model", f"model {EVIL[:3]}")):
            terminal.wait_for(question)
            terminal.type(f"{typed}\n".replace("\x1b", ""))
        terminal.wait_for("Save anyway")
        terminal.type("n\n")
        terminal.wait_for("Endpoint [")
        terminal.type("\x04")
        terminal.wait()
    check(terminal.shown)


@pytest.mark.long
def test_a_session_of_a_hostile_model_is_escaped_wherever_it_is_shown(hostile: Shell) -> None:
    (hostile.home / "config.toml").write_text("")
    script = [calls(("read_file", {"path": "evil.txt"}), (f"tool {EVIL}", {EVIL: EVIL})), text(f"crows {EVIL}")]
    hostile.endpoint.script(*script)
    with hostile.in_terminal("run", "--session", "work", f"Say {EVIL[-4:]}", **CALM) as terminal:
        assert terminal.wait() == 0
    check(terminal.shown, is_fake_line_allowed=True)
    hostile.endpoint.script(*script)
    with hostile.in_terminal("run", "--session", "work", "--json", "again", **CALM) as terminal:
        assert terminal.wait() == 0
    check(terminal.shown)
    _, exported, _ = hostile.crow("sessions", "export", "work")
    assert EVIL[-4:] in exported or "FAKE" in exported
    titled = re.sub(r'"title": ?"[^"]*"', lambda _: f'"title": {json.dumps(EVIL)}', exported)
    (hostile.place / "evil.jsonl").write_text(titled)
    (hostile.place / "bad.jsonl").write_text(f"{EVIL}\n")
    for arguments in (
        *(["list"], ["list", "--json"], ["show", "work"], ["show", "work", "--json"], ["search", "crows"]),
        *(["search", "crows", "--json"], ["export", "work"], ["export", "work", "--format", "markdown"]),
        *(["export", "work", "--format", "html"], ["show", "work", "--call", "call_5_0"], ["stats"]),
        *(["show", "work", "--context"], ["show", "work", "--context", "--json"], ["rename", "work", EVIL]),
        *(["import", "evil.jsonl"], ["import", "bad.jsonl"], ["list"], ["show", EVIL], ["tag", "work", f"+{EVIL}"]),
    ):
        with hostile.in_terminal("sessions", *arguments, **CALM) as terminal:
            terminal.wait()
        check(terminal.shown, is_fake_line_allowed=arguments[0] in ("show", "export"))


def test_recordings_are_escaped(hostile: Shell) -> None:
    hostile.env["CROW_TRACE"] = str(hostile.place / "trace.jsonl")
    hostile.endpoint.script(text(EVIL))
    assert hostile.crow("run", "hi")[0] == 0
    with (hostile.place / "trace.jsonl").open("a") as file:
        file.write(json.dumps({"from": "agent", "message": {"jsonrpc": "2.0", "method": EVIL, "params": {}}}) + "\n")
        file.write(EVIL)
    del hostile.env["CROW_TRACE"]
    with hostile.in_terminal("trace", "show", "trace.jsonl", **CALM) as terminal:
        terminal.wait()
    assert "FAKE" in terminal.shown
    check(terminal.shown)


def test_a_chat_escapes_what_endpoints_and_servers_say(hostile: Shell) -> None:
    """The endpoint answers, calls the tools of the servers and one that does not exist, and refuses the next prompt.
    The user asks for everything that lists names and texts of others. Only answers and results of tools have lines
    of their own."""
    answer = EVIL.replace("FAKE", "SAID")

    def call_all(request: Recorded) -> Reply:
        offered = [tool["function"]["name"] for tool in request.body["tools"]]
        theirs = [name for name in offered if name.startswith("lists__")]
        return calls(*((name, {EVIL: EVIL}) for name in (*theirs, f"tool {EVIL}")), say=f"I call {answer}")

    hostile.endpoint.script(call_all, text(f"Once {answer}"))
    hostile.endpoint.answer_with(failing(400, EVIL))
    typed = "".join(char for char in EVIL if char.isprintable())
    asked = (
        *(f"/title {typed}", "/title", "/context", "/mcp", "/mcp restart", "/history", "/tree", "/model", "/rewind"),
        *("/permissions", "/show call_5_0", "/search Once", "/diff", "again"),
    )
    with hostile.in_terminal("chat", "--plain", "--session", "work", **CALM) as terminal:
        terminal.wait_for("You: ")
        terminal.type("hi\n")
        for _ in range(2):
            terminal.wait_for("Allow this?")
            terminal.wait_for("Type y")
            terminal.type("y\n")
        terminal.wait_for("Once x")
        for line in asked:
            terminal.wait_for("You: ")
            terminal.type(f"{line}\n")
            if line in ("/model", "/rewind"):
                terminal.wait_for("Enter changes nothing: ")
                terminal.type("\n")
        terminal.wait_for("does not accept")
        terminal.wait_for("You: ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    check(terminal.shown, is_fake_line_allowed=True)
    before, results, after = re.split(r"(?s)(^Failed: .*?)^Once ", terminal.shown, maxsplit=1, flags=re.MULTILINE)
    assert "FAKE: all is well" in results
    check(before)
    check(after)
    with hostile.in_terminal("chat", "--plain", "--continue", **CALM) as terminal:
        terminal.wait_for("You: ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    check(terminal.shown)
