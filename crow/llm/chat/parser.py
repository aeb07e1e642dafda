"""Parses one streamed chat completion: takes the data of events and returns deltas and one complete answer.

The parser does not rely on declared types: it uses known members if they have the right type and ignores everything
else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

from crow.domain.errors import ContextOverflow, Overloaded, ProtocolError
from crow.domain.messages import FinishReason, JsonObject, ToolCall, ToolSpec, WireName
from crow.llm.errors import Origin
from crow.llm.parser import AnswerParser
from crow.llm.reasoning import (
    ReasoningDetails,
    ThinkingBlocks,
    content_pieces,
    details_text,
    signatures_in,
    thought_of,
)
from crow.llm.sse import replace_lone_in
from crow.llm.tool_calls import CallAssembler, new_call_id
from crow.llm.usage import read_usage


class ChatParser(AnswerParser):
    """Parses the chunks of one chat completion. `is_done` means that `[DONE]` arrived."""

    wire: ClassVar[WireName] = "chat"
    kind: ClassVar[str] = "a chat completion"
    plain_ends: ClassVar[frozenset[str | None]] = frozenset({None, "stop", "tool_calls"})

    def __init__(
        self, tools: Sequence[ToolSpec] = (), *, origin: Origin | None = None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        super().__init__(tools, origin=origin, new_id=new_id)
        self._calls = CallAssembler(tools, new_id=new_id)
        self._legacy_calls = CallAssembler(tools, new_id=new_id)
        self._details = ReasoningDetails()
        self._blocks = ThinkingBlocks()
        self._signatures: dict[str, object] = {}
        self._finish_word: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether a finish reason or `[DONE]` announced the end. Usage may still follow."""
        return self.is_done or self._finish_word is not None

    @property
    def _size(self) -> int:
        return self._chars + self._calls.size + self._legacy_calls.size + self._details.size + self._blocks.size

    @property
    def _has_too_many_calls(self) -> bool:
        return self._calls.has_too_many

    @property
    def _end_word(self) -> str | None:
        return self._finish_word

    def _finish_calls(self, *, is_cut: bool) -> tuple[ToolCall, ...]:
        return (self._calls or self._legacy_calls).finish(is_cut=is_cut)

    def _opaque(self) -> JsonObject:
        signatures = {"extra_content": self._signatures} if self._signatures else {}
        return replace_lone_in({**self._details.opaque(), **self._blocks.opaque(), **signatures})

    def _read_event(self, event: dict[str, object]) -> None:
        choices = event.get("choices")
        if "error" in event or not choices:
            self._raise_error(event)
            self._refuse_other_wire(event)
        if event.get("usage") is not None:
            self._add_usage(read_usage(event["usage"]))
        if type(groq := event.get("x_groq")) is dict:
            self._add_usage(read_usage(groq.get("usage")))
        if type(choices) is dict:
            choices = [choices]
        if type(choices) is not list:
            return
        for choice in choices:
            if type(choice) is dict and (not (index := choice.get("index")) or index == "0"):
                self._read_choice(choice)
                if "finish_reason" in event:
                    self._note_finish(event["finish_reason"])
                return

    def _raise_error(self, event: object) -> None:
        if self.is_done or (self._finish_word is not None and _ending_of(self._finish_word) != "failed"):
            # The answer is complete, so a later failure (for example while the server counts tokens) does not matter.
            return
        super()._raise_error(event)

    def _read_choice(self, choice: dict[str, object]) -> None:
        if (word := choice.get("finish_reason")) is not None:
            self._note_finish(word)
        if "usage" in choice:
            self._add_usage(read_usage(choice["usage"]))
        if choice.get("error"):
            self._raise_error({"error": choice["error"]})
        delta = choice.get("delta")
        if type(delta) is not dict:
            self._read_without_delta(choice)
            return
        if type(choice.get("message")) is dict and not any(delta[key] for key in delta if key != "role"):
            self._read_without_delta(choice)
            self._has_deltas = True  # a message that follows repeats this one
            return
        self._has_deltas = True
        if len(delta) == 1 and type(content := delta.get("content")) is str:
            self._content.append(content)
        else:
            self._read_delta(delta)

    def _read_without_delta(self, choice: dict[str, object]) -> None:
        """Read a choice in which a whole message or plain text takes the place of the delta."""
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
        if details := delta.get("reasoning_details"):
            self._details.add(details)
            if not thought and ((thought := details_text(details)) or field is None):
                field = "reasoning_details"
        # Some servers also send reasoning fields that stay empty. The first field with text is the right one.
        if self._reasoning_field is None or (thought and not self._has_thought):
            self._reasoning_field = field
        if blocks := delta.get("thinking_blocks"):
            self._blocks.add(blocks)
        if extra := delta.get("extra_content"):
            self._signatures.update(found := signatures_in(extra))
            self._chars += len(str(found))
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

    def _note_finish(self, value: object) -> None:
        if self._finish_word is None:
            self._finish_word = _finish_word(value)

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


_Ending: TypeAlias = FinishReason | Literal["failed", "too_long", "malformed"]
"""The meaning of a finish reason: one of crow's finish reasons, or what is wrong with the answer."""

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
    """Return the meaning of a finish reason. An unknown word means `stop`. If it stands for a failure and the answer is
    empty, the check for empty answers raises an error later."""
    for ending, words in _ENDINGS:
        if word in words.split():
            return ending
    return next((ending for ending, pattern in _SIMILAR_ENDINGS if re.search(pattern, word)), "stop")
