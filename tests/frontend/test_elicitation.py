"""Questions to the user beyond a yes or no: what is sent, and what an answer means."""

from __future__ import annotations

from typing import Any

import pytest

from crow.domain.entries import CallRef
from crow.domain.events import ElicitationAnswer, FormQuestion, UrlQuestion
from crow.frontend.client import elicitation_answer, elicitation_params
from crow.trace.schema import SchemaChecker

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
def test_a_question_is_a_valid_request(question: Any, params: dict[str, Any]) -> None:
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
def test_an_answer_that_is_no_clear_one_dismisses_the_question(result: Any, answer: ElicitationAnswer) -> None:
    assert elicitation_answer(result) == answer
