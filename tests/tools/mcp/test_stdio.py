from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any, Literal

import anyio
import mcp_types as mcp
import pytest
from mcp.shared.message import SessionMessage

from crow.domain.errors import ToolServerError
from crow.tools.mcp.stdio import ServerProcess
from crow.tools.process import HiddenKeys
from crow.tools.sandbox.confiner import KernelConfiner
from crow.tools.sandbox.policy import SandboxOptions
from crow.tools.servers import THE_WORKSPACE, StdioServer
from crow.tools.workspace import DiskWorkspace
from tests.tools.confined import USERS, Place, as_user
from tests.tools.conftest import pids_in, stdio, until_gone

ROOT = Path(__file__).parents[3]
PING = SessionMessage(mcp.JSONRPCRequest(jsonrpc="2.0", id=1, method="tools/list"))


def python(program: str, **more: Any) -> StdioServer:
    return StdioServer(name="srv", command=sys.executable, args=("-I", "-S", "-c", program), **more)


async def test_messages_go_both_ways_and_other_output_is_ignored(root: Path) -> None:
    async with ServerProcess(stdio("unruly.py", "garbage"), DiskWorkspace(root)) as (read, write):
        await write.send(PING)
        with anyio.fail_after(60):
            stray, answer = await read.receive(), await read.receive()
    assert isinstance(stray, SessionMessage)
    assert isinstance(answer, SessionMessage)
    assert isinstance(stray.message, mcp.JSONRPCResponse)
    assert stray.message.id == 999
    assert isinstance(answer.message, mcp.JSONRPCResponse)
    assert [tool["name"] for tool in answer.message.result["tools"]] == ["echo", "echo"]


async def test_a_server_gets_a_minimal_environment_and_its_own_variables(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("SOME_VARIABLE", "x")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("TZ", "hidden by its name")
    monkeypatch.setenv("HTTP_PROXY", "http://hidden-by-value@proxy.example")
    keys = HiddenKeys(variables=frozenset({"TZ", "OPENAI_API_KEY"}), values=("hidden-by-value",))
    given = (("GIVEN", "1"), ("OPENAI_API_KEY", "on purpose"))
    program = (
        "import json, os; print(json.dumps({'jsonrpc': '2.0', 'id': 1, 'result': "
        "{**{k: os.environ.get(k) for k in"
        " ('OPENAI_API_KEY', 'SOME_VARIABLE', 'LANG', 'GIVEN', 'TZ', 'HTTP_PROXY')}}}))"
    )
    async with ServerProcess(python(program, env=given), DiskWorkspace(root), lambda: keys) as (read, _):
        with anyio.fail_after(60):
            message = await read.receive()
    assert isinstance(message, SessionMessage)
    assert isinstance(message.message, mcp.JSONRPCResponse)
    assert message.message.result == {
        "OPENAI_API_KEY": "on purpose",
        "SOME_VARIABLE": None,
        "LANG": "C.UTF-8",
        "GIVEN": "1",
        "TZ": None,
        "HTTP_PROXY": None,
    }


async def test_a_server_starts_in_an_empty_private_directory_that_is_removed(root: Path) -> None:
    (root / "json.py").write_text("raise SystemExit('code of the workspace')")
    program = (
        "import os, stat; here = os.stat('.'); "
        "import json; print(json.dumps({'jsonrpc': '2.0', 'id': 1, 'result': "
        "{'cwd': os.getcwd(), 'files': os.listdir(), 'mode': stat.S_IMODE(here.st_mode)}}), flush=True); input()"
    )
    server = StdioServer(name="srv", command=sys.executable, args=("-S", "-c", program))
    async with ServerProcess(server, DiskWorkspace(root)) as (read, _):
        with anyio.fail_after(60):
            message = await read.receive()
        assert isinstance(message, SessionMessage)
        assert isinstance(message.message, mcp.JSONRPCResponse)
        result = message.message.result
        assert await anyio.Path(result["cwd"]).exists()
    assert (result["files"], result["mode"]) == ([], 0o700)
    assert not Path(result["cwd"]).is_relative_to(root)
    assert not await anyio.Path(result["cwd"]).exists()


async def test_its_directory_is_in_a_place_outside_of_the_workspace(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = (
        "import json, os; print(json.dumps({'jsonrpc': '2.0', 'id': 1, 'result': {'cwd': os.getcwd()}}), flush=True); "
        "input()"
    )
    places = (root / "cache", tmp_path / "file" / "none", tmp_path / "own" / "servers", tmp_path)
    async with ServerProcess(python(program), DiskWorkspace(root), places=places) as (read, _):
        with anyio.fail_after(60):
            message = await read.receive()
    assert isinstance(message, SessionMessage)
    assert isinstance(message.message, mcp.JSONRPCResponse)
    assert Path(message.message.result["cwd"]).is_relative_to(tmp_path / "own" / "servers")
    assert os.listdir(tmp_path / "own" / "servers") == []


@pytest.mark.parametrize("command", ["./server", "bin/server", "tool-of-the-workspace"])
async def test_no_command_is_looked_up_in_the_workspace(
    root: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (root / "bin").mkdir()
    for name in ("server", "bin/server", "tool-of-the-workspace"):
        (root / name).write_text('#!/bin/sh\ntouch "$0.ran"\n')
        (root / name).chmod(0o755)
    monkeypatch.chdir(root)
    monkeypatch.setenv("PATH", f":.:{root}:{os.environ['PATH']}")
    transport = ServerProcess(StdioServer(name="srv", command=command), DiskWorkspace(root))
    with pytest.raises(ToolServerError) as error:
        await transport.__aenter__()
    assert str(error.value) in (
        f"its command is {command}; expected an absolute path or the name of a program on PATH",
        f"{command} is not on PATH (directories of the workspace do not count)",
    )
    assert sorted(os.listdir(root)) == ["bin", "server", "tool-of-the-workspace"]
    assert os.listdir(root / "bin") == ["server"]


async def test_path_of_a_server_has_no_relative_directory_and_none_of_the_workspace(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(root)
    monkeypatch.setenv("PATH", f"bin:.::{root}/bin:{tmp_path}/link/.venv/bin:/usr/bin:{tmp_path}:/bin")
    program = "import json, os; print(json.dumps({'jsonrpc': '2.0', 'id': 1, 'result': {'path': os.environ['PATH']}}))"
    async with ServerProcess(python(program), DiskWorkspace(root)) as (read, _):
        with anyio.fail_after(60):
            message = await read.receive()
    assert isinstance(message, SessionMessage)
    assert isinstance(message.message, mcp.JSONRPCResponse)
    assert message.message.result == {"path": f"/usr/bin:{tmp_path}:/bin"}


async def test_a_server_to_be_confined_is_not_started_if_nothing_confines(root: Path, tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'ran')!r}, 'w')"
    transport = ServerProcess(python(program, sandbox="write"), DiskWorkspace(root))
    with pytest.raises(ToolServerError, match=r'its setting sandbox = "write" cannot be enforced: .*"off"'):
        await transport.__aenter__()
    assert not (tmp_path / "ran").exists()


PROBES = """
import json, os, socket, sys
def attempt(action):
    try:
        action()
        return "done"
    except OSError as error:
        return type(error).__name__
workspace, outside, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
result = {
    "file in the workspace": attempt(lambda: open(workspace + "/made", "w").close()),
    "protected file": attempt(lambda: open(workspace + "/AGENTS.md", "a").close()),
    "own directory": attempt(lambda: open("made", "w").close()),
    "secret outside": attempt(lambda: open(outside + "/secret").close()),
    "network": attempt(lambda: socket.create_connection(("127.0.0.1", port), 60).close()),
}
attempt(lambda: open(outside + "/made", "w").close())  # may succeed in its own /tmp
print(json.dumps({"jsonrpc": "2.0", "id": 1, "result": result}), flush=True)
input()
"""


@pytest.mark.parametrize("access", ["read", "write"])
async def test_a_confined_server_reaches_what_a_command_with_its_access_reaches(
    root: Path, tmp_path: Path, access: Literal["read", "write"]
) -> None:
    own = (str(ROOT), sys.prefix, sys.base_prefix)
    confiner = KernelConfiner([root], SandboxOptions(enabled="required", readable=own))
    workspace = DiskWorkspace(root, confiner=confiner)
    status = await workspace.sandbox_status()
    if not status.name:
        pytest.skip(status.problem)
    has_views = status.name.startswith("bubblewrap")  # Landlock refuses what bubblewrap does not even show
    (root / "AGENTS.md").touch()
    (tmp_path / "secret").write_text("s")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = (THE_WORKSPACE, str(tmp_path), str(listener.getsockname()[1]))
        server = StdioServer(
            name="srv", command=sys.executable, args=("-I", "-S", "-c", PROBES, *arguments), sandbox=access
        )
        async with ServerProcess(server, workspace) as (read, _):
            with anyio.fail_after(60):
                message = await read.receive()
    await workspace.close()
    assert isinstance(message, SessionMessage)
    assert isinstance(message.message, mcp.JSONRPCResponse)
    found = message.message.result
    assert found == {
        "file in the workspace": found["file in the workspace"] if access == "read" else "done",
        "protected file": "OSError" if access == "write" and has_views else found["protected file"],
        "own directory": "done",
        "secret outside": "FileNotFoundError" if has_views else "PermissionError",
        "network": "ConnectionRefusedError" if has_views else "OSError",
    }
    assert (root / "made").exists() is (access == "write")
    assert not (tmp_path / "made").exists()
    assert (root / "AGENTS.md").read_text() == ""


async def test_a_polite_server_ends_with_its_input(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.tools.mcp.stdio.CLOSE_S", 60)
    transport = ServerProcess(python("import sys; sys.stdin.read(); sys.exit(5)"), DiskWorkspace(root))
    async with transport:
        pass
    assert transport.returncode == 5


async def test_a_server_that_ignores_everything_is_killed_with_its_children(root: Path, tmp_path: Path) -> None:
    transport = ServerProcess(stdio("unruly.py", "deaf", str(tmp_path / "pids")), DiskWorkspace(root))
    async with transport:
        pids = await pids_in(tmp_path / "pids")
    assert transport.returncode == -9
    for pid in pids:
        await until_gone(pid)


async def test_leaving_by_cancellation_ends_the_server_too(root: Path, tmp_path: Path) -> None:
    with anyio.CancelScope() as scope:
        async with ServerProcess(stdio("unruly.py", "mute", str(tmp_path / "pids")), DiskWorkspace(root)):
            pids = await pids_in(tmp_path / "pids")
            scope.cancel()
            await anyio.sleep_forever()
    for pid in pids:
        await until_gone(pid)


async def test_the_end_of_a_server_closes_the_stream_and_ends_its_children(root: Path, tmp_path: Path) -> None:
    transport = ServerProcess(stdio("unruly.py", "leaves-child", str(tmp_path / "pids")), DiskWorkspace(root))
    async with transport as (read, write):
        with anyio.fail_after(60):
            with pytest.raises(anyio.EndOfStream):
                await read.receive()
            await transport.closed.wait()
        assert transport.reason == "it ended with exit code 0"
        with pytest.raises(anyio.BrokenResourceError):
            await write.send(PING)
    for pid in await pids_in(tmp_path / "pids"):
        await until_gone(pid)


async def test_closed_output_is_the_end_even_if_the_server_lives(root: Path) -> None:
    transport = ServerProcess(python("import os, time; os.close(1); time.sleep(600)"), DiskWorkspace(root))
    async with transport as (read, _):
        with anyio.fail_after(60), pytest.raises(anyio.EndOfStream):
            await read.receive()
        assert transport.reason == "it closed its output"


async def test_standard_error_is_logged_up_to_a_bound_and_its_end_is_kept(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    program = "import sys; sys.stderr.write('x\\n' * 5000 + 'no token: \\xe4\\n')"
    transport = ServerProcess(python(program), DiskWorkspace(root))
    async with transport:
        with anyio.fail_after(60):
            await transport.closed.wait()
    assert transport.last_words.endswith("x\nno token: ä")
    lines = [record.getMessage() for record in caplog.records if record.name == "crow.tools.mcp.stdio"]
    assert len(lines) == 1001
    assert (lines[0], lines[-1]) == ("srv: x", "srv: further lines are not logged")


async def test_an_endless_line_ends_the_connection(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.tools.mcp.stdio.LINE_BYTES", 1_000_000)
    transport = ServerProcess(stdio("unruly.py", "endless-line"), DiskWorkspace(root))
    async with transport as (read, _):
        with anyio.fail_after(60), pytest.raises(anyio.EndOfStream):
            await read.receive()
        assert transport.reason == "it sent a line of more than 1,000,000 bytes"


async def test_a_server_that_does_not_read_blocks_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.tools.mcp.stdio.UNREAD_BYTES", 1_000_000)
    transport = ServerProcess(stdio("unruly.py", "mute"), DiskWorkspace(root))
    request = SessionMessage(
        mcp.JSONRPCRequest(jsonrpc="2.0", id=1, method="tools/call", params={"text": "x" * 300_000})
    )
    async with transport as (_, write):
        with anyio.fail_after(60):
            for _ in range(4):
                await write.send(request)
            await transport.closed.wait()
        assert transport.reason == "it left 1,000,000 bytes of requests unread"


async def test_a_server_that_sends_only_line_ends_is_paused_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.tools.mcp.stdio.QUEUED_BYTES", 10_000)
    program = "import sys\nfor number in range(1_000): sys.stdout.write('\\n' * 10_000)"
    server = ServerProcess(python(program), DiskWorkspace(root))
    async with server:
        with anyio.fail_after(60):
            while not server._is_paused and not server.closed.is_set():  # noqa: ASYNC110 - reading raises no event
                await anyio.sleep(0.005)
        assert server._is_paused


async def test_a_slow_reader_pauses_the_server_and_loses_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.tools.mcp.stdio.QUEUED_BYTES", 10_000)
    program = (
        "import json\nfor number in range(5000): "
        "print(json.dumps({'jsonrpc': '2.0', 'id': number, 'result': {'x': 'y' * 100}}))"
    )
    async with ServerProcess(python(program), DiskWorkspace(root)) as (read, _):
        with anyio.fail_after(60):
            messages = [message async for message in read]
    assert [
        getattr(message.message, "id", None) for message in messages if isinstance(message, SessionMessage)
    ] == list(range(5000))


@pytest.mark.parametrize("user", USERS)
def test_the_directory_of_a_server_goes_even_if_the_server_made_parts_of_it_read_only(user: str) -> None:
    async def scenario(place: Place) -> Any:
        program = "mkdir made; touch made/file; chmod 500 made; mkdir done; read line"
        server = ServerProcess(StdioServer(name="srv", command="/bin/sh", args=("-c", program)), place.open())
        async with server:
            assert server._private is not None
            directory = server._private.path
            with anyio.fail_after(60):
                while not (directory / "temporary" / "work" / "done").exists():  # noqa: ASYNC110 - made by another process
                    await anyio.sleep(0.005)
        return directory.exists()

    assert as_user(user, scenario) is False
