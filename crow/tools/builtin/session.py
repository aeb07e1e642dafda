"""`update_plan`, `recall` and `task`: tools that work on sessions.

`recall` reads other sessions only if its scope includes them and the user has given permission. A `task` needs no
permission to start, unless its agent file comes from the workspace, because each call that its subagent makes needs its
own permission.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import get_args, get_type_hints

import anyio.to_thread

from crow.domain.entries import Announcement, Location, PlanItem
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.domain.rendering import code, in_title
from crow.domain.subagents import resume_hint
from crow.domain.text import plural
from crow.tools import (
    AgentKind,
    Coverage,
    Outcome,
    PlannedCall,
    RecallQuery,
    RecallScope,
    SubagentResult,
    Task,
    Touched,
)
from crow.tools.agents import prompt_of, read_agent
from crow.tools.builtin.skill import permission_argument
from crow.tools.builtin.task_changes import Decision, plan_settling
from crow.tools.builtin.tool import (
    Arguments,
    Builtin,
    PathTarget,
    ToolContext,
    ToolInvocation,
    argument,
    session_call,
    tool_spec,
)

_MAX_RECALLED = 20
_QUERY_CHARS = 300
"""The maximum length of a query. There is a limit because the search time is proportional to the length of the query
times the length of the text."""

_TIME_CHARS = 40
_MAX_ITEMS = 100
_TITLE_CHARS = 80
_FIELDS = get_type_hints(PlanItem)


async def _plan_update_plan(_context: ToolContext, args: Arguments) -> PlannedCall:
    return session_call(f"Plan: {_describe_progress(_items_from(args))}", "think")


async def _run_update_plan(invocation: ToolInvocation, args: Arguments) -> Outcome:
    items = _items_from(args)
    verb = "unchanged" if items == invocation.ports.plan.current() else "updated"
    return Outcome(text=f"The plan is {verb}: {_describe_progress(items)}.", plan=items)


def _items_from(args: Arguments) -> tuple[PlanItem, ...]:
    return tuple(PlanItem(**item) for item in args["items"])


def _describe_progress(items: tuple[PlanItem, ...]) -> str:
    done = sum(item.status == "completed" for item in items)
    return f"{done} of {len(items)} done" if items else "empty"


async def _plan_recall(context: ToolContext, args: Arguments) -> PlannedCall:
    query = _recall_query(args)
    what = f"entry {query.entry}" if query.entry is not None else code(query.words) if query.words else "by time"
    if query.scope == "this":
        return session_call(f"Recall {what}", "think")
    place = (
        f"the sessions of {in_title(str(context.workspace.cwd))}"
        if query.scope == "workspace"
        else "all stored sessions"
    )
    where = f"session {in_title(query.session)}" if query.session is not None else place
    return PlannedCall(
        announcement=Announcement(title=f"Recall {what} from {where}", kind="search"),
        access="read",
        review_text=f"The model may then read {place} until this session ends. `/permissions` can take that back.",
        coverage=Coverage(
            argument=query.scope,
            asks_once=True,
            wider_arguments=("all",) if query.scope == "workspace" else (),
            narrower_arguments=("workspace",) if query.scope == "all" else (),
        ),
    )


async def _run_recall(invocation: ToolInvocation, args: Arguments) -> Outcome:
    return Outcome(text=await invocation.ports.log.recall(_recall_query(args), limit=_MAX_RECALLED))


def _recall_query(args: Arguments) -> RecallQuery:
    """Return the query of a call. :raises ~crow.domain.errors.ArgumentError: the call does not say what to look for, or
    contradicts itself."""
    since, until = args.get("since") or None, args.get("until") or None
    query = RecallQuery(
        words=args.get("query") or "",
        entry=args.get("entry"),
        session=args.get("session") or None,
        scope=args.get("scope", "this"),
        since_ms=None if since is None else _unix_ms("since", since),
        before_ms=None if until is None else _unix_ms("until", until, days_later=1),
    )
    if not query.words.strip() and query.entry is None and since is None and until is None:
        raise ArgumentError("query, entry, since and until are all missing; expected at least one of them")
    if query.session is not None and query.scope == "this":
        raise ArgumentError(
            'the argument session needs scope "workspace" or "all"; leave session out to search this conversation'
        )
    return query


def _unix_ms(name: str, text: str, *, days_later: int = 0) -> int:
    """Convert `text`, a day or a time in the local time zone, to Unix ms. If `text` is a day, add `days_later` days.
    `name` is the argument's name for the error message.

    :raises ~crow.domain.errors.ArgumentError: `text` is neither a day nor a time.
    """
    try:
        moment = datetime.fromisoformat(text)
        is_day = len(text) <= len("2026-11-01")
        return round((moment + timedelta(days=days_later * is_day)).astimezone().timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ArgumentError(
            f'{name} is "{text}"; expected a day or time such as 2026-11-01 or 2026-11-01T09:30'
        ) from None


async def _plan_task(context: ToolContext, args: Arguments) -> PlannedCall:
    if args.get("changes"):
        return plan_settling(args)
    kind, task = _find_agent(context, args), _task_from(args)
    title = in_title(task.title) + (f" (with {plural(len(task.files), 'file')})" if task.files else "")
    if kind is None:
        return session_call(f"Task: {title}", "think")
    if not kind.is_from_workspace:
        return session_call(f"Task for {kind.name}: {title}", "think")
    target = PathTarget.at(context.workspace, Path(kind.source))
    if target.read_protection != "none":
        raise ArgumentError(f"{target.name} holds secrets, so it is not used as a subagent")
    text, digest = await anyio.to_thread.run_sync(read_agent, kind)
    return PlannedCall(
        announcement=Announcement(
            title=f"Task for {kind.name} from this workspace: {title}",
            kind="think",
            locations=(Location(path=kind.source),),
        ),
        access="none",
        review_text=text,
        coverage=Coverage(argument=permission_argument(kind, digest), asks_once=True),
        touched=Touched(rule_paths=target.rule_names, has_hard_links=target.has_hard_links),
    )


def _find_agent(context: ToolContext, args: Arguments) -> AgentKind | None:
    """Return the kind of subagent that the arguments name, or None if they do not name a kind.

    :raises ~crow.domain.errors.ArgumentError: there is no such kind, or the arguments name both a kind and a task to
        resume.
    """
    name = args.get("agent")
    if not name:
        return None
    if args.get("resume"):
        raise ArgumentError("agent and resume are both given; a resumed task keeps its kind of subagent, so omit agent")
    kinds = [kind for kind in context.agents if not kind.problem]
    for kind in kinds:
        if kind.name == name:
            return kind
    names = ", ".join(kind.name for kind in kinds) or "none"
    raise ArgumentError(f'there is no agent "{name}"; agents: {names}')


async def task_to_run(context: ToolContext, args: Arguments, planned: PlannedCall | None) -> Task:
    """Return the task that the arguments describe. Its kind of subagent is read from the kind's file again.

    :raises ~crow.domain.errors.ArgumentError: there is no such kind, or its file has changed since the user allowed it.
    """
    task, kind = _task_from(args), _find_agent(context, args)
    if kind is None:
        return task
    text, digest = await anyio.to_thread.run_sync(read_agent, kind)
    if (
        kind.is_from_workspace
        and planned is not None
        and planned.coverage.argument != permission_argument(kind, digest)
    ):
        raise ArgumentError(f"{kind.source} has changed since this call was allowed; repeat the call")
    kind, instructions = prompt_of(kind, text)
    return replace(task, kind=kind, instructions=instructions)


async def _run_task(_invocation: ToolInvocation, _args: Arguments) -> Outcome:
    """Report an error, because this function runs only in sessions without subagents. In other sessions, the toolbox
    itself runs the subagent, in the asyncio task that handles the call."""
    raise ArgumentError("this session has no subagents")


def _task_from(args: Arguments) -> Task:
    """Return the task that the arguments describe."""
    tools = args.get("tools")
    return Task(
        title=" ".join(args["description"].split())[:_TITLE_CHARS],
        prompt=args["prompt"],
        tools=None if tools is None else tuple(tools),
        resume=args.get("resume") or None,
        background=args.get("background", False),
        isolated=args.get("isolated", False),
        files=tuple(args.get("files") or ()),
        state=args.get("state", False),
    )


def task_outcome(done: SubagentResult) -> Outcome:
    """Return the result of a task for the model."""
    if done.is_running:
        text = f"The task works in the background as {done.id}. You are told when it ends, so do not wait for it."
        return Outcome(text=text, raw_output={"task": done.id, "background": True})
    return Outcome(
        text="\n".join(filter(None, [done.text or "(no answer)", done.changes])) + resume_hint(done.id),
        is_error=done.is_error,
        raw_output={"task": done.id, "steps": done.steps},
        usage=done.usage,
        cost=done.cost,
    )


_STEP = {
    "type": "object",
    "properties": {
        "content": argument("string", "The step, in one line.", minLength=1),
        "status": {"type": "string", "enum": list(get_args(_FIELDS["status"]))},
        "priority": {"type": "string", "enum": list(get_args(_FIELDS["priority"]))},
    },
    "required": ["content", "status"],
}
_UPDATE_PLAN_SPEC = tool_spec(
    "update_plan",
    "Show the user a plan of several steps. Send all of them each time, at most one in progress.",
    required="items",
    items={"type": "array", "maxItems": _MAX_ITEMS, "items": _STEP},
)
UPDATE_PLAN = Builtin(_UPDATE_PLAN_SPEC, "think", "none", _plan_update_plan, _run_update_plan)

_RECALL_SPEC = tool_spec(
    "recall",
    "Search the whole history of this conversation, also compacted and hidden parts, or read one entry. Scope "
    "workspace or all searches the user's other sessions too, after asking.",
    query=argument("string", "Words that must all occur.", maxLength=_QUERY_CHARS),
    entry=argument("integer", "Its number.", minimum=1),
    scope={"type": "string", "enum": list(get_args(RecallScope))},
    session=argument("string", "Only the session with this id.", maxLength=_QUERY_CHARS),
    since=argument("string", "From this time, such as 2026-11-01.", maxLength=_TIME_CHARS),
    until=argument("string", "Up to this time or day.", maxLength=_TIME_CHARS),
)
RECALL = Builtin(_RECALL_SPEC, "think", "none", _plan_recall, _run_recall)

_TASK_ARGUMENTS = {
    "description": argument("string", "The task in a few words.", minLength=1),
    "prompt": argument("string", minLength=1),
    "tools": argument(
        "array",
        "Default: all but task and update_plan.",
        maxItems=100,
        items={"type": "string"},
    ),
    "resume": argument("string", "An earlier task's id."),
    "background": argument(
        "boolean",
        "Return at once; you are told when it ends.",
    ),
    "isolated": argument("boolean", "It works on a copy."),
    "files": argument("array", "Files to attach.", maxItems=20, items={"type": "string"}),
    "state": argument("boolean", "Attach a summary of this conversation."),
    "changes": argument("string", "With resume: for its copy.", enum=list(get_args(Decision))),
}
_AGENT_ARGUMENT = argument("string", "The kind of subagent, by name. Default: a plain one.", maxLength=64)
_PLAIN_TASK_SPEC = tool_spec(
    "task",
    "Give part of the work to a subagent. It knows only its prompt and answers with one text. Tasks of one answer "
    "run in parallel.",
    required="description prompt",
    **_TASK_ARGUMENTS,
)
"""The tool `task` if there are no kinds of subagents."""
_TASK_SPEC = tool_spec(
    "task", _PLAIN_TASK_SPEC.description, required="description prompt", **_TASK_ARGUMENTS, agent=_AGENT_ARGUMENT
)


def task_spec(kinds: Sequence[AgentKind], has_model: Callable[[str], bool]) -> ToolSpec:
    """Return the tool `task` for the model. Its description lists the kinds of subagents, if there are any."""
    if not kinds:
        return _PLAIN_TASK_SPEC
    lines = [
        f"- {kind.name}{f' (model {kind.model})' if kind.model and has_model(kind.model) else ''}: {kind.description}"
        for kind in kinds
    ]
    text = "\n".join([f"{_TASK_SPEC.description} The argument agent chooses a kind of subagent:", *lines])
    return replace(_TASK_SPEC, description=text)


TASK = Builtin(_TASK_SPEC, "think", "none", _plan_task, _run_task)
