"""Recognises images and PDFs that models accept."""

from __future__ import annotations

import base64
import binascii
import re

from crow.domain.entries import Attachment
from crow.domain.messages import PDF_BYTES, PDF_START, PDF_TYPE

IMAGE_BYTES = 3_000_000
"""Some providers refuse images with more bytes."""

_IMAGE = re.compile(
    rb"(?P<png>\x89PNG\r\n\x1a\n)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8[79]a)|(?P<webp>RIFF.{4}WEBP)", re.DOTALL
)


def image_type(head: bytes) -> str | None:
    """Detect the media type of an image from its first bytes. Return None for anything other than an image that models
    accept.

    A declared media type is ignored, because it may be wrong. Providers refuse every later request that contains an
    image with a wrong type.
    """
    found = _IMAGE.match(head)
    return None if found is None else f"image/{found.lastgroup}"


def sound_picture_type(data: str) -> str | None:
    """Return the media type of a base64 image. Return None if the data is invalid, too large, or not an image that
    models accept."""
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None
    return image_type(decoded[:16]) if len(decoded) <= IMAGE_BYTES else None


def sound_pdf(data: str, uri: str) -> Attachment | None:
    """Return a PDF that an MCP server sent as base64 `data`, as an attachment for the model. `uri` is its address on
    the server. Return None if the data is invalid, too large, or no PDF."""
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None
    if not decoded.startswith(PDF_START) or len(decoded) > PDF_BYTES:
        return None
    return Attachment(name=uri, uri=uri, mime_type=PDF_TYPE, data=data, for_model=True)
