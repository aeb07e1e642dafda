"""A workspace whose files may be open in the editor, and whose commands may run in the editor's terminals."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from crow.domain.text import in_format_of
from crow.protocol import SendRequest
from crow.protocol.errors import refusal_text
from crow.protocol.frames import METHOD_NOT_FOUND, RequestError
from crow.protocol.sizes import PART_BYTES, json_bytes
from crow.tools import NOTHING_EXCLUDED, CommandAccess, ExcludedPaths, FileStat, OnOutput, SandboxStatus, Workspace
from crow.tools.disk import make_directories
from crow.tools.layers import Layer
from crow.tools.network import CommandNetwork

_SILENCE_S = 2.0
"""The interval, in seconds, at which crow checks the file on disk while the editor has not responded to a write
request. Some editors write the file and never respond."""

_POLL_S = 0.3
"""The interval, in seconds, at which crow reads the output of a command in the editor's terminal."""

_OUTPUT_BYTES = 1_000_000
_REAP_S = 3.0
_ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
"""Environment variables that keep commands in the editor's terminals from waiting for a key or a password."""

_SHELL = ("cmd", "/c") if os.name == "nt" else ("/bin/sh", "-c")

_REFUSAL = re.compile(
    r"\b(denied|refus\w*|reject\w*|declin\w*|forbidden|not allowed|not permitted|outside allowed)\b", re.I
)
"""Matches the text of an error with which an editor refuses to read a file. After any other error, crow reads the file
from the disk."""


class EditorRequests:
    """Sends the requests of one session to the editor. `answer_s` is the time limit for a response, in seconds. For
    `silence_s`, see `_SILENCE_S`."""

    def __init__(
        self, session_id: str, request: SendRequest, *, answer_s: float, silence_s: float = _SILENCE_S
    ) -> None:
        self.answer_s = answer_s
        self.silence_s = silence_s
        self._session_id = session_id
        self._request = request

    async def send(self, method: str, *, wait_long: bool = False, **params: Any) -> Any:
        """Send a request and return its result. See `SendRequest`.

        :raises TimeoutError: the editor did not respond in time. With `wait_long`, there is no time limit.
        """
        with anyio.fail_after(None if wait_long else self.answer_s):
            return await self._request(method, {"sessionId": self._session_id, **params})


class ClientEditor:
    """The editor of one client. It reads and writes UTF-8 text; `disk` serves everything else.

    Only a file that exists on disk can be read. If the editor's response looks wrong, the text on disk is used instead.

    The editor writes all text that fits into one line of the protocol, and `disk` writes longer text. If the editor
    refuses a write, crow does not write the text to the disk either. After a write, crow reads the file again, because
    some editors format text when they save it, and some report success without writing.
    """

    def __init__(
        self,
        disk: Workspace,
        requests: EditorRequests,
        *,
        reads: bool = False,
        writes: bool = False,
        terminals: EditorTerminals | None = None,
    ) -> None:
        self.disk = disk
        self.terminals = terminals
        """Runs the commands. If it is None, `disk` runs them."""
        self._requests = requests
        self._reads = reads
        self._writes = writes

    async def read_text(self, path: Path) -> str:
        """See :class:`crow.tools.Workspace`. A file that exists only as an unsaved buffer in the editor is not
        found."""
        saved = await self.disk.read_text(path)
        buffer = await self._buffer(path)
        # Some editors return an empty text for a file that they could not read.
        return saved if buffer is None or (not buffer and saved) else in_format_of(saved, buffer)

    async def write_text(self, path: Path, text: str) -> str:
        """See :class:`crow.tools.Workspace`.

        :raises PermissionError: the editor refused to write, or failed to write.
        :raises TimeoutError: the editor did not respond. The file may or may not have been written.
        :raises ConnectionError: the editor is gone.
        """
        if not self._writes or json_bytes(text) > PART_BYTES:
            return await self.disk.write_text(path, text)
        before = await self.disk.stat(path)
        created = await anyio.to_thread.run_sync(make_directories, path.parent)
        try:
            await self._send_text(path, text)
        except BaseException as error:
            for directory in reversed(created):
                with suppress(OSError):
                    directory.rmdir()
            match error:
                case RequestError():
                    raise PermissionError(f"The editor did not write {path}: {refusal_text(error)}") from error
                case TimeoutError():
                    problem = (
                        f"The editor did not answer the request to write {path} within {self._requests.answer_s:g} s"
                    )
                    raise TimeoutError(f"{problem}; the file may or may not have been written.") from error
            raise
        return await self._text_after_write(path, text, before)

    async def _send_text(self, path: Path, text: str) -> None:
        """Send a write request. Return when the editor has responded, or when the file on disk contains the text."""
        answers: list[Any] = []
        failures: list[Exception] = []

        async def request() -> None:
            try:
                answers.append(await self._requests.send("fs/write_text_file", path=str(path), content=text))
            except (RequestError, TimeoutError, ConnectionError) as error:
                failures.append(error)
            waiting.cancel_scope.cancel()

        async with anyio.create_task_group() as waiting:
            waiting.start_soon(request)
            while True:
                await anyio.sleep(self._requests.silence_s)
                with suppress(OSError):
                    if await self._saved(path) == text:
                        waiting.cancel_scope.cancel()
        if failures:
            raise failures[0]
        match answers:
            case [str(problem)] if problem:  # some editors return the error as a result
                raise PermissionError(f"The editor did not write {path}: {problem}")

    async def _text_after_write(self, path: Path, text: str, before: FileStat) -> str:
        """Return the text of the file after a write.

        Usually this is the text on disk. If the editor has formatted the text or has not saved it yet, it is the text
        in the editor's buffer. If neither the file on disk nor the buffer has changed, the editor did not write
        anything. In this case, this method writes the text to the disk.
        """
        saved = await self._saved(path)
        if saved == f"{text}\n" and text.endswith("\n"):
            # Some editors add a newline to every text that they save, so this file now ends with two. Send the text
            # again without its last newline.
            with suppress(RequestError, TimeoutError, ConnectionError):
                await self._requests.send("fs/write_text_file", path=str(path), content=text[:-1])
            saved = await self._saved(path)
        if saved == text:
            return text
        buffer = await self._buffer(path)
        if buffer and buffer != saved:
            return in_format_of(text, buffer)
        if saved is not None and await self.disk.stat(path) != before:
            return saved
        return await self.disk.write_text(path, text)

    async def _saved(self, path: Path) -> str | None:
        """Return the text on disk, or None if there is no file."""
        with suppress(FileNotFoundError):
            return await self.disk.read_text(path)
        return None

    async def _buffer(self, path: Path) -> str | None:
        """Return the text in the editor's buffer. If the editor does not return the text, return None, and
        the caller must use the text on disk.

        :raises PermissionError: the editor did not allow reading the file.
        """
        if not self._reads:
            return None
        try:
            answer = await self._requests.send("fs/read_text_file", path=str(path))
        except RequestError as error:
            text = refusal_text(error)
            if _REFUSAL.search(text):
                raise PermissionError(f"The editor did not allow reading {path}: {text}") from error
            self._reads = error.code != METHOD_NOT_FOUND
            return None
        except TimeoutError:
            self._reads = False  # later requests would time out too
            return None
        except ConnectionError:
            return None
        content = answer.get("content") if isinstance(answer, dict) else None
        return content if isinstance(content, str) else None


class SharedWorkspace:
    """The :class:`crow.tools.Workspace` of a session that several clients may use.

    While a client's prompt runs, that client's editor serves files and runs commands, as far as the editor supports it.
    `disk` does the rest. If that client is not connected, `disk` does everything.
    """

    def __init__(self, disk: Workspace) -> None:
        self.disk = disk
        self.editor: ClientEditor | None = None
        """The editor of the client whose prompt runs, or None if that editor serves nothing."""
        self._with_leftovers: list[EditorTerminals] = []
        self.is_bounded = disk.is_bounded
        self.cwd = disk.cwd
        self.directories = disk.directories
        self.resolve = disk.resolve
        self.contains = disk.contains
        self.protection = disk.protection
        self.read_protection = disk.read_protection
        self.find_names = disk.find_names
        self.stat = disk.stat
        self.read_bytes = disk.read_bytes
        self.spawn = disk.spawn
        self.run_program = disk.run_program
        self.find_program = disk.find_program
        self.start_confined = disk.start_confined
        self.end_confined = disk.end_confined
        self.close = disk.close
        self.layers = disk.layers

    def use(self, editor: ClientEditor | None) -> None:
        """Use the files and terminals of `editor` from now on. If `editor` is None, use only `disk`."""
        if (terminals := self._terminals) is not None and terminals.has_leftovers:
            self._with_leftovers.append(terminals)
        self.editor = editor

    @property
    def _terminals(self) -> EditorTerminals | None:
        return None if self.editor is None else self.editor.terminals

    async def read_text(self, path: Path) -> str:
        """See :class:`crow.tools.Workspace`."""
        return await (self.disk if self.editor is None else self.editor).read_text(path)

    async def write_text(self, path: Path, text: str) -> str:
        """See :class:`crow.tools.Workspace`. If the editor is gone, `disk` writes the file."""
        if self.editor is not None:
            with suppress(ConnectionError):
                return await self.editor.write_text(path, text)
        return await self.disk.write_text(path, text)

    async def restore(self, path: Path, content: bytes | None, *, mode: int | None = None) -> None:
        """See :class:`crow.tools.Workspace`.

        Text is first written through the editor, so that an open buffer shows the text. If the file on disk still does
        not contain `content` after that, `disk` restores it.
        """
        # An editor would create the file with another mode, so `disk` creates it first.
        is_new = mode is not None and content is not None and (await self.disk.stat(path)).kind == "missing"
        if self.editor is None or is_new:
            await self.disk.restore(path, content, mode=mode)
        if self.editor is None:
            return
        with suppress(UnicodeDecodeError):
            if content is not None:
                await self.write_text(path, content.decode())
                if (await self.disk.stat(path)).kind == "file" and await self.disk.read_bytes(path) == content:
                    return
        await self.disk.restore(path, content)

    @property
    def confines(self) -> bool:
        """See :class:`crow.tools.Workspace`. Commands in the editor's terminals are not confined."""
        return self.disk.confines and self._terminals is None

    @property
    def credential_hosts(self) -> tuple[str, ...]:
        """See :class:`crow.tools.Workspace`."""
        return () if self._terminals is not None else self.disk.credential_hosts

    def explain_failure(self, access: CommandAccess, output: str, *, has_failed: bool = True) -> str:
        """See :class:`crow.tools.Workspace`."""
        return "" if self._terminals is not None else self.disk.explain_failure(access, output, has_failed=has_failed)

    async def sandbox_status(self) -> SandboxStatus:
        """See :class:`crow.tools.Workspace`. Commands in the editor's terminals are not confined."""
        status = await self.disk.sandbox_status()
        if self._terminals is None:
            return status
        problem = "Commands run in the editor's terminals (`editor.terminals`), where they cannot be confined."
        return replace(status, name="", problem=problem, has_overlay=False)

    async def run(
        self,
        command: str,
        *,
        access: CommandAccess,
        timeout_s: float,
        on_output: OnOutput,
        excluded: ExcludedPaths = NOTHING_EXCLUDED,
        layer: Layer | None = None,
        network: CommandNetwork | None = None,
    ) -> tuple[int | None, str]:
        """See :class:`crow.tools.Workspace`. If a command was allowed in the editor's terminal but cannot run there,
        `disk` does not run the command instead."""
        if self._terminals is not None and layer is None:  # a terminal of the editor cannot run commands in a layer
            return await self._terminals.run(command, cwd=str(self.cwd), timeout_s=timeout_s, on_output=on_output)
        return await self.disk.run(
            command,
            access=access,
            timeout_s=timeout_s,
            on_output=on_output,
            excluded=excluded,
            layer=layer,
            network=network,
        )

    @property
    def has_leftovers(self) -> bool:
        """See :class:`crow.tools.Workspace`."""
        terminals = self._terminals
        has_open = terminals is not None and terminals.has_leftovers
        return bool(self._with_leftovers) or has_open or self.disk.has_leftovers

    async def reap(self) -> None:
        """See :class:`crow.tools.Workspace`."""
        all_terminals, self._with_leftovers = [*self._with_leftovers, *filter(None, [self._terminals])], []
        for terminals in all_terminals:
            await terminals.reap()
        await self.disk.reap()


class EditorTerminals:
    """Runs the commands of one session in terminals of the editor. Each command gets its own terminal, which is
    released after the command has ended.

    The environment variables listed in `hidden` are set to an empty string, because the editor's own environment may
    contain them.
    """

    def __init__(self, editor: EditorRequests, hidden: Sequence[str] = ()) -> None:
        self._editor = editor
        self._variables = {**_ENVIRONMENT, **dict.fromkeys(hidden, "")}
        self._leftovers: list[str] = []

    async def run(self, command: str, *, cwd: str, timeout_s: float, on_output: OnOutput) -> tuple[int | None, str]:
        """See :meth:`crow.tools.Workspace.run`.

        :raises PermissionError: the editor refused or failed to run the command.
        """
        terminal = await self._create(command, cwd)
        try:
            with anyio.move_on_after(timeout_s) as timeout:
                status = await self._wait(terminal, on_output)
            if timeout.cancelled_caught:
                with suppress(RequestError, TimeoutError):  # some editors cannot kill
                    await self._editor.send("terminal/kill", terminalId=terminal)
            output, status_at_end = await self._output(terminal)
        except BaseException:
            self._leftovers.append(terminal)
            raise
        await self._release(terminal)
        return (None if timeout.cancelled_caught else exit_code(status or status_at_end)), output

    @property
    def has_leftovers(self) -> bool:
        """Whether terminals of cancelled commands wait for `reap`."""
        return bool(self._leftovers)

    async def reap(self) -> None:
        """Kill the cancelled commands and release their terminals. Give up after `_REAP_S` seconds."""
        leftovers, self._leftovers = self._leftovers, []
        with anyio.move_on_after(_REAP_S):
            for terminal in leftovers:
                with suppress(RequestError, TimeoutError, ConnectionError):
                    await self._editor.send("terminal/kill", terminalId=terminal)
                await self._release(terminal)

    async def _create(self, command: str, cwd: str) -> str:
        shell, arguments = _SHELL[0], [*_SHELL[1:], command]
        env = [{"name": name, "value": value} for name, value in self._variables.items()]
        try:
            answer = await self._editor.send(
                "terminal/create", command=shell, args=arguments, cwd=cwd, env=env, outputByteLimit=_OUTPUT_BYTES
            )
        except RequestError as error:
            raise PermissionError(f"The editor did not run the command: {refusal_text(error)}") from error
        except TimeoutError as error:
            problem = f"The editor did not answer within {self._editor.answer_s:g} s; the command may be running"
            raise PermissionError(f"{problem}.") from error
        except ConnectionError as error:
            raise PermissionError("The editor is gone; the command was not run.") from error
        match answer:
            case {"terminalId": str(terminal)}:
                return terminal
            case _:
                raise PermissionError("The editor did not open a terminal; the command was not run.")

    async def _wait(self, terminal: str, on_output: OnOutput) -> Any:
        """Show the output until the command ends. Return the exit status, or None if the editor reports none."""
        status: Any = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._show_output, terminal, on_output)
            with suppress(RequestError, ConnectionError):
                status = await self._editor.send("terminal/wait_for_exit", wait_long=True, terminalId=terminal)
            tasks.cancel_scope.cancel()
        return status

    async def _show_output(self, terminal: str, on_output: OnOutput) -> None:
        shown = ""
        while True:
            await anyio.sleep(_POLL_S)
            output, _ = await self._output(terminal)
            if output != shown:
                shown = output
                await on_output(output)

    async def _output(self, terminal: str) -> tuple[str, Any]:
        """Return the output and the exit status. If the editor sends no output, the output is empty. If it sends no
        status, the status is None."""
        try:
            answer = await self._editor.send("terminal/output", terminalId=terminal)
        except (RequestError, TimeoutError, ConnectionError):
            return "", None
        answer = answer if isinstance(answer, dict) else {}
        output = answer.get("output")
        text = output if isinstance(output, str) else ""
        if answer.get("truncated") is True:
            text = f"[the beginning is missing, because the editor keeps only {_OUTPUT_BYTES // 1_000_000} MB]\n{text}"
        return text, answer.get("exitStatus")

    async def _release(self, terminal: str) -> None:
        with suppress(RequestError, TimeoutError, ConnectionError):
            await self._editor.send("terminal/release", terminalId=terminal)


def exit_code(status: Any) -> int:
    """Return the exit code from the editor's exit status. If a signal ended the command, this is the negative number
    of the signal. If the status has neither a code nor a signal, this is -1."""
    match status:
        case {"exitCode": int(code)}:
            return code
        case {"signal": str(name)}:
            with suppress(KeyError):
                return -signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    return -1
