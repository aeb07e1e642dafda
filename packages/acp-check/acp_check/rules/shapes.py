"""Rules that compare each message with the published schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from acp_check.recording import Recorded
from acp_check.rules.rule import MUST, Check, Finding, Outcome, Rule, Shown, every, page
from acp_check.run import Exchange, Run, Update
from acp_check.schema import definition, problems, update_kinds

_RESPONSES = (
    "initialize",
    "authenticate",
    "logout",
    "session/new",
    "session/load",
    "session/resume",
    "session/list",
    "session/close",
    "session/delete",
    "session/fork",
    "session/prompt",
    "session/set_mode",
    "session/set_config_option",
)
_REQUESTS = (
    "session/request_permission",
    "fs/read_text_file",
    "fs/write_text_file",
    "terminal/create",
    "terminal/output",
    "terminal/wait_for_exit",
    "terminal/kill",
    "terminal/release",
    "elicitation/create",
)
_UPDATES = (
    "user_message_chunk",
    "agent_message_chunk",
    "agent_thought_chunk",
    "tool_call",
    "tool_call_update",
    "plan",
    "available_commands_update",
    "current_mode_update",
    "config_option_update",
    "session_info_update",
    "usage_update",
    "notice",
    "compaction_update",
    "compaction_summary_chunk",
)


def _words(found: tuple[str, ...]) -> str | None:
    return "; ".join(found[:3]) or None


def _response(method: str) -> Check:
    name = definition("agent", method, "Response")

    def problem(exchange: Exchange) -> str | None:
        value = exchange.response.message["result"] if exchange.response is not None else None
        return _words(problems(name, value)) if name is not None else None

    return every(
        lambda run: [
            each
            for each in run.asked_for(method)
            if each.result is not None and each.request.purpose != "unadvertised" and not each.is_of_later_version
        ],
        problem,
        f"the agent did not answer {method} with a result",
    )


def _request(method: str) -> Check:
    name = definition("client", method, "Request")

    def problem(exchange: Exchange) -> str | None:
        return _words(problems(name, exchange.request.message.get("params"))) if name is not None else None

    return every(lambda run: run.called(method), problem, f"the agent did not call {method}")


def _update(kind: str) -> Check:
    return every(
        lambda run: run.updates(kind),
        lambda update: None if _is_plain_chunk(update.body) else _words(problems(f"SessionUpdate/{kind}", update.body)),
        f"the agent sent no {kind}",
    )


def _is_plain_chunk(body: dict[str, Any]) -> bool:
    """Return whether an update is a chunk of plain text. These updates are the most frequent, and they are always
    valid."""
    match body:
        case {"content": {"type": "text", "text": str(), **others}, **rest} if not others:
            message = rest.pop("messageId", "")
            return (
                rest.keys() == {"sessionUpdate"} and isinstance(message, str) and body["sessionUpdate"] in _UPDATES[:3]
            )
    return False


def _kind(update: Update) -> str | None:
    return None if update.body.get("sessionUpdate") in update_kinds() else f"there is no update {update.kind!r}"


def _all_updates(run: Run) -> Iterator[Update]:
    return (update for connection in run.connections for update in connection.updates)


def _errors(run: Run) -> Iterator[Shown]:
    messages = (line for connection in run.connections for line in connection.agent_messages)
    return (Shown(line) for line in messages if "error" in line.message)


def _named_updates(run: Run) -> Iterator[Shown]:
    messages = (line for connection in run.connections for line in connection.agent_messages)
    return (Shown(line) for line in messages if line.message.get("method") == "session/update")


def _update_params(line: Recorded) -> str | None:
    match line.message.get("params"):
        case {"sessionId": str(), "update": {"sessionUpdate": str()}}:
            return None
    return "session/update must have a sessionId, and an update with the member sessionUpdate"


def _custom_fields(run: Run) -> Outcome:
    """Find members that the schema does not have, in messages that are valid apart from these members."""
    found, has_any = [], False
    for connection in run.connections:
        for name, value, line in _values(connection):
            has_any = True
            unknown = [] if problems(name, value) else problems(name, value, strict=True)
            if unknown:
                words = f"the protocol has no such members here: {_words(tuple(unknown))}"
                found.append(Finding(words=words, lines=(line,)))
    return found if has_any else "the agent sent no message"


def _values(connection: Any) -> Iterator[tuple[str, Any, Recorded]]:
    """Yield each value from the agent that has a definition in the schema, as (name of the definition, value, line)."""
    for exchange in connection.asked:
        name = definition("agent", exchange.method, "Response")
        if exchange.is_of_later_version:
            continue
        if name is not None and exchange.result is not None and exchange.response is not None:
            yield name, exchange.response.message["result"], exchange.response
    for exchange in connection.called:
        name = definition("client", exchange.method, "Request")
        if name is not None:
            yield name, exchange.request.message.get("params"), exchange.request
    for update in connection.updates:
        if update.body.get("sessionUpdate") in update_kinds() and not _is_plain_chunk(update.body):
            yield f"SessionUpdate/{update.kind}", update.body, update.line


def _anchor(name: str) -> str:
    return name.replace("/", "%2F").replace("_", "-")


RULES = (
    *(
        Rule(
            f"shape.{method}",
            MUST,
            f"The result of {method} matches the schema.",
            page(f"{'draft/' if method == 'session/fork' else ''}schema#{_anchor(method)}"),
            _response(method),
        )
        for method in _RESPONSES
    ),
    *(
        Rule(
            f"shape.{method}",
            MUST,
            f"The params of {method} match the schema.",
            page(f"schema#{_anchor(method)}"),
            _request(method),
        )
        for method in _REQUESTS
    ),
    *(
        Rule(
            f"shape.{kind}",
            MUST,
            f"The update {kind} matches the schema.",
            page("schema#sessionupdate"),
            _update(kind),
        )
        for kind in _UPDATES
    ),
    Rule(
        "shape.session/update",
        MUST,
        "An update names its session and its kind.",
        page("schema#sessionnotification"),
        every(_named_updates, lambda shown: _update_params(shown.line), "the agent sent no update"),
    ),
    Rule(
        "shape.update-kind",
        MUST,
        "The agent sends only kinds of updates that the protocol has.",
        page("schema#sessionupdate"),
        every(_all_updates, _kind, "the agent sent no update"),
    ),
    Rule(
        "shape.error",
        MUST,
        "The code of an error is a whole number, and its message is a string.",
        page("schema#error"),
        every(
            _errors,
            lambda shown: _words(problems("Error", shown.line.message["error"])),
            "the agent sent no error",
        ),
    ),
    Rule(
        "extensibility.no-custom-fields",
        MUST,
        "Members that the protocol does not have are sent only in _meta.",
        page("extensibility#the-_meta-field"),
        _custom_fields,
    ),
)
