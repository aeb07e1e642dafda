"""Turns questions for the user into requests to the client, and reads the client's answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, assert_never

import anyio
import anyio.lowlevel

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.domain import events
from crow.domain.events import Elicitation, ElicitationAnswer
from crow.domain.text import safe, title_line
from crow.frontend.calls import ShownCalls
from crow.protocol import tool_calls
from crow.protocol.frames import RequestError
from crow.protocol.sizes import PART_BYTES, json_bytes
from crow.tools.limits import FairLimiter

logger = logging.getLogger(__name__)

_MAX_WAITING_QUESTIONS = 16
"""The maximum number of questions from MCP servers that may wait while the user answers another question."""

_LABEL_CHARS = 500
_PERMISSION_KINDS: Mapping[PermissionAnswer, str] = {
    "allow_once": "allow_once",
    "allow_always": "allow_always",
    "allow_writes": "allow_always",
    "allow_below": "allow_always",
    "allow_registries": "allow_always",
    "reject_once": "reject_once",
    "reject_always": "reject_always",
}
"""The answers that a permission question can offer, each with its kind in the protocol."""


class Dialogs:
    """The dialogs that one client shows for a session and its subagents.

    The user sees at most one permission request and one question from an MCP server at a time. Otherwise, a new dialog
    might replace the one that the user is answering. `has_network` means that confined commands with the access `write`
    may use the network.
    """

    def __init__(self, *, answer_s: float, has_network: bool = False) -> None:
        self._answer_s = answer_s
        self._has_network = has_network
        self._asking = anyio.Lock()
        self._eliciting = FairLimiter(1)
        self._has_declined = False
        self._page_ids: set[str] = set()

    async def ask(
        self,
        session_id: str,
        question: PermissionQuestion,
        calls: ShownCalls,
        request: Callable[[str, dict[str, Any]], Awaitable[Any]],
    ) -> PermissionAnswer:
        """Ask for a permission. :raises ConnectionError: the client is gone."""
        params = permission_params(session_id, question, has_network=self._has_network)
        async with self._asking:
            await anyio.lowlevel.checkpoint_if_cancelled()  # the turn may have been cancelled while the question waited
            call = params["toolCall"]
            content = calls.question_content(question.call, call.pop("content", []))
            call |= {"content": content} if content else {}
            offered = [option["optionId"] for option in params["options"]]
            try:
                with anyio.fail_after(self._answer_s):
                    return permission_answer(await request("session/request_permission", params), offered)
            except TimeoutError:
                return "unanswered"
            except RequestError as error:
                logger.warning("The editor could not ask for permission: %s", error)
                return "cannot_ask"

    async def elicit(
        self,
        session_id: str,
        question: Elicitation,
        request: Callable[[str, dict[str, Any]], Awaitable[Any]],
        kinds: Collection[str],
        show: Callable[[events.NoticeShown], Awaitable[object]],
    ) -> ElicitationAnswer:
        """Ask a question of an MCP server. `kinds` are the kinds of questions that the client shows. `show` shows a
        notice.

        :raises ConnectionError: the client is gone.
        :raises RequestError: the client cannot ask its user.
        :raises TimeoutError: the user did not answer.
        """
        params = elicitation_params(session_id, question)
        if params["mode"] not in kinds or json_bytes(params) > PART_BYTES:
            return ElicitationAnswer(action="cancel")
        if self._eliciting.waiting >= _MAX_WAITING_QUESTIONS:
            if not self._has_declined:  # the user is told once, until no more questions are waiting
                self._has_declined = True
                await show(_too_many_questions(params["message"]))
            return ElicitationAnswer(action="decline")
        async with self._eliciting.slot():
            if not self._eliciting.waiting:
                self._has_declined = False
            if params["mode"] == "url":
                self._page_ids.add(params["elicitationId"])
            await anyio.lowlevel.checkpoint_if_cancelled()
            with anyio.fail_after(self._answer_s):
                return elicitation_answer(await request("elicitation/create", params))

    def finish(self, question_id: str) -> bool:
        """Forget a question that asked the user to open a page. Return whether the client was sent the question."""
        was_shown = question_id in self._page_ids
        self._page_ids.discard(question_id)
        return was_shown


def _too_many_questions(message: str) -> events.NoticeShown:
    return events.NoticeShown(
        severity="warning",
        title=f"MCP servers ask too many questions: {_MAX_WAITING_QUESTIONS} already wait for your answer.",
        description=f"Until you answer, crow declines all new questions, such as this one: {title_line(message)}",
    )


def permission_params(session_id: str, question: PermissionQuestion, *, has_network: bool = False) -> dict[str, Any]:
    """Return the parameters of `session/request_permission`.

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
    if always and question.below:
        labels["allow_below"] = f"Always keep what commands change below {title_line(question.below)}"
    if always and question.registries:
        labels["allow_registries"] = f"Always allow {title_line(question.registries, _LABEL_CHARS)}"
    options = [
        {"optionId": answer, "kind": kind, "name": labels[answer]}
        for answer, kind in _PERMISSION_KINDS.items()
        if answer in labels
    ]
    is_running = bool(question.plan.changed) or question.plan.coverage.rule_tool == "network"
    status = "in_progress" if is_running else "pending"
    params = {
        "sessionId": session_id,
        "toolCall": {"status": status} | call,
        "options": options,
    }
    # A rule with hidden characters would have to be escaped, and would then no longer match this call.
    has_rule = question.rule and safe(question.rule) == question.rule
    return params | ({"_meta": {"crow": {"rule": question.rule}}} if has_rule else {})


def permission_answer(result: object, offered: Collection[str] = _PERMISSION_KINDS) -> PermissionAnswer:
    """Read the answer in the response to `session/request_permission`. Anything unclear counts as a rejection.

    An "always" answer that is not in `offered` counts as the same answer for "once".
    """
    match result:
        case {"outcome": {"outcome": "cancelled"}}:
            return "cancelled"
        case {"outcome": {"outcome": "selected", "optionId": chosen}}:
            kind: PermissionAnswer = next((one for one in _PERMISSION_KINDS if one == chosen), "reject_once")
            once: PermissionAnswer = "allow_once" if kind.startswith("allow") else "reject_once"
            return kind if kind in offered else once
        case _:
            return "reject_once"


def elicitation_params(session_id: str, question: Elicitation) -> dict[str, Any]:
    """Return the parameters of `elicitation/create`."""
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
    """Read the answer in the response to `elicitation/create`. Anything unclear counts as `cancel`.

    Leave out values whose type no form field can have.
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
