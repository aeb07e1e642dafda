"""Version 2 of the protocol: the same events in other words, each valid against the pinned schema."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.agent import PermissionQuestion
from crow.agent.feed import Feed
from crow.agent.sessions.session import Session
from crow.domain.entries import (
    Announcement,
    Assistant,
    Attachment,
    Body,
    CallKind,
    CallRef,
    Command,
    Diff,
    Entry,
    Remark,
    Started,
    ToolResult,
    User,
)
from crow.domain.events import (
    CallAnnounced,
    CallEnded,
    CallProgressed,
    CompactionChanged,
    ContextMeasured,
    EntryStored,
    Event,
    FormQuestion,
    ModeChanged,
    NoticeShown,
    SummaryShown,
    TextShown,
    ThoughtShown,
    TitleChanged,
    TurnBegan,
    TurnEnded,
    UrlQuestion,
)
from crow.domain.messages import Image, Link, Part, Resource, Text
from crow.domain.text import safe
from crow.frontend.client import SessionClient
from crow.frontend.options import config_options
from crow.frontend.questions import Dialogs
from crow.frontend.v2 import Translation
from crow.protocol import ClientConnection
from crow.protocol.params import ClientCapabilities
from crow.protocol.sizes import LINE_BYTES
from crow.protocol.tool_calls import diff_contents
from crow.protocol.v2 import call_content, capabilities_from
from crow.tools import Coverage, PlannedCall
from tests.support.acp_v2 import SchemaV2, SessionView
from tests.support.amounts import examples
from tests.support.paths import PathBuilder, damaged, histories

V1 = ClientCapabilities(notices=True, compaction=True)
V2 = capabilities_from({"info": {"name": "t", "version": "0"}})
CALL = CallRef(assistant=7, index=0)
PIXEL = "iVBORw0KGgo="


class Sent:
    """A connection that keeps what is sent, and answers every question with `answer`."""

    def __init__(self, answer: Any = None) -> None:
        self.updates: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.schema: SchemaV2 | None = None
        self._answer = answer

    async def notify(self, method: str, params: dict[str, Any]) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        assert len(json.dumps(message, ensure_ascii=False).encode()) < LINE_BYTES
        if self.schema is not None:
            self.schema.check("agent", message)
        self.updates.append(params["update"])

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        assert self.schema is not None
        self.schema.check("agent", {"jsonrpc": "2.0", "id": 0, "method": method, "params": params})
        self.requests.append(params)
        return self._answer


class OpenCalls:
    """The part of a session that its client needs: which calls can be cancelled."""

    def __init__(self, *call_ids: str) -> None:
        self.id = "s"
        self.runner = SimpleNamespace(running_calls=dict.fromkeys(call_ids, anyio.CancelScope()))


OPTIONS: dict[str, Any] = {
    "cwd": "/proj",
    "options": lambda: config_options(mode="ask", model="m", models=["m"], config={}, booleans=True),
    "commands": lambda: [
        {"name": "help", "description": "Helps"},
        {"name": "undo", "description": "", "input": {"hint": "n"}},
    ],
}


def client_for(sent: Sent, caps: ClientCapabilities, *cancellable: str) -> SessionClient:
    sent.schema = SchemaV2()
    translation = Translation(sent, cast(Session, OpenCalls(*cancellable)))
    client = SessionClient("s", translation, caps, feed=Feed("s"), dialogs=Dialogs(answer_s=60.0), **OPTIONS)
    client.open()
    return client


async def replayed(caps: ClientCapabilities, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    async def history() -> AsyncIterator[Sequence[Entry]]:
        yield entries

    sent = Sent()
    if caps is V2:
        client: SessionClient = client_for(sent, V2)
    else:
        connection, dialogs = cast(ClientConnection, sent), Dialogs(answer_s=60.0)
        client = SessionClient("s", connection, caps, feed=Feed("s"), dialogs=dialogs, **OPTIONS)
    await client.load(history(), is_running=lambda: False)
    return sent.updates


async def shown(*events: Event, cancellable: Sequence[str] = ()) -> list[dict[str, Any]]:
    sent = Sent()
    client = client_for(sent, V2, *cancellable)
    for event in events:
        await client.show(event)
    return sent.updates


numbers = count(9)


def stored(body: Any) -> EntryStored:
    return EntryStored(entry=Entry(id=next(numbers), conversation=1, session="s", parent=None, turn=1, body=body))


def announced(name: str, announcement: Announcement, **arguments: Any) -> CallAnnounced:
    return CallAnnounced(call=CALL, name=name, arguments=json.dumps(arguments), announcement=announcement)


def patched(old: str, patch: str) -> str:
    """Applies the hunks of a patch to a text, and checks their numbers and context."""
    lines = old.split("\n")
    before = [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    after: list[str] = []
    at = 0
    for hunk in re.split(r"^(?=@@ -)", patch, flags=re.MULTILINE)[1:]:
        numbers, *body = hunk.removesuffix("\n").split("\n")
        match = re.fullmatch(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@", numbers)
        assert match is not None
        old_line, old_count, new_line, new_count = map(int, match.groups())
        start = old_line - 1 if old_count else old_line
        after += before[at:start]
        at = start
        assert len(after) == (new_line - 1 if new_count else new_line)
        made: list[str] = []
        for mark, following in zip(body, [*body[1:], ""], strict=True):
            if mark.startswith("\\"):
                continue
            line = mark[1:] + ("" if following.startswith("\\") else "\n")
            if mark[0] in " -":
                assert before[at] == line
                at += 1
            if mark[0] in " +":
                made.append(line)
        assert (at - start, len(made)) == (old_count, new_count)
        after += made
    return "".join(after + before[at:])


FILE_LINES = st.lists(st.sampled_from(["a", "b", "c d", "", "+x", "@@ -1 +1 @@", "\\", "e\r"]), max_size=14)
FILES = st.builds(lambda lines, end: "\n".join(lines) + end, FILE_LINES, st.sampled_from(["", "\n"]))


@given(old=st.none() | FILES, new=FILES)
def test_the_patch_of_a_change_makes_the_change(old: str | None, new: str) -> None:
    (content,) = call_content(diff_contents([Diff(path="/proj/a b.py", old_text=old, new_text=new)]))
    operation = "add" if old is None else "modify"
    assert content["changes"] == [{"operation": operation, "path": "/proj/a b.py", "fileType": "text"}]
    before, after = safe(old or ""), safe(new)
    if before == after:
        assert "patch" not in content
    else:
        assert content["patch"]["text"].startswith("diff --git /proj/a b.py /proj/a b.py\n")
        assert patched(before, content["patch"]["text"]) == after


def test_a_patch_names_a_new_file_and_quotes_what_git_quotes() -> None:
    (content,) = call_content(diff_contents([Diff(path='/proj/a"b.py', old_text=None, new_text="one\ntwo")]))
    assert content["patch"] == {
        "format": "git_patch",
        "text": (
            'diff --git "/proj/a\\"b.py" "/proj/a\\"b.py"\nnew file mode 100644\n--- /dev/null\n+++ "/proj/a\\"b.py"\n'
            "@@ -0,0 +1,2 @@\n+one\n+two\n\\ No newline at end of file\n"
        ),
    }


def test_the_regions_of_a_large_file_are_one_diff_with_their_line_numbers() -> None:
    lines = [f"{number} {'x' * 90}\n" for number in range(9_000)]
    changed = [*lines[:100], "new\n", *lines[101:8_000], *lines[8_001:]]
    diff = Diff(path="/proj/large.txt", old_text="".join(lines), new_text="".join(changed))
    said, note = call_content(diff_contents([diff]))
    assert said["type"] == "diff"
    assert "2 of 2 changed regions" in note["content"]["text"]
    assert patched("".join(lines), said["patch"]["text"]) == "".join(changed)


def test_a_region_that_was_cut_has_no_patch() -> None:
    diff = Diff(path="/proj/one-line.txt", old_text="a" * 900_000, new_text="b" * 900_000)
    said, _note = call_content(diff_contents([diff]))
    assert said == {
        "type": "diff",
        "changes": [{"operation": "modify", "path": "/proj/one-line.txt", "fileType": "text"}],
    }


WORDS = st.sampled_from(["", "a", "look\nat this", "変更", "\u202ehidden", "x" * 900])
PARTS: st.SearchStrategy[Part] = st.sampled_from(
    [
        Text(text="please"),
        Image(data=PIXEL, mime_type="image/png"),
        Resource(uri="file:///proj/a.py", text="a = 1\n", mime_type="text/x-python"),
        Link(uri="file:///proj/b.py", name="b.py"),
    ]
)
DIFFS = st.lists(
    st.builds(Diff, path=st.sampled_from(["/proj/a.py", "/proj/b.py"]), old_text=st.none() | FILES, new_text=FILES),
    max_size=2,
    unique_by=lambda diff: diff.path,
)

KINDS: tuple[CallKind, ...] = ("read", "execute", "edit", "search", "other")


@st.composite
def sessions(draw: st.DrawFn) -> list[Entry]:
    """Histories, sound or damaged, with every kind of content that a user may see."""
    entries = []
    for entry in draw(st.one_of(histories(20), damaged())):
        body = entry.body
        message_id = draw(st.sampled_from([f"m{entry.id}", "m"]))
        match body:
            case User():
                body = replace(body, parts=(*body.parts, draw(PARTS)), message_id=message_id)
            case Assistant():
                body = replace(body, thought=draw(WORDS), message_id=message_id)
            case ToolResult():
                shown_as = draw(st.sampled_from([Announcement(title="t", kind=kind) for kind in KINDS]))
                body = replace(
                    body,
                    announcement=replace(shown_as, diffs=tuple(draw(DIFFS))),
                    is_error=draw(st.booleans()),
                    images=tuple(draw(st.lists(st.just(Image(data=PIXEL, mime_type="image/png")), max_size=1))),
                    attachments=tuple(
                        draw(st.lists(st.just(Attachment(name="log", uri="https://example.com/log")), max_size=1))
                    ),
                    raw_output=draw(st.sampled_from([{}, {"exit_code": 1, "output": "out"}, {"rows": [1, None]}])),
                )
            case _ if draw(st.integers(0, 9)) == 0:
                remark: Body = Remark(text="Noted.", message_id=message_id)
                command: Body = Command(text="/help", answer="Help.", message_id=message_id)
                body = draw(st.sampled_from([remark, command]))
        entries.append(replace(entry, body=body))
    return entries


def history_v1(updates: Sequence[dict[str, Any]]) -> list[Any]:
    """What a client of version 1 shows after these updates, in the words of version 2."""
    view = SessionView()
    for update in updates:
        match update["sessionUpdate"]:
            case "tool_call":
                fields = {key: update[key] for key in update if key not in ("sessionUpdate", "_meta")}
                view.apply({"sessionUpdate": "tool_call_update", **fields})
            case "plan":
                view.apply({"sessionUpdate": "plan_update", "plan": {"entries": update["entries"]}})
            case _:
                view.apply(update)
    return [(key, comparable(item)) for key, item in view.items.items()]


def history_v2(updates: Sequence[dict[str, Any]]) -> list[Any]:
    """What a client of version 2 shows after these updates."""
    return [(key, comparable(item)) for key, item in SessionView(updates).items.items()]


def comparable(item: Any) -> Any:
    """An item of a history without what only one version says: how a file changed, and that a call did not fail."""
    if not isinstance(item, dict):
        return item
    content = [
        ("diff", block["changes"][0]["path"] if "changes" in block else block["path"])
        if block["type"] == "diff"
        else block
        for block in item.get("content", [])
    ]
    return item | {"content": content, "status": item["status"].replace("cancelled", "failed")}


@settings(max_examples=examples(20))
@given(entries=sessions())
def test_load_and_resume_give_the_same_history(entries: list[Entry]) -> None:
    async def both() -> None:
        loaded, resumed = await replayed(V1, entries), await replayed(V2, entries)
        assert history_v2(resumed) == history_v1(loaded)
        # Applied to a client that knows the session already, the replay changes nothing.
        assert history_v2([*resumed, *resumed])[: len(history_v2(resumed))] == history_v2(resumed)

    anyio.run(both)


async def test_each_change_of_a_diff_has_the_same_texts_in_both_versions() -> None:
    diffs = (
        Diff(path="/proj/a", old_text="1\n2\n", new_text="1\n3\n"),
        Diff(path="/proj/b", old_text=None, new_text="x"),
    )
    announcement = Announcement(title="Edit", kind="edit", diffs=diffs)
    path = PathBuilder(ToolResult(call=CALL, name="edit_file", text="ok", announcement=announcement))
    (first,), (second,) = await replayed(V1, path.entries), await replayed(V2, path.entries)
    assert [(block["path"], block["newText"]) for block in first["content"]] == [
        (block["changes"][0]["path"], patched(old["oldText"], block["patch"]["text"]))
        for old, block in zip(first["content"], second["content"], strict=True)
    ]


async def test_a_command_has_a_terminal_of_its_own() -> None:
    shell = Announcement(title="make test", kind="execute")
    result = ToolResult(
        call=CALL, name="shell", text="ok\n", announcement=shell, raw_output={"exit_code": -9, "output": "ünfinished\n"}
    )
    updates = await shown(
        announced("shell", shell, command="make test"),
        stored(Started(call=CALL, why="mode auto")),
        CallProgressed(call=CALL, text="ünf"),
        stored(result),
        cancellable=["call_7_0"],
    )
    opened, call, started, chunk, rest, ended, final = updates
    terminal = {"sessionUpdate": "terminal_update", "terminalId": "call_7_0"}
    assert opened == terminal | {"command": "make test", "cwd": "/proj"}
    assert call["content"] == [{"type": "terminal", "terminalId": "call_7_0"}]
    assert call["status"] == "pending"
    assert started == {
        "sessionUpdate": "tool_call_update",
        "toolCallId": "call_7_0",
        "status": "in_progress",
        "capabilities": {"cancel": {}},
    }
    assert SessionView([chunk, rest]).terminals == {"call_7_0": "ünfinished\n".encode()}
    assert ended == terminal | {"exitStatus": {"signal": "SIGKILL"}}
    assert (final["status"], final["capabilities"]) == ("completed", None)


async def test_messages_notices_and_the_context_are_valid() -> None:
    updates = await shown(
        stored(User(parts=(Text(text="hi"), Image(data=PIXEL, mime_type="image/png")), message_id="u")),
        ThoughtShown(message_id="m", offset=0, text="hm"),
        TextShown(message_id="m", offset=0, text="hel"),
        TextShown(message_id="m", offset=3, text="lo"),
        NoticeShown(severity="warning", title="Slow server", description="still starting"),
        ContextMeasured(used=10, size=100, cost=0.5),
        CompactionChanged(compaction_id="c", status="in_progress"),
        SummaryShown(compaction_id="c", text="## Goal"),
        CompactionChanged(compaction_id="c", status="completed", detail="## Goal"),
        TitleChanged(title="Greeting"),
        ModeChanged(mode="plan"),
        stored(Remark(text="Noted.", message_id="r")),
    )
    assert [update["sessionUpdate"] for update in updates] == [
        "user_message",
        "user_message_chunk",
        "agent_thought_chunk",
        "agent_message_chunk",
        "agent_message_chunk",
        "notice",
        "usage_update",
        "compaction_update",
        "compaction_summary_chunk",
        "compaction_update",
        "session_info_update",
        "config_option_update",  # there are no modes in this version
        "agent_message_chunk",
    ]
    assert updates[-2]["configOptions"][0]["configId"] == "mode"


async def test_a_call_that_was_not_run_is_cancelled() -> None:
    events = (announced("fetch", Announcement(title="Fetch", kind="fetch")), CallEnded(call=CALL, text="Cancelled."))
    assert [update["status"] for update in await shown(*events)] == ["pending", "cancelled"]


def question(call: CallRef, name: str = "shell") -> PermissionQuestion:
    plan = PlannedCall(
        announcement=Announcement(title="make test", kind="execute"),
        access="execute",
        coverage=Coverage(argument="make test"),
    )
    return PermissionQuestion(call=call, name=name, arguments='{"command": "make test"}', plan=plan, always="")


async def test_a_question_describes_itself_and_does_not_change_the_call() -> None:
    sent = Sent({"outcome": {"outcome": "selected", "optionId": "allow_once"}})
    client = client_for(sent, V2)
    await client.show(announced("shell", Announcement(title="make test", kind="execute"), command="make test"))
    assert await client.ask(question(CALL)) == "allow_once"
    (asked,) = sent.requests
    assert asked["title"] == "Allow: make test"
    assert "```sh\nmake test\n```" in asked["description"]
    assert asked["subject"]["toolCall"]["content"] == [{"type": "terminal", "terminalId": "call_7_0"}]


async def test_a_question_of_a_running_call_does_not_say_that_the_call_is_pending() -> None:
    sent = Sent({"outcome": {"outcome": "selected", "optionId": "reject_once"}})
    client = client_for(sent, V2)
    for event in started(CALL, "srv__ask"):
        await client.show(event)
    await client.ask(question(CALL))
    (asked,) = sent.requests
    assert asked["subject"] == {"type": "tool_call", "toolCall": {"toolCallId": "call_7_0"}}
    assert "```sh\nmake test\n```" in asked["description"]


@pytest.mark.parametrize(
    "answer", [None, {}, {"outcome": {"outcome": "_later"}}, {"outcome": {"outcome": "selected", "optionId": "yes"}}]
)
async def test_an_answer_that_crow_does_not_know_is_no_permission(answer: Any) -> None:
    client = client_for(Sent(answer), V2)
    await client.show(announced("shell", Announcement(title="make test", kind="execute")))
    assert await client.ask(question(CALL)) == "reject_once"


class Waiting(Sent):
    """A connection whose user answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[anyio.Event] = []

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        await super().request(method, params)
        self.answers.append(answered := anyio.Event())
        await answered.wait()
        return {"outcome": {"outcome": "selected", "optionId": "allow_once"}, "action": "decline"}

    async def asked(self, count: int) -> None:
        while len(self.answers) < count:
            await anyio.lowlevel.checkpoint()

    def states(self) -> list[str]:
        return [update["state"] for update in self.updates if update["sessionUpdate"] == "state_update"]


def started(call: CallRef, name: str) -> tuple[Event, Event]:
    announcement = Announcement(title=name, kind="other")
    return (
        CallAnnounced(call=call, name=name, arguments="{}", announcement=announcement),
        stored(Started(call=call, why="mode auto")),
    )


async def test_a_question_requires_action_only_while_nothing_else_goes_on() -> None:
    sent = Waiting()
    client = client_for(sent, replace(V2, question_kinds=frozenset({"form"})), "call_1_1", "call_1_2")
    other, asking, task = (CallRef(assistant=1, index=index) for index in range(3))
    async with anyio.create_task_group() as tasks:
        await client.show(TurnBegan(message_id="p"))
        for event in (*started(other, "fetch"), announced("shell", Announcement(title="make test", kind="execute"))):
            await client.show(event)
        tasks.start_soon(client.ask, question(CALL))
        await sent.asked(1)
        assert sent.states() == ["running"]  # the fetch goes on
        await client.show(
            stored(ToolResult(call=other, name="fetch", text="ok", announcement=Announcement(title="fetch")))
        )
        assert sent.states() == ["running", "requires_action"]
        sent.answers[0].set()
        await wait_all_tasks_blocked()
        assert sent.states() == ["running", "requires_action", "running"]
        for event in (*started(asking, "ask"), *started(task, "task")):
            await client.show(event)
        tasks.start_soon(client.elicit, FormQuestion(message="Which?", schema={"properties": {}}, call=asking))
        await sent.asked(2)
        assert sent.states()[-1] == "running"  # the subagent goes on
        of_subagent, announcement = CallRef(assistant=2, index=0), Announcement(title="make", kind="execute")
        await client.show(CallAnnounced(call=of_subagent, name="shell", arguments="{}", announcement=announcement))
        tasks.start_soon(client.ask, question(of_subagent))
        await sent.asked(3)
        assert sent.states()[-1] == "requires_action"
        sent.answers[1].set()
        sent.answers[2].set()
    await client.show(TurnEnded(message_id="p"))
    assert sent.states()[-2:] == ["running", "idle"]


async def test_a_question_outside_of_a_turn_leaves_the_session_idle() -> None:
    sent = Sent({"action": "decline"})
    client = client_for(sent, replace(V2, question_kinds=frozenset({"form", "url"})))
    await client.elicit(FormQuestion(message="Which?", schema={"properties": {"a": {"type": "string"}}}))
    await client.elicit(UrlQuestion(message="Where?", url="http://localhost/consent", id="q"))
    assert [params["mode"] for params in sent.requests] == ["form", "url"]
    assert sent.updates == []
