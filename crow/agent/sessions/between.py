"""Writes a title, and a summary in advance, while no turn of a session runs."""

from __future__ import annotations

import logging
from functools import partial
from typing import TypeAlias

import anyio
import anyio.abc

from crow.agent.background import BackgroundTask
from crow.agent.compaction.compactor import Compactor
from crow.agent.compaction.writer import PreparedCheckpoint
from crow.agent.history.titles import untitled_prompt, write_title
from crow.agent.sessions.conversation import Conversation
from crow.agent.turns.cost import Budget
from crow.domain.errors import StoreError

logger = logging.getLogger(__name__)

_WATCH_S = 0.5
"""While a summary is written between two turns, crow checks at this interval (in seconds) whether the session has
changed. If so, crow stops writing. Another process writes a summary only after it has run a turn and then waited for
`Conversation.rest_s` seconds, which is much longer than this interval. So two processes never write a summary of one
session at once."""

_Position: TypeAlias = tuple[int | None, str]
"""The id of the newest checkpoint, and the endpoint of the session's model."""


class BetweenTurns:
    """Works for one session while no turn runs. Its tasks belong to the session's task group."""

    def __init__(self, conversation: Conversation, budget: Budget, tasks: anyio.abc.TaskGroup) -> None:
        self._conversation = conversation
        self._budget = budget
        self._tasks = tasks
        self._titling: BackgroundTask | None = None
        self._titled = ""
        """The message id of the prompt for which a title was requested."""
        self._compactor: Compactor | None = None
        """The compactor of the last turn. None if a fallback model has answered in that turn."""
        self._preparation: BackgroundTask | None = None
        self._prepared: PreparedCheckpoint | None = None
        """The summary that was written in advance, or None. While a turn runs, the turn's compactor has the summary."""
        self._attempted_at: _Position | None = None
        """The position of the session when crow last began to write a summary in advance."""
        self._next_attempt = 0
        """A context size in tokens. While the session's position is still `_attempted_at`, crow writes no further
        summary between turns until the context has reached this size."""

    def begin_turn(self, compactor: Compactor) -> None:
        """Give the summary that was written in advance to the compactor of a turn that begins."""
        compactor.prepared, self._prepared = self._prepared, None
        self._compactor = compactor

    def end_turn(self, compactor: Compactor, *, has_fallen_back: bool) -> None:
        """Take back a summary that the turn has not used, because the next turn can use it."""
        self._prepared = compactor.prepared
        if has_fallen_back:  # the next turn asks the session's own model
            self._compactor = None

    def prepare_checkpoint(self) -> None:
        """Start to write the summary that the next prompt may need, if the session has become large enough.

        Call this after a turn. Only the process that ran the newest turn writes a summary.
        """
        compactor = self._compactor
        level = None if compactor is None else compactor.gauge.early_level()
        if compactor is None or level is None or self._budget.is_spent():
            return
        used, checkpoint = compactor.gauge.used(), self._conversation.branch.projection.checkpoint
        position: _Position = (None if checkpoint is None else checkpoint.id, compactor.gauge.info.endpoint)
        # Wait until the context has grown. Otherwise a user who always answers quickly would pay for a summary in every
        # turn.
        if used < level or (position == self._attempted_at and used < self._next_attempt):
            return
        self._prepared = None
        self._preparation = BackgroundTask(self._tasks, partial(self._prepare_checkpoint, compactor, position))

    def cancel_preparation(self) -> None:
        """Stop writing a summary. This does not wait until the request is closed."""
        if self._preparation is not None:
            self._preparation.cancel()

    async def _prepare_checkpoint(self, compactor: Compactor, position: _Position) -> None:
        model = self._conversation.branch.row.model
        await anyio.sleep(self._conversation.rest_s)
        try:
            if await self._has_changed(model):
                return
            self._attempted_at = position
            self._next_attempt = compactor.gauge.used() + compactor.gauge.limits().room // 10
            with anyio.CancelScope() as scope:
                watch = BackgroundTask(self._tasks, partial(self._watch, model, scope))
                try:
                    self._prepared = await compactor.prepare()
                finally:
                    watch.cancel()
            await self._conversation.branch.store_requests()
        except StoreError as error:  # usually because another process runs a turn; the usage is stored later
            logger.info("Session %s: no summary was written early: %s", self._conversation.branch.row.id, error)
        except Exception:
            logger.exception("Session %s: no summary could be written early", self._conversation.branch.row.id)

    async def _watch(self, model: str, scope: anyio.CancelScope) -> None:
        """Cancel `scope` as soon as the session has changed, because the summary would then not be used."""
        while not await self._has_changed(model):  # noqa: ASYNC110  # other processes set no event here
            await anyio.sleep(_WATCH_S)
        scope.cancel()

    async def _has_changed(self, model: str) -> bool:
        """Whether another process runs a turn, another process has added entries, or the user has chosen another model
        than `model`. Also true if the store cannot be read."""
        try:
            row = await self._conversation.adapters.store.session(self._conversation.branch.row.id)
        except StoreError:
            return True
        return row.state != "idle" or row.leaf != self._conversation.branch.leaf or row.model != model

    def title_later(self) -> None:
        """If this was the session's first turn and the user has set a model for titles, ask that model for a title in
        the background."""
        name = "" if self._budget.is_spent() else self._conversation.adapters.settings().title_model
        prompt = untitled_prompt(self._conversation.branch) if name else None
        if prompt is not None and prompt.message_id != self._titled:
            self._titled = prompt.message_id
            if self._titling is not None:
                self._titling.cancel()
            open_model = partial(self._conversation.adapters.model, name)
            self._titling = BackgroundTask(
                self._tasks, partial(write_title, self._conversation.branch, prompt, open_model)
            )

    async def end_background(self) -> None:
        """Stop writing a summary and a title, and wait until the requests are closed and their usage is known."""
        tasks = [task for task in (self._preparation, self._titling) if task is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            await task.wait()
