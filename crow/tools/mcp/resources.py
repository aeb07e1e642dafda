"""Lists the resources of MCP servers, describes them to the model, and converts their contents."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio
import mcp_types as mcp
from mcp.client import Client

from crow.domain.entries import Attachment
from crow.domain.messages import Image
from crow.domain.text import on_one_line, shorten
from crow.tools import Outcome
from crow.tools.builtin.media import sound_pdf, sound_picture_type
from crow.tools.mcp.calls import count_bytes, describe_error, encodable
from crow.tools.mcp.listing import MAX_RESOURCES, MAX_TEMPLATES, pages
from crow.tools.mcp.names import URI_CHARS

logger = logging.getLogger(__name__)

_MAX_SHOWN = 100
"""The maximum number of resources in a listing for the model."""
_MAX_CONTENTS = 100
"""The maximum number of parts of one resource that are returned."""
_LISTING_S = 10.0
_NAME_CHARS = 100
_ABOUT_CHARS = 200
_ATTACHED_BYTES = 10_000_000
"""Binary contents above this size, in bytes, are described but not shown to the user."""

_COMPLETIONS = 100
"""The maximum number of suggested values for a variable of a template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalResource:
    """A resource that a server lists, or a template for the URIs of resources."""

    uri: str
    about: str = ""
    """A description for the model."""
    is_template: bool = False

    @property
    def line(self) -> str:
        """The resource as one entry of a listing for the model."""
        return f"- {'template ' if self.is_template else ''}{self.uri}{f'  {self.about}' if self.about else ''}"


async def list_resources(client: Client, server: str) -> tuple[ExternalResource, ...]:
    """Return the resources and templates of a server, in the server's order. The result is empty or incomplete if a
    listing fails."""
    if client.server_capabilities.resources is None:
        return ()
    resources: dict[str, ExternalResource] = {}
    templates: dict[str, ExternalResource] = {}
    try:
        with anyio.fail_after(_LISTING_S):
            async for page in pages(client.list_resources):
                for one in page.resources:
                    resources.setdefault(one.uri, _external_resource(one))
                if len(resources) >= MAX_RESOURCES:
                    logger.warning("MCP server %s: only %s resources are listed", server, f"{MAX_RESOURCES:,}")
                    break
    except Exception as error:  # noqa: BLE001 - the tools of the server must stay usable, whatever fails here
        logger.warning("MCP server %s did not list its resources: %s", server, describe_error(error))
    try:
        with anyio.fail_after(_LISTING_S):
            async for more in pages(client.list_resource_templates):
                for each in more.resource_templates:
                    templates.setdefault(each.uri_template, _external_resource(each))
                if len(templates) >= MAX_TEMPLATES:
                    break
    except Exception as error:  # noqa: BLE001 - many servers have resources and no templates
        logger.info("MCP server %s did not list templates of resources: %s", server, describe_error(error))
    return (*list(templates.values())[:MAX_TEMPLATES], *list(resources.values())[:MAX_RESOURCES])


def _external_resource(found: mcp.Resource | mcp.ResourceTemplate) -> ExternalResource:
    """Convert a listed resource or template."""
    is_template = isinstance(found, mcp.ResourceTemplate)
    uri = found.uri_template if isinstance(found, mcp.ResourceTemplate) else found.uri
    size = None if isinstance(found, mcp.ResourceTemplate) or found.size is None else f"{found.size:,} bytes"
    name = _short_line(found.title or found.name, _NAME_CHARS)
    kind = _short_line(found.mime_type or "", _NAME_CHARS)
    about = ", ".join(filter(None, ("" if name == uri else name, kind, size)))
    if found.description:
        about += f"{': ' if about else ''}{_short_line(found.description, _ABOUT_CHARS)}"
    return ExternalResource(uri=uri, about=about, is_template=is_template)


def _short_line(text: str, limit: int) -> str:
    """Return the beginning of a server's text on one line, with hidden characters escaped."""
    return shorten(on_one_line(text[: 2 * limit]), limit)


def describe_resources(servers: Mapping[str, Sequence[ExternalResource]], query: str) -> str:
    """Return a listing for the model. It contains those resources of each server whose URI and description together
    contain all words of the query."""
    words = query.lower().split()
    blocks: list[str] = []
    room, total = _MAX_SHOWN, 0
    for name, resources in servers.items():
        matching = [one for one in resources if all(word in one.line.lower() for word in words)]
        total += len(matching)
        shown = matching[:room]
        room -= len(shown)
        if shown:
            blocks.append("\n".join([f"{name}:", *(one.line for one in shown)]))
    if not blocks:
        count = sum(map(len, servers.values()))
        return f'None of {count:,} resources matches "{query}".' if words else "There are no resources."
    if total > _MAX_SHOWN:
        blocks.append(f"[{total - _MAX_SHOWN:,} more; narrow the query]")
    return "\n\n".join(blocks)


def outcome_of_resource(uri: str, result: mcp.ReadResourceResult) -> Outcome:
    """Return the contents of a resource for the model and the user. Each part has a heading, except a text that is the
    only part."""
    pieces: list[str] = []
    images: list[Image] = []
    attachments: list[Attachment] = []
    contents = result.contents[:_MAX_CONTENTS]
    for content in contents:
        heading = _short_line(content.uri, URI_CHARS)
        if isinstance(content, mcp.TextResourceContents):
            is_alone = len(contents) == 1 and content.uri == uri
            pieces.append(content.text if is_alone else f"{heading}:\n{content.text}")
            continue
        size = count_bytes(content.blob)
        kind = content.mime_type or "of unknown type"
        if (media := sound_picture_type(content.blob)) is not None:
            images.append(Image(data=content.blob, mime_type=media))
            pieces.append(f"[{heading}: a picture]")
        elif (pdf := sound_pdf(content.blob, heading)) is not None:
            attachments.append(pdf)
            pieces.append(f"[{heading}: a PDF, {size:,} bytes]")
        else:
            pieces.append(
                f"[{heading}, {_short_line(kind, _NAME_CHARS)}, {size:,} bytes: binary, models cannot read it]"
            )
            if size <= _ATTACHED_BYTES:
                attachments.append(
                    Attachment(name=heading, uri=heading, mime_type=content.mime_type, data=content.blob)
                )
    if len(result.contents) > _MAX_CONTENTS:
        pieces.append(f"[{len(result.contents) - _MAX_CONTENTS:,} more parts are left out]")
    return Outcome(text=encodable("\n".join(pieces) or "(empty)"), images=tuple(images), attachments=tuple(attachments))


def completions_of(result: mcp.CompleteResult, variable: str) -> str:
    """Return a text for the model with the values that a server suggests for a variable of a template."""
    values = [_short_line(value, URI_CHARS) for value in result.completion.values[:_COMPLETIONS]]
    if not values:
        return f"The server suggests no values for {variable}."
    has_more = result.completion.has_more or len(result.completion.values) > _COMPLETIONS
    return "\n".join([f"Values for {variable}:", *values, *(["[there are more; give a beginning]"] * bool(has_more))])
