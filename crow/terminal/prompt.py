"""Builds the prompt of `crow run` from arguments, standard input and attached files."""

from __future__ import annotations

import argparse
import base64
import os
import select
import stat
import sys
from pathlib import Path
from typing import Any

from crow.domain.errors import ArgumentError

_INPUT_BYTES = 1_000_000
"""The maximum number of bytes that crow reads from standard input, or from the file of --prompt-file or --schema."""

_ATTACHED_BYTES = 200_000
"""The maximum size in bytes of a --file whose content becomes part of the prompt. For a larger file, the prompt
contains only a link, and the model reads the parts that it needs."""

_IMAGE_BYTES = 15_000_000
_STDIN_HINT_S = 2.0

_IMAGE_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif"}
_IMAGE_TYPES |= {".webp": "image/webp"}


def read_prompt(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the content blocks of the prompt. :raises ArgumentError: there is no prompt, or a file cannot be read."""
    texts = [] if options.prompt_file is None else [read_text("--prompt-file", options.prompt_file)]
    texts += [] if options.prompt in (None, "-") else [options.prompt]
    blocks = [text_block("\n\n".join(texts))] if any(text.strip() for text in texts) else []
    if (given := _read_stdin()).strip():
        blocks.append(text_block(f"Standard input:\n\n{given}" if blocks else given))
    if not blocks:
        raise ArgumentError('There is no prompt. Give one as an argument, such as crow run "explain this repository".')
    return [*blocks, *map(_file_block, options.file), *map(_image_block, options.image)]


def text_block(text: str) -> dict[str, Any]:
    """Return the content block of a text."""
    return {"type": "text", "text": text}


def _read_stdin() -> str:
    """Return standard input, or an empty text if standard input is a terminal. At most `_INPUT_BYTES` are returned.
    Tell the user if crow has to wait for the input or cuts it."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    fd = sys.stdin.fileno()
    if not stat.S_ISREG(os.fstat(fd).st_mode) and not select.select([fd], [], [], _STDIN_HINT_S)[0]:
        print("crow: reading standard input until it ends; use </dev/null to send none", file=sys.stderr)
    with os.fdopen(fd, "rb", closefd=False) as file:
        data = file.read(_INPUT_BYTES + 1)
    if len(data) <= _INPUT_BYTES:
        return _decoded("Standard input", data)
    print(f"crow: standard input is cut after {_INPUT_BYTES:,} bytes", file=sys.stderr)
    return f"{_decoded('Standard input', data[:_INPUT_BYTES])}\n[cut here: crow reads {_INPUT_BYTES:,} bytes at most]"


def read_text(option: str, path: str) -> str:
    """Return the text of the file to which `option` is set. :raises ArgumentError: the file cannot be read, is too
    large, or is not text."""
    try:
        with open(path, "rb") as file:
            data = file.read(_INPUT_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"{option} {path}: {error.strerror or error}") from None
    if len(data) > _INPUT_BYTES:
        raise ArgumentError(f"{option} {path} has more than {_INPUT_BYTES:,} bytes; attach it with --file instead.")
    return _decoded(f"{option} {path}", data)


def _decoded(source: str, data: bytes) -> str:
    """Return `data` as text. `source` tells the user, in an error, where the data comes from. :raises ArgumentError:
    the data is not text."""
    if b"\0" in data:
        raise ArgumentError(
            f"{source} is not text: it has a zero byte. For a binary file, write its path in the prompt."
        )
    return data.decode("utf-8", "replace")


def _file_block(path: str) -> dict[str, Any]:
    """Return the content of a small text file, or a link to any other file. :raises ArgumentError: there is no such
    file."""
    place = Path(path).resolve()
    try:
        is_small = place.is_file() and place.stat().st_size <= _ATTACHED_BYTES
        data = place.read_bytes() if is_small else b"\0"
        place.stat()
    except OSError as error:
        raise ArgumentError(f"--file {path}: {error.strerror or error}") from None
    try:
        text = data.decode() if b"\0" not in data else None
    except UnicodeDecodeError:
        text = None
    if text is None:
        return {"type": "resource_link", "uri": place.as_uri(), "name": place.name}
    return {"type": "resource", "resource": {"uri": place.as_uri(), "text": text}}


def _image_block(path: str) -> dict[str, Any]:
    """Return the content block of an image. :raises ArgumentError: the file is not an image that crow sends, cannot be
    read, or is too large."""
    mime_type = _IMAGE_TYPES.get(Path(path).suffix.lower())
    if mime_type is None:
        raise ArgumentError(f"--image {path}: expected a file that ends with {', '.join(_IMAGE_TYPES)}.")
    try:
        with open(path, "rb") as file:
            data = file.read(_IMAGE_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"--image {path}: {error.strerror or error}") from None
    if len(data) > _IMAGE_BYTES:
        raise ArgumentError(f"--image {path} has more than {_IMAGE_BYTES:,} bytes; scale the image down.")
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": mime_type}


def mentioned_block(path: str) -> dict[str, Any]:
    """Return the content of an image that a prompt mentions, or a link to any other file. The front end attaches the
    content of small text files."""
    if Path(path).suffix.lower() in _IMAGE_TYPES:
        return _image_block(path)
    return {"type": "resource_link", "uri": Path(path).as_uri(), "name": Path(path).name}
