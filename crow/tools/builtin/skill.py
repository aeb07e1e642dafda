"""`skill`: loads the text of a skill.

A skill of the workspace may have been written by a stranger. Therefore the user can read the skill's text, and is asked
before the skill is loaded. A permission is valid for the skill's path and content. If either changes, the user is asked
again.
"""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread

from crow.domain.conversation import FROM_WORKSPACE, LOADING
from crow.domain.entries import Announcement, Location
from crow.domain.errors import ArgumentError
from crow.domain.rendering import in_title
from crow.tools import AgentKind, Coverage, Outcome, PlannedCall, SkillInfo, Touched
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
from crow.tools.skills import read_skill


async def _plan_skill(context: ToolContext, args: Arguments) -> PlannedCall:
    if args.get("unload"):
        return session_call(f"Unload the skill {in_title(args['name'])}", "think")
    skill = _find_skill(context, args["name"])
    title, locations = f"{LOADING}{skill.name}", (Location(path=skill.source),)
    if not skill.is_from_workspace:
        return PlannedCall(announcement=Announcement(title=title, kind="read", locations=locations), access="none")
    target = PathTarget.at(context.workspace, Path(skill.source))
    if target.read_protection != "none":
        raise ArgumentError(f"{target.name} holds secrets, so it is not loaded as a skill")
    text, digest = await anyio.to_thread.run_sync(read_skill, skill)
    return PlannedCall(
        announcement=Announcement(title=f"{title}{FROM_WORKSPACE}", kind="read", locations=locations),
        access="read",
        review_text=text,
        coverage=Coverage(argument=permission_argument(skill, digest), asks_once=True),
        touched=Touched(rule_paths=target.rule_names, has_hard_links=target.has_hard_links),
    )


async def _run_skill(invocation: ToolInvocation, args: Arguments) -> Outcome:
    if args.get("unload"):
        name = args["name"]
        return Outcome(text=f"The skill {name} is unloaded; you no longer see its text.", unloads=name)
    skill = _find_skill(invocation.context, args["name"])
    text, digest = await anyio.to_thread.run_sync(read_skill, skill)
    allowed = None if invocation.planned is None else invocation.planned.coverage.argument
    if allowed is not None and allowed != permission_argument(skill, digest):
        raise ArgumentError(f"{skill.source} has changed since this call was allowed; repeat the call")
    if not text:
        raise ArgumentError(f"{skill.source} has no text below its front matter")
    answer = f"The skill {skill.name} follows; its files are in {Path(skill.source).parent}."
    return Outcome(text=answer, skill=(skill.name, text))


def permission_argument(file: SkillInfo | AgentKind, digest: str) -> str:
    """Return the text that identifies what the user permits: the file's path and the hash of its content."""
    return f"{file.source} (sha256 {digest})"


def _find_skill(context: ToolContext, name: str) -> SkillInfo:
    """Return the skill with this name. :raises ~crow.domain.errors.ArgumentError: there is no such skill."""
    for skill in context.skills:
        if skill.name == name:
            return skill
    names = ", ".join(skill.name for skill in context.skills) or "none"
    raise ArgumentError(f'there is no skill "{name}"; skills: {names}')


_SKILL_SPEC = tool_spec(
    "skill",
    "Load a skill: instructions for one kind of work. <skills> lists the available ones.",
    required="name",
    name=argument("string"),
    unload=argument("boolean", "Forget its text."),
)
SKILL = Builtin(_SKILL_SPEC, "read", "read", _plan_skill, _run_skill)
