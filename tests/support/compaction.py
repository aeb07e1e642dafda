"""Random sessions on a branch in memory, and models that fail on purpose."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio

from crow.agent import PermissionQuestion
from crow.agent.branch import Branch
from crow.agent.compaction import Reason
from crow.agent.compaction.budget import CompactionPolicy, Gauge, Limits
from crow.agent.compaction.compactor import CompactionResult, Compactor, Helpers
from crow.agent.compaction.window import ContextWindow
from crow.domain.entries import (
    Announcement,
    Assistant,
    CallRef,
    Diff,
    File,
    NewEntry,
    Prompt,
    Reminder,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.errors import Overloaded, TurnError
from crow.domain.events import CompactionChanged, Event
from crow.domain.messages import Message, Text, ToolCall, ToolSpec, Usage
from crow.llm import Model, ModelInfo, Request
from crow.store import Store
from tests.support.memory_store import MemoryStore
from tests.support.scripted_model import Say, ScriptedStream, call

__all__ = [
    "AnsweringModel",
    "Notes",
    "Simulation",
    "Way",
    "branch_of",
    "compactor_on",
    "flaky",
    "same_prompt",
    "summariser",
]

Way = Literal["good", "empty", "cut", "calls", "long", "garbage", "error", "hang"]
FAILURES: tuple[Way, ...] = ("empty", "cut", "calls", "long", "garbage", "error", "hang")
SUMMARY = "## Goal\nBuild the parser.\n## Next\nTest it."


class AnsweringModel:
    """A model whose answers come from a function."""

    def __init__(self, answer: Callable[[Request], Say], info: ModelInfo | None = None) -> None:
        self.requests: list[Request] = []
        self.info = info or ModelInfo(name="scripted", endpoint="test scripted", context_window=32_000)
        self._answer = answer

    def check(self) -> None:
        """Always ready."""

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[ScriptedStream]:
        self.requests.append(request)
        yield ScriptedStream(self._answer(request))

    async def close(self) -> None:
        """Nothing to close."""


def summariser(*ways: Way, info: ModelInfo | None = None) -> AnsweringModel:
    """A model that answers in each of the given ways in turn."""
    endless = itertools.cycle(ways)
    return AnsweringModel(lambda _: answered(next(endless)), info)


def flaky(rate: float, chance: random.Random, info: ModelInfo) -> AnsweringModel:
    """A model whose summaries fail at a rate from 0 to 1."""
    return AnsweringModel(lambda _: answered(chance.choice(FAILURES) if chance.random() < rate else "good"), info)


def answered(way: Way) -> Say:
    match way:
        case "good":
            return Say(text=[SUMMARY], usage=Usage(input_tokens=1000, output_tokens=100))
        case "empty":
            return Say(text=[" \n"])
        case "cut":
            return Say(text=[SUMMARY], finish="length")
        case "calls":
            return Say(text=[SUMMARY], calls=(call("read_file", path="/a"),))
        case "long":
            return Say(text=["word " * 40_000])
        case "garbage":
            return Say(text=["�\x00" * 20])
        case "error":
            return Say(error=Overloaded("The endpoint is busy."))
        case "hang":
            return Say(hold=anyio.Event())


class Notes:
    """A client that records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def publish(self, event: Event) -> None:
        self.events.append(event)

    async def ask(self, question: PermissionQuestion) -> Literal["allow_once"]:
        return "allow_once"

    def compactions(self) -> list[str]:
        return [event.status for event in self.events if isinstance(event, CompactionChanged)]


def branch_of(store: MemoryStore, client: Notes, session: str = "s") -> Branch:
    typed: Store = store  # type: ignore[assignment]  # it has what these tests call
    branch = Branch(typed, client, store.create(session))  # type: ignore[arg-type]  # so has the client
    branch.turn = 1
    return branch


def compactor_on(
    branch: Branch,
    model: Model,
    settings: CompactionPolicy | None = None,
    *,
    window: ContextWindow | None = None,
    **helpers: Any,
) -> Compactor:
    """A compactor for one turn; `helpers` are fields of :class:`crow.agent.compaction.Helpers`."""
    gauge = Gauge(branch, lambda: model.info, settings or CompactionPolicy(), window or ContextWindow())
    return Compactor(gauge, model, Helpers(**helpers))


PROMPT = Prompt(
    system="You are crow. " * 40,
    tools=(ToolSpec(name="read_file", description="Reads a file. " * 20, input_schema={"type": "object"}),),
    cwd="/repo",
    model="scripted",
)


async def same_prompt() -> Prompt:
    return PROMPT


@dataclass(kw_only=True)
class Pass:
    """One compaction pass, its limits, and the number of model requests."""

    result: CompactionResult
    limits: Limits
    calls: int


@dataclass(kw_only=True)
class Simulation:
    """Takes random steps, repeatable by seed. The provider counts `ratio` tokens for each token that crow estimates."""

    seed: int
    window: int
    model: AnsweringModel
    ratio: float = 1.0
    settings: CompactionPolicy = field(default_factory=CompactionPolicy)
    passes: list[Pass] = field(default_factory=list)
    requests: list[tuple[Message, ...]] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    ended: list[TurnError] = field(default_factory=list)
    checked: Pass | None = None

    async def run(self, steps: int, check: Callable[[Simulation], None]) -> None:
        """Run some steps and call `check` after every pass and every request."""
        self.random = random.Random(self.seed)
        self.store, self.client = MemoryStore(), Notes()
        self.branch = branch_of(self.store, self.client)
        await self.branch.record([NewEntry(body=PROMPT)])
        self.compactor = self.new_compactor()
        calling = False
        for _ in range(steps):
            if not calling:
                await self.begin_turn()
            if not await self.make_room(check):
                calling = False
                continue
            self.requests.append(self.branch.context().messages)
            check(self)
            calling = await self.answer()
            if calling and self.random.random() < 0.1:  # cancelled before all results arrived
                await self.branch.record([NewEntry(body=TurnEnd(stop="cancelled"))])
                calling = False

    def new_compactor(self) -> Compactor:
        return compactor_on(
            self.branch,
            self.model,
            self.settings,
            fresh_prompt=same_prompt,
            read_file=self.read_file,
            deadline_s=0.0005,
        )

    async def read_file(self, _: str) -> str | None:
        return None if self.random.random() < 0.3 else self.words(self.random.choice([10, 100, 1000, 5000]))

    async def begin_turn(self) -> None:
        self.branch.turn += 1
        self.compactor = self.new_compactor()
        text = self.words(self.random.choice([5, 40, 400, 4000]))
        body = User(parts=(Text(text=text),), message_id="m", cut=self.cut(text))
        await self.branch.record([NewEntry(body=body)])
        if self.random.random() < 0.2:
            await self.branch.record([NewEntry(body=Reminder(text="It is another day."))])

    async def make_room(self, check: Callable[[Simulation], None]) -> bool:
        """Compact before a request. Returns false if the turn had to end."""
        reason: Reason = "command" if self.random.random() < 0.05 else "threshold"
        limits, calls = self.compactor.gauge.limits(), len(self.model.requests)
        result = await self.compactor.compact(reason)
        done = Pass(result=result, limits=limits, calls=len(self.model.requests) - calls)
        self.passes.append(done)
        if result.outcome in ("masked", "compacted"):
            self.broken.add(len(self.requests))
        check(self)
        if result.outcome == "too_small":
            self.ended.append(TurnError(result.words))
            await self.branch.record([NewEntry(body=TurnEnd(stop="error", detail=result.words))])
            return False
        return True

    async def answer(self) -> bool:
        """Add a model answer, perhaps with calls; most calls get results."""
        count = self.random.choice([0, 1, 1, 2, 3])
        estimate = self.compactor.gauge.estimate()
        reported = self.random.choice([estimate * self.ratio] * 6 + [0, None, estimate * 20])
        calls = tuple(self.call(index) for index in range(count))
        body = Assistant(
            text=self.words(self.random.choice([0, 20, 200])),
            message_id="m",
            calls=calls,
            endpoint=self.model.info.endpoint,
            finish=self.random.choice(["stop", "stop", "interrupted"]) if not calls else "tool_calls",
        )
        usage = None if reported is None else Usage(input_tokens=int(reported), output_tokens=50)
        (entry,) = await self.branch.record([NewEntry(body=body, usage=usage, estimate=estimate)])
        indexes = list(range(count))
        self.random.shuffle(indexes)
        for index in indexes:
            if self.random.random() < 0.95:
                await self.result(entry.id, index, calls[index], count)
        if not calls:
            await self.branch.record([NewEntry(body=TurnEnd(stop="end_turn"))])
        return bool(calls)

    def call(self, index: int) -> ToolCall:
        name = self.random.choice(["read_file", "write_file", "shell"])
        path = f"/proj/{name}/{self.random.randrange(40)}.py"
        return ToolCall(id=self.random.choice(["", "c1", f"c{index}"]), name=name, arguments=json.dumps({"path": path}))

    async def result(self, assistant: int, index: int, called: ToolCall, beside: int) -> None:
        ref = CallRef(assistant=assistant, index=index)
        path = json.loads(called.arguments)["path"]
        text = self.words(self.random.choice([1, 30, 300, 3000, 9000]))
        diffs: tuple[Diff, ...] = ()
        if called.name == "write_file":
            await self.branch.record([NewEntry(body=File(call=ref, path=path, before=None, after_hash="0"))])
            diffs = (Diff(path=path, old_text=None, new_text=text),)
        body = ToolResult(
            call=ref,
            name=called.name,
            text=text,
            announcement=Announcement(title=called.name, diffs=diffs),
            cut=self.cut(text, beside),
        )
        await self.branch.record([NewEntry(body=body)])

    def cut(self, text: str, beside: int = 1) -> int | None:
        return self.compactor.gauge.cut_result(text, beside=beside)

    def words(self, count: int) -> str:
        kind = self.random.random()
        word = "值" * 4 if kind < 0.1 else "word" if kind < 0.9 else "A1b2" * 30
        return " ".join([word] * max(0, count // (len(word) // 4))) if count else ""

    def files_modified(self) -> set[str]:
        """The files that the whole history modified."""
        return {entry.body.path for entry in self.store.path("s") if isinstance(entry.body, File)}
