"""What the model is told of its surroundings: the prompt entry, and reminders when something changed since.

Strategy: at a turn's start the newest prompt entry is kept if directory, model and tools are still those it was made
for; else a new one is written (a break). Everything else that changed becomes one reminder before the next request.
What was told is read from the log once, then kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crow.agent import new_message_id
from crow.agent.branch import Branch
from crow.agent.prompt import MODES, ROLE, Facts, build_prompt, changes, facts_now, facts_told, read_instructions
from crow.domain.entries import NewEntry, Note, Prompt, Remark
from crow.domain.messages import ToolSpec
from crow.tools import ServerStatus, Skill

__all__ = ["Briefing"]


class Briefing:
    """What the model knows on one branch."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._tools: tuple[ToolSpec, ...] = ()
        self._facts: Facts | None = None
        self._instructions = ""
        self.look_back()

    def look_back(self) -> None:
        """Read again what was told; after the branch was loaded or moved."""
        self._checkpoint = self._branch.projection.checkpoint
        self._told = facts_told(self._branch.entries)

    def read(self) -> None:
        """Read the AGENTS.md files; before each turn. Blocks."""
        self._instructions = read_instructions(Path(self._branch.row.cwd))

    async def begin_turn(
        self, tools: Sequence[ToolSpec], servers: Sequence[ServerStatus], skills: Sequence[Skill]
    ) -> None:
        """See what is there now, and write a prompt entry if the newest one no longer fits."""
        row = self._branch.row
        self._facts = facts_now(row.mode, self._instructions, servers, skills)
        self._tools = tuple(tools)
        newest = self._branch.prompt
        if newest is None or (newest.cwd, newest.model, newest.tools) != (row.cwd, row.model, self._tools):
            await self._branch.record([*place_changed(newest, row.cwd), NewEntry(body=await self.fresh_prompt())])
            self.look_back()

    async def fresh_prompt(self) -> Prompt:
        """The prompt entry as it would be written now; also written with each checkpoint."""
        assert self._facts is not None, "a turn begins first"
        row = self._branch.row
        extra = row.config.get("system_prompt_append")
        whole = row.config.get("system_prompt")
        return await build_prompt(
            cwd=row.cwd,
            directories=row.additional_directories,
            model=row.model,
            tools=self._tools,
            facts=self._facts,
            extra=extra if isinstance(extra, str) else "",
            role=whole if isinstance(whole, str) else ROLE,
        )

    def reminder(self) -> tuple[str, list[NewEntry]] | None:
        """What is due to be told now, and notes for the log; None when the model knows everything.

        The caller stores both before its next request.
        """
        assert self._facts is not None, "a turn begins first"
        if self._branch.projection.checkpoint is not self._checkpoint:
            self.look_back()  # what was told before it may be covered now
        facts = self._facts.with_mode(self._branch.row.mode)
        text = changes(self._told, facts)
        if text is None:
            return None
        notes = []
        if self._told.get("mode", MODES["ask"]) != facts.sections()["mode"]:
            notes.append(NewEntry(body=Note(about="mode", value=facts.mode)))
        self._told |= facts.sections()
        return text, notes


def place_changed(before: Prompt | None, cwd: str) -> list[NewEntry]:
    """A remark for the user where the session works in another directory than until now."""
    if before is None or before.cwd == cwd:
        return []
    text = f"This session worked in {before.cwd} until now; from here on it works in {cwd}."
    return [NewEntry(body=Remark(text=text, message_id=new_message_id()))]
