"""Delivers an answer to the chat, each message of it once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from crow_channels.chat import Button, Chat, File, Outgoing
from crow_channels.errors import ChatRefused, ChatUnavailable
from crow_channels.state import Prompt, State
from crow_channels.text import harmless, settled, split, units

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0

QUESTIONS, FILES = 500, 1000
"""The numbers of the first question and of the first file among the messages of an answer."""

_AS_FILE = "The answer is long. All of it is in the file."


class Delivery:
    """The messages of one answer. `run` shows the answer while it grows, until `finish`."""

    def __init__(self, chat: Chat, state: State, prompt: Prompt) -> None:
        self._chat, self._state, self._prompt = chat, state, prompt
        self._changed = asyncio.Event()
        self._finished = asyncio.Event()

    def grow(self) -> None:
        """Show what the prompt's answer is by now."""
        self._changed.set()

    def finish(self) -> None:
        """Show the whole answer, and end."""
        self._finished.set()
        self._changed.set()

    async def run(self) -> None:
        """Deliver until the whole answer has arrived. A chat that is away delays it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            is_final = self._finished.is_set()
            self._state.save(self._prompt)  # what the chat shows must be known after a restart
            await self._show(is_final=is_final)
            if is_final:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._finished.wait(), self._chat.limits.edit_interval_s)

    async def put(
        self, number: int, text: str, *, buttons: Sequence[Button] = (), files: Sequence[File] = (), tries: int = 0
    ) -> None:
        """Send the message with this number, or change it if it was sent. Tries again until the chat takes or refuses
        it, or `tries` times."""
        pause_s, tried = _FIRST_PAUSE_S, 0
        while True:
            try:
                return await self._put(number, text, tuple(buttons), tuple(files))
            except ChatUnavailable as error:
                tried += 1
                if tried == tries:
                    return None
                logger.warning("The chat %s cannot be reached: %s", self._prompt.chat, error)
                await asyncio.sleep(max(error.retry_after_s, pause_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except ChatRefused as error:
                prompt = self._prompt
                logger.error("The chat %s refused a message to %s: %s", prompt.chat, prompt.place, error)  # noqa: TRY400
                post = self._state.post(self._prompt.number, number)
                self._state.set_post(self._prompt.number, number, text, (post and post.message) or "")
                return None

    async def _put(self, number: int, text: str, buttons: tuple[Button, ...], files: tuple[File, ...]) -> None:
        prompt, state, place = self._prompt.number, self._state, self._prompt.place
        post = state.post(prompt, number)
        if post is None:
            state.set_post(prompt, number, text, None)
            message_id = await self._chat.send(place, self._message(number, text, buttons, files))
            state.set_post(prompt, number, text, message_id)
            return
        shown, message_id_or_none = post.content, post.message
        if message_id_or_none is None:  # whether the first try arrived is unknown, so this one must be the same
            again = self._message(number, shown, buttons, files)
            message_id_or_none = await self._chat.find(place, again, state.posts(prompt))
            if message_id_or_none is None:
                message_id_or_none = await self._chat.send(place, again)
            state.set_post(prompt, number, shown, message_id_or_none)
        if message_id_or_none and shown != text and self._chat.limits.can_edit:
            await self._chat.edit(place, message_id_or_none, self._message(number, text, buttons, files))
            state.set_post(prompt, number, text, message_id_or_none)

    def _message(self, number: int, text: str, buttons: tuple[Button, ...], files: tuple[File, ...]) -> Outgoing:
        prompt = self._prompt
        return Outgoing(
            key=f"{prompt.chat}:{prompt.place}:{prompt.message}:{number}",
            text=text,
            after=prompt.message,
            is_reply=number == 0,
            buttons=buttons,
            files=files,
        )

    async def _show(self, *, is_final: bool) -> None:
        limits, text = self._chat.limits, harmless(self._prompt.text)
        pieces = [piece.text for piece in split(text if is_final else settled(text), limits.chars)]
        file: File | None = None
        if limits.file_bytes and len(pieces) > limits.messages:
            data = self._prompt.text.encode(errors="replace")[: limits.file_bytes]
            file = File(name="answer.md", mime="text/markdown", data=data)
        if file is not None or (limits.file_bytes and not is_final):  # the last message may have to hold the file
            del pieces[limits.messages - 1 :]
        if not is_final and not limits.can_edit:
            del pieces[-1:]
        for number, piece in enumerate(pieces):
            await self.put(number, piece)
        if is_final and file is not None:
            await self.put(len(pieces), _AS_FILE, files=(file,))
        if is_final:
            for number, name, mime, data in self._state.files(self._prompt.number):
                await self.put(FILES + number, name, files=(File(name=name, mime=mime, data=data),))


def cut(text: str, limit: int) -> str:
    """Return the beginning of a text that fits into a message."""
    return text if units(text) <= limit else split(text, limit - 2)[0].text + "\n…"
