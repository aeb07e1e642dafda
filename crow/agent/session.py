"""A session: one task that takes prompts in order and owns whatever they need.

Strategy: the session's own task takes a prompt when the turn before has ended, claims the turn, runs it inside one
cancel scope, and ends it with one transaction, however it ended; a prompt that has to wait for that is put into the
inbox by the request that brought it. The request then only waits. MCP servers, commands and every write belong to that
task, so that they are opened and closed in one place. Knows protocols only; the adapters come from above.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.lowlevel

from crow.agent import Client, commands, new_message_id
from crow.agent.branch import Branch
from crow.agent.links import with_contents
from crow.agent.standing import Standing
from crow.agent.unstored import RETRY_S, Unstored
from crow.agent.waiter import Waiter
from crow.domain.entries import NewEntry, StopReason, TurnEnd, User
from crow.domain.errors import CrowError, NoSuchSession, StoreError
from crow.domain.messages import Part, Text
from crow.store import Tail

if TYPE_CHECKING:
    from crow.agent.adapters import Adapters
    from crow.agent.running import Running
    from crow.agent.turn import Turn
    from crow.agent.turns import Turns
    from crow.domain.events import ContextMeasured
    from crow.tools import McpServer, Workspace
    from crow.tools.prompts import ServerPrompt

__all__ = ["Session"]

logger = logging.getLogger(__name__)

CANCELLED = TurnEnd(stop="cancelled")
END_S = 5.0
RENEW_S = 20.0


class Session:
    """A session that is open in this process. `run` is its task; everything else is called from requests."""

    def __init__(
        self, adapters: Adapters, client: Client, workspace: Workspace, servers: Sequence[McpServer], tail: Tail
    ) -> None:
        self.id = tail.row.id
        self.servers = tuple(servers)
        self._adapters = adapters
        self._client = client
        self._workspace = workspace
        self._branch = Branch(adapters.store, client, tail)
        self._unstored = Unstored(adapters.store, self._branch)
        self._standing = Standing(adapters, self._branch)
        self._queue: deque[Waiter] = deque()
        self._wake = anyio.Event()
        self._tools_wanted = anyio.Event()
        self._closing = False
        self._ended = anyio.Event()
        self._running: Running | None = None
        self._turns_made: Turns | None = None

    @property
    def branch(self) -> Branch:
        """Where the session stands."""
        return self._branch

    @property
    def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts that the session's servers offer now."""
        return self._turns_made.tools.prompts if self._turns_made is not None else ()

    @property
    def closing(self) -> bool:
        """Whether it takes no more prompts, since somebody closes it."""
        return self._closing

    @property
    def busy(self) -> bool:
        """Whether a prompt runs or waits."""
        return bool(self._queue)

    @property
    def owes(self) -> bool:
        """Whether the end of its last turn could not be stored yet: only memory has it."""
        return bool(self._unstored)

    async def settle(self) -> bool:
        """Store what could not be stored yet; whether nothing is left."""
        if self._unstored:
            await self._unstored.settle_if_possible()
        return not self._unstored

    def submit(self, parts: Sequence[Part]) -> Waiter:
        """Queue a prompt, at once, so that a cancel just behind it finds it; `answer` waits for its turn to end.

        :raises ~crow.domain.errors.NoSuchSession: the session is closed.
        """
        if self._closing:
            raise NoSuchSession(self.id)
        text = parts[0].text.strip() if parts and isinstance(parts[0], Text) else ""
        waiter = Waiter(parts=parts, text=text, message_id=new_message_id(), command=commands.parse(text))
        if self.servers and text.startswith("/"):
            from crow.agent.server_prompts import called

            waiter.called = called(text)
        self._queue.append(waiter)
        return waiter

    async def answer(self, waiter: Waiter) -> StopReason:
        """Store a submitted prompt and wait for its turn to end.

        :raises ~crow.domain.errors.CrowError: the turn failed; the session takes the next prompt all the same.
        """
        try:
            if waiter.command is None:
                await self._enqueue(waiter)
        except BaseException as error:
            if waiter.waits and not isinstance(error, Exception):  # the request is over, the prompt may be in the inbox
                self.withdraw(waiter)
            elif waiter in self._queue:  # else the session has ended meanwhile
                self._queue.remove(waiter)
            raise
        finally:
            waiter.ready.set()
            self._wake.set()
        await waiter.done.wait()
        if waiter.error is not None:
            raise waiter.error
        return waiter.stop

    async def _enqueue(self, waiter: Waiter) -> None:
        """Put a prompt into the inbox, unless it is its turn now: then the claim stores it."""
        waiter.parts = await with_contents(self._expanded(waiter), self._workspace)
        waiter.waits = waiter.called is not None or self._closing or self._queue[0] is not waiter
        if waiter.waits:
            await self._adapters.store.enqueue(self.id, waiter.parts, waiter.message_id)

    async def prompt(self, parts: Sequence[Part]) -> StopReason:
        """`submit` and `answer`."""
        return await self.answer(self.submit(parts))

    def withdraw(self, waiter: Waiter) -> None:
        """End one submitted prompt as `cancelled`; those before and behind it stay."""
        waiter.cancelled = True
        if self._queue and self._queue[0] is waiter:
            if self._running is not None:
                self._running.cancel()
        else:  # answered now; what the user said is stored when its turn has come
            waiter.stop = "cancelled"
            waiter.done.set()

    def _expanded(self, waiter: Waiter) -> Sequence[Part]:
        """The parts, with one of the user's own commands replaced by the prompt that it stands for."""
        if not waiter.text.startswith("/"):
            return waiter.parts
        name, *rest = waiter.text[1:].split(maxsplit=1)
        for template in self._adapters.templates():
            if template.name == name:
                return (Text(text=template.prompt(rest[0] if rest else "")), *waiter.parts[1:])
        return waiter.parts

    async def steer(self, parts: Sequence[Part]) -> bool:
        """Give the running turn a further prompt, which the model sees at its next step; False when no turn runs.

        It is in the inbox when this returns. A turn that ends before the model saw it keeps it in the history.
        """
        if self._turn() is None:
            return False
        message_id = new_message_id()
        parts = await with_contents(parts, self._workspace)
        await self._adapters.store.enqueue(self.id, parts, message_id)
        turn = self._turn()
        if turn is None:  # it ended meanwhile: the sender prompts anew
            await self._adapters.store.drop_prompt(self.id, message_id)
            return False
        turn.steer(User(parts=tuple(parts), message_id=message_id))
        return True

    def cancel(self) -> None:
        """End the running turn and those that wait, as `cancelled`; without effect when idle."""
        for waiter in self._queue:
            waiter.cancelled = True
        if self._running is not None:
            self._running.cancel()

    def warm(self) -> None:
        """Start what the first prompt will need (the MCP servers), if the session has not yet."""
        if self.servers:
            self._tools_wanted.set()

    async def measured(self) -> ContextMeasured:
        """See :meth:`crow.agent.standing.Standing.measured`."""
        return await self._standing.measured()

    async def close(self) -> None:
        """Cancel, and wait until the session's task has ended."""
        self._closing = True
        self.cancel()
        self._wake.set()
        await self._ended.wait()

    async def run(self) -> None:
        """The session's task. Ends after `close`, or when cancelled."""
        try:
            async with anyio.create_task_group() as background:
                background.start_soon(self._keep_tools)
                while not self._closing or (self._queue and self._queue[0].is_nowhere):
                    if self._queue:
                        await self._serve(self._queue[0], background)
                    else:
                        await self._rest()
                await self._unstored.close()
                if self._turns_made is not None:
                    self._turns_made.tools.close()
                self._tools_wanted.set()
        finally:
            self._closing = True
            for waiter in self._queue:
                waiter.stop = "cancelled"
                waiter.done.set()
            self._queue.clear()
            self._ended.set()

    async def _rest(self) -> None:
        """Wait for a prompt or the close; meanwhile, what could not be stored is tried again now and then."""
        self._wake = anyio.Event()
        with anyio.move_on_after(RETRY_S if self._unstored else None) as scope:
            await self._wake.wait()
        if scope.cancelled_caught:
            await self._unstored.settle_if_possible()

    async def _keep_tools(self) -> None:
        """Open the tools when they are first wanted, and close them in the same task, outside of any turn's scope."""
        await self._tools_wanted.wait()
        if self._closing:
            return
        with suppress(Exception):  # told by each turn that needs the tools
            await self._adapters.load()
        if not self._closing:
            await self._turns().tools.keep()

    def _turn(self) -> Turn | None:
        return self._turns_made.turn if self._turns_made is not None else None

    def _hush(self) -> bool:
        turn = self._turn()
        return turn is not None and turn.hush()

    def _turns(self) -> Turns:
        """What only turns need. Imported with the first of them, if `load` has not done it yet."""
        if self._turns_made is None:
            from crow.agent.turns import Turns

            self._turns_made = Turns(
                self._adapters,
                self._client,
                self._workspace,
                self.servers,
                self._branch,
                self._unstored,
                self._standing,
                want_tools=self._tools_wanted.set,
            )
        return self._turns_made

    async def _serve(self, waiter: Waiter, background: anyio.abc.TaskGroup) -> None:
        if not waiter.ready.is_set():
            await waiter.ready.wait()
        if waiter not in self._queue:  # it could not be stored, and its request has said so
            return
        from crow.agent.aside import IfLong
        from crow.agent.running import Running

        try:
            self._running = running = Running(background, hush=self._hush, end=partial(self._end, CANCELLED))
            if waiter.cancelled:
                running.cancel()
            # A command may run for hours without a word; who cannot look up this process must not take it for dead.
            async with IfLong(RENEW_S, self._renew_lease, again=True):
                await running.run(partial(self._answer, waiter, background, running))
        except Exception as error:  # noqa: BLE001  a session's failure stays its own: the request answers it
            waiter.error = error
        finally:
            self._running = None
            self._queue.remove(waiter)
            waiter.done.set()
        if self._workspace.has_leftovers:
            background.start_soon(self._workspace.reap)

    async def _renew_lease(self) -> None:
        try:
            for session_id in (self.id, *(self._turns_made.sub_agents if self._turns_made is not None else ())):
                await self._adapters.store.renew_lease(session_id)
        except StoreError as error:
            logger.warning("Session %s: no sign of life could be given: %s", self.id, error)

    async def _answer(self, waiter: Waiter, background: anyio.abc.TaskGroup, running: Running) -> None:
        """Claim the turn, run it, end it. Cancelled or failed, it is ended all the same."""
        if self._turns_made is not None and waiter.command is None:
            self._turns_made.look(background)
        with anyio.CancelScope(shield=True):  # what the user said is on disk, even if they cancel at once
            moved = await self._claim(waiter)
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            await self._standing.begin(moved=moved)
            if waiter.command is not None:
                waiter.stop = await self._turns().run_command(waiter.text, waiter.command)
            else:
                await self._adapters.load()  # in its thread, also what `_turns` imports
                if waiter.called is not None:
                    waiter.stop = await self._turns().run_called(waiter, waiter.called)
                else:
                    waiter.stop = await self._turns().run()
            end = TurnEnd(stop=waiter.stop)
        except anyio.get_cancelled_exc_class():
            waiter.stop = "cancelled"
            if not running.is_ended:
                await self._end(CANCELLED)
            raise
        except CrowError as error:
            await self._end(TurnEnd(stop="error", detail=str(error)))
            raise
        except Exception:
            logger.exception("The turn failed")
            await self._end(TurnEnd(stop="error", detail="Internal error"))
            raise
        await self._end(end)

    async def _claim(self, waiter: Waiter) -> bool:
        try:
            await self._unstored.settle()
            is_prompt = waiter.command is None and waiter.called is None  # the words of a called one are the server's
            return await self._standing.claim(
                waiter.message_id if is_prompt else None, waiter.parts, waits=waiter.waits
            )
        except StoreError:
            if waiter.waits:  # the caller is told, and asks again
                await self._unstored.drop_prompt(waiter.message_id)
            raise

    async def _end(self, end: TurnEnd) -> None:
        """Store what is left of the turn together with its end and give the turn back, whatever happens meanwhile."""
        turn = None
        if self._turns_made is None:
            self._unstored.keep([NewEntry(body=end)])
        else:
            self._turns_made.look_away()
            turn = self._turns_made.leave(end)
        if turn is not None:
            with anyio.move_on_after(END_S, shield=True):
                await turn.end_open()
        with anyio.move_on_after(END_S, shield=True):
            try:
                await self._unstored.settle()
            except StoreError as error:
                if end.stop not in ("error", "cancelled"):  # those have an answer already
                    raise
                logger.warning("The end of a turn could not be stored yet: %s", error)
        if end.stop == "refusal":  # ACP drops the prompt of a refused turn; its branch stays in the log
            await self._standing.step_back()
