"""Random sessions on a branch in memory, and models that fail on purpose."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import anyio

from crow.agent import PermissionQuestion
from crow.agent.compaction import Reason
from crow.agent.compaction.budget import CompactionPolicy, Gauge, Limits
from crow.agent.compaction.compactor import CompactionResult, Compactor
from crow.agent.compaction.window import ContextWindow
from crow.agent.compaction.writer import Helpers
from crow.agent.history.branch import Branch
from crow.domain.entries import (
    Announcement,
    Assistant,
    CallRef,
    Checkpoint,
    Diff,
    Entry,
    File,
    NewEntry,
    Prompt,
    Reminder,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.errors import ContextOverflow, NetworkError, Overloaded, StoreError, TurnError
from crow.domain.events import CompactionChanged, Event
from crow.domain.messages import Image, Message, Part, Text, ToolCall, ToolSpec, Usage
from crow.llm import Model, ModelInfo, Request
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

Way = Literal[
    "good", "empty", "thought", "cut", "refused", "calls", "long", "garbage", "error", "overflow", "broken", "hang"
]
FAILURES: tuple[Way, ...] = (
    "empty",
    "thought",
    "cut",
    "refused",
    "calls",
    "long",
    "garbage",
    "error",
    "overflow",
    "broken",
    "hang",
)
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


def flaky(rate: float, chance: random.Random, info: ModelInfo, tally: Counter[str] | None = None) -> AnsweringModel:
    """A model whose summaries fail at a rate from 0 to 1. `tally` counts the ways in which it answered."""

    def answer(_: Request) -> Say:
        way: Way = chance.choice(FAILURES) if chance.random() < rate else "good"
        if tally is not None:
            tally[way] += 1
        return answered(way)

    return AnsweringModel(answer, info)


def answered(way: Way) -> Say:
    match way:
        case "good":
            return Say(text=[SUMMARY], usage=Usage(input_tokens=1000, output_tokens=100))
        case "empty":
            return Say(text=[" \n"])
        case "thought":
            return Say(thought="I should summarise it.")
        case "cut":
            return Say(text=[SUMMARY], finish="length")
        case "refused":
            return Say(text=[SUMMARY], finish="refusal")
        case "calls":
            return Say(text=[SUMMARY], calls=(call("read_file", path="/a"),))
        case "long":
            return Say(text=["word " * 40_000])
        case "garbage":
            return Say(text=["�\x00" * 20])
        case "error":
            return Say(error=Overloaded("The endpoint is busy."))
        case "overflow":
            return Say(error=ContextOverflow("The request is too long."))
        case "broken":
            return Say(text=[SUMMARY], error=NetworkError("The connection was closed."))
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
    branch = Branch(store, client, store.create(session))
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


PICTURE = Image(data="iVBORw0KGgo=", mime_type="image/png")
BULK_WINDOW = 16_000
"""In a larger window, some texts are longer by the same factor, so that it fills up after as many steps."""


@dataclass(kw_only=True)
class Simulation:
    """Takes random steps, repeatable by seed. The provider counts `ratio` tokens for each token that crow estimates.

    A step compacts if it is due, sends a request and stores the answer with its calls and results. Between two turns
    the user goes back, forks the session, or undoes a compaction. `points` counts how often crow decided whether to
    compact. `compact_model`, if there is one, is asked first for summaries.
    """

    seed: int
    window: int
    model: AnsweringModel
    ratio: float = 1.0
    settings: CompactionPolicy = field(default_factory=CompactionPolicy)
    compact_model: AnsweringModel | None = None
    passes: list[Pass] = field(default_factory=list)
    requests: list[tuple[Message, ...]] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    ended: list[TurnError] = field(default_factory=list)
    checked: Pass | None = None
    points: int = 0
    events: Counter[str] = field(default_factory=Counter)
    session: str = "s"

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

    def path(self) -> tuple[Entry, ...]:
        """All entries of the session, oldest first."""
        return self.store.path(self.session)

    def new_compactor(self) -> Compactor:
        return compactor_on(
            self.branch,
            self.model,
            self.settings,
            fresh_prompt=same_prompt,
            read_file=self.read_file,
            compact_model=self.compact_model,
            deadline_s=0.0005,
        )

    async def read_file(self, _: str) -> str | None:
        return None if self.random.random() < 0.3 else self.words(self.random.choice([10, 100, 1000, 5000]))

    async def begin_turn(self) -> None:
        if self.random.random() < 0.15:
            await self.change_branch()
        self.branch.turn += 1
        self.compactor = self.new_compactor()
        text = self.words(self.random.choice([5, 40, 400, 4000]))
        parts: tuple[Part, ...] = (Text(text=text), *self.pictures())
        await self.branch.record([NewEntry(body=User(parts=parts, message_id="m", cut=self.cut(text)))])
        if self.random.random() < 0.2:
            await self.branch.record([NewEntry(body=Reminder(text="It is another day."))])

    async def change_branch(self) -> None:
        """Go back before a prompt, forward to another branch, to a fork, or undo a compaction."""
        entries, leaf = self.path(), self.branch.leaf
        kind = self.random.choice(["undo", "elsewhere", "fork", "compact undo"])
        if kind == "compact undo":
            checkpoint = self.branch.projection.checkpoint
            await self.compactor.on_command("undo")
            if self.branch.projection.checkpoint is checkpoint:
                return
        elif kind == "fork":
            place = entries[self.random.randrange(len(entries) // 2, len(entries))]
            self.session = self.store.fork(self.session, f"{self.session}f", entry=place.id)
            self.branch = Branch(self.store, self.client, await self.store.tail(self.session))
        else:
            prompts = [entry.parent for entry in entries[-80:] if isinstance(entry.body, User)]
            anywhere = [entry for entry in self.store.entries if entry > 1]
            places = prompts[-3:] if kind == "undo" else anywhere[-200:]
            if not places or (to := self.random.choice(places)) == leaf:
                return
            await self.branch.move(to, kind)
        self.events[kind] += 1
        self.broken.add(len(self.requests))
        self.compactor = self.new_compactor()

    async def make_room(self, check: Callable[[Simulation], None]) -> bool:
        """Compact before a request. Returns false if the turn had to end."""
        if self.random.random() < 0.03:
            await self.fail_to_store()
        chance, window = self.random.random(), None
        reason: Reason = "command" if chance < 0.05 else "model" if chance < 0.07 else "threshold"
        if chance > 0.98:
            reason, window = "overflow", max(500, round(self.compactor.gauge.used() * self.random.uniform(0.6, 1.0)))
        limits, calls = self.compactor.gauge.limits(window=window), self.asked
        self.points += 1
        result = await self.compactor.compact(reason, window=window)
        done = Pass(result=result, limits=limits, calls=self.asked - calls)
        self.passes.append(done)
        if result.outcome in ("masked", "compacted"):
            self.broken.add(len(self.requests))
        if result.entry is not None and isinstance(result.entry.body, Checkpoint) and result.entry.body.files_shown:
            self.events["files shown"] += 1
        check(self)
        if result.entry is not None and reason != "overflow" and not limits.is_tiny and self.random.random() < 0.2:
            await self.compact_again(reason)
        if result.outcome == "too_small":
            self.ended.append(TurnError(result.words))
            await self.branch.record([NewEntry(body=TurnEnd(stop="error", detail=result.words))])
            return False
        return True

    @property
    def asked(self) -> int:
        """How many summaries were asked for."""
        return len(self.model.requests) + (len(self.compact_model.requests) if self.compact_model else 0)

    async def compact_again(self, reason: Reason) -> None:
        """A second pass right after one must change nothing."""
        self.points += 1
        before = (self.store.appends, self.asked)
        result = await self.compactor.compact(reason)
        assert result.outcome == "noop", result
        assert (self.store.appends, self.asked) == before

    async def fail_to_store(self) -> None:
        """A pass that cannot be stored must change nothing."""
        self.points += 1
        path, context, row = self.path(), self.branch.context(), await self.store.session(self.session)
        self.store.fails = StoreError("The disk is full.")
        try:
            await self.compactor.compact("threshold")
        except StoreError:
            self.events["disk full"] += 1
        self.store.fails = None
        assert (self.path(), self.branch.context(), await self.store.session(self.session)) == (path, context, row)

    async def answer(self) -> bool:
        """Add a model answer, perhaps with calls; most calls get results."""
        count = self.random.choice([0, 1, 1, 2, 3]) if self.random.random() < 0.97 else 12
        estimate = self.compactor.gauge.estimate()
        reported = self.random.choice([estimate * self.ratio] * 6 + [0, None, estimate * 20])
        self.events["parallel calls"] += count > 1
        calls = tuple(self.call(index) for index in range(count))
        body = Assistant(
            text=self.words(self.random.choice([0, 20, 200])),
            message_id="m",
            calls=calls,
            endpoint=self.model.info.endpoint,
            finish=self.random.choice(["stop", "stop", "interrupted"]) if not calls else "tool_calls",
            cut=self.compactor.gauge.cut_calls(calls),
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
        arguments = {"path": f"/proj/{name}/{self.random.randrange(40)}.py"}
        if name == "write_file" and self.random.random() < 0.1:
            arguments["content"] = self.words(self.random.choice([100, 3000]))
        return ToolCall(id=self.random.choice(["", "c1", f"c{index}"]), name=name, arguments=json.dumps(arguments))

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
            images=self.pictures(),
        )
        await self.branch.record([NewEntry(body=body)])

    def cut(self, text: str, beside: int = 1) -> int | None:
        return self.compactor.gauge.cut_result(text, beside=beside)

    def pictures(self) -> tuple[Image, ...]:
        """No images in most cases; else a few, or more of them in a larger window."""
        if self.random.random() < 0.93:
            return ()
        self.events["images"] += 1
        most = max(1, self.window // 20_000)
        return (PICTURE,) * self.random.randint(1, most)

    def words(self, count: int) -> str:
        """A text of about `count` tokens. A few are a hundred times longer."""
        kind, length = self.random.random(), self.random.random()
        if length < 0.004:
            self.events["huge"] += 1
            count *= 100
        elif length < 0.2:
            count *= max(1, self.window // BULK_WINDOW)
        word = "值" * 4 if kind < 0.1 else "word" if kind < 0.95 else "A1b2" * 30
        return repeated(word, min(400_000, count) // (len(word) // 4)) if count else ""

    def files_modified(self) -> set[str]:
        """The files that the whole history modified."""
        return {entry.body.path for entry in self.path() if isinstance(entry.body, File)}


@lru_cache(maxsize=32)
def repeated(word: str, times: int) -> str:
    return " ".join([word] * max(0, times))
