"""One open session: takes its prompts in order and runs a turn for each."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from crow.agent import Client, commands, new_message_id
from crow.agent.background import BackgroundTask, after_delay
from crow.agent.sessions.claims import Claims
from crow.agent.sessions.conversation import Conversation
from crow.agent.sessions.pending import PendingPrompt, Repeat, first_with
from crow.agent.sessions.repeats import answer_of_first, stored_outcome
from crow.agent.templates import expand_template, parse_prompt_call
from crow.agent.turns.adapters import Adapters
from crow.agent.turns.links import attach_files
from crow.agent.turns.mentions import Mention, find_mentions
from crow.domain.entries import Command, NewEntry, PromptName, StopReason, TurnEnd, User
from crow.domain.errors import (
    NO_MEMORY,
    CrowError,
    LeafMoved,
    NoSuchSession,
    RepeatedPrompt,
    StoreError,
    lacks_memory,
)
from crow.domain.events import NoticeShown, TurnBegan, TurnEnded
from crow.domain.messages import JsonObject, Part, Text
from crow.domain.trace_context import use_trace_context
from crow.llm import ThoughtLevel
from crow.store import Tail
from crow.tools import Workspace
from crow.tools.servers import McpServer, ServerPrompt

if TYPE_CHECKING:  # importing these takes 30 ms, and a session opens without them
    from crow.agent.sessions.runner import TurnRunner
    from crow.agent.turns.turn import Turn


logger = logging.getLogger(__name__)

_CANCELLED = TurnEnd(stop="cancelled")
_HEAD_START_S = 0.0005
"""When the user cancels a turn, crow starts to store the turn's end, waits this many seconds, and then cancels the
running work. The wait lets the store begin first."""
RENEW_S = 20.0
RETRY_S = 5.0
_TELL_S = 2.0


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
        self.servers = tuple(servers)
        self.conversation = Conversation(adapters, client, workspace, tail)
        self.branch = self.conversation.branch
        self.closing = False
        self.runs_elsewhere = False
        """Whether another process runs a turn, as far as is known."""
        self._claims = Claims(self.conversation)
        self._ended_before = tail.waiting
        """What ended in the background before the session was opened. The model is told in the next turn."""
        self._queue: deque[PendingPrompt] = deque()
        """The prompts in order. The turn of the first one runs or is next."""
        self._wake = anyio.Event()
        """Set when there is something to do for the session's task."""
        self._ended = anyio.Event()
        """Set when the session's task has ended."""
        self._ending: BackgroundTask | None = None
        """Stores the end of a cancelled turn while the connection to the model is being closed."""
        self._runner: TurnRunner | None = None
        """None until the first prompt or command, or until tools are needed."""
        self._tools_wanted = anyio.Event()
        self._is_warm = False
        """Whether everything that a turn imports has been imported."""

    @property
    def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts that the session's MCP servers offer now."""
        return self._runner.tools.prompts if self._runner is not None else ()

    @property
    def thought_levels(self) -> tuple[ThoughtLevel, ...] | None:
        """The thought levels that the session's model takes, or None if that is unknown."""
        return self.conversation.adapters.info(self.branch.row.model).thought_levels

    @property
    def has_turn(self) -> bool:
        """Whether a prompt runs or waits."""
        return bool(self._queue)

    @property
    def is_running(self) -> bool:
        """Whether a turn runs here or in another process, or the end of the last turn is not stored yet."""
        return self.has_turn or self.owes or self.runs_elsewhere

    @property
    def busy(self) -> bool:
        """Whether a prompt runs or waits, or a subagent works in the background."""
        return self.has_turn or (self._runner is not None and bool(self._runner.subagents.running))

    @property
    def owes(self) -> bool:
        """Whether the store refused something that is still in memory, such as the end of the last turn."""
        return not self.branch.is_settled

    async def settle(self) -> bool:
        """Try again to store what the store refused. Return whether everything is stored."""
        if self.owes:
            await self.branch.try_to_settle()
        return not self.owes

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
        """
        if self.closing:
            raise NoSuchSession(self.id)
        if name is not None and (first := first_with(name, self._queue)) is not None:
            repeat = Repeat(queued=first)
            return PendingPrompt(parts=parts, text=first.text, message_id=first.message_id, name=name, repeat=repeat)
        text = parts[0].text.strip() if parts and isinstance(parts[0], Text) else ""
        prompt = PendingPrompt(
            parts=parts,
            text=text,
            message_id=new_message_id(),
            command=commands.parse(text),
            metadata=metadata or {},
            name=name,
        )
        if self.servers:
            prompt.called = parse_prompt_call(text)
            if prompt.command is None and prompt.called is None:
                prompt.mentions = self._mentions(parts)
        if self._runner is not None:
            self._runner.between.cancel_preparation()
        self._queue.append(prompt)
        return prompt

    async def answer(self, prompt: PendingPrompt) -> StopReason:
        """Wait for the turn of a submitted prompt to end. If the turn cannot start at once, the prompt is stored in the
        meantime.

        :raises ~crow.domain.errors.CrowError: the turn failed. The session still takes the next prompt.
        """
        if prompt.repeat.queued is not None:
            return await answer_of_first(self.conversation, self._queue, prompt)
        try:
            await self._check(prompt)
            if prompt.metadata:
                await self.branch.merge_metadata(prompt.metadata)
            if prompt.command is None:
                if prompt.text.startswith("/"):
                    prompt.parts = expand_template(prompt.text, prompt.parts, self.conversation.adapters.templates())
                prompt.parts = await attach_files(prompt.parts, self.workspace, self.conversation.rules())
                is_revoked = prompt not in self._queue
                prompt.in_inbox = not is_revoked and (
                    prompt.needs_servers or self.closing or self._queue[0] is not prompt
                )
                if prompt.in_inbox:
                    await self.conversation.adapters.store.enqueue(
                        self.id, prompt.parts, prompt.message_id, name=prompt.name
                    )
        except RepeatedPrompt:
            prompt.in_inbox, prompt.repeat.is_refused = False, True
            self._drop(prompt)
        except BaseException as error:
            if prompt.in_inbox and not isinstance(error, Exception):  # cancelled; the prompt may be stored already
                self.withdraw(prompt)
            else:
                prompt.error = error if isinstance(error, Exception) else None
                self._drop(prompt)
            raise
        finally:
            prompt.ready.set()
            self._wake.set()
        await prompt.done.wait()
        if prompt.repeat.is_refused:
            return await stored_outcome(self.conversation, self._queue, prompt)
        if prompt.error is not None:
            raise prompt.error
        return prompt.stop

    def _drop(self, prompt: PendingPrompt) -> None:
        """Remove a prompt that cannot be queued. Prompts that repeat it have the same outcome."""
        if prompt in self._queue:
            self._queue.remove(prompt)
            prompt.stop = "cancelled"
            prompt.done.set()

    async def _check(self, prompt: PendingPrompt) -> None:
        """Check a prompt that would change something, or be refused, before the store sees its name.

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
        return find_mentions(parts, [server.name for server in self.servers])

    async def steer(self, parts: Sequence[Part], message_id: str | None = None, name: PromptName | None = None) -> bool:
        """Add a prompt to the running turn. The model sees the prompt at its next step. Return False if no turn runs.

        When this returns, the prompt is in the inbox. Even if the turn ends before that step, the prompt goes into the
        history. If the session already has a prompt with this `name`, nothing is added.

        :raises ~crow.domain.errors.ArgumentError: a prompt with other content has this name.
        """
        if self._turn is None:
            return name is not None and await self.conversation.adapters.store.named_prompt(self.id, name) is not None
        message_id = message_id or new_message_id()
        parts = await attach_files(parts, self.workspace, self.conversation.rules())
        mentions = self._mentions(parts)
        if mentions and self._runner is not None:
            parts, failures = await self._runner.attach_resources(parts, mentions)
            for words in failures:
                await self.conversation.report("A resource could not be attached", words)
        try:
            await self.conversation.adapters.store.enqueue(self.id, parts, message_id, name=name)
        except RepeatedPrompt:
            return True
        if (turn := self._turn) is None:  # the turn ended meanwhile; the sender has to prompt again
            await self.conversation.adapters.store.drop_prompt(self.id, message_id)
            return False
        turn.steer(User(parts=tuple(parts), message_id=message_id, name=name))
        return True

    @property
    def _turn(self) -> Turn | None:
        return self._runner.turn if self._runner is not None else None

    @property
    def running_calls(self) -> Mapping[str, anyio.CancelScope]:
        """Maps the id of each running call of the turn to the call's cancel scope. Calls of subagents are not
        included. Cancelling a scope ends only its own call."""
        return self._turn.running_calls if self._turn is not None else {}

    def withdraw(self, prompt: PendingPrompt) -> None:
        """End one submitted prompt as `cancelled`. The other prompts stay. If the prompt repeats a queued one, that one
        ends too."""
        if prompt.repeat.queued is not None and prompt.repeat.queued in self._queue:
            self.withdraw(prompt.repeat.queued)
            return
        if self._queue and self._queue[0] is prompt:
            self._cancel(prompt)
        else:  # answer the request now; the turn stores the prompt and ends at once
            prompt.scope.cancel()
            prompt.stop = "cancelled"
            prompt.done.set()

    def revoke(self, prompt: PendingPrompt) -> bool:
        """Take back a prompt that waits for an earlier turn. Return False if the prompt's own turn is next or has
        begun.

        The prompt may already be in the store's inbox. In that case, the caller removes it from there when `answer` has
        returned.
        """
        if prompt not in self._queue or self._queue[0] is prompt:
            return False
        self._queue.remove(prompt)
        prompt.stop = "cancelled"
        prompt.done.set()
        return True

    @property
    def waiting(self) -> tuple[PendingPrompt, ...]:
        """The prompts that wait for an earlier turn."""
        return tuple(self._queue)[1:]

    def cancel(self) -> None:
        """End the running turn and all waiting prompts as `cancelled`, and cancel the subagents in the background."""
        for prompt in self._queue:
            self._cancel(prompt)
        if self._runner is not None:
            self._runner.subagents.cancel_background()

    def lose_turn(self) -> None:
        """End the running turn with an error, because the session has entries that this process did not store."""
        if self._queue:
            self._queue[0].error = LeafMoved(
                f"Another process took over session {self.id}, or the database stored something without confirming it. "
                "The rest of the turn is lost; send the prompt again."
            )
            self._cancel(self._queue[0])

    def _cancel(self, prompt: PendingPrompt) -> None:
        turn = self._turn if prompt is self._queue[0] and self._ending is None else None
        if turn is not None and turn.mute():
            # The turn is only waiting for the model, so its end can be stored while the connection is being closed.
            self._ending = BackgroundTask(self._tasks, partial(self._end_turn, _CANCELLED))
            asyncio.get_running_loop().call_later(_HEAD_START_S, prompt.scope.cancel)
        else:
            prompt.scope.cancel()

    def cancel_subagent(self, task_id: str) -> bool:
        """Cancel the work of one of the session's subagents. Return False if that subagent does not run in this
        process."""
        return self._runner is not None and self._runner.subagents.cancel(task_id)

    def has_subagent(self, task_id: str) -> bool:
        """Whether this subagent of the session runs in this process."""
        return self._runner is not None and task_id in self._runner.subagents.running

    def remark_later(self, notice: NoticeShown) -> None:
        """Add this notice to the history when the next turn begins. Call this if the editor shows no notices."""
        self._claims.remark_later(notice)

    def notice_later(self, notice: NoticeShown) -> None:
        """Show this notice when the next turn begins. If the editor shows no notices, it goes into the history."""
        self._claims.notice_later(notice)

    def warm(self) -> None:
        """Start the MCP servers, and remember that the first prompt needs no more imports."""
        self._is_warm = True
        if self.servers:
            self._tools_wanted.set()

    async def close(self) -> None:
        """Cancel all prompts, and wait until the session's task has ended."""
        self.closing = True
        if self._runner is not None:
            self._runner.between.cancel_preparation()
        self.cancel()
        self._wake.set()
        await self._ended.wait()

    async def run(self) -> None:
        """Run the session's task. It ends after `close`, or when it is cancelled."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._run_tools)
                while not self.closing or (self._queue and self._queue[0].is_only_in_memory):
                    if self._queue:
                        await self._serve(self._queue[0])
                    else:
                        await self._wait_for_prompt()
                if self._runner is not None:
                    await self._runner.between.end_background()
                    await self._runner.subagents.wait_ended()
                await self.branch.close()
                if self._runner is not None:
                    self._runner.close()
                self._tools_wanted.set()
            await self.workspace.close()
        finally:
            self.closing = True
            for prompt in self._queue:
                prompt.stop = "cancelled"
                prompt.done.set()
            self._queue.clear()
            self._ended.set()

    async def _wait_for_prompt(self) -> None:
        """Wait for a prompt or for `close`. If the store could not store something before, also try after a few seconds
        to store it."""
        self._wake = anyio.Event()
        with anyio.move_on_after(RETRY_S if self.owes else None) as scope:
            await self._wake.wait()
        if scope.cancelled_caught:
            await self.branch.try_to_settle()

    async def _run_tools(self) -> None:
        """Open the tools when they are needed for the first time, and close them at the end of the session. Both happen
        in one task, which belongs to no turn."""
        await self._tools_wanted.wait()
        if not self.closing:
            with suppress(Exception):  # every turn that needs the tools will raise the same error
                await self.conversation.adapters.load()
        if not self.closing:
            await self._turn_runner().tools.run()

    def _turn_runner(self) -> TurnRunner:
        if self._runner is None:
            from crow.agent.sessions.runner import TurnRunner  # takes 30 ms and is not needed to open a session

            self._runner = TurnRunner(
                self.conversation,
                self.servers,
                self._tasks,
                ended_before=self._ended_before,
                tools_wanted=self._tools_wanted,
            )
        return self._runner

    async def _serve(self, prompt: PendingPrompt) -> None:
        """Run the turn of the first prompt in the queue."""
        if not prompt.ready.is_set():
            await prompt.ready.wait()
        if prompt not in self._queue:  # the prompt could not be stored, so `answer` removed it from the queue
            return
        use_trace_context(prompt.trace_context)
        if prompt.trace_context:
            logger.info("Session %s: a turn begins", self.id)
        try:
            # A tool may run for hours. Without a renewed lease, other processes would assume that this process is dead.
            async with after_delay(RENEW_S, self._renew_lease, again=True):
                try:
                    with prompt.scope:
                        if prompt.command is None and (self._runner is not None or self._is_warm):
                            self._turn_runner().prefetch()
                        moved = await self._claims.take(prompt)
                        await self._run_turn(prompt, moved=moved)
                finally:
                    if self._ending is not None:
                        with anyio.CancelScope(shield=True):
                            await self._ending.wait()
        except RepeatedPrompt:
            prompt.repeat.is_refused = True
        except Exception as error:  # noqa: BLE001  # the request raises it; the session goes on
            prompt.error = error
        except BaseException:
            prompt.stop = "cancelled"
            raise
        finally:
            self._ending = None
            prompt.usage = self.branch.turn_usage
            if not prompt.repeat.is_refused and (prompt.has_begun or not self.runs_elsewhere):
                ended = TurnEnded(message_id=prompt.message_id, stop=prompt.stop, error=prompt.error)
                with anyio.move_on_after(_TELL_S, shield=True):
                    await self.branch.publish(ended)
            self._queue.remove(prompt)
            prompt.done.set()
        self._begin_rest(prompt)

    def _begin_rest(self, prompt: PendingPrompt) -> None:
        """Start what runs between two turns. `prompt` is the prompt of the last turn."""
        if self._runner is not None and prompt.error is None and prompt.stop != "cancelled" and not self.closing:
            self._runner.between.title_later()
        if self.workspace.has_leftovers:
            self._tasks.start_soon(self.workspace.reap)
        is_resting = not (self._queue or self.closing or self.owes)
        if self._runner is not None and is_resting and prompt.command is None and prompt.error is None:
            self._runner.between.prepare_checkpoint()

    async def _renew_lease(self) -> None:
        subagents = self._runner.subagents.running if self._runner is not None else ()
        try:
            for session_id in (self.id, *subagents):
                await self.conversation.adapters.store.renew_lease(session_id)
        except StoreError as error:
            logger.warning("Session %s: its lease could not be renewed: %s", self.id, error)

    async def _run_turn(self, prompt: PendingPrompt, *, moved: bool) -> None:
        """Run a claimed turn, and end it even if it is cancelled or fails. `moved` is what `Claims.take` returned."""
        try:
            try:
                if self.conversation.follower is not None and self.branch.must_catch_up:
                    await self.conversation.follower.reached(self.branch.claimed_to or 0)
            finally:  # the prompt is stored, so clients are shown it even if the turn is cancelled already
                prompt.has_begun = True
                await self.branch.publish(self._began(prompt))
            await anyio.lowlevel.checkpoint_if_cancelled()
            await self._claims.begin(moved=moved)
            if prompt.command is None:
                await self.conversation.adapters.load()  # imports, in a thread, the packages that `_turn_runner` needs
            prompt.stop = await self._turn_runner().run(prompt)
        except anyio.get_cancelled_exc_class():
            prompt.stop = "cancelled"
            if self._ending is None:
                self._keep_command(prompt)
                await self._end_turn(_CANCELLED)
            raise
        except Exception as error:
            self._keep_command(prompt)
            is_bug = not isinstance(error, CrowError)
            if is_bug:
                logger.exception("The turn failed")
            words = NO_MEMORY if lacks_memory(error) else "Internal error" if is_bug else str(error)
            await self._end_turn(TurnEnd(stop="error", detail=words))
            raise
        await self._end_turn(TurnEnd(stop=prompt.stop))

    def _began(self, prompt: PendingPrompt) -> TurnBegan:
        entry = self.branch.newest_user()
        is_stored = entry is not None and getattr(entry.body, "message_id", "") == prompt.message_id
        typed = None if prompt.command is None else prompt.text
        return TurnBegan(message_id=prompt.message_id, stored=entry if is_stored else None, typed=typed)

    def _keep_command(self, prompt: PendingPrompt) -> None:
        """Store a command without an answer when its turn ends, because a client may have shown the command."""
        if prompt.command is not None and self.branch.prompt_with(prompt.message_id) is None:
            command = Command(text=prompt.text, answer="", message_id=prompt.message_id, name=prompt.name)
            self.branch.store_at_end([NewEntry(body=command)])

    async def _end_turn(self, end: TurnEnd) -> None:
        """Store the turn's end, together with everything that the turn has not stored yet, and release the turn."""
        try:
            if self._runner is None:
                await self.branch.end_turn(end)
            else:
                await self._runner.end_turn(end)
        except StoreError as error:
            if end.stop not in ("error", "cancelled"):  # in these cases the request already has its answer
                raise
            logger.warning("Could not store the end of the turn; crow will try again: %s", error)
        await self.conversation.tell_cost()
        if end.stop == "refusal":  # ACP drops a refused prompt; the turn stays in the log as a branch
            first = next((entry for entry in self.branch.entries if entry.turn == self.branch.turn), None)
            if first is not None:
                await self.conversation.move(first.parent, "refusal")
