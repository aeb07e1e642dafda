"""Tests sessions with endpoints whose window changes, and that may lie about it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.endpoints import ENDPOINTS, Simulation
from crow.agent.compaction.budget import CompactionPolicy, gauge_on
from crow.agent.compaction.compactor import Compactor
from crow.agent.compaction.window import MIN_ROOM, ContextWindow
from crow.agent.compaction.writer import Helpers
from crow.agent.history.branch import Branch
from crow.agent.permissions.judge import Permissions
from crow.agent.turns.prompt import Briefing
from crow.agent.turns.turn import Turn
from crow.domain.entries import NewEntry, TurnEnd
from crow.domain.errors import ContextOverflow
from crow.domain.messages import Usage
from crow.domain.tokens import estimate_message, estimate_tools
from crow.llm import ModelInfo, Request
from crow.llm.facts import LearnedWindow, learned_window
from crow.tools.workspace import DiskWorkspace
from tests.agent.harness import NoteTaker, Tool, Tools
from tests.support.amounts import examples
from tests.support.compaction import SUMMARY, Notes, branch_of
from tests.support.hooks import hooks_on
from tests.support.memory_store import MemoryStore
from tests.support.paths import problems, user
from tests.support.scripted_model import Say, ScriptedStream, call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Habit = Literal["names", "counts", "says nothing", "names too little", "names too much", "cuts"]
HABITS: tuple[Habit, ...] = get_args(Habit)
INFO = ModelInfo(name="m", endpoint="http://localhost m")
MARGIN = 900
"""Estimated tokens of the smallest checkpoint plus the distance between threshold and window."""


class Memory:
    """Facts of one endpoint."""

    def __init__(self) -> None:
        self.facts: dict[str, object] = {}

    async def learned(self, base_url: str, model: str) -> Mapping[str, object]:
        return self.facts

    async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        self.facts = {**self.facts, **facts}

    @property
    def window(self) -> LearnedWindow | None:
        learned = learned_window(self.facts)
        return learned if learned is not None and learned.times else None


@dataclass(kw_only=True)
class Endpoint:
    """A server with a `window`. It counts `ratio` tokens for each that crow estimates, and refuses `burps` requests
    of any size. `steps`: how many answers of a turn call a tool."""

    window: int
    habit: Habit
    ratio: float = 1.0
    reports: bool = True
    burps: int = 0
    steps: int = 0
    info: ModelInfo = INFO
    sizes: list[int] = field(default_factory=list)
    refused: int = 0
    summaries: int = 0

    def check(self) -> None:
        """Always ready."""

    async def close(self) -> None:
        """Nothing is open."""

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[ScriptedStream]:
        assert problems(request.messages) == []
        yield ScriptedStream(self.answer(request))

    def answer(self, request: Request) -> Say:
        is_summary = request.tool_choice == "none" or not request.tools
        size = round(self.ratio * (estimate_tools(request.tools) + sum(map(estimate_message, request.messages))))
        if not is_summary:
            self.sizes.append(size)
        if self.burps and not is_summary:
            self.burps -= 1
            return Say(error=ContextOverflow("context length exceeded"))
        if size > self.window and self.habit != "cuts":
            self.refused += not is_summary
            return Say(error=self.refusal(size))
        usage = Usage(input_tokens=min(size, self.window), output_tokens=50) if self.reports else None
        if is_summary:
            self.summaries += 1
            return Say(text=[SUMMARY], usage=usage)
        if self.steps:
            self.steps -= 1
            calls = (call("read", f"c{len(self.sizes)}", path=f"/{len(self.sizes)}"),)
            return Say(text=["I read on."], calls=calls, usage=usage)
        return Say(text=["Done. " * 100], usage=usage)

    def refusal(self, size: int) -> ContextOverflow:
        match self.habit:
            case "names":
                return ContextOverflow(f"maximum context length is {self.window}", limit=self.window, size=size)
            case "counts":
                return ContextOverflow(f"the request has {size} tokens", size=size)
            case "names too little":
                return ContextOverflow("limit 1800", limit=1_800)
            case "names too much":
                return ContextOverflow("limit 400000", limit=400_000)
            case _:
                return ContextOverflow("context length exceeded")


class Talk:
    """Consecutive sessions with one endpoint."""

    def __init__(self, endpoint: Endpoint, seed: int = 0) -> None:
        self.endpoint, self.memory, self.random = endpoint, Memory(), random.Random(seed)
        self.output = 0
        self.sessions = 0
        self.begin()

    def begin(self) -> None:
        """Start another session."""
        self.sessions += 1
        self.store = MemoryStore()
        self.branch: Branch = branch_of(self.store, Notes())
        self.window = ContextWindow(self.memory, f"s{self.sessions}")
        self.briefing = Briefing(self.branch)

    async def prompt(self, text: str) -> ContextOverflow | None:
        """One turn. Returns the endpoint's error if it failed; other errors are raised."""

        async def read(**_: Any) -> str:
            return "x" * self.output

        tools, branch = Tools({"read": Tool("read", read)}), self.branch
        branch.turn += 1
        await self.window.look_up(self.endpoint.info)
        gauge = await gauge_on(branch, lambda: self.endpoint.info, CompactionPolicy(), self.window)
        cut = gauge.cut_prompt(text)
        await branch.record([NewEntry(body=user(text, cut=cut))])
        await self.briefing.begin_turn(tools.specs(), (), ())
        compactor = Compactor(gauge, self.endpoint, Helpers(fresh_prompt=self.briefing.fresh_prompt))
        permissions = Permissions(branch, NoteTaker(), DiskWorkspace(branch.row.cwd))
        hooks = hooks_on(branch)
        turn = Turn(branch, compactor, tools, steps=50, briefing=self.briefing, permissions=permissions, hooks=hooks)
        try:
            await turn.run()
        except ContextOverflow as error:
            await branch.record([NewEntry(body=TurnEnd(stop="error", detail=str(error)))])
            return error
        await branch.record([NewEntry(body=TurnEnd(stop="end_turn"))])
        return None

    def fixed(self) -> float:
        """Estimated tokens of system message and tools."""
        prompt = self.branch.projection.prompt
        assert prompt is not None
        return estimate_tools(prompt.tools) + len(prompt.system) / 4

    def least(self, text: str) -> int:
        """Tokens, by the endpoint's count, of the smallest request with this prompt."""
        return round(self.endpoint.ratio * (self.fixed() + len(text) / 4 + MARGIN))

    def is_tiny(self) -> bool:
        """Whether the window is too small for a turn of several steps."""
        return 0.8 * self.endpoint.window / self.endpoint.ratio - self.fixed() < MIN_ROOM


@st.composite
def phases(draw: st.DrawFn) -> list[tuple[int, Habit, int]]:
    """For each phase: window, habit, number of prompts."""
    phase = st.tuples(
        st.sampled_from([3_000, 6_000, 12_000, 40_000, 100_000, 300_000]), st.sampled_from(HABITS), st.integers(1, 8)
    )
    return draw(st.lists(phase, min_size=1, max_size=5))


async def check_phases(
    phases: Sequence[tuple[int, Habit, int]], *, seed: int, ratio: float, reports: bool, burps: bool
) -> int:
    """Talk to an endpoint that changes from phase to phase. Returns the number of prompts."""
    endpoint = Endpoint(window=phases[0][0], habit=phases[0][1], ratio=ratio, reports=reports)
    talk = Talk(endpoint, seed)
    chance = talk.random
    for window, habit, prompts in phases:
        endpoint.window, endpoint.habit = window, habit
        may_fail = True  # once after a change: the window may have shrunk to a tenth without a number
        for _ in range(prompts):
            if chance.random() < 0.1:
                talk.begin()
            endpoint.steps, talk.output = chance.choice([0, 0, 1, 3, 8]), chance.choice([100, 3_000, 30_000])
            endpoint.burps = chance.choice([0, 0, 0, 1, 3]) if burps else 0
            burped = endpoint.burps > 0
            asked, text = len(endpoint.sizes), "q" * chance.choice([20, 400, 4_000, 20_000])
            error = await talk.prompt(text)
            assert len(endpoint.sizes) > asked, "the endpoint was not asked"
            # A useless limit, and one tool result that alone exceeds the window, can exhaust the passes.
            is_hopeless = habit == "names too little" and ratio * talk.output / 4 > window
            if error is not None and not (burped or is_hopeless or talk.is_tiny()) and talk.least(text) <= window:
                assert may_fail, f"{error} with {window}"
                may_fail = False
    return sum(prompts for _, _, prompts in phases)


@pytest.mark.long
@given(
    phases=phases(),
    seed=st.integers(0, 2**32),
    ratio=st.sampled_from([0.6, 1.0, 1.7]),
    reports=st.booleans(),
    burps=st.booleans(),
)
@settings(max_examples=examples(8))
async def test_every_prompt_reaches_the_endpoint_and_succeeds_if_the_endpoint_would_answer(
    phases: list[tuple[int, Habit, int]], seed: int, ratio: float, reports: bool, burps: bool
) -> None:
    await check_phases(phases, seed=seed, ratio=ratio, reports=reports, burps=burps)


async def test_window_that_falls_and_rises_again_is_followed_both_ways() -> None:
    endpoint = Endpoint(window=40_000, habit="names")
    talk = Talk(endpoint)
    for window, prompts in ((40_000, 12), (12_000, 12), (100_000, 60)):
        endpoint.window = window
        for _ in range(prompts):
            assert await talk.prompt("q" * 8_000) is None
        if window == 12_000:
            assert talk.memory.window is not None
            assert talk.memory.window.tokens == 12_000
            assert max(endpoint.sizes[-6:]) < 12_000
    assert max(endpoint.sizes) > 80_000


@pytest.mark.long
@pytest.mark.parametrize("habit", ["names", "counts", "says nothing"])
async def test_larger_requests_are_tested_less_often_while_a_learned_window_holds(habit: Habit) -> None:
    endpoint = Endpoint(window=12_000, habit=habit)
    talk = Talk(endpoint)
    for _ in range(150):
        assert await talk.prompt("q" * 8_000) is None
    learned = talk.memory.window
    assert learned is not None
    assert 10_000 < learned.tokens <= 12_000
    assert learned.patience >= 32
    assert endpoint.refused <= 6
    assert endpoint.summaries < 90


async def test_silent_truncation_is_learned_and_tested_again() -> None:
    endpoint = Endpoint(window=8_192, habit="cuts")
    talk = Talk(endpoint)
    for _ in range(20):
        assert await talk.prompt("q" * 8_000) is None
    assert talk.memory.window is not None
    assert (talk.memory.window.tokens, talk.memory.window.is_silent) == (8_192, True)
    assert sum(size > 8_192 for size in endpoint.sizes) < 8
    endpoint.window = 100_000
    for _ in range(50):
        assert await talk.prompt("q" * 8_000) is None
    assert talk.memory.window is None
    assert max(endpoint.sizes) > 60_000


async def test_window_learned_twice_applies_to_the_next_session() -> None:
    endpoint = Endpoint(window=12_000, habit="names")
    talk = Talk(endpoint)
    refused = []
    for _ in range(3):
        for _ in range(6):
            assert await talk.prompt("q" * 8_000) is None
        refused.append(endpoint.refused)
        talk.begin()
    assert refused == [1, 2, 2]


async def test_configured_window_that_is_too_large_costs_one_refused_request_a_session() -> None:
    endpoint = Endpoint(window=12_000, habit="names")
    endpoint.info = replace(INFO, context_window=128_000, is_window_configured=True)
    talk = Talk(endpoint)
    for _ in range(8):
        assert await talk.prompt("q" * 8_000) is None
    assert endpoint.refused == 1
    assert talk.memory.facts == {}


async def test_one_wrong_refusal_has_no_lasting_effect() -> None:
    endpoint = Endpoint(window=100_000, habit="names", burps=1)
    talk = Talk(endpoint)
    error = await talk.prompt("hi")
    assert str(error).startswith("context length exceeded The request had about ")
    for _ in range(2):
        talk.begin()
        assert await talk.prompt("hi") is None
    assert talk.memory.facts == {}


@pytest.mark.long
async def test_sessions_follow_a_gateway_that_swaps_its_model_at_noon() -> None:
    """`python -m benchmarks.endpoints` does this for 10,000 turns and with other endpoints."""
    window, change = ENDPOINTS["gateway that swaps the model at noon"]
    tally = await Simulation(window, change, seed=2).run(120)
    assert tally.unusable == []
    assert {"stream", "no stream", "reasoning_effort"} <= tally.reasons.keys()
    assert (tally.failed, tally.extra < 20) == (0, True)
