"""The checkers find violations of schema and order."""

from __future__ import annotations

from typing import Any

import pytest

from acp_check.schema import SchemaChecker, Violation, check_update
from tests.support.house_rules import HouseRules
from tests.support.order import OrderChecker

TEXT = {"type": "text", "text": "hi"}
CALL = {"sessionUpdate": "tool_call", "toolCallId": "c", "title": "t", "status": "pending"}


def update(**fields: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": "s", "update": fields}}


def asked(number: int, method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def answered(number: int, **result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def checked(*messages: tuple[str, dict[str, Any]]) -> None:
    judge, order = SchemaChecker(), OrderChecker()
    for sender, message in messages:
        judge.check(sender, message)  # type: ignore[arg-type]
        order.check(sender, message)  # type: ignore[arg-type]


OPEN = (("client", asked(1, "session/new", cwd="/w", mcpServers=[])), ("agent", answered(1, sessionId="s")))
PROMPT = ("client", asked(2, "session/prompt", sessionId="s", prompt=[TEXT]))
END = ("agent", answered(2, stopReason="end_turn"))


def test_a_plain_turn_is_valid() -> None:
    checked(
        *OPEN,
        ("agent", update(sessionUpdate="available_commands_update", availableCommands=[])),
        PROMPT,
        ("agent", update(sessionUpdate="agent_message_chunk", content=TEXT, messageId="m")),
        ("agent", update(**CALL)),
        ("agent", update(sessionUpdate="tool_call_update", toolCallId="c", status="completed")),
        END,
        ("agent", update(sessionUpdate="usage_update", used=1, size=2)),
        ("client", {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": "s"}}),
    )


def test_a_call_may_leave_out_its_status_and_a_failed_load_leaves_the_session_known() -> None:
    load = asked(7, "session/load", sessionId="s", cwd="/w", mcpServers=[])
    checked(
        *OPEN,
        ("client", load),
        ("agent", {"jsonrpc": "2.0", "id": 7, "error": {"code": -32000, "message": "no"}}),
        PROMPT,
        ("agent", update(sessionUpdate="tool_call", toolCallId="c", title="t")),
        ("agent", update(sessionUpdate="tool_call_update", toolCallId="c", status="completed")),
        ("agent", update(sessionUpdate="tool_call_update", toolCallId="c", title="late, but no new state")),
        END,
    )


def test_prompts_may_overlap_with_a_failed_load_and_loads_with_each_other() -> None:
    def load(number: int) -> tuple[str, dict[str, Any]]:
        return "client", asked(number, "session/load", sessionId="s", cwd="/w", mcpServers=[])

    replayed = (
        ("agent", update(sessionUpdate="user_message_chunk", content=TEXT, messageId="u")),
        ("agent", update(**CALL | {"status": "completed"})),
    )
    checked(
        *OPEN,
        load(7),
        PROMPT,
        ("agent", {"jsonrpc": "2.0", "id": 7, "error": {"code": -32800, "message": "no"}}),
        ("agent", update(sessionUpdate="agent_message_chunk", content=TEXT, messageId="m")),
        END,
        load(8),
        load(9),
        *replayed,
        ("agent", answered(8)),
        *replayed,
        ("agent", answered(9)),
    )
    with pytest.raises(Violation, match="no turn is running"):
        checked(*OPEN, load(8), load(9), ("agent", answered(8)), ("agent", answered(9)), *replayed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sessionUpdate": "agentMessageChunk", "content": TEXT},
        {"sessionUpdate": "agent_message_chunk", "content": TEXT, "message_id": "m"},
        {"sessionUpdate": "agent_message_chunk", "content": TEXT | {"extra": 1}},
        {"sessionUpdate": "agent_message_chunk", "content": "hi"},
        {"sessionUpdate": "tool_call", "toolCallId": "c"},
        CALL | {"kind": "run"},
        CALL | {"status": "cancelled"},
        CALL | {"content": [{"type": "diff", "path": "/a", "newText": "", "oldTxt": ""}]},
        CALL | {"locations": [{"path": "/a", "row": 1}]},
        {"sessionUpdate": "current_mode_update", "modeId": "ask"},
        {"sessionUpdate": "usage_update", "used": -1, "size": 1},
        {"sessionUpdate": "plan", "entries": [{"content": "a", "status": "pending"}]},
        None,
    ],
)
def test_an_invalid_update_is_found(wrong: Any) -> None:
    with pytest.raises(Violation):
        check_update(wrong)


@pytest.mark.parametrize(
    "messages",
    [
        [("agent", {"id": 1, "result": {}})],
        [("agent", answered(1))],
        [*OPEN, ("agent", answered(1, sessionId="s"))],
        [OPEN[0], ("agent", answered(1, session="s"))],
        [OPEN[0], ("agent", answered(1, sessionId="s", extra=1))],
        [OPEN[0], ("agent", {"jsonrpc": "2.0", "id": 1, "result": {"sessionId": "s"}, "error": None})],
        [OPEN[0], ("agent", {"jsonrpc": "2.0", "id": 1, "error": {"code": "x", "message": "m"}})],
        [("agent", update(sessionUpdate="usage_update", used=1, size=2))],
        [*OPEN, ("agent", update(sessionUpdate="agent_message_chunk", content=TEXT))],
        [*OPEN, PROMPT, ("agent", update(sessionUpdate="user_message_chunk", content=TEXT))],
        [*OPEN, PROMPT, ("agent", update(**CALL)), END],
        [*OPEN, PROMPT, ("agent", update(**CALL)), ("agent", update(**CALL))],
        [*OPEN, PROMPT, ("agent", update(sessionUpdate="tool_call_update", toolCallId="c", status="completed"))],
        [*OPEN, PROMPT, END, ("agent", update(sessionUpdate="agent_message_chunk", content=TEXT))],
        [("agent", asked(0, "session/prompt", sessionId="s", prompt=[TEXT]))],
        [("client", asked(1, "session/set_model", sessionId="s", modelId="m"))],
        [*OPEN, PROMPT, ("agent", {"jsonrpc": "2.0", "id": 2, "result": {"stopReason": "done"}})],
    ],
)
def test_an_invalid_or_misplaced_message_is_found(messages: list[tuple[str, dict[str, Any]]]) -> None:
    checked(*messages[:-1])
    with pytest.raises(Violation):
        checked(*messages)


CHUNK = update(sessionUpdate="agent_message_chunk", content=TEXT, messageId="m")
ENDED = update(sessionUpdate="tool_call_update", toolCallId="c", status="completed")
ASKED = asked(0, "session/request_permission", sessionId="s", toolCall={"toolCallId": "c"}, options=[])
BUSY: list[tuple[str, dict[str, Any]]] = [
    *OPEN,
    ("agent", update(sessionUpdate="usage_update", used=1, size=2)),
    PROMPT,
    ("agent", CHUNK),
    ("agent", update(**CALL)),
    ("agent", ASKED),
    ("client", answered(0, outcome={"outcome": "cancelled"})),
    ("agent", ENDED),
    END,
    ("client", asked(3, "session/load", sessionId="s", cwd="/w", mcpServers=[])),
    ("agent", update(sessionUpdate="user_message_chunk", content=TEXT, messageId="u")),
    ("agent", update(**CALL)),
    ("agent", ENDED),
    ("agent", answered(3)),
]


def without(*places: int) -> list[tuple[str, dict[str, Any]]]:
    return [message for place, message in enumerate(BUSY) if place not in places]


def moved(place: int, to: int) -> list[tuple[str, dict[str, Any]]]:
    rest = without(place)
    return [*rest[:to], BUSY[place], *rest[to:]]


def test_a_busy_recording_is_valid() -> None:
    checked(*BUSY)


@pytest.mark.parametrize(
    "doctored",
    [
        moved(2, 1),  # an update before the answer that creates the session
        moved(9, 4),  # the turn's answer before its updates
        moved(6, 5),  # a permission asked about before the call is announced
        moved(6, 8),  # ... and after it is over
        without(5),  # a call that was never announced
        without(8),  # a call that never ends
        without(13),  # ... in a replay
        moved(13, 12),  # an update before its announcement, in a replay
        moved(14, 11),  # the load's answer before its replay
        [*BUSY[:6], BUSY[5], *BUSY[6:]],  # a call announced twice
        [*BUSY[:10], BUSY[9], *BUSY[10:]],  # a request answered twice
        [*BUSY[:4], ("agent", BUSY[11][1]), *BUSY[4:]],  # the user's words, sent back
        [*BUSY[:9], ("agent", update(sessionUpdate="tool_call_update", toolCallId="c", status="in_progress")), BUSY[9]],
        [*BUSY[:1], ("agent", answered(1, sessionId="s", modes={})), *BUSY[2:]],
    ],
)
def test_each_rule_finds_its_fault_in_a_modified_recording(doctored: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(Violation):
        checked(*doctored)


def test_a_message_must_not_continue_after_a_later_tool_call() -> None:
    house = HouseRules()
    house.check("agent", CHUNK)
    house.check("agent", update(**CALL))
    with pytest.raises(Violation):
        house.check("agent", CHUNK)
    house.check("client", asked(3, "session/load", sessionId="s"))
    house.check("agent", CHUNK)


def of_child(**fields: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": "child", "update": fields}}


ANNOUNCED = (
    "agent",
    update(sessionUpdate="subagent_update", sessionId="child", title="t", capabilities={"cancel": {}}),
)
ORDER = ("agent", of_child(sessionUpdate="session_message", messageId="o", senderSessionId="s", content=[TEXT]))
CHILD_CALL = ("agent", of_child(**CALL))
CHILD_CALL_ENDS = (
    "agent",
    of_child(sessionUpdate="tool_call_update", toolCallId="c", status="completed"),
)
LINKED_CALL = ("agent", update(**CALL | {"content": [{"type": "session", "sessionId": "child"}]}))
ENDED_CALL = ("agent", update(sessionUpdate="tool_call_update", toolCallId="c", status="completed"))
IDLE = (
    "agent",
    update(sessionUpdate="subagent_update", sessionId="child", state={"state": "idle", "stopReason": "end_turn"}),
)


def with_subagents(*messages: tuple[str, dict[str, Any]], offered: object = None) -> None:
    capabilities = {"subagents": {}} if offered is None else offered
    initialize = asked(0, "initialize", protocolVersion=1, clientCapabilities=capabilities)
    checked(("client", initialize), ("agent", answered(0, protocolVersion=1)), *OPEN, PROMPT, *messages)


def test_the_messages_of_a_subagent_are_valid_also_after_the_turn() -> None:
    with_subagents(ANNOUNCED, ORDER, LINKED_CALL, ENDED_CALL, END, CHILD_CALL, CHILD_CALL_ENDS, IDLE)


@pytest.mark.parametrize(
    ("messages", "offered", "words"),
    [
        ((ANNOUNCED,), {}, "did not say that it supports subagents"),
        ((ANNOUNCED,), {"subagents": None}, "did not say that it supports subagents"),
        ((LINKED_CALL,), {}, "does not know this session yet"),
        ((ORDER, ANNOUNCED), None, "does not know this session yet"),
        ((LINKED_CALL,), None, "does not know this session yet"),
        ((ANNOUNCED, CHILD_CALL, IDLE), None, "these tool calls have not ended"),
        ((ANNOUNCED, CHILD_CALL, CHILD_CALL), None, "announced twice"),
        (
            (ANNOUNCED, ("agent", of_child(sessionUpdate="user_message_chunk", content=TEXT, messageId="m"))),
            None,
            "no session is being loaded",
        ),
        ((("agent", update(sessionUpdate="subagent_update", title="t")),), None, "sessionId"),
        ((("agent", update(sessionUpdate="subagent_update", sessionId="child", name="t")),), None, "name"),
        (
            (ANNOUNCED, ("agent", update(**CALL | {"content": [{"type": "session", "session": "child"}]}))),
            None,
            "not valid under any",
        ),
    ],
)
def test_a_fault_in_the_messages_of_a_subagent_is_found(
    messages: tuple[tuple[str, dict[str, Any]], ...], offered: object, words: str
) -> None:
    with pytest.raises(Violation, match=words):
        with_subagents(*messages, offered=offered)


def test_an_update_may_carry_meta() -> None:
    params = {"sessionId": "s", "update": {"sessionUpdate": "plan", "entries": []}}
    notification = {"jsonrpc": "2.0", "method": "session/update"}
    SchemaChecker().check("agent", notification | {"params": params | {"_meta": {"acp/cursor": "e1"}}})
    for name, value in (("_meta", 1), ("meta", {})):
        with pytest.raises(Violation):
            SchemaChecker().check("agent", notification | {"params": params | {name: value}})
