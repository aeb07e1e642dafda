"""Token counts under the names of many providers."""

from __future__ import annotations

from crow.domain.messages import Usage
from crow.llm.usage import merge_usage, read_usage


def test_cached_tokens_are_added_only_where_the_input_leaves_them_out() -> None:
    anthropic = {"input_tokens": 20, "cache_read_input_tokens": 80}
    both = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 80}, "cache_read_input_tokens": 80}
    assert read_usage(anthropic) == read_usage(both) == Usage(input_tokens=100, cached_tokens=80)


def test_a_zero_in_a_later_report_stands_for_a_count_that_it_leaves_out() -> None:
    first, later = Usage(input_tokens=100, output_tokens=1), Usage(input_tokens=0, output_tokens=50)
    assert merge_usage(first, later) == Usage(input_tokens=100, output_tokens=50)


def test_the_first_count_of_a_kind_may_be_zero() -> None:
    first, later = Usage(input_tokens=100), Usage(output_tokens=50, cached_tokens=0)
    assert merge_usage(first, later) == Usage(input_tokens=100, output_tokens=50, cached_tokens=0)
