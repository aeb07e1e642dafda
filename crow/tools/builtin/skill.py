"""`skill`: loads the text of a skill.

A workspace's skill is instructions from a stranger: the user reads its text and is asked about each one. The answer
holds for that path and content, and is asked for again when either changes.
"""

from __future__ import annotations

import anyio.to_thread

from crow.domain.entries import Announcement, Location
from crow.domain.errors import ArgumentError
from crow.tools import Outcome, PlannedCall
from crow.tools.builtin.tool import Arguments, Builtin, Target, ToolContext, ToolInvocation
from crow.tools.skills import FoundSkill, SkillText, read_skill


async def plan_skill(context: ToolContext, args: Arguments) -> PlannedCall:
    found = find_skill(context, args["name"])
    title, locations = f"Load the skill {found.skill.name}", (Location(path=found.skill.source),)
    if not found.skill.of_workspace:
        return PlannedCall(announcement=Announcement(title=title, kind="read", locations=locations), access="none")
    loaded = await anyio.to_thread.run_sync(read_skill, found)
    return PlannedCall(
        announcement=Announcement(title=f"{title} from this workspace", kind="read", locations=locations),
        access="read",
        argument=permission_argument(found, loaded),
        paths=Target.at(context.workspace, found.path).rule_names,
        asks_once=True,
        shown=loaded.text,
    )


async def run_skill(invocation: ToolInvocation, args: Arguments) -> Outcome:
    found = find_skill(invocation.context, args["name"])
    loaded = await anyio.to_thread.run_sync(read_skill, found)
    allowed = invocation.allowed_argument
    if allowed is not None and allowed != permission_argument(found, loaded):
        raise ArgumentError(f"{found.skill.source} has changed since this call was allowed; repeat the call")
    if not loaded.text:
        raise ArgumentError(f"{found.skill.source} has no text below its front matter")
    text = f"The skill {found.skill.name} follows; its files are in {found.path.parent}."
    return Outcome(text=text, skill=(found.skill.name, loaded.text))


def permission_argument(found: FoundSkill, loaded: SkillText) -> str:
    """What the user's permission is for."""
    return f"{found.path} (sha256 {loaded.digest})"


def find_skill(context: ToolContext, name: str) -> FoundSkill:
    """:raises ~crow.domain.errors.ArgumentError: there is no such skill."""
    for found in context.skills:
        if found.skill.name == name:
            return found
    names = ", ".join(found.skill.name for found in context.skills) or "none"
    raise ArgumentError(f'there is no skill "{name}"; skills: {names}')


SKILL = Builtin(
    name="skill",
    description="Load a skill: instructions for one kind of work. <skills> lists the available ones.",
    properties={"name": {"type": "string", "minLength": 1, "description": "The skill's name."}},
    required=("name",),
    kind="read",
    access="read",
    plan=plan_skill,
    run=run_skill,
)
