"""Turns an error that an endpoint reports into one of crow's errors.

Endpoints put the text of an error in different places of a body or event. `ErrorBody` holds the status, code and text
of an error. From these three, crow chooses the error to raise. The first line of this table that applies decides:

    402, or no credit or quota left ........................ QuotaExceeded
    429, or too many requests .............................. RateLimited
    413, or the request is too long ........................ ContextOverflow
    a content filter ....................................... ContentRefused
    401, 403, or a refused key ............................. AuthError
    an unknown model ....................................... ModelNotFound
    404, 405 without a better reason ....................... BadRequest (a wrong base URL)
    5xx and the like, or an error event without a reason ... Overloaded (BadRequest if tools need a flag)
    a status below 400 ..................................... ProtocolError
    anything else .......................................... BadRequest

Rate limits are checked before overflow, because messages about rate limits may mention tokens too. The provider's own
text stays in the message.
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

from crow.domain import errors
from crow.domain.messages import WireName
from crow.domain.text import on_one_line
from crow.llm import WIRE_TITLES
from crow.llm.dialect import Dialect

_SHOWN_CHARS = 1000
_SEARCHED_CHARS = 20_000
_TRANSIENT_STATUS = frozenset({408, 409, 425, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
_MIN_WINDOW = 256
"""Every context window has at least this many tokens. A smaller number in a message is something else, such as a status
or a position."""

_NUMBER = r"\d[\d,_]*(?:\.\d+)?[km]?\b"
_AMOUNT = r"\d++(?:\.\d++)?\s*+(?:milliseconds?|minutes?|mins?|seconds?|secs?|hours?|days?|ms|[smhd])?(?![a-z])"
_WORDINGS = r"""
throttled
    rate.?limit|too many requests|per (?:minute|second|hour|day)\b|\b[tr]pm\b|please wait|throttl|slow down
    |concurrency limit|请求过于频繁|速率限制
no credit
    insufficient[_ ](?:quota|balance|credits?|funds)|credit balance|out of credits?|not enough credits?
    |more credits|payment required|billing (?:hard )?limit|billing_error|spend_limit_reached|余额不足|欠费
quota
    exceeded your current quota|quota (?:has been |was )?(?:exceeded|exhausted|reached)
    |reached your specified (?:\w+ ){0,2}usage limits
    |(?:daily|weekly|monthly) (?:\w+ ){0,2}(?:limit|quota)|limit for (?:today|this (?:week|month))
bad key
    invalid[_ ](?:api[_ ])?key|incorrect api key|no api key|invalid bearer|api_key_invalid|unauthori[sz]ed
    |api[_ ]key(?: is)? (?:not valid|invalid|missing|required|expired)|invalid[_ ]authentication|authentication[_ ]error
    |permission_error
no model
    model[_ ]not[_ ]found|no such model|unknown model|invalid model|unsupported model|not a valid model
    |models?\b\W*(?:named |name |id )?\W?[\w./:@-]{0,120}\W{0,3}\s*(?:was |is |does |do )?
    (?:not (?:found|exist|supported|available|loaded)|unavailable)
    |model_not_exist|no endpoints found for|not_found_error\W{1,4}(?:message\W{1,5})?model:|模型不存在
    |deploymentnotfound|\bdeployment\b.{0,40}does not exist
filtered
    content[_ ](?:filter|policy|management)|responsibleaipolicy|data_inspection_failed|flagged|moderation
    |safety (?:system|filter|settings)|prohibited_content|inappropriate content|sensitive content|\"1301\"
refused request
    invalid[_ ](?:request|param|argument|value|input)|unsupported|not support|unrecognized|unexpected\b
    |must (?:be|have|not)|missing|required|malformed|bad[_ ]request|extra inputs|not permitted|validation
no path
    not found|not allowed|cannot post|no route|could not route|unexpected endpoint|not implemented
    |(?:unknown|invalid|no such) (?:request )?(?:path|url|endpoint|route)
no item
    \b(?:item|response|file|container) with id\b|previous[_ ]response|no endpoints found
tools need a flag
    \b(?:tools?|tool_choice) param(?:eter)? requires\b
tools with reasoning
    \A(?=.*\b(?:tool|function)s?\b).*(?:\breason(?:s|ing)|\bthinking\b)
no tools
    (?:not|n't) support (?:tool|function)s?\b(?! choice)|support tool use|(?:not|n't) support function calling
    |(?:tools?|(?:tool|function) calling)\W{0,2} (?:is|are) not (?:supported|available|enabled)|support tool calling
    |\bno (?:tool|function) (?:support|calling|use)|not support parameters: [^\]]*\btools\b|--enable-auto-tool-choice
    |不支持.{0,6}(?:工具|函数|tools?\b)
other than tools
    (?:parallel|strict|custom|hosted|multiple) |tool_choice|tool choice [^r]|tool_(?:use|call|result)|\bstream|minimal
    |reasoning_content|reasoning_details|signature|\bimages?\b|\bfiles?\b|_tokens|web_search|schema|\bjson\b
    |\bnames?\b|arguments|too many|\bresults?\b
overflow
    maximum (?:context|allowed|prompt|input|allowed input|model) length|\b1261\b.{0,60}too long
    |context_(?:length|window)_exceeded|max_prompt_tokens_exceeded|string_above_max_length
    |exceeds? (?:the )?(?:model's )?(?:maximum )?context (?:window|length|limit)|exceeded max context length
    |context (?:window|length|size) (?:of this model )?(?:is |was |has been )?exceed
    |exceed(?:s the available)?[_ ]context[_ ]size|exceeded model token limit|exceeds? max message tokens
    |(?:prompt|conversation|messages?) (?:is |are )?too long|input is too long|request[_ ]too[_ ]large
    |reduce the length of|range of input length|too many (?:input )?tokens for (?:this|the) model
    |(?:longer|greater) than the (?:model.s )?(?:maximum )?context|too large for model with
    |input token count.{0,80}exceeds|prompt token count .{0,40}exceeds|input length .{0,60}exceeds
    |tokens .{0,40}exceed model maximum|prompt contains.{0,40}input tokens
    |max_(?:completion_)?tokens\W.{0,60}too large|messages\[\d+\]\.content\W{0,3}\s*string too long
    |输入长度超过|上下文长度|超过最大长度|输入过长|token.{0,12}超(?:过|出)
not overflow
    possible causes|max_tokens: \d+ > \d+|at most \d[\d,]* completion tokens|valid range of max_tokens
    |max_tokens must be
    |tools\[\d+\]|tool_calls\[\d+\]|function\.(?:name|description)|tool name|array too long
unclear overflow
    possible causes.{0,200}(?:context|length|tokens)
window
    tokens?(?![a-z])|(?:prompt|input|sequence|model) length|[ck]onte(?:xt|kst)|\bn_ctx\b
    |max_(?:model|seq)_len|コンテキスト|上下文|токен|jetons
request
    prompt|input|messages?\b|request|conversation|[ck]onte(?:xt|kst)|window|max_model_len|n_tokens
    |number of tokens|model can|too many tokens|token limit
too much
    exceed|too (?:long|many|large|big)|(?:longer|larger|greater|more|bigger) than|overflow|not enough|maxim
    |does(?: not|n't) fit|must (?:be <=|have less)|only handle|[\d)]\s*>\s|超過|超过|превы
too little
    minim|too (?:small|short|few)|characters|string too long
limit before
    (?:max(?!_(?:new_|completion_|output_)?tokens)\w*|limit\w*|window|[ck]onte(?:xt|kst)\w*|length|available
    |allowed|handle|supports|n_ctx|<=|>|less than|最大\w*|上限|限制)
    (?:\W|\b(?:is|of|was|are|only|model|length|size|window|tokens?|number|to|than|du|modèle|est|de|von|ist)\b|为|是)*\Z
code before
    (?:limit|length|large|long)\s*\(\Z
wait
    (?:try again (?:in|after)|retry[ -]?after:?|retry in|retrydelay|wait(?: for)?)\W{0,5}
    (\d+:\d\d(?::\d\d)?|(?:AMOUNT[ ,]*)+)
span
    (?:AMOUNT\s*)+
"""
"""The kinds of messages. The name of each kind is followed by its pattern, whose lines are joined.

A message that matches "overflow" reports an overflow. A message also reports an overflow if it contains a number of
tokens and matches "window", "request" and "too much", but not "too little". A message that matches "not overflow" never
reports an overflow, whatever else it matches: it is about the output limit, about the name or description of a tool, or
it lists "possible causes", because the server does not know whether a parameter is bad or the request is too long.

A message that matches "unclear overflow" may report an overflow. A number directly after a match of "code before" may
be an error code.
"""
_PATTERNS = {
    name: re.compile("".join(map(str.strip, lines)).replace("AMOUNT", _AMOUNT), re.IGNORECASE | re.DOTALL)
    for name, *lines in (entry.splitlines() for entry in re.split(r"\n(?=\S)", _WORDINGS.strip()))
}
_NUMBERED = tuple(
    re.compile(wording.replace("LIMIT", f"(?P<limit>{_NUMBER})").replace("SIZE", f"(?P<size>{_NUMBER})"), re.I | re.S)
    for wording in (
        r"exceed context limit:\s*SIZE\s*\+\s*(?P<more>\d[\d,_]*)\s*>\s*LIMIT",
        r"n_prompt_tokens\W{1,4}SIZE.{0,80}?n_ctx\W{1,4}LIMIT",
        r"n_ctx\W{1,4}LIMIT.{0,80}?n_prompt_tokens\W{1,4}SIZE",
        r"requested (?P<more>\d[\d,_]*) output tokens and your prompt contains at least SIZE",
        r"range of input length should be \[\d+,\s*LIMIT",
    )
)
"""Patterns for messages in which the word before a number does not say whether the number is the limit or the size, in
tokens."""

_PLAIN_NUMBER = re.compile(
    r"(?<![\w.])(\d{1,3}(?:[,_.'\u00a0\u202f]\d{3})+|\d+(?:\.\d+)?)\s?([km])?(?![\w\d])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The endpoint and the model of a request, as error messages name them."""

    endpoint: str = "the endpoint"
    """The endpoint's URL."""
    model: str = ""
    """The model's name."""
    wire: WireName = "chat"
    """The wire of the request."""
    key_hint: str = "Set OPENAI_API_KEY"
    """The beginning of a sentence that tells the user where to set the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """The information that an endpoint sent about an error."""

    message: str = ""
    """The reason in words."""
    code: str = ""
    """The codes and types of the error."""
    status: int | None = None
    """The HTTP status."""
    everything: str = ""
    """The whole body or event, because the reason may be hidden in nested metadata."""
    wait_s: float | None = None
    """The number of seconds to wait, if the headers ask for a wait."""

    @property
    def searched(self) -> str:
        """All text that helps to classify the error."""
        return f"{self.code} {self.message} {self.everything}"[:_SEARCHED_CHARS]

    @property
    def shown(self) -> str:
        """The text to show to the user. It consists of the message, the status and the code. The code is left out if
        the message contains it."""
        message = on_one_line(self.message[: 4 * _SHOWN_CHARS])[:_SHOWN_CHARS].rstrip(" .")
        facts = [f"HTTP {self.status}"] if self.status is not None else []
        if self.code and self.code.lower() not in message.lower():
            facts.append(on_one_line(self.code[:100]))
        if not message:
            return ", ".join(facts) or "it gave no reason"
        return f"{message} ({', '.join(facts)})" if facts else message


def find_error(body: object) -> ErrorBody | None:
    """Return the error that a parsed event or response body contains, in any known form. Return None if there is no
    error. A response with a success status may also contain an error."""
    if isinstance(body, list):
        # Lists inside the list are skipped, because they could nest without end.
        items = (item for item in body if not isinstance(item, list))
        return next((found for item in items if (found := find_error(item)) is not None), None)
    if not isinstance(body, Mapping):
        return None
    if body.get("error"):
        return _error_body(body["error"], body)
    if any(body.get(key) for key in ("error_type", "error_message", "errorMessage", "errorCode", "exception")):
        return _error_body(body, body)
    status = body.get("base_resp")
    if isinstance(status, Mapping) and status.get("status_code"):
        return _error_body({"message": status.get("status_msg"), "code": status["status_code"]}, body)
    errors = body.get("errors")
    if isinstance(errors, list) and errors:
        return _error_body(errors[0], body)
    if "choices" in body:
        choices = body["choices"]
        choice = choices[0] if isinstance(choices, list) and choices else None
        error = choice.get("error") if isinstance(choice, Mapping) else None
        return _error_body(error, body) if error else None
    is_error = body.get("object") == "error" or body.get("type") == "error" or body.get("success") is False
    has_message = isinstance(body.get("message") or body.get("msg") or body.get("detail"), (str, list))
    has_code = any(_is_error_code(body.get(key)) for key in ("code", "status", "detail", "error_code"))
    return _error_body(body, body) if is_error or (has_message and has_code) else None


def parse_error_response(status: int, content: bytes) -> ErrorBody:
    """Read the body of an HTTP error. An HTML page is reduced to its title."""
    text = content.decode("utf-8", "replace").strip()
    try:
        body = json.loads(text) if text else None
    except (ValueError, RecursionError):
        message = page_title(text) or text
        return ErrorBody(message=message[:_SHOWN_CHARS], status=status, everything=message[:_SEARCHED_CHARS])
    found = find_error(body)
    if found is None and isinstance(body, (Mapping, str)) and body:
        found = _error_body(body, body)
    if found is None:
        return ErrorBody(status=status, everything=text[:_SEARCHED_CHARS])
    # Use the status of the response. A code in the body may be the status of another server behind this one.
    return replace(found, status=status)


def model_error(body: ErrorBody, origin: Origin) -> errors.ModelError:
    """Return the error to raise for `body`."""
    words, status, who, wait_s = body.shown, body.status, origin.endpoint, body.wait_s
    if wait_s is None and (match := _PATTERNS["wait"].search(body.searched)):
        wait_s = _seconds(match[1])

    def says(*kinds: str) -> bool:
        return any(_PATTERNS[kind].search(body.searched) for kind in kinds)

    is_refusal = status is None or status < 500
    # A message such as "Quota exceeded ... retry in 17 s" is a rate limit.
    if status == 402 or (is_refusal and (says("no credit") or (wait_s is None and says("quota")))):
        advice = "Waiting does not help; check the account."
        return errors.QuotaExceeded(f"{who} has no credit left for this key: {words}. {advice}")
    # A 413 that mentions tokens per minute is not a rate limit: this one request is larger than the limit for a minute,
    # so waiting does not help.
    is_throttled = status not in {404, 413} and (status == 429 or says("throttled"))
    if is_throttled and (status is None or status <= 429 or status in _TRANSIENT_STATUS):
        return errors.RateLimited(f"{who} is rate-limiting requests: {words}.", retry_after_s=wait_s)
    if not is_throttled and (status == 413 or _is_overflow(body.searched)):
        limit, size = _overflow_numbers(body.searched, body.message)
        model = f'the model "{origin.model}"' if origin.model else "the model"
        return errors.ContextOverflow(f"The request is too long for {model}: {words}.", limit=limit, size=size)
    if is_refusal and says("filtered") and status not in {401, 404}:
        return errors.ContentRefused(f"The content filter at {who} refused: {words}.")
    if status in {401, 403} or (is_refusal and says("bad key")):
        advice = f"{origin.key_hint} to a key that it accepts."
        return errors.AuthError(f"{who} refused {'access' if status == 403 else 'the key'}: {words}. {advice}")
    if is_refusal and says("no model"):
        return errors.ModelNotFound(f'{who} does not serve the model "{origin.model}": {words}.')
    if status in {404, 405} and (not body.message or says("no path")) and not says("no item"):
        advice = "A base URL usually ends in /v1, such as http://localhost:11434/v1."
        return errors.BadRequest(f"{who} has no {WIRE_TITLES[origin.wire]} API at this URL: {words}. {advice}")
    # llama.cpp answers 500 if tools need a flag, but sending the request again does not help
    if not says("tools need a flag") and (status in _TRANSIENT_STATUS or not is_refusal):
        return errors.Overloaded(f"{who} has trouble: {words}.", retry_after_s=wait_s)
    if status is None and not says("refused request"):
        return errors.Overloaded(f"{who} broke off with an error: {words}.", retry_after_s=wait_s)
    if status is not None and status < 400:
        return errors.ProtocolError(f"{who} answered with something other than an answer: {words}.")
    hint = " Crow needs a model that can call tools; choose another one." if says("no tools") else ""
    if says("tools need a flag"):
        hint = " Crow needs tools: start the server with this flag."
    elif _refuses_tools_with_reasoning(body):
        hint = ' If this endpoint has no other API, set thought_level = "off" for this model.'
    is_unclear = status == 400 and (not re.search(r"\w", body.searched) or says("unclear overflow"))
    return errors.BadRequest(f"{who} does not accept the request: {words}.{hint}", is_unclear=is_unclear)


def page_title(text: str) -> str | None:
    """Return the title of an HTML page, or None if `text` is not HTML."""
    head = text[:2000].lower()
    if "<html" not in head and "<!doctype html" not in head and "<title" not in head:
        return None
    text = text[:_SEARCHED_CHARS]
    for tag in ("title", "h1"):
        if match := re.search(rf"<{tag}[^<>]*+>(.{{0,500}}?)</{tag}>", text, re.IGNORECASE | re.DOTALL):
            title = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", match[1])).split())
            return title[:200] or "an HTML page without a title"
    return "an HTML page without a title"


# The keys under which servers send the text of an error.

_MESSAGE_KEYS = (
    *("message", "error_message", "errorMessage", "msg", "detail", "error", "description", "reason", "title"),
    "exception",
)
_CODE_KEYS = ("code", "status", "status_code", "type", "error_type", "error_code", "errorCode")
_GOOD_CODE = re.compile(r"0+|2\d\d|ok|success|succeeded|processing|queued|pending|in_progress|running|started", re.I)
_ECHO_KEYS = frozenset({"input", "messages", "request", "failed_generation"})


def _error_body(error: object, body: object) -> ErrorBody:
    """Return the information in `error`, which is `body` or a part of it. If `error` is not an object, the codes are
    taken from `body`. If it is not text either, the message is taken from `body`, too."""
    fields = next((each for each in (error, body) if isinstance(each, Mapping)), {})
    code, status = _code_and_status(fields)
    message = error if isinstance(error, str) else _message(fields)
    if not message and not isinstance(error, Mapping):
        message = str(error)[:_SHOWN_CHARS]
    everything = json.dumps(_without_echo(body), ensure_ascii=False, default=str)[:_SEARCHED_CHARS]
    return ErrorBody(message=message[:_SEARCHED_CHARS], code=code, status=status, everything=everything)


def _is_error_code(code: object) -> bool:
    """Return whether `code` is a code or status that means a failure. Texts such as "ok" and numbers from 200 to 299 do
    not."""
    if isinstance(code, str):
        return bool(code) and not _GOOD_CODE.fullmatch(code)
    return bool(code) and not (isinstance(code, int) and 200 <= code < 300)


def _without_echo(value: object, depth: int = 0) -> object:
    """Return `value` without the parts that repeat crow's own request."""
    if depth > 6:
        return None
    if isinstance(value, Mapping):
        return {key: _without_echo(item, depth + 1) for key, item in value.items() if key not in _ECHO_KEYS}
    return [_without_echo(item, depth + 1) for item in value[:20]] if isinstance(value, list) else value


def _message(error: Mapping[str, object]) -> str:
    """Return the reason in words, with OpenRouter's `metadata.raw` in brackets if that says more. Return an empty text
    if the error gives no reason."""
    for key in _MESSAGE_KEYS:
        value = error.get(key)
        if isinstance(value, Mapping) and (inner := _message(value)):
            return inner
        if isinstance(value, list) and value:
            # FastAPI sends validation errors as a list of {loc, msg, type}.
            value = json.dumps(_without_echo(value), ensure_ascii=False, default=str)
        if isinstance(value, str) and value.strip():
            metadata = error.get("metadata")
            raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
            has_more = isinstance(raw, str) and raw.strip() and raw not in value
            return f"{value.strip()} ({str(raw).strip()})" if has_more else value.strip()
    return ""


def _code_and_status(error: Mapping[str, object]) -> tuple[str, int | None]:
    """Return `(words, status)`: the codes and types in the error as one text, and the number among them that is an HTTP
    status, or None."""
    words: list[str] = []
    status: int | None = None
    for key in _CODE_KEYS:
        value = error.get(key)
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            continue
        number = int(value) if isinstance(value, int) or (value.isdecimal() and len(value) < 10) else 0
        if 400 <= number < 600:
            status = status or number
        else:
            words.append(str(value))
    return " ".join(words), status


# Decides whether a request was too long, and by how much.


def _is_overflow(words: str) -> bool:
    if _PATTERNS["not overflow"].search(words) is not None:
        return False
    if _PATTERNS["overflow"].search(words) is not None:
        return True
    return (
        bool(_sizes(words))
        and all(_PATTERNS[kind].search(words) for kind in ("window", "request", "too much"))
        and not _PATTERNS["too little"].search(words)
    )


def _overflow_numbers(words: str, message: str) -> tuple[int | None, int | None]:
    """Return `(limit, size)` in tokens. A number that the message does not state is None. If the endpoint also counts
    the output, the size includes the output.

    The patterns in `_NUMBERED` are applied to all of `words`. Other numbers are read only from `message`, which is a
    part of `words`.
    """
    for wording in _NUMBERED:
        if match := wording.search(words):
            numbers = {key: _count(value) for key, value in match.groupdict().items() if value}
            limit, size = numbers.get("limit"), numbers.get("size")
            if size is not None:
                size += numbers.get("more") or 0
            elif limit is not None:
                size = max((number for number, _ in _sizes(message) if number > limit), default=None)
            return (limit if limit is not None and limit >= _MIN_WINDOW else None), size
    if not _PATTERNS["window"].search(message) or _PATTERNS["too little"].search(message):
        return None, None
    # The limit is the smallest number that follows a word such as "limit" or "maximum". If there are two numbers and
    # neither follows such a word, the limit is the smaller one. The size is the largest number above the limit, or
    # simply the largest number if the limit is unknown.
    sizes = _sizes(message)
    if len(sizes) == 1 and _PATTERNS["code before"].search(sizes[0][1]):
        return None, None
    limits = [number for number, before in sizes if _PATTERNS["limit before"].search(before)]
    limit = min(limits, default=min(sizes)[0] if len(sizes) == 2 else None)
    return limit, max((number for number, _ in sizes if limit is None or number > limit), default=None)


def _sizes(words: str) -> list[tuple[int, str]]:
    """Return the numbers that may be counts of tokens, each with the text before it."""
    return [
        (number, words[max(0, match.start() - 60) : match.start()])
        for match in _PLAIN_NUMBER.finditer(words)
        if (number := _count(match[1] + (match[2] or ""))) is not None and number >= _MIN_WINDOW
    ]


def _count(digits: str) -> int | None:
    """Read `131,072`, `131_072`, `131.072`, `128k` or `8.5K` as a number. Return None if the number is zero or too
    large to be a count of tokens."""
    scale = {"k": 1000, "m": 1_000_000}.get(digits[-1:].lower(), 1)
    plain = digits.rstrip("kKmM")
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+", plain) and scale == 1:
        plain = plain.replace(".", "")
    number = float(re.sub(r"[^\d.]", "", plain) or 0) * scale
    return int(number) if 0 < number < 1e11 else None


# Decides which part of the request was refused.

_NO = (
    r"(?:unsupported|not support|not enabled|not have|no endpoints|deprecated|unrecogni[sz]ed|unknown"
    r"|unexpected|not permitted|not allowed|extra (?:inputs|fields)"
    r"|additional propert|no such|invalid|not a valid|cannot|can't|must|only)"
)
_REFUSAL_WORDINGS = r"""
earlier_thoughts|opaque any  bound to a different conversation|signature.{0,40}\bthinking
earlier_thoughts|opaque any  thinking.{0,60}(?:cannot be modified|must remain)
thinking_budget        any   thinking\.type\.enabled\W{1,4}is not|budget_tokens.{0,40}(?:not support|not permitted)
thinking_off           any   thinking\.type\.disabled\W{1,4}is not|\bbetween_tools\b
thinking_off           any   thinking.{0,40}(?:cannot|can't) be (?:disabled|turned off)
thinking_display       any   \bthinking[.\w]*\.display\b|\bdisplay\W{1,3}(?:extra inputs|not permitted)
adaptive_thinking      any   \badaptive\b.{0,40}(?:not support|unsupported|not permitted|does not match|not available)
effort                 near  \boutput_config\b|(?<!reasoning_)(?<!reasoning\.)\beffort\b
opaque                 any   encrypted[_ ]content.{0,80}(?:could not|cannot|can't|verif|decrypt)
opaque                 any   invalid_encrypted_content|without its required '?(?:following|reasoning)
opaque                 any   \bitem with id\b.{0,120}not found
include                any   encrypted[_. ]content
summary                near  reasoning[._]?summary|\bsummar(?:y|ies)\b
cache_retention        any   prompt_cache_retention|prompt_cache_options|prompt_cache_breakpoint
store                  near  \bstore\b
strict                 near  \bstrict\b
custom_tools           near  \bcustom\b.{0,20}tools?\b|tool.{0,20}\bcustom\b|custom_tool_call
output_limit           near  \bmax_output_tokens
stream_options         any   stream_options|include_usage
max_completion_tokens  near  \bmax_completion_tokens
max_tokens             near  \bmax_tokens
prompt_cache_key       any   prompt_cache_key
parallel_calls         any   only supports? (?:a )?single tool.?calls?|only one tool call|multiple tool calls.{0,40}not
parallel_tool_calls    any   parallel_tool_calls
parallel_tool_calls    near  parallel tool calls?
tool_choice            near  tool[_ ]choice(?! requires)
no_reasoning           any   missing.{0,20}reasoning_content
no_reasoning           any   reasoning_content.{0,60}(?:missing|required|must be|in the thinking)
cache_marker           any   cache_control
is_error               near  \bis_error\b
thought_level          near  reasoning[._]?effort|enable_thinking|think(?:ing)?(?:[._]type)?\b|thinking_budget
opaque                 near  extra_content|reasoning_details|thought_signature|thinking_blocks
reasoning              near  \breasoning(?:_content|_text)?\b
developer_role         near  developer
system_role            near  system (?:role|message|prompt)|['\"`]system['\"`]
system_role            any   roles must alternate|only user(?:,| and) assistant roles
files                  any   \b(?:pdf|document|file)s?\b.{0,80}(?:could not be (?:read|processed)|password)
files                  any   (?:could not|cannot|unable to) (?:read|process|parse).{0,40}\b(?:pdf|document)\b
files                  any   \bpdf\b.{0,40}(?:too many|maximum of \d+) pages|too many pages
files                  near  \binput_file\b|\bfile_data\b|\bpdfs?\b|\bdocument\b|['\"`]file['\"`]
files                  near  \bfile (?:inputs?|parts?)\b
images                 any   image exceeds|image dimensions exceed|could not process image
images                 near  \bimage(?:_url|s)?\b|\bvision\b|multi-?modal content
images                 any   not a multimodal
null_content           any   content.{0,80}(?:null|none\b|nil\b)|(?:null|nil|none).{0,60}content|content is empty
stream                 any   ['\"`]stream['\"`].{0,40}(?:not support|unsupported|must be false)|to stream this model
stream                 any   (?:not support|unsupported) streaming
stream                 any   \bstreaming.{0,30}(?:not supported|unsupported|disabled)
no_content             any   content.{0,40}(?:required|missing)|missing.{0,40}content
"""
"""The parts of a request in the order in which they are checked, each with a pattern for messages that refuse it. If a
line names two parts, crow leaves out the first one, and if the endpoint refuses the request again, the second one, too.
A "near" pattern matches only if a word of refusal (`_NO`) stands shortly before or after it. The patterns of "stream"
match few messages on purpose: one broken stream must not disable streaming at an endpoint permanently."""


def _refusal_pattern(where: str, wording: str) -> re.Pattern[str]:
    if where == "near":
        wording = rf"{_NO}.{{0,60}}(?:{wording})|(?:{wording}).{{0,80}}{_NO}"
    return re.compile(wording, re.IGNORECASE | re.DOTALL)


_REFUSALS = tuple(
    (part, pattern)
    for parts, where, wording in (line.split(maxsplit=2) for line in _REFUSAL_WORDINGS.strip().splitlines())
    for pattern in (_refusal_pattern(where, wording),)
    for part in parts.split("|")
)
_MAX_OUTPUT = re.compile(
    r"max_tokens: \d+ > (\d+)"
    r"|at most (\d[\d,]*) completion tokens|valid range of max_(?:completion_)?tokens is \[\d+,\s*(\d+)\]"
    r"|max_(?:completion_)?tokens\W.{0,60}"
    r"(?:less than or equal to|<=|at most|maximum(?: value)? (?:is|of)|exceed)\D{0,20}(\d[\d,]*)",
    re.IGNORECASE | re.DOTALL,
)


def refused_part(body: ErrorBody, dialect: Dialect) -> str | None:
    """Return the part of the request that the endpoint refused, or None. A part is skipped if leaving it out would not
    change the request."""
    # An error inside a successful response may have no status.
    if body.status not in {None, 400, 404, 415, 422, 500, 501}:
        return None
    for part, wording in _REFUSALS:
        name = dialect.name_of(part)
        if wording.search(body.searched) and dialect.refusing(name) != dialect:
            return name
    return None


_WIRE_WORDS: dict[WireName, str] = {
    "chat": r"chat[/_ ]?completions?\b",
    "responses": r"/responses\b|\bresponses\s*(?:api|endpoint|接口)|\bresponses(?=-only)|(?:to|use) responses\b",
    "messages": r"/messages\b|\bmessages (?:api|endpoint)|\banthropic\W(?:style|compatible|format)",
}
_USE = (
    r"(?:\buse\b|\btry\b|\bvia\b|\bthrough\b|(?:switch|migrate|moved?) to|\bcall\b|\bsee\b|使用|\bmean\b|\bconsider\b"
    r"|(?:supported|available|served|offered) (?:in|on|by|with)|requires?|\bneeds\b|\bonly\b)"
)
_UNSERVED = (
    r"(?:\bnot (?:support|accessible|available|enabled|served|offer|allowed|work)|n't (?:support|work|offer|serve|have)"
    r"|unsupported|\b(?:removed|disabled|closed|no longer|cannot|unavailable)\b|enabled only"
    r"|only (?:enabled|available|supported)|不支持)"
)
_OTHER_NAMED = {
    wire: re.compile(rf"{_USE}[^.]{{0,60}}?(?:{words})|(?:{words})[^.]{{0,20}}only\b", re.I)
    for wire, words in _WIRE_WORDS.items()
}
_OWN_REFUSED = {
    wire: re.compile(rf"{_UNSERVED}[^.]{{0,60}}(?:{words})|(?:{words})[^.]{{0,60}}{_UNSERVED}", re.I)
    for wire, words in _WIRE_WORDS.items()
}
_PARAMETER = re.compile(r"\A(?!.*\b(?:tool|function)s?\b).*\b(?:parameter|argument|field)s?\b", re.I | re.S)
_NOT_IMPLEMENTED = re.compile(r"not[_ ]implemented|convert_request_failed", re.I)


def refuses_wire(body: ErrorBody, wire: WireName) -> bool:
    """Return whether the endpoint does not serve this wire at all, does not serve tools or this model on it, or names
    another wire to use."""
    if body.status in {500, 501}:
        return body.status == 501 or _NOT_IMPLEMENTED.search(body.searched) is not None
    if body.status not in {None, 400, 404, 405, 410, 422}:
        return False
    says_tools = _refuses_tools(body) or _refuses_tools_with_reasoning(body)
    if _PARAMETER.search(body.message) is None:
        others = (pattern for other, pattern in _OTHER_NAMED.items() if other != wire)
        if any(pattern.search(body.message) for pattern in (*others, _OWN_REFUSED[wire])):
            return True
    if not isinstance(model_error(body, Origin()), errors.BadRequest):
        return False
    if _PATTERNS["no item"].search(body.searched) is not None and not says_tools:
        return False
    # LM Studio reports an unexpected endpoint with status 200.
    if body.status in {404, 405, 410} or "unexpected endpoint" in body.message.lower():
        return True
    return body.status is not None and says_tools


def _refuses_tools(body: ErrorBody) -> bool:
    """Return whether the error says that this model cannot call tools at this endpoint."""
    return _says_of_tools(body, "no tools")


def _refuses_tools_with_reasoning(body: ErrorBody) -> bool:
    """Return whether the error says that this model cannot both reason and call tools."""
    return _says_of_tools(body, "tools with reasoning")


def _says_of_tools(body: ErrorBody, kind: str) -> bool:
    """Return whether the error matches this kind of `_PATTERNS`, and is not about a detail of tools, such as a name."""
    is_said = _PATTERNS[kind].search(body.message) is not None
    return is_said and _PATTERNS["other than tools"].search(body.message) is None


def max_output_tokens(body: ErrorBody) -> int | None:
    """Return the largest output limit that the endpoint accepts, or None if the error does not state it."""
    match = _MAX_OUTPUT.search(body.searched) if body.status in {None, 400, 422} else None
    return _count(next(filter(None, match.groups()))) if match is not None else None


# The time for which an endpoint asks crow to wait.

_SPAN_S = {"ms": 0.001, "milli": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}
_MIN_TIMESTAMP = 1e8
"""A number of seconds above this is a Unix time (after 1973) and not a duration."""


def retry_after_s(headers: Mapping[str, str], *, now_s: float, status: int = 429) -> float | None:
    """Return how many seconds the headers of an error with this HTTP status ask crow to wait, or None if they ask for
    no wait. Header names are in lower case. `now_s` is the current Unix time, which is needed for headers that name a
    time."""
    if (milliseconds := _number(headers.get("retry-after-ms", ""))) is not None:
        return max(0.0, milliseconds / 1000)
    if (asked := _wait(headers.get("retry-after", "").strip(), now_s)) is not None:
        return asked
    if status >= 500:
        # Many endpoints send the resets of rate limits with every response, also if the error is about something else.
        return None
    # The headers do not say which of several limits was hit, so the earliest reset is used.
    resets = [_wait(value.strip(), now_s) for key, value in headers.items() if key.startswith("x-ratelimit-reset")]
    return min((wait for wait in resets if wait is not None), default=None)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _wait(text: str, now_s: float) -> float | None:
    """Return how many seconds `text` asks crow to wait, or None if it does not ask for a wait. `text` is a duration
    (`1s`, `6m0s`, `120`) or a time (Unix time in s or ms, an HTTP date, ISO 8601)."""
    if (number := _number(text)) is not None:
        if number > 1000 * _MIN_TIMESTAMP and number > 100 * now_s:
            number /= 1000
        return max(0.0, number - now_s if number > max(_MIN_TIMESTAMP, now_s / 2) else number)
    try:
        if _PATTERNS["span"].fullmatch(text):
            return seconds if math.isfinite(seconds := _seconds(text)) else None
        if named := email.utils.parsedate_tz(text):
            return max(0.0, email.utils.mktime_tz(named) - now_s)
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        return None
    return max(0.0, moment.timestamp() - now_s) if moment.tzinfo is not None else None


def _seconds(text: str) -> float:
    """Return the sum of the durations in `text`, in seconds. `1:30` means minutes and seconds."""
    if ":" in text:
        return float(reduce(lambda so_far, part: so_far * 60 + float(part), text.split(":"), 0.0))
    amounts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|milli|s|m|h|d)?", text, re.IGNORECASE)
    return sum(float(amount) * _SPAN_S[unit.lower()] for amount, unit in amounts)
