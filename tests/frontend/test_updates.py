"""Events as updates; each must be valid against the pinned schema."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_check.schema import check_update
from crow.domain.entries import (
    Announcement,
    Assistant,
    Attachment,
    Body,
    CallRef,
    Checkpoint,
    Command,
    Diff,
    Entry,
    Location,
    Mask,
    Note,
    PlanItem,
    Prompt,
    Remark,
    Reminder,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.events import (
    CallAnnounced,
    CallEnded,
    CallProgressed,
    CommandsChanged,
    CompactionChanged,
    ContextMeasured,
    EntryStored,
    Event,
    ModeChanged,
    NoticeShown,
    OptionsChanged,
    SummaryShown,
    TextShown,
    ThoughtShown,
    TitleChanged,
    TurnBegan,
)
from crow.domain.messages import Image, Link, Resource, Text
from crow.frontend.calls import ViewLimits
from crow.frontend.view import View
from crow.protocol.params import ClientCapabilities
from crow.protocol.sizes import LINE_BYTES
from crow.protocol.tool_calls import result_contents, text_content
from crow.protocol.updates import plan_updates
from tests.support.amounts import examples
from tests.support.views import reading

PLAIN = ClientCapabilities()
GATED = ClientCapabilities(notices=True, compaction=True, terminal_output=True)
CALL = CallRef(assistant=7, index=0)
READ = Announcement(title="Read src/a.py", kind="read", locations=(Location(path="/w/src/a.py", line=3),))
EDIT = Announcement(
    title="Edit src/a.py",
    kind="edit",
    locations=(Location(path="/w/src/a.py"),),
    diffs=(Diff(path="/w/src/a.py", old_text="one\n", new_text="two\n"),),
)
SHELL = Announcement(title="make test", kind="execute")


numbers = count(9)


def stored(body: Body, number: int | None = None) -> EntryStored:
    number = next(numbers) if number is None else number
    return EntryStored(entry=Entry(id=number, conversation=1, session="s", parent=None, turn=1, body=body))


def announced(announcement: Announcement, name: str, **arguments: Any) -> CallAnnounced:
    return CallAnnounced(call=CALL, name=name, arguments=json.dumps(arguments), announcement=announcement)


def result(announcement: Announcement, text: str, **fields: Any) -> EntryStored:
    return stored(ToolResult(call=CALL, name="tool", text=text, announcement=announcement, **fields))


def updates_for(view: View, *events: Event) -> list[dict[str, Any]]:
    updates = [shown.update for event in events for shown in view.apply(event)]
    for update in updates:
        check_update(update)
        assert len(json.dumps(update, ensure_ascii=False).encode(errors="replace")) < LINE_BYTES
    return updates


def live(caps: ClientCapabilities = PLAIN) -> View:
    return View(caps, session_id="s", cwd="/w", new_id=lambda: "new")


def words(*contents: str) -> list[dict[str, Any]]:
    return [{"type": "content", "content": {"type": "text", "text": text}} for text in contents]


def agent(message_id: str, text: str) -> dict[str, Any]:
    return {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}, "messageId": message_id}


def test_text_and_thought_of_one_answer_are_two_messages() -> None:
    assert updates_for(
        live(), ThoughtShown(message_id="m", offset=0, text="hm"), TextShown(message_id="m", offset=0, text="yes")
    ) == [
        {"sessionUpdate": "agent_thought_chunk", "content": {"type": "text", "text": "hm"}, "messageId": "m_thought"},
        agent("m", "yes"),
    ]


def test_a_read_is_announced_started_and_completed_with_a_status_each_time() -> None:
    events = (
        announced(READ, "read_file", path="src/a.py", line=3),
        stored(Started(call=CALL, why="mode ask: reads are free", announcement=READ)),
        result(READ, "text of the file"),
    )
    assert updates_for(live(), *events) == [
        {
            "sessionUpdate": "tool_call",
            "toolCallId": "call_7_0",
            "status": "pending",
            "title": "Read src/a.py",
            "kind": "read",
            "name": "read_file",
            "locations": [{"path": "/w/src/a.py", "line": 3}],
            "rawInput": {"path": "src/a.py", "line": 3},
            "_meta": {"tool_name": "read_file"},
        },
        {"sessionUpdate": "tool_call_update", "toolCallId": "call_7_0", "status": "in_progress"},
        {
            "sessionUpdate": "tool_call_update",
            "toolCallId": "call_7_0",
            "status": "completed",
            "content": words("    text of the file"),
        },
    ]


def test_an_edit_shows_the_planned_diff_then_the_diff_that_was_made() -> None:
    made = Announcement(
        title="Edit src/a.py",
        kind="edit",
        locations=(Location(path="/w/src/a.py", line=1),),
        diffs=(Diff(path="/w/src/a.py", old_text="one\n", new_text="TWO\n"),),
    )
    pending, done = updates_for(live(), announced(EDIT, "edit_file", path="src/a.py"), result(made, "Edited."))
    assert pending["content"] == [{"type": "diff", "path": "/w/src/a.py", "oldText": "one\n", "newText": "two\n"}]
    assert done == {
        "sessionUpdate": "tool_call_update",
        "toolCallId": "call_7_0",
        "status": "completed",
        "locations": [{"path": "/w/src/a.py", "line": 1}],
        "content": [{"type": "diff", "path": "/w/src/a.py", "oldText": "one\n", "newText": "TWO\n"}],
    }


def test_unchanged_content_is_not_sent_again() -> None:
    edited = updates_for(live(), announced(EDIT, "edit_file", path="src/a.py"), result(EDIT, "Edited."))
    printed = updates_for(
        live(), announced(SHELL, "shell"), CallProgressed(call=CALL, text="a\n"), result(SHELL, "a\n")
    )
    assert [("content" in update, update["status"]) for update in (*edited, *printed)] == [
        (True, "pending"),
        (False, "completed"),
        (False, "pending"),
        (True, "in_progress"),
        (False, "completed"),
    ]


def test_a_new_file_has_an_empty_old_text_and_a_failed_edit_shows_why() -> None:
    create = Announcement(title="Write b", kind="edit", diffs=(Diff(path="/w/b", old_text=None, new_text="x"),))
    pending, failed = updates_for(live(), announced(create, "write_file"), result(create, "no space", is_error=True))
    assert pending["content"] == [{"type": "diff", "path": "/w/b", "oldText": "", "newText": "x"}]
    assert (failed["status"], failed["content"]) == ("failed", words("no space"))


def test_output_without_a_terminal_is_a_code_block_and_raw_output() -> None:
    output = {"exit_code": 2, "output": "a ``` b\n"}
    events = (
        announced(SHELL, "shell", command="make test"),
        CallProgressed(call=CALL, text="a"),
        result(SHELL, "a ``` b\n\nexit code 2", raw_output=output),
    )
    pending, progress, done = updates_for(live(), *events)
    assert (pending["rawInput"], pending.get("content")) == ({"command": "make test"}, None)
    assert progress["content"] == words("```console\na\n```")
    assert done["content"] == words("````console\na ``` b\n````")
    assert done["rawOutput"] == output
    assert (pending["status"], progress["status"], done["status"]) == ("pending", "in_progress", "completed")


def test_output_in_a_terminal_is_streamed_and_shown_nowhere_else() -> None:
    events = (
        announced(SHELL, "shell", command="make test"),
        CallProgressed(call=CALL, text="one\n"),
        CallProgressed(call=CALL, text="one\n"),
        CallProgressed(call=CALL, text="one\ntwo\n"),
        result(SHELL, "unused", raw_output={"exit_code": 1, "output": "one\ntwo\nthree\n"}, is_error=True),
    )
    assert updates_for(live(GATED), *events) == [
        {
            "sessionUpdate": "tool_call",
            "toolCallId": "call_7_0",
            "status": "pending",
            "title": "make test",
            "kind": "execute",
            "name": "shell",
            "locations": [],
            "rawInput": {"command": "make test"},
            "content": [{"type": "terminal", "terminalId": "call_7_0"}],
            "_meta": {"tool_name": "shell", "terminal_info": {"terminal_id": "call_7_0", "cwd": "/w"}},
        },
        *(
            {
                "sessionUpdate": "tool_call_update",
                "toolCallId": "call_7_0",
                "status": "in_progress",
                "_meta": {"terminal_output": {"terminal_id": "call_7_0", "data": data}},
            }
            for data in ("one\n", "two\n")
        ),
        {
            "sessionUpdate": "tool_call_update",
            "toolCallId": "call_7_0",
            "status": "failed",
            "rawOutput": {"exit_code": 1},
            "_meta": {
                "terminal_output": {"terminal_id": "call_7_0", "data": "three\n"},
                "terminal_exit": {"terminal_id": "call_7_0", "exit_code": 1, "signal": None},
            },
        },
    ]


def test_a_terminal_gets_the_beginning_live_and_the_rest_when_the_command_ends() -> None:
    text = "".join(f"line {number}\n" for number in range(200_000))
    builder = live(GATED)
    updates_for(builder, announced(SHELL, "shell", command="yes"))
    first = updates_for(builder, CallProgressed(call=CALL, text=text[:60_000]))
    assert updates_for(builder, CallProgressed(call=CALL, text=text[:900_000])) == []
    (last,) = updates_for(builder, result(SHELL, "", raw_output={"exit_code": -9, "output": text}))
    assert first[0]["_meta"]["terminal_output"]["data"] == text[:50_000]
    rest = last["_meta"]["terminal_output"]["data"]
    assert rest.startswith(text[50_000:60_000])
    assert rest.endswith(text[-10_000:])
    assert "characters are not shown here" in rest
    assert last["_meta"]["terminal_exit"] == {"terminal_id": "call_7_0", "exit_code": None, "signal": "signal 9"}


def test_a_call_that_ends_without_a_result_fails_once_with_a_reason() -> None:
    builder = live()
    updates_for(builder, announced(READ, "read_file"))
    assert updates_for(builder, CallEnded(call=CALL, text="Cancelled.")) == [
        {
            "sessionUpdate": "tool_call_update",
            "toolCallId": "call_7_0",
            "status": "failed",
            "content": words("Cancelled."),
        }
    ]
    assert updates_for(builder, CallEnded(call=CALL, text="Cancelled.")) == []
    assert updates_for(builder, CallProgressed(call=CALL, text="late")) == []


def test_a_cancelled_call_ends_its_terminal() -> None:
    _, ended = updates_for(live(GATED), announced(SHELL, "shell"), CallEnded(call=CALL, text="Cancelled."))
    assert ended["content"] == [{"type": "terminal", "terminalId": "call_7_0"}, *words("Cancelled.")]
    assert ended["_meta"] == {"terminal_exit": {"terminal_id": "call_7_0", "exit_code": None, "signal": None}}


def test_an_unknown_call_is_announced_by_its_first_event() -> None:
    (update,) = updates_for(live(), result(READ, "text"))
    assert (update["sessionUpdate"], update["status"], update["title"]) == ("tool_call", "completed", "Read src/a.py")
    started, done = updates_for(live(), stored(Started(call=CALL, why="", announcement=READ)), result(READ, "text"))
    assert (started["sessionUpdate"], done["sessionUpdate"]) == ("tool_call", "tool_call_update")


def test_the_complete_plan_follows_its_result() -> None:
    items = (PlanItem(content="a", status="completed", priority="high"), PlanItem(content="b"))
    think = Announcement(title="Plan", kind="think")
    _, done, plan = updates_for(live(), announced(think, "update_plan"), result(think, "2 steps", plan=items))
    assert done["status"] == "completed"
    assert plan == {
        "sessionUpdate": "plan",
        "entries": [
            {"content": "a", "priority": "high", "status": "completed"},
            {"content": "b", "priority": "medium", "status": "pending"},
        ],
    }


@pytest.mark.parametrize(
    ("event", "update"),
    [
        (
            ContextMeasured(used=10, size=100, cost=0.5),
            {"sessionUpdate": "usage_update", "used": 10, "size": 100, "cost": {"amount": 0.5, "currency": "USD"}},
        ),
        (ContextMeasured(used=10, size=100), {"sessionUpdate": "usage_update", "used": 10, "size": 100}),
        (TitleChanged(title="T"), {"sessionUpdate": "session_info_update", "title": "T"}),
        (TitleChanged(title=None), {"sessionUpdate": "session_info_update", "title": None}),
        (ModeChanged(mode="plan"), {"sessionUpdate": "current_mode_update", "currentModeId": "plan"}),
        (stored(Remark(text="r", message_id="m")), agent("m", "r\n\n")),
        (
            stored(
                Checkpoint(compaction_id="c", summary="s", first_kept=None, tokens_before=120_400, tokens_after=900)
            ),
            agent("c", "(Context compacted: 120k → 900 tokens.)\n\n"),
        ),
        (
            stored(Mask(before=4, tokens_before=90_000, tokens_after=60_000), 9),
            agent("mask_9", "(Older tool outputs elided: 90k → 60k tokens.)\n\n"),
        ),
        (
            NoticeShown(severity="warning", title="Slow.", description="Retrying."),
            agent("new", "(Slow. Retrying.)\n\n"),
        ),
        (CompactionChanged(compaction_id="c", status="failed", detail="No room."), agent("new", "(No room.)\n\n")),
    ],
)
def test_updates_that_every_client_gets(event: Event, update: dict[str, Any]) -> None:
    assert updates_for(live(), event, event)[:1] == [update]
    if isinstance(event, EntryStored):
        assert updates_for(live(), event, event) == [update]


@pytest.mark.parametrize(
    "event",
    [
        stored(TurnEnd(stop="error", detail="d")),
        stored(Reminder(text="r")),
        stored(Note(about="mode", value="ask")),
        stored(Prompt(system="s", tools=(), cwd="/w", model="m")),
        NoticeShown(severity="info", title="t"),
        SummaryShown(compaction_id="c", text="so far"),
        CompactionChanged(compaction_id="c", status="completed", detail="s"),
        CompactionChanged(compaction_id="c", status="failed", detail="No room.", is_command=True),
        OptionsChanged(),
        CommandsChanged(),
        TextShown(message_id="m", offset=0, text=""),
    ],
)
def test_events_that_a_live_client_does_not_see(event: Event) -> None:
    assert updates_for(live(), event) == []


def test_a_stored_item_is_shown_whole_unless_a_part_of_it_was_shown() -> None:
    view = live()
    asked = stored(User(parts=(Text(text="hi"),), message_id="u"))
    said = stored(Assistant(text="Hello you.", thought="hm", message_id="m"))
    typed = stored(Command(text="/usage", answer="12 tokens", message_id="c"))
    hi = {"sessionUpdate": "user_message_chunk", "content": {"type": "text", "text": "hi"}, "messageId": "u"}
    assert updates_for(view, asked, asked) == [hi]
    assert updates_for(view, TextShown(message_id="m", offset=0, text="Hello")) == [agent("m", "Hello")]
    thought, rest = updates_for(view, said, TextShown(message_id="m", offset=5, text=" you."))
    assert (thought["content"]["text"], rest) == ("hm", agent("m", " you."))
    begun = TurnBegan(message_id="c", typed="/usage")
    assert [update.get("messageId") for update in updates_for(view, begun, begun)] == ["c_typed", None, None]
    assert updates_for(view, typed, typed) == [agent("c", "12 tokens")]
    assert view.apply(stored(User(parts=(Text(text="mine"),), message_id="v")), is_own=True) == []


def test_a_client_without_compactions_is_told_once_that_a_summary_is_written_and_how_that_ended() -> None:
    going = CompactionChanged(compaction_id="c", status="in_progress")
    checkpoint = stored(
        Checkpoint(compaction_id="c", summary="s", first_kept=None, tokens_before=120_400, tokens_after=900)
    )
    done = replace(going, status="completed", detail="s")
    begun = agent("new", "(Writing a summary of the conversation so far.)\n\n")
    ended = agent("c", "(Context compacted: 120k → 900 tokens.)\n\n")
    assert updates_for(live(), going, checkpoint, done) == [begun, ended]
    asked = stored(Checkpoint(compaction_id="c", summary="s", first_kept=None, reason="command"))
    assert updates_for(live(), replace(going, is_command=True), asked, done) == [begun]
    stopped = agent("new", "(The summary was cancelled.)\n\n")
    assert updates_for(live(), going, replace(going, status="cancelled")) == [begun, stopped]
    notice = {"sessionUpdate": "notice", "severity": "info", "title": "Writing a summary of the conversation so far."}
    assert updates_for(live(ClientCapabilities(notices=True)), going, checkpoint, done) == [notice, ended]


def test_text_that_a_dead_process_never_stored_is_named_once() -> None:
    lost = agent(
        "lost_6",
        "(The end of the text above was lost, because the process that wrote it ended. The model does not see it.)\n\n",
    )
    for entry in (Assistant(text="One", message_id="m", finish="interrupted"), TurnEnd(stop="cancelled")):
        view = live()
        shown = updates_for(view, TextShown(message_id="m", offset=0, text="One two"), stored(entry, 6))
        assert shown == [agent("m", "One two"), lost]
        assert updates_for(view, stored(entry, 6), stored(TurnEnd(stop="cancelled"))) == []


def test_clients_get_the_kinds_of_updates_that_they_asked_for() -> None:
    checkpoint = Checkpoint(compaction_id="c", summary="s", first_kept=None)
    events = (
        NoticeShown(severity="error", title="t", description="d"),
        NoticeShown(severity="info", title="t"),
        CompactionChanged(compaction_id="c", status="in_progress"),
        stored(checkpoint),
        CompactionChanged(compaction_id="c", status="completed", detail="s"),
        SummaryShown(compaction_id="c", text="so far"),
        SummaryShown(compaction_id="c", text=""),
        CompactionChanged(compaction_id="d", status="failed", detail="why"),
        CompactionChanged(compaction_id="e", status="cancelled"),
        stored(Mask(before=4), 2**40),
    )
    compaction = {"sessionUpdate": "compaction_update"}
    assert updates_for(live(GATED), *events) == [
        {"sessionUpdate": "notice", "severity": "error", "title": "t", "description": "d"},
        {"sessionUpdate": "notice", "severity": "info", "title": "t"},
        compaction | {"compactionId": "c", "status": "in_progress"},
        compaction | {"compactionId": "c", "status": "completed", "summary": [{"type": "text", "text": "s"}]},
        {
            "sessionUpdate": "compaction_summary_chunk",
            "compactionId": "c",
            "content": {"type": "text", "text": "so far"},
        },
        compaction | {"compactionId": "c", "status": "in_progress", "summary": []},
        compaction | {"compactionId": "d", "status": "failed", "error": "why"},
        compaction | {"compactionId": "e", "status": "cancelled"},
        compaction | {"compactionId": f"mask_{2**40}", "status": "completed"},
    ]


def test_code_is_sent_as_a_markdown_code_block() -> None:
    numbered = "   999\t# __init__\n  1000\t\n  1001\t```"
    found = Announcement(title="Search `x`", kind="search")

    def contents(announcement: Announcement, text: str, *, is_error: bool = False) -> object:
        return result_contents(
            ToolResult(call=CALL, name="tool", text=text, announcement=announcement, is_error=is_error)
        )

    assert contents(READ, numbered) == words("       999\t# __init__\n      1000\t\n      1001\t```")
    assert contents(found, "a/__init__.py:1: ```") == words("````\na/__init__.py:1: ```\n````")
    for announcement in (READ, found):
        assert contents(announcement, "does not exist", is_error=True) == words("does not exist")


def test_replay_sends_one_update_per_call_with_its_final_status() -> None:
    events = (
        announced(SHELL, "shell", command="make test"),
        result(SHELL, "out\n", raw_output={"exit_code": 0, "output": "out\n"}),
        CallAnnounced(call=CallRef(assistant=8, index=1), name="grep", arguments="{}", announcement=READ),
        CallEnded(call=CallRef(assistant=8, index=1), text="Not run."),
    )
    done, ended = updates_for(reading(GATED), *events)
    assert done == {
        "sessionUpdate": "tool_call",
        "toolCallId": "call_7_0",
        "status": "completed",
        "title": "make test",
        "kind": "execute",
        "name": "tool",
        "locations": [],
        "rawInput": {"command": "make test"},
        "rawOutput": {"exit_code": 0, "output": "out\n"},
        "content": words("```console\nout\n```"),
        "_meta": {"tool_name": "tool"},
    }
    assert (ended["toolCallId"], ended["status"], ended["content"]) == ("call_8_1", "failed", words("Not run."))


@pytest.mark.parametrize(
    ("arguments", "kind", "title"),
    [
        ('{"command": "make\\n  test"}', "execute", "make … (+1 line)"),
        ('{"path": "src/__init__.py", "content": "x"}', "other", "tool `src/__init__.py`"),
        ('{"pattern": "nest", "path": "src"}', "other", "tool src"),
        ('{"url": 7, "depth": 2}', "other", "tool"),
        ("[broken", "other", "tool"),
    ],
)
def test_replay_titles_a_call_without_announcement_by_its_arguments(arguments: str, kind: str, title: str) -> None:
    bare = CallAnnounced(call=CALL, name="tool", arguments=arguments, announcement=Announcement(title="tool"))
    (ended,) = updates_for(reading(GATED), bare, CallEnded(call=CALL, text="Not run."))
    assert (ended["kind"], ended["title"], ended["status"]) == (kind, title, "failed")


def test_replay_separates_prompts_without_an_answer() -> None:
    def ask(number: int) -> EntryStored:
        return stored(User(parts=(Text(text="go on"),), message_id=f"u{number}"), number)

    spoken = stored(Assistant(text="Going.", message_id="a"), 4)
    updates = updates_for(
        reading(PLAIN),
        *(ask(1), stored(TurnEnd(stop="cancelled"), 2)),
        *(ask(3), spoken, stored(TurnEnd(stop="cancelled"), 5)),
        *(ask(6), stored(TurnEnd(stop="end_turn"), 7)),
    )
    assert [(update["messageId"], update["content"]["text"]) for update in updates] == [
        ("u1", "go on"),
        ("turn_end_2", "(Cancelled.)\n\n"),
        ("u3", "go on"),
        ("a", "Going."),
        ("u6", "go on"),
        ("turn_end_7", "(No answer.)\n\n"),
    ]


def test_replay_sends_the_prompt_in_its_own_blocks() -> None:
    parts = (
        Text(text="look"),
        Image(data="aGk=", mime_type="image/png"),
        Resource(uri="file:///w/a", text="t", mime_type="text/plain"),
        Link(uri="/w/b.py", name="b.py"),
    )
    chunks = updates_for(reading(PLAIN), stored(User(parts=parts, message_id="u")))
    assert {chunk["messageId"] for chunk in chunks} == {"u"}
    assert {chunk["sessionUpdate"] for chunk in chunks} == {"user_message_chunk"}
    assert [chunk["content"] for chunk in chunks] == [
        {"type": "text", "text": "look"},
        {"type": "image", "data": "aGk=", "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "file:///w/a", "text": "t", "mimeType": "text/plain"}},
        {"type": "resource_link", "uri": "/w/b.py", "name": "b.py"},
    ]


def test_replay_shows_commands_checkpoints_and_failed_turns() -> None:
    checkpoint = stored(Checkpoint(compaction_id="c", summary="s", first_kept=None))
    events = (
        stored(Command(text="/usage", answer="12 tokens", message_id="m")),
        stored(Checkpoint(compaction_id="c", summary="s", first_kept=None)),
        stored(TurnEnd(stop="interrupted"), 2**40),
        stored(TurnEnd(stop="error", detail="No such model."), 2**40 + 1),
        stored(TurnEnd(stop="end_turn"), 2**40 + 2),
    )
    typed = {
        "sessionUpdate": "user_message_chunk",
        "content": {"type": "text", "text": "/usage"},
        "messageId": "m_typed",
    }
    compacted = agent("c", "(Context compacted: 0 → 0 tokens.)\n\n")
    ends = [
        agent(f"turn_end_{2**40}", "(The turn was interrupted.)\n\n"),
        agent(f"turn_end_{2**40 + 1}", "(No such model.)\n\n"),
    ]
    assert updates_for(reading(PLAIN), *events) == [typed, agent("m", "12 tokens"), compacted, *ends]
    summary = [{"type": "text", "text": "s"}]
    shown = {"sessionUpdate": "compaction_update", "compactionId": "c", "status": "completed", "summary": summary}
    assert updates_for(reading(GATED), checkpoint) == [shown]


def test_attachments_of_a_result_are_shown_by_their_type() -> None:
    attachments = (
        Attachment(name="b", uri="file:///b.txt", mime_type="text/plain"),
        Attachment(name="sound", mime_type="audio/wav", data="AAAA"),
        Attachment(name="picture", mime_type="image/bmp", data="AAAA"),
        Attachment(name="c", uri="file:///c.zip", mime_type="application/zip", data="AAAA"),
        Attachment(name="d", uri="file:///d.zip", data="A" * 1_000_000),
        Attachment(name="e", mime_type="video/mp4", data="AAAA"),
    )
    brought = ToolResult(call=CALL, name="t", text="", announcement=Announcement(title="t"), attachments=attachments)
    contents = [
        {"type": "resource_link", "uri": "file:///b.txt", "name": "b", "mimeType": "text/plain"},
        {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
        {"type": "image", "data": "AAAA", "mimeType": "image/bmp"},
        {"type": "resource", "resource": {"uri": "file:///c.zip", "blob": "AAAA", "mimeType": "application/zip"}},
        {"type": "resource_link", "uri": "file:///d.zip", "name": "d"},
        {"type": "text", "text": "(e, video/mp4, 3 bytes: not shown)"},
    ]
    assert result_contents(brought) == [{"type": "content", "content": content} for content in contents]


def test_a_question_shows_its_text_beside_the_terminal_until_the_command_runs() -> None:
    terminal = {"type": "terminal", "terminalId": CALL.call_id}
    question = [text_content("Run it?")]
    updates = live(GATED)
    updates_for(updates, announced(SHELL, "shell", command="make test"))
    assert updates.calls.question_content(CALL, question) == [*question, terminal]
    (started,) = updates_for(updates, stored(Started(call=CALL, why="asked")))
    assert started["content"] == [terminal]
    plain = live(PLAIN)
    updates_for(plain, announced(SHELL, "shell", command="make test"))
    assert plain.calls.question_content(CALL, question) == question
    (started,) = updates_for(plain, stored(Started(call=CALL, why="asked")))
    assert "content" not in started
    (finished,) = updates_for(plain, result(SHELL, ""))
    assert finished["content"] == [], "the question is over"


@pytest.mark.long
def test_huge_values_stay_below_the_limit_of_a_line() -> None:
    wild = "\x01\U0001f600" * 300_000
    write = Announcement(
        title=wild,
        kind="edit",
        locations=tuple(Location(path="/" + "p" * 4000) for _ in range(500)),
        diffs=tuple(Diff(path=f"/w/{name}", old_text=wild, new_text=wild + name) for name in "abc"),
    )
    picture = Image(data="A" * 2_000_000, mime_type="image/png")
    ref = CallRef(assistant=8, index=0)
    long = ToolResult(
        call=ref,
        name="t",
        text=wild,
        announcement=SHELL,
        images=(picture,),
        attachments=tuple(
            Attachment(name=wild, uri=uri, mime_type=wild, data=picture.data) for uri in ("u", wild, None)
        )
        * 100,
        raw_output={"output": wild, "x": [wild]},
    )
    for builder in (live(), live(GATED), reading(GATED)):
        updates = updates_for(
            builder,
            announced(write, "write_file", path="/w/a", content=wild),
            result(write, wild),
            CallAnnounced(call=ref, name="shell", arguments=json.dumps({"command": wild}), announcement=SHELL),
            CallProgressed(call=ref, text=wild),
            stored(long),
            TextShown(message_id="m", offset=0, text=wild),
            ThoughtShown(message_id="m", offset=0, text=wild),
            stored(User(parts=(Text(text=wild), Resource(uri="u", text=wild), picture), message_id="u")),
        )
        text = [update for update in updates if update["sessionUpdate"] == "agent_message_chunk"]
        assert "".join(chunk["content"]["text"] for chunk in text) == wild


def test_a_large_file_shows_its_changed_regions_and_says_so() -> None:
    lines = [f"line {number} of a file that is long\n" for number in range(40_000)]
    changed = [*lines[:10], "new\n", *lines[11:30_000], *lines[30_001:]]
    announcement = Announcement(
        title="Edit big",
        kind="edit",
        diffs=(Diff(path="/w/big", old_text="".join(lines), new_text="".join(changed)),),
    )
    (update,) = updates_for(live(), announced(announcement, "edit_file"))
    first, second, note = update["content"]
    assert first == {
        "type": "diff",
        "path": "/w/big",
        "oldText": "".join(lines[7:14]),
        "newText": "".join(changed[7:14]),
    }
    assert (second["oldText"], second["newText"]) == (
        "".join(lines[29_997:30_004]),
        "".join(lines[29_997:30_000] + lines[30_001:30_004]),
    )
    assert "shown: 2 of 2 changed regions, from lines 8, 29998" in note["content"]["text"]


texts = st.text(max_size=30)
calls = st.builds(CallRef, assistant=st.integers(1, 3), index=st.integers(0, 2))
announcements = st.builds(
    Announcement,
    title=texts,
    kind=st.sampled_from(["read", "edit", "execute", "other"]),
    locations=st.lists(st.builds(Location, path=texts, line=st.none() | st.integers(0, 9)), max_size=2).map(tuple),
    diffs=st.lists(st.builds(Diff, path=texts, old_text=st.none() | texts, new_text=texts), max_size=2).map(tuple),
)
raw_outputs = st.dictionaries(st.sampled_from(["output", "exit_code", "x"]), texts | st.integers(), max_size=3)
results = st.builds(
    ToolResult,
    call=calls,
    name=texts,
    text=texts,
    is_error=st.booleans(),
    announcement=announcements,
    raw_output=raw_outputs,
)
events = st.one_of(
    st.builds(CallAnnounced, call=calls, name=texts, arguments=texts, announcement=announcements),
    st.builds(CallProgressed, call=calls, text=texts),
    st.builds(CallEnded, call=calls, text=texts),
    st.builds(TextShown, message_id=texts, text=texts),
    st.builds(NoticeShown, severity=st.sampled_from(["info", "warning", "error"]), title=texts, description=texts),
    results.map(stored),
    st.builds(Started, call=calls, why=texts, announcement=announcements).map(stored),
    st.builds(Checkpoint, compaction_id=texts, summary=texts, first_kept=st.none()).map(stored),
    st.builds(Command, text=texts, answer=texts, message_id=texts).map(stored),
)


@settings(max_examples=examples(20))
@given(st.lists(events, max_size=12), st.builds(ClientCapabilities, terminal_output=st.booleans()))
def test_any_sequence_of_events_gives_valid_updates(sequence: list[Event], caps: ClientCapabilities) -> None:
    updates_for(live(caps), *sequence)
    updates_for(reading(caps), *sequence)


@pytest.mark.parametrize("contents", [["x" * 2_000_000], ["é" * 200] * 20_000])
def test_a_plan_of_any_size_fits_on_a_line(contents: list[str]) -> None:
    (update,) = plan_updates([PlanItem(content=content, status="pending", priority="high") for content in contents])
    check_update(update)
    assert len(json.dumps(update, ensure_ascii=False).encode()) < LINE_BYTES


def test_all_histories_of_a_replay_share_its_limits() -> None:
    limits, alone = ViewLimits(), ViewLimits()
    assert limits.result_bytes(100) is None
    first, second = limits.result_bytes(5_000), limits.result_bytes(5_000)
    assert first is not None
    assert second is not None
    assert second < first
    assert second == alone.result_bytes(10_100)
    assert (limits.calls, limits.answer_bytes) == (alone.calls, alone.answer_bytes)
