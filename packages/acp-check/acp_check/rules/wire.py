"""Rules about lines and JSON-RPC."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from acp_check.recording import Recorded
from acp_check.rules.rule import (
    JSON,
    JSON_RPC,
    MUST,
    SHOULD,
    Check,
    Finding,
    Outcome,
    Rule,
    answered,
    answered_by_error,
    describe,
    every,
    every_line,
    page,
)
from acp_check.run import Exchange, Run

_STDIO = page("transports#stdio")
_ERRORS = page("overview#error-handling")
_CODES = page("schema#errorcode")
_ONLY_LIVE = "only a check that drives the agent sends this"
_NO_BYTES = "a recording has messages, not bytes"
_RESERVED = range(-32768, -31999)
_KNOWN_CODES = {-32700, -32600, -32601, -32602, -32603, *range(-32099, -31999)}
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _raw(run: Run) -> Iterable[Recorded]:
    return (line for connection in run.connections for line in connection.agent_lines if line.raw is not None)


def _lines(run: Run) -> Iterable[Recorded]:
    return (line for connection in run.connections for line in connection.agent_lines)


def _messages(run: Run) -> Iterable[Recorded]:
    return (line for connection in run.connections for line in connection.agent_messages)


def _bytes(problem: Callable[[bytes], str | None]) -> Check:
    return every_line(_raw, lambda line: problem(line.raw or b""), _NO_BYTES)


def _utf8(raw: bytes) -> str | None:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    return None


def _is_json(line: Recorded) -> str | None:
    if line.text is None or _is_other_problem(line) or _numbers(line):
        return None
    return "this line is not JSON"


def _is_other_problem(line: Recorded) -> bool:
    """Return whether another rule reports this line."""
    return line.raw is not None and (not line.raw.strip() or bool(_utf8(line.raw) or _bom(line.raw)))


def _bom(raw: bytes) -> str | None:
    return "the line begins with a byte order mark" if raw.startswith(b"\xef\xbb\xbf") else None


def _numbers(line: Recorded) -> str | None:
    """Find NaN and Infinity, which JSON does not have. Python's parser accepts them, but the check reads such lines as
    text."""
    if line.text is None or _is_other_problem(line):
        return None
    try:
        json.loads(line.text)
    except (ValueError, RecursionError):
        return None
    return "NaN and Infinity are not JSON"


def _is_object(line: Recorded) -> str | None:
    return None if line.text is not None or isinstance(line.message, dict) else "this line is not a JSON object"


def _repeated_names(raw: bytes) -> str | None:
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        repeated.extend(name for name in set(names) if names.count(name) > 1)
        return dict(items)

    try:
        json.loads(raw, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return None
    return f"an object has two members named {repeated[0]!r}" if repeated else None


def _surrogates(line: Recorded) -> str | None:
    if line.raw is None or b"\\ud" not in line.raw.lower() or line.message is None:
        return None
    return "half of a surrogate pair" if _SURROGATE.search(json.dumps(line.message, ensure_ascii=False)) else None


def _last_line(run: Run) -> Outcome:
    if not run.is_live:
        return _NO_BYTES
    return [
        Finding(words=f"the output ends without a newline: {connection.unfinished_line[:80]!r}")
        for connection in run.connections
        if connection.unfinished_line.strip()
    ]


def _survives(*purposes: str) -> Check:
    """Return a check for the lines with one of these purposes: after each line, the agent must still answer the next
    request."""

    def check(run: Run) -> Outcome:
        reactions = [each for at in run.connections for purpose in purposes for each in at.reactions(purpose)]
        if not reactions:
            return _ONLY_LIVE
        return [
            Finding(words=f"after this, {describe(barrier)}", lines=(line, *barrier.lines))
            for line, _, barrier in reactions
            if not barrier.is_answered
        ]

    return check


def _refused(code: int, *purposes: str) -> Check:
    """Return a check for the lines with one of these purposes: the agent must answer each line with exactly one error,
    and the error must have this code."""

    def check(run: Run) -> Outcome:
        reactions = [each for at in run.connections for purpose in purposes for each in at.reactions(purpose)]
        if not reactions:
            return _ONLY_LIVE
        found = []
        for line, wrote, barrier in reactions:
            if not wrote and not barrier.is_answered:
                continue  # whether the agent survives is another rule
            codes = [_error_code(each) for each in wrote if _error_code(each) is not None]
            if codes != [code]:
                words = f"expected one error {code}, got {codes or 'no error'}"
                found.append(Finding(words=words, lines=(line, *(each for each in wrote if _error_code(each)))))
        return found

    return check


def _error_code(line: Recorded) -> Any:
    match line.message:
        case {"error": {"code": code}}:
            return code
    return None


def _null_id(run: Run) -> Outcome:
    found, has_any = [], False
    for connection in run.connections:
        for _, wrote, _ in connection.reactions("broken-json"):
            for line in wrote:
                if _error_code(line) is not None:
                    has_any = True
                    if line.message.get("id", 0) is not None or _error_code(line) != -32700:
                        words = "the answer to a line that is not JSON must have the id null and the code -32700"
                        found.append(Finding(words=words, lines=(line,)))
    return found if has_any else "the agent did not answer a line that is not JSON"


def _silent(*purposes: str) -> Check:
    """Return a check for the notifications with one of these purposes: the agent must not answer them."""

    def check(run: Run) -> Outcome:
        reactions = [each for at in run.connections for purpose in purposes for each in at.reactions(purpose)]
        if not reactions:
            return _ONLY_LIVE
        return [
            Finding(words="a notification was answered", lines=(line, answer))
            for line, wrote, _ in reactions
            for answer in wrote
            if isinstance(answer.message, dict) and "method" not in answer.message and answer.message.get("id") is None
        ]

    return check


def _strays(kind: str, words: str) -> Check:
    def check(run: Run) -> Outcome:
        found = [
            Finding(words=words, lines=(line,))
            for connection in run.connections
            for line, what in connection.strays
            if what == kind
        ]
        return found or ([] if any(each.is_answered for at in run.connections for each in at.asked) else "no responses")

    return check


def _id_problem(line: Recorded) -> str | None:
    number = line.message["id"]
    is_allowed = isinstance(number, int | str) and not isinstance(number, bool)
    return None if is_allowed else f"the id is {number!r}"


def _unanswered(run: Run) -> Iterable[Exchange]:
    """Yield the requests that an agent has to answer. Requests after a broken line are left out, because the rules
    about broken lines check them."""
    return (
        each
        for connection in run.connections
        for each in connection.asked
        if connection.is_live and (each.request.purpose or not connection.name.startswith("broken"))
    )


def _code_problem(exchange: Exchange) -> str | None:
    code = exchange.code
    is_fine = code not in _RESERVED or code in _KNOWN_CODES
    return None if is_fine else f"{code} is reserved by JSON-RPC, but has no defined meaning"


def _failed(run: Run) -> Iterable[Exchange]:
    return (each for connection in run.connections for each in connection.asked if each.error is not None)


def _error_message(exchange: Exchange) -> str | None:
    message = (exchange.error or {}).get("message")
    return None if isinstance(message, str) and message.strip() else f"the error's message is {message!r}"


def _has_method(line: Recorded) -> str | None:
    method = line.message.get("method")
    return None if isinstance(method, str) else f"the method is {method!r}"


def _one_of(line: Recorded) -> str | None:
    message = line.message
    if "id" not in message:
        return "this message has neither method nor id"
    return None if ("result" in message) != ("error" in message) else "a response must have either result or error"


def _with(*, method: bool, number: bool = False) -> Callable[[Run], Iterable[Recorded]]:
    def lines(run: Run) -> Iterable[Recorded]:
        return (
            line
            for line in _messages(run)
            if ("method" in line.message) == method and ("id" in line.message or not number)
        )

    return lines


def _reused(run: Run) -> Outcome:
    if not any(connection.called for connection in run.connections):
        return "the agent sent no request"
    return [
        Finding(words="the id belongs to a request that is still open", lines=(line,))
        for connection in run.connections
        for line in connection.reused_ids
    ]


def _while_prompt(run: Run) -> Outcome:
    """Find requests that the agent did not answer while a prompt was running. Only prompts that ran until they were
    cancelled count."""
    found, has_any = [], False
    for connection in run.connections:
        for exchange in connection.asked:
            running = [
                turn
                for turn in connection.turns
                if exchange.request.purpose == "while-prompt"
                and turn.cancels
                and turn.exchange.request.line < exchange.request.line < turn.cancels[0].line
            ]
            has_any = has_any or bool(running)
            if any(exchange.response is None or turn.cancels[0].line < exchange.response.line for turn in running):
                words = "this request was not answered while a prompt was running"
                found.append(Finding(words=words, lines=exchange.lines))
    return found if has_any else "no prompt ran long enough"


RULES = (
    Rule("framing.utf8", MUST, "Each line on stdout is UTF-8.", page("transports"), _bytes(_utf8)),
    Rule(
        "framing.json",
        MUST,
        "The agent writes only JSON to stdout, one message per line.",
        _STDIO,
        every_line(_lines, _is_json, "the agent wrote nothing"),
    ),
    Rule(
        "framing.object",
        MUST,
        "Each message is a single JSON object.",
        _STDIO,
        every_line(_lines, _is_object, "the agent wrote nothing"),
    ),
    Rule(
        "framing.numbers",
        MUST,
        "Numbers are JSON numbers, never NaN or Infinity.",
        f"{JSON}#section-6",
        every_line(_lines, _numbers, "the agent wrote nothing"),
    ),
    Rule("framing.last-newline", MUST, "The last message also ends with a newline.", _STDIO, _last_line),
    Rule(
        "framing.no-blank-lines",
        MUST,
        "There are no blank lines on stdout.",
        _STDIO,
        _bytes(lambda raw: None if raw.strip() else "a blank line"),
    ),
    Rule(
        "framing.no-byte-order-mark",
        MUST,
        "No line begins with a byte order mark.",
        f"{JSON}#section-8.1",
        _bytes(_bom),
    ),
    Rule(
        "framing.no-carriage-return",
        SHOULD,
        "Lines end with a newline only, without a carriage return.",
        _STDIO,
        _bytes(lambda raw: "the line ends with a carriage return" if raw.rstrip(b"\n").endswith(b"\r") else None),
    ),
    Rule(
        "framing.unique-names",
        SHOULD,
        "No object has two members with the same name.",
        f"{JSON}#section-4",
        _bytes(_repeated_names),
    ),
    Rule(
        "framing.no-surrogates",
        SHOULD,
        "Strings contain no half of a surrogate pair.",
        f"{JSON}#section-8.2",
        every_line(_raw, _surrogates, _NO_BYTES),
    ),
    Rule(
        "framing.reads-blank-line",
        SHOULD,
        "A blank line on stdin does not end the connection.",
        _STDIO,
        _survives("blank-line"),
    ),
    Rule(
        "framing.reads-pieces",
        MUST,
        "A message that arrives in several pieces is read as one.",
        _STDIO,
        answered("a message in two pieces was not answered", _ONLY_LIVE, "in-pieces"),
    ),
    Rule(
        "framing.reads-several",
        MUST,
        "If several messages arrive at once, all of them are read.",
        _STDIO,
        answered("one of three messages in a single write was not answered", _ONLY_LIVE, "at-once"),
    ),
    Rule(
        "framing.reads-any-json",
        MUST,
        "Spaces, the order of members and escapes make no difference.",
        f"{JSON}#section-9",
        answered("a message with unusual spaces and escapes was not answered", _ONLY_LIVE, "spaced"),
    ),
    Rule(
        "framing.reads-long-lines",
        MUST,
        "A message of one megabyte is read.",
        _STDIO,
        answered("a message of one megabyte was not answered", _ONLY_LIVE, "long-line"),
    ),
    Rule(
        "framing.survives-bad-bytes",
        SHOULD,
        "A line that is not UTF-8 does not end the connection.",
        f"{JSON_RPC}#error_object",
        _survives("bad-bytes"),
    ),
    Rule(
        "jsonrpc.version",
        MUST,
        'Each message has the member jsonrpc with the value "2.0".',
        f"{JSON_RPC}#request_object",
        every_line(
            _messages,
            lambda line: (
                None if line.message.get("jsonrpc") == "2.0" else f"jsonrpc is {line.message.get('jsonrpc')!r}"
            ),
            "the agent sent no message",
        ),
    ),
    Rule(
        "jsonrpc.members",
        MUST,
        "A message has only the members of JSON-RPC.",
        page("extensibility#the-_meta-field"),
        every_line(
            _messages,
            lambda line: (
                f"JSON-RPC does not have the members {unknown}"
                if (unknown := sorted(line.message.keys() - {"jsonrpc", "id", "method", "params", "result", "error"}))
                else None
            ),
            "the agent sent no message",
        ),
    ),
    Rule(
        "jsonrpc.method",
        MUST,
        "The method of a request or notification is a string.",
        f"{JSON_RPC}#request_object",
        every_line(_with(method=True), _has_method, "the agent sent no request and no notification"),
    ),
    Rule(
        "jsonrpc.params",
        MUST,
        "The params of a request or notification are an object.",
        f"{JSON_RPC}#parameter_structures",
        every_line(
            _with(method=True),
            lambda line: None if isinstance(line.message.get("params", {}), dict) else "params is not an object",
            "the agent sent no request and no notification",
        ),
    ),
    Rule(
        "jsonrpc.request-id",
        MUST,
        "The id of the agent's requests is a whole number or a string.",
        f"{JSON_RPC}#request_object",
        every_line(_with(method=True, number=True), _id_problem, "the agent sent no request"),
    ),
    Rule(
        "jsonrpc.request-id-unique",
        SHOULD,
        "The agent's open requests have different ids.",
        f"{JSON_RPC}#request_object",
        _reused,
    ),
    Rule(
        "jsonrpc.result-or-error",
        MUST,
        "A response has an id, and either a result or an error.",
        f"{JSON_RPC}#response_object",
        every_line(_with(method=False), _one_of, "the agent sent no response"),
    ),
    Rule(
        "jsonrpc.known-request",
        MUST,
        "A response belongs to a request of the client.",
        f"{JSON_RPC}#response_object",
        _strays("unknown", "the client sent no request with this id"),
    ),
    Rule(
        "jsonrpc.one-response",
        MUST,
        "A request is answered only once.",
        f"{JSON_RPC}#response_object",
        _strays("twice", "this request was already answered"),
    ),
    Rule(
        "jsonrpc.id-type",
        MUST,
        "The id of a response has the type of the request's id.",
        f"{JSON_RPC}#response_object",
        _strays("type", "an open request of the client has this id, but of another type"),
    ),
    Rule(
        "jsonrpc.answered",
        MUST,
        "Each request is answered.",
        f"{JSON_RPC}#response_object",
        every(
            _unanswered,
            lambda exchange: f"{exchange.method} was not answered in time" if exchange.gave_up else None,
            "a recording does not say how long the client would have waited",
        ),
    ),
    *(
        Rule(
            f"jsonrpc.{purpose}",
            MUST,
            says,
            f"{JSON_RPC}#response_object",
            answered(f"a request with {what} was not answered", _ONLY_LIVE, purpose),
        )
        for purpose, what, says in (
            ("id-zero", "the id 0", "A request with the id 0 is answered."),
            ("id-large", "the id 9007199254740991", "A request with a large id is answered with the same number."),
            ("id-string", "a string as id", "A request with a string as id is answered with the same string."),
            ("id-number-string", 'the id "7"', 'A request with the id "7" is answered with "7", not with 7.'),
            ("id-unicode", "an id in several scripts", "An id in any script is returned unchanged."),
        )
    ),
    Rule(
        "jsonrpc.error-message",
        MUST,
        "An error has a message.",
        _ERRORS,
        every(_failed, _error_message, "the agent sent no error"),
    ),
    Rule(
        "jsonrpc.error-code",
        SHOULD,
        "An error does not use a code that JSON-RPC reserves but does not define.",
        f"{JSON_RPC}#error_object",
        every(_failed, _code_problem, "the agent sent no error"),
    ),
    Rule(
        "jsonrpc.unknown-method",
        SHOULD,
        "An unknown method is answered with -32601.",
        f"{JSON_RPC}#error_object",
        answered_by_error("expected the error -32601", _ONLY_LIVE, "unknown-method", codes=(-32601,)),
    ),
    Rule(
        "jsonrpc.unknown-extension",
        SHOULD,
        "An unknown method that begins with _ is answered with -32601.",
        page("extensibility#custom-requests"),
        answered_by_error("expected the error -32601", _ONLY_LIVE, "unknown-extension", codes=(-32601,)),
    ),
    Rule(
        "jsonrpc.unknown-notification",
        SHOULD,
        "An unknown notification is ignored.",
        page("extensibility#custom-notifications"),
        _survives("unknown-notification"),
    ),
    Rule(
        "jsonrpc.notification-unanswered",
        MUST,
        "A notification is never answered.",
        _ERRORS,
        _silent("unknown-notification", "cancel-unknown", "cancel-idle"),
    ),
    Rule(
        "jsonrpc.unknown-response",
        SHOULD,
        "A response that belongs to no request does not end the connection.",
        f"{JSON_RPC}#response_object",
        _survives("unknown-response"),
    ),
    Rule(
        "jsonrpc.parse-error",
        SHOULD,
        "A line that is not JSON is answered with -32700.",
        f"{JSON_RPC}#error_object",
        _refused(-32700, "broken-json"),
    ),
    Rule(
        "jsonrpc.parse-error-id",
        MUST,
        "The answer to a line that is not JSON has the id null and the code -32700.",
        f"{JSON_RPC}#response_object",
        _null_id,
    ),
    Rule(
        "jsonrpc.survives-parse-error",
        SHOULD,
        "A line that is not JSON does not end the connection.",
        f"{JSON_RPC}#error_object",
        _survives("broken-json"),
    ),
    Rule(
        "jsonrpc.invalid-request",
        SHOULD,
        "A message that is not a valid request is answered with -32600.",
        f"{JSON_RPC}#error_object",
        _refused(-32600, "bad-method", "not-an-object"),
    ),
    Rule(
        "jsonrpc.survives-invalid-request",
        SHOULD,
        "A message that is not a valid request does not end the connection.",
        f"{JSON_RPC}#error_object",
        _survives("bad-method", "not-an-object"),
    ),
    Rule(
        "jsonrpc.batch",
        SHOULD,
        "A batch is answered with a single error -32600, because the protocol has no batches.",
        page("transports#stdio"),
        _refused(-32600, "batch"),
    ),
    Rule(
        "jsonrpc.survives-batch",
        SHOULD,
        "A batch does not end the connection.",
        page("transports#stdio"),
        _survives("batch"),
    ),
    Rule(
        "jsonrpc.missing-params",
        SHOULD,
        "A request without a member that the schema requires is refused.",
        page("schema"),
        answered_by_error("expected an error", _ONLY_LIVE, "missing-params"),
    ),
    Rule(
        "jsonrpc.wrong-params",
        SHOULD,
        "A request with a required member of the wrong type is refused.",
        page("schema"),
        answered_by_error("expected an error", _ONLY_LIVE, "wrong-params"),
    ),
    Rule(
        "jsonrpc.invalid-params",
        SHOULD,
        "The error for invalid params has the code -32602.",
        _CODES,
        answered_by_error(
            "expected the error -32602",
            _ONLY_LIVE,
            "missing-params",
            "wrong-params",
            codes=(-32602,),
            if_refused=True,
        ),
    ),
    Rule(
        "jsonrpc.while-prompt",
        SHOULD,
        "Other requests are answered while a prompt runs.",
        page("overview#communication-model"),
        _while_prompt,
    ),
)
