"""The interface between the agent and a model: a request, a stream of deltas, an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

from crow.domain.messages import Answer, Message, SentRequest, ToolSpec, Usage, WireName
from crow.llm.facts import Refusal

ThoughtLevel: TypeAlias = Literal["off", "low", "medium", "high"]
WIRE_TITLES: Mapping[WireName, str] = {"chat": "Chat Completions", "responses": "Responses", "messages": "Messages"}
"""The names of the wires for users."""

THOUGHT_LEVELS: tuple[ThoughtLevel, ...] = get_args(ThoughtLevel)
"""How much a model should think before it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of the answer, never empty."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtDelta:
    """A piece of the reasoning, never empty."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrying:
    """The request failed and will be sent again after `wait_s` seconds. `reason` is a sentence for the user."""

    reason: str
    wait_s: float


Delta: TypeAlias = TextDelta | ThoughtDelta | Retrying


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a model; `messages[0]` is the system message.

    If `max_output_tokens` is None, the endpoint decides the limit. If `tool_choice` is `none`, the model may not call
    tools. The request still lists the tools, so that the prefix of the prompt stays the same. `cache_key` is the same
    for all requests of a session. If `thought_level` is None, the endpoint's configuration decides.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    max_output_tokens: int | None = None
    cache_key: str = ""
    thought_level: ThoughtLevel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Sizes in tokens and prices in USD per million tokens. None means unknown."""

    context_window: int | None = None
    max_output_tokens: int | None = None
    input_price: float | None = None
    cached_price: float | None = None
    cache_write_price: float | None = None
    output_price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo(ModelLimits):
    """What crow knows about a model. `endpoint` is the base URL and the model name, separated by a space. If the
    context window is neither configured nor listed by the endpoint, it is unknown. `refused` lists the refusals that
    change how messages are written, oldest first. `is_local` means that the model runs on this machine or its local
    network."""

    name: str
    endpoint: str
    is_local: bool = False
    is_window_configured: bool = False
    refused: tuple[Refusal, ...] = ()
    wire: WireName = "chat"
    """The form in which requests are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a request. The endpoint accepted this attempt, and probably charges for it.

    `usage` is what the endpoint has reported for this attempt. `output_tokens` is crow's estimate for the text,
    reasoning and tool arguments that have arrived. `sent` tells how the request was sent, if bytes were sent.
    """

    usage: Usage | None = None
    output_tokens: int = 0
    sent: SentRequest | None = None


class Stream(Protocol):
    """One running request, which is sent again after transient failures."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate over the deltas as they arrive. Only one task may iterate. The iteration ends when the answer is
        complete.

        :raises ~crow.domain.errors.ModelError: the endpoint failed. `partial()` still returns what was yielded.
        """

    @property
    def answer(self) -> Answer:
        """The whole answer. :raises RuntimeError: the iteration has not ended yet."""

    def partial(self) -> Answer:
        """Return what was yielded so far, without tool calls. Its `finish` is `interrupted`."""

    def attempts(self) -> tuple[Attempt, ...]:
        """Return the attempts that the endpoint accepted, in order. The last attempt may still be running. If the
        request has succeeded, the last attempt gave the answer."""


class Model(Protocol):
    """A model behind an endpoint."""

    @property
    def info(self) -> ModelInfo:
        """The facts that crow knows about the model now. Later answers and errors may add more."""

    def check(self) -> None:
        """Check that a request can be made at all.

        :raises ~crow.domain.errors.AuthError: a required key is missing; the message says how to set one.
        :raises ~crow.domain.errors.ConfigError: no model is set, or a setting is wrong.
        """

    def stream(self, request: Request) -> AbstractAsyncContextManager[Stream]:
        """Return a context manager with the stream of `request`. The connection is closed as soon as the context ends,
        even if it ends because of a cancellation."""

    async def close(self) -> None:
        """Close the connections within a limited time. `close` may be called more than once."""


class EndpointMemory(Protocol):
    """Stores facts about endpoints in the store's table `endpoints`, where later processes find them."""

    async def learned(self, base_url: str, model: str) -> Mapping[str, object]:
        """Return the stored facts, such as `{"max_output_tokens": 8192, "refused": ["stream_options"]}`, or an empty
        mapping if there are none."""

    async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        """Add `facts` to the stored facts. A new value replaces the whole old value: nested mappings are not merged."""


def cost_of(usage: Usage | None, info: ModelInfo) -> float | None:
    """Return the price of one request in USD, or None if the usage or the prices are unknown. If tokens read from the
    provider's cache or written to it have no price of their own, they cost as much as other input."""
    if usage is None or info.input_price is None or info.output_price is None:
        return None
    cached, written = usage.cached_tokens or 0, usage.cache_write_tokens or 0
    cached_price = info.input_price if info.cached_price is None else info.cached_price
    write_price = info.input_price if info.cache_write_price is None else info.cache_write_price
    fresh = max(0, (usage.input_tokens or 0) - cached - written)
    sent = fresh * info.input_price + cached * cached_price + written * write_price
    return (sent + (usage.output_tokens or 0) * info.output_price) / 1e6
