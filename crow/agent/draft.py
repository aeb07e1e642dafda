"""The running stream of one answer, as it is shown and saved.

Strategy: one task reads the stream into a buffer; another shows it: the first piece at once, later ones coalesced so
that a piece waits at most 15 ms, and what was shown is saved with the first piece and then once a second at most. The
reader waits when the client is slow, so memory stays bounded. An answer that continues another is shown without what it
repeats. Knows nothing of where text goes or is kept.
"""

from __future__ import annotations

import time
from dataclasses import replace

import anyio

from crow.agent.branch import Branch
from crow.agent.overlap import Overlap, without_overlap
from crow.domain.errors import ModelError, StoreError
from crow.domain.events import NoticeShown, TextShown, ThoughtShown
from crow.domain.messages import Answer
from crow.llm import Delta, Retrying, Stream, TextDelta, ThoughtDelta

__all__ = ["Draft"]

PIECE_WAIT_S = 0.015
SAVE_EVERY_S = 0.8
BUFFER_CHARS = 512 * 1024


class Draft:
    """What was shown of an answer so far: `text`, `thought`. `before` is the text that the answer continues."""

    def __init__(self, branch: Branch, message_id: str, *, before: str = "") -> None:
        self.message_id = message_id
        self._before = before
        self._overlap = Overlap(before)
        self._told_of_retry = False
        self._branch = branch
        self._pending: list[Delta] = []
        self._pending_chars = 0
        self._shown: list[str] = []
        self._thoughts: list[str] = []
        self._unsaved_text: list[str] = []
        self._unsaved_thought: list[str] = []
        self._saved_at: float | None = None
        self._wake = anyio.Event()
        self._room = anyio.Event()
        self._ended = anyio.Event()
        self._failure: StoreError | None = None

    @property
    def text(self) -> str:
        """The text that was shown."""
        return "".join(self._shown)

    @property
    def thought(self) -> str:
        """The reasoning that was shown."""
        return "".join(self._thoughts)

    async def follow(self, stream: Stream) -> Answer:
        """Show the stream until it ends, and return its answer; everything read was shown when this returns or raises.

        :raises ~crow.domain.errors.ModelError: as the stream does.
        :raises ~crow.domain.errors.StoreError: a piece could not be saved.
        """
        failure: ModelError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._show, tasks.cancel_scope)
            try:
                async for delta in stream:
                    await self._put(delta)
            except ModelError as error:
                failure = error
            self._ended.set()
            self._wake.set()
        if self._failure is not None:
            raise self._failure
        if failure is not None:
            raise failure
        answer = stream.answer
        return replace(answer, text=without_overlap(self._before, answer.text)) if self._before else answer

    async def _put(self, delta: Delta) -> None:
        self._pending.append(delta)
        if not isinstance(delta, Retrying):
            self._pending_chars += len(delta.text)
        self._wake.set()
        if self._pending_chars > BUFFER_CHARS:
            self._room = anyio.Event()
            await self._room.wait()

    async def _show(self, reading: anyio.CancelScope) -> None:
        try:
            while not (self._ended.is_set() and not self._pending):
                await self._wait_for_work()
                pending, self._pending, self._pending_chars = self._pending, [], 0
                self._wake = anyio.Event()
                self._room.set()
                for delta in merged(pending):
                    await self._publish(delta)
                await self._save()
                if not self._ended.is_set():
                    with anyio.move_on_after(PIECE_WAIT_S):
                        await self._ended.wait()
            await self._show_text(self._overlap.finish())
        except StoreError as error:
            self._failure = error
            reading.cancel()  # nobody may go on reading what cannot be kept

    async def _wait_for_work(self) -> None:
        if self._pending or self._ended.is_set():
            return
        if self._saved_at is None or not (self._unsaved_text or self._unsaved_thought):
            await self._wake.wait()
            return
        with anyio.move_on_after(max(0.0, self._saved_at + SAVE_EVERY_S - time.monotonic())):
            await self._wake.wait()

    async def _publish(self, delta: Delta) -> None:
        match delta:
            case TextDelta(text=text):
                await self._show_text(self._overlap.feed(text))
            case ThoughtDelta(text=text):
                self._thoughts.append(text)
                self._unsaved_thought.append(text)
                await self._branch.publish(ThoughtShown(message_id=self.message_id, text=text))
            case Retrying(reason=reason, wait_s=wait_s):
                if self._told_of_retry:
                    return
                self._told_of_retry = True
                title = f"{reason} Trying again in {wait_s:.0f} s." if wait_s >= 1 else f"{reason} Trying again."
                await self._branch.publish(NoticeShown(severity="warning", title=title))

    async def _show_text(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._unsaved_text.append(text)
            await self._branch.publish(TextShown(message_id=self.message_id, text=text))

    async def _save(self) -> None:
        now = time.monotonic()
        if self._ended.is_set() or not (self._unsaved_text or self._unsaved_thought):
            return  # the whole answer is about to be stored
        if self._saved_at is not None and now - self._saved_at < SAVE_EVERY_S:
            return
        text, thought = "".join(self._unsaved_text), "".join(self._unsaved_thought)
        self._unsaved_text, self._unsaved_thought = [], []
        self._saved_at = now
        await self._branch.save_draft(message_id=self.message_id, text=text, thought=thought)


def merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one delta."""
    result: list[Delta] = []
    run: list[str] = []
    kind: type[TextDelta] | type[ThoughtDelta] | None = None
    for delta in [*deltas, None]:
        if run and kind is not None and type(delta) is not kind:
            result.append(kind(text="".join(run)))
            run = []
        if isinstance(delta, (TextDelta, ThoughtDelta)):
            kind = type(delta)
            run.append(delta.text)
        elif delta is not None:
            result.append(delta)
    return result
