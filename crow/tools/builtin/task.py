"""`task`: gives work to a sub-agent with its own conversation.

The session runs the sub-agent. The call itself touches nothing: each call that the sub-agent makes needs its own
permission.
"""

from __future__ import annotations

from crow.domain.errors import ArgumentError
from crow.tools import Outcome, PlannedCall, SubagentResult, Task
from crow.tools.builtin.tool import (
    Arguments,
    Builtin,
    ToolContext,
    ToolInvocation,
    argument,
    plan_in_session,
    tool_spec,
)

TITLE_CHARS = 80


async def plan_task(_context: ToolContext, args: Arguments) -> PlannedCall:
    return plan_in_session(f"Task: {task_from(args).title}", "think")


async def run_task(_invocation: ToolInvocation, _args: Arguments) -> Outcome:
    """Reached only in a session without sub-agents: the toolbox runs other tasks in the call's own task."""
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


TASK_SPEC = tool_spec(
    "task",
    "Give part of the work to a sub-agent, which works in its own conversation and answers with one text. It knows "
    "only its prompt. Several tasks in one answer run in parallel.",
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
