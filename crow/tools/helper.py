"""A program of crow's own that runs beside crow, and is reached by a pair of sockets."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio

from crow.tools.process import Process, start


class Helper:
    """A helper process. It is started by the first call of `connection`, and ended by `close`. It can import only the
    standard library."""

    def __init__(self, program: str, env: Mapping[str, str]) -> None:
        """`program` is the path of a Python file, which gets the number of its socket as its argument."""
        self._program = program
        self._env = env
        self._process: Process | None = None
        self._connection: socket.socket | None = None
        self._lock = anyio.Lock()

    async def connection(self) -> socket.socket:
        """Return crow's end of the pair of sockets, as a non-blocking socket. Start the process if it does not run.
        :raises OSError: the process cannot be started."""
        async with self._lock:
            if self._connection is not None:
                return self._connection
            own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            own.setblocking(False)
            with other:
                try:
                    self._process = await start(
                        [sys.executable, "-I", "-S", self._program, str(other.fileno())],
                        cwd=Path(os.sep),
                        env=self._env,
                        on_output=lambda _: None,
                        inherited=(other.fileno(),),
                    )
                except BaseException:
                    own.close()
                    raise
            self._connection = own
            return own

    async def close(self) -> None:
        """End the process. The next call of `connection` starts another one."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            with anyio.CancelScope(shield=True):
                await process.end(0)
