"""Commands that stand the session elsewhere in its conversation: undo, redo, rewind, retry, new, clear.

Strategy: nothing is removed; the leaf moves, the move is recorded, and the answer says in words what the model no
longer sees, since a client cannot take back what it has shown. What can be redone is read from the moves: redo takes
back the newest one that was not taken back yet, unless something was said since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crow.agent import new_message_id, new_session_id
from crow.agent.commands import OPTIONS_HINT, PLACE_HINT
from crow.agent.commands.desk import Desk, Handler
from crow.agent.commands.leaving import Leaving, after_leaving, leaving_from
from crow.agent.commands.places import on_path, place_named, quoted
from crow.domain.entries import Entry, StopReason, User
from crow.domain.errors import ArgumentError
from crow.domain.events import TitleChanged
from crow.domain.messages import Text
from crow.store import Move, NewSession, SessionChanges

__all__ = ["WALK_COMMANDS"]

LEAVES = ("undo", "rewind", "retry", "new", "clear")
UNSEEN = "The model no longer sees it, though it is still shown above."


async def undo(desk: Desk, argument: str) -> str:
    leaving = without_place("undo", argument)
    prompt = await newest_prompt(desk)
    if prompt is None:
        raise ArgumentError("There is nothing to undo: nothing was said yet on this branch. `/tree` shows the others.")
    await leave(desk, prompt.parent, "undo", leaving)
    return f"Took back the last turn, {quoted_prompt(prompt)}. {UNSEEN} `/redo` brings it back."


async def redo(desk: Desk, argument: str) -> str:
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


async def rewind(desk: Desk, argument: str) -> str:
    leaving = leaving_from(argument)
    if not leaving.place:
        raise ArgumentError(f"`/rewind` needs a place: {PLACE_HINT}. `/history` lists the prompts with their numbers.")
    place = await place_named(desk, leaving.place)
    if place.entry == desk.branch.leaf:
        raise ArgumentError(f"The session stands {place.words} already.")
    await leave(desk, place.entry, "rewind", leaving)
    return f"Now {place.words}. The model sees nothing that came after it. `/redo` goes back to where you were."


async def retry(desk: Desk, argument: str) -> str:
    leaving = without_place("retry", argument)
    prompt = await newest_prompt(desk)
    if prompt is None or not isinstance(prompt.body, User):
        raise ArgumentError("There is nothing to retry: nothing was said yet on this branch.")
    again = replace(prompt.body, message_id=new_message_id())
    await leave(desk, prompt.parent, "retry", leaving, then=again)
    return f"Trying again: {quoted_prompt(prompt)}. The model does not see its first answer; `/tree` still has it."


async def new(desk: Desk, argument: str) -> str:
    nothing_expected("new", argument)
    if desk.branch.row.alias is not None:
        return await new_for_alias(desk, desk.branch.row.alias)
    return await begin_anew(desk, "new")


async def clear(desk: Desk, argument: str) -> str:
    nothing_expected("clear", argument)
    return await begin_anew(desk, "clear")


async def begin_anew(desk: Desk, command: str) -> str:
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


async def new_for_alias(desk: Desk, alias: str) -> str:
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


async def leave(desk: Desk, to: int | None, reason: str, leaving: Leaving, *, then: User | None = None) -> None:
    """Move, and see to what is left once the command is stored; `then` is prompted after that."""
    leaf = desk.branch.leaf
    await desk.move(to, reason)

    async def go_on(command: Entry) -> StopReason:
        stop = await after_leaving(desk, command, leaf, to, leaving)
        return stop if then is None or stop == "cancelled" else await desk.run_prompt(then)

    desk.follow_up = go_on


async def newest_prompt(desk: Desk) -> Entry | None:
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


def without_place(name: str, argument: str) -> Leaving:
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
