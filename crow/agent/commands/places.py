"""Places in a conversation, as people name them: a prompt's number, a label, an entry's id.

Strategy: prompts are numbered from 1 along the path the session stands on; a label is found on any branch, the newest
of its name; `#` and a number is the entry with this id. Shows `/history` and `/tree` in the same words, so that what
is shown can be typed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crow.agent.commands.desk import Desk, Handler
from crow.domain.entries import NewEntry, Note
from crow.domain.errors import ArgumentError
from crow.store import Outline, Point, Tip

__all__ = ["PLACE_COMMANDS", "Place", "on_path", "place_named", "quoted"]

QUOTE_CHARS = 60
LABEL_CHARS = 60
LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to stand (None: before everything), and where that is in words."""

    entry: int | None
    words: str


async def place_named(desk: Desk, name: str) -> Place:
    """:raises ArgumentError: there is no such place."""
    row = desk.branch.row
    if name.startswith("#"):
        number = name[1:]
        entry = await desk.store.entry(int(number)) if number.isdecimal() and number.isascii() else None
        if entry is None or entry.conversation != row.conversation:
            raise ArgumentError(f"There is no entry {name} in this conversation. `/tree` and `/history` show what is.")
        return Place(entry=entry.id, words=f"at entry {name}")
    outline = await desk.store.outline(row.id)
    prompts = [point for point in on_path(outline, outline.tips[0]) if point.kind == "prompt"]
    if name.isdecimal() and name.isascii():
        if not 1 <= int(name) <= len(prompts):
            there = f"there are {len(prompts)}" if prompts else "there is none yet"
            raise ArgumentError(f"There is no prompt {name} on this branch; {there}. `/history` lists them.")
        point = prompts[int(name) - 1]
        return Place(entry=point.before, words=f"before prompt {name}, {quoted(point.text)}")
    found = next((point for point in reversed(outline.points) if point.kind == "label" and point.text == name), None)
    if found is None:
        raise ArgumentError(f"No label {quoted(name)}. `/label {name}` would make it here; `/tree` shows all labels.")
    return Place(entry=found.entry, words=f"at the label {quoted(name)}")


async def history(desk: Desk, argument: str) -> str:
    if argument not in ("", "all"):
        raise ArgumentError(f"`/history {argument}`: expected nothing, or `all` for more than {LISTED} places.")
    outline = await desk.store.outline(desk.branch.row.id)
    lines, number = [], 0
    for point in on_path(outline, outline.tips[0]):
        match point.kind:
            case "prompt":
                number += 1
                lines.append(f"- {number}. {quoted(point.text)} `#{point.entry}`")
            case "label":
                lines.append(f"- label {quoted(point.text)} `#{point.entry}`")
            case "checkpoint":
                lines.append(f"- compacted here `#{point.entry}`")
    if not lines:
        return "Nothing was said yet on this branch. `/tree` shows the others."
    if not argument and len(lines) > LISTED:
        lines = [f"- … {len(lines) - LISTED} earlier; `/history all` shows them", *lines[-LISTED:]]
    return "\n".join([*lines, "\n`/rewind NUMBER` goes back to before a prompt, `/fork NUMBER` forks there."])


async def tree(desk: Desk, argument: str) -> str:
    if argument not in ("", "all"):
        raise ArgumentError(f"`/tree {argument}`: expected nothing, or `all` for more than {LISTED} branches.")
    outline = await desk.store.outline(desk.branch.row.id)
    tips = outline.tips if argument else outline.tips[:LISTED]
    lines = [shown_tip(outline, tip) for tip in tips]
    if len(tips) < len(outline.tips):
        lines.append(f"- … {len(outline.tips) - len(tips)} left earlier; `/tree all` shows them")
    if len(outline.tips) == 1:
        return "\n".join([*lines, "\nThere is no other branch. `/undo`, `/rewind` and `/retry` make one."])
    return "\n".join([*lines, "\n`/rewind #ENTRY` goes to the end of another branch; nothing is lost by going."])


async def label(desk: Desk, argument: str) -> str:
    name = " ".join(argument.split())
    if not name:
        outline = await desk.store.outline(desk.branch.row.id)
        named = [f"- {quoted(point.text)} `#{point.entry}`" for point in outline.points if point.kind == "label"]
        return "\n".join(named) or "There are no labels. `/label NAME` gives this place a name."
    if len(name) > LABEL_CHARS or name.startswith("#") or name.isdecimal():
        raise ArgumentError(
            f"{quoted(name)} cannot be a label: expected at most {LABEL_CHARS} characters, no number and no # in front."
        )
    (entry,) = await desk.branch.record([NewEntry(body=Note(about="label", value=name))])
    return f"This place is {quoted(name)} (`#{entry.id}`) now. `/rewind {name}` comes back here, `/fork {name}` forks."


def on_path(outline: Outline, tip: Tip) -> list[Point]:
    """The points of a branch, oldest first."""
    by_entry = {point.entry: point for point in outline.points}
    points: list[Point] = []
    at = tip.point
    while at is not None:
        points.append(by_entry[at])
        at = by_entry[at].previous
    return points[::-1]


def shown_tip(outline: Outline, tip: Tip) -> str:
    points = on_path(outline, tip)
    prompts = [point for point in points if point.kind == "prompt"]
    labels = [quoted(point.text) for point in points if point.kind == "label"]
    count = f"{len(prompts)} prompt{'s' * (len(prompts) != 1)}"
    said = f"{count}, last {quoted(prompts[-1].text)}" if prompts else "nothing said yet"
    named = f"; label{'s' * (len(labels) > 1)} {', '.join(labels)}" if labels else ""
    place = "the beginning" if tip.entry is None else f"`#{tip.entry}`"
    return f"- {'**you are here** ' if tip.is_current else ''}{place}: {said}{named}"


def quoted(text: str) -> str:
    """The first line, bounded, in quotation marks."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"“{line if len(line) <= QUOTE_CHARS else line[: QUOTE_CHARS - 1].rstrip() + '…'}”"


PLACE_COMMANDS: Mapping[str, Handler] = {"history": history, "tree": tree, "label": label}
