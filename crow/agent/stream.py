"""The running stream of one answer, as it is shown and saved.

Strategy: whoever reads the stream shows a piece at once when none was shown in the last 15 ms; other pieces are
gathered, and a second task shows them when those are over. What was shown is saved beside it: the first piece at once,
then once a second at most. Nothing is shown while a save is late, so all text older than a second is on disk, however
slow the disk is. The reader waits while the client is slow, so memory stays bounded. An answer that continues another
is shown without what it repeats. Knows nothing of where text goes or is kept.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import anyio
import anyio.abc

from crow.agent.branch import Branch
from crow.domain.errors import ModelError, StoreError
from crow.domain.events import NoticeShown, TextShown, ThoughtShown
from crow.domain.messages import Answer
from crow.llm import Delta, Retrying, Stream, TextDelta, ThoughtDelta

__all__ = ["AnswerDraft", "Overlap", "without_overlap"]

PIECE_WAIT_S = 0.015
SAVE_EVERY_S = 0.8
LATE_SAVE_S = 0.2
BUFFER_CHARS = 512 * 1024


class AnswerDraft:
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
        self._tasks: anyio.abc.TaskGroup | None = None
        self._shown_at = self._saved_at = -math.inf
        self._showing = False
        self._saved: anyio.Event | None = None
        self._ended = False
        self.is_hushed = False
        self._wake = anyio.Event()
        self._wakes_at = math.inf
        self._room = anyio.Event()
        self._failure: StoreError | None = None

    @property
    def text(self) -> str:
        """The text that was shown."""
        return "".join(self._shown)

    @property
    def thought(self) -> str:
        """The reasoning that was shown."""
        return "".join(self._thoughts)

    def mute(self) -> None:
        """Show nothing more, whatever is still read: what was shown is about to be stored."""
        self.is_hushed = True

    async def follow(self, stream: Stream) -> Answer:
        """Show the stream until it ends, and return its answer; everything read was shown when this returns or raises.

        :raises ~crow.domain.errors.ModelError: as the stream does.
        :raises ~crow.domain.errors.StoreError: a piece could not be saved.
        """
        failure: ModelError | None = None
        deltas = aiter(stream)
        first = await anext(deltas, None)
        async with anyio.create_task_group() as self._tasks:
            try:
                if first is not None:
                    await self._put(first)
                self._tasks.start_soon(self._tend)  # until now there was nothing to tend
                async for delta in deltas:
                    await self._put(delta)
            except ModelError as error:
                failure = error
            self._ended = True
            self._wake.set()
        if self._failure is not None:
            raise self._failure
        await self._show_text(self._overlap.finish())
        if failure is not None:
            raise failure
        answer = stream.answer
        return replace(answer, text=without_overlap(self._before, answer.text)) if self._before else answer

    async def save(self) -> None:
        """Save what was shown and is not saved yet, once the stream has ended.

        :raises ~crow.domain.errors.StoreError: it could not be saved.
        """
        text, thought = "".join(self._unsaved_text), "".join(self._unsaved_thought)
        self._unsaved_text, self._unsaved_thought = [], []
        if text or thought:
            await self._branch.save_draft(message_id=self.message_id, text=text, thought=thought)

    async def _put(self, delta: Delta) -> None:
        self._pending.append(delta)
        if not isinstance(delta, Retrying):
            self._pending_chars += len(delta.text)
        due = self._shown_at + PIECE_WAIT_S
        if not self._showing and time.monotonic() >= due:
            await self._show()
        elif due < self._wakes_at:
            self._wakes_at = due
            self._wake.set()
        if self._pending_chars > BUFFER_CHARS:
            self._room = anyio.Event()
            await self._room.wait()

    async def _tend(self) -> None:
        """Show what was gathered, and save what was shown, when the time for it has come."""
        while self._pending or not self._ended:
            now = time.monotonic()
            is_due = self._ended or now >= self._shown_at + PIECE_WAIT_S
            if self._pending and not self._showing and is_due:
                await self._show()
                continue
            self._save_if_due()
            self._wakes_at = self._next()
            self._wake = anyio.Event()
            with anyio.move_on_after(self._wakes_at - now):
                await self._wake.wait()

    def _next(self) -> float:
        """When something will be due; infinite: when it is known."""
        show = self._shown_at + PIECE_WAIT_S if self._pending and not self._showing else math.inf
        is_unsaved = self._saved is None and (self._unsaved_text or self._unsaved_thought)
        return min(show, self._saved_at + SAVE_EVERY_S if is_unsaved else math.inf)

    async def _show(self) -> None:
        self._showing = True
        try:
            if self._saved is not None and time.monotonic() > self._saved_at + LATE_SAVE_S:
                await self._saved.wait()
            pending, self._pending, self._pending_chars = self._pending, [], 0
            self._room.set()
            for delta in merged(pending):
                await self._publish(delta)
        finally:
            self._showing = False
        self._shown_at = time.monotonic()

    async def _publish(self, delta: Delta) -> None:
        match delta:
            case TextDelta(text=text):
                await self._show_text(self._overlap.feed(text))
            case ThoughtDelta(text=text) if not self.is_hushed:
                self._thoughts.append(text)
                self._unsaved_thought.append(text)
                self._save_if_due()
                await self._branch.publish(ThoughtShown(message_id=self.message_id, text=text))
            case Retrying(reason=reason, wait_s=wait_s):
                if self._told_of_retry:
                    return
                self._told_of_retry = True
                title = f"{reason} Trying again in {wait_s:.0f} s." if wait_s >= 1 else f"{reason} Trying again."
                await self._branch.publish(NoticeShown(severity="warning", title=title))

    async def _show_text(self, text: str) -> None:
        if text and not self.is_hushed:
            self._shown.append(text)
            self._unsaved_text.append(text)
            self._save_if_due()  # now, since a client that does not read may keep this from going on
            await self._branch.publish(TextShown(message_id=self.message_id, text=text))

    def _save_if_due(self) -> None:
        if self._ended or self._tasks is None:
            return  # the whole answer is about to be stored
        if self._saved is not None or not (self._unsaved_text or self._unsaved_thought):
            return
        due = self._saved_at + SAVE_EVERY_S
        if (now := time.monotonic()) >= due:
            self._saved_at, self._saved = now, anyio.Event()
            self._tasks.start_soon(self._save, self._tasks.cancel_scope, self._saved)
        elif due < self._wakes_at:
            self._wakes_at = due
            self._wake.set()

    async def _save(self, reading: anyio.CancelScope, saved: anyio.Event) -> None:
        text, thought = "".join(self._unsaved_text), "".join(self._unsaved_thought)
        self._unsaved_text, self._unsaved_thought = [], []
        try:
            await self._branch.save_draft(message_id=self.message_id, text=text, thought=thought)
        except StoreError as error:
            self._failure = error
            reading.cancel()  # nobody may go on reading what cannot be kept
        finally:
            self._saved = None
            saved.set()
        self._save_if_due()


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


# FROM agent.overlap: Removes text that a resumed answer repeats: the end of the old text at the start of the new one.
#
# While what came so far stands somewhere in the old text it may still grow into a repetition of its end, so it is
# held
# back; with the first character that does not fit, the longest repetition is known. A repetition must be one that
# does
# not come about by chance: "hel" and "lo" share a letter and mean "hello". The result is the same for any split.


LEAST_CHARS = 3
"""A shorter repetition is taken for text that goes on."""

SURE_CHARS = 8
"""From this length on a repetition may begin within a word, or behind blanks that the old text does not have."""

MOST_CHARS = 64_000
"""How far back the old text is looked at."""


class Overlap:
    """Feed the pieces of the new text; each call gives what is certainly new. `before` is the old text."""

    def __init__(self, before: str) -> None:
        self._before = before[-MOST_CHARS:]
        self._held = ""
        self._decided = not before

    def feed(self, piece: str) -> str:
        """What of the text so far is new and not yet given, perhaps nothing."""
        if self._decided:
            return piece
        self._held += piece
        if self._may_grow():
            return ""
        return self._decide()

    def finish(self) -> str:
        """The text has ended: what was held back and is no repetition."""
        return "" if self._decided else self._decide()

    def _may_grow(self) -> bool:
        """Whether a longer repetition than any so far is possible: what came stands in the old text before its end."""
        return any(0 <= self._before.find(text) < len(self._before) - len(text) for text in self._readings())

    def _readings(self) -> tuple[str, ...]:
        """The new text as it is, and without the blanks at its start."""
        bare = self._held.lstrip()
        return (self._held,) if bare == self._held else (self._held, bare)

    def _decide(self) -> str:
        self._decided = True
        held, self._held = self._held, ""
        return held[_repeated(self._before, held) :]


def without_overlap(before: str, text: str) -> str:
    """`text` as it goes on from `before`."""
    overlap = Overlap(before)
    return overlap.feed(text) + overlap.finish()


def _repeated(before: str, text: str) -> int:
    """How many characters at the start of `text` repeat the end of `before`."""
    whole = _longest(before, text, least=LEAST_CHARS)
    blanks = len(text) - len(text.lstrip())
    if whole or not blanks:
        return whole
    bare = _longest(before, text[blanks:], least=SURE_CHARS)
    return blanks + bare if bare else 0


def _longest(before: str, text: str, *, least: int) -> int:
    says_something = next((at for at, character in enumerate(text) if character.isalnum()), len(text)) + 1
    for length in range(min(len(before), len(text)), max(least, says_something) - 1, -1):
        if before.endswith(text[:length]) and _is_meant(before, text[:length]):
            return length
    return 0


def _is_meant(before: str, repeated: str) -> bool:
    """Whether a repetition begins where one would begin."""
    start = len(before) - len(repeated)
    is_within_word = start > 0 and before[start - 1].isalnum() and repeated[0].isalnum()
    return len(repeated) >= SURE_CHARS or not is_within_word
