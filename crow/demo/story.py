"""The story that `crow demo` tells, scene by scene, to a real process in a scratch workspace.

Strategy: every scene prompts, prints what comes, and checks it; with the offline model what comes is known, with a
model of the user's it is not, so there a missing tool call is remarked upon and the story goes on. What the protocol
and the disk promise is checked with every model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crow.demo.page import Page, Replay
from crow.demo.process import CrowProcess, DemoFailed, Json, start_crow

__all__ = ["Story"]

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

    def __init__(self, page: Page, scratch: Path, environment: dict[str, str], *, offline: bool) -> None:
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
        replay = Replay()
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

    async def _load(self, crow: CrowProcess, replay: Replay, shown: Shown) -> None:
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
