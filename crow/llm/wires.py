"""The wires: the forms of requests and answers that an endpoint may speak. A wire is imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, assert_never

from crow.domain.messages import Message, WireName
from crow.llm import Request
from crow.llm.dialect import Dialect
from crow.llm.parser import AnswerParser


class Encoder(Protocol):
    """Encodes the requests of one session to one endpoint, and caches the encoded messages of the last request.

    The bytes of a message depend only on the messages up to it, the dialect and the endpoint. Therefore, as long as
    messages are only appended, each request starts with the bytes of the previous one.
    """

    def body(
        self,
        request: Request,
        *,
        model: str,
        endpoint: str,
        dialect: Dialect,
        limit: int | None,
        extra: Mapping[str, object] | None = None,
    ) -> bytes:
        """Return the request body. `endpoint` names the receiver: opaque members of an answer are sent back only to the
        endpoint that they came from. `limit` is the output limit in tokens, or None if none is set. Members of `extra`
        replace crow's own members of the same name, except those that hold the conversation."""

    def messages(self, messages: Sequence[Message], *, endpoint: str, dialect: Dialect) -> list[bytes]:
        """Return the bytes of the messages in order, including what the encoder inserts between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One wire."""

    name: WireName
    path: str
    """The path of the wire's endpoint below the base URL."""
    encoder: Callable[[], Encoder]
    parser: type[AnswerParser]
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every request on this wire."""
    key_header: str | None = None
    """A header that holds the key, in addition to `Authorization`."""
    default_limit: Callable[[str], int | None] = lambda _model: None
    """Returns the output limit in tokens that requests to a model have if none is set, or None for no limit."""


@cache
def wire_named(name: WireName) -> Wire:
    """Return the wire of this name."""
    # A wire that is not used is not imported.
    match name:
        case "chat":
            from crow.llm.chat.encode import Encoder as ChatEncoder
            from crow.llm.chat.parser import StreamParser

            return Wire(name=name, path="/chat/completions", encoder=ChatEncoder, parser=StreamParser)
        case "responses":
            from crow.llm.responses.encode import Encoder as ResponsesEncoder
            from crow.llm.responses.parser import ResponsesParser

            return Wire(name=name, path="/responses", encoder=ResponsesEncoder, parser=ResponsesParser)
        case "messages":
            from crow.llm.messages.encode import Encoder as MessagesEncoder
            from crow.llm.messages.encode import default_limit
            from crow.llm.messages.parser import MessagesParser

            return Wire(
                name=name,
                path="/messages",
                encoder=MessagesEncoder,
                parser=MessagesParser,
                headers={"anthropic-version": "2023-06-01"},
                key_header="x-api-key",
                default_limit=default_limit,
            )
        case _ as never:
            assert_never(never)
