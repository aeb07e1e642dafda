"""Permission requests and elicitations, and the meaning of their answers."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import pytest

from acp_check.schema import SchemaChecker, validate
from crow.agent import PermissionQuestion
from crow.agent.feed import Feed
from crow.domain.entries import Announcement, CallRef, Diff
from crow.domain.events import (
    CallAnnounced,
    CallProgressed,
    ElicitationAnswer,
    FormQuestion,
    UrlQuestion,
)
from crow.frontend.calls import ShownCalls, ViewLimits
from crow.frontend.client import SessionClient
from crow.frontend.questions import (
    Dialogs,
    elicitation_answer,
    elicitation_params,
    permission_answer,
    permission_params,
)
from crow.protocol.params import ClientCapabilities
from crow.protocol.sizes import LINE_BYTES, json_bytes
from crow.protocol.tool_calls import diff_view
from crow.tools import CommandAccess, Coverage, PlannedCall

SCHEMA = {"properties": {"branch": {"type": "string", "title": "Branch"}}, "required": ["branch"]}


@pytest.mark.parametrize(
    ("question", "params"),
    [
        (
            FormQuestion(message="Which?", schema=SCHEMA, call=CallRef(assistant=4, index=1)),
            {"toolCallId": "call_4_1", "mode": "form", "requestedSchema": {"type": "object", **SCHEMA}},
        ),
        (
            UrlQuestion(message="Which?", url="http://localhost/consent", id="q1"),
            {"mode": "url", "url": "http://localhost/consent", "elicitationId": "q1"},
        ),
    ],
)
def test_an_elicitation_is_a_valid_request(question: Any, params: dict[str, Any]) -> None:
    sent = elicitation_params("s", question)
    assert sent == {"sessionId": "s", "message": "Which?"} | params
    SchemaChecker().check("agent", {"jsonrpc": "2.0", "id": 0, "method": "elicitation/create", "params": sent})


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        (
            {"action": "accept", "content": {"a": "x", "b": 1, "c": 0.5, "d": True, "e": ["x"], "f": {}, "g": [1]}},
            ElicitationAnswer(action="accept", content={"a": "x", "b": 1, "c": 0.5, "d": True, "e": ["x"]}),
        ),
        ({"action": "accept"}, ElicitationAnswer(action="accept")),
        ({"action": "decline"}, ElicitationAnswer(action="decline")),
        ({"action": "cancel"}, ElicitationAnswer(action="cancel")),
        ({"action": "_later"}, ElicitationAnswer(action="cancel")),
        (None, ElicitationAnswer(action="cancel")),
    ],
)
def test_an_unclear_answer_dismisses_the_question(result: Any, answer: ElicitationAnswer) -> None:
    assert elicitation_answer(result) == answer


def test_a_permission_request_repeats_the_call_and_offers_one_option_of_each_kind() -> None:
    announcement = Announcement(
        title="Edit a.py", kind="edit", diffs=(Diff(path="/w/a.py", old_text="a", new_text="b"),)
    )
    question = PermissionQuestion(
        call=CallRef(assistant=3, index=1),
        name="edit_file",
        arguments='{"path": "a.py"}',
        plan=PlannedCall(announcement=announcement, access="write"),
        always="edit_file in this directory and session",
        never="edit_file in this session",
        reason="The deny rule `x\u202e` may forbid this call.",
    )
    params = permission_params("s", question)
    validate("RequestPermissionRequest", params)
    assert params["toolCall"] == {
        "toolCallId": "call_3_1",
        "status": "pending",
        "title": "Edit a.py",
        "kind": "edit",
        "name": "edit_file",
        "locations": [],
        "rawInput": {"path": "a.py"},
        "content": [
            {"type": "diff", "path": "/w/a.py", "oldText": "a", "newText": "b"},
            {
                "type": "content",
                "content": {"type": "text", "text": r"The deny rule `x\u202e` may forbid this call."},
            },
        ],
        "_meta": {"tool_name": "edit_file"},
    }
    kinds = ["allow_once", "allow_always", "reject_once", "reject_always"]
    assert [(option["kind"], option["optionId"]) for option in params["options"]] == [(kind, kind) for kind in kinds]
    assert [option["name"] for option in params["options"]] == [
        "Allow",
        "Always allow edit_file in this directory and session",
        "Reject",
        "Always reject edit_file in this session",
    ]


COMMAND = Announcement(title="make", kind="execute")


def asked(plan: PlannedCall, *, name: str = "shell", arguments: str = "{}", **more: Any) -> tuple[str, list[str]]:
    """The text of a question, and the kinds of answers that it offers."""
    call = CallRef(assistant=3, index=0)
    question = PermissionQuestion(call=call, name=name, arguments=arguments, plan=plan, always="`make` in this session")
    params = permission_params("s", question, **more)
    validate("RequestPermissionRequest", params)
    parts = params["toolCall"].get("content", ())
    return "".join(part["content"]["text"] for part in parts if part["type"] == "content"), [
        option["kind"] for option in params["options"]
    ]


def command(line: str, access: CommandAccess = "full", requested: CommandAccess = "full") -> PlannedCall:
    return PlannedCall(
        announcement=COMMAND,
        access="execute",
        command_access=access,
        requested_access=requested,
        coverage=Coverage(argument=line),
    )


EVERY = ["allow_once", "allow_always", "reject_once", "reject_always"]
ONCE = ["allow_once", "reject_once"]


def test_a_question_about_a_command_shows_all_of_it_and_the_access_that_it_gets() -> None:
    text, offered = asked(command("echo '```'\n\n  rm -rf b\u202e\x1b[2K # \U000e0041"))
    fence, first, blank, second, close, *_, words = text.split("\n")
    assert (fence, first, blank, close) == ("````sh", "echo '```'", "", "````")
    assert second == r"  rm -rf b\u202e\x1b[2K # \U000e0041"
    assert words == "It is not confined: it can do everything that you can."
    assert offered == EVERY


@pytest.mark.parametrize(
    ("access", "requested", "has_network", "words"),
    [
        ("read", "read", True, "It is confined: it changes no files, and has no network."),
        ("write", "write", False, "It is confined: it may change files in the workspace, and has no network."),
        ("write", "write", True, "It is confined: it may change files in the workspace, and use the network."),
        ("full", "full", True, "It is not confined: it can do everything that you can."),
        (
            "full",
            "read",
            False,
            "It is not confined, because commands cannot be confined here: it can do everything that you can.",
        ),
    ],
)
def test_a_question_says_in_words_what_a_command_may_do(
    access: CommandAccess, requested: CommandAccess, has_network: bool, words: str
) -> None:
    text, _ = asked(command("make", access, requested), has_network=has_network)
    assert text == f"```sh\nmake\n```\n\n{words}"


@pytest.mark.parametrize(
    ("has_network", "label"),
    [
        (False, "Always allow commands that can only change files here"),
        (True, "Always allow commands that can only change files here or use the network"),
    ],
)
def test_a_question_about_a_confined_command_offers_to_allow_all_of_them(has_network: bool, label: str) -> None:
    def params(line: str) -> Any:
        call, plan = CallRef(assistant=3, index=0), command(line, "write", "write")
        question = PermissionQuestion(
            call=call, name="shell", arguments="{}", plan=plan, always="`make`", offers_writes=True
        )
        return permission_params("s", question, has_network=has_network)

    offered = params("make")
    validate("RequestPermissionRequest", offered)
    assert [(option["optionId"], option["kind"]) for option in offered["options"]] == [
        ("allow_once", "allow_once"),
        ("allow_always", "allow_always"),
        ("allow_writes", "allow_always"),
        ("reject_once", "reject_once"),
        ("reject_always", "reject_always"),
    ]
    assert [option["name"] for option in offered["options"]][:3] == ["Allow", "Always allow `make`", label]
    assert [option["optionId"] for option in params("x" * 300_000)["options"]] == ONCE


def test_a_command_that_is_too_long_to_show_is_counted_and_only_allowed_once() -> None:
    line = "echo " + "a" * 300_000 + "; rm -rf ~"
    text, offered = asked(command(line))
    hidden = len(line) - 16_000
    assert f"{hidden:,} characters are not shown.\n\nIt is not confined" in text
    assert text.startswith("```sh\necho aaa")
    assert "; rm -rf ~\n```" in text
    assert offered == ONCE
    assert asked(command("x" * 16_000))[1] == EVERY


def test_a_command_of_hidden_characters_fits_on_a_line() -> None:
    line = "\U000e0041" * 300_000
    arguments = json.dumps({"command": line})
    question = PermissionQuestion(
        call=CallRef(assistant=3, index=0), name="shell", arguments=arguments, plan=command(line), always="x" * 3_000
    )
    assert json_bytes(permission_params("s", question)) < LINE_BYTES


def test_a_question_about_a_tool_of_a_server_shows_its_name_and_all_arguments() -> None:
    plan = PlannedCall(announcement=Announcement(title="srv: Read the `README`"), access="external")
    text, offered = asked(plan, name="srv__delete", arguments='{"path": "/", "why": "a\\nb\u2066"}')
    assert text == ('It calls srv__delete with:\n\n```json\n{\n  "path": "/",\n  "why": "a\\nb\\u2066"\n}\n```')
    assert offered == EVERY
    nested = asked(plan, name="srv__delete", arguments='{"a":' * 5_000 + "1" + "}" * 5_000)
    assert "characters are not shown" in nested[0]
    assert nested[1] == ONCE


def test_a_question_with_a_long_title_shows_the_whole_of_it() -> None:
    url = "https://example.com/" + "a" * 500
    text, offered = asked(
        PlannedCall(announcement=Announcement(title=f"Fetch {url}"), access="fetch", coverage=Coverage(argument=url))
    )
    assert text == f"```\nFetch {url}\n```"
    assert offered == EVERY


def test_a_write_that_is_too_large_to_show_is_counted_and_only_allowed_once() -> None:
    new_text = "head\n" + "middle\n" * 300_000 + "tail\u202e\n"
    diff = Diff(path="/w/a.sh", old_text="old\n", new_text=new_text)
    plan = PlannedCall(announcement=Announcement(title="Write a.sh", kind="edit", diffs=(diff,)), access="write")
    call = CallRef(assistant=3, index=0)
    question = PermissionQuestion(call=call, name="write_file", arguments="{}", plan=plan, always="write_file")
    params = permission_params("s", question)
    shown, note = params["toolCall"]["content"]
    head, marker, tail = re.split(r"\n\[…(.*)…\]\n", shown["newText"])
    assert (head[:5], tail[-11:]) == ("head\n", "tail\\u202e\n")
    hidden = len(new_text) - len(head) - (len(tail) - 5)
    assert marker == f" {hidden:,} characters are not shown here "
    assert note["content"]["text"].endswith(f"{hidden:,} characters of the change are not shown.")
    assert [option["kind"] for option in params["options"]] == ONCE


def test_the_end_of_a_change_with_many_regions_is_shown_too() -> None:
    lines = [f"{number} {'x' * 90}\n" for number in range(100_000)]
    changed = [line.upper() if number % 20 == 0 else line for number, line in enumerate(lines)]
    contents, hidden = diff_view([Diff(path="/w/a", old_text="".join(lines), new_text="".join(changed))])
    *shown, note = contents
    assert shown[0]["newText"].startswith(lines[0].upper())
    assert lines[99_980].upper() in shown[-1]["newText"]
    assert hidden > 500_000
    assert f"{hidden:,} characters of the change are not shown." in note["content"]["text"]


def test_hidden_characters_of_a_file_are_visible_in_its_diff() -> None:
    diff = Diff(path="/w/a.py", old_text="a\r\n", new_text="if admin:\u202e\r\n\treturn\u2066\n")
    ((shown,), hidden) = diff_view([diff])
    assert (shown["oldText"], shown["newText"], hidden) == (
        "a\r\n",
        "if admin:\\u202e\r\n\treturn\\u2066\n",
        0,
    )


@pytest.mark.parametrize(
    ("chosen", "meaning"),
    [("allow_always", "allow_once"), ("allow_writes", "allow_once"), ("reject_always", "reject_once")],
)
def test_an_always_answer_that_was_not_offered_counts_once(chosen: str, meaning: str) -> None:
    answer = {"outcome": {"outcome": "selected", "optionId": chosen}}
    assert permission_answer(answer, ["allow_once", "reject_once"]) == meaning


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        ({"outcome": {"outcome": "selected", "optionId": "allow_always"}}, "allow_always"),
        ({"outcome": {"outcome": "selected", "optionId": "allow_writes"}}, "allow_writes"),
        ({"outcome": {"outcome": "selected", "optionId": "reject_always"}}, "reject_always"),
        ({"outcome": {"outcome": "cancelled"}}, "cancelled"),
        ({"outcome": {"outcome": "selected", "optionId": "cancelled"}}, "reject_once"),
        ({"outcome": {"outcome": "selected", "optionId": ["allow_once"]}}, "reject_once"),
        ({"outcome": "selected"}, "reject_once"),
        ({}, "reject_once"),
        (None, "reject_once"),
    ],
)
def test_an_unclear_answer_rejects_the_call(answer: Any, meaning: str) -> None:
    assert permission_answer(answer) == meaning


class Wire:
    """A connection that accepts every question and records what is sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        if method == "session/request_permission":
            self.sent.append(f"{method} {params['sessionId']}")
            return {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
        self.sent.append(method)
        return {"action": "accept"}

    async def notify(self, method: str, params: dict[str, Any]) -> None:
        if method == "session/update":
            self.sent.append(f"{params['update']['sessionUpdate']} {params['sessionId']}")
        else:
            self.sent.append(f"{method} {params['elicitationId']}")


def client_of(wire: Any, caps: ClientCapabilities) -> SessionClient:
    dialogs = Dialogs(answer_s=60)
    return SessionClient("s", wire, caps, cwd="/", feed=Feed("s"), options=list, commands=list, dialogs=dialogs)


async def test_only_a_page_that_was_shown_is_reported_as_finished_and_only_once() -> None:
    wire: Any = Wire()
    caps = ClientCapabilities(question_kinds=frozenset({"url"}))
    client = client_of(wire, caps)
    await client.finish_question("e1")
    await client.elicit(UrlQuestion(message="Sign in.", url="https://example.com/", id="e1"))
    for question_id in ("e2", "e1", "e1"):
        await client.finish_question(question_id)
    assert wire.sent == ["elicitation/create", "elicitation/complete e1"]


async def test_a_question_in_a_call_of_a_subagent_is_asked_in_its_session() -> None:
    wire: Any = Wire()
    caps = ClientCapabilities(subagents=True)
    client = client_of(wire, caps)
    own, of_subagent, hidden = (CallRef(assistant=n, index=0) for n in (1, 2, 3))
    announcement = Announcement(title="docs__ask", kind="other")
    for place, ref in ((client, own), (client.subagents.open("task-1", Feed("task-1")), of_subagent)):
        await place.show(CallAnnounced(call=ref, name="docs__ask", arguments="{}", announcement=announcement))
    plan = PlannedCall(
        announcement=announcement, access="external", coverage=Coverage(rule_tool="sampling", argument="docs")
    )
    answers = [
        await client.ask(PermissionQuestion(call=ref, name="docs__ask", arguments="{}", plan=plan, always=""))
        for ref in (own, of_subagent, hidden)
    ]
    for ref in (of_subagent, hidden):
        await client.show(CallProgressed(call=ref, text="The model answers docs."))
    assert answers == ["allow_once", "allow_once", "cannot_ask"]
    assert wire.sent == [
        "tool_call s",
        "tool_call task-1",
        "session/request_permission s",
        "session/request_permission task-1",
        "tool_call_update task-1",
    ]


async def test_a_question_that_was_cancelled_while_it_waited_is_not_asked() -> None:
    dialogs, sent = Dialogs(answer_s=60), list[str]()
    shown = ShownCalls(ClientCapabilities(), "s", "/w", ViewLimits(), None, is_reading=False)
    waits, second = anyio.Event(), anyio.CancelScope()

    async def request(_method: str, params: dict[str, Any]) -> dict[str, Any]:
        sent.append(params["toolCall"]["toolCallId"])
        await waits.wait()
        return {"outcome": {"outcome": "cancelled"}}

    async def ask(index: int) -> None:
        call = CallRef(assistant=3, index=index)
        question = PermissionQuestion(call=call, name="shell", arguments="{}", plan=command("make"), always="")
        await dialogs.ask("s", question, shown, request)

    async def ask_first() -> None:
        await ask(0)
        second.cancel()  # the second question is next by now, but its task has not gone on yet

    async def ask_second() -> None:
        with second:
            await ask(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_first)
        tasks.start_soon(ask_second)
        await anyio.wait_all_tasks_blocked()
        waits.set()
    assert sent == ["call_3_0"]
