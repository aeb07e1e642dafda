"""The question that a permission request asks, and its answer.

Strategy: the request repeats all that was announced of the call, as many clients draw their dialog from it alone.
The ids of the options are their kinds. Whatever is no clear yes is a no. Knows nothing of rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from crow.frontend.bounds import head_and_tail
from crow.frontend.tool_calls import call_fields, diff_contents, fenced, text_content

if TYPE_CHECKING:
    from crow.agent import PermissionQuestion

__all__ = ["PermissionAnswer", "permission_answer", "permission_params"]

PermissionAnswer: TypeAlias = Literal[
    "allow_once", "allow_always", "reject_once", "reject_always", "cancelled", "cannot_ask", "unanswered"
]
KINDS: tuple[PermissionAnswer, ...] = ("allow_once", "allow_always", "reject_once", "reject_always")


def permission_params(session_id: str, question: PermissionQuestion) -> dict[str, Any]:
    """The parameters of `session/request_permission`."""
    announcement = question.offer.announcement
    call = call_fields(question.call.call_id, announcement, name=question.name, arguments=question.arguments)
    content = diff_contents(announcement.diffs)
    if question.offer.shown:
        content.append(text_content(fenced(head_and_tail(question.offer.shown))))
    if content:
        call["content"] = content
    options = [
        {"optionId": "allow_once", "kind": "allow_once", "name": "Allow"},
        {"optionId": "allow_always", "kind": "allow_always", "name": f"Always allow {question.always}"},
        {"optionId": "reject_once", "kind": "reject_once", "name": "Reject"},
        {"optionId": "reject_always", "kind": "reject_always", "name": f"Always reject {question.always}"},
    ]
    if not question.always:
        options = options[::2]
    return {"sessionId": session_id, "toolCall": {"status": "pending"} | call, "options": options}


def permission_answer(result: object) -> PermissionAnswer:
    """What the client's answer means."""
    match result:
        case {"outcome": {"outcome": "cancelled"}}:
            return "cancelled"
        case {"outcome": {"outcome": "selected", "optionId": chosen}}:
            return next((kind for kind in KINDS if kind == chosen), "reject_once")
        case _:
            return "reject_once"
