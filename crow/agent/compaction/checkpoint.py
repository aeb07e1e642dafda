"""What a compaction keeps of messages, skills, files and tool outputs, decided without a model.

A checkpoint carries on what the one before it kept, so nothing depends on how many compactions there were. Files come
from the arguments of the built-in file tools and from what calls announced, never from a summary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from crow.domain.entries import (
    Announcement,
    Assistant,
    CallRef,
    Checkpoint,
    Entry,
    File,
    KeptSkill,
    Pin,
    Skill,
    ToolResult,
    User,
)
from crow.domain.rendering import parts_text, user_parts
from crow.domain.tokens import estimate_text, fit

__all__ = ["files_touched", "hiding_order", "pins_of", "skills_of"]

READERS = frozenset({"read_file"})
WRITERS = frozenset({"write_file", "edit_file"})
REWRITERS = frozenset({"write_file"})
"""Tools whose arguments hold the whole new file."""

PIN_FRAME = 14
"""Tokens of the lines around a pinned message."""

WORTH_CUTTING = 64
"""Fewer tokens of a message than these say nothing."""

SKILL_TOOL = "skill"
MOST_SKILLS = 12
"""Older ones are left to the summary."""


def pins_of(previous: Checkpoint | None, covered: Iterable[Entry], budget: int) -> tuple[Pin, ...]:
    """The messages of the user among `covered` and the pins before them, oldest first, within `budget` estimated
    tokens: the first and the last always, then newest first. Each is whole up to half of the budget; one that does not
    fit gets half of what is left, so that a huge one does not push out all before it."""
    known = {pin.entry: pin for pin in (previous.pins if previous else ())}
    for entry in covered:
        if isinstance(entry.body, User):
            known[entry.id] = Pin(entry=entry.id, text=parts_text(user_parts(entry.body, entry.id)))
    pins = [known[entry] for entry in sorted(known)]
    if not pins:
        return ()
    half = budget // 2 - PIN_FRAME
    chosen = {pin.entry: cut(pin, half) for pin in (pins[0], pins[-1])}
    left = budget - sum(map(cost, chosen.values()))
    for pin in reversed(pins[1:-1]):
        kept = cut(pin, half)
        if cost(kept) > left:
            kept = cut(pin, max(WORTH_CUTTING, left // 2 - PIN_FRAME))
        if cost(kept) > left:
            break
        chosen[pin.entry] = kept
        left -= cost(kept)
    return tuple(chosen[entry] for entry in sorted(chosen))


def cost(pin: Pin) -> int:
    return PIN_FRAME + estimate_text(pin.text)


def cut(pin: Pin, tokens: int) -> Pin:
    text = fit(pin.text, tokens, pin.entry)
    return pin if text is pin.text else Pin(entry=pin.entry, text=text)


def skills_of(previous: Checkpoint | None, covered: Iterable[Entry], budget: int) -> tuple[KeptSkill, ...]:
    """The newest skills among `covered` and those kept before, oldest first, each once: whole, newest first, within
    `budget` estimated tokens, then cut, then by name alone."""
    known = {skill.name: skill for skill in (previous.skills if previous else ())}
    for entry in covered:
        skill = skill_in(entry)
        if skill is not None:
            known.pop(skill.name, None)
            known[skill.name] = skill
    kept: list[KeptSkill] = []
    left = budget
    for skill in reversed(list(known.values())[-MOST_SKILLS:]):
        room = left - PIN_FRAME
        text = fit(skill.text, room, skill.entry) if skill.text and room >= WORTH_CUTTING else ""
        kept.append(skill if text is skill.text else replace(skill, text=text))
        left -= PIN_FRAME + estimate_text(text)
    return tuple(reversed(kept))


def skill_in(entry: Entry) -> KeptSkill | None:
    """A skill that this entry gave to the model."""
    match entry.body:
        case Skill(name=name, text=text):
            return KeptSkill(entry=entry.id, name=name, text=text)
        case ToolResult(name=tool, text=text, is_error=False, announcement=announcement) if tool == SKILL_TOOL:
            return KeptSkill(entry=entry.id, name=announcement.title, text=text)
        case _:
            return None


def files_touched(previous: Checkpoint | None, entries: Sequence[Entry]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files read only, and files modified, over the whole history: those of `previous`, then what `entries` touched;
    the latest touched last."""
    read = dict.fromkeys(previous.files_read if previous else ())
    modified = dict.fromkeys(previous.files_modified if previous else ())
    arguments: dict[CallRef, str] = {}
    for entry in entries:
        match entry.body:
            case Assistant(calls=calls):
                for index, call in enumerate(calls):
                    arguments[CallRef(assistant=entry.id, index=index)] = call.arguments
            case File(path=path):
                touch(modified, (path,))
            case ToolResult() as result:
                touch(modified, written(result, arguments.get(result.call, "{}")))
                touch(read, seen(result, arguments.get(result.call, "{}")))
            case _:
                pass
    return tuple(path for path in read if path not in modified), tuple(modified)


def hiding_order(entries: Sequence[Entry]) -> tuple[int, ...]:
    """The tool results among `entries` (oldest first), in the order in which to hide them.

    First those that a later result replaces: the same call again, the same output, a file read or written whole since.
    Then other outputs. Last the newest version of each file that was read, the file touched last at the very end.
    """
    calls = {
        CallRef(assistant=entry.id, index=index): call
        for entry in entries
        if isinstance(entry.body, Assistant)
        for index, call in enumerate(entry.body.calls)
    }
    later: set[tuple[str, str, str]] = set()
    whole: set[str] = set()
    touched: dict[str, int] = {}
    ranked: list[tuple[int, int, int]] = []
    for entry in reversed(entries):
        result = entry.body
        if not isinstance(result, ToolResult):
            continue
        arguments = calls[result.call].arguments if result.call in calls else "{}"
        read, changed = seen(result, arguments), written(result, arguments)
        for path in (*read, *changed):
            touched.setdefault(path, entry.id)
        same = {(result.name, "call", arguments), (result.name, "output", result.text)}
        if same & later or (read and whole.issuperset(read)):
            ranked.append((0, entry.id, entry.id))
        elif read:
            ranked.append((2, max(touched[path] for path in read), entry.id))
        else:
            ranked.append((1, entry.id, entry.id))
        if result.name not in READERS or read:  # a failed read replaces nothing
            later |= same
        if read and is_whole(arguments):
            whole.update(read)
        elif result.name in REWRITERS:
            whole.update(changed)
    return tuple(entry for _, _, entry in sorted(ranked))


def is_whole(arguments: str) -> bool:
    """Whether a call reads a file from its beginning, without a limit."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("line") in (None, 1) and value.get("limit") is None


def touch(files: dict[str, None], paths: Iterable[str]) -> None:
    for path in paths:
        files.pop(path, None)
        files[path] = None


def written(result: ToolResult, arguments: str) -> tuple[str, ...]:
    """What a result says was changed. A failed call changed what it still shows a diff of, nothing else."""
    announcement = result.announcement
    diffs = tuple(diff.path for diff in announcement.diffs)
    if diffs or result.is_error:
        return diffs
    if result.name in WRITERS:
        return located(announcement) or named(arguments)
    return located(announcement) if announcement.kind in ("edit", "delete", "move") else ()


def seen(result: ToolResult, arguments: str) -> tuple[str, ...]:
    if result.is_error or result.name not in READERS:
        return ()
    return located(result.announcement) or named(arguments)


def located(announcement: Announcement) -> tuple[str, ...]:
    return tuple(location.path for location in announcement.locations)


def named(arguments: str) -> tuple[str, ...]:
    """The `path` among a call's arguments."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return ()
    path = value.get("path") if isinstance(value, dict) else None
    return (path,) if isinstance(path, str) and path else ()
