"""A workspace whose files the editor has open.

Strategy: the editor serves text, the disk everything else. A file must exist on disk to be read; its text comes from
the editor, in the disk's own line endings; whatever looks wrong there falls back to the disk. A write goes through the
editor and through nothing else, unless no line holds the text: its refusal is final. After it the file is read again,
as editors format on save, and some say that they wrote what they did not: the disk gets that. Knows two requests of
the protocol; not which tool asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from acp import RequestError

from crow.frontend.server import Ask, refusal_words
from crow.frontend.terminal import EditorTerminals
from crow.frontend.tool_calls import PART_BYTES, weight

if TYPE_CHECKING:
    from crow.frontend.params import ClientCapabilities
    from crow.tools import BackgroundCommand, FileStat, OnOutput, Protection, Workspace

__all__ = ["EditorWorkspace"]

SILENCE_S = 2.0
"""How long an editor may say nothing of a write that is on disk; some fail after the writing, and never answer."""

METHOD_NOT_FOUND = -32601
_BOM = "\ufeff"
_REFUSAL = re.compile(
    r"\b(denied|refus\w*|reject\w*|declin\w*|forbidden|not allowed|not permitted|outside allowed)\b", re.I
)


class EditorWorkspace:
    """See :class:`crow.tools.Workspace`. `disk` is the workspace without the editor; `in_terminals`: commands run in
    the editor's terminals, if it has any, without the variables `hidden`; `answer_s`: how long it may take for an
    answer, in seconds."""

    def __init__(
        self,
        disk: Workspace,
        session_id: str,
        ask: Ask,
        caps: ClientCapabilities,
        *,
        answer_s: float,
        silence_s: float = SILENCE_S,
        in_terminals: bool = False,
        hidden: Sequence[str] = (),
    ) -> None:
        self._disk = disk
        self._session_id = session_id
        self._ask = ask
        self._reads = caps.reads_files
        self._writes = caps.writes_files
        self._answer_s = answer_s
        self._silence_s = silence_s
        self._terminals = (
            EditorTerminals(session_id, ask, answer_s=answer_s, hidden=hidden)
            if in_terminals and caps.terminals
            else None
        )

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
        """See :class:`crow.tools.Workspace`. An unsaved buffer of a file that is not on disk is not seen."""
        saved = await self._disk.read_text(path)
        if not self._reads:
            return saved
        buffer = await self._buffer(path)
        # Some editors answer an empty text for what they could not read.
        if buffer is None or (not buffer and saved):
            return saved
        return _like(saved, buffer)

    async def write_text(self, path: Path, text: str) -> str:
        """See :class:`crow.tools.Workspace`.

        :raises PermissionError: the editor refused, or failed, which is taken for a refusal.
        :raises TimeoutError: the editor did not answer; whether it wrote is not known.
        """
        if not self._writes or weight(text) > PART_BYTES:
            return await self._disk.write_text(path, text)
        before = await self._disk.stat(path)
        made = await anyio.to_thread.run_sync(_make_parents, path.parent)
        written = False
        try:
            answer = await self._write(path, text)
            if isinstance(answer, str) and answer:  # some say as a result what went wrong
                raise PermissionError(f"The editor did not write {path}: {answer}")
            written = True
        except RequestError as error:
            raise PermissionError(f"The editor did not write {path}: {refusal_words(error)}") from error
        except TimeoutError as error:
            words = f"The editor did not answer the request to write {path} within {self._answer_s:g} s"
            raise TimeoutError(f"{words}; whether it was written is not known.") from error
        except ConnectionError as error:
            raise PermissionError(f"The editor is gone; {path} was not written.") from error
        finally:
            if not written:
                _remove_empty(made)
        return await self._after_write(path, text, before)

    async def put_back(self, path: Path, content: bytes | None) -> None:
        """See :class:`crow.tools.Workspace`. Text goes through the editor, so that an open buffer shows it; then the
        disk, since an editor may write it otherwise than it was."""
        text = None if content is None else _decoded(content)
        if text is not None:
            await self.write_text(path, text)
            if (await self._disk.stat(path)).kind == "file" and await self._disk.read_bytes(path) == content:
                return
        await self._disk.put_back(path, content)

    async def run(self, command: str, *, timeout_s: float, on_output: OnOutput) -> tuple[int | None, str]:
        """See :class:`crow.tools.Workspace`."""
        if self._terminals is not None:
            return await self._terminals.run(command, cwd=str(self.cwd), timeout_s=timeout_s, on_output=on_output)
        return await self._disk.run(command, timeout_s=timeout_s, on_output=on_output)

    async def spawn(self, command: str, on_output: Callable[[str], None]) -> BackgroundCommand:
        """See :class:`crow.tools.Workspace`."""
        return await self._disk.spawn(command, on_output)

    @property
    def has_leftovers(self) -> bool:
        """See :meth:`crow.tools.Workspace.has_leftovers`."""
        return self._disk.has_leftovers or (self._terminals is not None and self._terminals.has_leftovers)

    async def reap(self) -> None:
        """See :class:`crow.tools.Workspace`."""
        if self._terminals is not None:
            await self._terminals.reap()
        await self._disk.reap()

    async def _after_write(self, path: Path, text: str, before: FileStat) -> str:
        """What the file holds: as saved, or the editor's buffer where that was formatted or is not saved yet.

        Where nothing has changed, in the editor neither, its answer was wrong and the text goes to the disk.
        """
        saved = await self._saved(path)
        if saved == f"{text}\n" and text.endswith("\n"):
            # Some end the last line of a buffer themselves, and make one more, empty line of the text's own end.
            with suppress(RequestError, TimeoutError, ConnectionError):
                await self._request("fs/write_text_file", path, content=text[:-1])
            saved = await self._saved(path)
        if saved == text:
            return text
        buffer = await self._buffer(path) if self._reads else None
        if buffer and (saved is None or buffer != saved):
            return _like(text, buffer)
        if saved is not None and await self._disk.stat(path) != before:
            return saved
        return await self._disk.write_text(path, text)

    async def _write(self, path: Path, text: str) -> Any:
        """The editor's answer; None for one that does not come though the disk holds the text."""
        answers: list[Any] = []
        failures: list[Exception] = []

        async def ask() -> None:
            try:
                answers.append(await self._request("fs/write_text_file", path, content=text))
            except (RequestError, TimeoutError, ConnectionError) as error:
                failures.append(error)
            asking.cancel_scope.cancel()

        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            while True:
                await anyio.sleep(self._silence_s)
                with suppress(OSError):
                    if await self._saved(path) == text:
                        asking.cancel_scope.cancel()
        if failures:
            raise failures[0]
        return answers[0] if answers else None

    async def _saved(self, path: Path) -> str | None:
        """The text on disk; None without a file."""
        with suppress(FileNotFoundError):
            return await self._disk.read_text(path)
        return None

    async def _buffer(self, path: Path) -> str | None:
        """The editor's text; None where the disk must do. :raises PermissionError: the editor refused."""
        try:
            answer = await self._request("fs/read_text_file", path)
        except RequestError as error:
            words = refusal_words(error)
            if _REFUSAL.search(words):
                raise PermissionError(f"The editor did not give {path}: {words}") from error
            self._reads = self._reads and error.code != METHOD_NOT_FOUND
            return None
        except TimeoutError:
            # It offered to read and does not answer: asking again would cost as much each time.
            self._reads = False
            return None
        except ConnectionError:
            return None
        content = answer.get("content") if isinstance(answer, dict) else None
        return content if isinstance(content, str) else None

    async def _request(self, method: str, path: Path, **params: str) -> Any:
        with anyio.fail_after(self._answer_s):
            return await self._ask(method, {"sessionId": self._session_id, "path": str(path)} | params)


def _like(saved: str, buffer: str) -> str:
    """The buffer's text with the byte order mark and line endings of the file, which editors keep apart from text.

    The last line's too: some give the lines without what ends the last.
    """
    if saved.endswith("\n") and not buffer.endswith("\n"):
        buffer += "\r\n" if "\r\n" in buffer else "\n"
    if "\r\n" in saved and "\r\n" not in buffer:
        buffer = buffer.replace("\n", "\r\n")
    if saved.startswith(_BOM) and not buffer.startswith(_BOM):
        buffer = _BOM + buffer
    return buffer


def _decoded(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _make_parents(directory: Path) -> list[Path]:
    """Make what is missing of `directory`; gives what was made, outermost first."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for made in reversed(missing):
        made.mkdir(exist_ok=True)
    return missing[::-1]


def _remove_empty(directories: list[Path]) -> None:
    for directory in reversed(directories):
        with suppress(OSError):
            directory.rmdir()
