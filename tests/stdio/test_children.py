"""Every child of crow is waited for, and no program that a workspace planted is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest

from crow.tools.sandbox.confiner import choose_sandbox
from tests.stdio.conftest import FRESH, ROOT, StartCrow
from tests.support import fake_endpoint as fake
from tests.support import fork_server
from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.server import ServerProcess, WebSocketClient, server_environment

SESSIONS = 12


@pytest.fixture(autouse=True)
def sandbox() -> None:
    """Skips if nothing confines commands on this machine."""
    if choose_sandbox().sandbox is None:
        pytest.skip(choose_sandbox().problem)


def shell(access: str, command: str) -> fake.Reply:
    return fake.calls(("shell", {"command": command, "access": access}))


def zombies(parent: int) -> list[str]:
    """The names of the children of a process that have ended and were not waited for."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
        except OSError:
            continue
        state, of = rest.split()[:2]
        if (state, int(of)) == ("Z", parent):
            found.append(name.partition("(")[2])
    return found


async def work(client: CrowProcess | WebSocketClient, endpoint: FakeEndpoint, place: Path) -> None:
    """Run a command of each access in many sessions. Close every second session."""
    await client.initialize()
    for number in range(SESSIONS):
        session = await client.new_session(place)
        await client.request("session/set_mode", {"sessionId": session, "modeId": "auto"})
        endpoint.script(
            shell("read", "sleep 0 & echo one"), shell("write", "setsid true; echo two"), fake.text("Done.")
        )
        await client.prompt(session, "go")
        shown = str(client.updates(session, "tool_call_update"))
        assert "one" in shown
        assert "two" in shown
        if number % 2:
            await client.request("session/close", {"sessionId": session})


async def until_all_are_waited_for(parent: int) -> None:
    left: list[str] = []
    with anyio.move_on_after(120):
        while left := zombies(parent):  # noqa: ASYNC110 - nothing tells when another process reaps
            await anyio.sleep(0.05)
    assert left == []


@pytest.mark.long
async def test_no_child_of_many_sessions_stays_a_zombie(crow: StartCrow, endpoint: FakeEndpoint, place: Path) -> None:
    async with crow(endpoint=endpoint, env={"CROW_SANDBOX": "required"}) as agent:
        await work(agent, endpoint, place)
        await until_all_are_waited_for(agent.pid)


@pytest.mark.long
async def test_no_child_of_many_sessions_of_a_server_stays_a_zombie(
    endpoint: FakeEndpoint, place: Path, home: Path
) -> None:
    model = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": "sk-test-0123456789", "CROW_MODEL": "fake-model"}
    env = server_environment(home, CROW_SANDBOX="required", **model)
    async with ServerProcess(env=env, cwd=place) as server, server.client() as client:
        await work(client, endpoint, place)
        await until_all_are_waited_for(server.pid)


@pytest.mark.long
async def test_no_program_that_a_workspace_planted_on_path_is_started(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, tmp_path: Path
) -> None:
    """The workspace has an activated environment, in which a command has planted every program of the machine."""
    planted, ran = place / ".venv" / "bin", tmp_path / "ran"
    planted.mkdir(parents=True)
    names = {name for folder in ("/usr/bin", "/usr/sbin", "/bin", "/sbin") for name in os.listdir(folder)}
    for name in names | {"bwrap", "unshare", "mount", "uname", "bash", "git", "rg", "lsb_release", "gcc", "ldconfig"}:
        (planted / name).symlink_to("planted")
    (planted / "planted").write_text(f'#!/bin/sh\necho "$0" >>{ran}\nexit 1\n')
    (planted / "planted").chmod(0o755)
    for number in range(100):
        (place / f"f{number}.txt").write_text("needle\n")
    other = tmp_path / "other"
    other.mkdir()
    endpoint.script(
        shell("read", "echo one"),
        shell("write", "echo two"),
        fake.calls(("grep", {"pattern": "ne+dle"}), ("list_files", {})),
        fake.text("Done."),
    )
    env: dict[str, str | None] = {
        "PATH": f"{planted}::.:.venv/bin:{os.environ['PATH']}",
        "CROW_SANDBOX": "required",
        "HOME": str(tmp_path / "user"),
    }
    for workspace in (place, other):
        # the first one also imports everything
        async with crow(endpoint=endpoint, env=env, argv=FRESH if workspace is place else None) as agent:
            await agent.initialize()
            assert not ran.exists(), "at initialize"
            session = await agent.new_session(workspace)
            await agent.request("session/set_mode", {"sessionId": session, "modeId": "auto"})
            await agent.prompt(session, "go")
            await agent.prompt(session, "/context")
            if workspace is place:
                shown = str(agent.updates(session, "tool_call_update"))
                assert "needle" in shown
                assert "one" in shown
    fresh, forked = [sys.executable, "-m", "crow"], fork_server.command()
    for command in (["doctor"], ["run", "say hi"], ["sessions"], ["models"]):
        await anyio.run_process(
            [*(fresh if command == ["doctor"] else forked), *command],
            check=False,
            cwd=place,
            env={
                **{name: value or "" for name, value in env.items()},
                "PYTHONPATH": str(ROOT),
                "CROW_MODEL": "offline",
            },
        )
    started = set(ran.read_text().splitlines()) if ran.exists() else set()
    assert started == set()
