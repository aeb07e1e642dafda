"""Turns questions for the user into requests to the client, and reads the client's answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, assert_never

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.domain import events
from crow.domain.events import Elicitation, ElicitationAnswer
from crow.domain.rendering import safe, title_line
from crow.frontend import tool_calls

PERMISSION_KINDS: Mapping[PermissionAnswer, str] = {
    "allow_once": "allow_once",
    "allow_always": "allow_always",
    "allow_writes": "allow_always",
    "reject_once": "reject_once",
    "reject_always": "reject_always",
}
"""The answers that a permission question can offer, each with its kind in the protocol."""


def permission_params(session_id: str, question: PermissionQuestion, *, has_network: bool = False) -> dict[str, Any]:
    """Returns the parameters of `session/request_permission`.

    The parameters repeat everything about the call, because many clients build their dialog from this request alone. If
    a call is too large to be shown completely, the user can only allow or reject this one call, and gets no "always"
    answers.
    """
    announcement = question.plan.announcement
    call = tool_calls.call_fields(question.call.call_id, announcement, name=question.name, arguments=question.arguments)
    content, is_whole = tool_calls.question_contents(
        question.plan,
        question.name,
        question.arguments,
        has_network=has_network,
        reason=question.reason,
        changes=question.changes,
    )
    if content:
        call["content"] = content
    always, never = (title_line(words) if is_whole else "" for words in (question.always, question.never))
    labels = {"allow_once": "Allow", "reject_once": "Reject"}
    if always:
        labels |= {"allow_always": f"Always allow {always}", "reject_always": f"Always reject {never}"}
    if always and question.offers_writes:
        network = " or use the network" if has_network else ""
        labels["allow_writes"] = f"Always allow commands that can only change files here{network}"
    options = [
        {"optionId": answer, "kind": kind, "name": labels[answer]}
        for answer, kind in PERMISSION_KINDS.items()
        if answer in labels
    ]
    params = {"sessionId": session_id, "toolCall": {"status": "pending"} | call, "options": options}
    # A rule with hidden characters would have to be escaped, and would then no longer match this call.
    has_rule = question.rule and safe(question.rule) == question.rule
    return params | ({"_meta": {"crow": {"rule": question.rule}}} if has_rule else {})


def permission_answer(result: object, offered: Collection[str] = PERMISSION_KINDS) -> PermissionAnswer:
    """Reads the answer in the response to `session/request_permission`. Anything unclear counts as a rejection.

    An "always" answer that is not in `offered` counts as the same answer for "once".
    """
    match result:
        case {"outcome": {"outcome": "cancelled"}}:
            return "cancelled"
        case {"outcome": {"outcome": "selected", "optionId": chosen}}:
            kind: PermissionAnswer = next((one for one in PERMISSION_KINDS if one == chosen), "reject_once")
            once: PermissionAnswer = "allow_once" if kind.startswith("allow") else "reject_once"
            return kind if kind in offered else once
        case _:
            return "reject_once"


def elicitation_params(session_id: str, question: Elicitation) -> dict[str, Any]:
    """Returns the parameters of `elicitation/create`."""
    params: dict[str, Any] = {"sessionId": session_id, "message": question.message}
    if question.call is not None:
        params["toolCallId"] = question.call.call_id
    match question:
        case events.FormQuestion(schema=schema):
            return params | {"mode": "form", "requestedSchema": {"type": "object", **schema}}
        case events.UrlQuestion(url=url, id=question_id):
            return params | {"mode": "url", "url": url, "elicitationId": question_id}
        case _:
            assert_never(question)


def elicitation_answer(result: object) -> ElicitationAnswer:
    """Reads the answer in the response to `elicitation/create`. Anything unclear counts as `cancel`.

    Leaves out values whose type no form field can have.
    """
    match result:
        case {"action": "accept", "content": dict(content)}:
            values = {key: value for key, value in content.items() if _is_form_value(value)}
            return ElicitationAnswer(action="accept", content=values)
        case {"action": "accept" | "decline" as action}:
            return ElicitationAnswer(action=action)
        case _:
            return ElicitationAnswer(action="cancel")


def _is_form_value(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, str | int | float)
