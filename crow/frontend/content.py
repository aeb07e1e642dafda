"""Content blocks of a prompt as parts, and parts as content blocks for replay.

Strategy: every block becomes a part; what cannot be used as it is becomes a sentence that says so, in the prompt
itself, so that neither the user nor the model wonders. Only what breaks the protocol's own types is refused, before
anything is stored. Reads no file: a link stays a link.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, assert_never
from urllib.parse import unquote

from crow.domain.errors import ArgumentError
from crow.domain.messages import Image, Link, Part, Resource, Text
from crow.frontend.tool_calls import PIECE_BYTES, head_and_tail, pieces

__all__ = ["blocks", "own_parts", "parts_from"]

URI_BYTES = 20_000

_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_DATA_URI = re.compile(r"data:([^;,]*)(?:;[^;,]*)*;base64,", re.IGNORECASE)
_KINDS = "text, image, audio, resource or resource_link"
_REPEATED = re.compile(r"<previous_user_message>(.*)</previous_user_message>", re.DOTALL)
_REPEATS = re.compile(
    r"<system_context>Continuing from previous session with (\d+) recent user messages</system_context>"
)


def parts_from(prompt: object) -> tuple[Part, ...]:
    """The parts of a prompt as `session/prompt` gives it: never empty, none of them empty.

    :raises ArgumentError: not a list of content blocks, or nothing in it; the message names the block.
    """
    if not isinstance(prompt, list):
        raise ArgumentError(f"prompt is {_shown(prompt)}; expected a list of content blocks.")
    parts = [part for index, block in enumerate(prompt) if (part := _part(f"prompt[{index}]", block)) is not None]
    if not any(not isinstance(part, Text) or part.text.strip() for part in parts):
        raise ArgumentError("The prompt is empty; send at least one content block with some text.")
    return tuple(parts)


def own_parts(parts: tuple[Part, ...], *, is_first: bool) -> tuple[Part, ...]:
    """The parts without the earlier prompts that some clients (avante) send again with every one.

    They put all of them into tags, the newest, which is meant, in front; and a sentence that counts them behind. What
    this session has is left out; in its first prompt the earlier ones are news, and stay, the oldest first.
    """
    texts = {index: part.text for index, part in enumerate(parts) if isinstance(part, Text)}
    told = {index: match for index, text in texts.items() if (match := _REPEATS.fullmatch(text))}
    repeated = {index: match[1] for index, text in texts.items() if (match := _REPEATED.fullmatch(text))}
    if not repeated or [int(match[1]) for match in told.values()] != [len(repeated)]:
        return parts
    newest, *earlier = repeated
    rest = tuple(part for index, part in enumerate(parts) if index not in repeated and index not in told)
    kept = tuple(parts[index] for index in reversed(earlier)) if is_first else ()
    return (*rest, *kept, Text(text=repeated[newest])) if repeated[newest].strip() else parts


def blocks(part: Part) -> tuple[dict[str, Any], ...]:
    """`part` as content blocks; a long text as several, and what no line can hold as a sentence."""
    match part:
        case Text(text=text):
            return tuple(_text_block(piece) for piece in pieces(text))
        case Image(data=data, mime_type=mime_type, uri=uri):
            if len(data) > PIECE_BYTES:
                return (_text_block(f"({_sized('an image', mime_type, data)}: too large to show again)"),)
            block = {"type": "image", "data": data, "mimeType": mime_type}
            return (block if uri is None else block | {"uri": head_and_tail(uri, URI_BYTES)},)
        case Resource(uri=uri, text=text, mime_type=mime_type):
            resource = {"uri": head_and_tail(uri, URI_BYTES), "text": head_and_tail(text, PIECE_BYTES)}
            if mime_type is not None:
                resource["mimeType"] = head_and_tail(mime_type, URI_BYTES)
            return ({"type": "resource", "resource": resource},)
        case Link(uri=uri, name=name, mime_type=mime_type):
            link = {
                "type": "resource_link",
                "uri": head_and_tail(uri, URI_BYTES),
                "name": head_and_tail(name, URI_BYTES),
            }
            return (link if mime_type is None else link | {"mimeType": head_and_tail(mime_type, URI_BYTES)},)
        case _:
            assert_never(part)


def _part(where: str, block: object) -> Part | None:
    if not isinstance(block, dict):
        raise ArgumentError(f'{where} is {_shown(block)}; expected a content block, such as {{"type": "text"}}.')
    match block.get("type"):
        case "text":
            text = _string(where, block, "text")
            return Text(text=text) if text else None
        case "image":
            return _image(where, block)
        case "audio":
            data, mime_type = _string(where, block, "data"), _string(where, block, "mimeType")
            return Text(text=f"({_sized('An audio clip', mime_type, data)} came with the prompt; crow cannot hear it.)")
        case "resource":
            return _resource(where, block.get("resource"))
        case "resource_link":
            uri = _string(where, block, "uri")
            if _DATA_URI.match(uri):
                return _binary(f"{where}.uri", uri, _mime(block) or "", None)
            name = block.get("name")
            return Link(uri=uri, name=name if isinstance(name, str) and name else _name(uri), mime_type=_mime(block))
        case kind:
            raise ArgumentError(f"{where}.type is {_shown(kind)}; expected {_KINDS}.")


def _image(where: str, block: Mapping[str, Any]) -> Part:
    data, mime_type = _string(where, block, "data"), _string(where, block, "mimeType")
    uri = block.get("uri") if isinstance(block.get("uri"), str) else None
    if not data and uri and _DATA_URI.match(uri):
        data, uri = uri, None
    if not data and uri:
        return Link(uri=uri, name=_name(uri), mime_type=mime_type or None)
    return _binary(f"{where}.data", data, mime_type, uri)


def _resource(where: str, resource: object) -> Part | None:
    where = f"{where}.resource"
    if not isinstance(resource, dict):
        raise ArgumentError(f"{where} is {_shown(resource)}; expected an object with uri and text or blob.")
    uri = _string(where, resource, "uri")
    if isinstance(resource.get("text"), str):
        return Resource(uri=uri, text=resource["text"], mime_type=_mime(resource))
    if isinstance(resource.get("blob"), str):
        return _binary(f"{where}.blob", resource["blob"], _mime(resource) or "", uri)
    raise ArgumentError(f"{where} has neither text nor blob; expected one of them as a string.")


def _binary(where: str, data: str, mime_type: str, uri: str | None) -> Part:
    """An image that models take, else the text that the bytes are, else a sentence about them."""
    embedded = _DATA_URI.match(data)
    if embedded is not None:
        data, mime_type = data[embedded.end() :], embedded[1] or mime_type
    mime_type = mime_type.strip().lower()
    raw = _decoded(where, data)
    kind = "image/jpeg" if mime_type == "image/jpg" else mime_type
    if kind in _IMAGE_TYPES and raw:
        # Encoded anew: what is stored goes into every later request, and providers refuse sloppy base64.
        return Image(data=base64.b64encode(raw).decode(), mime_type=kind, uri=uri)
    text = _as_text(raw)
    if text is not None:
        return Resource(uri=uri or "attachment", text=text, mime_type=mime_type or None)
    named = f"The file {head_and_tail(uri, URI_BYTES)}" if uri else "A file"
    what = _sized(named, mime_type or "type unknown", data)
    return Text(text=f"({what} came with the prompt; crow cannot read it.)")


def _decoded(where: str, data: str) -> bytes:
    packed = "".join(data.split())
    try:
        return base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ArgumentError(f"{where} is not base64: {error}.") from error


def _as_text(raw: bytes) -> str | None:
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _string(where: str, block: Mapping[str, Any], key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise ArgumentError(f"{where}.{key} is {_shown(value)}; expected a string.")
    return value


def _mime(block: Mapping[str, Any]) -> str | None:
    value = block.get("mimeType")
    return value if isinstance(value, str) and value else None


def _name(uri: str) -> str:
    path = unquote(uri.split("?", 1)[0].split("#", 1)[0]).replace("\\", "/")
    return PurePosixPath(path).name or uri


def _sized(what: str, mime_type: str, data: str) -> str:
    return f"{what} ({mime_type[:100]}, {len(data) * 3 // 4:,} bytes)"


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _shown(value: object) -> str:
    match value:
        case None:
            return "missing"
        case str():
            return f'"{value[:60]}"'
        case bool() | int() | float():
            return str(value).lower()
        case _:
            return "an object" if isinstance(value, dict) else "a list"
