"""The wires: the forms in which endpoints take requests and send answers. A wire is imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, assert_never

from crow.domain.messages import WireName
from crow.llm.encoder import Encoder
from crow.llm.parser import AnswerParser

AnyEncoder: TypeAlias = Encoder[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One wire."""

    name: WireName
    path: str
    """The path of the wire's endpoint below the base URL."""
    encoder: Callable[[], AnyEncoder]
    parser: type[AnswerParser]
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every request on this wire."""
    key_header: str | None = None
    """A header that holds the key, in addition to `Authorization`."""
    default_limit: Callable[[str], int | None] = lambda _model: None
    """Takes the name of a model. Returns the output limit in tokens of requests for which no limit is set, or None if
    such requests state no limit."""


@cache
def wire_named(name: WireName) -> Wire:
    """Return the wire of this name."""
    # A wire that is not used is not imported.
    match name:
        case "chat":
            from crow.llm.chat.encode import ChatEncoder
            from crow.llm.chat.parser import ChatParser

            return Wire(name=name, path="/chat/completions", encoder=ChatEncoder, parser=ChatParser)
        case "responses":
            from crow.llm.responses.encode import ResponsesEncoder
            from crow.llm.responses.parser import ResponsesParser

            return Wire(name=name, path="/responses", encoder=ResponsesEncoder, parser=ResponsesParser)
        case "messages":
            from crow.llm.messages.encode import MessagesEncoder, default_limit
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
