"""Numbers from endpoints that are text, negative, NaN, enormous or missing."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from crow.agent.compaction.budget import CompactionPolicy, limits_for
from crow.agent.history.usage import usage_of_answer
from crow.domain.errors import ContextOverflow
from crow.domain.messages import Usage
from crow.llm import ModelLimits, cost_of
from crow.llm.chat.parser import ChatParser
from crow.llm.endpoint import Endpoint
from crow.llm.errors import ErrorBody, Origin, max_output_tokens, model_error, parse_error_response, retry_after_s
from crow.llm.learning import EndpointFacts
from crow.llm.listing import facts_of, read_listing
from tests.support.amounts import examples

NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([0, 1, -1, 10**30, -(10**30), 10**400, 1e308, math.nan, math.inf, -math.inf, None, True, False]),
    st.sampled_from(
        ["", "0", "12", "-5", "1e3", "1e999", "NaN", "Infinity", "1_000", "٣", "²", "0x10", "12 tokens", "9" * 5_000]
    ),
    st.integers(),
    st.floats(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["tokens", "value"]), st.integers(), max_size=1),
)
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens", "cached_tokens")
DETAILS = st.dictionaries(
    st.sampled_from(["cached_tokens", "cache_write_tokens", "cache_creation_tokens", "reasoning_tokens"]), NUMBERS
)
REPORTS = st.builds(
    lambda counts, sent, made: {**counts, "prompt_tokens_details": sent, "completion_tokens_details": made},
    st.dictionaries(st.sampled_from([*COUNTS, "cache_read_input_tokens", "cache_creation_input_tokens"]), NUMBERS),
    DETAILS | NUMBERS,
    DETAILS | NUMBERS,
)
PLACES = ("context_length", "max_model_len", "context_window", "max_completion_tokens", "loaded_context_length")
PRICES = ("prompt", "completion", "input_cache_read", "input_cache_write")
ITEMS = st.builds(
    lambda sizes, prices, top: {"id": "m", **sizes, "pricing": prices, "top_provider": top},
    st.dictionaries(st.sampled_from(PLACES), NUMBERS),
    st.dictionaries(st.sampled_from(PRICES), NUMBERS) | NUMBERS,
    st.dictionaries(st.sampled_from(PLACES), NUMBERS) | NUMBERS,
)
ENDPOINT = Endpoint(base_url="http://localhost/v1", model="m")
PRICED = ModelLimits(input_price=3.0, cached_price=0.3, cache_write_price=3.75, output_price=15.0)
many = settings(max_examples=examples(20), database=None)


def is_sane(limits: ModelLimits) -> bool:
    """Whether sizes are whole numbers of a possible size and prices are finite and not negative."""
    sizes, prices = fields(ModelLimits)[:2], fields(ModelLimits)[2:]  # the output limit may be small
    return all(
        value is None or (type(value) is int and 1 <= value <= 10**9)
        for value in (getattr(limits, each.name) for each in sizes)
    ) and all(
        value is None or (math.isfinite(value) and value >= 0)
        for value in (getattr(limits, each.name) for each in prices)
    )


@given(reports=st.lists(REPORTS | NUMBERS, min_size=1, max_size=3))
@many
def test_any_usage_gives_counts_that_can_be_stored_and_a_finite_cost(reports: list[Any]) -> None:
    parser = ChatParser()
    events = [json.dumps({"choices": [{"delta": {"content": "Hi"}}], "usage": report}) for report in reports]
    parser.feed([*events, json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}), "[DONE]"])
    answer = parser.finish()
    assert answer.text == "Hi" * len(reports)
    usage = usage_of_answer(answer, sent=100)
    counts = [getattr(usage, each.name) for each in fields(Usage) if each.name.endswith("_tokens")]
    assert all(count is None or (type(count) is int and 0 <= count < 10**13) for count in counts)
    assert usage.input_tokens is not None
    assert usage.output_tokens is not None
    info = EndpointFacts(Endpoint(base_url="http://localhost/v1", model="m", **limits_of(PRICED)), None, {}).info
    cost = cost_of(usage, info)
    assert cost is not None
    assert 0 <= cost < 10**9


@given(items=st.lists(ITEMS, min_size=1, max_size=3))
@many
def test_any_listing_gives_possible_windows_and_prices(items: list[Any]) -> None:
    for offered in read_listing(json.loads(json.dumps({"data": items}))) or ():
        assert is_sane(offered)
        stored = json.loads(json.dumps(facts_of(offered), allow_nan=False))
        info = EndpointFacts(ENDPOINT, None, stored).info
        assert is_sane(info)
        limits = limits_for(info.context_window or 128_000, info.max_output_tokens, 1_000, CompactionPolicy())
        assert limits.threshold <= limits.window


@given(listed=st.dictionaries(st.sampled_from([each.name for each in fields(ModelLimits)]), NUMBERS) | NUMBERS)
@many
def test_any_stored_facts_give_possible_windows_and_prices(listed: Any) -> None:
    assert is_sane(EndpointFacts(ENDPOINT, None, {"listed": listed, "max_output_tokens": listed}).info)


@given(number=NUMBERS, name=st.sampled_from(["retry-after", "retry-after-ms", "x-ratelimit-reset-tokens"]))
@many
def test_any_wait_is_finite_or_unknown(number: Any, name: str) -> None:
    wait_s = retry_after_s({name: str(number)}, now_s=1.8e9)
    assert wait_s is None or (math.isfinite(wait_s) and wait_s >= 0)


@given(limit=NUMBERS, size=NUMBERS, status=st.sampled_from([200, 400, 413, 429, 500, 503]))
@many
def test_any_numbers_in_an_error_are_plausible_or_unknown(limit: Any, size: Any, status: int) -> None:
    words = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {size} tokens."
    content = json.dumps({"error": {"message": words, "code": limit, "status": size, "n_ctx": limit}}).encode()
    body: ErrorBody = parse_error_response(status, content)
    error = model_error(body, Origin())
    if isinstance(error, ContextOverflow):
        assert all(count is None or 0 <= count < 10**13 for count in (error.limit, error.size))
    accepted = max_output_tokens(body)
    assert accepted is None or 0 < accepted < 10**13


def limits_of(limits: ModelLimits) -> dict[str, Any]:
    return {each.name: getattr(limits, each.name) for each in fields(ModelLimits)}
