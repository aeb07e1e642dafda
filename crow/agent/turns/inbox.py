"""Tells a session's model which subagents and commands have ended in the background.

ACP allows the messages of a turn only while a prompt is unanswered, so crow never starts a turn by itself. Instead, the
news waits in the session's inbox in the store. If a turn is running, the model is told before its next request;
otherwise, it is told in the next turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio
import anyio.abc

from crow.agent import new_remark
from crow.agent.history.branch import Branch
from crow.domain.entries import Custom, Entry, NewEntry
from crow.domain.errors import StoreError
from crow.domain.events import NoticeShown
from crow.domain.messages import Text
from crow.domain.rendering import parts_text
from crow.domain.subagents import TASK_WORDS, WAKE
from crow.domain.text import shorten_middle, title_line
from crow.store import QueuedPrompt, TurnStore
from crow.tools import WatchedCommand

logger = logging.getLogger(__name__)

_NAMESPACE = "crow"
_TEXT_CHARS = 20_000
"""`Inbox.add` shortens the text for the model to about this many characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """Something that ended in the background."""

    message_id: str
    """The id in the inbox: `WAKE` and the id of the call that started the work."""
    text: str
    """Tells the model how the work ended."""
    remark: str = ""
    """Tells the user that the model was told. If empty, the user is not told."""
    is_known: Callable[[], bool] = lambda: False
    """Called before the model is told. If it returns true, the model already knows and is not told again."""


class Inbox:
    """Remembers which work of a session has ended in the background, until the model is told about it."""

    def __init__(
        self,
        branch: Branch,
        store: TurnStore,
        waiting: Sequence[QueuedPrompt],
        *,
        tasks: anyio.abc.TaskGroup,
        has_turn: Callable[[], bool],
    ) -> None:
        """`waiting` are the inbox entries about work that ended before the session was opened. Commands are watched in
        `tasks`."""
        self._branch = branch
        self._store = store
        self._tasks = tasks
        self._has_turn = has_turn
        self._watching: list[anyio.CancelScope] = []
        """One scope for each command in the background. Cancelling it ends the watching, not the command."""
        self._ended = [_waiting_end(each) for each in waiting]

    @property
    def has_news(self) -> bool:
        """Whether there is something that the model does not know yet."""
        return any(not each.is_known() for each in self._ended)

    async def expect(self, call_id: str, if_killed: str) -> None:
        """Record in the store that something runs in the background. If crow dies before `add` is called, the model
        gets the text `if_killed`.

        :raises ~crow.domain.errors.StoreError: the record could not be stored.
        """
        await self._store.enqueue(self._branch.row.id, (Text(text=if_killed),), f"{WAKE}{call_id}")

    async def drop(self, call_id: str) -> None:
        """Remove the record of something that did not start."""
        with suppress(StoreError):
            await self._store.drop_prompt(self._branch.row.id, f"{WAKE}{call_id}")

    async def add(
        self, call_id: str, text: str, *, title: str, remark: str = "", is_known: Callable[[], bool] = lambda: False
    ) -> None:
        """Record in the store that something in the background has ended. If no turn is running, tell the user."""
        text = shorten_middle(text, _TEXT_CHARS)
        ended = _Ended(message_id=f"{WAKE}{call_id}", text=text, remark=remark, is_known=is_known)
        try:
            await self._store.replace_queued(self._branch.row.id, (Text(text=ended.text),), ended.message_id)
        except StoreError as error:
            logger.warning("Session %s: could not store what ended in the background: %s", self._branch.row.id, error)
        self._ended.append(ended)
        if not self._has_turn():
            description = "Crow tells the model with your next prompt."
            await self._branch.publish(NoticeShown(severity="info", title=title, description=description))

    async def deliver(self) -> None:
        """Tell the model which work has ended. Each text is added to the history and removed from the inbox in one
        transaction.

        :raises ~crow.domain.errors.StoreError: something could not be stored; the rest stays in the inbox.
        """
        while self._ended:
            ended = self._ended[0]
            stored: Sequence[Entry] = ()
            if ended.is_known():
                await self._store.drop_prompt(self._branch.row.id, ended.message_id)
            else:
                told = Custom(namespace=_NAMESPACE, text=ended.text, for_model=True, message_id=ended.message_id)
                remark = (new_remark(ended.remark),) if ended.remark else ()
                stored = await self._branch.store_only([NewEntry(body=told), *remark])
            self._ended.remove(ended)  # a cancellation while clients are told must not store it again
            await self._branch.publish_stored(stored)

    async def watch(self, call_id: str, command: WatchedCommand) -> None:
        """See :class:`crow.tools.BackgroundWatcher`."""
        name = f"The background command {command.id} (`{title_line(command.line)}`)"
        try:
            lost = " What it changed since shell_output last looked is lost." if command.is_layered else ""
            await self.expect(call_id, f"{name} has ended, because crow ended while it ran.{lost}")
        except StoreError as error:
            logger.warning("Session %s: could not store the note about this: %s: %s", self._branch.row.id, name, error)
        self._tasks.start_soon(self._watch, call_id, name, command)

    async def _watch(self, call_id: str, name: str, command: WatchedCommand) -> None:
        with anyio.CancelScope() as scope:
            self._watching.append(scope)
            await command.ended()
            with anyio.CancelScope(shield=True):
                title = f"{name} has {command.state}."
                text = f"{title} Read the rest of its output with shell_output."
                if command.waiting:
                    text += f" Only after that are its last changes kept, or the user is asked: {command.waiting}."
                await self.add(call_id, text, title=title_line(title), is_known=command.is_known)
        self._watching.remove(scope)

    def close(self) -> None:
        """Stop watching commands. Called before crow ends the commands that still run."""
        for scope in self._watching:
            scope.cancel()


def _waiting_end(queued: QueuedPrompt) -> _Ended:
    """Convert an inbox entry about work that ended before the session was opened."""
    text = parts_text(queued.parts)
    remark = f"({text.splitlines()[0]})" if text.startswith(TASK_WORDS) else ""
    return _Ended(message_id=queued.message_id, text=text, remark=remark)
