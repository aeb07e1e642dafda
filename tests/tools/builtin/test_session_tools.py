from __future__ import annotations

from crow.domain.entries import Announcement, PlanItem
from crow.tools import Outcome, PlannedCall
from tests.tools.conftest import OpenBox

ITEMS = [
    {"content": "Read", "status": "completed", "priority": "high"},
    {"content": "Write", "status": "in_progress"},
]
PLAN = (
    PlanItem(content="Read", status="completed", priority="high"),
    PlanItem(content="Write", status="in_progress", priority="medium"),
)


async def test_a_plan_is_returned_whole(open_box: OpenBox) -> None:
    async with open_box(plan=PLAN) as box:
        assert await box.plan("update_plan", items=ITEMS) == PlannedCall(
            announcement=Announcement(title="Plan: 1 of 2 done", kind="think"), access="none"
        )
        assert await box.run("update_plan", items=ITEMS) == Outcome(
            text="The plan is unchanged: 1 of 2 done.", plan=PLAN
        )
        assert await box.run("update_plan", items=[]) == Outcome(text="The plan is updated: empty.", plan=())


async def test_recall_searches_the_log_by_words_or_entry(open_box: OpenBox) -> None:
    async with open_box() as box:
        assert await box.run("recall", query="colour") == Outcome(text="words=colour entry=None limit=20")
        assert await box.run("recall", entry="12") == Outcome(text="words= entry=12 limit=20")
        assert await box.plan("recall", entry=12) == PlannedCall(
            announcement=Announcement(title="Recall entry 12", kind="think"), access="none"
        )
        neither = await box.plan("recall", query="")
        assert neither.fault == ("recall: query, entry, since and until are all missing; expected at least one of them")


async def test_recall_of_other_sessions_asks_once_for_its_scope(open_box: OpenBox) -> None:
    async with open_box() as box:
        wide = await box.plan("recall", query="colour", scope="all")
        near = await box.plan("recall", entry=7, session="s2", scope="workspace")
        here = await box.plan("recall", query="colour", session="s2")
        await box.run("recall", since="2026-11-01", until="2026-11-02", scope="all")
        await box.run("recall", since="2026-11-01T09:30:00+00:00", until="2026-11-01T09:31:00+00:00")
        bad = await box.plan("recall", since="yesterday")
    assert (wide.access, wide.coverage.argument, wide.coverage.asks_once) == ("read", "all", True)
    assert (wide.announcement.title, wide.coverage.narrower_arguments) == (
        "Recall `colour` from all stored sessions",
        ("workspace",),
    )
    assert wide.review_text.startswith("The model may then read all stored sessions until this session ends.")
    assert (near.announcement.title, near.coverage.argument) == ("Recall entry 7 from session s2", "workspace")
    assert near.coverage.wider_arguments == ("all",)
    assert here.fault == (
        'recall: the argument session needs scope "workspace" or "all"; leave session out to search this conversation'
    )
    days, moment = box.log.queries
    assert (days.words, days.scope) == ("", "all")
    assert days.since_ms is not None
    assert days.before_ms is not None
    assert days.before_ms - days.since_ms in range(47 * 3_600_000, 49 * 3_600_000 + 1), "the last day is included"
    assert (moment.since_ms, moment.before_ms) == (1_793_525_400_000, 1_793_525_460_000)
    assert bad.fault == 'recall: since is "yesterday"; expected a day or time such as 2026-11-01 or 2026-11-01T09:30'
