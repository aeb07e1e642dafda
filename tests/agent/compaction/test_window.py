"""Tests how a model's window is determined and learned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import date, timedelta

import pytest

from crow.agent.compaction.window import ContextWindow
from crow.domain.errors import ContextOverflow, StoreError
from crow.llm import ModelInfo
from crow.llm.facts import LearnedWindow, describe_facts, learned_window

HERE = "http://localhost model"
INFO = ModelInfo(name="model", endpoint=HERE, context_window=100_000)


class Memory:
    """Facts of endpoints, as a store keeps them."""

    def __init__(self) -> None:
        self.facts: dict[tuple[str, str], dict[str, object]] = {}

    async def learned(self, base_url: str, model: str) -> Mapping[str, object]:
        return self.facts.get((base_url, model), {})

    async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        self.facts[base_url, model] = {**self.facts.get((base_url, model), {}), **facts}


async def looked_up(memory: Memory, info: ModelInfo = INFO, *, session: str = "s") -> ContextWindow:
    window = ContextWindow(memory, session)
    await window.look_up(info)
    return window


def overflow(limit: int | None = None, size: int | None = None) -> ContextOverflow:
    return ContextOverflow("The request is too long.", limit=limit, size=size)


def learned_by(memory: Memory) -> LearnedWindow | None:
    learned = learned_window(memory.facts.get(("http://localhost", "model"), {}))
    return learned if learned is not None and learned.times else None


async def test_window_is_configured_or_listed_or_assumed() -> None:
    memory = Memory()
    unknown, configured = replace(INFO, context_window=None), replace(INFO, is_window_configured=True)
    window = await looked_up(memory, unknown)
    assert (window.tokens(unknown), window.tokens(INFO)) == (128_000, 100_000)
    assert window.describe(unknown) == "The endpoint does not say how large its window is; crow assumes 128,000 tokens."
    assert window.describe(configured) == "You configured this window."
    await memory.learn("http://localhost", "model", {"listed": {"context_window": 16_384}})
    await window.look_up(unknown)
    assert window.tokens(unknown) == 16_384
    assert window.describe(unknown) == "The endpoint lists this window."


@pytest.mark.parametrize(
    ("error", "tokens", "aim"),
    [
        (overflow(limit=32_768), 32_768, 32_768),
        (overflow(limit=60_000), 60_000, 45_000),
        (overflow(limit=60_000, size=70_000), 60_000, 45_000),
        (overflow(size=60_000), 54_000, 45_000),
        (overflow(), 45_000, 45_000),
        (overflow(limit=1_000_000), 45_000, 45_000),
        (overflow(limit=1_800), 45_000, 45_000),
        (overflow(size=1_000_000), 45_000, 45_000),
    ],
    ids=[
        "limit",
        "limit above what was sent",
        "limit and size with an answer",
        "size",
        "nothing",
        "limit above the declared window",
        "limit below the fixed part",
        "wild size",
    ],
)
async def test_refusal_lowers_the_window_of_its_session_and_a_second_one_of_all_sessions(
    error: ContextOverflow, tokens: int, aim: int
) -> None:
    memory = Memory()
    first = await looked_up(memory, session="one")
    assert await first.on_refusal(INFO, error, used=50_000, fixed=2_000) == aim
    assert (await looked_up(memory, session="one")).tokens(INFO) == tokens
    assert (await looked_up(memory, session="two")).tokens(INFO) == 100_000
    await (await looked_up(memory, session="two")).on_refusal(INFO, error, used=50_000, fixed=2_000)
    assert (await looked_up(memory, session="three")).tokens(INFO) == tokens
    elsewhere = replace(INFO, endpoint="http://elsewhere model")
    assert (await looked_up(memory, elsewhere)).tokens(elsewhere) == 100_000


async def test_consecutive_refusals_count_once_and_the_last_is_believed() -> None:
    memory = Memory()
    window = await looked_up(memory)
    assert await window.on_refusal(INFO, overflow(limit=90_000), used=50_000, fixed=2_000) == 45_000
    # Far less was sent, and still it names the same: that is not the reason.
    assert await window.on_refusal(INFO, overflow(limit=90_000), used=20_000, fixed=2_000) == 18_000
    assert await window.on_refusal(INFO, overflow(limit=12_000), used=18_000, fixed=2_000) == 12_000
    learned = learned_by(memory)
    assert learned is not None
    assert (learned.tokens, learned.times) == (12_000, 1)


async def test_limit_below_an_accepted_request_is_learned_only_after_another_refusal() -> None:
    memory = Memory()
    window = await looked_up(memory)
    await window.on_answer(INFO, sent=33_000, counted=32_000)
    assert await window.on_refusal(INFO, overflow(limit=12_000), used=34_000, fixed=2_000) == 30_600
    assert window.tokens(INFO) == 32_000
    assert await window.on_refusal(INFO, overflow(limit=12_000), used=15_000, fixed=2_000) == 12_000
    assert window.tokens(INFO) == 12_000
    await window.forget(INFO)
    await window.on_answer(INFO, sent=33_000, counted=32_000)
    assert await window.on_refusal(INFO, overflow(limit=12_000), used=20_000, fixed=2_000) == 18_000
    assert learned_by(memory) is None


async def test_guess_that_leaves_no_room_is_learned_the_second_time() -> None:
    window = await looked_up(Memory())
    assert await window.on_refusal(INFO, overflow(), used=3_000, fixed=2_000) == 2_700
    assert window.tokens(INFO) == 100_000
    await window.on_answer(INFO, sent=2_500, counted=2_500)
    assert await window.on_refusal(INFO, overflow(), used=3_000, fixed=2_000) == 2_700
    assert window.tokens(INFO) == 2_700


async def test_description_of_a_learned_window_says_when_and_from_which_words() -> None:
    window = await looked_up(Memory())
    await window.on_refusal(INFO, ContextOverflow("At most 8192\n\x1b[31m tokens."), used=50_000, fixed=2_000)
    assert re.fullmatch(
        r"Crow learned a window of 45,000 tokens on \d{4}-\d\d-\d\d, for this session only \(seen once\), from "
        r'a refused request of about 50,000 tokens: "At most 8192  \[31m tokens\."\. Crow uses it only '
        r"to decide when to compact\. After 8 more answers, or on another day, crow tests whether the "
        r"endpoint accepts more\. `/context forget` drops it\.",
        window.describe(INFO),
    )


async def test_configured_window_discards_the_learned_one_and_is_lowered_only_for_the_session() -> None:
    memory = Memory()
    for session in ("one", "two"):
        await (await looked_up(memory, session=session)).on_refusal(
            INFO, overflow(limit=9_000), used=50_000, fixed=2_000
        )
    configured = replace(INFO, is_window_configured=True)
    window = await looked_up(memory, configured)
    assert window.tokens(configured) == 100_000
    assert memory.facts["http://localhost", "model"] == {"window": None}
    await window.on_refusal(configured, overflow(limit=9_000), used=50_000, fixed=2_000)
    await window.look_up(configured)
    assert window.tokens(configured) == 9_000
    assert (await looked_up(memory, configured)).tokens(configured) == 100_000
    assert (await looked_up(memory)).tokens(INFO) == 100_000


@pytest.mark.parametrize(
    "fact",
    [
        {"declared": 128_000, "tokens": 1_728},
        {"tokens": "9", "source": "s", "learned_on": "d", "session": "s"},
        {"tokens": 0, "source": "s", "learned_on": "d", "session": "s"},
        {"tokens": 9, "source": "s", "learned_on": "d", "session": "s", "times": True},
        "9000",
        None,
    ],
    ids=["of an older version", "text", "zero", "no count", "a string", "nothing"],
)
def test_invalid_fact_is_ignored(fact: object) -> None:
    assert learned_window({"window": fact}) is None


async def test_answer_to_a_longer_request_discards_a_learned_window() -> None:
    memory = Memory()
    window = await looked_up(memory)
    await window.on_refusal(INFO, overflow(limit=8_192), used=50_000, fixed=2_000)
    await window.on_answer(INFO, sent=20_000, counted=8_000)
    assert window.tokens(INFO) == 8_192
    await window.on_answer(INFO, sent=20_000, counted=9_000)
    assert window.tokens(INFO) == 100_000
    assert (await looked_up(memory)).tokens(INFO) == 100_000
    await window.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    await window.on_answer(INFO, sent=12_500, counted=None)  # an estimate may be off
    assert window.tokens(INFO) == 12_000
    await window.on_answer(INFO, sent=14_000, counted=None)
    assert window.tokens(INFO) == 100_000


async def answers(window: ContextWindow, count: int) -> bool:
    """Give some answers, then fill the context. Return whether a larger window is tested."""
    for _ in range(count):
        await window.on_answer(INFO, sent=5_000, counted=5_000)
    window.test_if_due(INFO)
    return window.tokens(INFO) == 100_000


async def test_learned_window_is_tested_after_some_answers_and_later_if_it_still_holds() -> None:
    memory = Memory()
    window = await looked_up(memory)
    await window.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    for patience in (8, 16, 32, 64, 128, 256, 256):
        assert not await answers(window, patience // 2)
        await window.on_compaction(INFO)  # stores the count
        window = await looked_up(memory)
        assert not await answers(window, patience // 2 - 1)
        assert await answers(window, 1)
        assert window.cautious_tokens(INFO) == 12_000
        await window.on_answer(INFO, sent=11_800, counted=11_800)
        assert window.tokens(INFO) == 100_000
        await window.on_refusal(INFO, overflow(), used=13_000, fixed=2_000)
    learned = learned_by(memory)
    assert learned is not None
    assert (learned.tokens, learned.times, learned.answers, learned.patience) == (12_000, 8, 0, 256)


async def test_learned_window_is_tested_with_the_first_full_context_of_another_day() -> None:
    memory, day = Memory(), date(2026, 1, 1)
    window = ContextWindow(memory, "s", today=lambda: day)
    await window.look_up(INFO)
    await window.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    for _ in range(3):
        assert not await answers(window, 1)
        day += timedelta(days=1)
        assert await answers(window, 0)
        await window.on_refusal(INFO, overflow(), used=13_000, fixed=2_000)


async def test_session_whose_longer_requests_were_accepted_tests_a_window_learned_by_others() -> None:
    memory = Memory()
    own = await looked_up(memory, session="own")
    await own.on_answer(INFO, sent=40_000, counted=40_000)
    for session in ("one", "two"):
        other = await looked_up(memory, session=session)
        await other.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    await own.look_up(INFO)
    assert own.tokens(INFO) == 12_000
    assert await answers(own, 0)
    await own.on_refusal(INFO, overflow(limit=12_000), used=41_000, fixed=2_000)
    assert not await answers(own, 0)
    learned = learned_by(memory)
    assert learned is not None
    assert (learned.times, learned.patience) == (3, 8)


@pytest.mark.parametrize(("days", "patience"), [(0, 8), (1, 32)], ids=["on the same day", "on another day"])
async def test_disproved_window_leaves_only_its_patience_if_it_lasted_until_another_day(
    days: int, patience: int
) -> None:
    memory, day = Memory(), date(2026, 1, 1)
    window = ContextWindow(memory, "s", today=lambda: day)
    await window.look_up(INFO)
    await window.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    for _ in range(2):
        assert await answers(window, 128)
        await window.on_refusal(INFO, overflow(), used=13_000, fixed=2_000)
    day += timedelta(days=days)
    await window.on_answer(INFO, sent=40_000, counted=40_000)
    assert (learned_by(memory), window.tokens(INFO)) == (None, 100_000)
    assert describe_facts(memory.facts["http://localhost", "model"]) == ()
    await window.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    learned = learned_by(memory)
    assert learned is not None
    assert (learned.patience, learned.times) == (patience, 1)


async def test_silently_truncated_window_is_tested_with_one_answer() -> None:
    window = await looked_up(Memory())
    await window.on_truncation(INFO, 1_900, fixed=2_000)
    assert window.tokens(INFO) == 100_000
    await window.on_truncation(INFO, 8_192, fixed=2_000)
    assert window.tokens(INFO) == 8_192
    assert await answers(window, 8)
    await window.on_answer(INFO, sent=8_500, counted=8_192)
    assert window.tokens(INFO) == 100_000
    await window.on_answer(INFO, sent=10_500, counted=8_200)
    assert window.tokens(INFO) == 8_192
    assert await answers(window, 16)
    await window.on_answer(INFO, sent=10_500, counted=10_400)
    assert window.describe(INFO) == "The endpoint lists this window."


async def test_learned_window_can_be_forgotten_for_all_sessions() -> None:
    memory = Memory()
    window = await looked_up(memory)
    assert await window.forget(INFO) is None
    await window.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    other = await looked_up(memory, session="other")
    learned = await other.forget(INFO)
    assert learned is not None
    assert learned.tokens == 12_000
    await window.look_up(INFO)
    assert window.tokens(INFO) == 100_000


async def test_store_failure_does_not_prevent_learning_for_the_session() -> None:
    class Full(Memory):
        async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
            raise StoreError("The disk is full.")

    window = await looked_up(Full())
    await window.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    assert window.tokens(INFO) == 12_000
    assert ContextWindow().tokens(INFO) == 100_000
