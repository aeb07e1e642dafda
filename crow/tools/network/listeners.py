"""Works inside the namespaces of commands, with the help of another process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio

from crow.programs import helper_environment
from crow.tools.network import LISTENER_PORT, enter
from crow.tools.process import Process, start

_TIMEOUT_S = 10.0


class Listeners:
    """The helper process of one session. `close` ends it."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._connection: socket.socket | None = None
        self._lock = anyio.Lock()

    async def open(self, pid: int) -> socket.socket:
        """Return a socket that listens on the loopback interface of the process `pid`, which has a network namespace of
        its own.

        :raises OSError: this is not possible.
        """
        answer, handles = await self._ask(b"listen\0%d\0%d" % (pid, LISTENER_PORT))
        if not handles:
            raise OSError(
                f"no socket in the namespace of the command: {answer.decode(errors='replace') or 'no answer'}"
            )
        listener = socket.socket(fileno=handles[0])
        listener.set_inheritable(False)
        listener.setblocking(False)
        return listener

    async def refresh(self, pid: int, roots: Sequence[Path]) -> None:
        """Let the layers over these trees show files that were replaced below them. They are mounted for the sandbox
        whose first process is `pid`.

        :raises OSError: this is not possible.
        """
        answer, _ = await self._ask(b"\0".join([b"refresh", b"%d" % pid, *map(os.fsencode, roots)]))
        if answer != b"\0":
            raise OSError(f"the layer of the command cannot be refreshed: {answer.decode(errors='replace')}")

    async def _ask(self, request: bytes) -> tuple[bytes, Sequence[int]]:
        """Return the helper's answer, and the open files in it. The answer is empty if the helper has ended."""
        async with self._lock:
            connection = self._connection or await self._start()
            try:
                with anyio.fail_after(_TIMEOUT_S):
                    connection.send(request)
                    await anyio.wait_readable(connection)
                    answer, handles, _, _ = socket.recv_fds(connection, 256, 1)
            except BaseException:
                await self._stop()  # its next answer would belong to this question
                raise
            if not answer:
                await self._stop()
        return answer, handles

    async def close(self) -> None:
        """End the helper process."""
        await self._stop()

    async def _start(self) -> socket.socket:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        with other:
            try:
                self._process = await start(
                    [sys.executable, "-I", "-S", enter.__file__, str(other.fileno())],
                    cwd=Path(os.sep),
                    env=helper_environment(os.environ)[0],
                    on_output=lambda _: None,
                    inherited=(other.fileno(),),
                )
            except BaseException:
                own.close()
                raise
        self._connection = own
        return own

    async def _stop(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            with anyio.CancelScope(shield=True):
                await process.end(0)
