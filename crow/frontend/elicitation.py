"""The request that puts a question to the user, and its answer.

Strategy: as for permissions, both directions are pure functions. Whatever is no clear answer counts as dismissed; of
an accepted form only values that a form can hold are taken. Knows no capability.
"""

from __future__ import annotations

from typing import Any, assert_never

from crow.domain.elicitation import Elicitation, ElicitationAnswer, FormQuestion, UrlQuestion

__all__ = ["elicitation_answer", "elicitation_params"]


def elicitation_params(session_id: str, question: Elicitation) -> dict[str, Any]:
    """The parameters of `elicitation/create`."""
    params: dict[str, Any] = {"sessionId": session_id, "message": question.message}
    if question.call is not None:
        params["toolCallId"] = question.call.call_id
    match question:
        case FormQuestion(schema=schema):
            return params | {"mode": "form", "requestedSchema": {"type": "object", **schema}}
        case UrlQuestion(url=url, id=question_id):
            return params | {"mode": "url", "url": url, "elicitationId": question_id}
        case _:
            assert_never(question)


def elicitation_answer(result: object) -> ElicitationAnswer:
    """What the client's answer means."""
    match result:
        case {"action": "accept", "content": dict(content)}:
            return ElicitationAnswer(action="accept", content={k: v for k, v in content.items() if _is_value(v)})
        case {"action": "accept"}:
            return ElicitationAnswer(action="accept")
        case {"action": "decline"}:
            return ElicitationAnswer(action="decline")
        case _:
            return ElicitationAnswer(action="cancel")


def _is_value(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, str | int | float)
