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
        assert await box.run("recall", query="colour") == Outcome(text="query=colour entry=None limit=20")
        assert await box.run("recall", entry="12") == Outcome(text="query=None entry=12 limit=20")
        assert await box.plan("recall", entry=12) == PlannedCall(
            announcement=Announcement(title="Recall entry 12", kind="think"), access="none"
        )
        neither = await box.plan("recall", query="")
        assert neither.fault == "recall: query and entry are both missing; expected one of them"
