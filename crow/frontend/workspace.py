"""A workspace whose files may be open in the editor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from acp import RequestError

from crow.frontend.client import SendRequest, refusal_text
from crow.frontend.params import ClientCapabilities
from crow.frontend.terminal import EditorTerminals
from crow.frontend.tool_calls import PART_BYTES, json_bytes
from crow.tools import BackgroundCommand, FileStat, OnOutput, Protection, Workspace

SILENCE_S = 2.0
"""How often a write that the editor has not answered is looked for on disk: some editors write and never answer."""

METHOD_NOT_FOUND = -32601
_BOM = "\ufeff"
_REFUSAL = re.compile(
    r"\b(denied|refus\w*|reject\w*|declin\w*|forbidden|not allowed|not permitted|outside allowed)\b", re.I
)


class EditorWorkspace:
    """See :class:`crow.tools.Workspace`. The editor serves UTF-8 text, `disk` everything else.

    A file must exist on disk to be read; whatever looks wrong in the editor's answer falls back to the disk. A write
    goes through the editor alone, unless the text is too large for a line: a refusal is final. After a write the file
    is read again, as some editors format on save, and some report success without writing.

    `in_terminals`: run commands in the editor's terminals, if it has any, without the variables `hidden`. `answer_s`
    is how long the editor may take to answer, in seconds.
    """

    def __init__(
        self,
        disk: Workspace,
        session_id: str,
        request: SendRequest,
        caps: ClientCapabilities,
        *,
        answer_s: float,
        silence_s: float = SILENCE_S,
        in_terminals: bool = False,
        hidden: Sequence[str] = (),
    ) -> None:
        self._disk = disk
        self._session_id = session_id
        self._request = request
        self._reads = caps.reads_files
        self._writes = caps.writes_files
        self._answer_s = answer_s
        self._silence_s = silence_s
        self._terminals = EditorTerminals(session_id, request, answer_s=answer_s, hidden=hidden)
        self._in_terminals = in_terminals and caps.terminals

    @property
    def cwd(self) -> Path:
        """See :class:`crow.tools.Workspace`."""
        return self._disk.cwd

    def resolve(self, path: str) -> Path:
        """See :class:`crow.tools.Workspace`."""
        return self._disk.resolve(path)

    def contains(self, path: Path) -> bool:
        """See :class:`crow.tools.Workspace`."""
        return self._disk.contains(path)

    def protection(self, path: Path) -> Protection:
        """See :class:`crow.tools.Workspace`."""
        return self._disk.protection(path)

    async def stat(self, path: Path, *, head: int = 0) -> FileStat:
        """See :class:`crow.tools.Workspace`."""
        return await self._disk.stat(path, head=head)

    async def read_bytes(self, path: Path, limit: int | None = None, start: int = 0) -> bytes:
        """See :class:`crow.tools.Workspace`."""
        return await self._disk.read_bytes(path, limit, start)

    async def read_text(self, path: Path) -> str:
        """See :class:`crow.tools.Workspace`. An unsaved buffer of a file that is not on disk is not found."""
        saved = await self._disk.read_text(path)
        buffer = await self._buffer(path)
        # Some editors return an empty text for what they could not read.
        return saved if buffer is None or (not buffer and saved) else _in_format_of(saved, buffer)

    async def write_text(self, path: Path, text: str) -> str:
        """See :class:`crow.tools.Workspace`.

        :raises PermissionError: the editor refused or failed.
        :raises TimeoutError: the editor did not answer; it is not known whether it wrote.
        """
        if not self._writes or json_bytes(text) > PART_BYTES:
            return await self._disk.write_text(path, text)
        before = await self._disk.stat(path)
        created = await anyio.to_thread.run_sync(_make_directories, path.parent)
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
                    problem = f"The editor did not answer the request to write {path} within {self._answer_s:g} s"
                    raise TimeoutError(f"{problem}; it may or may not have been written.") from error
                case ConnectionError():
                    raise PermissionError(f"The editor is gone; {path} was not written.") from error
            raise
        return await self._text_after_write(path, text, before)

    async def put_back(self, path: Path, content: bytes | None) -> None:
        """See :class:`crow.tools.Workspace`.

        Text goes through the editor first, so that an open buffer shows it, then to the disk if that still differs.
        """
        with suppress(UnicodeDecodeError):
            if content is not None:
                await self.write_text(path, content.decode())
                if (await self._disk.stat(path)).kind == "file" and await self._disk.read_bytes(path) == content:
                    return
        await self._disk.put_back(path, content)

    async def run(self, command: str, *, timeout_s: float, on_output: OnOutput) -> tuple[int | None, str]:
        """See :class:`crow.tools.Workspace`."""
        if self._in_terminals:
            return await self._terminals.run(command, cwd=str(self.cwd), timeout_s=timeout_s, on_output=on_output)
        return await self._disk.run(command, timeout_s=timeout_s, on_output=on_output)

    async def spawn(self, command: str, on_output: Callable[[str], None]) -> BackgroundCommand:
        """See :class:`crow.tools.Workspace`."""
        return await self._disk.spawn(command, on_output)

    @property
    def has_leftovers(self) -> bool:
        """See :class:`crow.tools.Workspace`."""
        return self._disk.has_leftovers or self._terminals.has_leftovers

    async def reap(self) -> None:
        """See :class:`crow.tools.Workspace`."""
        await self._terminals.reap()
        await self._disk.reap()

    async def _send_text(self, path: Path, text: str) -> None:
        """Sends a write request. Returns without an answer if the text is on disk meanwhile."""
        answers: list[Any] = []
        failures: list[Exception] = []

        async def request() -> None:
            try:
                answers.append(await self._send("fs/write_text_file", path, content=text))
            except (RequestError, TimeoutError, ConnectionError) as error:
                failures.append(error)
            waiting.cancel_scope.cancel()

        async with anyio.create_task_group() as waiting:
            waiting.start_soon(request)
            while True:
                await anyio.sleep(self._silence_s)
                with suppress(OSError):
                    if await self._saved(path) == text:
                        waiting.cancel_scope.cancel()
        if failures:
            raise failures[0]
        match answers:
            case [str(problem)] if problem:  # some editors return the error as a result
                raise PermissionError(f"The editor did not write {path}: {problem}")

    async def _text_after_write(self, path: Path, text: str, before: FileStat) -> str:
        """What the file contains now: as saved, or the editor's buffer if that was formatted or is not saved yet.

        If neither disk nor buffer have changed, the editor's answer was wrong, and the text is written to the disk.
        """
        saved = await self._saved(path)
        if saved == f"{text}\n" and text.endswith("\n"):
            # Some editors add a newline to every buffer, here a second one.
            with suppress(RequestError, TimeoutError, ConnectionError):
                await self._send("fs/write_text_file", path, content=text[:-1])
            saved = await self._saved(path)
        if saved == text:
            return text
        buffer = await self._buffer(path)
        if buffer and buffer != saved:
            return _in_format_of(text, buffer)
        if saved is not None and await self._disk.stat(path) != before:
            return saved
        return await self._disk.write_text(path, text)

    async def _saved(self, path: Path) -> str | None:
        """The text on disk; None if there is no file."""
        with suppress(FileNotFoundError):
            return await self._disk.read_text(path)
        return None

    async def _buffer(self, path: Path) -> str | None:
        """The editor's text; None if the disk's must do. :raises PermissionError: the editor refused."""
        if not self._reads:
            return None
        try:
            answer = await self._send("fs/read_text_file", path)
        except RequestError as error:
            text = refusal_text(error)
            if _REFUSAL.search(text):
                raise PermissionError(f"The editor did not allow reading {path}: {text}") from error
            self._reads = error.code != METHOD_NOT_FOUND
            return None
        except TimeoutError:
            self._reads = False  # it would take as long each time
            return None
        except ConnectionError:
            return None
        content = answer.get("content") if isinstance(answer, dict) else None
        return content if isinstance(content, str) else None

    async def _send(self, method: str, path: Path, **params: str) -> Any:
        with anyio.fail_after(self._answer_s):
            return await self._request(method, {"sessionId": self._session_id, "path": str(path)} | params)


def _in_format_of(saved: str, buffer: str) -> str:
    """`buffer` with the byte order mark, line endings and final newline of `saved`: editors may omit them."""
    if saved.endswith("\n") and not buffer.endswith("\n"):
        buffer += "\r\n" if "\r\n" in buffer else "\n"
    if "\r\n" in saved and "\r\n" not in buffer:
        buffer = buffer.replace("\n", "\r\n")
    if saved.startswith(_BOM) and not buffer.startswith(_BOM):
        buffer = _BOM + buffer
    return buffer


def _make_directories(directory: Path) -> list[Path]:
    """Creates `directory` and its missing parents; returns the new ones, outermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()][::-1]
    for path in missing:
        path.mkdir(exist_ok=True)
    return missing
