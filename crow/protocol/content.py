"""Converts the content blocks of a prompt into parts, and parts back into content blocks."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, assert_never
from urllib.parse import unquote

from crow.domain.errors import ArgumentError
from crow.domain.messages import PDF_BYTES, PDF_START, PDF_TYPE, File, Image, Link, Part, Resource, Text
from crow.domain.rendering import file_name
from crow.protocol.frames import describe_member, text_in
from crow.protocol.sizes import PIECE_BYTES, limit_text, split_text

_URI_BYTES = 20_000
"""The limit for a URI or a name that is sent to a client."""

_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_DATA_URI = re.compile(r"data:([^;,]*)(?:;[^;,]*)*;base64,", re.IGNORECASE)
_REPEATED_PROMPT = re.compile(r"<previous_user_message>(.*)</previous_user_message>", re.DOTALL)
_REPEATED_COUNT = re.compile(
    r"<system_context>Continuing from previous session with (\d{1,6}) recent user messages</system_context>"
)


def parts_from(prompt: object) -> tuple[Part, ...]:
    """Convert the `prompt` of `session/prompt` into parts. Return at least one part. Empty text blocks are left out.

    Content that crow cannot use is replaced by a sentence that says so. The files and pages behind links are not read
    here.

    :raises ArgumentError: the prompt is empty, or a content block is invalid. The message names the block.
    """
    if not isinstance(prompt, list):
        raise ArgumentError(f"prompt is {describe_member(prompt)}; expected a list of content blocks.")
    parts = [part for index, block in enumerate(prompt) if (part := _part(f"prompt[{index}]", block)) is not None]
    if all(isinstance(part, Text) and not part.text.strip() for part in parts):
        raise ArgumentError("The prompt is empty; send at least one content block with some text.")
    return tuple(parts)


def without_repeated_prompts(parts: tuple[Part, ...], *, is_first: bool) -> tuple[Part, ...]:
    """Remove the earlier prompts that some clients (avante) repeat with every new prompt.

    Such a client encloses each prompt in tags, starts with the newest prompt, and adds a sentence with the number of
    prompts. If `is_first` is set, this is the first prompt of the session, so the earlier prompts are new to crow. They
    are then kept, with the oldest one first.
    """
    texts = {index: part.text for index, part in enumerate(parts) if isinstance(part, Text)}
    counts = {index: match[1] for index, text in texts.items() if (match := _REPEATED_COUNT.fullmatch(text))}
    prompts = {index: match[1] for index, text in texts.items() if (match := _REPEATED_PROMPT.fullmatch(text))}
    if not prompts or [int(count) for count in counts.values()] != [len(prompts)]:
        return parts
    newest, *earlier = prompts
    if not prompts[newest].strip():
        return parts
    rest = [part for index, part in enumerate(parts) if index not in prompts and index not in counts]
    kept = [parts[index] for index in reversed(earlier)] if is_first else []
    return (*rest, *kept, Text(text=prompts[newest]))


def blocks(part: Part) -> tuple[dict[str, Any], ...]:
    """Convert `part` into content blocks. A long text becomes several blocks. A very large image is replaced by a
    sentence."""
    match part:
        case Text(text=text):
            return tuple({"type": "text", "text": piece} for piece in split_text(text))
        case Image(data=data, mime_type=mime_type, uri=uri):
            if len(data) > PIECE_BYTES:
                return ({"type": "text", "text": f"({_sized('an image', mime_type, data)}: too large to show again)"},)
            return ({"type": "image", "data": data, "mimeType": mime_type} | _optional("uri", uri),)
        case File(name=name, data=data, mime_type=mime_type, uri=uri):
            if len(data) > PIECE_BYTES:
                return (
                    {
                        "type": "text",
                        "text": f"({_sized(f'the file {name}', mime_type, data)}: too large to show again)",
                    },
                )
            file = {"uri": limit_text(uri or name, _URI_BYTES), "blob": data, "mimeType": mime_type}
            return ({"type": "resource", "resource": file},)
        case Resource(uri=uri, text=text, mime_type=mime_type):
            resource = {"uri": limit_text(uri, _URI_BYTES), "text": limit_text(text, PIECE_BYTES)}
            return ({"type": "resource", "resource": resource | _optional("mimeType", mime_type)},)
        case Link(uri=uri, name=name, mime_type=mime_type):
            link = {"uri": limit_text(uri, _URI_BYTES), "name": limit_text(name, _URI_BYTES)}
            return ({"type": "resource_link"} | link | _optional("mimeType", mime_type),)
        case _:
            assert_never(part)


def _optional(key: str, value: str | None) -> dict[str, str]:
    return {} if value is None else {key: limit_text(value, _URI_BYTES)}


def _part(where: str, block: object) -> Part | None:
    if not isinstance(block, dict):
        raise ArgumentError(
            f'{where} is {describe_member(block)}; expected a content block, such as {{"type": "text"}}.'
        )
    match block.get("type"):
        case "text":
            text = text_in(block, "text", f"{where}.")
            return Text(text=text) if text else None
        case "image":
            data, mime_type = text_in(block, "data", f"{where}."), text_in(block, "mimeType", f"{where}.")
            uri = _optional_string(block, "uri")
            if not data and uri and _DATA_URI.match(uri):
                data, uri = uri, None
            if not data and uri:
                return Link(uri=uri, name=_name(uri), mime_type=mime_type or None)
            return _binary(f"{where}.data", data, mime_type, uri)
        case "audio":
            data, mime_type = text_in(block, "data", f"{where}."), text_in(block, "mimeType", f"{where}.")
            clip = _sized("An audio clip", mime_type, data)
            return Text(text=f"({clip} is attached; crow cannot play audio.)")
        case "resource":
            return _resource(f"{where}.resource", block.get("resource"))
        case "resource_link":
            uri, link_type = text_in(block, "uri", f"{where}."), _optional_string(block, "mimeType")
            if _DATA_URI.match(uri):
                return _binary(f"{where}.uri", uri, link_type or "", None)
            return Link(uri=uri, name=_optional_string(block, "name") or _name(uri), mime_type=link_type)
        case kind:
            known = "text, image, audio, resource or resource_link"
            raise ArgumentError(f"{where}.type is {describe_member(kind)}; expected {known}.")


def _resource(where: str, resource: object) -> Part:
    if not isinstance(resource, dict):
        raise ArgumentError(
            f'{where} is {describe_member(resource)}; expected an object with "uri" and either "text" or "blob".'
        )
    uri, mime_type = text_in(resource, "uri", f"{where}."), _optional_string(resource, "mimeType")
    match resource:
        case {"text": str(text)}:
            return Resource(uri=uri, text=text, mime_type=mime_type)
        case {"blob": str(blob)}:
            return _binary(f"{where}.blob", blob, mime_type or "", uri)
        case _:
            raise ArgumentError(f'{where} has neither "text" nor "blob"; expected one of them as a string.')


def _binary(where: str, data: str, mime_type: str, uri: str | None) -> Part:
    """Convert base64 data or a data URI into a part.

    The part is an image if models accept images of this type, and a file if it is a PDF of at most `PDF_BYTES`.
    Otherwise, it is a resource if the data is text. In all other cases, it is a sentence that describes the file and
    says that crow cannot read it.
    """
    data_uri = _DATA_URI.match(data)
    if data_uri is not None:
        data, mime_type = data[data_uri.end() :], data_uri[1] or mime_type
    mime_type = mime_type.strip().lower()
    packed = "".join(data.split())
    try:
        raw = base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ArgumentError(f"{where} is not base64: {error}.") from error
    image_type = "image/jpeg" if mime_type == "image/jpg" else mime_type
    if image_type in _IMAGE_TYPES and raw:
        # Encode the image again: it is sent with every later request, and providers reject malformed base64.
        return Image(data=base64.b64encode(raw).decode(), mime_type=image_type, uri=uri)
    if raw.startswith(PDF_START) and len(raw) <= PDF_BYTES:
        name = file_name(unquote(uri)) if uri else "attachment.pdf"
        return File(name=name, data=base64.b64encode(raw).decode(), mime_type=PDF_TYPE, uri=uri)
    try:
        if b"\0" not in raw and (raw or image_type not in _IMAGE_TYPES):
            return Resource(uri=uri or "attachment", text=raw.decode(), mime_type=mime_type or None)
    except UnicodeDecodeError:
        pass
    file = _sized(f"The file {limit_text(uri, _URI_BYTES)}" if uri else "A file", mime_type or "unknown type", data)
    return Text(text=f"({file} is attached; crow cannot read it.)")


def _optional_string(block: Mapping[str, Any], key: str) -> str | None:
    value = block.get(key)
    return value if isinstance(value, str) and value else None


def _name(uri: str) -> str:
    path = unquote(uri.split("?", 1)[0].split("#", 1)[0]).replace("\\", "/")
    return PurePosixPath(path).name or uri


def _sized(what: str, mime_type: str, data: str) -> str:
    return f"{what} ({mime_type[:100]}, {len(data) * 3 // 4:,} bytes)"
