"""`task`: work given to a sub-agent with a conversation of its own.

Strategy: only the spec and the words are here; the session runs the sub-agent, through the port. The call itself
touches nothing: each call of the sub-agent is judged as one of the session's own.
"""

from __future__ import annotations

from crow.domain.entries import Announcement
from crow.domain.messages import ToolSpec
from crow.tools import Outcome, PlannedCall, SubagentResult, Task
from crow.tools.builtin.tool import Arguments, Builtin, ToolContext, ToolInvocation

__all__ = ["TASK", "outcome_of_task", "task_of"]

TITLE_CHARS = 80


async def look(_around: ToolContext, args: Arguments) -> PlannedCall:
    title = f"Task: {task_of(args).title}"
    return PlannedCall(announcement=Announcement(title=title, kind="think"), access="none")


async def run(_running: ToolInvocation, args: Arguments) -> Outcome:
    """Never reached by way of MCP: who has the port runs it in the call's own task."""
    return Outcome(text=f"task: {task_of(args).title}: there is nobody to run it", is_error=True)


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
    """How a task ended, for the model."""
    return Outcome(
        text=f"{done.text or '(no answer)'}\n[task {done.id}; give it as resume to go on with it]",
        is_error=done.is_error,
        raw_output={"task": done.id, "steps": done.steps},
        usage=done.usage,
        cost=done.cost,
    )


TASK = Builtin(
    spec=ToolSpec(
        name="task",
        description=(
            "Give a part of the work to a sub-agent, which works in a conversation of its own and answers with one "
            "text. It knows nothing but its prompt. Several tasks in one answer run at once."
        ),
        input_schema={
            "type": "object",
            "properties": {
                "description": {"type": "string", "minLength": 1, "description": "What it is, in a few words."},
                "prompt": {"type": "string", "minLength": 1, "description": "All that the sub-agent must know."},
                "tools": {
                    "type": "array",
                    "maxItems": 100,
                    "items": {"type": "string"},
                    "description": "Names of the tools that it may use. Default: all but task and update_plan.",
                },
                "resume": {"type": "string", "description": "The id of an earlier task, to go on with it."},
            },
            "required": ["description", "prompt"],
        },
    ),
    kind="think",
    access="none",
    look=look,
    run=run,
)
