"""The prompts that run in this process, and their results for clients that ask again."""

from __future__ import annotations

import time
from functools import partial
from typing import TypeAlias

import anyio.abc

from crow.agent.background import BackgroundTask
from crow.agent.idle import IdleTimer
from crow.agent.sessions.pending import PendingPrompt
from crow.agent.sessions.session import Session
from crow.protocol import ClientConnection
from crow.protocol.frames import RequestId

_KEEP_S = 600.0
"""The result of a prompt is kept for this many seconds, so that a client whose connection broke can still get it."""

MAX_KEPT = 1_000
"""At most this many results of prompts are kept. If there are more when a prompt starts, crow drops the oldest
results."""

PromptKey: TypeAlias = tuple[str, str, RequestId]
"""Identifies a prompt request: the connection id of its client, the id of its session, and the id of the
request."""


class PromptRun:
    """A prompt whose turn runs to its end even if the connection that sent the prompt breaks.

    `connection` is the connection that now waits for the response. `blocks` are the content blocks of the request.
    """

    def __init__(self, session: Session, prompt: PendingPrompt, connection: ClientConnection, blocks: object) -> None:
        self.session = session
        self.blocks = blocks
        self.prompt = prompt
        self.connection = connection
        self.ended_at: float | None = None
        self._task: BackgroundTask

    def start(self, tasks: anyio.abc.TaskGroup, idle: IdleTimer) -> None:
        """Start to wait for the end of the prompt's turn."""
        self._task = BackgroundTask(tasks, partial(self._run, idle))

    async def _run(self, idle: IdleTimer) -> None:
        try:
            with idle.turn():
                await self.session.answer(self.prompt)
        finally:
            self.ended_at = time.monotonic()

    async def wait(self) -> PendingPrompt:
        """Wait for the end of the prompt's turn, and return the prompt. :raises Exception: the turn failed."""
        await self._task.wait()
        return self.prompt


class RunningPrompts:
    """The prompts that run or have ended a short time ago. Each runs as a task in `tasks`."""

    def __init__(self, tasks: anyio.abc.TaskGroup, idle: IdleTimer) -> None:
        self._tasks = tasks
        self._idle = idle
        self._runs: dict[PromptKey, PromptRun] = {}

    def again(self, connection: ClientConnection, key: PromptKey, blocks: object) -> PromptRun | None:
        """Return the original prompt if a client repeats it after its connection broke. Return None if the prompt is
        new. A client may use the id of an earlier request for a new prompt, so the content blocks are compared.

        From now on, the response to the original prompt goes to `connection`.
        """
        known = self._runs.get(key) if key[0] else None
        if known is None or known.connection is connection or known.blocks != blocks:
            return None
        known.connection = connection
        return known

    def run(self, run: PromptRun, key: PromptKey) -> None:
        """Run a submitted prompt. For `_KEEP_S` seconds after the end of the turn, the client that sent the prompt can
        ask for the result again."""
        run.start(self._tasks, self._idle)
        if key[0]:
            now = time.monotonic()
            ended = [each for each, old in self._runs.items() if old.ended_at is not None]
            for index, each in enumerate(ended):
                if index < len(ended) - MAX_KEPT or now - (self._runs[each].ended_at or now) > _KEEP_S:
                    del self._runs[each]
            self._runs[key] = run
