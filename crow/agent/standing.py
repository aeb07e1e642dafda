"""Where a session stands: what is to be said and done whenever that changes.

Strategy: the branch knows its entries; what follows from them for the session as a whole (its title, the plan the
client shows, how full the context is, what the model was told) is brought up to date here. Knows no turn and no queue.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from crow.agent import new_message_id
from crow.agent.choices import set_model
from crow.agent.compaction.gauge import Gauge, gauge_on
from crow.agent.compaction.window import Window
from crow.domain.entries import NewEntry, PlanItem, Remark
from crow.domain.errors import CrowError
from crow.domain.events import ContextMeasured, NoticeShown, PlanChanged, TitleChanged
from crow.domain.messages import Part
from crow.domain.rendering import parts_text
from crow.store import SessionChanges

if TYPE_CHECKING:
    from crow.agent.adapters import Adapters
    from crow.agent.branch import Branch
    from crow.agent.briefing import Briefing
    from crow.llm import ModelInfo

__all__ = ["Standing"]

logger = logging.getLogger(__name__)

TITLE_CHARS = 80
SMALL_CHARS = 2_000
"""A prompt of no more characters is a small part of every window."""


class Standing:
    """How the session of `branch` stands; `briefing` is what the model was told, once a turn has told it anything;
    `window` is what the session knows of its models' windows."""

    def __init__(self, adapters: Adapters, branch: Branch) -> None:
        self.briefing: Briefing | None = None
        self._adapters = adapters
        self._branch = branch
        self._place = (branch.row.cwd, branch.row.additional_directories)
        self._has_warned = False
        self.window = Window(adapters.store, branch.row.id)

    async def claim(self, message_id: str | None, parts: Sequence[Part], *, waits: bool) -> bool:
        """Take the turn for a prompt (`message_id` None: for a command); whether others had moved the session.

        `waits`: the prompt is in the inbox. See :meth:`crow.store.Store.take_turn` for errors.
        """
        known = self._branch.plan
        if not self._branch.row.model and (name := self._adapters.default_model()):
            await set_model(self._branch, name)  # none was set when the session was made
        if message_id is None:
            start = await self._branch.claim(None)
        else:
            cut = await self.cut(parts)
            start = await self._branch.claim(message_id, cut=cut, parts=None if waits else parts)
        if start.moved:
            await self._look_around(known)
        return start.moved

    async def begin(self, *, moved: bool) -> None:
        """A turn begins: say and store what has changed since the last; `moved` is what `claim` gave."""
        row = self._branch.row
        if self._adapters.store.warning and not self._has_warned:
            self._has_warned = True
            await self._branch.publish(NoticeShown(severity="warning", title=self._adapters.store.warning))
        if (row.cwd, row.additional_directories) != self._place:  # opened elsewhere since: here the tools are as before
            cwd, directories = self._place
            await self._branch.change(SessionChanges(cwd=cwd, additional_directories=directories))
        if moved:
            text = "This session went on elsewhere since it was opened here; what was said there is part of it now."
            await self._branch.record([NewEntry(body=Remark(text=text, message_id=new_message_id()))])
        await self.name()

    async def name(self) -> None:
        """Give the session the title of its first prompt, unless it has one."""
        if self._branch.row.title is None and (title := title_from(self._branch.newest_user_text())):
            await self._branch.change(SessionChanges(title=title))
            await self._branch.publish(TitleChanged(title=title))

    async def move(self, to: int | None, reason: str) -> None:
        """Stand on another entry; see :meth:`crow.agent.branch.Branch.move`."""
        known = self._branch.plan
        await self._branch.move(to, reason)
        await self._look_around(known)

    async def step_back(self) -> None:
        """Stand before the turn that just ended."""
        known = self._branch.plan
        await self._branch.step_back()
        await self._look_around(known)

    async def measured(self) -> ContextMeasured:
        """How full the context is, without loading anything.

        :raises ~crow.domain.errors.CrowError: the model's settings or the store cannot be used.
        """
        return (await self._gauge()).reading()

    async def cut(self, parts: Sequence[Part]) -> int | None:
        """How many characters of a huge prompt the model may see; None: all of them."""
        text = parts_text(parts)
        if len(text) <= SMALL_CHARS:
            return None
        return (await self._gauge()).cut_prompt(text)

    async def _look_around(self, known: Sequence[PlanItem]) -> None:
        """The session stands elsewhere now: see what the model was told there, and tell the client what holds there,
        the plan if it is not the one `known` to it, and how full the context is."""
        if self.briefing is not None:
            self.briefing.look_back()
        if self._branch.plan != known:
            await self._branch.publish(PlanChanged(plan=self._branch.plan))
        try:
            measured = await self.measured()
        except CrowError as error:
            logger.warning("The context could not be measured: %s", error)
        else:
            await self._branch.publish(measured)

    async def _gauge(self) -> Gauge:
        return await gauge_on(self._branch, self._info, self._adapters.settings().compaction, self.window)

    def _info(self) -> ModelInfo:
        return self._adapters.info(self._branch.row.model)


def title_from(text: str) -> str:
    """The first line of a prompt, bounded; empty if there is none."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= TITLE_CHARS else line[: TITLE_CHARS - 1].rstrip() + "…"
