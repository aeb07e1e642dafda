"""Rules about turns, for both engines: which entries end a draft, and which close the turn of a dead owner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from crow.domain.entries import Assistant, Body, Custom, Entry, NewEntry, PromptName, TurnEnd, User
from crow.domain.errors import ArgumentError, LeafMoved, NoSuchSession, SessionBusy
from crow.domain.messages import Usage
from crow.domain.subagents import WAKE
from crow.domain.tokens import estimate_text
from crow.store.codec import decode_parts
from crow.store.owner import readable
from crow.store.values import QueuedPrompt, SessionRow

Refusal: TypeAlias = Literal["gone", "busy", "interrupted", "fenced", "moved"]
"""Why a session cannot be written. "gone": it does not exist. "busy": another living store runs a turn.
"interrupted": a dead owner left a turn that must be closed first. "fenced": another process took over the turn, because
this process gave no sign of life. "moved": the session has another leaf."""


class InboxItem(NamedTuple):
    """Columns of a row of `inbox`."""

    seq: int
    owner: str
    parts: str
    message_id: str


class DraftPiece(NamedTuple):
    """A saved piece of an answer that was streaming."""

    message_id: str
    text: str
    thought: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadTurn:
    """A turn whose owner died: the session's row still says that the turn is running."""

    owner: str
    pieces: Sequence[DraftPiece]
    """The pieces of the draft at the leaf, oldest first."""
    previous: tuple[str, int | None] | None
    """The model of the session's previous request, and the sum of its input and output tokens. None if there was no
    earlier request."""
    has_end: bool
    """Whether the leaf is the end of this turn. If so, the owner died before it could release the turn."""


def orphans(items: Iterable[InboxItem], owner: str) -> tuple[InboxItem, ...]:
    """Return the prompts of dead owners. `items` are the items of this store (`owner`) and of dead owners."""
    return tuple(item for item in items if item.owner != owner and not item.message_id.startswith(WAKE))


def waiting_news(items: Iterable[InboxItem]) -> tuple[QueuedPrompt, ...]:
    """Return the texts that tell the model about background work. They are not prompts."""
    return tuple(
        QueuedPrompt(parts=decode_parts(item.parts), message_id=item.message_id)
        for item in items
        if item.message_id.startswith(WAKE)
    )


def closing_entries(
    dead: DeadTurn | None, left: Sequence[tuple[InboxItem, PromptName | None]], *, turn: int, model: str
) -> list[tuple[NewEntry, int]]:
    """Return the entries that close what dead owners have left behind, each with its turn.

    `dead` is the turn number `turn` if a dead owner left it running, otherwise None. Its saved draft becomes an
    interrupted answer. `left` are the queued prompts and their names. Each becomes a turn that never ran. `model` is
    the model of the session.
    """
    entries: list[tuple[NewEntry, int]] = []
    if dead is not None:
        answer = _interrupted_answer(dead.pieces)
        if answer is not None:
            by, usage = _estimated_usage(answer, dead.previous or (model, None))
            entries.append((NewEntry(body=answer, model=by, usage=usage), turn))
        if answer is not None or not dead.has_end:
            entries.append((_interrupted(f"{readable(dead.owner)} ended in the middle of this turn"), turn))
    for number, (item, name) in enumerate(left, start=turn + 1):
        user = User(parts=decode_parts(item.parts), message_id=item.message_id, name=name)
        entries.append((NewEntry(body=user, model=model), number))
        entries.append((_interrupted(f"{readable(item.owner)} ended before it ran this prompt"), number))
    return entries


def preview(closing: Iterable[tuple[NewEntry, int]], row: SessionRow, *, now_ms: int) -> tuple[Entry, ...]:
    """Return closing entries as they would follow the session's path. The entries are not stored, so they get made-up
    ids that follow the id of the session's newest entry."""
    entries: list[Entry] = []
    parent = row.leaf
    for entry_id, (new, turn) in enumerate(closing, start=max(row.newest_entry, row.leaf or 0) + 1):
        entries.append(
            Entry(
                id=entry_id,
                conversation=row.conversation,
                session=row.id,
                parent=parent,
                turn=turn,
                body=new.body,
                model=new.model,
                usage=new.usage,
                created_ms=now_ms,
            )
        )
        parent = entry_id
    return tuple(entries)


def _interrupted_answer(pieces: Sequence[DraftPiece]) -> Assistant | None:
    """Return the saved part of an unfinished answer, or None if nothing was saved. Only the newest answer counts."""
    newest = [piece for piece in pieces if piece.message_id == pieces[-1].message_id]
    text, thought = "".join(piece.text for piece in newest), "".join(piece.thought for piece in newest)
    if not text and not thought:
        return None
    return Assistant(text=text, thought=thought, message_id=newest[0].message_id, finish="interrupted")


def ends_draft(bodies: Iterable[Body]) -> bool:
    """Return whether these entries end the draft, because they contain the whole answer or the end of the turn."""
    return any(isinstance(body, Assistant | TurnEnd) for body in bodies)


def taken_from_inbox(bodies: Iterable[Body]) -> list[str]:
    """Return the message ids of the items that leave the inbox once these entries are stored."""
    return [
        body.message_id
        for body in bodies
        if isinstance(body, User) or (isinstance(body, Custom) and body.message_id.startswith(WAKE))
    ]


def raise_refusal(
    why: str, session_id: str, *, leaf: int | None = None, current: int | None = None, owner: str = ""
) -> NoReturn:
    """Refuse to write to a session. `why` is a `Refusal`. If it is "moved", `leaf` is the leaf that the caller expects,
    and `current` the leaf of the session. If it is "busy", `owner` is the owner of the turn.

    :raises NoSuchSession: the session does not exist, or is deleted.
    :raises SessionBusy: another living store runs a turn.
    :raises LeafMoved: in all other cases.
    """
    match why:
        case "gone":
            raise NoSuchSession(session_id)
        case "busy":
            raise SessionBusy(session_id, readable(owner))
        case "interrupted":
            raise LeafMoved(f"Session {session_id} was left in the middle of a turn. Load it again, then retry.")
        case "fenced":
            raise LeafMoved(
                f"Another process took over session {session_id} because this process gave no sign of life."
                " Nothing was written; load it again, then retry."
            )
        case _:
            raise LeafMoved(
                f"Another process changed session {session_id}: its leaf is entry {current}, not {leaf}. Nothing was"
                " written; load it again, then retry."
            )


def no_longer_queued(session_id: str, message_id: str) -> ArgumentError:
    """Return the error for a prompt that should be in the inbox but is not."""
    return ArgumentError(f"Prompt {message_id} is no longer queued in session {session_id}. Send it again.")


def _interrupted(detail: str) -> NewEntry:
    return NewEntry(body=TurnEnd(stop="interrupted", detail=detail))


def _estimated_usage(answer: Assistant, previous: tuple[str, int | None]) -> tuple[str, Usage]:
    """Return the model of an unfinished answer, and the estimated usage of its request. The input is estimated as the
    tokens of the previous request. The output is estimated from the saved text."""
    model, sent = previous
    made = estimate_text(answer.text) + estimate_text(answer.thought)
    usage = Usage(input_tokens=sent, output_tokens=made, is_input_estimated=sent is not None, is_output_estimated=True)
    return model, usage
