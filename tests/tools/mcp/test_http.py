"""MCP servers over HTTP that are slow, forget, or send too much."""

from __future__ import annotations

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
            async with await http_transport(server, None, 600, stack) as (_, outgoing):
                await outgoing.send(SessionMessage(mcp.JSONRPCNotification(jsonrpc="2.0", method="x")))
                assert await anyio.to_thread.run_sync(ended.wait, 60)
    assert not has_sent_all.is_set()
