"""`skill`: loads the text of a skill.

Strategy: the outcome carries the text apart, so that it becomes an entry of its own, which no compaction hides. A skill
of the workspace is a stranger's words in the place of instructions: the first one of a session is asked about.
"""

from __future__ import annotations

import anyio.to_thread

from crow.domain.entries import Announcement, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.tools import Offer, Outcome
from crow.tools.builtin.tool import Arguments, Around, Builtin, Running
from crow.tools.skills import FoundSkill, read_skill

__all__ = ["SKILL"]


async def look(around: Around, args: Arguments) -> Offer:
    found = named(around, args["name"])
    of_workspace = found.skill.of_workspace
    where = " of this workspace" if of_workspace else ""
    return Offer(
        announcement=Announcement(
            title=f"Load the skill {found.skill.name}{where}",
            kind="read",
            locations=(Location(path=found.skill.source),),
        ),
        access="read" if of_workspace else "none",
        outside=of_workspace,
        argument=f"skills of {around.workspace.cwd}" if of_workspace else None,
        asks_once=True,
    )


async def run(running: Running, args: Arguments) -> Outcome:
    found = named(running.around, args["name"])
    text = await anyio.to_thread.run_sync(read_skill, found)
    if not text:
        raise ArgumentError(f"skill: {found.skill.source} holds no text below its front matter")
    words = f"The skill {found.skill.name} follows; its files are in {found.path.parent}."
    return Outcome(text=words, skill=(found.skill.name, text))


def named(around: Around, name: str) -> FoundSkill:
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
