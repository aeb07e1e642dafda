"""What an external MCP server gave or did, as an outcome and in words.

Strategy: text stays text, pictures stay pictures, everything else becomes words that say what it is; structured
content is shown where there is no text. Failures become one sentence that names the server, however deep the library
buried them in exception groups. Knows no connection.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping

import mcp_types as mcp
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError

from crow.domain.entries import Attachment
from crow.domain.messages import Image
from crow.tools import OnOutput, Outcome
from crow.tools.pictures import sound_picture_type

__all__ = ["outcome_of", "progress_shown", "sentence"]

SENTENCE_CHARS = 300
PROGRESS_LINES = 100
PROGRESS_EVERY_S = 0.1


def outcome_of(result: mcp.CallToolResult) -> Outcome:
    """A result as the model and the client get it."""
    pieces = [text for block in result.content if (text := text_of(block)) is not None]
    images = tuple(
        Image(data=block.data, mime_type=media)
        for block in result.content
        if isinstance(block, mcp.ImageContent) and (media := sound_picture_type(block.data)) is not None
    )
    structured = result.structured_content
    if not pieces and structured is not None:
        pieces = [json.dumps(structured, ensure_ascii=False, indent=2)]
    if not pieces:
        pieces = ["(a picture)" if images else "(no output)"]
    return Outcome(
        text="\n".join(pieces).encode("utf-8", "replace").decode("utf-8"),
        is_error=result.is_error,
        images=images,
        attachments=tuple(each for block in result.content if (each := attachment_of(block)) is not None),
        raw_output=structured if isinstance(structured, Mapping) else {},
    )


def text_of(block: mcp.ContentBlock) -> str | None:
    match block:
        case mcp.TextContent(text=text):
            return text
        case mcp.ImageContent():
            if sound_picture_type(block.data) is not None:
                return None
            return f"[a picture, {block.mime_type}, {bytes_in(block.data):,} bytes: of a kind that models cannot see]"
        case mcp.AudioContent():
            return f"[sound, {block.mime_type}, {bytes_in(block.data):,} bytes: not shown]"
        case mcp.ResourceLink():
            about = f": {block.description}" if block.description else ""
            return f"[{block.title or block.name}]({block.uri}){about}"
        case mcp.EmbeddedResource(resource=mcp.TextResourceContents() as resource):
            return f"{resource.uri}:\n{resource.text}"
        case mcp.EmbeddedResource(resource=resource):
            size = bytes_in(resource.blob) if isinstance(resource, mcp.BlobResourceContents) else 0
            return f"[{resource.uri}, {resource.mime_type or 'of unknown type'}, {size:,} bytes: not shown]"


def attachment_of(block: mcp.ContentBlock) -> Attachment | None:
    """What of a block is for the user, beside the words about it; None for text and pictures."""
    match block:
        case mcp.AudioContent():
            return Attachment(name="sound", mime_type=block.mime_type, data=block.data)
        case mcp.ImageContent() if sound_picture_type(block.data) is None:
            return Attachment(name="picture", mime_type=block.mime_type, data=block.data)
        case mcp.ResourceLink():
            return Attachment(name=block.title or block.name, uri=block.uri, mime_type=block.mime_type)
        case mcp.EmbeddedResource(resource=mcp.BlobResourceContents() as resource):
            uri = resource.uri
            return Attachment(name=uri, uri=uri, mime_type=resource.mime_type, data=resource.blob)
        case _:
            return None


def bytes_in(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def sentence(error: BaseException) -> str:
    """What went wrong, without the groups around it."""
    match error:
        case BaseExceptionGroup(exceptions=exceptions):
            return sentence(exceptions[0])
        case MCPError():
            return str(error.message) or f"error {error.code}"
        case FileNotFoundError() | PermissionError():
            return f"{error.strerror}: {error.filename}" if error.filename else str(error)
        case _:
            words = " ".join(str(error).split()) or type(error).__name__
            return words if len(words) <= SENTENCE_CHARS else words[:SENTENCE_CHARS] + "…"


def progress_shown(on_output: OnOutput) -> ProgressFnT:
    """Progress of a call as lines of output, the newest ones, at most ten times a second."""
    lines: list[str] = []
    shown_at = -math.inf

    async def report(progress: float, total: float | None, message: str | None) -> None:
        nonlocal shown_at
        share = f"{progress:g}" if total is None else f"{progress:g}/{total:g}"
        lines.append(f"{share} {message}" if message else share)
        del lines[:-PROGRESS_LINES]
        if time.monotonic() - shown_at >= PROGRESS_EVERY_S:
            shown_at = time.monotonic()
            await on_output("\n".join(lines))

    return report
