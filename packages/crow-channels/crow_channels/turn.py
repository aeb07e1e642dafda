"""Builds the answer to a prompt from the updates of its session. Does no I/O."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

from crow_channels.state import Prompt
from crow_channels.text import line

MAX_TEXT = 1_000_000
"""An answer is cut after this many characters."""

_MAX_FILES, _MAX_FILE_BYTES, _MAX_TITLE = 10, 8_000_000, 160
_SUFFIXES = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}

KeepFile = Callable[[int, str, str, bytes], None]
"""Stores a file of the answer: its number, name, media type and content."""


class Turn:
    """Follows one turn. Every update moves the cursor of the prompt; those of its own turn also add to its answer.

    Other clients may prompt the same session. Each of their prompts arrives as a user message, and so does this one's
    if the connection is another than the one that sent it.
    """

    def __init__(self, prompt: Prompt, keep_file: KeepFile, *, shows_calls: bool) -> None:
        self.prompt = prompt
        self._keep_file, self._shows_calls = keep_file, shows_calls
        self.is_own = True
        """Whether the updates are about this prompt's turn, and not about one of another client."""
        self._message: object = None

    def apply(self, params: Mapping[str, Any]) -> bool:
        """Take a `session/update`. Return whether the answer has grown."""
        update, before = params.get("update") or {}, self.prompt.text
        kind = update.get("sessionUpdate")
        if kind == "user_message_chunk":
            self._user_message(update)
        elif kind == "session_info_update":
            state = (update.get("_meta") or {}).get("acp/turnState") or {}
            if state.get("state") == "idle":
                self.is_own = True  # the next turn is this prompt's
        elif self.is_own and kind == "agent_message_chunk":
            self._text(str(update.get("messageId")), update.get("content") or {})
        elif self.is_own and kind in ("tool_call", "tool_call_update"):
            self._call(update)
        cursor = (params.get("_meta") or {}).get("acp/cursor")
        if isinstance(cursor, str):
            self.prompt.cursor = cursor
        return self.prompt.text != before

    def begin_replay(self) -> None:
        """Expect the whole history, from its first message."""
        self.is_own, self._message = False, None

    def add(self, text: str, source: str) -> None:
        """Add text to the answer. Text from another source than the one before begins a new paragraph."""
        prompt = self.prompt
        if prompt.last != source and prompt.text:
            prompt.text = prompt.text.rstrip("\n") + "\n\n"
        prompt.last = source
        if len(prompt.text) < MAX_TEXT:
            prompt.text += text
            if len(prompt.text) >= MAX_TEXT:
                prompt.text = prompt.text[:MAX_TEXT] + "\n\n(The answer is too long for a chat and ends here.)"

    def _user_message(self, update: Mapping[str, Any]) -> None:
        if update.get("messageId") == self._message:
            return  # a further block of the same message
        self._message = update.get("messageId")
        sent = next((str(block["text"]) for block in self.prompt.blocks if block.get("type") == "text"), "")
        self.is_own = str((update.get("content") or {}).get("text", "")).strip() == sent.strip()
        if self.is_own:
            self.prompt.has_begun = True

    def _text(self, message: str, content: Mapping[str, Any]) -> None:
        self.prompt.has_begun = True
        match content:
            case {"type": "text", "text": str(text)}:
                self.add(text, message)
            case {"type": "resource_link", "uri": str(uri)}:
                self.add(f"{line(str(content.get('name') or uri), _MAX_TITLE)}: {line(uri, 500)}\n", message)
            case _:
                self._file(content, message)

    def _call(self, update: Mapping[str, Any]) -> None:
        self.prompt.has_begun = True
        call = str(update.get("toolCallId"))
        if update["sessionUpdate"] == "tool_call" and call not in self.prompt.calls:
            self.prompt.calls.append(call)
            if self._shows_calls:
                self.add(f"⚙ {line(str(update.get('title') or 'a tool call'), _MAX_TITLE)}", f"call {call}")
        for number, content in enumerate(update.get("content") or ()):
            if isinstance(content, dict) and content.get("type") == "content":
                self._file(content.get("content") or {}, f"{call} {number}")

    def _file(self, content: Mapping[str, Any], source: str) -> None:
        """Keep an image. A repeated update has the same source, so its image is not kept twice."""
        match content:
            case {"type": "image", "data": str(data), "mimeType": str(mime)} if mime in _SUFFIXES:
                mark = f"file {source} {len(data)}"
                if mark in self.prompt.calls or len(data) > _MAX_FILE_BYTES * 4 // 3:
                    return
                number = sum(each.startswith("file ") for each in self.prompt.calls)
                if number < _MAX_FILES:
                    try:
                        image = base64.b64decode(data, validate=True)
                    except binascii.Error:
                        return
                    self.prompt.calls.append(mark)
                    self._keep_file(number, f"image-{number + 1}.{_SUFFIXES[mime]}", mime, image)


class Replay:
    """Collects the answer to a prompt from the whole history of its session, for a server without cursors."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._blank = (turn.prompt.text, turn.prompt.last, list(turn.prompt.calls))
        self._message: object = None
        turn.begin_replay()
        self.is_found = False
        """Whether the prompt is in the history."""

    def apply(self, params: Mapping[str, Any]) -> None:
        """Take a `session/update` of a load."""
        update, prompt = params.get("update") or {}, self._turn.prompt
        is_new = update.get("sessionUpdate") == "user_message_chunk" and update.get("messageId") != self._message
        if is_new:
            self._message = update.get("messageId")
        self._turn.apply(params)
        if is_new and self._turn.is_own:  # the last prompt with this text is the one
            prompt.text, prompt.last, self.is_found = "", "", True
            prompt.calls[:] = [each for each in prompt.calls if each.startswith("file ")]

    def finish(self) -> None:
        """Restore the answer as it was if the history does not have it."""
        if not self.is_found:
            self._turn.prompt.text, self._turn.prompt.last, self._turn.prompt.calls = self._blank
