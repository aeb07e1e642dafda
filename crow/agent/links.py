"""Links of a prompt that point into the workspace, with what they point at.

Strategy: a small text file is read where the editor has it (unsaved text too) and goes along with the prompt; anything
else stays a link, which the model can open with its tools. Reading never fails a prompt and is bounded in time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import anyio

from crow.domain.errors import CrowError
from crow.domain.messages import Link, Part, Resource

if TYPE_CHECKING:
    from crow.tools import Workspace

__all__ = ["path_of", "with_contents"]

MOST_BYTES = 32 * 1024
READ_S = 3.0
_DRIVE = re.compile(r"/?[A-Za-z]:[\\/]")


async def with_contents(parts: Sequence[Part], workspace: Workspace) -> tuple[Part, ...]:
    """The parts, links to small text files of the workspace replaced by these files."""
    if not any(isinstance(part, Link) for part in parts):
        return tuple(parts)
    found = list(parts)
    with anyio.move_on_after(READ_S):
        for index, part in enumerate(parts):
            if isinstance(part, Link):
                found[index] = await _opened(part, workspace)
    return tuple(found)


def path_of(uri: str) -> str | None:
    """The path that a file URI or a plain path names, without line numbers; None for anything else."""
    if _DRIVE.match(uri):
        return uri.partition("#")[0]
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost") or not parts.path:
        return None
    path = unquote(parts.path) if parts.scheme else parts.path
    return path[1:] if parts.scheme and _DRIVE.match(path) else path


async def _opened(link: Link, workspace: Workspace) -> Part:
    name = path_of(link.uri)
    if name is None:
        return link
    try:
        path = workspace.resolve(name)
        if not workspace.contains(path):
            return link
        found = await workspace.stat(path)
        if found.kind != "file" or found.size > MOST_BYTES:
            return link
        if "\0" in (await workspace.read_bytes(path)).decode():
            return link
        text = await workspace.read_text(path)
    except (OSError, ValueError, CrowError):  # not there, not text, refused by the editor, no path at all
        return link
    return Resource(uri=link.uri, text=text, mime_type=link.mime_type)
