"""Attacks on the real process by pages, repositories, imported files and answers of a model."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.stdio.test_tools import configured, ended, server, shown
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint
from tests.tools.conftest import until_gone

PAGE = b"<title>Nests</title>" + b"<p>" * 1_600_000
"""Takes a second or more to convert, which leaves time to find the process that does it."""


@contextmanager
def heavy_page() -> Iterator[str]:
    """The URL of a page of 4.8 MB."""

    class Web(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


async def stopped_converter(agent: CrowProcess) -> int:
    """The process that converts a page, stopped: now the conversion never ends, and no signal but SIGKILL ends it."""
    with anyio.fail_after(60):
        while (pid := converter_of(agent.pid)) is None:  # noqa: ASYNC110 - nobody tells of a grandchild
            await anyio.sleep(0.001)
    os.kill(pid, signal.SIGSTOP)
    return pid


def converter_of(parent: int) -> int | None:
    """The process that converts a page for `parent`, if it runs."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return next((int(pid) for pid in children if b"page.py" in Path(f"/proc/{pid}/cmdline").read_bytes()), None)


@pytest.mark.parametrize("how", ["cancel", "SIGTERM"])
async def test_a_page_that_is_never_converted_holds_up_no_other_session_no_cancel_and_no_exit(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, how: str
) -> None:
    configured(home, "[permissions]\nfetch_private = true\n")
    with heavy_page() as url:
        endpoint.script(fake.calls(("fetch", {"url": url})), fake.text("Here I am."))
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            session, other = await agent.new_session(place), await agent.new_session(place)
            turn = await agent.start_prompt(session, "read it")
            converter = await stopped_converter(agent)
            assert (await agent.prompt(other, "are you there?"))["stopReason"] == "end_turn"
            assert shown(agent.updates(other)) == "Here I am."
            if how == "cancel":
                await agent.notify("session/cancel", {"sessionId": session})
                assert (await turn.result())["stopReason"] == "cancelled"
            else:
                agent.send_signal(signal.SIGTERM)
                assert await agent.wait() == 0
            await until_gone(converter)


async def test_no_command_and_no_server_gets_the_keys_of_any_endpoint(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    toml = f"""
        [model]
        api_key_env = "NEST_KEY"
        [providers.openrouter]
        models = ["m"]
        [providers.work]
        base_url = "http://127.0.0.1:1/v1"
        api_key_env = "WORK_KEY"
        [permissions]
        mode = "auto"
        [mcp_servers.srv]
        env = {{ TOKEN = "${{WORK_KEY}}" }}
        {server("tiny.py", "")}
        """
    configured(home, toml)
    keys = {
        "NEST_KEY": "sk-nest-0123456789",
        "WORK_KEY": "sk-work-0123456789",
        "OPENROUTER_API_KEY": "sk-router-0123456789",
        "DEEPSEEK_API_KEY": "sk-deep-0123456789",
        "OPENAI_API_KEY": "sk-open-0123456789",
        "A_COPY": "Bearer sk-nest-0123456789",
        "ALL_PROXY": "socks5://sk-work-0123456789@127.0.0.1:1",
    }
    steps = [
        ("shell", {"command": "env"}),
        ("shell", {"command": "env", "background": True}),
        *(("srv__env", {"text": name}) for name in (*keys, "TOKEN")),
    ]
    endpoint.script(fake.calls(*steps), fake.calls(("shell_output", {"job": "job1", "wait_s": 30})), fake.text("ok"))
    async with crow(endpoint=endpoint, env={**keys, "NO_KEY": "is passed on"}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        said = [text for _, text in ended(agent.updates(session))]
    told = "\n".join(said)
    assert told.count("NO_KEY=is passed on") == 2
    assert [key for key in keys if f"{key}=" in told] == []
    assert told.count("sk-") == 1, "the one that the user's file gives to the server"
    assert "sk-work-0123456789" in said
