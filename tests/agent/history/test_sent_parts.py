"""Tests of what breaks the cache because messages are written in another way than before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crow.agent.history.sent_parts import SentParts
from crow.domain.entries import Assistant, Body
from crow.domain.messages import SentRequest
from crow.llm import ModelInfo
from crow.llm.facts import Refusal
from tests.support.paths import PathBuilder, result_of, said

INFO = ModelInfo(name="m", endpoint="e m", wire="messages")
REFUSAL = Refusal(part="messages.is_error", source="a test", learned_on="2026-01-01", session="s", times=2)


def answer(*calls: str, **dialect: object) -> Assistant:
    sent = SentRequest(digest="d", size=1, endpoint="e m", dialect=dialect)
    return replace(said("", *calls), endpoint="e m", wire="messages", sent=sent)


FAILED = result_of(1, is_error=True)


@pytest.mark.parametrize(
    ("bodies", "info", "expected"),
    [
        ([answer("c1"), FAILED, answer()], INFO, ("is_error",)),
        ([answer("c1"), FAILED, answer(marks_failures=True)], INFO, ()),
        ([answer("c1"), result_of(1), answer()], INFO, ()),
        ([answer("c1"), FAILED, answer()], replace(INFO, refused=(REFUSAL,)), ()),
        ([answer("c1"), FAILED, answer()], replace(INFO, endpoint="other m"), ()),
        ([answer("c1"), FAILED, answer()], replace(INFO, wire="chat"), ("API Chat Completions",)),
        ([said("", "c1"), FAILED], INFO, ()),
    ],
)
def test_marks_of_failures_that_an_older_version_did_not_send_break_the_cache_once(
    bodies: list[Body], info: ModelInfo, expected: tuple[str, ...]
) -> None:
    parts, entries = SentParts("s"), PathBuilder(*bodies).entries
    parts.watch(info, entries)
    assert parts.changed(info) == expected
    parts.watch(info, entries)
    assert parts.changed(info) == ()
