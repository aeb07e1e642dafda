"""Starts a real `crow serve` with the offline model, and crow-channels between it and a chat."""

from __future__ import annotations

import asyncio
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

SECRETS = {"DISCORD_TOKEN": "discord-token-of-the-tests", "HOOK_SECRET": "a secret of the tests only"}


class Crow:
    """A server that can be killed and started again. It keeps its port and its sessions."""

    def __init__(self, home: Path, settings: str = "") -> None:
        self.home, self.workspace = home / "crow", home / "work"
        self.home.mkdir()
        self.workspace.mkdir()
        (self.home / "config.toml").write_text(settings)
        self.environment = {"PATH": os.environ["PATH"], "CROW_HOME": str(self.home), "CROW_MODEL": "offline"}
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self._port}/acp"

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        command = [sys.executable, "-m", "crow", "serve", "--listen", f"127.0.0.1:{self._port}"]
        self._process = process = subprocess.Popen(
            command, env=self.environment, cwd=self.workspace, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        for line in process.stderr:
            logged = json.loads(line)
            if logged["message"] == "The server listens":
                self._port = int(logged["address"].removesuffix("/acp").rpartition(":")[2])
                self._reading = threading.Thread(target=process.stderr.read, daemon=True)
                self._reading.start()
                return
        raise AssertionError("The server did not start")

    def end(self, number: int = signal.SIGKILL) -> None:
        """End the server."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._reading.join()
            assert self._process.stderr is not None
            self._process.stderr.close()
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
        command = [sys.executable, "-m", "crow", *arguments]
        return subprocess.run(
            command, env=self.environment, cwd=self.workspace, stdout=subprocess.PIPE, text=True, check=True
        ).stdout


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
