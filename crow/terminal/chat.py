"""The command `crow chat`: a conversation at the terminal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

from crow.agent.permissions.rules import MODES
from crow.app import recording
from crow.domain.errors import ArgumentError
from crow.domain.text import on_one_line, safe
from crow.protocol.frames import RequestError
from crow.settings import Loaded
from crow.terminal.asking import Questions
from crow.terminal.completion import Choices, mentioned_files, mentions_file
from crow.terminal.connection import Connection, Params, connect, error_of
from crow.terminal.display import Display, LastTurns
from crow.terminal.early import EARLY_KEYS
from crow.terminal.first import choose_model, importable_sessions
from crow.terminal.help import HELP, PLAIN_HELP
from crow.terminal.keyboard import Interrupted, Keyboard, LineEditor, PlainKeyboard, open_history
from crow.terminal.picker import Choice, pick
from crow.terminal.prompt import mentioned_block, text_block
from crow.terminal.remote import ChatTimes, RemoteConnection, connect_to
from crow.terminal.render import look_of, wrapped
from crow.terminal.screen import Screen, interrupts, shell_quoted, write
from crow.terminal.sessions import (
    OpenedSession,
    add_session_arguments,
    alias_of,
    check_session_options,
    find_session,
    line_of,
    list_sessions,
    open_session,
)
from crow.terminal.shell import UserCommands
from crow.terminal.state import SessionState
from crow.terminal.status import notification, status_line
from crow.terminal.typed import TypedText

logger = logging.getLogger(__name__)

_CAPABILITIES: Mapping[str, Any] = {
    "session": {"notices": {}, "compaction": {}},
    "elicitation": {"form": {}, "url": {}},
    "_meta": {"crow": {"remarks": True}},
}

_PICKED_SESSIONS = 200
_COMPLETED_SESSIONS = 50

_STOPS = {
    "cancelled": "Cancelled.",
    "max_tokens": "The answer reached its length limit. Send a prompt to continue.",
    "max_turn_requests": "Stopped at the limit of steps for one turn. Send a prompt to continue.",
    "refusal": "The model refused to answer.",
}


_STOPPING = "Cancelling; press Ctrl-C again to leave"


class _Phase(Enum):
    """What the chat does: it reads a prompt, waits for a turn or for a command of the user, or stops one of these."""

    IDLE = auto()
    WORKING = auto()
    STOPPING = auto()


class _NoModel(Exception):
    """No model is available. The message says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `crow chat`, except those of the settings."""
    add_session_arguments(parser)
    parser.add_argument(
        "--plain",
        action="store_true",
        help="for screen readers: no cursor movement, no colours, words instead of symbols",
    )


def run_chat(load: Callable[[], Loaded], options: argparse.Namespace, log_in: Callable[[Loaded], int]) -> int:
    """Chat until the user leaves, and return the exit code. `load` reads the settings. `log_in` runs `crow login` and
    returns its exit code.

    :raises ~crow.domain.errors.CrowError: the chat could not start.
    """
    for name, file in (("standard input", sys.stdin), ("standard output", sys.stdout)):
        if file is None or not file.isatty():
            raise ArgumentError(
                f'crow chat needs a terminal, and {name} is not one. In scripts and pipes, use crow run "PROMPT".'
            )
    if options.connect is not None and options.base_url:
        raise ArgumentError("--base-url has no effect with --connect: the settings of the server apply.")
    cwd = check_session_options(options, is_remote=options.connect is not None)
    while True:
        loaded = load()
        if loaded.problem is not None:
            raise loaded.problem
        try:
            return asyncio.run(_Chat(options, loaded, load).run(cwd))
        except _NoModel as error:
            EARLY_KEYS.restore()  # so that the terminal lets the user edit the next answers
            if not choose_model(str(error), options, partial(log_in, loaded)):
                return 2


class _Chat:
    """One chat: the :class:`crow.terminal.connection.TerminalClient` for all sessions that the user opens in it."""

    def __init__(self, options: argparse.Namespace, loaded: Loaded, reload: Callable[[], Loaded]) -> None:
        self._options = options
        self._loaded = loaded
        self._reload = reload
        self._look = look_of(os.environ, is_plain=options.plain)
        self._screen = Screen(is_animated=self._look.has_styles)
        self._display = Display(self._look, self._screen, self._write)
        self._screen.below = self._below
        self._commands = UserCommands(self._write)
        self._choices = Choices(Path.cwd(), arguments={"mode": dict.fromkeys(MODES, "")})
        self._state = SessionState(self._choices)
        self._typed = TypedText()
        self._use_keyboard(PlainKeyboard())
        self._is_first = False
        self._link: Connection | None = None
        self._session = OpenedSession("", "", {}, is_new=True)
        self._phase = _Phase.IDLE
        self._begun_at = 0.0
        """The monotonic time at which the phase `WORKING` began, in seconds."""
        self._writing = asyncio.Lock()
        self._replayed: dict[str, LastTurns] | None = None
        """While a session is being opened: the last turns of each session that sends updates, by session id. The
        session that the chat leaves may still send some. None at other times."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_prompted = False
        """Whether a prompt was sent to the open session."""
        self._has_said_where_files_are = False
        self._is_lost = False
        """Whether the user was told that the server cannot be reached."""
        self._unfinished = ""
        """While no turn runs: written text that does not end a line yet. It is shown together with the rest of its
        line."""

    def _use_keyboard(self, keyboard: Keyboard) -> None:
        self._keyboard = keyboard
        self._questions = Questions(self._look, self._display, keyboard, self._typed, self._write)

    async def run(self, cwd: str | None) -> int:
        """Chat until the user leaves. :raises _NoModel: no model is available."""
        main = asyncio.current_task()
        assert main is not None
        with interrupts(lambda: self._interrupt(main), ["SIGINT"]), interrupts(main.cancel, ["SIGTERM", "SIGHUP"]):
            try:
                async with self._connect() as self._link:
                    if not (self._server or self._options.session or self._options.newest):
                        await self._check_model()
                    self._open_keyboard()
                    try:
                        await self._open(self._options, cwd)
                    except RequestError as error:
                        raise error_of(error) from None
                    await self._say_importable()
                    await self._talk()
                    if self._has_prompted or not self._session.is_new:
                        await self._display.say(await self._how_to_return())
            except asyncio.CancelledError:
                if self._session.id:
                    with suppress(OSError):
                        print(f"\n{self._return_command(self._session.id)}")
                return 130
            finally:
                self._screen.clear()
        return 0

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Connection]:
        if not self._server:
            async with connect(self._loaded, self, reload=self._reload, capabilities=_CAPABILITIES) as local:
                yield local
            return
        token, caps, times = self._options.token_file, _CAPABILITIES, ChatTimes()
        with recording(self._loaded) as recorder:
            async with connect_to(
                self._server, token, self, capabilities=caps, observe=recorder, times=times
            ) as remote:
                yield remote

    @property
    def _server(self) -> str:
        """The address of the server. Empty if crow works in this process."""
        return self._options.connect or ""

    @property
    def _connection(self) -> Connection:
        assert self._link is not None, "the chat has begun"
        return self._link

    async def _check_model(self) -> None:
        try:
            await self._connection.call("authenticate", {"methodId": "configured"})
        except RequestError as error:
            raise _NoModel(str(error)) from None

    def _open_keyboard(self) -> None:
        history, self._is_first = open_history(self._loaded.paths.data_dir / "chat_history")
        if self._look.has_styles:
            keys = EARLY_KEYS.take()
            self._use_keyboard(LineEditor(self._choices, history, self._status, self._change_mode, keys))

    async def _open(self, options: argparse.Namespace, cwd: str | None) -> None:
        """Open the session that the options name, and show the end of its history."""
        replayed = self._replayed = defaultdict[str, LastTurns](LastTurns)
        try:
            opened = await open_session(self._connection, options, cwd, is_replayed=True)
        finally:
            self._replayed = None
        self._session, self._has_prompted = opened, False
        self._choices.cwd = None if self._server else Path(opened.cwd)
        self._display.forget_session()
        self._state.open(opened.response, options.mode)
        name = f" · session {options.session}" if options.session else ""
        place = f"{opened.cwd} at {self._server}" if self._server else opened.cwd
        await self._display.say(f"crow · {self._status()} · {place}{name}")
        if opened.notice:
            await self._display.say(opened.notice)
        if opened.is_new:
            keys = "Alt-Enter breaks the line" if self._look.has_styles else "Ctrl-D leaves"
            await self._display.say(f"Enter sends, {keys}, /help lists the commands.")
        for turn in replayed[opened.id].turns:
            await self._display.turn(turn)

    async def _say_importable(self) -> None:
        """In the user's first chat, say how many sessions of other tools can be imported."""
        if not self._is_first or self._server:
            return
        for words in await importable_sessions(self._loaded):
            await self._display.say(words)

    async def _talk(self) -> None:
        """Read prompts and send them, until the user leaves."""
        while True:
            self._start(self._refresh_sessions())
            self._display.block = ""
            try:
                text = await self._next_text()
            except EOFError:
                return
            self._display.block = ""
            if text.strip() == "/exit":
                return
            try:
                await self._carry_out(text)
            except (ArgumentError, RequestError) as error:
                await self._display.problem(str(error))

    async def _carry_out(self, text: str) -> None:
        """Run a `!` command or a command of the terminal such as `/session`, or send the text as a prompt. :raises
        RequestError: the front end refuses a request. :raises ArgumentError: the session to open cannot be found."""
        if text.startswith("!"):
            return await self._run_command(text[1:].strip())
        name, _, argument = text.strip().partition(" ")
        match name:
            case "":
                return None
            case "/session":
                return await self._go_to(argument.strip())
            case "/model" | "/rewind" if not argument:
                value = await self._pick(self._models() if name == "/model" else await self._prompts(), name)
                if value is None:
                    return None
                text = f"{name} {value}"
            case "/help" if not argument:
                await self._display.markdown("help", PLAIN_HELP if self._look.has_words else HELP)
        alias = await self._alias() if name == "/new" else ""
        await self._prompt(text)
        if alias:  # `/new` has given this name to the new session
            await self._go_to(alias)
        return None

    async def _next_text(self) -> str:
        """Return the oldest text that was queued during the last turn. If there is none, read a prompt from the user.

        :raises EOFError: the user pressed Ctrl-D.
        """
        sign = "You: " if self._look.has_words else "> "
        if self._typed.queue:
            text = self._typed.queue.pop(0)
            await self._write(f"\n{sign}{safe(text)}\n")
            return text
        return await self._keyboard.prompt(f"\n{sign}", default=self._typed.take_all())

    async def _prompt(self, text: str) -> None:
        params = await self._prompt_params(text)
        if params is None:
            return
        self._has_prompted = True
        stop = ""
        try:
            with self._working():
                stop = (await self._connection.call("session/prompt", params))["stopReason"]
        except RequestError as error:
            await self._display.end_message()
            await self._display.problem(str(error))
        else:
            await self._display.end_message()
            if stop in _STOPS:
                await self._display.say(_STOPS[stop])
        if stop != "cancelled":
            await self._notify("crow has finished")
        if stop != "end_turn":
            await self._keep_queue()
        if not self._look.has_styles:
            await self._display.say(self._status())

    @contextmanager
    def _working(self, label: str = "") -> Iterator[None]:
        """During the block, show the spinner with `label`, and collect the text that the user types."""
        self._phase, self._screen.label = _Phase.WORKING, label
        self._begun_at, self._screen.status = time.monotonic(), self._turn_status
        try:
            with self._screen.spinning(), self._keyboard.collect(self._typed, self._typed_changed):
                self._screen.refresh()
                yield
        finally:
            self._phase, self._screen.status = _Phase.IDLE, None

    async def _run_command(self, command: str) -> None:
        """Run a command of the user."""
        if self._server:
            await self._display.problem("! runs commands on this machine, but this session is on a server.")
            return
        if not command:
            await self._display.say("Type a command after !, such as !git status")
            return
        try:
            with self._working(f"$ {command}"):
                words = await self._commands.run(command, Path(self._session.cwd))
        except (OSError, ValueError) as error:
            await self._display.problem(f"{on_one_line(command)} cannot be run: {error}")
            return
        await self._display.say(words)

    async def _notify(self, words: str) -> None:
        """If the turn has taken long, let the terminal notify the user, who may be looking elsewhere."""
        after_s = self._loaded.settings.chat.notify_after_s
        if after_s and time.monotonic() - self._begun_at >= after_s:
            terminal = os.environ.get("TERM", "dumb")
            await write(sys.stdout, notification(words, terminal, has_styles=self._look.has_styles))

    async def _prompt_params(self, text: str) -> Params | None:
        """Return the parameters of a prompt. If the text mentions a file that cannot be used, say so and return
        None."""
        if self._choices.cwd is None and mentions_file(text) and not self._has_said_where_files_are:
            self._has_said_where_files_are = True
            await self._display.say(
                "@ attaches no files here, because they are on the server. The model reads them by their paths."
            )
        try:
            cwd = self._choices.cwd
            files = [] if cwd is None else [mentioned_block(path) for path in mentioned_files(text, cwd)]
        except ArgumentError as error:
            await self._display.problem(str(error))
            return None
        ran = [] if text.startswith("/") else [text_block(each) for each in self._commands.take_results()]
        return {"sessionId": self._session.id, "prompt": [text_block(text), *files, *ran]}

    # Text that the user types during a turn.

    def _typed_changed(self, steering: tuple[str, ...]) -> None:
        if self._typed.is_stop_asked:
            if self._phase is _Phase.WORKING:
                self._stop_turn()
            return
        if self._typed.is_mode_asked:
            self._change_mode()
            return
        self._screen.refresh()
        if not self._look.has_styles:
            self._start(self._say_queue(steering))
        for text in steering:
            self._start(self._steer(text))

    def _below(self, columns: int) -> list[str]:
        """Return the lines to show below the spinner during a turn: the newest output of a running command, and the
        typed text."""
        is_shown = self._phase is not _Phase.IDLE and self._look.has_styles
        return [*self._display.running(columns), *self._typed.shown(columns)] if is_shown else []

    async def _say_queue(self, steering: tuple[str, ...]) -> None:
        """In a terminal without styles, say whether the typed line was queued."""
        if not steering:
            async with self._writing:
                queued = self._typed.queue
                how = "An empty line sends it into this turn; Esc and Enter takes it back."
                words = f"Queued for after this turn: {queued[-1]}\n{how}" if queued else "Nothing is queued."
                await self._display.say(words)

    async def _steer(self, text: str) -> None:
        """Send a text into the running turn. If the turn has ended meanwhile, the text becomes the next prompt."""
        async with self._writing:
            if (params := await self._prompt_params(text)) is None:
                return
        try:
            answer = await self._connection.call("_session/steering", params)
        except (RequestError, ConnectionError) as error:
            answer = {"outcome": str(error)}
        async with self._writing:
            if answer["outcome"] == "injected":
                await self._display.say(f"Sent into this turn: {text}")
                return
            self._typed.queue.insert(0, text)
            self._screen.refresh()

    async def _keep_queue(self) -> None:
        """After a turn that did not end by itself, do not send the queued texts. Put them into the next prompt or, in a
        terminal without styles, only show them."""
        if not self._typed.queue:
            return
        if self._look.has_styles:
            self._typed.line = self._typed.take_all()
        else:
            await self._display.say(f"Not sent, because the turn did not end by itself: {self._typed.take_all()}")

    async def _go_to(self, name: str) -> None:
        """Run `/session`: open the session that `name` means. Without a name, show this session, and let the user pick
        another one."""
        before = self._session.id
        if not name:
            await self._display.say(f"This session is {before}. {await self._how_to_return()}")
            others = await self._other_sessions(_PICKED_SESSIONS)
            name = await self._pick([Choice(each["sessionId"], line_of(each)) for each in others], "/session") or ""
        if not name:
            return
        options = argparse.Namespace(session=name, newest=False, model=None, mode=None)
        await self._open(options, None)
        if self._session.id != before:
            with suppress(RequestError):
                await self._connection.call("session/close", {"sessionId": before})

    async def _alias(self) -> str:
        """Return the session's alias, or an empty text."""
        found = await find_session(self._connection, self._session.id)
        return alias_of(found) if found is not None else ""

    async def _how_to_return(self) -> str:
        """Return a sentence that says how to come back to this session."""
        alias = ""
        with suppress(RequestError):
            alias = await self._alias()
        return self._return_command(shell_quoted(alias) if alias else self._session.id)

    def _return_command(self, session: str) -> str:
        connect = f"--connect {shell_quoted(self._server)} " if self._server else ""
        return safe(f"Come back with: crow chat {connect}--session {session}")

    async def _pick(self, choices: Sequence[Choice], command: str) -> str | None:
        """Let the user pick the argument of a command. Return None if the user picks nothing."""
        if not choices:
            await self._display.say(f"There is nothing to pick for {command} yet.")
            return None
        columns, is_newest_last = shutil.get_terminal_size().columns - 1, command == "/rewind"

        async def show(words: str) -> None:
            await self._display.begin_block("list", wrapped(self._look, "", words))

        try:
            return await pick(
                choices, columns=columns, is_newest_last=is_newest_last, show=show, ask=self._keyboard.line
            )
        except (EOFError, Interrupted):
            return None

    def _models(self) -> list[Choice]:
        names = self._choices.arguments.get("model", {})
        return [Choice(name, f"{name} (now)" if name == self._state.model else name) for name in names]

    async def _prompts(self) -> list[Choice]:
        """Return the prompts of the session's path, oldest first. Their numbers are those of `/rewind`."""
        prompts = (await self._connection.call("_session/prompts", {"sessionId": self._session.id}))["prompts"]
        return [Choice(str(int(prompt["number"])), str(prompt["text"])) for prompt in prompts]

    async def _other_sessions(self, most: int) -> list[Params]:
        listed = await list_sessions(self._connection, most)
        return [each for each in listed if each["sessionId"] != self._session.id]

    async def _refresh_sessions(self) -> None:
        with suppress(RequestError, ConnectionError):
            others = await self._other_sessions(_COMPLETED_SESSIONS)
            known = {alias_of(each) or str(each["sessionId"]): str(each.get("title", "")) for each in others}
            self._choices.arguments |= {"session": known, "bring": known}

    def _interrupt(self, main: asyncio.Task[Any]) -> None:
        """Handle Ctrl-C. During a turn, the first press cancels the turn, and the second leaves the chat."""
        match self._phase:
            case _Phase.IDLE:
                if not self._keyboard.interrupt():
                    main.cancel()
            case _Phase.WORKING:
                self._stop_turn()
            case _Phase.STOPPING:
                main.cancel()

    def _stop_turn(self) -> None:
        self._phase = _Phase.STOPPING
        self._screen.refresh()
        if not self._commands.stop():
            self._start(self._connection.cancel(self._session.id))

    def _change_mode(self) -> None:
        self._start(self._next_mode())

    async def _next_mode(self) -> None:
        """Change to the next permission mode. Skip a mode that the server refuses: `auto` may need a sandbox."""
        now = MODES.index(self._state.mode) if self._state.mode in MODES else -1
        for mode in (*MODES[now + 1 :], *MODES[: max(0, now)]):
            with suppress(RequestError):
                await self._connection.call("session/set_mode", {"sessionId": self._session.id, "modeId": mode})
                self._state.mode = mode
                self._keyboard.refresh()
                return

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        """Do work in the background. Its failure is only logged."""

        async def logged() -> None:
            try:
                await work
            except Exception:
                logger.exception("Work in the background failed")

        task = asyncio.create_task(logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # See TerminalClient.

    async def update(self, params: Params) -> None:
        """See `TerminalClient`."""
        if self._replayed is not None and self._replayed[params["sessionId"]].keep(params["update"]):
            return
        if self._replayed is None and params["sessionId"] != self._session.id:
            return  # the session was left a moment ago
        async with self._writing:
            self._state.take(params["update"])
            await self._display.update(params["update"])
            if params["update"]["sessionUpdate"] == "session_info_update" and not self._state.has_turn:
                await self._display.end_message()

    async def ask_permission(self, params: Params) -> dict[str, Any]:
        """See `TerminalClient`."""
        async with self._writing, self._keyboard.set_aside():
            with self._screen.paused():
                await self._notify("crow asks for permission")
                chosen = await self._questions.permission(params)
                if chosen is not None:
                    return {"outcome": {"outcome": "selected", "optionId": chosen}}
                await self._connection.cancel(self._session.id)
                return {"outcome": {"outcome": "cancelled"}}

    async def elicit(self, params: Params) -> dict[str, Any]:
        """See `TerminalClient`."""
        async with self._writing, self._keyboard.set_aside():
            with self._screen.paused():
                if self._phase is not _Phase.IDLE:
                    await self._notify("crow asks a question")
                return await self._questions.elicitation(params)

    # See RemoteClient.

    def connection_changed(self) -> None:
        """See `RemoteClient`."""
        self._keyboard.refresh()
        was_lost, self._is_lost = self._is_lost, bool(self._trouble)
        if not self._look.has_styles and was_lost is not self._is_lost:  # no status line shows it
            self._start(self.warn(f"{self._trouble}." if self._is_lost else "Connected again."))

    async def warn(self, words: str) -> None:
        """See `RemoteClient`."""
        async with self._writing:
            await self._display.say(words, is_warning=True)

    @property
    def _trouble(self) -> str:
        """Says that the server cannot be reached now. Empty if it can."""
        is_lost = isinstance(self._link, RemoteConnection) and not self._link.is_connected
        return "Reconnecting to the server" if is_lost else ""

    def _status(self) -> str:
        state = self._state
        turn = "a turn is running" if state.has_turn and self._phase is _Phase.IDLE else ""
        return " · ".join(filter(None, [self._trouble, turn, state.model or "no model", state.mode, state.usage]))

    def _turn_status(self, label: str, columns: int) -> str:
        seconds, stops = time.monotonic() - self._begun_at, self._phase is _Phase.STOPPING
        words = _STOPPING if stops else self._trouble or label
        tokens, mode = (0, "") if self._commands.is_running else (self._state.tokens, self._state.mode)
        return status_line(words, columns, seconds=seconds, tokens=tokens, mode=mode, is_stopping=stops)

    async def _write(self, text: str) -> None:
        text = self._unfinished + text
        self._unfinished = ""
        if self._phase is not _Phase.IDLE:
            await self._screen.print_rendered(text)
            return
        lines, end, self._unfinished = text.rpartition("\n")  # the prompt would overwrite an unfinished line
        if end:
            async with self._keyboard.set_aside():
                await self._screen.print_rendered(lines + end)
