"""Token counts, wherever and under whatever names an endpoint reports them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from crow.domain.messages import Usage

__all__ = ["newer_usage", "read_usage"]


def read_usage(report: object) -> Usage | None:
    """The counts of one report; None if it holds none."""
    if not isinstance(report, Mapping):
        return None
    sent = _first(report, "prompt_tokens", "input_tokens")
    made = _first(report, "completion_tokens", "output_tokens")
    in_details = _mapping(report.get("prompt_tokens_details") or report.get("input_tokens_details"))
    out_details = _mapping(report.get("completion_tokens_details") or report.get("output_tokens_details"))
    cached = _first(in_details, "cached_tokens")
    if cached is None:
        cached = _first(report, "prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    if sent is not None and report.get("prompt_tokens") is None:
        # Anthropic's own counts leave what was read from the cache, or written to it, out of the input.
        beside = (_first(report, "cache_read_input_tokens"), _first(report, "cache_creation_input_tokens"))
        sent += sum(count for count in beside if count is not None)
    reasoning = _first(out_details, "reasoning_tokens")
    if reasoning is None:
        reasoning = _first(report, "reasoning_tokens")
    total = _first(report, "total_tokens")
    if reasoning and sent is not None and made is not None and total == sent + made + reasoning:
        # xAI counts the reasoning beside the completion, everybody else inside it.
        made += reasoning
    usage = Usage(input_tokens=sent, output_tokens=made, cached_tokens=cached, reasoning_tokens=reasoning)
    return None if usage == Usage() else usage


def newer_usage(known: Usage | None, report: Usage | None) -> Usage | None:
    """Reports are cumulative: the last one counts, member by member; one of zeros says nothing after one of numbers."""
    if report is None or known is None:
        return report or known
    if not (report.input_tokens or report.output_tokens):
        return known
    return Usage(
        input_tokens=_newer(known.input_tokens, report.input_tokens),
        output_tokens=_newer(known.output_tokens, report.output_tokens),
        cached_tokens=_newer(known.cached_tokens, report.cached_tokens),
        reasoning_tokens=_newer(known.reasoning_tokens, report.reasoning_tokens),
    )


def _newer(known: int | None, reported: int | None) -> int | None:
    return known if reported is None else reported


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _first(report: Mapping[str, object], *keys: str) -> int | None:
    for key in keys:
        value = report.get(key)
        if isinstance(value, str) and value.isdecimal() and len(value) < 13:
            value = int(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12:
            return int(value)
    return None
