"""Reads the token counts that endpoints report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from crow.domain.messages import Usage


def read_usage(report: object) -> Usage | None:
    """Return the token counts in one report, or None if it contains none. The counts may have the names of any
    provider, because gateways mix them."""
    if not isinstance(report, Mapping):
        return None
    sent = first_count(report, "prompt_tokens", "input_tokens")
    made = first_count(report, "completion_tokens", "output_tokens")
    in_details = report.get("prompt_tokens_details") or report.get("input_tokens_details")
    out_details = report.get("completion_tokens_details") or report.get("output_tokens_details")
    if (cached := first_count(in_details, "cached_tokens")) is None:
        cached = first_count(report, "prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    is_anthropic = report.get("prompt_tokens") is None and first_count(in_details, "cached_tokens") is None
    if sent is not None and is_anthropic:
        # Anthropic's input count does not include tokens that are read from the cache or written to it.
        sent += first_count(report, "cache_read_input_tokens") or 0
        sent += first_count(report, "cache_creation_input_tokens") or 0
    # the names that OpenRouter, LiteLLM and Anthropic use
    if (written := first_count(in_details, "cache_write_tokens", "cache_creation_tokens")) is None:
        written = first_count(report, "cache_creation_input_tokens")
    if (reasoning := first_count(out_details, "reasoning_tokens")) is None:
        reasoning = first_count(report, "reasoning_tokens")
    total = first_count(report, "total_tokens")
    if reasoning and sent is not None and made is not None and total == sent + made + reasoning:
        # xAI counts reasoning in addition to the completion. All other providers include it in the completion.
        made += reasoning
    usage = Usage(
        input_tokens=sent,
        output_tokens=made,
        cached_tokens=cached,
        reasoning_tokens=reasoning,
        cache_write_tokens=written,
    )
    return None if usage == Usage() else usage


def first_count(report: object, *keys: str) -> int | None:
    """Return the first token count in `report` under one of `keys`, or None if there is none."""
    members: Mapping[str, object] = report if isinstance(report, Mapping) else {}
    for key in keys:
        value = members.get(key)
        if isinstance(value, str) and value.isdecimal() and len(value) < 13:
            value = int(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12:
            return int(value)
    return None


def merge_usage(known: Usage | None, report: Usage | None) -> Usage | None:
    """Return `known`, updated with the counts in `report`. Reports are cumulative, so the newest count of each kind is
    used. A zero does not replace a known count, because some servers send zero instead of leaving a count out. If
    `known` is not None, a `report` in which both input and output are zero or missing is ignored."""
    if report is None or known is None:
        return report or known
    if not (report.input_tokens or report.output_tokens):
        return known
    counts = {each.name: getattr(report, each.name) for each in fields(report)}
    return replace(known, **{name: count for name, count in counts.items() if count or getattr(known, name) is None})
