"""Rules about sessions: new, load, resume, list, close, delete and fork."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from acp_check.rules.rule import (
    MUST,
    SHOULD,
    Check,
    Finding,
    Outcome,
    Rule,
    advertised,
    answered_by_error,
    answered_by_result,
    describe,
    every,
    is_absolute,
    page,
)
from acp_check.run import OPENING, Connection, Exchange, RecordedTurn, Run

_SETUP = "session-setup"
_NO_LOAD = "the agent does not advertise loadSession"
_NO_RESUME = "the agent does not advertise sessionCapabilities.resume"
_NO_LIST = "the agent does not advertise sessionCapabilities.list"
_NO_CLOSE = "the agent does not advertise sessionCapabilities.close"
_NO_DELETE = "the agent does not advertise sessionCapabilities.delete"
_NOT_FOUND = (-32002,)


def _opened(run: Run) -> list[Exchange]:
    """Return the requests that opened a session."""
    return [each for each in run.asked_for(*OPENING) if each.result is not None]


def _new(run: Run) -> list[Exchange]:
    return [each for each in run.asked_for("session/new", "session/fork") if each.result is not None]


def _session_id(exchange: Exchange) -> str | None:
    session = (exchange.result or {}).get("sessionId")
    return None if isinstance(session, str) and session else f"sessionId is {session!r}"


def _different(run: Run) -> Outcome:
    """Find sessions with the same id. Ids from different processes of an agent are compared only if that agent stores
    sessions."""
    seen: dict[tuple[int, str], Exchange] = {}
    found = []
    for number, connection in enumerate(run.connections):
        keeps = any(advertised(connection, f"sessionCapabilities.{each}") for each in ("list", "resume"))
        process = 0 if keeps or advertised(connection, "loadSession") else number + 1
        for exchange in connection.asked_for("session/new", "session/fork"):
            if exchange.result is not None and not exchange.params.get("_meta"):  # an extension may reopen a session
                session = exchange.opened
                before = seen.setdefault((process, session), exchange)
                if before is not exchange:
                    words = f"two sessions have the id {session!r}"
                    found.append(Finding(words=words, lines=(*before.lines, *exchange.lines)))
    return found if len(_new(run)) > 1 else "fewer than two sessions were created"


def _early(run: Run) -> Outcome:
    """Find updates for sessions that the client cannot know about yet."""
    found = []
    for connection in run.connections:
        known: dict[str, int] = {}
        for exchange in connection.asked:
            known.setdefault(exchange.session, exchange.request.line)  # the client itself named this session
            if exchange.method in OPENING and exchange.result is not None and exchange.response is not None:
                known.setdefault(exchange.opened, exchange.response.line)
        for update in connection.updates:
            if update.kind == "subagent_update":
                known[update.child] = min(known.get(update.child, update.line.line), update.line.line)
            if update.line.line < known.get(update.session, update.line.line + 1):
                found.append(Finding(words="the client does not know this session yet", lines=update.lines))
    return found if any(connection.updates for connection in run.connections) else "the agent sent no update"


def _mcp_connected(run: Run) -> Outcome:
    if run.servers_started is None:
        return "only a check that drives the agent has an MCP server of its own"
    if run.servers_started:
        return []
    opened = [each for each in run.exchanges("new-with-server") if each.result is not None]
    if not opened:
        return "no session with an MCP server was created"
    return [Finding(words="the agent did not start this MCP server", lines=opened[0].lines)]


def _mcp_environment(run: Run) -> Outcome:
    if not run.servers_started:
        return "the agent did not start the MCP server of the check"
    return [
        Finding(words=f"the MCP server was started with {started}")
        for started in run.servers_started
        if started != {"arguments": ["one", "two words"], "variable": "ACP check ☕"}
    ]


def _shown(run: Run) -> list[RecordedTurn]:
    """Return the finished prompts of sessions that are loaded somewhere in the run."""
    loaded = {turn.exchange.session for turn in run.loads()}
    purposes = ("prompt-say", "prompt-tool")
    return [turn for turn in run.turns(*purposes) if turn.exchange.session in loaded and turn.stop_reason == "end_turn"]


def _replay_of(run: Run, turn: RecordedTurn) -> RecordedTurn | None:
    """Return the replay of a turn's session, with what came after the response: that is late, but not missing."""
    load = next((load for load in run.loads() if load.exchange.session == turn.exchange.session), None)
    return load and RecordedTurn(exchange=load.exchange, updates=[*load.updates, *load.late])


def _replayed(problem: Callable[[RecordedTurn, RecordedTurn], str | None]) -> Check:
    """Return a check that compares turns with the later replays of their sessions."""

    def check(run: Run) -> Outcome:
        found, has_any = [], False
        for turn in _shown(run):
            replay = _replay_of(run, turn)
            if replay is not None and turn.exchange.request.line < replay.exchange.request.line:
                has_any = True
                words = problem(turn, replay)
                if words:
                    found.append(Finding(words=words, lines=(turn.exchange.request, *replay.lines)))
        return found if has_any else f"no session with a prompt was loaded ({_NO_LOAD}, or this is a recording)"

    return check


def _prompt_text(turn: RecordedTurn) -> str:
    blocks = turn.exchange.params.get("prompt")
    texts = [block.get("text") for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    return next((text for text in texts if isinstance(text, str)), "")


def _user_text(turn: RecordedTurn, replay: RecordedTurn) -> str | None:
    return None if _prompt_text(turn) in replay.text("user_message_chunk") else "the replay lacks the user's message"


def _agent_text(turn: RecordedTurn, replay: RecordedTurn) -> str | None:
    is_shown = turn.text().strip() in replay.text()  # some agents store texts without the last newline
    return None if is_shown else f"the replay lacks the agent's text {turn.text()[:80]!r}"


def _calls(turn: RecordedTurn, replay: RecordedTurn) -> str | None:
    missing = [call for call in turn.statuses() if call not in replay.statuses()]
    return f"the replay lacks the tool calls {missing}" if missing else None


def _order(turn: RecordedTurn, replay: RecordedTurn) -> str | None:
    text = turn.text().strip()
    if not text:
        return None
    is_repeated = replay.text().count(text) > 1  # two prompts got the same answer: which of them was it?
    user = agent = ""
    for update in replay.updates:
        if update.kind == "user_message_chunk":
            user += update.text
        elif update.kind == "agent_message_chunk":
            agent += update.text
            if text in agent and not (user if is_repeated else _prompt_text(turn) in user):
                return "the agent's text is replayed before the user's message"
    return None


def _loaded_session(run: Run) -> Outcome:
    loads = run.loads()
    found = []
    for connection in run.connections:
        for turn in connection.turns:
            if turn.exchange.method == "session/load" and turn.exchange.response is not None:
                children = {update.child for update in turn.updates if update.kind == "subagent_update"}
                known = {turn.exchange.session, *children, *_used_before(connection, turn)}
                found += [
                    Finding(words="the replay has an update of another session", lines=(*turn.lines, update.line))
                    for update in connection.updates
                    if turn.exchange.request.line < update.line.line < turn.exchange.response.line
                    and update.session not in known
                ]
    return found if loads else _NO_LOAD


def _used_before(connection: Connection, turn: RecordedTurn) -> set[Any]:
    before = (each for each in connection.asked if each.request.line < turn.exchange.request.line)
    return {each.session for each in before} | {each.opened for each in connection.asked}


def _open_after_replay(run: Run) -> Outcome:
    return [
        Finding(words=f"these replayed tool calls have not ended: {unfinished}", lines=turn.lines)
        for turn in run.loads()
        if (
            unfinished := [
                call for call, seen in turn.statuses().items() if seen[-1:] not in (["completed"], ["failed"])
            ]
        )
        and turn.exchange.request.purpose
    ] or ([] if run.loads() else _NO_LOAD)


def _no_replay(run: Run) -> Outcome:
    resumed = [
        each for each in run.asked_for("session/resume") if each.result is not None and each.response is not None
    ]
    found = []
    for connection in run.connections:
        for exchange in connection.asked_for("session/resume"):
            if exchange.response is not None:
                running = any(
                    turn.exchange.session == exchange.session
                    and turn.exchange.request.line < exchange.response.line
                    and (turn.exchange.response is None or turn.exchange.response.line > exchange.request.line)
                    for turn in connection.turns
                )
                found += [
                    Finding(words="session/resume replayed this update", lines=(*exchange.lines, update.line))
                    for update in connection.updates
                    if exchange.request.line < update.line.line < exchange.response.line
                    and update.session == exchange.session
                    and update.kind.endswith(("_message_chunk", "_thought_chunk"))
                    and not running
                ]
    return found if resumed else _NO_RESUME


def _lists(run: Run) -> list[Exchange]:
    return [each for each in run.asked_for("session/list") if each.result is not None]


def _rows(exchange: Exchange) -> list[dict[str, Any]]:
    rows = (exchange.result or {}).get("sessions")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _row_check(problem: Callable[[Exchange, dict[str, Any]], str | None]) -> Callable[[Exchange], str | None]:
    def check(exchange: Exchange) -> str | None:
        return next((words for row in _rows(exchange) if (words := problem(exchange, row))), None)

    return check


def _row_cwd(_: Exchange, row: dict[str, Any]) -> str | None:
    cwd = row.get("cwd")
    return None if isinstance(cwd, str) and is_absolute(cwd) else f"the session's cwd is {cwd!r}"


def _row_filter(exchange: Exchange, row: dict[str, Any]) -> str | None:
    cwd = exchange.params.get("cwd")
    return f"asked for sessions of {cwd!r}, got one of {row.get('cwd')!r}" if cwd and row.get("cwd") != cwd else None


def _row_time(_: Exchange, row: dict[str, Any]) -> str | None:
    return _time_problem(row.get("updatedAt"))


def _time_problem(value: Any) -> str | None:
    """Return the problem with an ISO 8601 time, or None if the time is valid or missing."""
    if value is None:
        return None
    try:
        datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        return f"updatedAt is {value!r}, not an ISO 8601 time"
    return None


def _listed_twice(exchange: Exchange) -> str | None:
    ids = [row.get("sessionId") for row in _rows(exchange)]
    return f"a session is listed twice: {ids}" if len({str(each) for each in ids}) < len(ids) else None


def _is_listed(run: Run) -> Outcome:
    lists = [each for each in run.exchanges("list-cwd") if each.result is not None]
    prompted = [turn for turn in run.turns("prompt-say") if turn.stop_reason == "end_turn"]
    if not lists or not prompted:
        return _NO_LIST
    return [
        Finding(words=f"the session {turn.exchange.session!r} had a prompt and is not listed", lines=exchange.lines)
        for exchange in lists
        for turn in prompted
        if turn.exchange.request.line < exchange.request.line
        and turn.exchange.session not in [row.get("sessionId") for row in _rows(exchange)]
        and not (exchange.result or {}).get("nextCursor")
    ]


def _list_is_empty(exchange: Exchange) -> str | None:
    if exchange.result is None:
        return None
    sessions = (exchange.result or {}).get("sessions")
    return None if sessions == [] else f"no session can match, but sessions is {str(sessions)[:200]}"


def _deleted(run: Run) -> Outcome:
    gone = {each.session for each in run.exchanges("delete") if each.result is not None}
    lists = [each for each in run.exchanges("list-after-delete") if each.result is not None]
    if not gone or not lists:
        return f"{_NO_DELETE} or sessionCapabilities.list"
    return [
        Finding(words="a deleted session is still listed", lines=exchange.lines)
        for exchange in lists
        if gone & {str(row.get("sessionId")) for row in _rows(exchange)}
    ]


def _forked(exchange: Exchange) -> str | None:
    if exchange.result is None:
        return describe(exchange)
    is_new = exchange.opened != exchange.session
    return None if is_new else "the fork has the id of the session that it was made from"


def _unadvertised(run: Run) -> Outcome:
    asked = run.exchanges("unadvertised")
    return [
        Finding(words=f"the agent does not advertise {each.method}, but serves it", lines=each.lines)
        for each in asked
        if each.result is not None
    ] or ([] if asked else "the agent advertises every optional method")


def _is_used(problem: str, *purposes: str) -> Check:
    """Return a check for the prompts with one of these purposes: each must have been answered with a result."""
    return answered_by_result(problem, "no session was opened this way", *purposes)


RULES = (
    Rule(
        "session.new",
        MUST,
        "session/new is answered with a session.",
        page(f"{_SETUP}#creating-a-session"),
        answered_by_result("expected a result", "only a check that drives the agent asks for this", "new"),
    ),
    Rule(
        "session.id",
        MUST,
        "A new session has an id: a string that is not empty.",
        page(f"{_SETUP}#session-id"),
        every(_new, _session_id, "no session was created"),
    ),
    Rule("session.unique-ids", MUST, "Two sessions have different ids.", page(f"{_SETUP}#session-id"), _different),
    Rule(
        "session.known-first",
        SHOULD,
        "Updates of a session come after the response that names it.",
        page("slash-commands#advertising-commands"),
        _early,
    ),
    Rule(
        "session.mcp-stdio",
        MUST,
        "A session with an MCP server that speaks stdio is created.",
        page(f"{_SETUP}#stdio-transport"),
        answered_by_result("expected a result", "only a check that drives the agent asks for this", "new-with-server"),
    ),
    Rule(
        "session.mcp-connected",
        SHOULD,
        "The agent connects to the MCP servers that the client names.",
        page(f"{_SETUP}#checking-transport-support"),
        _mcp_connected,
    ),
    Rule(
        "session.mcp-environment",
        MUST,
        "An MCP server gets its arguments and environment unchanged.",
        page(f"{_SETUP}#stdio-transport"),
        _mcp_environment,
    ),
    Rule(
        "session.additional-directories",
        MUST,
        "An agent that advertises additionalDirectories accepts them.",
        page(f"{_SETUP}#additional-workspace-roots"),
        answered_by_result(
            "expected a result", "the agent does not advertise additionalDirectories", "new-with-directories"
        ),
    ),
    Rule(
        "session.unknown-prompt",
        SHOULD,
        "A prompt to an unknown session fails.",
        page(f"{_SETUP}#session-id"),
        answered_by_error("expected an error", "only a check that drives the agent asks for this", "unknown-session"),
    ),
    Rule(
        "session.unknown-code",
        SHOULD,
        "The error for an unknown session is -32002, resource not found.",
        page("schema#errorcode"),
        answered_by_error(
            "expected the error -32002",
            "only a check that drives the agent asks for this",
            "unknown-session",
            "load-unknown",
            "resume-unknown",
            codes=_NOT_FOUND,
            if_refused=True,
        ),
    ),
    Rule(
        "session.unadvertised",
        SHOULD,
        "A method that the agent does not advertise is not served.",
        page("session-list#checking-support"),
        _unadvertised,
    ),
    Rule(
        "load.works",
        MUST,
        "An agent that advertises loadSession loads a session of an earlier process.",
        page(f"{_SETUP}#loading-a-session"),
        answered_by_result("expected a result", _NO_LOAD, "load"),
    ),
    Rule(
        "load.user-messages",
        MUST,
        "A load replays the user's messages.",
        page(f"{_SETUP}#loading-a-session"),
        _replayed(_user_text),
    ),
    Rule(
        "load.agent-messages",
        MUST,
        "A load replays the agent's messages with the text that was shown.",
        page(f"{_SETUP}#loading-a-session"),
        _replayed(_agent_text),
    ),
    Rule(
        "load.tool-calls",
        MUST,
        "A load replays the tool calls.",
        page(f"{_SETUP}#loading-a-session"),
        _replayed(_calls),
    ),
    Rule(
        "load.order",
        SHOULD,
        "A load replays the conversation in its original order.",
        page(f"{_SETUP}#loading-a-session"),
        _replayed(_order),
    ),
    Rule(
        "load.replay-first",
        MUST,
        "A load is answered after the replay.",
        page(f"{_SETUP}#loading-a-session"),
        every(
            Run.loads,
            lambda turn: "the replay continues after the response" if turn.late else None,
            _NO_LOAD,
        ),
    ),
    Rule(
        "load.own-session",
        MUST,
        "A load replays only its own session.",
        page(f"{_SETUP}#loading-a-session"),
        _loaded_session,
    ),
    Rule(
        "load.ended-calls",
        SHOULD,
        "A load shows no tool call as running.",
        page("tool-calls#status"),
        _open_after_replay,
    ),
    Rule(
        "load.unknown",
        SHOULD,
        "A load of an unknown session fails.",
        page(f"{_SETUP}#loading-sessions"),
        answered_by_error("expected an error", _NO_LOAD, "load-unknown"),
    ),
    Rule(
        "load.continues",
        SHOULD,
        "A loaded session accepts prompts.",
        page(f"{_SETUP}#loading-sessions"),
        _is_used("the prompt after a load failed", "prompt-after-load"),
    ),
    Rule(
        "resume.works",
        MUST,
        "An agent that advertises resume resumes a session of an earlier process.",
        page(f"{_SETUP}#resuming-a-session"),
        answered_by_result("expected a result", _NO_RESUME, "resume"),
    ),
    Rule(
        "resume.no-replay",
        MUST,
        "A resume replays nothing.",
        page(f"{_SETUP}#resuming-a-session"),
        _no_replay,
    ),
    Rule(
        "resume.unknown",
        SHOULD,
        "A resume of an unknown session fails.",
        page(f"{_SETUP}#resuming-sessions"),
        answered_by_error("expected an error", _NO_RESUME, "resume-unknown"),
    ),
    Rule(
        "resume.continues",
        SHOULD,
        "A resumed session accepts prompts.",
        page(f"{_SETUP}#resuming-sessions"),
        _is_used("the prompt after a resume failed", "prompt-after-resume"),
    ),
    Rule(
        "list.works",
        MUST,
        "An agent that advertises list answers session/list.",
        page("session-list#listing-sessions"),
        answered_by_result("expected a result", _NO_LIST, "list", "list-cwd"),
    ),
    Rule("list.contains", SHOULD, "A session that had a prompt is listed.", page("session-list"), _is_listed),
    Rule(
        "list.cwd-filter",
        MUST,
        "A list for a directory contains only sessions of that directory.",
        page("session-list#listing-sessions"),
        every(
            lambda run: [each for each in _lists(run) if each.params.get("cwd")],
            _row_check(_row_filter),
            "the client asked for no list of a directory",
        ),
    ),
    Rule(
        "list.absolute-cwd",
        MUST,
        "The cwd of a listed session is absolute.",
        page("session-list#listing-sessions"),
        every(_lists, _row_check(_row_cwd), _NO_LIST),
    ),
    Rule(
        "list.empty",
        MUST,
        "A list without matches is an empty array.",
        page("session-list#listing-sessions"),
        every(lambda run: run.exchanges("list-empty"), _list_is_empty, _NO_LIST),
    ),
    Rule(
        "list.once",
        SHOULD,
        "A session is listed only once.",
        page("session-list#listing-sessions"),
        every(_lists, _listed_twice, _NO_LIST),
    ),
    Rule(
        "list.times",
        MUST,
        "updatedAt is an ISO 8601 time.",
        page("session-list#listing-sessions"),
        every(_lists, _row_check(_row_time), _NO_LIST),
    ),
    Rule(
        "list.bad-cursor",
        SHOULD,
        "A cursor that the agent did not issue is an error.",
        page("session-list#pagination"),
        answered_by_error("expected an error", _NO_LIST, "list-bad-cursor"),
    ),
    Rule(
        "info.times",
        MUST,
        "The updatedAt of a session_info_update is an ISO 8601 time.",
        page("session-list#updating-session-metadata"),
        every(
            lambda run: run.updates("session_info_update"),
            lambda update: _time_problem(update.body.get("updatedAt")),
            "the agent sent no session_info_update",
        ),
    ),
    Rule(
        "close.works",
        MUST,
        "An agent that advertises close closes a session.",
        page(f"{_SETUP}#closing-a-session"),
        answered_by_result("expected a result", _NO_CLOSE, "close"),
    ),
    Rule(
        "close.cancels",
        MUST,
        "Closing a session cancels its prompt.",
        page(f"{_SETUP}#closing-a-session"),
        every(
            lambda run: [turn for turn in run.turns("prompt-close") if _was_running(run, turn)],
            lambda turn: None if turn.stop_reason == "cancelled" else f"the stop reason is {turn.stop_reason!r}",
            f"{_NO_CLOSE}, or no prompt ran long enough",
        ),
    ),
    Rule(
        "delete.works",
        MUST,
        "An agent that advertises delete deletes a session.",
        page("session-delete#deleting-a-session"),
        answered_by_result("expected a result", _NO_DELETE, "delete"),
    ),
    Rule("delete.unlisted", MUST, "A deleted session is not listed.", page("session-delete#semantics"), _deleted),
    Rule(
        "delete.twice",
        SHOULD,
        "Deleting a deleted session succeeds.",
        page("session-delete#semantics"),
        answered_by_result("expected a result", _NO_DELETE, "delete-again"),
    ),
    Rule(
        "delete.unknown",
        SHOULD,
        "Deleting an unknown session succeeds.",
        page("session-delete#semantics"),
        answered_by_result("expected a result", _NO_DELETE, "delete-unknown"),
    ),
    Rule(
        "fork.new-id",
        SHOULD,
        "A fork is a session with an id of its own.",
        page("draft/schema#session%2Ffork"),
        every(lambda run: run.exchanges("fork"), _forked, "the agent does not advertise sessionCapabilities.fork"),
    ),
)


def _was_running(run: Run, turn: RecordedTurn) -> bool:
    """Return whether the turn was still running when the session was closed. Only an answer of the check's endpoint is
    known not to end by itself."""
    may_end = run.endpoint is not None and not run.endpoint.requests
    if may_end and turn.stop_reason == "end_turn":
        return False
    response = turn.exchange.response
    closes = [each for each in run.exchanges("close") if each.session == turn.exchange.session]
    return any(response is None or response.line > close.request.line for close in closes)
