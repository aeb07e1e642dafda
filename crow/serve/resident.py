"""Starts, stops and describes the user's resident server, `crow serve --user`."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from crow.bridge.resident import PLACES, absolute, is_private, socket_path
from crow.bridge.wire import peer
from crow.domain.errors import ConfigError, CrowError
from crow.domain.text import plural
from crow.runtime import own_command
from crow.version import __version__

START_S = 60.0
"""A server has this many seconds to start, and as many to end after its drain time. Its imports alone take one second,
or ten seconds on a busy machine."""

_POLL_S = 0.02
_ANSWER_S = 5.0
_MAX_REASON_BYTES = 4096


class _ResidentError(CrowError):
    """The error if the resident server cannot be started, reached or stopped."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A running resident server."""

    path: Path
    """The path of its socket."""
    pid: int | None
    """The id of its process, if the system tells it."""
    version: str
    """The version of crow that it runs."""
    figures: Mapping[str, float]
    """The values of the server's metrics that have no labels, by the names of the metrics."""

    def describe(self) -> str:
        """Return a sentence with the server's version, process and socket, and with the numbers of its clients and
        sessions."""
        counts = [int(self.figures.get(name, 0)) for name in ("crow_connections", "crow_sessions_open")]
        busy = int(self.figures.get("crow_sessions_busy", 0))
        process = f"process {self.pid}" if self.pid is not None else "a process"
        other = "" if self.version == __version__ else f" (this is crow {__version__}, which does not use it)"
        return (
            f"crow {self.version} runs as {process} on {self.path}{other}: {plural(counts[0], 'client')}, "
            f"{plural(counts[1], 'open session')}, {busy} of them busy."
        )


def own_socket(env: Mapping[str, str]) -> Path:
    """Return the path of the socket of this user's server. If the socket's directory does not exist, create the
    directory.

    :raises ConfigError: the directory cannot be created, or other users can write to it.
    """
    path = Path(socket_path(env))
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The directory {path.parent} cannot be created: {error.strerror}.") from error
    if not is_private(str(path.parent)):
        raise ConfigError(
            f"Other users can write to the directory {path.parent}, so crow creates no socket in it. Remove the "
            "directory; crow will create it again."
        )
    return path


def find(env: Mapping[str, str]) -> Resident | None:
    """Return the running server, or None. :raises CrowError: the server does not answer, or the socket's directory is
    not safe."""
    path = own_socket(env)
    try:
        with _connected(path) as opened:
            owner, text = peer(opened), _get(opened, "/metrics")
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except OSError as error:
        raise _ResidentError(f"The server on {path} does not answer: {error.strerror or error}.") from error
    figures, version = {}, "?"
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("crow_build_info{"):
            version = name.partition('version="')[2].partition('"')[0]
        elif name and not line.startswith("#") and "{" not in name:
            figures[name] = float(value)
    return Resident(path, None if owner is None else owner[0], version, figures)


def start(env: Mapping[str, str]) -> None:
    """Start the server in a process of its own, if no server is running. Wait until clients can connect to the server.

    :raises ~crow.domain.errors.CrowError: the server does not start.
    """
    path = own_socket(env)
    with _only_one(path):
        if _answers(path):
            return
        command = own_command("serve", "--user")
        with tempfile.TemporaryFile() as errors:
            # The server must outlive the editor that starts it, so it shares no terminal, process group or directory.
            null = subprocess.DEVNULL
            places = {name: absolute(env[name]) for name in PLACES if env.get(name)}
            server = subprocess.Popen(  # noqa: S603  our own program
                command, stdin=null, stdout=null, stderr=errors, cwd="/", start_new_session=True, env={**env, **places}
            )
            _wait(lambda: _serves(path) or server.poll() is not None)
            if server.poll() is not None or not _serves(path):
                errors.seek(0)
                reason = errors.read(_MAX_REASON_BYTES).decode(errors="replace").strip()
                raise _ResidentError(reason.removeprefix("crow: ") or f"The server did not start within {START_S:g} s.")
            server.returncode = 0  # so that Popen does not warn about a process that still runs


def stop(env: Mapping[str, str], *, timeout_s: float) -> Resident | None:
    """Ask the server to end, and wait until it has ended. Return what is known about that server, or None if no server
    was running.

    The server first lets running turns finish.

    :raises ~crow.domain.errors.CrowError: the server still runs after `timeout_s` seconds.
    """
    running = find(env)
    if running is None:
        return None
    if running.pid is None:
        raise _ResidentError(
            f"Crow cannot find out on this system which process listens on {running.path}. End the server by hand."
        )
    os.kill(running.pid, signal.SIGTERM)
    if not _wait(lambda: not _answers(running.path), timeout_s):
        raise _ResidentError(f"The server (process {running.pid}) still runs after {timeout_s:g} s.")
    return running


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a lock, so that only one process at a time starts the server. A second process waits for the lock, and then
    finds the server running."""
    lock = os.open(path.with_name(f"{path.name}.start"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not _wait(lambda: _locks(lock)):
            raise _ResidentError("Another process has been trying to start the server for a minute.")
        yield
    finally:
        os.close(lock)


def _locks(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _answers(path: Path) -> bool:
    """Return whether a process listens on the socket. That process may still be starting, or about to fail."""
    with suppress(OSError), _connected(path):
        return True
    return False


def _serves(path: Path) -> bool:
    """Return whether a server answers requests."""
    with suppress(OSError), _connected(path) as opened:
        return bool(_get(opened, "/healthz"))
    return False


@contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    """Connect to the server's socket. Each step takes at most `_ANSWER_S` seconds. :raises OSError: the server does not
    answer."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.settimeout(_ANSWER_S)
        opened.connect(str(path))
        yield opened


def _wait(is_done: Callable[[], bool], timeout_s: float = START_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _get(opened: socket.socket, resource: str) -> str:
    """Send an HTTP request and return the body of the response."""
    opened.sendall(f"GET {resource} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    data = b""
    while more := opened.recv(65536):
        data += more
    return data.partition(b"\r\n\r\n")[2].decode(errors="replace")
