"""`edit_file`: replaces a piece of a file.

The replacement is computed twice: once to show the diff before the call is allowed, and again from the current file
when the call runs. All other bytes of the file stay as they are (byte order mark, line ends, missing final newline).
Files that are not UTF-8 are refused, because writing them back would also change other bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crow.domain.entries import Diff
from crow.domain.errors import ArgumentError
from crow.domain.rendering import RESULT_MASK, in_title
from crow.tools import Outcome, PlannedCall
from crow.tools.builtin.files import A_FILE, PATH, WHOLE_BYTES, apply_change, check_mask, plan_change, stat_kind
from crow.tools.builtin.tool import (
    Arguments,
    Builtin,
    PathTarget,
    ToolContext,
    ToolInvocation,
    argument,
    describe_error,
    tool_spec,
)

NUMBERED = re.compile(r"\s*\d+\t")
MAX_LINES_NAMED = 5
MAX_LINES_COMPARED = 1_000_000


async def plan_edit(context: ToolContext, args: Arguments) -> PlannedCall:
    target = context.target(args["path"])
    diff, line, fault = None, None, None
    try:
        before, replacement = await prepare_edit(context, target, args)
        diff = Diff(path=target.client_path, old_text=before, new_text=replacement.text)
        line = replacement.line
    except (ArgumentError, OSError) as error:
        fault = describe_error(error)
    title = f"Edit {in_title(target.name)}"
    return await plan_change(context, target, title, diff=diff, fault=fault, line=line)


async def run_edit(invocation: ToolInvocation, args: Arguments) -> Outcome:
    target = invocation.target(args["path"])
    before, edit = await prepare_edit(invocation.context, target, args)
    where = "1 place, at line" if edit.count == 1 else f"{edit.count} places, the first at line"
    done = f"Edited {target.name} in {where} {edit.line}{f' ({edit.remark})' if edit.remark else ''}."
    return await apply_change(invocation, target, before, edit.text, f"Edit {in_title(target.name)}", done, edit.line)


async def prepare_edit(context: ToolContext, target: PathTarget, args: Arguments) -> tuple[str, Replacement]:
    """Return the text of the file, and the replacement.

    :raises ~crow.domain.errors.ArgumentError: the file cannot be edited, or the arguments do not fit the file's text.
    :raises OSError: the file cannot be read.
    """
    workspace, name = context.workspace, target.name
    stat = await stat_kind(workspace, target, ("file",), A_FILE)
    if stat.size > WHOLE_BYTES:
        raise ArgumentError(f"{name} has {stat.size:,} bytes, more than {WHOLE_BYTES:,}; use shell")
    text = await workspace.read_text(target.path)
    fault = context.seen_files.find_fault(target.path, text, name)
    if fault is not None:
        raise ArgumentError(fault)
    if "�" in text:
        try:
            (await workspace.read_bytes(target.path)).decode("utf-8")
        except UnicodeDecodeError as error:
            byte, at = error.object[error.start], error.start
            raise ArgumentError(f"{name} is not UTF-8 (byte 0x{byte:02x} at {at}); use shell to change it") from None
    body = text.removeprefix("\ufeff")
    if RESULT_MASK in args["old_text"] and RESULT_MASK not in body:
        raise ArgumentError(
            f"old_text contains {RESULT_MASK}, which stands for a secret that you cannot see; choose an old_text "
            "without it"
        )
    edit = replace_text(body, args["old_text"], args["new_text"], every=args.get("all", False), name=name)
    check_mask("new_text", edit.text, body)
    return text, replace(edit, text=text[: len(text) - len(body)] + edit.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """The new text, the number of replaced places, and the first changed line (counted from 1). `remark` says how
    old_text matched if the match was not exact."""

    text: str
    count: int
    line: int
    remark: str = ""


def replace_text(text: str, old: str, new: str, *, every: bool, name: str) -> Replacement:
    """Replace `old` with `new` in the text of the file `name`.

    An exact match is tried first, both with the line ends as given and with those of the file. If there is no exact
    match, trailing white space is ignored, and the lines in the file may be indented more or less than those of `old`.
    This difference in indentation must be the same for all lines. It is then applied to the new text as well.

    :raises ~crow.domain.errors.ArgumentError: nothing matches, or several places match and `every` is false.
    """
    if not old:
        raise ArgumentError("old_text is empty; expected text from the file. Use write_file for a new file")
    if old == new:
        raise ArgumentError("old_text and new_text are the same; nothing would change")
    for wanted, given in spellings(text, old, new):
        at = text.find(wanted)
        if at < 0:
            continue
        if not every and text.find(wanted, at + 1) >= 0:  # a second match may overlap the first
            raise ArgumentError(describe_matches(text, wanted, name))
        has_lf_end = "\n" not in old and not every and line_end_at(text, at) == "\n"
        return Replacement(
            text=text.replace(wanted, new if has_lf_end else given),
            count=text.count(wanted),
            line=text.count("\n", 0, at) + 1,
        )
    return replace_loosely(text, old, new, name)


def spellings(text: str, old: str, new: str) -> list[tuple[str, str]]:
    """Return the pairs of old and new text to try: the texts as given and, if the file has CRLF line ends, also the
    texts with CRLF."""
    if "\r\n" not in text or "\r" in old:
        return [(old, new)]
    new_crlf = re.sub(r"\r?\n", "\r\n", new)
    return [(old.replace("\n", "\r\n"), new_crlf), (old, new)] if "\n" in old else [(old, new_crlf)]


def line_end_at(text: str, at: int) -> str:
    """Return the line end of the line at `at`. If that is the last line and has no line end, return the line end of the
    line before it."""
    end = text.find("\n", at)
    end = end if end >= 0 else text.rfind("\n", 0, at)
    return "\r\n" if end > 0 and text[end - 1] == "\r" else "\n"


def describe_matches(text: str, wanted: str, name: str) -> str:
    lines: list[int] = []
    at = text.find(wanted)
    while at >= 0 and len(lines) <= MAX_LINES_NAMED:
        lines.append(text.count("\n", 0, at) + 1)
        at = text.find(wanted, at + 1)
    return (
        f"old_text occurs {max(2, text.count(wanted))} times in {name}; include more lines so that it occurs once "
        f"(lines {format_lines(lines)}), or set all=true"
    )


def format_lines(lines: Sequence[int]) -> str:
    return ", ".join(map(str, lines[:MAX_LINES_NAMED])) + (" ..." if len(lines) > MAX_LINES_NAMED else "")


def replace_loosely(text: str, old: str, new: str, name: str) -> Replacement:
    """Replace the only place that matches `old` when trailing white space is ignored. The lines of this place may be
    indented more, or less, than those of `old`, all by the same amount."""
    lines = text.split("\n")  # not splitlines, which also splits at other characters, such as form feeds
    lines = [line + "\n" for line in lines[:-1]] + [line for line in lines[-1:] if line]
    wanted = old.removesuffix("\n").split("\n")
    matches = find_loosely(lines, wanted, name)
    if not matches:
        raise ArgumentError(describe_mismatch(lines, wanted, name))
    if len(matches) > 1:
        raise ArgumentError(
            f"old_text does not occur as given in {name}, but {len(matches)} places differ from it only in white space "
            f"(lines {format_lines([index + 1 for index, _ in matches])}); copy one of them with its white space"
        )
    index, (removed, added) = matches[0]
    end = index + len(wanted)
    line_end = "\r\n" if lines[index].endswith("\r\n") else "\n"
    given = [line.removesuffix("\r") for line in new.removesuffix("\n").split("\n")] if new else []
    placed = "".join((added + line.removeprefix(removed) if line.strip() else line) + line_end for line in given)
    if not lines[end - 1].endswith("\n"):
        placed = placed.removesuffix(line_end)
    shift = "; new_text was indented to match" if removed or added else ""
    return Replacement(
        text="".join([*lines[:index], placed, *lines[end:]]),
        count=1,
        line=index + 1,
        remark=f"old_text differed only in white space{shift}",
    )


def find_loosely(lines: Sequence[str], wanted: Sequence[str], name: str) -> list[tuple[int, tuple[str, str]]]:
    """Find all places whose lines match the wanted lines. Ignore trailing white space, and a difference in indentation
    if it is the same for all lines. For each place, return the index of its first line and the result of
    :func:`indent_shift`.

    :raises ~crow.domain.errors.ArgumentError: there are too many places to compare.
    """
    if not any(line.strip() for line in wanted):
        return []
    # Searching one joined text takes linear time. Comparing line by line may take much longer, for example if all
    # lines are alike.
    bare = "".join(f"\n{line.strip()}" for line in [*lines, ""])
    bare_wanted = "".join(f"\n{line.strip()}" for line in [*wanted, ""])
    matches, index, at, compared = [], 0, 0, 0
    while (place := bare.find(bare_wanted, at)) >= 0:
        index += bare.count("\n", at, place)
        shift = indent_shift(wanted, lines[index : index + len(wanted)])
        if shift is not None:
            matches.append((index, shift))
        compared += len(wanted)
        if compared > MAX_LINES_COMPARED:
            raise ArgumentError(f"too many places in {name} are similar to old_text; copy it exactly")
        index, at = index + 1, place + 1
    return matches


def indent_shift(wanted: Sequence[str], actual: Sequence[str]) -> tuple[str, str] | None:
    """Return how to change the indentation of the wanted lines so that they become the actual lines: the text to remove
    from the start of each line, and the text to add there. Return None if the lines need different changes."""
    shifts = set()
    for want, have in zip(wanted, actual, strict=True):
        if not want.strip():
            continue
        indent, actual_indent = (line[: len(line) - len(line.lstrip())] for line in (want, have))
        if actual_indent.endswith(indent):
            shifts.add(("", actual_indent.removesuffix(indent)))
        elif indent.endswith(actual_indent):
            shifts.add((indent.removesuffix(actual_indent), ""))
        else:
            return None
    return shifts.pop() if len(shifts) == 1 else None


def describe_mismatch(lines: Sequence[str], wanted: Sequence[str], name: str) -> str:
    """Return the error message that says why nothing matched, and which lines come close."""
    start = f"old_text does not occur in {name}"
    if all(NUMBERED.match(line) for line in wanted):
        return f"{start}; leave out the line numbers that read_file adds"
    first = next((line.strip() for line in wanted if line.strip()), "")
    near = [number for number, line in enumerate(lines, 1) if first and line.strip() == first]
    if not near:
        return f"{start}; read the file again and copy the text exactly"
    return f"{start}; its first line is at line {format_lines(near)}, but the lines after it differ: read from there"


EDIT_FILE_SPEC = tool_spec(
    "edit_file",
    "Replace text in a file. Copy old_text exactly from the file, without line numbers. It must occur once: "
    "include enough lines around the change, or set all=true to replace every occurrence.",
    required="path old_text new_text",
    path=PATH,
    old_text=argument("string", "The text to replace."),
    new_text=argument("string", "The text that replaces old_text. If it is empty, old_text is deleted."),
    all=argument("boolean", "Replace every occurrence. Default false."),
)
EDIT_FILE = Builtin(EDIT_FILE_SPEC, "edit", "write", plan_edit, run_edit)
