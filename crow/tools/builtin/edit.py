"""`edit_file`: a piece of a file replaced by another.

Strategy: the same plan is made twice, to show the change before it is allowed and again from the file as it is when
the call runs. What the plan does not touch keeps its bytes: byte order mark, line ends, missing final newline; a file
that is not UTF-8 is refused, since writing it back would change it elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from crow.domain.entries import Announcement, Diff, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.tools import Offer, Outcome
from crow.tools.builtin.files import PATH, WHOLE_BYTES, change, own_file, regular_file
from crow.tools.builtin.replace import Replaced, replace
from crow.tools.builtin.tool import (
    Arguments,
    Around,
    Builtin,
    Running,
    path_names,
    shown_name,
    shown_path,
    system_words,
)

__all__ = ["EDIT_FILE"]


async def look_at_edit(around: Around, args: Arguments) -> Offer:
    workspace = around.workspace
    path = workspace.resolve(args["path"])
    shown, name = shown_path(workspace, path), shown_name(workspace, path)
    outside = not workspace.contains(path)
    diffs: tuple[Diff, ...] = ()
    line, fault = None, None
    try:
        before, replaced = await planned(around, path, args)
        diffs, line = (Diff(path=shown, old_text=before, new_text=replaced.text),), replaced.line
    except (ArgumentError, OSError) as error:
        # of a file outside nothing may reach the model before the user agreed, not even that it lacks some text
        words = str(error) if isinstance(error, ArgumentError) else system_words("edit_file", error)
        fault = None if outside else words
    fault = own_file("edit_file", workspace, path) or fault
    return Offer(
        announcement=Announcement(
            title=f"Edit {name}", kind="edit", locations=(Location(path=shown, line=line),), diffs=diffs
        ),
        access="write",
        outside=outside,
        paths=path_names(workspace, path),
        fault=fault,
        is_protected=workspace.protection(path) == "ask",
        is_barrier=True,
    )


async def run_edit(running: Running, args: Arguments) -> Outcome:
    path = running.resolve(args["path"])
    before, replaced = await planned(running.around, path, args)
    name = shown_name(running.workspace, path)
    places = "1 place" if replaced.count == 1 else f"{replaced.count} places"
    remark = f" ({replaced.remark})" if replaced.remark else ""
    done = f"Edited {name} in {places}, at line {replaced.line}{' and after' if replaced.count > 1 else ''}{remark}."
    return await change(running, path, before, replaced.text, title=f"Edit {name}", done=done, line=replaced.line)


async def planned(around: Around, path: Path, args: Arguments) -> tuple[str, Replaced]:
    """The file's text and what it would become.

    :raises ~crow.domain.errors.ArgumentError: it cannot be edited so.
    :raises OSError: it cannot be read.
    """
    workspace = around.workspace
    name = shown_name(workspace, path)
    stat = await regular_file("edit_file", workspace, path)
    if stat.size > WHOLE_BYTES:
        raise ArgumentError(f"edit_file: {name} holds {stat.size:,} bytes, more than {WHOLE_BYTES:,}; use shell")
    text = await workspace.read_text(path)
    around.seen.check(path, text, tool="edit_file", name=name)
    if "�" in text:
        check_utf8(name, await workspace.read_bytes(path))
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    replaced = replace(
        text.removeprefix(mark), args["old_text"], args["new_text"], every=args.get("all", False), name=name
    )
    return text, Replaced(text=mark + replaced.text, count=replaced.count, line=replaced.line, remark=replaced.remark)


def check_utf8(name: str, data: bytes) -> None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"edit_file: {name} is not UTF-8 (byte 0x{data[error.start]:02x} at {error.start}); use shell to change it"
        ) from None


EDIT_FILE = Builtin(
    spec=ToolSpec(
        name="edit_file",
        description=(
            "Replace a piece of a file. old_text must be copied from the file exactly, without line numbers, and "
            "occur once; give enough lines around the change, or set all to replace every occurrence."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "path": PATH,
                "old_text": {"type": "string", "description": "The text to replace."},
                "new_text": {"type": "string", "description": "What comes in its place; empty deletes it."},
                "all": {"type": "boolean", "description": "Replace every occurrence. Default false."},
            },
            "required": ["path", "old_text", "new_text"],
        },
    ),
    kind="edit",
    access="write",
    look=look_at_edit,
    run=run_edit,
    is_barrier=True,
)
