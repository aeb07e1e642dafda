"""Opens sockets and refreshes layers inside the namespaces of commands, through the helper process in `enter.py`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import anyio

from crow.programs import helper_environment
from crow.tools.helper import Helper
from crow.tools.network import LISTENER_PORT, enter

_TIMEOUT_S = 10.0


class Listeners:
    """The helper process of one session. `close` ends it."""

    def __init__(self) -> None:
        self._helper = Helper(enter.__file__, helper_environment(os.environ)[0])
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
        """Let the layers over the trees `roots` show files that were replaced in these trees. The layers are mounted in
        the sandbox whose first process is `pid`.

        :raises OSError: this is not possible.
        """
        answer, _ = await self._ask(b"\0".join([b"refresh", b"%d" % pid, *map(os.fsencode, roots)]))
        if answer != b"\0":
            raise OSError(f"the layer of the command cannot be refreshed: {answer.decode(errors='replace')}")

    async def _ask(self, request: bytes) -> tuple[bytes, Sequence[int]]:
        """Return the helper's answer, and the open files in it. The answer is empty if the helper has ended."""
        async with self._lock:
            connection = await self._helper.connection()
            try:
                with anyio.fail_after(_TIMEOUT_S):
                    connection.send(request)
                    await anyio.wait_readable(connection)
                    answer, handles, _, _ = socket.recv_fds(connection, 256, 1)
            except BaseException:
                await self._helper.close()  # a late answer would be taken for the answer to the next request
                raise
            if not answer:
                await self._helper.close()
        return answer, handles

    async def close(self) -> None:
        """End the helper process."""
        await self._helper.close()
