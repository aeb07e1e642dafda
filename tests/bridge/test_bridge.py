"""A bridge between an editor and a server: what passes, what a lost connection changes, and how it ends."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import runpy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from crow.bridge import messages
from crow.bridge.journal import Journal
from crow.bridge.loop import MAX_UNSENT_BYTES
from tests.support.bridged import BridgedEditor, QuickTimes
from tests.support.fake_server import Connection, FakeServer


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeServer]:
    async with FakeServer(tmp_path / "crow.sock") as server:
        yield server


def spoken(word: str, count: int) -> str:
    return "".join(f"{word}{number} " for number in range(count))


async def test_messages_pass_unchanged_in_both_directions(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        session = await editor.new_session()
        assert await editor.prompt(session, "3 twig") == {
            "jsonrpc": "2.0",
            "id": 3,
            "result": {"stopReason": "end_turn"},
        }
        assert editor.text(session) == spoken("twig", 3)
        odd = b'{"jsonrpc" :"2.0","id":"\\u00e4 \xc3\xa9", "method":"echo","params":{"a" : [1.50,  "\\ud83d"]}}'
        await editor.raw(odd + b"\r\n\n  \n")
        await editor.until(lambda: json.loads(editor.lines[-1]).get("id") == "ä é")
        assert server.received[-1] == json.loads(odd)
        server.last.raw(b"\x81\x15" + b'{"a":\n\r 1, "b": "\xc3\xa9"}')
        await editor.until(lambda: editor.lines[-1] == b'{"a":   1, "b": "\xc3\xa9"}')


@pytest.mark.parametrize(("option", "is_used"), [("array_hook", True), ("an_option_of_a_later_python", False)])
def test_a_json_scanner_with_more_options_does_not_stop_the_bridge(
    monkeypatch: pytest.MonkeyPatch, option: str, is_used: bool
) -> None:
    scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

    def make_scanner(options: object) -> object:
        getattr(options, option)
        return scan

    monkeypatch.setattr("_json.make_scanner", make_scanner)
    module = runpy.run_path(inspect.getfile(messages))
    assert (module["_scan"] is scan) == is_used
    assert module["parse"](b'{"id": [1, 2.5, "\xc3\xa9"]}') == {"id": [1, 2.5, "é"]}


@pytest.mark.long
async def test_a_large_message_passes_and_one_over_the_limit_is_refused(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        await editor.request("initialize", protocolVersion=1)
        text = "é" * 4_000_000
        assert (await editor.request("echo", text=text))["result"]["text"] == text
        await editor.raw(b"x" * (33 << 20) + b"\n")
        await editor.until(lambda: editor.log[-1]["id"] is None)
        assert editor.log[-1]["error"]["code"] == -32600
        await editor.raw(b'{"jsonrpc":"2.0","id":9,"method":"\xff"}\n')
        await editor.until(lambda: editor.log[-1].get("error", {}).get("code") == -32700)
        assert (await editor.request("echo"))["result"] == {}


async def test_pieces_of_messages_and_control_frames_between_them_are_joined(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        await editor.request("initialize", protocolVersion=1)
        server.last.pongs = False  # an answer to a ping would come between the bytes of a frame
        for piece in (b'\x01\x03{"a', b"\x89\x02hi", b'\x00\x02":', b"\x80\x02" + b"1}"):
            for byte in piece:
                server.last.raw(bytes([byte]))
                await asyncio.sleep(0)
        await editor.until(lambda: editor.lines[-1] == b'{"a":1}')


async def test_a_cut_connection_loses_nothing_and_shows_nothing_twice(server: FakeServer) -> None:
    server.piece_s = 0.001
    async with BridgedEditor(server.path) as editor:
        session = await editor.new_session()
        answer = await editor.start_prompt(session, "200 twig")
        for place in (20, 80, 150):
            await editor.until(lambda place=place: f"twig{place} " in editor.text(session))
            server.drop()
        assert (await answer)["result"] == {"stopReason": "end_turn"}
        assert editor.text(session) == spoken("twig", 200)
        assert server.prompts == {"200 twig": 1}
        assert len(server.connections) == 4
        assert {connection.id for connection in server.connections} == {server.last.id}


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_connection_that_breaks_before_the_second_answer_is_restored(
    server: FakeServer, *, is_asked: bool
) -> None:
    async with BridgedEditor(server.path) as editor:
        assert "result" in await editor.request("initialize", protocolVersion=1)
        if is_asked:
            server.last.send = lambda message: None  # type: ignore[method-assign]
            opened = await editor.start("session/new", cwd="/", mcpServers=[])
            await server.until(lambda: server.received[-1]["method"] == "session/new")
            server.drop()
        else:
            server.drop()
            opened = await editor.start("session/new", cwd="/", mcpServers=[])
        session = (await opened)["result"]["sessionId"]
        assert "result" in await editor.prompt(session, "1 twig")
        assert [each["method"] for each in server.received[-3:]] == ["initialize", "session/new", "session/prompt"]


async def test_what_the_editor_sends_meanwhile_waits_for_the_server(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        session = await editor.new_session()
        await server.stop_listening()
        answers = [await editor.start_prompt(session, f"1 {word}") for word in ("a", "b", "c")]
        await asyncio.sleep(0.05)
        await server.listen_again()
        assert [("result" in await answer) for answer in answers] == [True] * 3
        assert editor.text(session) == "a0 b0 c0 "
        assert server.prompts == {"1 a": 1, "1 b": 1, "1 c": 1}


async def test_a_turn_that_a_restart_ended_is_answered_with_an_error_and_not_run_again(server: FakeServer) -> None:
    server.piece_s = 0.005
    async with BridgedEditor(server.path) as editor:
        session = await editor.new_session()
        answer = await editor.start_prompt(session, "1000 twig")
        await editor.until(lambda: "twig9 " in editor.text(session))
        server.restart()
        error = (await answer)["error"]
        assert (error["code"], "restarted" in error["message"]) == (-32603, True)
        assert server.prompts == {"1000 twig": 1}
        shown = editor.text(session)
        assert shown == spoken("twig", shown.count(" "))
        assert "result" in await editor.prompt(session, "1 more")


async def test_a_request_whose_effect_is_unknown_is_answered_with_an_error(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        session = await editor.new_session()
        server.piece_s = 30
        await editor.start_prompt(session, "1 twig")
        await editor.until(lambda: True)
        fork = asyncio.create_task(editor.request("session/prompt_twice", sessionId=session))
        assert "result" in await fork
        server.last.pongs = False
        server.last.send = lambda message: None  # type: ignore[method-assign]
        lost = await editor.start("session/fork", sessionId=session)
        listed = await editor.start("session/list")
        await server.until(lambda: server.received[-1]["method"] == "session/list")
        server.drop()
        assert "before the server answered session/fork" in (await lost)["error"]["message"]
        assert "result" in await listed


async def test_a_permission_is_shown_once_and_its_answer_is_not_lost(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        editor.answers_asks = False
        session = await editor.new_session()
        answer = await editor.start_prompt(session, "ask")
        await editor.until(editor.asks)
        for _ in range(3):
            count = len(server.connections)
            server.drop()
            await server.until(lambda count=count: len(server.connections) > count)  # type: ignore[misc]
        outcome = {"outcome": {"outcome": "selected", "optionId": "no"}}
        await editor.send({"id": editor.asks()[0]["id"], "result": outcome})
        assert "result" in await answer
        assert '"optionId": "no"' in editor.text(session)
        assert len(editor.asks()) == 1


async def test_another_question_about_the_same_call_is_not_answered_with_an_old_answer(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        session = await editor.new_session()
        params = {"sessionId": session, "toolCall": {"toolCallId": "t"}, "options": []}
        server.last.send({"id": 0, "method": "session/request_permission", "params": params})
        await editor.until(editor.asks)
        assert "result" in await editor.request("session/list")
        server.drop()
        assert "result" in await editor.request("session/list")
        server.last.send({"id": 0, "method": "session/request_permission", "params": params | {"options": [1]}})
        await editor.until(lambda: len(editor.asks()) == 2)
        server.last.send({"id": 1, "method": "session/request_permission", "params": params | {"options": [1]}})
        await editor.until(lambda: len(editor.asks()) == 3)


def test_the_answer_to_an_open_question_answers_no_other_question_about_the_same_call() -> None:
    line = Line()
    journal = line.journal
    params = {"sessionId": "s", "toolCall": {"toolCallId": "t"}, "options": []}
    asked = {"jsonrpc": "2.0", "id": 0, "method": "session/request_permission", "params": params}
    journal.server_sent(json.dumps(asked).encode())
    line.restart()
    journal.to_editor.clear()
    other = asked | {"params": params | {"options": [1]}}
    journal.server_sent(json.dumps(other).encode())
    (shown,) = map(json.loads, journal.to_editor)
    assert shown["params"] == other["params"]
    allowed = {"jsonrpc": "2.0", "id": 0, "result": {"outcome": {"outcome": "selected", "optionId": "allow_once"}}}
    journal.editor_sent(json.dumps(allowed).encode())
    assert journal.to_server == []
    journal.editor_sent(json.dumps(allowed | {"id": shown["id"]}).encode())
    assert [json.loads(each) for each in journal.to_server] == [allowed]


async def test_a_permission_that_is_not_asked_again_is_withdrawn(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        editor.answers_asks = False
        session = await editor.new_session()
        await editor.start_prompt(session, "ask")
        await editor.until(editor.asks)
        server.restart()
        await editor.until(lambda: editor.log[-1].get("method") == "$/cancel_request")
        assert editor.log[-1]["params"] == {"requestId": editor.asks()[0]["id"]}


async def test_a_lost_load_continues_where_it_broke(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as first:
        session = await first.new_session()
        await first.prompt(session, "5 twig")
    async with BridgedEditor(server.path) as editor:
        await editor.request("initialize", protocolVersion=1)
        server.last.send = cut_after(server, 4)  # type: ignore[assignment, method-assign]
        assert "result" in await editor.request("session/load", sessionId=session, cwd="/", mcpServers=[])
        assert editor.text(session) == spoken("twig", 5)


def cut_after(server: FakeServer, count: int) -> Callable[[dict[str, object]], None]:
    """A `send` that cuts the connection after some messages."""
    connection = server.last
    sent: list[object] = []

    def send(message: dict[str, object]) -> None:
        if len(sent) < count:
            sent.append(message)
            connection.frame(1, json.dumps({"jsonrpc": "2.0"} | message).encode())
        else:
            connection.end()

    return send


async def test_a_gap_is_said(server: FakeServer) -> None:
    server.piece_s = 0.005
    async with BridgedEditor(server.path) as editor:
        session = await editor.new_session()
        answer = await editor.start_prompt(session, "50 twig")
        await editor.until(lambda: "twig9 " in editor.text(session))
        server.loses_cursors = True
        server.drop()
        assert "result" in await answer
        assert editor.text(session).count("are missing here") == 1


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "404 Not Found", "200 OK"])
async def test_a_server_that_refuses_ends_the_bridge_with_words(server: FakeServer, status: str) -> None:
    server.status = status
    async with BridgedEditor(server.path) as editor:
        error = (await editor.request("initialize", protocolVersion=1))["error"]
        assert status[:3] in error["message"]
        assert await editor.ended() != 0


async def test_no_server_is_an_error_at_once(tmp_path: Path) -> None:
    async with BridgedEditor(tmp_path / "absent.sock") as editor:
        error = (await editor.request("initialize", protocolVersion=1))["error"]
        assert "no such socket" in error["message"]
        assert await editor.ended() == 2


async def test_a_server_that_stays_away_ends_the_bridge_with_an_error_for_each_request(server: FakeServer) -> None:
    class Impatient(QuickTimes):
        give_up = 0.3

    async with BridgedEditor(server.path, times=Impatient) as editor:
        session = await editor.new_session()
        server.piece_s = 30
        running = await editor.start_prompt(session, "1 twig")
        await server.stop_listening()
        waiting = await editor.start_prompt(session, "2 twig")
        for answer in (running, waiting):
            assert "No connection to crow for 0.3 s" in (await answer)["error"]["message"]
        assert await editor.ended() == 1


async def test_the_bridge_leaves_the_end_of_the_connection_to_the_server(tmp_path: Path) -> None:
    class Patient(QuickTimes):
        close = 60.0

    wrote = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        connection.pongs = False
        try:
            await connection.upgrade(lambda _: "c1")
            await connection.receive()
            connection.send({"id": 1, "result": {}})
            await connection.receive()
            assert await connection.closed_with == b"\x03\xe8"
            connection.frame(10, b"1" * (8 << 20))  # far more than a socket holds
            await writer.drain()
        except Exception as error:  # noqa: BLE001
            wrote.set_exception(error)
        else:
            wrote.set_result(True)
        finally:
            connection.end()

    async with (
        await asyncio.start_unix_server(serve, tmp_path / "s"),
        BridgedEditor(tmp_path / "s", times=Patient) as editor,
    ):
        await editor.request("initialize", protocolVersion=1)
        editor.close_stdin()
        assert await wrote
        assert await editor.ended() == 0


async def test_a_server_that_does_not_end_the_connection_does_not_keep_the_bridge(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        await connection.upgrade(lambda _: "c1")
        await connection.receive()
        connection.send({"id": 1, "result": {}})
        await closed.wait()
        connection.end()

    async with await asyncio.start_unix_server(serve, tmp_path / "s"):
        async with BridgedEditor(tmp_path / "s") as editor:
            await editor.request("initialize", protocolVersion=1)
            editor.close_stdin()
            assert await editor.ended() == 0
        closed.set()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\xf1\x00", "invalid WebSocket frame"),
        (b"\x81\x80abcd", "invalid WebSocket frame"),
        (b"\x89\x7e\x00\x80", "invalid WebSocket frame"),
        (b"\x80\x00", "invalid WebSocket frame"),
        (b"\x81\x7f" + (1 << 40).to_bytes(8, "big"), "more than 64 MiB"),
        (b"\x81\x02\xc3(", "not UTF-8"),
        (b"\x88\x01x", "invalid code"),
        (b"\x88\x02\x03\xee", "invalid code"),
        (b"\x88\x09\x03\xf0revoked", "revoked"),
        (b"\x88\x02\x03\xf0", "so crow does not connect again"),
    ],
)
async def test_a_broken_or_final_server_ends_the_bridge_with_words(server: FakeServer, sent: bytes, words: str) -> None:
    async with BridgedEditor(server.path) as editor:
        session = await editor.new_session()
        server.piece_s = 30
        answer = await editor.start_prompt(session, "1 twig")
        server.last.raw(sent)
        assert words in (await answer)["error"]["message"]
        assert await editor.ended() == 1
        assert len(server.connections) == 1


async def test_the_reason_of_the_server_is_read_before_a_failed_write_is_reported(server: FakeServer) -> None:
    class Hasty(QuickTimes):
        close = 0.0  # an editor that reads late still gets the reason

    async with BridgedEditor(server.path, times=Hasty) as editor:
        session = await editor.new_session()
        editor.pause()
        server.last.send({"method": "_x", "params": {"text": "x" * (MAX_UNSENT_BYTES + 1_000_000)}})
        while editor.bridge._may_read_server:  # noqa: ASYNC110  until it holds too many bytes for the editor
            await asyncio.sleep(0.001)
        server.last.raw(b"\x88\x09\x03\xf0revoked")
        server.last.stop_reading()
        answer = await editor.start_prompt(session, "1 twig")
        editor.resume()
        assert "revoked" in (await answer)["error"]["message"]
        assert await editor.ended() == 1
        assert len(server.connections) == 1


@pytest.mark.parametrize("code", [1000, 1001, 1011, 1012, 1013])
async def test_a_server_that_closes_for_a_while_is_found_again(server: FakeServer, code: int) -> None:
    async with BridgedEditor(server.path) as editor:
        session = await editor.new_session()
        server.last.close(code, "drain")
        assert "result" in await editor.prompt(session, "1 twig")
        assert len(server.connections) == 2


async def test_the_token_and_cookies_come_with_every_connection(server: FakeServer) -> None:
    server.extra = "Set-Cookie: node=n7; Path=/; HttpOnly\r\n"
    async with BridgedEditor(server.path, token="t0ken") as editor:
        await editor.new_session()
        server.drop()
        assert "result" in await editor.request("session/list")
        first, second = (connection.headers for connection in server.connections)
        assert first["authorization"] == second["authorization"] == "Bearer t0ken"
        assert ("cookie" in first, second["cookie"]) == (False, "node=n7")


async def test_a_silent_editor_is_not_an_error_when_the_server_gives_up_waiting(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        await server.until(lambda: server.connections)
        server.last.close(1008, "no initialize in 10 s")
        assert "result" in await editor.request("initialize", protocolVersion=1)


async def test_an_initialize_that_crosses_the_end_of_the_servers_patience_is_sent_again(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        await server.until(lambda: server.connections)
        first = server.last
        first.send = lambda message: None  # type: ignore[method-assign]
        answer = await editor.start("initialize", protocolVersion=1)
        await server.until(lambda: server.received)
        first.close(1008, "no initialize in 10 s")
        assert "result" in await answer
        assert [each["method"] for each in server.received] == ["initialize", "initialize"]


async def test_the_end_of_stdin_ends_the_bridge_also_without_a_server(server: FakeServer) -> None:
    async with BridgedEditor(server.path) as editor:
        await editor.new_session()
        await server.stop_listening()
        editor.close_stdin()
        assert await editor.ended() == 0


def test_in_version_2_a_lost_load_is_begun_again_and_a_gap_has_a_message_id() -> None:
    journal, number = Journal("j"), itertools.count(1)

    def ask(method: str, answer: dict[str, Any], **params: Any) -> None:
        request_id = next(number)
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        journal.editor_sent(json.dumps(message).encode())
        journal.server_sent(json.dumps({"jsonrpc": "2.0", "id": request_id} | answer).encode())

    def reconnect() -> dict[str, Any]:
        """A new connection; what the bridge sends when that has been initialized."""
        journal.lost()
        journal.connected(is_known=True)
        return answered({"result": {"protocolVersion": 2}})

    def answered(answer: dict[str, Any]) -> dict[str, Any]:
        request_id = json.loads(journal.to_server.pop())["id"]
        journal.server_sent(json.dumps({"jsonrpc": "2.0", "id": request_id} | answer).encode())
        sent: dict[str, Any] = json.loads(journal.to_server[-1])
        return sent

    journal.connected(is_known=False)
    ask("initialize", {"result": {"protocolVersion": 2}}, protocolVersion=2)
    ask("session/new", {"result": {"sessionId": "s", "_meta": {"acp/cursor": "e0.0"}}}, cwd="/")
    load = {"sessionId": "s", "cwd": "/", "mcpServers": [], "replayFrom": {"type": "start"}}
    journal.editor_sent(json.dumps({"id": "load", "method": "session/resume", "params": load}).encode())
    again = reconnect()
    assert (again["method"], again["params"]["replayFrom"]) == ("session/resume", {"type": "start"})
    journal.server_sent(json.dumps({"id": again["id"], "result": {"_meta": {"acp/cursor": "e1.0"}}}).encode())
    (again,) = map(json.loads, journal.to_server[-1:])
    assert (again["id"], again["params"]["_meta"]) == ("load", {"acp/cursor": "e1.0"})
    assert "replayFrom" not in again["params"]
    journal.server_sent(json.dumps({"id": again["id"], "result": {"_meta": {"acp/cursor": "e1.0"}}}).encode())
    again = reconnect()
    assert again["params"] == {"mcpServers": [], "cwd": "/", "sessionId": "s", "_meta": {"acp/cursor": "e1.0"}}
    journal.to_editor.clear()
    again = answered({"error": {"code": -32602, "message": "gap"}})
    assert again["params"] == {"mcpServers": [], "cwd": "/", "sessionId": "s"}
    (notice,) = map(json.loads, journal.to_editor)
    assert notice["params"]["update"]["sessionUpdate"] == "agent_message_chunk"
    assert notice["params"]["update"]["messageId"]


class Line:
    """A journal between an editor and a server, without the two."""

    def __init__(self, *, knows_names: bool = True) -> None:
        self.journal = Journal("j")
        self.journal.connected(is_known=False)
        self._number = itertools.count(1)
        self.initialized = {"protocolVersion": 1, "_meta": {"crow": {"promptId": {}}} if knows_names else {}}
        self.send("initialize", protocolVersion=1)
        self.answer({"result": self.initialized})
        self.send("session/new", cwd="/")
        self.answer({"result": {"sessionId": "s", "_meta": {"acp/cursor": "e1.0"}}})

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """What the server gets of a request of the editor."""
        message = {"jsonrpc": "2.0", "id": next(self._number), "method": method, "params": params}
        self.journal.editor_sent(json.dumps(message).encode())
        sent: dict[str, Any] = json.loads(self.journal.to_server.pop())
        self.last = sent
        return sent

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What the editor gets of an answer to its last request."""
        self.journal.server_sent(json.dumps({"jsonrpc": "2.0", "id": self.last["id"]} | answer).encode())
        found: dict[str, Any] = json.loads(self.journal.to_editor.pop())
        return found

    def restart(self, *, has_read: bool = True) -> list[dict[str, Any]]:
        """What a new server gets, after the old one has read everything or nothing. `own` has the bridge's requests."""
        self.own: list[dict[str, Any]] = []
        if has_read:
            self.journal.acknowledged(self.journal.number)
        self.journal.lost()
        self.journal.connected(is_known=False)
        sent = []
        while self.journal.to_server:
            message = json.loads(self.journal.to_server.pop(0))
            if str(message.get("id")).startswith("crow-bridge"):
                self.own.append(message)
                result = self.initialized if message["method"] == "initialize" else {}
                answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
                self.journal.server_sent(json.dumps(answer).encode())
            else:
                sent.append(message)
        return sent


@pytest.mark.parametrize("method", ["session/prompt", "_session/steering"])
def test_each_prompt_gets_a_name_of_its_own_and_keeps_it_on_any_server(method: str) -> None:
    line, block = Line(), {"type": "text", "text": 'é "\ud83d" \n'}
    first = line.send(method, sessionId="s", prompt=[block], _meta={"a": 1, "crow": {"metadata": {}}})
    name = first["params"]["_meta"]["crow"]["promptId"]
    assert name.startswith("bridge-j-")
    assert first["params"] == {
        "sessionId": "s",
        "prompt": [block],
        "_meta": {"a": 1, "crow": {"metadata": {}, "promptId": name}},
    }
    assert line.restart() == [first]
    assert line.answer({"result": {"outcome": "injected"}})["result"] == {"outcome": "injected"}
    assert line.send(method, sessionId="s", prompt=[block])["params"]["_meta"]["crow"]["promptId"] != name
    own = {"crow": {"promptId": "mine"}}
    odd: list[Any] = [own, {"crow": []}, [], {"crow": {"promptId": 5}}]
    for given in odd:
        assert line.send(method, sessionId="s", prompt=[], _meta=given)["params"]["_meta"] == given


def test_a_new_server_is_told_which_prompts_the_editor_shows_already() -> None:
    line = Line()
    sent = [line.send("session/prompt", sessionId="s", prompt=[])["params"]["_meta"]["crow"]["promptId"]]
    sent.append(line.send("_session/steering", sessionId="s", prompt=[])["params"]["_meta"]["crow"]["promptId"])
    line.restart()
    assert line.own[-1]["method"] == "session/resume"
    assert line.own[-1]["params"]["_meta"] == {"acp/cursor": "e1.0", "crow": {"promptIds": sent}}


def test_a_server_without_names_is_sent_no_names_and_no_prompt_twice() -> None:
    line = Line(knows_names=False)
    sent = line.send("session/prompt", sessionId="s", prompt=[])
    assert "_meta" not in sent["params"]
    assert line.restart() == []
    assert (
        "it is not known whether session/prompt succeeded"
        in json.loads(line.journal.to_editor.pop())["error"]["message"]
    )


def test_a_turn_that_the_restart_cancelled_is_an_error_and_no_cancellation_by_the_editor() -> None:
    line = Line()
    line.send("session/prompt", sessionId="s", prompt=[])
    line.restart()
    assert "restarted" in line.answer({"result": {"stopReason": "cancelled"}})["error"]["message"]
    line.send("session/prompt", sessionId="s", prompt=[])
    cancel = {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": "s"}}
    line.journal.editor_sent(json.dumps(cancel).encode())
    line.journal.to_server.clear()
    assert line.answer({"result": {"stopReason": "cancelled"}})["result"] == {"stopReason": "cancelled"}


@pytest.mark.parametrize("is_asked_first", [False, True])
def test_a_late_answer_to_a_withdrawn_question_answers_no_question_of_the_next_server(is_asked_first: bool) -> None:
    line = Line()
    journal = line.journal
    asked = {"jsonrpc": "2.0", "id": 0, "method": "elicitation/create", "params": {"sessionId": "s", "message": "?"}}
    cancelled = {"jsonrpc": "2.0", "id": 0, "error": {"code": -32800, "message": "cancelled"}}
    journal.server_sent(json.dumps(asked).encode())
    line.restart()
    withdrawn = json.loads(journal.to_editor.pop())
    assert (withdrawn["method"], withdrawn["params"]) == ("$/cancel_request", {"requestId": 0})
    if not is_asked_first:
        journal.editor_sent(json.dumps(cancelled).encode())
    journal.server_sent(json.dumps(asked).encode())
    again = json.loads(journal.to_editor.pop())
    if is_asked_first:
        journal.editor_sent(json.dumps(cancelled).encode())
    accepted = {"jsonrpc": "2.0", "id": again["id"], "result": {"action": "accept"}}
    journal.editor_sent(json.dumps(accepted).encode())
    assert [json.loads(each) for each in journal.to_server] == [accepted | {"id": 0}]


@pytest.mark.parametrize("method", ["session/prompt", "session/new"])
def test_a_request_that_a_server_refuses_while_it_shuts_down_goes_to_the_next_one(method: str) -> None:
    line = Line()
    sent = line.send(method, sessionId="s", prompt=[])
    refusal = {"code": -32603, "message": "This server is shutting down.", "data": {"reason": "draining"}}
    line.journal.server_sent(json.dumps({"jsonrpc": "2.0", "id": sent["id"], "error": refusal}).encode())
    assert line.journal.to_editor == []
    assert line.restart() == [sent]
    assert line.answer({"result": {"sessionId": "s"}})["result"] == {"sessionId": "s"}


def test_a_lost_resume_of_the_editor_continues_at_the_newest_cursor() -> None:
    line = Line()
    cursor = {"acp/cursor": "e2.0"}
    line.send("session/resume", sessionId="t", cwd="/", _meta={"acp/cursor": "e1.0"})
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "twig"}}
    shown = {"method": "session/update", "params": {"sessionId": "t", "update": update, "_meta": cursor}}
    line.journal.server_sent(json.dumps(shown).encode())
    (again,) = line.restart()
    assert (again["method"], again["params"]["_meta"]) == ("session/resume", cursor)


def test_a_server_that_shuts_down_while_a_session_is_resumed_causes_no_gap() -> None:
    line = Line()
    journal = line.journal
    refusal = {"code": -32603, "message": "This server is shutting down.", "data": {"reason": "draining"}}
    journal.lost()
    journal.connected(is_known=False)
    for answer in ({"result": line.initialized}, {"error": refusal}):
        request = json.loads(journal.to_server.pop())
        journal.server_sent(json.dumps({"jsonrpc": "2.0", "id": request["id"]} | answer).encode())
    assert (request["method"], journal.to_editor) == ("session/resume", [])
    line.restart()
    assert line.own[-1]["params"]["_meta"] == {"acp/cursor": "e1.0"}


def test_a_cancellation_that_came_before_a_prompt_is_repeated_before_it() -> None:
    line = Line()
    cancel = {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": "s"}}
    line.journal.editor_sent(json.dumps(cancel).encode())
    line.journal.to_server.clear()
    prompt = line.send("session/prompt", sessionId="s", prompt=[])
    assert line.restart(has_read=False) == [cancel, prompt]
