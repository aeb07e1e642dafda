"""`skill`: loads the text of a skill.

The outcome carries the text apart, so that it becomes an entry of its own, which no compaction hides. A skill of the
workspace is a stranger's words in the place of instructions: the user is asked about each one, and shown its text. The
answer is about that path and that content, and is asked for again when either has changed.
"""

from __future__ import annotations

import anyio.to_thread

from crow.domain.entries import Announcement, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.tools import Outcome, PlannedCall
from crow.tools.builtin.tool import Arguments, Builtin, ToolContext, ToolInvocation, path_names
from crow.tools.skills import FoundSkill, SkillText, read_skill

__all__ = ["SKILL"]


async def look(around: ToolContext, args: Arguments) -> PlannedCall:
    found = named(around, args["name"])
    title, locations = f"Load the skill {found.skill.name}", (Location(path=found.skill.source),)
    if not found.skill.of_workspace:
        return PlannedCall(announcement=Announcement(title=title, kind="read", locations=locations), access="none")
    loaded = await anyio.to_thread.run_sync(read_skill, found)
    return PlannedCall(
        announcement=Announcement(title=f"{title} of this workspace", kind="read", locations=locations),
        access="read",
        argument=consent(found, loaded),
        paths=path_names(around.workspace, found.path),
        asks_once=True,
        shown=loaded.text,
    )


async def run(running: ToolInvocation, args: Arguments) -> Outcome:
    found = named(running.around, args["name"])
    loaded = await anyio.to_thread.run_sync(read_skill, found)
    if running.allowed is not None and running.allowed != consent(found, loaded):
        raise ArgumentError(f"skill: {found.skill.source} was changed after this call was allowed; call it again")
    if not loaded.text:
        raise ArgumentError(f"skill: {found.skill.source} holds no text below its front matter")
    words = f"The skill {found.skill.name} follows; its files are in {found.path.parent}."
    return Outcome(text=words, skill=(found.skill.name, loaded.text))


def consent(found: FoundSkill, loaded: SkillText) -> str:
    """What the user agrees to when they allow a skill."""
    return f"{found.path} (sha256 {loaded.digest})"


def named(around: ToolContext, name: str) -> FoundSkill:
    """:raises ~crow.domain.errors.ArgumentError: there is no such skill."""
    for found in around.skills:
        if found.skill.name == name:
            return found
    names = ", ".join(found.skill.name for found in around.skills) or "none"
    raise ArgumentError(f'skill: there is no skill "{name}"; there are: {names}')


SKILL = Builtin(
    spec=ToolSpec(
        name="skill",
        description="Load a skill: instructions for one kind of work. Those that there are stand under <skills>.",
        input_schema={
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1, "description": "The skill's name."}},
            "required": ["name"],
        },
    ),
    kind="read",
    access="read",
    look=look,
    run=run,
)
