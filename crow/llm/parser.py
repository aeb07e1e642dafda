"""Builds one answer from the events of a stream. Each wire has a subclass that reads its own events.

The base class turns pieces of text, reasoning and tool calls into deltas and one complete answer. Text that may turn
out to be reasoning or a tool call is held back until this is decided, so that only text of the answer is shown. The
result does not depend on how the bytes are split into pieces.
"""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import ClassVar, TypeAlias

from crow.domain.errors import AnswerTooLong, ContextOverflow, ModelError, ProtocolError
from crow.domain.messages import Answer, FinishReason, JsonObject, ToolCall, ToolSpec, Usage, WireName
from crow.domain.text import on_one_line
from crow.domain.tokens import estimate_text
from crow.llm import WIRE_TITLES, Attempt, TextDelta, ThoughtDelta
from crow.llm.errors import ErrorBody, Origin, find_error, model_error, page_title
from crow.llm.reasoning import ThinkSplitter
from crow.llm.sse import SurrogateJoiner, chunks_in, is_end, is_keep_alive, replace_lone
from crow.llm.text_tool_calls import CallDetector
from crow.llm.tool_calls import MAX_CALLS, new_call_id
from crow.llm.usage import merge_usage

MAX_CHARS = 4_000_000
"""The limit for one answer in characters: text, reasoning and tool arguments together."""

Piece: TypeAlias = TextDelta | ThoughtDelta

LOOP_CHARS = 16_384
"""An answer is cut off if this many characters in a row only repeat one passage."""
_MAX_PASSAGE_CHARS = 2_048
_LOOP_STEP_CHARS = 4_096

_DECODER = json.JSONDecoder(strict=False)
_MAX_BLANKS = 1000
"""Only this many of the blanks before the first word of a thought are kept."""


class _LoopDetector:
    """Detects that the end of a text only repeats one passage. The text is checked after every `_LOOP_STEP_CHARS`
    characters. `passage` is the repeated passage, or empty."""

    def __init__(self) -> None:
        self.passage = ""
        self._tail = ""
        self._pieces: list[str] = []
        self._chars = 0

    def feed(self, piece: str) -> None:
        """Add the next piece of the text."""
        self._pieces.append(piece)
        self._chars += len(piece)
        if self._chars >= _LOOP_STEP_CHARS:
            self._tail = "".join((self._tail, *self._pieces))[-LOOP_CHARS:]
            self._pieces, self._chars = [], 0
            self.passage = _repeated_passage(self._tail) if len(self._tail) == LOOP_CHARS else ""


def _repeated_passage(text: str) -> str:
    """Return the shortest passage, of at most `_MAX_PASSAGE_CHARS` characters, that repeats throughout `text`.
    Return an empty text if there is none."""
    end, at = text[-64:], len(text) - 64
    for _ in range(64):  # the last 64 characters may also occur inside the passage
        at = text.rfind(end, max(0, len(text) - 64 - _MAX_PASSAGE_CHARS), at + 63)
        if at < 0:
            break
        period = len(text) - 64 - at
        if text.startswith(text[period:]):
            return text[-period:]
    return ""


class AnswerParser(ABC):
    """Parses the events of one answer. Call `feed` with the data of events as they arrive, then `flush`, then `finish`.

    The joined texts of all `TextDelta`s are the text of the answer and of `partial()`. In the same way, all
    `ThoughtDelta`s together are the thought.

    An answer passes through these states: events arrive; `is_finished` (an event announced the end, but usage may
    follow); `is_done` (the last event arrived, and later ones are ignored); and after `flush` or `finish`, ended (the
    held-back text was sorted, and `_ending` or `_error` is set). A broken stream goes from any of these states to the
    last one.
    """

    wire: ClassVar[WireName]
    kind: ClassVar[str]
    """The name of the content of the wire's streams in error messages, such as `a chat completion`."""

    plain_ends: ClassVar[frozenset[str | None]]
    """The provider's words for an answer that is simply complete. Error messages leave them out."""

    def __init__(
        self, tools: Sequence[ToolSpec] = (), *, origin: Origin | None = None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self._origin = origin or Origin()
        self._detector = CallDetector({tool.name: tool for tool in tools}, new_id=new_id)
        self._splitter = ThinkSplitter()
        self._text_joiner = SurrogateJoiner()
        self._thought_joiner = SurrogateJoiner()
        self._content: list[str] = []
        """Content that was not yet separated into thought and text."""
        self._pieces: list[tuple[type[Piece], str]] = []
        """Thought and text that `feed` or `flush` will return."""
        self._text = io.StringIO()
        self._thought = io.StringIO()
        self._answer_loop = _LoopDetector()
        self._thought_loop = _LoopDetector()
        self._chars = 0
        """The number of characters of content and thoughts received, including those beyond the limit."""
        self._blank_thought = ""
        """Blanks before the first word of the thought."""
        self._reasoning_field: str | None = None
        self._has_deltas = False
        self._has_thought = False
        self._is_refused = False
        self._usage: Usage | None = None
        self._error: ModelError | None = None
        self._is_ended = False
        self._ending: tuple[FinishReason, tuple[ToolCall, ...]] | None = None
        """How the answer ended, and its calls. None while events arrive, or if the answer failed."""
        self.is_done = False
        self.error_body: ErrorBody | None = None
        """The error that an event reported, or None."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether an event announced the end. Usage may still follow."""

    @property
    @abstractmethod
    def _size(self) -> int:
        """The number of characters received, including those beyond the limit."""

    @property
    @abstractmethod
    def _has_too_many_calls(self) -> bool:
        """Whether calls beyond `MAX_CALLS` were left out."""

    @property
    @abstractmethod
    def _end_word(self) -> str | None:
        """The provider's word for how the answer ended, or None if no event has said so."""

    @abstractmethod
    def _read_event(self, event: dict[str, object]) -> None:
        """Read one event. :raises ~crow.domain.errors.ModelError: the event carries an error."""

    @abstractmethod
    def _finish_reason(self) -> FinishReason:
        """Return how the answer ended. :raises ~crow.domain.errors.ModelError: the answer broke off or failed."""

    @abstractmethod
    def _finish_calls(self, *, is_cut: bool) -> tuple[ToolCall, ...]:
        """Return the calls in order. `is_cut` means that the output limit cut the last call."""

    @abstractmethod
    def _opaque(self) -> JsonObject:
        """Return the fields that are sent back to the endpoint unchanged. Called by `finish`, when `_ending` is set."""

    def feed(self, events: Iterable[str]) -> list[Piece]:
        """Return the deltas in these events, in the order in which they are to be shown. Adjacent deltas of the same
        kind are joined.

        :raises ~crow.domain.errors.ModelError: an event carries an error or is not JSON, or the answer is too long. To
        get the deltas from before the error, call `flush`.
        """
        try:
            for event_data in events:
                if not self.is_done:
                    self._read(event_data)
        except RecursionError:
            raise ProtocolError(f"{self._origin.endpoint} sent an event that nests too deeply to be read.") from None
        finally:
            self._read_content()
        limit = f"{MAX_CHARS:,} characters of text, reasoning and tool arguments" if self._size > MAX_CHARS else ""
        if self._has_too_many_calls:
            limit = f"{MAX_CALLS:,} tool calls"
        if limit:
            self._error = AnswerTooLong(
                f"The answer from {self._origin.endpoint} was cut off after {limit}; the model may be repeating "
                "itself. The part that was shown is kept, but none of the tool calls ran. Prompt again, or limit "
                "answers with max_output_tokens."
            )
            raise self._error
        if (self._answer_loop.passage or self._thought_loop.passage) and not self.is_finished:
            self._error = self._loop_error()
            raise self._error
        return self._take_pieces()

    def flush(self) -> list[Piece]:
        """Tell the parser that the stream has ended. Return the deltas for held-back text, without tool calls. A second
        call returns nothing more."""
        self._end()
        return self._take_pieces()

    def finish(self) -> Answer:
        """Return the complete answer.

        :raises ~crow.domain.errors.ModelError: the endpoint reported a failure.
        :raises ~crow.domain.errors.ProtocolError: the answer is incomplete or empty.
        """
        self._end()
        if self._error is not None or self._ending is None:
            raise self._error or ProtocolError("The answer broke off.")
        finish, calls = self._ending
        shown = self.partial()
        if not (shown.text.strip() or calls or finish in {"refusal", "paused"}):
            self._check_empty(finish, has_thought=bool(shown.thought))
        return replace(
            shown,
            calls=calls,
            finish="tool_calls" if calls and finish in {"stop", "paused"} else finish,
            opaque=self._opaque(),
            wire=self.wire,
        )

    def partial(self) -> Answer:
        """Return the part of the answer that was shown so far, without its tool calls."""
        return Answer(
            text=self._text.getvalue(),
            thought=self._thought.getvalue(),
            finish="interrupted",
            usage=self._usage,
            reasoning_field=self._reasoning_field,
            wire=self.wire,
        )

    def attempt(self) -> Attempt:
        """Return the usage that the endpoint has reported so far, and an estimate of the output tokens that have
        arrived."""
        shown = (self._text.getvalue(), self._thought.getvalue())
        others = max(0, self._size - sum(map(len, shown)))  # characters of held-back text and of tool arguments
        return Attempt(usage=self._usage, output_tokens=sum(map(estimate_text, shown)) + (others + 3) // 4)

    @property
    def has_begun(self) -> bool:
        """Whether a part of an answer, or a report of its usage, has arrived."""
        return self._has_deltas or self.has_content or self._usage is not None

    @property
    def has_content(self) -> bool:
        """Whether a character of text, reasoning or a tool call has arrived."""
        return self._size > 0

    def _loop_error(self) -> AnswerTooLong:
        what, loop = ("answer", self._answer_loop) if self._answer_loop.passage else ("reasoning", self._thought_loop)
        passage = replace_lone(" ".join(loop.passage.split())[:60])
        return AnswerTooLong(
            f"The {what} from {self._origin.endpoint} was cut off, because its last {LOOP_CHARS:,} characters repeat "
            f'the same {len(loop.passage):,} characters: "{passage}". The part that was shown is kept, but none of the '
            "tool calls ran. Prompt again in other words, or choose another model."
        )

    def _take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return [
            kind(text="".join(text for _, text in neighbours))
            for kind, neighbours in groupby(pieces, key=lambda piece: piece[0])
        ]

    def _read(self, event_data: str) -> None:
        try:
            # `raw_decode` is faster than `decode`, which also looks for blanks around the value.
            chunk, end = _DECODER.raw_decode(event_data)
        except (ValueError, RecursionError):
            chunk, end = None, -1
        if end != len(event_data):
            self._read_other(event_data)
        elif type(chunk) is dict:
            self._read_event(chunk)
        elif isinstance(chunk, list):
            self._raise_error(chunk)
        elif isinstance(chunk, str) and is_end(chunk):
            self._read_other(chunk)

    def _read_other(self, event_data: str) -> None:
        """Read data that is not one JSON object: the end marker, wrongly framed chunks, or something that can be
        ignored."""
        data = event_data.strip()
        if len(data) < len(event_data):
            self._read(data)
            return
        if is_end(data):
            self.is_done = True
            return
        if not data or self.is_finished or is_keep_alive(data):
            return
        chunks, is_done = chunks_in(data)
        if not chunks:
            who, title = self._origin.endpoint, page_title(data)
            words = on_one_line(replace_lone(data[:200] if title is None else title))
            if title is None:
                raise ProtocolError(f"{who} sent something other than {self.kind}: {words}")
            page = f'{who} answered with a web page ("{words}") instead of {self.kind}.'
            raise ProtocolError(f"{page} Check the base URL; it usually ends in /v1.")
        for chunk in chunks:
            self._read_event(chunk)
        self.is_done = self.is_done or is_done

    def _raise_error(self, event: object) -> None:
        """Raise the error that `event` carries, if any."""
        self.error_body = find_error(event)
        if self.error_body is not None:
            raise model_error(self.error_body, self._origin)

    def _refuse_other_wire(self, event: JsonObject) -> None:
        """Raise an error if the answer begins with an event of another wire."""
        kind = str(event.get("type") or "")
        wire: WireName | None = "chat" if "choices" in event else None
        if kind.startswith("response.") or event.get("object") == "response":
            wire = "responses"
        elif kind.startswith(("message_", "content_block_")):
            wire = "messages"
        if wire is None or wire == self.wire or self.has_begun:
            return
        other = f"an answer of its {WIRE_TITLES[wire]} API"
        raise ProtocolError(f'{self._origin.endpoint} sent {other} instead of {self.kind}. Set wire = "{wire}" for it.')

    def _add_usage(self, usage: Usage | None) -> None:
        self._usage = merge_usage(self._usage, usage)

    def _read_thought(self, thought: str) -> None:
        if thought:
            self._read_content()
            self._add_thought(self._thought_joiner.feed(self._within_limit(thought)))

    def _read_content(self) -> None:
        """Separate the new content into thought, text, and a part that must be held back."""
        if self._content:
            content, self._content = "".join(self._content), []
            self._split(self._text_joiner.feed(self._within_limit(content)))

    def _split(self, content: str) -> None:
        thought, text = self._splitter.feed(content)
        if self._splitter.found and self._reasoning_field is None:
            self._reasoning_field = "content"
        self._add_thought(self._thought_joiner.feed(thought) if thought else "")
        self._detector.drop_end_tokens = self._splitter.has_removed_tokens
        self._add_text(self._detector.feed(text) if text else "")

    def _add_text(self, text: str) -> None:
        if text:
            self._answer_loop.feed(text)
            self._text.write(text)
            self._pieces.append((TextDelta, text))

    def _add_thought(self, thought: str) -> None:
        if not self._has_thought:
            # Blanks alone are not a thought. They are held back until the first word.
            thought, self._blank_thought = self._blank_thought + thought, ""
            if thought.isspace():
                self._blank_thought = thought[-_MAX_BLANKS:]
                return
        if thought:
            self._has_thought = True
            self._thought_loop.feed(thought)
            self._thought.write(thought)
            self._pieces.append((ThoughtDelta, thought))

    def _within_limit(self, piece: str) -> str:
        """Return as much of `piece` as the character limit allows. All characters of `piece` are counted."""
        room = max(0, MAX_CHARS - self._size)
        self._chars += len(piece)
        return piece[:room]

    def _end(self) -> None:
        """Sort the held-back text into thought, text and tool calls, because no more text follows. Only the first call
        has an effect."""
        if self._is_ended:
            return
        self._is_ended = True
        # Text passes through the joiner before it reaches the splitter, so the joiner is finished first.
        self._read_content()
        self._split(self._text_joiner.finish())
        thought, text = self._splitter.finish()
        self._add_thought(self._thought_joiner.feed(thought) + self._thought_joiner.finish())
        self._add_text(self._detector.feed(text) if text else "")
        try:
            if self._error is not None:
                raise self._error
            finish = self._finish_reason()
        except ModelError as error:
            self._error = error
            self._add_text(self._detector.interrupt())
            return
        is_refusal = finish == "refusal"
        calls = () if is_refusal else self._finish_calls(is_cut=finish == "length")
        text, written = self._detector.finish(may_call=not calls and not is_refusal)
        self._add_text(text)
        self._ending = finish, calls or written

    def _check_empty(self, finish: FinishReason, *, has_thought: bool) -> None:
        """Raise the error for an answer that has neither text nor calls. Do not raise an error if the output limit
        explains why the answer is empty."""
        who, word = self._origin.endpoint, self._end_word
        if finish == "length":
            if has_thought or self._usage is None or self._usage.output_tokens != 0:
                return
            problem = "The request left the model no room for an answer: the length limit was reached before any text."
            raise ContextOverflow(problem, size=self._usage.input_tokens)
        if has_thought:
            raise ProtocolError(f"{who} sent reasoning but no answer. Ask again, or try another model.")
        if word not in self.plain_ends:
            raise ProtocolError(f'{who} sent an empty answer (finish reason "{word}"). Ask again.')
        raise ProtocolError(f"{who} sent an empty answer. Ask again, or try another model.")
