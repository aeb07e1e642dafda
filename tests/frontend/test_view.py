"""What a view shows of a log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings

from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Command,
    Custom,
    Entry,
    Mask,
    Note,
    Prompt,
    Remark,
    Reminder,
    Restore,
    Started,
    ToolResult,
    TurnEnd,
)
from crow.domain.events import EntryStored
from crow.domain.rendering import EFFECTS_UNKNOWN, INTERRUPTED, NOT_RUN
from crow.frontend.view import View
from crow.protocol.params import ClientCapabilities
from tests.support.amounts import examples
from tests.support.paths import PathBuilder, damaged, histories, result_of, said, user
from tests.support.shared_host import transcript
from tests.support.views import Params, read_log, reading, texts


def log_of(*bodies: Body) -> list[Params]:
    return read_log(PathBuilder(*bodies).entries)


def calls(updates: list[Params]) -> list[tuple[Any, ...]]:
    """The kind, index, title, status and last text of each update of a call."""
    return [
        (
            update["sessionUpdate"],
            CallRef.parse(update["toolCallId"]).index,  # type: ignore[union-attr]
            update.get("title"),
            update["status"],
            update.get("content", [{}])[-1].get("content", {}).get("text"),
        )
        for update in updates
        if "toolCallId" in update
    ]


def test_prompt_reasoning_and_answer_are_shown_whole() -> None:
    updates = log_of(user("hi"), Assistant(text="hello", thought="hm", message_id="m7"), TurnEnd(stop="end_turn"))
    assert [update["content"]["text"] for update in updates] == ["hi", "hm", "hello"]
    assert updates[1]["messageId"] == "m7_thought"


def test_an_interrupted_answer_is_marked() -> None:
    answers = (said("I will", finish="interrupted"), replace(said("", finish="interrupted"), message_id="n"))
    assert texts(log_of(*answers)) == {"m": f"I will\n\n{INTERRUPTED}", "n": INTERRUPTED}


def test_calls_are_shown_in_call_order_whichever_ends_first() -> None:
    updates = log_of(said("", "a", "b"), result_of(1, 1), result_of(1, 0), TurnEnd(stop="end_turn"))
    assert [(kind, index, status) for kind, index, _, status, _ in calls(updates)] == [
        ("tool_call", 0, "pending"),
        ("tool_call", 1, "completed"),
        ("tool_call_update", 0, "completed"),
    ]
    in_order = log_of(said("", "a", "b"), result_of(1, 0), result_of(1, 1), TurnEnd(stop="end_turn"))
    assert [(kind, status) for kind, _, _, status, _ in calls(in_order)] == [("tool_call", "completed")] * 2


def test_calls_without_a_result_end_with_the_text_that_the_model_sees() -> None:
    shown = (Announcement(title="Read a", kind="read"), Announcement(title="Write b", kind="edit"))
    answer = replace(said("", "a", "b"), announcements=shown)
    updates = log_of(answer, Started(call=CallRef(assistant=1, index=0), why="allowed"))
    assert calls(updates) == [
        ("tool_call", 0, "Read a", "failed", EFFECTS_UNKNOWN),
        ("tool_call", 1, "Write b", "failed", NOT_RUN),
    ]


def test_the_calls_of_a_running_turn_stay_open() -> None:
    view = reading()
    entries = PathBuilder(said("", "a", "b"), Started(call=CallRef(assistant=1, index=0), why="allowed")).entries
    shown = [each.update for entry in entries for each in view.apply(EntryStored(entry=entry))]
    shown += [each.update for each in view.end_reading(is_running=True)]
    assert [(index, status) for _, index, _, status, _ in calls(shown)] == [(0, "in_progress"), (1, "pending")]


def test_compactions_remarks_and_commands_are_shown_but_reminders_are_not() -> None:
    shown: list[Body] = [
        Checkpoint(compaction_id="k", summary="S", first_kept=None, reason="threshold"),
        Mask(before=1),
        Remark(text="A server failed.", message_id="r"),
        Command(text="/help", answer="...", message_id="c"),
        Custom(namespace="ours", text="Ticket 17.", is_shown=True, message_id="t"),
    ]
    hidden: list[Body] = [
        Prompt(system="s", tools=(), cwd="/", model="m"),
        Reminder(text="plan mode"),
        Custom(namespace="ours", text="Ticket 17.", for_model=True),
        Restore(entry=1),
        Note(about="model", value="t"),
    ]
    updates = log_of(*shown, *hidden)
    assert [update["messageId"] for update in updates] == ["k", "mask_2", "r", "c_typed", "c", "t"]


@given(entries=histories())
@settings(max_examples=examples(20))
def test_compactions_add_only_themselves(entries: list[Entry]) -> None:
    marks = {each.body.compaction_id for each in entries if isinstance(each.body, Checkpoint)}
    marks |= {f"mask_{each.id}" for each in entries if isinstance(each.body, Mask)}
    without = [entry for entry in entries if not isinstance(entry.body, (Checkpoint, Mask, Restore))]
    assert [each for each in transcript(read_log(entries)) if each[1] not in marks] == transcript(read_log(without))


@given(entries=damaged())
@settings(max_examples=examples(20))
def test_every_call_and_result_of_a_damaged_path_is_shown(entries: list[Entry]) -> None:
    statuses = {update["toolCallId"]: update["status"] for update in read_log(entries) if "toolCallId" in update}
    for entry in entries:
        if isinstance(entry.body, Assistant):
            refs = {CallRef(assistant=entry.id, index=index).call_id for index in range(len(entry.body.calls))}
            assert refs <= statuses.keys()
        if isinstance(entry.body, ToolResult):
            assert entry.body.call.call_id in statuses
    assert not {"pending", "in_progress"} & set(statuses.values())


@given(entries=histories())
@settings(max_examples=examples(20))
def test_an_entry_that_comes_twice_or_late_is_shown_once(entries: list[Entry]) -> None:
    once, again = (View(ClientCapabilities(), session_id="s") for _ in range(2))
    for at, entry in enumerate(entries):
        shown = [each.update for each in once.apply(EntryStored(entry=entry))]
        assert [each.update for each in again.apply(EntryStored(entry=entry))] == shown
        for late in entries[: at + 1]:
            assert again.apply(EntryStored(entry=late)) == []
