"""Tests summaries that are written while a session is idle, on a real store."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from crow.agent.compaction.budget import CompactionPolicy, gauge_on
from crow.agent.history.options import set_model
from crow.agent.hooks import Hooks
from crow.agent.sessions.pending import PendingPrompt
from crow.agent.sessions.session import Session
from crow.domain.entries import Checkpoint, ModelRequest, TurnEnd
from crow.domain.errors import NetworkError, TurnError
from crow.domain.events import CompactionChanged, Event, SummaryShown
from crow.domain.messages import Usage
from crow.llm import ModelInfo
from tests.agent.harness import NoteTaker, Opened, opened, text
from tests.support.compaction import SUMMARY
from tests.support.hooks import python_hooks
from tests.support.scripted_model import Say, ScriptedModel

INFO = ModelInfo(name="far", endpoint="https://far.example/v1 far", context_window=32_000)
PRICED = replace(INFO, input_price=1.0, output_price=1.0)
EARLY = CompactionPolicy(early=0.6)
USED = Usage(input_tokens=1_000, output_tokens=100)
LONG = Say(text=["a" * 8_000], usage=None)
TALK = [LONG] * 4
"""Four answers to `talk` fill the window to 0.6 of the threshold, three do not."""
GOOD = Say(text=[SUMMARY], usage=USED)
DONE = Say(text=["done"], usage=USED)


@asynccontextmanager
async def idle(
    directory: Path,
    model: ScriptedModel,
    *,
    hooks: Hooks | None = None,
    client: NoteTaker | None = None,
    limits: Mapping[str, Any] | None = None,
) -> AsyncIterator[Opened]:
    """A session after four exchanges."""
    async with opened(directory, model, compaction=EARLY, hooks=hooks, client=client, limits=limits) as run:
        run.session.conversation.rest_s = 0
        await talk(run)
        yield run


async def talk(run: Opened, exchanges: int = 4) -> None:
    for _ in range(exchanges):
        await run.session.prompt(text("q" * 8_000))


async def counted(run: Opened, requests: int = 1) -> None:
    """Wait until the usage of this many summaries is stored."""
    while (await run.kinds()).count("ModelRequest") < requests:
        await anyio.lowlevel.checkpoint()


async def rested(run: Opened) -> None:
    """Give a summary that is about to be requested the time to be. Crow reads the session once before that."""
    for _ in range(20):
        await run.store.session("s1")


def summaries(model: ScriptedModel) -> int:
    """How many summaries were requested."""
    return sum("Your summary will replace" in repr(request.messages[-1]) for request in model.requests)


async def checkpoints(run: Opened) -> list[Checkpoint]:
    return [entry.body for entry in await run.log() if isinstance(entry.body, Checkpoint)]


def compactions(run: Opened) -> list[object]:
    return [event for event in run.client.events if isinstance(event, (CompactionChanged, SummaryShown))]


async def usage_of_prompt(session: Session, words: str) -> Usage | None:
    prompt = session.submit(text(words))
    await session.answer(prompt)
    return prompt.usage


async def test_next_prompt_uses_the_summary_that_was_written_while_the_session_was_idle(tmp_path: Path) -> None:
    model = ScriptedModel(*TALK, GOOD, DONE, info=INFO)
    async with idle(tmp_path, model) as run:
        await counted(run)
        written, answered = model.requests[4].messages[:-1], model.requests[3].messages
        assert written == answered[: len(written)]  # the provider has cached these
        assert (await checkpoints(run), compactions(run)) == ([], [])
        used = await usage_of_prompt(run.session, "Go on.")
        assert len(model.requests) == 6
        (checkpoint,) = await checkpoints(run)
        assert (checkpoint.reason, checkpoint.summary, checkpoint.method) == ("early", SUMMARY, "prefix")
        assert checkpoint.tokens_after < checkpoint.tokens_before
        assert "Build the parser." in repr(model.requests[5].messages[1])
        assert "Go on." in repr(model.requests[5].messages[-1])
        assert [(event.status, event.detail) for event in compactions(run) if isinstance(event, CompactionChanged)] == [
            ("in_progress", ""),
            ("completed", SUMMARY),
        ]
        assert used is not None
        assert (used.input_tokens, used.output_tokens) == (2_000, 200)  # the summary and the answer
        (total,) = await run.store.usage_by_model("s1")
        assert total.requests == 6


async def test_a_prompt_cancels_the_summary_and_its_usage_is_counted_once(tmp_path: Path) -> None:
    held = Say(text=["## Goal"], usage=USED, hold=anyio.Event())
    model = ScriptedModel(*TALK, held, DONE, info=INFO)
    async with idle(tmp_path, model) as run:
        await held.reached.wait()
        used = await usage_of_prompt(run.session, "Go on.")
        assert (len(model.requests), model.closed_streams) == (6, 6)
        assert (await checkpoints(run), compactions(run)) == ([], [])
        assert (await run.kinds()).count("ModelRequest") == 1
        assert used is not None
        assert (used.input_tokens, used.output_tokens) == (2_000, 200)


async def test_closing_the_session_cancels_the_summary_and_stores_its_usage(tmp_path: Path) -> None:
    held = Say(text=["## Goal"], usage=USED, hold=anyio.Event())
    model = ScriptedModel(*TALK, held, info=INFO)
    async with idle(tmp_path, model) as run:
        await held.reached.wait()
        await run.session.close()
        assert model.closed_streams == 5
        newest = (await run.log())[-1]
        assert (type(newest.body), newest.usage) == (ModelRequest, USED)


@pytest.mark.parametrize("command", ["/undo", "/compact", "/clear"])
async def test_a_summary_is_not_used_after_the_session_has_moved(tmp_path: Path, command: str) -> None:
    model = ScriptedModel(*TALK, GOOD, *([GOOD] if command == "/compact" else []), DONE, info=INFO)
    async with idle(tmp_path, model) as run:
        await counted(run)
        await run.session.prompt(text(command))
        await run.session.prompt(text("Go on."))
        assert "early" not in [checkpoint.reason for checkpoint in await checkpoints(run)]
        assert "Go on." in repr(model.requests[-1].messages[-1])


async def test_a_summary_is_not_used_with_another_model(tmp_path: Path) -> None:
    model = ScriptedModel(*TALK, GOOD, DONE, info=INFO)
    async with idle(tmp_path, model) as run:
        await counted(run)
        await set_model(run.session.branch, "other")
        await run.session.prompt(text("Go on."))
        assert await checkpoints(run) == []


async def test_a_change_of_the_model_cancels_the_summary(tmp_path: Path) -> None:
    held = Say(text=["## Goal"], usage=USED, hold=anyio.Event())
    model = ScriptedModel(*TALK, held, DONE, info=INFO)
    async with idle(tmp_path, model) as run:
        await held.reached.wait()
        await set_model(run.session.branch, "other")
        while model.closed_streams < 5:
            await anyio.lowlevel.checkpoint()
        await run.session.prompt(text("Go on."))
        assert (await run.kinds()).count("ModelRequest") == 1


async def test_no_summary_is_written_by_the_fallback_after_a_turn_that_it_has_ended(tmp_path: Path) -> None:
    down = Say(error=NetworkError("down"))
    model = ScriptedModel(*TALK[:3], down, LONG, GOOD, info=INFO)
    spare = ScriptedModel(LONG, info=replace(INFO, name="spare", endpoint="https://spare.example/v1 spare"))
    async with opened(tmp_path, model, compaction=EARLY, others={"spare": spare}, fallback="spare") as run:
        run.session.conversation.rest_s = 0
        await talk(run)
        await rested(run)
        assert (len(spare.requests), summaries(model)) == (1, 0)
        await talk(run, 1)
        await counted(run)  # the model that answers again writes it
        assert (len(spare.requests), summaries(model)) == (1, 1)


async def test_a_fallback_gets_the_summary_that_its_model_had_prepared(tmp_path: Path) -> None:
    model = ScriptedModel(*TALK, GOOD, Say(error=NetworkError("down")), DONE, info=INFO)
    spare = ScriptedModel(DONE, info=replace(INFO, name="spare", endpoint="https://spare.example/v1 spare"))
    async with opened(tmp_path, model, compaction=EARLY, others={"spare": spare}, fallback="spare") as run:
        run.session.conversation.rest_s = 0
        await talk(run)
        await counted(run)
        await run.session.prompt(text("Go on."))
        assert [checkpoint.reason for checkpoint in await checkpoints(run)] == ["early"]
        assert "Build the parser." in repr(spare.requests[0].messages[1])
        await run.session.prompt(text("And on."))
        assert (len(await checkpoints(run)), summaries(model), summaries(spare)) == (1, 1, 0)


async def test_a_summary_is_kept_if_the_limit_on_cost_stops_the_next_turn(tmp_path: Path) -> None:
    limits: dict[str, Any] = {}
    model = ScriptedModel(*TALK, GOOD, DONE, info=PRICED)
    async with idle(tmp_path, model, limits=limits) as run:
        await counted(run)
        limits["cost_per_session"] = run.session.branch.row.cost
        assert await run.session.prompt(text("Go on.")) == "max_turn_requests"
        assert (await checkpoints(run), len(model.requests)) == ([], 5)
        assert await run.session.prompt(text("Go on now.")) == "end_turn"
        assert [checkpoint.reason for checkpoint in await checkpoints(run)] == ["early"]
        assert len(model.requests) == 6


@pytest.mark.parametrize("limit", ["cost_per_turn", "cost_per_session"])
async def test_no_summary_is_written_when_a_limit_on_cost_is_reached(tmp_path: Path, limit: str) -> None:
    limits: dict[str, Any] = {limit: 1e-9}
    model = ScriptedModel(*TALK, LONG, GOOD, info=PRICED)
    async with idle(tmp_path, model, limits=limits) as run:
        await rested(run)
        assert len(model.requests) == 4
        limits.clear()
        await talk(run, 1)
        await counted(run)


async def test_a_hook_that_stops_the_next_turn_does_not_lose_the_summary(tmp_path: Path) -> None:
    answers: list[dict[str, str]] = [{"deny": "not now"}]

    async def deny(_: dict[str, Any]) -> dict[str, str] | None:
        return answers.pop() if "Go on." in repr(run.session.branch.projection.newest_user()) and answers else None

    model = ScriptedModel(*TALK, GOOD, DONE, info=INFO)
    async with idle(tmp_path, model, hooks=python_hooks({"before_request": [deny]})) as run:
        await counted(run)
        with pytest.raises(TurnError, match="not now"):
            await run.session.prompt(text("Go on."))
        await run.session.prompt(text("Go on now."))
        assert [checkpoint.reason for checkpoint in await checkpoints(run)] == ["early"]
        assert summaries(model) == 1


@pytest.mark.long
@pytest.mark.parametrize("number", range(10))
async def test_a_cancel_at_any_event_of_the_next_turn_neither_loses_the_summary_nor_uses_it_twice(
    tmp_path: Path, number: int
) -> None:
    class Impatient(NoteTaker):
        """Cancels the turn at one of its events."""

        left: int | None = None

        async def publish(self, event: Event) -> None:
            await super().publish(event)
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    run.session.cancel()
                    await anyio.lowlevel.checkpoint()

    client = Impatient()
    model = ScriptedModel(*TALK, GOOD, DONE, DONE, info=INFO)
    async with idle(tmp_path, model, client=client) as run:
        await counted(run)
        client.left = number
        assert await run.session.prompt(text("Go on.")) in ("cancelled", "end_turn")
        client.left = None
        assert await run.session.prompt(text("Go on now.")) == "end_turn"
        assert [checkpoint.reason for checkpoint in await checkpoints(run)] == ["early"]
        assert summaries(model) == 1
        changes = [event for event in compactions(run) if isinstance(event, CompactionChanged)]
        assert [event.status for event in changes][-2:] == ["in_progress", "completed"]


@pytest.mark.long
@pytest.mark.parametrize("moment", range(16))
async def test_a_prompt_at_any_moment_of_the_preparation_counts_each_request_once(tmp_path: Path, moment: int) -> None:
    model = ScriptedModel(*TALK, GOOD, DONE, DONE, info=INFO)
    async with idle(tmp_path, model) as run:
        for _ in range(moment):
            await anyio.lowlevel.checkpoint()
        run.session.conversation.rest_s = 60
        await run.session.prompt(text("Go on."))
        await run.session.prompt(text("And on."))
        assert summaries(model) <= 1
        assert len(await checkpoints(run)) <= summaries(model)
        (total,) = await run.store.usage_by_model("s1")
        assert total.requests == len(model.requests)


async def test_prompts_that_arrive_while_the_summary_is_stored_change_nothing(tmp_path: Path) -> None:
    class Eager(NoteTaker):
        """Sends another prompt, and then a fork, while the checkpoint is written."""

        async def publish(self, event: Event) -> None:
            await super().publish(event)
            if isinstance(event, CompactionChanged):
                more.append(run.session.submit(text(f"More, {event.status}.")))
                tasks.start_soon(run.session.answer, more[-1])
                fork = f"fork-{event.status}"
                await run.store.fork_session("s1", fork, entry=None, cwd="/", additional_directories=())

    more: list[PendingPrompt] = []
    model = ScriptedModel(*TALK, GOOD, DONE, DONE, DONE, info=INFO)
    async with idle(tmp_path, model, client=Eager()) as run, anyio.create_task_group() as tasks:
        await counted(run)
        await run.session.prompt(text("Go on."))
        for prompt in more:
            await prompt.done.wait()
        assert [prompt.stop for prompt in more] == ["end_turn", "end_turn"]
        assert [checkpoint.reason for checkpoint in await checkpoints(run)] == ["early"]
        assert summaries(model) == 1
        (total,) = await run.store.usage_by_model("s1")
        assert total.requests == 8


async def test_a_turn_of_another_process_cancels_the_summary(tmp_path: Path) -> None:
    held = Say(text=["## Goal"], usage=USED, hold=anyio.Event())
    here, there = ScriptedModel(*TALK, held, DONE, info=INFO), ScriptedModel(DONE, info=INFO)
    async with idle(tmp_path, here) as run:
        await held.reached.wait()
        async with opened(tmp_path, there, compaction=EARLY, session_id="s1") as other:
            await other.session.prompt(text("From elsewhere."))
        while here.closed_streams < 5:
            await anyio.lowlevel.checkpoint()
        await run.session.prompt(text("Go on."))
        assert await checkpoints(run) == []
        assert "From elsewhere." in repr(here.requests[-1].messages)
        assert (await run.kinds()).count("ModelRequest") == 1


async def test_usage_of_a_summary_is_stored_at_the_end_even_if_another_process_has_used_the_session(
    tmp_path: Path,
) -> None:
    held = Say(text=["## Goal"], usage=USED, hold=anyio.Event())
    here, there = ScriptedModel(*TALK, held, info=INFO), ScriptedModel(DONE, info=INFO)
    async with idle(tmp_path, here) as run:
        await held.reached.wait()
        async with opened(tmp_path, there, compaction=EARLY, session_id="s1") as other:
            await other.session.prompt(text("From elsewhere."))
        await run.session.close()
        assert here.closed_streams == 5
        assert [type(entry.body) for entry in (await run.log())[-2:]] == [TurnEnd, ModelRequest]
        (total,) = await run.store.usage_by_model("s1")
        assert total.requests == 6


async def test_a_process_that_only_opened_the_session_writes_no_summary_and_reports_none(tmp_path: Path) -> None:
    model, there = ScriptedModel(*TALK, GOOD, info=INFO), ScriptedModel(DONE, info=INFO)
    async with idle(tmp_path, model) as run, opened(tmp_path, there, compaction=EARLY, session_id="s1") as other:
        other.session.conversation.rest_s = 0
        await counted(run)
        await other.session.prompt(text("Go on."))
        assert len(there.requests) == 1
        assert "Remark" not in await run.kinds()


async def test_an_unusable_summary_is_dropped_and_the_next_turn_does_not_repeat_it(tmp_path: Path) -> None:
    model = ScriptedModel(*TALK, Say(text=[""]), Say(text=[""]), DONE, info=INFO)
    async with idle(tmp_path, model) as run:
        await counted(run, 2)
        await run.session.prompt(text("Go on."))
        assert await checkpoints(run) == []
        assert len(model.requests) == 7


async def test_summaries_are_written_again_when_the_context_has_grown(tmp_path: Path) -> None:
    model = ScriptedModel(*TALK, GOOD, LONG, LONG, LONG, LONG, GOOD, DONE, info=INFO)
    async with idle(tmp_path, model) as run:
        await counted(run)
        exchanges = 0
        while (await run.kinds()).count("ModelRequest") < 2 and exchanges < 4:
            await talk(run, 1)
            exchanges += 1
            if len(model.requests) == 9:
                await counted(run, 2)
        assert exchanges > 1
        await run.session.prompt(text("Go on."))
        assert [checkpoint.reason for checkpoint in await checkpoints(run)] == ["early", "early"]


async def test_early_level_follows_the_policy_the_model_and_an_undone_compaction(tmp_path: Path) -> None:
    model = ScriptedModel(*TALK, GOOD, DONE, info=INFO)
    async with idle(tmp_path, model) as run:
        await counted(run)
        session = run.session

        async def level(policy: CompactionPolicy = EARLY, *, info: ModelInfo = INFO) -> int | None:
            return (await gauge_on(session.branch, lambda: info, policy, session.conversation.window)).early_level()

        assert await level() == 25_600 * 6 // 10
        assert await level(replace(EARLY, early=0.9)) == 25_600 * 9 // 10
        assert await level(CompactionPolicy()) is None
        assert await level(replace(EARLY, auto=False)) is None
        assert await level(info=replace(INFO, is_local=True)) is None
        await session.prompt(text("Go on."))
        await session.prompt(text("/compact undo"))
        assert await level() is None


async def test_hooks_hear_of_the_summary_when_it_is_written_and_when_it_is_used(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    model = ScriptedModel(*TALK, GOOD, DONE, info=INFO)
    hooks = python_hooks({"before_compact": [heard.append], "after_compact": [heard.append]})
    async with idle(tmp_path, model, hooks=hooks) as run:
        await counted(run)
        assert [(facts["event"], facts["reason"]) for facts in heard] == [("before_compact", "early")]
        await run.session.prompt(text("Go on."))
        assert [(facts["event"], facts["reason"]) for facts in heard[1:]] == [("after_compact", "early")]


async def test_a_hook_that_denies_the_compaction_saves_the_request(tmp_path: Path) -> None:
    denied = anyio.Event()

    async def deny(_: dict[str, Any]) -> dict[str, str]:
        denied.set()
        return {"deny": "not now"}

    model = ScriptedModel(*TALK, DONE, info=INFO)
    async with idle(tmp_path, model, hooks=python_hooks({"before_compact": [deny]})) as run:
        await denied.wait()
        await run.session.prompt(text("Go on."))
        assert await checkpoints(run) == []


async def test_a_locked_database_while_a_summary_is_prepared_is_no_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[sqlite3.Connection] = []

    def lock(_: dict[str, Any]) -> dict[str, Any]:
        """Let another program hold the database before crow stores what the hook adds."""
        held.append(sqlite3.connect(tmp_path / "crow.db", isolation_level=None, check_same_thread=False))
        held[0].execute("BEGIN IMMEDIATE")
        return {"entries": [{"text": "noted"}]}

    hooks = python_hooks({"before_compact": [lock]})
    with caplog.at_level(logging.INFO):
        async with opened(tmp_path, ScriptedModel(*TALK, info=INFO), compaction=EARLY, hooks=hooks) as run:
            run.session.conversation.rest_s = 0
            run.store.database.lock_timeout.timeout_s = 0.01
            await talk(run)
            while "no summary" not in caplog.text:
                await anyio.lowlevel.checkpoint()
            held[0].close()
    assert [record.levelname for record in caplog.records if "no summary" in record.message] == ["INFO"]
