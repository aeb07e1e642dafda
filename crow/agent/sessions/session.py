"""One open session: takes its prompts in order and runs a turn for each."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from crow.agent import Client, commands, new_message_id
from crow.agent.sessions.claims import Claims
from crow.agent.sessions.conversation import Conversation
from crow.agent.sessions.lazy_runner import LazyRunner
from crow.agent.sessions.pending import PendingPrompt, PromptQueue, Repeat
from crow.agent.sessions.prompt_turn import PromptTurn
from crow.agent.sessions.repeats import answer_of_first, stored_outcome
from crow.agent.templates import expand_template, parse_prompt_call
from crow.agent.turns.adapters import Adapters
from crow.agent.turns.links import attach_files
from crow.agent.turns.mentions import Mention, find_mentions
from crow.domain.entries import PromptName, StopReason, User
from crow.domain.errors import (
    LeafMoved,
    NoSuchSession,
    RepeatedPrompt,
    StoreUnavailable,
    TurnError,
)
from crow.domain.events import TurnEnded
from crow.domain.messages import JsonObject, Part, Text
from crow.domain.trace_context import use_trace_context
from crow.store import Tail
from crow.tools import Workspace
from crow.tools.servers import McpServer

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""While a session has something that the store refused, crow tries again to store it at this interval, in seconds."""
_TELL_S = 2.0
"""The next turn waits at most this many seconds for clients to be told that a turn has ended."""


_OVERDUE = (
    "The last turn of session {id} has not ended yet, probably because the database does not answer. Crow ends it as "
    "soon as the database answers; send the next prompt after that."
)


class Session:
    """A session that is open in this process. `run` is the session's task. The tasks that handle the editor's requests
    call the other methods.

    The session's task claims each turn, runs it in the prompt's cancel scope and ends it. It also opens and closes the
    tools, including the MCP servers, in a child task. A request with a prompt only waits until the prompt's turn has
    ended.
    """

    def __init__(
        self, adapters: Adapters, client: Client, workspace: Workspace, servers: Sequence[McpServer], tail: Tail
    ) -> None:
        self.id = tail.row.id
        self.workspace = workspace
        self.conversation = Conversation(adapters, client, workspace, tail)
        self.branch = self.conversation.branch
        self.closing = False
        """Whether `close` was called, or the session's task has ended. The session takes no more prompts then."""
        self.runs_elsewhere = False
        """Whether another process runs a turn, as far as is known."""
        self.queue = PromptQueue()
        self.claims = Claims(self.conversation)
        self.runner = LazyRunner(self.conversation, servers, tail.waiting)
        self._turn: PromptTurn | None = None
        """The turn of the first prompt in the queue, while it is claimed, runs and ends."""
        self._wake = anyio.Event()
        """Set when there is something to do for the session's task."""
        self._ended = anyio.Event()
        """Set when the session's task has ended."""

    @property
    def is_running(self) -> bool:
        """Whether a turn runs here or in another process, or the end of the last turn is not stored yet."""
        return bool(self.queue) or not self.branch.is_settled or self.runs_elsewhere

    @property
    def busy(self) -> bool:
        """Whether a prompt runs or waits, or a subagent works in the background."""
        return bool(self.queue or self.runner.subagents)

    async def prompt(self, parts: Sequence[Part]) -> StopReason:
        """Submit a prompt and wait for its turn to end."""
        return await self.answer(self.submit(parts))

    def submit(
        self, parts: Sequence[Part], metadata: JsonObject | None = None, name: PromptName | None = None
    ) -> PendingPrompt:
        """Queue a prompt without waiting, so that a cancel request sent right after the prompt also cancels it.

        `answer` waits for the prompt's turn to end. `metadata` is merged into the session's metadata before the turn.
        If the session already has a prompt with this `name`, the new prompt does not run. `answer` then returns the
        outcome of the first prompt.

        :raises ~crow.domain.errors.NoSuchSession: the session is closed.
        :raises ~crow.domain.errors.ArgumentError: a queued prompt with other content has this name.
        :raises ~crow.domain.errors.StoreUnavailable: the last turn cannot end, because the database does not answer.
        """
        if self.closing:
            raise NoSuchSession(self.id)
        if name is not None and (first := self.queue.named(name)) is not None:
            repeat = Repeat(queued=first)
            return PendingPrompt(parts=parts, text=first.text, message_id=first.message_id, name=name, repeat=repeat)
        if self._turn is not None and self._turn.is_overdue:
            raise StoreUnavailable(_OVERDUE.format(id=self.id))
        text = parts[0].text.strip() if parts and isinstance(parts[0], Text) else ""
        prompt = PendingPrompt(
            parts=parts,
            text=text,
            message_id=new_message_id(),
            command=commands.parse(text),
            metadata=metadata or {},
            name=name,
        )
        if self.runner.servers:
            prompt.called = parse_prompt_call(text)
            if prompt.command is None and prompt.called is None:
                prompt.mentions = self._mentions(parts)
        self.runner.cancel_preparation()
        self.queue.append(prompt)
        return prompt

    async def answer(self, prompt: PendingPrompt) -> StopReason:
        """Wait for the turn of a submitted prompt to end. If the turn cannot start at once, the prompt is stored in the
        meantime.

        :raises ~crow.domain.errors.CrowError: the turn failed. The session still takes the next prompt.
        """
        if prompt.repeat.queued is not None:
            return await answer_of_first(self.conversation, self.queue, prompt)
        try:
            await self._check(prompt)
            if prompt.metadata:
                await self.branch.merge_metadata(prompt.metadata)
            if prompt.command is None:
                if prompt.text.startswith("/"):
                    prompt.parts = expand_template(prompt.text, prompt.parts, self.conversation.adapters.templates())
                prompt.parts = await attach_files(prompt.parts, self.workspace, self.conversation.rules())
                is_revoked = prompt not in self.queue
                prompt.in_inbox = not is_revoked and (
                    prompt.needs_servers or self.closing or self.queue[0] is not prompt
                )
                if prompt.in_inbox:
                    await self.conversation.adapters.store.enqueue(
                        self.id, prompt.parts, prompt.message_id, name=prompt.name
                    )
        except RepeatedPrompt:
            prompt.in_inbox, prompt.repeat.is_refused = False, True
            self.queue.drop(prompt)
        except BaseException as error:
            if prompt.in_inbox and not isinstance(error, Exception):  # cancelled; the prompt may be stored already
                self.withdraw(prompt)
            else:
                prompt.error = error if isinstance(error, Exception) else None
                self.queue.drop(prompt)
            raise
        finally:
            prompt.ready.set()
            self._wake.set()
        await prompt.done.wait()
        if prompt.repeat.is_refused:
            return await stored_outcome(self.conversation, self.queue, prompt)
        if prompt.error is not None:
            raise prompt.error
        return prompt.stop

    async def _check(self, prompt: PendingPrompt) -> None:
        """Refuse a prompt that needs files of another machine. Nothing is stored yet.

        A prompt that repeats a stored one must neither be refused nor change the session's metadata. So if either would
        happen, look for the stored prompt first.

        :raises RepeatedPrompt: the prompt repeats a stored one.
        :raises FilesElsewhere: see `Conversation.files_elsewhere`.
        """
        needs_files = prompt.command is None or prompt.command.name == "retry"
        problem = await self.conversation.files_elsewhere() if needs_files else None
        if prompt.name is not None and (problem or prompt.metadata):
            known = await self.conversation.adapters.store.named_prompt(self.id, prompt.name)
            if known is not None:
                raise RepeatedPrompt(prompt.name.id, known.message_id)
        if problem:
            raise problem

    def _mentions(self, parts: Sequence[Part]) -> tuple[Mention, ...]:
        return find_mentions(parts, [server.name for server in self.runner.servers])

    async def steer(self, parts: Sequence[Part], message_id: str | None = None, name: PromptName | None = None) -> bool:
        """Add a prompt to the running turn. The model sees the prompt at its next step. Return False if no turn runs.

        When this returns, the prompt is in the inbox. Even if the turn ends before that step, the prompt goes into the
        history. If the session already has a prompt with this `name`, nothing is added.

        :raises ~crow.domain.errors.ArgumentError: a prompt with other content has this name.
        """
        if self.runner.turn is None:
            return name is not None and await self.conversation.adapters.store.named_prompt(self.id, name) is not None
        message_id = message_id or new_message_id()
        parts = await attach_files(parts, self.workspace, self.conversation.rules())
        mentions = self._mentions(parts)
        if mentions:
            parts, failures = await self.runner.get().attach_resources(parts, mentions)
            for words in failures:
                await self.conversation.report("A resource could not be attached", words)
        try:
            await self.conversation.adapters.store.enqueue(self.id, parts, message_id, name=name)
        except RepeatedPrompt:
            return True
        if (turn := self.runner.turn) is None:  # the turn ended meanwhile; the sender has to prompt again
            await self.conversation.adapters.store.drop_prompt(self.id, message_id)
            return False
        turn.steer(User(parts=tuple(parts), message_id=message_id, name=name))
        return True

    def withdraw(self, prompt: PendingPrompt) -> None:
        """End one submitted prompt as `cancelled`. The other prompts stay. If the prompt repeats a queued one, end the
        queued prompt, which also ends the repeat."""
        if prompt.repeat.queued is not None and prompt.repeat.queued in self.queue:
            self.withdraw(prompt.repeat.queued)
            return
        if self.queue and self.queue[0] is prompt:
            self._cancel(prompt)
        else:  # the request is answered now; later, the prompt's turn stores the prompt and ends at once
            prompt.scope.cancel()
            prompt.stop = "cancelled"
            prompt.done.set()

    def cancel(self) -> None:
        """End the running turn and all waiting prompts as `cancelled`, and cancel the subagents in the background."""
        for prompt in self.queue:
            self._cancel(prompt)
        self.runner.cancel_subagents()

    def lose_turn(self) -> None:
        """End the running turn with an error, because the session has entries that this process did not store."""
        if self.queue:
            self.queue[0].error = LeafMoved(
                f"Another process took over session {self.id}, or the database stored something without confirming it. "
                "The rest of the turn is lost; send the prompt again."
            )
            self._cancel(self.queue[0])

    def _cancel(self, prompt: PendingPrompt) -> None:
        if self._turn is not None and self._turn.prompt is prompt:
            self._turn.cancel()
        else:
            prompt.scope.cancel()

    async def close(self) -> None:
        """Cancel all prompts, and wait until the session's task has ended."""
        self.closing = True
        self.runner.begin_close()
        self.cancel()
        self._wake.set()
        await self._ended.wait()

    async def run(self) -> None:
        """Run the session's task. It ends after `close`, or when it is cancelled."""
        try:
            async with anyio.create_task_group() as self.runner.tasks:
                self.runner.tasks.start_soon(self.runner.run_tools)
                while not self.closing or (self.queue and self.queue[0].is_only_in_memory):
                    if self.queue:
                        await self._serve(self.queue[0])
                    else:
                        await self._wait_for_prompt()
                await self.runner.end_background()
                await self.branch.close()
                self.runner.close()
            await self.workspace.close()
        finally:
            for prompt in tuple(self.queue):
                prompt.error = self._failure()
                self.queue.drop(prompt)
            self.closing = True
            self._ended.set()

    def _failure(self) -> TurnError | None:
        """Return the error for the prompts of a session whose task fails. Return None if the session was closed."""
        words = f"Session {self.id} failed; the log says why. Send the prompt again."
        return None if self.closing else TurnError(words)

    async def _wait_for_prompt(self) -> None:
        """Wait for a prompt or for `close`. If the store could not store something before, also try after a few seconds
        to store it."""
        self._wake = anyio.Event()
        with anyio.move_on_after(None if self.branch.is_settled else RETRY_S) as scope:
            await self._wake.wait()
        if scope.cancelled_caught:
            await self.branch.try_to_settle()

    async def _serve(self, prompt: PendingPrompt) -> None:
        """Run the turn of the first prompt in the queue."""
        if not prompt.ready.is_set():
            await prompt.ready.wait()
        if prompt not in self.queue:  # the prompt could not be stored, so `answer` removed it from the queue
            return
        use_trace_context(prompt.trace_context)
        if prompt.trace_context:
            logger.info("Session %s: a turn begins", self.id)
        self._turn = PromptTurn(prompt, self.conversation, self.claims, self.runner, self._answer_overdue)
        try:
            await self._turn.run()
        except RepeatedPrompt:
            prompt.repeat.is_refused = True
        except Exception as error:  # noqa: BLE001  # the request raises it; the session goes on
            prompt.error = error
        except BaseException:
            prompt.stop, prompt.error = "cancelled", prompt.error or self._failure()
            raise
        finally:
            self._turn = None
            prompt.usage = self.branch.usage.turn
            if not prompt.repeat.is_refused and not prompt.end_is_told:
                await self._tell_end(prompt)
            self.queue.remove(prompt)
            prompt.done.set()
        self._begin_rest(prompt)

    async def _tell_end(self, prompt: PendingPrompt) -> None:
        """Tell the clients that the turn of `prompt` has ended. Tell them nothing if the turn never began and another
        process runs a turn."""
        if prompt.has_begun or not self.runs_elsewhere:
            prompt.end_is_told = True
            with anyio.move_on_after(_TELL_S, shield=True):
                await self.branch.publish(TurnEnded(message_id=prompt.message_id, stop=prompt.stop, error=prompt.error))

    async def _answer_overdue(self) -> None:
        """Answer the request of a turn whose end the database holds up, and the requests of the cancelled prompts that
        wait for that turn. The turns themselves end when the database answers again."""
        # Nothing is logged here: if the log is on the same file system as the database, logging would hang as well.
        first, *waiting = self.queue
        first.usage = self.branch.usage.turn
        if first.error is None and not first.scope.cancel_called:
            first.error = StoreUnavailable(_OVERDUE.format(id=self.id))
        for prompt in (first, *(each for each in waiting if each.scope.cancel_called)):
            if prompt.scope.cancel_called:
                prompt.stop = "cancelled"
            prompt.done.set()
        await self._tell_end(first)

    def _begin_rest(self, prompt: PendingPrompt) -> None:
        """Start what runs between two turns. `prompt` is the prompt of the last turn."""
        if self.workspace.has_leftovers:
            self.runner.tasks.start_soon(self.workspace.reap)
        if self.runner.made is None or prompt.error is not None or self.closing:
            return
        if prompt.stop != "cancelled":
            self.runner.made.between.title_later()
        if prompt.command is None and not self.queue and self.branch.is_settled:
            self.runner.made.between.prepare_checkpoint()
