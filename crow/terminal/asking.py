"""Asks the user of a chat for permissions, and asks the questions of MCP servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from crow.domain.text import safe
from crow.terminal.connection import Params
from crow.terminal.dialog import Dialog
from crow.terminal.display import Display
from crow.terminal.form import fields_of
from crow.terminal.keyboard import Keyboard
from crow.terminal.question import keys_of, question_of
from crow.terminal.render import Look
from crow.terminal.typed import ENTERS, TypedText


class Questions:
    """The questions of a chat. While a question is open, nothing else may be written, and no prompt may be edited."""

    def __init__(
        self,
        look: Look,
        display: Display,
        keyboard: Keyboard,
        typed: TypedText,
        write: Callable[[str], Awaitable[None]],
    ) -> None:
        self._look = look
        self._display = display
        self._keyboard = keyboard
        self._typed = typed
        self._write = write

    async def permission(self, params: Params) -> str | None:
        """Ask whether a call may run. Return the id of the option that the user chooses, or None to stop the turn."""
        text, options = question_of(self._look, params)
        call = self._display.calls.setdefault(params["toolCall"]["toolCallId"], {})
        call["is_shown"] = True
        await self._display.begin_block("question", text)
        keys = keys_of(options)
        typed = await self._key({key: safe(option["name"]) for key, option in keys.items()}, "stop the turn")
        self._display.block = "tool"
        if typed not in keys:
            return None
        await self._write(self._look.paint("dim", f"  {keys[typed]['name']}") + "\n")
        return str(keys[typed]["optionId"])

    async def elicitation(self, params: Params) -> dict[str, Any]:
        """Ask the question of a server, and return the answer to the request."""
        await self._display.begin_block("question", self._look.paint("bold", params["message"]) + "\n")
        dialog = Dialog(self._look, self._write, lambda keys: self._key(keys, "dismiss"), self._keyboard.line)
        if params["mode"] == "url":
            return await dialog.offer_page(params["url"])
        return await dialog.fill_in(fields_of(params["requestedSchema"]))

    async def _key(self, keys: Mapping[str, str], escape_words: str) -> str:
        """Show the meaning of each key, and return the key that the user presses. `escape_words` is the meaning of
        Esc."""
        for key, words in keys.items():
            await self._write(f"  {self._look.paint('bold', key)}  {words}\n")
        escape = "Esc" if self._look.has_styles else "any other line"
        await self._discard_typed()
        await self._write(f"  {self._look.paint('bold', escape)}  {escape_words}\n")
        return await self._keyboard.key(keys.keys())

    async def _discard_typed(self) -> None:
        """Discard the keys typed so far, so that text meant for another line does not answer the question. If the user
        is typing, first wait until they press Enter."""
        if (self._typed.line or self._keyboard.is_typing) and self._look.has_styles:
            await self._write(f"  {self._look.paint('dim', 'You were typing. Enter: answer this question')}\n")
            await self._keyboard.key(ENTERS)
        self._keyboard.discard()
