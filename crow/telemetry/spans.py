"""Converts stored entries to spans.

The names follow version 0.1.0 of OpenTelemetry's semantic conventions for generative AI. Names that begin with `crow.`
are crow's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from crow.domain.entries import (
    Assistant,
    CallRef,
    Checkpoint,
    Entry,
    Mask,
    ModelRequest,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.messages import SentRequest, Text, ToolCall, Usage
from crow.domain.text import shorten
from crow.telemetry.turns import Turn, id_of_call, span_id

Value: TypeAlias = str | int | float | bool | tuple[str, ...]
Redact: TypeAlias = Callable[[str], str]

_NAME_CHARS = 128
_CONTENT_CHARS = 50_000

_FINISH = {
    "tool_calls": "tool_call",
    "refusal": "content_filter",
    "interrupted": "error",
}
"""Maps finish reasons to their names in the conventions, where these differ."""

_PROVIDERS = (
    (r"openai\.azure\.com", "azure.ai.openai"),
    (r"api\.anthropic\.com", "anthropic"),
    (r"amazonaws\.com|api\.aws", "aws.bedrock"),
    (r"aiplatform\.googleapis\.com", "gcp.vertex_ai"),
    (r"generativelanguage\.googleapis\.com", "gcp.gemini"),
    (r"api\.x\.ai", "x_ai"),
    (r"api\.deepseek\.com", "deepseek"),
    (r"api\.groq\.com", "groq"),
    (r"api\.mistral\.ai", "mistral_ai"),
    (r"api\.moonshot\.(?:ai|cn)", "moonshot_ai"),
    (r"api\.perplexity\.ai", "perplexity"),
    (r"api\.cohere\.(?:ai|com)", "cohere"),
)
"""The ends of host names, each with the name that the conventions give to the provider. For any other host, the name of
the API that its endpoint speaks is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span. Times are Unix times in ms."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ms: int
    end_ms: int
    attributes: Mapping[str, Value]
    is_client: bool = False
    """Whether the span is a request to a model, and not something that crow did itself."""

    @property
    def error(self) -> str:
        """The class of the error with which the operation ended, or an empty string."""
        return str(self.attributes.get("error.type", ""))


def spans_of(turn: Turn, redact: Redact | None = None) -> list[Span]:
    """Return the spans of the turn's entries. With `redact`, the spans also have the content of messages and calls,
    masked by `redact`."""
    return _Translation(turn, redact).spans()


class _Translation:
    """Goes through the entries of a turn, oldest first, and adds a span for each request, call and compaction."""

    def __init__(self, turn: Turn, redact: Redact | None) -> None:
        self._turn = turn
        self._redact = redact
        self._found: list[Span] = []
        self._session = turn.entries[0].session
        self._endpoint = ""
        """The base URL and the model of the newest request. This and the next two go into the turn's own span."""
        self._provider = "crow"  # the built-in model
        self._model = ""
        self._calls: dict[CallRef, ToolCall] = {}
        """The calls of all answers so far."""
        self._started: dict[CallRef, int] = {}
        """The calls that have no result yet, with the times at which they began, in Unix ms."""
        self._stop = ""
        """Why the turn ended, or empty before its end."""
        self._end_ms = 0
        """When the turn ended, or else the time of its newest entry."""

    def spans(self) -> list[Span]:
        """Return all spans. The turn's own span is the first one."""
        for entry, times in zip(self._turn.entries, self._times(), strict=True):
            match entry.body:
                case Assistant() as body:
                    for at, one in enumerate(body.calls):
                        self._calls[CallRef(assistant=entry.id, index=at)] = one
                    self._add_chat(entry, times, body.sent, body.endpoint)
                case ModelRequest(sent=sent):
                    self._add_chat(entry, times, sent, "")
                case Checkpoint() | Mask() as body:
                    self._add_compaction(entry.id, body, times)
                case Started(call=call):
                    self._started[call] = times[1]
                case ToolResult() as body:
                    self._started.pop(body.call, None)
                    self._add_call(body.call, (times[1] - body.duration_ms, times[1]), body)
                case TurnEnd(stop=stop):
                    for call, started in self._started.items():
                        self._add_call(call, (started, times[1]), None, error=stop)
                    self._started.clear()
                    self._stop, self._end_ms = stop, times[1]
                case _:
                    pass
            self._end_ms = self._end_ms if self._stop else times[1]
        if any(isinstance(entry.body, User) for entry in self._turn.entries):
            self._add_turn()
            self._found.insert(0, self._found.pop())
        return self._found

    def _times(self) -> Iterator[tuple[int, int]]:
        """Yield for each entry the time at which the work on it began, and the time at which the entry was stored.

        Entries of one transaction have the same time. If a process was killed, the last entries of its turn were stored
        only when the session was next opened. They get the time of the last entry that the killed process stored.
        """
        entries = self._turn.entries
        ends = [one for one in entries if isinstance(one.body, TurnEnd) and one.body.stop == "interrupted"]
        repaired = {one.created_ms for one in ends}
        earlier = now = self._turn.before_ms or entries[0].created_ms
        for entry in entries:
            if entry.created_ms != now:
                earlier, now = now, entry.created_ms
            yield (earlier, earlier) if now in repaired else (earlier, now)

    def _add_turn(self) -> None:
        """Add the span of the whole turn."""
        entries = self._turn.entries
        attributes: dict[str, Value | None] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": self._provider,
            "gen_ai.agent.name": self._turn.agent,
            "gen_ai.request.model": self._model,
            "crow.turn.stop": self._stop,
            "error.type": {"error": "_OTHER", "interrupted": "interrupted"}.get(self._stop, ""),
        }
        if self._redact is not None:
            prompts = [entry.body for entry in entries if isinstance(entry.body, User)]
            texts = [part.text for prompt in prompts for part in prompt.parts if isinstance(part, Text)]
            parts = [{"type": "text", "content": self._masked(text)} for text in texts]
            attributes["gen_ai.input.messages"] = json.dumps([{"role": "user", "parts": parts}])
        times = (entries[0].created_ms, self._end_ms)
        self._add(f"invoke_agent {self._turn.agent}", self._turn.span_id, times, attributes)

    def _add_chat(self, entry: Entry, times: tuple[int, int], sent: SentRequest | None, endpoint: str) -> None:
        """Add the span of a request to a model."""
        body = entry.body
        self._endpoint = endpoint = (sent.endpoint if sent else "") or endpoint or self._endpoint
        base_url, _, model = endpoint.partition(" ")
        self._model = model or entry.model or "unknown"
        if endpoint:
            wire = body.wire if isinstance(body, Assistant) else sent.dialect.get("wire") if sent else ""
            self._provider = provider_at(base_url) or ("anthropic" if wire == "messages" else "openai")
        attributes: dict[str, Value | None] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": self._provider,
            "gen_ai.request.model": self._model,
            "gen_ai.request.stream": True,
            "gen_ai.request.max_tokens": sent.limit if sent else None,
            "gen_ai.request.reasoning.level": sent.thought_level if sent else None,
            **_server(base_url),
            **_usage_attributes(entry.usage),
            "crow.cost": entry.cost,
        }
        if isinstance(body, Assistant):
            reason = _FINISH.get(body.finish, body.finish)
            attributes["gen_ai.response.finish_reasons"] = (reason,)
            attributes["error.type"] = "interrupted" if body.finish == "interrupted" else ""
            if self._redact is not None:
                attributes["gen_ai.output.messages"] = self._answer(body, reason)
        elif isinstance(body, ModelRequest):
            attributes["crow.request.purpose"] = body.purpose
            attributes["error.type"] = "no_answer" if body.purpose == "answer" else ""
        self._add(f"chat {self._model}", span_id("chat", entry.id), times, attributes, is_client=True)

    def _add_compaction(self, entry_id: int, body: Checkpoint | Mask, times: tuple[int, int]) -> None:
        """Add the span of a compaction."""
        attributes: dict[str, Value | None] = {
            "crow.tokens_before": body.tokens_before,
            "crow.tokens_after": body.tokens_after,
            "crow.compaction.reason": body.reason,
            "crow.compaction.method": body.method if isinstance(body, Checkpoint) else None,
        }
        self._add("compact", span_id("compaction", entry_id), times, attributes)

    def _add_call(self, call: CallRef, times: tuple[int, int], result: ToolResult | None, *, error: str = "") -> None:
        """Add the span of a tool call. Without `result`, the turn ended before the call did."""
        made = self._calls.get(call)
        name = shorten(result.name if result else made.name if made else "unknown", _NAME_CHARS)
        attributes: dict[str, Value | None] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.id": call.call_id,
            "gen_ai.tool.type": "function",
            "mcp.method.name": "tools/call" if "__" in name else "",
            "error.type": "tool_error" if result is not None and result.is_error else error,
        }
        if self._redact is not None:
            attributes["gen_ai.tool.call.arguments"] = self._masked(made.arguments) if made else ""
            attributes["gen_ai.tool.call.result"] = self._masked(result.text) if result else ""
        self._add(f"execute_tool {name}", id_of_call(call), times, attributes)

    def _add(
        self,
        name: str,
        own_id: int,
        times: tuple[int, int],
        attributes: Mapping[str, Value | None],
        *,
        is_client: bool = False,
    ) -> None:
        """Add a span without the attributes that are unknown."""
        turn, known = self._turn, {**attributes, "gen_ai.conversation.id": self._session}
        span = Span(
            name=_whole(name),
            trace_id=turn.trace_id,
            span_id=own_id,
            parent_id=turn.parent_id if own_id == turn.span_id else turn.root,
            start_ms=min(times),
            end_ms=times[1],
            attributes={
                key: _whole(value) if isinstance(value, str) else value
                for key, value in known.items()
                if value is not None and value != ""
            },
            is_client=is_client,
        )
        self._found.append(span)

    def _answer(self, body: Assistant, reason: str) -> str:
        parts: list[dict[str, str]] = [
            {"type": kind, "content": self._masked(text)}
            for kind, text in (("reasoning", body.thought), ("text", body.text))
            if text
        ]
        parts += [
            {"type": "tool_call", "id": call.id, "name": call.name, "arguments": self._masked(call.arguments)}
            for call in body.calls
        ]
        return json.dumps([{"role": "assistant", "parts": parts, "finish_reason": reason}])

    def _masked(self, text: str) -> str:
        """Return a text without secrets, shortened. The text is masked first, because half a token would not be
        recognised."""
        return shorten(self._redact(text), _CONTENT_CHARS) if self._redact is not None else ""


def _whole(text: str) -> str:
    """Return a text without halves of surrogate pairs, which no collector would take."""
    return text.encode(errors="replace").decode()


def _usage_attributes(usage: Usage | None) -> dict[str, Value | None]:
    """Return the token counts of a request. Unknown counts are None."""
    if usage is None:
        return {}
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.cache_write.input_tokens": usage.cache_write_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "crow.usage.is_estimated": usage.is_estimated or None,
    }


def provider_at(base_url: str) -> str:
    """Return the name that the conventions give to the provider at a base URL, or an empty string if they name no such
    provider."""
    host = str(_server(base_url).get("server.address", ""))
    return next((name for end, name in _PROVIDERS if re.search(rf"(?:^|[.-])(?:{end})$", host)), "")


def _server(base_url: str) -> dict[str, Value]:
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return {}
    default = 80 if parts.scheme == "http" else 443
    return {"server.address": host, "server.port": port or default} if host else {}
