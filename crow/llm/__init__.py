"""The interface between the agent and a model: a request, a stream of deltas, an answer.

The package also offers the parsers and encoders of all wires, for use without crow's connections. They do no I/O. They
are imported on first use, because `crow acp` does not need all of them. `docs/python-api.md` describes them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

from crow.domain.messages import Answer, Message, SentRequest, ToolSpec, Usage, WireName
from crow.llm.facts import Refusal

if TYPE_CHECKING:
    from crow.llm.chat.encode import ChatEncoder as ChatEncoder
    from crow.llm.chat.parser import ChatParser as ChatParser
    from crow.llm.dialect import Dialect as Dialect
    from crow.llm.messages.encode import MessagesEncoder as MessagesEncoder
    from crow.llm.messages.parser import MessagesParser as MessagesParser
    from crow.llm.responses.encode import ResponsesEncoder as ResponsesEncoder
    from crow.llm.responses.parser import ResponsesParser as ResponsesParser
    from crow.llm.sse import SseDecoder as SseDecoder
    from crow.llm.wires import Wire as Wire
    from crow.llm.wires import wire_named as wire_named

_LATER: Mapping[str, str] = {
    "ChatEncoder": "chat.encode",
    "ChatParser": "chat.parser",
    "Dialect": "dialect",
    "MessagesEncoder": "messages.encode",
    "MessagesParser": "messages.parser",
    "ResponsesEncoder": "responses.encode",
    "ResponsesParser": "responses.parser",
    "SseDecoder": "sse",
    "Wire": "wires",
    "wire_named": "wires",
}
"""Maps the names that are imported on first use to their modules in this package."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


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
    """The request failed and will be sent again."""

    reason: str
    """A sentence for the user."""
    wait_s: float
    """Crow sends the request again after this many seconds."""


Delta: TypeAlias = TextDelta | ThoughtDelta | Retrying


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a model."""

    messages: tuple[Message, ...]
    """The conversation. The first message is the system message."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that the model may call."""
    tool_choice: Literal["auto", "none"] = "auto"
    """If `none`, the model may not call tools. The request still lists them, so that the prefix of the prompt stays the
    same."""
    max_output_tokens: int | None = None
    """The output limit. If None, the endpoint decides."""
    cache_key: str = ""
    """The same text for all requests of a session. Endpoints may use it to find the part of the prompt that they have
    cached."""
    thought_level: ThoughtLevel | None = None
    """How much the model should think. If None, the endpoint's configuration decides."""


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
    """The facts that crow knows about a model. `context_window` is None if it is neither configured nor listed by the
    endpoint."""

    name: str
    """The model's name at its endpoint."""
    endpoint: str
    """The base URL and the model name, separated by a space."""
    is_local: bool = False
    """Whether the model runs on this machine or its local network."""
    is_window_configured: bool = False
    """Whether the context window comes from the user's settings."""
    refused: tuple[Refusal, ...] = ()
    """The refusals of those parts whose absence changes how messages are written, oldest first."""
    wire: WireName = "chat"
    """The form in which requests are sent."""
    thought_levels: tuple[ThoughtLevel, ...] | None = None
    """The thought levels that the model takes, according to the endpoint's list of models. None if the list does not
    say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a request. The endpoint accepted this attempt, and probably charges for it."""

    usage: Usage | None = None
    """The usage that the endpoint has reported for this attempt."""
    output_tokens: int = 0
    """Crow's estimate for the text, reasoning and tool arguments that have arrived."""
    sent: SentRequest | None = None
    """A record of the bytes that were sent. None if there are none, because the built-in model answered."""


class Stream(Protocol):
    """One running request, which is sent again after transient failures."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate over the deltas as they arrive. Only one task may iterate. The iteration ends when the answer is
        complete.

        :raises ~crow.domain.errors.ModelError: the endpoint failed. `partial()` still returns the deltas that were
        yielded.
        """

    @property
    def answer(self) -> Answer:
        """The whole answer. :raises RuntimeError: the iteration has not ended yet."""

    def partial(self) -> Answer:
        """Return an answer with the deltas that were yielded so far, without tool calls. Its `finish` is
        `interrupted`."""

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
        """Return the stored facts, such as `{"listed": {"context_window": 131072}}`, or an empty mapping if there are
        none."""

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
