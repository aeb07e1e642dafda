"""MCP servers over HTTP that are slow, forget, or send too much."""

from __future__ import annotations

import json
import queue
import threading
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.to_thread
import mcp_types as mcp
import pytest
from mcp.shared.message import SessionMessage

from crow.domain.errors import ToolServerError
from crow.domain.messages import Text
from crow.tools import Outcome
from crow.tools.mcp.http import http_transport
from crow.tools.servers import HttpServer
from tests.tools.conftest import OpenBox, skip_time
from tests.tools.mcp.test_client import FORGETFUL, Http, http_server


async def test_a_prompt_of_a_server_that_forgot_the_session_works_at_its_next_use(open_box: OpenBox) -> None:
    class Prompting(Http):
        def result_of(self, message: dict[str, Any]) -> dict[str, Any] | None:
            result = super().result_of(message)
            match message["method"]:
                case "initialize" if result is not None:
                    return {**result, "capabilities": {"tools": {}, "prompts": {}}}
                case "prompts/list":
                    return {"prompts": [{"name": "hello"}]}
                case "prompts/get" if result is not None:
                    return {"messages": [{"role": "user", "content": {"type": "text", "text": "Hi."}}]}
            return result

        def end_headers(self) -> None:
            self.send_header("Mcp-Session-Id", "s")
            super().end_headers()

    with http_server(Prompting) as url:
        async with open_box(HttpServer(name="web", url=url)) as box:
            prompt = await box.toolbox.prompt("web:hello")
            assert prompt is not None
            FORGETFUL["session"] = True
            with pytest.raises(ToolServerError, match="Session terminated"):
                await box.toolbox.fill(prompt, {})
            with anyio.fail_after(60):
                while not box.toolbox.servers()[0].losses:  # noqa: ASYNC110 - the loss raises no event
                    await anyio.sleep(0.005)
            assert await box.toolbox.prompt("web:hello") == prompt
            assert await box.toolbox.fill(prompt, {}) == (Text(text="Hi."),)


async def test_a_call_may_be_silent_for_as_long_as_a_call_may_take(open_box: OpenBox) -> None:
    called, done = threading.Event(), threading.Event()

    class Slow(Http):
        def result_of(self, message: dict[str, Any]) -> dict[str, Any] | None:
            if message["method"] == "tools/call":
                called.set()
                done.wait(120)
            return super().result_of(message)

    outcomes: list[Outcome] = []
    with http_server(Slow) as url:
        async with open_box(HttpServer(name="web", url=url), call_timeout_s=600) as box:
            await box.toolbox.wait_ready(120)

            async def run() -> None:
                outcomes.append(await box.run("web__whoami"))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                assert await anyio.to_thread.run_sync(called.wait, 60)
                skip_time(400)
                await anyio.wait_all_tasks_blocked()
                done.set()
    assert outcomes == [Outcome(text="you are None")]


async def test_a_server_with_the_older_transport_cannot_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.tools.mcp.http.LINE_BYTES", 100_000)
    ended, has_sent_all = threading.Event(), threading.Event()
    piece, count = bytes(100_000), 1_000

    class Endless(Http):
        def do_GET(self) -> None:  # noqa: N802 - the name in the library
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"event: endpoint\ndata: /post\n\n")
            ended.wait(120)

        def do_POST(self) -> None:  # noqa: N802 - the name in the library
            self.send_response(202)
            self.send_header("Content-Length", str(len(piece) * count))
            self.end_headers()
            try:
                for _ in range(count):
                    self.wfile.write(piece)
                has_sent_all.set()
            except OSError:
                pass
            ended.set()

    with http_server(Endless) as url:
        async with AsyncExitStack() as stack:
            server = HttpServer(name="web", url=url, transport="sse")
            async with await http_transport(server, None, stack) as (_, outgoing):
                await outgoing.send(SessionMessage(mcp.JSONRPCNotification(jsonrpc="2.0", method="x")))
                assert await anyio.to_thread.run_sync(ended.wait, 60)
    assert not has_sent_all.is_set()


async def test_a_stream_of_notifications_may_be_silent_for_hours(open_box: OpenBox) -> None:
    opened, changes, ended = threading.Event(), threading.Event(), threading.Event()

    class Quiet(Http):
        def do_GET(self) -> None:  # noqa: N802 - the name in the library
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            opened.set()
            if changes.wait(120) and not ended.is_set():
                message = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
                self.wfile.write(f"event: message\ndata: {json.dumps(message)}\n\n".encode())
            ended.wait(120)

        def result_of(self, message: dict[str, Any]) -> dict[str, Any] | None:
            result = super().result_of(message)
            if message["method"] == "tools/list" and result is not None and changes.is_set():
                return {"tools": [*result["tools"], {"name": "more", "inputSchema": {"type": "object"}}]}
            return result

        def end_headers(self) -> None:
            self.send_header("Mcp-Session-Id", "s")
            super().end_headers()

    has_changed = anyio.Event()

    async def on_change() -> None:
        if box.toolbox.servers()[0].tools == 2:
            has_changed.set()

    with http_server(Quiet) as url:
        async with open_box(HttpServer(name="web", url=url), on_change=on_change) as box:
            await box.toolbox.wait_ready(120)
            for _ in range(4):  # also the pauses before the library opens a new stream
                assert await anyio.to_thread.run_sync(opened.wait, 60)
                skip_time(10_000)
                await box.run("web__whoami")
            changes.set()
            with anyio.fail_after(60):
                await has_changed.wait()
            ended.set()


async def test_a_server_with_the_older_transport_may_be_silent_between_calls(open_box: OpenBox) -> None:
    answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    class Older(Http):
        def do_GET(self) -> None:  # noqa: N802 - the name in the library
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"event: endpoint\ndata: /post\n\n")
            while (answer := answers.get(timeout=120)) is not None:
                self.wfile.write(f"event: message\ndata: {json.dumps(answer)}\n\n".encode())

        def do_POST(self) -> None:  # noqa: N802 - the name in the library
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(202)
            self.send_header("Content-Length", "0")
            self.end_headers()
            if "id" in message:
                answers.put({"jsonrpc": "2.0", "id": message["id"], "result": self.result_of(message)})

    with http_server(Older) as url:
        async with open_box(HttpServer(name="web", url=url, transport="sse")) as box:
            await box.toolbox.wait_ready(120)
            skip_time(10_000)
            await anyio.wait_all_tasks_blocked()
            outcome = await box.run("web__whoami")
        answers.put(None)
    assert outcome == Outcome(text="you are None")
