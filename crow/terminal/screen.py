"""The user's terminal. The answer goes to stdout, reports of what happens go to stderr, and questions are asked at the
controlling terminal."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import anyio.to_thread

from crow.domain.text import on_one_line, safe, safe_json
from crow.protocol import frames
from crow.stdio import write_all

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SPINNER_S = 0.1
_PAUSE_STEPS = 4
"""After this many steps of the spinner without new text, the spinner and its status are shown even if the last line of
the answer has not ended."""

_DOWN, _UP, _SAVE, _RESTORE = "\x1bD", "\x1bM", "\x1b7", "\x1b8"
"""Move the cursor one line down or up in the same column, and scroll at the edge; save and restore its position."""


class Screen:
    """Writes the answer to stdout, and everything else to stderr. Hidden characters are escaped in text for a terminal.
    If stdout is a pipe, the answer is written unchanged."""

    def __init__(self, *, is_animated: bool = True) -> None:
        self.label = ""
        """Shown beside the spinner, cut to the width of the terminal."""
        self.status: Callable[[str, int], str] | None = None
        """Takes the label and a number of columns, and returns the whole text beside the spinner. If this is set and no
        text was written for a moment, the spinner is shown even if the last line of the answer has not ended. The
        spinner is then on the next line."""
        self.below: Callable[[int], Sequence[str]] = lambda columns: ()  # noqa: ARG005
        """Takes a number of columns, and returns the lines to show below the spinner. These lines may contain styles,
        and must not be wider than that. If there are such lines, the spinner is shown even if the last line of the
        answer has not ended."""
        self._escapes = sys.stdout.isatty()
        self._can_spin = is_animated and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        """Whether a spinner may be shown: `is_animated` is true, and stderr is a terminal that can move the cursor."""
        self._is_spinning = False
        """Whether the spinner is on the screen now."""
        self._has_below = False
        """Whether there may be lines below the spinner on the screen, which must be removed together with it."""
        self._is_paused = False
        """Whether the spinner must not be drawn; see `paused`."""
        self._step = self._pause_steps = 0
        """The steps of the spinner since the beginning, and since the last rendered text."""
        self._at_line_start = True
        """Whether the cursor of the answer is at the start of a line."""
        self._newlines = 2
        """The newlines at the end of the messages so far, counted up to 2."""

    async def print_answer(self, text: str) -> None:
        """Write a part of the answer."""
        if not text:
            return
        self.clear()
        await write(sys.stdout, safe(text) if self._escapes else text)
        self._at_line_start = text.endswith("\n") or not self._escapes

    async def print_rendered(self, text: str) -> None:
        """Write text to stdout unchanged. The caller has already prepared the text for the terminal, with escape
        sequences."""
        if text:
            self.clear()
            await write(sys.stdout, text)
            self._at_line_start = text.endswith("\n")
            self._pause_steps = 0
            if below := self._below():
                self.refresh(below)

    async def print_message(self, text: str, *, is_new: bool) -> None:
        """Write a part of one of the model's messages. Before a new message, write an empty line."""
        shown = "\n" * (2 - self._newlines) + text if is_new else text
        if shown:
            await self.print_answer(shown)
            self._newlines = min(2, len(shown) - len(shown.rstrip("\n")))

    async def print_line(self, value: Mapping[str, Any]) -> None:
        """Write a JSON line to stdout."""
        self.clear()
        line = frames.encode(dict(value)).decode()
        await write(sys.stdout, safe_json(line) if self._escapes else line)

    async def say(self, line: str) -> None:
        """Write a line to stderr."""
        self.clear()
        lead = "" if self._at_line_start else "\n"
        self._at_line_start = True
        with suppress(OSError):
            shown = safe(line).replace(
                "\n", "\n  "
            )  # a line end in the text must not begin a line that looks like crow's own
            await write(sys.stderr, f"{lead}{shown}\n")

    async def end_line(self) -> None:
        """End the last line of the messages if it has not ended yet."""
        if not self._newlines:
            self._newlines = 1
            await self.print_answer("\n")

    def clear(self) -> None:
        """Remove the spinner and the lines below it."""
        if self._is_spinning:
            self._is_spinning = False
            # In the middle of a line, the spinner is on the next line: go down, erase, and come back.
            where = "\r{}" if self._at_line_start else f"{_SAVE}{_DOWN}\r{{}}{_RESTORE}"
            self._show(where.format("\x1b[J" if self._has_below else "\x1b[K"))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show no spinner during the block."""
        self.clear()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def spinning(self) -> Iterator[None]:
        """If stderr is a terminal, show a spinner during the block whenever no text is being written."""
        task = asyncio.ensure_future(self._spin()) if self._can_spin else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
            self.clear()

    async def _spin(self) -> None:
        while True:
            await asyncio.sleep(_SPINNER_S)
            self._step += 1
            self._pause_steps += 1
            is_paused = self.status is not None and self._pause_steps >= _PAUSE_STEPS
            below = self._below()
            if self._at_line_start or is_paused or below:
                self.refresh(below)

    def _below(self) -> Sequence[str]:
        return self.below(shutil.get_terminal_size().columns - 1)

    def refresh(self, below: Sequence[str] | None = None) -> None:
        """Draw the spinner, and below it the lines in `below` (default: those that the function `self.below` returns).
        The cursor stays at the end of the answer."""
        if self._is_paused or not self._can_spin:
            return
        self.clear()
        columns = shutil.get_terminal_size().columns
        label = on_one_line(self.label)
        # A character takes up to two columns.
        words = label[: columns // 2 - 2] if self.status is None else self.status(label, columns - 3)
        # Made for the current width each time, because a line that the terminal wraps would move the answer.
        lines = [f"{_SPINNER[self._step % len(_SPINNER)]} {words}", *(self._below() if below is None else below)]
        self._is_spinning, self._has_below = True, self.status is not None or len(lines) > 1
        if not self._has_below:
            self._show(f"\r\x1b[K{lines[0]}")
            return
        # First make room below, so that the terminal does not scroll between saving and restoring the cursor.
        downs = len(lines) - self._at_line_start
        start = "" if self._at_line_start else _DOWN
        drawn = f"{_DOWN}".join(f"\r\x1b[K{line}" for line in lines)
        self._show(f"{_DOWN * downs}{_UP * downs}{_SAVE}{start}{drawn}{_RESTORE}")

    def _show(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


async def write(file: TextIO, text: str) -> None:
    """Write `text` and flush `file`, in a thread if that may block. Lone surrogates become question marks."""
    data = text.encode("utf-8", "replace")
    can_wait = len(data) > select.PIPE_BUF or not select.select([], [file], [], 0)[1]

    if can_wait:
        await anyio.to_thread.run_sync(write_all, file, data, abandon_on_cancel=True)
    else:
        write_all(file, data)


@contextmanager
def interrupts(
    interrupt: Callable[[], object], names: Sequence[str] = ("SIGINT", "SIGTERM", "SIGHUP")
) -> Iterator[None]:
    """Call `interrupt` for each of these signals during the block. Ctrl-C sends SIGINT."""
    loop = asyncio.get_running_loop()
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    with suppress(NotImplementedError):  # event loops on Windows take no signal handlers
        for each in signals:
            loop.add_signal_handler(each, interrupt)
    try:
        yield
    finally:
        with suppress(NotImplementedError):
            for each in signals:
                loop.remove_signal_handler(each)


def open_terminal() -> TextIO | None:
    """Open the user's terminal, even if stdin is a pipe. Return None if stderr is not a terminal, or if there is no
    terminal to open."""
    if not sys.stderr.isatty():
        return None
    try:
        return open(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY), "w", encoding="utf-8", errors="replace")
    except OSError:
        return None


async def answer_at(terminal: TextIO, question: str) -> str:
    """Ask at the terminal, and return the answer. Anything that was typed before the question is discarded."""
    fd = terminal.fileno()
    discard_input(fd)
    terminal.write(question)
    terminal.flush()
    return (await next_input(fd)).decode("utf-8", "replace").strip().lower()


async def next_input(fd: int, ready: asyncio.Future[bytes] | None = None) -> bytes:
    """Wait for input at this terminal, and return it. At the end of input, return an empty value. To end the wait
    early, set an exception on `ready`."""
    loop = asyncio.get_running_loop()
    typed: asyncio.Future[bytes] = loop.create_future() if ready is None else ready
    read_into(fd, typed)
    try:
        return await typed
    finally:
        loop.remove_reader(fd)


def read_into(fd: int, typed: asyncio.Future[bytes]) -> None:
    """Set the result of `typed` to the next input at this terminal."""

    def read() -> None:
        if not typed.done():
            try:
                typed.set_result(os.read(fd, 10_000))
            except OSError:  # the terminal is gone
                typed.set_result(b"")

    asyncio.get_running_loop().add_reader(fd, read)


def discard_input(fd: int) -> None:
    """Discard the keys that were typed at this terminal and not read yet."""
    try:
        import termios  # not available on Windows
    except ImportError:
        return
    with suppress(termios.error):
        termios.tcflush(fd, termios.TCIFLUSH)


def shell_quoted(text: str) -> str:
    """Return a text, such as a rule or an alias, in quotes for a shell's command line."""
    line = on_one_line(text)
    return "'" + line.replace("'", "'\\''") + "'"
