"""Estimates within a factor of two of real tokenizers, and cuts to a size."""

from __future__ import annotations

import base64
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.messages import AssistantMessage, Image, ToolCall, ToolMessage, ToolSpec, UserMessage
from crow.domain.tokens import (
    IMAGE_TOKENS,
    MESSAGE_TOKENS,
    estimate_message,
    estimate_text,
    estimate_tools,
    fit,
    head_and_tail,
)

ENGLISH = "The parser reads one byte at a time and never looks back, whatever the server sends. " * 20
CHINESE = "解析器每次读取一个字节，无论服务器发送什么都不会回头。" * 20
JAPANESE = "サーバーが何を送っても、パーサーは一度に一バイトずつ読みます。" * 20
RUSSIAN = "Разбор идёт по одному байту и никогда не возвращается назад. " * 20
ENCODED = base64.b64encode(random.Random(7).randbytes(9_000)).decode()


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        # tokens per character that current tokenizers need, from the most thrifty to the most lavish
        pytest.param(ENGLISH, 0.18, 0.30, id="English"),
        pytest.param(CHINESE, 0.55, 1.30, id="Chinese"),
        pytest.param(JAPANESE, 0.55, 1.30, id="Japanese"),
        pytest.param(RUSSIAN, 0.25, 0.50, id="Russian"),
        pytest.param(ENCODED, 0.45, 0.80, id="base64"),
        pytest.param("\n".join(ENCODED[at : at + 64] for at in range(0, 9_000, 64)), 0.45, 0.80, id="base64 in lines"),
        pytest.param(
            "/home/user/projects/crow/tests/agent/test_compaction_laws_of_sessions\n" * 20, 0.18, 0.30, id="paths"
        ),
        pytest.param("🙂🚀" * 50, 1.0, 3.0, id="emoji"),
    ],
)
def test_no_script_is_misjudged_by_more_than_a_factor_of_two(text: str, least: float, most: float) -> None:
    per_character = estimate_text(text) / len(text)
    assert most / 2 <= per_character <= least * 2


@given(st.text())
def test_any_text_has_an_estimate_that_grows_with_it(text: str) -> None:
    assert 0 <= estimate_text(text) <= 2 * len(text) + 1
    assert estimate_text(text) <= estimate_text(text + "one more sentence")
    assert (estimate_text(text) == 0) == (text == "")


def test_lone_surrogates_are_counted() -> None:
    assert estimate_text("a\ud800b") > 0


def test_a_picture_costs_the_same_whatever_its_size() -> None:
    small, large = (Image(data="A" * size, mime_type="image/png") for size in (10, 1_000_000))
    assert estimate_message(UserMessage(parts=(small,))) == estimate_message(UserMessage(parts=(large,)))
    assert estimate_message(UserMessage(parts=(small,))) == MESSAGE_TOKENS + IMAGE_TOKENS


def test_calls_and_results_count_with_their_frames() -> None:
    call = ToolCall(id="a", name="read_file", arguments='{"path": "/proj/readme"}')
    assert estimate_message(AssistantMessage(text="", calls=(call,))) > estimate_message(AssistantMessage(text=""))
    assert estimate_message(ToolMessage(call_id="a", text="")) > MESSAGE_TOKENS


def test_reasoning_counts_only_if_it_may_be_sent_back() -> None:
    plain = estimate_message(AssistantMessage(text="yes"))
    assert estimate_message(AssistantMessage(text="yes", thought="hm " * 100)) == plain
    field = AssistantMessage(text="yes", thought="hm " * 100, reasoning_field="reasoning_content")
    assert estimate_message(field) > plain + 50
    assert estimate_message(AssistantMessage(text="yes", opaque={"details": "hm " * 100})) > plain + 50


def test_text_that_the_items_of_an_answer_repeat_counts_once() -> None:
    plain = estimate_message(AssistantMessage(text=ENGLISH))
    items = [{"data": {"type": "text", "text": ENGLISH}}]
    assert plain <= estimate_message(AssistantMessage(text=ENGLISH, opaque={"items": items})) < 1.2 * plain


def test_tool_schemas_count() -> None:
    spec = ToolSpec(name="f", description="d" * 400, input_schema={"properties": {"x" * 400: {}}})
    assert estimate_tools([spec]) > 200
    assert estimate_tools([spec, spec]) == 2 * estimate_tools([spec])


def test_utf8_text_is_cut_between_characters() -> None:
    assert (
        head_and_tail("äöü" * 100, 9, 5) == "äöüäöü\n[... 291 of 300 characters are left out here; recall with entry 5"
        " gives all of it ...]\näöü"
    )


def test_a_negative_size_leaves_only_the_marker() -> None:
    assert fit("", -4, 12) == ""
    assert "entry 12" in fit("x", -4, 12)


@given(text=st.text(max_size=3_000), tokens=st.integers(0, 500))
def test_fit_stays_within_its_tokens_unless_only_the_marker_is_left(text: str, tokens: int) -> None:
    fitted = fit(text, tokens, 12)
    if estimate_text(text) <= tokens:
        assert fitted == text
    else:
        assert "entry 12" in fitted
        assert estimate_text(fitted) <= max(tokens, estimate_text(head_and_tail(text, 0, 12)))
