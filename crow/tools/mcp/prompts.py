"""The prompts of an MCP server: listed, and filled in when the user types one."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Mapping

import anyio
import mcp_types as mcp
from mcp.client import Client

from crow.domain.errors import ToolServerError
from crow.domain.messages import Image, Link, Part, Resource, Text
from crow.tools import PromptArgument, ServerPrompt
from crow.tools.mcp.calls import count_bytes, describe_error
from crow.tools.mcp.listing import MAX_PAGES, unique_names

logger = logging.getLogger(__name__)

LIST_S = 10.0
MAX_PROMPTS = 100
DESCRIPTION_CHARS = 200
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})


async def list_prompts(client: Client, server: str, prefix: str) -> dict[ServerPrompt, str]:
    """The prompts of a server, with the server's own name of each; empty or partial if listing fails."""
    if client.server_capabilities.prompts is None:
        return {}
    found: dict[str, mcp.Prompt] = {}
    cursor: str | None = None
    try:
        with anyio.fail_after(LIST_S):
            for _ in range(MAX_PAGES):
                page = await client.list_prompts(cursor=cursor)
                for prompt in page.prompts:
                    found.setdefault(prompt.name, prompt)
                cursor = page.next_cursor
                if cursor is None:
                    break
    except Exception as error:  # noqa: BLE001 - whatever fails here must not cost the server its tools
        logger.warning("MCP server %s did not list its prompts: %s", server, describe_error(error))
    chosen = list(found.values())[:MAX_PROMPTS]
    names = unique_names(prefix, ":", [prompt.name for prompt in chosen])
    return {
        ServerPrompt(
            name=name,
            server=server,
            description=" ".join((prompt.description or prompt.title or prompt.name).split())[:DESCRIPTION_CHARS],
            arguments=tuple(
                PromptArgument(name=argument, required=is_required)
                for argument, is_required in {one.name: one.required is True for one in prompt.arguments or ()}.items()
            ),
        ): prompt.name
        for prompt, name in zip(chosen, names, strict=True)
    }


async def fill_prompt(
    client: Client, prompt: ServerPrompt, own_name: str | None, arguments: Mapping[str, str]
) -> tuple[Part, ...]:
    """Have the server fill in a prompt. `own_name` is its name of it; None if it does not list the prompt any more."""
    failed = f"`/{prompt.name}` could not be used: MCP server {prompt.server}"
    if own_name is None:
        raise ToolServerError(f"{failed} has no such prompt any more.")
    try:
        filled = await client.get_prompt(own_name, dict(arguments))
    except Exception as error:  # a server's answer may raise anything in the library
        raise ToolServerError(f"{failed} did not give it: {describe_error(error)}") from error
    if not (parts := parts_of(filled)):
        raise ToolServerError(f"{failed} gave an empty prompt.")
    return parts


def parts_of(result: mcp.GetPromptResult) -> tuple[Part, ...]:
    """A filled prompt as the parts of one user message; says who speaks if it is not the user alone."""
    is_dialogue = any(message.role != "user" for message in result.messages)
    parts: list[Part] = []
    is_empty = True
    for message in result.messages:
        part = part_of(message.content)
        if is_dialogue:
            parts.append(Text(text=f"{message.role.capitalize()}:"))
        if not isinstance(part, Text) or part.text.strip():
            parts.append(part)
            is_empty = False
    return () if is_empty else tuple(parts)


def part_of(block: mcp.ContentBlock) -> Part:
    match block:
        case mcp.TextContent(text=text):
            return Text(text=encodable(text))
        case mcp.ImageContent(data=data, mime_type=kind):
            return picture(data, kind, None) or describe("a picture", kind, data)
        case mcp.AudioContent(data=data, mime_type=kind):
            return describe("a sound", kind, data)
        case mcp.ResourceLink(uri=uri, name=name, mime_type=mime_type):
            return Link(uri=encodable(uri), name=encodable(name), mime_type=mime_type)
        case mcp.EmbeddedResource(resource=mcp.TextResourceContents() as file):
            return Resource(uri=encodable(file.uri), text=encodable(file.text), mime_type=file.mime_type)
        case mcp.EmbeddedResource(resource=file):
            data = file.blob if isinstance(file, mcp.BlobResourceContents) else ""
            kind = file.mime_type or ""
            return picture(data, kind, file.uri) or describe(f"the file {file.uri}", kind, data)


def picture(data: str, mime_type: str, uri: str | None) -> Image | None:
    """An image that models take, with its base64 in the usual form; None for anything else."""
    try:
        raw = base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    if mime_type not in IMAGE_TYPES or not raw:
        return None
    return Image(data=base64.b64encode(raw).decode(), mime_type=mime_type, uri=uri)


def describe(what: str, mime_type: str, data: str) -> Text:
    kind = mime_type or "type unknown"
    return Text(text=f"({what} ({kind}, {count_bytes(data):,} bytes) came with the prompt; crow cannot read it.)")


def encodable(text: str) -> str:
    """`text` with lone surrogates replaced, since UTF-8 cannot encode them."""
    return text.encode("utf-8", "replace").decode("utf-8")
