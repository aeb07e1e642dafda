"""The helper that starts confined commands in namespaces, and what commands could do to it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from crow.tools.process import HiddenKeys, child_environment
from crow.tools.sandbox import Confinement, launched
from crow.tools.sandbox.bubblewrap import Bubblewrap
from crow.tools.sandbox.confiner import KernelConfiner, choose_sandbox
from crow.tools.workspace import DiskWorkspace
from tests.tools.confined import Place, as_user, run
from tests.tools.conftest import until_gone

LIMIT_S = 60
USER = "root" if os.geteuid() == 0 else "user"


def launcher_of(workspace: DiskWorkspace) -> launched.Launcher:
    confiner = workspace._confiner
    assert isinstance(confiner, KernelConfiner)
    return confiner._launcher


def scenario(command: str, access: Any = "write") -> Any:
    """Return the result of a command that the helper has started."""

    async def ran(place: Place) -> Any:
        workspace = place.open()
        result = await run(workspace, access, command)
        assert launcher_of(workspace).works
        return result

    return as_user(USER, ran, needs="bubblewrap")


def test_a_command_inherits_no_open_file_of_the_helper() -> None:
    assert scenario("for f in /proc/self/fd/*; do [ ! -e $f ] || echo ${f##*/}; done") == [0, "0\n1\n2\n"]


def test_a_command_cannot_look_into_the_first_process_nor_end_it() -> None:
    files = "/proc/1/environ /proc/1/mem /proc/1/maps /proc/1/fd/*"
    links = "/proc/1/cwd /proc/1/root /proc/1/exe /proc/1/fd/* /proc/1/ns/*"
    kills = "for s in INT TERM HUP QUIT KILL STOP SEGV USR1 ALRM; do kill -$s 1; done; kill -9 -1"
    code, output = scenario(f"cat {files}; readlink {links}; echo x >/proc/1/mem; {kills}; echo done; exit 7")
    assert code == 7
    errors = (
        "Permission denied",
        "No such process",
        "No such file or directory",
        "No such device or address",
        "Read-only file system",
    )
    assert [line for line in output.splitlines() if not line.endswith(errors)] == ["done"], output


def test_a_command_has_no_rights_over_its_mounts_and_namespaces() -> None:
    attack = """
        for line in 'mount -t tmpfs x /mnt' 'mount --bind /usr /mnt' 'mount -o remount,rw,bind /' 'umount -l /proc' \\
            'umount -l /home' 'umount -l /tmp' 'unshare -r true' 'unshare -m true' 'nsenter -t 1 -m true' \\
            'nsenter -t 1 -U true' 'mknod d b 8 0' 'chroot / true' 'hostname other' 'sysctl -w kernel.hostname=x' \\
            'ip link set lo down' 'ip link add d type dummy'
        do
            $line >/dev/null 2>&1 && echo "$line"
        done
        grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status | tr -s '\\t\\n' ' '
    """
    none = " ".join(f"Cap{kind}: {'0' * 16}" for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    assert scenario(attack) == [0, f"{none} NoNewPrivs: 1 Seccomp: 2 "]


def test_the_helper_has_none_of_crows_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROW_TEST_TOKEN", "sk-very-secret")

    async def ran(place: Place) -> Any:
        workspace = place.open()
        result = await run(workspace, "write", "cat /proc/*/environ")
        process = launcher_of(workspace)._helper._process
        assert process is not None
        return result[1], await anyio.Path(f"/proc/{process.pid}/environ").read_text()

    output, environment = as_user(USER, ran, needs="bubblewrap")
    assert environment.startswith("CROW_STARTED=")
    assert environment.count("=") <= 2, "at most the locale is added"
    assert "sk-very-secret" not in output


def test_where_the_helper_fails_bubblewrap_confines_the_same_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def ran(place: Place) -> Any:
        workspace = place.open()
        results = [await run(workspace, "write", "echo x >new; cat new; ls ~"), await run(workspace, "read", "exit 3")]
        return results, launcher_of(workspace).works

    results, works = as_user(USER, ran, needs="bubblewrap")
    assert (results, works) == ([[0, "x\nproject\n"], [3, ""]], False)


def failing_helper(directory: Path, tells_pid: str) -> str:
    """Return a helper whose sandboxes fail before they read a plan. It tells their process ids before or after that."""
    program = (
        Path(launched._PROGRAM).read_text().replace("    os.setsid()\n", '    raise OSError(1, "not allowed")\n', 1)
    )
    if tells_pid == "after":
        line = "            with suppress(OSError):  # crow"
        program = program.replace(line, f"            connection.recv(9)\n{line}", 1)
    (directory / "launcher.py").write_text(program)
    return str(directory / "launcher.py")


async def start_late(launcher: launched.Launcher, tells_pid: str, directory: Path) -> None:
    """Start a command when its sandbox has failed."""
    async with launcher.reserved(has_network=False) as reservation:
        with anyio.fail_after(LIMIT_S):
            await anyio.wait_readable(reservation._report)
        if tells_pid == "after":
            (await launcher._helper.connection()).send(b"go on")
        else:
            await reservation._find_pid()
            await until_gone(reservation._pid)
        confinement = Confinement(access="read", temporary=directory)
        await reservation.start(["/bin/true"], confinement, cwd=directory, env={}, on_output=print)


@pytest.mark.parametrize("tells_pid", ["before", "after"])
async def test_a_sandbox_that_fails_before_it_gets_its_plan_is_an_error_of_the_helper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tells_pid: str
) -> None:
    if not isinstance(choose_sandbox().sandbox, Bubblewrap):
        pytest.skip("needs bubblewrap")
    monkeypatch.setattr(launched, "_PROGRAM", failing_helper(tmp_path, tells_pid))
    launcher = launched.Launcher()
    with pytest.raises(launched.NotLaunchedError, match="not allowed"):
        await start_late(launcher, tells_pid, tmp_path)
    assert not launcher.works
    await launcher.close()


def test_a_helper_that_was_killed_is_replaced_by_bubblewrap_and_its_commands_go_on() -> None:
    async def ran(place: Place) -> Any:
        workspace = place.open()
        output = ""

        def note(text: str) -> None:
            nonlocal output
            output += text

        command = await workspace.spawn("echo begun; read line </tmp/go; echo ended", note, access="write")
        await run(workspace, "write", "mkfifo /tmp/go")
        helper = launcher_of(workspace)._helper._process
        assert helper is not None
        os.kill(helper.pid, signal.SIGKILL)
        await helper.exited.wait()
        result = await run(workspace, "write", "echo again")
        await command.end(0)
        return result, command.returncode, output

    result, code, output = as_user(USER, ran, needs="bubblewrap")
    assert result == [0, "again\n"]
    assert "begun" in output or code is not None


def test_a_program_that_does_not_exist_is_an_error_of_the_command_and_not_of_the_helper() -> None:
    async def ran(place: Place) -> Any:
        workspace = place.open()
        confiner = workspace._confiner
        assert confiner is not None
        output = bytearray()
        process = await confiner.start(
            ["/no/such/program"], "write", cwd=place.root, env=child_environment(HiddenKeys()), on_output=output.extend
        )
        await process.wait()
        await process.end(0)
        return process.returncode, launcher_of(workspace).works, bool(output)

    assert as_user(USER, ran, needs="bubblewrap") == [127, True, True]


def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    async def ran(place: Place) -> Any:
        workspace = place.open()
        await run(workspace, "write", "true")  # the helper runs
        children = anyio.Path(f"/proc/self/task/{os.getpid()}/children")
        before = await children.read_text()  # with those of other tests
        for _ in range(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, workspace, "write", "sleep 1000")
                await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            await workspace.reap()
        others = set((await children.read_text()).split()) - set(before.split())
        return [await anyio.Path(f"/proc/{pid}/status").read_text() for pid in others]

    assert as_user(USER, ran, needs="bubblewrap") == []


def test_everything_in_a_sandbox_dies_with_crow(tmp_path: Path) -> None:
    if not isinstance(choose_sandbox().sandbox, Bubblewrap):
        pytest.skip("needs bubblewrap")
    script = textwrap.dedent("""
        import asyncio, pathlib, sys
        from crow.tools.sandbox.confiner import KernelConfiner
        from crow.tools.sandbox.policy import SandboxOptions
        from crow.tools.workspace import DiskWorkspace

        async def main():
            root = pathlib.Path(sys.argv[1])
            workspace = DiskWorkspace(root, confiner=KernelConfiner([root], SandboxOptions()))
            await workspace.spawn("setsid sleep 98765 & sleep 98765", lambda _: None, access="write")
            assert workspace._confiner._launcher.works
            print("begun", flush=True)
            await asyncio.sleep(1000)

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as crow:
        assert crow.stdout is not None
        assert crow.stdout.readline() == b"begun\n"
        with open(f"/proc/{crow.pid}/task/{crow.pid}/children") as file:
            handles = [os.pidfd_open(int(pid)) for pid in file.read().split()]
        assert len(handles) == 2, "the helper and the first process of the sandbox"
        crow.kill()
        crow.wait()
    for handle in handles:
        assert select.select([handle], [], [], LIMIT_S)[0], "it has ended"
        os.close(handle)
