"""Runs the commands that the user types after `!` in `crow chat`."""

from __future__ import annotations

import asyncio
import codecs
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from crow.domain.text import plural, safe, shorten_middle
from crow.protocol.tool_calls import console_block
from crow.tools.process import Process, start

_GRACE_S = 0.5
"""How long a command that the user stops may take to end by itself."""

_UNSHOWN_BYTES = 1 << 18
"""Crow reads no more output while more than this many bytes of it are not shown yet."""

_KEPT_CHARS = 200_000
_SENT_CHARS = 20_000
"""The maximum size of a command's output that the model gets."""


def user_shell() -> list[str]:
    """Return the user's shell with the option before a command."""
    if os.name == "nt":
        return [os.environ.get("COMSPEC", "cmd.exe"), "/c"]
    shell = os.environ.get("SHELL", "")
    return [shell if os.path.isabs(shell) and os.access(shell, os.X_OK) else "/bin/sh", "-c"]


class UserCommands:
    """The user's commands. `write` shows their output, which is also kept for the next prompt."""

    def __init__(self, write: Callable[[str], Awaitable[None]]) -> None:
        self._write = write
        self._results: list[str] = []
        self._is_running = False
        self._is_stopping = False

    @property
    def is_running(self) -> bool:
        """Whether a command runs."""
        return self._is_running

    async def run(self, command: str, cwd: Path) -> str:
        """Run a command, and return a sentence that says how it ended. If this is cancelled, the command is ended.

        :raises OSError: the directory or the shell does not exist.
        :raises ValueError: the command contains a NUL.
        """
        self._is_running, self._is_stopping = True, False
        try:
            return await self._run(command, cwd)
        finally:
            self._is_running = False

    def stop(self) -> bool:
        """Stop the running command, even if it is only about to start. Return False if none runs."""
        self._is_stopping = self._is_running
        return self._is_running

    def take_results(self) -> list[str]:
        """Return the texts for the model about the commands that ended since the last call of this method."""
        results, self._results = self._results, []
        return results

    async def _run(self, command: str, cwd: Path) -> str:
        unshown, kept = bytearray(), ""
        process: Process | None = None

        def take(output: bytes) -> None:
            unshown.extend(output)
            if process is not None and len(unshown) > _UNSHOWN_BYTES:
                process.read_output(False)

        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        # Without a terminal, most programs write neither colours nor pages.
        process = await start([*user_shell(), command], cwd=cwd, env=os.environ, on_output=take)
        ended = asyncio.create_task(process.wait())
        try:
            while not self._is_stopping and (not ended.done() or unshown):
                text = decode(bytes(unshown)).replace("\r\n", "\n")
                unshown.clear()
                process.read_output(True)
                kept = (kept + text)[-_KEPT_CHARS:]
                await self._write(safe(text))
                if not unshown and not ended.done():
                    await asyncio.wait([ended], timeout=0.05)
        finally:
            ended.cancel()
            await process.end(_GRACE_S)
        if kept and not kept.endswith("\n"):
            await self._write("\n")
        how = "stopped by the user" if self._is_stopping else f"exit code {process.returncode}"
        output = console_block(shorten_middle(kept, _SENT_CHARS)) if kept.strip() else "It printed nothing."
        self._results.append(f"I ran this command myself ({how}): {command}\n\n{output}")
        size = plural(len(kept.splitlines()), "line")
        return f"{how[0].upper()}{how[1:]}. Your next prompt includes its output ({size})."
