"""`crow demo`: what crow does, shown on a real process, in a minute and without a key.

A scratch directory holds the workspace and crow's own files and is gone afterwards. The offline model answers, unless
the environment names an endpoint or a model.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from rich.console import Console
from rich.text import Text

from crow.domain.errors import CrowError

__all__ = ["CrowProcess", "DemoFailed", "DemoReplay", "Json", "Listener", "Printer", "Story", "show", "start_crow"]


def show() -> None:
    """Run the demo on stdout. :raises DemoFailed: a step went wrong."""
    console = Console(highlight=False, emoji=False)
    page = Printer(console)
    environment = dict(os.environ)
    offline = not _names_an_endpoint(environment)
    with tempfile.TemporaryDirectory(prefix="crow-demo-") as scratch:
        environment.pop("CROW_CONFIG", None)
        environment["CROW_HOME"] = str(Path(scratch) / "home")
        if offline:
            environment["CROW_MODEL"] = "offline"
        console.print(Text(_welcome(environment, offline=offline)), soft_wrap=True)
        story = Story(page, Path(scratch).resolve(), environment, offline=offline)
        try:
            anyio.run(story.tell)
        except DemoFailed as failure:
            page.line("")
            log = Path(environment["CROW_HOME"]) / "crow.log"
            if log.exists():  # it goes with the scratch directory
                page.line(log.read_text("utf-8", "replace")[-4000:], "dim")
            scene = page.scenes[-1] if page.scenes else "the start"
            raise DemoFailed(f'the demo failed in "{scene}": {failure}') from failure
    page.line("")
    console.rule(Text("What you saw", style="bold"), align="left", style="dim")
    for number, scene in enumerate(page.scenes, start=1):
        console.print(Text(f"  {number}. {scene}{' (not all of it, with this model)' if scene in page.missed else ''}"))
    console.print(Text(_farewell()), soft_wrap=True)


def _names_an_endpoint(environment: Mapping[str, str]) -> bool:
    """Whether the user wants to see crow with a model of theirs; a key alone may be meant for other programs."""
    model = environment.get("CROW_MODEL", "")
    return model != "offline" and bool(model or environment.get("OPENAI_BASE_URL"))


def _welcome(environment: Mapping[str, str], *, offline: bool) -> str:
    if not offline:
        return f"crow, with the model {environment.get('CROW_MODEL') or '(none: set CROW_MODEL)'}"
    words = "crow, with its offline model: it follows rules and is no language model."
    if environment.get("OPENAI_API_KEY"):
        words += "\nOPENAI_API_KEY is set; name a model in CROW_MODEL to see crow with it."
    return words


def _farewell() -> str:
    beside = Path(sys.executable).with_name("crow")
    command = str(beside) if beside.exists() else shutil.which("crow") or "crow"
    server = {"agent_servers": {"Crow": {"type": "custom", "command": command, "args": ["acp"], "env": {}}}}
    return (
        "\nThe scratch directory is gone. To use crow in Zed, put this into its settings.json"
        " (README.md has the other editors):\n\n"
        + json.dumps(server, indent=2)
        + '\n\nThen name an endpoint and a model: README.md, "Configuration".'
    )


# FROM demo.story: The story that `crow demo` tells, scene by scene, to a real process in a scratch workspace.
#
# Strategy: every scene prompts, prints what comes, and checks it; with the offline model what comes is known, with a
# model of the user's it is not, so there a missing tool call is remarked upon and the story goes on. What the
# protocol
# and the disk promise is checked with every model.


_README = """\
# Tea timer

A small program that counts down the minutes a tea needs.

    python tea.py green

It prints one line a minute and rings the bell at the end.
"""

_TEAS = "".join(
    f"{number:03d}. {kind} tea from garden {number}: {minutes} minutes at {degrees} degrees, {grams} grams a cup.\n"
    for number, (kind, minutes, degrees, grams) in enumerate(
        [("Green", 2, 75, 2), ("Black", 4, 95, 3), ("White", 5, 80, 2), ("Oolong", 3, 90, 3), ("Herbal", 8, 100, 4)]
        * 40,
        start=1,
    )
)


_SURELY_SAVED_S = 0.5
"""Text of the first half second is more than two seconds old when the process is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What was on the screen at the kill; `saved` is its beginning that must be on disk."""

    text: str
    saved: str


class Story:
    """Tells the story on `page`; `scratch` is an empty directory, `environment` that of the processes."""

    def __init__(self, page: Printer, scratch: Path, environment: dict[str, str], *, offline: bool) -> None:
        self._page = page
        self._workspace = scratch / "tea"
        self._stderr = scratch / "stderr.txt"
        self._environment = environment
        self._offline = offline
        self._prompt_timeout_s = 60.0 if offline else 600.0
        self._session = ""

    async def tell(self) -> None:
        """All of it. :raises DemoFailed: something did not do what it should."""
        self._workspace.mkdir()
        (self._workspace / "README.md").write_text(_README, "utf-8")
        (self._workspace / "teas.txt").write_text(_TEAS, "utf-8")
        page = self._page
        async with start_crow(page, self._environment, self._stderr) as crow:
            await self._open(crow)
            await self._read(crow)
            await self._write(crow)
            await self._edit(crow)
            await self._compact(crow)
            shown = await self._kill(crow)
        replay = DemoReplay()
        async with start_crow(replay, self._environment, self._stderr) as crow:
            await self._load(crow, replay, shown)
            crow.listen(page)
            await self._go_on(crow)

    async def _open(self, crow: CrowProcess) -> None:
        page = self._page
        page.scene("A new session", "An editor starts `crow acp` and speaks the Agent Client Protocol on its stdin.")
        started = time.monotonic()
        hello = await self._initialize(crow)
        took_ms = (time.monotonic() - started) * 1000
        new = await crow.request(
            "session/new", {"cwd": str(self._workspace), "mcpServers": []}, timeout_s=self._prompt_timeout_s
        )
        self._session = str((new or {}).get("sessionId", ""))
        if not self._session:
            raise DemoFailed("session/new: the answer has no sessionId")
        page.line(f"  {hello} is ready after {took_ms:.0f} ms; the session is {self._session}")

    async def _initialize(self, crow: CrowProcess) -> str:
        params = {"protocolVersion": 1, "clientCapabilities": {}, "clientInfo": {"name": "crow-demo", "version": "1"}}
        answer = await crow.request("initialize", params, timeout_s=30)
        info = (answer or {}).get("agentInfo") or {}
        return f"{info.get('name', 'crow')} {info.get('version', '')}".strip()

    async def _read(self, crow: CrowProcess) -> None:
        page = self._page
        page.scene("A prompt and its answer", 'Reading is free in the mode "ask"; the answer streams.')
        await self._prompt(crow, "read README.md")
        self._expect("Tea timer" in page.text or not self._offline, "the answer does not speak of the file it read")
        await self._prompt(crow, "read teas.txt")
        self._expect(page.pieces > 1, "the answer did not stream")

    async def _write(self, crow: CrowProcess) -> None:
        page = self._page
        page.scene("A tool call that must be allowed", "Writing asks first, and shows the change before it is made.")
        await self._prompt(crow, "write notes.txt: Crow keeps everything.")
        notes = self._workspace / "notes.txt"
        self._expect(page.asked > 0, "nothing was asked before the write")
        self._expect(
            notes.exists() and "Crow keeps everything." in notes.read_text("utf-8"), "notes.txt was not written"
        )

    async def _edit(self, crow: CrowProcess) -> None:
        page = self._page
        page.scene("A diff", "An edit is shown as a diff; the file's former content is kept with the session.")
        await self._prompt(crow, "edit notes.txt: everything -> every step")
        notes = self._workspace / "notes.txt"
        self._expect(page.diffs > 0, "no diff was shown")
        self._expect(notes.exists() and "every step" in notes.read_text("utf-8"), "notes.txt was not edited")

    async def _compact(self, crow: CrowProcess) -> None:
        page = self._page
        page.scene(
            "A compaction", "The model sees a summary from here on; the log keeps every word, and so does replay."
        )
        page.measure()
        before = page.used
        await self._prompt(crow, "/compact")
        page.measure()
        if before is not None and page.used is not None:
            self._expect(page.used < before, "the context did not become smaller")

    async def _kill(self, crow: CrowProcess) -> Shown:
        page = self._page
        page.scene(
            "kill -9 in the middle of a turn",
            "No warning, no cleanup: all text older than a second is on disk.",
            on_one_line=True,
        )
        started = time.monotonic()
        early: list[str] = []

        def enough() -> bool:
            passed_s = time.monotonic() - started
            if passed_s < _SURELY_SAVED_S:
                early[:] = [page.text]
            return bool(page.text) and passed_s > _SURELY_SAVED_S + 2

        answer = await self._prompt(crow, "count to 200", stop=enough)
        await crow.kill()
        page.line("  ✗ killed", "bold red")
        self._expect(answer is None, "the answer was over before the process could be killed")
        return Shown(text=page.text, saved=page.text if answer is not None else "".join(early))

    async def _load(self, crow: CrowProcess, replay: DemoReplay, shown: Shown) -> None:
        page = self._page
        page.scene("A new process loads the session", "session/load replays the whole history, then answers.")
        await self._initialize(crow)
        params: Json = {"sessionId": self._session, "cwd": str(self._workspace), "mcpServers": []}
        await crow.request("session/load", params, timeout_s=60)
        for who, text in replay.items:
            page.line(f"  {who:<4} │ {_short(text)}", "dim" if who == "tool" else "")
        if replay.last("you") != "count to 200":
            raise DemoFailed(f"the interrupted prompt did not come back; the last was {replay.last('you')!r}")
        came_back = max((_common(shown.text, text) for who, text in replay.items if who == "crow"), key=len, default="")
        page.line(f"  of the answer {len(shown.text)} characters were shown, {len(came_back)} came back", "dim")
        if not came_back.startswith(shown.saved):
            raise DemoFailed(f"text older than two seconds is missing: {shown.saved[len(came_back) :]!r}")

    async def _go_on(self, crow: CrowProcess) -> None:
        page = self._page
        page.scene("And goes on", "The next prompt works, whatever happened to the one before.")
        await self._prompt(crow, "summarise")
        self._expect(bool(page.text.strip()), "the answer is empty")
        page.measure()

    async def _prompt(self, crow: CrowProcess, text: str, *, stop: Callable[[], bool] | None = None) -> Json | None:
        self._page.prompt(text)
        params: Json = {"sessionId": self._session, "prompt": [{"type": "text", "text": text}]}
        answer = await crow.request("session/prompt", params, timeout_s=self._prompt_timeout_s, stop=stop)
        if answer is not None and answer.get("stopReason") != "end_turn":
            raise DemoFailed(f'the prompt "{text}" ended with {answer.get("stopReason")!r} instead of "end_turn"')
        return answer

    def _expect(self, is_so: bool, complaint: str) -> None:
        if is_so:
            return
        if self._offline:
            raise DemoFailed(complaint)
        self._page.miss(f"{complaint}, with this model")


def _common(one: str, other: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _short(text: str) -> str:
    """Both ends of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 68 else f"{line[:33]} … {line[-32:]}"


# FROM demo.page: What the demo prints.
#
# Strategy: one page that turns the updates of a session into lines a person can read, on a terminal or in a file;
# text
# appears as it streams. It also remembers what it showed, so that the story can be checked against it.


_FINAL = {"completed": ("✓", "green"), "failed": ("✗", "red")}


class Printer:
    """Prints a session as it happens. `text`, `pieces`, `asked` and `diffs` are what came since the last `scene`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._in_line = False
        self._on_one_line = False
        self._message = ""
        self._titles: dict[str, str] = {}
        self._shown: set[tuple[str, str]] = set()
        self.scenes: list[str] = []
        self.missed: set[str] = set()
        self.text = ""
        self.pieces = 0
        self.asked = 0
        self.diffs = 0
        self.used: int | None = None
        self.size: int | None = None

    def scene(self, title: str, why: str, *, on_one_line: bool = False) -> None:
        """A new part of the story; `on_one_line`: line ends of the agent's text are shown as spaces."""
        self._end_line()
        self._on_one_line = on_one_line
        self.text, self.pieces, self.asked, self.diffs = "", 0, 0, 0
        self.scenes.append(title)
        self._console.print()
        self._console.rule(Text(f"{len(self.scenes)}. {title}", style="bold"), align="left", style="dim")
        self._console.print(Text(why, style="dim"), soft_wrap=True)
        self._console.print()

    def prompt(self, text: str) -> None:
        """What the user says."""
        self.line(f"you › {text}", "bold cyan")

    def line(self, text: str, style: str = "") -> None:
        """A line of its own."""
        self._end_line()
        self._console.print(Text(text, style=style), soft_wrap=True)

    def miss(self, complaint: str) -> None:
        """The scene did not show what its title says."""
        self.missed.add(self.scenes[-1])
        self.line(f"  ! {complaint}", "yellow")

    def update(self, update: Json) -> None:
        """Something happened in the session."""
        match update:
            case {"sessionUpdate": "agent_message_chunk", "content": {"text": str(text)}}:
                self._stream(text, str(update.get("messageId")))
            case {"sessionUpdate": "tool_call" | "tool_call_update", "toolCallId": str(call)}:
                self._call(call, update)
            case {"sessionUpdate": "usage_update", "used": int(used), "size": int(size)}:
                self.used, self.size = used, size
            case _:
                pass  # modes, options, commands, titles: for an editor's menus

    def permission(self, question: Json) -> str | None:
        """Show the question; the demo's user allows everything once."""
        self.asked += 1
        call = question.get("toolCall", {})
        self._call(str(call.get("toolCallId", "")), {**call, "status": None})
        options = [option for option in question.get("options", []) if isinstance(option, dict)]
        chosen = next((option for option in options if option.get("kind") == "allow_once"), None)
        self.line(f"  ? may crow run this: {self._titles[str(call.get('toolCallId', ''))]}", "yellow")
        for option in options:
            self.line(
                f"    ({'•' if option is chosen else ' '}) {option.get('name')}", "" if option is chosen else "dim"
            )
        return None if chosen is None else str(chosen["optionId"])

    def measure(self) -> None:
        """How full the context is."""
        if self.used is not None and self.size is not None:
            self.line(f"  the context holds {self.used:,} of {self.size:,} tokens", "dim")

    def _stream(self, text: str, message: str) -> None:
        self.pieces += 1
        self.text += text
        if message != self._message:
            self._end_line()
            self._message = message
        if not self._in_line:
            self._console.print(Text("crow › ", style="bold magenta"), end="")
        self._console.print(Text(text.replace("\n", " ") if self._on_one_line else text), end="", soft_wrap=True)
        self._in_line = True

    def _call(self, call: str, update: Json) -> None:
        if call not in self._titles:
            self._titles[call] = str(update.get("title") or "a tool call")
            self.line(f"  ● {self._titles[call]}", "blue")
        for item in update.get("content") or ():
            match item:
                case {"type": "diff", "path": str(path), "newText": str(new)} if (call, new) not in self._shown:
                    self._shown.add((call, new))
                    self.diffs += 1
                    for line, style in _diff_lines(path, item.get("oldText") or "", new):
                        self.line(f"    {line}", style)
                case _:
                    pass
        status = str(update.get("status"))
        if status in _FINAL:
            sign, style = _FINAL[status]
            self.line(f"  {sign} {self._titles[call]}", style)

    def _end_line(self) -> None:
        if self._in_line:
            self._console.print()
            self._in_line = False


class DemoReplay:
    """Listens to the replay of a session and keeps it as `(who, text)` in order, chunks of a message joined."""

    def __init__(self) -> None:
        self.items: list[tuple[str, str]] = []
        self._places: dict[str, int] = {}
        self.updates = 0

    def update(self, update: Json) -> None:
        """One replayed update."""
        self.updates += 1
        match update:
            case {"sessionUpdate": "user_message_chunk", "content": {"text": str(text)}}:
                self._add("you", str(update.get("messageId")), text)
            case {"sessionUpdate": "agent_message_chunk", "content": {"text": str(text)}}:
                self._add("crow", str(update.get("messageId")), text)
            case {"sessionUpdate": "tool_call", "toolCallId": str(call)}:
                self._add("tool", call, str(update.get("title")))
            case _:
                pass

    def permission(self, question: Json) -> str | None:
        """Replay asks nothing."""
        raise DemoFailed(f"a permission was asked while the session was loaded: {question}")

    def last(self, who: str) -> str:
        """The newest text of `who`, or nothing."""
        return next((text for speaker, text in reversed(self.items) if speaker == who), "")

    def _add(self, who: str, message: str, text: str) -> None:
        key = f"{who} {message}"
        if key in self._places:
            place = self._places[key]
            self.items[place] = who, self.items[place][1] + text
        else:
            self._places[key] = len(self.items)
            self.items.append((who, text))


def _diff_lines(path: str, old: str, new: str) -> Iterator[tuple[str, str]]:
    yield path, "bold"
    for line in list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1))[2:]:
        yield line, {"+": "green", "-": "red", "@": "dim"}.get(line[:1], "")


# FROM demo.process: A real crow process, as an editor holds one: started, spoken to line by line, killed.
#
# Strategy: one task does everything. A request is written, then lines are read until its answer comes; what arrives
# in
# between (updates, questions) is handed to a listener. No protocol library and nothing of the agent: only pipes.


Json: TypeAlias = dict[str, Any]

_LONGEST_LINE = 32 * 1024 * 1024


class DemoFailed(CrowError):
    """A step did not do what it should."""


class Listener(Protocol):
    """Whoever watches a session."""

    def update(self, update: Json) -> None:
        """Something happened in the session: the `update` of a `session/update`."""
        ...

    def permission(self, question: Json) -> str | None:
        """crow asks whether a call may run; returns the id of an option, None for cancelled."""
        ...


@asynccontextmanager
async def start_crow(listener: Listener, environment: Mapping[str, str], stderr: Path) -> AsyncIterator[CrowProcess]:
    """Run `crow acp`; on leaving, its stdin is closed and it is given 5 s to end before it is killed.

    What it prints on stderr is added to the file `stderr`.
    """
    with stderr.open("ab") as errors:
        process = await anyio.open_process(
            [sys.executable, "-m", "crow", "acp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
    crow = CrowProcess(process, listener, stderr)
    try:
        yield crow
        if not crow.was_killed:
            await crow.end()
    finally:
        with anyio.CancelScope(shield=True):
            await crow.kill()


class CrowProcess:
    """One running process."""

    def __init__(self, process: Process, listener: Listener, stderr: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._listener = listener
        self._stderr = stderr
        self._requests = 0
        self.was_killed = False

    async def request(
        self, method: str, params: Json, *, timeout_s: float, stop: Callable[[], bool] | None = None
    ) -> Json | None:
        """Send a request and return its result; None if `stop` said so after some line before the answer came.

        :raises DemoFailed: an error as answer, no answer within `timeout_s`, or the end of the process.
        """
        self._requests += 1
        request_id = self._requests
        await self._send({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
        try:
            with anyio.fail_after(timeout_s):
                while True:
                    message = await self._receive(method)
                    if message.get("id") == request_id and "method" not in message:
                        return _result(method, message)
                    await self._handle(message)
                    if stop is not None and stop():
                        return None
        except TimeoutError:
            raise DemoFailed(f"{method}: no answer within {timeout_s:g} s{self._last_words()}") from None

    def listen(self, listener: Listener) -> None:
        """Hand what comes from now on to another listener."""
        self._listener = listener

    async def kill(self) -> None:
        """End it as `kill -9` does, if it still runs."""
        self.was_killed = True
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._process.aclose()

    async def end(self) -> None:
        """Close its stdin and wait until it has ended by itself. :raises DemoFailed: it did not, or not well."""
        if self._process.returncode is None:
            await self._stdin.aclose()
        with anyio.move_on_after(5) as limit:
            await self._process.wait()
        if limit.cancelled_caught:
            raise DemoFailed(f"crow did not end within 5 s of the end of its input{self._last_words()}")
        if self._process.returncode != 0:
            raise DemoFailed(f"crow ended with exit code {self._process.returncode}{self._last_words()}")

    async def _send(self, message: Json) -> None:
        try:
            await self._stdin.send(json.dumps(message).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            raise DemoFailed(f"crow ended before {message.get('method', 'an answer')}{self._last_words()}") from None

    async def _receive(self, waiting_for: str) -> Json:
        try:
            line = await self._lines.receive_until(b"\n", _LONGEST_LINE)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            raise DemoFailed(f"crow ended during {waiting_for}{self._last_words()}") from None
        try:
            message = json.loads(line)
        except ValueError:
            raise DemoFailed(f"crow wrote a line that is no JSON: {line[:200]!r}") from None
        if not isinstance(message, dict):
            raise DemoFailed(f"crow wrote a line that is no message: {line[:200]!r}")
        return message

    async def _handle(self, message: Json) -> None:
        match message:
            case {"method": "session/update", "params": {"update": dict(update)}}:
                self._listener.update(update)
            case {"method": "session/request_permission", "id": request_id, "params": dict(question)}:
                option = self._listener.permission(question)
                outcome = {"outcome": "cancelled"} if option is None else {"outcome": "selected", "optionId": option}
                await self._send({"jsonrpc": "2.0", "id": request_id, "result": {"outcome": outcome}})
            case {"method": str(method), "id": request_id}:
                error = {"code": -32601, "message": f"The demo has no {method}"}
                await self._send({"jsonrpc": "2.0", "id": request_id, "error": error})
            case _:
                pass  # a notification that this client does not know

    def _last_words(self) -> str:
        words = self._stderr.read_text("utf-8", "replace").strip() if self._stderr.exists() else ""
        return f"; it said: {words[-2000:]}" if words else ""


def _result(method: str, message: Json) -> Json:
    match message:
        case {"error": {"message": str(words), "code": code}}:
            raise DemoFailed(f"{method}: {words} ({code})")
        case {"result": dict(result)}:
            return result
        case {"result": None}:
            return {}
        case _:
            raise DemoFailed(f"{method}: an answer that is none: {json.dumps(message)[:500]}")
