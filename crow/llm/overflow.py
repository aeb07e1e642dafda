"""How endpoints say that a request is too long, and the numbers they give.

Strategy: one list of wordings to recognise, one of wordings that carry the window (`limit`) and the request's size,
both in tokens. Throttling also speaks of tokens: whoever asks here has ruled it out first. Pure.
"""

from __future__ import annotations

import re

__all__ = ["is_overflow", "overflow_numbers"]

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
            r"输入长度超过|上下文长度|超过最大长度|输入过长",
        )
    ),
    re.IGNORECASE | re.DOTALL,
)
_NOT_OVERFLOW = re.compile(
    # Either is meant: a request with bad parameters gets these words too.
    r"possible causes|"
    # The limit of one answer, not of the window.
    r"at most \d[\d,]* completion tokens|valid range of max_tokens|max_tokens must be",
    re.IGNORECASE,
)

_NUMBER = r"\d[\d,]*"
_NUMBERED = tuple(
    re.compile(wording.replace("LIMIT", f"(?P<limit>{_NUMBER})").replace("SIZE", f"(?P<size>{_NUMBER})"), re.I | re.S)
    for wording in (
        r"prompt is too long:\s*SIZE\s*tokens\s*>\s*LIMIT",
        r"exceed context limit:\s*SIZE\s*\+\s*(?P<more>\d[\d,]*)\s*>\s*LIMIT",
        r"n_prompt_tokens\W{1,4}SIZE.{0,80}?n_ctx\W{1,4}LIMIT",
        r"n_ctx\W{1,4}LIMIT.{0,80}?n_prompt_tokens\W{1,4}SIZE",
        r"request \(SIZE tokens?\) exceeds the available context size \(LIMIT",
        r"maximum context length\D{0,5}LIMIT.{0,120}?(?:requested|resulted in|contains?|has)\s+(?:at least )?SIZE",
        r"requested (?P<more>\d[\d,]*) output tokens and your prompt contains at least SIZE",
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


def is_overflow(words: str) -> bool:
    """Whether `words` say that the request is too long for the model."""
    return _WORDINGS.search(words) is not None and _NOT_OVERFLOW.search(words) is None


def overflow_numbers(words: str) -> tuple[int | None, int | None]:
    """`(limit, size)` in tokens, as far as stated; size counts the output where the endpoint does."""
    for wording in _NUMBERED:
        match = wording.search(words)
        if match is None:
            continue
        numbers = match.groupdict()
        limit, size = _tokens(numbers.get("limit")), _tokens(numbers.get("size"))
        more = _tokens(numbers.get("more"))
        if size is not None and more is not None:
            size += more
        if limit is not None and limit < 256:
            # No window is that small: the number means something else (a status, a position).
            limit = None
        return limit, size
    return None, None


def _tokens(digits: str | None) -> int | None:
    number = (digits or "").replace(",", "")
    return int(number) if number and len(number) < 12 else None
