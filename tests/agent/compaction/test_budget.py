"""Tests limits and the measuring of the context."""

from __future__ import annotations

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
    used_part,
)
from crow.domain.conversation import Projection
from crow.domain.entries import Assistant, Checkpoint, Entry, Mask, Prompt
from crow.domain.messages import Usage
from crow.domain.tokens import estimate_text
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
        files=71_100,
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
        files=1_800,
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
def test_compacted_request_has_room_for_its_parts_in_any_window(
    window: int, max_output: int | None, fixed: int
) -> None:
    limits = limits_for(window, max_output, fixed, DEFAULTS)
    assert limits.threshold <= 0.85 * window
    assert limits.threshold + (limits.output or 0) <= window
    assert limits.room == max(0, limits.threshold - fixed)
    assert limits.fixed + limits.keep + limits.pins + limits.summary + limits.lists <= max(limits.target, fixed)
    assert limits.target <= limits.ceiling <= max(limits.threshold, fixed)


@given(text=st.text(min_size=1, max_size=4_000), room=st.integers(2_000, 10_000), beside=st.integers(1, 9))
def test_cut_message_takes_at_most_its_share_of_the_room(text: str, room: int, beside: int) -> None:
    limits = replace(limits_for(128_000, None, 0, DEFAULTS), room=room)
    share = min(room // 4, room // 2 // beside)
    chars = cut_for(text, limits, 1.0, beside=beside)
    assert (chars is None) == (estimate_text(text) <= share)
    if chars is not None:
        assert 0 < chars < len(text)


def test_message_keeps_a_useful_part_even_in_a_window_without_room() -> None:
    limits = limits_for(2_000, None, 3_000, DEFAULTS)
    assert limits.room == 0
    assert cut_for("x" * 8_000, limits, 1.0) == 2_000
    assert cut_for("x" * 2_000, limits, 1.0) is None


def answered(
    path: PathBuilder, text: str = "done", *, reported: int | None, output: int = 10, endpoint: str = HERE
) -> Entry:
    """Adds an answer to the path's present request."""
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


def test_report_counts_the_request_so_far_and_scales_later_estimates() -> None:
    path = talk()
    estimate = Projection(path.entries).context().estimate
    answered(path, reported=2 * estimate, output=30)
    path.add(user("y" * 400))
    assert measured(path) == Measure(used=2 * estimate + 30 + 2 * 104, fixed=208, scale=2.0, is_reported=True)


@pytest.mark.parametrize("reported", [0, None, 10, 100_000], ids=["zero", "none", "far too few", "far too many"])
def test_implausible_report_is_not_believed(reported: int | None) -> None:
    path = talk()
    answered(path, reported=reported)
    estimate = Projection(path.entries).context().estimate
    assert measured(path) == Measure(used=estimate, fixed=104, scale=1.0, is_reported=False)


def test_report_of_another_endpoint_is_ignored() -> None:
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
def test_after_a_break_the_size_is_estimated_with_the_known_scale(later: Mask | Checkpoint | Prompt) -> None:
    path = talk()
    answered(path, reported=2 * Projection(path.entries).context().estimate)
    path.add(later)
    estimate = Projection(path.entries).context().estimate
    found = measured(path)
    assert (found.used, found.scale, found.is_reported) == (2 * estimate, 2.0, True)


def test_reasoning_that_is_not_sent_back_is_not_counted() -> None:
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


def test_calibration_moves_half_way_to_reports_and_stays_without_them() -> None:
    assert recalibrated(1.0, Measure(used=1, fixed=1, scale=2.0, is_reported=True)) == 1.5
    assert recalibrated(1.3, Measure(used=1, fixed=1, scale=1.0, is_reported=False)) == 1.3


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
def test_silent_truncation_is_detected(reported: list[int | None], tokens: int | None) -> None:
    path = PathBuilder(Prompt(system="", tools=(), cwd="/", model="m"), user("x" * 12_000))
    for count in reported:
        answered(path, reported=count)
        path.add(user("y" * 12_000))
    assert silent_cut(reports_since_break(path.entries, HERE), 1.0) == tokens
    if tokens is not None:  # what the server counts is no measure then
        estimate = Projection(path.entries).context().estimate
        assert measured(path).used == estimate


def test_counts_of_uncached_tokens_alone_do_not_hide_how_full_the_context_is() -> None:
    path = PathBuilder(Prompt(system="", tools=(), cwd="/", model="m"), user("x" * 40_000))
    first = Projection(path.entries).context().estimate
    answered(path, reported=first)
    path.add(user("y" * 16_000))
    answered(path, reported=4_100)
    path.add(user("z" * 4_000))
    assert measured(path).used == pytest.approx(Projection(path.entries).context().estimate, rel=0.01)


def test_cached_tokens_counted_separately_are_added() -> None:
    path = talk()
    estimate = Projection(path.entries).context().estimate
    body = replace(said("done"), endpoint=HERE)
    path.add(body, usage=Usage(input_tokens=20, output_tokens=10, cached_tokens=estimate - 20), estimate=estimate)
    assert measured(path).used == estimate + 10


def test_of_two_contradicting_counts_the_likelier_is_used() -> None:
    path = talk()
    estimate = Projection(path.entries).context().estimate
    answered(path, reported=round(3.5 * estimate))  # counted double, and more
    path.add(user("y" * 40))
    second = Projection(path.entries).context().estimate
    answered(path, reported=second, output=10)
    assert measured(path).used == second + 10


def test_a_threshold_in_tokens_leaves_room_for_an_answer_and_for_work() -> None:
    def threshold(tokens: int, *, window: int = 128_000, fixed: int = 3_000) -> int:
        return limits_for(window, None, fixed, CompactionPolicy(threshold=tokens)).threshold

    assert threshold(50_000) == 50_000
    assert threshold(127_000) == 128_000 - 20_000
    assert threshold(4_000, fixed=6_000) == 6_000 + 4_000
    assert not limits_for(128_000, None, 6_000, CompactionPolicy(threshold=4_000)).is_tiny


def test_a_part_of_the_window_is_a_share_of_the_declared_one_or_tokens() -> None:
    assert used_part(128_000, 128_000, DEFAULTS) == 128_000
    assert used_part(128_000, 128_000, CompactionPolicy(window=0.5)) == 64_000
    assert used_part(40_000, 128_000, CompactionPolicy(window=0.5)) == 40_000
    assert used_part(1_000_000, 1_000_000, CompactionPolicy(window=200_000)) == 200_000
    assert used_part(16_000, 16_000, CompactionPolicy(window=0.1)) == 8_000
    assert used_part(6_000, 6_000, CompactionPolicy(window=0.1)) == 6_000
