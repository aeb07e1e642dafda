"""What the demo prints.

Strategy: one page that turns the updates of a session into lines a person can read, on a terminal or in a file; text
appears as it streams. It also remembers what it showed, so that the story can be checked against it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from crow.demo.process import DemoFailed, Json

__all__ = ["Page", "Replay"]

_FINAL = {"completed": ("✓", "green"), "failed": ("✗", "red")}


class Page:
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


class Replay:
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
