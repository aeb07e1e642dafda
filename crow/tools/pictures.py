"""Pictures that models take, told by how their data begins.

Strategy: what is announced as a picture and is none would be refused by a provider in every later request, so nobody is
believed. Pure.
"""

from __future__ import annotations

import base64
import binascii

__all__ = ["PICTURE_BYTES", "picture_type", "sound_picture_type"]

PICTURE_BYTES = 3_000_000
"""More than that no provider takes for certain."""

PICTURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"RIFF", "image/webp"),
)


def picture_type(head: bytes) -> str | None:
    """The media type of a picture that models take, by how its file begins; None for anything else."""
    for start, media in PICTURES:
        if head.startswith(start) and (media != "image/webp" or head[8:12] == b"WEBP"):
            return media
    return None


def sound_picture_type(data: str) -> str | None:
    """The media type of a picture in base64 that can be sent to a model; None if it cannot."""
    try:
        whole = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None
    return picture_type(whole[:16]) if len(whole) <= PICTURE_BYTES else None
