"""Formulas and measuring."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.agent.compaction.budget import (
    CompactionPolicy,
    Limits,
    Measure,
    cut_for,
    limits_for,
    measure,
    recalibrated,
    reports_since_break,
    silent_cut,
)
from crow.agent.compaction.window import ContextWindow, LearnedWindow, learned_in
from crow.domain.conversation import Projection
from crow.domain.entries import Assistant, Checkpoint, Entry, Mask, Prompt
from crow.domain.errors import ContextOverflow, StoreError
from crow.domain.messages import Usage
from crow.domain.tokens import estimate_text
from crow.llm import ModelInfo
from tests.support.paths import PathBuilder, result_of, said, user

DEFAULTS = CompactionPolicy()
HERE = "http://localhost model"


def test_limits_of_a_large_window() -> None:
    assert limits_for(200_000, 32_000, 10_000, DEFAULTS) == Limits(
        window=200_000,
        is_configured=False,
        output=32_000,
        fixed=10_000,
        threshold=168_000,
        room=158_000,
        target=89_000,
        keep=20_000,
        pins=19_750,
        summary=6_000,
        lists=4_000,
        skills=8_000,
    )


def test_limits_of_a_small_window() -> None:
    assert limits_for(8_000, 4_096, 2_000, DEFAULTS) == Limits(
        window=8_000,
        is_configured=False,
        output=2_000,
        fixed=2_000,
        threshold=6_000,
        room=4_000,
        target=4_000,
        keep=800,
        pins=500,
        summary=400,
        lists=200,
        skills=250,
    )


def test_settings_move_threshold_tail_and_target() -> None:
    settings = CompactionPolicy(threshold=0.5, keep_tokens=1_000, target=0.25)
    limits = limits_for(100_000, None, 10_000, settings)
    assert (limits.threshold, limits.keep, limits.target, limits.output) == (50_000, 1_000, 20_000, None)


@given(
    window=st.integers(4_000, 2_000_000),
    max_output=st.none() | st.integers(1, 1_000_000),
    fixed=st.integers(0, 50_000),
)
def test_a_compacted_request_has_room_for_its_parts_in_any_window(
    window: int, max_output: int | None, fixed: int
) -> None:
    limits = limits_for(window, max_output, fixed, DEFAULTS)
    assert limits.threshold <= 0.85 * window
    assert limits.threshold + (limits.output or 0) <= window
    assert limits.room == max(0, limits.threshold - fixed)
    assert limits.fixed + limits.keep + limits.pins + limits.summary + limits.lists <= max(limits.target, fixed)
    assert limits.target <= limits.ceiling <= max(limits.threshold, fixed)


@given(text=st.text(min_size=1, max_size=4_000), room=st.integers(2_000, 10_000), beside=st.integers(1, 9))
def test_a_cut_message_has_at_most_its_share_of_the_room(text: str, room: int, beside: int) -> None:
    limits = replace(limits_for(128_000, None, 0, DEFAULTS), room=room)
    share = min(room // 4, room // 2 // beside)
    chars = cut_for(text, limits, 1.0, beside=beside)
    assert (chars is None) == (estimate_text(text) <= share)
    if chars is not None:
        assert 0 < chars < len(text)


def test_a_message_keeps_a_part_worth_reading_in_a_window_without_room() -> None:
    limits = limits_for(2_000, None, 3_000, DEFAULTS)
    assert limits.room == 0
    assert cut_for("x" * 8_000, limits, 1.0) == 2_000
    assert cut_for("x" * 2_000, limits, 1.0) is None


def answered(
    path: PathBuilder, text: str = "done", *, reported: int | None, output: int = 10, endpoint: str = HERE
) -> Entry:
    """An answer to the request that the path gives now."""
    estimate = Projection(path.entries).context().estimate
    body = replace(said(text), endpoint=endpoint)
    return path.add(body, usage=Usage(input_tokens=reported, output_tokens=output), estimate=estimate)


def measured(path: PathBuilder, calibration: float = 1.0) -> Measure:
    projection = Projection(path.entries)
    return measure(projection.context(), projection.entries, HERE, calibration)


def talk() -> PathBuilder:
    """A path whose request is estimated at 200 tokens and a few."""
    return PathBuilder(Prompt(system="s" * 400, tools=(), cwd="/", model="m"), user("x" * 400))


def test_without_reports_everything_is_estimated_and_calibrated() -> None:
    path = talk()
    estimate = Projection(path.entries).context().estimate
    assert measured(path, 1.5) == Measure(used=round(estimate * 1.5), fixed=156, scale=1.5, is_reported=False)


def test_a_report_stands_for_everything_up_to_it_and_scales_what_follows() -> None:
    path = talk()
    estimate = Projection(path.entries).context().estimate
    answered(path, reported=2 * estimate, output=30)
    path.add(user("y" * 400))
    assert measured(path) == Measure(used=2 * estimate + 30 + 2 * 104, fixed=208, scale=2.0, is_reported=True)


@pytest.mark.parametrize("reported", [0, None, 10, 100_000], ids=["zero", "none", "far too few", "far too many"])
def test_a_report_that_cannot_be_true_is_not_believed(reported: int | None) -> None:
    path = talk()
    answered(path, reported=reported)
    estimate = Projection(path.entries).context().estimate
    assert measured(path) == Measure(used=estimate, fixed=104, scale=1.0, is_reported=False)


def test_a_report_of_another_endpoint_says_nothing_about_this_one() -> None:
    path = talk()
    answered(path, reported=400, endpoint="http://elsewhere model")
    assert not measured(path).is_reported


@pytest.mark.parametrize(
    "later",
    [
        Mask(before=3),
        Checkpoint(compaction_id="k", summary="S", first_kept=2),
        Prompt(system="other", tools=(), cwd="/", model="m"),
    ],
    ids=["mask", "checkpoint", "prompt"],
)
def test_after_a_break_the_size_is_estimated_but_the_scale_is_still_known(later: Mask | Checkpoint | Prompt) -> None:
    path = talk()
    answered(path, reported=2 * Projection(path.entries).context().estimate)
    path.add(later)
    estimate = Projection(path.entries).context().estimate
    found = measured(path)
    assert (found.used, found.scale, found.is_reported) == (2 * estimate, 2.0, True)


def test_reasoning_that_does_not_go_back_is_not_counted() -> None:
    path = talk()
    estimate = Projection(path.entries).context().estimate
    usage = Usage(input_tokens=estimate, output_tokens=5_000, reasoning_tokens=4_990)
    path.add(Assistant(text="done", message_id="m", endpoint=HERE), usage=usage, estimate=estimate)
    assert measured(path).used == estimate + 10


def test_results_after_a_report_are_added_to_it() -> None:
    path = talk()
    estimate = Projection(path.entries).context().estimate
    body = replace(said("", "a"), endpoint=HERE)
    path.add(body, usage=Usage(input_tokens=estimate, output_tokens=20), estimate=estimate)
    path.add(result_of(3, 0, "z" * 4_000))
    assert measured(path).used == estimate + 20 + 1_012


def test_calibration_follows_reports_half_way_and_keeps_still_without() -> None:
    assert recalibrated(1.0, Measure(used=1, fixed=1, scale=2.0, is_reported=True)) == 1.5
    assert recalibrated(1.3, Measure(used=1, fixed=1, scale=1.0, is_reported=False)) == 1.3


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
    return learned_in(memory.facts.get(("http://localhost", "model"), {}))


async def test_a_window_is_configured_or_listed_or_assumed() -> None:
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
async def test_a_refused_request_lowers_the_window_of_its_session_first_and_of_all_when_it_happens_again(
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


async def test_refusals_in_a_row_are_one_event_and_the_last_is_believed() -> None:
    memory = Memory()
    window = await looked_up(memory)
    assert await window.on_refusal(INFO, overflow(limit=90_000), used=50_000, fixed=2_000) == 45_000
    # Far less was sent, and still it names the same: that is not the reason.
    assert await window.on_refusal(INFO, overflow(limit=90_000), used=20_000, fixed=2_000) == 18_000
    assert await window.on_refusal(INFO, overflow(limit=12_000), used=18_000, fixed=2_000) == 12_000
    learned = learned_by(memory)
    assert learned is not None
    assert (learned.tokens, learned.times) == (12_000, 1)


async def test_a_number_below_what_has_worked_is_not_learned_until_that_no_longer_works() -> None:
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


async def test_a_guess_that_leaves_no_room_is_learned_the_second_time() -> None:
    window = await looked_up(Memory())
    assert await window.on_refusal(INFO, overflow(), used=3_000, fixed=2_000) == 2_700
    assert window.tokens(INFO) == 100_000
    await window.on_answer(INFO, sent=2_500, counted=2_500)
    assert await window.on_refusal(INFO, overflow(), used=3_000, fixed=2_000) == 2_700
    assert window.tokens(INFO) == 2_700


async def test_what_was_learned_says_from_which_words_and_when() -> None:
    window = await looked_up(Memory())
    await window.on_refusal(INFO, ContextOverflow("At most 8192\n\x1b[31m tokens."), used=50_000, fixed=2_000)
    assert re.fullmatch(
        r"Crow learned a window of 45,000 tokens on \d{4}-\d\d-\d\d, for this session only, from a refused request of "
        r'about 50,000 tokens: "At most 8192  \[31m tokens\."\. It only triggers compaction\. After 4 more compactions '
        r"crow tests whether the endpoint takes more\. `/context forget` drops it\.",
        window.describe(INFO),
    )


async def test_a_configured_window_voids_what_was_learned_and_is_bounded_for_the_session_alone() -> None:
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
def test_a_fact_that_cannot_be_used_is_none(fact: object) -> None:
    assert learned_in({"window": fact}) is None


async def test_an_answer_to_a_longer_request_makes_a_learned_window_void() -> None:
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


async def test_after_four_compactions_a_learned_window_is_left_aside_and_then_for_longer_if_it_still_holds() -> None:
    memory = Memory()
    window = await looked_up(memory)
    await window.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    due = []
    for patience in (4, 8, 16):
        for _ in range(patience):
            due.append(window.tokens(INFO))
            await window.on_compaction(INFO)
        assert (window.tokens(INFO), window.cautious_tokens(INFO)) == (100_000, 12_000)
        await window.on_answer(INFO, sent=11_800, counted=11_800)
        assert window.tokens(INFO) == 100_000
        await window.on_refusal(INFO, overflow(), used=13_000, fixed=2_000)
    assert due == [12_000] * 28
    learned = learned_by(memory)
    assert learned is not None
    assert (learned.tokens, learned.times, learned.compactions, learned.patience) == (12_000, 4, 0, 32)


async def test_a_window_that_is_cut_silently_is_tried_by_one_answer() -> None:
    window = await looked_up(Memory())
    await window.on_truncation(INFO, 1_900, fixed=2_000)
    assert window.tokens(INFO) == 100_000
    await window.on_truncation(INFO, 8_192, fixed=2_000)
    assert window.tokens(INFO) == 8_192
    for _ in range(4):
        await window.on_compaction(INFO)
    assert window.tokens(INFO) == 100_000
    await window.on_answer(INFO, sent=8_500, counted=8_192)
    assert window.tokens(INFO) == 100_000
    await window.on_answer(INFO, sent=10_500, counted=8_200)
    assert window.tokens(INFO) == 8_192
    for _ in range(8):
        await window.on_compaction(INFO)
    await window.on_answer(INFO, sent=10_500, counted=10_400)
    assert window.describe(INFO) == "The endpoint lists this window."


async def test_what_was_learned_can_be_forgotten_for_all_sessions() -> None:
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


async def test_a_store_that_cannot_keep_what_was_learned_fails_no_turn() -> None:
    class Full(Memory):
        async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
            raise StoreError("The disk is full.")

    window = await looked_up(Full())
    await window.on_refusal(INFO, overflow(limit=12_000), used=50_000, fixed=2_000)
    assert window.tokens(INFO) == 12_000
    assert ContextWindow().tokens(INFO) == 100_000


@pytest.mark.parametrize(
    ("reported", "tokens"),
    [
        ([3_000, 6_000, 8_192, 8_192, 8_192], 8_192),
        ([3_000, 6_000, 8_192, 8_100, 7_900], 8_192),
        ([3_000, 6_000, 9_000, 12_000, 15_000], None),
        ([3_000, 3_000, 3_000, 3_000, 3_000], None),
        ([3_000, 2_900, 3_400, 3_100, 3_050], None),
        ([3_000, 6_000, 8_192, 8_192], None),
        ([3_000, None, 0, None, 0], None),
    ],
    ids=["flat", "cut at messages", "growing", "uncached only", "uncached, uneven", "too few yet", "not reported"],
)
def test_a_server_that_cuts_silently_is_found_out(reported: list[int | None], tokens: int | None) -> None:
    path = PathBuilder(Prompt(system="", tools=(), cwd="/", model="m"), user("x" * 12_000))
    for count in reported:
        answered(path, reported=count)
        path.add(user("y" * 12_000))
    assert silent_cut(reports_since_break(path.entries, HERE), 1.0) == tokens
    if tokens is not None:  # what the server counts is no measure then
        estimate = Projection(path.entries).context().estimate
        assert measured(path).used == estimate


def test_a_count_of_uncached_tokens_alone_does_not_hide_how_full_the_context_is() -> None:
    path = PathBuilder(Prompt(system="", tools=(), cwd="/", model="m"), user("x" * 40_000))
    first = Projection(path.entries).context().estimate
    answered(path, reported=first)
    path.add(user("y" * 16_000))
    answered(path, reported=4_100)
    path.add(user("z" * 4_000))
    assert measured(path).used == pytest.approx(Projection(path.entries).context().estimate, rel=0.01)


def test_cached_tokens_beside_the_input_are_part_of_it() -> None:
    path = talk()
    estimate = Projection(path.entries).context().estimate
    body = replace(said("done"), endpoint=HERE)
    path.add(body, usage=Usage(input_tokens=20, output_tokens=10, cached_tokens=estimate - 20), estimate=estimate)
    assert measured(path).used == estimate + 10


def test_of_two_counts_that_contradict_each_other_the_likelier_is_taken() -> None:
    path = talk()
    estimate = Projection(path.entries).context().estimate
    answered(path, reported=round(3.5 * estimate))  # counted double, and more
    path.add(user("y" * 40))
    second = Projection(path.entries).context().estimate
    answered(path, reported=second, output=10)
    assert measured(path).used == second + 10
