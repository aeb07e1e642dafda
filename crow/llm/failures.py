"""What an endpoint complains of, turned into one of crow's errors.

Strategy: first find the words, wherever a body or an event carries them (`Complaint`); then decide by status, code and
wording what kind of failure they are, throttling before overflow, since both speak of tokens. The provider's own words
stay in the message. Pure: knows neither HTTP client nor stream, and never sees a key.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from crow.llm.overflow import is_overflow, overflow_numbers
from crow.llm.waits import wait_in

__all__ = ["Complaint", "Origin", "complaint_in", "complaint_of_response", "failure", "page_title"]

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
class Complaint:
    """An endpoint's words. `everything` is the whole body or event: the telling part may hide in nested metadata."""

    message: str = ""
    code: str = ""
    status: int | None = None
    everything: str = ""

    @property
    def searched(self) -> str:
        """All words that tell what kind of failure this is."""
        return f"{self.code} {self.message} {self.everything}"[:_SEARCHED_CHARS]


def complaint_in(body: object) -> Complaint | None:
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


def complaint_of_response(status: int, content: bytes) -> Complaint:
    """The words of an HTTP error; HTML is its title, never the page."""
    text = content.decode("utf-8", "replace").strip()
    try:
        body = json.loads(text) if text else None
    except (ValueError, RecursionError):
        title = page_title(text)
        message = title if title is not None else text[:_SHOWN_CHARS]
        return Complaint(message=message, status=status, everything=text[:_SEARCHED_CHARS] if title is None else title)
    found = complaint_in(body)
    if found is None and isinstance(body, (Mapping, str)) and body:
        found = _complaint(body, body)
    if found is None:
        return Complaint(status=status, everything=text[:_SEARCHED_CHARS])
    # The status line is what the server means; a code in the body may be the status of somebody behind it.
    return replace(found, status=status)


def failure(complaint: Complaint, origin: Origin, *, wait_s: float | None = None) -> ModelError:
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


def _other(complaint: Complaint, origin: Origin, *, words: str, wait_s: float | None) -> ModelError:
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


def _complaint_in_choice(body: Mapping[str, object]) -> Complaint | None:
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping) or not choice.get("error"):
        return None
    return _complaint(choice["error"], body)


def _complaint(error: object, body: object) -> Complaint:
    everything = json.dumps(_without_echo(body), ensure_ascii=False, default=str)[:_SEARCHED_CHARS]
    if not isinstance(error, Mapping):
        outer = body if isinstance(body, Mapping) else {}
        code, status = _code_of(outer)
        message = error if isinstance(error, str) else _message_of(outer)
        message = message[:_SEARCHED_CHARS] or str(error)[:_SHOWN_CHARS]
        return Complaint(message=message, code=code, status=status, everything=everything)
    code, status = _code_of(error)
    message = _message_of(error)[:_SEARCHED_CHARS]
    return Complaint(message=message, code=code, status=status, everything=everything)


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


def _words(complaint: Complaint) -> str:
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
