"""`task`: gives work to a sub-agent with its own conversation.

The session runs the sub-agent. The call itself touches nothing: each call that the sub-agent makes needs its own
permission.
"""

from __future__ import annotations

from crow.domain.errors import ArgumentError
from crow.tools import Outcome, PlannedCall, SubagentResult, Task
from crow.tools.builtin.tool import Arguments, Builtin, ToolContext, ToolInvocation, plan_in_session

TITLE_CHARS = 80


async def plan_task(_context: ToolContext, args: Arguments) -> PlannedCall:
    return plan_in_session(f"Task: {task_of(args).title}", "think")


async def run_task(_invocation: ToolInvocation, _args: Arguments) -> Outcome:
    """Reached only in a session without sub-agents: the toolbox runs other tasks in the call's own task."""
    raise ArgumentError("this session has no sub-agents")


def task_of(args: Arguments) -> Task:
    """The task that the arguments describe."""
    tools = args.get("tools")
    return Task(
        title=" ".join(args["description"].split())[:TITLE_CHARS],
        prompt=args["prompt"],
        tools=None if tools is None else tuple(tools),
        resume=args.get("resume") or None,
    )


def outcome_of_task(done: SubagentResult) -> Outcome:
    """The result of a task for the model."""
    return Outcome(
        text=f"{done.text or '(no answer)'}\n[task {done.id}; to continue it, call task with resume={done.id}]",
        is_error=done.is_error,
        raw_output={"task": done.id, "steps": done.steps},
        usage=done.usage,
        cost=done.cost,
    )


TASK = Builtin(
    name="task",
    description=(
        "Give part of the work to a sub-agent, which works in its own conversation and answers with one text. It knows "
        "only its prompt. Several tasks in one answer run in parallel."
    ),
    properties={
        "description": {"type": "string", "minLength": 1, "description": "The task in a few words."},
        "prompt": {"type": "string", "minLength": 1, "description": "Everything the sub-agent needs to know."},
        "tools": {
            "type": "array",
            "maxItems": 100,
            "items": {"type": "string"},
            "description": "Names of the tools it may use. Default: all except task and update_plan.",
        },
        "resume": {"type": "string", "description": "The id of an earlier task, to continue it."},
    },
    required=("description", "prompt"),
    kind="think",
    access="none",
    plan=plan_task,
    run=run_task,
)
