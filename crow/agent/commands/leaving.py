"""What every command that leaves a branch does with what it leaves: its files, and a summary of it for the model.

Strategy: the leaf moves and the command is stored first; then what is left behind is looked at, the user is asked about
files where they did not say, and what the model must know is stored as crow's words to it. Knows the two branches by
their leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from crow.agent import new_message_id
from crow.agent.commands.desk import Desk
from crow.agent.compaction.summary import Asking, Head, ask, is_usable, notes, serialised_request
from crow.agent.cost import cost_of
from crow.agent.rewind import PutBack, look_at, offer_to_put_back
from crow.domain.conversation import for_model
from crow.domain.entries import Entry, NewEntry, Remark, Reminder, StopReason
from crow.domain.errors import ArgumentError

__all__ = ["Leaving", "after_leaving", "leaving_from"]

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
class Leaving:
    """What the user wants with what is left: `place` is what they said beside the options."""

    place: str = ""
    files: Literal["ask", "put back", "keep"] = "ask"
    summary: bool = False


def leaving_from(argument: str) -> Leaving:
    """The options at the end of an argument. :raises ArgumentError: both `files` and `keep`."""
    words = argument.split()
    options: set[str] = set()
    while words and words[-1] in ("files", "keep", "summary"):
        options.add(words.pop())
    if {"files", "keep"} <= options:
        raise ArgumentError("`files` puts files back and `keep` leaves them as they are; give one of them.")
    return Leaving(
        place=" ".join(words),
        files="put back" if "files" in options else "keep" if "keep" in options else "ask",
        summary="summary" in options,
    )


async def after_leaving(desk: Desk, command: Entry, leaf: int | None, to: int | None, leaving: Leaving) -> StopReason:
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


async def see_to_files(desk: Desk, command: Entry, leaf: int | None, to: int | None, leaving: Leaving) -> PutBack:
    changes = await desk.store.file_changes(leaf, to)
    files = await look_at(desk.workspace, changes) if changes else ()
    if not files or leaving.files == "keep":
        return PutBack(left=tuple(former.name for former in files))
    return await offer_to_put_back(
        desk.branch, desk.client, desk.workspace, files, command=command, asks=leaving.files == "ask"
    )


async def summary_of(desk: Desk, leaf: int | None, to: int | None) -> tuple[NewEntry, NewEntry]:
    """What was left, for the model and for the user: in the model's words or, where it has none, in notes taken by
    code."""
    context = for_model(await desk.store.left_behind(leaf, to, SAID))
    compactor = await desk.compactor()
    model, gauge = compactor.model, compactor.gauge
    head = Head(tools=(), messages=context.messages, estimate=context.estimate, previous="")
    request = serialised_request(head, INSTRUCTION, gauge.limits(), gauge.measured().scale, desk.branch.row.id)
    answer = await ask(model, request, Asking(deadline_s=DEADLINE_S))
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
