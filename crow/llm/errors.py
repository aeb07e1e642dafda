"""What an endpoint complains of, turned into one of crow's errors.

Strategy: first find the words, wherever a body or an event carries them (`ErrorBody`); then decide by status, code and
wording what kind of failure they are, throttling before overflow, since both speak of tokens. The provider's own words
stay in the message. Pure: knows neither HTTP client nor stream, and never sees a key.
"""

from __future__ import annotations

import email.utils
import html
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import reduce

from crow.domain.errors import (
    AuthError,
    BadRequest,
    ContentRefused,
    ContextOverflow,
    ModelError,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    QuotaExceeded,
    RateLimited,
)

__all__ = [
    "ErrorBody",
    "Origin",
    "complaint_in",
    "complaint_of_response",
    "failure",
    "is_overflow",
    "overflow_numbers",
    "page_title",
    "retry_after_s",
    "wait_in",
]

_SHOWN_CHARS = 1000
_SEARCHED_CHARS = 20_000
_ECHO = frozenset({"input", "messages", "request", "failed_generation"})

_MESSAGE_KEYS = (
    *("message", "error_message", "errorMessage", "msg", "detail", "error", "description", "reason", "title"),
    "exception",
)
_CODE_KEYS = ("code", "status", "status_code", "type", "error_type", "error_code", "errorCode")
_GOOD = frozenset(
    {"ok", "success", "succeeded", "processing", "queued", "pending", "in_progress", "running", "started"}
)

_TRANSIENT_STATUS = frozenset({408, 409, 425, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
_THROTTLED = re.compile(
    r"rate.?limit|too many requests|per (?:minute|second|hour|day)\b|\b[tr]pm\b|please wait|throttl|slow down"
    r"|concurrency limit|请求过于频繁|速率限制",
    re.IGNORECASE,
)
_NO_CREDIT = re.compile(
    r"insufficient[_ ](?:quota|balance|credits?|funds)|credit balance|out of credits?|not enough credits?|more credits"
    r"|payment required|billing (?:hard )?limit|余额不足|欠费",
    re.IGNORECASE,
)
_QUOTA = re.compile(
    r"exceeded your current quota|quota (?:has been |was )?(?:exceeded|exhausted|reached)"
    r"|(?:daily|weekly|monthly) (?:\w+ ){0,2}(?:limit|quota)|limit for (?:today|this (?:week|month))",
    re.IGNORECASE,
)
_BAD_KEY = re.compile(
    r"invalid[_ ](?:api[_ ])?key|incorrect api key|api[_ ]key(?: is)? (?:not valid|invalid|missing|required|expired)"
    r"|invalid[_ ]authentication|authentication[_ ]error|unauthori[sz]ed|no api key|invalid bearer|api_key_invalid",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(
    r"model[_ ]not[_ ]found|no such model|unknown model|invalid model|unsupported model|not a valid model"
    r"|models?\b\W*(?:named |name |id )?\W?[\w./:@-]{0,120}\W{0,3}\s*(?:was |is |does |do )?"
    r"(?:not (?:found|exist|supported|available|loaded)|unavailable)"
    r"|model_not_exist|no endpoints found for|模型不存在",
    re.IGNORECASE,
)
_FILTERED = re.compile(
    r"content[_ ](?:filter|policy|management)|responsibleaipolicy|data_inspection_failed|flagged|moderation"
    r"|safety (?:system|filter|settings)|prohibited_content|inappropriate content|sensitive content|\"1301\"",
    re.IGNORECASE,
)
_REFUSED_REQUEST = re.compile(
    r"invalid[_ ](?:request|param|argument|value|input)|unsupported|not support|unrecognized|unexpected\b"
    r"|must (?:be|have|not)|missing|required|malformed|bad[_ ]request|extra inputs|not permitted|validation",
    re.IGNORECASE,
)
_NO_PATH = re.compile(r"not found|not allowed|cannot post|no route|unknown (?:path|url)|invalid url", re.IGNORECASE)
_NO_TOOLS = re.compile(
    r"(?:not|n't) support (?:tool|function)s?\b(?! choice)|support tool use|tools?\W{0,2} (?:is|are) not supported"
    r"|tool calling|--enable-auto-tool-choice",
    re.IGNORECASE,
)
_TITLE = re.compile(r"<title[^<>]*+>(.{0,500}?)</title>", re.IGNORECASE | re.DOTALL)
_HEADING = re.compile(r"<h1[^<>]*+>(.{0,500}?)</h1>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who was asked, for the words of an error."""

    endpoint: str = "the endpoint"
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """An endpoint's words. `everything` is the whole body or event: the telling part may hide in nested metadata."""

    message: str = ""
    code: str = ""
    status: int | None = None
    everything: str = ""

    @property
    def searched(self) -> str:
        """All words that tell what kind of failure this is."""
        return f"{self.code} {self.message} {self.everything}"[:_SEARCHED_CHARS]


def complaint_in(body: object) -> ErrorBody | None:
    """The error that a parsed event or body of a *successful* response carries, in any known shape, or None."""
    if isinstance(body, list):
        return next((found for item in body if (found := complaint_in(item)) is not None), None)
    if not isinstance(body, Mapping):
        return None
    error = body.get("error")
    if error:
        return _complaint(error, body)
    if any(body.get(key) for key in ("error_type", "error_message", "errorMessage", "errorCode", "exception")):
        return _complaint(body, body)
    status = body.get("base_resp")
    if isinstance(status, Mapping) and status.get("status_code"):
        return _complaint({"message": status.get("status_msg"), "code": status["status_code"]}, body)
    errors = body.get("errors")
    if isinstance(errors, list) and errors:
        return _complaint(errors[0], body)
    if "choices" in body:
        return _complaint_in_choice(body)
    is_error = body.get("object") == "error" or body.get("type") == "error" or body.get("success") is False
    says_why = isinstance(body.get("message") or body.get("msg") or body.get("detail"), (str, list))
    is_marked = any(_is_bad(body.get(key)) for key in ("code", "status", "detail", "error_code"))
    return _complaint(body, body) if is_error or (says_why and is_marked) else None


def complaint_of_response(status: int, content: bytes) -> ErrorBody:
    """The words of an HTTP error; HTML is its title, never the page."""
    text = content.decode("utf-8", "replace").strip()
    try:
        body = json.loads(text) if text else None
    except (ValueError, RecursionError):
        title = page_title(text)
        message = title if title is not None else text[:_SHOWN_CHARS]
        return ErrorBody(message=message, status=status, everything=text[:_SEARCHED_CHARS] if title is None else title)
    found = complaint_in(body)
    if found is None and isinstance(body, (Mapping, str)) and body:
        found = _complaint(body, body)
    if found is None:
        return ErrorBody(status=status, everything=text[:_SEARCHED_CHARS])
    # The status line is what the server means; a code in the body may be the status of somebody behind it.
    return replace(found, status=status)


def failure(complaint: ErrorBody, origin: Origin, *, wait_s: float | None = None) -> ModelError:
    """The error to raise. `wait_s`: seconds the endpoint asked to wait, if it did."""
    words, status, searched = _words(complaint), complaint.status, complaint.searched
    who = origin.endpoint
    if wait_s is None:
        wait_s = wait_in(searched)
    # "Quota exceeded ... retry in 17 s" is a rate limit by another name.
    is_quota = _NO_CREDIT.search(searched) or (wait_s is None and _QUOTA.search(searched))
    if status == 402 or (is_quota and (status is None or status < 500)):
        return QuotaExceeded(
            f"{who} has no credit left for this key: {words}. Waiting does not help; check the account."
        )
    if status == 413 or not (status == 429 or _THROTTLED.search(searched)):
        # A 413 that speaks of tokens per minute is one request larger than a whole minute's share: waiting is in vain.
        if status == 413 or is_overflow(searched):
            limit, size = overflow_numbers(searched, complaint.message)
            return ContextOverflow(f"The request is too long for {_model_at(origin)}: {words}.", limit=limit, size=size)
    elif status is None or status == 429 or status in _TRANSIENT_STATUS or status < 429:
        return RateLimited(f"{who} asks to slow down: {words}.", retry_after_s=wait_s)
    return _other(complaint, origin, words=words, wait_s=wait_s)


def page_title(text: str) -> str | None:
    """What an HTML page calls itself, None if `text` is no HTML."""
    head = text[:2000].lower()
    if "<html" not in head and "<!doctype html" not in head and "<title" not in head:
        return None
    text = text[:_SEARCHED_CHARS]
    match = _TITLE.search(text) or _HEADING.search(text)
    title = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", match.group(1))).split()) if match else ""
    return title[:200] or "an HTML page without a title"


def _other(complaint: ErrorBody, origin: Origin, *, words: str, wait_s: float | None) -> ModelError:
    status, searched, who = complaint.status, complaint.searched, origin.endpoint
    is_refusal = status is None or status < 500
    if is_refusal and _FILTERED.search(searched) and status not in {401, 404}:
        return ContentRefused(f"The content filter of {who} refused: {words}.")
    if status in {401, 403} or (is_refusal and _BAD_KEY.search(searched)):
        refused = "access" if status == 403 else "the key"
        return AuthError(
            f"{who} refused {refused}: {words}. Set OPENAI_API_KEY (or the variable that api_key_env names) to a key "
            "that it accepts."
        )
    if is_refusal and _NO_MODEL.search(searched):
        return ModelNotFound(f'{who} does not serve the model "{origin.model}": {words}.')
    if status in {404, 405} and (not complaint.message or _NO_PATH.search(complaint.message)):
        return BadRequest(
            f"{who} has no chat completions there: {words}. A base URL usually ends in /v1, such as "
            "http://localhost:11434/v1."
        )
    if status in _TRANSIENT_STATUS or (status is not None and status >= 500):
        return Overloaded(f"{who} has trouble: {words}.", retry_after_s=wait_s)
    if status is None and not _REFUSED_REQUEST.search(searched):
        return Overloaded(f"{who} broke off with an error: {words}.", retry_after_s=wait_s)
    if status is not None and status < 400:
        return ProtocolError(f"{who} answered something else than a chat completion: {words}.")
    hint = " Crow needs a model that can call tools; choose another one." if _NO_TOOLS.search(searched) else ""
    return BadRequest(f"{who} does not take the request: {words}.{hint}")


def _is_bad(code: object) -> bool:
    """Whether a code or status is there and says that something is amiss."""
    if isinstance(code, str):
        return bool(code) and code.lower() not in _GOOD and not re.fullmatch(r"0+|2\d\d", code)
    return bool(code) and not (isinstance(code, int) and 200 <= code < 300)


def _complaint_in_choice(body: Mapping[str, object]) -> ErrorBody | None:
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping) or not choice.get("error"):
        return None
    return _complaint(choice["error"], body)


def _complaint(error: object, body: object) -> ErrorBody:
    everything = json.dumps(_without_echo(body), ensure_ascii=False, default=str)[:_SEARCHED_CHARS]
    if not isinstance(error, Mapping):
        outer = body if isinstance(body, Mapping) else {}
        code, status = _code_of(outer)
        message = error if isinstance(error, str) else _message_of(outer)
        message = message[:_SEARCHED_CHARS] or str(error)[:_SHOWN_CHARS]
        return ErrorBody(message=message, code=code, status=status, everything=everything)
    code, status = _code_of(error)
    message = _message_of(error)[:_SEARCHED_CHARS]
    return ErrorBody(message=message, code=code, status=status, everything=everything)


def _without_echo(value: object, depth: int = 0) -> object:
    """`value` without what it repeats of our own request: those are not the endpoint's words."""
    if depth > 6:
        return None
    if isinstance(value, Mapping):
        return {key: _without_echo(item, depth + 1) for key, item in value.items() if key not in _ECHO}
    if isinstance(value, list):
        return [_without_echo(item, depth + 1) for item in value[:20]]
    return value


def _message_of(error: Mapping[str, object]) -> str:
    for key in _MESSAGE_KEYS:
        value = error.get(key)
        if isinstance(value, str) and value.strip():
            message = value.strip()
            break
        if isinstance(value, Mapping):
            inner = _message_of(value)
            if inner:
                return inner
        if isinstance(value, list) and value:
            # FastAPI's validation errors: a list of {loc, msg, type}.
            message = json.dumps(_without_echo(value), ensure_ascii=False, default=str)
            break
    else:
        return ""
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
    if isinstance(raw, str) and raw.strip() and raw not in message:
        message = f"{message} ({raw.strip()})"
    return message


def _code_of(error: Mapping[str, object]) -> tuple[str, int | None]:
    """The words of its code and type, and its HTTP status if a number among them is one."""
    words: list[str] = []
    status: int | None = None
    for key in _CODE_KEYS:
        value = error.get(key)
        if isinstance(value, bool) or value is None:
            continue
        number = (
            value if isinstance(value, int) else int(value) if isinstance(value, str) and value.isdecimal() else None
        )
        if number is not None and 400 <= number < 600:
            status = status or number
        elif isinstance(value, (str, int)):
            words.append(str(value))
    return " ".join(words), status


def _words(complaint: ErrorBody) -> str:
    """What to show: the endpoint's words, its code if that says more, and the status."""
    message = " ".join(complaint.message.split())[:_SHOWN_CHARS].rstrip(" .")
    facts = [f"HTTP {complaint.status}"] if complaint.status is not None else []
    if complaint.code and complaint.code.lower() not in message.lower():
        facts.append(complaint.code[:100])
    if not message:
        return ", ".join(facts) if facts else "it gave no reason"
    return f"{message} ({', '.join(facts)})" if facts else message


def _model_at(origin: Origin) -> str:
    return f'the model "{origin.model}"' if origin.model else "the model"


# FROM llm.overflow: How endpoints say that a request is too long, and the numbers they give.
#
# Strategy: one list of wordings to recognise, one of wordings that carry the window (`limit`) and the request's size,
# both in tokens. Whatever else speaks of a window or of tokens, of the request, and of too much, is one too; its
# numbers
# are told apart by the words before them. Throttling also speaks of tokens: whoever asks here has ruled it out first.
# Pure.


_WORDINGS = re.compile(
    "|".join(
        (
            r"maximum (?:context|allowed input|prompt|input) length",
            r"maximum allowed (?:input )?length",
            r"context_length_exceeded|context_window_exceeded|string_above_max_length",
            r"exceeds? the (?:model's )?(?:maximum )?context (?:window|length)",
            r"context (?:window|length) (?:of this model )?(?:is |was |has been )?exceed",
            r"context window exceeds limit|exceeds? (?:the )?context limit",
            r"prompt (?:is )?too long|input is too long|request_too_large|request too large",
            r"input token count.{0,80}exceeds",
            r"reduce the length of",
            r"exceed(?:s the available)?[_ ]context[_ ]size|context size has been exceeded",
            r"greater than the context length|exceeded max context length",
            r"prompt contains.{0,40}input tokens",
            r"max_(?:completion_)?tokens\W.{0,60}too large",
            r"input length .{0,60}exceeds",
            r"longer than the (?:model.s )?(?:maximum )?context",
            r"exceeded model token limit",
            r"range of input length",
            r"too large for model with",
            r"prompt token count .{0,40}exceeds|max_prompt_tokens_exceeded",
            r"tokens .{0,40}exceed model maximum",
            r"too many (?:input )?tokens for (?:this|the) model",
            r"\b1261\b.{0,60}too long",
            r"输入长度超过|上下文长度|超过最大长度|输入过长|token.{0,12}超(?:过|出)",
            r"conversation is too long|messages? (?:is |are )?too long|exceeds? max message tokens",
            r"maximum model length|messages\[\d+\]\.content\W{0,3}\s*string too long",
        )
    ),
    re.IGNORECASE | re.DOTALL,
)
_NOT_OVERFLOW = re.compile(
    # Either is meant: a request with bad parameters gets these words too.
    r"possible causes|"
    # The limit of one answer, not of the window.
    r"at most \d[\d,]* completion tokens|valid range of max_tokens|max_tokens must be|"
    # A tool, its name or its description.
    r"tools\[\d+\]|tool_calls\[\d+\]|function\.(?:name|description)|tool name|array too long",
    re.IGNORECASE,
)

_WINDOW = re.compile(
    r"tokens?(?![a-z])|(?:prompt|input|sequence|model) length|[ck]onte(?:xt|kst)|\bn_ctx\b|max_(?:model|seq)_len"
    r"|コンテキスト|上下文|токен|jetons",
    re.IGNORECASE,
)
_REQUEST = re.compile(
    r"prompt|input|messages?\b|request|conversation|[ck]onte(?:xt|kst)|window|max_model_len|n_tokens|number of tokens"
    r"|model can|too many tokens|token limit",
    re.IGNORECASE,
)
_TOO_MUCH = re.compile(
    r"exceed|too (?:long|many|large|big)|(?:longer|larger|greater|more|bigger) than|overflow|not enough|maxim"
    r"|does(?: not|n't) fit|must (?:be <=|have less)|only handle|[\d)]\s*>\s|超過|超过|превы",
    re.IGNORECASE,
)
_TOO_LITTLE = re.compile(r"minim|too (?:small|short|few)|characters|string too long", re.IGNORECASE)

_NUMBER = r"\d[\d,_]*(?:\.\d+)?[km]?\b"
_LEAST_WINDOW = 256
"""No window is smaller: such a number means something else (a status, a position)."""
_NUMBERED = tuple(
    re.compile(wording.replace("LIMIT", f"(?P<limit>{_NUMBER})").replace("SIZE", f"(?P<size>{_NUMBER})"), re.I | re.S)
    for wording in (
        r"prompt is too long:\s*SIZE\s*tokens\s*>\s*LIMIT",
        r"exceed context limit:\s*SIZE\s*\+\s*(?P<more>\d[\d,_]*)\s*>\s*LIMIT",
        r"n_prompt_tokens\W{1,4}SIZE.{0,80}?n_ctx\W{1,4}LIMIT",
        r"n_ctx\W{1,4}LIMIT.{0,80}?n_prompt_tokens\W{1,4}SIZE",
        r"request \(SIZE tokens?\) exceeds the available context size \(LIMIT",
        r"maximum context length\D{0,5}LIMIT.{0,120}?(?:requested|resulted in|contains?|has)\s+(?:at least )?SIZE",
        r"requested (?P<more>\d[\d,_]*) output tokens and your prompt contains at least SIZE",
        r"input token count\W{0,3}\(?SIZE\)?\s*exceeds\D{0,80}LIMIT",
        r"maximum prompt length is LIMIT.{0,80}?contains SIZE",
        r"input length\W{0,3}SIZE\D{0,20}exceeds\D{0,80}LIMIT",
        r"input \(SIZE tokens\) is longer than\D{0,60}LIMIT",
        r"exceeded model token limit:\s*LIMIT\s*\(requested:\s*SIZE",
        r"range of input length should be \[\d+,\s*LIMIT",
        r"prompt contains SIZE tokens.{0,120}?LIMIT maximum context",
        r"prompt token count of SIZE exceeds the limit of LIMIT",
        r"prompt tokens \(SIZE\) exceed model maximum \(LIMIT",
        r"\blimit:? LIMIT,? requested:? SIZE",
        # A number in brackets behind such words may be an error code.
        r"maximum (?:context|allowed|prompt|input)[\w ]{0,40}length(?: is| of|:)\s*LIMIT",
        r"context (?:size|length|window|limit)(?: is| of|:)\s*LIMIT",
    )
)


_PLAIN_NUMBER = re.compile(
    r"(?<![\w.])(\d{1,3}(?:[,_.'\u00a0\u202f]\d{3})+|\d+(?:\.\d+)?)\s?([km])?(?![\w\d])", re.IGNORECASE
)
_LIMIT_BEFORE = re.compile(
    r"(?:max(?!_(?:new_|completion_|output_)?tokens)\w*|limit\w*|window|[ck]onte(?:xt|kst)\w*|length|available|allowed"
    r"|handle|supports|n_ctx|<=|>|less than|最大\w*|上限|限制)"
    r"(?:\W|\b(?:is|of|was|are|only|model|length|size|window|tokens?|number|to|than|du|modèle|est|de|von|ist)\b|为|是)*\Z",
    re.IGNORECASE,
)
_CODE_BEFORE = re.compile(r"(?:limit|length|large|long)\s*\(\Z")
"""A number in brackets behind such words may be an error code."""


def is_overflow(words: str) -> bool:
    """Whether `words` say that the request is too long for the model."""
    if _NOT_OVERFLOW.search(words) is not None:
        return False
    if _WORDINGS.search(words) is not None:
        return True
    told = (_WINDOW, _REQUEST, _TOO_MUCH)
    has_size = any((_tokens(match) or 0) >= _LEAST_WINDOW for match in _PLAIN_NUMBER.finditer(words))
    return has_size and all(each.search(words) for each in told) and not _TOO_LITTLE.search(words)


def overflow_numbers(words: str, message: str = "") -> tuple[int | None, int | None]:
    """`(limit, size)` in tokens, as far as stated; size counts the output where the endpoint does. `message`: the part
    of `words` in which any number may be one of them."""
    for wording in _NUMBERED:
        match = wording.search(words)
        if match is None:
            continue
        numbers = {key: _read(value) for key, value in match.groupdict().items() if value}
        limit, size, more = numbers.get("limit"), numbers.get("size"), numbers.get("more")
        if size is not None and more is not None:
            size += more
        if limit is not None and size is None:
            size = max((number for number, _ in _sizes(message) if number > limit), default=None)
        return (limit if limit is not None and limit >= _LEAST_WINDOW else None), size
    return _told(message) if _WINDOW.search(message) and not _TOO_LITTLE.search(message) else (None, None)


def _told(message: str) -> tuple[int | None, int | None]:
    """The limit is the smallest number behind a word for it; the size one that is larger, or the only other one."""
    sizes = _sizes(message)
    limits = [number for number, before in sizes if _LIMIT_BEFORE.search(before)]
    if len(sizes) == 1 and _CODE_BEFORE.search(sizes[0][1]):
        return None, None
    limit = min(limits, default=min(sizes)[0] if len(sizes) == 2 else None)
    others = [number for number, _ in sizes if limit is None or number > limit]
    return limit, max(others, default=None)


def _sizes(message: str) -> list[tuple[int, str]]:
    """The numbers that may be counts of tokens, each with what stands before it."""
    found = [(_tokens(match), match.start()) for match in _PLAIN_NUMBER.finditer(message)]
    return [
        (number, message[max(0, at - 60) : at])
        for number, at in found
        if number is not None and number >= _LEAST_WINDOW
    ]


def _tokens(match: re.Match[str]) -> int | None:
    return _read(match.group(1) + (match.group(2) or ""))


def _read(digits: str) -> int | None:
    """`131,072`, `131_072`, `131.072`, `128k` or `8.5K` as a number; None if it is too large to be one of tokens."""
    scale = {"k": 1000, "m": 1_000_000}.get(digits[-1:].lower(), 1)
    plain = digits.rstrip("kKmM")
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+", plain) and scale == 1:
        plain = plain.replace(".", "")
    number = float(re.sub(r"[^\d.]", "", plain) or 0) * scale
    return int(number) if 0 < number < 1e11 else None


# FROM llm.waits: How long an endpoint asks to wait, in its headers or in its words. Pure.


_AMOUNT = r"\d++(?:\.\d++)?\s*+(?:milliseconds?|minutes?|mins?|seconds?|secs?|hours?|days?|ms|[smhd])?(?![a-z])"
_WAIT_WORDS = re.compile(
    r"(?:try again (?:in|after)|retry[ -]?after:?|retry in|retrydelay|wait(?: for)?)\W{0,5}"
    rf"((?:{_AMOUNT}[ ,]*)+|\d+:\d\d(?::\d\d)?)",
    re.IGNORECASE,
)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|milli|s|m|h|d)?", re.IGNORECASE)
_SPAN_S = {"ms": 0.001, "milli": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}
_WHOLE_SPAN = re.compile(rf"(?:{_AMOUNT}\s*)+", re.IGNORECASE)
_AFTER_1973 = 1e8
"""A number of seconds that is larger names a moment."""


def retry_after_s(headers: Mapping[str, str], *, now_s: float) -> float | None:
    """Seconds to wait by the headers (keys in lower case); `now_s` is Unix time, for those that name a moment."""
    milliseconds = _number(headers.get("retry-after-ms", "").strip())
    if milliseconds is not None:
        return max(0.0, milliseconds / 1000)
    asked = _span(headers.get("retry-after", "").strip(), now_s)
    if asked is not None:
        return asked
    waits = [
        wait
        for key, value in headers.items()
        if key.startswith("x-ratelimit-reset") and (wait := _span(value.strip(), now_s)) is not None
    ]
    # Of several limits the one that resets last may be the one that was hit, or one that is far from it.
    return min(waits) if waits else None


def wait_in(words: str) -> float | None:
    """The seconds that `words` ask to wait, None if they ask for none."""
    match = _WAIT_WORDS.search(words)
    return _seconds(match.group(1)) if match is not None else None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _span(text: str, now_s: float) -> float | None:
    """`1s`, `6m0s`, `120`; or a moment: Unix time in seconds or milliseconds, a date of HTTP or of ISO 8601."""
    number = _number(text)
    if number is not None:
        if number > 1000 * _AFTER_1973 and number > 100 * now_s:
            number /= 1000
        return max(0.0, number - now_s if number > max(_AFTER_1973, now_s / 2) else number)
    if _WHOLE_SPAN.fullmatch(text):
        return _seconds(text)
    moment = _moment(text)
    return max(0.0, moment - now_s) if moment is not None else None


def _moment(text: str) -> float | None:
    """A date as Unix time."""
    try:
        named = email.utils.parsedate_tz(text)
        return float(email.utils.mktime_tz(named)) if named is not None else _iso(text)
    except (ValueError, OverflowError):
        return None


def _iso(text: str) -> float | None:
    moment = datetime.fromisoformat(text) if text else None
    return moment.timestamp() if moment is not None and moment.tzinfo is not None else None


def _seconds(text: str) -> float:
    """The sum of the amounts; `1:30` is minutes and seconds."""
    if ":" in text:
        return float(reduce(lambda so_far, part: so_far * 60 + int(part), text.split(":"), 0))
    return sum(float(amount) * _SPAN_S[unit.lower()] for amount, unit in _SPAN.findall(text))
