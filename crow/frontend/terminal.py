"""Commands in the editor's own terminals, where the user asked for that.

Strategy: one terminal a command, released whatever happens; its output is looked at while it runs and once more at the
end. A command that was cancelled is killed and released later, when nobody waits for it. Knows five requests of the
protocol; not which tool asks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
from acp import RequestError

from crow.frontend.server import Ask, refusal_words

if TYPE_CHECKING:
    from crow.tools import OnOutput

__all__ = ["EditorTerminals"]

LOOK_EVERY_S = 0.3
OUTPUT_BYTES = 1_000_000
REAP_S = 3.0
ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
SHELL = ("cmd", "/c") if os.name == "nt" else ("/bin/sh", "-c")


class EditorTerminals:
    """The terminals of one session. `answer_s`: how long the editor may take for an answer, in seconds. `hidden`:
    variables that commands must not see; the editor's own environment may hold them, so they are set to nothing."""

    def __init__(self, session_id: str, ask: Ask, *, answer_s: float, hidden: Sequence[str] = ()) -> None:
        self._session_id = session_id
        self._ask = ask
        self._answer_s = answer_s
        self._variables = {**ENVIRONMENT, **dict.fromkeys(hidden, "")}
        self._left: list[str] = []

    async def run(self, command: str, *, cwd: str, timeout_s: float, on_output: OnOutput) -> tuple[int | None, str]:
        """See :meth:`crow.tools.Workspace.run`.

        :raises PermissionError: the editor refused to run it, or failed, which is taken for a refusal.
        """
        terminal = await self._create(command, cwd)
        ended = False
        try:
            with anyio.move_on_after(timeout_s) as timeout:
                status = await self._wait(terminal, on_output)
            if timeout.cancelled_caught:
                with suppress(RequestError, TimeoutError):  # some editors cannot
                    await self._bounded("terminal/kill", terminal)
                status = None
            output, at_end = await self._output(terminal)
            ended = True
        finally:
            if not ended:
                self._left.append(terminal)
        await self._release(terminal)
        return (None if timeout.cancelled_caught else exit_code(status or at_end)), output

    @property
    def has_leftovers(self) -> bool:
        """Whether there is something for `reap` to do."""
        return bool(self._left)

    async def reap(self) -> None:
        """Kill and release what was cancelled; bounded."""
        left, self._left = self._left, []
        with anyio.move_on_after(REAP_S):
            for terminal in left:
                with suppress(RequestError, TimeoutError):
                    await self._bounded("terminal/kill", terminal)
                await self._release(terminal)

    async def _create(self, command: str, cwd: str) -> str:
        shell, *options = SHELL
        variables = [{"name": name, "value": value} for name, value in self._variables.items()]
        params = {"command": shell, "args": [*options, command], "cwd": cwd, "env": variables}
        try:
            with anyio.fail_after(self._answer_s):
                answer = await self._ask(
                    "terminal/create", {"sessionId": self._session_id, "outputByteLimit": OUTPUT_BYTES} | params
                )
        except RequestError as error:
            raise PermissionError(f"The editor did not run the command: {refusal_words(error)}") from error
        except TimeoutError as error:
            raise PermissionError(
                f"The editor did not answer within {self._answer_s:g} s; whether it runs is not known."
            ) from error
        except ConnectionError as error:
            raise PermissionError("The editor is gone; the command was not run.") from error
        match answer:
            case {"terminalId": str(terminal)}:
                return terminal
            case _:
                raise PermissionError("The editor opened no terminal; the command was not run.")

    async def _wait(self, terminal: str, on_output: OnOutput) -> Any:
        """How the command ended, as the editor says; its output is shown meanwhile."""
        status: Any = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._show, terminal, on_output)
            with suppress(RequestError, ConnectionError):
                status = await self._ask("terminal/wait_for_exit", self._named(terminal))
            tasks.cancel_scope.cancel()
        return status

    async def _show(self, terminal: str, on_output: OnOutput) -> None:
        shown = ""
        while True:
            await anyio.sleep(LOOK_EVERY_S)
            output, _ = await self._output(terminal)
            if output != shown:
                shown = output
                await on_output(output)

    async def _output(self, terminal: str) -> tuple[str, Any]:
        try:
            answer = await self._bounded("terminal/output", terminal)
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
            await self._bounded("terminal/release", terminal)

    async def _bounded(self, method: str, terminal: str) -> Any:
        with anyio.fail_after(self._answer_s):
            return await self._ask(method, self._named(terminal))

    def _named(self, terminal: str) -> dict[str, Any]:
        return {"sessionId": self._session_id, "terminalId": terminal}


def exit_code(status: Any) -> int:
    """The exit code, negative for a signal; -1 where the editor does not say."""
    match status:
        case {"exitCode": int(code)}:
            return code
        case {"signal": str(name)}:
            with suppress(KeyError):
                return -signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
            return -1
        case _:
            return -1
