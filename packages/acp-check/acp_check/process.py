"""Starts an agent's process for a check, and always ends it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from acp_check.errors import CheckError
from acp_check.run import Exit

MAX_BYTES = 256 << 20
"""The check stops reading from an agent that has written more than this many bytes."""

_KILL_AFTER_S = 2.0


class AgentIO(Protocol):
    """The stdin and stdout of an agent."""

    def write(self, data: bytes) -> None:
        """Write to stdin, without waiting until the agent has read the data."""

    def read_line(self, timeout_s: float) -> bytes | None:
        """Return the next line of stdout with its newline, None if no line came in time, or b"" at the end of
        stdout."""

    def pause(self) -> None:
        """Stop reading stdout."""

    def resume(self) -> None:
        """Continue to read stdout."""

    def close(self, timeout_s: float) -> Exit:
        """Close stdin, wait for the process to exit, and kill the agent's processes that still run."""


class AgentProcess:
    """An agent that runs in its own process group. :raises CheckError: the agent cannot be started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cwd: Path, stderr: Path) -> None:
        try:
            with stderr.open("ab") as errors:
                self._process = subprocess.Popen(  # noqa: S603 - the user named this command
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=dict(environment),
                    cwd=cwd,
                    bufsize=0,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CheckError(f"{command[0]}: cannot be started: {reason}") from error
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._may_read = threading.Event()
        self._may_read.set()
        self._has_ended = False
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def write(self, data: bytes) -> None:
        """See `AgentIO`."""
        self._to_write.put(data)

    def read_line(self, timeout_s: float) -> bytes | None:
        """See `AgentIO`."""
        if self._has_ended and self._lines.empty():
            return b""
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            return None
        self._has_ended = self._has_ended or not line
        return line

    def pause(self) -> None:
        """See `AgentIO`."""
        self._may_read.clear()

    def resume(self) -> None:
        """See `AgentIO`."""
        self._may_read.set()

    def close(self, timeout_s: float) -> Exit:
        """See `AgentIO`."""
        self.resume()
        self._to_write.put(None)
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        leftovers = self._end_group(was_alive=code is None)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._threads[0].join(1)
        return Exit(code=code, leftovers=leftovers)

    def _end_group(self, *, was_alive: bool) -> bool:
        """End every process of the group. Return True if the agent had exited, but other processes still ran."""
        if not _group_exists(self._process.pid):
            return False
        leftovers = not was_alive and not self._are_gone(0.5)  # children may need a moment to exit
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except (ProcessLookupError, PermissionError):
                break
            if self._are_gone(_KILL_AFTER_S):
                break
        return leftovers

    def _are_gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while _group_exists(self._process.pid):
            self._process.poll()  # reaps the agent
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _read(self) -> None:
        """Read stdout to its end. Queue each whole line, then an unfinished last line, then b""."""
        assert self._process.stdout is not None
        descriptor, rest, size = self._process.stdout.fileno(), bytearray(), 0
        while size < MAX_BYTES:
            self._may_read.wait()
            try:
                data = os.read(descriptor, 1 << 16)
            except OSError:
                break
            if not data:
                break
            size += len(data)
            rest += data
            if b"\n" in data:
                *lines, last = bytes(rest).split(b"\n")
                for line in lines:
                    self._lines.put(line + b"\n")
                rest = bytearray(last)
        if rest:
            self._lines.put(bytes(rest))
        self._lines.put(b"")
        self._process.stdout.close()

    def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            while (data := self._to_write.get()) is not None:
                view = memoryview(data)
                while view:
                    view = view[self._process.stdin.write(view) or 0 :]
        except OSError:
            pass
        try:
            self._process.stdin.close()
        except OSError:
            return


def _group_exists(group: int) -> bool:
    """Return whether a process of the group is alive. Zombie processes are ignored."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stats = list(Path("/proc").glob("[0-9]*/stat"))
    return not stats or any(_is_alive_in(group, stat) for stat in stats)


def _is_alive_in(group: int, stat: Path) -> bool:
    try:
        state, _, of = stat.read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return of == str(group) and state not in "ZX"
