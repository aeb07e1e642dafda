"""The history as the client sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from crow.domain.events import CallAnnounced, CallEnded, EntryStored, Event, TextShown, ThoughtShown
from crow.domain.rendering import EFFECTS_UNKNOWN, INTERRUPTED, NOT_RUN
from crow.domain.replay import Replay
from tests.support.paths import PathBuilder, damaged, histories, result_of, said, user


def replayed(entries: Sequence[Entry]) -> list[Event]:
    replay = Replay()
    return [event for entry in entries for event in replay.feed(entry)] + list(replay.end())


def of(*bodies: Body) -> tuple[list[Entry], list[Event]]:
    entries = PathBuilder(*bodies).entries
    return entries, replayed(entries)


def announced(assistant: int, index: int, call: str, announcement: Announcement) -> CallAnnounced:
    return CallAnnounced(
        call=CallRef(assistant=assistant, index=index),
        name="read_file",
        arguments=f'{{"path": "/proj/{call}"}}',
        announcement=announcement,
    )


def test_prompt_reasoning_and_answer_are_shown_whole() -> None:
    entries, events = of(user("hi"), Assistant(text="hello", thought="hm", message_id="m7"), TurnEnd(stop="end_turn"))
    assert events == [
        EntryStored(entry=entries[0]),
        ThoughtShown(message_id="m7", text="hm"),
        TextShown(message_id="m7", text="hello"),
        EntryStored(entry=entries[2]),
    ]


def test_interrupted_answer_is_marked() -> None:
    _, events = of(said("I will", finish="interrupted"), said("", finish="interrupted"))
    assert events == [
        TextShown(message_id="m", text=f"I will\n\n{INTERRUPTED}"),
        TextShown(message_id="m", text=INTERRUPTED),
    ]


def test_calls_are_announced_in_call_order_each_with_its_result() -> None:
    entries, events = of(said("", "a", "b"), result_of(1, 1), result_of(1, 0), TurnEnd(stop="end_turn"))
    second, first = entries[1], entries[2]
    assert isinstance(first.body, ToolResult)
    assert isinstance(second.body, ToolResult)
    assert events == [
        announced(1, 0, "a", first.body.announcement),
        EntryStored(entry=first),
        announced(1, 1, "b", second.body.announcement),
        EntryStored(entry=second),
        EntryStored(entry=entries[3]),
    ]


def test_calls_without_result_end_with_the_text_that_the_model_sees() -> None:
    seen = Announcement(title="Read a", kind="read")
    _, events = of(said("", "a", "b"), Started(call=CallRef(assistant=1, index=0), why="allowed", announcement=seen))
    assert events == [
        announced(1, 0, "a", seen),
        CallEnded(call=CallRef(assistant=1, index=0), text=EFFECTS_UNKNOWN),
        announced(1, 1, "b", Announcement(title="read_file")),
        CallEnded(call=CallRef(assistant=1, index=1), text=NOT_RUN),
    ]


def test_calls_without_result_are_announced_as_they_were_shown() -> None:
    shown = (Announcement(title="Read a", kind="read"), Announcement(title="Write b", kind="edit"))
    answer = replace(said("", "a", "b"), announcements=shown)
    _, events = of(answer, Started(call=CallRef(assistant=1, index=0), why="allowed"))
    assert events == [
        announced(1, 0, "a", shown[0]),
        CallEnded(call=CallRef(assistant=1, index=0), text=EFFECTS_UNKNOWN),
        announced(1, 1, "b", shown[1]),
        CallEnded(call=CallRef(assistant=1, index=1), text=NOT_RUN),
    ]


def test_compactions_remarks_and_commands_are_shown_but_reminders_are_not() -> None:
    shown: list[Body] = [
        Checkpoint(compaction_id="k", summary="S", first_kept=None),
        Mask(before=1),
        Remark(text="A server failed.", message_id="r"),
        Command(text="/help", answer="...", message_id="c"),
        Custom(namespace="ours", text="Ticket 17.", is_shown=True),
    ]
    hidden: list[Body] = [
        Prompt(system="s", tools=(), cwd="/", model="m"),
        Reminder(text="plan mode"),
        Custom(namespace="ours", text="Ticket 17.", for_model=True),
        Restore(entry=1),
        Note(about="model", value="t"),
    ]
    entries, events = of(*shown, *hidden)
    assert events == [EntryStored(entry=entry) for entry in entries[:5]]


@given(entries=histories())
@settings(max_examples=50)
def test_compactions_add_only_themselves_to_a_replay(entries: list[Entry]) -> None:
    without = [entry for entry in entries if not isinstance(entry.body, (Checkpoint, Mask, Restore))]
    events = [
        event
        for event in replayed(entries)
        if not (isinstance(event, EntryStored) and isinstance(event.entry.body, (Checkpoint, Mask)))
    ]
    assert events == replayed(without)


@given(entries=damaged())
@settings(max_examples=40)
def test_every_call_and_result_of_a_damaged_path_is_shown(entries: list[Entry]) -> None:
    events = replayed(entries)
    stored = [event.entry for event in events if isinstance(event, EntryStored)]
    answered = {entry.body.call for entry in stored if isinstance(entry.body, ToolResult)}
    announced_calls = {event.call for event in events if isinstance(event, CallAnnounced)}
    for entry in entries:
        if isinstance(entry.body, Assistant):
            calls = {CallRef(assistant=entry.id, index=index) for index in range(len(entry.body.calls))}
            assert calls <= announced_calls
        if isinstance(entry.body, ToolResult):
            assert entry.body.call in answered
