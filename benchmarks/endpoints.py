"""Measures what crow pays to follow endpoints that change: `python -m benchmarks.endpoints [turns] [seed]`.

Sessions talk over HTTP to endpoints that change their context window and the parameters that they accept: a router
with fallback models, a proxy that refuses requests for no good reason, a local server that is restarted with another
window, and a gateway that swaps the model at noon. Days pass while they talk. The exit code is 1 if a session could not
be used while its endpoint would have answered, or if crow sent too many requests or compacted too often.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from benchmarks.rows import Row, arguments, report
from crow.agent.compaction.budget import CompactionPolicy, gauge_on
from crow.agent.compaction.compactor import Compactor
from crow.agent.compaction.window import ContextWindow
from crow.agent.compaction.writer import Helpers
from crow.agent.history.branch import Branch
from crow.agent.hooks import BranchHooks, Hooks
from crow.agent.permissions.judge import Permissions
from crow.agent.turns.prompt import Briefing
from crow.agent.turns.turn import Turn
from crow.domain.entries import Checkpoint, Mask, NewEntry, TurnEnd
from crow.domain.errors import ModelError
from crow.llm.client import EndpointClient
from crow.llm.endpoint import Endpoint
from crow.llm.stream import RetryTiming
from crow.tools.workspace import DiskWorkspace
from tests.agent.harness import NoteTaker, Tool, Tools
from tests.support import fake_endpoint as fake
from tests.support.compaction import SUMMARY, Notes, branch_of
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply
from tests.support.memory_store import MemoryStore
from tests.support.paths import user

__all__ = ["ENDPOINTS", "Simulation", "Tally"]

TURNS = 10_000
MAX_EXTRA_PERCENT = 1.0
MAX_UNNEEDED_PERCENT = 2.0
FIRST_DAY = date(2026, 1, 1)
HOURS = range(9, 18)
TURNS_PER_HOUR = 12
SESSIONS = 3
"""Sessions that are open at the same time."""

NEEDED = 0.72
"""A compaction is needed if the request fills at least this part of the window. Crow compacts at 0.8 of these windows,
but it can measure a request only with an error of some per cent."""

SESSION_TURNS = 60
RESTART_TURNS = 150
"""Crow's process ends after this many turns on average, and a new one knows only what was stored."""


@dataclass(kw_only=True)
class Server:
    """A server. `window` is the number of tokens that it accepts now, `refused` the members of a request that it
    refuses now. If `needs_stream` is true, it answers only streams. It fails `accidents` of the requests without a good
    reason. `replies_left` is how many of a turn's answers still call a tool."""

    window: int
    chance: random.Random
    refused: frozenset[str] = frozenset()
    needs_stream: bool = False
    lists: bool = False
    accidents: float = 0.0
    wordings: tuple[str, ...] = ()
    requests: int = 0
    answered: int = 0
    refusals: int = 0
    failures: int = 0
    steps: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def size(self, request: Recorded) -> int:
        """The tokens of a request, as this server counts them."""
        return len(request.raw) // 4

    def __call__(self, request: Recorded) -> Reply:
        self.requests += 1
        if self.chance.random() < self.accidents:
            self.failures += 1
            return fake.failing(400, self.chance.choice(self.wordings))
        body = request.body
        for name in sorted(self.refused & body.keys()):
            if name != "stream" or body["stream"]:
                return self.refuse(name, f"Unsupported parameter: '{name}' is not supported with this model.")
        if self.needs_stream and not body["stream"]:
            return self.refuse("no stream", "This model answers only if stream=true is set.")
        size = self.size(request)
        if size > self.window:
            words = f"This model's maximum context length is {self.window} tokens, but the request has {size} tokens."
            return self.refuse("size", words)
        self.answered += 1
        return self.answer(body, size)

    def refuse(self, reason: str, words: str) -> Reply:
        self.refusals += 1
        self.reasons[reason] += 1
        return fake.failing(400, words)

    def answer(self, body: Mapping[str, Any], size: int) -> Reply:
        is_summary = not body.get("tools") or body.get("tool_choice") == "none"
        say = SUMMARY if is_summary else "I looked at it. " * 20
        message: dict[str, object] = {"role": "assistant", "content": say}
        if not is_summary and self.steps:
            self.steps -= 1
            arguments = json.dumps({"path": f"/{self.requests}"})
            called = {"name": "read", "arguments": arguments}
            message["tool_calls"] = [{"index": 0, "id": f"c{self.requests}", "type": "function", "function": called}]
        usage = {"prompt_tokens": size, "completion_tokens": 100, "total_tokens": size + 100}
        if not body["stream"]:
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return fake.body(json.dumps({"choices": [choice], "usage": usage}).encode())
        events: list[object] = [fake.chunk(message), fake.chunk(finish="stop")]
        if "stream_options" in body:
            events.append({"choices": [], "usage": usage})
        return Reply(steps=(fake.sse(*events),))


@dataclass(kw_only=True)
class Tally:
    """What happened. `extra` are requests that were refused or sent again in vain, besides `accidents` of the endpoint.
    `unneeded` are compactions of requests that the endpoint would have answered for some time to come. `unusable` are
    turns that failed although the endpoint would have answered."""

    turns: int = 0
    requests: int = 0
    extra: int = 0
    accidents: int = 0
    compactions: int = 0
    unneeded: int = 0
    failed: int = 0
    unusable: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        for name in ("turns", "requests", "extra", "accidents", "compactions", "unneeded", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unusable += other.unusable
        self.reasons += other.reasons

    @property
    def extra_percent(self) -> float:
        return 100 * self.extra / max(1, self.requests)

    @property
    def unneeded_percent(self) -> float:
        return 100 * self.unneeded / max(1, self.compactions)


@dataclass(frozen=True, slots=True)
class Moment:
    """When a turn begins: the number of the day, and the hour."""

    day: int
    hour: int


Change = Callable[[Server, Moment], None]
"""Changes a server before a turn."""


def router(server: Server, _now: Moment) -> None:
    """A router whose first model is sometimes down for some minutes. Its fallback has a smaller window and refuses
    `stream_options`."""
    is_down = server.chance.random() < (0.8 if server.refused else 0.01)
    server.window = 24_000 if is_down else 64_000
    server.refused = frozenset({"stream_options"} if is_down else ())


def proxy(server: Server, _now: Moment) -> None:
    """A proxy that refuses some requests for other reasons."""
    server.accidents = 0.002
    server.wordings = (
        "Bad Request",
        "upstream connect error: invalid request",
        "Unknown parameter: 'stream_options'",
        "body.max_tokens: Extra inputs are not permitted",
        "'stream' is not supported by this backend.",
    )


def local_server(server: Server, now: Moment) -> None:
    """A local server that is restarted with another window every few days."""
    server.lists = True
    if now.hour == HOURS[0] and now.day % 4 == 0:
        server.window = (32_000, 16_000, 48_000, 24_000)[now.day // 4 % 4]


def gateway(server: Server, now: Moment) -> None:
    """A gateway that swaps the model at noon. The first model cannot stream; the second only streams."""
    is_morning = now.hour < 12
    server.window = 64_000 if is_morning else 24_000
    server.refused = frozenset({"stream"} if is_morning else {"reasoning_effort"})
    server.needs_stream = not is_morning


def strict(server: Server, _now: Moment) -> None:
    """A server that never changes, and refuses much."""
    server.refused = frozenset({"stream_options", "reasoning_effort"})


ENDPOINTS: Mapping[str, tuple[int, Change]] = {
    "router with a fallback model": (64_000, router),
    "proxy that refuses for other reasons": (64_000, proxy),
    "local server with another window": (32_000, local_server),
    "gateway that swaps the model at noon": (64_000, gateway),
    "strict server": (32_000, strict),
}


class Memory:
    """Facts of one endpoint, as they are stored."""

    def __init__(self) -> None:
        self.facts: dict[str, object] = {}

    async def learned(self, *_: str) -> Mapping[str, object]:
        return self.facts

    async def learn(self, _base_url: str, _model: str, facts: Mapping[str, object]) -> None:
        self.facts = json.loads(json.dumps({**self.facts, **facts}))


class Simulation:
    """Sessions with one endpoint. Every random choice depends only on the seed."""

    def __init__(self, window: int, change: Change, seed: int) -> None:
        self.chance = random.Random(seed)
        self.server = Server(window=window, chance=random.Random(seed + 1))
        self.change = change
        self.memory = Memory()
        self.tally = Tally()
        self.day = 0
        self.sessions: list[Session] = []
        self._number = 0

    def today(self) -> date:
        return FIRST_DAY + timedelta(days=self.day)

    async def run(self, turns: int) -> Tally:
        """Take this many turns, in several sessions and processes."""
        async with FakeEndpoint(otherwise=self.server) as endpoint:
            turn = 0
            while turn < turns:
                async with AsyncExitStack() as stack:
                    model = self.open_model(endpoint)
                    stack.push_async_callback(model.close)
                    for session in self.sessions:
                        session.restart()
                    for _ in range(min(turns - turn, self.chance.randrange(1, 2 * RESTART_TURNS))):
                        await self.take_turn(turn, model)
                        endpoint.requests.clear()
                        turn += 1
        tally, server = self.tally, self.server
        tally.turns, tally.requests, tally.accidents = turns, server.requests, server.failures
        tally.reasons = server.reasons
        tally.extra = server.requests - server.answered - server.failures
        return tally

    def open_model(self, endpoint: FakeEndpoint) -> EndpointClient:
        async def sleep(_: float) -> None:
            await anyio.lowlevel.checkpoint()

        settings = Endpoint(base_url=endpoint.base_url, model="fake-model", thought_level="low")
        timing = RetryTiming(sleep=sleep, chance=self.chance.random)
        facts = self.memory.facts
        return EndpointClient(settings, memory=self.memory, learned=facts, timing=timing, today=self.today)

    async def take_turn(self, turn: int, model: EndpointClient) -> None:
        self.day, hour = divmod(turn // TURNS_PER_HOUR, len(HOURS))
        self.change(self.server, Moment(self.day, HOURS[hour]))
        if len(self.sessions) < SESSIONS or self.chance.random() < 1 / SESSION_TURNS:
            self._number += 1
            self.sessions = [*self.sessions[1 - SESSIONS :], Session(self, f"s{self._number}")]
        await self.chance.choice(self.sessions).prompt(model)


class Session:
    """One session with the endpoint of a simulation."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.branch: Branch = branch_of(MemoryStore(), Notes(), name)
        self.briefing = Briefing(self.branch)
        self.restart()

    def restart(self) -> None:
        """Forget everything that is not stored."""
        self.window = ContextWindow(self.simulation.memory, self.name, today=self.simulation.today)

    async def prompt(self, model: EndpointClient) -> None:
        """Take one turn and count what it cost."""
        simulation, branch, server = self.simulation, self.branch, self.simulation.server
        chance, tally = simulation.chance, simulation.tally
        output = chance.choice((200, 1_000, 6_000))

        async def read(**_: object) -> str:
            return "x" * output

        tools, failures = Tools({"read": Tool("read", read)}), server.failures
        newest = branch.entries[-1].id if branch.entries else 0
        branch.turn += 1
        server.steps = chance.choice((0, 0, 1, 2, 4))
        await self.window.look_up(model.info)
        gauge = await gauge_on(branch, lambda: model.info, CompactionPolicy(), self.window)
        text = "q" * chance.choice((20, 400, 4_000))
        await branch.record([NewEntry(body=user(text, cut=gauge.cut_prompt(text)))])
        await self.briefing.begin_turn(tools.specs(), (), ())
        compactor = Compactor(gauge, model, Helpers(fresh_prompt=self.briefing.fresh_prompt))
        workspace = DiskWorkspace(branch.row.cwd)
        permissions = Permissions(branch, NoteTaker(), workspace)
        hooks = BranchHooks(Hooks(), branch, workspace, ignore)
        turn = Turn(branch, compactor, tools, steps=50, briefing=self.briefing, permissions=permissions, hooks=hooks)
        try:
            await turn.run()
            await branch.record([NewEntry(body=TurnEnd(stop="end_turn"))])
        except ModelError as error:
            await branch.record([NewEntry(body=TurnEnd(stop="error", detail=str(error)))])
            tally.failed += 1
            if server.failures == failures:
                tally.unusable.append(f"{self.name}, day {simulation.day}: {error}")
        await model.settled()
        for entry in branch.entries:
            if entry.id > newest and isinstance(entry.body, (Checkpoint, Mask)):
                tally.compactions += 1
                tally.unneeded += entry.body.tokens_before < NEEDED * server.window


async def ignore(_: str) -> None: ...


def rows(name: str, tally: Tally) -> list[Row]:
    """The figures of one simulation."""
    return [
        Row(f"{name}: turns", tally.turns, tally.turns, ""),
        Row(f"{name}: requests", tally.requests, tally.requests, ""),
        Row(f"{name}: requests refused for no reason", tally.accidents, tally.accidents, ""),
        Row(f"{name}: turns failed by the endpoint", tally.failed, tally.failed, ""),
        Row(f"{name}: extra requests", tally.extra_percent, tally.extra, "%"),
        Row(f"{name}: compactions", tally.compactions, tally.compactions, ""),
        Row(f"{name}: unneeded compactions", tally.unneeded_percent, tally.unneeded, "%"),
    ]


async def simulate(turns: int, seed: int) -> dict[str, Tally]:
    """Divide the turns among the endpoints. The last tally is the sum of all."""
    tallies: dict[str, Tally] = {}
    for number, (name, (window, change)) in enumerate(ENDPOINTS.items()):
        tallies[name] = await Simulation(window, change, seed * 100 + number).run(turns // len(ENDPOINTS))
    whole = Tally()
    for tally in tallies.values():
        whole.add(tally)
    return {**tallies, "all": whole}


async def main(turns: int, seed: int, file: Path | None) -> int:
    tallies = await simulate(turns, seed)
    made = [row for name, tally in tallies.items() for row in rows(name, tally)]
    whole = tallies["all"]
    limits = {"all: extra requests": MAX_EXTRA_PERCENT, "all: unneeded compactions": MAX_UNNEEDED_PERCENT}
    made = [replace(row, limit=limits.get(row.what)) for row in made]
    made.append(Row("all: turns failed though the endpoint would answer", len(whole.unusable), 0, "", 0))
    report(made, file)
    for name, tally in tallies.items():
        print(f"{name}: refused because of {dict(tally.reasons)}")
    print("\n".join(whole.unusable[:20]))
    return any(row.is_over for row in made)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("turns", nargs="?", type=int, default=TURNS, help="turns with all endpoints together")
    parser.add_argument("seed", nargs="?", type=int, default=1)
    options = parser.parse_args()
    sys.exit(anyio.run(main, options.turns, options.seed, options.json))
