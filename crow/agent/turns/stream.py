"""Shows and saves one answer while the model streams it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

import anyio
import anyio.abc

from crow.agent.history.branch import Branch
from crow.domain.errors import ModelError, StoreError
from crow.domain.events import NoticeShown, TextShown, ThoughtShown
from crow.domain.messages import Answer
from crow.llm import Delta, Retrying, Stream, TextDelta, ThoughtDelta

_PIECE_WAIT_S = 0.015
"""A piece that arrives within this many seconds after the last update waits and is shown together with later ones."""
_SAVE_EVERY_S = 0.8
"""The shown text is saved at most once in this many seconds."""
_LATE_SAVE_S = 0.2
"""If a save takes longer than this many seconds, nothing more is shown until it has ended."""
_BUFFER_CHARS = 512 * 1024
"""If more characters than this wait to be shown, the stream is not read further."""


class _Shown:
    """The part of an answer's text, or of its thought, that clients have been shown."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._chars = 0
        self._saved = 0
        """How many pieces were saved."""

    def add(self, piece: str) -> int:
        """Add a piece. Return the number of characters before it."""
        self.pieces.append(piece)
        offset, self._chars = self._chars, self._chars + len(piece)
        return offset

    @property
    def is_unsaved(self) -> bool:
        """Whether a shown piece is not saved yet."""
        return self._saved != len(self.pieces)

    def take_unsaved(self) -> str:
        """Return the text that is not saved yet. It counts as saved from now on."""
        unsaved, self._saved = "".join(self.pieces[self._saved :]), len(self.pieces)
        return unsaved


class _Gathered:
    """The pieces that have arrived and are not shown yet."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self._chars = 0
        self._has_room = anyio.Event()

    def add(self, delta: Delta) -> None:
        """Add a piece."""
        self.deltas.append(delta)
        if not isinstance(delta, Retrying):
            self._chars += len(delta.text)

    async def room(self) -> None:
        """If more than `_BUFFER_CHARS` characters are gathered, wait for `take`."""
        if self._chars > _BUFFER_CHARS:
            self._has_room = anyio.Event()
            await self._has_room.wait()

    def take(self) -> Sequence[Delta]:
        """Remove all pieces, and return them."""
        deltas, self.deltas, self._chars = self.deltas, [], 0
        self._has_room.set()
        return deltas


class AnswerDraft:
    """An answer while it arrives. The draft shows the answer to the client and saves the shown part. If the answer
    continues an earlier one that broke off, `before` is the earlier text.

    The reader of the stream shows a piece at once if nothing was shown in the last 15 ms. Later pieces are gathered,
    and a second task shows them when the 15 ms are over. Shown text is saved in parallel: the first piece at once,
    later pieces at most every 0.8 s. If a save takes too long, nothing more is shown until the save has ended. So all
    text that was shown more than a second ago is on disk, however slow the disk is. The reader waits for a slow client,
    so memory use is bounded.
    """

    def __init__(self, branch: Branch, message_id: str, *, before: str = "") -> None:
        self.message_id = message_id
        self.is_muted = False
        """Nothing more is shown."""
        self._branch = branch
        self._before = before
        self._overlap = Overlap(before)
        self._gathered = _Gathered()
        self._text = _Shown()
        self._thought = _Shown()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._shown_at = -math.inf
        """When the last update was sent. This and the other times are `time.monotonic()`, in seconds."""
        self._saved_at = -math.inf
        """When the last save began."""
        self._is_showing = False
        self._saving: anyio.Event | None = None
        """Set when the running save ends. None if no save is running."""
        self._has_ended = False
        """The stream has ended."""
        self._wake = anyio.Event()
        """Wakes `_show_gathered`, which sleeps until `_wakes_at`."""
        self._wakes_at = math.inf
        self._has_reported_retry = False
        self._failure: StoreError | None = None
        """Why a save failed. `follow` raises it."""

    @property
    def text(self) -> str:
        """The text that was shown to the client."""
        return "".join(self._text.pieces)

    @property
    def thought(self) -> str:
        """The reasoning that was shown to the client."""
        return "".join(self._thought.pieces)

    def mute(self) -> None:
        """Show nothing more of the answer. `text` and `thought` then stay as they are."""
        self.is_muted = True

    async def follow(self, stream: Stream) -> Answer:
        """Show the stream until it ends, and return its answer. Even if the stream fails, all text that arrived before
        the failure is shown.

        :raises ~crow.domain.errors.ModelError: the stream raised it.
        :raises ~crow.domain.errors.StoreError: a piece could not be saved.
        """
        failure: ModelError | None = None
        deltas = aiter(stream)
        first = await anext(deltas, None)
        async with anyio.create_task_group() as self._tasks:
            try:
                if first is not None:
                    await self._put(first)
                self._tasks.start_soon(self._show_gathered)
                async for delta in deltas:
                    await self._put(delta)
            except ModelError as error:
                failure = error
            self._has_ended = True
            self._wake.set()
        if self._failure is not None:
            raise self._failure
        await self._show_text(self._overlap.finish())
        if failure is not None:
            raise failure
        answer = stream.answer
        return replace(answer, text=without_overlap(self._before, answer.text)) if self._before else answer

    async def save(self) -> None:
        """Save the shown text that is not saved yet. :raises ~crow.domain.errors.StoreError: it could not be saved."""
        text, thought = self._text.take_unsaved(), self._thought.take_unsaved()
        if text or thought:
            await self._branch.save_draft(message_id=self.message_id, text=text, thought=thought)

    async def _put(self, delta: Delta) -> None:
        self._gathered.add(delta)
        due = self._shown_at + _PIECE_WAIT_S
        if not self._is_showing and time.monotonic() >= due:
            await self._show()
        else:
            self._wake_by(due)
        await self._gathered.room()

    async def _show_gathered(self) -> None:
        """Until the stream ends, show the gathered pieces and save the text shown so far, each on its own schedule."""
        while self._gathered.deltas or not self._has_ended:
            now = time.monotonic()
            show_at = self._shown_at + _PIECE_WAIT_S if self._gathered.deltas and not self._is_showing else math.inf
            if show_at <= now or (self._has_ended and show_at < math.inf):
                await self._show()
                continue
            self._save_if_due()
            save_at = self._saved_at + _SAVE_EVERY_S if self._saving is None and self._is_unsaved() else math.inf
            self._wakes_at = min(show_at, save_at)
            self._wake = anyio.Event()
            with anyio.move_on_after(self._wakes_at - now):
                await self._wake.wait()

    def _wake_by(self, due: float) -> None:
        if due < self._wakes_at:
            self._wakes_at = due
            self._wake.set()

    async def _show(self) -> None:
        self._is_showing = True
        try:
            if self._saving is not None and time.monotonic() > self._saved_at + _LATE_SAVE_S:
                await self._saving.wait()
            for delta in merged(self._gathered.take()):
                await self._publish(delta)
        finally:
            self._is_showing = False
        self._shown_at = time.monotonic()

    async def _publish(self, delta: Delta) -> None:
        match delta:
            case TextDelta(text=text):
                await self._show_text(self._overlap.feed(text))
            case ThoughtDelta(text=text) if not self.is_muted:
                offset = self._thought.add(text)
                self._save_if_due()
                await self._branch.publish(ThoughtShown(message_id=self.message_id, offset=offset, text=text))
            case Retrying(reason=reason, wait_s=wait_s) if not self._has_reported_retry:
                self._has_reported_retry = True
                title = f"{reason} Trying again in {wait_s:.0f} s." if wait_s >= 1 else f"{reason} Trying again."
                await self._branch.publish(NoticeShown(severity="warning", title=title))

    async def _show_text(self, text: str) -> None:
        if text and not self.is_muted:
            offset = self._text.add(text)
            self._save_if_due()  # comes before `publish`, which waits while the client does not read
            await self._branch.publish(TextShown(message_id=self.message_id, offset=offset, text=text))

    def _is_unsaved(self) -> bool:
        return self._text.is_unsaved or self._thought.is_unsaved

    def _save_if_due(self) -> None:
        """If some shown text is not saved and no save is running, start a save, or make `_show_gathered` wake up when
        the next save is due. After the end of the stream, do nothing, because the whole answer is stored instead."""
        if self._has_ended or self._tasks is None or self._saving is not None or not self._is_unsaved():
            return
        due = self._saved_at + _SAVE_EVERY_S
        if (now := time.monotonic()) >= due:
            self._saved_at, self._saving = now, anyio.Event()
            self._tasks.start_soon(self._save, self._tasks.cancel_scope, self._saving)
        else:
            self._wake_by(due)

    async def _save(self, reading: anyio.CancelScope, saving: anyio.Event) -> None:
        try:
            await self.save()
        except StoreError as error:
            self._failure = error
            reading.cancel()  # stop reading, because the text read so far could not be saved
        finally:
            self._saving = None
            saving.set()
        self._save_if_due()


def merged(deltas: Sequence[Delta]) -> Iterator[Delta]:
    """Yield the pieces in order, with neighbouring pieces of the same kind joined."""
    for kind, run in groupby(deltas, key=attrgetter("__class__")):
        if kind is Retrying:
            yield from run
        else:
            yield kind(text="".join(delta.text for delta in run if not isinstance(delta, Retrying)))


_MIN_CHARS = 3
"""A repetition shorter than this is treated as new text."""
_SURE_CHARS = 8
"""A repetition with at least this many characters counts in two more cases: if it begins within a word, and if the new
text has white space before it that the old text does not have."""
_MAX_CHARS = 64_000
"""Crow looks for repetitions only in this many characters at the end of the old text."""


class Overlap:
    """Removes the start of a resumed answer if it repeats the end of the old text.

    Call `feed` with each piece of the new text; it returns the text that is certainly new. As long as the new text that
    has arrived also occurs somewhere in the old text, it may be the beginning of a repetition. So it is held back until
    this is ruled out. Short matches are ignored, because they may be accidental: if "hel" is continued by "lo", both
    have an "l", but "hello" is meant. The result does not depend on how the text is split into pieces.
    """

    def __init__(self, before: str) -> None:
        self._before = before[-_MAX_CHARS:]
        self._held = ""
        self._is_decided = not before

    def feed(self, piece: str) -> str:
        """Add a piece. Return the part of the held-back text that is now known not to repeat the old text, or an empty
        string."""
        if self._is_decided:
            return piece
        self._held += piece
        bare = self._held.lstrip()
        readings = (self._held,) if bare == self._held else (self._held, bare)
        if any(0 <= self._before.find(text) < len(self._before) - len(text) for text in readings):
            return ""  # the old text continues after this match, so a longer repetition is possible
        return self.finish()

    def finish(self) -> str:
        """Decide which part of the held-back text repeats the old text. Return the rest."""
        self._is_decided = True
        held, self._held = self._held, ""
        return held[_repeated_chars(self._before, held) :]


def without_overlap(before: str, text: str) -> str:
    """Return `text` without the part at its start that repeats the end of `before`."""
    overlap = Overlap(before)
    return overlap.feed(text) + overlap.finish()


def _repeated_chars(before: str, text: str) -> int:
    """Return how many characters at the start of `text` repeat the end of `before`."""
    whole = _longest_repetition(before, text, _MIN_CHARS)
    blanks = len(text) - len(text.lstrip())
    if whole or not blanks:
        return whole
    bare = _longest_repetition(before, text[blanks:], _SURE_CHARS)
    return blanks + bare if bare else 0


def _longest_repetition(before: str, text: str, min_chars: int) -> int:
    """Return the length of the longest start of `text` that is also the end of `before`, has at least `min_chars`
    characters, and contains a letter or digit. If it is shorter than `_SURE_CHARS`, it counts only if it does not begin
    within a word of `before`. Return 0 if there is none."""
    first_letter_end = next((at for at, character in enumerate(text) if character.isalnum()), len(text)) + 1
    for length in range(min(len(before), len(text)), max(min_chars, first_letter_end) - 1, -1):
        if before.endswith(text[:length]):
            start = len(before) - length
            is_within_word = start > 0 and before[start - 1].isalnum() and text[0].isalnum()
            if length >= _SURE_CHARS or not is_within_word:
                return length
    return 0
