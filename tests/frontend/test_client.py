"""Permission requests and elicitations, and the meaning of their answers."""

from __future__ import annotations

from typing import Any

import pytest

from crow.agent import PermissionQuestion
from crow.domain.entries import Announcement, CallRef, Diff
from crow.domain.events import ElicitationAnswer, FormQuestion, UrlQuestion
from crow.frontend.client import elicitation_answer, elicitation_params, permission_answer, permission_params
from crow.tools import PlannedCall
from crow.trace.schema import SchemaChecker, validate

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
        always="edit_file in this session",
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
        "content": [{"type": "diff", "path": "/w/a.py", "oldText": "a", "newText": "b"}],
        "_meta": {"tool_name": "edit_file"},
    }
    kinds = ["allow_once", "allow_always", "reject_once", "reject_always"]
    assert [(option["kind"], option["optionId"]) for option in params["options"]] == [(kind, kind) for kind in kinds]
    assert params["options"][1]["name"] == "Always allow edit_file in this session"


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        ({"outcome": {"outcome": "selected", "optionId": "allow_always"}}, "allow_always"),
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
