"""Functions for message content and JSON that the encoders of all wires share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import assert_never

from crow.domain import messages as domain
from crow.llm.dialect import Dialect
from crow.llm.sse import replace_lone

EMPTY_TEXT = "(empty message)"
"""Sent in place of a message without words, which endpoints refuse."""

NO_OUTPUT = "(no output)"
"""Sent in place of an empty tool result."""

GO_ON = "Continue."
"""Sent as a message of the user if the endpoint needs one to continue its answer."""


def user_content(parts: Sequence[domain.Part], dialect: Dialect) -> list[str | domain.Image | domain.File]:
    """Return the texts, images and files of a user message in order. Adjacent texts are joined. If there are no images
    and files, the result is exactly one text."""
    content: list[str | domain.Image | domain.File] = []
    texts: list[str] = []
    before: domain.Part | None = None
    for part in parts:
        if isinstance(part, domain.Text) and isinstance(before, domain.Text):
            # Two adjacent texts are separate paragraphs. A link belongs to the sentence around it.
            texts.append("\n\n")
        before = part
        match part:
            case domain.Text(text=text):
                texts.append(text)
            case domain.Link(uri=uri, name=name):
                texts.append(f"[{name}]({uri})")
            case domain.Resource(uri=uri, text=text):
                texts.append(f'\n<resource uri="{uri}">\n{text}\n</resource>\n')
            case domain.Image() if not dialect.sends_images:
                texts.append(f"\n{_image_left_out(part)}\n")
            case domain.File() if not dialect.sends_files:
                texts.append(f"\n{_file_left_out(part)}\n")
            case domain.Image() | domain.File():
                content += [_joined(texts)] if texts else []
                texts = []
                content.append(part)
            case _ as never:
                assert_never(never)
    return [*content, _joined(texts)] if texts or not content else content


def result_content(
    message: domain.ToolMessage, dialect: Dialect
) -> tuple[str, tuple[domain.Image, ...], tuple[domain.File, ...]]:
    """Return the text, the images and the files of a tool result. If the model does not take images or files, the text
    says that they were left out."""
    images = message.images if dialect.sends_images else ()
    files = message.files if dialect.sends_files else ()
    if images == message.images and files == message.files:
        return message.text, images, files
    notes = [_image_left_out(image) for image in message.images[len(images) :]]
    notes += [_file_left_out(file) for file in message.files[len(files) :]]
    return "\n".join((message.text, *notes)), images, files


def _image_left_out(image: domain.Image) -> str:
    """Return the text that takes the place of an image."""
    return f"[An image ({image.mime_type}, {_kilobytes(image.data)} KB) was left out: this model takes no images.]"


def _file_left_out(file: domain.File) -> str:
    return (
        f"[The file {file.name} ({file.mime_type}, {_kilobytes(file.data)} KB) was left out: this model takes no files."
        " A program such as pdftotext may give its text.]"
    )


def _kilobytes(data: str) -> int:
    return max(1, len(data) * 3 // 4 // 1024)


def data_url(part: domain.Image | domain.File) -> str:
    """Return a `data:` URL with the content of an image or a file."""
    return f"data:{part.mime_type};base64,{part.data}"


def is_paused(message: domain.Message | None) -> bool:
    """Return whether `message` is an answer that the endpoint has paused and wants to continue."""
    return isinstance(message, domain.AssistantMessage) and message.is_paused


def json_bytes(value: object) -> bytes:
    """Return `value` as compact JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return replace_lone(text).encode()


def _joined(texts: Sequence[str]) -> str:
    text = "".join(texts).strip("\n")
    return text if text.strip() else EMPTY_TEXT


def _plain(value: object) -> object:
    """Return a read-only mapping as a dict, which `json` can write."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
