"""Commands that move the session within its conversation: undo, redo, rewind, retry, new, clear.

No entry is removed. A move only changes which entry is the session's leaf, and the move is recorded. The answer says
which part the model no longer sees, because that part stays visible in the client. Redo reverses the newest move that
is not reversed yet. Redo is refused if the user has sent another prompt after that move. `/history`, `/tree` and
`/label` use the same names for places as `/rewind` and `/fork`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from crow.agent import new_message_id, new_session_id
from crow.agent.commands import OPTIONS_HINT, PLACE_HINT
from crow.agent.commands.context import CommandContext
from crow.agent.compaction.summary import SummaryJob, summarise
from crow.agent.history.restore import Restore, changes_to_undo, holds_change_sets, names_of
from crow.agent.history.rewind import RestoreResult, find_restorable_files, restore_files
from crow.agent.history.usage import summary_stream
from crow.domain.conversation import for_model
from crow.domain.entries import LABEL_CHARS, Entry, NewEntry, Note, Remark, Reminder, StopReason, User, is_label
from crow.domain.errors import ArgumentError
from crow.domain.events import SessionListChanged, TitleChanged
from crow.domain.messages import Text
from crow.domain.text import is_number, plural, quote, safe
from crow.store import BranchPoint, BranchTip, Move, NewSession, Outline, SessionChanges

_MOVES = ("undo", "rewind", "retry", "new", "clear")
_UNSEEN = "The model no longer sees it, although it is still shown above."
_MAX_LISTED = 50

_SUMMARY_DEADLINE_S = 120.0
_SUMMARY_TOKENS = 1_500
_SUMMARISED = ("user", "assistant", "tool", "reminder", "custom", "checkpoint")
_INSTRUCTION = (
    "The user has abandoned this line of work and gone back to an earlier point. In at most 400 words, say what was "
    "tried here, what came of it, what was learned, and whether it is worth trying again. Plain text, no preamble."
)
_LEFT_BEHIND = (
    "<reminder>\nThe user went back to this point after another line of work, which you no longer see. This is what "
    "came of it:\n{summary}\n</reminder>"
)
_SHOWN_SUMMARY = "Summary of the work that you left, as the model sees it:\n\n{summary}"
_SHOWN_NOTES = "The model did not summarise the work that you left, so crow took notes. The model sees:\n\n{summary}"
_STILL_CHANGED = (
    "<reminder>\nThe user went back to this point of the conversation. These files still contain later "
    "changes: {names}. Read them again before you rely on their contents.\n</reminder>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place to which the session can move."""

    entry: int | None
    """None means before all entries."""
    words: str
    """Describes the place to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RestoreOptions:
    """The user's choices about the part of the conversation that a move abandons."""

    place: str = ""
    """The text that the user typed before the options. Empty if there was none."""
    files: Literal["ask", "restore", "keep"] = "ask"
    """Whether to restore the files that were changed in that part."""
    summary: bool = False
    """Whether to summarise the part for the model."""


async def undo(context: CommandContext, argument: str) -> str:
    options = _parse_options("undo", argument)
    prompt = await _newest_prompt(context)
    if prompt is None:
        raise ArgumentError("There is nothing to undo: this branch has no prompts. `/tree` shows the other branches.")
    told = await _move_to(context, prompt.parent, "undo", options)
    return f"Took back the last turn, {_quoted_prompt(prompt)}. {_UNSEEN} `/redo` brings it back. {told}".rstrip()


async def redo(context: CommandContext, argument: str) -> str:
    options = _parse_options("redo", argument)
    move = _move_to_redo(await context.store.moves(context.branch.row.id))
    if move is None:
        raise ArgumentError("There is nothing to redo. `/tree` shows all branches.")
    if await context.store.entries_beyond(context.branch.leaf, move.to_leaf, ("user",)):
        raise ArgumentError(
            "There is nothing to redo: you have sent other prompts since you went back. `/tree` shows the branch "
            "that you left, and `/rewind #ENTRY` goes there."
        )
    told = await _move_to(context, move.from_leaf, "redo", options)
    prompt = await _newest_prompt(context)
    position = f"after {_quoted_prompt(prompt)}" if prompt else "at the beginning"
    return f"Back where you were before `/{move.reason}`, {position}. The model sees that part again. {told}".rstrip()


async def rewind(context: CommandContext, argument: str) -> str:
    options = _parse_options("rewind", argument, takes_place=True)
    if not options.place:
        raise ArgumentError(f"`/rewind` needs a place: {PLACE_HINT}. `/history` lists the prompts with their numbers.")
    place = await find_place(context, options.place)
    if place.entry == context.branch.leaf:
        raise ArgumentError(f"The session is {place.words} already.")
    told = await _move_to(context, place.entry, "rewind", options)
    return (
        f"Now {place.words}. The model sees nothing that came after it. `/redo` goes back to where you were. {told}"
    ).rstrip()


async def retry(context: CommandContext, argument: str) -> str:
    options = _parse_options("retry", argument)
    prompt = await _newest_prompt(context)
    if prompt is None or not isinstance(prompt.body, User):
        raise ArgumentError("There is nothing to retry: this branch has no prompts.")
    again = replace(prompt.body, message_id=new_message_id())
    await _move_to(context, prompt.parent, "retry", options, then=again)
    return f"Trying again: {_quoted_prompt(prompt)}. The model does not see its first answer; `/tree` still lists it."


async def new(context: CommandContext, _: str) -> str:
    """If the session has an alias, create a new session and give it the alias. Otherwise do the same as `/clear`."""
    row = context.branch.row
    if row.alias is None:
        return await _start_over(context, "new")
    roots, config = row.additional_directories, row.config
    fresh = NewSession(
        id=new_session_id(), cwd=row.cwd, additional_directories=roots, model=row.model, mode=row.mode, config=config
    )
    made = await context.store.create_session(fresh)
    await context.store.move_alias(row.id, made.id)
    await context.branch.change(SessionChanges())  # reload the row, which no longer has an alias
    await context.branch.publish(SessionListChanged(session_id=made.id, change="created"))
    return (
        f"{quote(row.alias)} is now the alias of a new session, `{made.id}`; open it by that alias. This session, "
        f"`{row.id}`, keeps its history and stays in the list. To continue it, send a prompt here. (To start over "
        "within a session, use `/clear`.)"
    )


async def clear(context: CommandContext, _: str) -> str:
    return await _start_over(context, "clear")


async def _start_over(context: CommandContext, command: str) -> str:
    """Start the session again without any messages. The session keeps its id, and the conversation so far stays as
    another branch."""
    if await _newest_prompt(context) is None:
        raise ArgumentError("This branch is empty already. Just send a prompt.")
    await context.move(None, command)
    if not context.branch.row.title_by_user:
        await context.branch.change(SessionChanges(title=None))
        await context.branch.publish(TitleChanged(title=None))
    return (
        "A fresh start in the same session. The model sees nothing of the conversation above, but nothing is deleted. "
        "`/redo` goes back to it, and `/tree` lists it."
    )


async def history(context: CommandContext, argument: str) -> str:
    if argument not in ("", "all") and not re.fullmatch(r"[1-9][0-9]{0,5}", argument):
        raise ArgumentError(f"`/history {argument}`: expected no argument, a number of lines, such as 10, or `all`.")
    most = None if argument == "all" else int(argument or _MAX_LISTED)
    outline = await context.store.outline(context.branch.row.id)
    lines, number = [], 0
    for point in outline.points_of(outline.tips[0]):
        match point.kind:
            case "prompt":
                number += 1
                lines.append(f"- {number}. {quote(point.text)} `#{point.entry}`{_labelled(point)}")
            case "label":
                lines.append(f"- {_label_list(point.labels)} `#{point.entry}`")
            case "checkpoint":
                lines.append(f"- compaction (summary) `#{point.entry}`{_labelled(point)}")
    if not lines:
        return "This branch has no prompts yet. `/tree` shows the other branches."
    if most is not None and len(lines) > most:
        lines = [f"- … {len(lines) - most} earlier; `/history all` shows them", *lines[-most:]]
    return "\n".join([*lines, "\n`/rewind NUMBER` goes back to before a prompt; `/fork NUMBER` forks there."])


async def tree(context: CommandContext, argument: str) -> str:
    outline = await context.store.outline(context.branch.row.id)
    tips = outline.tips if argument else outline.tips[:_MAX_LISTED]
    lines = [_describe_tip(outline, tip) for tip in tips]
    if len(tips) < len(outline.tips):
        lines.append(f"- … {len(outline.tips) - len(tips)} older ones; `/tree all` shows them")
    end = "`/rewind #ENTRY` goes to the end of another branch. Nothing is lost."
    if len(outline.tips) == 1:
        end = "There is no other branch. `/undo`, `/rewind` and `/retry` make one."
    return "\n".join([*lines, "", end])


async def label(context: CommandContext, argument: str) -> str:
    words = argument.split()
    if not words or words == ["remove"]:
        points = (await context.store.outline(context.branch.row.id)).points
        labels = [f"- {', '.join(map(quote, point.labels))} `#{point.entry}`" for point in points if point.labels]
        return "\n".join(labels) or "There are no labels. `/label NAME` names this place; `/label #ENTRY NAME` another."
    if words[0] == "remove":
        return await _remove_label(context, " ".join(words[1:]))
    place = None
    if words[0].startswith("#"):
        place = await find_place(context, words.pop(0))
    name = " ".join(words)
    if not is_label(name):
        raise ArgumentError(
            f"{quote(safe(name))} cannot be a label. A label has 1 to {LABEL_CHARS} characters that can be seen, is "
            "not a number, and does not begin with #."
        )
    note = Note(about="label", value=name, entry=place.entry if place is not None else None)
    (entry,) = await context.branch.record([NewEntry(body=note)])
    which = (
        f"Entry `#{place.entry}` is now {quote(name)}" if place else f"This place is now {quote(name)} (`#{entry.id}`)"
    )
    return f"{which}. `/rewind {name}` returns there; `/fork {name}` forks there; `/label remove {name}` removes it."


async def _remove_label(context: CommandContext, name: str) -> str:
    outline = await context.store.outline(context.branch.row.id)
    if not any(name in point.labels for point in outline.points):
        raise ArgumentError(f"There is no label {quote(name)}. `/label` lists them.")
    await context.branch.record([NewEntry(body=Note(about="label", value=name, entry=0))])
    return f"Removed the label {quote(name)}."


async def find_place(context: CommandContext, name: str) -> Place:
    """Return the place that `name` means. A number means a prompt of this branch, counted from 1. `#` and a number mean
    the entry with that id. Anything else means the newest label of that name on any branch.

    :raises ArgumentError: there is no such place.
    """
    row = context.branch.row
    if name.startswith("#"):
        entry = await context.store.entry(int(name[1:])) if is_number(name[1:]) else None
        if entry is None or entry.conversation != row.conversation:
            raise ArgumentError(f"There is no entry {name} in this conversation. `/tree` and `/history` list entries.")
        return Place(entry=entry.id, words=f"at entry {name}")
    outline = await context.store.outline(row.id)
    if is_number(name):
        prompts = outline.prompts
        if not 1 <= int(name) <= len(prompts):
            raise ArgumentError(f"There is no prompt {name}; this branch has {len(prompts)}. `/history` lists them.")
        point = prompts[int(name) - 1]
        return Place(entry=point.before, words=f"before prompt {name}, {quote(point.text)}")
    found = next((point for point in outline.points if name in point.labels), None)
    if found is None:
        raise ArgumentError(f"There is no label {quote(name)}. `/label {name}` adds it here; `/tree` shows all labels.")
    return Place(entry=found.entry, words=f"at the label {quote(name)}")


def _label_list(labels: Sequence[str]) -> str:
    return f"label{'s' * (len(labels) > 1)} {', '.join(map(quote, labels))}"


def _labelled(point: BranchPoint) -> str:
    return f" ({_label_list(point.labels)})" if point.labels else ""


def _describe_tip(outline: Outline, tip: BranchTip) -> str:
    points = outline.points_of(tip)
    prompts = [point for point in points if point.kind == "prompt"]
    labels = [quote(label) for point in points for label in point.labels]
    count = plural(len(prompts), "prompt")
    content = f"{count}, last {quote(prompts[-1].text)}" if prompts else "no prompts yet"
    named = f"; label{'s' * (len(labels) > 1)} {', '.join(labels)}" if labels else ""
    place = "the beginning" if tip.entry is None else f"`#{tip.entry}`"
    return f"- {'**you are here** ' if tip.is_current else ''}{place}: {content}{named}"


async def _newest_prompt(context: CommandContext) -> Entry | None:
    """Return the newest prompt on the path, even if a compaction has hidden it from the model."""
    if (entry := context.branch.projection.newest_user()) is not None:
        return entry
    prompts = (await context.store.outline(context.branch.row.id)).prompts
    return await context.store.entry(prompts[-1].entry) if prompts else None


def _quoted_prompt(entry: Entry) -> str:
    parts = entry.body.parts if isinstance(entry.body, User) else ()
    return quote("\n".join(part.text for part in parts if isinstance(part, Text)))


def _move_to_redo(moves: Sequence[Move]) -> Move | None:
    """Return the newest move that no redo has reversed. `moves` are sorted newest first."""
    reversed_moves = 0
    for move in moves:
        if move.reason == "redo":
            reversed_moves += 1
        elif move.reason in _MOVES:
            if not reversed_moves:
                return move
            reversed_moves -= 1
    return None


def _parse_options(command: str, argument: str, *, takes_place: bool = False) -> _RestoreOptions:
    """Parse the options at the end of `argument`.

    :raises ArgumentError: the options contradict each other, or `argument` names a place but the command takes none.
    """
    words = argument.split()
    options: set[str] = set()
    while words and words[-1] in ("files", "keep", "summary"):
        options.add(words.pop())
    place = " ".join(words)
    if {"files", "keep"} <= options:
        raise ArgumentError("`files` restores files and `keep` leaves them as they are; give only one of them.")
    if place and not takes_place:
        raise ArgumentError(f"`/{command} {place}`: expected at most {OPTIONS_HINT}. `/rewind` goes to any place.")
    return _RestoreOptions(
        place=place,
        files="restore" if "files" in options else "keep" if "keep" in options else "ask",
        summary="summary" in options,
    )


async def _move_to(
    context: CommandContext, to: int | None, reason: str, options: _RestoreOptions, *, then: User | None = None
) -> str:
    """Move to the entry `to`, and set a follow-up that runs after the command has been stored. The follow-up restores
    files and writes a summary as `options` say. If `then` is given, the follow-up sends that prompt at the end."""
    leaf = context.branch.leaf
    told = await context.move(to, reason)

    async def follow_up(command: Entry) -> StopReason:
        stop = await _restore_and_summarise(context, command, leaf, to, options)
        return stop if then is None or stop == "cancelled" else await context.run_prompt(then)

    context.follow_up = follow_up
    return told


async def _restore_and_summarise(
    context: CommandContext, command: Entry, leaf: int | None, to: int | None, options: _RestoreOptions
) -> StopReason:
    """Restore files and store a summary, as `options` say. Both concern the abandoned entries: those on the path to the
    entry `leaf` that are not on the path to the entry `to`."""
    left, gained = await context.store.file_changes(leaf, to), await context.store.file_changes(to, leaf)
    changes = await changes_to_undo(context.workspace, left, gained)
    has_sets = holds_change_sets(changes)
    files = await find_restorable_files(context.workspace, changes) if changes and not has_sets else ()
    if has_sets and options.files != "keep":
        restore = Restore(context.branch, context.client, context.workspace, command)
        result = await restore.run(changes, asks=options.files == "ask")
    elif has_sets:
        result = RestoreResult(left=await names_of(context.workspace, changes))
    elif files and options.files != "keep":
        asks, workspace = options.files == "ask", context.workspace
        result = await restore_files(context.branch, context.client, workspace, files, command=command, asks=asks)
    else:
        result = RestoreResult(left=tuple(file.name for file in files))
    if result.left:
        text = _STILL_CHANGED.format(names=", ".join(result.left))
        await context.branch.record([NewEntry(body=Reminder(text=text))])
    if result.cancelled:
        return "cancelled"
    if options.summary:
        await _summarise_left(context, leaf, to)
    return "end_turn"


async def _summarise_left(context: CommandContext, leaf: int | None, to: int | None) -> None:
    """Store a summary of the abandoned part, for the model and for the user."""
    messages = for_model(await context.store.entries_beyond(leaf, to, _SUMMARISED)).messages
    compactor = await context.compactor()
    gauge, info = compactor.gauge, compactor.model.info
    scale = gauge.measured().scale
    job = SummaryJob(
        messages=messages,
        limits=replace(gauge.limits(), summary=round(_SUMMARY_TOKENS * scale)),
        scale=scale,
        deadline_s=_SUMMARY_DEADLINE_S,
        stream=partial(summary_stream, context.branch),
        instruction=_INSTRUCTION,
        cache_key=context.branch.row.id,
        keeps_prefix=False,
    )
    summary = await summarise(job, compactor.model)
    shown = _SHOWN_NOTES if summary.method == "fallback" else _SHOWN_SUMMARY
    reminder = Reminder(text=_LEFT_BEHIND.format(summary=summary.text))
    remark = Remark(text=shown.format(summary=summary.text), message_id=new_message_id())
    await context.branch.record(
        [
            NewEntry(body=reminder, model=info.name),
            NewEntry(body=remark),
        ]
    )


HANDLERS = (undo, redo, rewind, retry, new, clear, history, tree, label)
