"""Rules about prompts, messages, plans and cancellation."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from typing import Any

from acp_check.rules.rule import (
    MUST,
    SHOULD,
    Finding,
    Outcome,
    Rule,
    answered_by_result,
    describe,
    every,
    page,
)
from acp_check.run import CHUNKS, Exchange, RecordedTurn, Run, Update

_TURN = "prompt-turn"
_NO_TURN = "no prompt was answered"
_NO_QUESTION = "the agent asked for no permission"
_NOT_SENT = "the check did not send the prompt that this rule needs, or the prompt ended too early"
_NO_ENDPOINT = "the agent did not use the endpoint of the check"
_STOP_REASONS = ("end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled")
SPOKEN = "Hello from the check: ☕ naïve 漢字 🐦\nsecond line\n"
"""The answer of the check's endpoint to a prompt with the word `say`."""


def _answered(run: Run) -> list[RecordedTurn]:
    return [turn for turn in run.turns() if turn.exchange.is_answered]


def _stop_reason(turn: RecordedTurn) -> str | None:
    if turn.exchange.result is None or turn.stop_reason in _STOP_REASONS:
        return None
    return f"the stop reason is {turn.stop_reason!r}"


def _late(turn: RecordedTurn) -> str | None:
    return f"{len(turn.late)} updates of the turn came after the response" if turn.late else None


def _late_turns(run: Run) -> Iterator[_LateTurn]:
    return (_LateTurn(turn) for turn in _answered(run))


class _LateTurn:
    """A turn whose `lines` also include its late updates."""

    def __init__(self, turn: RecordedTurn) -> None:
        self.turn = turn

    @property
    def lines(self) -> tuple[Any, ...]:
        """The lines of the turn and of its first three late updates."""
        return (*self.turn.lines, *(update.line for update in self.turn.late[:3]))


def _outside(run: Run) -> Outcome:
    """Find messages and tool calls that were sent in a session before its first prompt or load."""
    found = []
    for connection in run.connections:
        begun: dict[str, int] = {}
        for turn in connection.turns:
            begun.setdefault(turn.exchange.session, turn.exchange.request.line)
        children = {u.child for u in connection.updates if u.kind == "subagent_update"}
        resumed = {each.session for each in connection.asked_for("session/resume")}
        found += [
            Finding(words="this update belongs to a turn, but the session has had no prompt", lines=update.lines)
            for update in connection.updates
            if update.kind in (*CHUNKS, "tool_call", "tool_call_update")
            and update.session not in children | resumed
            and update.line.line < begun.get(update.session, 1 << 62)
        ]
    return found if any(connection.updates for connection in run.connections) else "the agent sent no update"


def _echo(run: Run) -> Outcome:
    turns = _answered(run)
    return [
        Finding(words="the user's own message was sent back", lines=update.lines)
        for turn in turns
        for update in turn.updates
        if update.kind == "user_message_chunk"
    ] or ([] if turns else _NO_TURN)


def _spoken(run: Run) -> Outcome:
    if not run.endpoint or not run.endpoint.requests:
        return _NO_ENDPOINT
    return [
        Finding(words=f"the endpoint said {SPOKEN!r}, the client was shown {turn.text()[:200]!r}", lines=turn.lines)
        for turn in run.turns("prompt-say")
        if SPOKEN.strip() not in turn.text()
    ]


def _not_cancelled(turn: RecordedTurn) -> str | None:
    if turn.exchange.result is None:
        return describe(turn.exchange)
    return "the prompt was not cancelled, but its stop reason is cancelled" if turn.stop_reason == "cancelled" else None


def _ids(run: Run) -> Iterator[tuple[RecordedTurn, Update, str]]:
    for turn in run.turns():
        for update in turn.updates:
            if update.kind in CHUNKS and isinstance(update.body.get("messageId"), str):
                yield turn, update, update.body["messageId"]


def _roles(run: Run) -> Outcome:
    found = []
    seen: dict[tuple[Any, str], tuple[str, Update]] = {}
    for connection in run.connections:
        for update in connection.updates:
            message = update.body.get("messageId")
            if update.kind in CHUNKS and isinstance(message, str):
                role = "user" if update.kind == "user_message_chunk" else "agent"
                before = seen.setdefault((update.session, message), (role, update))
                if before[0] != role:
                    words = f"the message {message!r} is used by the user and by the agent"
                    found.append(Finding(words=words, lines=(before[1].line, update.line)))
    return found if seen else "the agent sends no message ids"


def _turn_ids(run: Run) -> Outcome:
    found = []
    seen: dict[tuple[Any, str], tuple[RecordedTurn, Update]] = {}
    for turn, update, message in _ids(run):
        before = seen.setdefault((update.session, message), (turn, update))
        if before[0] is not turn and turn.exchange.request.line > before[0].exchange.request.line:
            words = f"the message id {message!r} was already used in an earlier prompt"
            found.append(Finding(words=words, lines=(before[1].line, update.line)))
    return found if seen else "the agent sends no message ids"


def _interleaved(run: Run) -> Outcome:
    """Find messages that continue after another message of the same kind has begun."""
    found, has_any = [], False
    for turn in run.turns():
        last: dict[str, str] = {}
        ended: dict[str, set[str]] = {}
        for update in turn.updates:
            message = update.body.get("messageId")
            if update.kind in CHUNKS and isinstance(message, str):
                has_any = True
                before = last.get(update.kind)
                if before is not None and before != message:
                    ended.setdefault(update.kind, set()).add(before)
                if message in ended.get(update.kind, ()):
                    words = f"the message {message!r} continues after another message began"
                    found.append(Finding(words=words, lines=update.lines))
                last[update.kind] = message
    return found if has_any else "the agent sends no message ids"


def _contents(run: Run) -> Iterator[tuple[Update, dict[str, Any]]]:
    for update in run.updates(*CHUNKS, "tool_call", "tool_call_update"):
        content = update.body.get("content")
        for block in content if isinstance(content, list) else [content]:
            if isinstance(block, dict):
                inner = block.get("content") if block.get("type") == "content" else block
                if isinstance(inner, dict):
                    yield update, inner


def _base64(run: Run) -> Outcome:
    found, has_any = [], False
    for update, block in _contents(run):
        resource = block.get("resource")
        data = block.get("data") if block.get("type") in ("image", "audio") else None
        data = resource.get("blob") if data is None and isinstance(resource, dict) else data
        if isinstance(data, str):
            has_any = True
            try:
                base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError):
                found.append(Finding(words="the data is not valid Base64", lines=update.lines))
    return found if has_any else "the agent sent no images, audio or binary resources"


def _cancelled(run: Run) -> list[RecordedTurn]:
    """Return the prompts that were cancelled while they ran."""
    return [turn for turn in run.turns() if turn.cancels]


def _cancelled_while(purpose: str) -> Callable[[Run], list[RecordedTurn]]:
    return lambda run: [turn for turn in _cancelled(run) if turn.purpose == purpose]


def _cancel_result(turn: RecordedTurn) -> str | None:
    if turn.exchange.error is not None:
        return f"a cancelled prompt must not be answered with an error; {describe(turn.exchange)}"
    return None


def _cancel_reason(turn: RecordedTurn) -> str | None:
    """Find a stop reason other than `cancelled` after a cancellation. If the prompt may have ended by itself just
    before it was cancelled, every stop reason is allowed."""
    if turn.exchange.result is None or turn.stop_reason == "cancelled":
        return None
    response = turn.exchange.response
    crossed = response is not None and response.line == turn.cancels[0].line + 1 and not turn.permissions
    is_known_to_run = turn.purpose in ("prompt-cancel", "prompt-cancel-permission")
    return None if crossed and not is_known_to_run else f"the stop reason is {turn.stop_reason!r}"


def _cancel_answered(turn: RecordedTurn) -> str | None:
    return "the cancelled prompt was not answered" if turn.exchange.gave_up else None


def _left_stream(run: Run) -> Outcome:
    if not run.endpoint or not run.endpoint.hung:
        return _NO_ENDPOINT
    missing = run.endpoint.hung - run.endpoint.left
    words = f"{missing} of {run.endpoint.hung} of the model's answers were still being read after the cancel"
    return [Finding(words=words, lines=_cancelled(run)[0].lines if _cancelled(run) else ())] if missing else []


def _request_cancelled(exchange: Exchange) -> str | None:
    if not exchange.is_answered:
        return describe(exchange)
    if exchange.error is not None and exchange.code != -32800:
        return f"expected a result or the error -32800; {describe(exchange)}"
    return None


def _plans(run: Run) -> list[Update]:
    return run.updates("plan")


def _plan_entries(update: Update) -> str | None:
    entries = update.body.get("entries")
    wrong = [
        e for e in (entries if isinstance(entries, list) else ()) if not (isinstance(e, dict) and e.get("content"))
    ]
    return f"these entries have no content: {wrong}" if wrong else None


def _complete_plan(run: Run) -> Outcome:
    """Find plans that repeat only one entry of the previous plan: the agent sent only the change, not the whole
    plan."""
    found, has_any = [], False
    for turn in run.turns():
        last: list[str] = []
        for update in turn.updates:
            if update.kind == "plan":
                has_any = True
                entries = update.body.get("entries")
                now = (
                    [str(e.get("content")) for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
                )
                if len(last) > 1 and len(now) == 1 and now[0] in last:
                    words = f"the plan had {len(last)} entries and the update has only one; plans are sent whole"
                    found.append(Finding(words=words, lines=update.lines))
                last = now
    return found if has_any else "the agent sent no plan"


def _currency(update: Update) -> str | None:
    cost = update.body.get("cost")
    currency = cost.get("currency") if isinstance(cost, dict) else "USD"
    return None if re.fullmatch("[A-Z]{3}", str(currency)) else f"the currency is {currency!r}"


def _other_session(run: Run) -> Outcome:
    """Find prompts that stopped when a prompt of another session was cancelled."""
    others = run.turns("prompt-other")
    if not others:
        return _NOT_SENT
    return [
        Finding(words=f"only a prompt of another session was cancelled; {words}", lines=turn.lines)
        for turn in others
        if (words := _not_cancelled(turn))
    ]


def _own_updates(run: Run) -> Outcome:
    """Find turns that show the text of another session."""
    if not run.endpoint or not run.endpoint.requests:
        return _NO_ENDPOINT
    found = []
    for connection in run.connections:
        found += [
            Finding(words="this turn has the text of another session", lines=turn.lines)
            for turn in connection.turns
            if turn.purpose == "prompt-cancel" and SPOKEN.strip() in turn.text()
        ]
    return found if run.turns("prompt-cancel") and run.turns("prompt-other") else _NOT_SENT


def _slow(run: Run) -> Outcome:
    turns = run.turns("prompt-slow")
    if not turns or not run.endpoint or not run.endpoint.requests:
        return _NO_ENDPOINT
    found = []
    for turn in turns:
        numbers = re.findall(r"\bline (\d+)\b", turn.text())
        if turn.stop_reason != "end_turn" or numbers != [str(number) for number in range(len(numbers))]:
            words = f"the client did not read for a while; now text is missing or {describe(turn.exchange)}"
            found.append(Finding(words=words, lines=turn.lines))
        elif len(numbers) < FLOOD_LINES:
            words = f"the client did not read for a while; {len(numbers)} of {FLOOD_LINES} lines arrived"
            found.append(Finding(words=words, lines=turn.lines))
    return found


FLOOD_LINES = 4000
"""The number of lines that the check's endpoint writes for a client that reads slowly."""


def _content_prompt(kind: str, capability: str) -> Rule:
    return Rule(
        f"prompt.{kind}",
        MUST,
        f"An agent that advertises promptCapabilities.{capability} accepts it in a prompt.",
        page("initialization#prompt-capabilities"),
        answered_by_result(
            "the prompt failed", f"the agent does not advertise promptCapabilities.{capability}", f"prompt-{kind}"
        ),
    )


RULES = (
    Rule(
        "prompt.text",
        MUST,
        "A prompt of text is answered with a stop reason.",
        page("content#text-content"),
        answered_by_result("expected a result", "only a check that drives the agent asks for this", "prompt-say"),
    ),
    Rule(
        "prompt.resource-link",
        MUST,
        "A prompt with a resource link is answered with a stop reason.",
        page("initialization#prompt-capabilities"),
        answered_by_result("expected a result", "only a check that drives the agent asks for this", "prompt-link"),
    ),
    _content_prompt("image", "image"),
    _content_prompt("audio", "audio"),
    _content_prompt("resource", "embeddedContext"),
    Rule(
        "prompt.again",
        MUST,
        "A session accepts a second prompt after the first.",
        page("initialization#session-capabilities"),
        answered_by_result("expected a result", "only a check that drives the agent asks for this", "prompt-again"),
    ),
    Rule(
        "prompt.stop-reason",
        MUST,
        "The stop reason is one that the protocol has.",
        page(f"{_TURN}#stop-reasons"),
        every(_answered, _stop_reason, _NO_TURN),
    ),
    Rule(
        "prompt.updates-first",
        SHOULD,
        "Updates of a turn come before its response.",
        page(f"{_TURN}#4-check-for-completion"),
        every(_late_turns, lambda late: _late(late.turn) if not late.turn.cancels else None, _NO_TURN),
    ),
    Rule(
        "prompt.updates-of-turn",
        SHOULD,
        "Messages and tool calls belong to a prompt or a load.",
        page(f"{_TURN}#3-agent-reports-output"),
        _outside,
    ),
    Rule(
        "prompt.no-echo",
        SHOULD,
        "The user's message is not sent back while its prompt runs.",
        page("session-setup#loading-a-session"),
        _echo,
    ),
    Rule(
        "prompt.text-shown",
        SHOULD,
        "The client receives the model's text whole and unchanged.",
        page(f"{_TURN}#3-agent-reports-output"),
        _spoken,
    ),
    Rule(
        "prompt.not-cancelled",
        MUST,
        "A prompt that nobody cancelled is not answered with cancelled.",
        page(f"{_TURN}#stop-reasons"),
        every(
            lambda run: run.turns("prompt-say", "prompt-link", "prompt-again", "prompt-after-load"),
            lambda turn: _not_cancelled(turn) if turn.exchange.result is not None else None,
            _NO_TURN,
        ),
    ),
    Rule(
        "prompt.two-sessions",
        SHOULD,
        "Two sessions can run prompts at the same time without mixing their text.",
        page("session-setup"),
        _own_updates,
    ),
    Rule(
        "prompt.slow-client",
        SHOULD,
        "A client that reads slowly loses nothing.",
        page(f"{_TURN}#3-agent-reports-output"),
        _slow,
    ),
    Rule(
        "message.roles",
        MUST,
        "The user's and the agent's messages have different ids.",
        page(f"{_TURN}#message-ids"),
        _roles,
    ),
    Rule(
        "message.unique-ids",
        MUST,
        "A message id is not used again in a later turn.",
        page(f"{_TURN}#message-ids"),
        _turn_ids,
    ),
    Rule(
        "message.whole",
        SHOULD,
        "A message ends when the next one of its kind begins.",
        page(f"{_TURN}#message-ids"),
        _interleaved,
    ),
    Rule("content.base64", MUST, "Images, audio and blobs are Base64.", page("content#image-content"), _base64),
    Rule(
        "cancel.answered",
        MUST,
        "A cancelled prompt is answered.",
        page(f"{_TURN}#cancellation"),
        every(_cancelled, _cancel_answered, _NOT_SENT),
    ),
    Rule(
        "cancel.no-error",
        MUST,
        "A cancelled prompt is answered with a result, not with an error.",
        page(f"{_TURN}#cancellation"),
        every(_cancelled, _cancel_result, _NOT_SENT),
    ),
    Rule(
        "cancel.stop-reason",
        MUST,
        "A cancelled prompt is answered with the stop reason cancelled.",
        page(f"{_TURN}#cancellation"),
        every(_cancelled_while("prompt-cancel"), _cancel_reason, _NOT_SENT),
    ),
    Rule(
        "cancel.in-permission",
        MUST,
        "A prompt that is cancelled while a permission is open is answered with cancelled.",
        page(f"{_TURN}#cancellation"),
        every(_cancelled_while("prompt-cancel-permission"), _cancel_reason, _NO_QUESTION),
    ),
    Rule(
        "cancel.updates-first",
        MUST,
        "After a cancelled prompt is answered, no update of its turn follows.",
        page(f"{_TURN}#cancellation"),
        every(
            lambda run: [late for late in _late_turns(run) if late.turn.cancels],
            lambda late: _late(late.turn),
            _NOT_SENT,
        ),
    ),
    Rule(
        "cancel.next-prompt",
        MUST,
        "A prompt after a cancelled prompt works.",
        page("initialization#session-capabilities"),
        every(lambda run: run.turns("prompt-after-cancel"), _not_cancelled, _NOT_SENT),
    ),
    Rule(
        "cancel.idle",
        MUST,
        "A cancel without a running prompt does not cancel the next prompt.",
        page(f"{_TURN}#stop-reasons"),
        every(lambda run: run.turns("prompt-after-idle-cancel"), _not_cancelled, _NOT_SENT),
    ),
    Rule(
        "cancel.own-session",
        MUST,
        "A cancel leaves the prompts of other sessions alone.",
        page(f"{_TURN}#stop-reasons"),
        _other_session,
    ),
    Rule(
        "cancel.leaves-model",
        SHOULD,
        "A cancel ends the request to the model.",
        page(f"{_TURN}#cancellation"),
        _left_stream,
    ),
    Rule(
        "cancel.request",
        MUST,
        "After $/cancel_request, a request is answered with a result or with -32800.",
        page("cancellation#%24%2Fcancel_request-notification"),
        every(lambda run: run.exchanges("prompt-cancel-request"), _request_cancelled, _NOT_SENT),
    ),
    Rule(
        "plan.entries",
        MUST,
        "Each entry of a plan says what is to be done.",
        page("agent-plan#plan-entries"),
        every(_plans, _plan_entries, "the agent sent no plan"),
    ),
    Rule(
        "plan.whole",
        MUST,
        "A plan is sent whole each time.",
        page("agent-plan#updating-plans"),
        _complete_plan,
    ),
    Rule(
        "usage.currency",
        MUST,
        "The currency of a cost is an ISO 4217 code, such as USD.",
        page(f"{_TURN}#session-usage-updates"),
        every(lambda run: run.updates("usage_update"), _currency, "the agent sent no usage_update"),
    ),
)
