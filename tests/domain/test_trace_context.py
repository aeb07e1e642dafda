"""Which trace contexts of a client are used."""

from __future__ import annotations

from typing import Any

import pytest

from crow.domain.trace_context import trace_context_from

PARENT = "00-80e1afed08e019fc1110464cfa66635c-7a085853722dc6d2-01"


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"traceparent": PARENT},
        {"traceparent": PARENT, "tracestate": "a=1, b=2", "baggage": "user=ann;x=y"},
        {"traceparent": f"cc{PARENT[2:]}-what-the-future-will-be-like"},
        {"baggage": "x" * 8_192},
    ],
)
def test_valid_values_are_copied_unchanged(meta: dict[str, str]) -> None:
    assert trace_context_from({**meta, "other": "x"}) == meta


@pytest.mark.parametrize(
    "parent",
    [
        None,
        7,
        "",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}\n",
        f"{PARENT}-more",
        f"ff{PARENT[2:]}",
        f"00-{'0' * 32}-7a085853722dc6d2-01",
        f"00-80e1afed08e019fc1110464cfa66635c-{'0' * 16}-01",
    ],
)
def test_an_invalid_traceparent_is_left_out_with_its_tracestate(parent: Any) -> None:
    assert trace_context_from({"traceparent": parent, "tracestate": "a=1", "baggage": "b=2"}) == {"baggage": "b=2"}


@pytest.mark.parametrize("value", ["", " ", "a\r\nAuthorization: x", "a\x00", "ü", "x" * 8_193, ["a"], {"a": 1}])
def test_values_that_cannot_be_headers_are_left_out(value: Any) -> None:
    assert trace_context_from({"traceparent": PARENT, "tracestate": value, "baggage": value}) == {"traceparent": PARENT}
