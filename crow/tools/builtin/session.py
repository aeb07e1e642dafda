"""`update_plan` and `recall`: tools that touch only the session.

Strategy: both go through the ports. The plan is returned in the outcome, and is the session's once that is stored.
"""

from __future__ import annotations

from typing import get_args, get_type_hints

from crow.domain.entries import Announcement, PlanItem
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.domain.rendering import code
from crow.tools import Outcome, PlannedCall
from crow.tools.builtin.tool import Arguments, Builtin, ToolContext, ToolInvocation

__all__ = ["RECALL", "UPDATE_PLAN"]

RECALLED = 20
QUERY_CHARS = 300
"""Looking for a long text takes its length times that of what is looked through."""

MAX_ITEMS = 100
FIELDS = get_type_hints(PlanItem)


async def look_at_plan(_around: ToolContext, args: Arguments) -> PlannedCall:
    return PlannedCall(
        announcement=Announcement(title=f"Plan: {progress(items_of(args))}", kind="think"), access="none"
    )


async def run_plan(running: ToolInvocation, args: Arguments) -> Outcome:
    items = items_of(args)
    unchanged = items == running.plan.current()
    text = "The plan is as it was" if unchanged else "The plan is updated"
    return Outcome(text=f"{text}: {progress(items)}.", plan=items)


def items_of(args: Arguments) -> tuple[PlanItem, ...]:
    return tuple(PlanItem(**item) for item in args["items"])


def progress(items: tuple[PlanItem, ...]) -> str:
    if not items:
        return "empty"
    return f"{sum(item.status == 'completed' for item in items)} of {len(items)} done"


async def look_at_recall(_around: ToolContext, args: Arguments) -> PlannedCall:
    about(args)
    title = f"Recall entry {args['entry']}" if "entry" in args else f"Recall {code(args['query'])}"
    return PlannedCall(announcement=Announcement(title=title, kind="think"), access="none")


async def run_recall(running: ToolInvocation, args: Arguments) -> Outcome:
    query, entry = about(args)
    return Outcome(text=await running.log.recall(query=query, entry=entry, limit=RECALLED))


def about(args: Arguments) -> tuple[str | None, int | None]:
    """:raises ~crow.domain.errors.ArgumentError: neither query nor entry."""
    query, entry = args.get("query") or None, args.get("entry")
    if query is None and entry is None:
        raise ArgumentError("recall: query and entry are both missing; expected one of them")
    return query, entry


UPDATE_PLAN = Builtin(
    spec=ToolSpec(
        name="update_plan",
        description=(
            "Show the user a plan for work of several steps, and keep it up to date. Give the whole plan each time, "
            "with at most one step in progress."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "items": {
                    "type": "array",
                    "maxItems": MAX_ITEMS,
                    "items": {
                        "type": "object",
                        "properties": {
                            "content": {"type": "string", "minLength": 1, "description": "The step, in one line."},
                            "status": {"type": "string", "enum": list(get_args(FIELDS["status"]))},
                            "priority": {"type": "string", "enum": list(get_args(FIELDS["priority"]))},
                        },
                        "required": ["content", "status"],
                    },
                }
            },
            "required": ["items"],
        },
    ),
    kind="think",
    access="none",
    look=look_at_plan,
    run=run_plan,
)

RECALL = Builtin(
    spec=ToolSpec(
        name="recall",
        description=(
            "Look into the whole history of this conversation, compacted and hidden parts included: by words, or one "
            "entry by its number."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "query": {"type": "string", "maxLength": QUERY_CHARS, "description": "Words to look for."},
                "entry": {"type": "integer", "minimum": 1, "description": "The number of an entry."},
            },
        },
    ),
    kind="think",
    access="none",
    look=look_at_recall,
    run=run_recall,
)
