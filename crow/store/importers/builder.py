"""Builds a conversation of crow from the messages of another tool, in the form of a crow export.

An importer calls the builder for each message, in the order of the messages. A call that adds a prompt, a reminder or a
remark writes an entry at once. The parts of an answer and the results of its calls are collected, and are written when
something else follows. A prompt ends the turn before it and begins the next one. A result that comes after its answer
was written is written at once.
"""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, TypeAlias

from crow.domain import entries
from crow.domain.entries import Announcement, Body, CallRef, Pin, StopReason
from crow.domain.messages import FinishReason, Image, Part, ToolCall, Usage
from crow.domain.rendering import in_title
from crow.domain.text import safe
from crow.store.codec import encode, mend
from crow.store.importers.files import Problems
from crow.store.importers.parts import announce, short_line, tool_call, words_of
from crow.store.portable import (
    BlobRecord,
    ConversationRecord,
    EntryRecord,
    MoveRecord,
    SessionRecord,
    blob_record,
    line_of,
)

_CUT_CHARS = 48_000
"""The model sees at most this many characters of an imported prompt, of a result, or of the arguments of all calls in
one answer together. Crow's own results have the same limit."""

_TITLE_CHARS = 80
_SPOOL_BYTES = 4 * 1024 * 1024
"""A conversation stays in memory up to this size."""
_MAX_PIN_CHARS = 20_000

_Stop: TypeAlias = StopReason | Literal["interrupted", "error"]
_DONE: tuple[_Stop, str] = ("end_turn", "")


class ConversationBuilder:
    """Takes the messages of one session in order, and writes their entries to a temporary file.

    The methods may be called in any order, and texts may contain any characters: the conversation is always valid. A
    "step" is one answer with the results of its calls. The builder collects a step before it writes the entries of the
    step, because other tools store the parts of an answer one after another.
    """

    def __init__(self, session_id: str, *, cwd: str, parent_id: str | None, problems: Problems) -> None:
        self.session_id = session_id
        self.parent_id = parent_id
        self.leaf: int | None = None
        """The number (from 1) of the newest entry of the current branch, or None while the branch has no entries."""
        self.title: str | None = None
        self.title_by_user = False
        self.archived = False
        self.created_ms: int | None = None
        """The earliest time so far, in Unix milliseconds, or None if no time is known."""
        self.updated_ms = 0
        """Unix milliseconds."""
        self.messages = 0
        """The number of prompts and answers so far."""
        self.lines = 0
        """The number of lines in the temporary file."""
        self.model = ""
        """The model of the entries that follow."""
        self._problems = problems
        self._cwd = cwd
        """The session's directory, unless `set_cwd` sets another one."""
        self._first_prompt = ""
        self._has_prompt = False
        self._now_ms = 0
        self._turns = array("q")
        """The turn of each entry, in order."""
        self._open = bytearray()
        """Whether each entry's turn was still open after the entry."""
        self._before: dict[int, int | None] = {}
        """Maps each turn to the leaf before it."""
        self._ends: dict[int, int | None] = {}
        """Maps each turn to its newest entry."""
        self._newest_turn = 0
        self._step: _Step | None = None
        """The current answer, or None if no answer has begun since the last entry."""
        self._last_key: str | None = None
        """The key of the answer that began last."""
        self._stop = _DONE
        """The reason why the current turn ends, and details for the user."""
        self._usage: tuple[Usage, float | None] | None = None
        """The usage and cost that the next answer gets."""
        self._calls: dict[str, tuple[CallRef, ToolCall, Announcement]] = {}
        """The calls that were written and have no result so far, by their ids in the imported session."""
        self._prompts: dict[bytes, int] = {}
        """Maps the hash of a prompt's text to the number of the prompt's entry."""
        self._moves: list[MoveRecord] = []
        self._blobs: set[str] = set()
        """The hashes of the blobs in the temporary file."""
        self._spool: Any = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115  closed by close()

    def close(self) -> None:
        """Delete the temporary file. A second call has no effect."""
        self._spool.close()

    @property
    def turn(self) -> int:
        """The number of the leaf's turn, or 0 before the first prompt."""
        return 0 if self.leaf is None else self._turns[self.leaf - 1]

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a prompt nor an answer."""
        return self.messages == 0

    def at(self, time_ms: int | None) -> None:
        """Set the time of the next entries. If `time_ms` is None, the time that was set last stays in effect."""
        if time_ms is not None:
            self._now_ms = time_ms
            self.created_ms = time_ms if self.created_ms is None else min(self.created_ms, time_ms)
            self.updated_ms = max(self.updated_ms, time_ms)

    def set_cwd(self, path: Any) -> None:
        """Set the session's directory, if `path` is an absolute path."""
        if not isinstance(path, str) or not path.startswith("/") or len(path) > 4096:
            return
        # A name with hidden characters could look like the name of another directory.
        if path == safe(mend(path)) and not {"\n", "\t"} & set(path):
            self._cwd = path

    def set_title(self, title: Any, *, by_user: bool = False) -> None:
        """Set the title if `title` is a text that is not empty. A title that the user chose is replaced only if
        `by_user` is true."""
        if isinstance(title, str) and (line := short_line(title, 200)) and (by_user or not self.title_by_user):
            self.title, self.title_by_user = line, by_user

    def set_model(self, name: Any) -> None:
        """Set the model of the next answers."""
        if isinstance(name, str) and name:
            self.model = short_line(name, 200)

    def user(self, parts: Sequence[Part]) -> int | None:
        """Add a prompt, which begins a turn. Return the number of the prompt's entry, or None if the prompt is
        empty."""
        if not parts:
            return None
        before = self.leaf if self._step is None else self.end_step()
        self.end_turn()
        self._newest_turn += 1
        self._before[self._newest_turn] = before
        words = words_of(parts)
        cut = _CUT_CHARS if len(words) > _CUT_CHARS else None
        self._has_prompt = True
        self.messages += 1
        number = self._emit(
            entries.User(parts=tuple(parts), message_id=self._message_id(), cut=cut), model=self.model, opens_turn=True
        )
        if words.strip():
            self._first_prompt = self._first_prompt or short_line(words, _TITLE_CHARS, first_line=True)
            self._prompts[_digest(words)] = number
        return number

    def answer(self, key: str | None = None) -> None:
        """Begin an answer. If the current answer has the same `key` and none of its calls has a result yet, continue
        the current answer instead."""
        step = self._step
        if step is not None and (key is None or step.key != key or step.results):
            self.end_step()
        if self._step is None:
            is_rest = key is not None and key == self._last_key
            self._step = _Step(key=key, model=self.model, time_ms=self._now_ms, is_rest=is_rest)
            self._last_key = key
            if self._usage is not None:
                self._step.usage, self._usage = self._usage, None

    def continue_answer(self) -> None:
        """Continue the current answer. Begin a new one if there is no current answer, or if the current answer already
        has a usage or a result of one of its calls."""
        if self._step is None or self._step.results or (self._step.usage is not None and not self._step.is_empty):
            self.answer()

    def think(self, text: str) -> None:
        """Add a thought to the answer."""
        if text.strip():
            self._current().thoughts.append(text)

    def say(self, text: str) -> None:
        """Add text to the answer."""
        if text.strip():
            self._current().texts.append(text)

    def call(self, call_id: str, name: str, arguments: Any, *, announcement: Announcement | None = None) -> None:
        """Add a tool call to the answer. `arguments` is an object, or the text that the model wrote."""
        step = self._current()
        call = tool_call(call_id, name, arguments)
        announcement = announcement or announce(name, arguments, self._cwd)
        step.newest[call_id] = len(step.calls)
        step.calls.append((call_id, call, announcement))

    def finish_answer(self, finish: FinishReason) -> None:
        """Set the reason why the answer ended."""
        if self._step is not None:
            self._step.finish = finish

    def report_usage(self, usage: Usage, cost: float | None = None, *, again: bool = False) -> None:
        """Set the usage of the current answer. If that answer already has a usage, the new usage replaces it if `again`
        is true, and belongs to the next answer otherwise. If the current answer continues one whose usage is already
        counted, the new usage is ignored."""
        if (usage == Usage() and cost is None) or (self._step is not None and self._step.is_rest):
            return
        if self._step is not None and (again or self._step.usage is None):
            self._step.usage = usage, cost
        elif not again:
            self._usage = usage, cost

    def result(
        self,
        call_id: str,
        parts: Sequence[Part],
        *,
        is_error: bool = False,
        duration_ms: int = 0,
        title: str = "",
    ) -> None:
        """Add the result of a call. If no call with this id waits for a result, report a problem."""
        images = tuple(part for part in parts if isinstance(part, Image))
        found = _Result(words_of(parts), images, is_error, duration_ms, short_line(title, 200), self._now_ms)
        index = None if self._step is None else self._step.newest.get(call_id)
        if self._step is not None and index is not None:
            is_expected = self._step.results.setdefault(index, found) is found
        elif is_expected := call_id in self._calls:
            self.end_step()
            self._emit_result(*self._calls.pop(call_id), found)
        if not is_expected:
            self._problems.skip("a tool result without its call")

    def end_step(self) -> int | None:
        """Write the current answer, if there is one, and its results. Return the leaf."""
        step, self._step = self._step, None
        if step is None or step.is_empty:
            if step is not None and step.usage is not None:
                self._usage = step.usage
            return self.leaf
        self.messages += 1
        now, self._now_ms = self._now_ms, step.time_ms
        calls = tuple(call for _, call, _ in step.calls)
        usage, cost = step.usage or (None, None)
        body = entries.Assistant(
            text="\n\n".join(step.texts),
            thought="\n\n".join(step.thoughts),
            message_id=self._message_id(),
            calls=calls,
            finish="tool_calls" if calls and step.finish == "stop" else step.finish,
            announcements=tuple(announcement for _, _, announcement in step.calls),
            cut=_CUT_CHARS if sum(len(call.arguments) for call in calls) > _CUT_CHARS else None,
        )
        number = self._emit(body, model=step.model, usage=usage, cost=cost)
        for index, (call_id, call, announcement) in enumerate(step.calls):
            ref = CallRef(assistant=number, index=index)
            if index in step.results:
                self._now_ms = step.results[index].time_ms
                self._emit_result(ref, call, announcement, step.results[index])
            else:
                self._calls[call_id] = ref, call, announcement
        self._now_ms = max(now, self._now_ms)
        return self.leaf

    def stop(self, reason: _Stop, detail: str = "") -> None:
        """Set the reason why the turn ends. Results of the turn's calls may still follow."""
        self._stop = reason, detail

    def end_turn(self) -> None:
        """End the turn if it has not ended yet."""
        self.end_step()
        (reason, detail), self._stop = self._stop, _DONE
        if self.leaf is not None and self._open[self.leaf - 1]:
            self._emit(entries.TurnEnd(stop=reason, detail=detail), opens_turn=False)

    def remind(self, text: str) -> None:
        """Add text that only the model sees."""
        if text.strip():
            self.end_step()
            self._emit(entries.Reminder(text=text))

    def remark(self, text: str) -> None:
        """Add text that only the user sees."""
        if text.strip():
            self.end_step()
            self._emit(entries.Remark(text=text, message_id=self._message_id()))

    def command(self, text: str, answer: str) -> None:
        """Add a command that the user typed, and the answer to it. The model sees neither the command nor the
        answer."""
        self.end_step()
        self._emit(entries.Command(text=text, answer=answer, message_id=self._message_id()))

    def label(self, name: str) -> None:
        """Label this point of the conversation."""
        self.end_step()
        self._emit(entries.Note(about="label", value=short_line(name, 200)))

    def checkpoint(
        self,
        summary: str,
        *,
        first_kept: int | None = None,
        by_user: bool = False,
        tokens_before: int | None = None,
        files_read: Sequence[str] = (),
        files_modified: Sequence[str] = (),
        kept_prompts: Sequence[str] = (),
    ) -> None:
        """Add a compaction. From now on, the model sees `summary` in place of the entries before entry number
        `first_kept`, or in place of all entries so far if `first_kept` is None. It still sees the complete texts of
        `kept_prompts`, up to 20,000 characters in total. If not all of them fit, the last ones have priority."""
        self.end_step()
        if not summary.strip():
            return
        pins = []
        room = _MAX_PIN_CHARS
        for prompt in reversed(kept_prompts):
            number = self._prompts.get(_digest(prompt))
            if number is None or len(prompt) > room:
                continue
            room -= len(prompt)
            pins.append(Pin(entry=number, text=prompt))
        body = entries.Checkpoint(
            compaction_id=self._message_id().replace("msg", "compaction"),
            summary=summary,
            first_kept=first_kept,
            pins=tuple(reversed(pins)),
            files_read=tuple(map(mend, files_read)),
            files_modified=tuple(map(mend, files_modified)),
            reason="command" if by_user else "threshold",
            method="serialised",
            tokens_before=tokens_before or 0,
        )
        self._emit(body)

    def go(self, to: int | None) -> None:
        """Continue after the entry number `to`, or at the beginning if `to` is None. The next entries form a new
        branch."""
        self.end_step()
        if to != self.leaf:
            if self._stop != _DONE:
                self.end_turn()
            self._moves.append(
                MoveRecord(
                    session=self.session_id,
                    from_leaf=self.leaf,
                    to_leaf=to,
                    reason="rewind",
                    created_ms=self._now_ms,
                )
            )
            self.leaf = to

    def go_to_turn(self, turn: int) -> None:
        """Continue after the end of an earlier turn."""
        self.end_step()
        if turn != self.turn:
            self.go(self._ends.get(turn))

    def undo_turns(self, number: int) -> None:
        """Continue before the last `number` turns."""
        self.end_step()
        to = self.leaf
        for _ in range(min(number, self._newest_turn)):
            turn = 0 if to is None else self._turns[to - 1]
            if turn not in self._before:
                break
            to = self._before[turn]
        self.go(to)

    def write_to(self, file: BinaryIO) -> int:
        """Write the conversation as lines of a crow export. Return the number of lines."""
        self.end_turn()
        created_ms = self._now_ms if self.created_ms is None else self.created_ms
        session = SessionRecord(
            id=self.session_id,
            cwd=self._cwd,
            title=self.title or self._first_prompt or None,
            title_by_user=self.title_by_user,
            parent_id=self.parent_id,
            forked_from=None,
            leaf=self.leaf,
            turn=self._newest_turn,
            listed=self._has_prompt or self.messages > 0,
            archived=self.archived,
            created_ms=created_ms,
            updated_ms=max(self.updated_ms, created_ms),
        )
        file.write(line_of(ConversationRecord(created_ms=created_ms)))
        file.write(line_of(session))
        self._spool.seek(0)
        while piece := self._spool.read(1024 * 1024):
            file.write(piece)
        for move in self._moves:
            file.write(line_of(move))
        return 2 + self.lines + len(self._moves)

    def _current(self) -> _Step:
        if self._step is None:
            self.answer()
        assert self._step is not None
        return self._step

    def _emit_result(self, ref: CallRef, call: ToolCall, announcement: Announcement, found: _Result) -> None:
        if found.title:
            announcement = Announcement(
                title=in_title(found.title),
                kind=announcement.kind,
                locations=announcement.locations,
                diffs=announcement.diffs,
            )
        self._emit(
            entries.ToolResult(
                call=ref,
                name=call.name,
                text=found.text,
                is_error=found.is_error,
                duration_ms=found.duration_ms,
                announcement=announcement,
                cut=_CUT_CHARS if len(found.text) > _CUT_CHARS else None,
                images=found.images,
            )
        )

    def _emit(
        self,
        body: Body,
        *,
        model: str = "",
        usage: Usage | None = None,
        cost: float | None = None,
        opens_turn: bool | None = None,
    ) -> int:
        """Write an entry after the leaf, and return its number. `opens_turn` is true for a prompt, false for the end of
        a turn, and None for other entries."""
        stored = encode(body, shares_texts=False)
        text = stored.text if stored.spilled is None else stored.blobs[stored.spilled].decode()
        for name, data in stored.blobs.items():
            if name != stored.spilled and name not in self._blobs:
                self._blobs.add(name)
                self._write(blob_record(name, data))
        is_open = bool(self.leaf is not None and self._open[self.leaf - 1]) if opens_turn is None else opens_turn
        number, turn = len(self._turns) + 1, self._newest_turn if opens_turn else self.turn
        record = EntryRecord(
            id=number,
            parent=self.leaf,
            session=self.session_id,
            turn=turn,
            model=model,
            usage=usage,
            cost=cost,
            estimate=None,
            created_ms=self._now_ms,
            kind=stored.kind,
            body={},
        )
        self._write(record, text)
        self._turns.append(turn)
        self._open.append(is_open)
        self._ends[turn] = self.leaf = number
        return number

    def _write(self, record: EntryRecord | BlobRecord, body: str | None = None) -> None:
        self._spool.write(line_of(record, body=body))
        self.lines += 1

    def _message_id(self) -> str:
        """Return an id for a message. Every import of this session gives the message the same id."""
        return f"msg_{hashlib.sha256(f'{self.session_id} {len(self._turns)}'.encode()).hexdigest()[:24]}"


@dataclass(slots=True)
class _Step:
    """An answer and the results of its calls."""

    key: str | None
    """The id of the answer in the imported session, or None if it has none. Messages with the same key are parts of one
    answer."""
    model: str
    time_ms: int
    """Unix milliseconds."""
    is_rest: bool = False
    """Whether it continues an answer whose usage is already counted."""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, ToolCall, Announcement]] = field(default_factory=list)
    """The calls, each with the id that it has in the imported session."""
    newest: dict[str, int] = field(default_factory=dict)
    """Maps each of these ids to the index in `calls` of the newest call that has the id."""
    results: dict[int, _Result] = field(default_factory=dict)
    """Maps the index of a call to its result."""
    usage: tuple[Usage, float | None] | None = None
    """The usage, and the cost in US dollars."""
    finish: FinishReason = "stop"

    @property
    def is_empty(self) -> bool:
        return not (self.texts or self.thoughts or self.calls)


@dataclass(slots=True)
class _Result:
    """The result of a tool call."""

    text: str
    images: tuple[Image, ...]
    is_error: bool
    duration_ms: int
    title: str
    time_ms: int
    """When the result arrived, in Unix milliseconds."""


NewConversation: TypeAlias = Callable[..., ConversationBuilder]
"""A function `new(session_id, parent_id=None)` that begins a conversation. The caller of the importer writes the
conversations to the export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A session of another tool that can be imported."""

    tool: str
    place: str
    """Tells the user where the session is."""
    session_id: str = ""
    """The session's id in crow, or empty if this id is not known until the session is read."""
    parent_id: str | None = None
    updated_ms: int
    """Unix milliseconds. Sessions are sorted by this time."""
    read: Callable[[NewConversation, Problems], None] = field(repr=False)
    """Builds the session's conversations."""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).digest()[:16]
