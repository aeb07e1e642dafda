"""Commands that stand the session elsewhere in its conversation: undo, redo, rewind, retry, new, clear.

Strategy: nothing is removed; the leaf moves, the move is recorded, and the answer says in words what the model no
longer sees, since a client cannot take back what it has shown. What can be redone is read from the moves: redo takes
back the newest one that was not taken back yet, unless something was said since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from crow.agent import new_message_id, new_session_id
from crow.agent.commands import OPTIONS_HINT, PLACE_HINT, CommandContext, Handler
from crow.agent.compaction.summary import CoveredContext, SummaryOptions, ask, is_usable, notes, serialised_request
from crow.agent.rewind import RestoreResult, look_at, offer_to_put_back
from crow.domain.conversation import for_model
from crow.domain.entries import Entry, NewEntry, Note, Remark, Reminder, StopReason, User
from crow.domain.errors import ArgumentError
from crow.domain.events import TitleChanged
from crow.domain.messages import Text
from crow.llm import cost_of
from crow.store import BranchPoint, BranchTip, Move, NewSession, Outline, SessionChanges

__all__ = [
    "PLACE_COMMANDS",
    "WALK_COMMANDS",
    "BranchTarget",
    "RestoreOptions",
    "after_leaving",
    "leaving_from",
    "on_path",
    "place_named",
    "quoted",
]

LEAVES = ("undo", "rewind", "retry", "new", "clear")
UNSEEN = "The model no longer sees it, though it is still shown above."


async def undo(desk: CommandContext, argument: str) -> str:
    leaving = without_place("undo", argument)
    prompt = await newest_prompt(desk)
    if prompt is None:
        raise ArgumentError("There is nothing to undo: nothing was said yet on this branch. `/tree` shows the others.")
    await leave(desk, prompt.parent, "undo", leaving)
    return f"Took back the last turn, {quoted_prompt(prompt)}. {UNSEEN} `/redo` brings it back."


async def redo(desk: CommandContext, argument: str) -> str:
    leaving = without_place("redo", argument)
    move = to_redo(await desk.store.moves(desk.branch.row.id))
    if move is None:
        raise ArgumentError("There is nothing to redo. `/tree` shows all branches.")
    if await desk.store.left_behind(desk.branch.leaf, move.to_leaf, ("user",)):
        raise ArgumentError(
            "There is nothing to redo: you went on since. `/tree` shows the branch that you left, and `/rewind #ENTRY` "
            "goes there."
        )
    await leave(desk, move.from_leaf, "redo", leaving)
    prompt = await newest_prompt(desk)
    stands = f"after {quoted_prompt(prompt)}" if prompt else "at the beginning"
    return f"Back where you were before `/{move.reason}`, {stands}. The model sees it again."


async def rewind(desk: CommandContext, argument: str) -> str:
    leaving = leaving_from(argument)
    if not leaving.place:
        raise ArgumentError(f"`/rewind` needs a place: {PLACE_HINT}. `/history` lists the prompts with their numbers.")
    place = await place_named(desk, leaving.place)
    if place.entry == desk.branch.leaf:
        raise ArgumentError(f"The session stands {place.words} already.")
    await leave(desk, place.entry, "rewind", leaving)
    return f"Now {place.words}. The model sees nothing that came after it. `/redo` goes back to where you were."


async def retry(desk: CommandContext, argument: str) -> str:
    leaving = without_place("retry", argument)
    prompt = await newest_prompt(desk)
    if prompt is None or not isinstance(prompt.body, User):
        raise ArgumentError("There is nothing to retry: nothing was said yet on this branch.")
    again = replace(prompt.body, message_id=new_message_id())
    await leave(desk, prompt.parent, "retry", leaving, then=again)
    return f"Trying again: {quoted_prompt(prompt)}. The model does not see its first answer; `/tree` still has it."


async def new(desk: CommandContext, argument: str) -> str:
    nothing_expected("new", argument)
    if desk.branch.row.alias is not None:
        return await new_for_alias(desk, desk.branch.row.alias)
    return await begin_anew(desk, "new")


async def clear(desk: CommandContext, argument: str) -> str:
    nothing_expected("clear", argument)
    return await begin_anew(desk, "clear")


async def begin_anew(desk: CommandContext, command: str) -> str:
    """Stand before everything: the id stays, the conversation so far is a branch of its own."""
    if await newest_prompt(desk) is None:
        raise ArgumentError("This branch is empty already. Just send a prompt.")
    await desk.move(None, command)
    if not desk.branch.row.title_by_user:
        await desk.branch.change(SessionChanges(title=None))
        await desk.branch.publish(TitleChanged(title=None))
    return (
        "A fresh start in the same session. The model sees nothing of what was said above; nothing is deleted. "
        "`/redo` goes back, and `/tree` lists it."
    )


async def new_for_alias(desk: CommandContext, alias: str) -> str:
    """A new session takes the alias over; this one stays as it is."""
    row = desk.branch.row
    made = await desk.store.create_session(
        NewSession(
            id=new_session_id(),
            cwd=row.cwd,
            model=row.model,
            mode=row.mode,
            additional_directories=row.additional_directories,
            config=row.config,
        )
    )
    await desk.store.move_alias(row.id, made.id)
    await desk.branch.change(SessionChanges())  # the row in memory has no alias any more either
    return (
        f"{quoted(alias)} names a new session now, `{made.id}`: open it by that name. This one, `{row.id}`, keeps all "
        "that was said, goes on if you prompt it here, and stays in the list. `/clear` would begin anew right here."
    )


async def leave(
    desk: CommandContext, to: int | None, reason: str, leaving: RestoreOptions, *, then: User | None = None
) -> None:
    """Move, and see to what is left once the command is stored; `then` is prompted after that."""
    leaf = desk.branch.leaf
    await desk.move(to, reason)

    async def go_on(command: Entry) -> StopReason:
        stop = await after_leaving(desk, command, leaf, to, leaving)
        return stop if then is None or stop == "cancelled" else await desk.run_prompt(then)

    desk.follow_up = go_on


async def newest_prompt(desk: CommandContext) -> Entry | None:
    """The newest prompt on the path, also where a compaction has put it out of the model's sight."""
    found = desk.branch.newest_user()
    if found is None:
        outline = await desk.store.outline(desk.branch.row.id)
        prompts = [point for point in on_path(outline, outline.tips[0]) if point.kind == "prompt"]
        found = await desk.store.entry(prompts[-1].entry) if prompts else None
    return found


def to_redo(moves: Sequence[Move]) -> Move | None:
    """The newest move that was not taken back; `moves` newest first."""
    taken_back = 0
    for move in moves:
        if move.reason == "redo":
            taken_back += 1
        elif move.reason in LEAVES:
            if not taken_back:
                return move
            taken_back -= 1
    return None


def without_place(name: str, argument: str) -> RestoreOptions:
    leaving = leaving_from(argument)
    if leaving.place:
        raise ArgumentError(
            f"`/{name} {leaving.place}`: expected nothing, or {OPTIONS_HINT}. `/rewind` goes to a place of your choice."
        )
    return leaving


def nothing_expected(name: str, argument: str) -> None:
    if argument:
        raise ArgumentError(f"`/{name}` takes nothing after it; send the prompt by itself afterwards.")


def quoted_prompt(entry: Entry) -> str:
    parts = entry.body.parts if isinstance(entry.body, User) else ()
    return quoted("\n".join(part.text for part in parts if isinstance(part, Text)))


WALK_COMMANDS: Mapping[str, Handler] = {
    "undo": undo,
    "redo": redo,
    "rewind": rewind,
    "retry": retry,
    "new": new,
    "clear": clear,
}


# FROM agent.commands.places: Places in a conversation, as people name them: a prompt's number, a label, an entry's
# id.
#
# Strategy: prompts are numbered from 1 along the path the session stands on; a label is found on any branch, the
# newest
# of its name; `#` and a number is the entry with this id. Shows `/history` and `/tree` in the same words, so that
# what
# is shown can be typed.


QUOTE_CHARS = 60
LABEL_CHARS = 60
LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTarget:
    """Where to stand (None: before everything), and where that is in words."""

    entry: int | None
    words: str


async def place_named(desk: CommandContext, name: str) -> BranchTarget:
    """:raises ArgumentError: there is no such place."""
    row = desk.branch.row
    if name.startswith("#"):
        number = name[1:]
        entry = await desk.store.entry(int(number)) if number.isdecimal() and number.isascii() else None
        if entry is None or entry.conversation != row.conversation:
            raise ArgumentError(f"There is no entry {name} in this conversation. `/tree` and `/history` show what is.")
        return BranchTarget(entry=entry.id, words=f"at entry {name}")
    outline = await desk.store.outline(row.id)
    prompts = [point for point in on_path(outline, outline.tips[0]) if point.kind == "prompt"]
    if name.isdecimal() and name.isascii():
        if not 1 <= int(name) <= len(prompts):
            there = f"there are {len(prompts)}" if prompts else "there is none yet"
            raise ArgumentError(f"There is no prompt {name} on this branch; {there}. `/history` lists them.")
        point = prompts[int(name) - 1]
        return BranchTarget(entry=point.before, words=f"before prompt {name}, {quoted(point.text)}")
    found = next((point for point in reversed(outline.points) if point.kind == "label" and point.text == name), None)
    if found is None:
        raise ArgumentError(f"No label {quoted(name)}. `/label {name}` would make it here; `/tree` shows all labels.")
    return BranchTarget(entry=found.entry, words=f"at the label {quoted(name)}")


async def history(desk: CommandContext, argument: str) -> str:
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


async def tree(desk: CommandContext, argument: str) -> str:
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


async def label(desk: CommandContext, argument: str) -> str:
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


def on_path(outline: Outline, tip: BranchTip) -> list[BranchPoint]:
    """The points of a branch, oldest first."""
    by_entry = {point.entry: point for point in outline.points}
    points: list[BranchPoint] = []
    at = tip.point
    while at is not None:
        points.append(by_entry[at])
        at = by_entry[at].previous
    return points[::-1]


def shown_tip(outline: Outline, tip: BranchTip) -> str:
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


# FROM agent.commands.leaving: What every command that leaves a branch does with what it leaves: its files, and a
# summary of it for the model.
#
# Strategy: the leaf moves and the command is stored first; then what is left behind is looked at, the user is asked
# about
# files where they did not say, and what the model must know is stored as crow's words to it. Knows the two branches
# by
# their leaves.


DEADLINE_S = 120.0
SUMMARY_TOKENS = 1_500
SAID = ("user", "assistant", "tool", "reminder", "checkpoint")
INSTRUCTION = (
    "The user has left this line of work and gone back to an earlier point. In at most 400 words, write what was tried "
    "here, what came of it, what was learned, and why one would or would not try it again. Plain text, no preamble."
)
LEFT_BEHIND = (
    "<reminder>\nThe user went back to this point after another line of work, which you no longer see. This is what "
    "came of it:\n{summary}\n</reminder>"
)
SHOWN_SUMMARY = "What came of the line of work that you left, as the model is told:\n\n{summary}"
SHOWN_NOTES = "The model gave no summary of the work that you left, so crow took notes. It is told:\n\n{summary}"
STILL_CHANGED = (
    "<reminder>\nThe user went back to this point of the conversation. These files were changed after it and still "
    "are: {names}. Read them again before you rely on what they hold.\n</reminder>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """What the user wants with what is left: `place` is what they said beside the options."""

    place: str = ""
    files: Literal["ask", "put back", "keep"] = "ask"
    summary: bool = False


def leaving_from(argument: str) -> RestoreOptions:
    """The options at the end of an argument. :raises ArgumentError: both `files` and `keep`."""
    words = argument.split()
    options: set[str] = set()
    while words and words[-1] in ("files", "keep", "summary"):
        options.add(words.pop())
    if {"files", "keep"} <= options:
        raise ArgumentError("`files` puts files back and `keep` leaves them as they are; give one of them.")
    return RestoreOptions(
        place=" ".join(words),
        files="put back" if "files" in options else "keep" if "keep" in options else "ask",
        summary="summary" in options,
    )


async def after_leaving(
    desk: CommandContext, command: Entry, leaf: int | None, to: int | None, leaving: RestoreOptions
) -> StopReason:
    """See to what the path of `leaf` has and that of `to` has not."""
    back = await see_to_files(desk, command, leaf, to, leaving)
    if back.left:
        text = STILL_CHANGED.format(names=", ".join(back.left))
        await desk.branch.record([NewEntry(body=Reminder(text=text))])
    if back.dismissed:
        return "cancelled"
    if leaving.summary:
        await desk.branch.record(await summary_of(desk, leaf, to))
    return "end_turn"


async def see_to_files(
    desk: CommandContext, command: Entry, leaf: int | None, to: int | None, leaving: RestoreOptions
) -> RestoreResult:
    changes = await desk.store.file_changes(leaf, to)
    files = await look_at(desk.workspace, changes) if changes else ()
    if not files or leaving.files == "keep":
        return RestoreResult(left=tuple(former.name for former in files))
    return await offer_to_put_back(
        desk.branch, desk.client, desk.workspace, files, command=command, asks=leaving.files == "ask"
    )


async def summary_of(desk: CommandContext, leaf: int | None, to: int | None) -> tuple[NewEntry, NewEntry]:
    """What was left, for the model and for the user: in the model's words or, where it has none, in notes taken by
    code."""
    context = for_model(await desk.store.left_behind(leaf, to, SAID))
    compactor = await desk.compactor()
    model, gauge = compactor.model, compactor.gauge
    head = CoveredContext(tools=(), messages=context.messages, estimate=context.estimate, previous="")
    request = serialised_request(head, INSTRUCTION, gauge.limits(), gauge.measured().scale, desk.branch.row.id)
    answer = await ask(model, request, SummaryOptions(deadline_s=DEADLINE_S))
    if answer is not None and is_usable(answer, SUMMARY_TOKENS):
        shown, text = SHOWN_SUMMARY, answer.text.strip()
    else:
        shown, text = SHOWN_NOTES, notes("", context.messages[1:], SUMMARY_TOKENS)
    usage = answer.usage if answer is not None else None
    reminder = Reminder(text=LEFT_BEHIND.format(summary=text))
    remark = Remark(text=shown.format(summary=text), message_id=new_message_id())
    return (
        NewEntry(body=reminder, model=model.info.name, usage=usage, cost=cost_of(usage, model.info)),
        NewEntry(body=remark),
    )
