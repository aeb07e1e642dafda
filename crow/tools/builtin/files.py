"""`write_file`, and what the tools that touch files share.

A write states what it replaces, and the log keeps that before the file changes. What an offer says of a file outside
the workspace is its name alone: nothing about it reaches the model unasked.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import difflib
import os
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread

from crow.domain.entries import Announcement, Diff, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import Image, ToolSpec
from crow.domain.rendering import in_title
from crow.tools import FileStat, Outcome, PlannedCall, Workspace
from crow.tools.builtin.tool import Arguments, Builtin, ToolContext, ToolInvocation, path_names, shown_name, shown_path

__all__ = [
    "PATH",
    "PICTURE_BYTES",
    "READ_FILE",
    "WHOLE_BYTES",
    "WRITE_FILE",
    "LineStart",
    "LineWindow",
    "change",
    "missing",
    "own_file",
    "picture_type",
    "regular_file",
    "sound_picture_type",
]

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


async def look_at_write(around: ToolContext, args: Arguments) -> PlannedCall:
    workspace = around.workspace
    path = workspace.resolve(args["path"])
    outside = not workspace.contains(path)
    stat = await workspace.stat(path)
    fault = own_file("write_file", workspace, path) or (None if outside else unwritable(workspace, stat))
    before = await workspace.read_text(path) if stat.kind == "file" and stat.size <= WHOLE_BYTES else None
    if fault is None and not outside:
        fault = stale(around, path, before)
    shown = shown_path(workspace, path)
    return PlannedCall(
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


def stale(around: ToolContext, path: Path, text: str | None) -> str | None:
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


async def run_write(running: ToolInvocation, args: Arguments) -> Outcome:
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
    running: ToolInvocation,
    path: Path,
    before: str | None,
    after: str,
    *,
    title: str,
    done: str,
    line: int | None = None,
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


# FROM tools.builtin.read: `read_file`: lines of a text, or a picture.
#
# Strategy: text is read through the workspace (so unsaved buffers count) and shown in numbered lines, a window at a
# time
# with an honest marker; of a file too large to hold the window alone is kept. What an offer says of a file outside
# the
# workspace is its name alone: nothing about it reaches the model unasked.


WINDOW_LINES = 2_000
WINDOW_CHARS = 50_000
LINE_CHARS = 2_000
PIECE_BYTES = 4_000_000
SNIFFED_CHARS = 8_192
SNIFFED_BYTES = 16
WIDE = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
THREAD_CHARS = 262_144


async def look_at_read(around: ToolContext, args: Arguments) -> PlannedCall:
    workspace = around.workspace
    path = workspace.resolve(args["path"])
    line, limit = args.get("line"), args.get("limit")
    lines = ""
    if line is not None or limit is not None:
        first = line or 1
        lines = f" from line {first}" if limit is None else f" lines {first}-{first + limit - 1}"
    return PlannedCall(
        announcement=Announcement(
            title=f"Read {in_title(shown_name(workspace, path))}{lines}",
            kind="read",
            locations=(Location(path=shown_path(workspace, path), line=line),),
        ),
        access="read",
        outside=not workspace.contains(path),
        paths=path_names(workspace, path),
    )


async def run_read(running: ToolInvocation, args: Arguments) -> Outcome:
    workspace = running.workspace
    path = running.resolve(args["path"])
    name = shown_name(workspace, path)
    stat = await regular_file("read_file", workspace, path, head=SNIFFED_BYTES)
    picture = picture_type(stat.head)
    if picture is not None:
        return await read_picture(workspace, path, stat, picture)
    line, limit = args.get("line", 1), args.get("limit", WINDOW_LINES)
    if stat.size > WHOLE_BYTES:
        return Outcome(text=await part_of_huge(workspace, stat, name, line, limit))
    text = await workspace.read_text(path)
    running.around.seen.note(path, text)
    if text.startswith(("\ufffd\ufffd", "\0\0\ufffd\ufffd")):  # what UTF-16 and 32 begin with is no UTF-8
        text = wide_text(await workspace.read_bytes(path)) or text
    if is_binary(text):
        raise ArgumentError(f"read_file: {name} is binary ({stat.size:,} bytes); only text can be read")
    if len(text) < THREAD_CHARS:
        return Outcome(text=numbered(name, text, line, limit))
    return Outcome(text=await anyio.to_thread.run_sync(numbered, name, text, line, limit))


async def part_of_huge(workspace: Workspace, stat: FileStat, name: str, line: int, limit: int) -> str:
    """Lines of a file too large to hold, from disk, numbered like those of any other.

    :raises ~crow.domain.errors.ArgumentError: there is no such line, or it is no text.
    """
    head = (await workspace.read_bytes(stat.path, SNIFFED_CHARS)).decode("utf-8", "replace")
    if is_binary(head):
        raise ArgumentError(f"read_file: {name} is binary ({stat.size:,} bytes); only text can be read")
    window = LineWindow(first=line, limit=limit, row_bytes=4 * LINE_CHARS, most_bytes=WINDOW_CHARS)
    at, wanted = 0, True
    while wanted and (piece := await workspace.read_bytes(stat.path, PIECE_BYTES, at)):
        wanted = await anyio.to_thread.run_sync(window.feed, piece)
        at += len(piece)
    if not window.rows:
        raise ArgumentError(f"read_file: line is {line}; {name} has {window.lines:,} lines")
    shown: list[str] = []
    chars = 0
    for number, row in enumerate(window.rows, line):
        content = row.text().removeprefix("\ufeff" if number == 1 else "")
        text = f"{number:6}\t{content[:LINE_CHARS]}"
        left_out = row.left_out + len(content[LINE_CHARS:].encode())
        text += f"[... {left_out:,} more bytes in this line]" if left_out else ""
        chars += len(text) + 1
        if chars > WINDOW_CHARS and shown:
            break
        shown.append(text)
    last = line - 1 + len(shown)
    if window.has_more or len(shown) < len(window.rows):
        shown.append(f"[lines {line}-{last} of a file of {stat.size:,} bytes; go on with line={last + 1}]")
    else:
        shown.append(f"[the file of {stat.size:,} bytes ends here, with line {last}]")
    return with_remark(shown)


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


def numbered(name: str, text: str, line: int, limit: int) -> str:
    """The lines from `line` on, numbered, at most `limit` of them and 50,000 characters.

    :raises ~crow.domain.errors.ArgumentError: there is no such line.
    """
    lines = text.removeprefix("\ufeff").split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        return f"({name} is empty)"
    if line > len(lines):
        raise ArgumentError(f"read_file: line is {line}; {name} has {len(lines)} lines")
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
    return with_remark(shown)


def with_remark(rows: list[str]) -> str:
    """The rows as one text, with a word about bytes that are none."""
    remark = ["[bytes that are not UTF-8 are shown as �]"] if any("�" in row for row in rows) else []
    return "\n".join([*rows, *remark])


def shortened(line: str) -> str:
    if len(line) <= LINE_CHARS:
        return line
    return f"{line[:LINE_CHARS]}[... {len(line) - LINE_CHARS:,} more characters in this line]"


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


# FROM tools.builtin.window: Lines of a file that is too large to hold: any of them, in bounded memory.
#
# Strategy: pieces of the file are fed in order; lines before the wanted ones are only counted, of the wanted ones no
# more
# is kept than is shown. Pure; who reads the pieces, and how the lines are worded, is others' affair.


class LineStart:
    """The beginning of a line. `left_out`: how many bytes of it were not kept."""

    def __init__(self) -> None:
        self.left_out = 0
        self._start = bytearray()

    def __len__(self) -> int:
        return len(self._start)

    def add(self, piece: bytes, most_bytes: int) -> None:
        """A further piece of the line, as far as there is room."""
        kept = piece[: max(0, most_bytes - len(self._start))]
        self._start += kept
        self.left_out += len(piece) - len(kept)

    def text(self) -> str:
        """What was kept, without a carriage return at its end; half a character there becomes U+FFFD."""
        return self._start.decode("utf-8", "replace").removesuffix("\r")


class LineWindow:
    """The lines from `first` on (from 1): at most `limit`, of each `row_bytes`, and of all `most_bytes` or little more.

    `rows` are the lines so far. `has_more`: others follow. `lines`: how many there were up to the last one fed.
    """

    def __init__(self, *, first: int, limit: int, row_bytes: int, most_bytes: int) -> None:
        self.rows: list[LineStart] = []
        self.has_more = False
        self._missing = first - 1
        self._skipped = 0
        self._skipped_is_open = False
        self._limit = limit
        self._row_bytes = row_bytes
        self._room = most_bytes
        self._is_open = False

    @property
    def lines(self) -> int:
        """How many lines there were, the shown ones among them."""
        return self._skipped + len(self.rows) + (self._skipped_is_open and not self.rows)

    def feed(self, data: bytes) -> bool:
        """Take the next piece of the file; whether a further one is wanted."""
        at = self._skip(data) if self._missing else 0
        while at < len(data):
            if not self._is_open:
                if len(self.rows) == self._limit or (self.rows and self._room <= 0):
                    self.has_more = True
                    return False
                self.rows.append(LineStart())
            newline = data.find(b"\n", at)
            end = newline if newline >= 0 else len(data)
            row = self.rows[-1]
            self._room += len(row)
            row.add(data[at:end], self._row_bytes)
            self._room -= len(row)
            self._is_open = newline < 0
            at = end + 1
        return True

    def _skip(self, data: bytes) -> int:
        """Where the first wanted line begins in `data`, or its length."""
        count = data.count(b"\n")
        if count < self._missing:
            self._missing -= count
            self._skipped += count
            self._skipped_is_open = not data.endswith(b"\n")
            return len(data)
        rest = data.split(b"\n", self._missing)[-1]
        self._skipped += self._missing
        self._missing, self._skipped_is_open = 0, False
        return len(data) - len(rest)


# FROM tools.pictures: Pictures that models take, told by how their data begins.
#
# Strategy: what is announced as a picture and is none would be refused by a provider in every later request, so
# nobody is
# believed. Pure.


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
