"""The tools and turns of a session, made when they are first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from crow.agent.sessions.conversation import Conversation
from crow.store import QueuedPrompt
from crow.tools.servers import McpServer, ServerPrompt

if TYPE_CHECKING:  # importing these takes 30 ms, and a session opens without them
    from crow.agent.sessions.runner import TurnRunner
    from crow.agent.turns.turn import Turn


class LazyRunner:
    """Makes a session's :class:`TurnRunner` with the first prompt or command, or when tools are needed."""

    tasks: anyio.abc.TaskGroup
    """The task group of the session. The session sets it when it begins to run."""

    def __init__(
        self, conversation: Conversation, servers: Sequence[McpServer], ended_before: Sequence[QueuedPrompt]
    ) -> None:
        self.servers = tuple(servers)
        self.made: TurnRunner | None = None
        """The runner, or None if nothing has needed one yet."""
        self.is_warm = False
        """Whether everything that a turn imports has been imported."""
        self._conversation = conversation
        self._ended_before = ended_before
        """Texts about background work that ended before the session was opened, for the model to read in the next
        turn."""
        self._is_closing = False
        self._tools_wanted = anyio.Event()

    def get(self) -> TurnRunner:
        """Return the runner. The first call makes it."""
        if self.made is None:
            from crow.agent.sessions.runner import TurnRunner  # takes 30 ms and is not needed to open a session

            self.made = TurnRunner(
                self._conversation,
                self.servers,
                self.tasks,
                ended_before=self._ended_before,
                tools_wanted=self._tools_wanted,
            )
        return self.made

    @property
    def turn(self) -> Turn | None:
        """The turn that is running now."""
        return self.made.turn if self.made is not None else None

    @property
    def running_calls(self) -> Mapping[str, anyio.CancelScope]:
        """Maps the id of each running call of the turn to the call's cancel scope. Calls of subagents are not
        included. Cancelling a scope ends only its own call."""
        return self.turn.running_calls if self.turn is not None else {}

    @property
    def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts that the session's MCP servers offer now."""
        return self.made.tools.prompts if self.made is not None else ()

    @property
    def subagents(self) -> frozenset[str]:
        """The ids of the session's subagents that run in this process."""
        return frozenset(self.made.subagents.running if self.made is not None else ())

    def cancel_subagent(self, task_id: str) -> bool:
        """Cancel the work of one of the session's subagents. Return False if that subagent does not run in this
        process."""
        return self.made is not None and self.made.subagents.cancel(task_id)

    def warm(self) -> None:
        """Start the MCP servers. Call this when everything that a turn imports has been imported."""
        self.is_warm = True
        if self.servers:
            self._tools_wanted.set()

    async def run_tools(self) -> None:
        """Open the tools when they are needed for the first time, and close them at the end of the session. Both happen
        in one task, which belongs to no turn."""
        await self._tools_wanted.wait()
        if not self._is_closing:
            with suppress(Exception):  # every turn that needs the tools will raise the same error
                await self._conversation.adapters.load()
        if not self._is_closing:
            await self.get().tools.run()

    def cancel_preparation(self) -> None:
        """Stop writing a summary in advance."""
        if self.made is not None:
            self.made.between.cancel_preparation()

    def cancel_subagents(self) -> None:
        """Cancel the subagents in the background."""
        if self.made is not None:
            self.made.subagents.cancel_background()

    def begin_close(self) -> None:
        """Open no more tools, and stop writing a summary in advance."""
        self._is_closing = True
        self.cancel_preparation()

    async def end_background(self) -> None:
        """Wait until nothing runs in the background."""
        if self.made is not None:
            await self.made.between.end_background()
            await self.made.subagents.wait_ended()

    def close(self) -> None:
        """Close the tools."""
        if self.made is not None:
            self.made.close()
        self._tools_wanted.set()
