"""Runs crow from a shell and in a pseudo terminal, with its own home and an endpoint on loopback."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from tests.support.fake_endpoint import FakeEndpoint
from tests.support.fork_server import ForkedProgram

Program: TypeAlias = subprocess.Popen[bytes] | ForkedProgram
OWN_START = ("LANG", "LC_", "PYTHON")
"""How the names of variables begin that Python reads when it starts."""

IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, sys.argv[1:])
"""
"""Makes stdin the controlling terminal, then becomes the program of its arguments."""


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether a forked process does the same as a new one that has these variables."""
    return sys.platform == "linux" and not any(name.startswith(OWN_START) for name in env)


def forkable(env: Mapping[str, str]) -> dict[str, str]:
    """Return these variables without those that would need a new interpreter."""
    return {name: value for name, value in env.items() if not name.startswith(OWN_START)}


def start(arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdin: int = subprocess.DEVNULL) -> Program:
    """Start a command with pipes."""
    if can_fork(env):
        return ForkedProgram(arguments, env=env, cwd=cwd, stdin=stdin)
    command, pipe = [sys.executable, "-P", "-m", "crow", *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=env, stdin=stdin, stdout=pipe, stderr=pipe)


class Shell:
    """Runs crow in `place` with its own home and endpoint."""

    def __init__(self, directory: Path, endpoint: FakeEndpoint) -> None:
        self.endpoint = endpoint
        self.home, self.place = directory / "home", directory / "work"
        self.home.mkdir()
        self.place.mkdir()
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "CROW_HOME": str(self.home),
            "CROW_MODEL": "fake-model",
            "CROW_SANDBOX": "off",
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": "none",
            "TERM": "xterm",
        }

    def start(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> Program:
        return start(arguments, env=self.env, cwd=self.place, stdin=stdin)

    def crow(self, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        """The exit code, stdout and stderr of a command."""
        with self.start(*arguments, stdin=subprocess.PIPE) as process:
            out, err = process.communicate(stdin, timeout=120)
        return process.wait(), out.decode(), err.decode()

    @contextmanager
    def in_terminal(self, *arguments: str, **environment: str) -> Iterator[Terminal]:
        """Start a command in a terminal of 80 columns and 24 rows."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        # The line editor would wait for an answer to its question where the cursor is.
        env = self.env | {"PROMPT_TOOLKIT_NO_CPR": "1"} | environment
        with self._start_in(theirs, arguments, env) as process:
            os.close(theirs)
            try:
                yield Terminal(ours, process)
            finally:
                process.kill()
                os.close(ours)

    def _start_in(self, terminal: int, arguments: Sequence[str], env: Mapping[str, str]) -> Program:
        if can_fork(env):
            return ForkedProgram(arguments, env=env, cwd=self.place, terminal=terminal)
        command = [sys.executable, "-c", IN_TERMINAL, sys.executable, "-P", "-m", "crow", *arguments]
        return subprocess.Popen(
            command, cwd=self.place, env=env, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
        )

    def asked(self, number: int = -1) -> str:
        """The messages of a request, as text."""
        return json.dumps(self.endpoint.asked[number].body["messages"])


class Terminal:
    """The other end of a terminal in which a process runs. `shown` is everything that it wrote."""

    def __init__(self, fd: int, process: Program) -> None:
        self._fd = fd
        self._data = b""
        self._seen = 0
        self.process = process

    @property
    def shown(self) -> str:
        return self._data.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, text: str) -> str:
        """Read until `text` was written after the last text that was waited for. Return what was written until then."""
        wanted = text.encode()
        while (at := self._data.find(wanted, self._seen)) < 0:
            if not self._read():
                raise AssertionError(f"{text!r} was not shown:\n{self.shown}")
        before, self._seen = self._seen, at + len(wanted)
        return self._data[before : self._seen].decode("utf-8", "replace")

    def wait(self) -> int:
        """Read until the process has ended. Return its exit code."""
        while self._read():
            pass
        return self.process.wait(60)

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 10_000)
        except OSError:  # Linux reports the end of a terminal as an error
            return False
        self._data += data
        return bool(data)
