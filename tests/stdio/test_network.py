"""Commands of the real process reach hosts by their names, after the user was asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from crow.programs import SYSTEM_PROGRAMS
from crow.tools.network.registries import DEFAULT_REGISTRIES
from tests.stdio.conftest import StartCrow
from tests.stdio.test_confinement import CONFINED, place
from tests.stdio.test_layers import User, overlay, run, shell, start
from tests.support.fake_endpoint import FakeEndpoint

__all__ = ["overlay", "place"]

PYTHON = SYSTEM_PROGRAMS.find("python3") or "python3"


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server on the loopback interface of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def fetch(port: int, host: str = "localhost") -> Any:
    """A command that fetches through the proxy, even what is local."""
    code = f"import urllib.request as u; print(u.urlopen('http://{host}:{port}/').read().decode())"
    return shell(f'no_proxy= NO_PROXY= {PYTHON} -I -S -c "{code}" 2>&1 | tail -1')


def write_config(home: Path, text: str) -> None:
    home.mkdir()
    (home / "config.toml").write_text(text)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ask", "plan"])
async def test_a_host_of_the_settings_is_reached_without_a_question(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, home: Path, port: int, mode: str
) -> None:
    write_config(home, f'[permissions]\nallow = ["network(localhost:{port})"]\n')
    user = User()
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, place, mode)
        assert await run(agent, endpoint, session, fetch(port)) == ["hello"]
    assert user.asked == []


async def test_the_user_is_asked_about_an_unknown_host_and_the_model_is_told(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, port: int
) -> None:
    user = User("reject_once", "reject_always")
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, place)
        told = await run(agent, endpoint, session, *[fetch(port)] * 3)
    assert len(user.asked) == 2, "the third try is refused by the rule"
    assert f"It wants to connect to: localhost:{port}" in user.texts()[0]
    assert [option["name"] for option in user.asked[0]["options"]] == [
        "Allow",
        f"Always allow commands to connect to `localhost:{port}` in this directory and session",
        "Reject",
        f"Always reject commands to connect to `localhost:{port}` in this session",
    ]
    assert user.asked[0]["toolCall"]["status"] == "in_progress"
    assert all(f"[Hosts not reached: localhost:{port}: " in text for text in told)
    assert "the user did not allow it" in told[0]
    assert "The user has forbidden this" in told[2]


async def test_nobody_is_asked_in_plan_mode(crow: StartCrow, endpoint: FakeEndpoint, place: Path, port: int) -> None:
    user = User()
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, place, "plan")
        told = await run(agent, endpoint, session, fetch(port))
    assert "network is not available in plan mode" in told[0]
    assert user.asked == []


async def test_one_answer_allows_the_registries_of_a_project_but_no_private_address(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, port: int
) -> None:
    (place / "package.json").write_text("{}")
    (place / ".npmrc").write_text(f"registry=http://localhost:{port}/\n")
    user = User("allow_registries")
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, place)
        told = await run(agent, endpoint, session, fetch(port), fetch(port))
        assert user.asked[0]["options"][2]["name"] == (
            f"Always allow the registries of npm: {DEFAULT_REGISTRIES['npm'][0]}, and localhost:{port}, which files of "
            "this project name"
        )
        await agent.prompt(session, "/permissions")
    assert len(user.asked) == 1
    for text in told:
        assert "localhost is at 127.0.0.1, a private address" in text or "::1, a private address" in text


async def test_a_rule_for_a_command_that_may_do_everything_lets_it_reach_hosts(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, home: Path
) -> None:
    write_config(home, '[permissions]\nallow = ["shell"]\ndeny = ["network(denied.test)"]\n')
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
    user = User()
    async with crow(endpoint=endpoint, env=CONFINED, answers=user.answers) as agent:
        session = await start(agent, place)
        told = await run(agent, endpoint, session, fetch(closed), fetch(80, "denied.test"))
    assert user.asked == []
    assert "a private address" in told[0], "allowed, but not by its name"
    assert "The user has forbidden this" in told[1]
