"""The branch, the client and the workspace of an open session, which its turns and commands share."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Protocol

import anyio
import anyio.to_thread

from crow.agent import Client, new_remark
from crow.agent.compaction.budget import Gauge, gauge_on
from crow.agent.compaction.window import ContextWindow
from crow.agent.history.branch import Branch
from crow.agent.history.options import adopt_options, options_at
from crow.agent.permissions.rules import PermissionRule, current_rules
from crow.agent.turns.adapters import Adapters
from crow.domain.entries import PlanItem
from crow.domain.errors import CrowError, FilesElsewhere, StoreError
from crow.domain.events import ContextMeasured, NoticeShown, PlanChanged
from crow.domain.messages import Part
from crow.domain.rendering import parts_text
from crow.llm import ThoughtLevel
from crow.store import Tail, node_of
from crow.tools import Workspace

logger = logging.getLogger(__name__)

_RESTORING_MOVES = ("undo", "redo", "rewind")
"""Moves that restore the model and the thought level that were in use at the target entry. Other moves, such as
`/retry`, change neither of the two."""
_REST_S = 2.0
"""The default of `Conversation.rest_s`."""
_TELL_S = 2.0
"""The end of a turn waits at most this many seconds for clients to be told the cost."""
_SMALL_CHARS = 2_000
"""A prompt of at most this length fits into every context window."""


class SessionFollower(Protocol):
    """Follows a session in the store, and takes over the entries that other processes add to it."""

    async def until_free(self) -> None:
        """Wait until no other process runs a turn of the session, but only for a limited time. After that time, return
        even if another process still runs a turn."""

    async def reached(self, entry_id: int) -> None:
        """Wait until everything up to this entry was published."""


class Conversation:
    """The branch of one open session, and everything that its turns and commands need beside it."""

    def __init__(self, adapters: Adapters, client: Client, workspace: Workspace, tail: Tail) -> None:
        self.adapters = adapters
        self.client = client
        self.workspace = workspace
        self.branch = Branch(adapters.store, client, tail)
        self.window = ContextWindow(adapters.store, tail.row.id)
        self.directories = (tail.row.cwd, tail.row.additional_directories)
        """The working directory and the additional directories with which the session was opened."""
        self.rest_s = _REST_S
        """If no prompt arrives for this many seconds after a turn, crow may write a summary in advance."""
        self.follower: SessionFollower | None = None
        """Follows what other processes do with the session. None if other processes do not notify this one."""

    @property
    def id(self) -> str:
        """The id of the session."""
        return self.branch.row.id

    @property
    def thought_levels(self) -> tuple[ThoughtLevel, ...] | None:
        """The thought levels that the session's model takes, or None if that is unknown."""
        return self.adapters.info(self.branch.row.model).thought_levels

    def rules(self) -> tuple[PermissionRule, ...]:
        """Return the rules of the user's file and those of the session."""
        return current_rules(self.adapters.settings().rules, self.branch.row)

    async def report(self, title: str, detail: str = "", *, severity: Literal["info", "warning"] = "warning") -> None:
        """Show the user a notice. If the editor shows no notices, write the notice into the history."""
        if self.client.takes_notices:
            await self.client.publish(NoticeShown(severity=severity, title=title, description=detail))
        else:
            await self.branch.record([new_remark(f"{title}: {detail}" if detail else title)])

    async def move(self, to: int | None, reason: str) -> str:
        """Move the leaf (see :meth:`Branch.move`). Send the client the plan and the context size at the new leaf.

        Undo, redo and rewind also restore the model and the thought level that the session had at that entry. Return,
        in words for the user, which of them were restored, or an empty string.
        """
        branch = self.branch
        plan, options = branch.projection.plan, await options_at(self.adapters.store, branch.row, branch.leaf, to)
        await branch.move(to, reason)
        restored = await adopt_options(branch, options, self.adapters.models, keep=reason not in _RESTORING_MOVES)
        await self.publish_position(plan)
        words = []
        if "model" in restored:
            words.append(f"The model is `{restored['model']}` again.")
        if "thought_level" in restored:
            words.append(f"The thought level is {restored['thought_level'] or 'the default of the endpoint'} again.")
        return " ".join(words)

    async def publish_position(self, known_plan: tuple[PlanItem, ...]) -> None:
        """Send the plan if it differs from `known_plan`. Then tell the client how full the context is."""
        if self.branch.projection.plan != known_plan:
            await self.branch.publish(PlanChanged(plan=self.branch.projection.plan))
        try:
            measured = await self.measured()
        except CrowError as error:
            logger.warning("The context could not be measured: %s", error)
        else:
            await self.branch.publish(measured)

    async def tell_cost(self) -> None:
        """Tell the client the cost of the session, unless the client already knows it."""
        branch = self.branch
        if branch.row.cost == (branch.told.cost or 0.0):
            return
        with anyio.move_on_after(_TELL_S, shield=True), suppress(CrowError):
            if self.adapters.info(branch.row.model).input_price is not None:
                await branch.publish(await self.measured())

    async def measured(self) -> ContextMeasured:
        """Return how full the context is. This does not load the model.

        :raises ~crow.domain.errors.CrowError: the model's settings or the store cannot be used.
        """
        return (await self._gauge()).reading()

    async def cut_for(self, parts: Sequence[Part]) -> int | None:
        """Return how many characters of a very long prompt the model may see, or None for all."""
        text = parts_text(parts)
        return None if len(text) <= _SMALL_CHARS else (await self._gauge()).cut_prompt(text)

    async def _gauge(self) -> Gauge:
        policy = self.adapters.settings().compaction
        return await gauge_on(self.branch, lambda: self.adapters.info(self.branch.row.model), policy, self.window)

    async def files_elsewhere(self) -> FilesElsewhere | None:
        """Return an error if another machine has run the session and the session's directory does not exist on this
        machine. Otherwise return None."""
        node, cwd = node_of(self.branch.row), self.directories[0]
        if not self.adapters.node or node in ("", self.adapters.node):
            return None
        return None if await anyio.to_thread.run_sync(os.path.isdir, cwd) else FilesElsewhere(node, cwd)

    async def cancel_elsewhere(self) -> None:
        """Ask the process that runs a turn of this session to cancel that turn."""
        try:
            await self.adapters.store.cancel_turn(self.id)
        except StoreError as error:
            logger.warning("Session %s: the turn of another process could not be cancelled: %s", self.id, error)
