"""The prompts of one MCP server: listed while it lives, filled in when one is used.

Strategy: a server that lists none, or fails to, is as good as one without; its tools are not touched by that. Of a
filled prompt, texts, pictures and files become the parts of one user message, and whatever a model cannot take becomes
words that say what it is. Knows a client, and no connection.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Mapping

import anyio
import mcp_types as mcp
from mcp.client import Client

from crow.domain.errors import ToolServerError
from crow.domain.messages import Image, Link, Part, Resource, Text
from crow.tools import PromptArgument, ServerPrompt
from crow.tools.mcp.calls import bytes_in, sentence
from crow.tools.mcp.listing import prompt_names

__all__ = ["PromptList", "parts_of"]

logger = logging.getLogger(__name__)

LIST_S = 10.0
MOST_PROMPTS = 100
PAGES = 50
DESCRIPTION_CHARS = 200
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})


class PromptList:
    """The prompts of a server. `listed` leads from what is offered to the server's own name of it."""

    def __init__(self, server: str, prefix: str, on_change: Callable[[], Awaitable[None]] | None) -> None:
        self.listed: dict[ServerPrompt, str] = {}
        self.known = anyio.Event()
        """Set once the server that runs now was asked what it has."""
        self._server = server
        self._prefix = prefix
        self._on_change = on_change
        self._changed = anyio.Event()

    def begin(self) -> None:
        """A new life of the server begins, of which nothing is known yet."""
        self.known = anyio.Event()

    def change(self) -> None:
        """The server says that its listing has changed."""
        self._changed.set()

    async def keep(self, client: Client) -> None:
        """List what a new client's server has, and again with each change, until cancelled."""
        while True:
            self._changed = anyio.Event()
            found = await self._look(client)
            self.known.set()
            if found != self.listed:
                self.listed = found
                if self._on_change is not None:
                    await self._on_change()
            await self._changed.wait()

    async def fill(self, client: Client, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """See :meth:`crow.tools.ServerPrompts.fill`."""
        words = f"`/{prompt.name}` could not be used: MCP server {self._server}"
        if prompt not in self.listed:
            raise ToolServerError(f"{words} has no such prompt any more.")
        try:
            filled = await client.get_prompt(self.listed[prompt], dict(arguments))
        except Exception as error:  # whatever a stranger's answer provokes in the library
            raise ToolServerError(f"{words} did not give it: {sentence(error)}") from error
        parts = parts_of(filled)
        if not parts:
            raise ToolServerError(f"{words} gave an empty prompt.")
        return parts

    async def _look(self, client: Client) -> dict[ServerPrompt, str]:
        if client.server_capabilities.prompts is None:
            return {}
        found: dict[str, mcp.Prompt] = {}
        cursor: str | None = None
        try:
            with anyio.fail_after(LIST_S):
                for _ in range(PAGES):
                    page = await client.list_prompts(cursor=cursor)
                    for prompt in page.prompts:
                        found.setdefault(prompt.name, prompt)
                    cursor = page.next_cursor
                    if cursor is None:
                        break
        except Exception as error:  # noqa: BLE001 - a stranger's failure must cost its tools nothing
            logger.warning("MCP server %s did not list its prompts: %s", self._server, sentence(error))
        chosen = list(found.values())[:MOST_PROMPTS]
        names = prompt_names(self._prefix, [prompt.name for prompt in chosen])
        return {self._offered(prompt, name): prompt.name for prompt, name in zip(chosen, names, strict=True)}

    def _offered(self, prompt: mcp.Prompt, name: str) -> ServerPrompt:
        arguments = {argument.name: argument.required is True for argument in prompt.arguments or ()}
        return ServerPrompt(
            name=name,
            server=self._server,
            description=" ".join((prompt.description or prompt.title or prompt.name).split())[:DESCRIPTION_CHARS],
            arguments=tuple(PromptArgument(name=key, required=required) for key, required in arguments.items()),
        )


def parts_of(result: mcp.GetPromptResult) -> tuple[Part, ...]:
    """A filled prompt as the parts of one user message; who speaks is said where it is not the user alone."""
    spoken = any(message.role != "user" for message in result.messages)
    parts: list[Part] = []
    for message in result.messages:
        part = part_of(message.content)
        if spoken:
            parts.append(Text(text=f"{message.role.capitalize()}:"))
        if not isinstance(part, Text) or part.text.strip():
            parts.append(part)
    return tuple(parts) if any(not isinstance(part, Text) or part.text.strip() for part in parts) else ()


def part_of(block: mcp.ContentBlock) -> Part:
    match block:
        case mcp.TextContent(text=text):
            return Text(text=whole(text))
        case mcp.ImageContent(data=data, mime_type=mime_type):
            return picture(data, mime_type, None) or words("a picture", mime_type, data)
        case mcp.AudioContent(data=data, mime_type=mime_type):
            return words("a sound", mime_type, data)
        case mcp.ResourceLink(uri=uri, name=name, mime_type=mime_type):
            return Link(uri=whole(uri), name=whole(name), mime_type=mime_type)
        case mcp.EmbeddedResource(resource=mcp.TextResourceContents() as file):
            return Resource(uri=whole(file.uri), text=whole(file.text), mime_type=file.mime_type)
        case mcp.EmbeddedResource(resource=file):
            data = file.blob if isinstance(file, mcp.BlobResourceContents) else ""
            return picture(data, file.mime_type or "", file.uri) or words(f"the file {file.uri}", file.mime_type, data)


def picture(data: str, mime_type: str, uri: str | None) -> Image | None:
    """An image that models take, encoded as providers want it; None for anything else."""
    if mime_type not in IMAGE_TYPES:
        return None
    try:
        raw = base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    return Image(data=base64.b64encode(raw).decode(), mime_type=mime_type, uri=uri) if raw else None


def words(what: str, mime_type: str | None, data: str) -> Text:
    kind = mime_type or "type unknown"
    return Text(text=f"({what} ({kind}, {bytes_in(data):,} bytes) came with the prompt; crow cannot read it.)")


def whole(text: str) -> str:
    """`text` without lone surrogates, which have no UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
