"""The resident server of a user: started on demand, shared by editors, ended when nobody needs it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from crow.bridge.resident import config_file, socket_path, wants_autostart
from crow.serve.tokens import new_token
from crow.settings.load import find_paths
from crow.store.sqlite.store import SqliteStore
from crow.version import __version__
from tests.stdio.conftest import ROOT, StartCrow
from tests.store.scenes import converse, new_session
from tests.support.acp_client import CrowProcess, allow_once
from tests.support.fake_endpoint import FakeEndpoint, calls, text
from tests.support.fake_server import FakeServer
from tests.support.fork_server import forking_python

INITIALIZE = '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}\n'


class Watcher(CrowProcess):
    """An editor that also sees the turns of others, with cursors, so only the schema is checked."""

    def _rules(self) -> tuple[Any, ...]:
        return (self._schema,)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """What crow takes for its interpreter, so that the servers that it starts are forked."""
    return forking_python(tmp_path)


@pytest.fixture
def user(home: Path, python: Path) -> Iterator[dict[str, str]]:
    """The environment of a user who has set `serve.autostart`. The server is stopped afterwards."""
    runtime = tempfile.mkdtemp(prefix="crow-run-")  # the path of a socket must be short
    home.mkdir()
    (home / "config.toml").write_text("[serve]\nautostart = true\n")
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "CROW_HOME": str(home),
        "CROW_MODEL": "offline",
        "CROW_SANDBOX": "off",
        "XDG_RUNTIME_DIR": runtime,
    }
    yield env
    assert serve(python, env, "--stop")[0] == 0
    shutil.rmtree(runtime)


def serve(python: Path, env: Mapping[str, str], *options: str) -> tuple[int, str, str]:
    """`crow serve --user`: the exit code, stdout and stderr."""
    done = subprocess.run(
        [python, "-P", "-m", "crow", "serve", "--user", *options],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def acp(python: Path, env: Mapping[str, str], *options: str) -> dict[str, Any]:
    """Initializes a `crow acp`, and returns its answer."""
    with subprocess.Popen(
        [python, "-P", "-m", "crow", "acp", *options], env=dict(env), stdin=-1, stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(INITIALIZE)
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        process.stdin.close()
        assert (process.wait(60), process.stderr.read()) == (0, "")
    return answer


def server_pid(python: Path, env: Mapping[str, str]) -> int:
    code, stdout, _ = serve(python, env, "--status")
    assert code == 0
    return int(stdout.partition("process ")[2].split()[0])


@pytest.mark.long
async def test_a_session_of_one_editor_is_watched_and_answered_in_another(
    crow: StartCrow, user: dict[str, str], endpoint: FakeEndpoint, place: Path, python: Path
) -> None:
    endpoint.script(calls(("shell", {"command": "echo nest"})), text("Built."), text("Again."))
    never = asyncio.Event()

    async def wait(_params: dict[str, Any]) -> dict[str, Any]:
        await never.wait()
        return {"outcome": {"outcome": "cancelled"}}

    def start(answer: Any) -> CrowProcess:
        runtime = {"XDG_RUNTIME_DIR": user["XDG_RUNTIME_DIR"]}
        answers = {"session/request_permission": answer}
        forks = f"import sys; sys.executable = {str(python)!r}"
        return crow(endpoint=endpoint, env=runtime, answers=answers, client=Watcher, before=forks)

    # The user may read the whole database, so the user's own server asks for no token and hides nothing.
    store = await SqliteStore.open(Path(user["CROW_HOME"]) / "crow.db")
    await store.add_token(new_token("ann")[1])
    await store.create_session(new_session("of-ann", cwd=str(place), principal="ann"))
    await converse(store, "of-ann", "Fly")
    await store.close()

    async with start(wait) as zed, start(allow_once) as neovim:
        # Both find no server. One of them starts it.
        await asyncio.gather(zed.initialize(), neovim.initialize())
        await zed.load_session("of-ann", place)
        session = await zed.new_session(place)
        await neovim.load_session(session, place)
        assert await zed.prompt(session, "Build") == {"stopReason": "end_turn"}
        for editor in (zed, neovim):
            await editor.wait_for_text(session, "Built.")
        log = Path(user["CROW_HOME"]) / "serve.log"
        assert log.read_text().count("The server listens") == 1

        # The server dies. The next prompt starts another one, and nothing is shown twice.
        first = server_pid(python, user)
        os.kill(first, signal.SIGKILL)
        assert await zed.prompt(session, "Once more") == {"stopReason": "end_turn"}
        await neovim.wait_for_text(session, "Again.")
        assert server_pid(python, user) != first
        for editor in (zed, neovim):
            assert editor.text(session) == "Built.Again."
        assert log.read_text().count("The server listens") == 2


def test_what_is_about_one_process_does_not_use_the_server(python: Path, user: dict[str, str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert "result" in acp(python, user | {"CROW_TRACE": str(trace)})
    assert trace.exists()
    assert "result" in acp(python, user, "--experimental-v2")
    assert serve(python, user, "--status") == (1, "No server of this user runs.\n", "")


async def test_a_server_of_another_version_is_not_used(python: Path, user: dict[str, str]) -> None:
    path = Path(socket_path(user))
    path.parent.mkdir(mode=0o700)
    async with FakeServer(path) as server:
        server.extra = "Crow-Version: 0.0.1\r\n"
        answer = await asyncio.to_thread(acp, python, user)
        assert answer["result"]["agentInfo"]["version"] == __version__
        assert server.received == []
        server.extra = f"Crow-Version: {__version__}\r\n"
        answer = await asyncio.to_thread(acp, python, user)
        assert answer["result"]["agentInfo"]["name"] == "fake"
    assert "another version" in (Path(user["CROW_HOME"]) / "crow.log").read_text()


def test_a_server_that_ends_while_it_starts_is_an_error(python: Path, user: dict[str, str]) -> None:
    with closing(sqlite3.connect(Path(user["CROW_HOME"]) / "crow.db")) as database:
        database.execute("PRAGMA user_version = 9999")
    code, stdout, stderr = serve(python, user, "--start")
    assert (code, stdout) == (1, "")
    assert "is the database of another program" in stderr


def test_the_server_ends_when_nobody_needs_it(python: Path, user: dict[str, str]) -> None:
    (Path(user["CROW_HOME"]) / "config.toml").write_text("[serve]\nidle_timeout_s = 0.1\n")
    code, _, stderr = serve(python, user)
    assert (code, stderr) == (0, "")
    assert "Nobody has used the server" in (Path(user["CROW_HOME"]) / "serve.log").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "127.0.0.1:0"), "--listen cannot be used with --user"),
        (("--tls-cert", "x"), "--tls-cert cannot be"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    python: Path, user: dict[str, str], options: tuple[str, ...], words: str
) -> None:
    code, _, stderr = serve(python, user, *options)
    assert (code, words in stderr) == (2, True)


def test_a_directory_that_others_can_write_to_gets_no_socket(python: Path, tmp_path: Path, home: Path) -> None:
    (tmp_path / "crow-run").mkdir(mode=0o700)
    (tmp_path / "crow-run" / "crow").mkdir()
    (tmp_path / "crow-run" / "crow").chmod(0o777)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path / "crow-run")}
    code, _, stderr = serve(python, env | {"CROW_HOME": str(home)}, "--status")
    assert (code, "Other users can write to the directory" in stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "is_wanted"),
    [
        ("[serve]\nautostart = true\n", True),
        ("serve.autostart=true", True),
        ("[model]\nname = 'x'\n\n[ serve ]  # all\n listen = 'x'\n autostart\t=  true # yes\n[log]\n", True),
        ("[serve]\nautostart = false\n", False),
        ("[serve]\n# autostart = true\n", False),
        ("[log]\nautostart = true\n", False),
        ("[serve.x]\nautostart = true\n", False),
        ('x = """\n[serve]\nautostart = true\n"""\n', False),
        ('[serve]\n"autostart" = true\nautostart = true\n', False),
        ("", False),
    ],
)
def test_the_setting_is_read_without_a_parser(tmp_path: Path, text: str, is_wanted: bool) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert wants_autostart({"CROW_HOME": str(tmp_path)}) is is_wanted


@pytest.mark.parametrize("name", ["CROW_HOME", "CROW_CONFIG", "XDG_CONFIG_HOME", "HOME"])
def test_the_settings_are_looked_for_in_the_usual_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    for other in ("CROW_HOME", "CROW_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, str(tmp_path / "place"))
    assert config_file(os.environ) == str(find_paths(os.environ).config_file)
