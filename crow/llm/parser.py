"""Parses one streamed chat completion: takes the data of events and returns deltas and one complete answer.

The parser does not rely on declared types: it uses known members if they have the right type and ignores everything
else. Text that may turn out to be reasoning or a tool call is held back until this is decided, so that only text of the
answer is shown. The result does not depend on how the bytes are split into pieces.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Literal, TypeAlias

from crow.domain.errors import AnswerTooLong, ContextOverflow, ModelError, Overloaded, ProtocolError
from crow.domain.messages import Answer, FinishReason, ToolCall, ToolSpec, Usage
from crow.domain.tokens import estimate_text
from crow.llm import Attempt, TextDelta, ThoughtDelta
from crow.llm.errors import ErrorBody, Origin, find_error, model_error, page_title
from crow.llm.reasoning import ReasoningDetails, ThinkSplitter, content_pieces, details_text, thought_of
from crow.llm.sse import SurrogateJoiner, chunks_in, is_end, is_keep_alive, replace_lone, replace_lone_in
from crow.llm.text_tool_calls import CallDetector
from crow.llm.tool_calls import MAX_CALLS, CallAssembler, new_call_id

MAX_CHARS = 4_000_000
"""The limit for one answer in characters: text, reasoning and tool arguments together."""

Piece: TypeAlias = TextDelta | ThoughtDelta

LOOP_CHARS = 16_384
"""An answer is cut off if this many characters in a row only repeat one passage."""
MAX_PASSAGE_CHARS = 2_048
_LOOP_STEP_CHARS = 4_096

_DECODER = json.JSONDecoder(strict=False)
_MAX_BLANKS = 1000


class LoopDetector:
    """Detects that a text keeps repeating one passage. `passage` is the repeated passage, or empty. The text is checked
    once per `_LOOP_STEP_CHARS` characters."""

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
            self.passage = repeated_passage(self._tail) if len(self._tail) == LOOP_CHARS else ""


def repeated_passage(text: str) -> str:
    """Return the shortest passage, of at most `MAX_PASSAGE_CHARS` characters, that repeats throughout `text`. Return an
    empty text if there is none."""
    end, at = text[-64:], len(text) - 64
    for _ in range(64):  # the last 64 characters may also occur inside the passage
        at = text.rfind(end, max(0, len(text) - 64 - MAX_PASSAGE_CHARS), at + 63)
        if at < 0:
            break
        period = len(text) - 64 - at
        if text.startswith(text[period:]):
            return text[-period:]
    return ""


class StreamParser:
    """Parses the events of one answer. Call `feed` with the data of events as they arrive, then `flush`, then `finish`.

    The joined texts of all `TextDelta`s are the text of the answer and of `partial()`. In the same way, all
    `ThoughtDelta`s together are the thought. If an event reported an error, `error_body` describes this error.
    `is_done` means that `[DONE]` arrived. Everything after `[DONE]` is ignored.
    """

    def __init__(
        self, tools: Sequence[ToolSpec] = (), *, origin: Origin | None = None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self._origin = origin or Origin()
        self._calls = CallAssembler(tools, new_id=new_id)
        self._legacy_calls = CallAssembler(tools, new_id=new_id)
        self._detector = CallDetector({tool.name: tool for tool in tools}, new_id=new_id)
        self._splitter = ThinkSplitter()
        self._text_joiner = SurrogateJoiner()
        self._thought_joiner = SurrogateJoiner()
        self._details = ReasoningDetails()
        self._content: list[str] = []
        self._pieces: list[tuple[type[Piece], str]] = []
        self._text = io.StringIO()
        self._thought = io.StringIO()
        self._answer_loop = LoopDetector()
        self._thought_loop = LoopDetector()
        self._chars = 0
        self._blank_thought = ""
        self._reasoning_field: str | None = None
        self._has_deltas = False
        self._has_thought = False
        self._is_refused = False
        self._finish_word: str | None = None
        self._usage: Usage | None = None
        self._error: ModelError | None = None
        self._is_ended = False
        self._ending: tuple[FinishReason, tuple[ToolCall, ...]] | None = None
        self.is_done = False
        self.error_body: ErrorBody | None = None

    @property
    def is_finished(self) -> bool:
        """Whether a finish reason or `[DONE]` announced the end. Usage may still follow."""
        return self.is_done or self._finish_word is not None

    def feed(self, events: Iterable[str]) -> list[Piece]:
        """Return the deltas in these events, in the order in which they are to be shown. Adjacent deltas of the same
        kind are joined.

        :raises ~crow.domain.errors.ModelError: an event carries an error or is not JSON, or the answer is too long. To
        get what came before the error, call `flush`.
        """
        try:
            for event_data in events:
                if not self.is_done:
                    self._read(event_data)
        finally:
            self._read_content()
        limit = f"{MAX_CHARS:,} characters of text, reasoning and tool arguments" if self._size > MAX_CHARS else ""
        if self._calls.has_too_many:
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
        if not (shown.text.strip() or calls or finish == "refusal"):
            self._check_empty(finish, has_thought=bool(shown.thought))
        return replace(
            shown,
            calls=calls,
            finish="tool_calls" if calls and finish == "stop" else finish,
            opaque=replace_lone_in(self._details.opaque()),
        )

    def partial(self) -> Answer:
        """Return the part of the answer that was shown so far, without its tool calls."""
        return Answer(
            text=self._text.getvalue(),
            thought=self._thought.getvalue(),
            finish="interrupted",
            usage=self._usage,
            reasoning_field=self._reasoning_field,
        )

    def attempt(self) -> Attempt:
        """Return the usage that the endpoint has reported so far, and an estimate of the tokens that it has sent."""
        shown = (self._text.getvalue(), self._thought.getvalue())
        others = max(0, self._size - sum(map(len, shown)))  # characters of held-back text and of tool arguments
        return Attempt(usage=self._usage, output_tokens=sum(map(estimate_text, shown)) + (others + 3) // 4)

    @property
    def has_begun(self) -> bool:
        """Whether a part of an answer, or a report of its usage, has arrived."""
        return self._has_deltas or self._size > 0 or self._usage is not None

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
            self._read_chunk(chunk)
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
            if title is None:
                raise ProtocolError(f"{who} sent something other than a chat completion: {replace_lone(data[:200])}")
            page = f'{who} answered with a web page ("{replace_lone(title)}") instead of a chat completion.'
            raise ProtocolError(f"{page} Check the base URL; it usually ends in /v1.")
        for chunk in chunks:
            self._read_chunk(chunk)
        self.is_done = is_done

    def _read_chunk(self, chunk: dict[str, object]) -> None:
        choices = chunk.get("choices")
        if "error" in chunk or not choices:
            self._raise_error(chunk)
        if chunk.get("usage") is not None:
            self._add_usage(chunk["usage"])
        if type(groq := chunk.get("x_groq")) is dict:
            self._add_usage(groq.get("usage"))
        if type(choices) is dict:
            choices = [choices]
        if type(choices) is not list:
            return
        for choice in choices:
            if type(choice) is dict and (not (index := choice.get("index")) or index == "0"):
                self._read_choice(choice)
                if "finish_reason" in chunk:
                    self._note_finish(chunk["finish_reason"])
                return

    def _raise_error(self, chunk: object) -> None:
        """Raise the error that `chunk` carries, if any."""
        if self.is_done or (self._finish_word is not None and _ending_of(self._finish_word) != "failed"):
            # The answer is complete, so a later failure (for example while the server counts tokens) does not matter.
            return
        self.error_body = find_error(chunk)
        if self.error_body is not None:
            raise model_error(self.error_body, self._origin)

    def _add_usage(self, report: object) -> None:
        self._usage = _merge_usage(self._usage, _read_usage(report))

    def _read_choice(self, choice: dict[str, object]) -> None:
        if (word := choice.get("finish_reason")) is not None:
            self._note_finish(word)
        if "usage" in choice:
            self._add_usage(choice["usage"])
        if choice.get("error"):
            self._raise_error({"error": choice["error"]})
        delta = choice.get("delta")
        if type(delta) is not dict:
            self._read_without_delta(choice)
            return
        self._has_deltas = True
        if len(delta) == 1 and type(content := delta.get("content")) is str:
            self._content.append(content)
        else:
            self._read_delta(delta)

    def _read_without_delta(self, choice: dict[str, object]) -> None:
        """Read a choice that has a whole message or plain text instead of a delta."""
        message = choice.get("message")
        if type(message) is not dict:
            text = choice.get("delta") or choice.get("text")
            if type(text) is str:
                self._content.append(text)
        elif self._has_deltas:
            # The server repeats the whole answer at the end of the stream. Read only the part that came in no delta.
            self._read_content()
            text, so_far = message.get("content"), self._text.getvalue() + self._detector.held + self._splitter.held
            rest = text[len(so_far) :] if isinstance(text, str) and text.startswith(so_far) else ""
            self._read_delta({"content": rest, "tool_calls": None if self._calls else message.get("tool_calls")})
        else:
            self._read_delta(message)

    def _read_delta(self, delta: dict[str, object]) -> None:
        field, thought = thought_of(delta)
        self._reasoning_field = self._reasoning_field or field
        if details := delta.get("reasoning_details"):
            self._details.add(details)
            if not thought:
                thought = details_text(details)
                self._reasoning_field = self._reasoning_field or "reasoning_details"
        self._read_thought(thought)
        content = delta.get("content")
        if type(content) is str:
            self._content.append(content)
        elif content is not None:
            for kind, piece in content_pieces(content):
                if kind == "thought":
                    self._reasoning_field = self._reasoning_field or "content"
                    self._read_thought(piece)
                else:
                    self._content.append(piece)
        refusal = delta.get("refusal")
        if type(refusal) is str and refusal:
            self._is_refused = True
            self._content.append(refusal)
        if calls := delta.get("tool_calls"):
            self._calls.add_all(calls)
        legacy = delta.get("function_call")
        if type(legacy) is dict:
            self._legacy_calls.add({"index": 0, "function": legacy})
        if "finish_reason" in delta:
            self._note_finish(delta["finish_reason"])

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
        self._detector.drop_end_tokens = self._splitter.is_dressed
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

    @property
    def _size(self) -> int:
        """The number of characters received, including those beyond the limit."""
        return self._chars + self._calls.size + self._legacy_calls.size + self._details.size

    def _note_finish(self, value: object) -> None:
        if self._finish_word is None:
            self._finish_word = _finish_word(value)

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
        calls = () if is_refusal else (self._calls or self._legacy_calls).finish(is_cut=finish == "length")
        text, written = self._detector.finish(may_call=not calls and not is_refusal)
        self._add_text(text)
        self._ending = finish, calls or written

    def _finish_reason(self) -> FinishReason:
        """Return how the answer ended.

        :raises ~crow.domain.errors.ModelError: the answer broke off or failed.
        """
        who, word = self._origin.endpoint, self._finish_word
        if word is None and not self.is_done:
            raise ProtocolError(f"The answer from {who} broke off: the stream ended without a finish reason.")
        ending = _ending_of(word) if word is not None else "stop"
        if ending == "failed":
            raise Overloaded(f'{who} stopped before the answer was complete (finish reason "{word}").')
        if ending == "too_long":
            raise ContextOverflow(f'The request is too long for the model (finish reason "{word}").')
        if ending == "malformed":
            if not (self._calls or self._legacy_calls):
                raise ProtocolError(f'{who} could not read a tool call that the model wrote (finish reason "{word}").')
            ending = "stop"
        return "refusal" if self._is_refused else ending

    def _check_empty(self, finish: FinishReason, *, has_thought: bool) -> None:
        """Raise the error for an answer that has neither text nor calls. Do not raise an error if the output limit
        explains why the answer is empty."""
        who, word = self._origin.endpoint, self._finish_word
        if finish == "length":
            if has_thought or self._usage is None or self._usage.output_tokens != 0:
                return
            problem = "The request left the model no room for an answer: the length limit was reached before any text."
            raise ContextOverflow(problem, size=self._usage.input_tokens)
        if has_thought:
            raise ProtocolError(f"{who} sent reasoning but no answer. Ask again, or try another model.")
        if word not in {None, "stop", "tool_calls"}:
            raise ProtocolError(f'{who} sent an empty answer (finish reason "{word}"). Ask again.')
        raise ProtocolError(f"{who} sent an empty answer. Ask again, or try another model.")


_Ending: TypeAlias = FinishReason | Literal["failed", "too_long", "malformed"]
"""One of crow's finish reasons, or the reason why there is no answer."""

_ENDINGS: tuple[tuple[_Ending, str], ...] = (
    ("length", "length max_tokens max_output_tokens max_completion_tokens max_length model_length incomplete"),
    ("refusal", "content_filter content-filter sensitive refusal safety recitation blocklist spii image_safety"),
    ("refusal", "prohibited_content guardrail_intervened content_filtered error_toxic language"),
    ("failed", "error abort aborted network_error insufficient_system_resource cancelled canceled failed"),
    ("too_long", "model_context_window_exceeded context_window_exceeded context_length_exceeded"),
)
_SIMILAR_ENDINGS: tuple[tuple[_Ending, str], ...] = (
    ("malformed", r"malformed"),
    ("failed", r"(?:_|\b)error\b|timeout|timed_out|overloaded|failure|unavailable"),
    ("refusal", r"content_?filter|moderation|prohibited|safety"),
    ("length", r"max_?(?:new_|output_|completion_)?(?:tokens|length|output)|(?:length|token|output)_limit"),
    ("length", r"\Acontext_length\Z"),
)


def _finish_word(value: object) -> str | None:
    """Return the word in a `finish_reason`, in lower case. Return None if the value contains no word yet."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, Mapping):
        value = value.get("type") or value.get("reason")
    if not isinstance(value, str):
        return None
    word = re.sub(r"\A(?:finish_?reason[._:])|[\"'\s]+", "", value, flags=re.IGNORECASE).lower()
    return None if word in {"", "null", "none"} else word


def _ending_of(word: str) -> _Ending:
    """Return the meaning of a finish reason. An unknown word is treated as `stop`: if it stands for a failure and the
    answer is empty, an error is raised anyway."""
    for ending, words in _ENDINGS:
        if word in words.split():
            return ending
    return next((ending for ending, pattern in _SIMILAR_ENDINGS if re.search(pattern, word)), "stop")


def _read_usage(report: object) -> Usage | None:
    """Return the token counts from one report, or None if it contains none."""
    if not isinstance(report, Mapping):
        return None
    sent = _first_count(report, "prompt_tokens", "input_tokens")
    made = _first_count(report, "completion_tokens", "output_tokens")
    in_details = report.get("prompt_tokens_details") or report.get("input_tokens_details")
    out_details = report.get("completion_tokens_details") or report.get("output_tokens_details")
    if (cached := _first_count(in_details, "cached_tokens")) is None:
        cached = _first_count(report, "prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    if sent is not None and report.get("prompt_tokens") is None:
        # Anthropic's input count does not include tokens that are read from the cache or written to it.
        sent += _first_count(report, "cache_read_input_tokens") or 0
        sent += _first_count(report, "cache_creation_input_tokens") or 0
    # OpenRouter, LiteLLM, Anthropic
    if (written := _first_count(in_details, "cache_write_tokens", "cache_creation_tokens")) is None:
        written = _first_count(report, "cache_creation_input_tokens")
    if (reasoning := _first_count(out_details, "reasoning_tokens")) is None:
        reasoning = _first_count(report, "reasoning_tokens")
    total = _first_count(report, "total_tokens")
    if reasoning and sent is not None and made is not None and total == sent + made + reasoning:
        # xAI counts reasoning in addition to the completion. All other providers include it in the completion.
        made += reasoning
    usage = Usage(
        input_tokens=sent,
        output_tokens=made,
        cached_tokens=cached,
        reasoning_tokens=reasoning,
        cache_write_tokens=written,
    )
    return None if usage == Usage() else usage


def _first_count(report: object, *keys: str) -> int | None:
    members: Mapping[str, object] = report if isinstance(report, Mapping) else {}
    for key in keys:
        value = members.get(key)
        if isinstance(value, str) and value.isdecimal() and len(value) < 13:
            value = int(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12:
            return int(value)
    return None


def _merge_usage(known: Usage | None, report: Usage | None) -> Usage | None:
    """Return `known`, updated with the counts in `report`. Reports are cumulative, so the newest count of each kind is
    used. If `known` is not None, a `report` in which both input and output are zero or missing is ignored."""
    if report is None or known is None:
        return report or known
    if not (report.input_tokens or report.output_tokens):
        return known
    stated = {each.name: value for each in fields(report) if (value := getattr(report, each.name)) is not None}
    return replace(known, **stated)
