"""`crow chat --connect` in a pseudo terminal: through a real `crow serve`, and with hostile servers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crow.bridge.loop import Bridge
from crow.bridge.websocket import Address
from crow.terminal.remote import RemoteConnection
from tests.support.fake_endpoint import Gate, Reply, calls, chunk, sse, text, usage
from tests.support.fake_server import Connection, FakeServer, Message
from tests.support.terminal import Program, Shell, Terminal

ENTER, CTRL_C, CTRL_D, ESCAPE = "\r", "\x03", "\x04", "\x1b"
READY = "\x1b[?2004h"
"""The line editor asks for marked pastes when it begins to read keys."""


@contextmanager
def serving(shell: Shell, *options: str) -> Iterator[tuple[Program, str]]:
    """A `crow serve` on a Unix socket, with the home of the shell, and its address."""
    path = shell.place.parent / "s.sock"
    with shell.start("serve", "--listen", str(path), *options) as server:
        assert server.stderr is not None
        log = iter(server.stderr.readline, b"")
        assert any(b"The server listens" in line for line in log), "the server has ended"
        reader = threading.Thread(target=lambda: list(log), daemon=True)
        reader.start()
        try:
            yield server, str(path)
        finally:
            server.kill()
            reader.join(60)  # nobody may read a pipe that is being closed


def unstyled(terminal: Terminal) -> str:
    """What a terminal shows, without the codes of styles."""
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.shown)


def elsewhere(shell: Shell) -> dict[str, str]:
    """The environment of a client that has nothing of the server."""
    home = shell.place.parent / "client"
    home.mkdir(exist_ok=True)
    return {"CROW_HOME": str(home), "CROW_MODEL": "", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}


def held(*pieces: str) -> tuple[Reply, Gate]:
    """An answer whose last piece waits until the gate is open."""
    gate, *first = Gate(), *(sse(chunk({"role": "assistant", "content": piece}), done=False) for piece in pieces[:-1])
    return Reply(steps=(*first, gate, sse(chunk({"content": pieces[-1]}), chunk(finish="stop"), usage()))), gate


def test_a_chat_elsewhere_asks_lists_rewinds_and_continues(shell: Shell) -> None:
    write = calls(("write_file", {"path": "a.txt", "content": "hello\n"}))
    shell.endpoint.script(write, text("Done."), text("Again."), text("Fresh."))
    (shell.place / "note.txt").write_text("secret of the workspace")
    env = elsewhere(shell)
    with serving(shell) as (_, address):
        with shell.in_terminal("chat", "--session", "work", "--connect", address, **env) as terminal:
            terminal.wait_for(READY)
            terminal.type(f"read @note.txt{ENTER}")
            terminal.wait_for("@ attaches no files here")
            terminal.wait_for("stop the turn")
            terminal.type("y")
            terminal.wait_for("Done.")
            terminal.wait_for(READY)
            terminal.type(f"second{ENTER}")
            terminal.wait_for("Again.")
            terminal.wait_for(READY)
            terminal.type(f"/rewind{ENTER}")
            terminal.wait_for("2) second")
            terminal.type(f"2{ENTER}")
            terminal.wait_for("Now before prompt 2")
            terminal.wait_for(READY)
            terminal.type(f"/new{ENTER}")
            terminal.wait_for("is now the alias")
            terminal.wait_for(READY)
            terminal.type(f"third{ENTER}")
            terminal.wait_for("Fresh.")
            terminal.wait_for(READY)
            terminal.type(f"/session{ENTER}")
            terminal.wait_for("1) ")
            terminal.type(f"1{ENTER}")
            terminal.wait_for("is now the alias")
            terminal.wait_for(READY)
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
            whole = re.sub(r"\s", "", unstyled(terminal))  # a long path is broken anywhere
            back = re.search(r"Comebackwith:crowchat--connect'\S+?'--session(crow-[0-9a-f]{24})", whole)
            assert back is not None
        assert (shell.place / "a.txt").read_text() == "hello\n"
        with shell.in_terminal("chat", "--session", back[1][:16], "--connect", address, "--plain", **env) as terminal:
            terminal.wait_for("You: /new")
            terminal.wait_for("You: ")
    assert "secret of the workspace" not in shell.asked(0)
    assert not list((shell.place.parent / "client").glob("*.db")), "the client stores no sessions"


def test_an_answer_goes_on_after_the_server_was_killed_and_nothing_is_lost_or_twice(shell: Shell) -> None:
    slow, gate = held("The first half ", "never arrives.")
    shell.endpoint.script(slow, text("The second answer."))
    with serving(shell) as (server, address):
        terminal_of = shell.in_terminal("chat", "--connect", address, **elsewhere(shell))
        with terminal_of as terminal:
            terminal.wait_for(READY)
            terminal.type(f"begin{ENTER}")
            terminal.wait_for("The first half")
            server.send_signal(signal.SIGKILL)
            server.wait(60)
            terminal.wait_for("Reconnecting to the server")
            terminal.type(f"go on{ENTER}")
            terminal.wait_for("queued: go on")
            with serving(shell):
                terminal.wait_for("was interrupted")
                terminal.wait_for(READY)
                terminal.wait_for("go on")  # the turn did not end by itself, so the queued text stands in the prompt
                terminal.type(ENTER)
                terminal.wait_for("The second answer.")
                terminal.wait_for(READY)
                terminal.type(CTRL_D)
                assert terminal.wait() == 0
            gate.open()
    assert terminal.shown.count("The first half") == 1
    assert terminal.shown.count("The second answer.") == 1
    assert [json.loads(shell.asked(number))[-1]["content"] for number in (0, 1)] == ["begin", "go on"]


def test_a_prompt_of_another_client_is_shown_and_asked_about_while_a_line_is_typed(shell: Shell) -> None:
    write = calls(("write_file", {"path": "a.txt", "content": "hello\n"}))
    shell.endpoint.script(write, text("One line", " without an end"), text("Then this."))
    env = elsewhere(shell)
    with serving(shell) as (_, address):
        options = ("--session", "shared", "--connect", address)
        with (
            shell.in_terminal("chat", *options, **env) as first,
            shell.in_terminal("chat", "--plain", *options, **env) as plain,
        ):
            first.wait_for(READY)
            plain.wait_for("You: ")
            with shell.in_terminal("chat", *options, **env) as watching:
                watching.wait_for(READY)
                watching.type("half a line")
                watching.wait_for("line")
                first.type(f"write it{ENTER}")
                watching.wait_for("> write it")
                watching.wait_for("You were typing. Enter: answer this question")
                plain.wait_for("You: write it")
                plain.wait_for("Type ")  # it asks, too, unless somebody has answered
                watching.type("y")
                watching.type(ENTER)
                watching.wait_for("stop the turn")
                watching.type("y")
                watching.wait_for("One line without an end")
                watching.wait_for("half a line")
            first.wait_for("One line without an end")
            plain.wait_for("One line without an end")
            plain.wait_for("You: ")
            plain.type(f"and now{ENTER}")
            plain.wait_for("Then this.")


def test_what_cannot_work_elsewhere_is_said_before_connecting(shell: Shell) -> None:
    for arguments, words in (
        (("--connect", "http://x", "--plain"), "starts with http://; expected ws://, wss:// or the path of a socket."),
        (("--connect", "no.sock"), "there is no such socket"),
        (("--connect", "no.sock", "--base-url", "http://x"), "the settings of the server apply"),
        (("--connect", "ws://192.0.2.1/acp", "--token-file", "token"), "The token would travel to ws://192.0.2.1/acp"),
    ):
        token = shell.place / "token"
        token.write_text("crow_x")
        token.chmod(0o600)
        with shell.in_terminal("chat", *arguments, **elsewhere(shell)) as terminal:
            assert terminal.wait() == 2
            assert words in " ".join(terminal.shown.split())


class HostileServer(FakeServer):
    """A server that sends what it likes: `messages` before the answer to a method, and `results` as the answers of
    methods. A result may be a function of the request. A text is the message of an error."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.messages: dict[str, list[Message | bytes]] = {}
        self.results: dict[str, Any] = {}

    def _handle(self, connection: Connection, data: bytes) -> None:
        message = json.loads(data)
        method, request_id = message.get("method"), message.get("id")
        if method == "session/prompt" or method in self.results:
            self.received.append(message)
            for each in self.messages.get(method, ()):
                connection.frame(1, each) if isinstance(each, bytes) else connection.send(each)
            result = self.results.get(method, {"stopReason": "end_turn"})
            result = result(message) if callable(result) else result
            if isinstance(result, str):
                connection.send({"id": request_id, "error": {"code": -32603, "message": result}})
            elif result is not None:
                connection.send({"id": request_id, "result": result})
            return
        super()._handle(connection, data)


@contextmanager
def hostile(shell: Shell) -> Iterator[HostileServer]:
    """A hostile server in a thread. Its socket is `shell.place.parent / "h.sock"`."""
    server, ready, ended = HostileServer(shell.place.parent / "h.sock"), threading.Event(), threading.Event()

    async def serve() -> None:
        async with server:
            ready.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        ended.set()
        thread.join(60)


ATTACK = "\x1b]0;owned\x07\x1b[2J\u202e\x9b2J\x08\r"


def update(**members: Any) -> Message:
    return {"method": "session/update", "params": {"sessionId": "s1", "update": members}}


def chunk_of(words: Any) -> Message:
    return update(sessionUpdate="agent_message_chunk", messageId="m", content={"type": "text", "text": words})


OPTIONS = [{"optionId": ATTACK, "name": f"Allow{ATTACK}", "kind": "allow_once"}]
CALL = {"toolCallId": "t", "title": f"`rm`{ATTACK}", "kind": "edit"}
DIFF = {"type": "diff", "path": f"/etc/x{ATTACK}", "oldText": f"a{ATTACK}", "newText": f"b{ATTACK}\n"}


@pytest.mark.parametrize("look", [(), ("--plain",)], ids=["styled", "plain"])
def test_a_hostile_server_writes_no_control_characters_and_reads_no_files(shell: Shell, look: tuple[str, ...]) -> None:
    with hostile(shell) as server:
        server.results = {
            "session/new": {
                "sessionId": "s1",
                "configOptions": [{"id": "model", "currentValue": f"m{ATTACK}", "options": [{"value": f"m{ATTACK}"}]}],
            },
            "session/list": {"sessions": [{"sessionId": ATTACK, "title": ATTACK, "cwd": ATTACK, "updatedAt": "?"}]},
        }
        server.messages["session/prompt"] = [
            {"id": 1, "method": "fs/read_text_file", "params": {"sessionId": "s1", "path": "/etc/passwd"}},
            {"id": 2, "method": "terminal/create", "params": {"sessionId": "s1", "command": "id"}},
            {"id": 3, "method": "session/request_permission", "params": {"sessionId": "s1"}},
            {"id": 4, "method": "elicitation/create", "params": {"mode": "url", "url": "file:///x", "message": ATTACK}},
            *(b"{", b"[]", b'"x"', b'{"jsonrpc":"2.0","method":7}', b"[" * 100_000, b"{" * 9_000_000, b"\x1b[2J"),
            {"id": 99, "result": {}},
            update(sessionUpdate="usage_update", used="many", size=[]),
            update(sessionUpdate="plan", entries=[{"content": ATTACK, "status": ATTACK}]),
            update(sessionUpdate="notice", title=ATTACK, description=ATTACK, severity=[]),
            update(sessionUpdate="available_commands_update", availableCommands=[{"name": 5, "description": ATTACK}]),
            update(sessionUpdate="current_mode_update", currentModeId={"x": ATTACK}),
            update(sessionUpdate="tool_call", **CALL, content=[DIFF], status="pending"),
            update(sessionUpdate="tool_call_update", toolCallId="t", status="completed"),
            update(sessionUpdate="tool_call_update", toolCallId="t", title="x" * 3_000_000, status="failed"),
            chunk_of({"not": "text"}),
            chunk_of(f"Shown{ATTACK} here. "),
            {"id": 5, "method": "session/request_permission"}
            | {"params": {"sessionId": "s1", "toolCall": CALL | {"content": [DIFF]}, "options": OPTIONS}},
            chunk_of("The end."),
        ]
        address = str(shell.place.parent / "h.sock")
        with shell.in_terminal("chat", *look, "--connect", address, **elsewhere(shell)) as terminal:
            terminal.wait_for("You: " if look else READY)
            terminal.type(f"begin{ENTER}")
            terminal.wait_for("does not understand")
            terminal.wait_for("Allow this?")
            terminal.wait_for("y, then Enter" if look else "stop the turn")
            terminal.type(f"y{ENTER}" if look else "y")
            terminal.wait_for("The end.")
            terminal.wait_for("You: " if look else READY)
            terminal.type(f"{CTRL_D}")
            assert terminal.wait() == 0
        answers = {each["id"]: each for each in server.received if "method" not in each}
        assert [answers[number]["error"]["code"] for number in (1, 2, 3)] == [-32601, -32601, -32602]
        assert answers[4]["result"] == {"action": "cancel"}
        assert answers[5]["result"]["outcome"] == {"outcome": "selected", "optionId": ATTACK}
        asked = [each["params"]["prompt"] for each in server.received if each.get("method") == "session/prompt"]
        assert asked == [[{"type": "text", "text": "begin"}]]
    shown = terminal.shown
    assert not {"\x1b]0;", "\x1b[2J", "\u202e", "\x9b"} & set(re.findall(r"\x1b\]0;|\x1b\[2J|\u202e|\x9b", shown))
    assert not look or "\x1b" not in shown


def test_an_answer_of_an_unexpected_form_ends_the_chat_with_a_sentence(shell: Shell) -> None:
    with hostile(shell) as server:
        server.results = {"session/new": {"sessionId": [ATTACK]}}
        address = str(shell.place.parent / "h.sock")
        for result in ({}, {"sessionId": "s1", "configOptions": 5}):
            server.results = {"session/new": result}
            with shell.in_terminal("chat", "--connect", address, **elsewhere(shell)) as terminal:
                assert terminal.wait() == 1
                assert "sent an answer that crow does not understand" in " ".join(terminal.shown.split())
                assert "Traceback" not in terminal.shown


def test_ctrl_c_leaves_a_server_that_answers_nothing_and_floods(shell: Shell) -> None:
    with hostile(shell) as server:
        server.results = {"session/new": {"sessionId": "s1"}, "session/prompt": None}
        server.messages["session/prompt"] = [chunk_of("[*_`" * 20 + "\n")] * 20_000
        address = str(shell.place.parent / "h.sock")
        with shell.in_terminal("chat", "--connect", address, **elsewhere(shell)) as terminal:
            terminal.wait_for(READY)
            terminal.type(f"begin{ENTER}")
            terminal.wait_for("[*_")
            terminal.type(CTRL_C)
            terminal.wait_for("Cancelling")
            terminal.type(CTRL_C)
            terminal.wait_for("Come back with: crow chat --connect")
            assert terminal.wait() == 130


def test_a_run_elsewhere_streams_its_answer_and_reports_like_one_here(shell: Shell) -> None:
    first, retry = text("It is ", "done."), text('{"ok": true}')
    shell.endpoint.script(calls(("write_file", {"path": "a.txt", "content": "hello\n"})), first, text("no"), retry)
    (shell.place / "note.txt").write_text("a note of this machine")
    (shell.place / "schema.json").write_text('{"type": "object"}')
    shell_here, env = shell.env, elsewhere(shell)
    with serving(shell) as (_, address):
        shell.env = shell_here | env
        run = ("run", "--connect", address, "--session", "work")
        note = ("--file", "note.txt", "--mode", "accept-edits")
        code, out, err = shell.crow(*run, "write it", *note)
        assert (code, out) == (0, "It is done.\n")
        assert 'No session "work" exists' in err
        code, out, _ = shell.crow(*run, "is it?", "--schema", "schema.json", "--json")
    result = json.loads(out.splitlines()[-1])["result"]
    assert (shell.place / "a.txt").read_text() == "hello\n"
    assert "a note of this machine" in shell.asked(0)
    assert (code, result["json"], result["stopReason"], result["exitCode"]) == (0, {"ok": True}, "end_turn", 0)
    assert result["usage"]["inputTokens"] > 0
    assert result["receipt"] is None
    assert "write it" in shell.asked()


def test_a_run_elsewhere_refuses_calls_without_a_terminal_and_says_what_could_allow_them(shell: Shell) -> None:
    shell.endpoint.script(calls(("write_file", {"path": "a.txt", "content": "hello\n"})), text("I could not."))
    shell_here, env = shell.env, elsewhere(shell)
    with serving(shell) as (_, address):
        shell.env = shell_here | env
        code, _, err = shell.crow("run", "--connect", address, "write it")
    assert code == 4
    assert "a rule in the server's settings can allow it" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--allow", "fetch"), "--allow cannot be used with --connect"),
        (("--max-steps", "3"), "--max-steps cannot be used with --connect"),
        (("--require-verified",), "--require-verified cannot be used with --connect"),
        (("--base-url", "http://127.0.0.1:1/v1"), "--base-url cannot be used with --connect"),
        (("--file", "large.bin"), "--file attaches only small text files with --connect"),
        (("--mode", "wild"), '--mode is "wild"'),
    ],
)
def test_what_a_run_elsewhere_cannot_do_is_said_before_connecting(
    shell: Shell, options: tuple[str, ...], words: str
) -> None:
    (shell.place / "large.bin").write_bytes(b"\0")
    code, out, err = shell.crow("run", "--connect", "no.sock", "hello", *options)
    assert (code, out) == (2, "")
    assert words in err


def test_a_run_says_that_its_server_was_killed_and_how_to_go_on(shell: Shell) -> None:
    slow, gate = held("half of it ", "and the rest.")
    shell.endpoint.script(slow, text("Carried on."))
    shell_here, env = shell.env, elsewhere(shell)
    with serving(shell) as (server, address):
        shell.env = shell_here | env
        with shell.start("run", "--connect", address, "go") as client:
            assert client.stdout is not None
            seen = b""
            while b"half of it" not in seen:
                seen += client.stdout.read(1)
            server.kill()
            server.wait(60)
            shell.env = shell_here
            with serving(shell):
                gate.open()
                seen += client.stdout.read()
                assert client.stderr is not None
                told = client.stderr.read().decode()
                assert client.wait(60) == 1
    assert seen.count(b"half of it") == 1
    assert "crow: reconnecting to the server\ncrow: connected again\n" in told
    assert "The turn of this prompt was interrupted" in told
    assert f"crow run --connect '{address}' --session crow-" in told


def test_an_error_at_a_command_is_shown_and_another_session_shows_only_its_own_history(shell: Shell) -> None:
    listed = [
        {"sessionId": name, "title": name, "cwd": "/", "updatedAt": "2026-11-01T00:00:00Z"} for name in ("s1", "s2")
    ]
    with hostile(shell) as server:
        server.results = {
            "session/new": {"sessionId": "s1", "configOptions": []},
            "session/list": {"sessions": listed[1:]},
            "session/load": {"configOptions": []},
            "session/close": {},
            "_session/prompts": "The database is locked.",
        }
        other = {"sessionId": "s2", "update": chunk_of("Mine.")["params"]["update"]}
        asked = {"sessionUpdate": "user_message_chunk", "messageId": "u", "content": {"type": "text", "text": "Whose?"}}
        server.messages["session/load"] = [
            {"method": "session/update", "params": {"sessionId": "s2", "update": asked}},
            {"method": "session/update", "params": other},
            chunk_of("Not mine."),
        ]
        address = str(shell.place.parent / "h.sock")
        with shell.in_terminal("chat", "--plain", "--connect", address, **elsewhere(shell)) as terminal:
            terminal.wait_for("You: ")
            terminal.type(f"/rewind{ENTER}")
            terminal.wait_for("The database is locked.")
            terminal.type(f"/session s2{ENTER}")
            terminal.wait_for("Mine.")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
    assert "Whose?" in terminal.shown
    assert "Not mine." not in terminal.shown


def test_shift_tab_skips_a_mode_that_the_server_refuses(shell: Shell) -> None:
    def set_mode(request: Message) -> Any:
        return "Mode auto is not available." if request["params"]["modeId"] == "auto" else {}

    option = {"id": "mode", "currentValue": "accept-edits", "options": []}
    with hostile(shell) as server:
        server.results = {
            "session/new": {"sessionId": "s1", "configOptions": [option]},
            "session/list": {"sessions": []},
            "session/set_mode": set_mode,
        }
        address = str(shell.place.parent / "h.sock")
        with shell.in_terminal("chat", "--connect", address, **elsewhere(shell)) as terminal:
            terminal.wait_for(READY)
            terminal.type("\x1b[Z")
            terminal.wait_for("plan")
            terminal.type("\x1b[Z")
            terminal.wait_for("ask")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
    asked = [each["params"]["modeId"] for each in server.received if each.get("method") == "session/set_mode"]
    assert asked == ["plan", "auto", "ask"]


class Answering:
    """A client that answers each question at once."""

    def __init__(self) -> None:
        self.asked = 0

    async def update(self, params: Any) -> None: ...

    async def ask_permission(self, params: Any) -> dict[str, Any]:
        self.asked += 1
        return {"outcome": {"outcome": "cancelled"}}

    async def elicit(self, params: Any) -> dict[str, Any]:
        raise NotImplementedError

    def connection_changed(self) -> None: ...

    async def warn(self, words: str) -> None: ...


async def test_a_question_is_asked_although_an_answered_one_with_the_same_id_was_withdrawn_late() -> None:
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    client, source = Answering(), asyncio.StreamReader()
    connection = RemoteConnection(client, Bridge(Address("/nowhere")), writer, None)
    tasks = [asyncio.create_task(each) for each in (connection.read(source), connection.dispatch())]

    async def send(**message: Any) -> None:
        source.feed_data(json.dumps({"jsonrpc": "2.0"} | message).encode() + b"\n")
        for _ in range(20):
            await asyncio.sleep(0)

    for _ in range(2):  # the ids of the next connection begin at 0 again
        await send(id=0, method="session/request_permission", params={})
        await send(method="$/cancel_request", params={"requestId": 0})
    source.feed_eof()
    await asyncio.gather(*tasks)
    assert client.asked == 2
    writer.close()
    theirs.close()
