"""Confined commands: what must go on working, and what each access may do."""

from __future__ import annotations

import asyncio
import ensurepip
import errno
import importlib.util
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import anyio
import pytest

from crow import programs
from crow.programs import SYSTEM_PROGRAMS, Programs
from crow.tools import CommandAccess, Ports, jobs
from crow.tools import workspace as workspace_on_disk
from crow.tools.layers import Layer
from crow.tools.mcp.client import open_toolbox
from crow.tools.sandbox import Sandbox, confiner
from crow.tools.sandbox.bubblewrap import Bubblewrap
from crow.tools.sandbox.confiner import Choice, KernelConfiner, Sandboxes, choose_sandbox
from crow.tools.sandbox.policy import MAX_READ_ONLY, SandboxOptions
from crow.tools.trees import remove_tree
from crow.tools.workspace import DiskWorkspace
from tests.support.failing_calls import fail
from tests.tools.confined import USERS, Place, as_user, available, forked, run
from tests.tools.conftest import FixedPlan, RecordingLog, call, nest, skip_time

GIT = "git -c user.name=A -c user.email=a@b.c -c init.defaultBranch=main"
users = pytest.mark.parametrize("user", USERS)


@users
def test_each_access_changes_only_what_it_may(user: str) -> None:
    async def scenario(place: Place) -> Any:
        workspace = place.open()
        (place.root / "file").write_text("old\n")
        read = await run(workspace, "read", "echo new >file; cat file; echo t >/tmp/out; echo u >$TMPDIR/other")
        after_read = (place.root / "file").read_text()
        write = await run(workspace, "write", "cat /tmp/out $TMPDIR/other /var/tmp/out; echo new >file; echo x >new")
        outside = await run(workspace, "write", f"echo x >{place.outside}/new; echo x >/usr/new; echo x >~/new; :")
        await workspace.close()
        written = [(place.root / name).read_text() for name in ("file", "new")]
        escaped = [path for path in (place.outside / "new", Path("/usr/new"), place.home / "new") if path.exists()]
        has_overlay = (await workspace.sandbox_status()).has_overlay
        return has_overlay, read[1].splitlines(), after_read, write, len(outside[1].splitlines()), written, escaped

    has_overlay, read, after_read, write, failures, written, escaped = as_user(user, scenario, needs="bubblewrap")
    assert [line for line in read if line] == (["new"] if has_overlay else [*read[:-1], "old"])
    assert after_read == "old\n"
    assert write == [0, "t\nu\nt\n"]
    assert (failures, written, escaped) == (3, ["new\n", "x\n"], [])


CODES = {
    "exit 3": 3,
    "exit 137": 137,
    "exit 129": 129,
    "kill -KILL $$": -9,
    "kill -HUP $$": -1,
    "kill -SEGV $$": -11,
}


@users
def test_exit_codes_and_signals_are_those_of_the_command(user: str) -> None:
    async def scenario(place: Place) -> Any:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, commands would inherit that it is ignored
        workspace = place.open()
        return {
            command: [await run(workspace, "read", command), await run(workspace, "full", command)] for command in CODES
        }

    assert as_user(user, scenario) == {command: [[code, ""], [code, ""]] for command, code in CODES.items()}


def test_git_works() -> None:
    async def scenario(place: Place) -> Any:
        workspace = place.open()
        assert (await run(workspace, "full", f"{GIT} init -q && echo a >a && git add a && {GIT} commit -qm one"))[
            0
        ] == 0
        looked = await run(workspace, "read", "git status -s && git log --format=%s && git diff HEAD && git grep -n a")
        changed = await run(
            workspace,
            "write",
            f"echo b >a && {GIT} commit -qam two && git checkout -q -b side && echo c >c && git add c "
            f"&& {GIT} stash -q && {GIT} stash pop -q && {GIT} commit -qm three && git checkout -q main "
            f"&& {GIT} merge -q side && git tag v1 && git log --format=%s && git status -s && git gc -q "
            "&& git update-server-info",
        )
        await workspace.close()
        return looked, changed

    assert as_user(USERS[0], scenario) == [[0, "one\na:1:a\n"], [0, "three\ntwo\none\n"]]


def test_a_test_run_with_caches_needs_no_write() -> None:
    async def scenario(place: Place) -> Any:
        (place.root / "Makefile").write_text(f"test:\n\t{sys.executable} -m pytest -q -p no:anyio test_it.py\n")
        (place.root / "pytest.ini").write_text("[pytest]\n")
        (place.root / "test_it.py").write_text(
            "import socket\n"
            "def test_loopback(tmp_path):\n"
            "    server = socket.create_server(('127.0.0.1', 0))\n"
            "    client = socket.create_connection(server.getsockname())\n"
            "    server.accept()[0].sendall(b'x')\n"
            "    assert client.recv(1) == b'x'\n"
            "    (tmp_path / 'a').write_text('x')\n"
        )
        workspace = place.open()
        code, output = await run(workspace, "read", "make test && ls -d .pytest_cache")
        return (await workspace.sandbox_status()).has_overlay, code, output, sorted(os.listdir(place.root))

    has_overlay, code, output, left = as_user(USERS[0], scenario, needs="bubblewrap")
    assert "1 passed" in output
    assert (code == 0) is has_overlay
    assert left == ["Makefile", "pytest.ini", "test_it.py"]


@pytest.mark.long
def test_tests_and_linters_need_no_write_even_without_a_throwaway_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Landlock has no layer, so caches that are usually in the workspace get a place of their own."""
    monkeypatch.setattr(programs, "SYSTEM_PLACES", ())  # no bubblewrap

    async def scenario(place: Place) -> Any:
        (place.root / "pytest.ini").write_text("[pytest]\n")
        (place.root / "test_it.py").write_text(
            "import pytest\n\n\ndef test_true(pytestconfig: pytest.Config) -> None: ...\n"
        )
        (place.root / "plain.py").write_text("x: int = 1\n")
        workspace = place.open()
        binaries = Path(sys.executable).parent
        ran = await run(workspace, "read", f"{sys.executable} -m pytest -q -p no:anyio --lf")
        linted = await run(workspace, "read", f"{binaries}/ruff check . && {binaries}/mypy --strict plain.py")
        await workspace.close()
        return (await workspace.sandbox_status()).has_overlay, ran, linted, sorted(os.listdir(place.root))

    has_overlay, ran, linted, left = as_user(USERS[0], scenario)
    assert not has_overlay
    assert ran[0] == 0, ran
    assert "PytestCacheWarning" not in ran[1]
    assert linted[0] == 0, linted
    assert left == ["plain.py", "pytest.ini", "test_it.py"]


BUILDS = {
    "gcc": ({"main.c": '#include <stdio.h>\nint main(void) { puts("built"); }\n'}, "gcc -o main main.c && ./main"),
    "cargo": (
        {
            "Cargo.toml": '[package]\nname = "x"\nversion = "0.1.0"\n',
            "src/main.rs": 'fn main() { println!("built"); }\n',
        },
        "cargo build -q --offline && ./target/debug/x",
    ),
    "go": (
        {"go.mod": "module x\n", "main.go": 'package main\nfunc main() { println("built") }\n'},
        "go build -o x . && ./x",
    ),
    "npm": (
        {
            "package.json": '{"name": "x"}',
            "dep/package.json": '{"name": "dep", "version": "1.0.0"}',
            "dep/index.js": "console.log('built')",
        },
        (
            "npm install --offline --no-audit --no-fund --install-links --loglevel error ./dep >&2 "
            "&& node -e 'require(\"dep\")'"
        ),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("tool", available(*BUILDS))
def test_builds_work(tool: str) -> None:
    files, command = BUILDS[tool]
    home = os.environ["HOME"]

    async def scenario(place: Place) -> Any:
        for name, text in files.items():
            (place.root / name).parent.mkdir(exist_ok=True)
            (place.root / name).write_text(text)
        os.environ["HOME"] = home  # toolchains may be there
        workspace = place.open()
        return await run(workspace, "write", command)

    code, output = as_user(USERS[0], scenario)
    assert (code, output.splitlines()[-1:]) == (0, ["built"]), output


def pip_to_run() -> Path:
    """Where pip is: it is installed with this Python, or comes with it. To install it anew takes seconds."""
    installed = importlib.util.find_spec("pip")
    if installed is not None and installed.origin:
        return Path(installed.origin).parent
    (wheel,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    return wheel / "pip"


@pytest.mark.long
def test_packages_are_installed_from_the_network_with_a_private_cache() -> None:
    async def scenario(place: Place) -> Any:
        index = place.outside / "index" / "demo"
        index.mkdir(parents=True)
        wheel = "demo-1.0-py3-none-any.whl"
        with ZipFile(index / wheel, "w") as file:
            file.writestr("demo.py", "print('installed')")
            file.writestr("demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
            file.writestr("demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr("demo-1.0.dist-info/RECORD", "")
        (index / "index.html").write_text(f"<a href='{wheel}'>{wheel}</a>")
        handler = partial(Quiet, directory=str(index.parent))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            url = f"http://127.0.0.1:{server.server_port}/"
            pip = pip_to_run()
            command = (
                f"{sys.executable} -m venv --without-pip .venv && .venv/bin/python {pip} install -q --index-url "
                f"{url} --no-compile demo && .venv/bin/python -m demo && echo $PIP_CACHE_DIR"
            )
            reach = f"{sys.executable} -c 'import urllib.request as r; r.urlopen(\"{url}\")'"
            try:
                without = await run(place.open(), "write", reach)
                allowed = await run(place.open(network=True), "write", command)
            finally:
                server.shutdown()
                thread.join()
        return without[0], allowed, str(place.base / "caches")

    without, (code, output), caches = as_user(USERS[0], scenario)
    assert without != 0
    lines = output.splitlines()
    assert (code, lines[-2]) == (0, "installed"), output
    assert lines[-1].startswith(caches)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("shape", ["in tmp", "is home", "spaces", "newline", "linked", "additional"])
def test_every_shape_of_workspace_works(shape: str) -> None:
    async def scenario(place: Place) -> Any:
        root, more = place.root, []
        match shape:
            case "in tmp":
                root = place.outside
            case "is home":
                root = place.home
            case "spaces":
                root = place.home / "a  b 'c\" \\x"
            case "newline":
                root = place.home / "a\nb"
            case "linked":
                (place.home / "link").symlink_to(place.root)
                root = place.home / "link"
            case "additional":
                more = [place.outside]
        root.mkdir(exist_ok=True)
        workspace = place.open(root, *more)
        written = await run(workspace, "write", "echo one >file && echo two >>file && pwd -P")
        read = await run(
            workspace, "read", "cat file; touch file new; cat ~/.ssh/id_ed25519 ~/.config/crow/config.toml"
        )
        also = await run(workspace, "write", f"echo more >>{place.outside}/file")
        outside = (place.outside / "file").read_text()
        await workspace.close()
        return written, read[1], real_path(root), also[0], outside, (root / "new").exists()

    # where Landlock hides a file, nothing can be created directly in the directories above it
    needs = "bubblewrap" if shape == "is home" else ""
    written, read, real, _, outside, is_new = as_user(USERS[0], scenario, needs=needs)
    assert written == [0, real + "\n"]
    assert read.startswith("one\ntwo\n")
    assert "PRIVATE" not in read
    assert ("more" in outside) == (shape in ("in tmp", "additional"))
    assert not is_new


def test_a_linked_worktree_has_its_repository_but_a_forged_one_does_not() -> None:
    async def scenario(place: Place) -> Any:
        main, tree, forged = place.home / "main", place.home / "tree", place.home / "forged"
        setup = (
            f"{GIT} init -q {main} && cd {main} && {GIT} commit -q --allow-empty -m one && "
            f"git worktree add -q {tree} && mkdir {forged} && echo gitdir: {main}/.git >{forged}/.git"
        )
        assert (await run(place.open(), "full", setup))[0] == 0
        workspace = place.open(tree)
        committed = await run(
            workspace, "write", f"echo a >a && git add a && {GIT} commit -qm two && git log --format=%s"
        )
        attacked = await run(
            workspace,
            "write",
            f"echo '[alias] x = !sh' >>{main}/.git/config; echo x >{main}/.git/hooks/post-commit; echo x >{main}/new; "
            f"echo x >{main}/.git/worktrees/tree/gitdir; echo x >{main}/.git/commondir; echo $(ls -a {main})",
        )
        hostile = await run(place.open(forged), "read", f"ls {main}/.git; git log")
        config = (main / ".git" / "config").read_text()
        left = [
            str(path)
            for path in (main / "new", main / ".git/hooks/post-commit", main / ".git/commondir")
            if path.exists()
        ]
        return committed, attacked[1].splitlines(), hostile[0], config, left

    committed, attacked, hostile, config, left = as_user(USERS[0], scenario)
    assert committed == [0, "two\none\n"]
    assert ". .. .git" in attacked or any("ls: cannot open directory" in line for line in attacked)
    assert hostile != 0
    assert "alias" not in config
    assert left == []


@pytest.mark.parametrize("landlock", [False, True], ids=["any sandbox", "landlock"])
def test_a_workspace_inside_a_repository_can_use_it(landlock: bool, request: pytest.FixtureRequest) -> None:
    if landlock:
        request.getfixturevalue("no_bubblewrap")

    async def scenario(place: Place) -> Any:
        repository = place.home / "code" / "mono"
        inside, beside = repository / "packages" / "a", repository / "packages" / "b"
        setup = (
            f"mkdir -p {inside} {beside} && cd {repository} && {GIT} init -q && echo a >{inside}/a && "
            f"echo b >{beside}/b && git add . && {GIT} commit -qm one && echo x >{place.home}/code/secret"
        )
        assert (await run(place.open(), "full", setup))[0] == 0
        workspace = place.open(inside)
        looked = await run(workspace, "read", "git status -s && git log --format=%s && git diff HEAD && cat ../b/b")
        wrote = await run(
            workspace, "write", f"echo new >a && git status -s && {GIT} commit -qam two && git show --format=%s --stat"
        )
        attacked = await run(
            workspace,
            "write",
            "echo x >../b/b; echo x >../b/new; rm ../b/b; echo x >../../.git/hooks/post-commit; echo x >../../new; "
            "echo '[alias] x = !sh' >>../../.git/config; mv ../../.git ../../moved; cat ../../../secret",
        )
        read = await run(workspace, "read", "echo x >../../.git/new; cat ../../../secret")
        await workspace.close()
        changed = (await run(place.open(), "full", f"cd {repository} && git status -s && ls -A . .git/hooks"))[1]
        config = (repository / ".git" / "config").read_text()
        return looked, wrote, "x" in [*attacked[1].split(), *read[1].split()], changed, "alias" in config

    looked, wrote, is_seen, changed, is_configured = as_user(USERS[0], scenario)
    assert looked == [0, "one\nb\n"]
    assert wrote[0] == 0, wrote
    assert wrote[1].startswith(" M a\ntwo\n")
    assert "1 file changed" in wrote[1]
    assert not is_seen
    assert "post-commit\n" not in changed
    assert changed.startswith(".:\n.git\npackages\n")
    assert not is_configured


SURVIVOR = (
    "(setsid sh -c 'trap \"\" TERM; exec >alive; touch ready; while :; do sleep 100; done' &) ; "
    "until [ -e ready ]; do sleep 0.01; done; "
)
"""Starts a process that leaves the session, ignores SIGTERM, and holds the pipe `alive`."""


@pytest.mark.long
@users
@pytest.mark.parametrize("end", ["cancel", "timeout", "exit"])
def test_no_process_outlives_its_command(user: str, end: str) -> None:
    async def scenario(place: Place) -> Any:
        workspace = place.open()
        os.mkfifo(place.root / "alive")
        reader = os.open(place.root / "alive", os.O_RDONLY | os.O_NONBLOCK)
        last = ":" if end == "exit" else "trap 'echo bye >said; exit' TERM; echo up; while :; do sleep 0.05; done"
        output = ""
        with anyio.fail_after(1000):
            with anyio.CancelScope() as scope:

                async def on_output(_text: str) -> None:
                    if end == "cancel":
                        scope.cancel()
                    else:
                        skip_time(300)

                _, output = await workspace.run(SURVIVOR + last, access="write", timeout_s=300, on_output=on_output)
            await workspace.reap()
            os.set_blocking(reader, True)
            while await anyio.to_thread.run_sync(os.read, reader, 100):
                pass
        os.close(reader)
        said = (place.root / "said").read_text() if end != "exit" else "bye\n"
        return said, "left running" in output

    assert as_user(user, scenario) == ["bye\n", end == "exit"]


async def test_a_job_in_the_background_is_confined_and_ends(tmp_path: Path) -> None:
    if choose_sandbox().sandbox is None:
        pytest.skip(choose_sandbox().problem)
    root = tmp_path / "project"
    root.mkdir()
    options = SandboxOptions(caches=tmp_path / "caches")
    workspace = DiskWorkspace(root, confiner=KernelConfiner([root], options))
    async with open_toolbox(workspace, Ports(log=RecordingLog(), plan=FixedPlan()), ()) as toolbox:

        async def use(tool: str, /, **arguments: object) -> str:
            return (await toolbox.run(call(tool, **arguments), "c", ignore)).text

        line = "mkfifo in; touch ~/x; mkdir .vscode; echo up; cat <>in"
        started = await use("shell", command=line, background=True, access="write")
        fed = await use("shell", command="echo said >in", access="write")
        while "said" not in (output := await use("shell_output", job="job1")):
            assert "running" in output
        killed = await use("shell_kill", job="job1")
    await workspace.close()
    assert "up" in started
    assert "Read-only file system" in started or "Permission denied" in started
    assert "exit code" not in fed
    assert "[the command created .vscode; it was moved to" in fed + killed
    assert killed.endswith("[job1: ended by signal 15]")
    assert os.listdir(root) == ["in"]


UNTIL_GONE = "echo x >.envrc; mkdir .vscode; until ! [ -e .envrc ] && ! [ -e .vscode ]; do sleep 0.05; done; echo gone"


@pytest.mark.parametrize("sandbox", ["bubblewrap", "landlock"])
def test_protected_files_go_while_the_command_that_created_them_still_runs(
    sandbox: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands wait for the files to go, so they would never end."""
    monkeypatch.setattr(jobs, "CHECK_S", 0.2)
    monkeypatch.setattr(workspace_on_disk, "CHECK_S", 0.2)
    if sandbox == "landlock":
        request.getfixturevalue("no_bubblewrap")

    async def scenario(place: Place) -> Any:
        workspace = place.open()
        name = (await workspace.sandbox_status()).name
        (place.root / "AGENTS.md").write_text("rules\n")
        foreground = await run(workspace, "write", f"{UNTIL_GONE}; echo evil >>AGENTS.md", timeout_s=300)
        async with open_toolbox(workspace, Ports(log=RecordingLog(), plan=FixedPlan()), ()) as toolbox:

            async def use(tool: str, /, **arguments: object) -> str:
                return (await toolbox.run(call(tool, **arguments), "c", ignore)).text

            changed = 'echo evil >AGENTS.md; until [ "$(cat AGENTS.md)" = rules ]; do sleep 0.05; done; echo back'
            await use("shell", command=f"{UNTIL_GONE}; {changed}; cat", background=True, access="write")
            output = ""
            while "back" not in output:
                output += await use("shell_output", job="job1", wait_s=30)
        await workspace.close()
        return name, foreground, output, (place.root / "AGENTS.md").read_text(), sorted(os.listdir(place.root))

    name, (code, foreground), output, rules, left = as_user(USERS[0], scenario)
    assert name.lower().startswith(sandbox)
    assert (code == 0, foreground.startswith("gone\n")) == (sandbox == "landlock", True)
    for said in (foreground, output):
        assert "[the command created .envrc; it was moved to" in said
    assert (rules, left) == ("rules\n", ["AGENTS.md"])


GIT_RUNS = {
    "hooks in another folder": ("core.hooksPath", "tools", "tools/pre-commit"),
    "a filter": ("filter.x.clean", "python3 tools/clean.py", "tools/clean.py"),
    "an included file": ("include.path", "../shared.inc", "shared.inc"),
}


@pytest.mark.parametrize("sandbox", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("what", GIT_RUNS)
def test_what_git_would_run_stays_as_it_is(sandbox: str, what: str, request: pytest.FixtureRequest) -> None:
    if sandbox == "landlock":
        request.getfixturevalue("no_bubblewrap")
    key, value, file = GIT_RUNS[what]

    async def scenario(place: Place) -> Any:
        workspace = place.open()
        name = (await workspace.sandbox_status()).name
        (place.root / "tools").mkdir()
        (place.root / file).write_text("good\n")
        await run(workspace, "full", f"{GIT} init -q; git config {key} '{value}'")
        attack = (
            f"echo evil >{file}; echo evil >x; mv x {file}; rm {file}; mv tools t; echo evil >{file}; echo new >new"
        )
        _, output = await run(workspace, "write", attack)
        await workspace.close()
        return name, output, (place.root / file).read_text(), (place.root / "new").read_text()

    name, output, content, new = as_user(USERS[0], scenario)
    assert name.lower().startswith(sandbox)
    assert (content, new) == ("good\n", "new\n"), output


def real_path(path: Path) -> str:
    return os.path.realpath(path)


async def ignore(_text: str) -> None: ...


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crow finds no bubblewrap."""
    monkeypatch.setattr(programs, "SYSTEM_PLACES", ())


def test_more_protected_files_than_can_be_mounted_are_put_back() -> None:
    async def scenario(place: Place) -> Any:
        for number in range(MAX_READ_ONLY + 5):
            (place.root / f"d{number}").mkdir()
            (place.root / f"d{number}" / "AGENTS.md").write_text("rules\n")
        workspace = place.open()
        _, output = await run(workspace, "write", "for d in d*; do echo x >>$d/AGENTS.md; mv $d x$d; done 2>&1")
        await workspace.close()
        texts = [(place.root / f"d{number}" / "AGENTS.md").read_text() for number in range(MAX_READ_ONLY + 5)]
        return output, texts

    output, texts = as_user(USERS[0], scenario, needs="bubblewrap")
    assert texts == ["rules\n"] * (MAX_READ_ONLY + 5)
    assert output.count("Read-only file system") == MAX_READ_ONLY


@pytest.mark.usefixtures("no_bubblewrap")
def test_a_refused_socket_under_landlock_is_explained_as_a_lack_of_network() -> None:
    async def scenario(place: Place) -> Any:
        workspace = place.open()
        code, output = await run(workspace, "read", f"{sys.executable} -c 'import socket; socket.socket()'")
        hint = workspace.explain_failure("read", output, has_failed=code != 0)
        await workspace.close()
        return output, hint

    output, hint = as_user(USERS[0], scenario)
    assert "Network is unreachable" in output
    assert 'use access "full"' in hint
    assert "`network = true`" in hint


@pytest.mark.usefixtures("no_bubblewrap")
def test_landlock_confines_and_protected_files_are_put_back() -> None:
    async def scenario(place: Place) -> Any:
        workspace = place.open()
        name = (await workspace.sandbox_status()).name
        (place.root / "AGENTS.md").write_text("rules\n")
        read = await run(workspace, "read", f"echo x >new; echo x >{place.outside}/file; cat ~/.ssh/id_ed25519; pwd")
        write = await run(workspace, "write", "echo x >new; echo evil >>AGENTS.md; mkdir .vscode; echo t >$TMPDIR/t")
        shared = await run(workspace, "read", "cat $TMPDIR/t; false")
        hint = workspace.explain_failure("read", read[1])
        await workspace.close()
        left = [(place.root / "AGENTS.md").read_text(), (place.outside / "file").read_text()]
        return name, read[1], write, shared, hint, left, sorted(os.listdir(place.root))

    name, read, (code, output), shared, hint, left, names = as_user(USERS[0], scenario)
    assert name.startswith("Landlock")
    assert read.count("denied") == 3
    assert "PRIVATE" not in read
    assert code == 0
    assert "the command changed AGENTS.md; the former content was put back" in output
    assert "the command created .vscode; it was moved to" in output
    assert shared == [1, "t\n"]
    assert hint.startswith(
        '[Access was "read", which lets a command change only $TMPDIR. To change files in the workspace, use access '
    )
    assert left == ["rules\n", "outside\n"]
    assert names == ["AGENTS.md", "new"]


ADVICE = 'Use the access "full"; the user will be asked.'


async def plans_in(root: Path) -> dict[str, tuple[object, ...]]:
    """What becomes of commands with each setting of `sandbox.enabled`."""
    plans: dict[str, tuple[object, ...]] = {}
    for enabled in ("off", "auto", "required"):
        options = SandboxOptions(enabled=enabled, caches=root.parent / "caches")
        workspace = DiskWorkspace(root, confiner=KernelConfiner([root], options, Sandboxes()))
        async with open_toolbox(workspace, Ports(log=RecordingLog(), plan=FixedPlan()), ()) as toolbox:
            planned = await toolbox.plan(call("shell", command="touch x", access="write"))
            outcome = await toolbox.run(call("shell", command="echo x", access="write"), "c", ignore)
        status = await workspace.sandbox_status()
        plans[enabled] = (planned.command_access, outcome.is_error, outcome.text, status.name, status.problem)
    return plans


@pytest.mark.skipif(sys.platform != "linux", reason="on macOS, Seatbelt confines commands")
def test_nothing_runs_unconfined_if_no_sandbox_works(root: Path) -> None:
    def scenario() -> Any:
        setattr(programs, "SYSTEM_PLACES", ())  # noqa: B010  its type has a length
        fail("landlock_create_ruleset", 1, errno.ENOSYS)  # in this process
        return asyncio.run(plans_in(root))

    plans = forked(scenario)
    problem = "bubblewrap is not installed. Landlock: the kernel has no Landlock; Linux 5.13 and newer have it."
    refused = (
        f'shell: The command was not run, because no sandbox can limit it to the access "write": {problem} {ADVICE}'
    )
    assert plans == {
        "off": ["full", False, "x", "", '`sandbox.enabled` is "off".'],
        "auto": ["full", False, "x", "", problem],
        "required": ["write", True, refused, "", problem],
    }


class Found(Sandboxes):
    """What was found before the machine changed."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self._found = Choice(sandbox)

    def choose(self, programs: Programs = SYSTEM_PROGRAMS) -> Choice:
        return self._found


async def test_a_sandbox_that_stops_working_fails_the_call_and_runs_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # the helper does not start either
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    broken.chmod(0o755)
    sandbox = Bubblewrap(program=str(broken), name="bubblewrap 0")
    options = SandboxOptions(caches=tmp_path / "caches")
    workspace = DiskWorkspace(root, confiner=KernelConfiner([root], options, Found(sandbox)))
    async with open_toolbox(workspace, Ports(log=RecordingLog(), plan=FixedPlan()), ()) as toolbox:
        outcome = await toolbox.run(call("shell", command="touch x"), "c", ignore)
        job = await toolbox.run(call("shell", command="touch x", background=True), "c", ignore)
    problem = "could not be confined: bwrap: setting up uid map: Permission denied"
    assert outcome.text == f"shell: The command was not run, because it {problem}"
    assert outcome.is_error
    assert job.text.count(f"[the command was not run, because it {problem}]") == 1
    assert os.listdir(root) == []


async def test_a_sandbox_whose_probe_has_failed_is_tried_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = choose_sandbox()
    if expected.sandbox is None:
        pytest.skip(expected.problem)
    options = SandboxOptions(caches=tmp_path / "caches")
    workspace = DiskWorkspace(root, confiner=KernelConfiner([root], options, Sandboxes()))
    monkeypatch.setattr(confiner, "_RETRY_S", math.inf)
    with monkeypatch.context() as changed:
        changed.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        failed = await workspace.sandbox_status()
    remembered = await workspace.sandbox_status()
    monkeypatch.setattr(confiner, "_RETRY_S", 0.0)
    now = await workspace.sandbox_status()
    code, _ = await workspace.run("true", access="write", timeout_s=60, on_output=ignore)
    await workspace.close()
    assert "a temporary directory cannot be made: No such file or directory" in failed.problem
    assert (failed.name, remembered) == ("", failed)
    assert (now.name, code) == (expected.sandbox.name, 0)


def test_a_bubblewrap_of_the_workspace_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bwrap", "unshare", "mount", "sh", "bash", "uname"):
        (root / name).write_text(f"#!/bin/sh\ntouch {root}/started\n")
        (root / name).chmod(0o755)
    before = sorted(os.listdir(root))
    monkeypatch.chdir(root)
    monkeypatch.setenv("PATH", f"{root}::.:{os.environ['PATH']}")
    choice = Sandboxes().choose()
    assert choice.sandbox is None or not any(map(str(root).__contains__, choice.sandbox.programs))
    assert sorted(os.listdir(root)) == before


async def test_a_program_of_the_user_is_given_up_when_commands_may_have_changed_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that already uses the user's bubblewrap does not start the one that another session planted."""
    real = Programs().find("bwrap")
    if real is None:
        pytest.skip("needs bubblewrap")
    home, ran, ledger = tmp_path / "home", tmp_path / "ran", Programs(tmp_path / "ledger")
    own = home / ".linuxbrew" / "bin" / "bwrap"
    own.parent.mkdir(parents=True)
    shutil.copy(real, own)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(programs, "SYSTEM_PLACES", ())
    options = SandboxOptions(caches=tmp_path / "caches", programs=ledger)
    workspace = DiskWorkspace(root, confiner=KernelConfiner([root], options, Sandboxes()))
    status = await workspace.sandbox_status()
    if not status.name.startswith("bubblewrap"):
        pytest.skip(status.problem)
    await workspace.run("true", access="write", timeout_s=60, on_output=ignore)

    other = DiskWorkspace(home, confiner=KernelConfiner([home], options))
    planted = f"cd .linuxbrew/bin; mv bwrap old; printf '#!/bin/sh\\ntouch {ran}\\n' >bwrap; chmod +x bwrap"
    await other.run(planted, access="write", timeout_s=60, on_output=ignore)
    assert not (await workspace.sandbox_status()).name.startswith("bubblewrap")
    await workspace.run("true", access="read", timeout_s=60, on_output=ignore)
    assert own.read_text().startswith("#!/bin/sh"), "the command could write there"
    assert not ran.exists()
    assert Programs(tmp_path / "ledger").find("bwrap") is None
    for each in (workspace, other):
        await each.close()


@pytest.mark.parametrize(
    ("access", "output", "wanted"),
    [
        ("read", "touch: cannot touch 'x': Read-only file system", 'use access "write"'),
        ("write", "bash: .git/config: Permission denied", 'use access "full"'),
        ("read", "curl: (6) Could not resolve host: example.org", "`network = true`"),
        ("write", "npm error code EAI_AGAIN", "`network = true`"),
        ("read", "1 failed, 3 passed", ""),
        ("full", "Permission denied", ""),
    ],
)
async def test_a_failure_for_want_of_access_says_what_would_allow_it(
    root: Path, access: CommandAccess, output: str, wanted: str
) -> None:
    workspace = DiskWorkspace(root, confiner=KernelConfiner([root], SandboxOptions(enabled="required")))
    hint = workspace.explain_failure(access, output)
    assert (wanted in hint) if wanted else (hint == "")
    assert "\n" not in hint


@pytest.mark.parametrize("sandbox", ["best", "Landlock"])
def test_a_checkout_that_cannot_replace_protected_files_says_so(sandbox: str, request: pytest.FixtureRequest) -> None:
    if sandbox == "Landlock":
        request.getfixturevalue("no_bubblewrap")

    async def scenario(place: Place) -> Any:
        workspace = place.open()
        setup = (
            f"{GIT} init -q && echo 1 >AGENTS.md && echo 1 >a && git add . && {GIT} commit -qm one && git checkout -qb "
            f"side && echo 2 >AGENTS.md && echo 2 >a && {GIT} commit -qam two && git checkout -q main"
        )
        assert (await run(workspace, "full", setup))[0] == 0
        code, output = await run(workspace, "write", "git checkout side; git status -s >s; true")
        hint = workspace.explain_failure("write", output, has_failed=code != 0)
        _, output = await run(workspace, "write", "git checkout -q side -- a; echo 3 >b; echo AGENTS.md")
        none = workspace.explain_failure("write", output, has_failed=False)
        await workspace.close()
        return code, hint, none, (place.root / "AGENTS.md").read_text()

    code, hint, none, text = as_user(USERS[0], scenario)
    assert (code, text, none) == (0, "1\n", "")
    assert hint == (
        "[Protected files stayed as they were: AGENTS.md. So the command may have done only part of its work, for "
        'example when git checks out another branch. To change these files, use access "full".]'
    )


def test_directories_of_the_settings_are_added_and_faults_are_named() -> None:
    async def scenario(place: Place) -> Any:
        (place.home / "data").mkdir()
        (place.home / "data" / "file").write_text("data\n")
        (place.home / "build").mkdir()
        workspace = place.open(readable=("~/data", "~/missing", "relative"), writable=("~/build", "/usr", "~"))
        output = await run(workspace, "write", "cat ~/data/file; touch ~/build/new; touch ~/data/new 2>/dev/null; true")
        problem = (await workspace.sandbox_status()).problem
        await workspace.close()
        return output, problem, os.listdir(place.home / "build"), os.listdir(place.home / "data")

    output, problem, built, data = as_user(USERS[0], scenario)
    assert output == [0, "data\n"]
    assert (built, data) == (["new"], ["file"])
    assert problem.split("; sandbox") == [
        "sandbox.readable: ~/missing does not exist",
        ".readable: relative is not an absolute path; expected a path such as ~/datasets",
        ".writable: /usr is a directory of the system; expected a directory below it",
        ".writable: ~ contains crow's own files",
    ]


async def test_root_is_told_that_the_workspace_of_another_user_stays_unchanged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(root, 1000, 1000)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    workspace = DiskWorkspace(root, confiner=KernelConfiner([root], SandboxOptions()))
    status = await workspace.sandbox_status()
    assert not status.name or status.problem == (
        f"{root} belongs to another user, so confined commands cannot write there even as root"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs layers")
def test_commands_that_begin_while_a_place_for_layers_is_searched_get_layers_too(root: Path, tmp_path: Path) -> None:
    """Layers do not work in crow's data directory here, so crow tries the directory for temporary files, too."""
    opened: list[Layer | None] = []

    class Confiner(KernelConfiner):
        def _layer_works(self, *arguments: Any) -> bool:
            if arguments[-1].scratch is None:
                return False
            others.start()
            others.join(0.1)
            return True

        def open(self) -> None:
            opened.append(self._open_layer(Bubblewrap(program="bwrap", name="bubblewrap")))

    confiner = Confiner([root], SandboxOptions(layers=tmp_path / "layers"))
    others = threading.Thread(target=confiner.open)
    confiner.open()
    others.join()
    assert all(opened)
    for layer in filter(None, opened):
        layer.drop()
    asyncio.run(confiner.close())


def test_private_directories_are_removed_at_the_end_and_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = confiner.Private.create(None, [tmp_path])
    second = confiner.Private.create(None, [tmp_path])
    assert first.own.path.exists()  # it is still used
    os.close(second.own.lock)  # its process has died
    (second.own.path / "temporary" / "locked").mkdir(mode=0o000)
    nest(second.own.path / "temporary")
    third = confiner.Private.create(None, [tmp_path])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([first.own.path.name, third.own.path.name])
    first.own.remove()
    nest(third.own.path / "temporary")
    third.own.remove()
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_all_be_made_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, file = tmp_path / "temporary", tmp_path / "file"
    temporary.mkdir()
    file.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    open_before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with pytest.raises(NotADirectoryError):
            confiner.Private.create(file / "caches", [tmp_path])
    assert len(os.listdir("/dev/fd")) == open_before
    assert list(temporary.iterdir()) == []


@users
def test_a_tree_is_removed_even_if_its_owner_cannot_read_it(user: str) -> None:
    """The kernel leaves such trees behind for each overlay."""

    async def scenario(place: Place) -> Any:
        top = place.base / "top"
        deepest = top / "work" / "incompat" / "volatile"
        deepest.mkdir(parents=True)
        (deepest / "dirty").touch()
        for path in (deepest / "dirty", deepest, deepest.parent, deepest.parent.parent):
            path.chmod(0)
        remove_tree(top)
        return top.exists()

    assert as_user(user, scenario) is False


def test_the_rest_of_a_directory_that_a_session_could_not_remove_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "crow-session-old" / "layers").mkdir(parents=True)
    confiner.Private.create(None, [tmp_path]).own.remove()
    assert list(tmp_path.iterdir()) == []
