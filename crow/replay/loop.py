"""Runs the turns of a stored session again with today's loop. The model, the tools and the user act as in the log.

`Turn`, `Branch` and `Compactor` are the real ones. The other objects that a turn uses, such as the model and the tools,
are replaced by those of the classes named `_Logged...`. These find out what to do from the entries of the log that
:class:`LoggedStore` has not reached yet. If the log does not have what the turn does next, :class:`Diverged` ends the
turn. If the log says that the turn was cancelled or killed, it is cancelled at the same point.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeAlias, cast

import anyio
import anyio.lowlevel

from crow.agent import Client
from crow.agent.compaction.budget import CompactionPolicy, Gauge
from crow.agent.compaction.compactor import Compactor
from crow.agent.compaction.summary import SYSTEM, ignore
from crow.agent.compaction.window import DEFAULT_WINDOW, ContextWindow
from crow.agent.compaction.writer import Helpers
from crow.agent.history.branch import Branch
from crow.agent.hooks import BranchHooks, Hooks
from crow.agent.permissions.judge import Permissions
from crow.agent.turns.cost import Budget
from crow.agent.turns.prompt import SECTIONS, Briefing, facts_told
from crow.agent.turns.requests import Standby
from crow.agent.turns.turn import Turn
from crow.domain.entries import (
    Announcement,
    Assistant,
    CallRef,
    Checkpoint,
    Custom,
    Entry,
    Mask,
    NewEntry,
    Prompt,
    Remark,
    Reminder,
    Skill,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.errors import ContextOverflow, CrowError, ModelError, NetworkError
from crow.domain.events import Event
from crow.domain.messages import Answer, SystemMessage, ToolCall
from crow.domain.text import shorten
from crow.llm import Attempt, Delta, Model, ModelInfo, Request, TextDelta, ThoughtDelta
from crow.replay.log import Diverged, LoggedStore, is_request, named, sent_by
from crow.store import BranchStore, Tail
from crow.tools import OnOutput, Outcome, PlannedCall, Toolbox, Workspace

_EDITS = frozenset({"apply_patch", "edit_file", "write_file"})
_SHELLS = frozenset({"shell", "shell_output"})
"""Tools that shorten their own results."""
_CYCLES = 2_000
"""A call's result waits until all earlier results of the log were taken. If nothing happens in this many rounds of the
event loop, the turn differs from the log."""
_LIMITS = ("Stopped after ", " has cost ")
"""A remark that contains one of these says that the turn stopped at a limit."""

OnRequest: TypeAlias = Callable[[Entry, Request], None]
"""Gets the entry of the log, and the request that today's code sends in its place."""


class LoggedTurns:
    """Runs the turns of one path again."""

    def __init__(self, store: LoggedStore, workspace: Workspace, on_request: OnRequest) -> None:
        self._store = store
        self._workspace = workspace
        self._on_request = on_request
        self._scope = anyio.CancelScope()
        self._window = _LoggedWindow(store)
        self.answer = (0, Assistant(text="", message_id=""))
        """The id of the entry with the newest answer, and the answer."""
        self._compactor: Compactor | None = None
        self._stand_on(Tail(row=store.row, entries=()))

    async def begin(self) -> None:
        """Build the branch again from the log, up to the entry taken last. Call this after a turn that differed from
        the log."""
        self._stand_on(await self._store.tail())

    def _stand_on(self, tail: Tail) -> None:
        self.branch = Branch(cast("BranchStore", self._store), _Nobody(), tail)  # it has all methods that a turn calls
        self._model = _LoggedModel(self, self._store)
        self._briefing = _LoggedBriefing(self.branch, self._store)

    async def take(self, count: int) -> None:
        """Append the next entries of the log without running anything."""
        self._store.take_next(count)
        await self.branch.store_only(())

    async def prepare(self) -> None:
        """Write the summary for a later compaction, if the log says that crow wrote it between two turns."""
        checkpoint = self._store.next_checkpoint()
        if checkpoint is not None and checkpoint.reason == "early" and self._compactor is not None:
            self._compactor.prepared = await self._compactor.prepare()

    @property
    def lacks_summary(self) -> bool:
        """Whether the turn that begins uses an early summary that `prepare` has not written yet."""
        following = next((entry.body for entry in self._store.upcoming() if isinstance(entry.body, Checkpoint)), None)
        is_prepared = self._compactor is not None and self._compactor.prepared is not None
        return following is not None and following.reason == "early" and not is_prepared

    async def run(self) -> None:
        """Run the turn whose prompt `take` has appended.

        :raises Diverged: it does not do what the log says.
        """
        store, branch = self._store, self.branch
        if "mode" not in facts_told(branch.entries):  # the log may then lack the note that set the default mode again
            store.row = replace(store.row, mode=store.mode_ahead() or "ask")
        prepared = self._compactor.prepared if self._compactor is not None else None
        compactor = self._compactor = self._new_compactor()
        compactor.prepared = prepared
        turn = Turn(
            branch,
            compactor,
            cast("Toolbox", _LoggedToolbox(self, store)),  # it has all methods that a turn calls
            briefing=self._briefing,
            permissions=Permissions(branch, cast("Client", _Nobody()), self._workspace),  # no call needs permission
            hooks=BranchHooks(Hooks(), branch, self._workspace, ignore),
            steps=2**31,
            budget=_LoggedBudget(store),
            standby=_LoggedStandby(store, self._model),
            inbox=_LoggedInbox(branch, store),
        )
        end = TurnEnd(stop="cancelled")
        with anyio.CancelScope() as self._scope:
            end = TurnEnd(stop=await self._end_of(turn.run()))
        await turn.end(end)

    async def _end_of(self, work: Awaitable[Any]) -> Any:
        """Return what `work` returns, or `error` if it raises a :class:`CrowError`, with which a turn may end.

        :raises Diverged: the turn does not do what the log says, or `work` fails with any other exception.
        """
        try:
            return await work
        except Diverged:
            raise
        except CrowError:
            return "error"
        except Exception as error:  # noqa: BLE001  # a damaged log must not end the replay
            self._store.diverge(f"today crow fails: {type(error).__name__}: {shorten(str(error), 200)}")

    def _new_compactor(self) -> Compactor:
        limits = self._store.limits_now()
        policy = limits.policy if limits is not None else CompactionPolicy()
        policy = replace(policy, auto=policy.auto and self._store.decides, early=0.5)
        gauge = Gauge(self.branch, lambda: self._model.info, policy, self._window)
        helpers = Helpers(fresh_prompt=self._briefing.fresh_prompt, read_file=self._read_file)
        return Compactor(gauge, self._model, helpers)

    async def _read_file(self, path: str) -> str | None:
        checkpoint = self._store.next_checkpoint()
        shown = checkpoint.files_shown if checkpoint is not None else ()
        return next((file.text for file in shown if file.path == path), None)

    # The methods below act as the model did in the log.

    async def answer_of(self, request: Request) -> LoggedStream:
        """Return the stream with which the log answers the next request.

        If the request failed, the stream raises the error.

        :raises Diverged: the log has no request here.
        """
        store = self._store
        if count := store.overflowed():
            await self.take(count)
            context = self.branch.context()
            request = replace(request, messages=context.messages, tools=context.tools)
        before, body = store.before_next(), store.next_made()
        requests = list(filter(is_request, before))
        is_early_end = isinstance(body, TurnEnd) and body.stop not in ("error", "cancelled", "interrupted")
        is_compaction = isinstance(body, Checkpoint | Mask) and not requests and body.reason != "overflow"
        if is_early_end or is_compaction or isinstance(body, Reminder | ToolResult):
            store.diverge(f"today a request comes where the log has {named(store.ahead[len(before)])}")
        if isinstance(body, Assistant):
            requests.append(store.ahead[len(before)])
        for entry in requests:
            store.sent = entry.id
            self._on_request(entry, request)
        match body:
            case Assistant():
                return self._stream(requests[-1], body)
            case Checkpoint(reason="overflow") | Mask(reason="overflow"):
                return LoggedStream(failure=self._overflow())
            case Checkpoint() | Mask():
                return LoggedStream(failure=NetworkError("The endpoint was down."))
            case TurnEnd(stop="error", detail=detail):
                return LoggedStream(failure=ModelError(detail))
            case _:
                return LoggedStream(park=self.park)

    def _overflow(self) -> ContextOverflow:
        """Return the error of a request that was too long, and set the calibration of token estimates that crow learned
        from it. The log has the calibration only with the next request. If the endpoint reports token counts, the
        compaction in between has changed the calibration, and this change is reversed here."""
        ahead = self._store.limits_ahead(after=self._store.sent)
        if ahead is not None and self._compactor is not None:
            gauge = self._compactor.gauge
            learned, scale = ahead.calibration, gauge.measured().scale
            self._set_calibration(learned)
            if gauge.measured().is_reported:
                self._set_calibration(2 * learned - scale)
        return ContextOverflow("The request was too long.")

    def _set_calibration(self, calibration: float) -> None:
        self.branch.row = self._store.row = replace(self._store.row, calibration=calibration)

    def _stream(self, entry: Entry, body: Assistant) -> LoggedStream:
        """Return the stream of an answer. It ends as in the log: completely, with an error, or cancelled."""
        self.answer = (entry.id, body)
        answer = Answer(
            text=body.text,
            thought=body.thought,
            calls=body.calls,
            finish=body.finish,
            usage=entry.usage,
            opaque=body.opaque,
            reasoning_field=body.reasoning_field,
            wire=body.wire,
        )
        stream = LoggedStream(answer=answer, attempt=Attempt(usage=entry.usage, sent=body.sent))
        if body.finish == "interrupted":
            match self._store.next_made(after=entry):
                case TurnEnd(stop="error", detail=detail):
                    stream.failure = ModelError(detail)
                case TurnEnd() | None:
                    stream.park = self.park
                case _:
                    stream.failure = NetworkError("The stream broke.")
        return stream

    async def park(self) -> NoReturn:
        """Cancel the turn, because the log says that it was cancelled or killed here."""
        self._store.has_parked = True
        self._scope.cancel()
        await anyio.sleep_forever()
        raise AssertionError("the turn was cancelled")


@dataclass(slots=True, kw_only=True)
class LoggedStream:
    """An answer of the log, or the failure of a request; see :class:`crow.llm.Stream`."""

    answer: Answer = field(default_factory=lambda: Answer(text=""))
    attempt: Attempt | None = None
    """The attempt that gave the answer. Failed attempts and requests for summaries have their own entries in the
    log."""
    failure: ModelError | None = None
    """Raised after the answer."""
    park: Callable[[], Awaitable[None]] | None = None
    """Awaited after the answer: it cancels the turn."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate over the answer. :raises ~crow.domain.errors.ModelError: the request failed."""
        if self.answer.thought:
            yield ThoughtDelta(text=self.answer.thought)
        if self.answer.text:
            yield TextDelta(text=self.answer.text)
        if self.failure is not None:
            raise self.failure
        if self.park is not None:
            await self.park()

    def partial(self) -> Answer:
        """See :class:`crow.llm.Stream`."""
        return replace(self.answer, calls=(), finish="interrupted")

    def attempts(self) -> tuple[Attempt, ...]:
        """See :class:`crow.llm.Stream`."""
        return () if self.attempt is None else (self.attempt,)


class _LoggedModel:
    """The model of the next request in the log; see :class:`crow.llm.Model`."""

    def __init__(self, turns: LoggedTurns, store: LoggedStore) -> None:
        self._turns = turns
        self._store = store

    @property
    def info(self) -> ModelInfo:
        """See :class:`crow.llm.Model`."""
        request = next(filter(is_request, self._store.upcoming()), None)
        sent, limits = sent_by(request) if request is not None else None, self._store.limits_now()
        return ModelInfo(
            name=request.model if request is not None else "",
            endpoint=sent.endpoint if sent is not None else self._store.endpoint,
            context_window=limits.window if limits is not None else None,
            is_window_configured=limits is not None and limits.configured,
            max_output_tokens=limits.output if limits is not None else None,
        )

    def check(self) -> None:
        """See :class:`crow.llm.Model`."""

    async def close(self) -> None:
        """See :class:`crow.llm.Model`."""

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[LoggedStream]:
        """See :class:`crow.llm.Model`."""
        first = request.messages[0]
        is_transcript = isinstance(first, SystemMessage) and first.text == SYSTEM
        if is_transcript or request.tool_choice == "none":
            yield self._summary(is_transcript=is_transcript)
        else:
            yield await self._turns.answer_of(request)

    def _summary(self, *, is_transcript: bool) -> LoggedStream:
        """Return the summary of the next checkpoint. Return a failure if there is none, if no model wrote it, or if a
        model wrote it from a transcript and this request has no transcript."""
        checkpoint = self._store.next_checkpoint()
        method = checkpoint.method if checkpoint is not None else "fallback"
        if checkpoint is None or method == "fallback" or (method == "serialised" and not is_transcript):
            return LoggedStream(failure=ModelError("The log has no such summary."))
        return LoggedStream(answer=Answer(text=checkpoint.summary))


class _LoggedToolbox:
    """The tools. Each call gets the result that it has in the log."""

    def __init__(self, turns: LoggedTurns, store: LoggedStore) -> None:
        self._turns = turns
        self._store = store

    def prepare(self) -> None:
        """See :class:`crow.tools.Toolbox`."""

    def understood(self, call: ToolCall) -> ToolCall:
        """See :class:`crow.tools.Toolbox`. The log has the calls as they were understood."""
        return call

    async def plan(self, call: ToolCall) -> PlannedCall:
        """See :class:`crow.tools.Toolbox`. If a call was refused, its result in the log says why."""
        entry_id, answer = self._turns.answer
        index = next(index for index, each in enumerate(answer.calls) if each is call)
        was_started, result = self._store.fate_of(CallRef(assistant=entry_id, index=index))
        return PlannedCall(
            announcement=next(iter(answer.announcements[index:]), Announcement(title=call.name)),
            access="none",
            is_barrier=call.name in _EDITS,
            fault=result[1].text if result is not None and not was_started else None,
        )

    async def run(
        self,
        call: ToolCall,  # noqa: ARG002
        call_id: str,
        on_output: OnOutput,  # noqa: ARG002
        *,
        planned: PlannedCall | None = None,  # noqa: ARG002
    ) -> Outcome:
        """See :class:`crow.tools.Toolbox`. Calls that run at the same time end in the order of the log."""
        ref, store = CallRef.parse(call_id), self._store
        assert ref is not None
        entry, body = store.fate_of(ref)[1] or await self._turns.park()
        cycles, left = 0, len(store.ahead)
        while store.next_made() is not body:
            await anyio.lowlevel.checkpoint()
            cycles, left = (cycles + 1, left) if len(store.ahead) == left else (0, len(store.ahead))
            if cycles > _CYCLES or store.difference is not None:
                store.diverge(f"today {named(entry)} comes earlier than in the log")
        return Outcome(
            text=body.text,
            is_error=body.is_error,
            usage=entry.usage,
            cost=entry.cost,
            max_chars=body.cut if body.name in _SHELLS else None,
        )


class _LoggedBriefing(Briefing):
    """Tells the model the facts of the log: date, mode, servers, skills, instructions."""

    def __init__(self, branch: Branch, store: LoggedStore) -> None:
        self._store = store
        super().__init__(branch)

    async def fresh_prompt(self) -> Prompt:
        """Return the prompt entry that was stored with the next checkpoint."""
        bodies = [entry.body for entry in self._store.ahead]
        at = next((at for at, body in enumerate(bodies) if isinstance(body, Checkpoint)), 0)
        before = bodies[at - 1] if at else None
        return (
            before
            if isinstance(before, Prompt)
            else self._branch.projection.prompt or Prompt(system="", tools=(), cwd="", model="")
        )

    def reminder(self) -> tuple[str, list[NewEntry]] | None:
        """Set the facts to those in the next reminder of the log, and return the reminder that is then due."""
        before, following = self._store.before_next(), self._store.next_made()
        self.look_back()
        told = dict(self._told)
        if isinstance(following, Reminder):
            told |= facts_told([self._store.ahead[len(before)]])
        self.learn({name: told.get(name, "") for name in SECTIONS})
        return super().reminder()


class _LoggedWindow(ContextWindow):
    """The context window at the next request of the log."""

    def __init__(self, store: LoggedStore) -> None:
        super().__init__()
        self._log = store

    def tokens(self, info: ModelInfo) -> int:
        """See :class:`ContextWindow`."""
        return self.declared(info)

    def declared(self, info: ModelInfo) -> int:
        """See :class:`ContextWindow`."""
        return info.context_window or DEFAULT_WINDOW

    def cautious_tokens(self, info: ModelInfo) -> int:
        """See :class:`ContextWindow`."""
        limits = self._log.limits_now()
        return (limits.cautious or limits.window) if limits is not None else self.declared(info)

    def is_test_due(self, info: ModelInfo) -> bool:  # noqa: ARG002
        """Return False: the log has the window that was used."""
        return False

    async def on_refusal(self, info: ModelInfo, error: ContextOverflow, *, used: int, fixed: int) -> int:  # noqa: ARG002
        """Return the window that the next compaction of the log assumed, or at most 90 % of `used` if the log has
        none."""
        body = self._log.next_made()
        window = body.window if isinstance(body, Checkpoint | Mask) else None
        return window or min(self.declared(info), used * 9 // 10)


class _LoggedBudget(Budget):
    """Stops a turn at a limit only where the logged turn stopped at one."""

    def __init__(self, store: LoggedStore) -> None:
        self._store = store

    async def why_stop(self, branch: Branch, info: ModelInfo) -> str:  # noqa: ARG002
        """See :class:`Budget`."""
        for entry in self._store.upcoming():
            match entry.body:
                case Remark(text=text) if any(words in text for words in _LIMITS):
                    return text
                case Assistant() | ToolResult() | Reminder():
                    return ""
                case _:
                    pass
        return ""


class _LoggedStandby(Standby):
    """Gives the same model again after a failure, if the log says that the turn went on with a compaction."""

    def __init__(self, store: LoggedStore, model: Model) -> None:
        self._store = store
        self._model = model

    async def next(self, error: ModelError) -> Model | None:  # noqa: ARG002
        """See :class:`Standby`."""
        return self._model if isinstance(self._store.next_made(), Checkpoint | Mask) else None

    async def answered(self) -> None:
        """See :class:`Standby`."""


class _LoggedInbox:
    """The entries that came from outside while the turn ran: prompts of the user, texts of hooks, results of background
    work."""

    def __init__(self, branch: Branch, store: LoggedStore) -> None:
        self._branch = branch
        self._store = store

    @property
    def has_news(self) -> bool:
        """Whether the next entries from outside have a text for the model, and the turn goes on after it."""
        end = self._store.next_made()
        if end is None or (isinstance(end, TurnEnd) and end.stop != "max_turn_requests"):
            return False
        return any(isinstance(entry.body, User | Custom | Skill) for entry in self._store.before_next())

    async def deliver(self) -> None:
        """Take the next entries from outside. Set the mode to that of the next request. Do the same with the
        calibration, unless a compaction comes before this request."""
        branch, store = self._branch, self._store
        await branch.store_only(())
        store.row = replace(store.row, mode=store.mode_ahead() or store.row.mode)
        ahead = store.limits_ahead()
        if ahead is not None and not isinstance(store.next_made(), Checkpoint | Mask):
            store.row = replace(store.row, calibration=ahead.calibration)
        branch.row = store.row


class _Nobody:
    """Takes the place of the clients, and ignores all events."""

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`."""
