"""Starts a real `crow serve` with the offline model, and crow-channels between it and a chat."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from crow_channels.app import run
from crow_channels.chat import Chat
from crow_channels.config import Config, read_config

ROOT = Path(__file__).parents[3]
SECRETS = {"DISCORD_TOKEN": "discord-token-of-the-tests", "HOOK_SECRET": "a secret of the tests only"}


def _fork_server() -> Any:
    """Return the module of crow's tests, whose package has the same name as this one."""
    name = "tests.support.fork_server"
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "support" / "fork_server.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ALSO_IMPORTED += ["crow_channels.__main__", "crow_channels.discord_chat", "crow_channels.webhook_chat"]
    return module


fork_server = _fork_server()


class Process:
    """Crow with these arguments, or Python code. Its output is read by a thread."""

    def __init__(self, *arguments: str, env: Mapping[str, str], cwd: Path, script: str = "") -> None:
        self._process: Any
        if sys.platform == "linux":  # forked, which takes much less than another import of all modules
            self._process = fork_server.ForkedProgram(arguments, env=env, cwd=cwd, script=script)
        else:
            argv = [sys.executable, *(("-c", script) if script else ("-m", "crow")), *arguments]
            self._process = subprocess.Popen(
                argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        self.stderr = self._process.stderr
        self._reading = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        self.output, _ = self._process.communicate(timeout=None)

    def read(self) -> None:
        """Read the rest of its output, as long as it runs."""
        self._reading.start()

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal, wait for the end, and return the exit code, or the negative number of the signal."""
        self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        self._reading.join()
        return int(self._process.returncode)


class Crow:
    """A server that can be killed and started again. It keeps its port and its sessions."""

    def __init__(self, home: Path, settings: str = "") -> None:
        self.home, self.workspace = home / "crow", home / "work"
        self.home.mkdir()
        self.workspace.mkdir()
        (self.home / "config.toml").write_text(settings)
        self.environment = {"PATH": os.environ["PATH"], "CROW_HOME": str(self.home), "CROW_MODEL": "offline"}
        self._port = 0
        self._process: Process | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self._port}/acp"

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        listen = ("serve", "--listen", f"127.0.0.1:{self._port}")
        self._process = process = Process(*listen, env=self.environment, cwd=self.workspace)
        for line in process.stderr:
            logged = json.loads(line)
            if logged["message"] == "The server listens":
                self._port = int(logged["address"].removesuffix("/acp").rpartition(":")[2])
                process.read()
                return
        raise AssertionError("The server did not start")

    def end(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Read from crow's database."""
        with closing(sqlite3.connect(f"file:{self.home}/crow.db?mode=ro", uri=True)) as database:
            return database.execute(sql, values).fetchall()

    def prompts(self, alias: str = "%") -> list[str]:
        """Return the texts of all prompts in the sessions with this alias, in order."""
        sql = (
            "SELECT content FROM messages WHERE role = 'user' AND session IN"
            " (SELECT id FROM sessions WHERE coalesce(alias, '') LIKE ?) ORDER BY id"
        )
        return [row[0] for row in self.rows(sql, alias)]

    def command(self, *arguments: str) -> str:
        """Run a command of crow, and return its output."""
        process = Process(*arguments, env=self.environment, cwd=self.workspace)
        process.read()
        assert process.wait() == 0
        return str(process.output.decode())


@contextmanager
def serving(home: Path, settings: str = "") -> Iterator[Crow]:
    """A server that runs in the block."""
    crow = Crow(home, settings)
    crow.start()
    try:
        yield crow
    finally:
        crow.end()


def configure(home: Path, crow: Crow, chats: str, principals: str = "", server: str = "") -> Path:
    """Write a configuration."""
    path = home / "channels.toml"
    principals = principals or f'[principals.ann]\ncwd = "{crow.workspace}"\n'
    server = server or f'url = "{crow.url}"'
    path.write_text(f'state = "state.db"\n[server]\n{server}\n{principals}\n{chats}')
    return path


class Bridge:
    """Runs crow-channels in this process."""

    def __init__(self, config: Config, chats: Sequence[Chat] | None = None) -> None:
        self._config, self._chats = config, chats

    async def __aenter__(self) -> Bridge:
        self._task = asyncio.create_task(run(self._config, self._chats))
        test = asyncio.current_task()
        assert test is not None
        self._task.add_done_callback(lambda done: done.cancelled() or test.cancel())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


def bridge(path: Path, environment: Mapping[str, str] = SECRETS, chats: Sequence[Chat] | None = None) -> Bridge:
    """Crow-channels with this configuration, in this process."""
    return Bridge(read_config(path, environment), chats)
