"""The base class of encoders, which write requests as the bytes that are sent.

Each message is encoded once and its bytes are kept, so that the next request only has to join them. The bytes of a
message depend only on the messages up to it, the dialect and the endpoint. Therefore, as long as messages are only
appended, each request starts with the bytes of the previous one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from crow.domain.messages import Message, ToolSpec
from crow.llm import Request
from crow.llm.content import json_bytes
from crow.llm.dialect import Dialect


class _Encoded(Protocol):
    """A message in the form in which it is sent."""

    @property
    def message(self) -> Message:
        """The message."""


_EncodedT = TypeVar("_EncodedT", bound=_Encoded)


class Encoder(ABC, Generic[_EncodedT]):
    """Encodes the requests of one session to one endpoint, and keeps the encoded messages of the last request."""

    member: ClassVar[str]
    """The name of the member of a request that contains the conversation."""
    fixed_members: ClassVar[frozenset[str]]
    """The names of the members of a request that settings may not replace."""

    def __init__(self) -> None:
        self._dialect = Dialect()
        self._endpoint = self._model = ""
        self._messages: tuple[Message, ...] = ()
        """The messages of the last request."""
        self._encoded: list[_EncodedT] = []
        """The same messages in the form in which they were sent."""
        self._tools: tuple[ToolSpec, ...] = ()
        self._tools_sent = b""
        self._tools_size = 0
        """The size in bytes of the tools in the request that is being encoded. 0 if it has none."""

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
        replace crow's own members of the same name, except those in `fixed_members`."""
        self._use(model=model, endpoint=endpoint, dialect=dialect)
        self._read(request.messages)
        head = self._head(request, limit=limit)
        head.update({key: value for key, value in (extra or {}).items() if key not in self.fixed_members})
        pieces = [json_bytes(head)[:-1]]
        self._tools_size = 0
        if request.tools:
            tools = self._tool_bytes(request.tools)
            self._tools_size = len(tools)
            pieces.append(b',"tools":[' + tools + b"]")
        before, messages = self._conversation()
        # With a single join, a long conversation is copied only once.
        messages[0] = b"".join((*pieces, before, b',"' + self.member.encode() + b'":[', messages[0]))
        messages[-1] += b"]}"
        return b",".join(messages)

    def messages(self, messages: Sequence[Message], *, endpoint: str, dialect: Dialect) -> list[bytes]:
        """Return the bytes of the messages in order, including the messages that the encoder inserts between them. One
        message may be sent as several."""
        self._use(model="", endpoint=endpoint, dialect=dialect)
        self._read(tuple(messages))
        return self._sent()

    @abstractmethod
    def _head(self, request: Request, *, limit: int | None) -> dict[str, object]:
        """Return the members before the tools and the conversation."""

    @abstractmethod
    def _sent(self) -> list[bytes]:
        """Return the messages that were read, in the form in which they are sent. The list is new, so a caller may
        change it."""

    def _conversation(self) -> tuple[bytes, list[bytes]]:
        """Return the members that stand before the conversation, each with a comma in front, and the messages."""
        return b"", self._sent()

    @abstractmethod
    def _restart(self) -> None:
        """Empty the conversation. The messages are added again, from the first one."""

    @abstractmethod
    def _add(self, encoded: _EncodedT) -> None:
        """Add the next message to the conversation."""

    @abstractmethod
    def _encode(self, message: Message) -> _EncodedT:
        """Return the next message in the form in which it is sent."""

    @abstractmethod
    def _tool(self, spec: ToolSpec) -> Mapping[str, object]:
        """Return the definition of a tool."""

    def _use(self, *, model: str, endpoint: str, dialect: Dialect) -> None:
        """Encode for this model, endpoint and dialect from now on."""
        self._model = model
        if (self._dialect, self._endpoint) != (dialect, endpoint):
            self._dialect, self._endpoint = dialect, endpoint
            self._forget()

    def _forget(self) -> None:
        """Forget all encoded messages and tools, because they are encoded in another form from now on."""
        self._messages, self._encoded, self._tools, self._tools_sent = (), [], (), b""

    def _is_known(self, known: _EncodedT, message: Message) -> bool:
        """Return whether `_encode(message)` would return `known` again."""
        return known.message is message or known.message == message

    def _read(self, messages: tuple[Message, ...]) -> None:
        """Encode the messages that were not in the last request."""
        old: Sequence[_EncodedT] = ()
        if not self._messages or self._messages != messages[: len(self._messages)]:
            self._messages = ()
            old, self._encoded = self._encoded, []
            self._restart()
        for position in range(len(self._messages), len(messages)):
            message = messages[position]
            known = old[position] if position < len(old) else None
            if known is None or not self._is_known(known, message):
                known = self._encode(message)
            self._add(known)
            self._encoded.append(known)
        self._messages = messages

    def _tool_bytes(self, tools: tuple[ToolSpec, ...]) -> bytes:
        if not self._tools_sent or (tools is not self._tools and tools != self._tools):
            self._tools = tools
            self._tools_sent = b",".join(json_bytes(self._tool(tool)) for tool in tools)
        return self._tools_sent
