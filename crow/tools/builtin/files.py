"""`write_file`, and what the tools that touch files share.

A write states what it replaces, and the log keeps that before the file changes. What an offer says of a file outside
the workspace is its name alone: nothing about it reaches the model unasked.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread

from crow.domain.entries import Announcement, Diff, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.tools import FileStat, Offer, Outcome, Workspace
from crow.tools.builtin.tool import Arguments, Around, Builtin, Running, path_names, shown_name, shown_path

__all__ = ["PATH", "WHOLE_BYTES", "WRITE_FILE", "change", "missing", "own_file", "regular_file"]

WHOLE_BYTES = 32_000_000
NAMES_LOOKED_AT = 10_000
NAMES_COMPARED = 500
COMPARED_CHARS = 60


async def regular_file(tool: str, workspace: Workspace, path: Path, *, head: int = 0) -> FileStat:
    """What is at `path`, with its first `head` bytes. :raises ~crow.domain.errors.ArgumentError: it is no regular
    file."""
    stat = await workspace.stat(path, head=head)
    match stat.kind:
        case "missing":
            raise await missing(tool, workspace, path)
        case "directory":
            raise ArgumentError(f"{tool}: {shown_name(workspace, path)} is a directory; use list_files")
        case "other":
            raise ArgumentError(
                f"{tool}: {shown_name(workspace, path)} is a device, pipe or socket; expected a regular file"
            )
    return stat


async def missing(tool: str, workspace: Workspace, path: Path) -> ArgumentError:
    """The error for a file that does not exist, with similar names of its directory."""
    directory = path.parent
    names = await anyio.to_thread.run_sync(names_in, directory)
    if names is None:
        where = shown_name(workspace, directory)
        return ArgumentError(
            f"{tool}: {shown_name(workspace, path)} does not exist; neither does the directory {where}"
        )
    similar = await anyio.to_thread.run_sync(similar_names, path.name, names)
    hint = "; use list_files to see what is there"
    if similar:
        hint = "; similar: " + ", ".join(shown_name(workspace, directory / name) for name in similar)
    return ArgumentError(f"{tool}: {shown_name(workspace, path)} does not exist{hint}")


def similar_names(wanted: str, names: Sequence[str]) -> list[str]:
    """Up to three of the names that are close to one that is not there. Comparing two of n characters takes n² steps or
    more, so long names are compared by their beginnings, and only some where there are many."""
    start = wanted.casefold()[:COMPARED_CHARS]
    folded = {name.casefold()[:COMPARED_CHARS]: name for name in names}
    likely = sorted(folded, key=lambda name: (name[:1] != start[:1], abs(len(name) - len(start))))[:NAMES_COMPARED]
    return [folded[name] for name in difflib.get_close_matches(start, likely, n=3, cutoff=0.6)]


def names_in(directory: Path) -> list[str] | None:
    """Some names in a directory, None if it is none."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry, _ in zip(entries, range(NAMES_LOOKED_AT), strict=False)]
    except OSError:
        return None


async def look_at_write(around: Around, args: Arguments) -> Offer:
    workspace = around.workspace
    path = workspace.resolve(args["path"])
    outside = not workspace.contains(path)
    stat = await workspace.stat(path)
    fault = own_file("write_file", workspace, path) or (None if outside else unwritable(workspace, stat))
    before = await workspace.read_text(path) if stat.kind == "file" and stat.size <= WHOLE_BYTES else None
    if fault is None and not outside:
        fault = stale(around, path, before)
    shown = shown_path(workspace, path)
    return Offer(
        announcement=Announcement(
            title=f"Write {shown_name(workspace, path)}",
            kind="edit",
            locations=(Location(path=shown),),
            diffs=(Diff(path=shown, old_text=before, new_text=args["content"]),),
        ),
        access="write",
        outside=outside,
        paths=path_names(workspace, path),
        fault=fault,
        is_protected=workspace.protection(path) == "ask",
        is_barrier=True,
    )


def stale(around: Around, path: Path, text: str | None) -> str | None:
    """Why a file may not be replaced by a model that knows another text of it, None if it may."""
    if text is None:  # removed since: what is written then replaces nothing
        return None
    try:
        around.seen.check(path, text, tool="write_file", name=shown_name(around.workspace, path))
    except ArgumentError as error:
        return str(error)
    return None


def own_file(tool: str, workspace: Workspace, path: Path) -> str | None:
    """Why a path of crow's own cannot be written, None for any other."""
    if workspace.protection(path) != "never":
        return None
    return f"{tool}: {shown_name(workspace, path)} belongs to crow itself; tell the user what to change there"


def unwritable(workspace: Workspace, stat: FileStat) -> str | None:
    """Why what is there cannot be replaced by a file, None if it can."""
    if stat.size > WHOLE_BYTES:
        name = shown_name(workspace, stat.path)
        return f"write_file: {name} holds {stat.size:,} bytes, more than can be kept for undoing; use shell"
    if stat.kind in ("file", "missing"):
        return None
    kind = "a directory" if stat.kind == "directory" else "a device, pipe or socket"
    return f"write_file: {shown_name(workspace, stat.path)} is {kind}; expected the path of a file"


async def run_write(running: Running, args: Arguments) -> Outcome:
    workspace = running.workspace
    path = running.resolve(args["path"])
    stat = await workspace.stat(path)
    fault = unwritable(workspace, stat)
    if fault is not None:
        raise ArgumentError(fault)
    before = await workspace.read_text(path) if stat.kind == "file" else None
    if before is not None:
        running.around.seen.check(path, before, tool="write_file", name=shown_name(workspace, path))
    content: str = args["content"]
    name = shown_name(workspace, path)
    lines = content.count("\n") + (not content.endswith("\n") and content != "")
    verb = "Created" if before is None else "Replaced"
    done = f"{verb} {name}: {lines:,} line{'s' * (lines != 1)}, {len(content.encode()):,} bytes."
    return await change(running, path, before, content, title=f"Write {name}", done=done)


async def change(
    running: Running, path: Path, before: str | None, after: str, *, title: str, done: str, line: int | None = None
) -> Outcome:
    """Store what the file holds, write `after`, and tell what really changed. `before` is its text as read."""
    workspace = running.workspace
    on_disk = None
    if before is not None and (await workspace.stat(path)).kind == "file":  # an editor may hold what no disk has
        on_disk = await workspace.read_bytes(path)
        if on_disk.decode("utf-8", "replace") != before:  # what the user saw, their unsaved words too
            on_disk = before.encode("utf-8", "replace")
    await running.log.before_change(running.call_id, path, on_disk, after.encode("utf-8"))
    held = await workspace.write_text(path, after)
    running.around.seen.note(path, held)
    shown = shown_path(workspace, path)
    if held != after:
        done += " The editor changed it on saving; read it again before the next edit."
    return Outcome(
        text=done,
        announcement=Announcement(
            title=title,
            kind="edit",
            locations=(Location(path=shown, line=line),),
            diffs=(Diff(path=shown, old_text=before, new_text=held),),
        ),
    )


PATH = {"type": "string", "minLength": 1, "description": "Absolute, or relative to the working directory."}


WRITE_FILE = Builtin(
    spec=ToolSpec(
        name="write_file",
        description=(
            "Create a file, or replace the whole of one. Directories on the way are made. To change a part of a file, "
            "use edit_file."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "path": PATH,
                "content": {"type": "string", "description": "All that the file will hold, exactly."},
            },
            "required": ["path", "content"],
        },
    ),
    kind="edit",
    access="write",
    look=look_at_write,
    run=run_write,
    is_barrier=True,
)
