"""Reads what the user types in `crow chat`: prompts, single keys and lines of a form."""

from __future__ import annotations

import asyncio
import os
import re
import select
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app_or_none, in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.filters import Condition, has_completions
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.posix_utils import PosixStdinReader
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.renderer import CPR_Support
from prompt_toolkit.styles import Style

from crow.domain.text import on_one_line, plural, safe
from crow.terminal.completion import Choices, ChoicesCompleter, is_completed
from crow.terminal.render import cut
from crow.terminal.screen import discard_input, next_input, read_into, write
from crow.terminal.typed import ENTERS, TypedText

HISTORY_BYTES = 1_000_000
"""The size above which crow shortens the history file at its start. The newest `HISTORY_BYTES // 2` bytes remain."""


_ESCAPE_S = 0.05
"""If nothing follows the byte of Esc for this many seconds, the user pressed Esc. Otherwise, the byte begins another
key's code."""

_ESCAPE, _END = "escape", "end"
"""`Keyboard.key` returns `_ESCAPE` for Esc, and `_END` for Ctrl-D or the end of input."""

_LEAVING = "Press Ctrl-C again to leave. Everything is kept."

_PASTED_LINES, _PASTED_CHARS = 10, 2_000
"""The line editor shows a mark in place of a pasted text that has more lines or more characters than this."""


class Interrupted(Exception):
    """The user pressed Ctrl-C."""


class Keyboard(Protocol):
    """The user's keyboard. `set_aside` and `interrupt` may be called while another method runs. The other methods run
    one at a time."""

    async def prompt(self, message: str, *, default: str = "") -> str:
        """Read a prompt. If the keyboard has a line editor, the user begins with the text `default`. :raises EOFError:
        the user pressed Ctrl-D."""
        ...

    async def line(self, message: str, *, default: str = "") -> str:
        """Read a line of a form. :raises EOFError: the user pressed Ctrl-D. :raises Interrupted: the user pressed
        Ctrl-C."""
        ...

    async def key(self, keys: Collection[str]) -> str:
        """Read a key: one of `keys`, `_ESCAPE` or `_END`."""
        ...

    def discard(self) -> None:
        """Discard all keys typed so far. Call this just before the last part of a question is shown, because nobody can
        answer a question before seeing all of it."""
        ...

    def set_aside(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that hides an unfinished prompt during the block, so that other text can be
        written."""
        ...

    def collect(self, typed: TypedText, changed: Callable[[tuple[str, ...]], object]) -> Any:
        """Return a context manager. During its block, typed keys go to `typed`. After each key, `changed` is called
        with the texts to send into the running turn. While another method reads keys, the keys go to that method."""
        ...

    @property
    def is_typing(self) -> bool:
        """Whether a prompt is being edited and not empty."""
        ...

    def interrupt(self) -> bool:
        """Handle a Ctrl-C that was pressed while no turn ran. Return False if the keyboard is not waiting for input."""
        ...

    def refresh(self) -> None:
        """Draw the line below the prompt again."""
        ...


def open_history(path: Path) -> tuple[History, bool]:
    """Return the prompt history, and whether its file is new. Only the user can read this file. If the file cannot be
    used, the history is kept in memory."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(fd, "rb+") as file:
            os.fchmod(fd, 0o600)
            if os.fstat(fd).st_size > HISTORY_BYTES:
                file.seek(-HISTORY_BYTES // 2, os.SEEK_END)
                _, mark, rest = file.read().partition(b"\n# ")
                file.seek(0)
                file.write(mark + rest)
                file.truncate()
    except OSError:
        return InMemoryHistory(), False
    return FileHistory(str(path)), is_new


class Pastes:
    """Long pasted texts. The line editor shows a mark in the place of each, so that they do not fill the screen."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        """Maps marks to texts."""

    def shown(self, text: str) -> str:
        """Return the text that the line editor shows for a pasted text: the text itself, or a mark."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        lines = text.count("\n") + (not text.endswith("\n"))
        if lines <= _PASTED_LINES and len(text) <= _PASTED_CHARS:
            return text
        size = plural(lines, "line") if lines > 1 else plural(len(text), "character")
        mark = f"[paste #{len(self._texts) + 1}: {size}]"
        self._texts[mark] = text
        return mark

    def expanded(self, text: str) -> str:
        """Return a prompt with the pasted texts in the places of their marks."""
        if not self._texts:
            return text
        return re.sub("|".join(map(re.escape, self._texts)), lambda found: self._texts[found[0]], text)


class _ExpandedHistory(History):
    """A history that keeps the pasted texts in place of their marks."""

    def __init__(self, history: History, pastes: Pastes) -> None:
        super().__init__()
        self._history = history
        self._pastes = pastes

    def load_history_strings(self) -> Iterable[str]:
        """See `History`."""
        return self._history.load_history_strings()

    def append_string(self, string: str) -> None:
        """See `History`."""
        super().append_string(self._pastes.expanded(string))

    def store_string(self, string: str) -> None:
        """See `History`."""
        self._history.store_string(string)


class _EscapeReader(PosixStdinReader):
    """Reads typed keys, and distinguishes the key Esc from the codes of other keys, which begin with the same byte but
    arrive in one piece."""

    is_escape = False
    """Whether the newest byte of Esc came from the key Esc: nothing else arrived with it or soon after it."""
    _last, _last_s = "", 0.0
    """The text that was read last, and its monotonic time in seconds."""

    def read(self, count: int = 1024) -> str:
        data, now = super().read(count), time.monotonic()
        # Over a slow connection, the rest of the code of an arrow or another key may come later.
        is_after = self._last == "\x1b" and now - self._last_s >= _ESCAPE_S and not data.startswith(("\x1b", "[", "O"))
        self.is_escape = data == "\x1b" or is_after
        self._last, self._last_s = data, now
        return data


class LineEditor:
    """The keyboard with a line editor. `toolbar` returns the line to show below the prompt. The first prompt gets
    the keys `typed`. Shift-Tab calls `next_mode`."""

    def __init__(
        self,
        choices: Choices,
        history: History,
        toolbar: Callable[[], str],
        next_mode: Callable[[], object],
        typed: str = "",
    ) -> None:
        self._pastes = Pastes()
        self._toolbar = toolbar
        self._is_leaving = False
        current = "reverse bg:#ffffff #000000"  # white on black; without colours, still reversed
        style = Style.from_dict({"bottom-toolbar": "noreverse italic", "completion-menu.completion.current": current})
        self._session: PromptSession[str] = PromptSession(
            history=_ExpandedHistory(history, self._pastes),
            multiline=True,
            completer=ChoicesCompleter(choices),
            complete_in_thread=True,
            complete_while_typing=Condition(self._may_complete),  # while false, no lines are reserved for the menu
            key_bindings=self._keys(next_mode),
            bottom_toolbar=self._status,
            prompt_continuation="  ",
            style=style,
            enable_suspend=True,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            reserve_space_for_menu=6,
        )
        self._session.default_buffer.on_text_changed += self._stay
        app = self._session.app
        app.renderer.cpr_not_supported_callback = app.invalidate  # in place of a warning; see `_with_status`
        self._is_aside = False
        self._collector = _KeyCollector()
        self._reader: _EscapeReader | None = None
        terminal: Any = self._session.app.input
        if hasattr(terminal, "stdin_reader"):  # not on Windows
            self._reader = _EscapeReader(terminal.fileno(), encoding=terminal.stdin.encoding)
            terminal.stdin_reader = self._reader
        keys: list[KeyPress] = []
        Vt100Parser(keys.append).feed(typed)
        store_typeahead(self._session.app.input, keys)

    async def prompt(self, message: str, *, default: str = "") -> str:
        """See `Keyboard`."""
        self._is_leaving = False
        # The line editor leaves signals to the chat, and failures of tasks to the log.
        text = await self._session.prompt_async(
            lambda: self._with_status(message), default=default, handle_sigint=False, set_exception_handler=False
        )
        return self._pastes.expanded(text)

    async def line(self, message: str, *, default: str = "") -> str:
        """See `Keyboard`."""
        session: PromptSession[str] = PromptSession(interrupt_exception=Interrupted)
        with self._collector.suspended():
            return await session.prompt_async(
                message, default=default, handle_sigint=False, set_exception_handler=False
            )

    async def key(self, keys: Collection[str]) -> str:
        """See `Keyboard`."""
        with self._collector.suspended():
            return await _read_key(sys.stdin.fileno(), keys)

    def discard(self) -> None:
        """See `Keyboard`."""
        discard_input(sys.stdin.fileno())

    @asynccontextmanager
    async def set_aside(self) -> AsyncIterator[None]:
        """See `Keyboard`."""
        if self._is_aside:  # a nested in_terminal would wait for the outer one for ever
            yield
            return
        async with in_terminal():
            self._is_aside = True
            try:
                yield
            finally:
                self._is_aside = False

    @contextmanager
    def collect(self, typed: TypedText, changed: Callable[[tuple[str, ...]], object]) -> Iterator[None]:
        """See `Keyboard`."""
        with _without_echo(sys.stdin.fileno()), self._collector.running(lambda data: changed(typed.feed(data))):
            yield

    @property
    def is_typing(self) -> bool:
        """See `Keyboard`."""
        return self._session.app.is_running and bool(self._session.default_buffer.text)

    def interrupt(self) -> bool:
        """See `Keyboard`. Nothing is done here, because the line editor itself reads Ctrl-C as a key."""
        return get_app_or_none() is not None

    def refresh(self) -> None:
        """See `Keyboard`."""
        self._session.app.invalidate()

    def _status(self) -> str:
        return _LEAVING if self._is_leaving else on_one_line(self._toolbar())

    def _with_status(self, message: str) -> StyleAndTextTuples:
        """Return the message. If the terminal does not report where the cursor is, the line editor shows no toolbar, so
        put the line of the toolbar above the message."""
        app = self._session.app
        if app.renderer.cpr_support != CPR_Support.NOT_SUPPORTED or app.is_done or not (status := self._status()):
            return [("", message)]
        before, _, sign = message.rpartition("\n")
        line = cut(status, app.output.get_size().columns - 1)
        return [("", f"{before}\n" if before else "\n"), ("class:bottom-toolbar", line), ("", f"\n{sign}")]

    def _may_complete(self) -> bool:
        return is_completed(self._session.default_buffer.document.text_before_cursor)

    def _stay(self, _buffer: Buffer) -> None:
        self._is_leaving = False

    def _is_only_escape(self) -> bool:
        """Return whether the user presses Esc at an empty prompt."""
        buffer, reader = self._session.default_buffer, self._reader
        is_empty = not buffer.text and self._session.app.current_buffer is buffer
        return is_empty and reader is not None and reader.is_escape

    def _keys(self, next_mode: Callable[[], object]) -> KeyBindings:
        keys = _prompt_keys()

        @keys.add("c-c")
        def clear_or_leave(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            elif self._is_leaving:
                event.app.exit(exception=EOFError)
            else:
                self._is_leaving = True

        @keys.add("escape", eager=True, filter=Condition(self._is_only_escape))
        def press_escape(_event: KeyPressEvent) -> None:
            """Do nothing. Without this binding, Esc and the next key would count as Alt with that key."""

        @keys.add("s-tab", filter=~has_completions)
        def change_mode(_event: KeyPressEvent) -> None:
            next_mode()

        @keys.add(Keys.BracketedPaste)
        def paste(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(self._pastes.shown(event.data))

        return keys


class PlainKeyboard:
    """The keyboard without a line editor, for screen readers and simple terminals. The terminal itself lets the user
    edit a line.

    A line that ends with a backslash continues on the next line. Lines that arrive together, such as pasted ones, are
    one prompt.
    """

    def __init__(self) -> None:
        self._interrupted: asyncio.Future[bytes] | None = None
        self._message = ""
        self._is_aside = False
        self._collector = _KeyCollector()

    async def prompt(self, message: str, *, default: str = "") -> str:  # noqa: ARG002  the terminal edits the line
        """See `Keyboard`."""
        while True:
            try:
                return await self._read(message)
            except Interrupted:
                await write(sys.stdout, "\n")

    async def line(self, message: str, *, default: str = "") -> str:
        """See `Keyboard`."""
        return await self._read(f"{message}[{safe(default)}] " if default else message) or default

    async def key(self, keys: Collection[str]) -> str:
        """See `Keyboard`. The user types the key and Enter. Any other line counts as `_ESCAPE`."""
        try:
            typed = (await self._read(f"Type {', '.join(keys)}, then Enter: ")).strip().lower()
        except EOFError:
            return _END
        except Interrupted:
            return _ESCAPE
        return typed if typed in keys else _ESCAPE

    def discard(self) -> None:
        """See `Keyboard`."""
        discard_input(sys.stdin.fileno())

    @asynccontextmanager
    async def set_aside(self) -> AsyncIterator[None]:
        """See `Keyboard`."""
        waiting, message = self._interrupted, self._message
        if waiting is None or self._is_aside:
            yield
            return
        self._is_aside = True
        await write(sys.stdout, "\n")
        try:
            yield
        finally:  # a question may have read lines meanwhile, which ends the waiting
            self._is_aside = False
            self._interrupted, self._message = waiting, message
            read_into(sys.stdin.fileno(), waiting)
            await write(sys.stdout, message)

    @contextmanager
    def collect(self, typed: TypedText, changed: Callable[[tuple[str, ...]], object]) -> Iterator[None]:
        """See `Keyboard`."""
        with self._collector.running(lambda data: changed(typed.feed_lines(data))):
            yield

    @property
    def is_typing(self) -> bool:
        """See `Keyboard`. This is not known, because the terminal itself edits the line."""
        return False

    def interrupt(self) -> bool:
        """See `Keyboard`."""
        if self._interrupted is None:
            return False
        if not self._interrupted.done():
            self._interrupted.set_exception(Interrupted())
        return True

    def refresh(self) -> None:
        """See `Keyboard`. There is no line below the prompt."""

    async def _read(self, message: str) -> str:
        self._message = message
        await write(sys.stdout, message)
        with self._collector.suspended():
            lines = [await self._read_line()]
            while lines[-1].endswith("\\") or select.select([sys.stdin], [], [], 0)[0]:
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(await self._read_line())
        return "\n".join(lines)

    async def _read_line(self) -> str:
        self._interrupted = asyncio.get_running_loop().create_future()
        try:
            line = await next_input(sys.stdin.fileno(), self._interrupted)
        finally:
            self._interrupted = None
        if not line:
            raise EOFError
        return line.decode("utf-8", "replace").removesuffix("\n")


class _KeyCollector:
    """Passes typed bytes to a function, except while something else reads them."""

    def __init__(self) -> None:
        self._take: Callable[[bytes], object] | None = None
        self._escape: asyncio.TimerHandle | None = None
        """The timer that runs after the byte of Esc has arrived alone, because the rest of another key's code may
        follow. None at other times."""

    @contextmanager
    def running(self, take: Callable[[bytes], object]) -> Iterator[None]:
        """During the block, pass the typed bytes to `take`."""
        self._take = take
        self._listen()
        try:
            yield
        finally:
            self._take = None
            self._end_escape()
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """During the block, read nothing, so that other code can read the typed keys."""
        if self._take is None:
            yield
            return
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        try:
            yield
        finally:
            self._listen()

    def _listen(self) -> None:
        if self._take is not None:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)

    def _read(self) -> None:
        data = b""
        with suppress(OSError):  # the terminal is gone; SIGHUP ends the chat
            data = os.read(sys.stdin.fileno(), 10_000)
        if not data:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        elif self._take is not None:
            data = self._end_escape() + data
            if data == b"\x1b":
                self._escape = asyncio.get_running_loop().call_later(_ESCAPE_S, self._press_escape)
            else:
                self._take(data)

    def _end_escape(self) -> bytes:
        """Return the byte of Esc if it has arrived and was not passed on yet."""
        escape, self._escape = self._escape, None
        if escape is None:
            return b""
        escape.cancel()
        return b"\x1b"

    def _press_escape(self) -> None:
        if self._end_escape() and self._take is not None:
            self._take(b"\x1b")


def _prompt_keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-d")
    def leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.delete()
        else:
            event.app.exit(exception=EOFError)

    return keys


async def _read_key(fd: int, keys: Collection[str]) -> str:
    with _without_echo(fd):
        while True:
            typed = await next_input(fd)
            match typed:
                case b"" | b"\x04":
                    return _END
                case b"\x1b":
                    return _ESCAPE
            key = typed.decode("utf-8", "replace").lower()
            if key in keys:
                return key
            if key.endswith(ENTERS) and key[-1] in keys:  # Enter ends whatever was typed before it
                return key[-1]


@contextmanager
def _without_echo(fd: int) -> Iterator[None]:
    """During the block, typed keys are not shown, and reading a key does not wait for Enter."""
    try:
        import termios  # not available on Windows
    except ImportError:
        yield
        return
    before = termios.tcgetattr(fd)
    changed = termios.tcgetattr(fd)
    changed[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
