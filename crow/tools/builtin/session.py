"""`update_plan`, `recall` and `task`: tools that touch only the session.

The session runs the sub-agent of a task. Each call that the sub-agent makes needs its own permission.
"""

from __future__ import annotations

from typing import get_args, get_type_hints

from crow.domain.entries import PlanItem
from crow.domain.errors import ArgumentError
from crow.domain.rendering import code, in_title
from crow.tools import Outcome, PlannedCall, SubagentResult, Task
from crow.tools.builtin.tool import Arguments, Builtin, ToolContext, ToolInvocation, argument, session_call, tool_spec

MAX_RECALLED = 20
QUERY_CHARS = 300
"""The search time is proportional to the length of the query times the length of the text."""

MAX_ITEMS = 100
TITLE_CHARS = 80
FIELDS = get_type_hints(PlanItem)


async def plan_update_plan(_context: ToolContext, args: Arguments) -> PlannedCall:
    return session_call(f"Plan: {describe_progress(items_from(args))}", "think")


async def run_update_plan(invocation: ToolInvocation, args: Arguments) -> Outcome:
    items = items_from(args)
    verb = "unchanged" if items == invocation.ports.plan.current() else "updated"
    return Outcome(text=f"The plan is {verb}: {describe_progress(items)}.", plan=items)


def items_from(args: Arguments) -> tuple[PlanItem, ...]:
    return tuple(PlanItem(**item) for item in args["items"])


def describe_progress(items: tuple[PlanItem, ...]) -> str:
    done = sum(item.status == "completed" for item in items)
    return f"{done} of {len(items)} done" if items else "empty"


async def plan_recall(_context: ToolContext, args: Arguments) -> PlannedCall:
    query, entry = query_and_entry(args)
    return session_call(f"Recall {code(query or '')}" if entry is None else f"Recall entry {entry}", "think")


async def run_recall(invocation: ToolInvocation, args: Arguments) -> Outcome:
    query, entry = query_and_entry(args)
    return Outcome(text=await invocation.ports.log.recall(query=query, entry=entry, limit=MAX_RECALLED))


def query_and_entry(args: Arguments) -> tuple[str | None, int | None]:
    """:raises ~crow.domain.errors.ArgumentError: the call gives neither a query nor an entry."""
    query, entry = args.get("query") or None, args.get("entry")
    if query is None and entry is None:
        raise ArgumentError("query and entry are both missing; expected one of them")
    return query, entry


async def plan_task(_context: ToolContext, args: Arguments) -> PlannedCall:
    return session_call(f"Task: {in_title(task_from(args).title)}", "think")


async def run_task(_invocation: ToolInvocation, _args: Arguments) -> Outcome:
    """Report an error, because this function runs only in sessions without sub-agents. In other sessions, the toolbox
    itself runs the sub-agent, in the asyncio task that handles the call."""
    raise ArgumentError("this session has no sub-agents")


def task_from(args: Arguments) -> Task:
    """The task that the arguments describe."""
    tools = args.get("tools")
    return Task(
        title=" ".join(args["description"].split())[:TITLE_CHARS],
        prompt=args["prompt"],
        tools=None if tools is None else tuple(tools),
        resume=args.get("resume") or None,
    )


def task_outcome(done: SubagentResult) -> Outcome:
    """The result of a task for the model."""
    return Outcome(
        text=f"{done.text or '(no answer)'}\n[task {done.id}; to continue it, call task with resume={done.id}]",
        is_error=done.is_error,
        raw_output={"task": done.id, "steps": done.steps},
        usage=done.usage,
        cost=done.cost,
    )


STEP = {
    "type": "object",
    "properties": {
        "content": argument("string", "The step, in one line.", minLength=1),
        "status": {"type": "string", "enum": list(get_args(FIELDS["status"]))},
        "priority": {"type": "string", "enum": list(get_args(FIELDS["priority"]))},
    },
    "required": ["content", "status"],
}
UPDATE_PLAN_SPEC = tool_spec(
    "update_plan",
    "Show the user a plan for work of several steps, and keep it up to date. Send the whole plan each time, with "
    "at most one step in progress.",
    required="items",
    items={"type": "array", "maxItems": MAX_ITEMS, "items": STEP},
)
UPDATE_PLAN = Builtin(UPDATE_PLAN_SPEC, "think", "none", plan_update_plan, run_update_plan)

RECALL_SPEC = tool_spec(
    "recall",
    "Search the whole history of this conversation, including compacted and hidden parts, or read one entry by "
    "its number.",
    query=argument("string", "Words to search for.", maxLength=QUERY_CHARS),
    entry=argument("integer", "The number of an entry.", minimum=1),
)
RECALL = Builtin(RECALL_SPEC, "think", "none", plan_recall, run_recall)

TASK_SPEC = tool_spec(
    "task",
    "Give part of the work to a sub-agent, which works in its own conversation and answers with one text. It knows "
    "only its prompt. Tasks that you start in the same answer run in parallel.",
    required="description prompt",
    description=argument("string", "The task in a few words.", minLength=1),
    prompt=argument("string", "Everything the sub-agent needs to know.", minLength=1),
    tools=argument(
        "array",
        "Names of the tools it may use. Default: all except task and update_plan.",
        maxItems=100,
        items={"type": "string"},
    ),
    resume=argument("string", "The id of an earlier task, to continue it."),
)
TASK = Builtin(TASK_SPEC, "think", "none", plan_task, run_task)
