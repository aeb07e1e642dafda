"""One streamed chat completion: event data in, deltas and one whole answer out.

Strategy: nothing from the wire is trusted to have its declared type; what a chunk says in a known way is taken, the
rest is passed over. The common chunk (one piece of text) takes a short way. Calls are read and emptiness is judged at
the end, so that any split of the same bytes gives the same answer. Pure: knows no connection, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from crow.domain.errors import ContextOverflow, ModelError, Overloaded, ProtocolError
from crow.domain.messages import Answer, FinishReason, ToolCall, ToolSpec, Usage
from crow.llm import TextDelta, ThoughtDelta
from crow.llm.calls import CallAssembler, new_call_id
from crow.llm.endings import ending_of, finish_word
from crow.llm.failures import Complaint, Origin, complaint_in, failure, page_title
from crow.llm.framing import chunks_in, is_end, is_filler
from crow.llm.leaked import recovered_calls
from crow.llm.reasoning import ReasoningDetails, content_pieces, details_text, thought_of
from crow.llm.surrogates import Joiner, mended, mended_members
from crow.llm.thinking import ThinkSplitter, split_headless, without_end_tokens
from crow.llm.usage import newer_usage, read_usage

__all__ = ["StreamParser"]

_DECODER = json.JSONDecoder(strict=False)

_NO_DELTAS: list[TextDelta | ThoughtDelta] = []


class StreamParser:
    """Feed the data of each event; then `flush`, then `finish`.

    The text of all `TextDelta` is `partial().text`; so it is for thoughts. The answer's text is shorter than what was
    given out where reasoning or a call could be told from text at the end only. `complaint`: the endpoint's own words,
    where an event carried an error.
    """

    def __init__(
        self, tools: Sequence[ToolSpec] = (), *, origin: Origin | None = None, mint: Callable[[], str] = new_call_id
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._origin = origin or Origin()
        self._mint = mint
        self._calls = CallAssembler(tools, mint=mint)
        self._legacy_calls = CallAssembler(tools, mint=mint)
        self._has_deltas = False
        self._splitter = ThinkSplitter()
        self._text_joiner = Joiner()
        self._thought_joiner = Joiner()
        self._text: list[str] = []
        self._thought: list[str] = []
        self._blank_thought = ""
        self._details = ReasoningDetails()
        self._reasoning_field: str | None = None
        self._refused = False
        self._finish_word: str | None = None
        self._done = False
        self._error: ModelError | None = None
        self._flushed = False
        self._usage: Usage | None = None
        self.complaint: Complaint | None = None

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

    def feed(self, event_data: str) -> list[TextDelta | ThoughtDelta]:
        """The deltas of one event, in the order to be shown.

        :raises ~crow.domain.errors.ModelError: the event carries an error, or is no JSON.
        """
        if self._done:
            return _NO_DELTAS
        try:
            chunk = _DECODER.decode(event_data)
        except (ValueError, RecursionError):
            return self._feed_other(event_data)
        if type(chunk) is not dict:
            if isinstance(chunk, list):
                self._raise_complaint(chunk)
            return self._feed_other(chunk) if isinstance(chunk, str) and is_end(chunk) else _NO_DELTAS
        return self._feed_chunk(chunk)

    def flush(self) -> list[TextDelta | ThoughtDelta]:
        """The stream has ended: what was held back. Called twice it gives nothing more."""
        if self._flushed:
            return _NO_DELTAS
        self._flushed = True
        deltas: list[TextDelta | ThoughtDelta] = []
        # An unfinished pair belongs to the text before an unfinished tag does.
        self._add_content(self._text_joiner.finish(), deltas)
        thought, text = self._splitter.finish()
        self._add_thought(thought, deltas)
        self._add_thought(self._thought_joiner.finish(), deltas, joined=True)
        self._add_text(text, deltas)
        return deltas

    def finish(self) -> Answer:
        """The whole answer.

        :raises ~crow.domain.errors.ModelError: the endpoint said that it failed.
        :raises ~crow.domain.errors.ProtocolError: the answer is incomplete or empty.
        """
        self.flush()
        if self._error is not None:
            raise self._error
        finish = self._finish()
        text, thought = "".join(self._text), "".join(self._thought)
        self._text, self._thought = [text], [thought]  # a long answer need not be here twice
        calls = (self._calls or self._legacy_calls).finish(is_cut=finish == "length")
        if not calls and self._tools:
            text, calls = recovered_calls(text, self._tools, mint=self._mint)
        if not thought and (parts := split_headless(text)) is not None:
            thought, text = parts
            self._reasoning_field = "content"
        if self._splitter.is_dressed:
            text = without_end_tokens(text)
        if text.isspace():
            text = ""
        if finish == "refusal":
            calls = ()
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
            text="".join(self._text),
            thought="".join(self._thought),
            finish="interrupted",
            usage=self._usage,
            reasoning_field=self._reasoning_field,
        )

    def _feed_chunk(self, chunk: dict[str, object]) -> list[TextDelta | ThoughtDelta]:
        choices = chunk.get("choices")
        if "error" in chunk or not choices:
            self._raise_complaint(chunk)
        if chunk.get("usage") is not None or "x_groq" in chunk:
            self._read_usage(chunk)
        if type(choices) is dict:
            choices = [choices]
        if type(choices) is not list:
            return _NO_DELTAS
        for choice in choices:
            if type(choice) is dict and (not (index := choice.get("index")) or index == "0"):
                deltas = self._feed_choice(choice)
                if "finish_reason" in chunk:
                    self._note_finish(chunk["finish_reason"])
                return deltas
        return _NO_DELTAS

    def _feed_other(self, event_data: str) -> list[TextDelta | ThoughtDelta]:
        """Data that is no JSON object: the end, nothing, or several chunks whose framing is amiss."""
        data = event_data.strip()
        if is_end(data):
            self._done = True
            return self.flush()
        if not data or self.is_finished or is_filler(data):
            return _NO_DELTAS
        chunks, is_done = chunks_in(data)
        if chunks:
            deltas: list[TextDelta | ThoughtDelta] = []
            try:
                for chunk in chunks:
                    deltas.extend(self._feed_chunk(chunk))
            except ModelError as error:
                if not deltas:
                    raise
                # What came before it is given out first.
                self._error, is_done = error, True
            if is_done:
                self._done = True
                deltas.extend(self.flush())
            return deltas
        title = page_title(data)
        shown = title if title is not None else data[:200]
        raise ProtocolError(f"{self._origin.endpoint} sent an event that is no JSON: {mended(shown)}")

    def _raise_complaint(self, chunk: object) -> None:
        if self._done or (self._finish_word is not None and ending_of(self._finish_word) != "failed"):
            # What fails after the end, such as the counting, takes nothing from the answer.
            return
        self.complaint = complaint_in(chunk)
        if self.complaint is not None:
            raise failure(self.complaint, self._origin)

    def _read_usage(self, chunk: Mapping[str, object]) -> None:
        groq = chunk.get("x_groq")
        reports = (chunk.get("usage"), groq.get("usage") if isinstance(groq, Mapping) else None)
        for report in reports:
            self._usage = newer_usage(self._usage, read_usage(report))

    def _feed_choice(self, choice: dict[str, object]) -> list[TextDelta | ThoughtDelta]:
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
            return _NO_DELTAS if instead is None else self._feed_delta(instead)
        content = delta.get("content")
        if len(delta) == 1 and type(content) is str and self._splitter.in_text and content.isascii():
            if not content or self._text_joiner.is_waiting:
                return self._feed_delta(delta)
            self._text.append(content)
            return [TextDelta(text=content)]
        self._has_deltas = True
        return self._feed_delta(delta)

    def _delta_instead(self, choice: dict[str, object]) -> dict[str, object] | None:
        """What a choice without a delta adds: a message, or mere text."""
        message = choice.get("message")
        if type(message) is dict:
            if self._has_deltas:
                # The whole once more at its end: only what no delta brought is new.
                text, so_far = message.get("content"), "".join(self._text)
                rest = text[len(so_far) :] if isinstance(text, str) and text.startswith(so_far) else ""
                calls = None if self._calls else message.get("tool_calls")
                return {"content": rest, "tool_calls": calls}
            return message
        text = choice.get("delta") or choice.get("text")
        return {"content": text} if type(text) is str else None

    def _feed_delta(self, delta: dict[str, object]) -> list[TextDelta | ThoughtDelta]:
        deltas: list[TextDelta | ThoughtDelta] = []
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
            self._add_thought(thought, deltas)
        content = delta.get("content")
        if type(content) is str:
            self._add_content(content, deltas)
        elif content is not None:
            for kind, piece in content_pieces(content):
                if kind == "thought":
                    self._reasoning_field = self._reasoning_field or "content"
                    self._add_thought(piece, deltas)
                else:
                    self._add_content(piece, deltas)
        refusal = delta.get("refusal")
        if type(refusal) is str and refusal:
            self._refused = True
            self._add_content(refusal, deltas)
        calls = delta.get("tool_calls")
        if calls:
            self._calls.add_all(calls)
        legacy = delta.get("function_call")
        if type(legacy) is dict:
            self._legacy_calls.add({"index": 0, "function": legacy})
        if "finish_reason" in delta:
            self._note_finish(delta["finish_reason"])
        return deltas

    def _add_content(self, piece: str, deltas: list[TextDelta | ThoughtDelta]) -> None:
        piece = self._text_joiner.feed(piece)
        if not piece:
            return
        if self._splitter.in_text:
            self._add_text(piece, deltas)
            return
        thought, text = self._splitter.feed(piece)
        if self._splitter.found and self._reasoning_field is None:
            self._reasoning_field = "content"
        self._add_thought(thought, deltas)
        self._add_text(text, deltas)

    def _add_text(self, text: str, deltas: list[TextDelta | ThoughtDelta]) -> None:
        if text:
            self._text.append(text)
            deltas.append(TextDelta(text=text))

    def _add_thought(self, thought: str, deltas: list[TextDelta | ThoughtDelta], *, joined: bool = False) -> None:
        if not joined:
            thought = self._thought_joiner.feed(thought)
        if not thought:
            return
        if not self._thought:
            # Blanks alone are no thought; they wait for the first word.
            thought, self._blank_thought = self._blank_thought + thought, ""
            if thought.isspace():
                self._blank_thought = thought[-1000:]
                return
        self._thought.append(thought)
        deltas.append(ThoughtDelta(text=thought))

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
        if text or calls or finish == "refusal":
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
