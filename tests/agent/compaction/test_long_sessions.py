"""Tests a turn of 2,000 steps, and what survives many compactions."""

from __future__ import annotations

import pytest

from benchmarks.retention import retention
from benchmarks.working_set import run
from crow.agent.permissions.judge import Permissions
from crow.agent.turns.prompt import Briefing
from crow.agent.turns.turn import Turn
from crow.domain.entries import Checkpoint, Mask, NewEntry
from crow.llm import ModelInfo, Request
from crow.tools.workspace import DiskWorkspace
from tests.agent.harness import NoteTaker, Tool, Tools
from tests.support.amounts import IS_SOAK
from tests.support.compaction import SUMMARY, AnsweringModel, Notes, branch_of, compactor_on
from tests.support.hooks import hooks_on
from tests.support.memory_store import MemoryStore
from tests.support.paths import problems, user
from tests.support.scripted_model import Say, call

STEPS = 2_000 if IS_SOAK else 600
INFO = ModelInfo(name="scripted", endpoint="test scripted", context_window=32_000)


@pytest.mark.long
async def test_turn_of_many_steps_ends_with_bounded_requests_and_linear_cost() -> None:
    sizes: list[int] = []
    summaries = 0

    async def read(**_: object) -> str:
        return "x" * 3_000

    def answer(request: Request) -> Say:
        nonlocal summaries
        if request.tool_choice == "none" or not request.tools:
            summaries += 1
            return Say(text=[SUMMARY])
        sizes.append(compactor.gauge.used())
        if len(sizes) % 100 == 0:
            assert problems(request.messages) == []
        calls = (call("read", "again", path=f"/proj/{len(sizes) % 50}.py", line=len(sizes)),)
        return Say(text=["Done."]) if len(sizes) > STEPS else Say(text=[f"Step {len(sizes)}."], calls=calls)

    store, tools = MemoryStore(), Tools({"read": Tool("read", read)})
    branch = branch_of(store, Notes())
    await branch.record([NewEntry(body=user("Read them all. RULE-17 holds."))])
    briefing = Briefing(branch)
    await briefing.begin_turn(tools.specs(), (), ())
    compactor = compactor_on(branch, AnsweringModel(answer, INFO), fresh_prompt=briefing.fresh_prompt)
    permissions = Permissions(branch, NoteTaker(), DiskWorkspace(branch.row.cwd))
    hooks = hooks_on(branch)
    turn = Turn(branch, compactor, tools, steps=STEPS + 1, briefing=briefing, permissions=permissions, hooks=hooks)

    assert await turn.run() == "end_turn"
    limits = compactor.gauge.limits()
    assert len(sizes) == STEPS + 1
    assert max(sizes) < limits.threshold
    quarter = STEPS // 4
    costs = [sum(sizes[start : start + quarter]) for start in range(0, STEPS, quarter)]
    assert max(costs[1:]) < 1.1 * min(costs[1:])
    made = [entry.body for entry in store.path("s") if isinstance(entry.body, (Checkpoint, Mask))]
    assert 10 < len(made) < STEPS // 10
    assert summaries == sum(isinstance(body, Checkpoint) for body in made)
    assert "RULE-17" in repr(branch.context().messages[1])


@pytest.mark.long
async def test_files_in_use_are_hardly_ever_read_again_and_nothing_that_was_said_is_lost() -> None:
    work = await run(seed=1, window=16_000, share=1.0)
    assert work.passes.total() > 5
    assert work.read_again <= 0.05 * work.read
    assert work.calls_repeated <= 0.02 * work.calls
    assert (work.lost_rules, work.lost_decisions) == (0, 0)
    without = await run(seed=1, window=16_000, share=1.0, policy="no files shown")
    assert without.read_again > 5 * work.read_again


@pytest.mark.parametrize("compactions", [1, 3, 10])
async def test_facts_files_and_recall_survive_compactions(compactions: int) -> None:
    result = await retention(compactions, seed=1)
    assert (result.lost_facts, result.lost_files, result.lost_entries) == ([], [], [])
    assert result.facts > 0
    assert result.covered > 0
