"""`crow acp --connect` as an editor starts it: a process of its own, and a server on a socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest

from crow.bridge import loop
from crow.protocol import frames
from tests.support.fake_server import FakeServer

ROOT = Path(__file__).parents[2]
INITIALIZE = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}\n'
NEEDLESS = {
    "argparse",
    "asyncio",
    "dataclasses",
    "enum",
    "hashlib",
    "json",
    "re",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "typing",
}
"""Modules of the standard library that each take at least 2 ms."""

AT_EACH_MESSAGE = """
import os, sys
sys.argv[1:] = ["acp", "--connect", sys.argv[1]]
from crow.__main__ import main
write = os.write
def watched(fd, data):
    if fd == 1:
        write(2, "\\n".join([*sys.modules, "--", ""]).encode())
    return write(fd, data)
os.write = watched
sys.exit(main())
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeServer]:
    async with FakeServer(tmp_path / "crow.sock") as server:
        yield server


async def start(*arguments: object, code: str = "", env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = ["-c", code] if code else ["-m", "crow", "acp", "--connect"]
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | (env or {})
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, *map(str, arguments), stdin=pipe, stdout=pipe, stderr=pipe, env=variables
    )


async def say(process: asyncio.subprocess.Process, line: bytes) -> object:
    """Send a line; the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    with anyio.fail_after(60):
        return json.loads(await process.stdout.readline())


def run(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run it with an editor that says nothing. Returns the exit code, stdout and stderr."""
    stdin, held = os.pipe()  # at the end of stdin, it does not wait for a connection
    try:
        done = subprocess.run(
            [sys.executable, "-m", "crow", "acp", *map(str, arguments)],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | (env or {}),
        )
    finally:
        os.close(stdin)
        os.close(held)
    return done.returncode, done.stdout, done.stderr


async def test_the_first_answers_come_before_anything_slow_is_imported(server: FakeServer) -> None:
    process = await start(server.path, code=AT_EACH_MESSAGE)
    for _ in range(2):
        assert "result" in json.dumps(await say(process, INITIALIZE))
    _, stderr = await process.communicate(b"")
    loaded, later = (set(part.split("\n")) for part in stderr.decode().split("--\n")[:2])
    assert "crow.bridge.loop" in loaded
    assert later - loaded == {"crow.bridge.journal", "crow.bridge.messages", "crow.bridge.questions", "_json"}
    assert later & NEEDLESS == set()
    own = {"crow", "crow.__main__", "crow.bridge", "crow.bridge.loop", "crow.bridge.websocket", "crow.bridge.wire"}
    assert {name for name in loaded if name.partition(".")[0] == "crow"} == own
    assert {
        name
        for name in loaded - {"__main__"}  # the file of ours is not the file of theirs
        if getattr(sys.modules.get(name), "__file__", None) and "site-packages" in str(sys.modules[name].__file__)
    } <= {"_distutils_hack"}


async def test_the_end_of_stdin_ends_it_quietly(server: FakeServer) -> None:
    process = await start(server.path)
    assert "result" in json.dumps(await say(process, INITIALIZE))
    assert await process.communicate(b"") == (b"", b"")
    assert process.returncode == 0
    assert await server.last.closed_with == b"\x03\xe8"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_is_the_end_of_stdin(server: FakeServer, number: int) -> None:
    process = await start(server.path)
    # The second answer comes after the signals are handled.
    for _ in range(2):
        assert "result" in json.dumps(await say(process, INITIALIZE))
    process.send_signal(number)
    with anyio.fail_after(60):
        assert (await process.wait(), await process.communicate(b"")) == (0, (b"", b""))


async def test_an_answer_is_awaited_when_stdin_ends_right_after_the_request(server: FakeServer) -> None:
    process = await start(server.path)
    stdout, stderr = await process.communicate(INITIALIZE.rstrip())
    assert (json.loads(stdout)["id"], stderr, process.returncode) == (1, b"", 0)


async def test_the_token_comes_from_a_private_file_or_the_environment(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    file.chmod(0o600)
    for arguments, env in (
        ((server.path, "--token-file", file), {"CROW_TOKEN": "x"}),
        ((server.path,), {"CROW_TOKEN": "y"}),
    ):
        process = await start(*arguments, env=env)
        await say(process, INITIALIZE)
        await process.communicate(b"")
    assert [each.headers["authorization"] for each in server.connections] == ["Bearer from-file", "Bearer y"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--connect", "/nowhere/crow.sock"], "no such socket"),
        (["--connect", "http://localhost/acp"], "expected ws://, wss:// or the path of a socket"),
        (["--connect", "wss://me:secret@localhost/acp"], "put a token into CROW_TOKEN"),
        (["--connect", "ws://localhost:x"], "has no valid host and port"),
        (["--connect", "ws://127.0.0.1:1/acp"], "Cannot reach ws://127.0.0.1:1/acp"),
        (["--connect", "ws://crow.example.org/acp"], "unencrypted. Use wss://"),
        (["--connect", "/nowhere", "--token-file", "/nowhere/token"], "cannot be read"),
        (["--connect", "/nowhere", "--mode", "auto"], "--mode has no effect with --connect"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(arguments: Sequence[str], words: str) -> None:
    code, stdout, stderr = run(*arguments, env={"CROW_TOKEN": "secret-token"} if "example" in arguments[1] else None)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("crow: ")
    assert words in stderr
    assert stderr.count("\n") == 1
    assert "secret" not in stderr


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t0ken")
    file.chmod(0o640)
    code, _, stderr = run("--connect", "/nowhere", "--token-file", file)
    assert (code, f"chmod 600 {file}" in stderr, "t0ken" in stderr) == (2, True, False)


def test_the_bridge_accepts_the_same_lines_as_the_agent() -> None:
    assert loop.MAX_LINE_BYTES == frames.MAX_LINE_BYTES
