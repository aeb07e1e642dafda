"""Attaches resources of MCP servers that the user mentions in a prompt as `@server:uri`."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

import anyio

from crow.domain.messages import Image, Part, Resource, Text, ToolCall
from crow.domain.text import title_line
from crow.tools import PlannedCall, Toolbox

_MAX_MENTIONS = 10
"""At most this many mentions of one prompt are read."""
_READ_S = 30.0
"""The resources of one prompt are read for at most this many seconds."""
_SHOWN_CHARS = 100_000
"""The model gets at most this many characters of a resource."""
_MENTION = re.compile(r"(?<![^\s(\[\"'`])@([^\s@:]{1,64}):([A-Za-z][A-Za-z0-9+.-]{0,63}:\S{1,2000})")
_CLOSING = {")": "(", "]": "[", "}": "{"}

Refusal = Callable[[ToolCall, PlannedCall], Awaitable[str]]
"""A function that returns why a call may not run, or an empty string if it may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mention:
    """A mentioned resource."""

    server: str
    """The server's name as the user typed it."""
    uri: str

    def __str__(self) -> str:
        return f"@{self.server}:{self.uri}"


def find_mentions(parts: Sequence[Part], servers: Collection[str]) -> tuple[Mention, ...]:
    """Return the resources that a prompt mentions, without repetitions. `servers` are the names of the session's
    servers."""
    names = {alias for name in servers for alias in (name, re.sub(r"[^A-Za-z0-9_-]", "_", name))}
    texts = (part.text for part in parts if isinstance(part, Text) and "@" in part.text)
    mentions = (
        Mention(server=found[1], uri=_without_punctuation(found[2]))
        for text in texts
        for found in _MENTION.finditer(text)
        if found[1] in names
    )
    return tuple(dict.fromkeys(islice(mentions, _MAX_MENTIONS)))


def _without_punctuation(uri: str) -> str:
    """Return the URI without the punctuation of the sentence around it."""
    while uri[-1] in ".,;:!?\"'`>" or (uri[-1] in _CLOSING and uri.count(uri[-1]) > uri.count(_CLOSING[uri[-1]])):
        uri = uri[:-1]
    return uri


async def attach_resources(
    parts: Sequence[Part], mentions: Sequence[Mention], toolbox: Toolbox, refusal: Refusal
) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    """Return the parts of the prompt, followed by the mentioned resources, and a text for the user about each resource
    that could not be read. If there are such texts, another part at the end contains them for the model."""
    added: list[Part] = []
    failures: list[str] = []
    with anyio.move_on_after(_READ_S):
        for mention in mentions:
            read = await _read_mention(mention, toolbox, refusal)
            if isinstance(read, str):
                failures.append(f"{title_line(str(mention))}: {read}")
            else:
                added += read
            mentions = mentions[1:]
    failures += [f"{title_line(str(mention))}: not read within {_READ_S:g} s" for mention in mentions]
    notes = [Text(text="\n".join(["(crow could not attach:", *failures]) + ")")] if failures else []
    return (*parts, *added, *notes), tuple(failures)


async def _read_mention(mention: Mention, toolbox: Toolbox, refusal: Refusal) -> list[Part] | str:
    """Return the content of a resource, or a text that says why it could not be read.

    The user mentioned the resource, so reading it needs no permission. But deny rules still apply, and plan mode allows
    reading only if the user's settings declare `read_resource` read-only.
    """
    arguments = json.dumps({"server": mention.server, "uri": mention.uri}, ensure_ascii=False)
    call = ToolCall(id="", name="read_resource", arguments=arguments)
    plan = await toolbox.plan(call)
    if words := plan.fault or await refusal(call, plan):
        return words

    async def nothing(_output: str) -> None:
        """Ignore the progress, because nobody watches it."""

    outcome = await toolbox.run(call, "", nothing, planned=plan)
    if outcome.is_error:
        return outcome.text
    text, left_out = outcome.text[:_SHOWN_CHARS], len(outcome.text) - _SHOWN_CHARS
    if left_out > 0:
        text += f"\n[{left_out:,} more characters are left out]"
    images = [Image(data=image.data, mime_type=image.mime_type, uri=mention.uri) for image in outcome.images]
    return [Resource(uri=mention.uri, text=text), *images]
