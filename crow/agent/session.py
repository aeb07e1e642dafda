"""A session: one task that takes prompts in order and owns whatever they need.

Strategy: a prompt is put into the inbox by the request that brought it; the request then only waits. The session's
own task takes it when the turn before has ended, claims the turn, runs it inside one cancel scope, and ends it with
one transaction, however it ended. MCP servers, commands and every write belong to that task, so that they are opened
and closed in one place. Knows protocols only; the adapters come from above.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio
import anyio.abc
import anyio.lowlevel

from crow.agent import Client, commands, new_message_id
from crow.agent.asking import Permissions
from crow.agent.branch import Branch
from crow.agent.briefing import Briefing
from crow.agent.compaction.compactor import Compactor, Helpers
from crow.agent.compaction.gauge import Gauge
from crow.agent.compaction.hooks import Hooks
from crow.agent.compaction.limits import CompactionSettings
from crow.agent.compaction.window import Window
from crow.agent.delegate import SubAgents
from crow.agent.links import with_contents
from crow.agent.permission import Rule
from crow.agent.recall import BranchLog
from crow.agent.server_prompts import CalledPrompt, called, filled
from crow.agent.templates import Template
from crow.agent.turn import Turn
from crow.agent.unstored import RETRY_S, Unstored
from crow.domain.entries import Command, NewEntry, PlanItem, Remark, StopReason, TurnEnd, User
from crow.domain.errors import ArgumentError, CrowError, StoreError, ToolServerError
from crow.domain.events import (
    CommandsChanged,
    ContextMeasured,
    ModeChanged,
    NoticeShown,
    OptionsChanged,
    PlanChanged,
    TitleChanged,
)
from crow.domain.messages import Part, Text
from crow.domain.rendering import parts_text
from crow.llm import Model, ModelInfo
from crow.store import SessionChanges, Store, Tail
from crow.tools import McpServer, Ports, ServerStatus, Toolbox, Workspace
from crow.tools.prompts import ServerPrompt, ServerPrompts

__all__ = ["Adapters", "OpenToolbox", "Session", "SessionSettings"]

logger = logging.getLogger(__name__)

TITLE_CHARS = 80
SMALL_CHARS = 2_000
"""A prompt of no more characters is a small part of every window."""

SERVER_GRACE_S = 1.0
END_S = 5.0
RENEW_S = 20.0


class WaitableToolbox(Toolbox, ServerPrompts, Protocol):
    """A toolbox whose servers start in the background."""

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every server is ready or has failed, at most so long."""
        ...


class OpenToolbox(Protocol):
    """Opens a session's tools; entered and left in the session's task. `on_change` is told when a server became ready,
    failed, or changed what it offers."""

    def __call__(
        self,
        workspace: Workspace,
        ports: Ports,
        servers: Sequence[McpServer],
        *,
        on_change: Callable[[], Awaitable[None]],
    ) -> AbstractAsyncContextManager[WaitableToolbox]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What the configuration says about sessions."""

    steps_per_turn: int
    compaction: CompactionSettings
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What a session is made of. `load` imports the heavy packages, off the event loop; `model` gives the model of a
    name, or raises AuthError or ConfigError; `info` says what is known of it without loading anything."""

    store: Store
    load: Callable[[], Awaitable[None]]
    model: Callable[[str], Awaitable[Model]]
    info: Callable[[str], ModelInfo]
    open_toolbox: OpenToolbox
    settings: SessionSettings
    models: Sequence[str] = ()
    templates: Callable[[], Sequence[Template]] = tuple
    hooks: Hooks = field(default_factory=Hooks)


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A prompt that somebody waits for: in the inbox, under `message_id`, once `seq` is set. `called` is the prompt of
    a server that it may be."""

    parts: Sequence[Part]
    text: str
    message_id: str
    called: CalledPrompt | None = None
    seq: int | None = None
    stored: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)
    cancelled: bool = False
    stop: StopReason = "end_turn"
    error: Exception | None = None


class CurrentPlan:
    """The plan port: the newest plan on the branch."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def current(self) -> tuple[PlanItem, ...]:
        return self._branch.plan


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
        self._briefing = Briefing(self._branch)
        self._unstored = Unstored(adapters.store, self._branch)
        self._delegate: SubAgents | None = None
        self._permissions = Permissions(self._branch, client, adapters.settings.rules)
        self._named: dict[int, tuple[bool, int]] = {}
        self._has_warned = False
        self._place = (tail.row.cwd, tail.row.additional_directories)
        self._queue: deque[Waiter] = deque()
        self._wake = anyio.Event()
        self._tools_wanted = anyio.Event()
        self._tools_there = anyio.Event()
        self._tools_unwanted = anyio.Event()
        self._changed = anyio.Event()
        self._closing = False
        self._ended = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._turn: Turn | None = None
        self._toolbox: WaitableToolbox | None = None
        self._toolbox_failure: Exception | None = None

    @property
    def branch(self) -> Branch:
        """Where the session stands."""
        return self._branch

    @property
    def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts that the session's servers offer now."""
        return self._toolbox.prompts() if self._toolbox is not None else ()

    @property
    def busy(self) -> bool:
        """Whether a prompt runs or waits."""
        return bool(self._queue)

    def submit(self, parts: Sequence[Part]) -> Waiter:
        """Queue a prompt, at once, so that a cancel just behind it finds it; `answer` waits for its turn to end.

        :raises ~crow.domain.errors.CrowError: the session is closed.
        """
        if self._closing:
            raise CrowError(f"Session {self.id} is closed. Load it again to go on.")
        text = parts[0].text.strip() if parts and isinstance(parts[0], Text) else ""
        waiter = Waiter(
            parts=parts, text=text, message_id=new_message_id(), called=called(text) if self.servers else None
        )
        self._queue.append(waiter)
        return waiter

    async def answer(self, waiter: Waiter) -> StopReason:
        """Store a submitted prompt and wait for its turn to end.

        :raises ~crow.domain.errors.CrowError: the turn failed; the session takes the next prompt all the same.
        """
        try:
            if commands.parse(waiter.text) is None:
                waiter.parts = await with_contents(self._expanded(waiter), self._workspace)
                waiter.seq = await self._adapters.store.enqueue(self.id, waiter.parts, waiter.message_id)
        except BaseException:
            self._queue.remove(waiter)
            raise
        finally:
            waiter.stored.set()
        self._wake.set()
        await waiter.done.wait()
        if waiter.error is not None:
            raise waiter.error
        return waiter.stop

    async def prompt(self, parts: Sequence[Part]) -> StopReason:
        """`submit` and `answer`."""
        return await self.answer(self.submit(parts))

    def withdraw(self, waiter: Waiter) -> None:
        """End one submitted prompt as `cancelled`; those before and behind it stay."""
        waiter.cancelled = True
        if self._queue and self._queue[0] is waiter:
            if self._scope is not None:
                self._scope.cancel()
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
        if self._turn is None:
            return False
        message_id = new_message_id()
        parts = await with_contents(parts, self._workspace)
        await self._adapters.store.enqueue(self.id, parts, message_id)
        if self._turn is None:  # it ended meanwhile: the sender prompts anew
            for waiting in await self._adapters.store.queued(self.id):
                if waiting.message_id == message_id:
                    await self._adapters.store.drop_prompt(self.id, waiting.seq)
            return False
        self._turn.steer(User(parts=tuple(parts), message_id=message_id))
        return True

    def cancel(self) -> None:
        """End the running turn and those that wait, as `cancelled`; without effect when idle."""
        for waiter in self._queue:
            waiter.cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    def warm(self) -> None:
        """Start what the first prompt will need (the MCP servers), if the session has not yet."""
        if self.servers:
            self._tools_wanted.set()

    async def set_mode(self, mode: str) -> None:
        """Change the permission mode from the next call on; stored with the session."""
        if mode != self._branch.row.mode:
            await self._branch.change(SessionChanges(mode=mode))
        await self._branch.publish(ModeChanged(mode=mode))

    async def set_model(self, name: str) -> None:
        """Change the model from the next turn on; stored with the session."""
        if name != self._branch.row.model:
            await self._branch.change(SessionChanges(model=name))
        await self._branch.publish(OptionsChanged())

    async def set_option(self, name: str, value: str | bool) -> None:
        """Set an entry of the session's configuration; stored with the session, in force from the next turn on."""
        config = self._branch.row.config
        if config.get(name) != value:
            await self._branch.change(SessionChanges(config={**config, name: value}))
        await self._branch.publish(OptionsChanged())

    async def measured(self) -> ContextMeasured:
        """How full the context is, without loading anything.

        :raises ~crow.domain.errors.CrowError: the model's settings or the store cannot be used.
        """
        return (await self._gauge(self._branch, self._info)).reading()

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
                background.start_soon(self._keep_toolbox)
                while not self._closing:
                    if self._queue:
                        await self._serve(self._queue[0], background)
                    else:
                        await self._rest()
                await self._unstored.close()
                self._tools_unwanted.set()
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

    async def _keep_toolbox(self) -> None:
        """Open the tools when they are first wanted, and close them in the same task, outside of any turn's scope."""
        await self._tools_wanted.wait()
        if self._closing:
            return
        try:
            await self._adapters.load()
            async with (
                self._adapters.open_toolbox(
                    self._workspace, self._ports(), self.servers, on_change=self._offers_changed
                ) as self._toolbox,
                anyio.create_task_group() as telling,
            ):
                self._tools_there.set()
                telling.start_soon(self._tell_offers)
                await self._tools_unwanted.wait()
                telling.cancel_scope.cancel()
        except Exception as error:
            if self._toolbox is not None:
                raise
            self._toolbox_failure = error  # raised by each turn that needs the tools
        finally:
            self._tools_there.set()

    async def _offers_changed(self) -> None:
        self._changed.set()

    async def _tell_offers(self) -> None:
        """Tell the client when there are other commands than before. A slow client holds up no server."""
        known: tuple[ServerPrompt, ...] = ()
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            if self.prompts != known:
                known = self.prompts
                await self._branch.publish(CommandsChanged())

    def _ports(self) -> Ports:
        """What the tools may ask of the session."""
        log = BranchLog(self._adapters.store, self._branch)
        self._delegate = SubAgents(
            store=self._adapters.store,
            parent=self._branch,
            client=self._client,
            log=log,
            permissions=self._permissions,
            model=self._adapters.model,
            compactor=self._make_compactor,
            steps=self._adapters.settings.steps_per_turn,
        )
        return Ports(log=log, plan=CurrentPlan(self._branch), delegate=self._delegate, asker=self._client)

    async def _tools(self) -> WaitableToolbox:
        self._tools_wanted.set()
        await self._tools_there.wait()
        if self._toolbox is None:
            raise CrowError(f"The tools of this session could not be opened: {self._toolbox_failure}")
        return self._toolbox

    async def _serve(self, waiter: Waiter, background: anyio.abc.TaskGroup) -> None:
        await waiter.stored.wait()
        if waiter not in self._queue:  # it could not be stored, and its request has said so
            return
        background.start_soon(self._show_life, waiter)
        try:
            with anyio.CancelScope() as self._scope:
                if waiter.cancelled:
                    self._scope.cancel()
                await self._answer(waiter)
        except Exception as error:  # noqa: BLE001  a session's failure stays its own: the request answers it
            waiter.error = error
        finally:
            self._scope = None
            self._queue.remove(waiter)
            waiter.done.set()
        background.start_soon(self._workspace.reap)

    async def _show_life(self, waiter: Waiter) -> None:
        """A command may run for hours without a word; who cannot look up this process must not take it for dead."""
        while not waiter.done.is_set():
            with anyio.move_on_after(RENEW_S):
                await waiter.done.wait()
                return
            try:
                for session_id in (self.id, *(self._delegate.running if self._delegate is not None else ())):
                    await self._adapters.store.renew_lease(session_id)
            except StoreError as error:
                logger.warning("Session %s: no sign of life could be given: %s", self.id, error)

    async def _answer(self, waiter: Waiter) -> None:
        """Claim the turn, run it, end it. Cancelled or failed, it is ended all the same."""
        command = commands.parse(waiter.text) if waiter.seq is None else None
        self._turn = None
        with anyio.CancelScope(shield=True):  # what the user said is on disk, even if they cancel at once
            moved = await self._claim(waiter)
        try:
            await anyio.lowlevel.checkpoint()
            await self._begin(moved)
            if command is not None:
                await self._command(waiter, command)
            elif waiter.called is not None:
                waiter.stop = await self._call_prompt(waiter, waiter.called)
            else:
                waiter.stop = await self._run_turn()
            end = TurnEnd(stop=waiter.stop)
        except anyio.get_cancelled_exc_class():
            waiter.stop = "cancelled"
            await self._end(TurnEnd(stop="cancelled"))
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
            known = self._branch.plan
            seq = waiter.seq if waiter.called is None else None  # its words are the server's to give
            start = await self._branch.claim(seq, cut=await self._cut(waiter.parts) if seq is not None else None)
        except StoreError:
            if waiter.seq is not None:  # the caller is told, and asks again
                await self._unstored.drop_prompt(waiter.seq)
            raise
        if start.moved:
            await self._look_around(known)
        return start.moved

    async def _cut(self, parts: Sequence[Part]) -> int | None:
        """How many characters of a huge prompt the model may see; None: all of them."""
        text = parts_text(parts)
        if len(text) <= SMALL_CHARS:
            return None
        return (await self._gauge(self._branch, self._info)).cut_prompt(text)

    def _info(self) -> ModelInfo:
        return self._adapters.info(self._branch.row.model)

    async def _begin(self, moved: bool) -> None:
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
        await self._name()

    async def _name(self) -> None:
        """Give the session the title of its first prompt, unless it has one."""
        if self._branch.row.title is None and (title := title_from(self._branch.newest_user_text())):
            await self._branch.change(SessionChanges(title=title))
            await self._branch.publish(TitleChanged(title=title))

    async def _run_turn(self) -> StopReason:
        compactor, toolbox = await self._prepare()
        steps, most = self._adapters.settings.steps_per_turn, self._branch.row.config.get("max_turns")
        self._turn = Turn(
            self._branch,
            compactor,
            toolbox,
            steps=min(steps, most) if isinstance(most, int) and most > 0 else steps,
            briefing=self._briefing,
            permissions=self._permissions,
        )
        return await self._turn.run()

    async def _run_prompt(self, prompt: User) -> StopReason:
        await self._branch.record([NewEntry(body=prompt, model=self._branch.row.model)])
        await self._name()
        return await self._run_turn()

    async def _call_prompt(self, waiter: Waiter, typed: CalledPrompt) -> StopReason:
        """Prompt with what a server makes of `/server:prompt`; with the words as they are where no server has it."""
        prompt = User(parts=tuple(waiter.parts), message_id=waiter.message_id)
        try:
            parts = await filled(await self._tools(), typed, waiter.parts)
        except (ArgumentError, ToolServerError) as error:
            body = Command(text=waiter.text, answer=str(error), message_id=waiter.message_id)
            await self._branch.record([NewEntry(body=body)])
            assert waiter.seq is not None, "it was stored before its turn began"
            await self._adapters.store.drop_prompt(self.id, waiter.seq)
            return "end_turn"
        except BaseException:
            self._unstored.keep([NewEntry(body=prompt)])  # what the user said stays in the history
            raise
        return await self._run_prompt(replace(prompt, parts=parts, cut=await self._cut(parts)))

    async def _move(self, to: int | None, reason: str) -> None:
        known = self._branch.plan
        await self._branch.move(to, reason)
        await self._look_around(known)

    async def _look_around(self, known: Sequence[PlanItem]) -> None:
        """The session stands elsewhere now: see what the model was told there, and tell the client what holds there,
        the plan if it is not the one `known` to it, and how full the context is."""
        self._briefing.look_back()
        if self._branch.plan != known:
            await self._branch.publish(PlanChanged(plan=self._branch.plan))
        try:
            measured = await self.measured()
        except CrowError as error:
            logger.warning("The context could not be measured: %s", error)
        else:
            await self._branch.publish(measured)

    async def _prepare(self) -> tuple[Compactor, WaitableToolbox]:
        """What a turn and a compaction need: a model that can be asked, open tools, a prompt entry."""
        await self._adapters.load()
        model = await self._adapters.model(self._branch.row.model)
        model.check()
        toolbox = await self._tools()
        await toolbox.wait_ready(SERVER_GRACE_S)
        await self._name_failed_servers(toolbox.servers())
        await self._briefing.begin_turn(toolbox.specs(), toolbox.servers(), toolbox.skills())
        return await self._make_compactor(self._branch, model, self._briefing), toolbox

    async def _make_compactor(self, branch: Branch, model: Model, briefing: Briefing) -> Compactor:
        settings = self._compaction()
        other = settings.compact_model if settings.compact_model != branch.row.model else ""
        helpers = Helpers(
            fresh_prompt=briefing.fresh_prompt,
            compact_model=await self._adapters.model(other) if other else None,
            hooks=self._adapters.hooks,
        )
        return Compactor(await self._gauge(branch, lambda: model.info), model, helpers)

    async def _gauge(self, branch: Branch, info: Callable[[], ModelInfo]) -> Gauge:
        window = Window(self._adapters.store)
        await window.look_up(info())
        return Gauge(branch, info, self._compaction(), window)

    def _compaction(self) -> CompactionSettings:
        """As configured, unless the session was told otherwise."""
        settings, auto = self._adapters.settings.compaction, self._branch.row.config.get("auto_compact")
        return replace(settings, auto=auto) if isinstance(auto, bool) else settings

    async def _name_failed_servers(self, servers: Sequence[ServerStatus]) -> None:
        """Tell the user once of each failure of a server, also of one that it has got over by now."""
        for place, server in enumerate(servers):
            was_failed, losses = self._named.get(place, (False, 0))
            is_failed = server.state == "failed" or (server.state == "starting" and was_failed)
            self._named[place] = (is_failed, server.losses)
            if server.state == "failed" and not (was_failed and losses == server.losses):
                await self._tell(f"MCP server {server.name} is not available", server.detail)
            elif server.state != "failed" and losses < server.losses:
                done = "was" if server.state == "ready" else "is being"
                await self._tell(f"MCP server {server.name} had ended and {done} started again", server.loss)

    async def _tell(self, title: str, detail: str) -> None:
        """Tell the user something of this moment; where the editor has no place for that, in the history."""
        if self._client.takes_notices:
            await self._client.publish(NoticeShown(severity="warning", title=title, description=detail))
        else:
            await self._branch.record([NewEntry(body=Remark(text=f"{title}: {detail}", message_id=new_message_id()))])

    async def _command(self, waiter: Waiter, typed: commands.Typed) -> None:
        async def compactor() -> Compactor:
            return (await self._prepare())[0]

        desk = commands.Desk(
            branch=self._branch,
            store=self._adapters.store,
            client=self._client,
            workspace=self._workspace,
            models=self._adapters.models,
            rules=self._adapters.settings.rules,
            compactor=compactor,
            set_mode=self.set_mode,
            set_model=self.set_model,
            move=self._move,
            run_prompt=self._run_prompt,
            toolbox=self._tools,
        )
        answer = await commands.answer(desk, typed)
        body = Command(text=waiter.text, answer=answer, message_id=new_message_id())
        (entry,) = await self._branch.record([NewEntry(body=body)])
        if desk.follow_up is not None:
            waiter.stop = await desk.follow_up(entry)

    async def _end(self, end: TurnEnd) -> None:
        """Store what is left of the turn together with its end and give the turn back, whatever happens meanwhile."""
        turn, self._turn = self._turn, None
        left = [*turn.leftover(), *turn.unseen()] if turn is not None else []
        self._unstored.keep([*left, NewEntry(body=end)])
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
            known = self._branch.plan
            await self._branch.step_back()
            await self._look_around(known)


def title_from(text: str) -> str:
    """The first line of a prompt, bounded; empty if there is none."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= TITLE_CHARS else line[: TITLE_CHARS - 1].rstrip() + "…"
