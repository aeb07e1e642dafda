"""A session: one task that takes prompts in order and owns whatever they need.

Strategy: the session's own task takes a prompt when the turn before has ended, claims the turn, runs it inside one
cancel scope, and ends it with one transaction, however it ended; a prompt that has to wait for that is put into the
inbox by the request that brought it. The request then only waits. MCP servers, commands and every write belong to that
task, so that they are opened and closed in one place. Knows protocols only; the adapters come from above.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
import anyio.lowlevel

from crow.agent import Client, commands, new_message_id
from crow.agent.branch import Branch
from crow.agent.commands import Typed
from crow.agent.compaction.budget import Gauge, gauge_on
from crow.agent.compaction.window import ContextWindow
from crow.agent.links import with_contents
from crow.domain.entries import Entry, NewEntry, PlanItem, Remark, StopReason, TurnEnd, User
from crow.domain.errors import CrowError, LeafMoved, NoSuchSession, SessionBusy, StoreError
from crow.domain.events import (
    ContextMeasured,
    EntryStored,
    ModeChanged,
    NoticeShown,
    OptionsChanged,
    PlanChanged,
    TitleChanged,
)
from crow.domain.messages import Part, Text
from crow.domain.rendering import parts_text
from crow.store import SessionChanges, Store, Tail

if TYPE_CHECKING:
    from crow.agent import Adapters
    from crow.agent.prompt import Briefing
    from crow.agent.runner import TurnRunner
    from crow.agent.templates import CalledPrompt
    from crow.agent.turn import Turn
    from crow.domain.events import ContextMeasured
    from crow.llm import ModelInfo
    from crow.tools import McpServer, ServerPrompt, Workspace

__all__ = [
    "ActiveTurn",
    "AfterDelay",
    "BackgroundTask",
    "PendingPrompt",
    "PendingTurnEnd",
    "Session",
    "SessionStatus",
    "set_mode",
    "set_model",
    "set_option",
]

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
        self._unstored = PendingTurnEnd(adapters.store, self._branch)
        self._standing = SessionStatus(adapters, self._branch)
        self._queue: deque[PendingPrompt] = deque()
        self._wake = anyio.Event()
        self._tools_wanted = anyio.Event()
        self._closing = False
        self._ended = anyio.Event()
        self._running: ActiveTurn | None = None
        self._turns_made: TurnRunner | None = None

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

    def submit(self, parts: Sequence[Part]) -> PendingPrompt:
        """Queue a prompt, at once, so that a cancel just behind it finds it; `answer` waits for its turn to end.

        :raises ~crow.domain.errors.NoSuchSession: the session is closed.
        """
        if self._closing:
            raise NoSuchSession(self.id)
        text = parts[0].text.strip() if parts and isinstance(parts[0], Text) else ""
        waiter = PendingPrompt(parts=parts, text=text, message_id=new_message_id(), command=commands.parse(text))
        if self.servers and text.startswith("/"):
            from crow.agent.templates import called

            waiter.called = called(text)
        self._queue.append(waiter)
        return waiter

    async def answer(self, waiter: PendingPrompt) -> StopReason:
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

    async def _enqueue(self, waiter: PendingPrompt) -> None:
        """Put a prompt into the inbox, unless it is its turn now: then the claim stores it."""
        waiter.parts = await with_contents(self._expanded(waiter), self._workspace)
        waiter.waits = waiter.called is not None or self._closing or self._queue[0] is not waiter
        if waiter.waits:
            await self._adapters.store.enqueue(self.id, waiter.parts, waiter.message_id)

    async def prompt(self, parts: Sequence[Part]) -> StopReason:
        """`submit` and `answer`."""
        return await self.answer(self.submit(parts))

    def withdraw(self, waiter: PendingPrompt) -> None:
        """End one submitted prompt as `cancelled`; those before and behind it stay."""
        waiter.cancelled = True
        if self._queue and self._queue[0] is waiter:
            if self._running is not None:
                self._running.cancel()
        else:  # answered now; what the user said is stored when its turn has come
            waiter.stop = "cancelled"
            waiter.done.set()

    def _expanded(self, waiter: PendingPrompt) -> Sequence[Part]:
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
        """See :meth:`crow.agent.session.SessionStatus.measured`."""
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
        return turn is not None and turn.mute()

    def _turns(self) -> TurnRunner:
        """What only turns need. Imported with the first of them, if `load` has not done it yet."""
        if self._turns_made is None:
            from crow.agent.runner import TurnRunner

            self._turns_made = TurnRunner(
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

    async def _serve(self, waiter: PendingPrompt, background: anyio.abc.TaskGroup) -> None:
        if not waiter.ready.is_set():
            await waiter.ready.wait()
        if waiter not in self._queue:  # it could not be stored, and its request has said so
            return

        try:
            self._running = running = ActiveTurn(background, mute=self._hush, end=partial(self._end, CANCELLED))
            if waiter.cancelled:
                running.cancel()
            # A command may run for hours without a word; who cannot look up this process must not take it for dead.
            async with AfterDelay(RENEW_S, self._renew_lease, again=True):
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

    async def _answer(self, waiter: PendingPrompt, background: anyio.abc.TaskGroup, running: ActiveTurn) -> None:
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

    async def _claim(self, waiter: PendingPrompt) -> bool:
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
            self._turns_made.cancel_prefetch()
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


# FROM agent.waiter: A prompt that was given to a session, and what became of it.


@dataclass(slots=True, kw_only=True, eq=False)
class PendingPrompt:
    """A prompt that somebody waits for, or a `command`, which is stored with its answer. `called` is the prompt of a
    server that it may be. `ready`: its parts are whole; `waits`: it is in the inbox, under `message_id`."""

    parts: Sequence[Part]
    text: str
    message_id: str
    command: Typed | None = None
    called: CalledPrompt | None = None
    waits: bool = False
    ready: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)
    cancelled: bool = False
    stop: StopReason = "end_turn"
    error: Exception | None = None

    @property
    def is_nowhere(self) -> bool:
        """Whether it is a prompt that only memory holds, until its turn is claimed."""
        return self.ready.is_set() and self.command is None and not self.waits


# FROM agent.running: The turn that runs, as those see it who cancel it.
#
# Strategy: a turn is run in a scope of its own. One that only listens to the model when it is cancelled shows nothing
# more from that instant on, so its end can be stored by a task of its own while the connection is still being closed;
# any other is ended by whoever runs it, once it has let go of what it holds. Knows neither the turn nor the store.


HEAD_START_S = 0.0005
"""The store needs the interpreter for about as long until it waits for the disk; all else can be done meanwhile."""


class ActiveTurn:
    """`mute` has the turn show nothing more, and tells whether it does nothing else either until it is cancelled;
    `end`, one of `tasks`, then stores that it was cancelled."""

    def __init__(
        self, tasks: anyio.abc.TaskGroup, *, mute: Callable[[], bool], end: Callable[[], Awaitable[None]]
    ) -> None:
        self._scope = anyio.CancelScope()
        self._tasks = tasks
        self._hush = mute
        self._end = end
        self._ending: BackgroundTask | None = None

    @property
    def is_ended(self) -> bool:
        """Whether its end is stored, or being stored."""
        return self._ending is not None

    def cancel(self) -> None:
        """End the turn; without effect on one that was cancelled or is over."""
        if self._ending is None and self._hush():
            self._ending = BackgroundTask(self._tasks, self._end)
            asyncio.get_running_loop().call_later(HEAD_START_S, self._scope.cancel)
        else:
            self._scope.cancel()

    async def run(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Run it. When this returns it has let go of what it held, and if its end was begun here, that is stored.

        :raises Exception: what `turn` or `end` raised.
        """
        try:
            with self._scope:
                await turn()
        finally:
            if self._ending is not None:
                with anyio.CancelScope(shield=True):
                    await self._ending.wait()


# FROM agent.aside: Work that a task of its own does beside another task, which waits for it later.


class BackgroundTask:
    """What `work` does, begun now as one of `tasks`."""

    def __init__(self, tasks: anyio.abc.TaskGroup, work: Callable[[], Awaitable[None]]) -> None:
        self._scope = anyio.CancelScope()
        self._done = anyio.Event()
        self._failure: Exception | None = None
        tasks.start_soon(self._do, work)

    def cancel(self) -> None:
        """Nobody needs it any more."""
        self._scope.cancel()

    async def wait(self) -> None:
        """Until it is done. :raises Exception: what `work` raised."""
        if not self._done.is_set():
            await self._done.wait()
        if self._failure is not None:
            raise self._failure

    async def _do(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._scope:
                await work()
        except Exception as error:  # noqa: BLE001  # whoever waits for it raises it
            self._failure = error
        finally:
            self._done.set()


class AfterDelay:
    """Around a block that is mostly short: `work` is begun when the block has taken `after_s` seconds, with `again` as
    often as it has taken as long again. The end of the block waits for what was begun.

    Nothing but a timer is made for a short block. A timer's callback is no task, and only tasks may use anyio.
    """

    def __init__(self, after_s: float, work: Callable[[], Coroutine[Any, Any, None]], *, again: bool = False) -> None:
        self._after_s = after_s
        self._work = work
        self._again = again
        self._timer: asyncio.TimerHandle | None = None
        self._begun: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._begun is not None:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._begun])

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._begin)

    def _begin(self) -> None:
        if self._begun is None or self._begun.done():
            self._begun = asyncio.get_running_loop().create_task(self._work())
        if self._again:
            self._wait()


# FROM agent.unstored: The end of a turn that could not be stored when it came.
#
# Every end is kept here first and let go when it is on disk. A disk that is full, or a database that another program
# holds, therefore costs the prompt its answer and the session nothing: the end is tried again before the next claim,
# when
# the session is loaded, and now and then while idle. A session that closes before that leaves it to the store, which
# keeps it for whoever opens the session next in this process.


RETRY_S = 5.0
"""How long to leave the store alone, while idle, before what it refused is tried again."""


class PendingTurnEnd:
    """What the store still owes one session: the end of its last turn, and prompts that were answered by an error."""

    def __init__(self, store: Store, branch: Branch) -> None:
        self._store = store
        self._branch = branch
        self._end: tuple[NewEntry, ...] = ()
        self._unwanted: list[str] = []
        self._tried_at = 0.0
        self._settling = anyio.Lock(fast_acquire=True)

    def __bool__(self) -> bool:
        return bool(self._end or self._unwanted)

    def keep(self, end: Sequence[NewEntry]) -> None:
        """The running turn ends with these entries."""
        self._end = tuple(end)

    async def settle(self) -> None:
        """Store what is kept and give the turn back.

        :raises ~crow.domain.errors.StoreError: it still cannot be; it stays kept.
        """
        async with self._settling:
            self._tried_at = time.monotonic()
            stored: tuple[Entry, ...] = ()
            if self._end:
                try:
                    stored = await self._branch.store_only(self._end, release=True)
                except (LeafMoved, SessionBusy, NoSuchSession):
                    logger.exception("Session %s was changed by others during its turn", self._branch.row.id)
                self._end = ()
            while self._unwanted:
                await self._store.drop_prompt(self._branch.row.id, self._unwanted[0])
                del self._unwanted[0]
        for entry in stored:
            await self._branch.publish(EntryStored(entry=entry))

    async def settle_if_possible(self) -> None:
        """The same; what still cannot be stored stays kept."""
        try:
            await self.settle()
        except StoreError as error:
            logger.warning("Session %s: the end of a turn waits to be stored: %s", self._branch.row.id, error)

    async def drop_prompt(self, message_id: str) -> None:
        """Take a prompt out of the inbox, now or later: its sender was told that it does not run."""
        self._unwanted.append(message_id)
        if not self._end:
            await self.settle_if_possible()

    async def close(self) -> None:
        """The session closes: the last attempt, unless one has just failed."""
        if self and time.monotonic() - self._tried_at > 1:
            await self.settle_if_possible()
        if self._end:
            branch = self._branch
            self._store.disown(branch.row.id, leaf=branch.leaf, turn=branch.turn, end=self._end)


# FROM agent.standing: Where a session stands: what is to be said and done whenever that changes.
#
# Strategy: the branch knows its entries; what follows from them for the session as a whole (its title, the plan the
# client shows, how full the context is, what the model was told) is brought up to date here. Knows no turn and no
# queue.


TITLE_CHARS = 80
SMALL_CHARS = 2_000
"""A prompt of no more characters is a small part of every window."""


class SessionStatus:
    """How the session of `branch` stands; `briefing` is what the model was told, once a turn has told it anything;
    `window` is what the session knows of its models' windows."""

    def __init__(self, adapters: Adapters, branch: Branch) -> None:
        self.briefing: Briefing | None = None
        self._adapters = adapters
        self._branch = branch
        self._place = (branch.row.cwd, branch.row.additional_directories)
        self._has_warned = False
        self.window = ContextWindow(adapters.store, branch.row.id)

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


# FROM agent.choices: What the user chooses for a session, stored with it and told to the client: mode, model,
# options.


async def set_mode(branch: Branch, mode: str) -> None:
    """Change the permission mode from the next call on."""
    if mode != branch.row.mode:
        await branch.change(SessionChanges(mode=mode))
    await branch.publish(ModeChanged(mode=mode))


async def set_model(branch: Branch, name: str) -> None:
    """Change the model from the next turn on."""
    if name != branch.row.model:
        await branch.change(SessionChanges(model=name))
    await branch.publish(OptionsChanged())


async def set_option(branch: Branch, name: str, value: str | bool) -> None:
    """Set an entry of the session's configuration, in force from the next turn on."""
    config = branch.row.config
    if config.get(name) != value:
        await branch.change(SessionChanges(config={**config, name: value}))
    await branch.publish(OptionsChanged())
