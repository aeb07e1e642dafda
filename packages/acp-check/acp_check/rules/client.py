"""Rules about the agent's requests to the client, and about how the agent exits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from acp_check.recording import Recorded
from acp_check.rules.rule import (
    MUST,
    SHOULD,
    Check,
    Finding,
    Outcome,
    Rule,
    Shown,
    describe,
    every,
    is_absolute,
    offers,
    page,
)
from acp_check.rules.settings import options_of
from acp_check.run import OPENING, Connection, Exchange, Run
from acp_check.schema import definition

_ALL_OFFERED = "the client offers this on each connection"
_NO_READ = "the agent read no file through the client"
_NO_WRITE = "the agent wrote no file through the client"
_NO_TERMINAL = "the agent created no terminal"
_NO_ELICITATION = "the agent asked for no input"


def _is_elicitation(mode: str) -> Callable[[Recorded], bool]:
    def is_of_mode(line: Recorded) -> bool:
        message = line.message
        params = message.get("params")
        return message.get("method") == "elicitation/create" and isinstance(params, dict) and params.get("mode") == mode

    return is_of_mode


def _is_call(*methods: str) -> Callable[[Recorded], bool]:
    return lambda line: line.message.get("method") in methods


def _is_update(*kinds: str) -> Callable[[Recorded], bool]:
    def is_of_kind(line: Recorded) -> bool:
        match line.message:
            case {"method": "session/update", "params": {"update": {"sessionUpdate": kind}}}:
                return kind in kinds
        return False

    return is_of_kind


def _is_boolean_option(line: Recorded) -> bool:
    match line.message:
        case {"params": {"update": {"configOptions": options}}} | {"result": {"configOptions": options}}:
            return any(option.get("type") == "boolean" for option in options_of(options))
    return False


def _not_offered(capability: str, is_use: Callable[[Recorded], bool]) -> Check:
    """Return a check that fails if the agent uses a capability on a connection where the client does not offer it."""

    def check(run: Run) -> Outcome:
        found, has_any = [], False
        for connection in run.connections:
            if connection.initialize is not None and not offers(connection, capability):
                has_any = True
                words = f"the client did not offer {capability}"
                found += [Finding(words=words, lines=(line,)) for line in connection.agent_messages if is_use(line)]
        return found if has_any else _ALL_OFFERED

    return check


def _unknown_method(line: Recorded) -> str | None:
    method, kind = line.message["method"], "Request" if "id" in line.message else "Notification"
    if not isinstance(method, str) or method.startswith("_") or definition("client", method, kind):
        return None
    return f"clients have no {kind.lower()} {method!r}"


def _calls(run: Run) -> Iterator[Recorded]:
    return (line for each in run.connections for line in each.agent_messages if "method" in line.message)


def _extension_requests(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        if connection.initialize is not None and not _has_meta(connection.offered):
            has_any = True
            words = "the client advertises no extension"
            found += [
                Finding(words=words, lines=(each.request,)) for each in connection.called if each.method.startswith("_")
            ]
    return found if has_any else "the client advertises extensions on each connection"


def _has_meta(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value.get("_meta")) or any(_has_meta(each) for each in value.values())
    return False


def _known_session(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        known = {
            each.opened for each in connection.asked_for(*OPENING) if each.result is not None or not each.is_answered
        }
        known |= {each.session for each in connection.asked_for("session/load", "session/resume")}
        known |= {u.child for u in connection.updates if u.kind == "subagent_update"}
        for exchange in connection.called:
            if "sessionId" in exchange.params:
                has_any = True
                if exchange.session not in known:
                    words = f"the client does not know the session {exchange.session!r}"
                    found.append(Finding(words=words, lines=(exchange.request,)))
    return found if has_any else "the agent sent no request about a session"


def _path(exchange: Exchange) -> str | None:
    path = exchange.params.get("path")
    return None if is_absolute(path) else f"the path is {path!r}"


def _first_line(exchange: Exchange) -> str | None:
    return "the line is 0; lines begin at 1" if exchange.params.get("line") == 0 else None


def _cwd(exchange: Exchange) -> str | None:
    cwd = exchange.params.get("cwd")
    return None if cwd is None or is_absolute(cwd) else f"the cwd is {cwd!r}"


def _created(connection: Connection) -> dict[str, Exchange]:
    return {
        str((each.result or {}).get("terminalId")): each
        for each in connection.called
        if each.method == "terminal/create" and each.result is not None
    }


def _used_terminals(connection: Connection) -> Iterable[Exchange]:
    names = ("terminal/output", "terminal/wait_for_exit", "terminal/kill", "terminal/release")
    return (each for each in connection.called if each.method in names)


def _known_terminals(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        created = _created(connection)
        for exchange in _used_terminals(connection):
            has_any = True
            terminal = str(exchange.params.get("terminalId"))
            if terminal not in created:
                words = f"the client has no terminal {terminal!r}"
                found.append(Finding(words=words, lines=(exchange.request,)))
    return found if has_any else _NO_TERMINAL


def _released(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        released = {
            str(each.params.get("terminalId")) for each in _used_terminals(connection) if "release" in each.method
        }
        for terminal, exchange in _created(connection).items():
            has_any = True
            is_over = any(turn.exchange.is_answered for turn in connection.turns if _is_after(turn.exchange, exchange))
            if terminal not in released and is_over:
                found.append(Finding(words=f"the terminal {terminal!r} was never released", lines=exchange.lines))
    return found if has_any else _NO_TERMINAL


def _is_after(turn: Exchange, exchange: Exchange) -> bool:
    return turn.session == exchange.session and turn.request.line < exchange.request.line


def _after_release(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        released: set[str] = set()
        for exchange in _used_terminals(connection):
            has_any = True
            terminal = str(exchange.params.get("terminalId"))
            if terminal in released:
                words = f"the terminal {terminal!r} was already released"
                found.append(Finding(words=words, lines=(exchange.request,)))
            if exchange.method == "terminal/release":
                released.add(terminal)
    return found if has_any else _NO_TERMINAL


def _scope(exchange: Exchange) -> str | None:
    scopes = [name for name in ("sessionId", "requestId") if exchange.params.get(name) is not None]
    return (
        None if len(scopes) == 1 else f"it names {' and '.join(scopes) or 'neither'}; expected sessionId or requestId"
    )


def _completed(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        known: dict[str, int] = {}
        for exchange in connection.called:
            if exchange.method == "elicitation/create" and exchange.params.get("mode") == "url":
                known.setdefault(str(exchange.params.get("elicitationId")), exchange.request.line)
        for line in connection.notified:
            if line.message.get("method") == "elicitation/complete":
                has_any = True
                params = line.message.get("params")
                elicitation = str(params.get("elicitationId")) if isinstance(params, dict) else ""
                if known.get(elicitation, 1 << 62) > line.line:
                    words = f"no elicitation in url mode has the id {elicitation!r}"
                    found.append(Finding(words=words, lines=(line,)))
    return found if has_any else "the agent sent no elicitation/complete"


def _shown(run: Run) -> Iterator[Shown]:
    return (Shown(line) for line in _calls(run))


def _ended(name: str, words: str) -> Check:
    def check(run: Run) -> Outcome:
        connection = run.named(name)
        if connection is None or connection.exit is None:
            return "a recording does not say how the agent ended"
        return [Finding(words=words, lines=tuple(connection.lines[-1:]))] if connection.exit.code is None else []

    return check


def _leftovers(run: Run) -> Outcome:
    exits = [connection for connection in run.connections if connection.exit is not None]
    return [
        Finding(words="processes that the agent had started were still running", lines=tuple(connection.lines[-1:]))
        for connection in exits
        if connection.exit is not None and connection.exit.leftovers
    ] or ([] if exits else "a recording does not say how the agent ended")


def _meta(line: Recorded) -> str | None:
    return "_meta is neither an object nor null" if _has_wrong_meta(line.message) else None


def _has_wrong_meta(value: Any) -> bool:
    if isinstance(value, dict):
        if "_meta" in value and not isinstance(value["_meta"], dict | None):
            return True
        return any(_has_wrong_meta(each) for name, each in value.items() if name not in ("rawInput", "rawOutput"))
    return isinstance(value, list) and any(map(_has_wrong_meta, value))


_GATES: tuple[tuple[str, str, str, str, Callable[[Recorded], bool]], ...] = (
    ("fs-read", "fs.readTextFile", "Files are read", "file-system#checking-support", _is_call("fs/read_text_file")),
    (
        "fs-write",
        "fs.writeTextFile",
        "Files are written",
        "file-system#checking-support",
        _is_call("fs/write_text_file"),
    ),
    (
        "terminal",
        "terminal",
        "Terminals are used",
        "terminals#checking-support",
        lambda line: str(line.message.get("method")).startswith("terminal/"),
    ),
    (
        "elicitation-form",
        "elicitation.form",
        "Forms are shown",
        "elicitation#checking-support",
        _is_elicitation("form"),
    ),
    (
        "elicitation-url",
        "elicitation.url",
        "URLs are shown",
        "elicitation#checking-support",
        _is_elicitation("url"),
    ),
    (
        "boolean-options",
        "session.configOptions.boolean",
        "Options of type boolean are listed",
        "session-config-options#boolean-config-options",
        _is_boolean_option,
    ),
    ("notices", "session.notices", "Notices are sent", "initialization#capabilities", _is_update("notice")),
    (
        "compaction",
        "session.compaction",
        "Updates of a compaction are sent",
        "initialization#capabilities",
        _is_update("compaction_update", "compaction_summary_chunk"),
    ),
    (
        "plans",
        "plan",
        "Plans with an id are sent",
        "initialization#capabilities",
        _is_update("plan_update", "plan_removed"),
    ),
    (
        "subagents",
        "subagents",
        "Subagents are shown",
        "initialization#capabilities",
        _is_update("subagent_update", "session_message", "session_message_chunk"),
    ),
)

RULES = (
    *(
        Rule(
            f"offered.{name}",
            MUST,
            f"{says} only if the client offers {capability}.",
            page(link),
            _not_offered(capability, is_use),
        )
        for name, capability, says, link, is_use in _GATES
    ),
    Rule(
        "offered.methods",
        MUST,
        "The agent calls no method that clients do not have.",
        page("transports#stdio"),
        every(_shown, lambda shown: _unknown_method(shown.line), "the agent sent no request and no notification"),
    ),
    Rule(
        "offered.extensions",
        SHOULD,
        "Requests that begin with _ are sent only to clients that advertise extensions.",
        page("extensibility#advertising-custom-capabilities"),
        _extension_requests,
    ),
    Rule(
        "client.known-session",
        SHOULD,
        "The agent's requests name a session that the client has opened.",
        page("session-setup#session-id"),
        _known_session,
    ),
    Rule(
        "fs.read-path",
        MUST,
        "The path of a file to read is absolute.",
        page("overview#argument-requirements"),
        every(lambda run: run.called("fs/read_text_file"), _path, _NO_READ),
    ),
    Rule(
        "fs.read-line",
        MUST,
        "The line to read from is at least 1.",
        page("overview#argument-requirements"),
        every(lambda run: run.called("fs/read_text_file"), _first_line, _NO_READ),
    ),
    Rule(
        "fs.write-path",
        MUST,
        "The path of a file to write is absolute.",
        page("overview#argument-requirements"),
        every(lambda run: run.called("fs/write_text_file"), _path, _NO_WRITE),
    ),
    Rule(
        "fs.refused",
        MUST,
        "A prompt is answered even if the client cannot read or write a file.",
        page("prompt-turn#4-check-for-completion"),
        every(
            lambda run: [
                turn
                for turn in run.turns("prompt-client-fails")
                if any(
                    each.session == turn.exchange.session
                    for each in run.called("fs/read_text_file", "fs/write_text_file")
                )
            ],
            lambda turn: None if turn.exchange.is_answered else describe(turn.exchange),
            _NO_READ,
        ),
    ),
    Rule(
        "terminal.cwd",
        MUST,
        "The working directory of a terminal is absolute.",
        page("terminals#executing-commands"),
        every(lambda run: run.called("terminal/create"), _cwd, _NO_TERMINAL),
    ),
    Rule(
        "terminal.known",
        SHOULD,
        "The agent uses only terminals that it created.",
        page("terminals#getting-output"),
        _known_terminals,
    ),
    Rule("terminal.released", MUST, "Each terminal is released.", page("terminals#executing-commands"), _released),
    Rule(
        "terminal.after-release",
        MUST,
        "A released terminal is not used again.",
        page("terminals#releasing-terminals"),
        _after_release,
    ),
    Rule(
        "elicitation.scope",
        MUST,
        "An elicitation names a session or a request.",
        page("elicitation#creating-an-elicitation"),
        every(lambda run: run.called("elicitation/create"), _scope, _NO_ELICITATION),
    ),
    Rule(
        "elicitation.complete",
        MUST,
        "elicitation/complete names an earlier elicitation in url mode.",
        page("elicitation#url-completion"),
        _completed,
    ),
    Rule(
        "extensibility.meta",
        MUST,
        "_meta is an object.",
        page("extensibility#the-_meta-field"),
        every(
            lambda run: (Shown(line) for each in run.connections for line in each.agent_messages),
            lambda shown: _meta(shown.line),
            "the agent sent no message",
        ),
    ),
    Rule(
        "extensibility.meta-accepted",
        MUST,
        "Requests are accepted whatever their _meta contains.",
        page("schema"),
        every(
            lambda run: run.exchanges("new-with-meta", "prompt-with-meta"),
            lambda exchange: None if exchange.result is not None else describe(exchange),
            "only a check that drives the agent sends this",
        ),
    ),
    Rule(
        "initialize.future-capabilities",
        SHOULD,
        "A client that offers capabilities which do not exist yet is accepted.",
        page("initialization#capabilities"),
        every(
            lambda run: run.exchanges("initialize-newer"),
            lambda exchange: None if exchange.result is not None else describe(exchange),
            "only a check that drives the agent sends this",
        ),
    ),
    Rule(
        "exit.idle",
        SHOULD,
        "The agent ends by itself when its stdin is closed.",
        page("transports#stdio"),
        _ended("main", "the agent did not end after its stdin was closed, and was killed"),
    ),
    Rule(
        "exit.busy",
        SHOULD,
        "The agent also ends when its stdin is closed during a prompt.",
        page("transports#stdio"),
        _ended("bare", "the agent did not end after its stdin was closed during a prompt, and was killed"),
    ),
    Rule(
        "exit.leftovers",
        SHOULD,
        "The agent leaves no processes behind.",
        page("transports#stdio"),
        _leftovers,
    ),
)
