"""`edit_file`: a piece of a file replaced by another.

Strategy: the same plan is made twice, to show the change before it is allowed and again from the file as it is when
the call runs. What the plan does not touch keeps its bytes: byte order mark, line ends, missing final newline; a file
that is not UTF-8 is refused, since writing it back would change it elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crow.domain.entries import Announcement, Diff, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.tools import Outcome, PlannedCall
from crow.tools.builtin.files import PATH, WHOLE_BYTES, change, own_file, regular_file
from crow.tools.builtin.tool import (
    Arguments,
    Builtin,
    ToolContext,
    ToolInvocation,
    path_names,
    shown_name,
    shown_path,
    system_words,
)

__all__ = ["EDIT_FILE", "Replaced", "replace"]


async def look_at_edit(around: ToolContext, args: Arguments) -> PlannedCall:
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
    return PlannedCall(
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


async def run_edit(running: ToolInvocation, args: Arguments) -> Outcome:
    path = running.resolve(args["path"])
    before, replaced = await planned(running.around, path, args)
    name = shown_name(running.workspace, path)
    places = "1 place" if replaced.count == 1 else f"{replaced.count} places"
    remark = f" ({replaced.remark})" if replaced.remark else ""
    done = f"Edited {name} in {places}, at line {replaced.line}{' and after' if replaced.count > 1 else ''}{remark}."
    return await change(running, path, before, replaced.text, title=f"Edit {name}", done=done, line=replaced.line)


async def planned(around: ToolContext, path: Path, args: Arguments) -> tuple[str, Replaced]:
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


# FROM tools.builtin.replace: Replacing a piece of text by another: exactly, or forgiving about white space where that
# is unambiguous.
#
# An exact match comes first, with the file's own line ends; then lines are compared without white space at their ends
# and
# with one shift of indentation, which the new text is given too. Bytes outside the match are never touched.


NUMBERED = re.compile(r"\s*\d+\t")
LINES_NAMED = 5
LINES_COMPARED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """The new text, how many places changed, the first line that did (from 1), and how the match was made if it was
    not exact."""

    text: str
    count: int
    line: int
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndentShift:
    """Indentation to take away from or put before a line; one of both is empty."""

    remove: str = ""
    add: str = ""

    def apply(self, line: str) -> str:
        """The line, shifted; an empty one stays empty."""
        return self.add + line.removeprefix(self.remove) if line.strip() else line


def replace(text: str, old: str, new: str, *, every: bool, name: str) -> Replaced:
    """Put `new` in the place of `old` in the text of the file `name`.

    :raises ~crow.domain.errors.ArgumentError: nothing to replace, or more than one place and not `every`.
    """
    if not old:
        raise ArgumentError("edit_file: old_text is empty; expected text of the file, or use write_file for a new file")
    if old == new:
        raise ArgumentError("edit_file: old_text and new_text are the same; nothing would change")
    for wanted, given in spellings(text, old, new):
        count = text.count(wanted)
        if not every and text.find(wanted, text.find(wanted) + 1) >= 0:  # occurrences that overlap are two as well
            raise ArgumentError(too_many(text, wanted, max(2, count), name))
        if count:
            at = text.index(wanted)
            line = text.count("\n", 0, at) + 1
            is_lf = "\n" not in old and not every and line_end_at(text, at) == "\n"
            return Replaced(text=text.replace(wanted, new if is_lf else given), count=count, line=line)
    return replace_loosely(text, old, new, name)


def spellings(text: str, old: str, new: str) -> list[tuple[str, str]]:
    """Old and new text as given, then with the line ends of a file that has CRLF."""
    if "\r" not in text or "\r\n" not in text or "\r" in old:
        return [(old, new)]
    with_crlf = (old.replace("\n", "\r\n"), re.sub(r"\r?\n", "\r\n", new))
    return [with_crlf, (old, new)] if "\n" in old else [(old, with_crlf[1])]


def line_end_at(text: str, at: int) -> str:
    """How the line at `at` ends; the last one, how the one before it does."""
    end = text.find("\n", at)
    end = end if end >= 0 else text.rfind("\n", 0, at)
    return "\r\n" if end > 0 and text[end - 1] == "\r" else "\n"


def too_many(text: str, wanted: str, count: int, name: str) -> str:
    lines, at = [], -1
    for _ in range(min(count, LINES_NAMED)):
        at = text.index(wanted, at + 1)
        lines.append(str(text.count("\n", 0, at) + 1))
    where = ", ".join(lines) + (" ..." if count > LINES_NAMED else "")
    return (
        f"edit_file: old_text occurs {count} times in {name}; include more lines so that it occurs once "
        f"(lines {where}), or set all"
    )


def replace_loosely(text: str, old: str, new: str, name: str) -> Replaced:
    """The one place whose lines differ from `old` in trailing white space and one shift of indentation."""
    lines = split_lines(text)
    wanted = old.removesuffix("\n").split("\n")
    found = places(lines, wanted, name)
    if not found:
        raise ArgumentError(not_found(lines, wanted, name))
    if len(found) > 1:
        where = ", ".join(str(index + 1) for index, _ in found[:LINES_NAMED])
        raise ArgumentError(
            f"edit_file: old_text occurs nowhere in {name} exactly, and {len(found)} times apart from white space "
            f"(lines {where}); copy the one that is meant, with its white space"
        )
    index, shift = found[0]
    matched = lines[index : index + len(wanted)]
    line_end = "\r\n" if matched[0].endswith("\r\n") else "\n"
    given = [shift.apply(line.removesuffix("\r")) for line in new.removesuffix("\n").split("\n")] if new else []
    placed = "".join(line + line_end for line in given)
    if given and not matched[-1].endswith("\n"):
        placed = placed.removesuffix(line_end)
    return Replaced(
        text="".join(lines[:index]) + placed + "".join(lines[index + len(wanted) :]),
        count=1,
        line=index + 1,
        remark="old_text matched apart from white space"
        + (", new_text was indented like it" if shift != IndentShift() else ""),
    )


def split_lines(text: str) -> list[str]:
    """Lines with their ends, at `\\n` alone."""
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop().removesuffix("\n")
    return [*lines, last] if last else lines


def places(lines: Sequence[str], wanted: Sequence[str], name: str) -> list[tuple[int, IndentShift]]:
    """Where `wanted` stands, line by line, with the shift of each place.

    :raises ~crow.domain.errors.ArgumentError: it would take too long to say.
    """
    if not any(line.strip() for line in wanted):
        return []
    # One search of the text is linear; comparing line by line is not, in a file of lines that are all alike.
    bare = "".join(f"\n{line.strip()}" for line in [*lines, ""])
    bare_wanted = "".join(f"\n{line.strip()}" for line in [*wanted, ""])
    found, index, at, left = [], 0, 0, LINES_COMPARED
    while (place := bare.find(bare_wanted, at)) >= 0:
        index += bare.count("\n", at, place)
        shift = shift_between(wanted, lines[index : index + len(wanted)])
        if shift is not None:
            found.append((index, shift))
        left -= len(wanted)
        if left < 0:
            raise ArgumentError(f"edit_file: old_text is much like too many places in {name}; copy it exactly")
        index, at = index + 1, place + 1
    return found


def shift_between(wanted: Sequence[str], actual: Sequence[str]) -> IndentShift | None:
    """The one shift that leads from the wanted lines to the actual ones, None if they need several."""
    shifts = set()
    for want, have in zip(wanted, actual, strict=True):
        if not want.strip():
            continue
        indent, actual_indent = indent_of(want), indent_of(have)
        if actual_indent.endswith(indent):
            shifts.add(IndentShift(add=actual_indent.removesuffix(indent)))
        elif indent.endswith(actual_indent):
            shifts.add(IndentShift(remove=indent.removesuffix(actual_indent)))
        else:
            return None
    return shifts.pop() if len(shifts) == 1 else None


def indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def not_found(lines: Sequence[str], wanted: Sequence[str], name: str) -> str:
    """Why nothing matched, with the line that comes nearest."""
    start = f"edit_file: old_text does not occur in {name}"
    if all(NUMBERED.match(line) for line in wanted):
        return f"{start}; leave out the line numbers that read_file shows"
    first = next((line.strip() for line in wanted if line.strip()), "")
    near = [index + 1 for index, line in enumerate(lines) if first and line.strip() == first]
    if not near:
        return f"{start}; read the file again and copy the text exactly"
    where = ", ".join(map(str, near[:LINES_NAMED]))
    return f"{start}; its first line stands at line {where}, but what follows differs: read it again from there"
