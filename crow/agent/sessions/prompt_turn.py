"""Claims, runs and ends the turn of one prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.lowlevel

from crow.agent.background import BackgroundTask, after_delay
from crow.agent.sessions.claims import Claims
from crow.agent.sessions.conversation import Conversation
from crow.agent.sessions.lazy_runner import LazyRunner
from crow.agent.sessions.pending import PendingPrompt
from crow.domain.entries import Command, NewEntry, TurnEnd
from crow.domain.errors import NO_MEMORY, CrowError, StoreError, lacks_memory
from crow.domain.events import TurnBegan

logger = logging.getLogger(__name__)

_CANCELLED = TurnEnd(stop="cancelled")
_HEAD_START_S = 0.0005
"""When the user cancels a turn, crow starts to store the turn's end, waits this many seconds, and then cancels the
running work. The wait lets the store begin first."""
RENEW_S = 20.0
"""The lease of a running turn is renewed at this interval, in seconds."""
END_S = 10.0
"""If a turn has not ended this many seconds after its cancellation, or after its work, `PromptTurn` calls `on_overdue`.
Everything that the end of a turn waits for usually takes less time, unless the database hangs."""


class PromptTurn:
    """The turn of one prompt, from its claim to its end. It runs in the scope of the prompt, and ends in the store even
    if it is cancelled or fails.

    A write that has begun is never abandoned, because it may still succeed. So while the database hangs, `run` does not
    return. `on_overdue` answers the prompt's request then.
    """

    def __init__(
        self,
        prompt: PendingPrompt,
        conversation: Conversation,
        claims: Claims,
        runner: LazyRunner,
        on_overdue: Callable[[], Awaitable[None]],
    ) -> None:
        self.prompt = prompt
        self.is_overdue = False
        """Whether the turn should have ended `END_S` seconds ago."""
        self._conversation = conversation
        self._branch = conversation.branch
        self._claims = claims
        self._runner = runner
        self._ending: BackgroundTask | None = None
        """Stores the end of the cancelled turn while the connection to the model is being closed."""
        self._on_overdue = on_overdue
        self._is_ending = False
        """Whether the turn was cancelled or has done its work."""
        self._ended = anyio.Event()
        """Set when `run` returns."""

    async def run(self) -> None:
        """Claim the turn, run it and end it. :raises Exception: it failed."""
        prompt = self.prompt
        # A tool may run for hours. Without a renewed lease, other processes would assume that this process is dead.
        async with after_delay(RENEW_S, self._renew_lease, again=True):
            try:
                with prompt.scope:
                    if prompt.command is None and (self._runner.made is not None or self._runner.is_warm):
                        self._runner.get().prefetch()
                    moved = await self._claims.take(prompt)
                    await self._run(moved=moved)
            finally:
                if self._ending is not None:
                    with anyio.CancelScope(shield=True):
                        await self._ending.wait()
                self._ended.set()

    def cancel(self) -> None:
        """End the turn as `cancelled`."""
        self._limit_end()
        turn = self._runner.turn if self._ending is None else None
        if turn is not None and turn.mute():
            # The turn is only waiting for the model, so its end can be stored while the connection is being closed.
            self._ending = BackgroundTask(self._runner.tasks, partial(self._end, _CANCELLED))
            asyncio.get_running_loop().call_later(_HEAD_START_S, self.prompt.scope.cancel)
        else:
            self.prompt.scope.cancel()

    def _limit_end(self) -> None:
        """From now on, the turn has `END_S` seconds to end."""
        if not self._is_ending:
            self._is_ending = True
            self._runner.tasks.start_soon(self._watch_end)

    async def _watch_end(self) -> None:
        with anyio.move_on_after(END_S):
            await self._ended.wait()
        if not self._ended.is_set():
            self.is_overdue = True
            await self._on_overdue()

    async def _renew_lease(self) -> None:
        try:
            for session_id in (self._conversation.id, *self._runner.subagents):
                await self._conversation.adapters.store.renew_lease(session_id)
        except StoreError as error:
            logger.warning("Session %s: its lease could not be renewed: %s", self._conversation.id, error)

    async def _run(self, *, moved: bool) -> None:
        """Run the claimed turn. `moved` is what `Claims.take` returned."""
        conversation, prompt = self._conversation, self.prompt
        try:
            try:
                if conversation.follower is not None and self._branch.must_catch_up:
                    await conversation.follower.reached(self._branch.claimed_to or 0)
            finally:  # the prompt is stored, so the clients get it even if the turn is cancelled already
                await self._tell_begin()
            await anyio.lowlevel.checkpoint_if_cancelled()
            await self._claims.begin(moved=moved)
            if prompt.command is None:
                await conversation.adapters.load()  # imports, in a thread, the packages that the runner needs
            prompt.stop = await self._runner.get().run(prompt)
        except anyio.get_cancelled_exc_class():
            prompt.stop = "cancelled"
            if self._ending is None:
                self._keep_command()
                await self._end(_CANCELLED)
            raise
        except Exception as error:
            self._keep_command()
            is_bug = not isinstance(error, CrowError)
            if is_bug:
                logger.exception("The turn failed")
            prompt.error = error
            words = NO_MEMORY if lacks_memory(error) else "Internal error" if is_bug else str(error)
            await self._end(TurnEnd(stop="error", detail=words))
            raise
        await self._end(TurnEnd(stop=prompt.stop))

    async def _tell_begin(self) -> None:
        """Tell the clients that the turn has begun. They are told even if the caller is cancelled already."""
        prompt, entry = self.prompt, self._branch.projection.newest_user()
        is_stored = entry is not None and getattr(entry.body, "message_id", "") == prompt.message_id
        typed = None if prompt.command is None else prompt.text
        began = TurnBegan(message_id=prompt.message_id, stored=entry if is_stored else None, typed=typed)
        prompt.has_begun, prompt.end_is_told = True, False
        await self._branch.publish(began)

    def _keep_command(self) -> None:
        """Store a command without an answer when its turn ends, because a client may have shown the command."""
        prompt = self.prompt
        if prompt.command is not None and not self._branch.projection.has_prompt(prompt.message_id):
            command = Command(text=prompt.text, answer="", message_id=prompt.message_id, name=prompt.name)
            self._branch.store_at_end([NewEntry(body=command)])

    async def _end(self, end: TurnEnd) -> None:
        """Store the turn's end, together with everything that the turn has not stored yet, and release the turn."""
        self._limit_end()
        try:
            if self._runner.made is None:
                await self._branch.end_turn(end)
            else:
                await self._runner.made.end_turn(end)
        except StoreError as error:
            if end.stop not in ("error", "cancelled"):  # in these cases the request already has its answer
                raise
            logger.warning("Could not store the end of the turn; crow will try again: %s", error)
        await self._conversation.tell_cost()
        if end.stop == "refusal":  # ACP drops a refused prompt; the turn stays in the log as a branch
            first = next((entry for entry in self._branch.entries if entry.turn == self._branch.turn), None)
            if first is not None:
                await self._conversation.move(first.parent, "refusal")
