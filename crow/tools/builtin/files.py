"""`read_file` and `write_file`.

Strategy: text is read through the workspace (so unsaved buffers count) and shown in numbered lines, a window at a time
with an honest marker. A write states what it replaces, and the log keeps that before the file changes. What an offer
says of a file outside the workspace is its name alone: nothing about it reaches the model unasked.
"""

from __future__ import annotations

import base64
import codecs
import difflib
import os
from pathlib import Path

import anyio.to_thread

from crow.domain.entries import Announcement, Diff, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import Image, ToolSpec
from crow.tools import FileStat, Offer, Outcome, Workspace
from crow.tools.builtin.tool import Arguments, Around, Builtin, Running, path_names, shown_name, shown_path

__all__ = ["READ_FILE", "WRITE_FILE", "change", "missing", "regular_file"]

WINDOW_LINES = 2_000
WINDOW_CHARS = 50_000
LINE_CHARS = 2_000
WHOLE_BYTES = 32_000_000
SNIFFED_CHARS = 8_192
SNIFFED_BYTES = 16
PICTURE_BYTES = 3_000_000
PICTURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"RIFF", "image/webp"),
)
WIDE = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
NAMES_LOOKED_AT = 10_000
THREAD_CHARS = 262_144


async def look_at_read(around: Around, args: Arguments) -> Offer:
    workspace = around.workspace
    path = workspace.resolve(args["path"])
    line, limit = args.get("line"), args.get("limit")
    lines = ""
    if line is not None or limit is not None:
        first = line or 1
        lines = f" from line {first}" if limit is None else f" lines {first}-{first + limit - 1}"
    return Offer(
        announcement=Announcement(
            title=f"Read {shown_name(workspace, path)}{lines}",
            kind="read",
            locations=(Location(path=shown_path(workspace, path), line=line),),
        ),
        access="read",
        outside=not workspace.contains(path),
        paths=path_names(workspace, path),
    )


async def run_read(running: Running, args: Arguments) -> Outcome:
    workspace = running.workspace
    path = running.resolve(args["path"])
    name = shown_name(workspace, path)
    stat = await regular_file("read_file", workspace, path)
    picture = picture_type(await workspace.read_bytes(path, SNIFFED_BYTES))
    if picture is not None:
        return await read_picture(workspace, path, stat, picture)
    if stat.size > WHOLE_BYTES:
        text = (await workspace.read_bytes(path, WHOLE_BYTES)).decode("utf-8", "replace")
    else:
        text = await workspace.read_text(path)
        running.around.seen.note(path, text)
        if text.startswith(("\ufffd\ufffd", "\0\0\ufffd\ufffd")):  # what UTF-16 and 32 begin with is no UTF-8
            text = wide_text(await workspace.read_bytes(path)) or text
    if is_binary(text):
        raise ArgumentError(f"read_file: {name} is binary ({stat.size:,} bytes); only text can be read")
    window = (name, text, args.get("line", 1), args.get("limit", WINDOW_LINES), stat.size > WHOLE_BYTES)
    if len(text) < THREAD_CHARS:
        return Outcome(text=numbered(*window))
    return Outcome(text=await anyio.to_thread.run_sync(numbered, *window))


def picture_type(head: bytes) -> str | None:
    """The media type of a picture that models take, by how its file begins; None for anything else."""
    for start, media in PICTURES:
        if head.startswith(start) and (media != "image/webp" or head[8:12] == b"WEBP"):
            return media
    return None


async def read_picture(workspace: Workspace, path: Path, stat: FileStat, media: str) -> Outcome:
    """A picture as the model sees it. :raises ~crow.domain.errors.ArgumentError: it is too large."""
    name = shown_name(workspace, path)
    if stat.size > PICTURE_BYTES:
        raise ArgumentError(
            f"read_file: {name} is a picture of {stat.size:,} bytes; at most {PICTURE_BYTES:,} can be shown"
        )
    data = base64.b64encode(await workspace.read_bytes(path)).decode("ascii")
    words = f"{name} is a picture, {media}, {stat.size:,} bytes."
    return Outcome(text=words, images=(Image(data=data, mime_type=media),))


def wide_text(data: bytes) -> str | None:
    """The text of a file that begins with a byte order mark of UTF-16 or UTF-32, None if it is none."""
    for mark, encoding in WIDE:
        if data.startswith(mark):
            try:
                return data.decode(encoding) + f"\n[the file is {encoding}: shell can change it, edit_file cannot]"
            except UnicodeDecodeError:
                return None
    return None


def is_binary(text: str) -> bool:
    """Whether text read with replacement is none: a NUL, or undecodable for a tenth of its beginning."""
    sniffed = text[:SNIFFED_CHARS]
    return "\0" in sniffed or sniffed.count("�") * 10 > len(sniffed)


def numbered(name: str, text: str, line: int, limit: int, is_partial: bool) -> str:
    """The lines from `line` on, numbered, at most `limit` of them and 50,000 characters.

    :raises ~crow.domain.errors.ArgumentError: there is no such line.
    """
    lines = text.removeprefix("\ufeff").split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        return f"({name} is empty)"
    if line > len(lines):
        readable = "the readable part of " if is_partial else ""
        raise ArgumentError(f"read_file: line is {line}; {readable}{name} has {len(lines)} lines")
    shown: list[str] = []
    chars = 0
    for number, content in enumerate(lines[line - 1 : line - 1 + limit], line):
        row = f"{number:6}\t{shortened(content.removesuffix(chr(13)))}"
        chars += len(row) + 1
        if chars > WINDOW_CHARS and shown:
            break
        shown.append(row)
    last = line - 1 + len(shown)
    if last < len(lines):
        shown.append(f"[lines {line}-{last} of {len(lines):,}; go on with line={last + 1}]")
    elif is_partial:
        shown.append(f"[the first {WHOLE_BYTES:,} bytes end here; use shell, with sed or tail, for the rest]")
    if any("�" in row for row in shown):
        shown.append("[bytes that are not UTF-8 are shown as �]")
    return "\n".join(shown)


def shortened(line: str) -> str:
    if len(line) <= LINE_CHARS:
        return line
    return f"{line[:LINE_CHARS]}[... {len(line) - LINE_CHARS:,} more characters in this line]"


async def regular_file(tool: str, workspace: Workspace, path: Path) -> FileStat:
    """What is at `path`. :raises ~crow.domain.errors.ArgumentError: it is no regular file."""
    stat = await workspace.stat(path)
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
    folded = {name.casefold(): name for name in names}
    similar = difflib.get_close_matches(path.name.casefold(), folded, n=3, cutoff=0.6)
    hint = "; use list_files to see what is there"
    if similar:
        hint = "; similar: " + ", ".join(shown_name(workspace, directory / folded[name]) for name in similar)
    return ArgumentError(f"{tool}: {shown_name(workspace, path)} does not exist{hint}")


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
    fault = None if outside else unwritable(workspace, stat)
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

READ_FILE = Builtin(
    spec=ToolSpec(
        name="read_file",
        description=(
            "Read a text file, or look at a picture. Each line is shown behind its number and a tab, which are not "
            "part of the file. At most "
            f"{WINDOW_LINES:,} lines or {WINDOW_CHARS:,} characters at once; a closing remark says how to go on."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "path": PATH,
                "line": {"type": "integer", "minimum": 1, "description": "The first line to read, from 1."},
                "limit": {"type": "integer", "minimum": 1, "description": "How many lines to read."},
            },
            "required": ["path"],
        },
    ),
    kind="read",
    access="read",
    look=look_at_read,
    run=run_read,
)

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
