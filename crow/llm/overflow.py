"""How endpoints say that a request is too long, and the numbers they give.

Strategy: one list of wordings to recognise, one of wordings that carry the window (`limit`) and the request's size,
both in tokens. Whatever else speaks of a window or of tokens, of the request, and of too much, is one too; its numbers
are told apart by the words before them. Throttling also speaks of tokens: whoever asks here has ruled it out first.
Pure.
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
