"""Rules about tool calls and permissions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from acp_check.rules.rule import (
    MUST,
    SHOULD,
    Finding,
    Outcome,
    Rule,
    describe,
    every,
    is_absolute,
    page,
)
from acp_check.run import FINAL, Exchange, RecordedTurn, Run, Update

_TURN = "prompt-turn"
_NO_CALL = "the agent made no tool call"
_NO_QUESTION = "the agent asked for no permission"


def _answered(run: Run) -> list[RecordedTurn]:
    return [turn for turn in run.turns() if turn.exchange.is_answered]


def _calls(run: Run) -> list[Update]:
    return run.updates("tool_call", "tool_call_update")


def _announced(run: Run) -> Outcome:
    return _walk_calls(run, "an update of a tool call that was not announced")


def _announced_once(run: Run) -> Outcome:
    turns = _with_calls(run)
    found = []
    for turn in turns:
        seen: set[str] = set()
        for update in turn.updates:
            call = str(update.body.get("toolCallId"))
            if update.kind == "tool_call":
                if call in seen:
                    found.append(Finding(words=f"this turn announces a tool call twice: {call}", lines=update.lines))
                seen.add(call)
    return found if turns else _NO_CALL


def _unique_ids(run: Run) -> Outcome:
    return _walk_calls(run, "a tool call with the id of an earlier one")


def _is_below(session: str, root: str, parents: Mapping[str, str]) -> bool:
    """Return whether a session is `root` or one of its subagents, at any depth. `parents` maps subagents to parents,
    and may have cycles."""
    seen = set[str]()
    while session != root and session in parents and session not in seen:
        seen.add(session)
        session = parents[session]
    return session == root


def _reopened(run: Run) -> Outcome:
    return _walk_calls(run, "a tool call that had ended gets a new status")


def _walk_calls(run: Run, wanted: str) -> Outcome:
    """Follow each tool call of each session, and find problems of several kinds. Return only the findings of the kind
    `wanted`."""
    found, has_any = [], False
    for connection in run.connections:
        calls: dict[tuple[str, str], str] = {}
        loads = [turn.exchange for turn in connection.turns if turn.exchange.method == "session/load"]
        parents: dict[str, str] = {}
        for update in connection.updates:
            while loads and loads[0].request.line < update.line.line:  # the replay of a load announces the calls again
                session = loads.pop(0).session
                calls = {key: status for key, status in calls.items() if not _is_below(key[0], session, parents)}
            if update.kind == "subagent_update":
                parents.setdefault(update.child, update.session)
            if update.kind not in ("tool_call", "tool_call_update"):
                continue
            has_any = True
            key = (update.session, str(update.body.get("toolCallId")))
            before = calls.get(key)
            status = update.body.get("status") or before or "pending"
            words = ""
            if update.kind == "tool_call" and before is not None:
                words = "a tool call with the id of an earlier one"
            elif update.kind == "tool_call_update" and before is None:
                words = "an update of a tool call that was not announced"
            elif before in FINAL and status != before:
                words = "a tool call that had ended gets a new status"
            if words == wanted:
                found.append(Finding(words=f"{words}: {key[1]}", lines=update.lines))
            calls[key] = str(status)
    return found if has_any else _NO_CALL


def _unfinished(turn: RecordedTurn) -> str | None:
    """Find calls that have not ended when their turn ends. Cancelled and failed turns are left out, because version 1
    of the protocol has no status for cancelled calls."""
    if turn.stop_reason in (None, "cancelled"):
        return None
    open_calls = [call for call, seen in turn.statuses().items() if seen and seen[-1] not in FINAL]
    return f"the turn ends, but these tool calls have not ended: {open_calls}" if open_calls else None


def _with_calls(run: Run) -> list[RecordedTurn]:
    return [turn for turn in _answered(run) if turn.statuses()]


def _locations(update: Update) -> Iterator[dict[str, Any]]:
    places = update.body.get("locations")
    return (place for place in (places if isinstance(places, list) else ()) if isinstance(place, dict))


def _absolute_location(update: Update) -> str | None:
    wrong = [p.get("path") for p in _locations(update) if not is_absolute(p.get("path"))]
    return f"these paths are not absolute: {wrong}" if wrong else None


def _line_numbers(update: Update) -> str | None:
    wrong = [place["line"] for place in _locations(update) if place.get("line") == 0]
    return "a location has the line 0; lines begin at 1" if wrong else None


def _located(run: Run) -> list[Update]:
    return [update for update in _calls(run) if any(_locations(update))]


def _blocks(update: Update, kind: str) -> list[dict[str, Any]]:
    content = update.body.get("content")
    blocks = content if isinstance(content, list) else ()
    return [block for block in blocks if isinstance(block, dict) and block.get("type") == kind]


def _absolute_diff(update: Update) -> str | None:
    wrong = [diff.get("path") for diff in _blocks(update, "diff") if not is_absolute(diff.get("path"))]
    return f"these paths are not absolute: {wrong}" if wrong else None


def _known_terminal(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        created = {
            str((each.result or {}).get("terminalId")): each.response.line
            for each in connection.called
            if each.method == "terminal/create" and each.response is not None and each.result is not None
        }
        replayed = {
            update.line.line
            for turn in connection.turns
            if turn.exchange.method == "session/load"
            for update in turn.updates
        }
        if _offers_terminal_output(connection.offered):
            continue
        for update in connection.updates:
            if update.line.line in replayed:
                continue
            for block in _blocks(update, "terminal"):
                has_any = True
                if created.get(str(block.get("terminalId")), 1 << 62) > update.line.line:
                    words = f"the client has no terminal {block.get('terminalId')!r}"
                    found.append(Finding(words=words, lines=update.lines))
    return found if has_any else "the agent showed no terminal in a tool call"


def _offers_terminal_output(offered: dict[str, Any]) -> bool:
    """Return whether the client can show the agent's own terminals. Only some clients have this extension of the
    protocol."""
    meta = offered.get("_meta")
    return isinstance(meta, dict) and bool(meta.get("terminal_output"))


def _has_title(update: Update) -> str | None:
    title = update.body.get("title")
    return None if isinstance(title, str) and title.strip() else f"the title is {title!r}"


def _call_id(update: Update) -> str | None:
    call = update.body.get("toolCallId")
    return None if isinstance(call, str) and call else f"toolCallId is {call!r}"


def _allowed_calls(run: Run) -> Iterator[tuple[RecordedTurn, Exchange, str]]:
    for turn in _answered(run):
        for question in turn.permissions:
            yield turn, question, str((question.params.get("toolCall") or {}).get("toolCallId"))


def _chosen_kind(question: Exchange) -> str:
    """Return the kind of the option that the client chose, or an empty string if it chose none."""
    chosen = ((question.result or {}).get("outcome") or {}).get("optionId")
    return next((str(o.get("kind")) for o in _options(question) if o.get("optionId") == chosen), "")


def _options(question: Exchange) -> list[dict[str, Any]]:
    options = question.params.get("options")
    return [option for option in options if isinstance(option, dict)] if isinstance(options, list) else []


def _in_progress(run: Run) -> Outcome:
    found, has_any = [], False
    for turn, question, call in _allowed_calls(run):
        statuses = turn.statuses().get(call, [])
        if _chosen_kind(question).startswith("allow") and statuses[-1:] == ["completed"]:
            has_any = True
            if "in_progress" not in statuses:
                words = f"the tool call {call} was allowed and has completed, but was never in_progress"
                found.append(Finding(words=words, lines=question.lines))
    return found if has_any else "no tool call was allowed and completed"


def _rejected(run: Run) -> Outcome:
    found, has_any = [], False
    for turn, question, call in _allowed_calls(run):
        if _chosen_kind(question).startswith("reject"):
            has_any = True
            if turn.statuses().get(call, [])[-1:] == ["completed"]:
                found.append(Finding(words=f"the tool call {call} was rejected, but completed", lines=question.lines))
    return found if has_any else "no tool call was rejected"


def _ran_first(run: Run) -> Outcome:
    found, has_any = [], False
    for turn, question, call in _allowed_calls(run):
        has_any = True
        early = [
            update.line
            for update in turn.updates
            if str(update.body.get("toolCallId")) == call
            and update.body.get("status") == "completed"
            and (question.response is None or update.line.line < question.response.line)
        ]
        if early and question.request.line < early[0].line:
            words = f"the tool call {call} has completed before the client answered"
            found.append(Finding(words=words, lines=(question.request, early[0])))
    return found if has_any else _NO_QUESTION


def _questions(run: Run) -> list[Exchange]:
    return run.called("session/request_permission")


def _has_options(question: Exchange) -> str | None:
    return None if _options(question) else "the request offers no option"


def _option_ids(question: Exchange) -> str | None:
    ids = [str(option.get("optionId")) for option in _options(question)]
    return f"two options have the same id: {ids}" if len(set(ids)) < len(ids) else None


def _open_call(run: Run) -> Outcome:
    found, has_any = [], False
    for turn, question, call in _allowed_calls(run):
        has_any = True
        before = [u for u in turn.updates if u.line.line < question.request.line and u.body.get("toolCallId") == call]
        statuses = [status for update in before if (status := update.body.get("status"))]
        if not before or statuses[-1:] in (["completed"], ["failed"]):
            found.append(Finding(words=f"the tool call {call} is not open", lines=(question.request,)))
    return found if has_any else _NO_QUESTION


def _asked_in_turn(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        children = {update.child for update in connection.updates if update.kind == "subagent_update"}
        for question in connection.called:
            if question.method == "session/request_permission" and question.session not in children:
                has_any = True
                running = any(
                    turn.exchange.session == question.session
                    and turn.exchange.request.line < question.request.line
                    and (turn.exchange.response is None or turn.exchange.response.line > question.request.line)
                    for turn in connection.turns
                )
                if not running:
                    words = "the agent asks for a permission, but the session has no running prompt"
                    found.append(Finding(words=words, lines=(question.request,)))
    return found if has_any else _NO_QUESTION


def _ended(turn: RecordedTurn) -> str | None:
    return None if turn.exchange.result is not None else describe(turn.exchange)


RULES = (
    Rule(
        "tool.announced",
        SHOULD,
        "A tool call is announced before it is updated.",
        page("tool-calls#creating"),
        _announced,
    ),
    Rule(
        "tool.announced-once",
        SHOULD,
        "A turn announces each tool call only once.",
        page("tool-calls#creating"),
        _announced_once,
    ),
    Rule(
        "tool.unique-ids",
        SHOULD,
        "The id of a tool call is unique in its session.",
        page("tool-calls#creating"),
        _unique_ids,
    ),
    Rule(
        "tool.ended",
        SHOULD,
        "A tool call that completed or failed does not change its status again.",
        page("tool-calls#status"),
        _reopened,
    ),
    Rule(
        "tool.final",
        SHOULD,
        "When a turn ends, its tool calls have completed or failed.",
        page(f"{_TURN}#4-check-for-completion"),
        every(_with_calls, _unfinished, _NO_CALL),
    ),
    Rule(
        "tool.id",
        MUST,
        "A tool call has an id: a string that is not empty.",
        page("tool-calls#creating"),
        every(_calls, _call_id, _NO_CALL),
    ),
    Rule(
        "tool.title",
        MUST,
        "A tool call has a title.",
        page("tool-calls#creating"),
        every(lambda run: run.updates("tool_call"), _has_title, _NO_CALL),
    ),
    Rule(
        "tool.locations",
        MUST,
        "The paths of a tool call's locations are absolute.",
        page("overview#argument-requirements"),
        every(_located, _absolute_location, "no tool call has locations"),
    ),
    Rule(
        "tool.lines",
        MUST,
        "Line numbers begin at 1.",
        page("overview#argument-requirements"),
        every(_located, _line_numbers, "no tool call has locations"),
    ),
    Rule(
        "tool.diffs",
        MUST,
        "The path of a diff is absolute.",
        page("overview#argument-requirements"),
        every(
            lambda run: [update for update in _calls(run) if _blocks(update, "diff")],
            _absolute_diff,
            "no tool call has a diff",
        ),
    ),
    Rule(
        "tool.terminals",
        MUST,
        "A terminal in a tool call is one that the client created.",
        page("schema#terminal"),
        _known_terminal,
    ),
    Rule(
        "tool.in-progress",
        SHOULD,
        "A tool call that was allowed is shown as in_progress before it completes.",
        page(f"{_TURN}#5-tool-invocation-and-status-reporting"),
        _in_progress,
    ),
    Rule(
        "permission.options",
        SHOULD,
        "A permission request has options.",
        page("tool-calls#permission-options"),
        every(_questions, _has_options, _NO_QUESTION),
    ),
    Rule(
        "permission.option-ids",
        MUST,
        "The options of a permission request have different ids.",
        page("tool-calls#permission-options"),
        every(_questions, _option_ids, _NO_QUESTION),
    ),
    Rule(
        "permission.open-call",
        SHOULD,
        "A permission is asked for a tool call that was announced and has not ended.",
        page("tool-calls#requesting-permission"),
        _open_call,
    ),
    Rule(
        "permission.in-turn",
        SHOULD,
        "A permission is asked for while a prompt runs.",
        page(f"{_TURN}#5-tool-invocation-and-status-reporting"),
        _asked_in_turn,
    ),
    Rule(
        "permission.waits",
        SHOULD,
        "A tool call does not complete before its permission is answered.",
        page("tool-calls#requesting-permission"),
        _ran_first,
    ),
    Rule(
        "permission.rejected",
        SHOULD,
        "A rejected tool call does not complete.",
        page("tool-calls#permission-options"),
        _rejected,
    ),
    Rule(
        "permission.answered",
        MUST,
        "A prompt whose permission was rejected is answered.",
        page(f"{_TURN}#4-check-for-completion"),
        every(lambda run: [turn for turn in run.turns("prompt-reject") if turn.permissions], _ended, _NO_QUESTION),
    ),
    Rule(
        "permission.error",
        MUST,
        "A prompt whose permission request got an error is answered.",
        page(f"{_TURN}#4-check-for-completion"),
        every(
            lambda run: [turn for turn in run.turns("prompt-question-fails") if turn.permissions],
            lambda turn: None if turn.exchange.is_answered else describe(turn.exchange),
            _NO_QUESTION,
        ),
    ),
)
