"""`read_file`: lines of a text, or a picture.

Strategy: text is read through the workspace (so unsaved buffers count) and shown in numbered lines, a window at a time
with an honest marker; of a file too large to hold the window alone is kept. What an offer says of a file outside the
workspace is its name alone: nothing about it reaches the model unasked.
"""

from __future__ import annotations

import base64
import codecs
from pathlib import Path

import anyio.to_thread

from crow.domain.entries import Announcement, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import Image, ToolSpec
from crow.domain.titles import in_title
from crow.tools import FileStat, Offer, Outcome, Workspace
from crow.tools.builtin.files import PATH, WHOLE_BYTES, regular_file
from crow.tools.builtin.tool import Arguments, Around, Builtin, Running, path_names, shown_name, shown_path
from crow.tools.builtin.window import Window
from crow.tools.pictures import PICTURE_BYTES, picture_type

__all__ = ["READ_FILE"]

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
            title=f"Read {in_title(shown_name(workspace, path))}{lines}",
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
    window = Window(first=line, limit=limit, row_bytes=4 * LINE_CHARS, most_bytes=WINDOW_CHARS)
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
