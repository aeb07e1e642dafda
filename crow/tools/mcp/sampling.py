"""Converts requests that an MCP server sends to the model, and the model's answers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mcp_types as mcp
from mcp.client.session import ClientRequestContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from crow.domain.entries import Announcement
from crow.domain.errors import ArgumentError
from crow.domain.messages import AssistantMessage, Image, Part, Text, UserMessage
from crow.domain.rendering import SecretMask
from crow.tools.mcp.calls import PROGRESS_EVERY_S, encodable, parse_call_id, picture
from crow.tools.mcp.listing import matches
from crow.tools.sampling import SamplingAnswer, SamplingRefusal, SamplingRequest
from crow.tools.servers import ServerOptions

_SAMPLING = "sampling"
"""The user can put this name into a server's setting `read_only`, like the name of a tool. It stands for the server's
requests to the model."""

SERVER_WAITS = 16
"""A server's request to the model is refused if this many of its questions and requests already wait. Questions are not
refused, because the client limits them."""

_MAX_MESSAGES = 200
_MAX_CHARS = 100_000
_MAX_PICTURES = 8
_MAX_TOKENS = 8_192
_MAX_STOPS = 16
_STOP_CHARS = 200
_USER_REJECTED = -1
"""The error code of MCP for a request to the model that the user rejects."""
_STOP_REASONS: Mapping[str, Literal["endTurn", "maxTokens", "stopSequence"]] = {
    "end": "endTurn",
    "length": "maxTokens",
    "stop_sequence": "stopSequence",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningCall:
    """A request from crow that a server is working on."""

    call_id: str
    """The id of the model's tool call. Empty if the request does not come from one."""
    name: str
    """The tool's name for the model."""
    arguments: str
    """The call's arguments as JSON."""
    announcement: Announcement
    """What the user sees of the call."""

    @classmethod
    def of(cls, call_id: str, name: str, arguments: Mapping[str, Any], announcement: Announcement) -> RunningCall:
        """Return the call with its arguments as JSON."""
        text = json.dumps(dict(arguments), ensure_ascii=False)
        return cls(call_id=call_id, name=name, arguments=text, announcement=announcement)


def sampling_request(
    params: mcp.CreateMessageRequestParams,
    running: RunningCall | None,
    server: str,
    prefix: str,
    options: ServerOptions,
    mask: SecretMask,
) -> SamplingRequest:
    """Convert a server's request to the form that the session gets. `running` is the call that the server is working
    on.

    Only the server's own system prompt and messages are sent to the model. `includeContext`, `metadata`, the
    temperature and the preferences about the model are ignored, as the protocol allows.

    :raises ~crow.domain.errors.ArgumentError: the request is invalid or too large, or no call is running.
    """
    call = None if running is None else parse_call_id(running.call_id)
    if running is None or call is None:
        raise ArgumentError("crow answers sampling/createMessage only while it calls a tool of this server")
    if params.tools or params.tool_choice is not None:
        raise ArgumentError("crow does not offer the capability sampling.tools; send the request without tools")
    if params.max_tokens < 1:
        raise ArgumentError(f"maxTokens is {params.max_tokens}; expected at least 1")
    if not 1 <= len(params.messages) <= _MAX_MESSAGES:
        raise ArgumentError(f"the request has {len(params.messages):,} messages; expected 1 to {_MAX_MESSAGES}")
    stops = params.stop_sequences or []
    if len(stops) > _MAX_STOPS or any(not 1 <= len(stop) <= _STOP_CHARS for stop in stops):
        raise ArgumentError(f"stopSequences: expected at most {_MAX_STOPS} texts of 1 to {_STOP_CHARS} characters")
    system = mask(encodable(params.system_prompt or ""))
    grouped: list[tuple[str, list[Part]]] = []
    for message in params.messages:
        if not grouped or grouped[-1][0] != message.role:
            grouped.append((message.role, []))
        grouped[-1][1].extend(_part_from(block, mask) for block in message.content_as_list)
    parts = [part for _, some in grouped for part in some]
    size = len(system) + sum(len(part.text) for part in parts if isinstance(part, Text))
    if size > _MAX_CHARS:
        raise ArgumentError(f"the messages have {size:,} characters; expected at most {_MAX_CHARS:,}")
    if (pictures := sum(isinstance(part, Image) for part in parts)) > _MAX_PICTURES:
        raise ArgumentError(f"the messages have {pictures} pictures; expected at most {_MAX_PICTURES}")
    return SamplingRequest(
        server=server,
        prefix=prefix,
        call=call,
        name=running.name,
        arguments=running.arguments,
        announcement=running.announcement,
        system=system,
        messages=tuple(_message_from(role, some) for role, some in grouped),
        max_tokens=min(params.max_tokens, _MAX_TOKENS),
        stop_sequences=tuple(stops),
        is_read_only=matches(_SAMPLING, options.read_only),
    )


def _message_from(role: str, parts: list[Part]) -> UserMessage | AssistantMessage:
    """Convert a message of the server. :raises ~crow.domain.errors.ArgumentError: the message has the role `assistant`
    but contains a picture."""
    if role == "user":
        return UserMessage(parts=tuple(parts))
    if not all(isinstance(part, Text) for part in parts):
        raise ArgumentError("a message with the role assistant has a picture; expected text")
    return AssistantMessage(text="\n".join(part.text for part in parts if isinstance(part, Text)))


def _part_from(block: mcp.SamplingMessageContentBlock, mask: SecretMask) -> Part:
    """Convert a part of a message. :raises ~crow.domain.errors.ArgumentError: models cannot read this kind of
    content."""
    match block:
        case mcp.TextContent(text=text):
            return Text(text=mask(encodable(text)))
        case mcp.ImageContent(data=data) if (image := picture(data, None)) is not None:
            return image
        case _:
            raise ArgumentError(f"the messages contain {block.type} content that crow cannot use; expected text")


def result_of(answer: SamplingAnswer | SamplingRefusal) -> mcp.CreateMessageResult | mcp.ErrorData:
    """Return the answer in the form that the server gets."""
    if isinstance(answer, SamplingRefusal):
        return mcp.ErrorData(code=_USER_REJECTED if answer.is_users else mcp.INTERNAL_ERROR, message=answer.words)
    return mcp.CreateMessageResult(
        role="assistant",
        content=mcp.TextContent(type="text", text=answer.text),
        model=answer.model,
        stop_reason=_STOP_REASONS[answer.stop],
    )


def progress_sender(context: ClientRequestContext) -> Callable[[int], Awaitable[None]]:
    """Make a callback that tells the server how long the answer is so far, at most ten times a second. It sends nothing
    if the server did not ask for progress, or if the protocol is a newer version, in which a client cannot report
    progress."""
    meta: Mapping[str, Any] = context.meta or {}
    token = meta.get("progress_token", meta.get("progressToken"))
    is_wanted = token is not None and context.session.protocol_version not in MODERN_PROTOCOL_VERSIONS
    sent_at, sent = -math.inf, 0

    async def report(length: int) -> None:
        nonlocal sent_at, sent
        if is_wanted and length > sent and time.monotonic() - sent_at >= PROGRESS_EVERY_S:
            sent_at, sent = time.monotonic(), length
            params = mcp.ProgressNotificationParams(progress_token=token, progress=float(length))
            await context.session.send_notification(mcp.ProgressNotification(params=params))

    return report
