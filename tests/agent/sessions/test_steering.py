"""Steered and withdrawn prompts: what the model sees and what is stored."""

from __future__ import annotations

from pathlib import Path

import anyio

from crow.domain.entries import Assistant, TurnEnd, User
from crow.domain.messages import UserMessage
from crow.domain.rendering import parts_text
from tests.agent.harness import Tool, opened, text
from tests.support.scripted_model import Say, ScriptedModel, call


def users(request_messages: object) -> list[str]:
    assert isinstance(request_messages, tuple)
    return [parts_text(m.parts) for m in request_messages if isinstance(m, UserMessage)]


def go_on(say: Say) -> None:
    assert say.hold is not None
    say.hold.set()


async def test_a_steered_prompt_is_seen_at_the_next_step_and_leaves_the_inbox(tmp_path: Path) -> None:
    model = ScriptedModel(Say(calls=(call("work"),)), Say(text=["as you say"]))
    at_work, rested = anyio.Event(), anyio.Event()

    async def work() -> str:
        at_work.set()
        await rested.wait()
        return "worked"

    async with opened(tmp_path, model, tools={"work": Tool("read", work)}) as it:
        assert not await it.session.steer(text("too early"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.session.prompt, text("begin"))
            await at_work.wait()
            assert await it.session.steer(text("rather so"))
            assert [len(waiting.parts) for waiting in await it.store.queued("s1")] == [1]
            rested.set()
        assert await it.store.queued("s1") == ()
        assert await it.kinds() == ["User", "Assistant", "Started", "ToolResult", "User", "Assistant", "TurnEnd"]
    assert users(model.requests[1].messages)[-1] == "rather so"


async def test_a_prompt_steered_during_the_last_answer_gets_its_own_answer(tmp_path: Path) -> None:
    first = Say(text=["first"], hold=anyio.Event())
    model = ScriptedModel(first, Say(text=["second"]))
    async with opened(tmp_path, model) as it:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.session.prompt, text("begin"))
            await first.reached.wait()
            assert await it.session.steer(text("and this"))
            go_on(first)
        bodies = [entry.body for entry in await it.log()]
    assert [b.text for b in bodies if isinstance(b, Assistant)] == ["first", "second"]
    assert users(model.requests[1].messages) == [*users(model.requests[0].messages), "and this"]


async def test_a_cancelled_turn_stores_a_steered_prompt_that_the_model_never_saw(tmp_path: Path) -> None:
    never = Say(hold=anyio.Event())
    async with opened(tmp_path, ScriptedModel(never)) as it:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.session.prompt, text("begin"))
            await never.reached.wait()
            assert await it.session.steer(text("too late"))
            it.session.cancel()
        said = [parts_text(entry.body.parts) for entry in await it.log() if isinstance(entry.body, User)]
        assert await it.store.queued("s1") == ()
    assert said == ["begin", "too late"]


async def test_withdrawing_a_waiting_prompt_leaves_the_others(tmp_path: Path) -> None:
    first = Say(text=["one"], hold=anyio.Event())
    stops: dict[str, str] = {}
    async with opened(tmp_path, ScriptedModel(first, Say(text=["three"]))) as it:

        async def answer(words: str) -> None:
            stops[words] = await it.session.answer(waiters[words])

        waiters = {words: it.session.submit(text(words)) for words in ("first", "second", "third")}
        async with anyio.create_task_group() as tasks:
            for words in waiters:
                tasks.start_soon(answer, words)
            await first.reached.wait()
            it.session.withdraw(waiters["second"])
            await waiters["second"].done.wait()
            assert "first" not in stops
            go_on(first)
        ends = [entry.body.stop for entry in await it.log() if isinstance(entry.body, TurnEnd)]
    assert stops == {"first": "end_turn", "second": "cancelled", "third": "end_turn"}
    assert ends == ["end_turn", "cancelled", "end_turn"]


async def test_withdrawing_the_running_prompt_cancels_only_its_turn(tmp_path: Path) -> None:
    never = Say(hold=anyio.Event())
    async with opened(tmp_path, ScriptedModel(never, Say(text=["next"]))) as it:
        running, behind = it.session.submit(text("first")), it.session.submit(text("second"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.session.answer, running)
            tasks.start_soon(it.session.answer, behind)
            await never.reached.wait()
            it.session.withdraw(running)
    assert (running.stop, behind.stop) == ("cancelled", "end_turn")
