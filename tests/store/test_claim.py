"""What is stored for the turn and the prompts of an owner that died."""

from __future__ import annotations

import pytest

from crow.domain.entries import Assistant, Custom, NewEntry, PromptName, TurnEnd, User
from crow.domain.errors import CrowError, LeafMoved, NoSuchSession, SessionBusy
from crow.domain.messages import Text, Usage
from crow.domain.subagents import WAKE
from crow.store import QueuedPrompt
from crow.store.claim import (
    DeadTurn,
    DraftPiece,
    InboxItem,
    closing_entries,
    ends_draft,
    orphans,
    raise_refusal,
    taken_from_inbox,
    waiting_news,
)
from crow.store.codec import encode_parts
from tests.store.scenes import said

OWN, DEAD = "own", "the machine in the cellar"
NAME = PromptName(id="p", digest="d")
END = TurnEnd(stop="interrupted", detail=f"{DEAD} ended in the middle of this turn")
NEVER_RAN = TurnEnd(stop="interrupted", detail=f"{DEAD} ended before it ran this prompt")


def item(seq: int, owner: str, message_id: str) -> InboxItem:
    return InboxItem(seq, owner, encode_parts((Text(text=message_id),)), message_id)


def dead_turn(*pieces: DraftPiece, previous: tuple[str, int | None] | None = None, has_end: bool = False) -> DeadTurn:
    return DeadTurn(owner=DEAD, pieces=pieces, previous=previous, has_end=has_end)


def test_the_saved_draft_becomes_an_interrupted_answer_before_the_end_of_the_turn() -> None:
    pieces = (DraftPiece("a0", "lost ", ""), DraftPiece("a1", "x" * 32, "hm"), DraftPiece("a1", "y" * 8, ""))
    answer = Assistant(text="x" * 32 + "y" * 8, thought="hm", message_id="a1", finish="interrupted")
    usage = Usage(input_tokens=120, output_tokens=11, is_input_estimated=True, is_output_estimated=True)
    assert closing_entries(dead_turn(*pieces, previous=("m1", 120)), (), turn=3, model="m2") == [
        (NewEntry(body=answer, model="m1", usage=usage), 3),
        (NewEntry(body=END), 3),
    ]


def test_the_input_of_an_interrupted_first_request_is_unknown() -> None:
    (entry, _), _ = closing_entries(dead_turn(DraftPiece("a", "hello", "")), (), turn=1, model="m2")
    assert (entry.model, entry.usage) == ("m2", Usage(output_tokens=2, is_output_estimated=True))


@pytest.mark.parametrize("pieces", [(), (DraftPiece("a", "", ""),)])
def test_a_turn_without_a_saved_answer_ends_once(pieces: tuple[DraftPiece, ...]) -> None:
    assert closing_entries(dead_turn(*pieces), (), turn=1, model="m") == [(NewEntry(body=END), 1)]
    assert closing_entries(dead_turn(*pieces, has_end=True), (), turn=1, model="m") == []


def test_each_prompt_of_a_dead_owner_becomes_a_turn_that_never_ran() -> None:
    left = [(item(5, DEAD, "u5"), NAME), (item(6, DEAD, "u6"), None)]
    assert closing_entries(None, left, turn=2, model="m") == [
        (NewEntry(body=User(parts=(Text(text="u5"),), message_id="u5", name=NAME), model="m"), 3),
        (NewEntry(body=NEVER_RAN), 3),
        (NewEntry(body=User(parts=(Text(text="u6"),), message_id="u6"), model="m"), 4),
        (NewEntry(body=NEVER_RAN), 4),
    ]


def test_news_in_the_inbox_is_for_the_model_and_is_no_prompt() -> None:
    items = [item(1, OWN, "u1"), item(2, DEAD, "u2"), item(3, OWN, f"{WAKE}c1"), item(4, DEAD, f"{WAKE}c2")]
    assert orphans(items, OWN) == (items[1],)
    assert waiting_news(items) == tuple(
        QueuedPrompt(parts=(Text(text=name),), message_id=name) for name in (f"{WAKE}c1", f"{WAKE}c2")
    )


def test_prompts_and_told_news_leave_the_inbox_and_answers_and_ends_finish_the_draft() -> None:
    user = User(parts=(), message_id="u")
    told = Custom(namespace="crow", data={}, message_id=f"{WAKE}c")
    other = Custom(namespace="crow", data={}, message_id="other")
    assert taken_from_inbox([user, told, other, said("x")]) == ["u", f"{WAKE}c"]
    assert [ends_draft([body]) for body in (user, told, said("x"), TurnEnd(stop="end_turn"))] == [False] * 2 + [
        True
    ] * 2


@pytest.mark.parametrize(
    ("why", "error", "words"),
    [
        ("gone", NoSuchSession, "s1"),
        ("busy", SessionBusy, DEAD),
        ("interrupted", LeafMoved, "left in the middle of a turn"),
        ("fenced", LeafMoved, "gave no sign of life"),
        ("moved", LeafMoved, "its leaf is entry 7, not 4"),
    ],
)
def test_a_refusal_says_why_the_session_cannot_be_written(why: str, error: type[CrowError], words: str) -> None:
    with pytest.raises(error, match=words):
        raise_refusal(why, "s1", leaf=4, current=7, owner=DEAD)
