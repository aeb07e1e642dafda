"""Confined commands of the real process."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.programs import SYSTEM_PROGRAMS
from crow.tools.sandbox.confiner import choose_sandbox
from crow.tools.sandbox.landlock import Landlock
from tests.stdio.conftest import StartCrow
from tests.stdio.test_tools import configured
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, chosen
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.fork_server import run_script

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


HIDE = """
import ctypes, os
libc, flags, user = ctypes.CDLL(None, use_errno=True), {clone_newns}, os.geteuid()
if user != 0:
    flags |= {clone_newuser}
if libc.unshare(flags):
    raise OSError(ctypes.get_errno(), "unshare")
if user != 0:
    with open("/proc/self/uid_map", "w") as file:
        file.write(f"0 {{user}} 1")
for source, target, kind in ((b"none", b"/", {ms_private}), (b"/dev/null", {path!r}, {ms_bind})):
    if libc.mount(source, target, None, ctypes.c_ulong(kind), None):
        raise OSError(ctypes.get_errno(), "mount")
"""


@cache
def without_bubblewrap() -> str:
    """Code that hides bubblewrap from the process that runs it. Empty if there is no bubblewrap anyway."""
    bubblewrap = SYSTEM_PROGRAMS.find("bwrap")
    if bubblewrap is None:
        return ""
    code = HIDE.format(
        path=os.fsencode(bubblewrap),
        clone_newns=1 << 17,
        clone_newuser=1 << 28,
        ms_private=1 << 18 | 1 << 14,
        ms_bind=1 << 12,
    )
    if run_script(code, check=False).returncode != 0:
        pytest.skip("bubblewrap cannot be hidden here")
    return code


async def outputs(agent: CrowProcess, place: Path, mode: str = "auto") -> list[tuple[str, str]]:
    """How the calls of a prompt ended, and all of their text."""
    await agent.initialize()
    session = await agent.new_session(place)
    await agent.request("session/set_mode", {"sessionId": session, "modeId": mode})
    await agent.prompt(session, "go")
    found: dict[str, tuple[str, str]] = {}
    for update in agent.updates(session, "tool_call", "tool_call_update"):
        status, text = found.get(update["toolCallId"], ("", ""))
        shown = "".join(part.get("content", {}).get("text", "") for part in update.get("content") or ())
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
    answers = {"session/request_permission": lambda params: chosen(params, "reject_once")}  # .envrc is protected
    async with crow(endpoint=endpoint, env={**CONFINED, "HOME": str(user_home)}, answers=answers) as agent:
        results = await outputs(agent, place)
    assert [status for status, _ in results] == ["completed", "completed"], results
    for _, text in results:
        assert "done" in text
        assert not any(secret in text for secret in ("PRIVATE", "SQLite", "sk-test", "crow.log"))
    assert (home / "config.toml").read_text() == ""
    assert os.listdir(place) == []
    assert os.listdir(user_home) == [".ssh"]


async def test_one_answer_allows_all_confined_writes_of_the_session_in_its_directory(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path
) -> None:
    other = place.parent / "other"
    other.mkdir()
    asked: list[str] = []

    def allow_writes(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params["toolCall"]["rawInput"]["command"])
        label = "Always allow commands that can only change files here"
        wider = [option["optionId"] for option in params["options"] if option["name"] == label]
        return {"outcome": {"outcome": "selected", "optionId": wider[0]}} if wider else chosen(params, "reject_once")

    answers = {"session/request_permission": allow_writes}
    async with crow(endpoint=endpoint, env=CONFINED, answers=answers) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for step in (shell("write", "echo 1 >a"), shell("write", "echo 2 >>a; X=b; echo 3 >$X"), shell("full", ":")):
            endpoint.script(step, fake.text("ok"))
            await agent.prompt(session, "go")
        assert asked == ["echo 1 >a", ":"]
        assert ((place / "a").read_text(), (place / "b").read_text()) == ("1\n2\n", "3\n")
        await agent.request("session/close", {"sessionId": session})
        await agent.load_session(session, other)
        endpoint.script(shell("write", "echo 4 >a"), fake.text("ok"))
        await agent.prompt(session, "go")
        assert asked == ["echo 1 >a", ":", "echo 4 >a"]
        await agent.prompt(session, "/permissions")
        listed = agent.text(session)
        assert f"allow `shell --access write` (only in {place}, so not here)" in listed
        assert f"allow `shell --access write` (in {other})" in listed
    async with crow(endpoint=endpoint, env={"CROW_SANDBOX": "off"}, answers=answers) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        endpoint.script(shell("write", "echo 5 >a"), fake.text("ok"))
        await agent.prompt(session, "go")
    assert asked[3:] == ["echo 5 >a"], "nothing confines it now"
    assert (place / "a").read_text() == "1\n2\n"


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_no_process_of_a_command_outlives_crow(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, end: str
) -> None:
    sandbox = choose_sandbox().sandbox
    if end == "kill" and sandbox is not None and not sandbox.name.startswith("bubblewrap"):
        pytest.skip(f"needs bubblewrap; {sandbox.name} cannot end processes if crow is killed")
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


@pytest.mark.long
@pytest.mark.parametrize("only_landlock", [False, True], ids=["any sandbox", "landlock"])
async def test_commands_cannot_read_a_denied_file(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, only_landlock: bool
) -> None:
    # Under Landlock, a hidden directory makes the directories above it unlistable.
    landlock = only_landlock or isinstance(choose_sandbox().sandbox, Landlock)
    rules = ["read_file(.env)", "read_file(config/*.key)"] + ["read_file(private/)"] * (not landlock)
    configured(home, f"[permissions]\ndeny = {rules}\n")
    names = [".env", "a/b/c/.ENV", "config/x.key", *["private/deep/file"] * (not landlock)]
    for name in (*names, "config/plain", "plain"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("KEY=SECRET-0123\n" if name in names else "KEY=public\n")
    os.link(place / ".env", place / "a" / "other-name")
    (place / "link").symlink_to("config/x.key")
    reads = (
        "cat .env; cat a/other-name link; cat * .[a-z]* */*; echo done",
        "grep -r KEY . || true; echo done",
        "tar cf - . 2>/dev/null | tr -d '\\0'; echo done",
        "find . -type f -exec cat {} +; echo done",
    )
    moves = "mv .env moved; cp config/x.key copied; mv config cfg; mv private open; ln .env linked; cat *; echo done"
    endpoint.script(
        *(shell("read", command) for command in reads),
        shell("write", moves),
        shell("read", "cat moved copied linked cfg/* open/deep/*; echo done"),
        shell("read", "cat * */*; echo done", background=True),
        fake.text("Done."),
    )
    before = without_bubblewrap() if only_landlock else ""
    answers = {"session/request_permission": lambda params: chosen(params, "allow_once")}
    async with crow(endpoint=endpoint, env=CONFINED, answers=answers, before=before) as agent:
        results = await outputs(agent, place)
    sent = "".join(request.raw.decode() for request in endpoint.asked)
    assert len(results) == len(reads) + 3
    assert all("done" in text for _, text in results), results
    assert "KEY=public" in sent, results
    assert "SECRET-0123" not in sent + str(results)


NO_NETWORK = r"Hosts not reached: crow\.invalid: |`network = true`"
"""With layers, the proxy names the host; without them, crow judges by the output."""


SWALLOWED = (
    ("read", "curl -sS https://crow.invalid/x || true", NO_NETWORK),
    ("read", "curl -s https://crow.invalid/x 2>/dev/null || true", NO_NETWORK),
    ("write", "git clone -q https://crow.invalid/x 2>&1 | tail -1", NO_NETWORK),
    ("write", "touch /etc/nest || true", 'use access "full"'),
    ("write", "touch /etc/nest; echo done", 'use access "full"'),
    ("read", "printf 'a.py:3: raise PermissionError' && echo; echo Permission denied || true", ""),
    ("read", "echo curl || true", ""),
)


@pytest.mark.long
async def test_a_failure_for_want_of_access_that_the_command_swallows_is_explained(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path
) -> None:
    async with crow(endpoint=endpoint, env=CONFINED) as agent:
        await agent.initialize()
        for access, command, hint in SWALLOWED:
            endpoint.script(shell(access, command), fake.text("Done."))
            session = await agent.new_session(place)
            await agent.request("session/set_mode", {"sessionId": session, "modeId": "auto"})
            await agent.prompt(session, "go")
            (result,) = [each["content"] for each in endpoint.asked[-1].body["messages"] if each["role"] == "tool"]
            explained = re.search(hint or r"\[(Access was|Confined commands)", result) is not None
            assert (command, explained) == (command, hint != ""), result
