"""Runs commands in the editor's own terminals."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
from acp import RequestError

from crow.frontend.client import SendRequest, refusal_text
from crow.tools import OnOutput

POLL_S = 0.3
OUTPUT_BYTES = 1_000_000
REAP_S = 3.0
ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
SHELL = ("cmd", "/c") if os.name == "nt" else ("/bin/sh", "-c")


class EditorTerminals:
    """The terminals of one session: one for each command, released in any case.

    `answer_s` is how long the editor may take to answer, in seconds. The variables `hidden` are set to nothing, since
    the editor's own environment may contain them.
    """

    def __init__(self, session_id: str, request: SendRequest, *, answer_s: float, hidden: Sequence[str] = ()) -> None:
        self._session_id = session_id
        self._request = request
        self._answer_s = answer_s
        self._variables = {**ENVIRONMENT, **dict.fromkeys(hidden, "")}
        self._leftovers: list[str] = []

    async def run(self, command: str, *, cwd: str, timeout_s: float, on_output: OnOutput) -> tuple[int | None, str]:
        """See :meth:`crow.tools.Workspace.run`.

        :raises PermissionError: the editor refused or failed to run it.
        """
        terminal = await self._create(command, cwd)
        try:
            with anyio.move_on_after(timeout_s) as timeout:
                status = await self._wait(terminal, on_output)
            if timeout.cancelled_caught:
                with suppress(RequestError, TimeoutError):  # some editors cannot
                    await self._send("terminal/kill", terminal)
            output, status_at_end = await self._output(terminal)
        except BaseException:
            self._leftovers.append(terminal)
            raise
        await self._release(terminal)
        return (None if timeout.cancelled_caught else exit_code(status or status_at_end)), output

    @property
    def has_leftovers(self) -> bool:
        """Whether there is something for `reap` to do."""
        return bool(self._leftovers)

    async def reap(self) -> None:
        """Kills and releases the terminals of cancelled commands, within a time limit."""
        leftovers, self._leftovers = self._leftovers, []
        with anyio.move_on_after(REAP_S):
            for terminal in leftovers:
                with suppress(RequestError, TimeoutError):
                    await self._send("terminal/kill", terminal)
                await self._release(terminal)

    async def _create(self, command: str, cwd: str) -> str:
        shell, *options = SHELL
        params = {
            "sessionId": self._session_id,
            "outputByteLimit": OUTPUT_BYTES,
            "command": shell,
            "args": [*options, command],
            "cwd": cwd,
            "env": [{"name": name, "value": value} for name, value in self._variables.items()],
        }
        try:
            with anyio.fail_after(self._answer_s):
                answer = await self._request("terminal/create", params)
        except RequestError as error:
            raise PermissionError(f"The editor did not run the command: {refusal_text(error)}") from error
        except TimeoutError as error:
            problem = f"The editor did not answer within {self._answer_s:g} s; the command may be running"
            raise PermissionError(f"{problem}.") from error
        except ConnectionError as error:
            raise PermissionError("The editor is gone; the command was not run.") from error
        match answer:
            case {"terminalId": str(terminal)}:
                return terminal
            case _:
                raise PermissionError("The editor opened no terminal; the command was not run.")

    async def _wait(self, terminal: str, on_output: OnOutput) -> Any:
        """Shows the output until the command ends; returns the exit status, None if the editor does not say."""
        status: Any = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._show_output, terminal, on_output)
            with suppress(RequestError, ConnectionError):
                params = {"sessionId": self._session_id, "terminalId": terminal}
                status = await self._request("terminal/wait_for_exit", params)
            tasks.cancel_scope.cancel()
        return status

    async def _show_output(self, terminal: str, on_output: OnOutput) -> None:
        shown = ""
        while True:
            await anyio.sleep(POLL_S)
            output, _ = await self._output(terminal)
            if output != shown:
                shown = output
                await on_output(output)

    async def _output(self, terminal: str) -> tuple[str, Any]:
        """Output and exit status; empty and None if the editor does not say."""
        try:
            answer = await self._send("terminal/output", terminal)
        except (RequestError, TimeoutError, ConnectionError):
            return "", None
        if not isinstance(answer, dict):
            return "", None
        output = answer.get("output")
        text = output if isinstance(output, str) else ""
        if answer.get("truncated") is True:
            text = f"[the beginning is cut: the editor keeps {OUTPUT_BYTES // 1_000_000} MB]\n{text}"
        return text, answer.get("exitStatus")

    async def _release(self, terminal: str) -> None:
        with suppress(RequestError, TimeoutError, ConnectionError):
            await self._send("terminal/release", terminal)

    async def _send(self, method: str, terminal: str) -> Any:
        with anyio.fail_after(self._answer_s):
            return await self._request(method, {"sessionId": self._session_id, "terminalId": terminal})


def exit_code(status: Any) -> int:
    """The exit code from an exit status: negative for a signal, -1 if it does not say."""
    match status:
        case {"exitCode": int(code)}:
            return code
        case {"signal": str(name)}:
            with suppress(KeyError):
                return -signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    return -1
