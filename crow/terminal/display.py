"""Shows a conversation at the terminal: messages, tool calls and remarks, as blocks with empty lines between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from crow.domain.text import on_one_line, plural
from crow.terminal.connection import Params
from crow.terminal.markdown import MarkdownStream
from crow.terminal.question import plain_title
from crow.terminal.render import DIFF_LINES, Look, diff_of, output_of, plan_of, title_of, wrapped
from crow.terminal.screen import Screen

_REPLAYED_LINES = 16
"""When the chat resumes a session, it shows at most this many lines of each turn's last message."""

_REPLAYED_TURNS = 2
_REPLAYED_UPDATES = 4_000
_HISTORY_UPDATES = frozenset(
    {
        *("user_message_chunk", "agent_message_chunk", "agent_thought_chunk", "tool_call", "tool_call_update", "plan"),
        *("compaction_update", "compaction_summary_chunk"),
    }
)
"""The kinds of updates that are part of a replayed history."""

_TITLE_CHARS = 2_000

_RUNNING_LINES = 5
"""Only this many lines at the end of a running command's output are shown."""


class LastTurns:
    """The last turns of a stored session, from its replayed history."""

    def __init__(self) -> None:
        self.turns: deque[deque[Params]] = deque(maxlen=_REPLAYED_TURNS)
        """The updates of each turn, which begins with the updates of its prompt."""

    def keep(self, update: Params) -> bool:
        """Keep an update if it may belong to one of the last turns. Return whether it is part of a history."""
        kind = update["sessionUpdate"]
        if kind not in _HISTORY_UPDATES:
            return False
        if kind == "user_message_chunk" and not (self.turns and self.turns[-1][-1]["sessionUpdate"] == kind):
            self.turns.append(deque(maxlen=_REPLAYED_UPDATES))
        if self.turns:
            self.turns[-1].append(update)
        return True


class Display:
    """The conversation as it is shown. `write` prints rendered text above the prompt or the spinner, if one is
    shown."""

    def __init__(self, look: Look, screen: Screen, write: Callable[[str], Awaitable[None]]) -> None:
        self._look = look
        self._screen = screen
        self._write = write
        self._stream: MarkdownStream | None = None
        self._stream_id = ""
        self.block = ""
        """The kind of the newest block."""
        self.calls: dict[str, dict[str, Any]] = {}
        """The calls that have not ended, by id, each with the newest value of every member of its updates."""
        self._running: dict[str, str] = {}
        """The output so far of the commands that run, by the ids of their calls."""
        self._plan: Any = None
        """The entries of the plan that was shown last."""

    def running(self, columns: int) -> list[str]:
        """Return the last lines of the newest running command's output, each cut to `columns` columns."""
        if not self._running or not self._look.has_styles:
            return []
        lines = output_of(self._look, [*self._running.values()][-1], most=_RUNNING_LINES, columns=columns).splitlines()
        return lines[-_RUNNING_LINES:]

    def forget_session(self) -> None:
        """Forget the plan, and the calls that have not ended."""
        self._plan = None
        self.calls.clear()
        self._running.clear()

    async def update(self, update: Params) -> None:
        """Show an update of the session, if it has anything to show."""
        match update["sessionUpdate"]:
            case "agent_message_chunk":
                tone = "remark" if "_meta" in update else "text"
                await self.text(tone, update.get("messageId", ""), update["content"].get("text", ""))
            case "agent_thought_chunk":
                await self.text("thought", update.get("messageId", ""), update["content"].get("text", ""))
            case "tool_call" | "tool_call_update":
                await self.call(update)
            case "plan":
                is_whole = isinstance(update["entries"], list)  # a note replaces a plan that is too large
                if is_whole and update["entries"] != self._plan:
                    self._plan = update["entries"]
                    await self.begin_block("plan", plan_of(self._look, update["entries"]))
            case "notice":
                title, words = update["title"], update.get("description")
                mark = "" if title.endswith((".", "!", "?", ":")) else ":"
                text = f"{title}{mark} {words}" if words else title
                await self.say(text, is_warning=update.get("severity") != "info")
            case "compaction_update" if update["status"] == "in_progress" and "summary" not in update:
                await self.say("Compacting the context")
            case "compaction_update" if update["status"] == "failed":
                await self.say(f"Compaction failed: {update.get('error', '')}", is_warning=True)
            case "user_message_chunk":  # another client of the session sent this prompt
                await self.prompt(update["content"].get("text", ""))

    async def text(self, kind: str, message_id: str, text: str) -> None:
        """Show a piece of a message. `kind` is `text`, `remark` or `thought`."""
        if self._stream is None or message_id != self._stream_id:
            prefix = "Thought:\n" if kind == "thought" and self._look.has_words else ""
            await self.begin_block("message", prefix)
            self._stream_id = message_id
            self._stream = MarkdownStream(self._look, tone="" if kind == "text" else "dim")
        self._screen.label = "Thinking" if kind == "thought" else ""
        await self._write(self._stream.feed(text))

    async def end_message(self) -> None:
        """End the newest message, and show the part of its text that was held back."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await self._write(stream.end())
            self.block = "text"

    async def call(self, update: Params) -> None:
        """Show an update of a tool call."""
        call_id, is_new = update["toolCallId"], update["toolCallId"] not in self.calls
        call = self.calls.setdefault(call_id, {})
        call |= update
        status, title = call.get("status", "pending"), plain_title(call.get("title", "Tool call")[:_TITLE_CHARS])
        if status in ("completed", "failed"):
            del self.calls[call_id]
            self._running.pop(call_id, None)
            self._screen.label = ""
            await self.begin_block("tool", title_of(self._look, title, status) + self._details(call))
        else:
            self._screen.label = title
            if call.get("kind") == "execute" and update.get("status") == "in_progress" and not is_new:
                self._running[call_id] = _text_of(update) or self._running.get(call_id, "")
            if is_new:
                await self.end_message()
                if not self._look.has_styles:
                    await self.begin_block("tool", title_of(self._look, title, "running"))

    def _details(self, call: Mapping[str, Any]) -> str:
        """Return the text below the title of a finished call: the diffs of the call, the end of its output, or
        nothing."""
        contents = call.get("content") or ()
        if call["status"] == "failed" or call.get("kind") == "execute":
            text = _text_of(call)
            return output_of(self._look, text) if text.strip() else ""
        if call.get("is_shown"):  # the permission question has shown the diffs
            return ""
        diffs = [part for part in contents if part["type"] == "diff"]
        return "".join(diff_of(self._look, part, most=DIFF_LINES, has_path=len(diffs) > 1)[0] for part in diffs)

    async def markdown(self, message_id: str, text: str) -> None:
        """Show a whole message."""
        await self.text("text", message_id, text)
        await self.end_message()

    async def problem(self, problem: str) -> None:
        """Show an error."""
        await self.begin_block("problem", wrapped(self._look, "bad", f"Error: {problem}"))

    async def say(self, words: str, *, is_warning: bool = False) -> None:
        """Show a remark from crow itself."""
        await self.begin_block("remark", wrapped(self._look, "bold" if is_warning else "dim", words))

    async def begin_block(self, kind: str, text: str) -> None:
        """Show a block. An empty line comes first if the previous block is of another kind."""
        await self.end_message()
        gap = "\n" if kind != self.block else ""
        self.block = kind
        await self._write(f"{gap}{text}")

    async def prompt(self, text: str) -> None:
        """Show a prompt that was not typed here just now."""
        sign = "You:" if self._look.has_words else ">"
        lines = text.strip().splitlines() or [""]
        more = f" … (+{len(lines) - 1} lines)" if len(lines) > 1 else ""
        await self.begin_block("prompt", self._look.paint("dim", f"{sign} {on_one_line(lines[0])[:300]}{more}") + "\n")

    async def turn(self, turn: Sequence[Params]) -> None:
        """Show the prompt of a stored turn, and the end of the turn's last message."""
        prompt, messages = "", dict[str, str]()
        calls = 0
        for update in turn:
            match update:
                case {"sessionUpdate": "user_message_chunk", "content": {"text": str(text)}}:
                    prompt += text
                case {"sessionUpdate": "agent_message_chunk", "messageId": str(name), "content": {"text": str(text)}}:
                    messages[name] = messages.get(name, "") + text
                case {"sessionUpdate": "tool_call" | "tool_call_update" as kind, "toolCallId": str(name)}:
                    calls += kind == "tool_call"
                    self.calls[name] = self.calls.get(name, {}) | dict(update)
                    if self.calls[name].get("status") in ("completed", "failed"):
                        del self.calls[name]
        await self.prompt(prompt)
        if calls:
            await self.say(f"({plural(calls, 'tool call')})")
        if messages:
            lines = messages.popitem()[1].strip().splitlines()
            hidden = max(0, len(lines) - _REPLAYED_LINES)
            if hidden:
                await self.say(f"({hidden} lines before)")
            await self.markdown("", "\n".join(lines[hidden:]))
        self.block = "turn"


def _text_of(call: Mapping[str, Any]) -> str:
    """Return the text in the content of a tool call."""
    contents = call.get("content") or ()
    return "\n".join(part["content"].get("text", "") for part in contents if part["type"] == "content")
