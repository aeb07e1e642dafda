"""Attaches small text files of the workspace that a prompt links to.

Files are read as the editor has them, including unsaved text. A file that a deny rule forbids is not attached. All
other links stay unchanged, and the model can open them with its tools. If a file cannot be read, the prompt does not
fail. The time for reading is limited.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

import anyio
import anyio.to_thread

from crow.agent.permissions.decisions import may_attach
from crow.agent.permissions.rules import PermissionRule
from crow.domain.errors import CrowError
from crow.domain.messages import Link, Part, Resource
from crow.tools import Workspace

_MAX_BYTES = 32 * 1024
"""Larger files are not attached."""
_READ_S = 3.0
"""The files of one prompt are read for at most this many seconds."""
_DRIVE = re.compile(r"/?[A-Za-z]:[\\/]")
"""Matches the beginning of a Windows path, whose drive would look like the scheme of a URI."""


async def attach_files(
    parts: Sequence[Part], workspace: Workspace, rules: Sequence[PermissionRule] = ()
) -> tuple[Part, ...]:
    """Return the parts of a prompt. Links to small text files of the workspace are replaced with the files."""
    found = list(parts)
    with anyio.move_on_after(_READ_S):
        for index, part in enumerate(parts):
            if isinstance(part, Link):
                found[index] = await _with_content(part, workspace, rules)
    return tuple(found)


async def _with_content(link: Link, workspace: Workspace, rules: Sequence[PermissionRule]) -> Link | Resource:
    name = path_of(link.uri)
    if name is None:
        return link
    try:
        path = workspace.resolve(name)
        if not workspace.contains(path) or not await anyio.to_thread.run_sync(may_attach, path, workspace, rules):
            return link
        found = await workspace.stat(path)
        if found.kind != "file" or found.size > _MAX_BYTES or b"\0" in (data := await workspace.read_bytes(path)):
            return link
        data.decode()
        text = await workspace.read_text(path)
    except (OSError, ValueError, CrowError):  # missing, not text, refused by the editor, or not a valid path
        return link
    return Resource(uri=link.uri, text=text, mime_type=link.mime_type)


def path_of(uri: str) -> str | None:
    """Return the path in a file URI or in a plain path, without line numbers. Return None for anything else."""
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
