"""Confined commands of the real process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.tools.sandbox.confiner import choose_sandbox
from tests.stdio.conftest import StartCrow
from tests.stdio.test_tools import configured
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint

CONFINED: dict[str, str | None] = {"CROW_SANDBOX": "required"}


@pytest.fixture(autouse=True)
def sandbox() -> None:
    """Skips if nothing confines commands on this machine."""
    if choose_sandbox().sandbox is None:
        pytest.skip(choose_sandbox().problem)


@pytest.fixture
def place() -> Iterator[Path]:
    """A workspace below the user's HOME of the test, which is masked."""
    base = Path(tempfile.mkdtemp(prefix="crow-test-", dir="/tmp"))
    (base / "work").mkdir()
    yield base / "work"
    shutil.rmtree(base)


def shell(access: str, command: str, **arguments: object) -> Any:
    return fake.calls(("shell", {"command": command, "access": access, **arguments}))


async def outputs(agent: CrowProcess, place: Path, mode: str = "auto") -> list[tuple[str, str]]:
    """How the calls of a prompt ended, and all of their text."""
    await agent.initialize()
    session = await agent.new_session(place)
    await agent.request("session/set_mode", {"sessionId": session, "modeId": mode})
    await agent.prompt(session, "go")
    found: dict[str, tuple[str, str]] = {}
    for update in agent.updates(session, "tool_call", "tool_call_update"):
        status, text = found.get(update["toolCallId"], ("", ""))
        shown = "".join(part["content"].get("text", "") for part in update.get("content") or ())
        found[update["toolCallId"]] = (update.get("status") or status, shown or text)
    return list(found.values())


async def test_unasked_commands_cannot_reach_crows_own_files_or_keys(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configured(home, "")
    attack = (
        f"cat {home}/config.toml {home}/crow.db; ls {home}; tr '\\0' '\\n' </proc/$PPID/environ; echo 'x = 1' "
        f">>{home}/config.toml; rm -rf {home}; echo x >>~/.bashrc; echo x >.envrc; cat ~/.ssh/*; echo done"
    )
    endpoint.script(shell("write", attack), shell("read", attack), fake.text("Done."))
    user_home = place.parent / "user"
    (user_home / ".ssh").mkdir(parents=True)
    (user_home / ".ssh" / "id").write_text("PRIVATE")
    async with crow(endpoint=endpoint, env={**CONFINED, "HOME": str(user_home)}) as agent:
        results = await outputs(agent, place)
    assert [status for status, _ in results] == ["completed", "completed"], results
    for _, text in results:
        assert "done" in text
        assert not any(secret in text for secret in ("PRIVATE", "SQLite", "sk-test", "crow.log"))
    assert (home / "config.toml").read_text() == ""
    assert os.listdir(place) == []
    assert os.listdir(user_home) == [".ssh"]


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_no_process_of_a_command_outlives_crow(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, end: str
) -> None:
    os.mkfifo(place / "alive")
    reader = os.open(place / "alive", os.O_RDONLY | os.O_NONBLOCK)
    command = "setsid sh -c 'trap \"\" TERM; exec >alive; touch ready; while :; do sleep 100; done' & sleep 1000"
    endpoint.script(shell("write", command, background=True), shell("write", command), fake.text("Done."))
    async with crow(endpoint=endpoint, env=CONFINED) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.request("session/set_mode", {"sessionId": session, "modeId": "auto"})
        await agent.start_prompt(session, "go")
        with anyio.fail_after(60):
            while not await anyio.Path(place / "ready").exists():  # noqa: ASYNC110 - made by another process
                await anyio.sleep(0.01)
        if end == "kill":
            await agent.kill()
        else:
            await agent.close_stdin_and_wait()
    os.set_blocking(reader, True)
    with anyio.fail_after(60):
        while await anyio.to_thread.run_sync(os.read, reader, 100):
            pass
    os.close(reader)
