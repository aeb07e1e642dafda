"""How one endpoint wants its requests, and what its refusals teach.

Strategy: a dialect is a frozen value that starts from what the base URL tells and changes only when the endpoint
refuses a part of a request by name. What was refused is kept as plain names, so that it can be remembered across
processes. Pure: knows neither how a request is encoded nor how it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from crow.llm.endpoint import Endpoint, Thinking
from crow.llm.errors import ErrorBody

__all__ = ["Dialect", "dialect_of", "most_output_tokens", "refused_part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What goes into a request, and how. `refused` names what this endpoint did not take, in the order it was learned.

    `limit_field`: what the output limit is called. `usage_option`: `stream_options.include_usage` is sent.
    `empty_content`: what stands beside calls where there is no text. `reasoning`: the thought goes back under the field
    it came in; `always` also where there was none (as ''), which some endpoints demand; `inline` writes it into the
    content again. `thinking`: where the thought level goes, None for nowhere. `parallel_calls` None leaves it to the
    endpoint; False also spreads calls that were made at once over messages of one call each. `streams` False: the
    answer comes in one piece.
    """

    limit_field: Literal["max_tokens", "max_completion_tokens"] | None = "max_tokens"
    usage_option: bool = True
    tool_choice: bool = True
    parallel_calls: bool | None = None
    empty_content: Literal["null", "omitted", "blank"] = "null"
    reasoning: Literal["none", "own", "always", "inline"] = "own"
    system_role: Literal["system", "developer", "user"] = "system"
    takes_images: bool = True
    cache_key: bool = False
    cache_marker: bool = False
    thinking: Thinking | None = "effort"
    opaque: bool = True
    streams: bool = True
    refused: tuple[str, ...] = ()

    def refusing(self, part: str) -> Dialect:
        """The dialect of an endpoint that refused `part`; the same one if nothing can be changed about it."""
        changed = self._changed(part)
        return self if changed == self else replace(changed, refused=(*self.refused, part))

    def refusing_all(self, parts: Iterable[str]) -> Dialect:
        """As `refusing`, one after the other."""
        dialect = self
        for part in parts:
            dialect = dialect.refusing(part)
        return dialect

    def _changed(self, part: str) -> Dialect:
        match part:
            case "stream_options":
                return replace(self, usage_option=False)
            case "stream":
                return replace(self, streams=False, usage_option=False)
            case "max_tokens" if self.limit_field == "max_tokens":
                tried = "max_completion_tokens" in self.refused
                return replace(self, limit_field=None if tried else "max_completion_tokens")
            case "max_completion_tokens" if self.limit_field == "max_completion_tokens":
                tried = "max_tokens" in self.refused
                return replace(self, limit_field=None if tried else "max_tokens")
            case "tool_choice":
                return replace(self, tool_choice=False)
            case "parallel_tool_calls":
                return replace(self, parallel_calls=None)
            case "parallel_calls":
                return replace(self, parallel_calls=False)
            case "prompt_cache_key":
                return replace(self, cache_key=False)
            case "cache_marker":
                return replace(self, cache_marker=False)
            case "thought_level":
                return replace(self, thinking=None)
            case "null_content" if self.empty_content == "null":
                return replace(self, empty_content="omitted")
            case "no_content" if self.empty_content == "omitted":
                return replace(self, empty_content="blank")
            case "no_reasoning":
                return replace(self, reasoning="always")
            case "reasoning" if self.thinking == "reasoning":
                # Its name for the thought level is that of the field in older answers: the likelier part goes first.
                return replace(self, thinking=None)
            case "reasoning":
                return replace(self, reasoning="none")
            case "opaque":
                return replace(self, opaque=False)
            case "images":
                return replace(self, takes_images=False)
            case "system_role" if self.system_role == "system":
                return replace(self, system_role="developer")
            case "developer_role" | "system_role" if self.system_role != "user":
                return replace(self, system_role="user")
            case _:
                return self


def dialect_of(endpoint: Endpoint) -> Dialect:
    """What is known of an endpoint before the first request."""
    return Dialect(
        limit_field=endpoint.limit_field,
        cache_key=endpoint.cache == "key",
        # Only these models cache nothing unless they are asked to.
        cache_marker=endpoint.cache == "marker" and bool(_MARKED.search(endpoint.model)),
        takes_images=endpoint.takes_images,
        thinking=endpoint.thinking,
    )


_MARKED = re.compile(r"claude|anthropic", re.IGNORECASE)
_NO = (
    r"(?:unsupported|not support|not enabled|not have|no endpoints|deprecated|unrecogni[sz]ed|unknown"
    r"|unexpected|not permitted|not allowed|extra (?:inputs|fields)"
    r"|additional propert|no such|invalid|not a valid|cannot|can't|must|only)"
)


def _refusal_of(name: str) -> str:
    """A wording in which the name and the refusal stand close to each other, in either order."""
    return rf"{_NO}.{{0,60}}(?:{name})|(?:{name}).{{0,80}}{_NO}"


_PARTS = tuple(
    (part, re.compile(wording, re.IGNORECASE | re.DOTALL))
    for part, wording in (
        ("stream_options", r"stream_options|include_usage"),
        ("max_completion_tokens", _refusal_of(r"\bmax_completion_tokens")),
        ("max_tokens", _refusal_of(r"\bmax_tokens")),
        ("prompt_cache_key", r"prompt_cache_key"),
        (
            "parallel_calls",
            r"only supports? (?:a )?single tool.?calls?|only one tool call|multiple tool calls.{0,40}not",
        ),
        ("parallel_tool_calls", r"parallel_tool_calls|" + _refusal_of("parallel tool calls?")),
        ("tool_choice", _refusal_of("tool[_ ]choice(?! requires)")),
        (
            "no_reasoning",
            r"missing.{0,20}reasoning_content|reasoning_content.{0,60}(?:missing|required|must be|in the thinking)",
        ),
        ("cache_marker", r"cache_control"),
        (
            "thought_level",
            _refusal_of("reasoning[._]?effort|enable_thinking|think(?:ing)?(?:[._]type)?\\b|thinking_budget"),
        ),
        ("opaque", _refusal_of("extra_content|reasoning_details|thought_signature")),
        ("reasoning", _refusal_of(r"\breasoning(?:_content|_text)?\b")),
        ("developer_role", _refusal_of("developer")),
        (
            "system_role",
            _refusal_of(r"system (?:role|message|prompt)|['\"`]system['\"`]")
            + "|roles must alternate|only user(?:,| and) assistant roles",
        ),
        ("images", _refusal_of(r"\bimage(?:_url|s)?\b|\bvision\b|multi-?modal content") + "|not a multimodal"),
        ("null_content", r"content.{0,80}(?:null|none\b|nil\b)|(?:null|nil|none).{0,60}content|content is empty"),
        (
            # Told narrowly: an endpoint that only stumbled over a stream must not be asked without one for ever.
            "stream",
            (
                r"['\"`]stream['\"`].{0,40}(?:not support|unsupported|must be false)|to stream this model"
                r"|(?:not support|unsupported) streaming|\bstreaming.{0,30}(?:not supported|unsupported|disabled)"
            ),
        ),
        ("no_content", r"content.{0,40}(?:required|missing)|missing.{0,40}content"),
    )
)
_MOST_OUTPUT = re.compile(
    r"at most (\d[\d,]*) completion tokens|valid range of max_(?:completion_)?tokens is \[\d+,\s*(\d+)\]"
    r"|max_(?:completion_)?tokens\W.{0,60}"
    r"(?:less than or equal to|<=|at most|maximum(?: value)? (?:is|of)|exceed)\D{0,20}(\d[\d,]*)",
    re.IGNORECASE | re.DOTALL,
)


def refused_part(complaint: ErrorBody, dialect: Dialect) -> str | None:
    """The part of the request that the endpoint refused, if leaving it out would change the next request. A complaint
    within a successful response may have no status."""
    if complaint.status not in {None, 400, 404, 415, 422, 500, 501}:
        return None
    for part, wording in _PARTS:
        if wording.search(complaint.searched) and dialect.refusing(part) != dialect:
            return part
    return None


def most_output_tokens(complaint: ErrorBody) -> int | None:
    """The largest output limit that the endpoint takes, if it refused ours and said so."""
    match = _MOST_OUTPUT.search(complaint.searched) if complaint.status in {None, 400, 422} else None
    if match is None:
        return None
    return int(next(group for group in match.groups() if group).replace(",", "")) or None
