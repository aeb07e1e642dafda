"""Shows the questions of MCP servers at the terminal: open a page, or fill in a form."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from crow.domain.text import on_one_line, safe
from crow.terminal.browser import open_page
from crow.terminal.form import FormField
from crow.terminal.keyboard import Interrupted
from crow.terminal.render import Look


class Dialog:
    """Asks the user. `choose` shows keys with their meanings and returns the pressed key, and `ask_line` reads a
    line."""

    def __init__(
        self,
        look: Look,
        write: Callable[[str], Awaitable[None]],
        choose: Callable[[Mapping[str, str]], Awaitable[str]],
        ask_line: Callable[..., Awaitable[str]],
    ) -> None:
        self._look = look
        self._write = write
        self._choose = choose
        self._ask_line = ask_line

    async def offer_page(self, url: str) -> dict[str, Any]:
        """Offer to open a page, and return the answer to the request."""
        await self._write(f"  {safe(url)}\n")
        if not url.lower().startswith(("https://", "http://")):
            await self._write("  crow opens only pages on the web, so this one is not opened.\n")
            return {"action": "cancel"}
        match await self._choose({"y": "open this page", "n": "decline"}):
            case "y":
                has_display = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
                if not has_display or not await asyncio.to_thread(open_page, url):
                    await self._write("  No browser could be opened here; open the page yourself.\n")
                return {"action": "accept"}
            case "n":
                return {"action": "decline"}
        return {"action": "cancel"}

    async def fill_in(self, fields: Sequence[FormField]) -> dict[str, Any]:
        """Let the user fill in a form, and return the answer to the request."""
        match await self._choose({"y": "answer", "n": "decline"}):
            case "n":
                return {"action": "decline"}
            case "y":
                pass
            case _:
                return {"action": "cancel"}
        content: dict[str, Any] = {}
        try:
            for field in fields:
                value = await self._fill_in_field(field)
                if value is not None:
                    content[field.name] = value
        except (EOFError, Interrupted):
            return {"action": "cancel"}
        return {"action": "accept", "content": content}

    async def _fill_in_field(self, field: FormField) -> Any:
        lines = [field.description] if field.description else []
        lines += [f"{number}) {name}" for number, (_, name) in enumerate(field.choices, 1)]
        lines += ["You can enter several, separated by commas."] if field.kind == "array" else []
        for line in lines:
            await self._write(f"  {self._look.paint('dim', on_one_line(line))}\n")
        hint = " (y/n)" if field.kind == "boolean" else "" if field.is_required else " (optional)"
        while True:
            typed = await self._ask_line(f"  {on_one_line(field.title)}{hint}: ", default=field.default_text)
            try:
                return field.value_of(typed)
            except ValueError as error:
                await self._write(f"  {self._look.paint('bad', on_one_line(str(error)))}\n")
