"""One streamed chat completion: event data in, deltas and one whole answer out.

Nothing from the wire is trusted to have its declared type: what a chunk says in a known way is taken, the rest is
passed over. What may turn out to be reasoning or a tool call is held back until it is decided, so that the text that
was given out is the answer's text; any split of the same bytes gives the same answer.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from crow.domain.errors import AnswerTooLong, ContextOverflow, ModelError, Overloaded, ProtocolError
from crow.domain.messages import Answer, FinishReason, ToolCall, ToolSpec, Usage
from crow.llm import TextDelta, ThoughtDelta
from crow.llm.errors import ErrorBody, Origin, find_error, model_error, page_title
from crow.llm.reasoning import ReasoningDetails, ThinkSplitter, content_pieces, details_text, thought_of
from crow.llm.sse import chunks_in, is_end, is_filler
from crow.llm.surrogates import Joiner, mended, mended_members
from crow.llm.text_tool_calls import CallDetector
from crow.llm.tool_calls import CallAssembler, new_call_id

__all__ = ["MOST_CHARS", "Ending", "Piece", "StreamParser", "ending_of", "finish_word", "newer_usage", "read_usage"]

MOST_CHARS = 4_000_000
"""How much is taken of one answer: text, reasoning and tool arguments together."""

Piece: TypeAlias = TextDelta | ThoughtDelta

_DECODER = json.JSONDecoder(strict=False)


class StreamParser:
    """Feed the data of events as they come; then `flush`, then `finish`.

    The text of all `TextDelta`, joined, is the text of the answer, and of `partial()`; so it is for thoughts.
    `complaint`: the endpoint's own words, where an event carried an error.
    """

    def __init__(
        self, tools: Sequence[ToolSpec] = (), *, origin: Origin | None = None, mint: Callable[[], str] = new_call_id
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._origin = origin or Origin()
        self._calls = CallAssembler(tools, mint=mint)
        self._legacy_calls = CallAssembler(tools, mint=mint)
        self._detector = CallDetector(self._tools, new_id=mint)
        self._has_deltas = False
        self._splitter = ThinkSplitter()
        self._text_joiner = Joiner()
        self._thought_joiner = Joiner()
        self._content: list[str] = []
        self._given: list[tuple[type[Piece], list[str]]] = []
        self._text = io.StringIO()
        self._thought = io.StringIO()
        self._chars = 0
        self._blank_thought = ""
        self._details = ReasoningDetails()
        self._reasoning_field: str | None = None
        self._refused = False
        self._finish_word: str | None = None
        self._done = False
        self._error: ModelError | None = None
        self._has_thought = False
        self._is_ended = False
        self._ending: tuple[FinishReason, tuple[ToolCall, ...]] | None = None
        self._usage: Usage | None = None
        self.complaint: ErrorBody | None = None

    @property
    def is_done(self) -> bool:
        """`[DONE]` came: nothing that follows counts."""
        return self._done

    @property
    def is_finished(self) -> bool:
        """The end was announced, by a finish reason or `[DONE]`; usage may still follow."""
        return self._done or self._finish_word is not None

    @property
    def usage(self) -> Usage | None:
        """What was reported so far."""
        return self._usage

    def feed(self, events: Iterable[str]) -> list[Piece]:
        """The deltas of these events, in the order to be shown; neighbours of one kind are one delta.

        :raises ~crow.domain.errors.ModelError: an event carries an error, is no JSON, or the answer is too long. What
            came before it is given by `flush`.
        """
        try:
            for event_data in events:
                if not self._done:
                    self._read(event_data)
        finally:
            self._read_content()
        self._check_size()
        return self._take()

    def flush(self) -> list[Piece]:
        """The stream has ended: what was held back and is text. Called twice it gives nothing more."""
        self._end()
        return self._take()

    def finish(self) -> Answer:
        """The whole answer.

        :raises ~crow.domain.errors.ModelError: the endpoint said that it failed.
        :raises ~crow.domain.errors.ProtocolError: the answer is incomplete or empty.
        """
        self._end()
        if self._error is not None or self._ending is None:
            raise self._error or ProtocolError("The answer broke off.")
        finish, calls = self._ending
        text, thought = self._text.getvalue(), self._thought.getvalue()
        self._check_whole(finish, text=text, thought=thought, calls=calls)
        return Answer(
            text=text,
            thought=thought,
            calls=calls,
            finish="tool_calls" if calls and finish == "stop" else finish,
            usage=self._usage,
            opaque=mended_members(self._details.opaque()),
            reasoning_field=self._reasoning_field,
        )

    def partial(self) -> Answer:
        """What was given out so far, without calls."""
        return Answer(
            text=self._text.getvalue(),
            thought=self._thought.getvalue(),
            finish="interrupted",
            usage=self._usage,
            reasoning_field=self._reasoning_field,
        )

    def _take(self) -> list[Piece]:
        given, self._given = self._given, []
        return [kind(text="".join(pieces)) for kind, pieces in given]

    def _read(self, event_data: str) -> None:
        try:
            # Quicker than `decode`, which looks for blanks around the value.
            chunk, end = _DECODER.raw_decode(event_data)
        except (ValueError, RecursionError):
            chunk, end = None, -1
        if end != len(event_data):
            self._read_other(event_data)
        elif type(chunk) is dict:
            self._read_chunk(chunk)
        elif isinstance(chunk, list):
            self._raise_complaint(chunk)
        elif isinstance(chunk, str) and is_end(chunk):
            self._read_other(chunk)

    def _read_chunk(self, chunk: dict[str, object]) -> None:
        choices = chunk.get("choices")
        if "error" in chunk or not choices:
            self._raise_complaint(chunk)
        if chunk.get("usage") is not None or "x_groq" in chunk:
            self._read_usage(chunk)
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

    def _read_other(self, event_data: str) -> None:
        """Data that is no JSON object: the end, nothing, or several chunks whose framing is amiss."""
        data = event_data.strip()
        if len(data) < len(event_data):
            self._read(data)
            return
        if is_end(data):
            self._done = True
            return
        if not data or self.is_finished or is_filler(data):
            return
        chunks, is_done = chunks_in(data)
        if not chunks:
            title = page_title(data)
            shown = title if title is not None else data[:200]
            raise ProtocolError(f"{self._origin.endpoint} sent an event that is no JSON: {mended(shown)}")
        for chunk in chunks:
            self._read_chunk(chunk)
        self._done = is_done

    def _raise_complaint(self, chunk: object) -> None:
        if self._done or (self._finish_word is not None and ending_of(self._finish_word) != "failed"):
            # What fails after the end, such as the counting, takes nothing from the answer.
            return
        self.complaint = find_error(chunk)
        if self.complaint is not None:
            raise model_error(self.complaint, self._origin)

    def _read_usage(self, chunk: Mapping[str, object]) -> None:
        groq = chunk.get("x_groq")
        reports = (chunk.get("usage"), groq.get("usage") if isinstance(groq, Mapping) else None)
        for report in reports:
            self._usage = newer_usage(self._usage, read_usage(report))

    def _read_choice(self, choice: dict[str, object]) -> None:
        word = choice.get("finish_reason")
        if word is not None:
            self._note_finish(word)
        if "usage" in choice:
            self._usage = newer_usage(self._usage, read_usage(choice["usage"]))
        if choice.get("error"):
            self._raise_complaint({"error": choice["error"]})
        delta = choice.get("delta")
        if type(delta) is not dict:
            instead = self._delta_instead(choice)
            if instead is not None:
                self._read_delta(instead)
            return
        self._has_deltas = True
        if len(delta) == 1 and type(content := delta.get("content")) is str:
            self._content.append(content)
        else:
            self._read_delta(delta)

    def _delta_instead(self, choice: dict[str, object]) -> dict[str, object] | None:
        """What a choice without a delta adds: a message, or mere text."""
        message = choice.get("message")
        if type(message) is dict:
            if self._has_deltas:
                # The whole once more at its end: only what no delta brought is new.
                self._read_content()
                text, so_far = message.get("content"), self._text.getvalue() + self._detector.held + self._splitter.held
                rest = text[len(so_far) :] if isinstance(text, str) and text.startswith(so_far) else ""
                calls = None if self._calls else message.get("tool_calls")
                return {"content": rest, "tool_calls": calls}
            return message
        text = choice.get("delta") or choice.get("text")
        return {"content": text} if type(text) is str else None

    def _read_delta(self, delta: dict[str, object]) -> None:
        field, thought = thought_of(delta)
        if field is not None and self._reasoning_field is None:
            self._reasoning_field = field
        details = delta.get("reasoning_details")
        if details:
            self._details.add(details)
            if not thought:
                thought = details_text(details)
                self._reasoning_field = self._reasoning_field or "reasoning_details"
        if thought:
            self._read_content()
            self._add_thought(self._thought_joiner.feed(self._taken(thought)))
        content = delta.get("content")
        if type(content) is str:
            self._content.append(content)
        elif content is not None:
            for kind, piece in content_pieces(content):
                if kind == "thought":
                    self._reasoning_field = self._reasoning_field or "content"
                    self._read_content()
                    self._add_thought(self._thought_joiner.feed(self._taken(piece)))
                else:
                    self._content.append(piece)
        refusal = delta.get("refusal")
        if type(refusal) is str and refusal:
            self._refused = True
            self._content.append(refusal)
        calls = delta.get("tool_calls")
        if calls:
            self._calls.add_all(calls)
        legacy = delta.get("function_call")
        if type(legacy) is dict:
            self._legacy_calls.add({"index": 0, "function": legacy})
        if "finish_reason" in delta:
            self._note_finish(delta["finish_reason"])

    def _read_content(self) -> None:
        """Tell thought, text and what waits in the content that came."""
        if self._content:
            content, self._content = "".join(self._content), []
            self._add_content(self._text_joiner.feed(self._taken(content)))

    def _add_content(self, content: str) -> None:
        thought, text = self._splitter.feed(content)
        if self._splitter.found and self._reasoning_field is None:
            self._reasoning_field = "content"
        self._add_thought(self._thought_joiner.feed(thought) if thought else "")
        self._detector.drop_end_tokens = self._splitter.is_dressed
        self._add_text(self._detector.feed(text) if text else "")

    def _add_text(self, text: str) -> None:
        if text:
            self._text.write(text)
            self._give(TextDelta, text)

    def _add_thought(self, thought: str) -> None:
        if not self._has_thought:
            # Blanks alone are no thought; they wait for the first word.
            thought, self._blank_thought = self._blank_thought + thought, ""
            if thought.isspace():
                self._blank_thought = thought[-1000:]
                return
        if thought:
            self._has_thought = True
            self._thought.write(thought)
            self._give(ThoughtDelta, thought)

    def _give(self, kind: type[Piece], text: str) -> None:
        if self._given and self._given[-1][0] is kind:
            self._given[-1][1].append(text)
        else:
            self._given.append((kind, [text]))

    def _taken(self, piece: str) -> str:
        """As much of `piece` as there is room for."""
        room = max(0, MOST_CHARS - self._size)
        self._chars += len(piece)
        return piece[:room]

    @property
    def _size(self) -> int:
        """Characters that came, also those that were not taken."""
        return self._chars + self._calls.size + self._legacy_calls.size + self._details.size

    def _check_size(self) -> None:
        """:raises ~crow.domain.errors.AnswerTooLong: more came than is taken."""
        if self._size > MOST_CHARS:
            self._error = AnswerTooLong(
                f"The answer of {self._origin.endpoint} was stopped at {MOST_CHARS:,} characters of text, reasoning "
                "and tool arguments; the model may be repeating itself. What was shown is kept; none of its tool calls "
                "ran. Prompt again, or limit answers with max_output_tokens."
            )
            raise self._error

    def _end(self) -> None:
        """Decide what was held back."""
        if self._is_ended:
            return
        self._is_ended = True
        # An unfinished pair belongs to the text before an unfinished tag does.
        self._read_content()
        self._add_content(self._text_joiner.finish())
        thought, text = self._splitter.finish()
        self._add_thought(self._thought_joiner.feed(thought) + self._thought_joiner.finish())
        self._add_text(self._detector.feed(text) if text else "")
        try:
            if self._error is not None:
                raise self._error
            finish = self._finish()
        except ModelError as error:
            self._error = error
            self._add_text(self._detector.interrupt())
            return
        calls: tuple[ToolCall, ...] = ()
        if finish != "refusal":
            calls = (self._calls or self._legacy_calls).finish(is_cut=finish == "length")
        text, written = self._detector.finish(may_call=not calls and finish != "refusal")
        self._add_text(text)
        self._ending = finish, calls or written

    def _note_finish(self, value: object) -> None:
        if self._finish_word is None:
            self._finish_word = finish_word(value)

    def _finish(self) -> FinishReason:
        """Our word for how it ended. :raises ~crow.domain.errors.ModelError: it failed."""
        who, word = self._origin.endpoint, self._finish_word
        if word is None:
            if not self._done:
                raise ProtocolError(f"The answer of {who} broke off: the stream ended without a finish reason.")
            return "refusal" if self._refused else "stop"
        ending = ending_of(word)
        if ending == "failed":
            raise Overloaded(f'{who} broke off the answer (finish reason "{word}").')
        if ending == "too_long":
            raise ContextOverflow(f'The request is too long for the model (finish reason "{word}").')
        if ending == "malformed":
            if not (self._calls or self._legacy_calls):
                raise ProtocolError(f'{who} made a tool call that it could not read itself (finish reason "{word}").')
            ending = "stop"
        return "refusal" if self._refused else ending

    def _check_whole(self, finish: FinishReason, *, text: str, thought: str, calls: tuple[ToolCall, ...]) -> None:
        """An answer with nothing in it is an error, unless it says itself why."""
        if text.strip() or calls or finish == "refusal":
            return
        who = self._origin.endpoint
        if finish == "length":
            if thought or self._usage is None or self._usage.output_tokens != 0:
                return
            raise ContextOverflow(
                "The request leaves the model no room for an answer: it stopped at its length limit without a word.",
                size=self._usage.input_tokens,
            )
        if thought:
            raise ProtocolError(f"{who} sent reasoning but no answer. Ask again, or try another model.")
        if self._finish_word not in {None, "stop", "tool_calls"}:
            raise ProtocolError(f'{who} sent an empty answer (finish reason "{self._finish_word}"). Ask again.')
        raise ProtocolError(f"{who} sent an empty answer. Ask again, or try another model.")


# FROM llm.endings: How vendors call the end of an answer, and what each of their words means to us. Pure.


Ending: TypeAlias = FinishReason | Literal["failed", "too_long", "malformed"]
"""What an end means: one of our finish reasons, or that there is no answer."""

_WORDS: tuple[tuple[Ending, str], ...] = (
    ("stop", "stop end_turn eos eos_token end stop_sequence complete completed"),
    ("stop", "tool_calls function_call tool_use tool_call tool-calls"),
    ("length", "length max_tokens max_output_tokens max_completion_tokens max_length model_length incomplete"),
    ("refusal", "content_filter content-filter sensitive refusal safety recitation blocklist spii image_safety"),
    ("refusal", "prohibited_content guardrail_intervened content_filtered error_toxic language"),
    ("failed", "error abort aborted network_error insufficient_system_resource cancelled canceled failed"),
    ("too_long", "model_context_window_exceeded context_window_exceeded context_length_exceeded"),
)
_ENDINGS: dict[str, Ending] = {word: ending for ending, words in _WORDS for word in words.split()}
_FAMILIES: tuple[tuple[Ending, re.Pattern[str]], ...] = (
    ("malformed", re.compile(r"malformed")),
    ("failed", re.compile(r"(?:_|\b)error\b|timeout|timed_out|overloaded|failure|unavailable")),
    ("refusal", re.compile(r"content_?filter|moderation|prohibited|safety")),
    ("length", re.compile(r"max_?(?:new_|output_|completion_)?(?:tokens|length|output)|(?:length|token|output)_limit")),
    ("length", re.compile(r"\Acontext_length\Z")),
)
_DRESS = re.compile(r"\A(?:finish_?reason[._:])|[\"'\s]+", re.IGNORECASE)


def finish_word(value: object) -> str | None:
    """The word in a `finish_reason`, in lower case; None where it says nothing yet."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, Mapping):
        value = value.get("type") or value.get("reason")
    if not isinstance(value, str):
        return None
    word = _DRESS.sub("", value).lower()
    return None if word in {"", "null", "none"} else word


def ending_of(word: str) -> Ending:
    """What `word` means; an unknown one is `stop`, which asks for an answer to be there."""
    known = _ENDINGS.get(word)
    if known is not None:
        return known
    return next((ending for ending, family in _FAMILIES if family.search(word)), "stop")


# FROM llm.usage: Token counts, wherever and under whatever names an endpoint reports them. Pure.


def read_usage(report: object) -> Usage | None:
    """The counts of one report; None if it holds none."""
    if not isinstance(report, Mapping):
        return None
    sent = _first(report, "prompt_tokens", "input_tokens")
    made = _first(report, "completion_tokens", "output_tokens")
    in_details = _mapping(report.get("prompt_tokens_details") or report.get("input_tokens_details"))
    out_details = _mapping(report.get("completion_tokens_details") or report.get("output_tokens_details"))
    cached = _first(in_details, "cached_tokens")
    if cached is None:
        cached = _first(report, "prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    if sent is not None and report.get("prompt_tokens") is None:
        # Anthropic's own counts leave what was read from the cache, or written to it, out of the input.
        beside = (_first(report, "cache_read_input_tokens"), _first(report, "cache_creation_input_tokens"))
        sent += sum(count for count in beside if count is not None)
    reasoning = _first(out_details, "reasoning_tokens")
    if reasoning is None:
        reasoning = _first(report, "reasoning_tokens")
    total = _first(report, "total_tokens")
    if reasoning and sent is not None and made is not None and total == sent + made + reasoning:
        # xAI counts the reasoning beside the completion, everybody else inside it.
        made += reasoning
    usage = Usage(input_tokens=sent, output_tokens=made, cached_tokens=cached, reasoning_tokens=reasoning)
    return None if usage == Usage() else usage


def newer_usage(known: Usage | None, report: Usage | None) -> Usage | None:
    """Reports are cumulative: the last one counts, member by member; one of zeros says nothing after one of numbers."""
    if report is None or known is None:
        return report or known
    if not (report.input_tokens or report.output_tokens):
        return known
    return Usage(
        input_tokens=_newer(known.input_tokens, report.input_tokens),
        output_tokens=_newer(known.output_tokens, report.output_tokens),
        cached_tokens=_newer(known.cached_tokens, report.cached_tokens),
        reasoning_tokens=_newer(known.reasoning_tokens, report.reasoning_tokens),
    )


def _newer(known: int | None, reported: int | None) -> int | None:
    return known if reported is None else reported


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _first(report: Mapping[str, object], *keys: str) -> int | None:
    for key in keys:
        value = report.get(key)
        if isinstance(value, str) and value.isdecimal() and len(value) < 13:
            value = int(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12:
            return int(value)
    return None
