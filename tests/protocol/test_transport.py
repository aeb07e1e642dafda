"""The transport over real descriptors, with the SDK's own connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from acp.connection import Connection

from crow.protocol import frames
from crow.protocol import transport as transport_module
from crow.protocol.transport import StdioTransport

PIPE_BYTES = 65536


@contextlib.contextmanager
def pipe() -> Iterator[list[int]]:
    """A pipe as [read, write]; an end that the test closes itself is set to -1."""
    ends = list(os.pipe())
    try:
        yield ends
    finally:
        for fd in ends:
            if fd >= 0:
                os.close(fd)


class Editor:
    """The other ends of a transport, read by a thread."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    async def say(self, data: bytes | dict[str, Any]) -> None:
        whole = data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n"
        await asyncio.to_thread(self._write_all, whole)

    async def hear(self) -> dict[str, Any]:
        with anyio.fail_after(60):
            return await self._lines.get()

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._write, data) :]

    def join(self) -> None:
        self._thread.join(60)

    def _follow(self) -> None:
        with open(self._read, "rb", closefd=False) as lines:
            for line in lines:
                self._loop.call_soon_threadsafe(self._lines.put_nowait, json.loads(line))


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Editor]:
    """An echo agent on the SDK's connection: `echo` answers its parameters, `fail` raises."""

    async def handle(method: str, params: Any, is_notification: bool) -> Any:
        if method == "fail":
            raise ValueError(json.dumps({"said": "no"}))
        return {"method": method, "params": params}

    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        connection = Connection(handle, transport, listening=False)
        editor = Editor(up[1], down[0])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.main_loop)
            try:
                yield editor
            finally:
                os.close(up[1])
                up[1] = -1
        await connection.close()
        os.close(down[1])
        down[1] = -1
        editor.join()


def request(number: int, method: str = "echo", **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def echoed(number: int, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": {"method": "echo", "params": params}}


async def test_malformed_lines_are_answered_and_the_connection_continues() -> None:
    hostile = [b"{bad", b"\xff\xfe", b"[]", b"null", b"42", b'"x"', b"[" * 100_000, b'{"id":[],"result":1}', b"{}"]
    async with served() as editor:
        for line in hostile:
            await editor.say(line + b"\n")
        await editor.say(b"\n  \n" + b'{"jsonrpc":"2.0","id":null,"error":{"code":-32602,"message":"x"}}\n')
        await editor.say(request(1, a=1))
        answers = [await editor.hear() for _ in hostile]
        assert [(answer["id"], answer["error"]["code"]) for answer in answers] == [
            (None, code) for code in (-32700, -32700, -32600, -32600, -32600, -32600, -32700, -32600, -32600)
        ]
        assert await editor.hear() == echoed(1, a=1)


async def test_meta_is_a_plain_parameter_and_overrides_nothing() -> None:
    async with served() as editor:
        await editor.say(request(1, sessionId="real", _meta={"session_id": "forged", "sessionId": "forged"}))
        answer = await editor.hear()
        assert answer == echoed(1, sessionId="real", _meta={"session_id": "forged", "sessionId": "forged"})


async def test_a_line_over_the_limit_is_refused_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_LINE_BYTES", 100_000)
    async with served() as editor:
        await editor.say(b'{"jsonrpc":"2.0","id":1,"method":"echo","params":{"a":"' + b"x" * 300_000 + b'"}}\n')
        await editor.say(request(2))
        refused = await editor.hear()
        assert (refused["id"], refused["error"]["code"]) == (None, -32600)
        assert "at most 100000 bytes" in refused["error"]["message"]
        assert await editor.hear() == echoed(2)


async def test_a_megabyte_arrives_whole_in_both_directions() -> None:
    text = "ü" * 1_000_000
    async with served() as editor:
        await editor.say(request(1, text=text))
        assert await editor.hear() == echoed(1, text=text)


async def test_a_last_line_without_newline_is_read_at_the_end_of_stdin() -> None:
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        os.write(up[1], json.dumps(request(1)).encode())
        os.close(up[1])
        up[1] = -1
        assert await transport.receive() == request(1)
        assert await transport.receive() is None
        await transport.close()


async def test_responses_match_their_request_even_with_the_id_as_a_string() -> None:
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        for number in (0, 1, 2):
            await transport.send({"jsonrpc": "2.0", "id": number, "method": "fs/read_text_file", "params": {}})
        os.write(up[1], b'{"jsonrpc":"2.0","id":"1","result":{"content":"a"}}\n')
        os.write(up[1], b'{"jsonrpc":"2.0","id":7,"result":"nobody asked"}\n{"jsonrpc":"2.0","id":8}\n')
        os.write(up[1], b'{"jsonrpc":"2.0","id":2}\n{"jsonrpc":"2.0","id":0,"error":"no"}\n')
        assert await transport.receive() == {"jsonrpc": "2.0", "id": 1, "result": {"content": "a"}}
        assert await transport.receive() == {"jsonrpc": "2.0", "id": 2}
        error = {"code": -32603, "message": "no", "data": None}
        assert await transport.receive() == {"jsonrpc": "2.0", "id": 0, "error": error}
        await transport.close()
        sent = [json.loads(line) for line in os.read(down[0], PIPE_BYTES).splitlines()]
        assert [message.get("error", {}).get("code") for message in sent] == [None, None, None, -32600]
        assert sent[-1]["id"] == 8


async def test_a_slow_reader_slows_senders_and_gets_every_line_in_order() -> None:
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        sent: list[int] = []

        async def send_all() -> None:
            for number in range(200):
                await transport.send({"n": number, "pad": "x" * 5000})
                sent.append(number)

        received = b""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_all)
            await anyio.wait_all_tasks_blocked()
            assert len(sent) < 20
            while received.count(b"\n") < 200:
                received += await anyio.to_thread.run_sync(os.read, down[0], PIPE_BYTES)
        assert [json.loads(line)["n"] for line in received.splitlines()] == list(range(200))
        await transport.close()


async def test_requests_wait_while_the_editor_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "MAX_WAITING_BYTES", PIPE_BYTES)
    requests = b"".join(json.dumps(request(number)).encode() + b"\n" for number in range(500))
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        begun: list[int] = []

        async def serve(tasks: anyio.abc.TaskGroup) -> None:
            while (message := await transport.receive()) is not None:
                begun.append(message["id"])
                tasks.start_soon(transport.send, {"id": message["id"], "pad": "x" * 5000})
                await anyio.lowlevel.checkpoint()

        received = b""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, tasks)
            await anyio.to_thread.run_sync(os.write, up[1], requests)
            os.close(up[1])
            up[1] = -1
            await anyio.wait_all_tasks_blocked()
            assert 10 < len(begun) < 40
            while received.count(b"\n") < 500:
                received += await anyio.to_thread.run_sync(os.read, down[0], PIPE_BYTES)
        assert [json.loads(line)["id"] for line in received.splitlines()] == begun == list(range(500))
        await transport.close()


async def test_an_editor_that_closes_stdin_and_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "MAX_WAITING_BYTES", PIPE_BYTES)
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        await anyio.to_thread.run_sync(os.write, up[1], b"[]\n" * 5000)
        os.close(up[1])
        up[1] = -1
        with anyio.fail_after(60):
            assert await transport.receive() is None
        await transport.close()


async def test_a_sender_cancelled_while_waiting_leaves_no_partial_line() -> None:
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(transport.send, {"n": 1, "pad": "x" * 200_000})
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        received = b""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(transport.send, {"n": 2})
            while received.count(b"\n") < 2:
                received += await anyio.to_thread.run_sync(os.read, down[0], PIPE_BYTES)
        assert [json.loads(line)["n"] for line in received.splitlines()] == [1, 2]
        await transport.close()


async def test_close_completes_the_begun_line_and_the_responses_for_a_slow_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_module, "CLOSE_S", 0.0)
    monkeypatch.setattr(transport_module, "FINISH_S", 60.0)
    monkeypatch.setattr(transport_module, "STALLED_S", 60.0)
    with pipe() as up, pipe() as down:
        sender = StdioTransport(up[0], down[1])
        received = b""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.send, {"method": "session/update", "params": {"n": 1, "pad": "x" * 300_000}})
            tasks.start_soon(sender.send, {"method": "session/update", "params": {"n": 2}})
            tasks.start_soon(sender.send, {"id": 7, "result": {}})
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(sender.close)
            await anyio.wait_all_tasks_blocked()
            await sender.send({"method": "session/update", "params": {"n": 3}})
            while received.count(b"\n") < 2:
                received += await anyio.to_thread.run_sync(os.read, down[0], 1_000)
        os.close(down[1])
        down[1] = -1
        assert os.read(down[0], PIPE_BYTES) == b""
    lines = [json.loads(line) for line in received.splitlines()]
    assert [line.get("id") or line["params"]["n"] for line in lines] == [1, 7]


async def test_close_gives_up_on_a_reader_that_stopped_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "STALLED_S", 0.0)
    with pipe() as up, pipe() as down:
        sender = StdioTransport(up[0], down[1])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.send, {"id": 1, "result": "x" * 300_000})
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(60):
                await sender.close()


async def test_only_tasks_that_send_without_pause_must_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single message costs no pass of the event loop; a task that sends many lets others run."""
    monkeypatch.setattr(transport_module, "FAIR_S", -1.0)
    passes = 0

    async def others() -> None:
        nonlocal passes
        while True:
            await anyio.lowlevel.checkpoint()
            passes += 1

    with pipe() as up, pipe() as down:
        sender = StdioTransport(up[0], down[1])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            await anyio.lowlevel.checkpoint()
            before = passes
            await sender.send({"n": 1})
            assert passes == before
            await anyio.lowlevel.checkpoint()
            before = passes
            await sender.send({"n": 2})
            assert passes == before
            await sender.send({"n": 3})
            assert passes > before
            tasks.cancel_scope.cancel()
        await sender.close()


async def test_a_vanished_editor_ends_the_input_and_output_is_dropped() -> None:
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        ended: list[Any] = []

        async def receive() -> None:
            ended.append(await transport.receive())

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                await anyio.wait_all_tasks_blocked()
                os.close(down[0])
                down[0] = -1
                await transport.send({"jsonrpc": "2.0", "method": "session/update", "params": {}})
        assert ended == [None]
        await transport.send({"jsonrpc": "2.0", "method": "session/update", "params": {}})
        with pytest.raises(ConnectionError, match="closed the connection"):
            await transport.send({"jsonrpc": "2.0", "id": 1, "method": "session/request_permission", "params": {}})
        await transport.close()


async def test_a_blocked_sender_continues_when_the_editor_vanishes() -> None:
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(transport.send, {"pad": "x" * 1_000_000})
                await anyio.wait_all_tasks_blocked()
                os.close(down[0])
                down[0] = -1
        assert await transport.receive() is None
        await transport.close()


async def test_stop_ends_the_input_while_responses_still_leave() -> None:
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        os.write(up[1], json.dumps(request(1)).encode() + b"\n" + b'{"half')
        assert await transport.receive() == request(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(transport.receive)
            await anyio.wait_all_tasks_blocked()
            transport.stop()
        assert await transport.receive() is None
        await transport.send(echoed(1))
        await transport.close()
        assert json.loads(os.read(down[0], PIPE_BYTES)) == echoed(1)


async def test_a_response_that_is_not_json_becomes_an_internal_error() -> None:
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        await transport.send({"jsonrpc": "2.0", "id": 4, "result": {"a": object()}})
        with pytest.raises(TypeError):
            await transport.send({"jsonrpc": "2.0", "method": "x", "params": object()})
        await transport.close()
        answer = json.loads(os.read(down[0], PIPE_BYTES))
        assert (answer["id"], answer["error"]["code"]) == (4, -32603)


async def test_the_observer_sees_every_line_of_both_directions() -> None:
    seen: list[tuple[str, bytes]] = []
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1], observe=lambda way, line: seen.append((way, line)))
        os.write(up[1], b'[]\n{"jsonrpc":"2.0","method":"m"}\n')
        assert await transport.receive() == {"jsonrpc": "2.0", "method": "m", "params": {}}
        await transport.close()
        assert [(way, line) for way, line in seen if way == "in"] == [
            ("in", b"[]"),
            ("in", b'{"jsonrpc":"2.0","method":"m"}'),
        ]
        assert seen[1] == ("out", os.read(down[0], PIPE_BYTES).rstrip(b"\n"))


async def test_the_output_pipe_is_blocking_again_after_close_and_the_input_always_is() -> None:
    with pipe() as up, pipe() as down:
        transport = StdioTransport(up[0], down[1])
        assert (os.get_blocking(up[0]), os.get_blocking(down[1])) == (True, False)
        await transport.close()
        assert (os.get_blocking(up[0]), os.get_blocking(down[1])) == (True, True)


async def test_a_socket_serves_both_directions() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = StdioTransport(ours.fileno(), os.dup(ours.fileno()))
        theirs.sendall(json.dumps(request(1)).encode() + b"\n")
        assert await transport.receive() == request(1)
        await transport.send(echoed(1))
        assert json.loads(theirs.recv(PIPE_BYTES)) == echoed(1)
        theirs.shutdown(socket.SHUT_WR)
        assert await transport.receive() is None
        await transport.close()


async def test_regular_files_serve_both_directions(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(json.dumps(request(1)).encode() + b"\n[]\n")
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("wb") as sink:
        transport = StdioTransport(source.fileno(), sink.fileno())
        assert await transport.receive() == request(1)
        await transport.send(echoed(1))
        assert await transport.receive() is None
        await transport.close()
    answers = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert answers[0] == echoed(1)
    assert answers[1]["error"]["code"] == -32600


async def test_a_device_that_the_loop_cannot_watch_is_read() -> None:
    with pipe() as down:
        nothing = os.open(os.devnull, os.O_RDONLY)
        transport = StdioTransport(nothing, down[1])
        with anyio.fail_after(60):
            assert await transport.receive() is None
        await transport.close()
        os.close(nothing)


def test_prints_and_children_cannot_write_to_claimed_stdout() -> None:
    program = textwrap.dedent("""
        import os, subprocess, sys
        from crow.protocol.transport import claim_stdio
        print("before, still in the buffer")
        with claim_stdio() as (source, sink):
            print("a stray print")
            os.write(1, b"a stray write")
            subprocess.run([sys.executable, "-c", "import sys; print('child', sys.stdin.read())"])
            sys.stdout.flush()
            assert not os.get_inheritable(source) and not os.get_inheritable(sink)
            os.write(sink, os.read(source, 100))
        print("after")
    """)
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", program], input=b"line\n", env=buffered, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"line\n", b"")


def test_a_closed_stdin_is_an_error_that_says_so() -> None:
    program = "from crow.protocol.transport import claim_stdio\nwith claim_stdio(): pass"
    command = f"exec {sys.executable} -c '{program}' <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert b"EditorError: stdin or stdout is closed" in done.stderr
